"""The right-hand sides of the papers' theorems as closed forms, and the step sizes that they ask for. Free of torch.

Symbols are the papers'. Where a statement and its proof disagree, the function says so and offers both. FedSpa's two
versions are told apart by venue: `iclr` is the submission of 2022, `journal` the later one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Terms = dict[str, float]  # a bound, term by term; their sum is the bound


# FedSpa, Theorem 1 of the ICLR 2022 submission


@dataclass(frozen=True, kw_only=True)
class SparseProblem:
    """The constants of FedSpa's Theorem 1 (ICLR submission), section 4.3.

    Args:
        smoothness: L of Assumption 3.
        variance: sigma^2 of Assumption 2.
        dissimilarity: G of Assumption 1, by coordinate.
        gradient: B of Assumption 4, by coordinate.
        steps: N, local steps in a round.
        sampled: S, clients in a round.
        size: d, the entries of the model.
        dropped: beta, the entries outside of a mask.
        start_gap: f(w_0) - f(w*).
        optimal_apart: the mean of dist(m*_k, m*_k') over all k and k', those with k = k' included.
    """

    smoothness: float
    variance: float
    dissimilarity: float
    gradient: float
    steps: float
    sampled: int
    size: int
    dropped: float
    start_gap: float
    optimal_apart: float


def iclr_largest_step(smoothness: float, steps: float) -> float:
    """The largest eta with eta <= 1 / (16 L N), the theorem's condition."""
    return 1 / (16 * smoothness * steps) if smoothness * steps > 0 else math.inf


def iclr_kappa(step: float, smoothness: float, steps: float) -> float:
    """kappa = 1/2 - 150 N^3 eta^3 L^3 - 15 N^2 eta^2 L^2 - 5 N eta L. The bound exists where it is above 0.

    Example:
        >>> round(iclr_kappa(1 / 16, 1.0, 1), 4)
        0.0923
    """
    x = steps * step * smoothness
    return 0.5 - 150 * x**3 - 15 * x**2 - 5 * x


def iclr_phi(problem: SparseProblem, apart: float, away: float) -> float:
    """Phi_t, from the mean of dist(m_k, m_k') over all pairs and the mean of dist(m_k, m*_k) in round t."""
    kept = problem.size - problem.dropped
    return kept * problem.dissimilarity**2 + problem.gradient**2 * (apart + away)


def iclr_round_term(problem: SparseProblem, step: float, apart: float, away: float) -> float:
    """P_t. Its second coefficient is 5 N^2 eta^3 L^2 / 2, as Eqs. (38) and (46) derive it."""
    p, eta, n = problem, step, problem.steps
    phi = iclr_phi(p, apart, away)
    drift = 25 * n**3 * eta**4 * p.smoothness**3 + 2.5 * n**2 * eta**3 * p.smoothness**2
    masks = (4 * n**2 * eta**2 * p.smoothness + n * eta) / 2 * away * p.gradient**2
    sampling = 9 * n**2 * eta**2 * p.smoothness * phi + n * eta**2 * p.smoothness * p.variance / p.sampled
    return drift * (p.variance + 18 * n * phi) + masks + sampling


def iclr_residual(problem: SparseProblem) -> Terms:
    """Upsilon: what stays however many rounds there are, term by term."""
    p = problem
    return {
        "3 (d - beta) G^2": 3 * (p.size - p.dropped) * p.dissimilarity**2,
        "3 beta B^2": 3 * p.dropped * p.gradient**2,
        "3 B^2 mean dist(m*, m*')": 3 * p.optimal_apart * p.gradient**2,
    }


def iclr_bound(
    problem: SparseProblem, step: float, masks: Sequence[tuple[float, float]], as_derived: bool = False
) -> Terms | None:
    """Theorem 1, Eq. (5): what bounds the mean of ||grad F_k(w_k,t)||^2 over rounds and clients.

    Args:
        problem: the constants.
        step: eta.
        masks: (apart, away) of each round, as for `iclr_phi`; as many as there are rounds.
        as_derived: divide the sum of P_t by eta N kappa, as Eq. (47) requires. The printed theorem, Eqs. (5) and (48),
            leaves that division out.

    Returns:
        The terms; None where kappa is not above 0 and there is no bound.
    """
    kappa, rounds = iclr_kappa(step, problem.smoothness, problem.steps), len(masks)
    if kappa <= 0 or not rounds:
        return None
    divisor = step * problem.steps * kappa
    total = sum(iclr_round_term(problem, step, apart, away) for apart, away in masks)
    return {
        "3 (f(w_0) - f*) / (T eta N kappa)": 3 * problem.start_gap / (rounds * divisor),
        "3 mean P_t / (eta N kappa)" if as_derived else "3 mean P_t": 3
        * total
        / rounds
        / (divisor if as_derived else 1.0),
        **iclr_residual(problem),
    }


# FedSpa, Theorem 1 of the journal version


def journal_step(smoothness: float, steps: float, ratio: float, rounds: int) -> float:
    """eta_t = sqrt(1 / (16 L^2 N^2 p_t T)). The proof needs equality: Eq. (40) divides by eta_t."""
    return math.sqrt(1 / (16 * smoothness**2 * steps**2 * ratio * rounds)) if smoothness > 0 < ratio else math.inf


def journal_bound(
    *,
    smoothness: float,
    variance: float,
    dissimilarity: float,
    gradient: float,
    steps: float,
    sampled: int,
    start_gap: float,
    ratios: Sequence[float],
) -> Terms | None:
    """Theorem 1, Eq. (5): (p^ V + p~ C_1 + C_2) / sqrt(T), which bounds the mean of ||grad f(w_t)||^2 over rounds.

    Args:
        smoothness: L.
        variance: sigma^2, inside the masks.
        dissimilarity: G, a Euclidean norm.
        gradient: B, which bounds ||grad f||.
        steps: N.
        sampled: S.
        start_gap: f(w_0) - f(w*).
        ratios: p_t of each round; T is their number.

    Returns:
        The three terms; None where some p_t is 0 or infinite.

    Example:
        >>> journal_bound(smoothness=1, variance=0, dissimilarity=0, gradient=0, steps=1, sampled=1, start_gap=2,
        ...               ratios=[1.0] * 4)
        {'p^ V / sqrt(T)': 8.0, 'p~ C_1 / sqrt(T)': 0.0, 'C_2 / sqrt(T)': 0.0}
    """
    rounds = len(ratios)
    if not rounds or not all(0 < ratio < math.inf for ratio in ratios):
        return None
    n, root = steps, math.sqrt(rounds)
    noise, b = variance + 6 * n * dissimilarity**2, gradient**2
    c1 = 25 / (32 * n * rounds) * noise + 75 * b / (16 * rounds) + 1.5 * dissimilarity**2
    c1 += variance / (2 * n * sampled) + 2.5 * b
    c2 = 5 / (16 * n * root) * noise + 15 * b / (8 * root)
    largest, mean = max(map(math.sqrt, ratios)), sum(1 / math.sqrt(ratio) for ratio in ratios) / rounds
    return {
        "p^ V / sqrt(T)": largest * 8 * smoothness * start_gap / root,
        "p~ C_1 / sqrt(T)": mean * c1 / root,
        "C_2 / sqrt(T)": c2 / root,
    }


# DisPFL, Theorem 1


@dataclass(frozen=True)
class Generalization:
    """What DisPFL's Theorem 1 says with these constants: the gap is below 9 eps' with a probability of `sure` or more,
    if there are `examples` or more."""

    per_step: float  # eps~
    total: float  # eps'
    failure: float  # delta'
    examples: float
    sure: float

    @property
    def gap(self) -> float:
        return 9 * self.total


def dispfl_per_step(union: float, diameter: float, noise: float, delta: float, examples: int, batch: int) -> float:
    """eps~, Eq. (13). The theorem prints the square root over the sum of both terms; Eq. (12) derives it over the
    logarithm alone.

    Args:
        union: beta, the share of entries in the union of all clients' masks.
        diameter: D_g, the largest distance of two examples' gradients.
        noise: sigma of the Gaussian noise on gradients; 0: there is no bound.
        delta: delta.
        examples: N.
        batch: tau.

    Returns:
        eps~; infinite without noise.
    """
    if noise <= 0:
        return math.inf if union * diameter > 0 else 0.0
    reach = union * diameter / batch
    power = (math.sqrt(2) * reach * noise * math.sqrt(math.log(1 / delta)) + reach**2) / (2 * noise**2)
    share = min(batch / examples, 1.0)
    if power > 500:  # exp would overflow, and the other term does not matter
        return power + math.log(share)
    return math.log1p(share * math.expm1(power))


def dispfl_total(per_step: float, delta: float, iterations: int) -> float:
    """eps' = sqrt(2 T log(1/delta) eps~^2) + T eps~ (e^eps~ - 1) / (e^eps~ + 1), as in Lemma 2.

    Example:
        >>> round(dispfl_total(0.1, math.exp(-1), 2), 6)
        0.209992
    """
    if math.isinf(per_step):
        return math.inf
    return math.sqrt(2 * iterations * math.log(1 / delta)) * per_step + iterations * per_step * math.tanh(per_step / 2)


def dispfl_failure(per_step: float, total: float, delta: float, iterations: int) -> float:
    """delta', with the exponent (eps' + T eps~) / (2 eps~) of Lemma 2; the theorem prints it without the last eps~.
    NaN where T eps~ <= eps': the formula takes the logarithm of their difference."""
    whole = iterations * per_step
    if not 0 < total < whole < math.inf:
        return math.nan
    log_first = -(total + whole) / 2
    log_first += iterations * (math.log(2 * whole / (whole - total)) - math.log1p(math.exp(per_step)))
    log_first -= (total + whole) / (2 * per_step) * math.log((whole + total) / (whole - total))
    rest = delta / (1 + math.exp(per_step))
    grown = math.exp(per_step) * rest
    ceiling = math.ceil(total / per_step)
    second = 2 - (1 - grown) ** ceiling * (1 - rest) ** (iterations - ceiling) - (1 - rest) ** iterations
    return math.exp(log_first) + second


def dispfl_generalization(
    *, union: float, diameter: float, noise: float, delta: float, examples: int, batch: int, iterations: int
) -> Generalization:
    """Theorem 1: eps~, eps', delta', the sample size asked for, and the probability with which the gap is below
    9 eps'. Arguments are those of `dispfl_per_step`; `iterations` is T, all local steps."""
    per_step = dispfl_per_step(union, diameter, noise, delta, examples, batch)
    total = dispfl_total(per_step, delta, iterations)
    failure = dispfl_failure(per_step, total, delta, iterations)
    if math.isinf(total) or math.isnan(failure):
        return Generalization(per_step, total, failure, math.nan, math.nan)
    needed = 2 / total**2 * (math.log(16 / failure) + total)
    sure = 1 - math.exp(-total) * failure / total * math.log(2 / total)
    return Generalization(per_step, total, failure, needed, sure)


def dispfl_noise_for(
    gap: float, *, union: float, diameter: float, delta: float, examples: int, batch: int, iterations: int
) -> float:
    """The least noise with which 9 eps' <= gap, by bisection; what DisPFL would have to add for such a bound."""

    def reached(noise: float) -> bool:
        per_step = dispfl_per_step(union, diameter, noise, delta, examples, batch)
        return 9 * dispfl_total(per_step, delta, iterations) <= gap

    if union * diameter <= 0:
        return 0.0
    low, high = 0.0, 1e-6
    while not reached(high):
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high


# pFedGate: Proposition 1, Theorems 1 and 2, and q of appendix E


def gate_distance_bound(
    diversity: float,
    convexity: float,
    global_norm: float,
    largest: tuple[float, float],
    least: tuple[float, float],
    as_derived: bool = False,
) -> float | None:
    """Proposition 1, Eq. (4): ||M_i - 1|| <= sigma_i^2 / (mu^2 ||theta_g||^2) R_i R_g / (r_i r_g).

    Args:
        diversity: sigma_i^2.
        convexity: mu.
        global_norm: ||theta_g||.
        largest: R of theta_i and of theta_g, in absolute value.
        least: r of theta_i and of theta_g; one entry of zero makes the bound infinite.
        as_derived: divide by ||theta_g|| instead of its square, as Eqs. (12) and (13) give together.

    Returns:
        The bound; None where f is not strongly convex.
    """
    if convexity <= 0:
        return None
    if least[0] * least[1] == 0:
        return math.inf
    ratio = largest[0] * largest[1] / (least[0] * least[1])
    return diversity / (convexity**2 * global_norm ** (1 if as_derived else 2)) * ratio


def pfedgate_examples(
    *,
    epsilon: float,
    delta: float,
    clients: int,
    size: int,
    gate_size: int,
    radius: float,
    lipschitz: float,
    gate: float,
) -> float:
    """Theorem 1: the examples that each client needs, with a hidden constant of 1.

    Args:
        epsilon: the gap to be ensured.
        delta: the probability of failure.
        clients: |C|.
        size: d.
        gate_size: d_phi.
        radius: R.
        lipschitz: L_f L_h.
        gate: L_g.

    Returns:
        N~.
    """
    log = max(0.0, math.log(radius * lipschitz * (radius * gate + 1) / epsilon))
    return (size / clients * log + gate_size * log - math.log(delta) / clients) / epsilon**2


def pfedgate_gap(examples: int, **constants: float) -> float:
    """The epsilon for which `pfedgate_examples` equals the examples that there are, by bisection."""
    low, high = 1e-9, 1.0
    while pfedgate_examples(epsilon=high, **constants) > examples:  # type: ignore[arg-type]
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (low, middle) if pfedgate_examples(epsilon=middle, **constants) <= examples else (middle, high)  # type: ignore[arg-type]
    return high


def upload_share(used: Sequence[float]) -> float:
    """q = 1 - prod_j (1 - p_j), appendix E.

    Args:
        used: p_j of each batch: the share of the entries not used before that batch j uses.

    Returns:
        The share of entries that some batch uses.

    Example:
        >>> upload_share([0.5, 0.5])
        0.75
    """
    return 1 - math.prod(1 - p for p in used)


# FedSim and FedAlt: Theorems 1 and 2, Table 1


@dataclass(frozen=True, kw_only=True)
class PartialProblem:
    """The constants of FedSim's and FedAlt's theorems, section 3.

    Args:
        smooth_u: L_u.
        smooth_v: L_v.
        cross: max(L_uv, L_vu).
        variance_u: sigma_u^2.
        variance_v: sigma_v^2.
        diversity: delta^2 of Assumption 3.
        growth: rho^2 of Assumption 3.
        clients: n.
        sampled: m.
        steps_u: tau_u, or tau of FedSim.
        steps_v: tau_v.
        start_gap: Delta F_0.
    """

    smooth_u: float
    smooth_v: float
    cross: float
    variance_u: float
    variance_v: float
    diversity: float
    growth: float = 0.0
    clients: int
    sampled: int
    steps_u: float
    steps_v: float
    start_gap: float

    @property
    def chi(self) -> float:
        """Eq. (5): max(L_uv, L_vu) / sqrt(L_u L_v)."""
        return self.cross / math.sqrt(self.smooth_u * self.smooth_v) if self.cross else 0.0

    @property
    def unsampled(self) -> float:
        return 1 - self.sampled / self.clients

    @property
    def shared_noise(self) -> float:
        """(sigma_u^2 + delta^2 (1 - m/n)) / (m L_u), in both theorems."""
        return (self.variance_u + self.diversity * self.unsampled) / (self.sampled * self.smooth_u)


def fedsim_largest_step(problem: PartialProblem) -> float:
    """Theorem 1: eta <= min(1 / (12 (1 + chi^2)(1 + rho^2)), sqrt((m/n) / (196 (1 - 1/tau)(1 + chi^2)(1 + rho^2))))."""
    p = problem
    both = (1 + p.chi**2) * (1 + p.growth)
    drift = 196 * (1 - 1 / p.steps_u) * both
    return min(1 / (12 * both), math.sqrt(p.sampled / p.clients / drift) if drift else math.inf)


def fedalt_largest_step(problem: PartialProblem) -> float:
    """Theorem 2: eta <= min(1 / (24 (1 + rho^2)), m / (128 chi^2 (n - m)), sqrt(m / (64 chi^2 n))).

    The last is what the proof asks for: 32 eta^2 chi^2 n / m <= 1/2.
    """
    p, cross = problem, problem.chi**2
    found = [1 / (24 * (1 + p.growth))]
    if cross and p.clients > p.sampled:
        found.append(p.sampled / (128 * cross * (p.clients - p.sampled)))
    if cross:
        found.append(math.sqrt(p.sampled / (64 * cross * p.clients)))
    return min(found)


def fedsim_bound(problem: PartialProblem, step: float, rounds: int) -> Terms:
    """Theorem 1, Eq. (6), without the absolute constants that the paper leaves out. `step` is eta = gamma L tau."""
    p, grown = problem, 1 + problem.chi**2
    noise = p.shared_noise + p.sampled * p.variance_v / (p.clients * p.smooth_v)
    drift = (p.variance_u + p.diversity) / p.smooth_u + p.variance_v / p.smooth_v
    return {
        "Delta F_0 / (eta T)": p.start_gap / (step * rounds),
        "eta (1 + chi^2) (...)": step * grown * noise,
        "eta^2 (1 - 1/tau) (1 + chi^2) (...)": step**2 * (1 - 1 / p.steps_u) * grown * drift,
    }


def fedalt_bound(problem: PartialProblem, step: float, rounds: int) -> Terms:
    """Theorem 2, without the absolute constants that the paper leaves out."""
    p, cross = problem, problem.chi**2
    own = p.variance_v / p.smooth_v
    noise = p.shared_noise + own * (p.sampled + cross * (p.clients - p.sampled)) / p.clients
    drift = (p.variance_u + p.diversity) / p.smooth_u * (1 - 1 / p.steps_u)
    drift += own * p.sampled / p.clients * (1 - 1 / p.steps_v) + cross * own
    return {
        "Delta F_0 / (eta T)": p.start_gap / (step * rounds),
        "eta (...)": step * noise,
        "eta^2 (...)": step**2 * drift,
    }


def partial_rounds(
    problem: PartialProblem, epsilon: float, updates: Literal["simultaneous", "alternating"]
) -> tuple[float, float]:
    """Corollary 3 (FedSim) or 10 (FedAlt): eta, and the rounds T after which the bound is of the order of epsilon.

    As their proofs have it, without absolute constants: the largest eta allowed whose terms in eta and eta^2 are
    epsilon at most, and T = Delta F_0 / (eta epsilon).

    Args:
        problem: the constants.
        epsilon: what the mean of the weighted squared gradients is to reach.
        updates: of FedSim, or of FedAlt.

    Returns:
        eta and T.
    """
    is_sim = updates == "simultaneous"
    bound, allowed = (fedsim_bound, fedsim_largest_step) if is_sim else (fedalt_bound, fedalt_largest_step)
    gap, noise, drift = bound(problem, 1.0, 1).values()
    step = min(
        allowed(problem), epsilon / noise if noise else math.inf, math.sqrt(epsilon / drift) if drift else math.inf
    )
    return step, gap / (step * epsilon)


def fedalt_beats_fedsim(problem: PartialProblem) -> tuple[float, float]:
    """Both sides of the condition after Theorem 2; FedAlt's rate is the better one where the first is the smaller:
    sigma_v^2 / L_v (1 - 2m/n) < (sigma_u^2 + delta^2 (1 - m/n)) / (m L_u)."""
    p = problem
    return p.variance_v / p.smooth_v * (1 - 2 * p.sampled / p.clients), p.shared_noise


def partial_rate(
    problem: PartialProblem, rounds: int, updates: Literal["simultaneous", "alternating"]
) -> tuple[str, float, float]:
    """Table 1: the regime, its eta, and the dominant terms of the bound with that eta.

    Args:
        problem: the constants.
        rounds: T.
        updates: of FedSim, or of FedAlt.

    Returns:
        The condition as the table names it, eta, and the rate without absolute constants.
    """
    p, grown = problem, 1 + problem.chi**2
    is_sim = updates == "simultaneous"
    if p.variance_u == p.variance_v == 0 and p.sampled == p.clients:
        if p.steps_u > 1:
            drift = p.diversity * (1 - 1 / p.steps_u) * (grown if is_sim else 1.0) / p.smooth_u
            regime = "sigma_u = sigma_v = 0, m = n, tau > 1"
            return regime, rounds ** (-1 / 3), rounds ** (-2 / 3) * (p.start_gap + drift)
        return "sigma_u = sigma_v = 0, m = n, tau = 1", 1.0, p.start_gap / rounds
    if is_sim:
        noise = grown * (p.shared_noise + p.sampled * p.variance_v / (p.clients * p.smooth_v))
    else:
        mixed = (p.sampled + p.chi**2 * (p.clients - p.sampled)) / p.clients
        noise = p.shared_noise + p.variance_v / p.smooth_v * mixed
    return "general", rounds**-0.5, (p.start_gap + noise) / math.sqrt(rounds)
