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
from sparsona.core.reading import expand

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")  # of BatchNorm; GroupNorm needs none
MAX_NAMED = 6  # names in an error


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
        named = wrong[:MAX_NAMED] + ([f"and {len(wrong) - MAX_NAMED} more"] if len(wrong) > MAX_NAMED else [])
        raise SparsonaError(
            f"the weights in '{path}' do not fit the network: {'; '.join(named)}",
            expected="the state_dict of torchvision's resnet18, with the network's stem and number of channels",
            hint="stem=7x7 and three channels fit ImageNet weights",
        )
    with torch.no_grad():
        for name, value in wanted.items():
            value.copy_(found[name])


def _read(given: str) -> Mapping[str, Tensor]:
    path = expand(given)
    if not path.is_file():
        raise SparsonaError(
            f"there is no file '{path}'", expected="weights, .pth or .safetensors", hint="check weights="
        )
    try:
        if path.suffix == ".safetensors":
            state: Any = safetensors.torch.load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:  # torch's own words run to a page, and advise to run the file's code
        raise _unreadable(path, "it is damaged, or holds more than tensors; nothing in it was run") from None
    except Exception as error:  # whatever a damaged file makes of the readers
        raise _unreadable(path, str(error).partition("\n")[0][:200]) from None
    if not isinstance(state, Mapping) or not all(
        isinstance(k, str) and isinstance(v, Tensor) for k, v in state.items()
    ):
        raise SparsonaError(
            f"'{path}' holds something else than weights",
            expected="a state_dict: names and tensors",
            hint="torch.save(model.state_dict(), path)",
        )
    # Statistics are dropped, whatever they are.
    odd = [n for n, value in state.items() if n.rpartition(".")[2] not in STATISTICS and not _is_plain(value)]
    if odd:
        raise SparsonaError(
            f"weights in '{path}' that are no plain finite numbers: {', '.join(odd[:MAX_NAMED])}",
            expected="dense floating-point tensors without NaN or infinity",
            hint="convert them before they are saved: value.dequantize(), value.to_dense(), value.float()",
        )
    return state


def _unreadable(path: Path, why: str) -> SparsonaError:
    return SparsonaError(
        f"the weights in '{path}' cannot be read: {why}",
        expected="a state_dict as torch.save or safetensors write it",
        hint="save it again: torch.save(model.state_dict(), path)",
    )


def _is_plain(value: Tensor) -> bool:
    is_dense = value.layout is torch.strided and not value.is_quantized
    return is_dense and value.is_floating_point() and bool(value.isfinite().all())


def _shape(value: Tensor) -> str:
    return "x".join(map(str, value.shape)) or "a number"
