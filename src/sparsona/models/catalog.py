"""The catalog of networks: a row for each, and beside it the outline of its parameters. Free of torch.

An outline says what the parameters will be without building the module: names, shapes, order, FLOPs, roles. Tests
compare it with the module. To add a network, write its module in a file of this folder, and its outline and row here.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from sparsona.core.layout import Layout, Slot
from sparsona.core.outline import Outline, Roles
from sparsona.models.card import ModelCard
from sparsona.models.options import Option

VGG_WIDTHS = ((64,), (128,), (256, 256), (512, 512), (512, 512))  # a pooling layer after each group
RESNET_WIDTHS = (64, 128, 256, 512)  # of the four stages
GROUPS_BY_WIDTH = {64: 8, 128: 8, 256: 16, 512: 32}  # of the partial-personalisation paper's code
TRANSFORMER = {"width": 256, "hidden": 1024, "num_blocks": 4}


NORM_NAMES = ("none", "group", "batch")


class TooSmallError(Exception):
    """Nothing is left of an image after this many layers."""


def outline_conv_net(
    input_shape: tuple[int, ...],
    num_classes: int,
    channels: tuple[int, ...],
    hidden: tuple[int, ...],
    kernel: int = 5,
    padding: int = 0,
    split: bool = False,
    adapters: bool = False,
    norm: str = "none",
) -> Outline:
    inputs, side = input_shape[0], _side(input_shape)
    slots: list[Slot] = []
    place = 0  # in the nn.Sequential
    for outputs in channels:
        if split and not slots:
            upper, lower = (_shrink((rows, side[1]), kernel, padding=padding) for rows in split_rows(side[0]))
            slots += _conv("0.upper", inputs, outputs, kernel, upper, bias=True)
            slots += _conv("0.lower", inputs, outputs, kernel, lower, bias=True)
            side = (upper[0] + lower[0], upper[1])
        else:
            side = _shrink(side, kernel, padding=padding)
            slots += _conv(f"{place}", inputs, outputs, kernel, side, bias=True)
        if norm != "none":
            place += 1
            slots += _norm(f"{place}", outputs)
        side = _shrink(side, 2, stride=2)
        if adapters:
            slots += _conv(f"{place + 1}.adapter", outputs, outputs, 1, side)
        inputs, place = outputs, place + 3
    inputs, place = inputs * side[0] * side[1], place + 1
    for outputs in (*hidden, num_classes):
        slots += _linear(f"{place}", inputs, outputs)
        inputs, place = outputs, place + 2
    roles = cnn_roles(_names(slots), len(channels), norm)
    is_batch = norm == "batch"
    statistics = [_statistics(f"{1 + 4 * number}", width) for number, width in enumerate(channels) if is_batch]
    buffers = Layout(tuple(slot for found in statistics for slot in found))
    groups = {f"{1 + 4 * number}.weight": width // 4 for number, width in enumerate(channels) if norm == "group"}
    layout = Layout(tuple(slots))
    return Outline(layout, input_shape, num_classes, roles, buffers, mixes_examples=is_batch, norm_groups=groups)


def outline_signal_cnn(
    input_shape: tuple[int, ...], num_classes: int, channels: tuple[int, ...], kernel: int, hidden: int
) -> Outline:
    inputs, length = input_shape
    slots: list[Slot] = []
    for number, outputs in enumerate(channels):
        name = str(3 * number)  # convolution, pooling, ReLU
        slots += [
            Slot(f"{name}.weight", (outputs, inputs, kernel), 2 * length),
            Slot(f"{name}.bias", (outputs,), length, True),
        ]
        inputs, length = outputs, _shrink((length, length), 2, stride=2)[0]
    place = 3 * len(channels) + 1
    slots += _linear(f"{place}", inputs * length, hidden) + _linear(f"{place + 2}", hidden, num_classes)
    return Outline(Layout(tuple(slots)), input_shape, num_classes, cnn_roles(_names(slots)))


def _statistics(name: str, width: int) -> tuple[Slot, ...]:
    """The buffers of a BatchNorm."""
    shapes = {"running_mean": (width,), "running_var": (width,), "num_batches_tracked": ()}
    return tuple(Slot(f"{name}.{part}", shape) for part, shape in shapes.items())


def split_rows(height: int) -> tuple[int, int]:
    """Rows of an image for each of two first layers side by side."""
    return height - height // 2, height // 2


def cnn_roles(names: tuple[str, ...], num_convolutions: int = 0, norm: str = "none") -> Roles:
    """First and last layer, norms and adapters. Of two first layers side by side, the lower one is personal: figure
    1c of the partial-personalisation paper."""
    places = {str(1 + 4 * number) for number in range(num_convolutions)}  # convolution, norm, pooling, ReLU
    return Roles(
        input=tuple(name for name in names if name.startswith("0.")),
        output=names[-2:],
        norm=tuple(name for name in names if norm != "none" and name.partition(".")[0] in places),
        adapter=tuple(name for name in names if ".adapter." in name),
        split=tuple(name for name in names if ".lower." in name),
    )


def outline_mlp(input_shape: tuple[int, ...], num_classes: int, hidden: int = 64) -> Outline:
    inputs = prod(input_shape)
    slots = _linear("1", inputs, hidden or num_classes)
    if hidden:
        slots += _linear("3", hidden, num_classes)
    roles = Roles(input=_names(slots[:2]), output=_names(slots[-2:]))
    return Outline(Layout(tuple(slots)), input_shape, num_classes, roles)


def outline_vgg11(input_shape: tuple[int, ...], num_classes: int) -> Outline:
    inputs, side = input_shape[0], _side(input_shape)
    slots: list[Slot] = []
    norms: list[Slot] = []
    place = 0
    for widths in VGG_WIDTHS:
        for outputs in widths:
            slots += _conv(f"{place}", inputs, outputs, 3, side, bias=True)
            norms += _norm(f"{place + 1}", outputs)
            slots += norms[-2:]
            inputs, place = outputs, place + 3
        side, place = _shrink(side, 2, stride=2), place + 1
    slots += _linear(f"{place + 2}", inputs, num_classes)
    roles = Roles(input=_names(slots[:2]), output=_names(slots[-2:]), norm=_names(norms))
    groups = {slot.name: 32 for slot in norms[::2]}
    return Outline(Layout(tuple(slots)), input_shape, num_classes, roles, norm_groups=groups)


def outline_resnet18(
    input_shape: tuple[int, ...],
    num_classes: int,
    groups: int | str = 32,
    stem: str = "3x3",
    adapters: bool = False,
    adapter_form: str = "paper",
    dropout: float = 0.0,
    weights: str = "",
    split: bool = False,
) -> Outline:
    side = _side(input_shape)
    kernel, stride = (7, 2) if stem == "7x7" else (3, 1)
    halves = {"conv1": side[0]}
    if split:
        halves = dict(zip(("conv1.upper", "conv1.lower"), split_rows(side[0]), strict=True))
    slots: list[Slot] = []
    height = 0
    for name, rows in halves.items():
        made = _shrink((rows, side[1]), kernel, stride, padding=kernel // 2)
        slots += _conv(name, input_shape[0], 64, kernel, made)
        height += made[0]
    side = (height, made[1])
    if stem == "7x7":
        side = _shrink(side, 3, stride=2, padding=1)
    slots += _norm("bn1", 64)
    inputs = 64
    for stage, outputs in enumerate(RESNET_WIDTHS, start=1):
        for block in range(2):
            name = f"layer{stage}.{block}"
            stride = 2 if stage > 1 and block == 0 else 1
            side = _shrink(side, 3, stride, padding=1)
            for part, width in ((1, inputs), (2, outputs)):
                slots += _conv(f"{name}.conv{part}", width, outputs, 3, side)
                if adapters:
                    slots += _norm(f"{name}.adapter{part}.norm", outputs)
                    slots += _conv(f"{name}.adapter{part}.conv", outputs, outputs, 1, side)
                slots += _norm(f"{name}.bn{part}", outputs)
            if stride > 1:
                slots += _conv(f"{name}.downsample.0", inputs, outputs, 1, side)
                slots += _norm(f"{name}.downsample.1", outputs)
            inputs = outputs
    slots += _linear("fc", inputs, num_classes)
    by_norm = {
        slot.name: GROUPS_BY_WIDTH[slot.size] if groups == "width" else int(groups)
        for slot in slots
        if len(slot.shape) == 1 and slot.name.endswith(".weight")  # norms, the only vectors of weights
    }
    roles, noise = resnet_roles(_names(slots)), dropout > 0
    return Outline(Layout(tuple(slots)), input_shape, num_classes, roles, draws_noise=noise, norm_groups=by_norm)


def resnet_roles(names: tuple[str, ...]) -> Roles:
    """As the partial-personalisation paper defines them: the stem's norm belongs to the input layer; `norm` is the
    stem's and each block's bn1 and bn2, which its adapter mode personalises, and not the shortcuts' norms; the norm
    inside an adapter is the adapter's."""
    return Roles(
        input=tuple(name for name in names if name.startswith(("conv1.", "bn1."))),
        output=tuple(name for name in names if name.startswith("fc.")),
        norm=tuple(name for name in names if name.startswith("bn1.") or ".bn" in name),
        adapter=tuple(name for name in names if ".adapter" in name),
        split=tuple(name for name in names if ".lower." in name),
    )


