"""What a run reveals, measured by attacks: labels from masks (analysis/leakage.py), and pictures from updates.

An update of one step on one batch is inverted as published attacks do (Zhu, Liu, Han, Deep Leakage from Gradients,
NeurIPS 2019; Geiping, Bauermeister, Droege, Moeller, Inverting Gradients, NeurIPS 2020): pictures are searched whose
gradient has the direction of the update, and which are smooth. The attacker is given what helps it most: the model
before the step, the mask, the labels, and the size of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from sparsona.analysis.leakage import Presence, label_presence, told_classes
from sparsona.analysis.privacy import Spent, show_epsilon, spent
from sparsona.core import arguments
from sparsona.core.errors import SparsonaError
from sparsona.core.round import Batch
from sparsona.core.seeds import Seeds, generator
from sparsona.core.task import Task
from sparsona.core.tree import Tree, loaded
from sparsona.data.batches import in_order, shuffled
from sparsona.runs.traits import compared_clients, has_traits, read_traits
from sparsona.sparsity.masks import random_mask
from sparsona.sparsity.search import mask_counts
from sparsona.transforms.privacy import LARGEST, read_privacy

if TYPE_CHECKING:
    from sparsona.engine.context import ClientContext
    from sparsona.engine.population import Population
    from sparsona.runs.folder import RunFolder

MOST = 10**6  # of sizes and steps
DENSITY = 0.5  # of the masks that updates are attacked behind, where a method has none
USUAL_NOISE = 1.0  # the noise multiplier of an update, where a run has none
SMOOTHNESS = 1e-3  # weight of the total variation in what the attacker minimises
STARTS = 4  # of each search, every other one by the signs of gradients: the one that fits best is kept


@dataclass(frozen=True)
class Inversion:
    """Pictures that were found in the updates of batches of one size, in dB; more is closer to the true ones.

    Args:
        update: "dense", "masked", or either "with noise".
        batch_size: pictures in a batch.
        psnr: the mean over pictures, each with the one of those found that it is given by the best match.
        other: the same of other pictures of the same classes, drawn at random, and matched likewise.
        mean: the same of the mean picture of the data.
        batches: how many batches were attacked.
    """

    update: str
    batch_size: int
    psnr: float
    other: float
    mean: float
    batches: int


@dataclass(frozen=True, eq=False)
class Leakage:
    """What a run reveals, beside what it spent of differential privacy.

    Args:
        title: the run.
        presence: what masks tell about labels; None: clients have no masks, or no labels.
        why_not: the reason, where there is none.
        inversions: what updates tell about pictures.
        private: what the run spent; None: it has no differential privacy.
        noise: the noise multiplier of updates with noise.
    """

    title: str
    presence: Presence | None
    why_not: str
    inversions: tuple[Inversion, ...]
    private: Spent | None
    noise: float

    def rows(self) -> list[dict[str, str]]:
        """A row for each attack; the last columns are what an attacker reaches without the message."""
        found = []
        if self.presence is not None:
            chance = f"{self.presence.chance:.2f} ± {self.presence.spread:.2f}"
            found.append(("class present, from masks", "", f"AUC {self.presence.auc:.2f}", chance))
        for one in self.inversions:
            without = f"{one.other:.1f} dB same class, {one.mean:.1f} dB mean"
            found.append((f"pictures, from a {one.update} update", str(one.batch_size), f"{one.psnr:.1f} dB", without))
        return [dict(zip(("attack", "batch", "reached", "without it"), row, strict=True)) for row in found]

    def sentences(self) -> list[str]:
        """What the table does not show."""
        texts = []
        if self.presence is not None:
            texts.append(
                f"Masks of {self.presence.clients} clients: the attacker is fitted to some and judged on others; "
                "0.5 is chance, measured by exchanging the clients' classes."
            )
        elif self.why_not:
            texts.append(self.why_not)
        if self.inversions:
            texts.append(
                "Updates of one step from the initial model; the attacker knows model, mask and labels. PSNR, mean "
                f"over pictures; noise of {self.noise:g} norms on a change of that norm."
            )
        if self.private is None:
            texts.append("Epsilon: none, the run has no differential privacy.")
        else:
            epsilon = show_epsilon(self.private.epsilon)
            clear = f", and not {', '.join(self.private.in_the_clear)}" if self.private.in_the_clear else ""
            spent = f"Epsilon: {epsilon} at delta {self.private.privacy.delta:g}; it covers values{clear}."
            texts.append(f"{spent} {self.private.condition}".strip())
        return texts

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {
            "title": self.title,
            "presence": None if self.presence is None else vars(self.presence),
            "inversions": [vars(one) for one in self.inversions],
            "noise": self.noise,
            "privacy": None if self.private is None else self.private.brief(),
        }


def leakage_of(
    folder: RunFolder,
    context: ClientContext,
    population: Population,
    batch_sizes: Sequence[int],
    batches: int,
    steps: int,
    noise: float | None,
    seed: int,
    listen: Callable[[int, int], None] | None,
) -> Leakage:
    """Attack a run: its last masks, and updates of its clients' first batches. `Run.leakage` explains the arguments."""
    private = spent(folder)
    if noise is None:
        text = folder.config.get("privacy")
        noise = USUAL_NOISE if not text else read_privacy(text).noise
    presence, why_not = _presence(context, population, seed)
    found = tuple(_inversions(context, population, batch_sizes, batches, steps, noise, seed, listen))
    config, facts = folder.config, folder.facts
    title = ", ".join(map(str, (facts.title, config["data"].partition(":")[0], config["partition"])))
    return Leakage(f"{title}, seed {config['seed']}", presence, why_not, found, private, noise)


