"""FedSpa's two theorems; FedAvg (masks of ones) and training alone (one client) are special cases."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsona.analysis import theorems
from sparsona.analysis.bounds import Assumption, Bound, Constant
from sparsona.analysis.format import number
from sparsona.core.method import Phase, Work, steps_taken
from sparsona.core.round import Tick
from sparsona.data.batches import shuffled
from sparsona.engine.rounds import shared_model
from sparsona.engine.turn import take_step
from sparsona.experiment.theory.estimates import Objective, block_norm, gradient, squared_errors
from sparsona.experiment.theory.sample import (
    IF_SMALLER,
    Sample,
    bounded,
    check_algorithm,
    check_constant_rate,
    drawn_rounds,
    largest_batch_gradient,
    mean_gradient,
    measured_means,
    smoothness,
    standard_error,
    would_be,
)


def fedspa_bounds(sample: Sample) -> tuple[list[Constant], list[Bound]]:
    """Estimates of the constants of both versions, and their bounds."""
    context, clients = sample.context, sample.clients
    phase, alone = context.method.phases[0], context.method.server is None
    size, last = context.task.layout.size, len(sample.points) - 1
    shape = (len(sample.points), len(clients))
    norms, losses, variances, inside, smooth, differences, top, clipped = (np.zeros(shape) for _ in range(8))
    ratios, other_ratios, slopes = (np.zeros(shape) for _ in range(3))
    apart, away, spread, spread_inside, total = ([] for _ in range(5))
    is_exact = sample.has_exact_gradients(phase)
    finals = [_mask(sample.work(last, client)) for client in clients]
    for place, (completed, population) in enumerate(sample.points):
        shared = None if alone else shared_model(context.server_side, population)
        own_all: list[Tensor] = []
        dense_all: list[Tensor] = []
        star_all: list[Tensor] = []
        masks: list[Tensor | None] = []
        for k, client in enumerate(clients):
            work = sample.work(place, client)
            mask, final = _mask(work), finals[k]
            loss, x = sample.predicted(work, ("params",))
            objective = sample.objective(client, loss)
            (own,) = objective.gradient(x)
            same = mask is None or final is None or torch.equal(mask, final)
            star_at = x if same or shared is None or final is None else (shared.flat * final,)
            star = own if same else objective.gradient(star_at)[0]
            dense = own if shared is None or mask is None else objective.gradient((shared.flat.detach(),))[0]
            losses[place, k] = objective.value(star_at)
            norms[place, k] = float(own.double().square().sum())
            draws = sample.draws(client, sample.batch_size(client, phase))
            variances[place, k] = 0.0 if is_exact else np.mean(squared_errors(loss, x, (own,), draws)[0])
            clipped[place, k] = largest_batch_gradient(loss, x, draws)
            inside[place, k] = variances[place, k]
            if mask is not None and not is_exact:
                errors = [(gradient(loss, x, batch)[0] - own) * mask for batch in draws]
                inside[place, k] = np.mean([float(error.double().square().sum()) for error in errors])
            smooth[place, k] = block_norm(sample.curvature(client, loss), x, 0, 0, sample.random(client, "curvature"))
            top[place, k] = max(float(own.abs().max()), float(dense.abs().max()))
            ratios[place, k], other_ratios[place, k], differences[place, k] = _local_steps(
                sample, client, completed, phase, work, objective, own, star, mask, final
            )
            own_all.append(own)
            dense_all.append(dense)
            star_all.append(star if final is None else star * final)
            masks.append(mask)
            sample.listen()
        a, b = _distances(masks, finals, len(sample.taking_part))
        apart.append(a)
        away.append(b)
        spread.append([max(pair) for pair in zip(_largest_gap(own_all), _largest_gap(dense_all), strict=True)])
        whole = mean_gradient(star_all, len(sample.taking_part))
        spread_inside.append([float((one - whole.mean).norm()) for one in star_all])
        total.append(norms[place].mean() if alone else whole.squared)
        slopes[place] = norms[place] if alone else whole.slopes
    return _sparse_bounds(
        sample,
        size=size,
        alone=alone,
        norms=norms,
        losses=losses,
        variances=variances,
        inside=inside,
        smooth=smooth,
        differences=differences,
        top=top,
        ratios=ratios,
        other_ratios=other_ratios,
        slopes=slopes,
        clipped=clipped,
        apart=apart,
        away=away,
        spread=np.zeros(shape) if alone else np.array(spread),
        spread_inside=np.zeros(shape) if alone else np.array(spread_inside),
        total=total,
        dropped=[0 if mask is None else int(size - mask.sum()) for mask in finals],
        optimal_apart=_distances(finals, finals, len(sample.taking_part))[0],
    )


def _mask(work: Work) -> Tensor | None:
    """A client's mask as numbers; None: all ones."""
    mask = getattr(work, "mask", None)
    return None if mask is None else mask.flat


