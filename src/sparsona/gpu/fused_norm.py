"""A pass over a traced step: each GroupNorm takes in the casts, the shortcut and the ReLU around it, both ways.

Autocast runs a norm in float32 and torch converts the layout of its input, so a norm takes several times as long as
reading and writing its data. Here the norm becomes one operation (norm_ops) that reads and writes the format of the
convolutions next to it: bf16, channels last. Other users of the float32 result get a cast of the bf16. Results differ
by that rounding; without autocast, by the order of sums.

A neighbour is fused only if no other node uses it; otherwise it stays, and the norm alone is replaced.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from sparsona.gpu.norm_ops import BACKWARD, FORWARD
from sparsona.gpu.traced import is_cast, maker, write_elsewhere

aten = torch.ops.aten
HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class _Norm:
    """A norm after it was replaced."""

    x: Node
    shift: Node | None
    weight: Node
    bias: Node
    y: Node
    mean: Node
    rstd: Node
    relu: bool
    residual: bool


def fuse_group_norms(module: GraphModule) -> GraphModule:
    """The same computation with fewer kernels. A graph that writes into its images is returned unchanged."""
    graph = module.graph
    write_elsewhere(graph)
    if not any(_can_fuse(node) for node in graph.nodes) or not all(_is_pure(node) for node in graph.nodes):
        return module
    _drop_detached(graph)
    backwards: dict[Node, list[Node]] = {}
    for node in graph.find_nodes(op="call_function", target=aten.native_group_norm_backward.default):
        if node.args[2].target is operator.getitem:
            backwards.setdefault(node.args[2].args[0], []).append(node)
    for node in graph.find_nodes(op="call_function", target=aten.native_group_norm.default):
        if _can_fuse(node):
            mine = backwards.get(node, [])
            norm = _fuse_forward(graph, node, mine)
            for back in mine:
                _fuse_backward(graph, back, norm)
    _pool_in_half(graph)
    _hand_over_images(graph)
    graph.eliminate_dead_code()
    graph.lint()
    module.recompile()
    return module


def _can_fuse(node: Node) -> bool:
    if node.target is not aten.native_group_norm.default or node.args[1] is None or node.args[2] is None:
        return False
    x = node.args[0].meta["val"]  # type: ignore[union-attr]
    return x.dim() == 4 and x.dtype is torch.float32 and x.numel() > 0


def _is_pure(node: Node) -> bool:
    """Whether a node neither writes into images nor depends on their strides: then layouts and casts may move."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return True
    if not node.target._schema.is_mutable and node.target is not aten.as_strided.default:
        return True
    # An image of one pixel is the same in both layouts; average pooling sets its strides.
    strides_alone = node.target in (aten.as_strided.default, aten.as_strided_.default)
    images = [arg.meta["val"] for arg in node.all_input_nodes if _dim(arg) == 4]
    return all(strides_alone and image.shape[2:].numel() == 1 for image in images)


def _fuse_forward(graph: Graph, node: Node, backwards: list[Node]) -> _Norm:
    given, weight, bias, _, _, _, groups, eps = node.args
    assert isinstance(given, Node)
    assert isinstance(weight, Node)
    assert isinstance(bias, Node)
    out, mean, rstd = (_item(graph, node, place) for place in range(3))
    x = _source(given)
    shift = _take_bias(given, x, {node, *backwards})
    residual, last = _what_follows(out)
    relu = last is not out
    with graph.inserting_before(last.next):
        args = (x, shift, weight, bias, residual, groups, eps, relu)
        fused = graph.call_function(FORWARD, args)
        y, new_mean, new_rstd = (graph.call_function(operator.getitem, (fused, place)) for place in range(3))
    images = y.meta["val"] = x.meta["val"]
    new_mean.meta["val"] = new_rstd.meta["val"] = images.new_empty((images.shape[0], groups), dtype=torch.float32)
    mean.replace_all_uses_with(new_mean)
    rstd.replace_all_uses_with(new_rstd)
    _replace(graph, last, y)
    return _Norm(x, shift, weight, bias, y, new_mean, new_rstd, relu, residual is not None)


def _what_follows(out: Node) -> tuple[Node | None, Node]:
    """The shortcut, if one is added, and the last node to fuse: a ReLU or, where none follows, `out`."""
    user = _only_user(out)
    if user is not None and user.target is aten.relu.default:
        return None, user
    if user is not None and _adds_images(user):
        other = user.args[1] if user.args[0] is out else user.args[0]
        then = _only_user(user)
        if other is not out and then is not None and then.target is aten.relu.default:
            return other, then  # type: ignore[return-value]
    return None, out


