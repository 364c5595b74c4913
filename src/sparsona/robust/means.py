"""Robust means for any method: what a few lying clients send moves the result by a bounded amount.

`with_mean` makes a new method of a method, as `with_transforms` does. The updates of a round (or the messages that a
peer received) are judged together; then the method's own mean gets them with the robust value in place of theirs. A
weighted mean of equal values is that value, so that sums, server optimizers and masks need not know of it. Where a
method divides a masked entry by more clients than hold it (FedSpa), it is that value times their share, as without.

An entry is judged among those who hold it: an update whose mask leaves it out says nothing about it. Clients whose
parts have other shapes (HeteroFL's widths) are judged among themselves. Flags are never changed. Updates are held until
the round is complete: memory grows with the number of clients in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from sparsona.core.errors import SparsonaError
from sparsona.core.layout import Layout
from sparsona.core.method import Cost, Method, PeerHalf, Probe, Round, Server, ServerHalf, State, Sum, Tree, Work
from sparsona.core.update import Inbox, Part, Support, Update, mask_digest, places
from sparsona.robust import Mean

if TYPE_CHECKING:
    from torch import Tensor

CHUNK = 2**22  # numbers that are sorted or subtracted at a time
WEISZFELD_STEPS = 10
LEAST_OVERLAP = 0.1  # of the median over pairs of updates: with less in common, two cannot be compared
SMALLEST = 1e-6  # distance that counts, of the geometric median: nearer ones count as this


@dataclass(frozen=True)
class ReadPart(Part):
    """A part that remembers with which mask a method read it: the server may have it, or draw it from a seed."""

    read_with: list[Tree] = field(default_factory=list)

    def tree(self, mask: Tree | None = None) -> Tree:
        found = super().tree(mask)
        used = self.mask if self.support is Support.BITS else mask
        if self.support is not Support.DENSE and used is not None:
            self.read_with.append(used)
        return found


@dataclass(frozen=True)
class Held:
    """An update that waits for the others of its round, and the masks of those parts that have one."""

    update: Update
    masks: dict[str, Tree]


@dataclass(frozen=True)
class Own:
    """What who judges has: the server's model, or a peer's own, and the mask outside of which it keeps nothing.

    Args:
        model: what models that clients send are measured from, and the value of entries that nobody whose update was
            chosen holds; None: their median is in its place.
        mask: the entries that count in norms, and the mask of messages that assume it; None: all entries.
    """

    model: Tree | None = None
    mask: Tree | None = None


@dataclass(frozen=True)
class Waiting:
    """The Sum of a robust mean: all updates of a round."""

    round: Round
    held: tuple[Held, ...] = ()


def with_mean(method: Method, mean: Mean | None, layout: Layout) -> Method:
    """The same method with a robust mean.

    Args:
        method: a method with a server, or of peers.
        mean: the mean; None: the method's own.
        layout: of the model.

    Returns:
        A method whose server, or whose peers, take the robust mean.

    Raises:
        SparsonaError: the method has no mean that could be replaced.

    Example:
        >>> from torch import nn
        >>> from sparsona.core.task import Task
        >>> from sparsona.methods.fedavg import FedAvgConfig, fedavg
        >>> task = Task(nn.Linear(4, 3), (4,), 3)
        >>> method = fedavg(task, FedAvgConfig())
        >>> with_mean(method, Mean("median"), task.layout).phases == method.phases
        True
    """
    if mean is None:
        return method
    changes = frozenset(part.name for part in method.message_sizes(layout)[1] if part.is_change)
    if method.server is not None and method.server.comparable:
        return replace(method, server=_server_half(method.server, mean, changes))
    if method.peer is None or method.peer.wants is not None:
        why = "its clients send nothing"
        if method.server is not None:
            why = "entries of its messages mean something else from client to client"
        elif method.peer is not None:
            why = "its clients judge each other's models themselves"
        raise SparsonaError(
            f"mean={mean.text} for {method.name}: {why}",
            expected="a method that takes a mean of clients' numbers",
            hint="leave --mean out",
        )

    mask_of = method.peer.mask

    def own_model(state: State, probe: Probe, round_: Round) -> Own:
        """The model that a peer has without any message, where the mean goes by it, and its mask."""
        model = None
        if method.deploy is not None and (mean.name == BOUNDING or mean.name in CHOOSING):
            found = method.deploy(method.receive(state, (), probe.uncharged(), round_))
            model = found[0] if isinstance(found, tuple) else None
        return Own(model, None if mask_of is None else mask_of(state))

    def receive(state: State, inbox: Inbox, probe: Probe, round_: Round) -> Work:
        own = partial(own_model, state, probe, round_)
        return method.receive(state, judged_inbox(inbox, mean, own, changes), probe, round_)

    def finish(state: State, work: Work, inbox: Inbox, probe: Probe, round_: Round) -> tuple[State, Update | None]:
        own = partial(own_model, state, probe, round_)
        return method.finish(state, work, judged_inbox(inbox, mean, own, changes), probe, round_)

    return replace(method, receive=receive, finish=finish, peer=_peer_half(method.peer, mean, changes))


def with_robust_mean(make: Callable[[Any], Method], mean: Mean | None) -> Callable[[Any], Method]:
    """A factory of methods with a robust mean; it can be pickled if `make` can."""
    return make if mean is None else partial(_make, make, mean)


def _make(make: Callable[[Any], Method], mean: Mean, task: Any) -> Method:
    return with_mean(make(task), mean, task.layout)


def check_mean(mean: Mean, cost: Cost, name: str, num_updates: int, among_peers: bool) -> None:
    """Raise SparsonaError if a mean cannot be taken of what clients send.

    Args:
        mean: the mean.
        cost: of a client's turn.
        name: the method's.
        num_updates: how many updates a round has.
        among_peers: what a peer receives depends on the graph, and may be less.
    """
    if cost.up is not None and all(part.is_mask for part in cost.up):
        raise SparsonaError(
            f"mean={mean.text} for {name}, whose clients send masks only",
            expected="a method that takes a mean of clients' numbers",
            hint="leave --mean out",
        )
    if "krum" not in mean.name or among_peers:
        return
    lies = mean.lies(num_updates)
    if num_updates < 2 * lies + 3:
        raise SparsonaError(
            f"mean={mean.text} with {num_updates} updates a round: {lies} of them may be lies",
            expected=f"2 f + 3 updates or more, {2 * lies + 3} for f = {lies}",
            hint="raise --per-round, or lower the number of lies",
        )
    if (mean.chosen or 1) > num_updates - lies:
        raise SparsonaError(
            f"mean={mean.text} with {num_updates} updates a round: it would choose {mean.chosen}",
            expected=f"at most {num_updates - lies}, those that may not be lies",
        )


def _server_half(half: ServerHalf, mean: Mean, changes: frozenset[str]) -> ServerHalf:
    def zero(server: Server, round_: Round) -> Waiting:
        return Waiting(round_)

    def add(server: Server, total: Waiting, update: Update) -> Waiting:
        parts = {name: _as_read(part) for name, part in update.parts.items()}
        # The method reads the update now, so that one that it cannot use is refused when it arrives.
        half.add(server, half.zero(server, total.round), replace(update, parts=parts))
        masks = {
            name: part.read_with[0] for name, part in parts.items() if isinstance(part, ReadPart) and part.read_with
        }
        return replace(total, held=(*total.held, Held(update.owned(), masks)))

    def merge(one: Waiting, other: Waiting) -> Waiting:
        return replace(one, held=tuple(sorted((*one.held, *other.held), key=lambda held: held.update.sender)))

    def step(server: Server, total: Waiting, round_: Round) -> Server:
        own = Own(None if half.global_model is None else half.global_model(server))
        summed: Sum = half.zero(server, round_)
        for update in judged(total.held, mean, own, changes):
            summed = half.add(server, summed, update)
        return half.step(server, summed, round_)

    # How much one client can move a robust mean is not known: `takes_mean` would promise that it is.
    return replace(half, zero=zero, add=add, step=step, merge=merge, takes_mean=False)


def _peer_half(half: PeerHalf, mean: Mean, changes: frozenset[str]) -> PeerHalf:
    consensus = half.consensus
    if consensus is None:
        return half
    return replace(half, consensus=lambda inbox, round_: consensus(judged_inbox(inbox, mean, Own, changes), round_))


def judged_inbox(
    inbox: Inbox, mean: Mean, own: Callable[[], Own] = Own, changes: frozenset[str] = frozenset()
) -> Iterator[Update]:
    """A peer's messages with robust values. Its own model is not among them: it is trusted, and mixed with these.

    Args:
        inbox: the messages.
        mean: the robust mean.
        own: makes the peer's own model, which is to messages what a server's is to updates, if there are messages.
        changes: as in `judged`.

    Returns:
        The messages with other values inside their own support.
    """
    updates = tuple(inbox)
    if not updates:
        return
    mine = own()
    held = []
    for update in updates:
        masks = {name: _mask(part, mine.mask) for name, part in update.parts.items()}
        held.append(Held(update, {name: mask for name, mask in masks.items() if mask is not None}))
    yield from judged(held, mean, mine, changes)


def _mask(part: Part, own: Tree | None) -> Tree | None:
    """The mask of a message's values, where the receiver has it. What else an update that was not encoded holds does
    not count: results would depend on the executor."""
    if part.support is not Support.KNOWN or own is None:
        return part.bitmap
    is_own = part.mask is not None and part.mask.identity is own.identity
    return own if is_own or part.proof == mask_digest(own) else None


def judged(held: Sequence[Held], mean: Mean, own: Own, changes: frozenset[str] = frozenset()) -> Iterator[Update]:
    """Updates with the robust value in place of theirs, in their order.

    Args:
        held: the updates of a round.
        mean: the robust mean.
        own: what who judges has.
        changes: the names of parts that are changes rather than models. `Part.is_change` does not say so: it is not
            part of a message, so that it would depend on the executor.

    Returns:
        The updates with other values inside their own support.
    """
    kinds: dict[Any, list[int]] = {}
    for place, one in enumerate(held):
        kinds.setdefault(_kind(one), []).append(place)
    found: dict[int, Update] = {}
    for places_ in kinds.values():
        members = [held[place] for place in places_]
        found.update(zip(places_, _judge(members, mean, own, changes), strict=True))
    return (found[place] for place in range(len(held)))


def _kind(one: Held) -> tuple[Any, ...]:
    """What must be the same for two updates to be compared entry by entry."""
    return tuple(
        (name, part.layout.digest, b"" if name in one.masks else part.proof, _width(one, name))
        for name, part in sorted(one.update.parts.items())
        if not part.is_mask
    )


def _width(one: Held, name: str) -> int:
    part = one.update.parts[name]
    return part.layout.size if name in one.masks or part.support is Support.DENSE else part.num_values


def _judge(members: Sequence[Held], mean: Mean, own: Own, changes: frozenset[str]) -> list[Update]:
    import torch

    names = [name for name, part in sorted(members[0].update.parts.items()) if not part.is_mask]
    if not names:
        return [one.update for one in members]
    widths = [_width(members[0], name) for name in names]
    first = members[0].update.parts[names[0]].values
    values = first.new_zeros((len(members), sum(widths)))
    is_masked = any(one.masks for one in members)
    held = torch.ones(values.shape, dtype=torch.bool, device=values.device) if is_masked else None
    spans = dict(zip(names, zip(_starts(widths), widths, strict=True), strict=True))
    for row, one in enumerate(members):
        for name, (start, width) in spans.items():
            place, part = slice(start, start + width), one.update.parts[name]
            if name not in one.masks:
                values[row, place] = part.values
                continue
            mask = one.masks[name].flat.to(values.device)
            values[row, place][mask] = part.values
            assert held is not None
            held[row, place] = mask
    models = {name: span for name, span in spans.items() if name not in changes}
    if mean.name == BOUNDING:
        counted = _counted(members[0].update, spans, values, held, own.mask)
        found = _bounded(values, counted, mean, _centre(members[0].update, models, values, held, own.model))
    elif mean.name in CHOOSING:
        unheld = None if held is None else _centre(members[0].update, models, values, held, own.model)
        found = CHOOSING[mean.name](values, held, mean, unheld).expand(len(members), -1)
    else:
        found = RULES[mean.name](values, held, mean).expand(len(members), -1)
    judged_ = []
    for row, one in enumerate(members):
        parts = dict(one.update.parts)
        for name, (start, width) in spans.items():
            new = found[row, start : start + width]
            mask_ = one.masks.get(name)
            inside = new if mask_ is None else new.index_select(0, places(mask_).to(new.device))
            parts[name] = parts[name].carrying(inside)
        judged_.append(replace(one.update, parts=parts))
    return judged_


def _starts(widths: Sequence[int]) -> list[int]:
    return [sum(widths[:place]) for place in range(len(widths))]


def median(values: Tensor, held: Tensor | None, mean: Mean) -> Tensor:
    """The median of each entry over those who hold it, 0 where none does; the mean of the two in the middle."""
    return _sorted_mean(values, held, lambda num: (num - 1) // 2)


def trimmed(values: Tensor, held: Tensor | None, mean: Mean) -> Tensor:
    """The mean of each entry without a share of the lowest and of the highest values, rounded up, of those who hold it;
    of few holders one or two values are left (Yin et al., ICML 2018, round down and would cut none)."""
    assert mean.bound is not None
    share = mean.bound
    return _sorted_mean(values, held, lambda num: (share * num - 1e-9).ceil().long().minimum((num - 1) // 2))


def _sorted_mean(values: Tensor, held: Tensor | None, num_cut: Callable[[Tensor], Tensor]) -> Tensor:
    """The mean of each entry without so many of its lowest and of its highest values."""
    import torch

    found = []
    ranks = torch.arange(len(values), device=values.device)[:, None]
    for place in _chunks(values):
        some = values[:, place]
        if held is not None:
            some = some.where(held[:, place], math.inf)  # at the end
        num = torch.full_like(some[0], len(values)).long() if held is None else held[:, place].sum(0)
        cut = num_cut(num).clamp(min=0)
        kept = (ranks >= cut) & (ranks < num - cut)
        total = some.sort(0).values.double().where(kept, 0.0).sum(0)
        found.append((total / kept.sum(0).clamp(min=1)).to(values.dtype))
    return torch.cat(found)


def krum(values: Tensor, held: Tensor | None, mean: Mean, unheld: Tensor | None) -> Tensor:
    """The update with the smallest sum of squared distances to its n - f - 2 nearest (Blanchard et al., 2017)."""
    return _chosen(values, held, mean, 1, unheld)


def multi_krum(values: Tensor, held: Tensor | None, mean: Mean, unheld: Tensor | None) -> Tensor:
    """The mean of the updates with the smallest such sums: n - f of them, or as many as were asked for."""
    return _chosen(values, held, mean, mean.chosen or max(1, len(values) - mean.lies(len(values))), unheld)


def _chosen(values: Tensor, held: Tensor | None, mean: Mean, num: int, unheld: Tensor | None) -> Tensor:
    """The mean of so many updates. Where none of them holds an entry it is `unheld`: a value made of the others would
    be made of those that were just found to be far off, among whom attackers may be alone."""
    import torch

    distances = squared_distances(values, held)
    # Its distance to itself, 0, is the first; where updates were lost there may be fewer than 2 f + 3.
    nearest = max(1, min(len(values) - mean.lies(len(values)) - 2, len(values) - 1))
    scores = distances.sort(1).values[:, 1 : 1 + nearest].sum(1)
    best = scores.argsort(stable=True)[:num]
    weights = torch.zeros(len(values), dtype=torch.float64, device=values.device)
    weights[best] = 1.0
    return _weighted(values, held, weights, otherwise=unheld)


def geometric_median(values: Tensor, held: Tensor | None, mean: Mean) -> Tensor:
    """Weiszfeld's iteration from the median of each entry, smoothed (Pillutla et al., 2022): ten steps."""
    centre = median(values, held, mean)
    for _ in range(WEISZFELD_STEPS):
        distances = norms(values, held, centre, per_entry=True)
        centre = _weighted(values, held, 1 / distances.clamp(min=SMALLEST), otherwise=None)
    return centre