def check_arguments(
    batch_sizes: Any, batches: Any, steps: Any, noise: Any, seed: Any, listen: Any
) -> tuple[tuple[int, ...], int, int, float | None, int]:
    """The arguments of `Run.leakage` as plain values, or a SparsonaError that names a wrong one."""
    sizes = arguments.plain(batch_sizes)
    if not isinstance(sizes, list | tuple):
        raise SparsonaError(
            f"batch_sizes as a {type(batch_sizes).__name__}",
            expected="a list of whole numbers of 1 or more",
            hint="batch_sizes=[1, 4, 8]; empty: masks alone",
        )
    if listen is not None and not callable(listen):
        raise SparsonaError(f"listen as a {type(listen).__name__}", expected="a function", hint="leave it out")
    if noise is not None and not 0 < (noise := arguments.number("noise", noise)) <= LARGEST:
        raise SparsonaError(
            f"noise of {noise:g} norms", expected=f"a number above 0, at most {LARGEST:g}", hint="--noise 1"
        )
    return (
        tuple(arguments.whole("batch_sizes", one, 1, MOST) for one in sizes),
        arguments.whole("batches", batches, 1, MOST),
        arguments.whole("steps", steps, 1, MOST),
        noise,
        arguments.whole("seed", seed),
    )


def _presence(context: ClientContext, population: Population, seed: int) -> tuple[Presence | None, str]:
    counts = context.federation.label_counts("train")
    if counts is None or not has_traits(context):
        lacks = "labels" if counts is None else "masks"
        return None, f"Masks were not attacked: this run's clients have no {lacks}."
    clients = compared_clients(context)
    traits = read_traits(context, population, clients)
    if traits.kind != "mask":
        return None, "Masks were not attacked: this run's clients have none."
    rows = counts[list(clients)].numpy()
    if not told_classes(rows).any():
        return None, "Masks were not attacked: there is no class that two clients have and two have not."
    return label_presence(traits.distances(), rows, seed), ""


