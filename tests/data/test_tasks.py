"""What targets are: found out from them, or said."""

import numpy as np
import pytest

import sparsona as sp

X = np.random.default_rng(0).random((40, 3), dtype=np.float32)
Y = np.arange(40) % 2
ROWS = np.stack([Y, np.arange(40) % 4 == 0, Y], axis=1)


@pytest.mark.parametrize(
    ("y", "task", "expected"),
    [
        (Y, "auto", ("classification", "classes", 2)),
        (Y + 0.5, "auto", ("regression", "numbers", 1)),
        (ROWS.astype(float), "auto", ("multilabel", "labels", 3)),
        (ROWS.astype(float) + 0.5, "auto", ("regression", "numbers", 3)),
        (ROWS, "multilabel", ("multilabel", "labels", 3)),
        (Y * 7, "regression", ("regression", "numbers", 1)),
        (Y > 0, "binary", ("binary", "binary", 1)),
        (Y[:, None] * 1.0, "binary", ("binary", "binary", 1)),
        (Y * 1.0, "classification", ("classification", "classes", 2)),
    ],
)
def test_tasks(tmp_path, y, task, expected):
    data = sp.federate(X, y, clients=2, partition="iid", task=task)
    assert (data.task, data.targets, data.num_classes) == expected
    counts = data.label_counts("train")
    assert (counts is None) == (expected[1] in ("labels", "numbers"))
    assert counts is None or counts.shape == (2, 2)
    data.save(tmp_path)
    opened = sp.Federation.open(tmp_path)
    assert (opened.task, opened.digest()) == (data.task, data.digest())


def test_the_task_is_part_of_the_digest():
    one, other = (sp.federate(X, ROWS * 1.0, clients=2, partition="iid", task=t) for t in ("multilabel", "regression"))
    assert one.digest() != other.digest()


@pytest.mark.parametrize(
    ("y", "options", "words"),
    [
        (ROWS, {}, 'task="multilabel"'),
        (Y * 1.0, {}, 'task="regression"'),
        (Y * 2, {"task": "binary"}, "0 or 1 for each example"),
        (ROWS * 2, {"task": "multilabel"}, "0 or 1 in it"),
        (ROWS[..., None], {"task": "regression"}, r"shape \(N,\) or \(N, outputs\)"),
        (Y, {"task": "regresion"}, "did you mean 'regression'"),
        (ROWS * 1.0, {"num_classes": 2}, "num_classes is 2, task is multilabel"),
    ],
)
def test_errors_say_what_to_write(y, options, words):
    with pytest.raises(sp.SparsonaError, match=words):
        sp.federate(X, y, clients=2, partition="iid", **options)


def test_one_client_with_whole_numbers_among_others_with_fractions():
    whole, parts = (X[:8], Y[:8] * 1.0, X[8:12], Y[8:12] * 1.0), (X[20:28], Y[:8] + 0.5, X[28:32], Y[:4] + 0.5)
    for clients in ([whole, parts], [parts, whole]):
        assert sp.Federation.from_clients(clients).task == "regression"
    with pytest.raises(sp.SparsonaError, match='task="regression" if whole numbers'):
        sp.Federation.from_clients([parts, (X[:8], Y[:8], X[8:12], Y[8:12])])
    assert sp.Federation.from_clients([(X[:8], Y[:8], X[8:12], Y[8:12])] * 2, task="regression").y.is_floating_point()
    rows = (X[:8], ROWS[:8] * 1.0, X[8:12], ROWS[8:12] * 1.0)
    assert sp.Federation.from_clients([rows, rows]).task == "multilabel"
    with pytest.raises(sp.SparsonaError, match="3 targets for an example"):
        sp.Federation.from_clients([whole, rows], task="regression")


def test_balanced_weights_are_those_of_all_training_data():
    few, many = (X[:4], [0, 0, 0, 1], X[:2], [0, 1]), (X[:6], [0, 0, 0, 0, 0, 1], X[:9], [1] * 9)
    data = sp.Federation.from_clients([few, many], validation_rate=0)
    assert data.balanced_weights() == pytest.approx((10 / (2 * 8), 10 / (2 * 2)))
    rows = (X[:4], [[1.0, 0.0], [0.0, 0.0], [0.0, 1.0], [0.0, 1.0]], X[:1], [[1.0, 1.0]])
    assert sp.Federation.from_clients([rows], validation_rate=0).balanced_weights() == (3.0, 1.0)
    one = (X[:2], [0, 0], X[:1], [1])
    with pytest.raises(sp.SparsonaError, match="no training example has class 1"):
        sp.Federation.from_clients([one], validation_rate=0).balanced_weights()
