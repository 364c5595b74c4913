"""Metrics against values worked out by hand."""

import math

import numpy as np
import pytest
import torch

from sparsona.core.errors import SparsonaError
from sparsona.core.metrics import make_metrics, measure
from sparsona.core.targets import METRICS


def found(targets, outputs, true, *names):
    kind = torch.float32 if targets in ("numbers", "labels") else torch.int64
    metrics = make_metrics(targets, names or METRICS[targets])
    return measure(metrics, torch.tensor(outputs, dtype=torch.float32), torch.tensor(true, dtype=kind))


def test_one_logit():
    # Predicted 1, 0, 1, 1; of the pairs (yes, no): (2, -1) and (2, 2) and (1, -1) in order but for a tie, (1, 2) not.
    assert found("binary", [[2.0], [-1.0], [1.0], [2.0]], [1, 0, 1, 0]) == pytest.approx(
        {
            "accuracy": 3 / 4,
            "balanced-accuracy": (2 / 2 + 1 / 2) / 2,
            "f1": (4 / 5 + 2 / 3) / 2,
            "auc": (1 + 0.5 + 1 + 0) / 4,
        }
    )


def test_equal_scores_say_nothing():
    assert found("binary", [[0.3]] * 5, [1, 0, 0, 1, 0], "auc") == {"auc": 0.5}
    assert found("binary", [[0.3]] * 5, [1, 1, 1, 1, 0], "balanced-accuracy") == {"balanced-accuracy": 0.5}


def test_classes():
    outputs, true = np.log([[0.7, 0.2, 0.1], [0.2, 0.7, 0.1], [0.6, 0.3, 0.1], [0.1, 0.8, 0.1]]), [0, 0, 1, 1]
    values = found("classes", outputs.tolist(), true)
    assert values["accuracy"] == values["balanced-accuracy"] == 1 / 2
    assert values["f1"] == pytest.approx(1 / 2)  # of classes 0 and 1; 2 is neither true nor predicted
    # Class 0: 0.7 and 0.2 against 0.6 and 0.1; class 1: 0.3 and 0.8 against 0.2 and 0.7; nobody has class 2.
    assert values["auc"] == pytest.approx((3 / 4 + 3 / 4) / 2)
    assert found("classes", [[1.0, 0.0, 0.0]] * 2, [0, 2], "f1")["f1"] == pytest.approx((2 / 3 + 0) / 2)


def test_labels():
    outputs = [[1.0, -1.0, -1.0], [1.0, -1.0, -1.0], [-1.0, -1.0, -1.0]]
    values = found("labels", outputs, [[1, 0, 0], [0, 1, 0], [0, 0, 0]])
    # The first label has F1 2/3, the second 0; the third is neither true nor predicted, and left out.
    assert values == pytest.approx({"accuracy": 2 / 3, "f1": (2 / 3 + 0) / 2, "auc": (3 / 4 + 1 / 2) / 2})


def test_numbers():
    values = found("numbers", [[1.0, 5.0], [2.0, 5.0], [6.0, 5.0]], [[1.0, 5.0], [2.0, 5.0], [3.0, 5.0]])
    assert values["mae"] == pytest.approx(3 / 6)
    assert values["rmse"] == pytest.approx(math.sqrt(9 / 6))
    assert values["r2"] == pytest.approx(1 - 9 / 2)  # of the first output; the second does not vary


@pytest.mark.parametrize(
    ("targets", "outputs", "true", "absent"),
    [
        ("binary", [[0.1], [0.2]], [1, 1], {"auc"}),
        ("classes", [[0.1, 0.2], [0.2, 0.1]], [1, 1], {"auc"}),
        ("labels", [[-1.0, -1.0]], [[0, 0]], {"auc", "f1"}),
        ("numbers", [[1.0]], [[2.0]], {"r2"}),
        ("numbers", [[1.0], [1.0]], [[2.0], [2.0]], {"r2"}),
        ("numbers", [[math.nan], [1.0]], [[2.0], [1.0]], {"rmse", "mae", "r2"}),
    ],
)
def test_what_is_undefined_is_absent(targets, outputs, true, absent):
    assert set(METRICS[targets]) - set(found(targets, outputs, true)) == absent


def test_functions_from_python():
    outputs, targets = torch.zeros(2, 1), torch.tensor([1, 0])
    own = {"a": lambda o, t: t.float().mean(), "b": lambda o, t: None, "c": lambda o, t: np.float64(3)}
    assert measure(make_metrics("binary", list(own), own), outputs, targets) == {"a": 0.5, "c": 3.0}
    with pytest.raises(SparsonaError, match="returned a Tensor"):
        measure(make_metrics("binary", ["d"], {"d": lambda o, t: o}), outputs, targets)
    with pytest.raises(SparsonaError, match="'d' failed on 2 examples: ZeroDivisionError"):
        measure(make_metrics("binary", ["d"], {"d": lambda o, t: 1 / 0}), outputs, targets)
    with pytest.raises(SparsonaError, match="the metric 'mae' where classes are predicted"):
        make_metrics("classes", ["mae"])
