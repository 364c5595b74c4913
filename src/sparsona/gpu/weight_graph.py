"""A pass over a traced step: weights reach convolutions, and their gradients the flat buffer, in one copy each.

See weight_ops for why.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from sparsona.gpu.traced import is_cast
from sparsona.gpu.weight_ops import COLLECT, LAY_OUT

aten = torch.ops.aten
WEIGHT_OF = {aten.convolution.default: 1, aten.convolution_backward.default: 2}  # which argument it is
ONE_ROW = (aten.view.default, aten.reshape.default, aten.contiguous.default, aten._unsafe_view.default)


def fuse_weights(graph: Graph) -> None:
    """The same computation with fewer copies."""
    laid_out: dict[Node, Node] = {}
    for node in list(graph.nodes):
        if node.target in WEIGHT_OF:
            place = WEIGHT_OF[node.target]
            node.update_arg(place, _lay_out(graph, node.args[place], laid_out))
    for node in graph.find_nodes(op="call_function", target=aten.cat.default):
        _collect(graph, node)
    graph.eliminate_dead_code()


def _lay_out(graph: Graph, weight: Any, laid_out: dict[Node, Node]) -> Node:
    """The weight channels last; cast, where it was cast to bf16 before."""
    if weight in laid_out:
        return laid_out[weight]
    value = weight.meta["val"]
    if value.dim() != 4:
        return weight
    source, is_half = weight, value.dtype is torch.bfloat16
    if is_half:
        source = weight.args[0]
        if not is_cast(weight) or source.meta["val"].dtype is not torch.float32:
            return weight  # its layout is left to torch
    with graph.inserting_before(weight.next):
        laid_out[weight] = graph.call_function(LAY_OUT, (source, is_half))
    laid_out[weight].meta["val"] = value
    return laid_out[weight]


def _collect(graph: Graph, node: Node) -> None:
    """Replace the concatenation of a flat gradient's parts, and the casts and sums before it."""
    parts: Any = node.args[0]
    value = node.meta["val"]
    if value.dim() != 1 or value.dtype is not torch.float32:
        return
    found = [_origin(part) for part in parts]
    with graph.inserting_before(node):
        new = graph.call_function(COLLECT, ([part for part, _ in found], [row for _, row in found], value.numel()))
    new.meta["val"] = value
    node.replace_all_uses_with(new)


def _origin(part: Node) -> tuple[Node, int]:
    """Where the part of a gradient comes from, before it was laid out, cast or summed, and its row in a sum, or -1."""
    node: Any = part
    while node.target in ONE_ROW and node.args[0].meta["val"].numel() == part.meta["val"].numel():
        node = node.args[0]
    if node.target is aten.select.int and node.args[1] == 0:
        total = node.args[0]
        if total.target is aten.sum.dim_IntList and total.args[1] == [0] and total.meta.get("shares") is not None:
            return total.args[0], node.args[2]
    if is_cast(node) and node.args[0].meta["val"].dtype is torch.bfloat16:
        node = node.args[0]
    return node, -1
