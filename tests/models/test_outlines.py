"""Outlines are drawn without torch and are what the built network turns out to be."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from sparsona import models
from sparsona.core.errors import SparsonaError
from sparsona.core.task import Task, _has_own_code

OTHER_SIZES = {  # of the input, and another number of classes
    "mlp": ((3, 5), 4),
    "digits-cnn": ((3, 5, 11), 3),
    "signal-cnn": ((3, 21), 5),
    "cnn28": ((2, 17, 30), 47),
    "lenet5": ((3, 32, 19), 10),
    "vgg11": ((1, 64, 33), 20),
    "resnet18": ((1, 9, 14), 10),
    "resnet18-emnist": ((3, 7, 8), 5),
    "resnet18-gldv2": ((1, 37, 50), 11),
    "pfedgate-emnist": ((3, 20, 24), 10),
    "pfedgate-cifar10": ((1, 16, 17), 4),
    "pfedgate-cifar100": ((1, 18, 28), 12),
    "transformer": ((80,), 70),
}
WITH_OPTIONS = [
    ("resnet18-emnist:adapters=true", (1, 28, 28), 62),
    ("resnet18:adapters=true,adapter_form=authors,stem=7x7,groups=width,dropout=0.3", (3, 21, 16), 4),
    ("mlp:hidden=0", (7,), 3),
    ("resnet18:dropout=0.5", (1, 4, 4), 3),
    ("digits-cnn:split=true", (2, 7, 8), 5),
    ("cnn28:split=true", (1, 28, 31), 10),
    ("cnn28:split=true,adapters=true", (1, 28, 28), 10),
    ("resnet18-emnist:split=true,adapters=true", (1, 28, 28), 62),
    ("resnet18:split=true,stem=7x7", (3, 21, 16), 4),
    ("cnn28:norm=group", (1, 28, 28), 10),
    ("digits-cnn:norm=batch,adapters=true", (2, 7, 8), 5),
    ("pfedgate-cifar10:adapters=true", (3, 32, 32), 10),
    ("transformer:adapters=16,dropout=0.1", (20,), 50),
    ("transformer:adapters=64,adapter_form=authors", (7,), 30),
]
CASES = [(row.name, row.input_shape, row.num_classes) for row in models.MODELS.values()]
CASES += [(name, *other) for name, other in OTHER_SIZES.items()] + WITH_OPTIONS


def task_of(spec: str, input_shape: tuple[int, ...], num_classes: int) -> Task:
    build = models.builder(spec, input_shape, num_classes)
    return Task(build, input_shape, num_classes, tokens=spec.startswith("transformer"))


def shapes_of(spec: str, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """The network without any memory for its weights, nor time to draw them."""
    with torch.device("meta"):
        return models.builder(spec, input_shape, num_classes)()


def test_every_row_is_tried_at_another_size():
    assert set(OTHER_SIZES) == set(models.MODELS)


@pytest.mark.parametrize(("spec", "input_shape", "num_classes"), CASES)
def test_outline_equals_the_built_network(spec, input_shape, num_classes):
    task, outline = task_of(spec, input_shape, num_classes), models.outline(spec, input_shape, num_classes)
    assert outline.layout.slots == task.layout.slots
    assert outline.roles == task.roles
    assert outline.draws_noise == task.draws_noise
    assert outline.mixes_examples == task.mixes_examples == ("norm=batch" in spec)
    assert outline.buffer_layout == task.buffer_layout
    assert outline.norm_groups == task.norm_groups
    assert (outline.input_shape, outline.num_classes) == (task.input_shape, task.num_classes)


@pytest.mark.parametrize(("spec", "input_shape", "num_classes"), CASES)
def test_no_network_is_tried_for_mixing_examples(spec, input_shape, num_classes):
    """Only networks of the user's are: these start as fast as they can."""
    assert not _has_own_code(shapes_of(spec, input_shape, num_classes))