def _inversions(
    context: ClientContext,
    population: Population,
    batch_sizes: Sequence[int],
    batches: int,
    steps: int,
    noise: float,
    seed: int,
    listen: Callable[[int, int], None] | None,
) -> Iterator[Inversion]:
    if not batch_sizes:
        return
    task, shape = context.task, context.federation.input_shape
    if task.targets not in ("classes", "binary") or context.federation.has_tokens or len(shape) != 3:
        raise SparsonaError(
            f"updates of {task.targets} with inputs of shape {shape}",
            expected="pictures with one class each",
            hint="--batches none attacks masks alone",
        )
    clients = [one.index for one in context.clients if one.num_examples >= max(batch_sizes)]
    if not clients:
        raise SparsonaError(
            f"no client has {max(batch_sizes)} training examples", expected="smaller batches", hint="--batches 1,4"
        )
    drawn = [clients[int(place)] for place in torch.randperm(len(clients), generator=generator(seed))[:batches]]
    inputs, targets = _pool(context)
    low, high = float(inputs.min()), float(inputs.max())
    done = 0
    for size in batch_sizes:
        found: dict[str, list[float]] = {name: [] for name in _VARIANTS}
        others, means = [], []
        for number, client in enumerate(drawn):
            train = context.federation.packed_examples(client, "train")
            batch = next(shuffled(train, size, Seeds(seed).at(number).shared("attacked"), task.mixes_examples))
            true = batch.inputs
            random = generator(seed + number)
            instead = []
            for picture, label in zip(true, batch.targets, strict=True):
                same = inputs[(targets == label) & (inputs != picture).flatten(1).any(1)]
                if len(same):
                    instead.append(same[int(torch.randint(len(same), (), generator=random))])
                means.append(psnr(inputs.mean(0), picture, high - low))
            if len(instead) == len(true):  # matched as guesses are: choosing the best pairs is worth something
                others.append(matched_psnr(torch.stack(instead), true, high - low))
            for name, (has_mask, has_noise) in _VARIANTS.items():
                mask = _mask(context, population, client, seed) if has_mask else None
                params = context.params if mask is None else context.params.like(context.params.flat * mask.flat)
                update = visible_update(task, params, context.buffers, batch, mask)
                if has_noise:
                    update = with_noise(update, mask, noise, random)
                guess = invert(task, params, context.buffers, update, batch, mask, steps, seed + number, low, high)
                found[name].append(matched_psnr(guess, true, high - low))
                done += 1
                if listen is not None:
                    listen(done, len(batch_sizes) * len(drawn) * len(_VARIANTS))
        baseline = float(np.mean(others)) if others else math.nan
        for name, values in found.items():
            yield Inversion(name, size, float(np.mean(values)), baseline, float(np.mean(means)), len(drawn))


_VARIANTS = {  # has a mask, has noise
    "dense": (False, False),
    "masked": (True, False),
    "dense, noised": (False, True),
    "masked, noised": (True, True),
}


def _pool(context: ClientContext) -> tuple[Tensor, Tensor]:
    """Pictures as a model is given them, of at most 1,000 examples over all clients, with their classes."""
    inputs, targets, left = [], [], 1000
    for client in context.clients:
        for batch in in_order(context.federation.packed_examples(client.index, "train"), 100):
            inputs.append(batch.inputs[:left])
            targets.append(batch.targets[:left])
            left -= len(inputs[-1])
        if left <= 0:
            break
    return torch.cat(inputs), torch.cat(targets)


def _mask(context: ClientContext, population: Population, client: int, seed: int) -> Tree:
    """A client's own mask, or a random one."""
    if has_traits(context):
        state = population.states.get(client)
        assert context.method.trait is not None
        trait = context.method.trait(context.fresh_state(client) if state is None else loaded(state))
        if isinstance(trait, Tree) and trait.dtype is torch.bool and trait.layout.digest == context.task.layout.digest:
            return trait
    layout = context.task.layout
    return random_mask(layout, mask_counts(layout, DENSITY, "erk"), Seeds(seed).shared("mask"))


def visible_update(task: Task, params: Tree, buffers: Tree, batch: Batch, mask: Tree | None) -> Tensor:
    """What a server sees of one step on a batch, up to its length: the gradient, inside the mask if there is one.

    Args:
        task: the task.
        params: the model before the step.
        buffers: its buffers.
        batch: the batch.
        mask: which entries are sent; None: all.

    Returns:
        A vector with an entry for each of the model, 0 outside the mask.
    """
    flat = task.gradient(params, buffers, batch).flat.detach()
    return flat if mask is None else flat * mask.flat