def _take_bias(given: Node, x: Node, readers: set[Node]) -> Node | None:
    """Remove and return the bias of the convolution before, if only this norm uses the convolution's result."""
    if x.target is not aten.convolution.default or not isinstance(x.args[2], Node):
        return None
    chain = {given}
    while given is not x:
        given = given.args[0]  # type: ignore[assignment]
        chain.add(given)
    if any(user not in chain and user not in readers for link in chain for user in link.users):
        return None
    shift = x.args[2]
    x.update_arg(2, None)
    return shift


def _fuse_backward(graph: Graph, node: Node, norm: _Norm) -> None:
    arrives = node.args[0]
    assert isinstance(arrives, Node)
    gate = _gate(arrives, node, norm)
    place = node if gate is None else gate
    arrived: Any = arrives if gate is None else gate.args[0]
    parts = (arrived, None)
    if _adds_images(arrived) and len(arrived.users) == 1:
        parts = arrived.args  # where the gradients of two branches meet, they are added on the way in
    shortcut = gate is not None and norm.residual
    saved = norm.y if shortcut else None  # without a shortcut the kernel computes the ReLU's mask from x
    with graph.inserting_before(place):
        args = (
            *parts,
            norm.x,
            norm.shift,
            saved,
            norm.weight,
            norm.bias,
            norm.mean,
            norm.rstd,
            gate is not None,
            shortcut,
        )
        fused = graph.call_function(BACKWARD, args)
        dx, dresidual, shares = (graph.call_function(operator.getitem, (fused, item)) for item in range(3))
        total = graph.call_function(aten.sum.dim_IntList, (shares, [0]))
        dweight, dbias = (graph.call_function(aten.select.int, (total, 0, row)) for row in range(2))
    images = dx.meta["val"] = dresidual.meta["val"] = norm.x.meta["val"]
    rows = 2 if norm.shift is None else 3
    shares.meta["val"] = images.new_empty((images.shape[0], rows, images.shape[1]), dtype=torch.float32)
    total.meta["val"] = dweight.meta["val"] = dbias.meta["val"] = norm.weight.meta["val"]
    total.meta["shares"] = True  # for weight_graph, which sums them on their way to the flat gradient
    _replace(graph, _item(graph, node, 0), dx)
    _item(graph, node, 1).replace_all_uses_with(dweight)
    _item(graph, node, 2).replace_all_uses_with(dbias)
    if gate is not None and shortcut:
        _replace(graph, gate, dresidual)
    if norm.shift is not None:
        for user in list(dx.users):
            _give_bias(graph, user, dx, total)


def _gate(arrives: Node, node: Node, norm: _Norm) -> Node | None:
    """The ReLU's backward before the norm's, if it can be fused: only the shortcut uses its result besides."""
    gate, links = arrives, {node}
    while gate.target is aten.clone.default:
        links.add(gate)
        gate = gate.args[0]  # type: ignore[assignment]
    if not norm.relu or gate.target is not aten.threshold_backward.default or gate.args[2] != 0:
        return None
    if _source(gate.args[1]) is not norm.y:  # type: ignore[arg-type]
        return None
    return gate if norm.residual or all(user in links for user in gate.users) else None


def _give_bias(graph: Graph, node: Node, dx: Node, total: Node) -> None:
    """The gradient of a bias that was moved into a norm, where a convolution's backward would sum dx for it."""
    wanted: Any = node.args[10] if node.target is aten.convolution_backward.default else None
    if wanted is None or node.args[0] is not dx or not wanted[2]:
        return
    found = _item(graph, node, 2)
    with graph.inserting_before(total.next):
        dshift = graph.call_function(aten.select.int, (total, 0, 2))
    dshift.meta["val"] = total.meta["val"]
    node.update_arg(10, [*wanted[:2], False])
    if _dtype(found) is _dtype(dshift):
        found.replace_all_uses_with(dshift)
        return
    for user in list(found.users):  # it was rounded to bf16 on its way to the float32 parameter
        if is_cast(user) and _dtype(user) is _dtype(dshift):
            user.replace_all_uses_with(dshift)
    _replace(graph, found, _cast(graph, dshift, _dtype(found)))


