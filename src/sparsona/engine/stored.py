"""States, servers and models as bytes, to be stored and read back bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from sparsona.core.errors import SparsonaError
from sparsona.core.storage import pack_bits, unpack_bits
from sparsona.core.tree import Tree, map_parts, parts

BITS = "#bits"  # a bool tensor is stored as bits; the suffix keeps the two apart


def to_bytes(value: Any) -> bytes:
    """A State, Server or Work as a safetensors file.

    Args:
        value: trees and tensors, in tuples, dicts and dataclasses of them.

    Returns:
        The bytes of the file, which are the same for the same bits.

    Example:
        >>> data = to_bytes({"w": torch.ones(2)})
        >>> fill({"w": torch.zeros(2)}, read_tensors(data), "an example")["w"].tolist()
        [1.0, 1.0]
    """
    found = {}
    for path, leaf in parts(value):
        if leaf.dtype is torch.bool:
            bits = leaf.bits() if isinstance(leaf, Tree) else pack_bits(leaf.reshape(-1))
            found[f"{path}{BITS}{','.join(map(str, leaf.shape))}"] = bits
        else:
            tensor = leaf.flat if isinstance(leaf, Tree) else leaf
            found[path] = tensor.detach().cpu().contiguous().clone()  # shared storage is refused by the format
    return save(found)


def read_tensors(data: bytes) -> dict[str, Tensor]:
    """The tensors that `to_bytes` wrote, by their paths; ValueError if it did not."""
    try:
        stored: dict[str, Tensor] = load(data)
    except SafetensorError as error:
        raise ValueError(str(error)) from None
    found = {}
    for key, tensor in stored.items():
        path, mark, shape = key.partition(BITS)
        if mark:
            sizes = [int(size) for size in shape.split(",") if size]
            count = 1
            for size in sizes:
                count *= size
            tensor = unpack_bits(tensor, count).view(sizes)
        # A copy, in memory aligned as torch does it: where a buffer starts may decide how a product is summed.
        found[path] = tensor.clone()
    return found


def fill(template: Any, stored: dict[str, Tensor], what: str) -> Any:
    """The template's structure with the stored tensors in it."""
    expected = dict(parts(template))
    if expected.keys() != stored.keys() or any(
        stored[path].shape != value.shape or stored[path].dtype != value.dtype for path, value in expected.items()
    ):
        raise SparsonaError(
            f"{what} holds {_shapes(stored)}",
            expected=_shapes(expected),
            hint="use the version of sparsona, the model and the data this run was started with",
        )

    def put(path: str, leaf: Tree | Tensor) -> Tree | Tensor:
        tensor = stored[path].to(leaf.device)
        return leaf.like(tensor) if isinstance(leaf, Tree) else tensor

    return map_parts(put, template)


def _shapes(tensors: Mapping[str, Tree | Tensor]) -> str:
    return (
        ", ".join(f"{path} {list(value.shape)} {value.dtype}" for path, value in sorted(tensors.items())) or "nothing"
    )
