"""Differential privacy of what clients send: changes clipped to a norm, and Gaussian noise on each (local) or on their
sum (central). What a run spends of it is computed in analysis/privacy.py.

Papers: McMahan, Ramage, Talwar, Zhang, Learning Differentially Private Recurrent Language Models, ICLR 2018 (clipped
changes, a fixed divisor, noise on the sum); Kairouz et al., Advances and Open Problems in Federated Learning, 2021,
section 4 (local and central models). Free of torch, as transforms are.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from sparsona.core import spec
from sparsona.core.errors import SparsonaError, unknown_name
from sparsona.core.layout import Layout
from sparsona.core.method import Method, Probe, Round, Server, ServerHalf, State, Sum, Work
from sparsona.core.round import Client
from sparsona.core.seeds import generator
from sparsona.core.tree import Tree
from sparsona.core.update import Inbox, Part, PartSize, Support, Update, dense, message
from sparsona.transforms.clip import Clip
from sparsona.transforms.noise import Noise

if TYPE_CHECKING:
    from torch import Tensor

LOCAL, CENTRAL = "local", "central"
KINDS = (LOCAL, CENTRAL)
LARGEST = 1e9  # of a noise multiplier or a norm: their product is finite in float32


@dataclass(frozen=True)
class Privacy:
    """Who adds how much noise.

    Args:
        kind: "local": each client to its own change; "central": the server to the sum of a round.
        noise: the noise multiplier: the standard deviation of the noise, in units of `clip`.
        clip: the Euclidean norm that a client's change has at most, over all parts that hold values.
        delta: the probability with which epsilon may be exceeded, for which epsilon is computed.
    """

    kind: Literal["local", "central"]
    noise: float = 1.0
    clip: float = 1.0
    delta: float = 1e-5

    def __post_init__(self) -> None:
        for name in ("noise", "clip"):
            if not 0 < getattr(self, name) <= LARGEST:
                raise SparsonaError(
                    f"{name}={getattr(self, name):g} of --privacy",
                    expected=f"a number above 0, at most {LARGEST:g}",
                    hint="for example local:noise=1.0,clip=0.5",
                )
        if not 0 < self.delta < 1:
            raise SparsonaError(
                f"delta={self.delta:g} of --privacy",
                expected="a probability above 0 and below 1, far below one over the number of clients",
                hint="for example delta=1e-5",
            )

    @property
    def std(self) -> float:
        """The standard deviation of the noise."""
        return self.noise * self.clip

    def describe(self) -> str:
        """A clause for the protocol of a run."""
        noise = f"Gaussian noise of standard deviation {self.std:.4g} ({self.noise:.4g} times that norm)"
        if self.kind == LOCAL:
            return f"each client clips its change to norm {self.clip:.4g} and adds {noise} before it is sent"
        return (
            f"the server clips each client's change to norm {self.clip:.4g} and adds {noise} to their sum. The sum is "
            "divided by the number of clients wanted in a round; all weigh the same"
        )


def read_privacy(text: str) -> Privacy:
    """What a text says about privacy.

    Args:
        text: `local` or `central`, with options after a colon: `local:noise=1.0,clip=0.5`. In the options of a method,
            where commas have another meaning, plus signs may stand between them.

    Returns:
        The privacy.

    Example:
        >>> read_privacy("central:noise=1.0,clip=0.5")
        Privacy(kind='central', noise=1.0, clip=0.5, delta=1e-05)
    """
    found = spec.read("privacy", re.sub(r"\+(?=\s*[A-Za-z])", ",", text), KINDS)
    known = [field.name for field in fields(Privacy)][1:]
    if found.args:
        raise found.wrong(f"options by name: {', '.join(known)}", "local:noise=1.0,clip=0.5")
    given: dict[str, float] = {}
    for key, value in found.options.items():
        if key not in known:
            raise unknown_name("option of --privacy", key, known)
        number = spec.as_number(value)
        if number is None or not math.isfinite(number):
            raise found.wrong(f"a number for {key}", "local:noise=1.0,clip=0.5")
        given[key] = number
    kind: Literal["local", "central"] = "local" if found.name == LOCAL else "central"
    return Privacy(kind, **given)


def with_privacy(method: Method, privacy: Privacy, cohort: int, layout: Layout) -> Method:
    """The same method with clipped changes and noise. Transforms of messages come after it at a client, and are undone
    before it at the server.

    Args:
        method: any method that sends changes of a model, or the model that it received.
        privacy: who adds how much noise.
        cohort: how many clients are wanted in a round: what a sum is divided by, however many take part.
        layout: of the model.

    Returns:
        A method with the same messages; with central noise, all weigh the same.

    Raises:
        SparsonaError: nothing can be said about what a client changes by what this method sends.
    """
    check_private(method, privacy, layout)
    sent = method.message_sizes(layout)[1]
    models = frozenset(part.name for part in sent if not part.is_mask and not part.is_change)
    if privacy.kind == CENTRAL:
        assert method.server is not None
        return replace(method, server=_central_half(method.server, privacy, cohort, models, sent))
    clip, noise = Clip(privacy.clip), Noise(privacy.std)

    def finish(state: State, work: Work, inbox: Inbox, probe: Probe, round_: Round) -> tuple[State, Update | None]:
        received = tuple(inbox)
        after, update = method.finish(state, work, received, probe, round_)
        if update is None:
            return after, None
        start = received[0].parts
        change = clip.send(_moved(update, start, models, -1), {}, round_)[0]
        return after, _moved(noise.send(change, {}, round_)[0], start, models, 1)

    return replace(method, finish=finish)


def private_maker(make: Callable[[Any], Method], privacy: Privacy | None, cohort: int) -> Callable[[Any], Method]:
    """A factory of methods with privacy; it can be pickled if `make` can.

    Args:
        make: makes a method for a task.
        privacy: who adds how much noise; None: nobody.
        cohort: how many clients are wanted in a round.

    Returns:
        A factory like `make`.
    """
    return make if privacy is None else partial(_make, make, privacy, cohort)


def _make(make: Callable[[Any], Method], privacy: Privacy, cohort: int, task: Any) -> Method:
    return with_privacy(make(task), privacy, cohort, task.layout)


def sent_in_the_clear(method: Method, layout: Layout) -> tuple[str, ...]:
    """The parts of a client's message that are flags, which noise on values does not protect.

    Args:
        method: the method.
        layout: of the model.

    Returns:
        Their names.
    """
    return tuple(part.name for part in method.message_sizes(layout)[1] if part.is_mask)


def check_private(method: Method, privacy: Privacy, layout: Layout) -> None:
    """Raise SparsonaError if what one client can change by what it sends is not bounded by clipping.

    Args:
        method: the method.
        privacy: who adds noise.
        layout: of the model.
    """
    down, up = method.message_sizes(layout)
    values = [part for part in up if not part.is_mask]
    if method.server is None:
        who = "whose clients send to each other" if method.peer is not None else "whose clients send nothing"
        raise SparsonaError(
            f"--privacy for {method.name}, {who}",
            expected="a method with a server: a change is clipped against what the server sent",
            hint="fedavg, fedalt and fedspa-rsm take it; leave --privacy out for others",
        )
    if not values or not method.model_travels:
        raise SparsonaError(
            f"--privacy for {method.name}, which sends {'something other than models' if values else 'masks only'}",
            expected="a method that sends models or changes of them",
            hint="fedavg, fedalt and fedspa-rsm take it",
        )
    same = {part.name: part for part in down if part.support is Support.DENSE}
    for part in values:
        start = same.get(part.name)
        if not part.is_change and (
            part.support is not Support.DENSE or start is None or start.layout.digest != part.layout.digest
        ):
            raise SparsonaError(
                f"--privacy for {method.name}, whose part '{part.name}' is a model inside a mask of the client's own",
                expected="changes, or the model that was received: then it is known what to clip",
                hint="fedspa and fedspa-rsm send changes",
            )
    if privacy.kind == CENTRAL and not method.server.takes_mean:
        raise SparsonaError(
            f"--privacy central for {method.name}, whose server does more with updates than take their mean",
            expected="a method whose server takes the mean over all updates: what one client changes is known then",
            hint="use --privacy local, or fedavg, fedalt or fedspa, without --mean",
        )


def _moved(update: Update, start: Mapping[str, Part], models: frozenset[str], sign: int) -> Update:
    """The update with changes in place of models (sign -1), or with models in place of changes (1)."""
    parts = dict(update.parts)
    for name in models:
        values = parts[name].plain().values
        parts[name] = parts[name].carrying(values + sign * start[name].plain().values.to(values.device))
    return replace(update, parts=parts)


@dataclass(frozen=True)
class PrivateSum:
    """The method's Sum of clipped changes, how many there are, the last of them, the round, and what was sent down."""

    total: Sum
    num: int
    last: Update | None
    round: Round
    start: Mapping[str, Part]


