"""What a run spends of differential privacy: epsilon at its delta, of the run and of each client, by its records.

Two runs are neighbours if they differ in one client's whole data, replaced by any other data. A clipped change then
moves by at most twice the norm, so that noise of `noise` norms is `noise` / 2 of what it has to hide. Epsilons are
those of the package dp-accounting (extra `privacy`): of Gaussian mechanisms exact (Balle and Wang, ICML 2018), of
cohorts drawn without replacement by Renyi divergences (Wang, Balle, Kasiviswanathan, AISTATS 2019).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal
from functools import lru_cache
from typing import Any

import numpy as np

from sparsona.analysis.extra import import_extra
from sparsona.analysis.format import plural
from sparsona.core.errors import SparsonaError
from sparsona.core.targets import given_name
from sparsona.runs.folder import NETWORK, RunFolder, reached
from sparsona.transforms.privacy import CENTRAL, LOCAL, Privacy, read_privacy

MOST_EPSILON = 1e6  # above it, epsilon is infinite for every purpose
MOST_NOISE = 1e6  # above it, the accountant's differences are lost to rounding: that clients are drawn is not counted
_SAID = re.compile(r"Epsilon is (?:at most )?(above )?([0-9.]+(?:e[+-]?[0-9]+)?)")


def accountant() -> Any:
    """The package that epsilons are computed by, or a SparsonaError that says how to install it."""
    return import_extra("dp_accounting", "epsilons", "'sparsona[privacy]'")


def gaussian_epsilon(noise: float, delta: float, releases: int) -> float:
    """The epsilon of a client that took part in so many releases, each with noise, when everybody knows in which.

    Args:
        noise: the noise multiplier: standard deviations in units of the norm that changes are clipped to.
        delta: the probability with which it may be exceeded.
        releases: how many there were.

    Returns:
        Epsilon; infinity above 1e6.

    Example:
        >>> round(gaussian_epsilon(noise=2.0, delta=1e-5, releases=1), 2)
        4.38
    """
    if not releases:
        return 0.0
    sigma = noise / 2 / math.sqrt(releases)
    if sigma < 1 / math.sqrt(2 * MOST_EPSILON):  # epsilon is about 1 / (2 sigma^2) then
        return math.inf
    found = float(accountant().get_epsilon_gaussian(sigma, delta))
    return found if found <= MOST_EPSILON else math.inf


def sampled_epsilon(noise: float, delta: float, releases: int, cohort: int, clients: int) -> float:
    """The epsilon of noise on a sum over clients that are drawn without replacement, when nobody knows which.

    Args:
        noise: the noise multiplier.
        delta: the probability with which it may be exceeded.
        releases: how many rounds there were.
        cohort: the clients drawn in a round.
        clients: how many they are drawn from.

    Returns:
        Epsilon: never above that of a client that takes part in every round.

    Example:
        >>> sampled_epsilon(2.0, 1e-5, 10, cohort=10, clients=1000) < gaussian_epsilon(2.0, 1e-5, 10)
        True
    """
    always = gaussian_epsilon(noise, delta, releases)
    if cohort >= clients or not releases or math.isinf(always) or noise > MOST_NOISE:
        return always
    return min(always, _drawn_epsilon(noise, delta, releases, cohort, clients))


@lru_cache  # takes a second, and tables, protocols and reports of a run ask for the same
def _drawn_epsilon(noise: float, delta: float, releases: int, cohort: int, clients: int) -> float:
    dp = accountant()
    # REPLACE_ONE wants the multiplier against what replacing one client changes: twice the norm.
    event = dp.SampledWithoutReplacementDpEvent(clients, cohort, dp.GaussianDpEvent(noise / 2))
    one = dp.rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
    return float(one.compose(event, releases).get_epsilon(delta))


@dataclass(frozen=True)
class PrivacyPlan:
    """What epsilon depends on before a run.

    Args:
        privacy: who adds how much noise.
        rounds: how many rounds.
        cohort: clients in a round.
        clients: clients that take part in the run.
    """

    privacy: Privacy
    rounds: int
    cohort: int
    clients: int

    def epsilon(self) -> float:
        """What the run will have spent at its end; with local noise, of a client that takes part in every round."""
        noise, delta = self.privacy.noise, self.privacy.delta
        if self.privacy.kind == LOCAL:
            return gaussian_epsilon(noise, delta, self.rounds)
        return sampled_epsilon(noise, delta, self.rounds, self.cohort, self.clients)


def noise_for(epsilon: float, plan: PrivacyPlan) -> float:
    """The least noise multiplier, to three digits, with which a run spends at most this epsilon.

    Args:
        epsilon: the aim.
        plan: the run; its noise does not matter.

    Returns:
        The noise multiplier.

    Raises:
        SparsonaError: no epsilon, or none that noise could reach.
    """
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise SparsonaError(f"epsilon {epsilon:g}", expected="a finite number above 0", hint="for example --epsilon 3")

    def spends(noise: float) -> float:
        privacy = Privacy(plan.privacy.kind, noise, plan.privacy.clip, plan.privacy.delta)
        return PrivacyPlan(privacy, plan.rounds, plan.cohort, plan.clients).epsilon()

    low, high = 1e-2, 1e-1
    while spends(high) > epsilon:
        low, high = high, 4 * high
        if high > MOST_NOISE:
            raise SparsonaError(
                f"epsilon {epsilon:g} in {plan.rounds} rounds", expected="one that noise of 1e6 norms can reach"
            )
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if spends(middle) > epsilon else (low, middle)
    return math.ceil(high * 1000) / 1000


@dataclass(frozen=True, eq=False)
class Spent:
    """What a run has spent so far.

    Args:
        privacy: who adds how much noise.
        epsilon: of the run, for any client. Where `drawn_from` is a number it holds if nobody knows who was drawn, and
            depends on no draw itself; otherwise it is the largest of `clients`.
        releases: with local noise the most of one client, with central noise rounds.
        clients: each client's own, by the turns it had, when everybody knows which those were.
        drawn_from: how many clients a cohort was drawn from, where that it is not known who was drawn is counted; None:
            it is not.
        cohort: clients wanted in a round.
        in_the_clear: parts of messages that noise does not cover.
        secret: noise came from clients' own secrets; otherwise from the run's seed.
        began_with: the run whose model training began with, of another data set; "": none.
        always: of a client that was drawn in every round, for whoever knows who was drawn; None: `epsilon` holds for
            them, too.
        sampler: how clients were drawn.
        patience: the run could end early, by its clients' validation data.
    """

    privacy: Privacy
    epsilon: float
    releases: int
    clients: np.ndarray
    drawn_from: int | None
    cohort: int
    in_the_clear: tuple[str, ...]
    secret: bool
    began_with: str = ""
    always: float | None = None
    sampler: str = "uniform"
    patience: bool = False

    def rows(self) -> list[dict[str, str]]:
        """Epsilon of the run, and of the clients with the most, the median and the least."""
        texts = {"run": self.epsilon}
        if len(self.clients):
            texts |= {"busiest client": self.clients.max(), "median client": float(np.median(self.clients))}
            texts |= {"client with the least": self.clients.min()}
        if self.drawn_from is not None:
            texts = {
                f"{name}, {'if nobody' if name == 'run' else 'for whoever'} knows who was drawn": value
                for name, value in texts.items()
            }
        return [{"of": name, "epsilon": show_epsilon(value)} for name, value in texts.items()]

    @property
    def note(self) -> str:
        """How the rows go together; "": as one would expect."""
        if self.drawn_from is None or not len(self.clients):
            return ""
        return (
            "The run's epsilon counts on chance: a client may be drawn in any round, and nobody knows in which. Those "
            "of clients are by the turns that they had, for whoever knows them, and are larger or smaller than the "
            "run's as the draw went. They tell how it went: publish the run's epsilon or those of clients, not both."
        )

    @property
    def condition(self) -> str:
        """What the epsilon of the run holds under, in sentences; "": nothing else than its definition."""
        found = []
        if self.drawn_from is not None:
            found.append(
                f"It holds if nobody knows which {self.cohort} of the {self.drawn_from} clients are drawn in a round."
            )
        if given_name(self.sampler) is not None:
            found.append("It holds if the function that samples clients does not look at data.")
        return " ".join(found)

    def lines(self) -> list[tuple[str, str]]:
        """In words, for the protocol: topics and sentences."""
        one = self.privacy
        what = plural(self.releases, "round") if one.kind == CENTRAL else f"up to {plural(self.releases, 'update')}"
        epsilon = (
            f"Epsilon is {show_epsilon(self.epsilon)} at delta {one.delta:g} after {what}, for one client's whole data "
            f"replaced by {self._replacement}. {self.condition}"
        ).strip()
        known = []
        if self.always is not None:
            sentence = f"Epsilon is at most {show_epsilon(self.always)} for whoever knows who was drawn"
            known = [("epsilon if draws are known", f"{sentence}: that of a client that was drawn in every round.")]
        clear = [f"{name} (sent in the clear)" for name in self.in_the_clear]
        uncovered = [*clear, "numbers of examples", "losses", "results of evaluations"]
        if self.patience:
            uncovered.append("the number of rounds, which patience decides by validation data")
        if self.began_with:
            uncovered.append(f"what the model of '{self.began_with}' tells, which training began with")
        noise = (
            "Drawn from each client's own secret."
            if self.secret
            else "Simulated: drawn from the run's seed. It can be repeated, and protects nobody."
        )
        return [
            ("privacy", f"Differential privacy ({one.kind}): {one.describe()}."),
            ("epsilon", epsilon),
            *known,
            ("not covered", f"Epsilon covers the values in updates. It does not cover: {', '.join(uncovered)}."),
            ("noise", noise),
        ]

    @property
    def _replacement(self) -> str:
        return "any other of the same size, since clients are drawn by size" if self.sampler == "size" else "any other"

    def sentence(self) -> str:
        """The same in one paragraph."""
        *others, (_, noise) = self.lines()
        return " ".join([*(text for _, text in others), f"The noise is {noise[0].lower()}{noise[1:]}"])

    def brief(self) -> dict[str, Any]:
        """For a summary: without a number for each client."""
        return {
            "kind": self.privacy.kind,
            "noise": self.privacy.noise,
            "clip": self.privacy.clip,
            "delta": self.privacy.delta,
            "epsilon": self.epsilon if math.isfinite(self.epsilon) else None,  # null: above MOST_EPSILON
            "releases": self.releases,
            "drawn_from": self.drawn_from,
            "cohort": self.cohort,
            "in_the_clear": list(self.in_the_clear),
            "secret": self.secret,
            "began_with": self.began_with,
            "always": self.always if self.always is None or math.isfinite(self.always) else None,
            "sampler": self.sampler,
            "patience": self.patience,
        }

    @classmethod
    def of_brief(cls, found: Mapping[str, Any]) -> Spent:
        """What `brief` wrote, without clients: nothing is computed again, and the extra is not needed."""
        privacy = Privacy(found["kind"], found["noise"], found["clip"], found["delta"])
        epsilon = math.inf if found["epsilon"] is None else found["epsilon"]
        always = found.get("always")
        if always is None and "always" in found and found["drawn_from"] is not None:
            always = math.inf
        return cls(
            privacy,
            epsilon,
            found["releases"],
            np.empty(0),
            found["drawn_from"],
            found["cohort"],
            tuple(found["in_the_clear"]),
            found["secret"],
            found.get("began_with", ""),
            always,
            found.get("sampler", "uniform"),
            found.get("patience", False),
        )

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON; an infinite epsilon is null."""
        each = [value if math.isfinite(value) else None for value in self.clients.tolist()]
        return {**self.brief(), "clients": each}


