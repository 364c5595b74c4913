"""Optimizers as pairs of pure functions with explicit memory: SGD, momentum, Adam, AdamW.

`init(params)` makes the memory, a tuple of trees and tensors that is empty for plain SGD, and `step` takes it and
returns the next one. A method keeps it in Work during a turn and, with `optimizer_memory="keep"`, in State between
rounds. To add an optimizer, write a function here, a row in `OPTIMIZERS`, and its name in `OptimizerName`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from sparsona.core.layout import Layout
from sparsona.core.round import Tick
from sparsona.core.tree import Tree, map_parts, norm, zeros_like
from sparsona.core.update import PartSize, Support

if TYPE_CHECKING:
    from torch import Tensor

Memory = tuple[Any, ...]
OptimizerName = Literal["sgd", "adam", "adamw"]
FLAG: dict[str, Any] = {"flag": True}  # an option with a flag of its own on the command line
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Decay = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Rate = Annotated[float, Field(ge=0, lt=1)]
DECAY_TEXT = "L2 penalty of the weights"


class OptimizerOptions(BaseModel):
    """Options of a client's optimizer."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    lr: Positive = Field(0.1, description="learning rate in the first round", json_schema_extra=FLAG)
    weight_decay: Decay = Field(5e-4, description=DECAY_TEXT, json_schema_extra=FLAG)
    clip_norm: Positive | None = Field(10.0, description="largest gradient norm, over all entries; 'none' for no limit")
    optimizer: OptimizerName = Field("sgd", description="optimizer of clients", json_schema_extra=FLAG)
    momentum: Rate = Field(0.0, description="momentum of optimizer=sgd", json_schema_extra=FLAG)
    nesterov: bool = Field(False, description="momentum as Nesterov has it")
    beta1: Rate = Field(0.9, description="adam and adamw: decay of the mean of gradients")
    beta2: Rate = Field(0.999, description="adam and adamw: decay of the mean of their squares")
    eps: Positive = Field(1e-8, description="adam and adamw: least size that a step is divided by")
    optimizer_memory: Literal["reset", "keep"] = Field(
        "reset", description="momentum and moments begin anew in every round, or the client keeps them"
    )

    @model_validator(mode="after")
    def _is_one_optimizer(self) -> Self:
        if self.momentum and self.optimizer != "sgd":
            raise ValueError(f"momentum with optimizer=sgd only: {self.optimizer} has beta1")
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov with a momentum above 0 only")
        return self


class Step(Protocol):
    """One step: returns the new parameters and the new memory, in new buffers.

    Args:
        params: the parameters.
        grads: their gradient.
        memory: the memory.
        tick: the time of the step; learning rates are multiplied by `tick.lr_scale`.
        where: above 0 for entries that are updated: the others, and their memory, do not change. None: all.
        share: the factor of gradient clipping, if the norm includes more than `grads`; None: computed from `grads`.
    """

    def __call__(
        self,
        params: Tree,
        grads: Tree,
        memory: Memory,
        tick: Tick,
        where: Tensor | None = None,
        share: Tensor | float | None = None,
    ) -> tuple[Tree, Memory]: ...


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """A pair of pure functions, and what its memory costs.

    Args:
        init: makes the memory for some parameters.
        step: takes a step; see `Step`.
        num_trees: how many trees as large as the parameters the memory holds.
        flops: per entry and step. Those of SGD are not counted, as in the papers.
        keeps: whether a client keeps the memory between rounds.

    Example:
        >>> import torch
        >>> from sparsona.core.round import Tick
        >>> from sparsona.core.tree import Tree
        >>> sgd = make_optimizer(OptimizerOptions(lr=0.5, weight_decay=0, momentum=0.9))
        >>> params, grads = Tree.of({"w": torch.tensor([1.0])}), Tree.of({"w": torch.tensor([2.0])})
        >>> params, memory = sgd.step(params, grads, sgd.init(params), Tick(torch.tensor(1.0), torch.tensor(0)))
        >>> params["w"].item(), memory[0]["w"].item()
        (0.0, 2.0)
    """

    init: Callable[[Tree], Memory]
    step: Step
    num_trees: int = 0
    flops: int = 0
    keeps: bool = False

    def first(self, params: Tree) -> Memory:
        """The memory in a client's initial State.

        Args:
            params: the initial parameters.

        Returns:
            A memory; empty if clients do not keep it.
        """
        return self.init(params) if self.keeps else ()

    def begin(self, kept: Memory, params: Tree) -> Memory:
        """The memory at the start of a turn.

        Args:
            kept: the memory in State.
            params: the parameters to train.

        Returns:
            The kept memory, or a new one.
        """
        return kept or self.init(params)

    def end(self, memory: Memory) -> Memory:
        """The memory to keep in State after a turn.

        Args:
            memory: the memory after the last step.

        Returns:
            The same; empty if clients do not keep it.
        """
        return memory if self.keeps else ()

    def sizes(
        self, name: str, layout: Layout, num_values: int | None = None, support: Support = Support.DENSE
    ) -> tuple[PartSize, ...]:
        """The sizes of the memory, without its count of steps.

        Args:
            name: the name of the parts.
            layout: the layout of the model.
            num_values: the entries of the model inside its mask; None: all.
            support: how the entries are known.

        Returns:
            One size for each tree of the memory.
        """
        size = layout.size if num_values is None else num_values
        return tuple(PartSize(f"{name} {number}", layout, size, support) for number in range(self.num_trees))


