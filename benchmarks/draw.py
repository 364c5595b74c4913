"""The figures of benchmarks/compare.py as a bar chart (SVG) and as a table for docs/performance.md.

python benchmarks/draw.py benchmarks/results/compare.json docs/performance.md
"""

from __future__ import annotations

import html
import json
import sys
from pathlib import Path
from typing import Any

from record import NAMES, write_between

WORKS = {"cnn": "CNN of 256,830 parameters, 3x32x32", "lenet5": "LeNet5, 28x28"}
# Readable on white and on dark grey; ours stands out.
STYLE = """text{font:13px system-ui,-apple-system,'Segoe UI',Roboto,Arial,sans-serif;fill:#1f2328}
.head{font-weight:600}.bar{fill:#8c959f}.ours{fill:#0969da}.limit{stroke:#cf222e;stroke-dasharray:4 3;fill:none}
.told{fill:#cf222e}@media(prefers-color-scheme:dark){text{fill:#e6edf3}.bar{fill:#6e7681}.ours{fill:#58a6ff}
.limit{stroke:#ff7b72}.told{fill:#ff7b72}}"""
BEGIN, END = "<!-- cpu: written by benchmarks/draw.py -->", "<!-- cpu: end -->"
LEFT, BAR, ROW, HEAD, RIGHT = 190, 380, 24, 34, 110


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


def svg(found: dict[str, Any]) -> str:
    """A group of bars for each piece of work: seconds a round, and where the sgemm rate would end it."""
    parts, top = [], 0
    for work, result in found["results"].items():
        rows = best_rows(result["rows"])
        longest = max(row["best_s"] for row in rows)
        limit = result["flops_a_round"] / found["sgemm_flops"]
        parts.append(f'<text class="head" x="0" y="{top + 18}">{html.escape(WORKS[work])}: seconds a round</text>')
        for place, row in enumerate(rows):
            y, width = top + HEAD + place * ROW, BAR * row["best_s"] / longest
            ours = row["contender"] == "sparsona"
            told = f"{row['best_s']:.2f}" if ours else f"{row['best_s']:.2f} ({row['times_ours']:.1f}x)"
            parts.append(f'<text x="{LEFT - 8}" y="{y + 13}" text-anchor="end">{html.escape(name_of(row))}</text>')
            kind = "ours" if ours else "bar"
            parts.append(f'<rect class="{kind}" x="{LEFT}" y="{y}" width="{width:.1f}" height="18" rx="2"/>')
            parts.append(f'<text x="{LEFT + width + 6:.1f}" y="{y + 13}">{told}</text>')
        end = top + HEAD + len(rows) * ROW
        x = LEFT + BAR * limit / longest
        parts.append(f'<path class="limit" d="M{x:.1f} {top + HEAD - 5}V{end}"/>')
        parts.append(f'<text class="told" x="{x + 4:.1f}" y="{end + 9}">limit of matrix products: {limit:.2f}</text>')
        top = end + 34
    label = "Seconds a round on a CPU, by contender; shorter is better"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + BAR + RIGHT} {top}" role="img"'
    return f'{head} aria-label="{label}"><style>{STYLE}</style>{"".join(parts)}</svg>\n'


def table(found: dict[str, Any]) -> str:
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


def block(found: dict[str, Any], picture: str) -> str:
    """What stands between the marks."""
    about = found["environment"]
    where = f"{about['processor']}, {found['cores']} cores, Python {about['python']}, torch {about['torch']}"
    how = f"best of {found['repeats']} x {found['rounds']} rounds, in turns; commit {about['commit']}"
    return f"![Seconds a round, by contender]({picture})\n\n{table(found)}\n\n{where}; {how}."


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    found, page = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    picture = page.with_name("performance-cpu.svg")
    write_between(page, BEGIN, END, block(found, picture.name))
    picture.write_text(svg(found))


if __name__ == "__main__":
    main()
