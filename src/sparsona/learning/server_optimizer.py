"""The server's optimizer: take the mean of the clients' models, or treat the difference to it as a gradient.

The pseudo-gradient is old - mean. `sgd` with a step of 1 is the plain mean, to the bit. `adam` is FedAdam as in the
code of the partial-personalisation paper: betas .9 and .999, eps 1e-8, bias correction. Reddi et al. (ICLR 2021) use a
tau of 1e-3 in place of eps, and no correction.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from sparsona.core.tree import Tree
from sparsona.learning.optimizer import Moments, Positive, adam_step, init_moments
from sparsona.learning.phases import Training

BETAS, EPS = (0.9, 0.999), 1e-8


class ServerStep(Training):
    """Options of training where a server steps towards the mean."""

    server_optimizer: Literal["sgd", "adam"] = Field("sgd", description="how the server steps towards the mean")
    server_lr: Positive | None = Field(
        None, description="the server's step; none: 1 (the mean) with sgd, .001 with adam"
    )


def begin_moments(config: ServerStep, params: Tree) -> tuple[Moments, ...]:
    """The memory of the server's optimizer before the first round; empty with sgd."""
    return () if config.server_optimizer == "sgd" else (init_moments(params),)


def server_step(
    config: ServerStep, old: Tree, mean: Tree, moments: tuple[Moments, ...]
) -> tuple[Tree, tuple[Moments, ...]]:
    """The server's next parameters, and the next memory of its optimizer."""
    if not moments:
        lr = 1.0 if config.server_lr is None else config.server_lr
        return (mean if lr == 1.0 else old.like(old.flat.lerp(mean.flat, lr))), ()
    lr = 1e-3 if config.server_lr is None else config.server_lr
    (memory,) = moments
    new, memory = adam_step(old, old.flat - mean.flat, memory, lr, BETAS, EPS)
    return old.like(new), (memory,)