BOUNDING = "norm-bound"  # the mean that keeps all updates, scaled down
# Those that choose whole updates, and need a value for entries that none of the chosen holds (None: all hold all).
CHOOSING: dict[str, Callable[[Tensor, Tensor | None, Mean, Tensor | None], Tensor]] = {
    "krum": krum,
    "multi-krum": multi_krum,
}
RULES: dict[str, Callable[[Tensor, Tensor | None, Mean], Tensor]] = {
    "median": median,
    "trimmed": trimmed,
    "geometric-median": geometric_median,
}


def _bounded(values: Tensor, counted: Tensor | None, mean: Mean, centre: Tensor) -> Tensor:
    """Changes scaled down to a norm over the entries that count, around a centre (Sun et al., 2019)."""
    lengths = norms(values, counted, centre)
    bound = lengths.quantile(0.5) if mean.bound is None else lengths.new_tensor(mean.bound)
    shares = (bound / lengths.clamp(min=1e-30)).clamp(max=1.0)[:, None]
    # An update within the bound is the same to the bit.
    short = (centre.double() + shares * (values.double() - centre)).to(values.dtype)
    return short.where(shares < 1, values)


def _centre(
    update: Update, models: dict[str, tuple[int, int]], values: Tensor, held: Tensor | None, model: Tree | None
) -> Tensor:
    """What changes are measured from: 0 for changes; for models that of who judges, the server's, which was sent, or a
    peer's own, or else their median."""
    centre, known = values.new_zeros(values.shape[1]), None
    for name, (start, width) in models.items():
        part, place = update.parts[name], slice(start, start + width)
        same = _entries(model, part, width)
        if same is None:
            known = median(values, held, Mean("median")) if known is None else known
            same = known[place]
        centre[place] = same.to(values.device)
    return centre


