"""A pass over a traced step: convolutions of images with few channels are padded with channels of zeros.

In bf16 a GPU's fast convolutions need multiples of eight channels; the first layer's three would use a slow one, which
takes longer than any other of the network. Zeros change no sum.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, GraphModule, Node

from sparsona.gpu.fused_norm import HALF

aten = torch.ops.aten
EIGHT = 8


def pad_few_channels(module: GraphModule) -> GraphModule:
    """The same computation, with such images and weights padded to eight channels."""
    graph, padded = module.graph, dict[tuple[Node, int], Node]()
    for node in graph.find_nodes(op="call_function", target=aten.convolution.default):
        if _is_narrow(node.args[0], node.args[1], node.args[6], node.args[8]):
            for place in (0, 1):
                node.update_arg(place, _pad(graph, node.args[place], padded))
    for node in graph.find_nodes(op="call_function", target=aten.convolution_backward.default):
        if not _is_narrow(node.args[1], node.args[2], node.args[7], node.args[9]):
            continue
        channels = node.args[2].meta["val"].shape[1]
        for place in (1, 2):
            node.update_arg(place, _pad(graph, node.args[place], padded))
        for item in [user for user in node.users if user.target is operator.getitem and user.args[1] in (0, 1)]:
            with graph.inserting_before(item.next):
                real = graph.call_function(aten.slice.Tensor, (item, 1, 0, channels))
            real.meta["val"] = item.meta.get("val")  # none for images that need no gradient
            item.replace_all_uses_with(real, delete_user_cb=lambda user, real=real: user is not real)
    graph.lint()
    module.recompile()
    return module


def _is_narrow(images: object, weight: object, transposed: object, groups: object) -> bool:
    if transposed or groups != 1 or not isinstance(images, Node) or not isinstance(weight, Node):
        return False
    value = images.meta["val"]
    return value.dim() == 4 and value.dtype in HALF and value.shape[1] < EIGHT


def _pad(graph: Graph, node: Node, padded: dict[tuple[Node, int], Node]) -> Node:
    """The node with channels of zeros after its own: dimension 1, of images and of weights alike."""
    missing = EIGHT - node.meta["val"].shape[1]
    if (node, missing) not in padded:
        with graph.inserting_before(node.next):
            wide = graph.call_function(aten.constant_pad_nd.default, (node, [0, 0, 0, 0, 0, missing]))
            padded[node, missing] = graph.call_function(
                aten.clone.default, (wide,), {"memory_format": torch.channels_last}
            )
        for made in (wide, padded[node, missing]):
            made.meta["val"] = torch.nn.functional.pad(node.meta["val"], (0, 0, 0, 0, 0, missing))
    return padded[node, missing]
