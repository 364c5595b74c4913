"""SCAFFOLD: FedAvg whose clients correct their steps by control variates.

Paper: Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, SCAFFOLD: Stochastic Controlled Averaging for Federated Learning,
ICML 2020, Algorithm 1. A client's gradient g becomes g - c_i + c: c_i is where its own gradients usually point, c the
mean of those of all clients, so that clients drift less towards their own optima.

Kept: c_i. Travels: down the model and c, up the changes of the model and of c_i, all dense: twice the bytes of FedAvg.
Costs: dense training; with `variates=gradient` one more gradient over the client's data.

`variates` is how a client makes its new c_i (line 12). `steps`, option II: c_i - c + (x - y_i) / (K * lr), the mean of
the gradients of its steps. `gradient`, option I: the gradient of its data at the received model. It does not shrink
while a client learns, so that after a few epochs the correction is most of a step: it needs far lower rates, and on
digits at the default ones learns next to nothing.

Clients that forget (stateless) begin with c_i = 0 in every turn, and c becomes the sum of everything that they ever
reported. `first_variate=server` is for them: a client without a c_i takes c for it, so that its turn is FedAvg's,
and c follows the mean gradient. Where clients remember, `zero` is right: c stays the mean of all c_i.

Differences from the text: clients weigh by examples, in the mean of the models and in c (the text has plain means:
`weight=equal`). The corrected gradient is clipped. Decay of weights counts as part of the gradient, also in c_i. With
momentum or Adam a step is not lr times a gradient, so that option II is refused. Final tuning is not corrected.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from sparsona.core.errors import SparsonaError
from sparsona.core.method import (
    Client,
    Cost,
    Grads,
    Inbox,
    Layout,
    Method,
    PartSize,
    Probe,
    Round,
    Seeds,
    ServerHalf,
    Tick,
    Tree,
    Update,
    dense,
    message,
    steps_taken,
)
from sparsona.core.tree import zeros_like
from sparsona.learning.means import WeightedSum, client_weight
from sparsona.learning.optimizer import Memory, Moments, make_optimizer
from sparsona.learning.phases import Model
from sparsona.learning.server_optimizer import begin_moments, server_step
from sparsona.methods.fedavg import FedAvgConfig, fedavg

if TYPE_CHECKING:
    from torch import Tensor

    from sparsona.core.task import Task


class ScaffoldConfig(FedAvgConfig):
    """What SCAFFOLD adds to the options of FedAvg; `server_lr` is its global step."""

    variates: Literal["steps", "gradient"] = Field(
        "steps", description="a client's new control variate: from the steps it took, or from one more gradient"
    )
    first_variate: Literal["zero", "server"] = Field(
        "zero", description="that of a client without one: zero, or the server's, for clients that forget"
    )


@dataclass(frozen=True)
class ScaffoldState:
    """c_i, and the optimizer's memory if kept."""

    variate: Tree
    buffers: Tree
    memory: Memory = ()


@dataclass(frozen=True, kw_only=True)
class ScaffoldWork(Model):
    """FedAvg's Work, c_i and c."""

    variate: Tree
    mean_variate: Tree


@dataclass(frozen=True)
class ScaffoldServer:
    """x, c, the state of the server's optimizer, and what all clients together weigh."""

    params: Tree
    variate: Tree
    moments: tuple[Moments, ...]
    weight: Tensor


@dataclass(frozen=True)
class ScaffoldSum:
    """The changes of the model and of the control variates."""

    model: WeightedSum
    variate: WeightedSum

    def add(self, update: Update) -> ScaffoldSum:
        """This sum with one more update."""
        sums = (self.model, self.variate)
        trees = (update.parts[name].tree() for name in ("model", "variate"))
        return ScaffoldSum(*(one.add(tree, update.weight) for one, tree in zip(sums, trees, strict=True)))

    def merge(self, other: ScaffoldSum) -> ScaffoldSum:
        """The sum of everything added to this sum or to another."""
        return ScaffoldSum(self.model.merge(other.model), self.variate.merge(other.variate))


