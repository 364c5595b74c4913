"""DisPFL's theorem: how far training and expected error may be apart, by the privacy of noisy sparse steps."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from sparsona.analysis import theorems
from sparsona.analysis.bounds import Assumption, Bound, Constant, number
from sparsona.core.tree import loaded
from sparsona.data.batches import in_order
from sparsona.experiment.theory.estimates import diameter, gradient
from sparsona.experiment.theory.sample import (
    Sample,
    drawn_rounds,
    error_rate,
    recorded_accuracies,
    standard_error,
    take,
)

EXAMPLES_ALONE = 32  # examples of a client whose gradients are taken one by one


def dispfl_bounds(sample: Sample) -> tuple[list[Constant], list[Bound]]:
    """Estimates of beta and D_g, and the bound with the noise that is supposed."""
    context, clients = sample.context, sample.clients
    phase, size = context.method.phases[0], context.task.layout.size
    diameters, errors = (np.zeros((len(sample.points), len(clients))) for _ in range(2))
    for place in range(len(sample.points)):
        for k, client in enumerate(clients):
            work = sample.work(place, client)
            loss, x = sample.predicted(work, ("params",))
            examples = sample.examples(client)
            order = torch.randperm(examples.num_examples, generator=sample.random(client, "alone"))[:EXAMPLES_ALONE]
            rows = [gradient(loss, x, batch)[0] for batch in in_order(take(examples, order), 1)]
            diameters[place, k] = diameter(torch.stack(rows))
            errors[place, k] = error_rate(sample, work, client)
            sample.listen()
    union, kept = torch.zeros(size, dtype=torch.bool, device=context.device), []
    for client in sample.taking_part:
        state = sample.points[-1][1].states.get(client)
        assert context.method.trait is not None
        mask = context.method.trait(context.fresh_state(client) if state is None else loaded(state)).flat  # type: ignore[union-attr]
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
    ]
    has_errors = not sample.folder.facts.is_regression
    tested = {place: 1 - accuracy for place, accuracy in recorded_accuracies(sample)} if has_errors else {}
    gaps = [
        (float(place), abs(float(errors[k].mean()) - tested[place]))
        for k, (place, _) in enumerate(sample.points)
        if place in tested
    ]
    supposed = sample.noise or enough
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
    if sample.points[-1][0] in tested:
        notes.append(
            f"Measured: error on training data {errors[-1].mean():.4f} (of {len(clients)} clients), on test data "
            f"{tested[sample.points[-1][0]]:.4f} (as the run recorded it): a loss of at most 1, as the theorem asks."
        )
    assumptions = [
        Assumption.check("Gaussian noise on every gradient", sample.noise > 0, f"sigma = {sample.noise:g}"),
        Assumption(
            "the training loss is at most 1",
            "violated",
            "cross-entropy has no limit; the error, which is compared, has",
        ),
        Assumption.check(
            "N >= 2 / eps'^2 ln(16 / (e^-eps' delta'))",
            at.examples <= least,
            f"N = {least}, needed {number(at.examples)}"
            if math.isfinite(at.total)
            else "eps' is infinite without noise",
        ),
        Assumption(
            "each step samples its batch uniformly",
            "violated",
            "a pass draws batches without replacement: they depend on each other",
        ),
        Assumption("bounded diameter of gradients", "cannot be checked", f"the largest seen, {number(reach.value)}"),
        Assumption(
            "a gradient inside a mask of share beta is beta times as long",
            "cannot be checked",
            "used in Eq. (9); a mask may keep the largest entries",
        ),
        Assumption(
            "all clients mix to one consensus",
            "violated",
            "proof, appendix C.3; clients mix with their neighbours alone",
        ),
        Assumption("examples are i.i.d.", "violated", "Definition C.1; clients' distributions differ by design"),
    ]
    finite = math.isfinite(at.total)
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
        at.gap if finite else None,
        gaps[-1][1] if gaps else None,
        terms if finite else {},
        curve,
        gaps,
        assumptions,
        notes,
        measured_error=standard_error(errors[-1:]),
        unit="gap between errors",
        curve_label="" if sample.noise else f"with noise of {number(supposed)}",
    )
    return constants, [bound]