def outline_transformer(
    input_shape: tuple[int, ...],
    num_classes: int,
    adapters: int = 0,
    adapter_form: str = "paper",
    dropout: float = 0.0,
) -> Outline:
    (length,) = input_shape
    width, hidden, num_blocks = (TRANSFORMER[key] for key in ("width", "hidden", "num_blocks"))
    # The embedding is the weight of the output layer too, which is where it costs something.
    slots = [Slot("embedding.weight", (num_classes, width), 2 * length), Slot("positions.weight", (length, width))]
    for block in range(num_blocks):
        name = f"blocks.{block}"
        for part in ("query", "key", "value", "projection"):
            slots += _linear(f"{name}.{part}", width, width, length, bias=False)
        slots += _adapter(f"{name}.adapter1", width, adapters, length)
        slots += _norm(f"{name}.norm1", width)
        slots += _linear(f"{name}.widen", width, hidden, length)
        slots += _linear(f"{name}.narrow", hidden, width, length)
        slots += _adapter(f"{name}.adapter2", width, adapters, length)
        slots += _norm(f"{name}.norm2", width)
    slots.append(Slot("output.bias", (num_classes,), length))
    roles = transformer_roles(_names(slots), num_blocks)
    layout, groups = Layout(tuple(slots)), {name: 1 for name in roles.norm if name.endswith(".weight")}
    noise = dropout > 0
    return Outline(layout, input_shape, num_classes, roles, draws_noise=noise, takes_tokens=True, norm_groups=groups)


