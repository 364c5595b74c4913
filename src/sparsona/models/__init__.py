"""Networks by name. Rows are plain data: listing them and outlining them import no torch.

A network is asked for by its name, or by name and options: `resnet18-emnist`, `transformer:adapters=16,dropout=0.3`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from typing import Any

from sparsona.core.errors import SparsonaError
from sparsona.core.outline import Outline
from sparsona.core.spec import read
from sparsona.models import outlines
from sparsona.models.options import Option, Value, read_options


@dataclass(frozen=True)
class ModelCard:
    """A row of `sparsona models`."""

    name: str
    title: str
    summary: str
    input: str
    num_parameters: int  # for the standard input
    module: str  # the file in this folder
    builder: str  # the function in it; its twin in outlines.py has the same name
    input_shape: tuple[int, ...]  # the standard input: what the papers gave it
    num_classes: int
    options: Mapping[str, Option] = field(default_factory=dict)


_CNN_ADAPTERS = {
    "adapters": Option(False, "a residual adapter, x + conv1x1(x), after each pooling", (False, True)),
}
_SMALL_CNN = {
    **_CNN_ADAPTERS,
    "split": Option(False, "two first layers, for upper and lower rows; `--personal split` keeps one", (False, True)),
}
_RESNET = {
    "groups": Option(32, "groups of each GroupNorm: 32, or by width 64, 128, 256, 512 -> 8, 8, 16, 32", (32, "width")),
    "stem": Option("3x3", "first convolution: 3x3 with stride 1, or 7x7 with stride 2 and pooling", ("3x3", "7x7")),
    "adapters": Option(False, "a residual adapter after each 3x3 convolution of the blocks", (False, True)),
    "adapter_form": Option("paper", "paper: x + a(x); authors: 2x + a(x), as their code has it", ("paper", "authors")),
    "dropout": Option(0.0, "rate, inside the adapters, or before the last layer where there are none"),
    "weights": Option("", "a file of ImageNet weights with torchvision's names, .pth or .safetensors"),
}
_BY_WIDTH = {**_RESNET, "groups": replace(_RESNET["groups"], default="width")}
_TRANSFORMER = {
    "adapters": Option(0, "width of the adapters in each block, 0 for none; the paper has 16 and 64"),
    "adapter_form": Option(
        "paper",
        "where the second adapter sits. paper: on the feed-forward output; authors: on the skip branch",
        ("paper", "authors"),
    ),
    "dropout": Option(0.0, "rate, inside the adapters, or in the residual branches where there are none"),
}

MODELS = {
    card.name: card
    for card in (
        ModelCard(
            "digits-cnn",
            "small CNN",
            "two 3x3 convolutions of 16 and 32 channels, a hidden layer of 64; for images of 8x8 and a little more",
            "1x8x8, 10 classes",
            13_706,
            "cnn",
            "digits_cnn",
            (1, 8, 8),
            10,
            _SMALL_CNN,
        ),
        ModelCard(
            "mlp",
            "one hidden layer",
            "a hidden layer of 64, or none (hidden=0); for plain vectors, and for numbers as well as classes",
            "64 numbers, 10 classes",
            4_810,
            "mlp",
            "mlp",
            (64,),
            10,
            {"hidden": Option(64, "width of the hidden layer, 0 for a linear model")},
        ),
        ModelCard(
            "cnn28",
            "small CNN for 28x28",
            "two 5x5 convolutions of 16 and 32 channels, a hidden layer of 64; a quick start for MNIST and its kin",
            "1x28x28, 10 classes",
            46_730,
            "cnn",
            "cnn28",
            (1, 28, 28),
            10,
            _SMALL_CNN,
        ),
        ModelCard(
            "lenet5",
            "LeNet5 (Caffe)",
            "two 5x5 convolutions of 20 and 50 channels, a hidden layer of 500; FedSpa's network for EMNIST letters",
            "1x28x28, 26 classes",
            439_096,
            "cnn",
            "lenet5",
            (1, 28, 28),
            26,
        ),
        ModelCard(
            "vgg11",
            "VGG11-GN",
            "eight 3x3 convolutions with GroupNorm, one linear layer; FedSpa's network for CIFAR-10",
            "3x32x32, 10 classes",
            9_231_114,
            "vgg",
            "vgg11",
            (3, 32, 32),
            10,
        ),
        ModelCard(
            "resnet18",
            "ResNet18-GN",
            "GroupNorm of 32 groups, 3x3 stem; FedSpa's network for CIFAR-100, DisPFL's for CIFAR and Tiny-ImageNet",
            "3x32x32, 100 classes",
            11_220_132,
            "resnet",
            "resnet18",
            (3, 32, 32),
            100,
            _RESNET,
        ),
        ModelCard(
            "resnet18-emnist",
            "ResNet18-GN for EMNIST",
            "groups by width, 3x3 stem on one channel; the partial-personalisation paper's network for EMNIST",
            "1x28x28, 62 classes",
            11_199_486,
            "resnet",
            "resnet18",
            (1, 28, 28),
            62,
            _BY_WIDTH,
        ),
        ModelCard(
            "resnet18-gldv2",
            "ResNet18-GN for GLDv2",
            "groups by width, 7x7 stem and pooling; the partial-personalisation paper's network for landmarks",
            "3x224x224, 2,028 classes",
            12_216_876,
            "resnet",
            "resnet18",
            (3, 224, 224),
            2028,
            {**_BY_WIDTH, "stem": replace(_RESNET["stem"], default="7x7")},
        ),
        ModelCard(
            "pfedgate-emnist",
            "pFedGate's CNN for EMNIST",
            "two 5x5 convolutions of 32 and 64 channels, a hidden layer of 2,048; 2,171,786 parameters for 10 classes",
            "1x28x28, 62 classes",
            2_278_334,
            "cnn",
            "pfedgate_one_hidden",
            (1, 28, 28),
            62,
        ),
        ModelCard(
            "pfedgate-cifar10",
            "pFedGate's CNN for CIFAR-10",
            "two 5x5 convolutions of 32 and 64 channels, hidden layers of 120 and 84",
            "3x32x32, 10 classes",
            256_830,
            "cnn",
            "pfedgate_two_hidden",
            (3, 32, 32),
            10,
            _CNN_ADAPTERS,
        ),
        ModelCard(
            "pfedgate-cifar100",
            "pFedGate's CNN for CIFAR-100",
            "two 5x5 convolutions of 32 and 64 channels, a hidden layer of 2,048",
            "3x32x32, 100 classes",
            3_537_444,
            "cnn",
            "pfedgate_one_hidden",
            (3, 32, 32),
            100,
        ),
        ModelCard(
            "transformer",
            "transformer, 4 blocks",
            "next token; 4 heads of 64, tied embedding; the partial-personalisation paper's network for StackOverflow",
            "20 tokens, vocabulary of 10,004",
            5_731_092,
            "transformer",
            "transformer",
            (20,),
            10_004,
            _TRANSFORMER,
        ),
    )
}


def read_spec(spec: str) -> tuple[ModelCard, dict[str, Value]]:
    """The row that a spec names, and its options in full."""
    found = read("model", spec, MODELS)
    return MODELS[found.name], read_options(found, MODELS[found.name].options)


def outline(spec: str, input_shape: tuple[int, ...], num_classes: int) -> Outline:
    """The parameters of the named network for this input and number of classes, without building it."""
    card, options = read_spec(spec)
    _check_kind(card, input_shape, num_classes)
    draw = partial(getattr(outlines, card.builder), num_classes=num_classes, **options)
    try:
        return draw(tuple(input_shape))
    except outlines.TooSmallError:
        smallest = _smallest_side(draw, input_shape[0])
        raise SparsonaError(
            f"{card.name} cannot take {input_shape[1]}x{input_shape[2]} images",
            expected=f"at least {smallest}x{smallest} pixels",
            mend="use digits-cnn for images of 4x4 and more" if card.name != "digits-cnn" else "enlarge the images",
        ) from None


def describe(spec: str, shape: str | None = None, classes: int | None = None) -> dict[str, Any]:
    """A network in words and numbers: parameters in all and by role, and its options as they are set.

    `shape` is written like 3x32x32; left out, it and `classes` are what the papers gave the network.
    """
    card, values = read_spec(spec)
    if shape is not None and not all(part.isdecimal() and int(part) for part in shape.split("x")):
        raise SparsonaError(f"an input of '{shape}'", expected="a shape like 3x32x32, or a length for text")
    if classes is not None and classes < 1:
        raise SparsonaError(f"{classes} classes", expected="1 or more")
    input_shape = card.input_shape if shape is None else tuple(map(int, shape.split("x")))
    drawn = outline(spec, input_shape, classes or card.num_classes)
    names = {role: getattr(drawn.roles, role) for role in ("input", "output", "norm", "adapter", "split")}
    return {
        "name": spec,
        "title": card.title,
        "what": card.summary,
        "for": f"{'x'.join(map(str, input_shape))}, {drawn.num_classes:,} classes",
        "parameters": drawn.layout.size,
        "forward_flops": drawn.layout.forward_flops(),
        "roles": {
            role: {"parameters": drawn.layout.select(of).size, "names": ", ".join(of) or "none"}
            for role, of in names.items()
        },
        "options": {
            key: {"value": values[key], "what": option.summary, "choices": list(option.choices)}
            for key, option in card.options.items()
        },
    }


def builder(spec: str, input_shape: tuple[int, ...], num_classes: int) -> Callable[[], Any]:
    """A function that builds the named network for this input and number of classes."""
    outline(spec, input_shape, num_classes)  # complains before anything is built
    card, options = read_spec(spec)
    build = getattr(import_module(f"sparsona.models.{card.module}"), card.builder)
    return partial(build, tuple(input_shape), num_classes, **options)


def _check_kind(card: ModelCard, input_shape: tuple[int, ...], num_classes: int) -> None:
    if len(input_shape) != len(card.input_shape) and card.name != "mlp":  # which takes all shapes
        takes, expected = (
            ("images", "examples of shape (channels, height, width)")
            if len(card.input_shape) == 3
            else ("sequences of tokens", "examples of shape (length,)")
        )
        raise SparsonaError(
            f"model '{card.name}' takes {takes}, but the examples have shape {tuple(input_shape)}",
            expected=expected,
            mend="reshape the data, or pass a torch.nn.Module of your own",
        )
    if min(input_shape[0], num_classes) < 1:  # height and width are the outline's matter
        raise SparsonaError(
            f"model '{card.name}' cannot take examples of shape {tuple(input_shape)} in {num_classes} classes",
            expected="whole numbers from 1 on",
        )


def _smallest_side(draw: Callable[[tuple[int, ...]], Outline], channels: int) -> int:
    side = 1
    while True:
        try:
            draw((channels, side, side))
        except outlines.TooSmallError:
            side += 1
        else:
            return side
