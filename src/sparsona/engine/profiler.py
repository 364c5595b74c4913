"""Where the time goes, phase by phase: what `--profile` measures with.

`with context.clock.measure("finish"): ...` counts the time until the block is left, less what blocks inside it count
for themselves, so that all shares add up to the wall time. A clock that is off hands out one block that does nothing.
Never hold a block over a `yield` (another block would be closed first), nor open one while a CUDA graph is captured.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

START = "start: "  # how the names of start-up's parts begin
TRAIN, SEARCH = "train", "mask search"
WAIT, IDLE, OTHER = "wait for workers", "idle", "other"
# The order in which phases are shown, that of a run. Phases that are not listed are shown at the position of "".
_ORDER = (
    *(f"{START}import", f"{START}read data", f"{START}build", START.rstrip(": ")),
    *("reply", "encode", "decode", "init", "receive", TRAIN, SEARCH, "finish", "", "aggregate", "evaluate"),
    *("records", "checkpoint", "pipe", WAIT, IDLE),
)
_NOTHING: AbstractContextManager[None] = contextlib.nullcontext()


class Counts(Protocol):
    """The counts of training; a turn's Tally has them."""

    steps: int
    examples: int


@dataclass
class Span:
    """What was measured under one name. `each` has the seconds of single calls, for `SEARCH` and `TRAIN` alone."""

    seconds: float = 0.0
    calls: int = 0
    steps: int = 0
    examples: int = 0
    each: list[float] = field(default_factory=list)

    def add(self, other: Span) -> None:
        self.seconds += other.seconds
        self.calls += other.calls
        self.steps += other.steps
        self.examples += other.examples
        self.each += other.each


@dataclass(frozen=True)
class WorkerReport:
    """What a worker process measured since its last report, and its peak memory."""

    spans: dict[str, Span]
    peak_bytes: int


@dataclass
class _Workers:
    """Worker processes, as the clock of their parent sees them."""

    began: dict[int, float] = field(default_factory=dict)
    ended: dict[int, float] = field(default_factory=dict)
    peak_bytes: dict[int, int] = field(default_factory=dict)
    spans: dict[str, Span] = field(default_factory=dict)


@dataclass
class _Open:
    """A block that was entered and not yet left, and its own time so far."""

    name: str
    seconds: float = 0.0


class Clock:
    """Measures one process from the moment it is made, and collects the reports of its workers."""

    def __init__(self, is_on: bool = True) -> None:
        self.is_on = is_on
        self._began = self._since = time.perf_counter()
        self._open: list[_Open] = []
        self._spans: dict[str, Span] = {}
        self._workers = _Workers()
        self._device: Any = None

    def attach(self, device: Any) -> None:
        """Synchronise with this torch device wherever a block begins or ends, so that its work counts in that block."""
        if self.is_on and device.type == "cuda":
            import torch

            self._device = device
            torch.cuda.reset_peak_memory_stats(device)

    def measure(self, name: str) -> AbstractContextManager[None]:
        """A block whose time counts as `name`."""
        return _Block(self, name) if self.is_on else _NOTHING

    def training(self, phase: str, tallies: Iterable[Counts]) -> AbstractContextManager[None]:
        """A block that runs a training phase of one or more clients; their tallies give its steps and examples."""
        if not self.is_on:
            return _NOTHING
        return _Block(self, TRAIN if phase == TRAIN else f"{TRAIN}: {phase}", tuple(tallies))

    def take(self) -> WorkerReport:
        """What was measured since the last call: the report of a worker."""
        spans, self._spans = self._spans, {}
        return WorkerReport(spans, peak_bytes())

    def add_worker(self) -> int:
        """Count a worker process that is started; returns its number, for `record_worker` and `end_worker`."""
        number = len(self._workers.began)
        if self.is_on:
            self._workers.began[number] = time.perf_counter()
        return number

    def record_worker(self, number: int, report: WorkerReport | None) -> None:
        """Add a worker's report."""
        if report is None or not self.is_on:
            return
        for name, span in report.spans.items():
            self._workers.spans.setdefault(name, Span()).add(span)
        self._workers.peak_bytes[number] = report.peak_bytes

    def end_worker(self, number: int) -> None:
        """Count a worker process that has ended."""
        if self.is_on:
            self._workers.ended.setdefault(number, time.perf_counter())

    def profile(self) -> dict[str, Any]:
        """Everything measured until now, as docs/profile.md describes it. The shares of each list add up to 1."""
        now = self._charge()
        pool, wall = self._workers, now - self._began
        gpu = None
        if self._device is not None:
            import torch

            gpu = torch.cuda.max_memory_allocated(self._device)
        workers = None
        if pool.began:
            lived = sum(pool.ended.get(number, now) - began for number, began in pool.began.items())
            workers = {"processes": len(pool.began), "seconds": lived, "phases": _rows(pool.spans, lived)}
        peaks = list(pool.peak_bytes.values())
        memory = {"process": peak_bytes(), "workers": peaks, "gpu": gpu}
        search = _search_time(pool.spans if pool.began else self._spans)
        phases = _rows(self._spans, wall)
        return {"seconds": wall, "phases": phases, "workers": workers, "memory": memory, "search": search}

    def _charge(self) -> float:
        """Count the time until now for the innermost open block."""
        if self._device is not None:
            import torch

            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        if self._open:
            self._spans.setdefault(self._open[-1].name, Span()).seconds += now - self._since
            self._open[-1].seconds += now - self._since
        self._since = now
        return now

    def _enter(self, name: str) -> None:
        self._charge()
        self._open.append(_Open(name))

    def _leave(self, steps: int, examples: int) -> None:
        self._charge()
        left = self._open.pop()
        each = [left.seconds] if left.name in (TRAIN, SEARCH) else []
        self._spans.setdefault(left.name, Span()).add(Span(0.0, 1, steps, examples, each))


