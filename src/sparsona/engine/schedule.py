"""The batches of several clients at once, as index tensors: what a GPU gathers by, step after step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsona.core.method import Phase, Round
from sparsona.core.round import Batch
from sparsona.data.augment import Draws, augment, look
from sparsona.data.batches import Examples, draw_pass
from sparsona.engine.turn import phase_batch_size


@dataclass(frozen=True, eq=False)
class Schedule:
    """Whose examples make which batch. Tensors are [clients, batches, batch size], and `sizes` [clients, batches].

    Batches are those of `batches.shuffled`, in the same order; short ones are filled with copies of weight 0, and
    clients that have no more batches are given whole ones of which nothing is kept (`sizes` is 0 there).
    """

    inputs: Tensor  # of all clients, end to end
    targets: Tensor
    examples: Examples  # of the first client: how inputs are seen
    index: Tensor  # into `inputs`
    own_index: Tensor  # into the client's own examples
    weight: Tensor
    sizes: Tensor  # on the CPU
    draws: Draws | None

    @property
    def num_batches(self) -> int:
        return self.index.shape[1]

    def batch(self, number: int) -> Batch:
        """Everybody's batch of this number: [clients, batch size, ...]."""
        index = self.index[:, number]
        chosen = index.reshape(-1)
        stored = self.inputs.index_select(0, chosen)
        if self.draws is None:
            seen = look(stored, self.examples.view)
        else:
            seen = augment(stored, self.examples.view, Draws(*(d[:, number].reshape(-1) for d in self.draws)))
        return Batch(
            seen.view(*index.shape, *seen.shape[1:]),
            self.targets.index_select(0, chosen).view(*index.shape, *self.targets.shape[1:]),
            self.weight[:, number],
            self.own_index[:, number],
            torch.zeros(len(index), dtype=torch.int64, device=index.device),
        )


def plan_batches(phase: Phase, trains: Sequence[Examples], rounds: Sequence[Round]) -> Schedule:
    """The batches of one phase for several clients; `rounds` are bound to them."""
    device = trains[0].inputs.device
    size = max(phase_batch_size(phase, train, round_) for train, round_ in zip(trains, rounds, strict=True))
    rows: list[tuple[Tensor, Tensor, Draws | None]] = []  # per client: order, sizes of its batches, draws
    for train, round_ in zip(trains, rounds, strict=True):
        rows.append(plan_client(phase, train, round_, size))
    most = max(len(sizes) for _, sizes, _ in rows)
    sizes = torch.zeros(len(rows), most, dtype=torch.int64)
    own = torch.zeros(len(rows), most, size, dtype=torch.int64)
    drawn = None
    if rows[0][2] is not None:
        drawn = Draws(*(torch.zeros(len(rows), most, size, dtype=values.dtype) for values in rows[0][2]))
    for place, (order, counts, draws) in enumerate(rows):
        sizes[place, : len(counts)] = counts
        own[place, : len(counts)] = order
        if drawn is not None and draws is not None:
            for all_of, mine in zip(drawn, draws, strict=True):
                all_of[place, : len(counts)] = mine
    starts = torch.tensor([0, *(train.num_examples for train in trains)]).cumsum(0)[:-1]
    # Weight 1 where nothing is kept: a mean over nothing would not be a number.
    weight = (torch.arange(size) < torch.where(sizes > 0, sizes, size).unsqueeze(-1)).float()
    return Schedule(
        torch.cat([train.inputs for train in trains]),
        torch.cat([train.targets for train in trains]),
        trains[0],
        (own + starts[:, None, None]).to(device),
        own.to(device),
        weight.to(device),
        sizes,
        None if drawn is None else drawn.to(device),
    )


def plan_client(phase: Phase, train: Examples, round_: Round, size: int) -> tuple[Tensor, Tensor, Draws | None]:
    """Positions [batches, size], the number of real ones in each batch, and draws shaped alike."""
    own_size = phase_batch_size(phase, train, round_)
    count, num = train.num_examples, -(-train.num_examples // own_size)
    wanted = phase.epochs * num
    if phase.max_steps is not None:
        wanted = min(wanted, phase.max_steps * phase.batches_per_step)
    wanted -= wanted % phase.batches_per_step  # what is left at the very end may be fewer
    orders, all_draws = [], []
    for epoch in range(-(-wanted // num)):
        order, _, draws = draw_pass(train, own_size, round_.seeds.own(f"{phase.name}/{epoch}"))
        orders.append(_cut(order, num, own_size, size))
        if draws is not None:
            all_draws.append([_cut(values, num, own_size, size) for values in draws])
    sizes = torch.full((num,), own_size)
    sizes[-1] = count - (num - 1) * own_size
    merged = None
    if all_draws:
        merged = Draws(*(torch.cat(values)[:wanted] for values in zip(*all_draws, strict=True)))
    return torch.cat(orders)[:wanted], sizes.repeat(len(orders))[:wanted], merged


def _cut(values: Tensor, num: int, own_size: int, size: int) -> Tensor:
    """A pass cut into batches of `own_size`, each filled up to `size` with its pass's first entry."""
    filled = values[:1].repeat(num * own_size)
    filled[: len(values)] = values
    batches = values[:1].repeat(num, size)
    batches[:, :own_size] = filled.view(num, own_size)
    return batches
