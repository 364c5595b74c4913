"""Attackers for any method: clients that train as they should and send something else.

`with_attack` makes a new method of a method, inside its transforms: a lie is transformed, encoded, counted and checked
as an honest message is, and has its size. What a lie changes is the client's change: the difference between its message
and the one that it would have sent without training. An attacker's own State stays honest, except for a forged mask,
which its server must find there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from sparsona.core.errors import SparsonaError
from sparsona.core.method import Cost, Inbox, Method, Probe, Round, State, Tree, Update, Work
from sparsona.core.seeds import generator
from sparsona.core.tree import counts, map_parts
from sparsona.core.update import Part, Support, places
from sparsona.robust import FORGED_MASK, LABEL_FLIP, LITTLE, Attack
from sparsona.sparsity.masks import random_mask

if TYPE_CHECKING:
    from torch import Tensor

    from sparsona.data.federation import Federation


def with_attack(method: Method, attack: Attack, attackers: frozenset[int]) -> Method:
    """The same method, some of whose clients lie.

    Args:
        method: any method whose clients send something.
        attack: what they do.
        attackers: who does it.

    Returns:
        The method. Attacks on data and those that need other attackers' updates happen elsewhere: `flip_labels`,
        `collude`.
    """
    if attack.name in (LABEL_FLIP, LITTLE):
        return method

    def finish(state: State, work: Work, inbox: Inbox, probe: Probe, round_: Round) -> tuple[State, Update | None]:
        assert round_.client is not None
        if round_.client.index not in attackers:
            return method.finish(state, work, inbox, probe, round_)
        received = tuple(inbox)
        after, update = method.finish(state, work, received, probe, round_)
        if update is None:
            return after, update
        if attack.name == FORGED_MASK:
            return _forge_masks(after, update, round_, keeps=method.server is not None)
        numbers = {name: part for name, part in update.parts.items() if not part.is_mask}
        start: Mapping[str, Part] = {}
        if not all(part.is_change for part in numbers.values()):
            unread = probe.uncharged()
            untrained = method.receive(state, received, unread, round_)
            message = method.finish(state, untrained, received, unread, round_)[1]
            start = {} if message is None else message.parts
        lies = _lies(attack, numbers, start, round_)
        return after, replace(update, parts={**update.parts, **lies})

    return replace(method, finish=finish)


def with_attackers(
    make: Callable[[Any], Method], attack: Attack | None, attackers: frozenset[int]
) -> Callable[[Any], Method]:
    """A factory of methods with attackers; it can be pickled if `make` can."""
    return make if attack is None else partial(_make, make, attack, attackers)


def _make(make: Callable[[Any], Method], attack: Attack, attackers: frozenset[int], task: Any) -> Method:
    return with_attack(make(task), attack, attackers)


def check_attack(attack: Attack, cost: Cost, name: str, has_transforms: bool) -> None:
    """Raise SparsonaError if an attack does not fit what clients send.

    Args:
        attack: the attack.
        cost: of a client's turn.
        name: the method's.
        has_transforms: messages go through transforms.
    """
    if cost.up is None:
        raise SparsonaError(
            f"attack={attack.name} for {name}, whose clients send nothing",
            expected="a method with a server or peers",
            hint="leave --attack out",
        )
    numbers = [part for part in cost.up if not part.is_mask]
    layouts = {part.layout.digest for part in numbers}
    masks = [part for part in cost.up if part.is_mask and (part.layout.digest in layouts or not layouts)]
    if attack.name == FORGED_MASK and not masks and all(part.support is not Support.BITS for part in numbers):
        raise SparsonaError(
            f"attack={FORGED_MASK} for {name}, whose clients choose no mask of entries",
            expected="a method whose clients send masks, such as fedspa or dispfl",
            hint="sign-flip and others are for all methods that send numbers",
        )
    if attack.name not in (FORGED_MASK, LABEL_FLIP) and not numbers:
        raise SparsonaError(
            f"attack={attack.name} for {name}, whose clients send masks only",
            expected=f"{FORGED_MASK} or {LABEL_FLIP}",
        )
    if attack.colludes and has_transforms:
        raise SparsonaError(
            f"attack={LITTLE} with transforms: attackers compare their updates after those were applied",
            expected="messages without transforms",
            hint="leave --transform out",
        )


def _lies(attack: Attack, numbers: Mapping[str, Part], start: Mapping[str, Part], round_: Round) -> dict[str, Part]:
    """The parts with numbers of a lying message."""
    import torch

    whole = {name: part.tree() if part.whole is None else part.whole for name, part in numbers.items()}
    before, change = {}, {}
    held: dict[str, Tensor | None] = {}
    for name, tree in whole.items():
        other = start.get(name)
        before[name] = torch.zeros_like(tree.flat) if other is None or other.whole is None else other.whole.flat
        found = tree.flat - before[name]
        mask = numbers[name].mask
        held[name] = None if mask is None else mask.flat.to(found.device)
        change[name] = _inside(found, held[name])
    lie = _lie(attack, change, held, round_)
    return {
        name: replace(part, arrived=None, whole=whole[name].like((before[name] + lie[name]).to(whole[name].dtype)))
        for name, part in numbers.items()
    }


def _inside(values: Tensor, mask: Tensor | None) -> Tensor:
    return values if mask is None else values.where(mask, 0.0)


def _lie(
    attack: Attack, change: Mapping[str, Tensor], held: Mapping[str, Tensor | None], round_: Round
) -> dict[str, Tensor]:
    """What is sent in place of a change; of its norm counts what is inside the masks that it is sent with."""
    import torch

    if attack.name in ("sign-flip", "scaled"):
        factor = attack.option("factor")
        assert factor is not None
        return {name: value * (-factor if attack.name == "sign-flip" else factor) for name, value in change.items()}
    if attack.name == "same-value":
        return {name: torch.full_like(value, attack.option("value") or 0.0) for name, value in change.items()}
    assert attack.name == "random"
    random = generator(round_.seeds.own("attack"))
    drawn = {
        name: _inside(torch.randn(value.shape, generator=random).to(value.device), held[name])
        for name, value in change.items()
    }
    norm = attack.option("norm")
    length = (attack.option("factor") or 0.0) * _norm(change) if norm is None else norm
    scale = length / max(_norm(drawn), 1e-30)
    return {name: value * scale for name, value in drawn.items()}


def _norm(values: Mapping[str, Tensor]) -> float:
    return float(sum(value.double().square().sum() for value in values.values())) ** 0.5


def _forge_masks(state: State, update: Update, round_: Round, keeps: bool) -> tuple[State, Update]:
    """A message with other masks of the same density in every tensor, and with its values in other places of theirs;
    and the State with those masks, where a server will rely on the client having them."""
    forged: dict[int, Tree] = {}

    def other(mask: Tree, name: str) -> Tree:
        if id(mask) not in forged:
            drawn = random_mask(mask.layout, counts(mask), round_.seeds.own(f"forged/{name}")).loaded()
            forged[id(mask)] = drawn.like(drawn.flat.to(mask.device))
        return forged[id(mask)]

    parts = dict(update.parts)
    layouts = {part.layout.digest for part in parts.values() if not part.is_mask}
    for name, part in update.parts.items():
        if part.is_mask:
            if part.whole is not None and (part.layout.digest in layouts or not layouts):
                parts[name] = replace(part, whole=other(part.whole, name))
        elif part.mask is not None:
            values = part.values[_order(counts(part.mask), round_.seeds.own(f"values/{name}")).to(part.values.device)]
            if part.support is Support.BITS:
                part = replace(part, mask=other(part.mask, name))
            assert part.mask is not None
            flat = values.new_zeros(part.layout.size).scatter_(0, places(part.mask).to(values.device), values)
            parts[name] = replace(part, arrived=None, whole=Tree(part.layout, flat))

    def kept(_path: str, leaf: Any) -> Any:
        return forged.get(id(leaf), leaf) if isinstance(leaf, Tree) else leaf

    return map_parts(kept, state) if keeps else state, replace(update, parts=parts)


def _order(numbers: Sequence[int], seed: int) -> Tensor:
    """A random order within each tensor, of which so many values are sent."""
    import torch

    random, found, start = generator(seed), [], 0
    for number in numbers:
        found.append(start + torch.randperm(number, generator=random))
        start += number
    return torch.cat(found)


def collude(updates: Sequence[Update], masks: Sequence[Mapping[str, Tree]], z: float) -> list[Update]:
    """The messages of attackers that know each other's: a-little-is-enough.

    Args:
        updates: the attackers' honest messages of a round.
        masks: of each, the masks of its parts that have one.
        z: how many standard deviations to go.

    Returns:
        The messages to send: for each entry the mean of those who hold it, less z of their standard deviations.
    """
    import torch

    lies = [dict(update.parts) for update in updates]
    for name in [name for name, part in updates[0].parts.items() if not part.is_mask]:
        groups: dict[bytes, list[int]] = {}
        for place, update in enumerate(updates):
            groups.setdefault(update.parts[name].layout.digest, []).append(place)
        for members in groups.values():
            parts = [updates[place].parts[name] for place in members]
            values = parts[0].values.new_zeros((len(members), parts[0].layout.size)).double()
            held = torch.ones(values.shape, dtype=torch.bool, device=values.device)
            for row, place in enumerate(members):
                if (mask := masks[place].get(name)) is not None:
                    held[row] = mask.flat.to(values.device)
                values[row, held[row]] = parts[row].values.double()
            count = held.sum(0).clamp(min=1)
            mean = values.sum(0) / count
            spread = ((values - mean).where(held, 0.0).square().sum(0) / count).sqrt()
            lie = (mean - z * spread).to(parts[0].values.dtype)
            for row, place in enumerate(members):
                lies[place][name] = parts[row].carrying(lie[held[row]])
    return [replace(update, parts=parts) for update, parts in zip(updates, lies, strict=True)]


def flip_labels(federation: Federation, attack: Attack, attackers: frozenset[int]) -> Federation:
    """A federation in which attackers' training examples have other labels; tests and validation are as they were.

    Args:
        federation: the clients' data.
        attack: label-flip, with `shift` if it was given.
        attackers: whose labels are changed.

    Returns:
        A federation over the same inputs.
    """
    import torch

    if federation.targets in ("tokens", "numbers"):
        raise SparsonaError(
            f"attack={LABEL_FLIP} where {federation.targets} are predicted",
            expected="classes or labels",
            hint="sign-flip and others are for all methods that send numbers",
        )
    mine = torch.cat([federation.splits[client].train for client in sorted(attackers)])
    used = torch.zeros(len(federation.y), dtype=torch.int64)
    for split in federation.splits:
        for part in (split.train, split.validation, split.test):
            used.index_add_(0, part.cpu(), torch.ones(len(part), dtype=torch.int64))
    if int(used[mine.cpu()].max()) > 1:
        raise SparsonaError(
            f"attack={LABEL_FLIP} where clients share examples",
            expected="training examples that are an attacker's alone: others' labels would be flipped, too",
        )
    y, old = federation.y.clone(), federation.y[mine]
    shift = attack.option("shift")
    if federation.targets == "labels":
        y[mine] = 1 - old
    elif shift is None:
        y[mine] = federation.num_labels - 1 - old
    else:
        y[mine] = (old.long() + int(shift) % federation.num_labels).remainder(federation.num_labels).to(y.dtype)
    return replace(federation, y=y)
