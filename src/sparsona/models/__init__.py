"""Networks by name. Rows are plain data: listing them imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

from sparsona.core.errors import SparsonaError, unknown_name


@dataclass(frozen=True)
class ModelCard:
    """A row of `sparsona models`."""

    name: str
    title: str
    summary: str
    input: str
    num_parameters: int  # for the input and the number of classes named in `input`
    module: str
    builder: str


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
        ),
        ModelCard(
            "lenet5",
            "LeNet5 (Caffe)",
            "two 5x5 convolutions of 20 and 50 channels, a hidden layer of 500; FedSpa's network for EMNIST letters",
            "1x28x28, 26 classes",
            439_096,
            "lenet",
            "lenet5",
        ),
    )
}


def builder(name: str, input_shape: tuple[int, ...], num_classes: int) -> Callable[[], Any]:
    """A function that builds the named network for this input and number of classes."""
    if name not in MODELS:
        raise unknown_name("model", name, MODELS)
    card = MODELS[name]
    build = getattr(import_module(f"sparsona.models.{card.module}"), card.builder)
    if len(input_shape) != 3:
        raise SparsonaError(
            f"model '{name}' takes images, but the examples have shape {input_shape}",
            expected="examples of shape (channels, height, width)",
            mend="reshape the data, or pass a torch.nn.Module of your own",
        )
    return partial(build, input_shape, num_classes)