def _central_half(
    half: ServerHalf, privacy: Privacy, cohort: int, models: frozenset[str], sent: tuple[PartSize, ...]
) -> ServerHalf:
    """A server that takes (sum of clipped changes + noise) / cohort for the mean of a round.

    The method's own mean divides by the number of updates. Here that is always `cohort` + 1: those that came, one of
    noise alone, and empty ones for clients that did not come; so changes and noise are scaled by (cohort + 1) / cohort.
    A round in which nobody came has noise as well: that it has none would tell that somebody did not come.
    """
    clip, share = Clip(privacy.clip), (cohort + 1) / cohort

    def zero(server: Server, round_: Round) -> PrivateSum:
        # All clients receive the same model, or send changes: `check_private`.
        start = half.reply(server, Client(0, 0), round_).parts if models else {}
        return PrivateSum(half.zero(server, round_), 0, None, round_, start)

    def add(server: Server, total: PrivateSum, update: Update) -> PrivateSum:
        if total.num == cohort:
            raise SparsonaError(
                f"more than {cohort} updates in {total.round.title}",
                expected="as many as are wanted in a round, or fewer: epsilon was computed for those",
            )
        change = clip.send(_moved(update, total.start, models, -1), {}, total.round)[0]
        update = replace(_moved(_scaled(change, share), total.start, models, 1), weight=1.0)
        return replace(total, total=half.add(server, total.total, update), num=total.num + 1, last=update)

    def empty(server: Server, round_: Round) -> Update:
        """An update of the first client without any change, and with masks that nobody reads."""
        import torch

        device = next(iter(half.reply(server, Client(0, 0), round_).parts.values())).values.device
        parts = {}
        for one in sent:
            dtype = torch.bool if one.is_mask else torch.float32
            parts[one.name] = dense(Tree(one.layout, torch.zeros(one.layout.size, dtype=dtype, device=device)))
        return message(round_.on(Client(0, 0)), parts)

    def step(server: Server, total: PrivateSum, round_: Round) -> Server:
        import torch

        last = empty(server, round_) if total.last is None else total.last
        draws = generator(round_.seeds.shared("privacy"))

        def instead(change: Callable[[int], Tensor]) -> Update:
            """What the last update says, but for its values, which cover every entry."""
            parts = {
                name: part
                if part.is_mask
                else dense(Tree(part.layout, change(part.layout.size).to(part.values.device)))
                for name, part in last.parts.items()
            }
            return _moved(replace(last, parts=parts), total.start, models, 1)

        noise = instead(lambda size: torch.randn(size, generator=draws) * (privacy.std * share))
        found = half.add(server, total.total, noise)
        for _ in range(cohort - total.num):
            found = half.add(server, found, instead(torch.zeros))
        after = half.step(server, found, round_)
        if total.last is None:  # nobody said anything: what is kept of clients stays
            after = replace(after, **{name: getattr(server, name) for name in half.client_memory})
        return after

    return replace(half, zero=zero, add=add, step=step, merge=None, steps_always=True)


def _scaled(changes: Update, share: float) -> Update:
    parts = {name: part if part.is_mask else part.carrying(part.values * share) for name, part in changes.parts.items()}
    return replace(changes, parts=parts)
