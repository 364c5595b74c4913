"""ERK and the papers' cost tables: a case derived by hand, and the printed figures recomputed from layouts alone."""

from __future__ import annotations

from fractions import Fraction
from math import floor, prod

import pytest

from sparsona.core.layout import Layout, Slot
from sparsona.sparsity.erk import erk_densities, kept_counts, uniform_densities


def test_hand_derived() -> None:
    """Four tensors, d = 0.5, derived by hand.

    weight (6, 4):     N = 24, raw = 10/24, raw*N = 10
    bias   (6,):       N = 6,  raw = 1,     raw*N = 6
    kernel (2,6,3,3):  N = 108, raw = 14/108, raw*N = 14
    head   (2, 2):     N = 4,  raw = 1,     raw*N = 4
    142 entries, so 71 are to be kept.

    Loop 1: eps = 71 / (10 + 6 + 14 + 4) = 71/34 > 1 at raw 1: bias and head, which attain it together, become dense.
    Loop 2: 71 - 6 - 4 = 61 are left; eps = 61 / 24; eps * 10/24 = 610/576 > 1: weight becomes dense.
    Loop 3: 61 - 24 = 37 are left; eps = 37/14; eps * 14/108 = 37/108 < 1: stop.
    Kept: 24, 6, 37, 4 = 71.
    """
    layout = Layout((Slot("weight", (6, 4)), Slot("bias", (6,)), Slot("kernel", (2, 6, 3, 3)), Slot("head", (2, 2))))
    densities = erk_densities(layout, 0.5)
    assert densities == pytest.approx((1.0, 1.0, 37 / 108, 1.0), rel=1e-15)
    assert kept_counts(layout, densities) == (24, 6, 37, 4)


def conv(name: str, outs: int, ins: int, kernel: int, side: int, bias: bool) -> list[Slot]:
    """A convolution whose output is `side` x `side`; its bias is charged in full."""
    weight = Slot(f"{name}.weight", (outs, ins, kernel, kernel), 2 * side * side)
    return [weight] + ([Slot(f"{name}.bias", (outs,), side * side, bias_counts_dense=True)] if bias else [])


def linear(name: str, outs: int, ins: int) -> list[Slot]:
    return [Slot(f"{name}.weight", (outs, ins), 2), Slot(f"{name}.bias", (outs,), 1)]


def norm(name: str, width: int) -> list[Slot]:
    return [Slot(f"{name}.weight", (width,)), Slot(f"{name}.bias", (width,))]


def lenet() -> Layout:
    slots = conv("c1", 20, 1, 5, 24, True) + conv("c2", 50, 20, 5, 8, True)
    return Layout(tuple(slots + linear("fc1", 500, 800) + linear("fc2", 26, 500)))


def vgg11() -> Layout:
    slots: list[Slot] = []
    ins = 3
    for place, (outs, side) in enumerate(
        [(64, 32), (128, 16), (256, 8), (256, 8), (512, 4), (512, 4), (512, 2), (512, 2)], start=1
    ):
        slots += conv(f"c{place}", outs, ins, 3, side, True) + norm(f"n{place}", outs)
        ins = outs
    return Layout(tuple(slots + linear("head", 10, 512)))


def resnet18(num_classes: int) -> Layout:
    slots = conv("stem", 64, 3, 3, 32, False) + norm("stem.norm", 64)
    ins = 64
    for layer, (outs, side) in enumerate([(64, 32), (128, 16), (256, 8), (512, 4)], start=1):
        for block in range(2):
            name = f"layer{layer}.{block}"
            slots += conv(f"{name}.conv1", outs, ins, 3, side, False) + norm(f"{name}.norm1", outs)
            slots += conv(f"{name}.conv2", outs, outs, 3, side, False) + norm(f"{name}.norm2", outs)
            if ins != outs:
                slots += conv(f"{name}.shortcut", outs, ins, 1, side, False) + norm(f"{name}.shortcut.norm", outs)
            ins = outs
    return Layout(tuple(slots + linear("head", num_classes, 512)))


LENET, VGG11, RESNET18 = lenet(), vgg11(), resnet18(100)


def test_sizes_and_dense_flops() -> None:
    assert LENET.size == 439_096
    assert VGG11.size == 9_231_114
    assert RESNET18.size == 11_220_132
    assert (resnet18(10).size, resnet18(200).size) == (11_173_962, 11_271_432)
    assert VGG11.forward_flops() == 305_690_634
    assert RESNET18.forward_flops() == 1_110_937_700


def weight_densities(layout: Layout) -> dict[str, float]:
    """Rounded densities of the weights at d = 0.5, once it is clear that all biases and norms are dense."""
    densities = dict(zip(layout.names, erk_densities(layout, 0.5), strict=True))
    assert all(densities[slot.name] == 1 for slot in layout.slots if len(slot.shape) == 1)
    return {
        slot.name.removesuffix(".weight"): round(densities[slot.name], 3)
        for slot in layout.slots
        if len(slot.shape) > 1
    }


def test_densities_of_lenet() -> None:
    assert weight_densities(LENET) == {"c1": 1, "c2": 0.476, "fc1": 0.484, "fc2": 1}


