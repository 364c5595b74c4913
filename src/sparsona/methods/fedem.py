"""FedEM: every client's data are a mixture of a few distributions, each learned by a component that all share.

Paper: Marfoq, Neglia, Bellet, Kameni, Vidal, Federated Multi-Task Learning under a Mixture of Distributions, NeurIPS
2021, Algorithm 1 (FedEM, with a server). What is a client's own are the weights pi of its mixture. In each round it
assigns its examples to the components by how likely these make them (E-step, one pass over the training data), then
trains each component on its share (M-step). It predicts with the mixture of the components' probabilities. A client
that has no mixture yet, novel or stateless, finds one by E-steps alone, as the paper has it for clients that were not
there in training; so do clients in their first turn, before they train, except in the first round, in which no
component has learned anything to be told apart by.

Kept: pi (and each component's BatchNorm statistics). Travels: all `num_models` components, both ways. Costs: that many
dense trainings and predictions, and the pass that assigns examples.

With one component it is FedAvg to the bit. Components that start equal stay equal, so each is drawn from a seed of its
own; where the initial weights are given (a module with weights, a warm start), further components are those with noise
of a tenth of each tensor's size. A sequence of tokens is one example, assigned by the mean of its losses.

The learning rate: the share of an example scales its gradient, so that each of three components takes steps a third as
long as FedAvg's at the same rate. The default is therefore three times FedAvg's; with FedAvg's own, three components
are far behind it (digits, ten rounds: 42% against 66%).

Preset `authors`: one epoch with momentum that the client keeps between rounds, and the mean of all clients' components,
in which those that did not take part count with the old ones (`average_over="all"`: few participants move it little).
The authors' rates go by data set (EMNIST: 0.05). Preset `pfedgate`: the same code as that paper ran it, with clipping.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from sparsona.core.layout import Layout, Slot
from sparsona.core.method import (
    Batch,
    Client,
    Cost,
    Grads,
    Inbox,
    Method,
    PartSize,
    Phase,
    Probe,
    Round,
    Seeds,
    ServerHalf,
    Tick,
    Tree,
    Update,
    dense,
    message,
)
from sparsona.core.seeds import generator
from sparsona.learning.means import WeightedSum
from sparsona.learning.optimizer import FLAG, Memory, Positive, make_optimizer
from sparsona.learning.phases import Training, turn_flops

if TYPE_CHECKING:
    from torch import Tensor, nn

    from sparsona.core.task import Task


class FedEMConfig(Training):
    """What FedEM adds to the options of training."""

    lr: Positive = Field(0.3, description="learning rate in the first round", json_schema_extra=FLAG)
    num_models: int = Field(3, ge=1, description="components of the mixture")
    newcomer_steps: int = Field(10, ge=1, description="E-steps by which a client without a mixture finds its own")
    average_over: Literal["participants", "all"] = Field(
        "participants", description="whose components are averaged; all: those of absent clients are the old ones"
    )


@dataclass(frozen=True)
class FedEMState:
    """What a client keeps between rounds: pi; statistics of the first component, of the others; optimizers' memory."""

    mixture: Tensor
    buffers: Tree
    buffers_of_others: tuple[Tree, ...]
    memory: tuple[Memory, ...]


@dataclass(frozen=True)
class FedEMWork:
    """The components, pi, and q: a row for each training example, how much of it belongs to each component."""

    models: tuple[Tree, ...]
    buffers: tuple[Tree, ...]
    memory: tuple[Memory, ...]
    mixture: Tensor
    shares: Tensor


@dataclass(frozen=True)
class FedEMServer:
    """The components, and the number of all clients' examples."""

    models: tuple[Tree, ...]
    num_examples: Tensor


