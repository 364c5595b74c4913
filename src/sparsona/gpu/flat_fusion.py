"""A pass over a traced step: arithmetic on flat buffers, entry by entry, becomes one kernel each time it can.

A step ends with clipping, decay, momentum and masks on buffers as large as the model. Each of these operations reads
and writes them once more; together they need to be read and written once. The kernel is generated, one line for each
operation, and can write into the memory that the step updates.
"""

from __future__ import annotations

import linecache
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from sparsona.gpu.traced import write_elsewhere

aten = torch.ops.aten
LEAST = 1 << 16  # entries from which a kernel of its own is worth it
BLOCK = 1024

# How an operation is written in Triton, by its operands. `alpha` and `value` are factors with a default of 1.
WRITTEN: dict[Any, str] = {
    aten.add.Tensor: "{0} + {1} * {alpha}",
    aten.sub.Tensor: "{0} - {1} * {alpha}",
    aten.mul.Tensor: "{0} * {1}",
    aten.div.Tensor: "tl.div_rn({0}, {1})",
    aten.reciprocal.default: "tl.div_rn(1.0, {0})",
    aten.neg.default: "-{0}",
    aten.abs.default: "tl.abs({0})",
    aten.sqrt.default: "tl.sqrt_rn({0})",
    aten.addcmul.default: "{0} + {value} * ({1} * {2})",
    aten.lerp.Scalar: "{0} + {2} * ({1} - {0})",
    aten.where.self: "tl.where({0}, {1}, {2})",
    aten.gt.Scalar: "{0} > {1}",
    aten.ne.Scalar: "{0} != {1}",
    aten.detach.default: "{0}",
}
COMPARED = (aten.gt.Scalar, aten.ne.Scalar, aten.detach.default)
VIEWS = {
    aten.detach.default, aten.split_with_sizes.default, aten.view.default, aten.t.default, aten.select.int,
    aten.slice.Tensor, aten.as_strided.default, aten.reshape.default, aten.permute.default, aten.expand.default,
    aten.unsqueeze.default, aten.transpose.int, aten.unbind.int, aten.alias.default, aten._unsafe_view.default,
    aten.squeeze.dim, aten.split.Tensor,
}  # fmt: skip
_numbers = count()


def fuse_flat(graph: Graph) -> None:
    """The same computation with fewer passes over flat buffers."""
    write_elsewhere(graph)
    for group in _groups(graph):
        _fuse(graph, group)
    graph.eliminate_dead_code(lambda node: node.is_impure() or hasattr(node.target, "source"))  # a kernel writes


def _groups(graph: Graph) -> Iterable[list[Node]]:
    """Operations that can be one kernel: on as many entries, with nothing between them that needs a whole buffer."""
    depth: dict[Node, int] = {}
    groups: dict[tuple[int, int], list[Node]] = {}
    for node in graph.nodes:
        fusible = _is_fusible(node)
        steps = [depth[one] + (_is_fusible(one) != fusible) for one in node.all_input_nodes]
        depth[node] = max(steps, default=0)
        if fusible:
            groups.setdefault((node.meta["val"].numel(), depth[node]), []).append(node)
    return [group for group in groups.values() if len(group) > 1]


def _is_flat(node: Any) -> bool:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return isinstance(value, Tensor) and value.dim() == 1 and value.numel() >= LEAST and value.is_contiguous()


