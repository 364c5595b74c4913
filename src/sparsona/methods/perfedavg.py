"""Per-FedAvg: a shared model from which one step on a client's data leads to a good model for that client.

Paper: Fallah, Mokhtari, Ozdaglar, Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic
Meta-Learning Approach, NeurIPS 2020, Algorithm 1. Clients descend F_i(w) = f_i(w - a grad f_i(w)), whose gradient is
(I - a H) grad f_i(w - a grad f_i(w)) with H the Hessian of f_i at w and a = `adapt_lr`. Each of the three factors has a
batch of its own. `variant` says what becomes of H: `fo` leaves it out, and a step reads two batches; `hf` takes the
difference of the gradients on both sides of w; `exact` differentiates twice.

Kept: nothing but BatchNorm statistics. Travels: the dense model, both ways, and once more down for the last adaptation.
Costs: dense training. An epoch of N batches has N/2 steps with fo, N/3 with hf and exact, where FedAvg has N. A step
takes a gradient of each batch with fo, 4/3 of one with hf and exact: the third batch is differentiated twice.

Before it predicts, a model takes one step on a batch of its client's training data, also where it is evaluated between
rounds. The last one is final tuning (`tune_epochs=1`, one step, whatever the number), and is charged.

The displacement of `hf` is a constant, delta, times the gradient in the paper, so that its length changes with the
gradient's. Here it is `hf_length` times 1 + |w| long. In smooth networks the direction is then within .1% of the exact
one; with ReLU or max-pooling, in the median: on digits .06%, where a thousand times the length gives 54%, `fo` 93%
(after 200 steps). But where a kink lies between the two points, the difference contains its jump divided by the length,
whatever that is. So the Hessian's part is limited to the length of the rest, as it is by itself where adapt_lr is at
most 1/L, which the paper's theory assumes. `hf` needs fp32: in lower precision nothing is left of the difference.

Differences from the text: clients weigh by their examples (`weight=equal`: the text); decay and clipping are FedAvg's,
and not applied to the adapting step. The code most used for comparisons, that of pFedMe's authors, adapts to batches of
the test data, and is first-order; so is the row `perfedavg`: on digits it learns more from the same number of examples
(60% after 10 rounds of one seed, `hf` and `exact` 57%, FedAvg with twice the steps 66%), and costs less.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from sparsona.core.errors import SparsonaError
from sparsona.core.method import (
    Batch,
    Client,
    Cost,
    Grads,
    Layout,
    Method,
    PartSize,
    Probe,
    Round,
    Tick,
)
from sparsona.learning.optimizer import Positive, make_optimizer
from sparsona.learning.phases import Model, turn_flops
from sparsona.methods.fedavg import FedAvgConfig, fedavg

if TYPE_CHECKING:
    from torch import Tensor

    from sparsona.core.task import Task

# What a step holds besides the model and a gradient.
HELD = {"fo": ("adapted",), "hf": ("direction", "displaced", "ahead"), "exact": ("direction", "product")}


class PerFedAvgConfig(FedAvgConfig):
    """What Per-FedAvg adds to the options of FedAvg."""

    adapt_lr: Positive = Field(0.03, description="learning rate of the step that adapts the shared model to a client")
    variant: Literal["fo", "hf", "exact"] = Field(
        "fo", description="the Hessian is left out, replaced by a difference of gradients, or exact"
    )
    hf_length: Positive = Field(
        1e-5, description="hf: length of the displacement on each side, as a share of 1 + the norm of the weights"
    )


def perfedavg(task: Task, config: PerFedAvgConfig) -> Method:
    """A shared model that is adapted to each client by one step."""
    _check(task, config)
    base = fedavg(task, config)
    (plain,) = base.phases
    optimizer = make_optimizer(config)
    is_first_order = config.variant == "fo"
    # Two batches, a gradient each; or three batches and four gradients: a product with the Hessian costs two.
    passes = 3 if is_first_order else 4

    def slope(work: Model, at: Tensor, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The gradient at these weights; the loss, and the buffers after the pass."""
        import torch

        def value(flat: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            found, buffers = plain.loss(replace(work, params=work.params.like(flat)), batch)
            return found, (found, buffers.flat)

        result: tuple[Tensor, tuple[Tensor, Tensor]] = torch.func.grad(value, has_aux=True)(at)
        return result

    def curvature(work: Model, w: Tensor, vector: Tensor, batch: Batch) -> Tensor:
        """The product of the Hessian at w and a vector."""
        import torch

        product: Tensor
        if config.variant == "exact":
            product = torch.func.grad(lambda at: (slope(work, at, batch)[0] * vector).sum())(w)
            return product
        delta = config.hf_length * (1 + w.norm()) / (vector.norm() + 1e-12)
        ahead, behind = (slope(work, w + side * delta * vector, batch)[0] for side in (1, -1))
        product = (ahead - behind) / (2 * delta)  # equation 10
        limit: Tensor = (vector.norm() / (config.adapt_lr * product.norm() + 1e-12)).clamp(max=1.0)
        return product * limit

    def loss(work: Model, batches: tuple[Batch, ...]) -> tuple[Tensor, Any]:
        w = work.params.flat.detach()
        adapted = w - config.adapt_lr * slope(work, w, batches[0])[0]  # Algorithm 1 line 7
        direction, (value, buffers) = slope(work, adapted, batches[1])
        if not is_first_order:
            direction = direction - config.adapt_lr * curvature(work, w, direction, batches[2])
        # The value is the loss of the adapted model, the gradient is the direction (line 8).
        along = (work.params.flat * direction.detach()).sum()
        after = work.buffers.like(buffers) if task.moves_buffers else work.buffers
        return value.detach() + (along - along.detach()), after

    def adapt(work: Model, probe: Probe, round_: Round) -> Model:
        gradient, _ = slope(work, work.params.flat, probe.batch())
        return replace(work, params=work.params.like(work.params.flat - config.adapt_lr * gradient))

    def adapt_step(work: Model, grads: Grads, tick: Tick) -> Model:
        return replace(work, params=work.params.like(work.params.flat - config.adapt_lr * grads["params"].flat))

    def cost(layout: Layout, client: Client, round_: Round) -> Cost:
        found, training = base.cost(layout, client, round_), layout.train_flops()
        held = tuple(PartSize(name, layout, layout.size) for name in HELD[config.variant])
        per_step = optimizer.flops * layout.size
        return replace(
            found,
            train_flops=turn_flops((phase,), client, round_, passes * training // 3, per_step),
            at_work=(*held, *(found.at_work or ())),
            tune_flops=turn_flops((tune,), client, round_, training),
        )

    phase = replace(
        plain,
        loss=loss,
        batches_per_step=2 if is_first_order else 3,
        flops=lambda work: passes * task.layout.train_flops() // 3,
    )
    tune = replace(plain, update=adapt_step, epochs=1, max_steps=1, step_flops=None)
    return replace(base, phases=(phase,), adapt=adapt, cost=cost, tune=tune)


def _check(task: Task, config: PerFedAvgConfig) -> None:
    if config.variant != "hf" and config.hf_length != PerFedAvgConfig.model_fields["hf_length"].default:
        raise SparsonaError(
            f"hf_length={config.hf_length} with variant={config.variant}",
            expected="variant=hf, which takes a difference of gradients",
            hint="leave hf_length out, or choose that variant",
        )
    if config.variant == "hf" and task.half is not None:
        raise SparsonaError(
            "variant=hf with precision=bf16: nothing would be left of the difference of gradients",
            expected="precision=fp32",
            hint="--precision fp32, or another variant",
        )