def fedem(task: Task, config: FedEMConfig) -> Method:
    """A mixture of components that all clients train."""
    optimizer, num = make_optimizer(config), config.num_models
    forward_flops, train_flops = num * task.layout.forward_flops(), num * task.layout.train_flops()
    step_flops = num * optimizer.flops * task.layout.size

    def init_client(params: Tree, buffers: Tree, client: Client, seeds: Seeds) -> FedEMState:
        even = params.flat.new_full((num,), 1 / num)
        return FedEMState(even, buffers, (buffers,) * (num - 1), (optimizer.first(params),) * num)

    def receive(state: FedEMState, inbox: Inbox, probe: Probe, round_: Round) -> FedEMWork:
        (update,) = inbox
        assert round_.client is not None
        models = tuple(update.parts[f"model{number}"].tree() for number in range(num))
        memory = tuple(optimizer.begin(kept, model) for kept, model in zip(state.memory, models, strict=True))
        # As many rows as the largest client needs: executors run Works of one shape together.
        rows = max(round_.client.num_examples, round_.client.most_examples)
        shares = state.mixture.new_zeros((rows, num))
        return FedEMWork(models, (state.buffers, *state.buffers_of_others), memory, state.mixture, shares)

    def outputs(work: FedEMWork, inputs: Tensor) -> list[Tensor]:
        pairs = zip(work.models, work.buffers, strict=True)
        return [task.forward(model, buffers, inputs, False)[0] for model, buffers in pairs]

    def find_losses(work: FedEMWork, probe: Probe) -> Tensor:
        """A row for each training example, a column for each component."""
        import torch

        def of_examples(found: Tensor, batch: Batch) -> Tensor:
            losses, weight = task.losses(found, batch)
            return (losses * weight).flatten(1).sum(1) / weight.flatten(1).sum(1) if losses.dim() > 1 else losses

        rows = [
            torch.stack([of_examples(found, batch) for found in outputs(work, batch.inputs)], dim=1)
            for batch in probe.train(forward_flops)
        ]
        return torch.cat(rows)

    def find_mixture(work: FedEMWork, probe: Probe, steps: int) -> tuple[Tensor, Tensor]:
        """q and pi; the components stay as they are, so that one pass is enough for all E-steps."""
        losses, mixture = find_losses(work, probe), work.mixture
        for _ in range(steps):
            shares = (mixture.log() - losses).softmax(1)  # E-step: q is proportional to pi exp(-loss)
            mixture = shares.mean(0)  # M-step for pi: the mean of q
        return shares, mixture

    def enter(work: FedEMWork, probe: Probe, round_: Round) -> FedEMWork:
        assert round_.client is not None
        count = round_.client.num_examples
        if not count:
            return work
        is_newcomer = round_.is_new and round_.index > 0  # in the first round no component has learned anything
        shares, mixture = find_mixture(work, probe, config.newcomer_steps if is_newcomer else 1)
        table = work.shares.clone()
        table[:count] = shares
        return replace(work, mixture=mixture, shares=table)

    def adapt(work: FedEMWork, probe: Probe, round_: Round) -> FedEMWork:
        assert round_.client is not None
        if not round_.is_new or not round_.client.num_examples:
            return work
        return replace(work, mixture=find_mixture(work, probe, config.newcomer_steps)[1])

    def loss(work: FedEMWork, batch: Batch) -> tuple[Tensor, tuple[Tree, ...]]:  # M-step for the components
        shares = work.shares.index_select(0, batch.index).unbind(-1)
        values: list[Any] = []
        statistics: list[Tree] = []
        for share, model, buffers in zip(shares, work.models, work.buffers, strict=True):
            found, after = task.forward(model, buffers, batch.inputs, True, batch.noise)
            losses, weight = task.losses(found, batch)
            own = share.reshape(-1, *[1] * (losses.dim() - 1))
            values.append((losses * weight * own).sum() / weight.sum())
            statistics.append(after)
        return sum(values[1:], start=values[0]), tuple(statistics)

    def update(work: FedEMWork, grads: Grads, tick: Tick) -> FedEMWork:
        trios = zip(work.models, grads["models"], work.memory, strict=True)
        steps = [optimizer.step(model, slope, memory, tick) for model, slope, memory in trios]
        return replace(work, models=tuple(model for model, _ in steps), memory=tuple(memory for _, memory in steps))

    def finish(
        state: FedEMState, work: FedEMWork, inbox: Inbox, probe: Probe, round_: Round
    ) -> tuple[FedEMState, Update]:
        assert round_.client is not None
        parts = {f"model{number}": dense(model) for number, model in enumerate(work.models)}
        memory = tuple(optimizer.end(memory) for memory in work.memory)
        kept = FedEMState(work.mixture, work.buffers[0], work.buffers[1:], memory)
        return kept, message(round_, parts, weight=round_.client.num_examples)

    def predict(work: FedEMWork, inputs: Tensor) -> Tensor:
        from sparsona.learning.mixture import mix_predictions

        return mix_predictions(outputs(work, inputs), work.mixture, task.targets)

    def deploy(work: FedEMWork) -> nn.Module:
        from sparsona.learning.mixture import Mixture

        modules = [task.module(model, buffers) for model, buffers in zip(work.models, work.buffers, strict=True)]
        return Mixture(modules, work.mixture.cpu(), task.targets)

    def cost(layout: Layout, client: Client, round_: Round) -> Cost:
        def vector(name: str, size: int) -> PartSize:
            return PartSize(name, Layout((Slot(name, (size,)),)), size)

        models = tuple(PartSize(f"model{number}", layout, layout.size) for number in range(num))
        memory = tuple(part for number in range(num) for part in optimizer.sizes(f"memory{number}", layout))
        # All components take their steps together: as many gradients.
        at_work = (vector("shares", num * client.num_examples), vector("gradient", num * layout.size))
        mixture = vector("mixture", num)
        assigned = client.num_examples * forward_flops
        return Cost(
            models,
            models,
            turn_flops((phase,), client, round_, train_flops, step_flops),
            assigned,
            kept=(mixture, *memory) if optimizer.keeps else (mixture,),
            infer_flops=forward_flops,
            at_work=at_work if optimizer.keeps else (*memory, *at_work),
            tune_flops=turn_flops((replace(phase, epochs=1),), client, round_, train_flops, step_flops),
            tune_search_flops=assigned,
        )

    def init_server(params: Tree, clients: tuple[Client, ...], seeds: Seeds) -> FedEMServer:
        drawn = (_other_start(task, params, seeds.shared(f"component/{number}")) for number in range(1, num))
        total = float(sum(client.num_examples for client in clients))
        return FedEMServer((params, *drawn), params.flat.new_full((), total).double())

    def reply(server: FedEMServer, client: Client, round_: Round) -> Update:
        return message(round_, {f"model{number}": dense(model) for number, model in enumerate(server.models)})

    def zero(server: FedEMServer, round_: Round) -> tuple[WeightedSum, ...]:
        return (WeightedSum(),) * num

    def add(server: FedEMServer, total: tuple[WeightedSum, ...], update: Update) -> tuple[WeightedSum, ...]:
        return tuple(one.add(update.parts[f"model{number}"].tree(), update.weight) for number, one in enumerate(total))

    def merge(one: tuple[WeightedSum, ...], other: tuple[WeightedSum, ...]) -> tuple[WeightedSum, ...]:
        return tuple(mine.merge(theirs) for mine, theirs in zip(one, other, strict=True))

    def step(server: FedEMServer, total: tuple[WeightedSum, ...], round_: Round) -> FedEMServer:
        def mean(old: Tree, one: WeightedSum) -> Tree:  # by number of examples
            absent = float(server.num_examples) - one.weight
            return (one.add(old, absent) if config.average_over == "all" and absent > 0 else one).mean(otherwise=old)

        return replace(server, models=tuple(map(mean, server.models, total)))

    phase = Phase(
        name="train",
        trains=("models",),
        loss=loss,
        update=update,
        epochs=config.epochs,
        enter=enter,
        mixes_examples=task.mixes_examples,
        flops=lambda work: train_flops,
        step_flops=(lambda work: step_flops) if step_flops else None,
    )
    return Method(
        init_client=init_client,
        receive=receive,
        phases=(phase,),
        finish=finish,
        predict=predict,
        cost=cost,
        deploy=deploy,
        tune=phase,
        server=ServerHalf(init=init_server, reply=reply, zero=zero, add=add, step=step, merge=merge),
        trait=lambda state: state.mixture,
        adapt=adapt,
    )


def _other_start(task: Task, params: Tree, seed: int) -> Tree:
    """The start of a further component: drawn as the first was, or the first with noise if its weights were given."""
    import torch

    drawn = task.init(seed)[0].flat.to(params.device)
    if not torch.equal(drawn, params.flat):
        return params.like(drawn)
    random, parts = generator(seed), []
    for value in (params[name] for name in params):
        size = float(value.square().mean().sqrt()) or 0.1
        noise = 0.1 * size * torch.randn(value.shape, generator=random)
        parts.append((value + noise.to(value.device)).reshape(-1))
    return params.like(torch.cat(parts))
