"""GroupNorm with shortcut, ReLU and shift: against torch's own in float64, as plain torch and as Triton kernels.

Without a GPU the kernels run in Triton's interpreter; without Triton they are not tested.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from by_triton import check_in_interpreter, needs_gpu, needs_triton, on_gpu
from torch.nn import functional as F

from sparsona.gpu import norm_ops

SHAPES = [  # samples, channels, height, width, groups
    (2, 8, 5, 3, 2),
    (3, 15, 1, 1, 3),
    (1, 12, 7, 7, 4),  # 3 channels a group: lanes are masked
    (2, 10, 4, 4, 10),
    (2, 7, 3, 3, 1),
]
SWITCHES = list(itertools.product([False, True], repeat=4))  # relu, residual, shift, two gradients


def draw(shape, dtype, relu, residual, shift, two, far=0.0):
    """Inputs of both operations, images channels last."""
    samples, channels, height, width, groups = shape
    generator = torch.Generator().manual_seed(0)

    def images():
        drawn = torch.randn((samples, channels, height, width), generator=generator) + far
        return drawn.to(dtype).contiguous(memory_format=torch.channels_last)

    def row():
        return torch.randn(channels, generator=generator)

    return {
        "x": images(),
        "shift": row() if shift else None,
        "weight": row(),
        "bias": row(),
        "residual": images() - far if residual else None,
        "dy": images() - far,
        "dy2": images() - far if two else None,
        "groups": groups,
        "relu": relu,
    }


def expect(drawn):
    """By torch's group_norm and autograd, in float64: y, and the gradients of x, residual, weight, bias, shift."""
    x, shift, weight, bias, residual, dy, dy2 = (
        None if drawn[name] is None else drawn[name].double().requires_grad_()
        for name in ("x", "shift", "weight", "bias", "residual", "dy", "dy2")
    )
    out = F.group_norm(x if shift is None else x + shift[:, None, None], drawn["groups"], weight, bias, 1e-5)
    out = out if residual is None else out + residual
    out = out.relu() if drawn["relu"] else out
    wanted = [leaf for leaf in (x, residual, weight, bias, shift) if leaf is not None]
    found = torch.autograd.grad(out, wanted, dy if dy2 is None else dy + dy2)
    return [value.detach() for value in (out, *found)]


def run(forward, backward, drawn):
    y, mean, rstd = forward(
        *(drawn[n] for n in ("x", "shift", "weight", "bias", "residual", "groups")), 1e-5, drawn["relu"]
    )
    saved = None if drawn["residual"] is None else y
    before = (drawn["dy"], drawn["dy2"], drawn["x"], drawn["shift"], saved, drawn["weight"], drawn["bias"], mean, rstd)
    dx, dresidual, shares = backward(*before, drawn["relu"], drawn["residual"] is not None)
    assert y.dtype == dx.dtype == drawn["x"].dtype
    assert all(image.is_contiguous(memory_format=torch.channels_last) for image in (y, dx))
    return [y, dx, *([] if drawn["residual"] is None else [dresidual]), *shares.sum(0)]


def assert_near(found, expected, tolerance):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        scale = max(1.0, float(other.abs().max()))  # a shift has no gradient where a group is one channel
        assert float((one.double() - other).abs().max()) <= tolerance * scale


def check(forward, backward, shapes=SHAPES, all_switches=SWITCHES):
    for shape, switches in [(shapes[0], each) for each in all_switches] + [
        (shape, SWITCHES[-1]) for shape in shapes[1:]
    ]:
        drawn = draw(shape, torch.float32, *switches)
        assert_near(run(forward, backward, drawn), expect(drawn), 1e-5)
    # bf16 is rounded (or cut, by the interpreter) once, at the end. At a ReLU's kink that may fall either way.
    for shape in shapes:
        drawn = draw(shape, torch.bfloat16, False, True, True, True)
        assert_near(run(forward, backward, drawn), expect(drawn), 2**-7)
    # E[x^2] - E[x]^2 would have no digit left.
    drawn = draw((2, 8, 6, 6, 4), torch.float32, True, False, False, False, far=3000.0)
    assert_near(run(forward, backward, drawn), expect(drawn), 2e-3)


def test_plain_torch():
    check(norm_ops.group_norm_act, norm_ops.group_norm_act_backward)


def test_what_a_compiler_is_told_is_what_comes():
    drawn = draw((2, 8, 5, 3, 2), torch.bfloat16, True, True, True, True)
    args = [drawn[n] for n in ("x", "shift", "weight", "bias", "residual", "groups")] + [1e-5, True]
    torch.library.opcheck(norm_ops.group_norm_act, args, test_utils=("test_schema", "test_faketensor"))
    y, mean, rstd = norm_ops.group_norm_act(*args)
    args = [drawn[n] for n in ("dy", "dy2", "x", "shift")] + [y, drawn["weight"], drawn["bias"], mean, rstd, True, True]
    torch.library.opcheck(norm_ops.group_norm_act_backward, args, test_utils=("test_schema", "test_faketensor"))


def check_kernels():
    """In a process of its own: Triton asks for its interpreter when it is imported."""
    from sparsona.gpu import norm_kernels

    check(norm_ops.forward_by_triton, norm_ops.backward_by_triton, all_switches=SWITCHES[::3])  # it is slow
    # Smaller tiles: several a sample, the last of them cut short.
    norm_kernels.FORWARD_TILE = norm_kernels.BACKWARD_TILE = 64
    check(norm_ops.forward_by_triton, norm_ops.backward_by_triton, [(1, 12, 7, 5, 3), (1, 20, 5, 5, 2)], [])


@needs_triton
def test_kernels():
    check_in_interpreter("test_norm_ops")


@pytest.mark.gpu
@needs_gpu
def test_kernels_on_a_gpu():
    check(on_gpu(norm_ops.group_norm_act), on_gpu(norm_ops.group_norm_act_backward), [*SHAPES, (3, 64, 20, 20, 1)])
