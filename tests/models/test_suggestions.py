"""The network of data that nobody chose one for: by the shape of an example alone."""

import pytest
import torch

from sparsona import models


@pytest.mark.parametrize(
    ("shape", "outputs", "spec"),
    [
        ((2,), 2, "mlp:hidden=32"),
        ((60,), 3, "mlp:hidden=32"),
        ((61,), 3, "mlp:hidden=64"),
        ((561,), 6, "mlp:hidden=256"),
        ((2, 3, 4, 5), 2, "mlp:hidden=64"),
        ((9, 7), 6, "mlp:hidden=64"),
        ((9, 8), 6, "signal-cnn"),
        ((1, 1000), 2, "signal-cnn"),
        ((1, 3, 9), 2, "mlp:hidden=32"),
        ((3, 4, 9), 2, "digits-cnn"),
        ((1, 15, 28), 10, "digits-cnn"),
        ((1, 16, 16), 10, "cnn28"),
        ((3, 63, 80), 10, "cnn28"),
        ((3, 64, 64), 10, "resnet18:stem=7x7"),
    ],
)
def test_by_shape(shape, outputs, spec):
    """What is suggested takes such examples."""
    assert models.suggest(shape, outputs) == spec
    with torch.device("meta"):
        net = models.builder(spec, shape, outputs)()
        assert net(torch.zeros(2, *shape)).shape == (2, outputs)


def test_of_tokens_and_of_nothing():
    assert models.suggest((20,), 99, "tokens", tokens=True) == "transformer"
    assert models.suggest((20,), 3, "classes", tokens=True) is None  # it predicts at every position
    assert models.suggest((), 3) is None


def test_a_signal_too_short():
    with pytest.raises(
        models.SparsonaError, match=r"cannot take signals of length 3\n  expected: a length of at least 4"
    ):
        models.outline("signal-cnn", (9, 3), 6)
    with pytest.raises(models.SparsonaError, match=r"takes signals, but the examples have shape \(9,\)"):
        models.outline("signal-cnn", (9,), 6)
