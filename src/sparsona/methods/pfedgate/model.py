"""A model behind a gate: how pFedGate trains both, and what a client predicts with."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from sparsona.core.errors import SparsonaError
from sparsona.core.layout import Layout, Slot
from sparsona.core.method import Batch, Client, Cost, Grads, PartSize, Phase, Probe, Round, Support, Tick, Tree
from sparsona.core.outline import Outline
from sparsona.learning.optimizer import Memory, make_optimizer
from sparsona.learning.phases import turn_flops
from sparsona.methods.pfedgate.blocks import Blocks, spread
from sparsona.methods.pfedgate.compact import chain, compact
from sparsona.methods.pfedgate.config import (
    Budget,
    PFedGateConfig,
    alike,
    budget_left,
    cut,
    max_flops,
    select,
    used_flops,
)
from sparsona.methods.pfedgate.gate import Gate, weighted_mean
from sparsona.methods.pfedgate.rows import Rows, forward_rows, rows_of

if TYPE_CHECKING:
    from torch import Tensor

    from sparsona.core.task import Task


BATCHES = 8  # of a turn, whose shares are recorded one by one
CHOICES_AT_ONCE = 2**20  # that an exact solver tries, of all examples together


@dataclass(frozen=True)
class Traces:
    """What a forward pass leaves behind: statistics of the model's and of the gate's norms, the blocks that the last
    batch used and those that any batch used, and sums of scores and weights over the examples of all batches.

    For the record of a turn: how many examples kept each block, the sum of their gates M', and of the batches that
    trained the model, how many there were, how many used each block, and the product of the shares they did not use.
    """

    model: Tree
    gate: Tree
    kept: Tensor
    used: Tensor
    scores: Tensor  # [2, blocks]: G and M
    examples: Tensor
    chosen: Tensor
    gated: Tensor
    batches: Tensor
    picked: Tensor
    missed: Tensor
    newly: Tensor  # of the first BATCHES of them, the share that each used of what none before had

    @classmethod
    def start(cls, model: Tree, gate: Tree, scores: Tensor) -> Traces:
        """Of a turn in which nothing has happened; `scores` are [2, blocks]."""
        none = scores.new_zeros(scores.shape)
        row, zero = none[0], none.sum()
        return cls(model, gate, row, row, none, zero, row, row, zero, row, zero + 1, none.new_zeros(BATCHES))


@dataclass(frozen=True)
class GatedWork:
    """The current model and gate. `budget` has one entry, whose name, s_min, says how the model is cut."""

    params: Tree
    gate: Tree
    buffers: Traces
    scores: Tensor  # of the last turn, [2, blocks]
    memory: dict[str, Memory]  # of the optimizers of `params` and `gate`
    budget: dict[str, Budget]
    pooled: Tensor  # the mean input, if that is the gate's input


@dataclass(frozen=True)
class Cut:
    """A model cut into blocks, the form of a gate for them, and the layout of a bit for each."""

    blocks: Blocks
    form: Gate
    bits: Layout
    classes: tuple[tuple[tuple[int, ...], ...], ...] | None  # of blocks that cost the same, for an exact solver
    rows: tuple[Rows, ...] | None  # where examples with a gate each need no model each


class GatedModel:
    """Pure functions of a GatedWork, for one task and one set of options."""

    def __init__(self, task: Task, config: PFedGateConfig) -> None:
        self.task, self.config = task, config
        self.optimizers = {"params": make_optimizer(config), "gate": make_optimizer(config, config.gate_lr)}
        self.cut = lru_cache(self._cut)
        self._chain = lru_cache(lambda smallest: chain(task, self.cut(smallest).blocks))
        if task.takes_tokens:
            raise SparsonaError(
                "pFedGate on text: its gate would see the tokens that are to be predicted",
                expected="images or vectors of numbers",
                hint="choose FedAvg, FedSpa or a partly personal model for text",
            )
        if task.mixes_examples and (config.gating == "sample" or config.deploy_gate == "sample"):
            raise SparsonaError(
                "a model that mixes the examples of a batch, as BatchNorm does, where every example has its own",
                expected="a model whose examples do not see each other (GroupNorm)",
                hint="gating=batch with deploy_gate=stored, or another norm",
            )

    def _cut(self, smallest: float) -> Cut:
        config, blocks = self.config, cut(self.task.layout, self.config, smallest)
        switches = (config.paths, config.pre_norm, config.post_norm, config.sigmoid, config.gate_start)
        form = Gate(self.task.input_shape, len(blocks), *switches)
        classes = alike(blocks, config) if config.solver == "exact" else None
        each, rows = "sample" in (config.gating, config.deploy_gate), None
        if each and config.compute == "masked" and not isinstance(self.task, Outline):  # which has costs alone
            rows = rows_of(self.task, blocks)
        return Cut(blocks, form, Layout((Slot("blocks", (len(blocks),)),)), classes, rows)

    def of(self, work: GatedWork) -> tuple[Cut, Budget, float]:
        ((smallest, budget),) = work.budget.items()
        return self.cut(float(smallest)), budget, float(smallest)

    def adapt(self, work: GatedWork, scores: Tensor, weights: Tensor) -> tuple[Tree, Tensor]:
        """theta' = theta (x) M', and I*: M' = M I*, where the way back takes G for I* (appendix A)."""
        gates, kept = self._gates(work, scores, weights)
        return work.params.like(work.params.flat * spread(self.of(work)[0].blocks, gates)), kept

    def _gates(self, work: GatedWork, scores: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        here, budget, _ = self.of(work)
        kept = select(budget, scores, self.config, here.classes)
        through = scores - scores.detach()  # zero, and yet it has a gradient
        if self.config.straight_through == "authors":
            through = through * budget.sparse  # with s = 1 their code returns M as it is
        return weights * (kept + through if self.config.straight_through == "all" else kept * (1 + through)), kept

    def run(
        self, work: GatedWork, scores: Tensor, weights: Tensor, inputs: Tensor, noise: Tensor | None = None
    ) -> tuple[Tensor, Tree, Tensor]:
        """One model for all inputs: outputs, the model's buffers afterwards, and I*. With noise, as in training."""
        params: Mapping[str, Tensor]
        if self.config.compute == "compact":
            gates, kept = self._gates(work, scores, weights)
            params = compact(self._chain(self.of(work)[2]), work.params, kept, gates)
        else:
            params, kept = self.adapt(work, scores, weights)
        outputs, buffers = self.task.forward(params, work.buffers.model, inputs, noise is not None, noise)
        return outputs, buffers, kept

    def _floor(self, scores: Tensor, smallest: float) -> Tensor:
        return scores.clamp(min=smallest) if self.config.floors_scores else scores

    def answer(self, outputs: Tensor) -> Tensor:
        return outputs.relu() if self.config.logits_relu else outputs

    def each(
        self, work: GatedWork, inputs: Tensor, scores: Tensor, weights: Tensor, noise: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """A model for each example: outputs [N, ...], and what each keeps [N, blocks]."""
        import torch

        here = self.of(work)[0]
        if here.rows is not None:
            choices = max((math.prod(len(one) + 1 for one in classes) for classes in here.classes or ()), default=1)
            at_once = max(self.config.sample_chunk, CHOICES_AT_ONCE // choices)
            choose = torch.func.vmap(partial(self._gates, work), chunk_size=at_once)
            gates, kept = choose(scores, weights)
            return forward_rows(self.task, here.rows, work.params, work.buffers.model, inputs, gates), kept
        task = copy.copy(self.task)
        task.channels_last = False  # a stack of models has no such memory format

        def one(x: Tensor, g: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
            params, kept = self.adapt(work, g, m)
            return task.forward(params, work.buffers.model, x[None], noise is not None, noise)[0][0], kept

        by = torch.func.vmap(one, chunk_size=self.config.sample_chunk, randomness="different")
        found: tuple[Tensor, Tensor] = by(inputs, scores, weights)
        return found

    def loss(self, work: GatedWork, batch: Batch) -> tuple[Tensor, Any]:
        import torch

        config, traces, (here, _, smallest) = self.config, work.buffers, self.of(work)
        counts = batch.weight.new_ones(1) if config.gating == "client" else batch.weight
        seen = (work.pooled[None],) if config.gating == "client" else (batch.inputs, counts)
        scores, weights, statistics = here.form.scores(work.gate, traces.gate, *seen)  # Algorithm 1 line 5
        means = torch.stack([self._floor(weighted_mean(scores, counts), smallest), weighted_mean(weights, counts)])
        if config.gating == "sample":
            outputs, kept = self.each(work, batch.inputs, self._floor(scores, smallest), weights, batch.noise)
            every = kept * batch.weight.unsqueeze(1)
            chosen, gated = every.sum(0), (every * weights.detach()).sum(0)
            kept, buffers = (kept * (batch.weight > 0).unsqueeze(1)).amax(0), traces.model
        else:
            outputs, buffers, kept = self.run(work, means[0], means[1], batch.inputs, batch.noise)  # line 6
            chosen, gated = kept * batch.weight.sum(), kept * batch.weight.sum() * means[1].detach()
        examples = batch.weight.sum()
        after = replace(
            traces,
            model=buffers,
            gate=statistics,
            kept=kept,
            scores=traces.scores + examples * means.detach(),
            examples=traces.examples + examples,
            chosen=traces.chosen + chosen,
            gated=traces.gated + gated,
        )
        return self.task.mean_loss(self.answer(outputs), batch), after

    def update(self, work: GatedWork, grads: Grads, tick: Tick) -> GatedWork:
        """Lines 7 and 8, for the model, the gate, or both."""
        import torch

        new: dict[str, Any] = {}
        memory, used = dict(work.memory), None
        if "params" in grads:
            # Here and not in the loss: a pass that trains the gate alone moves no block, and has none to send.
            traces = work.buffers
            shares = self.of(work)[1].shares
            share = (traces.kept * shares).sum()
            left = (shares * (1 - traces.used)).sum()
            newly = (traces.kept * shares * (1 - traces.used)).sum() / left.clamp(min=1e-9)
            is_now = torch.arange(BATCHES, device=shares.device) == traces.batches
            traces = replace(
                traces,
                used=traces.used.maximum(traces.kept),
                batches=traces.batches + 1,
                picked=traces.picked + traces.kept,
                missed=traces.missed * (1 - share).clamp(min=0.0),
                newly=torch.where(is_now, newly, traces.newly),
            )
            work = replace(work, buffers=traces)
            if self.config.steps == "used":
                used = spread(self.of(work)[0].blocks, work.buffers.kept)
        for name in grads:
            where = used if name == "params" else None
            step = self.optimizers[name].step
            new[name], memory[name] = step(getattr(work, name), grads[name], memory[name], tick, where)
        return replace(work, **new, memory=memory)

    def pool(self, work: GatedWork, probe: Probe, round_: Round) -> GatedWork:
        """The mean of all training inputs, for client-wise adaptation (section 7.4)."""
        assert round_.client is not None
        total = work.pooled.new_zeros(work.pooled.shape)
        for batch in probe.train():
            total = total + batch.inputs.sum(0)
        return replace(work, pooled=total / round_.client.num_examples)

    def phase(self, name: str, *trains: str) -> Phase:
        """A phase that trains model, gate, or both at once."""
        return Phase(
            name=name,
            trains=trains,
            loss=self.loss,
            update=self.update,
            epochs=self.config.epochs,
            enter=self.pool if self.config.gating == "client" else None,
            mixes_examples=self.task.mixes_examples,
            traceable=self.config.compute == "masked",
            flops=self.example_flops,
            used_flops=self.used_flops,
            step_flops=lambda work: self.step_flops(self.of(work)[0], trains),
        )

    def step_flops(self, here: Cut, trains: tuple[str, ...]) -> int:
        """Of the optimizers, whatever the examples of a step."""
        sizes = {"params": self.task.layout.size, "gate": here.form.layout.size}
        return sum(self.optimizers[name].flops * sizes[name] for name in trains)

    def example_flops(self, work: GatedWork) -> int:
        """Of one example, at most."""
        here, budget, _ = self.of(work)
        return self.task.layout.with_backward(self.forward_flops(here, budget.left.tolist()))

    def used_flops(self, before: GatedWork, after: GatedWork) -> int:
        """Of all examples of a phase, by the blocks that each of them kept."""
        here, past, now = self.of(before)[0], before.buffers, after.buffers
        examples = round(float(now.examples - past.examples))
        gate = here.form.layout.forward_flops()
        forward = used_flops(here.blocks, (now.chosen - past.chosen).tolist(), examples) + examples * gate
        return 3 * forward + examples * self.task.layout.with_backward(0)

    def measure(self, work: GatedWork, round_: Round) -> dict[str, Tensor]:
        """Of a turn: the share of the model that an example used (s'), that of the blocks that any batch used (q), what
        appendix E's formula makes of the shares of the batches, and what each of the first batches added (NaN: the turn
        had fewer); of each block the mean score G, the mean gate M' = M I*, and the share of the batches that used
        it."""
        import torch

        traces, (_, budget, _) = work.buffers, self.of(work)
        examples, batches = traces.examples.clamp(min=1.0), traces.batches.clamp(min=1.0)
        was_taken = torch.arange(BATCHES, device=traces.newly.device) < traces.batches
        return {
            "density_used": (traces.chosen * budget.shares).sum() / examples,
            "upload_share": (traces.used * budget.shares).sum(),
            "upload_share_formula": 1 - traces.missed,
            "newly_used": traces.newly.where(was_taken, math.nan),
            "scores": traces.scores[0] / examples,
            "gates": traces.gated / examples,
            "chosen": traces.picked / batches,
        }

    def forward_flops(self, here: Cut, left: list[float]) -> int:
        """Of the gate, and of the model inside the budget, at most."""
        return max_flops(here.blocks, self.config, left) + here.form.layout.forward_flops()

    def current(self, work: GatedWork) -> Tensor:
        """Scores and weights to deploy: means over this turn's training, or what the last turn left."""
        import torch

        traces = work.buffers
        return torch.where(traces.examples > 0, traces.scores / traces.examples.clamp(min=1.0), work.scores)

    def deploy(self, work: GatedWork) -> tuple[Tree, Tree]:
        """The client's own model as plain weights."""
        stored = self.current(work)
        return self.adapt(work, stored[0], stored[1])[0], work.buffers.model

    def predict(self, work: GatedWork, inputs: Tensor) -> Tensor:
        if self.config.deploy_gate == "stored":
            stored = self.current(work)
            return self.answer(self.run(work, stored[0], stored[1], inputs)[0])
        here, _, smallest = self.of(work)
        scores, weights, _ = here.form.scores(work.gate, work.buffers.gate, inputs)
        if self.config.deploy_gate == "sample":
            return self.answer(self.each(work, inputs, self._floor(scores, smallest), weights, None)[0])
        # By the test batch, whose mean is cut off and not each example.
        return self.answer(self.run(work, self._floor(scores.mean(0), smallest), weights.mean(0), inputs)[0])

    def cost(
        self, client: Client, round_: Round, share: float, smallest: float, phases: tuple[Phase, ...], tune: Phase
    ) -> Cost:
        """A turn, at most: training decides which blocks are used, and so what is sent."""
        config, layout, here = self.config, self.task.layout, self.cut(smallest)
        whole, gate = _part("update", layout), _part("gate", here.form.layout)
        bits = replace(_part("blocks", here.bits), is_mask=True)
        kept = (gate, _part("statistics", here.form.buffer_layout), _vector("scores", 2 * here.bits.size))
        memory = self.optimizers["params"].sizes("memory", layout)
        memory += self.optimizers["gate"].sizes("the gate's memory", here.form.layout)
        keeps = self.optimizers["params"].keeps
        at_work = (
            _vector("budget", 5 * here.bits.size),
            _vector("mean input", math.prod(self.task.input_shape)),
            replace(whole, name="gated"),
            replace(gate, name="the gate's gradient"),
            replace(whole, name="gradient"),
        )
        flops = self.forward_flops(here, list(budget_left(here.blocks, config, share, smallest)))
        training = layout.with_backward(flops)

        def of(phases: tuple[Phase, ...]) -> int:
            return sum(turn_flops((p,), client, round_, training, self.step_flops(here, p.trains)) for p in phases)

        pooled = len(phases) * client.num_examples if config.gating == "client" else 0
        change = replace(whole, is_change=True)
        return Cost(
            down=(replace(whole, name="model"),),
            up=(replace(change, support=Support.KNOWN), bits) if config.aggregation == "uploaded" else (change,),
            train_flops=of(phases),
            search_flops=pooled * layout.forward_flops(),
            exact=False,
            kept=(*kept, *memory) if keeps else kept,
            infer_flops=flops - (here.form.layout.forward_flops() if config.deploy_gate == "stored" else 0),
            at_work=at_work if keeps else (*memory, *at_work),
            tune_flops=of((replace(tune, epochs=1),)),
        )


def _part(name: str, layout: Layout) -> PartSize:
    return PartSize(name, layout, layout.size)


def _vector(name: str, size: int) -> PartSize:
    return _part(name, Layout((Slot(name, (size,)),)))
