"""The server's optimizer: take the mean of the clients' models, or treat the difference to it as a gradient.

The pseudo-gradient is old - mean. `sgd` with a step of 1 is the plain mean, to the bit. `fedadam`, `fedyogi` and
`fedadagrad` are those of Reddi et al., Adaptive Federated Optimization, ICLR 2021, Algorithm 2: no correction of bias,
and second moments that start with the square of their tau, which is `server_eps`. `adam` is as in the code of the
partial-personalisation paper: Adam with bias correction, as torch has it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

from pydantic import Field, model_validator

from sparsona.core.tree import Tree
from sparsona.learning.optimizer import Moments, Positive, Rate, adam_step, init_moments
from sparsona.learning.phases import Training


@dataclass(frozen=True)
class _Defaults:
    lr: float
    beta1: float = 0.9
    beta2: float = 0.99
    eps: float = 1e-3


DEFAULTS = {
    "sgd": _Defaults(1.0),
    "adam": _Defaults(1e-3, beta2=0.999, eps=1e-8),
    "fedadam": _Defaults(0.03),
    "fedyogi": _Defaults(0.03),
    "fedadagrad": _Defaults(0.1, beta1=0.0),  # Adagrad has no momentum
}


class ServerStep(Training):
    """Options of training where a server steps towards the mean."""

    server_optimizer: Literal["sgd", "adam", "fedadam", "fedyogi", "fedadagrad"] = Field(
        "sgd", description="how the server steps towards the mean"
    )
    server_lr: Positive | None = Field(
        None,
        description="the server's step; none: 1 (the mean) with sgd, .001 with adam, .03 with fedadam and fedyogi, .1 "
        "with fedadagrad",
    )
    server_beta1: Rate | None = Field(
        None, description="decay of the server's mean of changes; none: .9, 0 with fedadagrad"
    )
    server_beta2: Rate | None = Field(
        None, description="decay of the mean of their squares; none: .999 with adam, .99 with fedadam and fedyogi"
    )
    server_eps: Positive | None = Field(
        None, description="least size that the server's step is divided by; none: 1e-8 with adam, .001 with the others"
    )

    @model_validator(mode="after")
    def _is_one_server_optimizer(self) -> Self:
        unused = {"sgd": ("server_beta1", "server_beta2", "server_eps"), "fedadagrad": ("server_beta2",)}
        for name in unused.get(self.server_optimizer, ()):
            if getattr(self, name) is not None:
                raise ValueError(f"{name} with server_optimizer={self.server_optimizer}, which has none")
        return self


def _options(config: ServerStep) -> _Defaults:
    """The options, where none is given those of the optimizer."""
    own = DEFAULTS[config.server_optimizer]
    given = (config.server_lr, config.server_beta1, config.server_beta2, config.server_eps)
    usual = (own.lr, own.beta1, own.beta2, own.eps)
    return _Defaults(*(one if found is None else found for found, one in zip(given, usual, strict=True)))


def begin_moments(config: ServerStep, params: Tree) -> tuple[Moments, ...]:
    """The memory of the server's optimizer before the first round; empty with sgd."""
    if config.server_optimizer == "sgd":
        return ()
    zeros = init_moments(params)
    if config.server_optimizer == "adam":
        return (zeros,)
    return (Moments(zeros.first, params.like(zeros.second.flat + _options(config).eps ** 2), zeros.step),)


def server_step(
    config: ServerStep, old: Tree, mean: Tree, moments: tuple[Moments, ...]
) -> tuple[Tree, tuple[Moments, ...]]:
    """The server's next parameters, and the next memory of its optimizer."""
    options = _options(config)
    if not moments:
        return (mean if options.lr == 1.0 else old.like(old.flat.lerp(mean.flat, options.lr))), ()
    (memory,) = moments
    slope = old.flat - mean.flat
    if config.server_optimizer == "adam":
        new, memory = adam_step(old, slope, memory, options.lr, (options.beta1, options.beta2), options.eps)
        return old.like(new), (memory,)
    first, squares, second = memory.first.flat.lerp(slope, 1 - options.beta1), slope.square(), memory.second.flat
    if config.server_optimizer == "fedadagrad":
        second = second + squares
    elif config.server_optimizer == "fedyogi":
        second = second - (1 - options.beta2) * squares * (second - squares).sign()
    else:
        second = second.lerp(squares, 1 - options.beta2)
    new = old.flat - options.lr * first / (second.sqrt() + options.eps)
    return old.like(new), (Moments(old.like(first), old.like(second), memory.step + 1),)
