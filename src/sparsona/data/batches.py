"""Batches of a client's examples, without a DataLoader.

An epoch is gathered once and handed out as views: for small models, gathering every batch by itself costs as much as
training on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sparsona.core.errors import SparsonaError
from sparsona.core.round import Batch
from sparsona.core.seeds import generator
from sparsona.data.augment import Draws, as_inputs, augment, draw
from sparsona.data.pool import View


@dataclass(frozen=True, eq=False)
class Examples:
    """Some of a client's examples: inputs (N, ...) and targets (N, ...), and how a model is to see the inputs.

    Batches are made of one tensor of inputs; a user is also given a tuple or a dict of them (`Federation.examples`).
    """

    inputs: Any
    targets: Tensor
    view: View = field(default_factory=View)

    def __repr__(self) -> str:
        """How much there is of what, and none of the data."""
        return f"Examples({self.num_examples:,}, inputs {_shape(self.inputs)}, targets {_shape(self.targets)})"

    @property
    def num_examples(self) -> int:
        return len(self.targets)


def _shape(inputs: Any) -> str:
    if isinstance(inputs, Tensor):
        return f"{str(inputs.dtype).removeprefix('torch.')} {tuple(inputs.shape)}"
    named = inputs.items() if isinstance(inputs, dict) else enumerate(inputs)
    return f"{{{', '.join(f'{name!r}: {_shape(one)}' for name, one in named)}}}"


def as_targets(stored: Tensor) -> Tensor:
    """Targets as losses take them: classes and tokens in int64, numbers as they are."""
    return stored if stored.is_floating_point() else stored.long()


def shuffled(
    examples: Examples, batch_size: int, seed: int, no_single: bool = False, drop_last: bool = False
) -> Iterator[Batch]:
    """One pass in an order drawn from `seed`; the last batch may be smaller, and is left out with `drop_last`.

    With `no_single`, a last example that would be alone joins the batch before it: statistics of one example
    (BatchNorm) do not exist. `index` holds positions in `examples`; `noise` differs from batch to batch. Images are
    augmented as their view says. The same seed gives the same batches.
    """
    _check_batch_size(batch_size)
    device = examples.inputs.device
    order, noise, draws = draw_pass(examples, batch_size, seed)
    order, noise = order.to(device), noise.to(device)
    gathered = Examples(examples.inputs.index_select(0, order), examples.targets.index_select(0, order), examples.view)
    draws = None if draws is None else draws.to(device)
    return _slices(gathered, order, noise, batch_size, no_single, draws, drop_last)


def draw_pass(examples: Examples, batch_size: int, seed: int) -> tuple[Tensor, Tensor, Draws | None]:
    """What chance decides about one pass, on the CPU: the order, a noise for each batch, and crops and mirrors."""
    count = examples.num_examples
    random = generator(seed)
    order = torch.randperm(count, generator=random)
    noise = torch.randint(2**63 - 1, (_num_batches(count, batch_size),), generator=random)
    return order, noise, draw(examples.inputs, examples.view, random) if examples.view.augments else None


def in_order(examples: Examples, batch_size: int) -> Iterator[Batch]:
    """One pass in the order of `examples`, not augmented; `noise` is 0 in every batch."""
    _check_batch_size(batch_size)
    count, device = examples.num_examples, examples.inputs.device
    noise = torch.zeros(_num_batches(count, batch_size), dtype=torch.int64, device=device)
    return _slices(examples, torch.arange(count, device=device), noise, batch_size)


def _slices(
    examples: Examples,
    index: Tensor,
    noise: Tensor,
    batch_size: int,
    no_single: bool = False,
    draws: Draws | None = None,
    drop_last: bool = False,
) -> Iterator[Batch]:
    inputs, targets, view = examples.inputs, examples.targets, examples.view
    weight = torch.ones(len(index), dtype=torch.float32, device=inputs.device)
    for position, start in enumerate(range(0, len(index), batch_size)):
        left = len(index) - start
        if drop_last and left < batch_size:
            return
        if no_single and left == 1 and start:
            return  # it was in the batch before
        joins = no_single and left == batch_size + 1 and not drop_last
        size = left if joins else min(batch_size, left)
        stored = inputs.narrow(0, start, size)
        yield Batch(
            as_inputs(stored, view) if draws is None else augment(stored, view, draws.narrow(start, size)),
            targets.narrow(0, start, size),
            weight.narrow(0, start, size),
            index.narrow(0, start, size),
            noise[position],
        )


def _num_batches(count: int, batch_size: int) -> int:
    return -(-count // batch_size)


def _check_batch_size(batch_size: int) -> None:
    if batch_size < 1:
        raise SparsonaError(
            f"a batch size of {batch_size}", expected="1 or more", hint="use 32 if there is no reason for another"
        )
