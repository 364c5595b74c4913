"""How many runs to have side by side: one more for as long as all of them together get faster by it.

Runs that share a GPU slow each other down. How much depends on network and machine: small steps leave most of a GPU
idle, large ones fill it. So the rounds of the runs under way are timed, with one run more and without. Free of torch.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from sparsona.runs.observers import RoundResult

ROUNDS = 5  # of every run, for one measurement; their median, since some rounds are evaluated and most are not
GAIN = 1.1  # one run more is worth its memory if all together do this many times as much

Rounds = Sequence[tuple[float, float]]  # when each ended, and how long it took, in seconds


class Packing:
    """How many runs of one network are worth having at a time.

    Args:
        most: the largest number.
        limit: the number to begin with; as large as `most`, it stays as it is.

    Example:
        >>> packing = Packing(most=4)
        >>> packing.update({"a": []}, now=1.0)  # it begins
        >>> packing.update({"a": [(10.0, 9.0), *((11.0 + n, 1.0) for n in range(5))]}, now=15.0)
        >>> packing.limit  # it has been timed: another may show what it costs
        2
    """

    def __init__(self, most: int, limit: int = 1) -> None:
        self.most, self.limit = most, min(limit, most)
        self.is_settled = self.limit == most
        self._running: frozenset[Any] = frozenset()
        self._since = 0.0
        self._before: dict[Any, float] = {}

    def update(self, rounds: Mapping[Any, Rounds], now: float) -> None:
        """Take note of the runs under way, and change `limit` once they have been timed.

        Args:
            rounds: of each run under way, those that it played in its process.
            now: the time, by the clock of `rounds`.
        """
        if self.is_settled or len(rounds) != self.limit:
            return
        if rounds.keys() != self._running:
            self._running, self._since = frozenset(rounds), now
        if not all(rounds.values()):
            return
        steady = max(self._since, *(one[0][0] for one in rounds.values()))  # in its first round a run compiles
        timed = {run: [took for end, took in one if end - took >= steady] for run, one in rounds.items()}
        if all(len(took) >= ROUNDS for took in timed.values()):
            self._judge({run: median(took) for run, took in timed.items()})

    def give_way(self, running: int) -> bool:
        """A run had no memory left beside so many others: never again as many. False: it was alone."""
        if not running:
            return False
        self.limit, self.is_settled = min(self.limit, running), True
        return True

    def _judge(self, paces: dict[Any, float]) -> None:
        """Compare the seconds that rounds take now with those before the last run was added."""
        common = self._before.keys() & paces.keys()
        if not self._before:
            gain = GAIN  # nothing to compare with yet
        elif common:
            share = fmean(self._before[run] / paces[run] for run in common)  # of the speed that they had
            gain = share * self.limit / (self.limit - 1)
        else:  # all that were timed before are over: time those of now alone
            self._before, self.limit = {}, self.limit - 1
            return
        if gain < GAIN:
            self.limit, self.is_settled = self.limit - 1, True
        elif self.limit == self.most:
            self.is_settled = True
        else:
            self._before, self.limit = paces, self.limit + 1


class Timer:
    """The observer that keeps when rounds end and how long they take, for `read_rounds` in another process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.unlink(missing_ok=True)

    def on_round(self, result: RoundResult) -> None:
        if result.is_tuning:
            return
        with self._path.open("ab") as file:
            file.write(_RECORD.pack(time.time(), result.seconds))


_RECORD = struct.Struct("<dd")


def read_rounds(path: Path) -> Rounds:
    """What a `Timer` has kept so far; nothing if it has not begun."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return ()
    whole = len(data) - len(data) % _RECORD.size  # the process may be writing
    return [(end, took) for end, took in _RECORD.iter_unpack(data[:whole])]