def make_optimizer(options: OptimizerOptions, lr: float | None = None) -> Optimizer:
    """The optimizer that these options name.

    Args:
        options: a method's options.
        lr: the learning rate, if it is not `options.lr`.

    Returns:
        The pair of functions. Learning rates are scaled by `tick.lr_scale`.

    Example:
        >>> make_optimizer(OptimizerOptions(optimizer="adam")).num_trees
        2
    """
    return OPTIMIZERS[options.optimizer](options, options.lr if lr is None else lr)


def clip_share(max_norm: float | None, *grads: Tree) -> Tensor | float:
    """The factor that clips a gradient to a norm.

    Args:
        max_norm: the largest norm; None: no limit.
        grads: the trees that make up the gradient.

    Returns:
        A factor of at most 1.

    Example:
        >>> import torch
        >>> round(float(clip_share(1.0, Tree.of({"w": torch.tensor([3.0, 4.0])}))), 3)
        0.2
    """
    if max_norm is None:
        return 1.0
    length = reduce(lambda one, other: one.hypot(other), map(norm, grads))
    share: Tensor = (max_norm / (length + 1e-6)).clamp(max=1.0)
    return share


def mask_memory(memory: Memory, mask: Tree) -> Memory:
    """A memory with zeros outside a mask.

    Args:
        memory: the memory of an optimizer.
        mask: the mask as numbers, 0 or 1.

    Returns:
        A new memory.

    Example:
        >>> import torch
        >>> velocity, mask = (Tree.of({"w": torch.tensor(values)}) for values in ([2.0, 3.0], [1.0, 0.0]))
        >>> mask_memory((velocity,), mask)[0]["w"].tolist()
        [2.0, 0.0]
    """
    return map_parts(lambda _path, leaf: leaf.like(leaf.flat * mask.flat) if isinstance(leaf, Tree) else leaf, memory)


def _update_where(new: Tensor, old: Tensor, where: Tensor | None) -> Tensor:
    """The new values where `where` is above 0, the old ones elsewhere."""
    return new if where is None else new.where(where > 0, old)


