"""How the learning rate changes from round to round, as a factor on that of the first. Free of torch."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from sparsona.core.errors import SparsonaError, unknown_name

Schedule = Callable[[int, int, float], float]  # (round, rounds, lr_decay) -> factor
FORMS = ("decay", "constant", "halving:N", "linear:W", "steps:A,B")
SLACK = 1e-9  # 0.29 * 100 is less than 29


def lr_schedule(text: str) -> Schedule:
    """The schedule that `text` names.

    - "decay": lr_decay ** round.
    - "constant": 1.
    - "halving:N": halved every N rounds.
    - "linear:W": up in a straight line over the first share W of the rounds, then down towards 0. Every round trains;
      "linear:W,from-zero" begins with a round of learning rate 0, as the authors of FedSim and FedAlt do.
    - "steps:A,B": times 0.1 from each of these shares of the rounds on.
    """
    name, colon, rest = text.strip().partition(":")
    words = [word.strip() for word in rest.split(",")] if colon else []
    if name in ("decay", "constant"):
        if colon:
            raise _wrong(text, f"'{name}' alone", f"--lr-schedule {name}")
        return _decay if name == "decay" else _constant
    if name == "halving":
        if len(words) != 1 or not words[0].isdecimal() or not int(words[0]):
            raise _wrong(text, "a number of rounds, 1 or more", "--lr-schedule halving:500")
        return _halving(int(words[0]))
    if name == "linear":
        from_zero = words[1:] == ["from-zero"]
        shares = _shares(words[:1])
        if not shares or (words[1:] and not from_zero):
            raise _wrong(text, "the share of rounds that warm up, from 0 to below 1", "--lr-schedule linear:0.1")
        return _linear(shares[0], from_zero)
    if name == "steps":
        shares = _shares(words)
        if not shares or any(a >= b for a, b in pairwise(shares)):
            raise _wrong(text, "shares of the rounds in rising order, below 1", "--lr-schedule steps:0.5,0.75")
        return _steps(shares)
    raise unknown_name("learning-rate schedule", text, FORMS)


def _wrong(text: str, expected: str, example: str) -> SparsonaError:
    return SparsonaError(f"lr_schedule = '{text}'", expected=expected, mend=f"for example {example}")


def _shares(words: list[str]) -> list[float]:
    """Numbers from 0 to below 1; none if any word is something else."""
    try:
        found = [float(word) for word in words]
    except ValueError:
        return []
    return found if all(0 <= share < 1 for share in found) else []


def _decay(index: int, rounds: int, decay: float) -> float:
    return decay**index


def _constant(index: int, rounds: int, decay: float) -> float:
    return 1.0


def _halving(every: int) -> Schedule:
    return lambda index, rounds, decay: 0.5 ** (index // every)


def _linear(share: float, from_zero: bool) -> Schedule:
    def factor(index: int, rounds: int, decay: float) -> float:
        rising = int(share * rounds + SLACK)
        if index < rising:
            return index / rising if from_zero else (index + 1) / (rising + 1)
        return max(0.0, (rounds - index) / (rounds - rising))

    return factor


def _steps(shares: list[float]) -> Schedule:
    def factor(index: int, rounds: int, decay: float) -> float:
        passed = sum(index >= int(share * rounds + SLACK) for share in shares)
        return float(10**-passed)

    return factor
