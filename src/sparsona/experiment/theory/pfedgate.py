"""pFedGate's proposition and theorems, and its formula for the share of the model that a client uploads."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsona import methods
from sparsona.analysis import theorems
from sparsona.analysis.bounds import Assumption, Bound, Constant, number
from sparsona.core.method import Work
from sparsona.core.round import Batch
from sparsona.data.batches import in_order, shuffled
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
)
from sparsona.methods.pfedgate.blocks import spread
from sparsona.methods.pfedgate.model import GatedModel
from sparsona.runs.validation import validate

EXAMPLES_ALONE = 8  # examples of a client at which Lipschitz constants are taken


def pfedgate_bounds(sample: Sample) -> tuple[list[Constant], list[Bound]]:
    """Estimates of the constants of all statements, and their bounds."""
    context, clients = sample.context, sample.clients
    config = validate(methods.factory("pfedgate")[1], sample.options, "pfedgate")
    model, phase = GatedModel(context.task, config), context.method.phases[0]
    shape, last = (len(sample.points), len(clients)), len(sample.points) - 1
    norms, variances, smooth, clipped = (np.zeros(shape) for _ in range(4))
    count = len(clients)
    (
        away,
        diverse,
        convex,
        largest,
        least,
        nonzero,
        steep,
        outputs,
        gates,
        radius,
        errors,
        shares,
        formula,
        first,
        later,
    ) = (np.zeros(count) for _ in range(15))
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
            objective = sample.objective(client, loss)
            mean = objective.gradient(x)
            norms[place, k] = float(mean[0].double().square().sum())
            draws = sample.draws(client, sample.batch_size(client, phase))
            variances[place, k] = np.mean(squared_errors(loss, x, mean, draws)[0])
            clipped[place, k] = largest_batch_gradient(loss, x, draws)
            smooth[place, k] = block_norm(objective, x, 0, 0, sample.random(client, "curvature"))
            if place == last:
                gate_size = work.gate.flat.numel()
                gated = _multipliers(model, work, objective.batches)
                own = theta * gated
                away[k] = float((gated - 1).norm())
                plain = sample.objective(client, _plain(sample, work))
                here, there = plain.gradient((own,))[0], plain.gradient((theta,))[0]
                diverse[k] = float((here - there).double().square().sum())
                top = block_norm(plain, (theta,), 0, 0, sample.random(client, "convexity"))
                convex[k] = least_curvature(plain, (theta,), top, sample.random(client, "least"))
                largest[k], least[k] = float(own.abs().max()), float(own.abs().min())
                nonzero[k] = float(own[own != 0].abs().min())
                steep[k], outputs[k], gates[k] = _lipschitz(sample, model, work, own, draws[0])
                radius[k] = max(float(theta.norm()), float(work.gate.flat.norm()))
                errors[k] = objective.value(x)
                first[k], later[k], formula[k], shares[k] = _uploads(sample, model, work, client, phase)
            sample.listen()
    size, n = theta.numel(), len(sample.taking_part)
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
            "least eigenvalue of the Hessian at theta_g",
        ),
        Constant.known("||theta_g||", float(theta.norm()), "last models"),
        Constant.known("R", ends[0][0], "largest entry of theta_i in absolute value"),
        Constant.known("r", ends[1][1], f"least entry of theta_i; of those not 0: {number(float(nonzero.min()))}"),
        Constant.largest("L", smooth, "power iteration on Hessian products, through the gate"),
        Constant.largest("sigma^2", variances, "||g - grad F_i||^2 over batches"),
        by_client("L_f", steep, f"largest gradient of {EXAMPLES_ALONE} examples' losses by theta_i"),
        by_client("L_h", outputs, "largest spectral norm of the outputs' Jacobian by theta_i"),
        by_client("L_g", gates, "largest spectral norm of the gate's Jacobian by phi_i"),
        by_client("R, of the ball", radius, "largest of ||theta_g|| and ||phi_i||"),
        by_client("p_1", first, "share of the model that the first batch uses"),
    ]
    bounds = [
        _proposition(sample, theta, diverse, convex, largest, least, nonzero, away),
        _generalization(sample, size, gate_size, n, radius, steep, outputs, gates, errors),
        _convergence(sample, norms, float(clipped.max()), constants),
        _uploaded(formula, shares, later, first, sample),
    ]
    return constants, bounds


def _mean_input(sample: Sample, client: int) -> Tensor:
    batches = list(in_order(sample.examples(client), 256))
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


def _selection(model: GatedModel, work: Work, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """What a batch's gate keeps (I*) and by what it multiplies (M'), for each entry of the model.

    With a gate for each example, what any of them keeps, and the mean of what they multiply by.
    """
    here, gating = model.of(work)[0], model.config.gating
    with torch.no_grad():
        seen = work.pooled[None] if gating == "client" else inputs
        scores, weights, _ = here.form.scores(work.gate, work.buffers.gate, seen)
        if gating != "sample":
            scores, weights = scores.mean(0, keepdim=True), weights.mean(0, keepdim=True)
        kept = torch.stack([model.adapt(work, g, m)[1] for g, m in zip(scores, weights, strict=True)])
        return spread(here.blocks, kept.amax(0)), spread(here.blocks, (kept * weights).mean(0))


def _multipliers(model: GatedModel, work: Work, batches: Any) -> Tensor:
    """M'_i for each entry of the model: the mean over a client's batches."""
    found = [_selection(model, work, batch.inputs)[1] for batch in batches]
    return torch.stack(found).mean(0)


def _uploads(
    sample: Sample, model: GatedModel, work: Work, client: int, phase: Any
) -> tuple[float, float, float, float]:
    """p_1, the mean of the later p_j, q by appendix E's formula with p_j = p_1, and the share of entries that some
    batch of a pass uses, with the last gate."""
    examples = sample.examples(client)
    size, seed = sample.batch_size(client, phase), sample.random(client, "pass").initial_seed()
    used: Tensor | None = None
    shares: list[float] = []
    for batch in shuffled(examples, size, seed, phase.mixes_examples):
        kept = _selection(model, work, batch.inputs)[0] > 0
        before = torch.zeros_like(kept) if used is None else used
        left = float((~before).sum())
        shares.append(float((kept & ~before).sum()) / left if left else 0.0)
        used = kept | before
    assert used is not None
    later = float(np.mean(shares[1:])) if len(shares) > 1 else 0.0
    return shares[0], later, theorems.upload_share([shares[0]] * len(shares)), float(used.float().mean())


def _lipschitz(sample: Sample, model: GatedModel, work: Work, own: Tensor, batch: Batch) -> tuple[float, float, float]:
    """L_f, L_h and L_g at a client's own model, over some of its examples."""
    task, like, buffers = sample.context.task, work.params.like, work.buffers.model
    plain, form = _plain(sample, work), model.of(work)[0].form
    steep = outputs = gates = 0.0

    def predict(inputs: Tensor, weights: Tensor) -> Tensor:
        return task.forward(like(weights), buffers, inputs, train=False)[0]

    def multiply(inputs: Tensor, phi: Tensor) -> Tensor:
        return form.scores(work.gate.like(phi), work.buffers.gate, inputs)[1]

    for place in range(min(EXAMPLES_ALONE, len(batch.targets))):
        x = batch.inputs[place : place + 1]
        one = Batch(x, batch.targets[place : place + 1], batch.weight[:1], batch.index[:1], batch.noise)
        steep = max(steep, float(gradient(plain, (own,), one)[0].norm()))
        outputs = max(outputs, jacobian_norm(partial(predict, x), own))
        gates = max(gates, jacobian_norm(partial(multiply, x), work.gate.flat))
    return steep, outputs, gates


