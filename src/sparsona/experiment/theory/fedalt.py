"""FedSim's and FedAlt's theorems: a shared and a personal part, each with constants of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from sparsona.analysis import theorems
from sparsona.analysis.bounds import Assumption, Bound, Constant
from sparsona.analysis.format import number
from sparsona.experiment.theory.estimates import block_norm, squared_errors
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


def fedalt_bounds(sample: Sample) -> tuple[list[Constant], list[Bound]]:
    """Estimates of the constants by part, and the bounds of both theorems."""
    context, clients, options = sample.context, sample.clients, sample.options
    shape = (len(sample.points), len(clients))
    losses, var_u, var_v, lu, lv, cross, own_v, clipped = (np.zeros(shape) for _ in range(8))
    diversity, share_u = np.zeros(len(sample.points)), np.zeros(len(sample.points))
    slopes, is_exact = np.zeros(shape), all(sample.has_exact_gradients(phase) for phase in context.method.phases)
    for place in range(len(sample.points)):
        shared: list[Tensor] = []
        for k, client in enumerate(clients):
            loss, x = sample.predicted(sample.work(place, client), ("shared", "personal"))
            objective = sample.objective(client, loss)
            g = objective.gradient(x)
            losses[place, k] = objective.value(x)
            draws = sample.draws(client, sample.batch_size(client, context.method.phases[0]))
            errors = squared_errors(loss, x, g, draws)
            if not is_exact:
                var_u[place, k], var_v[place, k] = np.mean(errors[0]), np.mean(errors[1])
            clipped[place, k] = largest_batch_gradient(loss, x, draws)
            random, curved = sample.random(client, "curvature"), sample.curvature(client, loss)
            lu[place, k], lv[place, k] = (block_norm(curved, x, block, block, random) for block in (0, 1))
            cross[place, k] = block_norm(curved, x, 0, 1, random)
            own_v[place, k] = float(g[1].double().square().sum())
            shared.append(g[0])
            sample.listen()
        whole = mean_gradient(shared, len(sample.taking_part))
        share_u[place], diversity[place], slopes[place] = whole.squared, whole.diversity, whole.slopes
    phases = context.method.phases
    alternates = len(phases) == 2
    steps_v, steps_u = (max(sample.steps(phase)) for phase in (phases[0], phases[-1]))
    made = {
        "L_u": Constant.largest("L_u", lu, "power iteration on the Hessian's shared block"),
        "L_v": Constant.largest("L_v", lv, "power iteration on its personal block"),
        "L_uv": Constant.largest("L_uv", cross, "power iteration on its mixed block; L_vu is equal"),
        "s_u": Constant.largest("sigma_u^2", var_u, "||g - grad_u F_i||^2 over batches"),
        "s_v": Constant.largest("sigma_v^2", var_v, "||g - grad_v F_i||^2 over batches"),
        "d": Constant(
            "delta^2", float(diversity.max()), float(diversity.mean()), None, len(diversity),
            "mean ||grad_u F_i - grad_u F||^2 over all clients, estimated from the sampled, by round, with rho = 0",
        ),
        "F": Constant.known("Delta F_0", float(losses[0].mean()), "mean loss of the first models; F* >= 0: 0 is taken"),
    }  # fmt: skip
    problem = theorems.PartialProblem(
        smooth_u=made["L_u"].value,
        smooth_v=made["L_v"].value,
        cross=made["L_uv"].value,
        variance_u=made["s_u"].value,
        variance_v=made["s_v"].value,
        diversity=made["d"].value,
        clients=len(sample.taking_part),
        sampled=context.plan.per_round,
        steps_u=steps_u,
        steps_v=steps_v,
        start_gap=made["F"].value,
    )
    rate_u, rate_v = (max(sample.lr_scales) * (options.get(name) or options["lr"]) for name in ("lr", "personal_lr"))
    eta_u, eta_v = rate_u * problem.smooth_u * steps_u, rate_v * problem.smooth_v * steps_v
    constants = [
        *made.values(),
        Constant.known("chi", problem.chi, "Eq. (5): L_uv / sqrt(L_u L_v)"),
        Constant.known("tau_u", steps_u, "steps of the shared part in a round, most of any client"),
        Constant.known("tau_v", steps_v, "steps of the personal part"),
        Constant.known("eta_u", eta_u, f"gamma_u L_u tau_u, gamma_u = {rate_u:g}"),
        Constant.known("eta_v", eta_v, f"gamma_v L_v tau_v, gamma_v = {rate_v:g}"),
    ]
    weight = problem.sampled / (problem.clients * problem.smooth_v)
    measured = measured_means(sample, share_u / problem.smooth_u + weight * own_v.mean(axis=1))
    both = f"{number(eta_u)} and {number(eta_v)}; the bound is that of the first"
    common = [
        Assumption.check("gamma_u L_u tau_u = gamma_v L_v tau_v = eta", 0.99 <= eta_u / eta_v <= 1.01, both),
        *check_algorithm(sample, float(clipped.max()), phases),
        check_constant_rate(sample),
        smoothness("L_u, L_v, L_uv", max(problem.smooth_u, problem.smooth_v, problem.cross)),
        bounded("gradient variance", "sigma_u^2 + sigma_v^2", problem.variance_u + problem.variance_v),
        bounded("partial gradient diversity", "delta^2", problem.diversity),
    ]  # fmt: skip
    left, right = theorems.fedalt_beats_fedsim(problem)
    condition = f"{'FedAlt' if left < right else 'FedSim'}'s rate is the better one here: "
    condition += f"sigma_v^2 / L_v (1 - 2m/n) = {number(left)}, "
    condition += f"(sigma_u^2 + delta^2 (1 - m/n)) / (m L_u) = {number(right)}."
    by_part = f"By part, measured: ||grad_u F||^2 = {number(share_u[0])} at first, {number(share_u[-1])} at the end; "
    by_part += f"mean ||grad_v F_i||^2 = {number(own_v[0].mean())} and {number(own_v[-1].mean())}."
    step = max(eta_u, eta_v)
    bounds = []
    reached = measured[-1][1]
    for name, theorem, corollary, bound, largest, updates in (
        ("FedSim", "Theorem 1, Eq. (6)", 3, theorems.fedsim_bound, theorems.fedsim_largest_step, "simultaneous"),
        ("FedAlt", "Theorem 2", 10, theorems.fedalt_bound, theorems.fedalt_largest_step, "alternating"),
    ):
        mine, allowed = alternates == (updates == "alternating"), largest(problem)
        rounds, why = max(sample.rounds, 1), f"{number(step)}, allowed {number(allowed)}"
        terms = bound(problem, eta_u, rounds)
        is_small = step <= allowed
        regime, eta, table = theorems.partial_rate(problem, rounds, updates)  # type: ignore[arg-type]

        def over_rounds(step: float, bound: Any = bound, rounds: int = rounds) -> list[tuple[float, float]]:
            return [(float(count), sum(bound(problem, step, count).values())) for count in drawn_rounds(rounds)]

        small = sum(bound(problem, allowed, rounds).values())
        notes = [
            f"With eta = {number(allowed)}, the largest allowed: {number(small)}.",
            f"Table 1, {regime}, eta = {number(eta)}: {number(table)}.",
        ]
        if reached > 0:
            eta, needed = theorems.partial_rounds(problem, reached, updates)  # type: ignore[arg-type]
            text = f"Corollary {corollary}, epsilon = {number(reached)} as measured: "
            notes.append(f"{text}{number(needed)} rounds, eta = {number(eta)}.")
        if not is_small:
            notes.insert(0, would_be(sum(terms.values())))
        if mine:
            notes = [*notes, by_part, condition]
        else:
            notes.append("Not this run's method: the bound with its constants, for comparison.")
        bounds.append(
            Bound(
                f"{name}, {theorem}",
                "mean over rounds of ||grad_u F||^2 / L_u + (m / n L_v) mean ||grad_v F_i||^2",
                sum(terms.values()) if is_small else None,
                reached if mine else None,
                terms,
                over_rounds(eta_u),
                measured if mine else (),
                [
                    Assumption.check("eta is small enough", is_small, why),
                    *common,
                ],
                notes,
                leaves_out_constants=True,
                unit="weighted squared gradients, mean so far",
                allowed_curve=over_rounds(allowed),
                curve_label="" if is_small else IF_SMALLER,
                measured_error=standard_error(sample, slopes / problem.smooth_u + weight * own_v) if mine else None,
            )
        )  # fmt: skip
    return constants, sorted(bounds, key=lambda one: one.measured is None)
