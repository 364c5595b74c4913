"""Which traced steps our own kernels cover, and the passes that put them there."""

from __future__ import annotations

import operator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from sparsona.gpu.flat_fusion import VIEWS, fuse_flat, writes_memory
from sparsona.gpu.norm_ops import BACKWARD, FORWARD
from sparsona.gpu.pool_ops import find_pools, fuse_pools
from sparsona.gpu.traced import maker
from sparsona.gpu.weight_graph import fuse_weights
from sparsona.gpu.weight_ops import LAY_OUT

aten = torch.ops.aten
# The share of results that may be left to torch's own kernels, one by one.
LEFT = 0.1
BUILDERS = 8  # threads that build kernels
PRODUCTS = {
    aten.convolution.default,
    aten.convolution_backward.default,
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    FORWARD,
    BACKWARD,
}


def fuse_step(module: GraphModule) -> GraphModule:
    """The same computation with fewer kernels, in a graph whose norms have been fused."""
    graph = module.graph
    if _takes_any_layout(graph):
        for node in graph.find_nodes(op="call_function", target=aten.clone.default):
            only_read = all(user.target in PRODUCTS for user in node.users)
            if node.kwargs.get("memory_format") is torch.channels_last and only_read:
                node.target = aten.contiguous.default  # no copy of what a kernel has made channels last
        fuse_pools(graph)
        fuse_weights(graph)
    fuse_flat(graph)
    graph.lint()
    module.recompile()
    return module


def _takes_any_layout(graph: Graph) -> bool:
    """Whether images may have another layout than they were traced with, and weights may be copied beforehand.

    Where norms were fused, nothing depends on the layout of images any more. Weights must not change between the first
    and the last use of a copy: what is written comes after all convolutions, as it does in a step.
    """
    nodes = list(graph.nodes)
    last = max((place for place, node in enumerate(nodes) if node.target in PRODUCTS), default=0)
    return any(node.target is FORWARD for node in nodes) and not any(map(writes_memory, nodes[:last]))


def is_covered(module: GraphModule) -> bool:
    """Whether almost all of a step is convolutions, products, and what we have kernels for.

    By the entries of images (and of anything else with two dimensions or more) that other operations make: a rule of
    the network and its batch, so that a run and its continuation decide alike.
    """
    if not _takes_any_layout(module.graph):
        return False
    pools = set(find_pools(module.graph))
    covered = left = 0
    for node in module.graph.nodes:
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, torch.Tensor) or value.dim() < 2:
            continue
        if maker(node).target in PRODUCTS or maker(node) in pools:
            covered += value.numel()
        elif node.target is aten.clone.default and maker(node.args[0]) in pools:
            continue  # our pooling has the layout that is asked for
        elif maker(node).target not in VIEWS and not _is_weight(node):
            left += value.numel()
    return left <= LEFT * covered


def build_kernels(module: GraphModule, device: torch.device) -> None:
    """Build the kernels of a step side by side: in its first call they would be built one after another.

    Each operation is called once on memory of its own, with nothing in it. The compiler works outside of Python's lock.
    """
    calls = {_signature(node): node for node in module.graph.nodes if _is_ours(node.target)}
    with ThreadPoolExecutor(BUILDERS) as pool:
        for done in [pool.submit(_try, node, device) for node in calls.values()]:
            done.result()


def _is_ours(target: Any) -> bool:
    return hasattr(target, "source") or getattr(target, "namespace", None) == "sparsona"


def _signature(node: Node) -> str:
    def kind(value: Any) -> Any:
        found = value.meta["val"]
        return tuple(found.shape), str(found.dtype)

    return str((node.target, torch.fx.map_arg((node.args, node.kwargs), lambda one: str(kind(one)))))


def _try(node: Node, device: torch.device) -> None:
    def empty(one: Node) -> Tensor:
        value = one.meta["val"]
        found = torch.zeros(value.shape, dtype=value.dtype, device=device)
        laid_out = value.dim() == 4 and node.target is not LAY_OUT
        return found.contiguous(memory_format=torch.channels_last) if laid_out else found

    with torch.cuda.device(device):
        args = torch.fx.map_arg(node.args, empty)
        node.target(*args)  # type: ignore[operator]


def _is_weight(node: Node) -> bool:
    """Whether a node is a weight's copy for a convolution or product, or its gradient's on the way back."""
    if node.target not in (aten._to_copy.default, aten.clone.default):
        return False
    before: Any = node.args[0]
    is_gradient = before.target is operator.getitem and before.args[1] == 1
    return (is_gradient and maker(before).target is aten.convolution_backward.default) or (
        before.target is aten.view.default and before.args[0].target is operator.getitem
    )
