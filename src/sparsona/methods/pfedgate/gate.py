"""pFedGate's gating layer: an input becomes a score and a weight for each block of another model.

Switchable norm over the input, flatten, linear, batch norm, sigmoid: pure functions of a tree of parameters and a tree
of running statistics. Statistics of a batch are weighted by the examples' weights: an example of weight 0 changes
nothing, so that batches may be filled up and clients of unequal size run side by side.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from sparsona.core.errors import SparsonaError
from sparsona.core.layout import Layout, Slot
from sparsona.core.seeds import generator
from sparsona.core.tree import Tree

if TYPE_CHECKING:
    from torch import Tensor

EPS = 1e-5
KEPT = 0.9  # how much of its running statistics a norm keeps when it has seen another batch


@dataclass(frozen=True)
class Gate:
    """The form of a gating layer. Two `paths`: the weights M of blocks come from a linear layer and norm of their own,
    otherwise M are the scores G themselves. Scores and weights are about `start` at first, by the last bias before the
    sigmoid. Without `sigmoid` they are what is before it, unbounded and of either sign."""

    input_shape: tuple[int, ...]
    num_blocks: int
    paths: int = 1
    pre_norm: bool = True
    post_norm: bool = True
    sigmoid: bool = True
    start: float = 0.5

    def __post_init__(self) -> None:
        if not self.input_shape:
            raise SparsonaError("a gate for inputs without a shape", expected="images or vectors of numbers")

    @property
    def channels(self) -> int:
        """Of images, their channels; a vector is one channel."""
        return self.input_shape[0] if len(self.input_shape) > 1 else 1

    @cached_property
    def layout(self) -> Layout:
        """Its parameters, and what they cost in a forward pass."""
        entries, blocks, slots = math.prod(self.input_shape), self.num_blocks, []
        if self.pre_norm:
            slots += [Slot("pre.means", (3,)), Slot("pre.vars", (3,))]
            slots += [Slot("pre.weight", (self.channels,)), Slot("pre.bias", (self.channels,))]
        for path in range(self.paths):
            slots += [Slot(f"{path}.weight", (blocks, entries), 2), Slot(f"{path}.bias", (blocks,), 1)]
            if self.post_norm:
                slots += [Slot(f"{path}.post.weight", (blocks,)), Slot(f"{path}.post.bias", (blocks,))]
        return Layout(tuple(slots))

    @cached_property
    def buffer_layout(self) -> Layout:
        """Its running statistics."""
        names = [("pre", self.channels)] if self.pre_norm else []
        if self.post_norm:
            names += [(f"{path}.post", self.num_blocks) for path in range(self.paths)]
        return Layout(tuple(Slot(f"{name}.{what}", (size,)) for name, size in names for what in ("mean", "var")))

    def init(self, seed: int, like: Tensor) -> tuple[Tree, Tree]:
        """Parameters as torch's layers draw them, and statistics of inputs never seen, on the device of `like`."""
        import torch

        random, bound = generator(seed), 1 / math.sqrt(math.prod(self.input_shape))
        last = math.log(self.start / (1 - self.start)) if self.sigmoid else self.start
        values = {}
        for slot in self.layout.slots:
            if slot.flops_per_weight:
                values[slot.name] = (2 * torch.rand(slot.shape, generator=random) - 1) * bound
            else:
                values[slot.name] = torch.full(slot.shape, 0.0 if slot.name.endswith("bias") else 1.0)
            if slot.name.endswith(".post.bias" if self.post_norm else ".bias") and not slot.name.startswith("pre"):
                values[slot.name] = values[slot.name] + last
        starts = {s.name: torch.full(s.shape, float(s.name.endswith("var"))) for s in self.buffer_layout.slots}
        params, buffers = Tree.of(values, self.layout), Tree.of(starts, self.buffer_layout)
        return params.like(params.flat.to(like.device)), buffers.like(buffers.flat.to(like.device))

    def scores(
        self, params: Tree, buffers: Tree, inputs: Tensor, weight: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tree]:
        """G and M of each example [N, blocks], and the statistics afterwards.

        With `weight` [N] as in training: norms go by the batch, weighted, and their running statistics move. Without,
        as in evaluation: they go by the running ones, and an example's scores depend on nothing but itself.
        """
        import torch

        moved: dict[str, Tensor] = {}
        x = inputs.reshape(len(inputs), self.channels, -1)
        if self.pre_norm:
            x = _switchable_norm(x, params, buffers, weight, moved)
        flat, found = x.reshape(len(inputs), -1), []
        for path in range(self.paths):
            y = flat @ params[f"{path}.weight"].transpose(0, 1) + params[f"{path}.bias"]
            if self.post_norm:
                y = _batch_norm(y, f"{path}.post", params, buffers, weight, moved)
            found.append(y.sigmoid() if self.sigmoid else y)
        if moved:
            parts = [moved[name].detach() for name in self.buffer_layout.names]
            buffers = buffers.like(torch.cat(parts))
        return found[0], found[-1], buffers


