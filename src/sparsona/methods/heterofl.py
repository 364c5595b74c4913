"""HeteroFL and FedRolex: each client trains a narrower copy of one shared network, as wide as it can hold.

Papers: Diao, Ding, Tarokh, HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous
Clients, ICLR 2021. Alam, Liu, Yan, Zhang, FedRolex: Model-Heterogeneous Federated Learning with Rolling Sub-Model
Extraction, NeurIPS 2022: HeteroFL whose windows move by one unit a round (`window="rolling"`).

A client of width rate r has the first ceil(r * width) channels of every hidden layer, inputs and outputs whole; with
FedRolex that many from channel `round` on, around the end. It is a smaller network, not a mask: bytes, FLOPs and memory
are those of its size. The server takes for each entry the mean over the clients that had it; an entry that none had
keeps its value. The headline is each client's narrow network (FedRolex: the one it would get next) on its own data, the
wide network is the point `global`. sparsity/widths.py says which networks can be narrowed.

Kept: nothing but BatchNorm statistics. Travels: the narrow network, both ways; up also which labels a client has, one
bit each, where the loss is masked. Costs: training of the narrow network.

How wide: a capacity is the share of the parameters that a client can hold, as for every method. `width="fit"` is the
widest network that fits it (half of the parameters is about .7 of the width); `width="rate"` takes the capacity as the
width rate, as both papers do with 1, .5, .25, .125 and .0625. `density` is a bound for all clients.

As published: activations of hidden layers are divided by r in training only (`scaler`); BatchNorm is static, which is
that statistics are estimated anew on training data before predictions; labels that a client does not have are masked in
its loss and, as in the authors' tests of local models, in its predictions (`masked_outputs`), and it does not count for
their output rows; clients weigh equally. Plain weights mask outputs by the output layer's bias: without one, models
with `masked_loss="exclude"` cannot be deployed as such. At full width, without masks and by examples, this is FedAvg to
the bit.

Differences. From HeteroFL: masked logits are left out of the softmax (`masked_loss="exclude"`); the authors' code sets
them to 0, which still counts in it. Statistics are those of each client's own data and network; the authors' server
asks all clients for those of the wide network. From FedRolex: windows round up as HeteroFL's (with the code; the text
rounds down) and move upwards (with the text; the code moves them downwards); its code redraws capacities in every
round, ours stay. Where a GroupNorm follows, whole groups are kept and windows move by groups, so that each channel is
normalised with the same ones as in the wide network. With BatchNorm, `global` uses a client's own statistics, which are
initial ones outside of its window.

Preset `authors`: rates, batches and clipping of their scripts, capacities as width rates, and one accident:
`masked_loss="zero"`. HeteroFL's are those for CIFAR-10, which divide the learning rate by 10 after 150 and 250 of 400
rounds, or 300 and 500 of 800. FedRolex's are the README's command for CIFAR-10 with the code of commit 9f519ab
(SGD with momentum; at 3f1485e it was Adam); that divides by 4 after 1,200 of 3,200, which is left out.
Preset `pfedgate`: 55% of the parameters, the density which that paper states for a budget of 50%, and which no
published width rate has; the code of those runs is not known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, model_validator

from sparsona.core.layout import Slot
from sparsona.core.method import (
    Batch,
    Client,
    Cost,
    Inbox,
    Layout,
    Method,
    PartSize,
    Probe,
    Round,
    Seeds,
    ServerHalf,
    Tree,
    Update,
    dense,
    message,
)
from sparsona.core.tree import zeros_like
from sparsona.learning.means import IndexedSum
from sparsona.learning.optimizer import FLAG, Memory, Moments, make_optimizer
from sparsona.learning.phases import training_phase, turn_flops
from sparsona.learning.server_optimizer import ServerStep, begin_moments, server_step
from sparsona.sparsity.widths import check_widths, find_widths, gather, scatter

if TYPE_CHECKING:
    from torch import Tensor

    from sparsona.core.task import Task

EXCLUDED = -1e4  # a logit whose softmax is 0, and no infinity, which would make the loss of an unseen label one
GAIN = Layout((Slot("gain", ()),))


class HeteroFLConfig(ServerStep):
    """What HeteroFL and FedRolex add to the options of training and of the server's step."""

    density: float = Field(
        1.0,
        gt=0,
        le=1,
        description="share of the parameters a client's network has at most; 1: as much as capacity allows",
        json_schema_extra=FLAG,
    )
    width: Literal["fit", "rate"] = Field(
        "fit", description="fit: as wide as capacity and density allow; rate: these are shares of the width"
    )
    window: Literal["first", "rolling"] = Field("first", description="which units: the first, or moving with the round")
    scaler: bool = Field(True, description="activations are divided by the width rate in training")
    masked_loss: Literal["off", "exclude", "zero"] = Field(
        "exclude", description="logits of labels that a client does not have: used, left out, or set to 0"
    )
    masked_outputs: bool = Field(True, description="predictions leave these logits out, or set them to 0, too")
    weight: Literal["equal", "examples"] = Field("equal", description="what a client's network weighs by")

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.window == "rolling" and self.optimizer_memory == "keep":
            raise ValueError("optimizer_memory=reset with rolling windows: each round trains other units")
        return self


