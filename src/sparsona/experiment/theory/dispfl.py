"""DisPFL's theorem: how far training and expected error may be apart, by the privacy of noisy sparse steps.

D-PSGD is DisPFL with one mask for all, of ones where its model is not cut.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsona.analysis import theorems
from sparsona.analysis.bounds import Assumption, Bound, Constant
from sparsona.analysis.format import number
from sparsona.core.tree import Tree, loaded
from sparsona.data.batches import in_order
from sparsona.experiment.theory.estimates import diameter, gradient
from sparsona.experiment.theory.sample import (
    Sample,
    check_batches,
    drawn_rounds,
    error_rate,
    standard_error,
    take,
    would_be,
)

EXAMPLES_ALONE = 32  # examples of a client whose gradients are taken one by one


def _mask(state: Any, like: Tensor) -> Tensor:
    """A peer's mask, DisPFL's own or the one that all of D-PSGD share; of ones where there is none."""
    masks: Sequence[Tree] = (state.mask,) if hasattr(state, "mask") else state.masks
    return masks[0].flat.to(like.device) if masks else torch.ones_like(like)


def dispfl_bounds(sample: Sample) -> tuple[list[Constant], list[Bound]]:
    """Estimates of beta and D_g, and the bound with the noise that is supposed."""
    context, clients = sample.context, sample.clients
    phase, size = context.method.phases[0], context.task.layout.size
    diameters, errors = (np.zeros((len(sample.points), len(clients))) for _ in range(2))
    has_errors = not sample.folder.facts.is_regression
    for place in range(len(sample.points)):
        for k, client in enumerate(clients):
            work = sample.work(place, client)
            loss, x = sample.predicted(work, ("params",))
            examples = sample.all_examples(client)
            order = torch.randperm(examples.num_examples, generator=sample.random(client, "alone"))[:EXAMPLES_ALONE]
            rows = [gradient(loss, x, batch)[0] for batch in in_order(take(examples, order), 1)]
            diameters[place, k] = diameter(torch.stack(rows))
            if has_errors:
                errors[place, k] = error_rate(sample, work, client)
            sample.listen()
    union, kept = torch.zeros(size, dtype=torch.bool, device=context.device), []
    for client in sample.taking_part:
        state = sample.points[-1][1].states.get(client)
        mask = _mask(context.fresh_state(client) if state is None else loaded(state), union)
        union |= mask
        kept.append(float(mask.float().mean()))
    share = float(union.float().mean())
    least = min(context.clients[client].num_examples for client in sample.taking_part)
    iterations = sample.rounds * max(sample.steps(phase))
    batch = min(context.plan.batch_size, least)
    reach = Constant.largest("D_g", diameters, f"largest distance of two of {EXAMPLES_ALONE} examples' gradients")
    problem: dict[str, Any] = {
        "union": share,
        "diameter": reach.value,
        "delta": sample.delta,
        "examples": least,
        "batch": batch,
        "iterations": max(iterations, 1),
    }
    enough = theorems.dispfl_noise_for(1.0, **problem)
    at, needed = (theorems.dispfl_generalization(noise=noise, **problem) for noise in (sample.noise, enough))
    dense = theorems.dispfl_generalization(noise=enough, **problem | {"union": 1.0})
    constants = [
        Constant.known("beta", share, f"share of entries in the union of {len(kept)} clients' last masks"),
        Constant.known("beta_k", float(np.mean(kept)), "mean share of entries in a client's mask"),
        reach,
        Constant.known("N", least, "training examples of the smallest client"),
        Constant.known("tau", batch, "batch size"),
        Constant.known("T", iterations, "rounds times local steps, most of any client"),
        Constant.known("sigma", sample.noise, "Gaussian noise on gradients: none is added; --noise supposes some"),
        Constant.known("delta", sample.delta, "chosen: --delta"),
        Constant.known("eps~", at.per_step, "Eq. (13)"),
        Constant.known("eps'", at.total, "Theorem 1, as in Lemma 2"),
        Constant.known("delta'", at.failure, "Theorem 1, as in Lemma 2"),
        Constant.known("probability", at.sure, "with which the gap is below 9 eps'"),
    ]
    pairs: dict[int, np.ndarray] = {}  # by round: training and test error of each client that has both
    for row, (place, _) in enumerate(sample.points if has_errors else ()):
        tested = sample.recorded_errors(place)
        if both := [(errors[row, k], tested[client]) for k, client in enumerate(clients) if client in tested]:
            pairs[place] = np.array(both)
    gaps = [(float(place), abs(float((both[:, 1] - both[:, 0]).mean()))) for place, both in pairs.items()]
    last = pairs.get(sample.points[-1][0])
    supposed = sample.noise or enough
    is_valid = math.isfinite(at.total) and 0 <= at.failure < 1 and at.sure > 0
    asked = f"eps~ = {number(needed.per_step)}, delta' = {number(needed.failure)}, probability {number(needed.sure)}"
    text = (
        f"Noise of {number(enough)} would make 9 eps' = 1, above which the bound says nothing ({asked}); the theorem "
    )
    text += f"would then ask for {number(needed.examples)} examples, of which the smallest client has {least}."
    ratio = number(dense.gap / needed.gap)
    notes = [
        text,
        f"With masks of ones (beta = 1) and that noise, 9 eps' = {number(dense.gap)}: {ratio} times as much.",
    ]
    if not (0 <= needed.failure < 1 and needed.sure > 0):
        notes.append(
            "With that noise delta' is not below 1, or the probability 0: the theorem would still say nothing."
        )
    if math.isfinite(at.total) and not is_valid:
        found = f"delta' = {number(at.failure)}, probability {number(at.sure)}"
        notes.insert(0, would_be(at.gap, f"that delta' is below 1 and the probability above 0 ({found})"))
    if is_valid:
        notes.insert(
            0,
            f"With noise of {number(sample.noise)} the bound holds with a probability of {number(min(at.sure, 1.0))}.",
        )
    if last is not None:
        notes.append(
            f"Measured on the same {len(last)} clients: error on training data {last[:, 0].mean():.4f}, on test data "
            f"{last[:, 1].mean():.4f} (as the run recorded it): a loss of at most 1, as the theorem asks."
        )
    elif not has_errors:
        notes.append("A regression has no share of errors, the loss of at most 1 that would be compared.")
    assumptions = [
        Assumption.check("Gaussian noise on every gradient", sample.noise > 0, f"sigma = {sample.noise:g}"),
        Assumption(
            "the training loss is at most 1",
            "violated",
            "cross-entropy has no limit; the error, which is compared, has"
            if has_errors
            else "squared errors have no limit",
        ),
        Assumption.check(
            "N >= 2 / eps'^2 ln(16 / (e^-eps' delta'))",
            at.examples <= least,
            f"N = {least}, needed {number(at.examples)}"
            if math.isfinite(at.total)
            else "eps' is infinite without noise",
        ),
        check_batches(sample, "each step samples its batch uniformly", [phase]),
        Assumption("bounded diameter of gradients", "cannot be checked", f"the largest seen, {number(reach.value)}"),
        Assumption(
            "a gradient inside a mask of share beta is beta times as long",
            "cannot be checked",
            "used in Eq. (9); a mask may keep the largest entries",
        ),
        _check_consensus(sample, same_masks=share == min(kept)),
        _check_iid(sample),
    ]
    every = max(sample.steps(phase))
    curve = []
    for count in drawn_rounds(sample.rounds):
        one = theorems.dispfl_generalization(noise=supposed, **problem | {"iterations": count * every})
        curve.append((float(count), one.gap))
    root = math.sqrt(2 * max(iterations, 1) * math.log(1 / sample.delta))
    terms = {
        "9 sqrt(2 T log(1/delta)) eps~": 9 * root * at.per_step,
        "9 T eps~ tanh(eps~ / 2)": 9 * (at.total - root * at.per_step),
    }
    bound = Bound(
        "DisPFL, Theorem 1",
        "|training error - expected error|, with probability 1 - e^-eps' delta' / eps' ln(2 / eps')",
        at.gap if is_valid else None,
        gaps[-1][1] if gaps else None,
        terms if math.isfinite(at.total) else {},
        curve,
        gaps,
        assumptions,
        notes,
        measured_error=None if last is None else standard_error(sample, (last[:, 1] - last[:, 0])[None]),
        unit="gap between errors",
        curve_label="" if is_valid else f"if noise of {number(supposed)} were enough",
    )
    return constants, [bound]


def _check_consensus(sample: Sample, same_masks: bool) -> Assumption:
    """Whether peers have one model after mixing."""
    text, plan = "all clients mix to one consensus", sample.context.plan
    graph = str(sample.folder.config.get("graph"))
    if graph != "full" or plan.per_round < len(sample.taking_part) or plan.drop_rate:
        return Assumption(text, "violated", "proof, appendix C.3; clients mix with their neighbours alone")
    if same_masks:
        return Assumption(text, "held", "graph=full: all have the mean of all models")
    return Assumption(text, "cannot be checked", "graph=full, but an entry is mixed by those whose masks have it")


def _check_iid(sample: Sample) -> Assumption:
    text, partition = "examples are i.i.d.", str(sample.folder.config.get("partition"))
    if partition == "iid":
        return Assumption(text, "held", "partition=iid")
    if partition == "None":
        return Assumption(text, "cannot be checked", "Definition C.1; the data came by client")
    return Assumption(text, "violated", f"Definition C.1; clients' distributions differ by design: {partition}")
