"""The models, clients and data that constants are estimated on, and what all theorems assume of the algorithm.

Only training data is read. Models are in evaluation mode, so that F_k is a mean over examples also with BatchNorm or
dropout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsona.analysis.bounds import Assumption, running_means
from sparsona.analysis.format import number
from sparsona.core.method import Phase, Work, steps_taken
from sparsona.core.points import RECEIVED
from sparsona.core.round import Batch, Client
from sparsona.core.seeds import Seeds, generator
from sparsona.core.targets import given_name
from sparsona.data.batches import Examples, in_order
from sparsona.engine.context import ClientContext
from sparsona.engine.pace import is_late
from sparsona.engine.plan import Plan, novel_clients
from sparsona.engine.population import Population
from sparsona.engine.rounds import received_work
from sparsona.experiment.theory.estimates import Loss, Objective, Point, gradient
from sparsona.robust import PLAIN
from sparsona.runs.folder import RunFolder

POINTS_DRAWN = 60  # of a bound over rounds
IF_SMALLER = "for a smaller step size"  # what a curve supposes


@dataclass(frozen=True, eq=False)
class Sample:
    """A run, its models at some rounds, and the clients and data that constants are estimated on."""

    folder: RunFolder
    context: ClientContext
    points: Sequence[tuple[int, Population]]  # after so many rounds, in order
    clients: tuple[int, ...]
    batches: int
    seed: int
    delta: float
    noise: float
    listen: Callable[[], None]

    @property
    def options(self) -> dict[str, Any]:
        found: dict[str, Any] = self.folder.config["options"]
        return found

    @cached_property
    def taking_part(self) -> list[int]:
        novel = novel_clients(self.context.plan, self.context.clients)
        return [client.index for client in self.context.clients if client.index not in novel]

    @property
    def rounds(self) -> int:
        """Those that were run, which are fewer than planned where a run was stopped."""
        return self.points[-1][0]

    @cached_property
    def lr_scales(self) -> list[float]:
        """The learning rate of each round that was run, as a multiple of the option's."""
        return [self.context.plan.round_at(index).lr_scale for index in range(max(self.rounds, 1))]

    def steps(self, phase: Phase) -> list[int]:
        """Local steps of each client in a round."""
        round_ = self.context.plan.round_at(0)
        return [steps_taken(phase, self.context.clients[client], round_) for client in self.taking_part]

    def random(self, client: int, purpose: str) -> torch.Generator:
        return generator(Seeds(self.seed).of(client).own(f"bounds/{purpose}"))

    def batch_size(self, client: int, phase: Phase) -> int:
        return phase.batch_size(self.context.clients[client].num_examples, self.context.plan.batch_size)

    def has_exact_gradients(self, phase: Phase) -> bool:
        """Whether every batch of every client is all of its data, as it is."""
        plan = self.context.plan
        sizes = [self.context.clients[client].num_examples for client in self.taking_part]
        holds = all(phase.batch_size(size, plan.batch_size) >= size for size in sizes)
        return holds and not (self.context.federation.view.augments or self.context.task.draws_noise)

    def all_examples(self, client: int) -> Examples:
        return self.context.federation.packed_examples(client, "train")

    def some_examples(self, client: int) -> Examples:
        """A client's training examples, or as many as the batches hold: for products with the Hessian."""
        whole = self.all_examples(client)
        most = self.batches * self.context.plan.batch_size
        if whole.num_examples <= most:
            return whole
        order = torch.randperm(whole.num_examples, generator=self.random(client, "examples"))[:most]
        return take(whole, order)

    def objective(self, client: int, loss: Loss, size: int | None = None) -> Objective:
        """F_k: the mean loss over all of a client's training examples, `size` at a time."""
        return self._objective(self.all_examples(client), loss, size)

    def curvature(self, client: int, loss: Loss, size: int | None = None) -> Objective:
        """The same over as many examples as the batches hold, for products with its Hessian."""
        return self._objective(self.some_examples(client), loss, size)

    def _objective(self, examples: Examples, loss: Loss, size: int | None) -> Objective:
        batches = list(in_order(examples, size or max(self.context.plan.batch_size, 64)))
        return Objective(loss, batches, [len(batch.targets) for batch in batches])

    def draws(self, client: int, size: int) -> list[Batch]:
        """Independent batches as training draws them, each without replacement."""
        examples, random = self.all_examples(client), self.random(client, "batches")
        size = min(size, examples.num_examples)
        orders = [torch.randperm(examples.num_examples, generator=random)[:size] for _ in range(self.batches)]
        return [next(in_order(take(examples, order), size)) for order in orders]

    def recorded_losses(self) -> dict[int, float]:
        """The test loss of each client's model as it received it after the last round, where the run recorded it."""
        rows = self.folder.records.evaluations(self.rounds, RECEIVED)
        return {row.client: float(row.loss) for row in rows if row.loss is not None and math.isfinite(row.loss)}

    def recorded_errors(self, completed: int) -> dict[int, float]:
        """The share of each client's test examples that this model predicts wrongly, as the run recorded it."""
        rows = self.folder.records.evaluations(completed, RECEIVED)
        return {row.client: 1 - (row.correct or 0) / row.count for row in rows if row.count}

    def work(self, place: int, client: int) -> Work:
        completed, population = self.points[place]
        return received_work(self.context, population, client, completed)

    def predicted(self, work: Work, fields: Sequence[str]) -> tuple[Loss, Point]:
        """The loss of what a client predicts, as a function of some trees of its Work, and where they are now.

        In evaluation mode, so that F_k is a mean over examples also with BatchNorm or dropout.
        """
        context, pull = self.context, self.options.get("start_pull") or 0.0

        def loss(x: Point, batch: Batch) -> Tensor:
            new = {name: getattr(work, name).like(value) for name, value in zip(fields, x, strict=True)}
            outputs = context.method.predict(replace(work, **new), batch.inputs)
            found = context.task.mean_loss(outputs, batch)
            if pull and "personal" in fields and work.start is not None:
                found = found + pull * (new["personal"].flat - work.start.flat).square().sum()
            return found

        return loss, tuple(getattr(work, name).flat.detach() for name in fields)