def _counted(
    update: Update, spans: dict[str, tuple[int, int]], values: Tensor, held: Tensor | None, mask: Tree | None
) -> Tensor | None:
    """The entries of each update that count in its norm: those that it holds and that who judges keeps. A peer's own
    model is 0 outside of its mask: all that others hold there would be a change, which is cut away afterwards."""
    import torch

    if mask is None:
        return held
    kept = torch.ones(values.shape[1], dtype=torch.bool, device=values.device)
    for name, (start, width) in spans.items():
        same = _entries(mask, update.parts[name], width)
        if same is not None:
            kept[start : start + width] = same.to(values.device)
    return kept.expand(values.shape) if held is None else held & kept


def _entries(tree: Tree | None, part: Part, width: int) -> Tensor | None:
    """The entries of a tree that a part's columns belong to; None: it has no such tensors."""
    if tree is None or width != part.layout.size:
        return None
    shapes = {slot.name: slot.shape for slot in tree.layout.slots}
    if any(shapes.get(slot.name) != slot.shape for slot in part.layout.slots):
        return None
    return tree.select(part.layout.names).flat


def norms(values: Tensor, held: Tensor | None, centre: Tensor, per_entry: bool = False) -> Tensor:
    """The distance of each update to a centre over the entries that it holds; `per_entry`: scaled as if it held all."""
    total = values.new_zeros(len(values)).double()
    for place in _chunks(values):
        gap = values[:, place].double() - centre[place]
        total += (gap if held is None else gap.where(held[:, place], 0.0)).square().sum(1)
    if per_entry and held is not None:
        total = total * (values.shape[1] / held.sum(1).clamp(min=1))
    return total.sqrt()


