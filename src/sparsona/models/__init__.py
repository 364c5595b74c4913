"""Networks by name: described and built. Importing this, listing networks and outlining them import no torch.

A network is named alone or with options: `resnet18-emnist`, `transformer:adapters=16,dropout=0.3`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from math import prod
from typing import Any

from sparsona.core.errors import SparsonaError
from sparsona.core.outline import Outline
from sparsona.core.spec import read
from sparsona.models.card import ModelCard
from sparsona.models.catalog import MODELS, TooSmallError
from sparsona.models.options import Value, read_options


def read_spec(spec: str) -> tuple[ModelCard, dict[str, Value]]:
    """The row that a spec names, and its options in full."""
    found = read("model", spec, MODELS)
    return MODELS[found.name], read_options(found, MODELS[found.name].options)


def outline(spec: str, input_shape: tuple[int, ...], num_classes: int) -> Outline:
    """The parameters of the named network for this input and number of classes, without building it."""
    card, options = read_spec(spec)
    _check_kind(card, input_shape, num_classes)

    def draw(shape: tuple[int, ...]) -> Outline:
        return card.draw(shape, num_classes, **options)

    try:
        return draw(tuple(input_shape))
    except TooSmallError:
        smallest = _smallest_side(draw, input_shape)
        if len(input_shape) == 2:
            raise SparsonaError(
                f"{card.name} cannot take signals of length {input_shape[1]}",
                expected=f"a length of at least {smallest}",
                hint="use mlp for short vectors",
            ) from None
        raise SparsonaError(
            f"{card.name} cannot take {input_shape[1]}x{input_shape[2]} images",
            expected=f"at least {smallest}x{smallest} pixels",
            hint="use digits-cnn for images of 4x4 and more" if card.name != "digits-cnn" else "enlarge the images",
        ) from None


def suggest(
    input_shape: tuple[int, ...], num_outputs: int, targets: str = "classes", tokens: bool = False
) -> str | None:
    """The network for data that nobody chose one for, by the shape of an example alone.

    Args:
        input_shape: of one example as a model sees it.
        num_outputs: the number of classes, or of numbers that are predicted.
        targets: "classes", "tokens" or "numbers".
        tokens: inputs are tokens.

    Returns:
        A spec for `builder`; None: none of the catalog fits.

    Example:
        >>> suggest((9, 128), 6), suggest((561,), 6), suggest((3, 32, 32), 10)
        ('signal-cnn', 'mlp:hidden=256', 'cnn28')
    """
    if tokens or targets == "tokens":
        return "transformer" if tokens and targets == "tokens" else None
    if len(input_shape) == 2 and input_shape[1] >= 8:
        return "signal-cnn"
    if len(input_shape) == 3 and (side := min(input_shape[1:])) >= 4:
        return "digits-cnn" if side < 16 else "cnn28" if side < 64 else "resnet18:stem=7x7"
    if not input_shape:
        return None
    width = 1 << ((prod(input_shape) + num_outputs).bit_length() - 1)  # the largest power of two that is not more
    return f"mlp:hidden={min(max(width, 32), 256)}"


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
    outline(spec, input_shape, num_classes)  # raises an error before anything is built
    card, options = read_spec(spec)
    module, _, function = card.build.partition(":")
    build = getattr(import_module(f"sparsona.models.{module}"), function)
    return partial(build, tuple(input_shape), num_classes, **card.architecture, **options)


_TAKES = {
    1: ("sequences of tokens", "examples of shape (length,)"),
    2: ("signals", "examples of shape (channels, length)"),
    3: ("images", "examples of shape (channels, height, width)"),
}


def _check_kind(card: ModelCard, input_shape: tuple[int, ...], num_classes: int) -> None:
    if len(input_shape) != len(card.input_shape) and not card.takes_any_shape:
        takes, expected = _TAKES[len(card.input_shape)]
        raise SparsonaError(
            f"model '{card.name}' takes {takes}, but the examples have shape {tuple(input_shape)}",
            expected=expected,
            hint="reshape the data, or pass a torch.nn.Module of your own",
        )
    if min(input_shape[0], num_classes) < 1:  # the outline checks height and width
        raise SparsonaError(
            f"model '{card.name}' cannot take examples of shape {tuple(input_shape)} in {num_classes} classes",
            expected="whole numbers from 1 on",
        )


def _smallest_side(draw: Callable[[tuple[int, ...]], Outline], input_shape: tuple[int, ...]) -> int:
    side = 1
    while True:
        try:
            draw((input_shape[0], *[side] * (len(input_shape) - 1)))
        except TooSmallError:
            side += 1
        else:
            return side
