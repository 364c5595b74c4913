"""Weights trained elsewhere: a local file with torchvision's names, BatchNorm turned into GroupNorm."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from sparsona.core.errors import SparsonaError

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")  # of BatchNorm; GroupNorm needs none


def load_weights(net: nn.Module, path: str) -> None:
    """Put the weights of the file into `net`.

    Scale and shift of each BatchNorm become those of the GroupNorm of that name and its running statistics are
    dropped. `fc` stays random where the file's has another shape; adapters, which no such file has, stay as they are.
    """
    found = {name: value for name, value in _read(path).items() if name.rpartition(".")[2] not in STATISTICS}
    wanted = {name: value for name, value in net.named_parameters() if ".adapter" not in name}
    head = {name for name in wanted if name.startswith("fc.")}
    if any(name not in found or found[name].shape != wanted[name].shape for name in head):
        wanted = {name: value for name, value in wanted.items() if name not in head}
        found = {name: value for name, value in found.items() if name not in head}
    wrong = [f"{name} is missing" for name in wanted if name not in found]
    wrong += [f"{name} is not known" for name in found if name not in wanted]
    wrong += [
        f"{name} is {_shape(found[name])}, not {_shape(value)}"
        for name, value in wanted.items()
        if name in found and found[name].shape != value.shape
    ]
    if wrong:
        raise SparsonaError(
            f"the weights in '{path}' do not fit the network: {'; '.join(wrong)}",
            expected="the state_dict of torchvision's resnet18, with the network's stem and number of channels",
            mend="stem=7x7 and three channels fit ImageNet weights",
        )
    with torch.no_grad():
        for name, value in wanted.items():
            value.copy_(found[name])


def _read(path: str) -> Mapping[str, Tensor]:
    if not Path(path).is_file():
        raise SparsonaError(
            f"there is no file '{path}'", expected="weights, .pth or .safetensors", mend="check weights="
        )
    try:
        if Path(path).suffix == ".safetensors":
            return safetensors.torch.load_file(path)
        state: Any = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError, safetensors.SafetensorError) as error:
        raise SparsonaError(
            f"the weights in '{path}' cannot be read: {error}",
            expected="a state_dict as torch.save or safetensors write it",
            mend="save it again: torch.save(model.state_dict(), path)",
        ) from None
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        raise SparsonaError(
            f"'{path}' holds something else than weights",
            expected="a state_dict: names and tensors",
            mend="torch.save(model.state_dict(), path)",
        )
    return state


def _shape(value: Tensor) -> str:
    return "x".join(map(str, value.shape)) or "a number"