def _pool_in_half(graph: Graph) -> None:
    """The largest of rounded values is the largest value, rounded: pooling needs no float32."""
    for node in graph.find_nodes(op="call_function", target=aten.max_pool2d_with_indices.default):
        x = _source(node.args[0])
        if _dtype(x) not in HALF:
            continue
        with graph.inserting_before(node):
            pooled = graph.call_function(node.target, (x, *node.args[1:]), node.kwargs)
            values, indices = (graph.call_function(operator.getitem, (pooled, place)) for place in range(2))
        out = _item(graph, node, 0)
        values.meta["val"] = out.meta["val"].to(_dtype(x))
        _replace(graph, out, values)
        _item(graph, node, 1).replace_all_uses_with(indices)
    for node in graph.find_nodes(op="call_function", target=aten.max_pool2d_with_indices_backward.default):
        x = _source(node.args[1])
        if _dtype(x) not in HALF:
            continue
        arrives = _source(node.args[0])
        with graph.inserting_before(node):
            if _dtype(arrives) is not _dtype(x):
                arrives = _cast_before(graph, arrives, _dtype(x))
            found = graph.call_function(node.target, (arrives, x, *node.args[2:]), node.kwargs)
        found.meta["val"] = x.meta["val"]
        _replace(graph, node, found)


def _hand_over_images(graph: Graph) -> None:
    """Our operations get the images before casts and copies, channels last; views no longer rely on a layout."""
    laid_out = {aten.convolution.default, aten.convolution_backward.default, FORWARD, BACKWARD}
    for node in list(graph.nodes):
        if node.target is aten.view.default and _dim(node.args[0]) == 4:
            node.target = aten.reshape.default
            if node.meta["val"].dim() != 4 and node.meta["val"].is_contiguous():
                _lay_out(graph, node)
        if node.target not in (FORWARD, BACKWARD):
            continue
        for place, arg in enumerate(node.args):
            if not isinstance(arg, Node) or _dim(arg) != 4:
                continue
            image = _source(arg)
            if maker(image).target not in laid_out:
                with graph.inserting_before(node):  # the compiler makes it part of what computes the image
                    options: dict[str, Any] = {"memory_format": torch.channels_last}
                    image, before = graph.call_function(aten.clone.default, (image,), options), image
                image.meta["val"] = before.meta["val"]
            node.update_arg(place, image)


def _lay_out(graph: Graph, node: Node) -> None:
    """Give a result the memory layout that was traced, for the nodes after it. No copy if it has that already."""
    with graph.inserting_before(node.next):
        plain = graph.call_function(aten.contiguous.default, (node,))
    node.replace_all_uses_with(plain, delete_user_cb=lambda user: user is not plain)
    plain.meta["val"] = node.meta["val"]


def _replace(graph: Graph, old: Node, new: Node) -> None:
    """Replace `old` by `new` in all its users; if `new` is narrower, users that do not narrow it get a cast."""
    kind, wide = _dtype(new), None
    for user in list(old.users):
        if kind is _dtype(old):
            user.replace_input_with(old, new)
        elif is_cast(user) and _dtype(user) is kind:
            user.replace_all_uses_with(new)
        else:
            wide = wide or _cast(graph, new, _dtype(old))
            user.replace_input_with(old, wide)


def _cast(graph: Graph, node: Node, dtype: torch.dtype) -> Node:
    with graph.inserting_before(node.next):
        return _cast_before(graph, node, dtype)


def _cast_before(graph: Graph, node: Node, dtype: torch.dtype) -> Node:
    """A cast where nodes are being inserted."""
    cast = graph.call_function(aten._to_copy.default, (node,), {"dtype": dtype})
    cast.meta["val"] = node.meta["val"].to(dtype)
    return cast


def _source(node: Node) -> Node:
    """The origin of a node, before copies to another layout and lossless casts."""
    while True:
        widens = is_cast(node) and _dtype(node) is torch.float32 and _dtype(node.args[0]) in HALF
        if not widens and node.target is not aten.clone.default:
            return node
        node = node.args[0]  # type: ignore[assignment]


def _adds_images(node: Node) -> bool:
    if node.target is not aten.add.Tensor or node.kwargs or not all(isinstance(arg, Node) for arg in node.args):
        return False
    return all(arg.meta["val"].shape == node.meta["val"].shape for arg in node.args)  # type: ignore[union-attr]


def _only_user(node: Node) -> Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _item(graph: Graph, node: Node, place: int) -> Node:
    for user in node.users:
        if user.target is operator.getitem and user.args[1] == place:
            return user
    with graph.inserting_before(node.next):  # not used so far: a node without users, removed at the end
        item = graph.call_function(operator.getitem, (node, place))
    item.meta["val"] = torch.empty(0)
    return item


def _dtype(node: Any) -> torch.dtype:
    return node.meta["val"].dtype


def _dim(node: Any) -> int:
    value = node.meta.get("val")
    return value.dim() if isinstance(value, torch.Tensor) else -1


def _drop_detached(graph: Graph) -> None:
    for node in graph.find_nodes(op="call_function", target=aten.detach.default):
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)