def with_noise(update: Tensor, mask: Tree | None, noise: float, random: torch.Generator) -> Tensor:
    """An update with Gaussian noise of so many of its own norms, as if it was just as long as the norm it is clipped
    to: a shorter one would be hidden better."""
    drawn = torch.randn(len(update), generator=random).to(update.device) * (noise * update.norm())
    return update + (drawn if mask is None else drawn * mask.flat)


def invert(
    task: Task,
    params: Tree,
    buffers: Tree,
    update: Tensor,
    batch: Batch,
    mask: Tree | None = None,
    steps: int = 300,
    seed: int = 0,
    low: float = 0.0,
    high: float = 1.0,
) -> Tensor:
    """Pictures whose gradient has the direction of an update.

    Args:
        task: the task.
        params: the model before the step.
        buffers: its buffers.
        update: what was seen.
        batch: the labels are the attacker's, the inputs are not: of them only the shape is used.
        mask: which entries were sent; None: all.
        steps: of the search.
        seed: of where it starts.
        low: the least value of a picture.
        high: the largest.

    Returns:
        As many pictures as the batch has, in an order of their own.
    """
    sent = None if mask is None else mask.flat.to(update.dtype)
    aim = update / update.norm().clamp(min=1e-20)
    best, least = torch.zeros_like(batch.inputs), math.inf
    at = params.like(params.flat.detach().clone().requires_grad_())
    for start in range(STARTS):
        random = generator(seed * STARTS + start)
        drawn = torch.rand(batch.inputs.shape, generator=random).to(batch.inputs.device)
        guess = (low + (high - low) * drawn).requires_grad_()
        optimizer = torch.optim.Adam([guess], lr=0.1 * (high - low))
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, eta_min=1e-3 * (high - low))
        value = math.inf
        for _ in range(steps):
            outputs, _ = task.forward(at, buffers, guess, train=False)
            loss = task.mean_loss(outputs, replace(batch, inputs=guess))
            (flat,) = torch.autograd.grad(loss, [at.flat], create_graph=True)
            flat = flat if sent is None else flat * sent
            apart = 1 - (flat * aim).sum() / flat.norm().clamp(min=1e-20)
            rough = (guess.diff(dim=-1).abs().mean() + guess.diff(dim=-2).abs().mean()) / (high - low)
            (slope,) = torch.autograd.grad(apart + SMOOTHNESS * rough, [guess])
            guess.grad = slope.sign() if start % 2 else slope
            optimizer.step()
            schedule.step()
            with torch.no_grad():
                guess.clamp_(low, high)
            value = float(apart.detach())
        if value < least:
            best, least = guess.detach().clone(), value
    return best


def psnr(guess: Tensor, true: Tensor, largest: float) -> float:
    """How close a picture is to the true one: the peak signal-to-noise ratio.

    Args:
        guess: a picture.
        true: the true one.
        largest: how far apart two values can be.

    Returns:
        In dB, at most 80.

    Example:
        >>> psnr(torch.full((2, 2), 0.1), torch.zeros(2, 2), largest=1.0)
        20.0
    """
    error = float((guess.double() - true.double()).square().mean())
    return round(min(80.0, 10 * math.log10(largest**2 / max(error, 1e-30))), 6)


def matched_psnr(guesses: Tensor, true: Tensor, largest: float) -> float:
    """The mean over the true pictures of the PSNR of the guess that each is given: the closest pairs are taken first.

    Args:
        guesses: as many as there are true ones, in any order.
        true: the true ones.
        largest: how far apart two values can be.

    Returns:
        In dB.
    """
    table = np.array([[psnr(guess, one, largest) for one in true] for guess in guesses])
    found = []
    for _ in range(len(true)):
        place = np.unravel_index(int(table.argmax()), table.shape)
        found.append(float(table[place]))
        table[place[0], :] = table[:, place[1]] = -math.inf
    return float(np.mean(found))
