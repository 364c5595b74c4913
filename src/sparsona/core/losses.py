"""Losses and scores: per example, or per token in next-token prediction.

`targets` says what is predicted for an example: "classes" (one of several), "binary" (yes or no, by one logit),
"labels" (any of several), "numbers" (a regression), or "tokens" (the next one at each position).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sparsona.core.errors import SparsonaError
from sparsona.core.round import Batch
from sparsona.core.targets import LOSSES
from sparsona.core.tokens import NUM_SPECIAL, PAD

Losses = Callable[[Tensor, Batch], tuple[Tensor, Tensor]]
Score = Callable[[Tensor, Batch], tuple[Tensor, Tensor]]


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


def sign_score(outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """The number of correct predictions of one logit, or of examples all of whose labels are predicted, and of all."""
    chosen = outputs > 0
    right = chosen.squeeze(-1) == batch.targets if batch.targets.dim() == 1 else (chosen == (batch.targets > 0)).all(-1)
    return (right * batch.weight).sum(), batch.weight.sum()


@dataclass(frozen=True, eq=False)
class ClassLoss:
    """Cross-entropy of classes or tokens, with weights of the classes and smoothed labels as torch defines them.

    A loss is multiplied by the weight of its class. The mean over a batch divides by the number of examples and not by
    the sum of their weights, so that an example counts the same in every batch.
    """

    weights: Tensor | None = None
    smoothing: float = 0.0
    is_tokens: bool = False

    def __call__(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        weights = None if self.weights is None else self.weights.to(outputs.device)  # there already: nothing moves
        logits = outputs.transpose(1, -1) if self.is_tokens else outputs
        found = F.cross_entropy(logits, batch.targets, weights, reduction="none", label_smoothing=self.smoothing)
        weight = batch.weight.unsqueeze(1) * (batch.targets != PAD) if self.is_tokens else batch.weight
        return found, weight


@dataclass(frozen=True, eq=False)
class LogitLoss:
    """Binary cross-entropy: of one logit, or the mean over the labels of an example.

    `weights` are those of no and yes for one logit; for labels, that of each where it applies (torch's pos_weight).
    """

    weights: Tensor | None = None
    smoothing: float = 0.0

    def __call__(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        weights = None if self.weights is None else self.weights.to(outputs.device)
        targets = batch.targets.to(outputs.dtype)
        smooth = targets * (1 - self.smoothing) + self.smoothing / 2 if self.smoothing else targets
        if targets.dim() == 1:
            found = F.binary_cross_entropy_with_logits(outputs.squeeze(-1), smooth, reduction="none")
            if weights is not None:
                found = found * (weights[0] + (weights[1] - weights[0]) * targets)
            return found, batch.weight
        found = F.binary_cross_entropy_with_logits(outputs, smooth, reduction="none", pos_weight=weights)
        return found.mean(-1), batch.weight


def absolute_error(outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """One loss per example, the sum of the absolute errors of its outputs, and its weight."""
    return (outputs - batch.targets).abs().sum(-1), batch.weight


def huber(outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """One loss per example, the sum over its outputs of half the squared error up to 1 and linear above, and its
    weight."""
    return F.huber_loss(outputs, batch.targets, reduction="none").sum(-1), batch.weight


@dataclass(frozen=True, eq=False)
class GivenLoss:
    """A function from Python: `function(outputs, targets)` returns a loss for each example."""

    name: str
    function: Callable[[Tensor, Tensor], Tensor]

    def __call__(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        found = self.function(outputs, batch.targets)
        if not isinstance(found, Tensor) or found.shape != batch.weight.shape or not found.is_floating_point():
            what = f"{found.dtype} of shape {tuple(found.shape)}" if isinstance(found, Tensor) else repr(found)[:60]
            raise SparsonaError(
                f"the loss '{self.name}' returned {what} for {batch.weight.shape[0]} examples",
                expected=f"one loss per example, a float tensor of shape ({batch.weight.shape[0]},), without a mean "
                "or sum over them",
                hint="pass reduction='none' to torch's losses, and sum over what belongs to one example",
            )
        return found, batch.weight

    def mixes_examples(self, targets: Tensor, num_outputs: int) -> bool:
        """Whether the loss of an example changes with the examples beside it, as one with a mean over the batch does.

        It is tried on random outputs: a loss that seldom does so may be missed.
        """
        draw = torch.Generator().manual_seed(0)
        half = len(targets) // 2
        for scale in (0.1, 1.0, 10.0):
            outputs = (scale * torch.randn(len(targets), num_outputs, generator=draw)).to(targets.device)
            try:
                beside, alone = self.function(outputs, targets)[:half], self.function(outputs[:half], targets[:half])
            except Exception:  # of the function: if it is wrong, training says how
                continue
            if not torch.allclose(beside, alone, 1e-3, 1e-6, equal_nan=True):
                return True
        return False


_ERRORS: dict[str, Losses] = {
    "squared-error": squared_error,
    "absolute-error": absolute_error,
    "huber": huber,
}
_SCORES: dict[str, Score] = {
    "classes": argmax_score,
    "tokens": token_score,
    "numbers": no_score,
    "binary": sign_score,
    "labels": sign_score,
}


def make_losses(
    targets: str,
    loss: str | None = None,
    *,
    class_weights: Sequence[float] | None = None,
    label_smoothing: float = 0.0,
    function: Callable[[Tensor, Tensor], Tensor] | None = None,
    device: torch.device | None = None,
) -> tuple[Losses, Score]:
    """The losses and the score of a task.

    Args:
        targets: what is predicted, a key of `core.targets.LOSSES`.
        loss: one of its names there; None: the first.
        class_weights: a weight for each class; of labels, for each where it applies.
        label_smoothing: the share of a label that is spread over all classes.
        function: a loss from Python, of the name `loss`.
        device: where the weights are kept.

    Returns:
        `losses` and `score` of a Task.

    Example:
        >>> losses, _ = make_losses("classes", class_weights=[1.0, 3.0])
        >>> batch = Batch(torch.zeros(2, 2), torch.tensor([0, 1]), torch.ones(2), torch.arange(2), torch.tensor(0))
        >>> losses(torch.zeros(2, 2), batch)[0].tolist()
        [0.6931471824645996, 2.079441547393799]
    """
    score = _SCORES[targets]
    if function is not None:
        _refuse_shaping(f"the loss '{loss}' from Python", class_weights, label_smoothing)
        if targets == "tokens":
            raise SparsonaError("a loss from Python where tokens are predicted", expected="cross-entropy")
        return GivenLoss(str(loss), function), score
    loss = loss or LOSSES[targets][0]
    if loss not in LOSSES[targets]:
        raise SparsonaError(
            f"the loss '{loss}' where {WHAT[targets]}",
            expected=" or ".join(LOSSES[targets]),
            hint=_HINTS.get((loss, targets), "leave loss out, or say what the targets are with the option task"),
        )
    if targets == "numbers":
        _refuse_shaping(f"the loss '{loss}'", class_weights, label_smoothing)
        return _ERRORS[loss], score
    weights = None if class_weights is None else torch.tensor(class_weights, dtype=torch.float32, device=device)
    if targets in ("binary", "labels"):
        return LogitLoss(weights, label_smoothing), score
    if targets == "tokens" and weights is not None:
        raise SparsonaError("class_weights where tokens are predicted", expected="data with classes")
    if weights is None and not label_smoothing:  # as it is: these are the bits of runs without options
        return (token_cross_entropy if targets == "tokens" else cross_entropy), score
    return ClassLoss(weights, label_smoothing, targets == "tokens"), score


WHAT = {
    "classes": "classes are predicted",
    "tokens": "tokens are predicted",
    "numbers": "numbers are predicted",
    "binary": "one of two classes is predicted by one logit",
    "labels": "any number of labels is predicted",
}
_HINTS = {
    ("bce", "classes"): 'for two classes and one logit, say so where the data is: task="binary"',
    ("cross-entropy", "binary"): 'bce; cross-entropy is for a logit per class, which is task="classification"',
    ("cross-entropy", "labels"): "bce, for each label",
}


def _refuse_shaping(what: str, class_weights: Any, label_smoothing: float) -> None:
    name = "class_weights" if class_weights is not None else "label_smoothing" if label_smoothing else ""
    if name:
        raise SparsonaError(
            f"{name} with {what}",
            expected="cross-entropy or bce, which have classes",
            hint=f"leave {name} out",
        )


def check_losses(losses: Losses, outputs: Tensor, targets: Tensor) -> None:
    """Try losses on a few examples, so that a function that is none is refused before a run starts."""
    batch = Batch(
        outputs, targets, torch.ones(len(targets)), torch.arange(len(targets)), torch.zeros((), dtype=torch.int64)
    )
    try:
        losses(outputs, batch)
    except SparsonaError:
        raise
    except Exception as error:
        raise SparsonaError(
            f"the loss '{getattr(losses, 'name', losses)}' failed on outputs of shape {tuple(outputs.shape)} and "
            f"targets of {targets.dtype} and shape {tuple(targets.shape)}: {type(error).__name__}: {error}",
            expected="a function of these that returns one loss per example",
        ) from error