def take(examples: Examples, order: Tensor) -> Examples:
    order = order.to(examples.inputs.device)
    return Examples(examples.inputs.index_select(0, order), examples.targets.index_select(0, order), examples.view)


def check_algorithm(sample: Sample, largest_gradient: float, phases: Sequence[Phase]) -> list[Assumption]:
    """Plain SGD with unbiased gradients, equal steps and weights, and clients drawn uniformly."""
    options, plan, task = sample.options, sample.context.plan, sample.context.task
    extras = [f"{name}={options[name]:g}" for name in ("momentum", "weight_decay") if options.get(name)]
    if options.get("optimizer", "sgd") != "sgd":
        extras.insert(0, f"optimizer={options['optimizer']}")
    found = [Assumption.check("clients take plain SGD steps", not extras, ", ".join(extras))]
    clip = options.get("clip_norm")
    if clip is not None:
        why = f"clip_norm={clip:g}, largest gradient of a batch seen {number(largest_gradient)}"
        found.append(Assumption.check("gradients are not clipped", largest_gradient <= clip, why))
    found.append(check_batches(sample, "stochastic gradients are unbiased at every step", phases))
    counts = [count for phase in phases for count in sample.steps(phase)]
    ranges = {(min(sample.steps(phase)), max(sample.steps(phase))) for phase in phases}
    why = f"from {min(counts)} to {max(counts)}; the largest is used"
    found.append(Assumption.check("all clients take equally many local steps", all(a == b for a, b in ranges), why))
    if "weight" in options:
        equal = (
            options["weight"] == "equal"
            or len({sample.context.clients[c].num_examples for c in sample.taking_part}) == 1
        )
        found.append(Assumption.check("the server's mean has equal weights", equal, f"weight={options['weight']}"))
    if (name := options.get("server_optimizer", "sgd")) != "sgd" or options.get("server_lr") not in (None, 1.0):
        found.append(Assumption("the server takes the plain mean", "violated", f"server_optimizer={name}"))
    if sample.context.method.server is not None:
        why = ", ".join(_uneven_sampling(plan, [sample.context.clients[client] for client in sample.taking_part]))
        found.append(Assumption.check("clients are sampled uniformly, without replacement", not why, why))
    scales = {sample.context.clients[client].lr_scale for client in sample.taking_part}
    if len(scales) > 1:
        why = f"client_lr_scale: from {min(scales):g} to {max(scales):g} of the option"
        found.append(Assumption("all clients have the same step size", "violated", why))
    if sample.folder.config.get("transform"):
        found.append(
            Assumption("messages arrive as they were sent", "violated", f"{sample.folder.config['transform']}")
        )
    if (mean := sample.folder.config.get("mean", PLAIN)) != PLAIN:
        found.append(Assumption("the server takes the plain mean", "violated", f"mean={mean}"))
    if attack := sample.folder.config.get("attack"):
        found.append(Assumption("all clients are honest", "violated", f"attack={attack}"))
    if task.mixes_examples or task.draws_noise:
        what = "BatchNorm, or other means over a batch" if task.mixes_examples else "dropout"
        found.append(Assumption("the loss is a mean over examples", "violated", f"{what}; estimates: evaluation mode"))
    if sample.context.federation.view.augments:
        why = "training augments images; estimates are of the images as they are"
        found.append(Assumption("one data distribution per client", "cannot be checked", why))
    return found


def _uneven_sampling(plan: Plan, clients: Sequence[Client]) -> list[str]:
    """What of a plan makes some clients' updates count more often than others', in words."""
    found = [f"drop_rate={plan.drop_rate:g}: updates are lost"] if plan.drop_rate else []
    if plan.sampler != "uniform":
        own = given_name(plan.sampler)
        found.append(f"sampler={plan.sampler}" if own is None else f"the sampler is a function, {own}")
    if plan.availability is not None:
        found.append("availability: not all clients are always available")
    if plan.late == "drop" and any(is_late(plan, client) for client in clients):
        found.append(f"deadline={plan.deadline:g}: late updates are lost")
    return found