def weighted_mean(values: Tensor, weight: Tensor) -> Tensor:
    """The mean over the first dimension; finite also if all weights are 0."""
    return (values * weight.reshape(-1, *[1] * (values.dim() - 1))).sum(0) / weight.sum().clamp(min=1.0)


def _switchable_norm(x: Tensor, params: Tree, buffers: Tree, weight: Tensor | None, moved: dict[str, Tensor]) -> Tensor:
    """Luo et al., 2019: mean and variance are mixtures of those of the image's channel, of the image, and of the
    channel over the batch; the logits of both mixtures are learned."""
    import torch

    mean_in, var_in = x.mean(-1), x.var(-1, correction=0)  # [N, C]
    second = var_in + mean_in.square()
    mean_ln = mean_in.mean(1, keepdim=True).expand_as(mean_in)
    var_ln = second.mean(1, keepdim=True) - mean_ln.square()
    if weight is None:
        mean_bn, var_bn = buffers["pre.mean"], buffers["pre.var"]
    else:
        mean_bn = weighted_mean(mean_in, weight)
        var_bn = (weighted_mean(second, weight) - mean_bn.square()).clamp(min=0.0)
        _move("pre", mean_bn, var_bn, buffers, weight.sum() > 0, moved)
    by_mean, by_var = params["pre.means"].softmax(0), params["pre.vars"].softmax(0)
    mean = by_mean[0] * mean_in + by_mean[1] * mean_ln + by_mean[2] * mean_bn
    var = by_var[0] * var_in + by_var[1] * var_ln.clamp(min=0.0) + by_var[2] * var_bn
    normed = (x - mean.unsqueeze(-1)) * torch.rsqrt(var + EPS).unsqueeze(-1)
    return normed * params["pre.weight"].unsqueeze(-1) + params["pre.bias"].unsqueeze(-1)


def _batch_norm(
    y: Tensor, name: str, params: Tree, buffers: Tree, weight: Tensor | None, moved: dict[str, Tensor]
) -> Tensor:
    import torch

    if weight is None:
        mean, var = buffers[f"{name}.mean"], buffers[f"{name}.var"]
    else:
        mean = weighted_mean(y, weight)
        var, count = weighted_mean((y - mean).square(), weight), weight.sum()
        # As torch does, the running variance is the unbiased one; one example alone has none.
        _move(name, mean, var * count / (count - 1).clamp(min=1.0), buffers, count > 1, moved)
    normed = (y - mean) * torch.rsqrt(var + EPS)
    return normed * params[f"{name}.weight"] + params[f"{name}.bias"]


def _move(name: str, mean: Tensor, var: Tensor, buffers: Tree, counts: Tensor, moved: dict[str, Tensor]) -> None:
    """Running statistics after a batch, if it counts."""
    by = (1 - KEPT) * counts.to(mean.dtype)
    for what, value in (("mean", mean), ("var", var)):
        before = buffers[f"{name}.{what}"]
        moved[f"{name}.{what}"] = before + by * (value.detach() - before)
