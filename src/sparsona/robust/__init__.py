"""Robust means and attackers by name. Free of torch: options and lists need none."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import NormalDist

from sparsona.core import spec
from sparsona.core.errors import SparsonaError, unknown_name

PLAIN = "mean"  # the method's own: nothing is wrapped


@dataclass(frozen=True)
class MeanCard:
    """One row: a name, how it is written, what it does, and how many values it has to and may be given."""

    name: str
    example: str
    summary: str
    needs: int = 0
    takes: int = 0


MEANS = {
    card.name: card
    for card in (
        MeanCard(PLAIN, PLAIN, "the method's own mean"),
        MeanCard("median", "median", "the median of each entry"),
        MeanCard("trimmed", "trimmed:0.2", "the mean of each entry without this share of the values at each end", 1, 1),
        MeanCard("norm-bound", "norm-bound", "changes no longer than the median one, or than a given norm", 0, 1),
        MeanCard("krum", "krum:0.2", "the update that is nearest to the others, of which this share may be lies", 1, 1),
        MeanCard("multi-krum", "multi-krum:0.2", "the mean of all but this share, the farthest from the others", 1, 2),
        MeanCard("geometric-median", "geometric-median", "the point of the smallest sum of distances to the updates"),
    )
}


@dataclass(frozen=True)
class Mean:
    """A robust mean: a row of `MEANS` and its values.

    Args:
        name: the row.
        bound: a share or a number of updates that may be lies, or a norm; None: the row needs none.
        chosen: how many updates multi-Krum chooses; None: all that may not be lies.
    """

    name: str
    bound: float | None = None
    chosen: int | None = None

    @property
    def text(self) -> str:
        """As it is written."""
        values = [f"{value:g}" for value in (self.bound, self.chosen) if value is not None]
        return f"{self.name}:{','.join(values)}" if values else self.name

    def lies(self, num: int) -> int:
        """How many of so many updates may be lies: a bound below 1 is a share of them, rounded up."""
        assert self.bound is not None
        return math.ceil(self.bound * num - 1e-9) if self.bound < 1 else int(self.bound)

    def describe(self, among_peers: bool) -> str:
        """A sentence for the protocol of a run."""
        text = MEANS[self.name].summary.replace("this share", f"{self.bound:g}" if self.bound is not None else "")
        who = "Each peer combines its neighbours' messages" if among_peers else "The server combines clients' updates"
        # Bounded changes go into the method's own mean; the others are replaced by one value.
        weights = "" if self.name == "norm-bound" else ". Every client counts the same"
        return f" {who} by a robust mean, {self.text}: {text}{weights}."


def read_mean(text: str) -> Mean | None:
    """The mean that a text names.

    Args:
        text: a row of `MEANS` with its values after a colon: `median`, `trimmed:0.2`, `multi-krum:4,12`.

    Returns:
        The mean; None: the method's own.

    Example:
        >>> read_mean("multi-krum:4,12"), read_mean("mean")
        (Mean(name='multi-krum', bound=4.0, chosen=12), None)
    """
    found = spec.read("mean", text, (card.example for card in MEANS.values()))
    card = MEANS[found.name]
    if found.options or not card.needs <= len(found.args) <= card.takes:
        wanted = {(0, 0): "no value", (1, 1): "one value", (0, 1): "at most one value"}
        raise found.wrong(f"{card.name} with {wanted.get((card.needs, card.takes), 'one or two values')}", card.example)
    if card.name == PLAIN:
        return None
    numbers = [spec.as_number(value) for value in found.args]
    bound = numbers[0] if numbers else None
    if numbers and (bound is None or bound <= 0):
        raise found.wrong("a number above 0", card.example)
    if card.name == "trimmed" and not (bound or 0) < 0.5:
        raise found.wrong("a share below 0.5: it is cut off at each end", card.example)
    if "krum" in card.name and bound is not None and bound >= 1 and bound != int(bound):
        raise found.wrong("a share below 1 or a whole number of updates that may be lies", card.example)
    chosen = None
    if len(found.args) > 1 and (chosen := spec.as_count(found.args[1])) is None:
        raise found.wrong("the number of updates that are chosen, 1 or more", "multi-krum:4,12")
    return Mean(card.name, bound, chosen)


@dataclass(frozen=True)
class AttackCard:
    """One row: a name, what it does, and its options with their defaults."""

    name: str
    summary: str
    options: dict[str, float | None] = field(default_factory=dict)

    @property
    def example(self) -> str:
        return f"{self.name}:0.2"


LABEL_FLIP, FORGED_MASK, LITTLE = "label-flip", "forged-mask", "little"
ATTACKS = {
    card.name: card
    for card in (
        AttackCard(LABEL_FLIP, "class c is trained as the last class minus c, or as c + shift", {"shift": None}),
        AttackCard("sign-flip", "the change times -factor", {"factor": 1.0}),
        AttackCard("scaled", "the change times factor", {"factor": 10.0}),
        AttackCard(
            "random", "normal draws with factor times the norm of the change, or a norm", {"factor": 1.0, "norm": None}
        ),
        AttackCard("same-value", "a change with the same value in all entries", {"value": 1.0}),
        AttackCard(LITTLE, "the attackers' mean less z standard deviations, as a-little-is-enough has it", {"z": None}),
        AttackCard(FORGED_MASK, "another mask of the same density, and the values in other places"),
    )
}


@dataclass(frozen=True)
class Attack:
    """What attackers do: a row of `ATTACKS`, the share of clients that do it, and the options given.

    Example:
        >>> read_attack("scaled:0.2,factor=5").option("factor")
        5.0
    """

    name: str
    rate: float
    options: tuple[tuple[str, float], ...] = ()

    def option(self, name: str) -> float | None:
        """The value of an option, given or the default."""
        return dict(self.options).get(name, ATTACKS[self.name].options[name])

    @property
    def colludes(self) -> bool:
        """Whether what attackers send depends on what the others of them would have sent."""
        return self.name == LITTLE

    def count(self, num_clients: int) -> int:
        """How many of so many clients attack: at least one."""
        return max(1, round(self.rate * num_clients))

    def who(self, attackers: int, clients: int) -> str:
        """How many attack, and how."""
        values = {**ATTACKS[self.name].options, **dict(self.options)}
        given = "".join(f", {key}={value:g}" for key, value in values.items() if value is not None)
        return f"{attackers} of {clients} clients attack by {self.name}{given} ({ATTACKS[self.name].summary})"

    def describe(self, attackers: int, clients: int, tested: int) -> str:
        """A sentence for the protocol of a run."""
        return (
            f" {self.who(attackers, clients)}. The results are those of {tested} honest clients, without the "
            "attackers' own."
        )


# Of options: above which, below which, in words. Messages are float32, and labels int64.
RANGES = {
    "": (-3.4e38, 3.4e38, "a number between -3.4e38 and 3.4e38"),
    "norm": (0.0, 3.4e38, "a number above 0 and below 3.4e38"),
    "shift": (-(2.0**63), 2.0**63, "a whole number of 64 bits"),
}


def read_attack(text: str) -> Attack:
    """The attack that a text names.

    Args:
        text: a row of `ATTACKS`, the share of clients after a colon, and options: `scaled:0.2,factor=5`.

    Returns:
        The attack.

    Example:
        >>> read_attack("sign-flip:0.2")
        Attack(name='sign-flip', rate=0.2, options=())
    """
    found = spec.read("attack", text, (card.example for card in ATTACKS.values()))
    card = ATTACKS[found.name]
    rate = spec.as_number(found.args[0]) if len(found.args) == 1 else None
    if rate is None or not 0 < rate < 1:
        raise found.wrong("the share of clients that attack, above 0 and below 1", card.example)
    given: dict[str, float] = {}
    for key, value in found.options.items():
        if key not in card.options:
            raise unknown_name(f"option of the attack '{card.name}'", key, card.options)
        number = spec.as_number(value)
        lowest, highest, wanted = RANGES.get(key, RANGES[""])
        if number is None or not lowest < number < highest or (key == "shift" and number != int(number)):
            raise SparsonaError(f"'{spec.shorten(value)}' for '{key}' of the attack '{card.name}'", expected=wanted)
        given[key] = number
    return Attack(card.name, rate, tuple(given.items()))


def little_z(num: int, attackers: int) -> float:
    """How many standard deviations stay unnoticed: Baruch et al., A Little Is Enough, NeurIPS 2019, algorithm 3.

    The attackers need s = floor(n / 2 + 1) - f honest updates that are farther from the mean than theirs, and z is the
    quantile of the normal distribution that leaves so many. Where sampling makes attackers the majority of a round,
    which the paper has no z for, it is that of s = 1.

    Args:
        num: the updates that a round aggregates, n.
        attackers: those of attackers among them, f.

    Returns:
        z, at least 0; 0 where fewer than two of the updates are honest.

    Example:
        >>> round(little_z(50, 24), 3), round(little_z(5, 3), 3), round(little_z(50, 30), 3)
        (1.426, 0.0, 1.645)
    """
    honest, supporters = num - attackers, max(1, num // 2 + 1 - attackers)
    return max(0.0, NormalDist().inv_cdf((honest - supporters) / honest)) if honest > supporters else 0.0
