"""Networks without their dead units: channels and neurons that change no prediction, because a mask removed them.

A unit is dead if everything that reads it has weight 0 for it, or if its own output is always 0: no weight, no bias,
and after it only what leaves 0 at 0. Leaving it out changes no sum but for the order of additions. The network is read
by tracing it; where that fails, or where units are mixed on their way (attention, GroupNorm, shortcuts), nothing is
dropped.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

# What treats every number by itself, and leaves 0 at 0.
_ELEMENTWISE: frozenset[Any] = frozenset(
    {
        *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Identity, nn.Dropout, nn.Dropout2d),
        *(torch.relu, torch.tanh, F.relu, F.leaky_relu, F.elu, F.gelu, F.silu, F.dropout, F.dropout2d),
        *("relu", "relu_", "tanh", "contiguous"),
    }
)
# What treats every channel by itself, and leaves one of zeros at 0.
_POOLS: frozenset[Any] = frozenset(
    {
        *(nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d),
        *(F.max_pool1d, F.max_pool2d, F.avg_pool1d, F.avg_pool2d, F.adaptive_avg_pool1d, F.adaptive_avg_pool2d),
    }
)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d)


@dataclass(frozen=True)
class _Link:
    """A layer, the BatchNorms after it, and the one layer that reads it."""

    name: str
    layer: Any
    norms: tuple[Any, ...]
    reader: Any

    def dead(self) -> Tensor:
        """For each unit, whether it can be left out."""
        weight = self.layer.weight
        unread = (self._by_unit(self.reader.weight) == 0).flatten(1).all(1)
        silent = (weight == 0).flatten(1).all(1)
        if self.layer.bias is not None:
            silent &= self.layer.bias == 0
        for norm in self.norms:  # the last decides: it makes 0 of every input, or something of a 0
            silent = (norm.weight == 0) & (norm.bias == 0) if norm.affine else torch.zeros_like(silent)
        return unread | silent

    def _by_unit(self, weight: Tensor) -> Tensor:
        """The reader's weights as [units, everything that reads that unit]."""
        units = len(self.layer.weight)
        return weight.unflatten(1, (units, -1)).transpose(0, 1)

    def keep(self, kept: Tensor) -> None:
        """Leave the other units out."""
        columns = self.reader.weight.unflatten(1, (len(kept), -1))[:, kept].flatten(1, 2)
        self.reader.weight = nn.Parameter(columns, requires_grad=False)
        self.layer.weight = nn.Parameter(self.layer.weight[kept], requires_grad=False)
        if self.layer.bias is not None:
            self.layer.bias = nn.Parameter(self.layer.bias[kept], requires_grad=False)
        for norm in self.norms:
            for name in ("weight", "bias"):
                if getattr(norm, name) is not None:
                    setattr(norm, name, nn.Parameter(getattr(norm, name)[kept], requires_grad=False))
            norm.running_mean, norm.running_var = norm.running_mean[kept], norm.running_var[kept]
            norm.num_features = int(kept.sum())
        for layer in (self.layer, self.reader):
            _state_sizes(layer)


def drop_dead_units(module: nn.Module) -> tuple[nn.Module, dict[str, int]]:
    """A network in evaluation mode without its dead units.

    Args:
        module: the network; it is not changed.

    Returns:
        A smaller copy, and how many units of which layers it lacks. The same network and nothing where no unit is dead
        or the structure is not understood.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)).eval()
        >>> with torch.no_grad():
        ...     _ = net[0].weight[1].zero_(), net[0].bias[1].zero_()
        >>> smaller, dropped = drop_dead_units(net)
        >>> smaller[0], dropped
        (Linear(in_features=4, out_features=2, bias=True), {'0': 1})
    """
    made = copy.deepcopy(module).eval()
    dropped: dict[str, int] = {}
    with torch.no_grad():
        try:
            links = list(_links(made))
        except Exception:  # a network that cannot be traced: data-dependent control flow and the like
            return module, {}
        changed = True
        while changed:  # dropping units of one layer may leave units of another without weights
            changed = False
            for link in links:
                kept = ~link.dead()
                if not kept.any():
                    kept[0] = True  # a layer keeps one
                if not kept.all():
                    dropped[link.name] = dropped.get(link.name, 0) + int((~kept).sum())
                    link.keep(kept)
                    changed = True
    return (made, dropped) if dropped else (module, {})