def _sgd(options: OptimizerOptions, rate: float) -> Optimizer:
    """SGD as torch has it: the gradient of the loss alone is clipped, then decay is added, then momentum."""
    decay, momentum = options.weight_decay, options.momentum
    keeps = options.optimizer_memory == "keep"

    def plain(
        params: Tree,
        grads: Tree,
        memory: Memory,
        tick: Tick,
        where: Tensor | None = None,
        share: Tensor | float | None = None,
    ) -> tuple[Tree, Memory]:
        # One new buffer for the decay and one for the gradient: a step of a small network is bound by memory, not by
        # arithmetic. Not in place: torch.func.vmap has no such operation for a stack of clients.
        lr = rate * tick.lr_scale
        size = lr * (clip_share(options.clip_norm, grads) if share is None else share)
        # Not params * (1 - lr * decay): next to 1, a small decay drowns in rounding.
        flat = params.flat.addcmul(params.flat, lr * decay, value=-1.0)
        flat = flat.addcmul(grads.flat, size, value=-1.0)
        return params.like(_update_where(flat, params.flat, where)), memory

    def with_momentum(
        params: Tree,
        grads: Tree,
        memory: Memory,
        tick: Tick,
        where: Tensor | None = None,
        share: Tensor | float | None = None,
    ) -> tuple[Tree, Memory]:
        (velocity,) = memory
        gradient = grads.flat * (clip_share(options.clip_norm, grads) if share is None else share)
        speed = momentum * velocity.flat + gradient + decay * params.flat
        ahead = gradient + decay * params.flat + momentum * speed if options.nesterov else speed
        flat = params.flat - rate * tick.lr_scale * ahead
        return params.like(_update_where(flat, params.flat, where)), (
            velocity.like(_update_where(speed, velocity.flat, where)),
        )

    if not momentum:
        return Optimizer(init=lambda params: (), step=plain, keeps=keeps)
    return Optimizer(init=lambda params: (zeros_like(params),), step=with_momentum, num_trees=1, keeps=keeps)


@dataclass(frozen=True)
class Moments:
    """The memory of Adam.

    Args:
        first: the running mean of the gradient.
        second: the running mean of its square.
        step: the number of steps so far.
    """

    first: Tree
    second: Tree
    step: Tensor


def init_moments(params: Tree) -> Moments:
    """The memory of Adam before the first step.

    Args:
        params: the parameters, for their layout.

    Returns:
        Zeros.
    """
    zeros = zeros_like(params)
    return Moments(zeros, zeros, params.flat.new_zeros(()).double())


def adam_step(
    params: Tree, slope: Tensor, memory: Moments, lr: Tensor | float, betas: tuple[float, float], eps: float
) -> tuple[Tensor, Moments]:
    """One step of Adam with bias correction.

    Args:
        params: the parameters.
        slope: the gradient, flat.
        memory: the moments.
        lr: the learning rate.
        betas: the decays of the two means.
        eps: added to the denominator.

    Returns:
        The new entries, flat, and the new moments.
    """
    step = memory.step + 1
    first = memory.first.flat.lerp(slope, 1 - betas[0])
    second = memory.second.flat.lerp(slope.square(), 1 - betas[1])
    size = (second / (1 - betas[1] ** step)).sqrt() + eps
    new = params.flat - lr * (first / (1 - betas[0] ** step)) / size
    return new, Moments(params.like(first), params.like(second), step)


def _adam(options: OptimizerOptions, rate: float, decouples: bool = False) -> Optimizer:
    """Adam with L2 decay in the gradient, or AdamW, whose decay is scaled by the learning rate alone."""
    decay, betas = options.weight_decay, (options.beta1, options.beta2)

    def step(
        params: Tree,
        grads: Tree,
        memory: Memory,
        tick: Tick,
        where: Tensor | None = None,
        share: Tensor | float | None = None,
    ) -> tuple[Tree, Memory]:
        (old,) = memory
        lr = rate * tick.lr_scale
        slope = grads.flat * (clip_share(options.clip_norm, grads) if share is None else share)
        if not decouples:
            slope = slope + decay * params.flat
        flat, new = adam_step(params, slope, old, lr, betas, options.eps)
        if decouples:
            flat = flat - lr * decay * params.flat
        first = old.first.like(_update_where(new.first.flat, old.first.flat, where))
        second = old.second.like(_update_where(new.second.flat, old.second.flat, where))
        return params.like(_update_where(flat, params.flat, where)), (Moments(first, second, new.step),)

    return Optimizer(
        init=lambda params: (init_moments(params),),
        step=step,
        num_trees=2,
        flops=15,  # two lerps of 3, a square, two corrections, root, eps, quotient, rate, difference, 2 of decay: 15
        keeps=options.optimizer_memory == "keep",
    )


def _adamw(options: OptimizerOptions, rate: float) -> Optimizer:
    return _adam(options, rate, decouples=True)


OPTIMIZERS: dict[OptimizerName, Callable[[OptimizerOptions, float], Optimizer]] = {
    "sgd": _sgd,
    "adam": _adam,
    "adamw": _adamw,
}