def _largest_gap(gradients: Sequence[Tensor]) -> list[float]:
    """||grad F_k - mean||_inf of each."""
    mean = torch.stack(list(gradients)).mean(0)
    return [float((one - mean).abs().max()) for one in gradients]


def _distances(masks: Sequence[Tensor | None], finals: Sequence[Tensor | None], clients: int) -> tuple[float, float]:
    """The mean Hamming distance over all pairs of all clients (k = k' included), and that of each to its last mask."""
    rows = [mask for mask in masks if mask is not None]
    if not rows:
        return 0.0, 0.0
    pairs = [float((a != b).sum()) for place, a in enumerate(rows) for b in rows[place + 1 :]]
    away = [float((a != b).sum()) for a, b in zip(masks, finals, strict=True) if a is not None and b is not None]
    apart = float(np.mean(pairs)) if pairs else 0.0
    return apart * (clients - 1) / clients, float(np.mean(away))


def _local_steps(
    sample: Sample,
    client: int,
    completed: int,
    phase: Phase,
    work: Work,
    objective: Objective,
    own: Tensor,
    star: Tensor,
    mask: Tensor | None,
    final: Tensor | None,
) -> tuple[float, float, float]:
    """p_t's ratio for one client by two readings, and ||grad F(w') - grad F(w)|| / ||w' - w||: the largest over some
    local steps, step 0 among them.

    Fact 4 and Eq. (29) need w~_k,t = m*_k w_t in both parts of the ratio; in the other reading it is m_k,t w_t, where
    local training starts. A step whose denominator is 0 is left out.
    """
    context = sample.context
    round_ = context.plan.round_at(completed).on(context.clients[client])
    train = context.federation.packed_examples(client, "train")
    count = steps_taken(phase, context.clients[client], round_)
    wanted = {1, count // 2, count - 1} - {0}
    start, smooth = work.params.flat, 0.0

    def ratio_at(moved: Tensor, there: Tensor) -> float:
        change = float((moved - there).double().square().sum())
        now = moved if mask is None else moved * mask
        then = there if final is None else there * final
        return float((now - then).double().square().sum()) / change if change else 0.0

    ratio, other = ratio_at(own, star), 0.0
    seed = sample.random(client, f"steps/{completed}").initial_seed()
    size = sample.batch_size(client, phase)
    stream = (b for epoch in range(phase.epochs) for b in shuffled(train, size, seed + epoch, phase.mixes_examples))
    for step, batch in enumerate(islice(stream, count - 1), 1):
        tick = Tick(torch.tensor(round_.lr_scale, dtype=torch.float32), torch.tensor(step - 1))
        work, _ = take_step(phase, work, batch, tick)
        if step not in wanted:
            continue
        (moved,) = objective.gradient((work.params.flat,))
        change = float((moved - own).double().square().sum())
        away = float((work.params.flat - start).double().square().sum())
        ratio, other = max(ratio, ratio_at(moved, star)), max(other, ratio_at(moved, own))
        if away:
            smooth = max(smooth, math.sqrt(change / away))
    return ratio, other, smooth


def _sparse_bounds(sample: Sample, *, size: int, alone: bool, **found: Any) -> tuple[list[Constant], list[Bound]]:
    plan, options = sample.context.plan, sample.options
    phase = sample.context.method.phases[0]
    steps, rounds = max(sample.steps(phase)), max(sample.rounds, 1)
    rate = options["lr"] * max(sample.lr_scales)
    places = [place for place, _ in sample.points]
    smooth = Constant.largest(
        "L",
        np.maximum(found["smooth"], found["differences"]),
        "power iteration on Hessian products, and gradient differences over local steps",
    )
    variance = Constant.largest("sigma^2", found["variances"], "||g - grad F_k||^2 over batches, dense")
    inside = Constant.largest("sigma^2, masked", found["inside"], "the same inside m_k")
    gap = Constant.largest(
        "G, by coordinate",
        found["spread"],
        f"largest |grad F_k - mean of {len(sample.clients)} clients|, at own masked models and at w_t",
    )
    gap_inside = Constant.largest(
        "G, Euclidean", found["spread_inside"], "||m*_k grad F_k - mean of the same||, at m*_k w_t"
    )
    top = Constant.largest("B, by coordinate", found["top"], "largest |grad F_k|, at own masked models and at w_t")
    steep = Constant.known(
        "B, of grad f",
        math.sqrt(max(found["total"])),
        "largest ||mean of m*_k grad F_k|| of the rounds, without what sampling clients adds",
    )
    ratio = Constant.largest("p_t", found["ratios"], "at local steps 0, 1, N/2 and N - 1; m* = the last masks")
    start = Constant.known(
        "f(w_0) - f*", float(found["losses"][0].mean()), "mean loss at m*_k w_0; f* >= 0 is taken as 0"
    )
    dropped = Constant.known("beta", float(np.mean(found["dropped"])), f"entries outside of a mask, of d = {size:,}")
    constants = [smooth, variance, inside, gap, gap_inside, top, steep, ratio, start, dropped]
    for name, values in (("dist(m_k, m_k')", found["apart"]), ("dist(m_k, m*_k)", found["away"])):
        text = "mean Hamming distance by round; m* = the last masks"
        constants.append(Constant(name, float(max(values)), float(np.mean(values)), None, len(values), text))
    constants.append(Constant.known("N", steps, "local steps in a round, most of any client"))
    constants.append(Constant.known("eta", rate, "largest learning rate"))
    sampled = 1 if alone else plan.per_round
    problem = theorems.SparseProblem(
        smoothness=smooth.value,
        variance=variance.value,
        dissimilarity=gap.value,
        gradient=top.value,
        steps=steps,
        sampled=sampled,
        size=size,
        dropped=dropped.value,
        start_gap=start.value,
        optimal_apart=found["optimal_apart"],
    )
    index = np.arange(rounds)
    masks = list(zip(np.interp(index, places, found["apart"]), np.interp(index, places, found["away"]), strict=True))
    common = [
        *check_algorithm(sample, float(found["clipped"].max()), [phase]),
        smoothness("L", smooth.value),
        bounded("gradient variance", "sigma^2", variance.value),
    ]
    if not alone and len(set(found["dropped"])) > 1:
        common.append(Assumption("all masks have one size", "violated", "capacities differ; beta is the mean"))
    bounds = [_iclr(sample, problem, rate, masks, found, common)]
    bounds.append(_journal(sample, problem, rate, inside.value, gap_inside.value, steep.value, places, found, common))
    return constants, bounds


def _check_masks(sample: Sample) -> Assumption:
    if _mask(sample.work(0, sample.clients[0])) is None:
        return Assumption("optimal masks m*", "held", "masks of ones are the only ones")
    return Assumption("optimal masks m*", "cannot be checked", "unknown: the run's last masks stand for them")


def _iclr(
    sample: Sample,
    problem: theorems.SparseProblem,
    rate: float,
    masks: list[tuple[float, float]],
    found: dict[str, Any],
    common: Sequence[Assumption],
) -> Bound:
    allowed = theorems.iclr_largest_step(problem.smoothness, problem.steps)
    terms = theorems.iclr_bound(problem, rate, masks)
    drawn_step = rate if terms is not None else allowed
    kappa = theorems.iclr_kappa(rate, problem.smoothness, problem.steps)
    notes = []
    if terms is None:
        notes.append(
            f"kappa = {number(kappa)} is not above 0 with eta = {rate:g}: the theorem says nothing of this run."
        )
    with_allowed = theorems.iclr_bound(problem, allowed, masks)
    derived = theorems.iclr_bound(problem, drawn_step, masks, as_derived=True)
    assert with_allowed is not None
    assert derived is not None
    notes.append(
        f"With the largest eta that it allows, {number(allowed)}, the bound is {number(sum(with_allowed.values()))}"
        f"{'; its terms are those shown' if terms is None else ''}."
    )
    notes.append(
        "Eq. (5) leaves out that P_t is divided by eta N kappa (Eq. (47) does not); with it the bound is "
        f"{number(sum(derived.values()))} at eta = {number(drawn_step)}."
    )

    def over_rounds(step: float) -> list[tuple[float, float]]:
        found = ((count, theorems.iclr_bound(problem, step, masks[:count])) for count in drawn_rounds(len(masks)))
        return [(float(count), sum(now.values())) for count, now in found if now is not None]

    measured = measured_means(sample, found["norms"].mean(axis=1))
    why = f"eta = {rate:g}, allowed {number(allowed)} = 1 / (16 L N)"
    return Bound(
        "FedSpa (ICLR), Theorem 1, Eq. (5)",
        "mean over rounds and clients of ||grad F_k(w_k,t)||^2",
        None if terms is None else sum(terms.values()),
        measured[-1][1],
        terms or with_allowed,
        over_rounds(rate),
        measured,
        [
            Assumption.check("the step size is small enough", rate <= allowed, why),
            *common,
            bounded("coordinates of the gradient", "B", problem.gradient),
            bounded("dissimilarity by coordinate", "G", problem.dissimilarity),
            check_constant_rate(sample),
            _check_masks(sample),
        ],
        notes,
        measured_error=standard_error(sample, found["norms"]),
        unit="squared gradient norm, mean so far",
        curve_label="" if terms is not None else f"with eta = {number(allowed)}",
        allowed_curve=over_rounds(allowed),
    )


def _journal(
    sample: Sample,
    problem: theorems.SparseProblem,
    rate: float,
    variance: float,
    dissimilarity: float,
    steep: float,
    places: list[int],
    found: dict[str, Any],
    common: Sequence[Assumption],
) -> Bound:
    rounds = max(sample.rounds, 1)
    by_place = found["ratios"].max(axis=1)
    ratios = np.interp(np.arange(rounds), places, by_place)

    def at(count: int) -> theorems.Terms | None:
        return theorems.journal_bound(
            smoothness=problem.smoothness,
            variance=variance,
            dissimilarity=dissimilarity,
            gradient=steep,
            steps=problem.steps,
            sampled=problem.sampled,
            start_gap=problem.start_gap,
            ratios=ratios[:count].tolist(),
        )

    terms = at(rounds)
    other = "p_t reads w~_k,t as m*_k w_t in both of its parts, as Fact 4 and Eq. (29) need. With m_k,t w_t in both, "
    other += f"where local training starts, the largest seen is {number(float(found['other_ratios'].max()))}, without "
    other += "local step 0, at which that reading is infinite where m_k,t and m*_k differ."
    notes = [other]
    if terms is None:
        notes.append("p_t is 0, as no local step was seen to move the gradient (N = 1): there is no bound.")
    steps = [theorems.journal_step(problem.smoothness, problem.steps, float(p), rounds) for p in ratios]
    rates = [sample.options["lr"] * scale for scale in sample.lr_scales]
    parts = [rate / step for rate, step in zip(rates, steps, strict=True)]
    is_small = max(parts) <= 1.01
    why = f"eta = {rate:g}, at most {number(min(steps))}; eta_t is up to {number(max(parts))} times as large as allowed"
    if terms is not None and not is_small:
        notes.insert(0, would_be(sum(terms.values())))
    curve = [(float(count), sum(now.values())) for count in drawn_rounds(rounds) if (now := at(count)) is not None]
    measured = measured_means(sample, found["total"])
    return Bound(
        "FedSpa (journal), Theorem 1, Eq. (5)",
        "mean over rounds of ||grad f(w_t)||^2",
        sum(terms.values()) if terms is not None and is_small else None,
        measured[-1][1],
        terms or {},
        curve,
        measured,
        [
            Assumption.check("the step size is at most sqrt(1 / (16 L^2 N^2 p_t T))", is_small, why),
            Assumption.check(
                "the step size equals that, which Eq. (40) needs",
                is_small and min(parts) >= 0.99,
                f"eta_t is from {number(min(parts))} to {number(max(parts))} times as large",
            ),
            *common,
            bounded("gradient of f", "B", steep),
            bounded("dissimilarity of masked gradients", "G", dissimilarity),
            _check_masks(sample),
        ],
        notes,
        measured_error=standard_error(sample, found["slopes"]),
        unit="squared gradient norm, mean so far",
        curve_label="" if is_small else IF_SMALLER,
    )
