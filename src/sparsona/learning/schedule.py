"""How the learning rate changes from round to round, as a factor of that of the first. Free of torch.

A schedule is a row of `SCHEDULES`: how it is written, what it does, and a function that makes it from its arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from sparsona.core import spec
from sparsona.core.spec import Spec

Factor = Callable[[int, int, float], float]  # (round, rounds, lr_decay) -> factor
SLACK = 1e-9  # 0.29 * 100 is less than 29


@dataclass(frozen=True)
class Schedule:
    """A row of `SCHEDULES`; `make` returns None where the arguments are not those expected."""

    form: str
    text: str
    make: Callable[[Spec], Factor | None]
    expected: str
    example: str


@lru_cache(maxsize=64)  # called in every round
def lr_schedule(text: str) -> Factor:
    """The schedule that a text names.

    Args:
        text: one of the forms in `SCHEDULES`.

    Returns:
        A function of the round, the number of rounds and `lr_decay`.

    Example:
        >>> lr_schedule("halving:10")(20, 100, 1.0)
        0.25
    """
    found = spec.read("lr_schedule", text, [row.form for row in SCHEDULES.values()])
    row = SCHEDULES[found.name]
    factor = None if found.options else row.make(found)
    if factor is None:
        raise found.wrong(row.expected, f"--lr-schedule {row.example}")
    return factor


def _decay(found: Spec) -> Factor | None:
    return None if found.argument is not None else lambda index, rounds, decay: decay**index


def _constant(found: Spec) -> Factor | None:
    return None if found.argument is not None else lambda index, rounds, decay: 1.0


def _halving(found: Spec) -> Factor | None:
    every = spec.as_count(found.args[0]) if len(found.args) == 1 else None
    return None if every is None else lambda index, rounds, decay: 0.5 ** (index // every)


def _linear(found: Spec) -> Factor | None:
    shares = _shares(found.args[:1])
    from_zero = found.args[1:] == ("from-zero",)
    if not shares or (found.args[1:] and not from_zero):
        return None

    def factor(index: int, rounds: int, decay: float) -> float:
        rising = int(shares[0] * rounds + SLACK)
        if index < rising:
            return index / rising if from_zero else (index + 1) / (rising + 1)
        return max(0.0, (rounds - index) / max(1, rounds - rising))  # a run may have no rounds

    return factor


def _steps(found: Spec) -> Factor | None:
    shares = _shares(found.args)
    if not shares or any(a >= b for a, b in pairwise(shares)):
        return None

    def factor(index: int, rounds: int, decay: float) -> float:
        passed = sum(index >= int(share * rounds + SLACK) for share in shares)
        return float(10**-passed)

    return factor


def _shares(words: tuple[str, ...]) -> list[float]:
    """Numbers from 0 to below 1; none if any word is something else."""
    found = [number for word in words if (number := spec.as_number(word)) is not None and 0 <= number < 1]
    return found if len(found) == len(words) else []


SCHEDULES = {
    row.form.partition(":")[0]: row
    for row in (
        Schedule("decay", "times lr_decay after every round", _decay, "'decay' alone", "decay"),
        Schedule("constant", "the same in every round", _constant, "'constant' alone", "constant"),
        Schedule("halving:N", "halved every N rounds", _halving, "a number of rounds, 1 or more", "halving:500"),
        Schedule(
            "linear:W",
            "up in a straight line over the first share W of the rounds, then down towards 0; every round trains, but "
            "`linear:W,from-zero` begins with a round of learning rate 0, as the authors of FedSim and FedAlt do",
            _linear,
            "the share of rounds that warm up, from 0 to below 1",
            "linear:0.1",
        ),
        Schedule(
            "steps:A,B",
            "times 0.1 from each of these shares of the rounds on",
            _steps,
            "shares of the rounds in rising order, below 1",
            "steps:0.5,0.75",
        ),
    )
}
