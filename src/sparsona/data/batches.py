"""Batches of a client's examples, without a DataLoader.

An epoch is gathered once and handed out as views: for small models, gathering every batch by itself costs as much as
training on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from sparsona.core.errors import SparsonaError
from sparsona.core.round import Batch
from sparsona.core.seeds import generator


class Examples(NamedTuple):
    """Some of a client's examples: inputs (N, ...) and targets (N, ...)."""

    inputs: Tensor
    targets: Tensor

    @property
    def num_examples(self) -> int:
        return self.inputs.shape[0]  # not __len__: a tuple of two must stay one when unpacked or copied


def shuffled(examples: Examples, batch_size: int, seed: int, no_single: bool = False) -> Iterator[Batch]:
    """One pass in an order drawn from `seed`; the last batch may be smaller, none is dropped.

    With `no_single`, a last example that would be alone joins the batch before it: statistics of one example
    (BatchNorm) do not exist. `index` holds positions in `examples`; `noise` differs from batch to batch. The same seed
    gives the same batches.
    """
    _check_batch_size(batch_size)
    count, device = examples.num_examples, examples.inputs.device
    draws = generator(seed)
    order = torch.randperm(count, generator=draws).to(device)
    noise = torch.randint(2**63 - 1, (_num_batches(count, batch_size),), generator=draws).to(device)
    gathered = Examples(examples.inputs.index_select(0, order), examples.targets.index_select(0, order))
    return _slices(gathered, order, noise, batch_size, no_single)


def in_order(examples: Examples, batch_size: int) -> Iterator[Batch]:
    """One pass in the order of `examples`, without copying them; `noise` is 0 in every batch."""
    _check_batch_size(batch_size)
    count, device = examples.num_examples, examples.inputs.device
    noise = torch.zeros(_num_batches(count, batch_size), dtype=torch.int64, device=device)
    return _slices(examples, torch.arange(count, device=device), noise, batch_size)


def _slices(
    examples: Examples, index: Tensor, noise: Tensor, batch_size: int, no_single: bool = False
) -> Iterator[Batch]:
    inputs, targets = examples
    weight = torch.ones(len(index), dtype=torch.float32, device=inputs.device)
    for position, start in enumerate(range(0, len(index), batch_size)):
        left = len(index) - start
        if no_single and left == 1 and start:
            return  # it was in the batch before
        size = left if no_single and left == batch_size + 1 else min(batch_size, left)
        yield Batch(
            inputs.narrow(0, start, size),
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
            f"a batch size of {batch_size}", expected="1 or more", mend="use 32 if there is no reason for another"
        )