@pytest.mark.parametrize(("spec", "input_shape", "num_classes"), CASES)
def test_dense_flops_are_those_torch_counts(spec, input_shape, num_classes):
    """torch counts products of matrices and convolutions without biases; products of two activations are not ours."""
    layout = models.outline(spec, input_shape, num_classes).layout
    kind = torch.int64 if spec.startswith("transformer") else torch.float32
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        shapes_of(spec, input_shape, num_classes)(torch.zeros((1, *input_shape), dtype=kind, device="meta"))
    counted = counter.get_flop_counts()["Global"]
    assert set(map(str, counted)) <= {"aten.convolution", "aten.addmm", "aten.mm", "aten.bmm"}
    attention = 2 * 2 * 256 * input_shape[0] ** 2 * 4 if spec.startswith("transformer") else 0
    assert sum(flops for op, flops in counted.items() if str(op) == "aten.bmm") == attention
    biases = sum(slot.flops_per_weight * slot.size for slot in layout.slots if slot.name.endswith("bias"))
    assert layout.forward_flops() - biases == sum(counted.values()) - attention


@pytest.mark.parametrize(
    ("spec", "flops"),
    [("vgg11", 305_690_634), ("resnet18", 1_110_937_700)],  # F of FedSpa's table 1
)
def test_dense_flops_of_the_papers(spec, flops):
    row = models.MODELS[spec]
    assert models.outline(spec, row.input_shape, row.num_classes).layout.forward_flops() == flops


@pytest.mark.parametrize(
    ("spec", "num_classes", "count"),
    [
        ("digits-cnn", 10, 13_706),
        ("cnn28", 10, 46_730),
        ("lenet5", 26, 439_096),
        ("vgg11", 10, 9_231_114),
        ("resnet18", 10, 11_173_962),
        ("resnet18", 100, 11_220_132),
        ("resnet18", 200, 11_271_432),
        ("resnet18-emnist", 62, 11_199_486),
        ("resnet18-emnist:adapters=true", 62, 11_199_486 + 1_400_320),
        ("resnet18-gldv2", 2028, 12_216_876),
        ("pfedgate-emnist", 10, 2_171_786),
        ("pfedgate-emnist", 62, 2_278_334),
        ("pfedgate-cifar10", 10, 256_830),
        ("pfedgate-cifar100", 100, 3_537_444),
        ("transformer", 10_004, 5_731_092),
        ("transformer:adapters=16", 10_004, 5_731_092 + 67_712),
    ],
)
def test_number_of_parameters(spec, num_classes, count):
    input_shape = (3, 64, 64) if num_classes == 200 else models.read_spec(spec)[0].input_shape
    assert models.outline(spec, input_shape, num_classes).layout.size == count
    assert sum(value.numel() for value in shapes_of(spec, input_shape, num_classes).parameters()) == count


@pytest.mark.parametrize("row", models.MODELS.values(), ids=lambda row: row.name)
def test_rows_say_what_is_so(row):
    assert models.outline(row.name, row.input_shape, row.num_classes).layout.size == row.num_parameters
    shape = "x".join(map(str, row.input_shape))
    assert row.input.startswith(shape)
    assert f"{row.num_classes:,}" in row.input