def scaffold(task: Task, config: ScaffoldConfig) -> Method:
    """FedAvg with control variates."""
    _check(config)
    base = fedavg(task, config)
    (plain,) = base.phases
    optimizer = make_optimizer(config)

    def init_client(params: Tree, buffers: Tree, client: Client, seeds: Seeds) -> ScaffoldState:
        return ScaffoldState(zeros_like(params), buffers, optimizer.first(params))

    def receive(state: ScaffoldState, inbox: Inbox, probe: Probe, round_: Round) -> ScaffoldWork:
        (update,) = inbox
        params, mean = (update.parts[name].tree() for name in ("model", "variate"))
        own = mean if round_.is_new and config.first_variate == "server" else state.variate
        memory = optimizer.begin(state.memory, params)
        return ScaffoldWork(params, state.buffers, memory, variate=own, mean_variate=mean)

    def update(work: ScaffoldWork, grads: Grads, tick: Tick) -> ScaffoldWork:
        gradient = grads["params"]
        corrected = gradient.like(gradient.flat + (work.mean_variate.flat - work.variate.flat))  # line 10
        stepped: ScaffoldWork = plain.update(work, {"params": corrected}, tick)
        return stepped

    def new_variate(work: ScaffoldWork, start: Tree, probe: Probe, round_: Round) -> Tree:  # line 12
        assert round_.client is not None
        if config.variates == "gradient":  # option I
            total = WeightedSum()
            for batch in probe.train(flops=task.layout.train_flops()):
                total = total.add(task.gradient(start, work.buffers, batch), len(batch.targets))
            slope = total.mean(otherwise=work.variate)
            return slope.like(slope.flat + config.weight_decay * start.flat)
        length = steps_taken(plain, round_.client, round_) * config.lr * round_.lr_scale
        if not length:  # nothing was learned
            return work.variate
        steps = (start.flat - work.params.flat) / length
        return start.like(work.variate.flat - work.mean_variate.flat + steps)  # option II

    def finish(
        state: ScaffoldState, work: ScaffoldWork, inbox: Inbox, probe: Probe, round_: Round
    ) -> tuple[ScaffoldState, Update]:
        (received,) = inbox
        start = received.parts["model"].tree()
        variate = new_variate(work, start, probe, round_)
        changes = {
            "model": start.like(work.params.flat - start.flat),
            "variate": start.like(variate.flat - work.variate.flat),
        }
        parts = {name: dense(change, is_change=True) for name, change in changes.items()}  # line 13
        kept = ScaffoldState(variate, work.buffers, optimizer.end(work.memory))
        return kept, message(round_, parts, weight=client_weight(config.weight, round_))

    def cost(layout: Layout, client: Client, round_: Round) -> Cost:
        def part(name: str, is_change: bool = False) -> PartSize:
            return PartSize(name, layout, layout.size, is_change=is_change)

        found = base.cost(layout, client, round_)
        search = client.num_examples * layout.train_flops() if config.variates == "gradient" else 0
        return replace(
            found,
            down=(part("model"), part("variate")),
            up=(part("model", is_change=True), part("variate", is_change=True)),
            search_flops=search,
            kept=(part("own variate"), *found.kept),
            at_work=(part("trained"), *(found.at_work or ())),  # its change is sent, so that the received one stays
        )

    def init_server(params: Tree, clients: tuple[Client, ...], seeds: Seeds) -> ScaffoldServer:
        counts = [client.num_examples for client in clients]  # 0: it takes no part until the end
        weights = {"examples": sum(counts), "equal": sum(count > 0 for count in counts)}
        weight = params.flat.new_tensor(weights[config.weight]).double()
        return ScaffoldServer(params, zeros_like(params), begin_moments(config, params), weight)

    def reply(server: ScaffoldServer, client: Client, round_: Round) -> Update:
        return message(round_, {"model": dense(server.params), "variate": dense(server.variate)})  # line 4

    def step(server: ScaffoldServer, total: ScaffoldSum, round_: Round) -> ScaffoldServer:  # lines 16 and 17
        change, moved = total.model.mean(otherwise=zeros_like(server.params)), total.variate.total
        assert moved is not None
        mean = server.params.like(server.params.flat + change.flat)
        params, moments = server_step(config, server.params, mean, server.moments)
        variate = server.variate.like((server.variate.flat + moved.flat / server.weight).to(params.flat.dtype))
        return ScaffoldServer(params, variate, moments, server.weight)

    server = ServerHalf(
        init=init_server,
        reply=reply,
        zero=lambda server, round_: ScaffoldSum(WeightedSum(), WeightedSum()),
        add=lambda server, total, update: total.add(update),
        step=step,
        merge=ScaffoldSum.merge,
        global_model=lambda server: server.params,
        needs_every_update=True,  # c is the mean of all c_i
    )
    return replace(
        base,
        init_client=init_client,
        receive=receive,
        phases=(replace(plain, update=update),),
        finish=finish,
        cost=cost,
        server=server,
    )


def _check(config: ScaffoldConfig) -> None:
    if config.variates == "steps" and (config.momentum or config.optimizer != "sgd"):
        raise SparsonaError(
            "control variates from steps that are not SGD's: they would not be gradients",
            expected="optimizer=sgd without momentum, or variates=gradient",
            hint="--set variates=gradient",
        )
    if config.weight == "batches":
        raise SparsonaError("weight=batches", expected="weight=examples or weight=equal, as those of c")
