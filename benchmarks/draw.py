"""The figures of benchmarks/compare.py or benchmarks/scale.py as a picture and as a table for docs/performance.md.

python benchmarks/draw.py benchmarks/results/compare.json docs/performance.md
python benchmarks/draw.py benchmarks/results/scale.json docs/performance.md

Needs the extra `report`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from record import NAMES, write_between

from sparsona.report.palette import BETTER, EQUAL, INK, WORSE
from sparsona.report.pictures.figure import Picture, new_picture, style

WORKS = {"cnn": "CNN of 256,830 parameters, 3x32x32", "lenet5": "LeNet5, 28x28"}
# The measurements of scale.py: key, title, what the x axis counts, and the figure on the y axis.
CHARTS = (
    ("memory", "Peak memory, MiB", "clients, all touched", "peak_mib_here"),
    ("round", "Seconds a round", "clients sampled", "round_seconds"),
    ("start", "Seconds to start", "clients registered", "start_seconds"),
)


def best_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each contender with the number of threads that suits it best, the fastest first."""
    best: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row["contender"] not in best or row["best_s"] < best[row["contender"]]["best_s"]:
            best[row["contender"]] = row
    return sorted(best.values(), key=lambda row: row["best_s"])


def name_of(row: dict[str, Any]) -> str:
    versions = [version for name, version in row["versions"].items() if name not in ("torch", "sparsona")]
    return " ".join([NAMES[row["contender"]], *(version.split("+")[0] for version in versions)])


def draw_comparison(found: dict[str, Any]) -> Picture:
    """A group of bars for each piece of work: seconds a round, and where the sgemm rate would end it."""
    groups = {work: best_rows(result["rows"]) for work, result in found["results"].items()}
    sizes = [len(rows) + 2 for rows in groups.values()]
    with style("comparison"):
        title = "Seconds a round on a CPU, by contender; shorter is better"
        picture = new_picture(title, ["Dashed: the limit of matrix products."], 0.32 * sum(sizes))
        panels = picture.figure.subplots(len(groups), squeeze=False, height_ratios=sizes)[:, 0]
        for axes, (work, rows) in zip(panels, groups.items(), strict=True):
            seconds = [row["best_s"] for row in rows]
            colours = [BETTER if row["contender"] == "sparsona" else EQUAL for row in rows]
            bars = axes.barh([name_of(row) for row in rows], seconds, color=colours)
            axes.bar_label(bars, [_bar_label(row) for row in rows], padding=4, color=INK)
            limit = found["results"][work]["flops_a_round"] / found["sgemm_flops"]
            axes.axvline(limit, color=WORSE, linestyle="--", linewidth=1)
            axes.text(limit, 1, f"{limit:.2f}", transform=axes.get_xaxis_transform(), color=WORSE, ha="center")
            axes.set_title(WORKS[work], loc="right")
            axes.set_xlim(0, 1.2 * max(seconds))
            axes.invert_yaxis()
    return picture


def _bar_label(row: dict[str, Any]) -> str:
    return f"{row['best_s']:.2f}" + ("" if row["contender"] == "sparsona" else f" ({row['times_ours']:.1f}x)")


def draw_scale(found: dict[str, Any]) -> Picture:
    """A curve for each measurement, on logarithmic axes."""
    with style("scale"):
        picture = new_picture("Memory, rounds and start-up by clients", ["Both axes are logarithmic."], 2.6)
        for axes, (kind, title, along, key) in zip(picture.figure.subplots(1, 3), CHARTS, strict=True):
            points = [(row["clients"], row[key]) for row in found["results"][kind]]
            axes.loglog(*zip(*points, strict=True), marker="o", color=BETTER)
            for point in points:
                axes.annotate(_format(point[1]), point, (0, 7), textcoords="offset points", ha="center")
            axes.set(title=title, xlabel=along)
            axes.margins(0.15, 0.25)
            axes.grid(axis="y")
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_formatter("{x:,g}")
                axis.set_minor_formatter("")
    return picture


def _format(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def comparison_table(found: dict[str, Any]) -> str:
    lines = [
        "| work | contender | threads | s a round, best (median) | times ours (low to high) | % of sgemm |",
        "|---|---|---|---|---|---|",
    ]
    for work, result in found["results"].items():
        for row in sorted(result["rows"], key=lambda row: row["best_s"]):
            threads = f"{row['note']}" if row["note"] else str(row["threads"])
            spread = f"{row['times_ours_low']:.2f} to {row['times_ours_high']:.2f}"
            lines.append(
                f"| {WORKS[work]} | {name_of(row)} | {threads} | {row['best_s']:.2f} ({row['median_s']:.2f}) "
                f"| {row['times_ours']:.2f} ({spread}) | {100 * row['share_of_limit']:.0f} |"
            )
    return "\n".join(lines)


def scale_table(found: dict[str, Any]) -> str:
    lines: list[str] = []
    for kind, title, along, key in CHARTS:
        sizes, values = ([_format(row[name]) for row in found["results"][kind]] for name in ("clients", key))
        lines += [f"| {along} | {' | '.join(sizes)} |", f"|{'---|' * (1 + len(sizes))}"]
        lines += [f"| {title} | {' | '.join(values)} |", ""]
    return "\n".join(lines[:-1])


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    found, page = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    about = found["environment"]
    versions = f"Python {about['python']}, torch {about['torch']}"
    if "sgemm_flops" in found:
        mark, picture, table = "cpu", draw_comparison(found), comparison_table(found)
        how = f"best of {found['repeats']} x {found['rounds']} rounds, in turns; commit {about['commit']}"
        label = "Seconds a round, by contender"
        where = f"{about['processor']}, {found['cores']} cores, {versions}; {how}."
    else:
        mark, picture, table = "scale", draw_scale(found), scale_table(found)
        label = "Memory, rounds and start-up by clients"
        where = f"{about['processor']}, {versions}; commit {about['commit']}."
    path = picture.save(page.with_name(f"performance-{mark}.svg"))
    begin, end = f"<!-- {mark}: written by benchmarks/draw.py -->", f"<!-- {mark}: end -->"
    write_between(page, begin, end, f"![{label}]({path.name})\n\n{table}\n\n{where}")


if __name__ == "__main__":
    main()
