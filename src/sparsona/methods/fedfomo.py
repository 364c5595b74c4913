"""FedFomo: each client mixes the models of others by how much they would help it, on its own validation data.

Paper: Zhang, Sapra, Fidler, Yeung, Alvarez, Personalized Federated Learning with First Order Model Optimization, ICLR
2021. Clients are peers here, as DisPFL ran it; in the paper a server passes the models on.

Kept: the model before and after the last training, and what other clients' models were worth so far. Travels, to each
peer that requests it: the dense model. Costs: dense training, and forward passes of every candidate over the
validation data, which a cost without validation data (`sparsona cost`) does not include.

A round: a client requests the models of some peers (`num_candidates`). These and its own newly trained model are the
candidates. Each has the weight

    w_n = (L(theta_prev) - L(theta_n)) / ||theta_n - theta_prev||

where theta_prev is the client's own model before its last training and L the mean loss on its validation data. The
client takes the mean of the candidates with positive weights, each by its share of them (`received`), and trains it
(`trained`). Losses that are summed over the data give the same shares. Weights, also negative ones, add up over the
rounds to the worth of a peer. Of the peers that are requested each is the one of most worth that is left, or with
probability `explore_rate` - round * `explore_decay` a random one; only peers that have a model to send are requested. A
model that diverged (its loss or distance is not finite) has no weight, and its sender is worth less than all others.

Mixing comes first, as in the authors' code: candidates are then all of one round, and a client that never trained can
mix what it receives. `order=train-mix` is DisPFL's: train, then mix the new model with what peers had mixed in the last
round. With it a new client mixes before its first training as well.

If no candidate has a positive weight, the trained model is kept. By the paper's formula it is theta_prev that is left,
and training was in vain: `if_none_helps=discard`, which `--preset paper`, `authors` and `dispfl` have. `--preset
authors` also has their learning rate of 0.1, decay of 0.99 and no momentum; they hold 20% of the data for validation
(`validation_rate`, a condition of every method in a comparison). `--preset dispfl` also trains first, and explores with
probability 0.5, once for all ten peers.

Not reproduced of the authors' code: worths add up weights divided by their sum; theta_prev can be a model from the
middle of training. Nor of DisPFL's: validation images are augmented; weights of peers that were not requested are added
to their worth again in each round; equal worths favour the last clients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from sparsona.core import tree
from sparsona.core.layout import Slot
from sparsona.core.method import (
    Client,
    Cost,
    Inbox,
    Layout,
    Method,
    PartSize,
    PeerHalf,
    Probe,
    Round,
    Seeds,
    Tree,
    Update,
    dense,
    message,
)
from sparsona.core.seeds import generator
from sparsona.learning.optimizer import Memory, make_optimizer
from sparsona.learning.phases import Training, plain_weights, predictor, training_phase, turn_flops

if TYPE_CHECKING:
    from torch import Tensor

    from sparsona.core.task import Task


class FedFomoConfig(Training):
    """What FedFomo adds to the options of training."""

    num_candidates: int = Field(10, ge=1, description="peers whose models a client requests; fewer if there are fewer")
    explore_rate: float = Field(0.3, ge=0, le=1, description="probability that a random peer is requested")
    explore_decay: float = Field(0.05, ge=0, le=1, description="what explore_rate loses in each round, down to 0")
    explore: Literal["each", "all"] = Field("each", description="decide it for each requested peer, or once for all")
    order: Literal["mix-train", "train-mix"] = Field("mix-train", description="what comes first in a round")
    if_none_helps: Literal["keep", "discard"] = Field(
        "keep", description="what becomes of the trained model if no candidate is better than the one before training"
    )


@dataclass(frozen=True)
class FedFomoState:
    """What a client keeps between rounds: its model before and after its last training, and the worth of each peer."""

    previous: Tree
    params: Tree
    buffers: Tree
    worth: Tensor
    memory: Memory = ()


@dataclass(frozen=True)
class FedFomoWork:
    """The model in training, the one that training started from, and the worth of each peer."""

    params: Tree
    start: Tree
    buffers: Tree
    worth: Tensor
    memory: Memory


def fedfomo(task: Task, config: FedFomoConfig) -> Method:
    """Peers that weigh each other's models by their validation loss."""
    optimizer = make_optimizer(config)
    phase = training_phase(task, config)
    trains_first = config.order == "train-mix"

    def validation_loss(params: Tree, buffers: Tree, probe: Probe) -> Tensor:
        import torch

        total = weight = params.flat.new_zeros((), dtype=torch.float64)
        with torch.no_grad():
            for batch in probe.validation():
                outputs, _ = task.forward(params, buffers, batch.inputs, train=False)
                losses, counted = task.losses(outputs, batch)
                total = total + (losses * counted).double().sum()
                weight = weight + counted.double().sum()
        return total / weight

    def mix(
        previous: Tree, trained: Sequence[tuple[int, Tree]], inbox: Inbox, buffers: Tree, worth: Tensor, probe: Probe
    ) -> tuple[Tree, Tensor]:
        """The mixed model and the new worths; `trained` is the client's own model after training, if it trained."""
        import torch

        received = [(update.sender, update.parts["model"].tree()) for update in inbox]
        if not received and not trained:
            return previous, worth
        base = validation_loss(previous, buffers, probe)
        total = torch.zeros_like(previous.flat, dtype=torch.float64)
        shares, worth = torch.zeros_like(base), worth.clone()
        for sender, params in (*received, *trained):
            distance = tree.norm(tree.subtract(params, previous)).double()
            gain = base - validation_loss(params, buffers, probe)
            weight = torch.where(distance > 0, gain / distance, 0.0)  # w_n
            # A model that diverged helps nobody, and nobody is worth less than who sent it.
            diverged = base.isfinite() & ~(gain.isfinite() & distance.isfinite())
            weight = torch.where(weight.isfinite() & ~diverged, weight, 0.0)
            worth[sender] += weight
            worth[sender] = torch.where(diverged, worth.min().clamp(max=0) - 1, worth[sender])
            share = weight.clamp(min=0)
            total.add_(torch.where(share > 0, params.flat.double() * share, 0.0))
            shares = shares + share
        # theta_prev + sum of share_n (theta_n - theta_prev), where the shares add up to 1: theta_prev cancels.
        otherwise = trained[0][1] if trained and config.if_none_helps == "keep" else previous
        mixed = torch.where(shares > 0, (total / shares).to(previous.flat.dtype), otherwise.flat)
        return previous.like(mixed), worth

    def init_client(params: Tree, buffers: Tree, client: Client, seeds: Seeds) -> FedFomoState:
        return FedFomoState(params, params, buffers, params.flat.new_zeros(client.num_clients), optimizer.first(params))

    def receive(state: FedFomoState, inbox: Inbox, probe: Probe, round_: Round) -> FedFomoWork:
        assert round_.client is not None
        params, worth = state.params, state.worth
        if round_.is_new or not trains_first:
            trained = () if round_.is_new else ((round_.client.index, state.params),)
            params, worth = mix(state.previous, trained, inbox, state.buffers, worth, probe)
        return FedFomoWork(params, params, state.buffers, worth, optimizer.begin(state.memory, params))

    def finish(
        state: FedFomoState, work: FedFomoWork, inbox: Inbox, probe: Probe, round_: Round
    ) -> tuple[FedFomoState, Update]:
        assert round_.client is not None
        previous, params, worth = work.start, work.params, work.worth
        if trains_first:
            trained = ((round_.client.index, params),)
            params, worth = mix(previous, trained, inbox, work.buffers, worth, probe)
            previous = params
        kept = FedFomoState(previous, params, work.buffers, worth, optimizer.end(work.memory))
        return kept, message(round_, {"model": dense(params)})

    def wants(state: FedFomoState, round_: Round, available: tuple[int, ...]) -> tuple[int, ...]:
        import torch

        assert round_.client is not None
        num = round_.client.num_clients
        random = generator(round_.seeds.own("wants"))
        shuffled, ties = torch.randperm(num, generator=random), torch.randperm(num, generator=random)
        worth = state.worth.cpu()
        ranked = ties[worth[ties].argsort(descending=True, stable=True)]
        having = set(available)
        # Worth can be below 0, and that of a peer without a message stays 0: it would be requested first, in vain.
        queues = [[peer for peer in order.tolist() if peer in having] for order in (ranked, shuffled)]
        draws = torch.rand(num - 1, generator=random)
        if config.explore == "all":
            draws[:] = draws[:1].clone()
        explores = (draws < config.explore_rate - round_.index * config.explore_decay).tolist()
        found: list[int] = []
        for explore in explores[: min(config.num_candidates, len(available))]:
            found.append(next(peer for peer in queues[explore] if peer not in found))
        return tuple(found)

    def cost(layout: Layout, client: Client, round_: Round) -> Cost:
        model, previous, mixed, candidate, total, gradient = (
            PartSize(name, layout, layout.size)
            for name in ("model", "previous", "mixed", "candidate", "sum", "gradient")
        )
        worth = PartSize("worth", Layout((Slot("worth", (client.num_clients,)),)), client.num_clients)
        memory = optimizer.sizes("memory", layout)
        requests = min(config.num_candidates, client.num_clients - 1)
        # The candidates, its own model, and the one before. With train-mix, a new client mixes twice.
        passes = 2 * requests + 3 if trains_first else requests + 2
        validation_flops = client.num_validation * layout.forward_flops()
        per_example, per_step = layout.train_flops(), optimizer.flops * layout.size
        return Cost(
            None,
            (model,),
            turn_flops((phase,), client, round_, per_example, per_step),
            passes * validation_flops,
            exact=not client.num_validation,  # passes depend on who has sent a model already
            kept=(previous, model, worth, *memory) if optimizer.keeps else (previous, model, worth),
            at_work=(mixed, gradient) if optimizer.keeps else (mixed, *memory, gradient),  # the start replaces previous
            mixing=(candidate, total),
            tune_flops=turn_flops((replace(phase, epochs=1),), client, round_, per_example, per_step),
            requests=requests,
            # With train-mix only a new client mixes before it is tuned, and it has no model of its own.
            tune_search_flops=(requests + (1 if trains_first else 2)) * validation_flops,
            message_flops=validation_flops,
        )

    return Method(
        init_client=init_client,
        receive=receive,
        phases=(phase,),
        finish=finish,
        predict=predictor(task),
        cost=cost,
        deploy=plain_weights,
        tune=phase,
        peer=PeerHalf(wants=wants),
    )
