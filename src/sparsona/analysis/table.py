"""Results as a table of words: one way to format, for the terminal and for the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sparsona.analysis.statistics import mean_and_spread, paired_difference
from sparsona.analysis.view import Group, RunView, group_views, pairs

UNKNOWN = "–"


@dataclass(frozen=True)
class Column:
    """One figure of the summary: where it is, how it is printed, and which end of it is the good one."""

    heading: str
    section: str
    key: str
    show: Callable[[float], str]
    meaning: str
    unit: str = ""  # of `show`, printed once after the spread
    more_is_better: bool = False
    is_optional: bool = False  # left out where no run has it

    @property
    def has_spread(self) -> bool:
        return self.section == "accuracy"


@dataclass(frozen=True)
class Cell:
    """A printed figure: its value, its spread over seeds ('' for one seed), and whether it is the column's best."""

    value: str
    spread: str = ""
    unit: str = ""
    best: bool = False

    @property
    def text(self) -> str:
        return f"{self.value} ± {self.spread}{self.unit}" if self.spread else f"{self.value}{self.unit}"


@dataclass(frozen=True)
class Row:
    """One method's line; `seeds` is the number of runs behind it."""

    label: str
    point: str
    seeds: int
    cells: tuple[Cell, ...]


def human_bytes(value: float) -> str:
    """Bytes in decimal units with three digits: 980 B, 14.2 kB, 1.30 MB."""
    return _human(value, ("B", "kB", "MB", "GB", "TB", "PB"))