def transformer_roles(names: tuple[str, ...], num_blocks: int) -> Roles:
    """As the partial-personalisation paper defines them: input and output are the first and the last block (without
    their adapters), since the embedding is too large to be personal; `norm` is every LayerNorm."""
    adapter = tuple(name for name in names if ".adapter" in name)
    shared = tuple(name for name in names if ".adapter" not in name)
    return Roles(
        input=tuple(name for name in shared if name.startswith("blocks.0.")),
        output=tuple(name for name in shared if name.startswith(f"blocks.{num_blocks - 1}.")),
        norm=tuple(name for name in names if ".norm" in name),
        adapter=adapter,
    )


def _adapter(name: str, width: int, adapter_width: int, positions: int) -> list[Slot]:
    if not adapter_width:
        return []
    narrow = _linear(f"{name}.narrow", width, adapter_width, positions)
    return narrow + _linear(f"{name}.widen", adapter_width, width, positions)


def _side(input_shape: tuple[int, ...]) -> tuple[int, int]:
    _, height, width = input_shape
    return height, width


def _shrink(side: tuple[int, int], kernel: int, stride: int = 1, padding: int = 0) -> tuple[int, int]:
    """Height and width after a convolution or a pooling layer."""
    height, width = ((length + 2 * padding - kernel) // stride + 1 for length in side)
    if min(height, width) < 1:
        raise TooSmallError
    return height, width


def _conv(name: str, inputs: int, outputs: int, kernel: int, side: tuple[int, int], bias: bool = False) -> list[Slot]:
    positions = side[0] * side[1]
    slots = [Slot(f"{name}.weight", (outputs, inputs, kernel, kernel), 2 * positions)]
    return [*slots, Slot(f"{name}.bias", (outputs,), positions, True)] if bias else slots


def _linear(name: str, inputs: int, outputs: int, positions: int = 1, bias: bool = True) -> list[Slot]:
    slots = [Slot(f"{name}.weight", (outputs, inputs), 2 * positions)]
    return [*slots, Slot(f"{name}.bias", (outputs,), positions)] if bias else slots


def _norm(name: str, width: int) -> list[Slot]:
    return [Slot(f"{name}.weight", (width,)), Slot(f"{name}.bias", (width,))]


def _names(slots: list[Slot]) -> tuple[str, ...]:
    return tuple(slot.name for slot in slots)


_CNN_ADAPTERS = {
    "adapters": Option(False, "a residual adapter, x + conv1x1(x), after each pooling", (False, True)),
}
_SPLIT_INPUT = {
    "split": Option(False, "two first layers, for upper and lower rows; `--personal split` keeps one", (False, True)),
}
_SMALL_CNN = {
    **_CNN_ADAPTERS,
    "norm": Option("none", "after each convolution: a GroupNorm of four channels a group, or a BatchNorm", NORM_NAMES),
    **_SPLIT_INPUT,
}
_RESNET = {
    "groups": Option(32, "groups of each GroupNorm: 32, or by width 64, 128, 256, 512 -> 8, 8, 16, 32", (32, "width")),
    "stem": Option("3x3", "first convolution: 3x3 with stride 1, or 7x7 with stride 2 and pooling", ("3x3", "7x7")),
    "adapters": Option(False, "a residual adapter after each 3x3 convolution of the blocks", (False, True)),
    "adapter_form": Option("paper", "paper: x + a(x); authors: 2x + a(x), as their code has it", ("paper", "authors")),
    "dropout": Option(0.0, "rate, inside the adapters, or before the last layer where there are none"),
    "weights": Option("", "a file of ImageNet weights with torchvision's names, .pth or .safetensors"),
    **_SPLIT_INPUT,
}
_BY_WIDTH = {**_RESNET, "groups": replace(_RESNET["groups"], default="width")}
_TRANSFORMER = {
    "adapters": Option(0, "width of the adapters in each block, 0 for none; the paper has 16 and 64"),
    "adapter_form": Option(
        "paper",
        "where the second adapter is. paper: on the feed-forward output; authors: on the skip branch",
        ("paper", "authors"),
    ),
    "dropout": Option(0.0, "rate, inside the adapters, or in the residual branches where there are none"),
}

# The networks by name: `MODELS["lenet5"].num_parameters`.
MODELS = {
    card.name: card
    for card in (
        ModelCard(
            "digits-cnn",
            "small CNN",
            "two 3x3 convolutions of 16 and 32 channels, a hidden layer of 64; for images of 8x8 and a little more",
            "cnn:conv_net",
            outline_conv_net,
            (1, 8, 8),
            10,
            architecture={"channels": (16, 32), "hidden": (64,), "kernel": 3, "padding": 1},
            options=_SMALL_CNN,
        ),
        ModelCard(
            "mlp",
            "one hidden layer",
            "a hidden layer of 64, or none (hidden=0); for plain vectors, and for numbers as well as classes",
            "mlp:mlp",
            outline_mlp,
            (64,),
            10,
            options={"hidden": Option(64, "width of the hidden layer, 0 for a linear model")},
            takes_any_shape=True,
        ),
        ModelCard(
            "signal-cnn",
            "1-D CNN",
            "two convolutions over time of 32 and 64 channels, a hidden layer of 64; for signals (channels, length)",
            "cnn:signal_cnn",
            outline_signal_cnn,
            (9, 128),
            6,
            architecture={"channels": (32, 64), "kernel": 5, "hidden": 64},
        ),
        ModelCard(
            "cnn28",
            "small CNN for 28x28",
            "two 5x5 convolutions of 16 and 32 channels, a hidden layer of 64; a quick start for MNIST and its kin",
            "cnn:conv_net",
            outline_conv_net,
            (1, 28, 28),
            10,
            architecture={"channels": (16, 32), "hidden": (64,)},
            options=_SMALL_CNN,
        ),
        ModelCard(
            "lenet5",
            "LeNet5 (Caffe)",
            "two 5x5 convolutions of 20 and 50 channels, a hidden layer of 500; FedSpa's network for EMNIST letters",
            "cnn:conv_net",
            outline_conv_net,
            (1, 28, 28),
            26,
            architecture={"channels": (20, 50), "hidden": (500,)},
        ),
        ModelCard(
            "vgg11",
            "VGG11-GN",
            "eight 3x3 convolutions with GroupNorm, one linear layer; FedSpa's network for CIFAR-10",
            "vgg:vgg11",
            outline_vgg11,
            (3, 32, 32),
            10,
        ),
        ModelCard(
            "resnet18",
            "ResNet18-GN",
            "GroupNorm of 32 groups, 3x3 stem; FedSpa's network for CIFAR-100, DisPFL's for CIFAR and Tiny-ImageNet",
            "resnet:resnet18",
            outline_resnet18,
            (3, 32, 32),
            100,
            options=_RESNET,
        ),
        ModelCard(
            "resnet18-emnist",
            "ResNet18-GN for EMNIST",
            "groups by width, 3x3 stem on one channel; the partial-personalisation paper's network for EMNIST",
            "resnet:resnet18",
            outline_resnet18,
            (1, 28, 28),
            62,
            options=_BY_WIDTH,
        ),
        ModelCard(
            "resnet18-gldv2",
            "ResNet18-GN for GLDv2",
            "groups by width, 7x7 stem and pooling; the partial-personalisation paper's network for landmarks",
            "resnet:resnet18",
            outline_resnet18,
            (3, 224, 224),
            2028,
            options={**_BY_WIDTH, "stem": replace(_RESNET["stem"], default="7x7")},
        ),
        ModelCard(
            "pfedgate-emnist",
            "pFedGate's CNN for EMNIST",
            "two 5x5 convolutions of 32 and 64 channels, a hidden layer of 2,048; 2,171,786 parameters for 10 classes",
            "cnn:conv_net",
            outline_conv_net,
            (1, 28, 28),
            62,
            architecture={"channels": (32, 64), "hidden": (2048,)},
        ),
        ModelCard(
            "pfedgate-cifar10",
            "pFedGate's CNN for CIFAR-10",
            "two 5x5 convolutions of 32 and 64 channels, hidden layers of 120 and 84",
            "cnn:conv_net",
            outline_conv_net,
            (3, 32, 32),
            10,
            architecture={"channels": (32, 64), "hidden": (120, 84)},
            options=_CNN_ADAPTERS,
        ),
        ModelCard(
            "pfedgate-cifar100",
            "pFedGate's CNN for CIFAR-100",
            "two 5x5 convolutions of 32 and 64 channels, a hidden layer of 2,048",
            "cnn:conv_net",
            outline_conv_net,
            (3, 32, 32),
            100,
            architecture={"channels": (32, 64), "hidden": (2048,)},
        ),
        ModelCard(
            "transformer",
            "transformer, 4 blocks",
            "next token; 4 heads of 64, tied embedding; the partial-personalisation paper's network for StackOverflow",
            "transformer:transformer",
            outline_transformer,
            (20,),
            10_004,
            options=_TRANSFORMER,
        ),
    )
}