def show_epsilon(epsilon: float) -> str:
    """Epsilon with three digits, rounded up, or in words that fit a table.

    Example:
        >>> show_epsilon(4.3751), show_epsilon(10.0)
        ('4.38', '10')
    """
    if not math.isfinite(epsilon):
        return f"above {MOST_EPSILON:g}"
    if epsilon <= 0:
        return "0"
    # Rounded up, in decimals: a smaller figure than the bound would not be proven.
    exact = Decimal(repr(float(epsilon)))
    return f"{float(exact.quantize(Decimal(1).scaleb(exact.adjusted() - 2), ROUND_CEILING)):.3g}"


def said_epsilon(sentence: str) -> float:
    """The epsilon in a sentence of a protocol, as `Spent.lines` writes it; 0 if there is none.

    Example:
        >>> said_epsilon("Epsilon is 4.38 at delta 1e-05 after 2 rounds.")
        4.38
    """
    found = _SAID.search(sentence)
    return 0.0 if found is None else math.inf if found[1] else float(found[2])


def spent(folder: RunFolder) -> Spent | None:
    """What a run has spent by its records, also if it was stopped.

    Every turn counts, also one whose update was lost or refused: noise was added once, and somebody may have read it.

    Args:
        folder: the run.

    Returns:
        What it spent; None for a run without privacy.
    """
    if not (text := folder.config.get("privacy")):
        return None
    privacy, config = read_privacy(text), folder.config
    last, records = folder.last_round, folder.records
    turns = {(row.round, row.client) for row in records.turns() if row.round < last}
    turns |= {(row.round, row.client) for row in records.failures() if row.round < last}
    took_part = Counter(client for _, client in turns)
    by_number = {num: gaussian_epsilon(privacy.noise, privacy.delta, num) for num in set(took_part.values())}
    clients = np.array([by_number.get(took_part[client], 0.0) for client in range(len(folder.facts.sizes))])
    num = len(clients) - len(folder.facts.novel)
    cohort = config.get("per_round") or max(1, num // 2)
    drawn_from = always = None
    if privacy.kind == LOCAL:
        releases = max(took_part.values(), default=0)
        epsilon = float(clients.max(initial=0.0))
    else:
        releases = min(last, reached(folder.path).completed)  # a round has noise also if nobody came
        epsilon = float(clients.max(initial=0.0))  # given who was drawn: each client by its own turns
        # Only of a uniform draw from all clients is it known how little a round tells about who was in it.
        if config.get("sampler", "uniform") == "uniform" and not config.get("availability") and cohort < num:
            # Also where the busiest client's is smaller: who reads a figure that was chosen by the draw learns of the
            # draw, and then this bound is not proven.
            drawn_from, epsilon = num, sampled_epsilon(privacy.noise, privacy.delta, releases, cohort, num)
            always = gaussian_epsilon(privacy.noise, privacy.delta, releases)
    return Spent(
        privacy,
        epsilon,
        releases,
        clients,
        drawn_from,
        cohort,
        folder.facts.in_the_clear,
        config.get("executor") == NETWORK,
        "" if folder.facts.warm_start is None else folder.facts.warm_start.run,
        always,
        config.get("sampler", "uniform"),
        bool(config.get("patience")),
    )