def human_flops(value: float) -> str:
    """A number of floating-point operations with three digits: 0 FLOP, 14.2 GFLOP."""
    return _human(value, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"))


def human_seconds(value: float) -> str:
    """A duration: 0.25 s, 12.3 s, 2 min 05 s, 1 h 02 min."""
    if round(value, 1) < 60:
        return f"{value:.2f} s" if value < 1 else f"{value:.1f} s"
    seconds = round(value)
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    minutes = round(value / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"


def human_accuracy(value: float) -> str:
    """A fraction as the number before a percent sign, with the two decimals that papers print."""
    return f"{100 * value:.2f}"


COLUMNS = (
    Column("accuracy", "accuracy", "mean", human_accuracy, "mean over clients at the headline round", "%", True),
    Column(
        "bottom decile", "accuracy", "bottom_decile", human_accuracy, "the client a tenth from the bottom", "%", True
    ),
    Column("worst", "accuracy", "worst", human_accuracy, "the worst client", "%", True),
    Column("last 10", "accuracy", "last10", human_accuracy, "mean of the last ten rounds", "%", True),
    Column(
        "bytes up", "bytes", "up", human_bytes, "clients to server, as encoded: headers, masks and checksums included"
    ),
    Column("bytes down", "bytes", "down", human_bytes, "server to clients, as encoded"),
    Column(
        "uploaded",
        "bytes",
        "upload_share",
        human_accuracy,
        "share of the model's entries in a client's upload, mean over uploads (pFedGate's q)",
        "%",
        is_optional=True,
    ),
    Column(
        "busiest in",
        "bytes",
        "busiest_round_in",
        human_bytes,
        "most bytes into one node (the server, or a peer) in one round",
        is_optional=True,
    ),
    Column(
        "busiest out",
        "bytes",
        "busiest_round_out",
        human_bytes,
        "most bytes out of one node in one round",
        is_optional=True,
    ),
    Column("papers' count", "bytes", "paper_total", human_bytes, "parameters × 4 in both directions, masks free"),
    Column("train FLOPs", "flops", "train", human_flops, "local training"),
    Column("mask FLOPs", "flops", "mask_search", human_flops, "searching for masks"),
    Column("seconds", "", "seconds", human_seconds, "wall time of the run"),
)


def shown_columns(views: Sequence[RunView]) -> tuple[Column, ...]:
    """COLUMNS without the optional ones that no run has."""
    groups = group_views(views)
    return tuple(
        column for column in COLUMNS if not column.is_optional or any(_values(column, group) for group in groups)
    )


def table(views: Sequence[RunView]) -> list[Row]:
    """A row per method in order of appearance; the best of each column is marked unless all are equal.

    What prints alike is equally good: a difference that the table does not show makes nobody the best.
    """
    groups = group_views(views)
    columns = [_column_cells(column, groups) for column in shown_columns(views)]
    return [
        Row(group.label, group.views[0].point, len(group.views), tuple(cells[i] for cells in columns))
        for i, group in enumerate(groups)
    ]


def rows(views: Sequence[RunView]) -> list[dict[str, str]]:
    """The table as text: a dict per method, keyed 'method' and by the headings of its columns."""
    headings = [column.heading for column in shown_columns(views)]
    return [
        {"method": row.label} | {heading: cell.text for heading, cell in zip(headings, row.cells, strict=True)}
        for row in table(views)
    ]


def differences(views: Sequence[RunView]) -> list[dict[str, str]]:
    """Each further method against the first, paired by seed: keys method, difference, interval, seeds.

    In points of mean accuracy; only runs on the same clients are paired.
    """
    groups = group_views(views)
    return [{"method": group.label} | _difference(groups[0], group) for group in groups[1:]]


def class_rows(views: Sequence[RunView]) -> list[dict[str, str]]:
    """Accuracy on classes that a client has among its training data, and on those it has not: a dict per method.

    Empty where no client was tested on a class that it never saw.
    """
    found = []
    for group in group_views(views):
        blocks = [view.summary["classes"] for view in group.views if view.summary.get("classes")]
        if any(block["unseen"]["clients"] for block in blocks):
            found.append(
                {"method": group.label} | {name: _seen([b[name] for b in blocks]) for name in ("seen", "unseen")}
            )
    return found


def _seen(blocks: Sequence[dict[str, Any]]) -> str:
    """The mean over seeds and clients, and how many test examples are behind it."""
    known = [block for block in blocks if block["mean"] is not None]
    if not known:
        return UNKNOWN
    mean, spread = mean_and_spread([block["mean"] for block in known])
    spread_text = "" if spread is None else f" ± {human_accuracy(spread)}"
    counts = [sum(block[key] for block in known) for key in ("clients", "examples")]
    return f"{human_accuracy(mean)}{spread_text}% ({counts[1]:,} examples of {counts[0]:,} clients)"


def _difference(reference: Group, group: Group) -> dict[str, str]:
    matched = pairs(reference, group)
    if not matched:
        return {"difference": UNKNOWN, "interval": "no common seed on the same clients", "seeds": "0"}
    before = [float(a.summary["accuracy"]["mean"]) for a, _ in matched]
    after = [float(b.summary["accuracy"]["mean"]) for _, b in matched]
    found = paired_difference(after, before)
    interval = "one seed: no interval"
    if found.low is not None and found.high is not None:
        interval = f"{_points(found.low)} to {_points(found.high)}"
    return {"difference": _points(found.mean), "interval": interval, "seeds": str(found.n)}


def _points(value: float) -> str:
    shown = f"{100 * value:+.2f}".replace("-", "−")
    return "0.00" if shown in ("+0.00", "−0.00") else shown


def _column_cells(column: Column, groups: Sequence[Group]) -> list[Cell]:
    measured = [_values(column, group) for group in groups]
    means = [mean_and_spread(values) if values else None for values in measured]
    known = [mean for mean in means if mean is not None]
    ends = {column.show(mean) for mean, _ in known}
    best = None
    if len(ends) > 1:
        best = column.show((max if column.more_is_better else min)(mean for mean, _ in known))
    cells = []
    for found in means:
        if found is None:
            cells.append(Cell(UNKNOWN))
            continue
        value, spread = column.show(found[0]), found[1]
        shown = column.show(spread) if column.has_spread and spread is not None else ""
        cells.append(Cell(value, shown, column.unit, value == best))
    return cells


def _values(column: Column, group: Group) -> list[float]:
    if column.section:
        return group.values(column.section, column.key)
    found = [view.summary.get(column.key) for view in group.views]
    return [float(value) for value in found if value is not None]


def _human(value: float, units: Sequence[str]) -> str:
    if round(value) < 1000:
        return f"{round(value)} {units[0]}"
    for unit in units[1:]:
        value /= 1000
        for decimals, limit in ((2, 10), (1, 100), (0, 1000)):
            if round(value, decimals) < limit:
                return f"{value:.{decimals}f} {unit}"
    return f"{value:.0f} {units[-1]}"