def squared_distances(values: Tensor, held: Tensor | None) -> Tensor:
    """Squared distances between updates. Of masked ones, the mean over the entries that both hold times the number of
    all entries, so that a small overlap is not a small distance; infinite for those that hold nothing in common, or
    less than a share of what two updates of this round usually do: a few entries can be chosen to be near."""
    import torch

    num, size = values.shape
    total = values.new_zeros((num, num)).double()
    common = torch.zeros_like(total)
    for place in _chunks(values):
        some = values[:, place]
        for row in range(num):
            gap = (some - some[row]).double().square()
            if held is not None:
                both = held[:, place] & held[row, place]
                gap = gap.where(both, 0.0)
                common[row] += both.sum(1)
            total[row] += gap.sum(1)
    if held is None:
        return total
    usual = common[*torch.triu_indices(num, num, 1)].quantile(0.5) if num > 1 else common.new_zeros(())
    scaled = (total * size / common.clamp(min=1)).where((common > 0) & (common >= LEAST_OVERLAP * usual), math.inf)
    return scaled.fill_diagonal_(0.0)


def _weighted(values: Tensor, held: Tensor | None, weights: Tensor, otherwise: Tensor | None) -> Tensor:
    """The weighted mean of each entry over those who hold it; `otherwise` where all of those weigh nothing."""
    import torch

    found = []
    for place in _chunks(values):
        share = weights[:, None] if held is None else weights[:, None] * held[:, place]
        sums = share.sum(0)
        total = (values[:, place].double() * share).sum(0) / sums.where(sums > 0, 1.0)
        one = total.to(values.dtype)
        found.append(one if otherwise is None else one.where(sums > 0, otherwise[place]))
    return torch.cat(found)


def _chunks(values: Tensor) -> Iterator[slice]:
    """Ranges of entries, few enough that a copy of them fits into memory."""
    num, size = values.shape
    step = max(1, CHUNK // max(num, 1))
    return (slice(start, min(start + step, size)) for start in range(0, max(size, 1), step))


def _as_read(part: Part) -> Part:
    if part.is_mask:
        return part
    return ReadPart(**{name: getattr(part, name) for name in Part.__dataclass_fields__})