@dataclass(frozen=True)
class HeteroFLState:
    """What a client keeps between rounds. The buffers are those of the wide network."""

    buffers: Tree
    memory: Memory = ()


@dataclass(frozen=True)
class HeteroFLWork:
    """A narrow network; what activations are multiplied by in training; which labels the client has."""

    params: Tree
    buffers: Tree
    memory: Memory
    gain: Tensor | None
    labels: Tensor | None


@dataclass(frozen=True)
class HeteroFLServer:
    """The wide network, and the state of the server's optimizer."""

    params: Tree
    moments: tuple[Moments, ...]


def heterofl(task: Task, config: HeteroFLConfig) -> Method:
    """Narrow networks, or windows of them."""
    widths, optimizer = find_widths(task), make_optimizer(config)
    if hasattr(task, "forward"):  # an Outline has no network to test
        check_widths(task, widths)
    wide = {"params": widths.layout, "buffers": task.buffer_layout}
    masks = config.masked_loss != "off" and task.targets in ("classes", "tokens")
    filling = 0.0 if config.masked_loss == "zero" else EXCLUDED
    masks_outputs = masks and config.masked_outputs
    has_bias = any(len(slot.shape) == 1 for slot in widths.layout.slots if slot.name in widths.output)
    labels_layout = Layout((Slot("labels", (task.num_classes,)),))

    @cache  # there are few capacities
    def rate_for(share: float) -> float:
        return widths.fit(share) if config.width == "fit" else share

    def rate_of(client: Client) -> float:
        return rate_for(min(config.density, client.capacity))

    @cache
    def narrow(of: str, rate: float) -> Layout:
        return widths.narrow(wide[of], rate)

    def shift_at(index: int) -> int:
        return index if config.window == "rolling" else 0  # FedRolex equation 3

    @lru_cache(maxsize=64)
    def places(of: str, layout: Layout, shift: int, device: Any) -> Tensor:
        return widths.places(wide[of], layout, shift).to(device)

    def cut(of: str, tree: Tree, client: Client, index: int) -> Tree:  # HeteroFL equation 1
        layout = narrow(of, rate_of(client))
        return gather(tree, layout, places(of, layout, shift_at(index), tree.device))

    def init_client(params: Tree, buffers: Tree, client: Client, seeds: Seeds) -> HeteroFLState:
        return HeteroFLState(buffers, optimizer.first(cut("params", params, client, 0)) if optimizer.keeps else ())

    def receive(state: HeteroFLState, inbox: Inbox, probe: Probe, round_: Round) -> HeteroFLWork:
        (update,) = inbox
        client = round_.client
        assert client is not None
        rate, flat = rate_of(client), update.parts["model"].tree().flat
        params = Tree(narrow("params", rate), flat)  # with the FLOPs of its tensors, which do not travel
        return HeteroFLWork(
            params,
            cut("buffers", state.buffers, client, round_.index),
            optimizer.begin(state.memory, params),
            flat.new_full((), 1 / rate) if config.scaler else None,
            (probe.label_counts() > 0).to(flat.device) if masks else None,
        )

    def loss(work: HeteroFLWork, batch: Batch) -> tuple[Tensor, Tree]:
        named: Mapping[str, Tensor] = work.params
        if work.gain is not None:  # (Wx + b) / r, after each hidden layer and before its norm
            scaled = {name: work.params[name] * work.gain for name in widths.hidden}
            named = {**work.params, **scaled}
        outputs, buffers = task.forward(named, work.buffers, batch.inputs, True, batch.noise)
        if work.labels is not None:
            outputs = outputs.masked_fill(~work.labels, filling)
        return task.mean_loss(outputs, batch), buffers

    def predict(work: HeteroFLWork, inputs: Tensor) -> Tensor:
        outputs = task.forward(work.params, work.buffers, inputs, train=False)[0]
        return outputs.masked_fill(~work.labels, filling) if masks_outputs and work.labels is not None else outputs

    def deploy(work: HeteroFLWork) -> tuple[Tree, Tree]:
        """Plain weights that mask outputs: without its weights, an output row has the logit of its bias."""
        if not masks_outputs or work.labels is None:
            return work.params, work.buffers
        named = dict(work.params)
        for name in widths.output:
            is_bias = named[name].dim() == 1
            named[name] = named[name].masked_fill(~_by_row(work.labels, named[name]), filling if is_bias else 0.0)
        return Tree.of(named, work.params.layout), work.buffers

    def adapt(work: HeteroFLWork, probe: Probe, round_: Round) -> HeteroFLWork:
        return replace(work, buffers=task.statistics(work.params, work.buffers, probe.train()))

    def finish(
        state: HeteroFLState, work: HeteroFLWork, inbox: Inbox, probe: Probe, round_: Round
    ) -> tuple[HeteroFLState, Update]:
        assert round_.client is not None
        parts = {"model": dense(work.params)}
        if work.labels is not None:
            parts["labels"] = dense(Tree(labels_layout, work.labels))
        at = places("buffers", work.buffers.layout, shift_at(round_.index), work.buffers.device)
        kept = HeteroFLState(scatter(work.buffers, state.buffers, at), optimizer.end(work.memory))
        return kept, message(round_, parts, 1.0 if config.weight == "equal" else round_.client.num_examples)

    def cost(layout: Layout, client: Client, round_: Round) -> Cost:
        own = narrow("params", rate_of(client))
        model, gradient = (PartSize(name, own, own.size) for name in ("model", "gradient"))
        labels = (PartSize("labels", labels_layout, task.num_classes, is_mask=True),) if masks else ()
        gain = (PartSize("gain", GAIN, 1),) if config.scaler else ()
        memory = optimizer.sizes("memory", own)
        per_example, per_step = own.train_flops(), optimizer.flops * own.size
        return Cost(
            (model,),
            (model, *labels),
            turn_flops((phase,), client, round_, per_example, per_step),
            kept=memory if optimizer.keeps else (),
            infer_flops=own.forward_flops(),
            at_work=(*labels, *gain, gradient) if optimizer.keeps else (*labels, *gain, *memory, gradient),
            tune_flops=turn_flops((replace(phase, epochs=1),), client, round_, per_example, per_step),
        )

    def is_partial(clients: tuple[Client, ...]) -> bool:
        """Windows that stay cover as much as the widest; those that move cover all."""
        sizes = (narrow("params", rate_of(client)).size for client in clients)
        return config.window == "first" and all(size < widths.layout.size for size in sizes)

    def init_server(params: Tree, clients: tuple[Client, ...], seeds: Seeds) -> HeteroFLServer:
        return HeteroFLServer(params, begin_moments(config, params))

    def reply(server: HeteroFLServer, client: Client, round_: Round) -> Update:
        return message(round_, {"model": dense(cut("params", server.params, client, round_.index))})

    def zero(server: HeteroFLServer, round_: Round) -> IndexedSum:
        return IndexedSum()

    def add(server: HeteroFLServer, total: IndexedSum, update: Update) -> IndexedSum:  # HeteroFL equations 2 to 4
        part, params = update.parts["model"], server.params
        at = places("params", part.layout, shift_at(update.round), params.device)
        mask = params.like(zeros_like(params).flat.bool().index_fill_(0, at, True))
        if "labels" in update.parts:
            labels = update.parts["labels"].tree()["labels"].to(params.device)
            for name in widths.output:
                mask[name].logical_and_(_by_row(labels, mask[name]))
        tree = scatter(part.tree(), zeros_like(params), at)
        return total.add(tree.like(tree.flat * mask.flat), mask, update.weight)

    def step(server: HeteroFLServer, total: IndexedSum, round_: Round) -> HeteroFLServer:
        mean = total.mean(otherwise=server.params)
        if total.weights is not None:  # what no client had stays as it is
            mean = mean.like(mean.flat.where(total.weights > 0, server.params.flat))
        return HeteroFLServer(*server_step(config, server.params, mean, server.moments))

    phase = replace(
        training_phase(task, config, flops=lambda work: work.params.layout.train_flops()),
        loss=loss,
        step_flops=(lambda work: optimizer.flops * work.params.layout.size) if optimizer.flops else None,
    )
    server = ServerHalf(
        init=init_server,
        reply=reply,
        zero=zero,
        add=add,
        step=step,
        merge=IndexedSum.merge,
        global_model=lambda server: server.params,
        is_partial=is_partial,
    )
    return Method(
        init_client=init_client,
        receive=receive,
        phases=(phase,),
        finish=finish,
        predict=predict,
        cost=cost,
        deploy=deploy if has_bias or not (masks_outputs and filling) else None,
        tune=phase,
        server=server,
        adapt=adapt if task.mixes_examples and task.buffer_layout.slots else None,
        adapts_tuned=True,
    )


def _by_row(labels: Tensor, tensor: Tensor) -> Tensor:
    """Flags of labels that broadcast over the rows of an output layer's weight or bias."""
    return labels.view(-1, *(1,) * (tensor.dim() - 1))
