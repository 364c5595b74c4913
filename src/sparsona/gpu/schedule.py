"""The batches of one or several clients as integers, from which a device gathers the examples of each step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparsona.core.method import Phase, Round
from sparsona.core.round import Batch
from sparsona.data.augment import Draws, as_inputs, augment
from sparsona.data.batches import Examples, as_targets, draw_pass
from sparsona.data.pool import View
from sparsona.engine.turn import phase_batch_size

# The fields of an example: its index in the pool and in the client's own data, its weight, its crop.
INDEX, OWN_INDEX, WEIGHT, TOP, LEFT, MIRRORED = range(6)
NUM_FIELDS = 6


def plan_rows(
    phase: Phase,
    trains: Sequence[Examples],
    positions: Sequence[Tensor],
    rounds: Sequence[Round],
    size: int,
    places: int,
) -> tuple[Tensor, Tensor]:
    """Rows [steps, batches per step, field, places, size] and the number of examples in each step [steps, places].

    Batches are those of `batches.shuffled`, in the same order. Short ones are padded with examples of weight 0; a place
    without a step (its client is done, or it is empty) gets a whole batch, whose result must be discarded.
    `positions` are the clients' examples in the pool, on the CPU; `rounds` are bound to the clients.
    """
    plans = [_plan_client(phase, train, round_) for train, round_ in zip(trains, rounds, strict=True)]
    at_once = phase.batches_per_step
    most = max(len(sizes) for _, _, sizes in plans)
    rows = torch.zeros(most, NUM_FIELDS, places, size, dtype=torch.int64)
    rows[:, WEIGHT] = 1
    rows[:, INDEX] = positions[0][0]
    sizes = torch.zeros(most, places, dtype=torch.int64)
    for column, ((own_size, fields, own_sizes), mine) in enumerate(zip(plans, positions, strict=True)):
        batches = len(own_sizes)
        if not batches:  # too little for one step
            continue
        mine_rows = rows[:batches, :, column]
        mine_rows[:, INDEX, :own_size] = mine[fields[0]].view(batches, own_size)
        mine_rows[:, OWN_INDEX, :own_size] = fields[0].view(batches, own_size)
        for field, values in zip((TOP, LEFT, MIRRORED), fields[1:], strict=False):
            mine_rows[:, field, :own_size] = values.view(batches, own_size)
        mine_rows[:, WEIGHT] = torch.arange(size) < own_sizes[:, None]
        sizes[:batches, column] = own_sizes
    steps = most // at_once
    return rows.view(steps, at_once, NUM_FIELDS, places, size), sizes.view(steps, at_once, places).sum(1)


def _plan_client(phase: Phase, train: Examples, round_: Round) -> tuple[int, list[Tensor], Tensor]:
    """The size of its batches; order, tops, lefts and mirrors [batches * size], padded; and real sizes [batches]."""
    own_size = phase_batch_size(phase, train, round_)
    count = train.num_examples - (train.num_examples % own_size if round_.drop_last else 0)
    num = -(-count // own_size)
    assert round_.client is not None
    wanted = phase.num_batches(round_.client, num)  # an incomplete last step is left out
    filling = num * own_size - count
    columns: list[list[Tensor]] = []
    for epoch in range(-(-wanted // num)):
        order, _, draws = draw_pass(train, own_size, round_.seeds.own(f"{phase.name}/{epoch}"))
        found = [values[:count] for values in ((order,) if draws is None else (order, *draws))]
        columns.append([torch.cat([values, values[:1].expand(filling)]) if filling else values for values in found])
    sizes = torch.full((num,), own_size)
    sizes[-1] = count - (num - 1) * own_size
    fields = [torch.cat(values)[: wanted * own_size] for values in zip(*columns, strict=True)]
    return own_size, fields, sizes.repeat(len(columns))[:wanted]


def gather(x: Tensor, y: Tensor, row: Tensor, view: View, noise: Tensor) -> Batch:
    """The batch that a row [field, ..., size] describes, out of the pool `x`, `y`."""
    index = row[INDEX].reshape(-1)
    stored = x.index_select(0, index)
    if view.augments:
        crops = (row[TOP].reshape(-1), row[LEFT].reshape(-1), row[MIRRORED].reshape(-1) > 0)
        inputs = augment(stored, view, Draws(*crops))
    else:
        inputs = as_inputs(stored, view)
    shape = row.shape[1:]
    targets = as_targets(y.index_select(0, index))
    return Batch(
        inputs.view(*shape, *inputs.shape[1:]),
        targets.view(*shape, *targets.shape[1:]),
        row[WEIGHT].float(),
        row[OWN_INDEX],
        noise,
    )
