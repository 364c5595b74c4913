"""pFedGate's proposition and theorems, and its formula for the share of the model that a client uploads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsona import methods
from sparsona.analysis import theorems
from sparsona.analysis.bounds import Assumption, Bound, Constant
from sparsona.analysis.format import number
from sparsona.analysis.gates import GateTurn, recorded_gates
from sparsona.core.method import Work, steps_taken
from sparsona.core.round import Batch
from sparsona.data.batches import in_order
from sparsona.engine.rounds import shared_model
from sparsona.experiment.theory.estimates import (
    Loss,
    Point,
    block_norm,
    gradient,
    jacobian_norm,
    least_curvature,
    squared_errors,
)
from sparsona.experiment.theory.sample import (
    Sample,
    bounded,
    check_algorithm,
    largest_batch_gradient,
    measured_means,
    smoothness,
    standard_error,
    training_loss,
)
from sparsona.methods.pfedgate.blocks import spread
from sparsona.methods.pfedgate.model import GatedModel
from sparsona.runs.validation import validate

EXAMPLES_ALONE = 8  # examples of a client at which Lipschitz constants are taken
ROUNDING = 1e-6  # eigenvalues below 0 by less, relative to the largest, may be those of a convex function


def pfedgate_bounds(sample: Sample) -> tuple[list[Constant], list[Bound]]:
    """Estimates of the constants of all statements, and their bounds."""
    context, clients = sample.context, sample.clients
    config = validate(methods.factory("pfedgate")[1], sample.options, "pfedgate")
    model, phase = GatedModel(context.task, config), context.method.phases[-1]  # the one that trains the model
    is_exact = sample.has_exact_gradients(phase)
    shape, last = (len(sample.points), len(clients)), len(sample.points) - 1
    norms, variances, smooth, clipped = (np.zeros(shape) for _ in range(4))
    count = len(clients)
    (away, diverse, convex, largest, least, nonzero, by_theta, steep, outputs, gates, radius, errors, tops) = (
        np.zeros(count) for _ in range(13)
    )
    gate_size = 0
    shared = shared_model(context.server_side, sample.points[-1][1])
    assert shared is not None
    theta = shared.flat
    for place in range(len(sample.points)):
        for k, client in enumerate(clients):
            work = sample.work(place, client)
            if config.gating == "client":  # section 7.4: the gate looks at the mean input
                work = replace(work, pooled=_mean_input(sample, client))
            loss, x = _gated(work, phase.loss)
            size = sample.batch_size(client, phase)  # the gate looks at a batch: of the size that training has
            objective = sample.objective(client, loss, size)
            mean = objective.gradient(x)
            norms[place, k] = float(mean[0].double().square().sum())
            draws = sample.draws(client, size)
            variances[place, k] = 0.0 if is_exact else np.mean(squared_errors(loss, x, mean, draws)[0])
            clipped[place, k] = largest_batch_gradient(loss, x, draws)
            curved = sample.curvature(client, loss, size)
            smooth[place, k] = block_norm(curved, x, 0, 0, sample.random(client, "curvature"))
            if place == last:
                gate_size = work.gate.flat.numel()
                gated = _multipliers(model, work, objective.batches)
                own = theta * gated
                away[k] = float((gated - 1).norm())
                plain = sample.objective(client, _plain(sample, work))
                here, there = plain.gradient((own,))[0], plain.gradient((theta,))[0]
                diverse[k] = float((here - there).double().square().sum())
                curved = sample.curvature(client, _plain(sample, work))
                tops[k] = block_norm(curved, (theta,), 0, 0, sample.random(client, "convexity"))
                convex[k] = least_curvature(curved, (theta,), tops[k], sample.random(client, "least"))
                largest[k], least[k] = float(own.abs().max()), float(own.abs().min())
                nonzero[k] = float(own[own != 0].abs().min())
                by_theta[k], steep[k], outputs[k], gates[k] = _lipschitz(sample, model, work, own, draws[0])
                radius[k] = max(float(theta.norm()), float(work.gate.flat.norm()))
                errors[k] = training_loss(sample, work, client)
            sample.listen()
    n = len(sample.taking_part)
    ends = [(float(values.max()), float(values.min())) for values in (largest, least)]

    def by_client(symbol: str, values: np.ndarray, how: str) -> Constant:
        return Constant.largest(symbol, values[None], how)

    constants = [
        by_client("sigma_i^2", diverse, "||grad f(theta_i) - grad f(theta_g)||^2 on a client's examples, last models"),
        Constant(
            "mu",
            float(convex.min()),
            float(convex.mean()),
            _sd(convex),
            count,
            "least eigenvalue of the Hessian at theta_g that was seen; the true one may be less",
        ),
        Constant.known("||theta_g||", float(theta.norm()), "last models"),
        Constant.known("R", ends[0][0], "largest entry of theta_i in absolute value"),
        Constant.known("r", ends[1][1], f"least entry of theta_i; of those not 0: {number(float(nonzero.min()))}"),
        Constant.largest("L", smooth, "power iteration on Hessian products, through the gate"),
        Constant.largest("sigma^2", variances, "||g - grad F_i||^2 over batches"),
        by_client("L_f", steep, f"largest gradient of {EXAMPLES_ALONE} examples' losses by the outputs (proof)"),
        by_client("L_f, by theta", by_theta, "the same by theta_i, as Assumption 2 has it: L_h is within it"),
        by_client("L_h", outputs, "largest spectral norm of the outputs' Jacobian by theta_i"),
        by_client("L_g", gates, "largest spectral norm of the gate's Jacobian by phi_i, norms by the batch"),
        by_client("R, of the ball", radius, "largest of ||theta_g|| and ||phi_i||"),
    ]
    turns = recorded_turns(sample)
    if turns:
        how = f"share of the model that a turn's first batch used, means of {len(turns)} clients, as recorded"
        constants.append(by_client("p_1", np.array([one.first for one in turns.values()]), how))
    bounds = [
        _proposition(diverse, convex, bool((convex < -ROUNDING * tops).any()), largest, least, nonzero, away),
        _generalization(sample, theta.numel(), gate_size, n, radius, steep, by_theta, outputs, gates, errors),
        _convergence(sample, norms, float(clipped.max()), constants),
        _uploaded(sample, turns),
    ]
    return constants, bounds


def _mean_input(sample: Sample, client: int) -> Tensor:
    batches = list(in_order(sample.all_examples(client), 256))
    return torch.cat([batch.inputs for batch in batches]).mean(0)


def _sd(values: np.ndarray) -> float | None:
    return float(values.std(ddof=1)) if len(values) > 1 else None


def _gated(work: Work, train_loss: Any) -> tuple[Loss, Point]:
    """The loss of a training step as a function of theta_g, with the gate as it is."""

    def loss(x: Point, batch: Batch) -> Tensor:
        found: Tensor = train_loss(replace(work, params=work.params.like(x[0])), batch)[0]
        return found

    return loss, (work.params.flat.detach(),)


def _plain(sample: Sample, work: Work) -> Loss:
    """The loss of the network itself with these weights: f(theta; x, y)."""
    task, buffers, like = sample.context.task, work.buffers.model, work.params.like

    def loss(x: Point, batch: Batch) -> Tensor:
        return task.mean_loss(task.forward(like(x[0]), buffers, batch.inputs, train=False)[0], batch)

    return loss


def _multipliers(model: GatedModel, work: Work, batches: Sequence[Batch]) -> Tensor:
    """M'_i for each entry of the model: the mean over a client's examples, in batches as training sees them."""
    gated, examples = torch.zeros_like(work.buffers.gated), 0.0
    with torch.no_grad():
        for batch in batches:
            after = model.loss(work, batch)[1]
            gated = gated + after.gated - work.buffers.gated
            examples += float(after.examples - work.buffers.examples)
    return spread(model.of(work)[0].blocks, gated / examples)


@dataclass(frozen=True)
class Turns:
    """What a client's recorded turns used, in the mean: the share that some batch used (q), the formula's value with
    the share of each batch, the share of the first batch, and the shares that each batch added (p_j)."""

    measured: float
    formula: float
    first: float
    added: np.ndarray


def recorded_turns(sample: Sample) -> dict[int, Turns]:
    """By client, from what the run recorded of the rounds that were evaluated."""
    found = recorded_gates(sample.folder)
    by_client: dict[int, list[GateTurn]] = {}
    for turn in () if found is None else found.turns:
        if turn.completed > sample.rounds:  # of tuning
            continue
        by_client.setdefault(turn.client, []).append(turn)
    return {
        client: Turns(
            float(np.mean([turn.upload_share for turn in turns])),
            float(np.mean([turn.upload_share_formula for turn in turns])),
            float(np.mean([turn.newly_used[0] for turn in turns])),
            np.mean([turn.newly_used for turn in turns], axis=0),
        )
        for client, turns in sorted(by_client.items())
    }


def _lipschitz(
    sample: Sample, model: GatedModel, work: Work, own: Tensor, batch: Batch
) -> tuple[float, float, float, float]:
    """L_f by theta_i and by the outputs, L_h, and L_g at a client's own model, over some of its examples.

    The gate's norms go by the batch, as in training.
    """
    task, like, buffers, gating = sample.context.task, work.params.like, work.buffers.model, model.config.gating
    plain, form = _plain(sample, work), model.of(work)[0].form
    by_theta = steep = outputs = gates = 0.0

    def predict(inputs: Tensor, weights: Tensor) -> Tensor:
        return task.forward(like(weights), buffers, inputs, train=False)[0]

    def multiply(phi: Tensor) -> Tensor:
        seen = (work.pooled[None], batch.weight.new_ones(1)) if gating == "client" else (batch.inputs, batch.weight)
        return form.scores(work.gate.like(phi), work.buffers.gate, *seen)[1]

    for place in range(min(EXAMPLES_ALONE, len(batch.targets))):
        x = batch.inputs[place : place + 1]
        one = Batch(x, batch.targets[place : place + 1], batch.weight[:1], batch.index[:1], batch.noise)
        by_theta = max(by_theta, float(gradient(plain, (own,), one)[0].norm()))
        with torch.no_grad():
            answer = predict(x, own)
        (by_output,) = gradient(lambda y, b: task.mean_loss(y[0], b), (answer,), one)
        steep = max(steep, float(by_output.norm()))
        outputs = max(outputs, jacobian_norm(partial(predict, x), own))
        if gating == "sample":
            gates = max(gates, jacobian_norm(lambda phi, at=place: multiply(phi)[at], work.gate.flat))  # type: ignore[misc]
    if gating != "sample":  # one for all examples: their mean
        gates = jacobian_norm(lambda phi: multiply(phi).mean(0), work.gate.flat)
    return by_theta, steep, outputs, gates


def _proposition(
    diverse: np.ndarray,
    convex: np.ndarray,
    is_refuted: bool,
    largest: np.ndarray,
    least: np.ndarray,
    nonzero: np.ndarray,
    away: np.ndarray,
) -> Bound:
    mu, top = float(convex.min()), float(largest.max())
    why = f"least eigenvalue seen {number(mu)}"
    if not is_refuted:
        why += "; the iteration comes from above, and other points were not looked at"
    sizes = f"without them r = {number(float(nonzero.min()))}, R = {number(top)}"
    notes = [
        f"f is not convex: its Hessian has an eigenvalue of {number(mu)}. There is no bound."
        if is_refuted
        else "mu is not known: the least eigenvalue seen is no lower limit of it. There is no bound.",
        f"A sparse theta_i has entries of 0: r = 0, and Eq. (4) is infinite by its own terms; {sizes}.",
        "Eqs. (12) and (13) together give ||theta_g|| where Eq. (4) prints its square.",
    ]
    assumptions = [
        Assumption("f is strongly convex", "violated" if is_refuted else "cannot be checked", why),
        Assumption.check("no entry of theta_i is 0", bool((least > 0).all()), "gates drop whole blocks"),
        bounded("diversity", "sigma_i^2", float(diverse.max())),
        Assumption("theta_i and theta_g are optimal", "cannot be checked", "the run's last models stand for them"),
    ]
    return Bound(
        "pFedGate, Proposition 1, Eq. (4)",
        "||M_i - 1||, largest of the clients",
        None,
        float(away.max()),
        assumptions=assumptions,
        notes=notes,
    )


def _generalization(
    sample: Sample,
    size: int,
    gate_size: int,
    n: int,
    radius: np.ndarray,
    steep: np.ndarray,
    by_theta: np.ndarray,
    outputs: np.ndarray,
    gates: np.ndarray,
    errors: np.ndarray,
) -> Bound:
    fewest = min(sample.context.clients[client].num_examples for client in sample.taking_part)
    constants: dict[str, Any] = {
        "delta": sample.delta,
        "clients": n,
        "size": size,
        "gate_size": gate_size,
        "radius": float(radius.max()),
        "lipschitz": float(steep.max() * outputs.max()),
        "gate": float(gates.max()),
    }
    epsilon = theorems.pfedgate_gap(fewest, **constants)
    literal = theorems.pfedgate_gap(fewest, **constants | {"lipschitz": float(by_theta.max() * outputs.max())})
    test = sample.recorded_losses()
    pairs = np.array([(errors[k], test[client]) for k, client in enumerate(sample.clients) if client in test])
    gaps = pairs[:, 1] - pairs[:, 0] if len(pairs) else np.zeros(0)
    gap = abs(float(gaps.mean())) if len(pairs) else None
    other = "L_f is by the network's outputs, as the proof uses it. By theta_i, as Assumption 2 has it, L_f L_h counts "
    other += f"the network's slope twice, and the value is {number(literal)}."
    notes = [f"With the {fewest} examples of the smallest client; delta = {sample.delta:g}.", other]
    if gap:
        needed = theorems.pfedgate_examples(epsilon=gap, **constants)
        notes.append(f"For the gap that was measured it asks for {number(needed)} examples of each client.")
        notes.append(
            f"Measured on the same {len(pairs)} clients, both by the models that they deploy: training loss "
            f"{pairs[:, 0].mean():.4f}, test loss {pairs[:, 1].mean():.4f} as the run recorded it."
        )
    return Bound(
        "pFedGate, Theorem 1",
        "|expected loss - training loss|",
        epsilon,
        gap,
        assumptions=[
            Assumption("parameters in a ball of radius R", "held", f"R = {number(float(radius.max()))} at the end"),
            bounded("slopes (Lipschitz)", "L_f L_h", constants["lipschitz"]),
            Assumption(
                "the loss is bounded", "violated", "the cited result of Baxter needs it; cross-entropy has no limit"
            ),
        ],
        notes=notes,
        leaves_out_constants=True,
        measured_error=standard_error(sample, gaps[None]),
    )


def _convergence(sample: Sample, norms: np.ndarray, clipped: float, constants: list[Constant]) -> Bound:
    named = {one.symbol: one for one in constants}
    measured = measured_means(sample, norms.mean(axis=1))
    first = norms[0].mean()
    rounds = max(sample.rounds, 1)
    rate = sample.options["lr"]
    curve = [(float(t), float(first / math.sqrt(t))) for t in range(1, rounds + 1)]
    return Bound(
        "pFedGate, Theorem 2, Eq. (7)",
        "mean over rounds of ||grad_theta f(theta_g (x) g_phi)||^2, of any client",
        None,
        measured[-1][1],
        {},
        curve,
        measured,
        [
            *check_algorithm(sample, clipped, sample.context.method.phases),
            Assumption(
                "eta = eta_0 / sqrt(T')",
                "cannot be checked",
                f"eta = {rate:g} fits with eta_0 = {rate * math.sqrt(rounds):.3g}",
            ),
            Assumption("T' is large enough", "cannot be checked", "the theorem does not say how large"),
            smoothness("L", named["L"].value),
            bounded("variance", "sigma^2", named["sigma^2"].value),
            Assumption.check("the gate's step is that of SGD", sample.options.get("optimizer", "sgd") == "sgd"),
        ],
        ["The theorem gives a rate, O(1 / sqrt(T')), and no constants, so there is no value to compare with."],
        leaves_out_constants=True,
        unit="squared gradient norm, mean so far",
        curve_label="first measured value / sqrt(rounds)",
        measured_error=standard_error(sample, norms),
    )


def _uploaded(sample: Sample, turns: dict[int, Turns]) -> Bound:
    phase = sample.context.method.phases[-1]
    theorem, what = "pFedGate, appendix E", "q, the share of the model that some batch of a turn uses"
    if not turns:
        note = "The run recorded no turn, as no round was evaluated: there is nothing to compare."
        return Bound(theorem, what, None, None, notes=[note])
    density, every = float(sample.options["density"]), [sample.context.clients[client] for client in turns]
    steps = [steps_taken(phase, client, sample.context.plan.round_at(0)) for client in every]
    first, measured, formula = (
        np.array([getattr(one, name) for one in turns.values()]) for name in ("first", "measured", "formula")
    )
    bound = [theorems.upload_share([p] * count) for p, count in zip(first, steps, strict=True)]
    wanted = np.array([min(density, client.capacity) for client in every])
    apart = float(np.abs(first - wanted).max())
    added = np.mean([one.added[: min(steps)] for one in turns.values()], axis=0)
    falls = bool((np.diff(added) <= 0.001).all())
    return Bound(
        theorem,
        what,
        float(np.mean(bound)),
        float(measured.mean()),
        assumptions=[
            Assumption.check(
                "p_1 = s_i",
                apart <= 0.02,
                f"p_1 = {number(float(first.mean()))}, s_i = {number(float(wanted.mean()))} in the mean; "
                f"up to {number(apart)} apart",
            ),
            Assumption.check("p_j falls with j", falls, f"p_j = {', '.join(number(float(p)) for p in added)}"),
        ],
        notes=[
            f"From the turns of {len(turns)} clients that the run recorded, in the rounds that were evaluated.",
            "The bound is q = 1 - prod(1 - p_j) with p_j = p_1, the most that falling p_j allow.",
            f"With p_j as the share that batch j used, whatever was used before: {number(float(formula.mean()))}.",
            "With p_j as shares of the entries not used before, the formula gives the measured q exactly.",
        ],
        measured_error=standard_error(sample, measured[None]),
    )