@pytest.mark.parametrize(
    ("spec", "counts"),
    [
        ("resnet18-emnist", {"input": 704, "output": 31_806, "norm": 7_808, "adapter": 0}),
        ("resnet18-gldv2", {"input": 9_536, "output": 1_040_364, "norm": 7_808, "adapter": 0}),
        ("resnet18-emnist:adapters=true", {"input": 704, "norm": 1_408_128 - 1_400_320, "adapter": 1_400_320}),
        ("resnet18-gldv2:adapters=true", {"output": 1_040_364, "norm": 7_808, "adapter": 1_400_320}),
        ("transformer", {"input": 788_736, "output": 788_736, "norm": 4_096, "adapter": 0}),
        ("transformer:adapters=16", {"input": 788_736, "norm": 71_808 - 67_712, "adapter": 67_712}),
        ("transformer:adapters=64", {"output": 788_736, "norm": 4_096, "adapter": 268_800 - 4_096}),
        ("vgg11", {"input": 1_792, "output": 5_130, "norm": 5_504, "adapter": 0}),
        ("lenet5", {"input": 520, "output": 13_026, "norm": 0}),
        ("digits-cnn:split=true", {"input": 320, "output": 650, "split": 160, "norm": 0}),
        ("pfedgate-cifar10:adapters=true", {"input": 2432, "output": 850, "adapter": 5120, "norm": 0}),
    ],
)
def test_counts_by_role(spec, counts):
    row, _ = models.read_spec(spec)
    outline = models.outline(spec, row.input_shape, row.num_classes)
    assert {role: outline.layout.select(getattr(outline.roles, role)).size for role in counts} == counts


def test_tied_weights_are_charged_where_they_are_listed():
    layout = task_of("transformer", (20,), 90).layout
    costs = {slot.name: slot.flops_per_weight for slot in layout.slots}
    assert "output.weight" not in costs
    assert costs["embedding.weight"] == 2 * 20
    assert costs["positions.weight"] == 0
    assert costs["output.bias"] == 20


def test_every_use_of_a_tied_weight_is_charged():
    def build() -> nn.Module:
        first, second = nn.Linear(4, 4), nn.Linear(4, 4)
        second.weight = first.weight
        return nn.Sequential(first, first, second)

    costs = {slot.name: slot.flops_per_weight for slot in Task(build, (4,), 4).layout.slots}
    assert costs == {"0.weight": 3 * 2, "0.bias": 2, "2.bias": 1}


def test_outlines_import_no_torch():
    code = """if True:
        import sys
        from sparsona import models
        for row in models.MODELS.values():
            models.outline(row.name, row.input_shape, row.num_classes)
        assert "torch" not in sys.modules and "pydantic" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


SMALLEST = {
    "digits-cnn": 4,
    "cnn28": 16,
    "lenet5": 16,
    "vgg11": 32,
    "resnet18": 1,
    "resnet18-emnist": 1,
    "resnet18-gldv2": 1,
    "pfedgate-emnist": 16,
    "pfedgate-cifar10": 16,
    "pfedgate-cifar100": 16,
}


@pytest.mark.parametrize("spec", SMALLEST)
@pytest.mark.parametrize("make", [models.outline, models.builder])
def test_too_small_images_are_refused_by_name(spec, make):
    side = SMALLEST[spec]
    with pytest.raises(SparsonaError) as caught:
        make(spec, (1, 200, side - 1), 10)
    assert spec in str(caught.value)
    assert f"at least {side}x{side} pixels" in str(caught.value)


@pytest.mark.parametrize("spec", SMALLEST)
def test_the_smallest_images_are_taken(spec):
    side = SMALLEST[spec]
    with torch.random.fork_rng():
        module = models.builder(spec, (1, side, side), 3)()
    assert module(torch.zeros(1, 1, side, side)).shape == (1, 3)


@pytest.mark.parametrize(
    ("spec", "input_shape", "num_classes", "words"),
    [
        ("lenet5", (6,), 3, "takes images, but the examples have shape (6,)"),
        ("resnet18", (3, 8), 3, "takes images"),
        ("transformer", (1, 28, 28), 3, "takes sequences of tokens"),
        ("transformer", (0,), 3, "cannot take examples of shape (0,)"),
        ("lenet5", (1, 28, 28), 0, "in 0 classes"),
    ],
)
def test_other_examples_are_refused(spec, input_shape, num_classes, words):
    with pytest.raises(SparsonaError) as caught:
        models.outline(spec, input_shape, num_classes)
    assert words in str(caught.value)
