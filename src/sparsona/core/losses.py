"""Losses and scores: per example in classification and regression, per token in next-token prediction."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from sparsona.core.round import Batch
from sparsona.core.tokens import NUM_SPECIAL, PAD


def cross_entropy(outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """One loss per example, and its weight."""
    return F.cross_entropy(outputs, batch.targets, reduction="none"), batch.weight


def argmax_score(outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """The number of correct predictions, and of all."""
    right = (outputs.argmax(dim=-1) == batch.targets).to(batch.weight.dtype)
    return (right * batch.weight).sum(), batch.weight.sum()


def squared_error(outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """One loss per example, the sum of the squared errors of its outputs, and its weight."""
    return (outputs - batch.targets).square().sum(-1), batch.weight


def no_score(outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """The score of a regression, which has no correct predictions: 0, and the number of examples."""
    return batch.weight.sum() * 0, batch.weight.sum()


def token_cross_entropy(outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """One loss per token, and its weight, which is 0 for padding."""
    losses = F.cross_entropy(outputs.transpose(1, -1), batch.targets, reduction="none")
    return losses, batch.weight.unsqueeze(1) * (batch.targets != PAD)


def token_score(outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """The number of correct tokens, and of all: only words of the vocabulary, not ends and unknown words."""
    weight = batch.weight.unsqueeze(1) * (batch.targets >= NUM_SPECIAL)
    return ((outputs.argmax(dim=-1) == batch.targets) * weight).sum(), weight.sum()
