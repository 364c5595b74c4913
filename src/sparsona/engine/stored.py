"""States, servers and models as bytes, to be stored and read back bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from sparsona.core.errors import SparsonaError
from sparsona.core.storage import pack_bits, unpack_bits
from sparsona.core.tree import Tree, map_parts, parts

BITS = "#bits"  # a bool tensor is stored as bits; the suffix keeps the two apart
NONZERO, VALUES = "#nonzero", "#values"  # a tensor with many zeros: bits that say where it has others, and these
MINUS = "#minus"  # and bits for -0.0, if it has any: what a mask makes of negative numbers
LEAST = 1 << 12  # entries from which that is looked at
SHARE = 0.9  # of a tensor's bytes that bits and values may take
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of an entry


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
            tensor = (leaf.flat if isinstance(leaf, Tree) else leaf).detach().contiguous()
            places = _places(tensor)
            if places is None:
                found[path] = tensor.cpu().clone()  # shared storage is refused by the format
                continue
            there, minus = places
            found[f"{path}{NONZERO}{','.join(map(str, leaf.shape))}"] = pack_bits(there)
            found[f"{path}{VALUES}"] = tensor.view(-1)[there].cpu()
            if minus.any():
                found[f"{path}{MINUS}"] = pack_bits(minus)
    return save(found)


def _places(tensor: Tensor) -> tuple[Tensor, Tensor] | None:
    """Where a tensor has anything but zero, and where it has -0.0; None if it is not much smaller without zeros."""
    size, each = tensor.numel(), tensor.element_size()
    if size < LEAST or each not in _INTEGERS or not tensor.dtype.is_floating_point:
        return None
    # As integers: a processor that flushes denormals takes them for zeros.
    patterns = tensor.view(-1).view(_INTEGERS[each])
    minus = patterns == torch.iinfo(patterns.dtype).min
    there = (patterns != 0) & ~minus
    return None if size / 4 + each * int(there.sum()) > SHARE * each * size else (there, minus)


def read_tensors(data: bytes) -> dict[str, Tensor]:
    """The tensors that `to_bytes` wrote, by their paths; ValueError if it did not."""
    try:
        stored: dict[str, Tensor] = load(data)
    except SafetensorError as error:
        raise ValueError(str(error)) from None
    found = {}
    for key, tensor in stored.items():
        if key.endswith((VALUES, MINUS)):
            continue  # read with its bits
        path, mark, shape = next((cut for cut in map(key.partition, (BITS, NONZERO)) if cut[1]), (key, "", ""))
        if mark:
            sizes = [int(size) for size in shape.split(",") if size]
            tensor = _unpacked(tensor, sizes, path)
        if mark == NONZERO:
            values = stored.get(f"{path}{VALUES}")
            if values is None or values.numel() != int(tensor.sum()):
                raise ValueError(f"'{path}' has not as many values as it has places for them")
            found[path] = values.new_zeros(sizes).masked_scatter_(tensor, values)
            if (minus := stored.get(f"{path}{MINUS}")) is not None:
                found[path].masked_fill_(_unpacked(minus, sizes, path) & ~tensor, -0.0)
        else:
            # A copy, in memory aligned as torch does it: where a buffer starts may decide how a product is summed.
            found[path] = tensor.clone()
    return found


def _unpacked(packed: Tensor, sizes: list[int], path: str) -> Tensor:
    size = prod(sizes)
    if min(sizes, default=0) < 0 or packed.dtype is not torch.uint8 or packed.shape != (-(-size // 8),):
        raise ValueError(f"'{path}' has not one bit for each of {size} entries")
    return unpack_bits(packed, size).view(sizes)


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