def check_batches(sample: Sample, text: str, phases: Sequence[Phase]) -> Assumption:
    """Whether each step's batch is drawn independently of the steps before."""
    if all(sample.has_exact_gradients(phase) for phase in phases):
        return Assumption(text, "held", "every batch is all of a client's data: gradients are exact")
    if max(count for phase in phases for count in sample.steps(phase)) == 1:
        return Assumption(text, "held", "one step in a round, whose batch is drawn uniformly")
    why = "a pass draws batches without replacement: after its first step they depend on the steps before"
    return Assumption(text, "violated", why)


def smoothness(symbol: str, value: float) -> Assumption:
    why = f"{symbol}: the largest seen, {number(value)}; ReLU and max pooling have kinks"
    return Assumption("smoothness everywhere", "cannot be checked", why)


def check_constant_rate(sample: Sample) -> Assumption:
    scales = sample.lr_scales
    why = f"from {min(scales):.3g} to {max(scales):.3g} of the option, over {len(scales)} rounds"
    return Assumption.check("the step size is constant", min(scales) == max(scales), why)


def largest_batch_gradient(loss: Loss, x: Point, batches: Sequence[Batch]) -> float:
    return max(math.sqrt(sum(float(g.square().sum()) for g in gradient(loss, x, batch))) for batch in batches)


def drawn_rounds(rounds: int) -> list[int]:
    return sorted({round(place) for place in np.geomspace(1, max(rounds, 1), POINTS_DRAWN)})


def standard_error(sample: Sample, values: np.ndarray) -> float | None:
    """Of the mean over clients (the last axis) of their means over the rounds (the first).

    Clients are drawn without replacement: None where all are measured, or just one.
    """
    count, every = values.shape[1], len(sample.taking_part)
    if count < 2 or count >= every:
        return None
    places = sample.points[-len(values) :]
    means = [
        running_means([(float(place), float(v)) for (place, _), v in zip(places, column, strict=True)])[-1][1]
        for column in values.T
    ]
    return float(np.std(means, ddof=1) / math.sqrt(count) * math.sqrt(1 - count / every))


@dataclass(frozen=True, eq=False)
class MeanGradient:
    """What the gradients of the sampled clients say of the mean over all clients.

    Args:
        mean: of the sampled ones.
        squared: an estimate of the squared norm of the mean over all, without what the sample adds to it.
        diversity: an estimate of the mean of ||g_k - mean||^2 over all clients.
        slopes: by how much each sampled client's gradient moves `squared`, for its standard error.
    """

    mean: Tensor
    squared: float
    diversity: float
    slopes: list[float]


def mean_gradient(gradients: Sequence[Tensor], every: int) -> MeanGradient:
    """Of some clients out of `every`, drawn without replacement.

    E ||mean of k||^2 = ||mean||^2 + S^2 / k (1 - k / n), where S^2 = sum ||g_i - mean||^2 / (n - 1); the sample's own
    S^2, with k - 1, is unbiased.
    """
    count = len(gradients)
    mean = torch.stack(list(gradients)).double().mean(0)
    apart = sum(float((one.double() - mean).square().sum()) for one in gradients)
    spread = apart / (count - 1) if count > 1 else 0.0
    squared = float(mean.square().sum()) - spread / count * (1 - count / every)
    slopes = [2 * float(mean @ one.double()) for one in gradients]
    return MeanGradient(mean.to(gradients[0]), max(squared, 0.0), spread * (every - 1) / every, slopes)


def measured_means(sample: Sample, values: Sequence[float] | np.ndarray) -> list[tuple[float, float]]:
    return running_means([(float(place), float(v)) for (place, _), v in zip(sample.points, values, strict=True)])


def bounded(what: str, symbol: str, value: float) -> Assumption:
    return Assumption(f"bounded {what}", "cannot be checked", f"{symbol}: the largest seen, {number(value)}")


def error_rate(sample: Sample, work: Work, client: int) -> float:
    """The share of a client's training examples that it predicts wrongly (not of a regression)."""
    task, right, count = sample.context.task, 0.0, 0
    with torch.no_grad():
        for batch in in_order(sample.all_examples(client), 256):
            outputs = sample.context.method.predict(work, batch.inputs)
            of_batch, out_of = task.score(outputs, batch)
            right += float(of_batch)
            count += int(out_of)
    return 1 - right / max(count, 1)


def training_loss(sample: Sample, work: Work, client: int) -> float:
    """The mean loss of a client's training examples by the predictions that its test examples are measured with."""
    task, total, count = sample.context.task, 0.0, 0
    with torch.no_grad():
        for batch in in_order(sample.all_examples(client), 256):
            outputs = sample.context.method.predict(work, batch.inputs)
            total += float(task.mean_loss(outputs, batch)) * len(batch.targets)
            count += len(batch.targets)
    return total / count


def would_be(value: float, condition: str = "its condition on the step size") -> str:
    """The note of a bound that does not exist."""
    return f"There is no bound: {condition} is violated. The formula's value would be {number(value)} if it held."