def _links(module: nn.Module) -> Iterator[_Link]:
    graph = fx.Tracer().trace(module)
    modules = dict(module.named_modules())
    calls = [str(node.target) for node in graph.nodes if node.op == "call_module"]
    # A layer that is called twice, or whose weight another one shares, is not a link in a chain.
    owners: dict[int, int] = {}
    for part in modules.values():
        for value in part.parameters(recurse=False):
            owners[id(value)] = owners.get(id(value), 0) + 1

    def layer_of(node: fx.Node) -> Any:
        name = str(node.target)
        found = modules.get(name) if node.op == "call_module" else None
        if not isinstance(found, _LAYERS) or calls.count(name) > 1 or type(found) not in _LAYERS:
            return None
        if getattr(found, "groups", 1) != 1 or any(owners[id(value)] > 1 for value in found.parameters()):
            return None
        return found

    for node in graph.nodes:
        if (layer := layer_of(node)) is None:
            continue
        norms: list[Any] = []
        is_linear = flat = isinstance(layer, nn.Linear)
        here = node
        while (after := _only_user(here)) is not None:
            here = after
            part = modules.get(str(here.target)) if here.op == "call_module" else None
            what = type(part) if here.op == "call_module" else here.target
            if (reader := layer_of(here)) is not None:
                size, units = reader.weight.shape[1], len(layer.weight)
                # A linear layer reads the last dimension: channels are there only after a flattening.
                if isinstance(reader, nn.Linear) is flat and (size == units or (size % units == 0 and not is_linear)):
                    yield _Link(str(node.target), layer, tuple(norms), reader)
                break
            if what in _NORMS and calls.count(str(here.target)) == 1 and _fits(part, len(layer.weight)):
                norms.append(part)
            elif _flattens(here, part):
                flat = True
            elif not (what in _ELEMENTWISE or (what in _POOLS and not flat)):
                break


def _only_user(node: fx.Node) -> fx.Node | None:
    """The one operation that reads a result as its first argument; asking for its batch size is no reading."""
    users = [user for user in node.users if not _is_batch_size(user)]
    return users[0] if len(users) == 1 and users[0].args and users[0].args[0] is node else None


def _is_batch_size(node: Any) -> bool:
    if not isinstance(node, fx.Node):
        return False
    if node.op == "call_function" and node.target is getattr:  # x.shape, of which x.shape[0] alone is used
        return bool(node.args[1] == "shape") and all(_is_batch_size(user) for user in node.users)
    if node.op == "call_function" and node.target is operator.getitem:
        source: Any = node.args[0]
        return bool(node.args[1] == 0) and isinstance(source, fx.Node) and source.target is getattr
    return node.op == "call_method" and node.target == "size" and bool(node.args[1:] == (0,))


def _fits(norm: Any, units: int) -> bool:
    return norm.running_mean is not None and len(norm.running_mean) == units


def _flattens(node: fx.Node, part: Any) -> bool:
    """Whether everything but the batch becomes one dimension."""
    if isinstance(part, nn.Flatten):
        return bool(part.start_dim == 1 and part.end_dim == -1)
    if node.op == "call_method" and node.target in ("view", "reshape"):
        return len(node.args) == 3 and _is_batch_size(node.args[1]) and bool(node.args[2] == -1)
    if (node.op == "call_function" and node.target is torch.flatten) or (
        node.op == "call_method" and node.target == "flatten"
    ):
        given = dict(zip(("start_dim", "end_dim"), node.args[1:], strict=False)) | dict(node.kwargs)
        return bool(given.get("start_dim", 0) == 1 and given.get("end_dim", -1) == -1)
    return False


def _state_sizes(layer: Any) -> None:
    if isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = layer.weight.shape
    else:
        layer.out_channels, layer.in_channels = layer.weight.shape[:2]
