"""pFedGate's gating layer against torch's own layers, and what padding must not do to it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparsona.core.errors import SparsonaError
from sparsona.methods.pfedgate.gate import Gate

FORMS = [
    Gate((3, 8, 8), 7, paths=2),
    Gate((3, 8, 8), 7, pre_norm=False),
    Gate((12,), 5, post_norm=False),
    Gate((12,), 5, sigmoid=False),
]


def images(form: Gate, count: int, seed: int = 0):
    return 2 * torch.randn(count, *form.input_shape, generator=torch.Generator().manual_seed(seed)) + 1


def test_sizes_are_those_of_the_authors_gates():
    assert Gate((1, 28, 28), 40).layout.size == 31_488
    assert Gate((3, 32, 32), 50).layout.size == 153_762
    assert Gate((3, 32, 32), 50).layout.forward_flops() == (2 * 3072 + 1) * 50


def test_batch_norm_and_linear_are_those_of_torch():
    form = Gate((12,), 5, pre_norm=False)
    params, buffers = form.init(0, torch.zeros(1))
    norm, x = nn.BatchNorm1d(5), images(form, 6)
    for _ in range(2):
        found, weights, buffers = form.scores(params, buffers, x, torch.ones(6))
        expected = norm(x @ params["0.weight"].T + params["0.bias"]).sigmoid()
        torch.testing.assert_close(found, expected.detach())
        assert weights is found
    torch.testing.assert_close(buffers["0.post.mean"], norm.running_mean)
    torch.testing.assert_close(buffers["0.post.var"], norm.running_var)
    norm.eval()
    x = x[:2]
    expected = norm(x @ params["0.weight"].T + params["0.bias"]).sigmoid()
    torch.testing.assert_close(form.scores(params, buffers, x)[0], expected.detach())


@pytest.mark.parametrize("place", range(3))
def test_switchable_norm_is_a_mixture_of_three(place):
    """With all weight on one of the three, it is torch's instance, layer or batch norm."""
    form = Gate((3, 4, 4), 6, post_norm=False)
    params, buffers = form.init(0, torch.zeros(1))
    named = {name: params[name].clone() for name in params}
    for name in ("pre.means", "pre.vars"):
        named[name] = torch.where(torch.arange(3) == place, 50.0, 0.0)
    params, x = type(params).of(named, form.layout), images(form, 5)
    norm = (nn.InstanceNorm2d(3), nn.LayerNorm((3, 4, 4)), nn.BatchNorm2d(3))[place]
    expected = (norm(x).flatten(1) @ params["0.weight"].T + params["0.bias"]).sigmoid()
    found, _, after = form.scores(params, buffers, x, torch.ones(5))
    torch.testing.assert_close(found, expected.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(after["pre.mean"], 0.1 * x.mean((0, 2, 3)))


@pytest.mark.parametrize("form", FORMS)
def test_padding_changes_nothing(form):
    params, buffers = form.init(0, torch.zeros(1))
    real, padding = images(form, 5), images(form, 3, seed=1)
    whole = form.scores(params, buffers, real, torch.ones(5))
    padded = form.scores(params, buffers, torch.cat([real, padding]), torch.tensor([1.0] * 5 + [0.0] * 3))
    for found, expected in zip(padded[:2], whole[:2], strict=True):
        torch.testing.assert_close(found[:5], expected)
    torch.testing.assert_close(padded[2].flat, whole[2].flat)


@pytest.mark.parametrize("weight", [[0.0, 0.0], [1.0, 0.0]])
@pytest.mark.parametrize("form", FORMS)
def test_nothing_or_one_example_gives_numbers_and_leaves_the_norms_behind_alone(form, weight):
    params, buffers = form.init(0, torch.zeros(1))
    live = params.like(params.flat.requires_grad_())
    found, weights, after = form.scores(live, buffers, images(form, 2), torch.tensor(weight))
    (gradient,) = torch.autograd.grad((found + weights).sum(), [live.flat])
    assert found.isfinite().all()
    assert gradient.isfinite().all()
    for name in after:
        if name.startswith("0.post") or not sum(weight):
            assert torch.equal(after[name], buffers[name])


def test_gates_are_about_their_start():
    for start in (0.5, 0.9):
        for form in (Gate((12,), 5, start=start), Gate((12,), 5, post_norm=False, paths=2, start=start)):
            scores, weights, _ = form.scores(*form.init(0, torch.zeros(1)), images(form, 64), torch.ones(64))
            assert scores.mean(0).sub(start).abs().max() < 0.1
            assert weights.mean(0).sub(start).abs().max() < 0.1


def test_no_shape_is_refused():
    with pytest.raises(SparsonaError, match="without a shape"):
        Gate((), 5)