def test_densities_of_vgg11() -> None:
    assert list(weight_densities(VGG11).values()) == [1, 1, 1, 0.848, 0.634, 0.422, 0.422, 0.422, 1]


def test_densities_of_resnet18() -> None:
    sparse = {name: value for name, value in weight_densities(RESNET18).items() if value < 1}
    assert sparse == {
        "layer3.0.conv2": 0.716,
        "layer3.1.conv1": 0.716,
        "layer3.1.conv2": 0.716,
        "layer4.0.conv1": 0.535,
        "layer4.0.conv2": 0.356,
        "layer4.1.conv1": 0.356,
        "layer4.1.conv2": 0.356,
    }


def exact_counts(layout: Layout, density: Fraction) -> tuple[int, ...]:
    """Section 2 of the methods reference, word for word, in exact arithmetic."""
    sizes = [prod(slot.shape) for slot in layout.slots]
    raw = [Fraction(sum(slot.shape), size) for slot, size in zip(layout.slots, sizes, strict=True)]
    dense: set[int] = set()
    while True:
        rest = [place for place in range(len(sizes)) if place not in dense]
        rhs = sum(density * sizes[place] for place in rest) - sum((1 - density) * sizes[place] for place in dense)
        eps = rhs / sum(raw[place] * sizes[place] for place in rest)
        top = max(raw[place] for place in rest)
        if eps * top <= 1:
            break
        dense |= {place for place in rest if raw[place] == top}
    return tuple(size if place in dense else floor(eps * raw[place] * size) for place, size in enumerate(sizes))


@pytest.mark.parametrize("layout", [LENET, VGG11, RESNET18], ids=["lenet", "vgg11", "resnet18"])
@pytest.mark.parametrize("density", ["0.05", "0.1", "0.2", "0.3", "0.4", "0.5", "0.6", "0.7", "0.8", "0.9"])
def test_floats_count_as_exact_arithmetic_does(layout: Layout, density: str) -> None:
    assert kept_counts(layout, erk_densities(layout, float(density))) == exact_counts(layout, Fraction(density))


def cost(layout: Layout, kept: tuple[int, ...] | None, rounds: int, examples: int) -> tuple[float, float]:
    """Gigabytes and FLOPs of a FedSpa run as the paper counts them (section 1 of the methods reference).

    Ten clients a round, four bytes per kept entry in either direction; five epochs at three forward passes per example,
    and if anything is sparse one dense batch of 128 to look at gradients.
    """
    turns = 10 * rounds
    flops = 5 * examples * 3 * layout.forward_flops(kept)
    if kept is not None:
        flops += 128 * 3 * layout.forward_flops()
    return 2 * 4 * turns * sum(layout.sizes if kept is None else kept) / 1e9, float(turns * flops)


def erk(layout: Layout, density: float) -> tuple[int, ...]:
    return kept_counts(layout, erk_densities(layout, density))


def check(layout: Layout, density: float, run: tuple[int, int], gigabytes: str, flops: str) -> None:
    """The cost of a run, compared to every digit of the two figures."""
    kept = None if density == 1 else erk(layout, density)
    actual = cost(layout, kept, *run)
    assert (f"{actual[0]:.{len(gigabytes.partition('.')[2])}f}", f"{actual[1]:.{flops.index('e') - 2}e}") == (
        gigabytes,
        flops,
    )


CIFAR, EMNIST = (1000, 500), (400, 1248)  # rounds, examples of a client


def test_dense_runs_cost_what_the_paper_prints() -> None:
    check(VGG11, 1, CIFAR, "738.489", "2.2927e+16")
    check(RESNET18, 1, CIFAR, "897.611", "8.332e+16")
    check(LENET, 1, EMNIST, "14.05", "3.457e+14")


def test_half_density_costs_what_the_paper_prints() -> None:
    check(VGG11, 0.5, CIFAR, "369.24", "1.7291e+16")
    check(RESNET18, 0.5, CIFAR, "448.80", "7.0503e+16")
    check(LENET, 0.5, EMNIST, "7.03", "1.96e+14")


@pytest.mark.parametrize(
    ("sparsity", "gigabytes", "flops"),
    [
        (0.2, "718.09", "8.22e+16"),
        (0.4, "538.57", "7.55e+16"),
        (0.6, "359.04", "6.52e+16"),
        (0.8, "179.52", "4.61e+16"),
    ],
)
def test_the_sparsity_table(sparsity: float, gigabytes: str, flops: str) -> None:
    """FedSpa's CIFAR100 ablation. `1 - sparsity` is 0.19999999999999996 for 0.8: the counts must not mind."""
    check(RESNET18, 1 - sparsity, CIFAR, gigabytes, flops)
    assert erk(RESNET18, 1 - sparsity) == erk(RESNET18, round(1 - sparsity, 1))


def test_uniform_half_density_costs_what_the_paper_prints() -> None:
    kept = kept_counts(RESNET18, uniform_densities(RESNET18, 0.5))
    assert f"{cost(RESNET18, kept, *CIFAR)[1]:.3e}" == "4.593e+16"