def _proposition(
    sample: Sample,
    theta: Tensor,
    diverse: np.ndarray,
    convex: np.ndarray,
    largest: np.ndarray,
    least: np.ndarray,
    nonzero: np.ndarray,
    away: np.ndarray,
) -> Bound:
    top, bottom, mu = float(theta.abs().max()), float(theta.abs().min()), float(convex.min())
    worst = [
        theorems.gate_distance_bound(float(d), mu, float(theta.norm()), (float(a), top), (float(b), bottom))
        for d, a, b in zip(diverse, largest, least, strict=True)
    ]
    value = None if None in worst else max(found for found in worst if found is not None)
    rest = number(float(nonzero.min()))
    notes = [
        f"A sparse theta_i has entries of 0: r = 0, and Eq. (4) is infinite by its own terms; without them r = {rest}.",
        "Eqs. (12) and (13) together give ||theta_g|| where Eq. (4) prints its square.",
    ]
    if value is None:
        notes.insert(0, f"f is not strongly convex: its Hessian has an eigenvalue of {number(mu)}. There is no bound.")
    assumptions = [
        Assumption.check("f is strongly convex", mu > 0, f"least eigenvalue seen {number(mu)}"),
        Assumption.check("no entry of theta_i is 0", bool((least > 0).all()), "gates drop whole blocks"),
        bounded("diversity", "sigma_i^2", float(diverse.max())),
        Assumption("theta_i and theta_g are optimal", "cannot be checked", "the run's last models stand for them"),
    ]
    return Bound(
        "pFedGate, Proposition 1, Eq. (4)",
        "||M_i - 1||, largest of the clients",
        value,
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
    test = sample.recorded_loss()
    gap = None if test is None else abs(float(errors.mean()) - test)
    notes = [f"With the {fewest} examples of the smallest client; delta = {sample.delta:g}."]
    if gap:
        needed = theorems.pfedgate_examples(epsilon=gap, **constants)
        notes.append(f"For the gap that was measured it asks for {number(needed)} examples of each client.")
        notes.append(f"Measured: training loss {errors.mean():.4f}, test loss {test:.4f} as the run recorded it.")
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
        measured_error=standard_error(norms),
    )


def _uploaded(formula: np.ndarray, shares: np.ndarray, later: np.ndarray, first: np.ndarray, sample: Sample) -> Bound:
    density = float(sample.options["density"])
    return Bound(
        "pFedGate, appendix E",
        "q, the share of the model that some batch of a pass uses, with the last gate",
        float(formula.mean()),
        float(shares.mean()),
        assumptions=[
            Assumption.check(
                "p_1 = s_i",
                bool(np.allclose(first, density, atol=0.02)),
                f"p_1 = {number(float(first.mean()))}, s = {density:g}; capacities may lower s_i",
            ),
            Assumption.check(
                "p_j falls with j",
                bool(later.mean() <= first.mean()),
                f"p_1 = {number(float(first.mean()))}, mean of the later p_j {number(float(later.mean()))}",
            ),
        ],
        notes=[
            "The bound is q = 1 - prod(1 - p_j) with p_j = p_1, the most that falling p_j allow.",
            "With p_j as shares of the entries not used before, the formula gives the measured q exactly.",
        ],
        measured_error=standard_error(shares[None]),
    )
