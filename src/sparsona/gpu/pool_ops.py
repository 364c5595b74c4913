"""Max pooling without overlap as two custom operations of torch, on images that are channels last.

Torch's own keeps a 64-bit index for each result and goes through the whole image for each gradient. Here the backward
pass finds the largest again. On a GPU Triton kernels do the work; elsewhere plain torch does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.nn import functional as F

aten = torch.ops.aten
MOST = 4  # pixels across a square: the kernels have a line for each pixel


@torch.library.custom_op("sparsona::max_pool", mutates_args=())
def max_pool(x: Tensor, size: int) -> Tensor:
    """The largest of each square of `size` pixels; rows and columns that fill no square are left out."""
    return F.max_pool2d(x, size).contiguous(memory_format=torch.channels_last)


@torch.library.custom_op("sparsona::max_pool_backward", mutates_args=())
def max_pool_backward(dy: Tensor, x: Tensor, size: int) -> Tensor:
    """The gradient of x: of equal pixels the first one gets it, as in torch."""
    _, where = F.max_pool2d(x, size, return_indices=True)
    kernel, stride, none, one = [size, size], [size, size], [0, 0], [1, 1]
    found = aten.max_pool2d_with_indices_backward(dy.to(x.dtype), x, kernel, stride, none, one, False, where)
    return found.contiguous(memory_format=torch.channels_last)


@max_pool.register_fake
def _(x, size):
    shape = (*x.shape[:2], x.shape[2] // size, x.shape[3] // size)
    return x.new_empty(shape).contiguous(memory_format=torch.channels_last)


@max_pool_backward.register_fake
def _(dy, x, size):
    return torch.empty_like(x, memory_format=torch.channels_last)


@max_pool.register_kernel("cuda")
def pool_by_triton(x: Tensor, size: int) -> Tensor:
    """The same by the kernel."""
    from sparsona.gpu import pool_kernels

    x = x.contiguous(memory_format=torch.channels_last)
    shape = (*x.shape[:2], x.shape[2] // size, x.shape[3] // size)
    y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    with torch.cuda.device_of(x):  # Triton starts kernels on the current GPU
        pool_kernels.forward(x, y, size)
    return y


@max_pool_backward.register_kernel("cuda")
def backward_by_triton(dy: Tensor, x: Tensor, size: int) -> Tensor:
    """The same by the kernel."""
    from sparsona.gpu import pool_kernels

    dy, x = (images.contiguous(memory_format=torch.channels_last) for images in (dy, x))
    fits = x.shape[2] % size == x.shape[3] % size == 0
    dx = (torch.empty_like if fits else torch.zeros_like)(x, memory_format=torch.channels_last)
    with torch.cuda.device_of(x):
        pool_kernels.backward(dy, x, dx, size)
    return dx


POOL = torch.ops.sparsona.max_pool.default
POOL_BACKWARD = torch.ops.sparsona.max_pool_backward.default


def fuse_pools(graph: Graph) -> None:
    """A pass over a traced step: max pooling without overlap by the operations above."""
    for node, size in find_pools(graph).items():
        with graph.inserting_before(node):
            if node.target is aten.max_pool2d_with_indices_backward.default:
                found = graph.call_function(POOL_BACKWARD, (node.args[0], node.args[1], size))
                old = [node]
            else:
                found = graph.call_function(POOL, (node.args[0], size))
                old = [user for user in node.users if user.args[1] == 0]
        for one in old:
            found.meta["val"] = one.meta["val"]
            one.replace_all_uses_with(found)
    graph.eliminate_dead_code()


def find_pools(graph: Graph) -> dict[Node, int]:
    """The nodes, forward and backward, that our operations can replace, and the size of their squares."""
    found: dict[Node, int] = {}
    for node in graph.find_nodes(op="call_function", target=aten.max_pool2d_with_indices.default):
        size = _square(node.args[0], node.args[1:])
        backwards = [user for item in node.users if item.args[1] == 1 for user in item.users]
        if size is not None and all(user.target is aten.max_pool2d_with_indices_backward.default for user in backwards):
            found |= dict.fromkeys((node, *backwards), size)
    return found


def _square(x: Any, rest: tuple[Any, ...]) -> int | None:
    """The size of the squares, if they are squares, do not overlap, and nothing is added at the edges."""
    defaults: tuple[Any, ...] = ([], [0, 0], [1, 1], False)
    kernel, stride, padding, dilation, ceils = (*rest, *defaults[len(rest) - 1 :])
    sizes = {*kernel, *(stride or kernel)}
    plain = not any(padding) and set(dilation) == {1} and not ceils
    fits = x.meta["val"].dim() == 4 and x.meta["val"].is_floating_point()
    return sizes.pop() if len(sizes) == 1 and plain and fits and max(sizes) <= MOST else None
