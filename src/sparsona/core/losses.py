"""Losses and scores: per example where a class is asked for, per token where the next one is."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from sparsona.core.round import Batch
from sparsona.core.tokens import NUM_SPECIAL, PAD


def cross_entropy(outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """One loss per example, and how much each counts."""
    return F.cross_entropy(outputs, batch.targets, reduction="none"), batch.weight


def argmax_score(outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """How many predictions are right, and of how many."""
    right = (outputs.argmax(dim=-1) == batch.targets).to(batch.weight.dtype)
    return (right * batch.weight).sum(), batch.weight.sum()


def squared_error(outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """One loss per example, the squares of its outputs' errors added up, and how much each counts."""
    return (outputs - batch.targets).square().sum(-1), batch.weight


def no_score(outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Of numbers none is right or wrong; how many there are."""
    return batch.weight.sum() * 0, batch.weight.sum()


def token_cross_entropy(outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """One loss per token, and how much each counts: padding does not."""
    losses = F.cross_entropy(outputs.transpose(1, -1), batch.targets, reduction="none")
    return losses, batch.weight.unsqueeze(1) * (batch.targets != PAD)


def token_score(outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """How many tokens are right, and of how many: only those of the vocabulary, not ends and unknown words."""
    weight = batch.weight.unsqueeze(1) * (batch.targets >= NUM_SPECIAL)
    return ((outputs.argmax(dim=-1) == batch.targets) * weight).sum(), weight.sum()
