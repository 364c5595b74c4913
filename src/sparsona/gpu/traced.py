"""What passes over a traced step ask of its nodes."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

aten = torch.ops.aten
ELSEWHERE = {
    aten.add_.Tensor: aten.add.Tensor,
    aten.sub_.Tensor: aten.sub.Tensor,
    aten.mul_.Tensor: aten.mul.Tensor,
    aten.div_.Tensor: aten.div.Tensor,
    aten.addcmul_.default: aten.addcmul.default,
}
# Results of these are new tensors: where one has a single user, writing into it has no side effect.
MAKES_NEW = {
    *ELSEWHERE.values(),
    aten._to_copy.default, aten.where.self, aten.reciprocal.default, aten.neg.default, aten.abs.default,
    aten.sqrt.default, aten.lerp.Scalar,
}  # fmt: skip


def write_elsewhere(graph: Graph) -> None:
    """Operations in place on tensors that were just made become those out of place.

    In place is fast on a CPU; passes need each result to be a tensor of its own. Where operands of another type would
    change the type of the result, the operation stays.
    """
    for node in graph.nodes:
        if node.target not in ELSEWHERE or node.args[0].target not in MAKES_NEW or len(node.args[0].users) > 1:
            continue
        values = [node.meta["val"], *(one.meta["val"] for one in node.all_input_nodes)]
        if len({value.dtype for value in values if value.dim()}) == 1:
            node.target = ELSEWHERE[node.target]


def is_cast(node: Node) -> bool:
    """Whether a node changes the type alone: not the device, not the layout."""
    if node.target is not aten._to_copy.default or node.kwargs.get("layout") not in (None, torch.strided):
        return False
    device = node.kwargs.get("device")
    here = node.args[0].meta["val"].device  # type: ignore[union-attr]
    return node.kwargs.get("memory_format") is None and (device is None or torch.device(device) == here)  # type: ignore[arg-type]


def maker(node: Any) -> Node:
    """The operation that made a result: of one of several results, the operation that made them all."""
    return node.args[0] if node.target is operator.getitem else node