class _Block:
    """One measured block."""

    def __init__(self, clock: Clock, name: str, tallies: Sequence[Counts] = ()) -> None:
        self._clock, self._name, self._tallies = clock, name, tallies

    def _counted(self) -> tuple[int, int]:
        return sum(tally.steps for tally in self._tallies), sum(tally.examples for tally in self._tallies)

    def __enter__(self) -> None:
        self._steps, self._examples = self._counted()
        self._clock._enter(self._name)

    def __exit__(self, *_: object) -> None:
        steps, examples = self._counted()
        self._clock._leave(steps - self._steps, examples - self._examples)


OFF = Clock(is_on=False)


def _rows(spans: dict[str, Span], wall: float) -> list[dict[str, Any]]:
    """What was measured in a fixed order, and the remaining time as the last row."""
    found = {name: span for name, span in spans.items() if name != OTHER}
    rest = Span(max(0.0, wall - sum(span.seconds for span in found.values())))
    rows = []
    for name, span in [*sorted(found.items(), key=lambda item: _place(item[0])), (OTHER, rest)]:
        row: dict[str, Any] = {"phase": name, "seconds": span.seconds, "share": span.seconds / wall if wall else 0.0}
        row |= {"calls": span.calls, "ms_per_call": 1e3 * span.seconds / span.calls if span.calls else None}
        if span.steps:
            row |= {"steps": span.steps, "ms_per_step": 1e3 * span.seconds / span.steps}
            row |= {"examples": span.examples, "examples_per_second": span.examples / span.seconds}
        rows.append(row)
    return rows


def _search_time(spans: dict[str, Span]) -> dict[str, Any] | None:
    """Mask search beside the training of the same turns (FedSpa, table 5); None where no mask was searched.

    A turn trains and then searches, so that the n-th of one belongs to the n-th of the other. Where clients train
    together there are fewer blocks of training than turns: then the ratio is that of the sums, without a spread.
    """
    if not (search := spans.get(SEARCH, Span())).calls or not (train := spans.get(TRAIN, Span())).seconds:
        return None
    found: dict[str, Any] = {"turns": search.calls, "ratio": search.seconds / train.seconds, "ratio_sd": None}
    found |= {"train_seconds": train.seconds / search.calls, "train_sd": None}
    found |= {"search_seconds": search.seconds / search.calls, "search_sd": _sd(search.each)}
    if len(train.each) == len(search.each):
        ratios = [one / other for one, other in zip(search.each, train.each, strict=True)]
        found |= {"ratio": statistics.fmean(ratios), "ratio_sd": _sd(ratios), "train_sd": _sd(train.each)}
    return found


def _sd(values: list[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None


def _place(name: str) -> int:
    """The position of a name, or of the word before its colon; names of equal position keep their order."""
    known = [text for text in (name, name.partition(":")[0], "") if text in _ORDER]
    return _ORDER.index(known[0])


def peak_bytes() -> int:
    """The peak memory of this process."""
    try:
        # Not getrusage's figure: it starts with that of the parent process.
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    import resource
    import sys

    found = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return found if sys.platform == "darwin" else found * 1024
