"""Metrics of a client's predictions: of all its examples at once, since few of them are means over examples."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sparsona.core.errors import SparsonaError
from sparsona.core.targets import METRICS, is_usable

Metric = Callable[[Tensor, Tensor], float | None]
Floats = npt.NDArray[np.float64]


def measure(metrics: Mapping[str, Metric], outputs: Tensor, targets: Tensor) -> dict[str, float]:
    """The values of metrics for one client, without those that are undefined, not finite or too large to add up.

    Args:
        metrics: by name; each returns None where it is undefined.
        outputs: of all examples, (N, outputs).
        targets: (N,) of classes, (N, outputs) of labels and numbers.

    Returns:
        The values by name.

    Example:
        >>> outputs, targets = torch.tensor([[0.1], [0.4], [0.35], [0.8]]), torch.tensor([0, 0, 1, 1])
        >>> measure(make_metrics("binary", ["auc", "accuracy"]), outputs, targets)
        {'auc': 0.75, 'accuracy': 0.5}
    """
    outputs, targets = outputs.detach().cpu(), targets.detach().cpu()
    found = {name: metric(outputs, targets) for name, metric in metrics.items()}
    return {name: float(value) for name, value in found.items() if value is not None and is_usable(value)}


class GivenMetric:
    """A function from Python: `function(outputs, targets)` returns a number, or None or NaN where it is undefined."""

    def __init__(self, name: str, function: Callable[[Tensor, Tensor], object]) -> None:
        self.name, self.function = name, function

    def __call__(self, outputs: Tensor, targets: Tensor) -> float | None:
        try:
            found = self.function(outputs, targets)
        except Exception as error:
            raise SparsonaError(
                f"the metric '{self.name}' failed on {len(targets)} examples: {type(error).__name__}: {error}",
                expected="a number for any client's examples; None where it is undefined",
            ) from error
        if found is None:
            return None
        if isinstance(found, Tensor | np.ndarray | np.generic) and found.ndim == 0:
            found = found.item()
        if not isinstance(found, int | float):
            raise SparsonaError(
                f"the metric '{self.name}' returned a {type(found).__name__}",
                expected="one number, or None where it is undefined",
            )
        return float(found)


def make_metrics(
    targets: str, names: tuple[str, ...] | list[str], functions: Mapping[str, Callable[[Tensor, Tensor], object]] = {}
) -> dict[str, Metric]:
    """Metrics by name.

    Args:
        targets: what is predicted.
        names: those of `core.targets.METRICS`, or of functions.
        functions: from Python, by name.

    Returns:
        The metrics, in the order of `names`.
    """
    found: dict[str, Metric] = {}
    for name in names:
        if name in functions:
            if targets == "tokens":
                raise SparsonaError("a metric from Python where tokens are predicted", expected="accuracy")
            found[name] = GivenMetric(name, functions[name])
        elif name in METRICS[targets]:
            found[name] = _METRICS[name]
        else:
            raise SparsonaError(
                f"the metric '{name}' where {targets} are predicted",
                expected=f"one of {', '.join(METRICS[targets])}",
                hint="say what the targets are with the option task, or pass a function of outputs and targets",
            )
    return found


def _classes(outputs: Tensor, targets: Tensor) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Predicted and true classes; of one logit, 0 and 1."""
    chosen = (outputs > 0).squeeze(-1) if outputs.shape[-1] == 1 else outputs.argmax(-1)
    return chosen.numpy().astype(np.int64), targets.numpy().astype(np.int64)


def accuracy(outputs: Tensor, targets: Tensor) -> float | None:
    """The share of right predictions; of labels, of examples all of whose labels are right."""
    if not len(targets):
        return None
    if targets.dim() > 1:
        return float(((outputs > 0) == (targets > 0)).all(-1).double().mean())
    chosen, true = _classes(outputs, targets)
    return float((chosen == true).mean())


def balanced_accuracy(outputs: Tensor, targets: Tensor) -> float | None:
    """The mean of the shares of right predictions of each class that there are examples of."""
    chosen, true = _classes(outputs, targets)
    found = [float((chosen[true == one] == one).mean()) for one in np.unique(true)]
    return float(np.mean(found)) if found else None


def f1(outputs: Tensor, targets: Tensor) -> float | None:
    """The mean of F1 over the classes, or labels, that are true or predicted of any example."""
    if targets.dim() > 1:
        chosen, true = (outputs > 0).numpy(), (targets > 0).numpy()
        columns = [(chosen[:, one], true[:, one]) for one in range(true.shape[1])]
    else:
        predicted, classes = _classes(outputs, targets)
        columns = [(predicted == one, classes == one) for one in np.union1d(predicted, classes)]
    sums = [(int((chosen & true).sum()), int(chosen.sum()) + int(true.sum())) for chosen, true in columns]
    found = [2 * both / of for both, of in sums if of]
    return float(np.mean(found)) if found else None


def auc(outputs: Tensor, targets: Tensor) -> float | None:
    """The area under the ROC curve; of classes the mean of each against the rest, of labels the mean of each.

    Classes and labels that all examples have, or none, are left out.
    """
    if targets.dim() > 1:
        scores, true = outputs.double().numpy(), (targets > 0).numpy()
    elif outputs.shape[-1] == 1:
        scores, true = outputs.double().numpy(), (targets > 0).numpy()[:, None]
    else:
        scores = outputs.double().softmax(-1).numpy()
        true = targets.numpy()[:, None] == np.arange(scores.shape[1])
    found = [_area(scores[:, one], true[:, one]) for one in range(true.shape[1])]
    known = [area for area in found if area is not None]
    return float(np.mean(known)) if known else None


def _area(scores: Floats, true: npt.NDArray[np.bool_]) -> float | None:
    """By ranks, of which equal scores have the mean: the share of pairs in order, where a tie counts half."""
    num_true = int(true.sum())
    num_false = len(true) - num_true
    if not num_true or not num_false or not np.isfinite(scores).all():
        return None
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]
    return (float(ranks[true].sum()) - num_true * (num_true + 1) / 2) / (num_true * num_false)


def _errors(outputs: Tensor, targets: Tensor) -> Floats:
    found: Floats = (outputs.double() - targets.double()).numpy()
    return found


def mae(outputs: Tensor, targets: Tensor) -> float | None:
    """The mean absolute error, over examples and outputs."""
    return float(np.abs(_errors(outputs, targets)).mean()) if len(targets) else None


def rmse(outputs: Tensor, targets: Tensor) -> float | None:
    """The root of the mean squared error, over examples and outputs."""
    return float(np.sqrt(np.square(_errors(outputs, targets)).mean())) if len(targets) else None


def r2(outputs: Tensor, targets: Tensor) -> float | None:
    """The share of the variance that is explained, mean over outputs; those that do not vary are left out."""
    errors, true = _errors(outputs, targets), targets.double().numpy()
    if len(true) < 2:
        return None
    spread = np.square(true - true.mean(axis=0)).sum(axis=0)
    varies = spread > 0
    if not varies.any():
        return None
    return float((1 - np.square(errors).sum(axis=0)[varies] / spread[varies]).mean())


_METRICS: dict[str, Metric] = {
    "accuracy": accuracy,
    "balanced-accuracy": balanced_accuracy,
    "f1": f1,
    "auc": auc,
    "mae": mae,
    "rmse": rmse,
    "r2": r2,
}


def gather(collected: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Outputs and targets of several batches as one."""
    outputs, targets = zip(*collected, strict=True)
    return torch.cat(outputs), torch.cat(targets)