def _is_number(node: Any) -> bool:
    """One number on the device: it is read once by each program, or computed there."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    return isinstance(value, Tensor) and value.dim() == 0 and value.dtype in (torch.float32, torch.float64)


def _is_fusible(node: Node) -> bool:
    """Whether a node is arithmetic of flat buffers of one length and of numbers."""
    if node.target not in WRITTEN or not _is_flat(node):
        return False
    if node.meta["val"].dtype not in (torch.float32, torch.bool) or set(node.kwargs) - {"alpha", "value"}:
        return False
    if node.meta["val"].dtype is torch.bool and node.target not in COMPARED:  # True + True is True, and not 2
        return False
    tensors = [arg for arg in node.args if isinstance(arg, Node)]
    if not all(isinstance(arg, Node) or _is_finite(arg) for arg in (*node.args, *node.kwargs.values())):
        return False
    if any(one.meta["val"].device != node.meta["val"].device for one in tensors):
        return False  # a number on the host
    size = node.meta["val"].numel()
    kinds = (torch.float32, torch.bool)
    return all(
        _is_number(one) or (_is_flat(one) and one.meta["val"].numel() == size and one.meta["val"].dtype in kinds)
        for one in tensors
    )


def _is_finite(arg: Any) -> bool:
    return isinstance(arg, int | float) and math.isfinite(arg)


def _fuse(graph: Graph, group: list[Node]) -> None:
    inside = set(group)
    places = {node: place for place, node in enumerate(graph.nodes)}
    given = dict.fromkeys(one for node in group for one in node.all_input_nodes if one not in inside)
    # Numbers that only these operations use are computed by them.
    scalars = _own_numbers([one for one in given if _is_number(one)], inside)
    inside |= set(scalars)
    lines = sorted(inside, key=places.__getitem__)
    given = dict.fromkeys(one for node in lines for one in node.all_input_nodes if one not in inside)
    leaving = [node for node in group if any(user not in inside for user in node.users)]
    copies = {
        user: node
        for node in leaving
        for user in node.users
        if user.target is aten.copy_.default and user.args[1] is node
    }
    after = max(places[one] for one in (*given, *group))
    others = [places[user] for node in leaving for user in node.users if user not in inside and user not in copies]
    # Results are needed, or memory that is read here changes: the kernel must have run.
    writes = [places[one] for one in graph.nodes if writes_memory(one) and places[one] > places[lines[0]]]
    before = min(*others, *writes, len(places) - 1)
    if after >= before:
        return  # something in between needs a part of the results, or changes what is read
    taken = {copy: node for copy, node in copies.items() if _may_write(copy, places, before, inside)}
    stored = [node for node in leaving if any(user not in inside and user not in taken for user in node.users)]
    buffers = [one for one in given if not _is_number(one)]
    numbers = [one for one in given if _is_number(one)]
    targets = [copy.args[0] for copy in taken]
    program = _write(lines, buffers, numbers, stored, list(taken.values()))
    at = next(node for node in graph.nodes if places.get(node) == before)
    with graph.inserting_before(at):
        new = graph.call_function(program, (buffers, numbers, targets))
        for number, node in enumerate(stored):
            item = graph.call_function(operator.getitem, (new, number))
            item.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(item, delete_user_cb=lambda user: user not in inside and user not in taken)
    for copy in taken:
        copy.replace_all_uses_with(copy.args[0])  # type: ignore[arg-type]
        graph.erase_node(copy)


def writes_memory(node: Node) -> bool:
    """Whether a node changes tensors that it is given."""
    if isinstance(node.target, torch._ops.OpOverload):
        return bool(node.target._schema.is_mutable)
    return hasattr(node.target, "source") and bool(node.args[2])


def _own_numbers(wanted: list[Node], inside: set[Node]) -> list[Node]:
    """Numbers computed by operations we can write, whose results are used in here alone."""
    found: dict[Node, None] = {}
    while True:
        more = [
            one
            for one in wanted
            if one not in found
            and one.target in (*WRITTEN, aten.clamp.default)
            and one.meta["val"].dtype is torch.float32
            and all(user in inside or user in found for user in one.users)
            and all(_is_number(arg) and arg.meta["val"].device == one.meta["val"].device for arg in one.all_input_nodes)
            and all(isinstance(arg, Node) or arg is None or _is_finite(arg) for arg in one.args)
        ]
        if not more:
            return list(found)
        for one in more:
            found[one] = None
            wanted = [*wanted, *(arg for arg in one.all_input_nodes if arg not in wanted)]


def _may_write(copy: Node, places: dict[Node, int], before: int, inside: set[Node]) -> bool:
    """Whether a result may be written where a later `copy_` would put it: nothing reads the old values after that."""
    seen, waiting = set[Node](), [copy.args[0]]
    while waiting:
        node: Any = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        for user in node.users:
            if user is copy or user in inside:
                continue
            if places[user] >= before:
                return False
            if user.target in VIEWS or user.target is operator.getitem:
                waiting.append(user)
    return copy.args[0].op == "placeholder" and not copy.users  # type: ignore[union-attr]


Program = Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]], list[Tensor]]


def _write(
    lines: list[Node], buffers: list[Node], numbers: list[Node], stored: list[Node], copied: list[Node]
) -> Program:
    """A function of buffers, numbers and targets: the stored results, and the copied ones written to the targets."""
    names = {node: f"b{place}" for place, node in enumerate(buffers)}
    names |= {node: f"n{place}" for place, node in enumerate(numbers)}
    names |= {node: f"v{place}" for place, node in enumerate(lines)}
    results = [*stored, *copied]
    inputs = [f"in_{names[node]}" for node in (*buffers, *numbers)]
    outputs = [f"out_{place}" for place in range(len(results))]
    text = [
        "import triton",
        "import triton.language as tl",
        "@triton.jit",
        f"def fused({', '.join([*inputs, *outputs])}, size, BLOCK: tl.constexpr):",
        "    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)",
        "    there = at < size",
    ]
    for node in buffers:
        text.append(f"    {names[node]} = tl.load(in_{names[node]} + at, mask=there)")
    for node in numbers:
        text.append(f"    {names[node]} = tl.load(in_{names[node]}).to(tl.float32)")
    text += [f"    {names[node]} = {_expression(node, names)}" for node in lines]
    for place, node in enumerate(results):
        text.append(f"    tl.store(out_{place} + at, {names[node]}, mask=there)")
    source = "\n".join(text) + "\n"
    kernel: list[Any] = []
    kinds = [node.meta["val"].dtype for node in stored]
    steps = [(node, node.target, node.args, node.kwargs) for node in lines]  # the nodes are about to lose theirs

    def fused(given: Sequence[Tensor], scalars: Sequence[Tensor], targets: Sequence[Tensor]) -> list[Tensor]:
        size = given[0].numel()
        if given[0].device.type != "cuda" and not kernel:
            return _plainly(given, scalars, targets)
        new = [torch.empty_like(given[0], dtype=kind) for kind in kinds]
        if not kernel:
            kernel.append(load_kernel(source))
        with torch.cuda.device_of(given[0]):
            kernel[0][(-(-size // BLOCK),)](*given, *scalars, *new, *targets, size, BLOCK=BLOCK)
        return new

    def _plainly(given: Sequence[Tensor], scalars: Sequence[Tensor], targets: Sequence[Tensor]) -> list[Tensor]:
        known: dict[Node, Any] = dict(zip((*buffers, *numbers), (*given, *scalars), strict=True))
        for node, operation, args, factors in steps:
            operands = [known[arg] if isinstance(arg, Node) else arg for arg in args]
            known[node] = operation(*operands, **factors)  # type: ignore[operator]
        found = [known[node] for node in stored]
        for node, target in zip(copied, targets, strict=True):
            target.copy_(known[node])
        return found

    fused.source = source  # type: ignore[attr-defined]
    fused.kernel = kernel  # type: ignore[attr-defined]
    return fused


def _expression(node: Node, names: dict[Node, str]) -> str:
    def written(arg: Any) -> str:
        return names[arg] if isinstance(arg, Node) else f"({arg!r})"

    if node.target is aten.clamp.default:
        low, high = (*node.args[1:], None, None)[:2]
        inner = written(node.args[0])
        inner = inner if low is None else f"tl.maximum({inner}, {low!r}, propagate_nan=tl.PropagateNan.ALL)"
        return inner if high is None else f"tl.minimum({inner}, {high!r}, propagate_nan=tl.PropagateNan.ALL)"
    factors = {name: repr(float(node.kwargs.get(name, 1))) for name in ("alpha", "value")}  # type: ignore[arg-type]
    return WRITTEN[node.target].format(*(written(arg) for arg in node.args), **factors)


def load_kernel(source: str) -> Any:
    """The Triton kernel that a source text defines. Triton reads the text again: `linecache` has it."""
    name = f"<fused {next(_numbers)}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    space: dict[str, Any] = {"__name__": "sparsona.gpu.fused"}
    exec(compile(source, name, "exec"), space)
    return space["fused"]
