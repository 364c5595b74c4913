"""The figures of benchmarks/scale.py as curves (SVG) and as a table for docs/performance.md.

python benchmarks/draw_scale.py benchmarks/results/scale.json docs/performance.md
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

from record import write_between

BEGIN, END = "<!-- scale: written by benchmarks/draw_scale.py -->", "<!-- scale: end -->"
STYLE = """text{font:12px system-ui,-apple-system,'Segoe UI',Roboto,Arial,sans-serif;fill:#1f2328}.head{font-weight:600}
.grid{stroke:#d0d7de;fill:none}.line{stroke:#0969da;stroke-width:2;fill:none}.dot{fill:#0969da}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.grid{stroke:#30363d}.line{stroke:#58a6ff}.dot{fill:#58a6ff}}"""
# What is drawn: which measurement, its title, what is along the axis, and the figure.
CHARTS = (
    ("memory", "Peak memory, MiB", "clients, all touched", "peak_mib_here"),
    ("round", "Seconds a round", "clients sampled", "round_seconds"),
    ("start", "Seconds to start", "clients registered", "start_seconds"),
)
WIDTH, HEIGHT, GAP, LEFT, TOP = 210, 150, 70, 50, 40


def chart(rows: list[dict[str, float]], title: str, along: str, key: str, x0: float) -> str:
    """One curve; both axes are logarithmic, from a power of ten to a power of ten."""
    xs, ys = [row["clients"] for row in rows], [row[key] for row in rows]
    (left, right), (low, high) = (
        (math.floor(math.log10(min(v))), math.ceil(math.log10(max(v)) - 1e-9)) for v in (xs, ys)
    )

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            x0 + WIDTH * (math.log10(x) - left) / max(1, right - left),
            TOP + HEIGHT - HEIGHT * (math.log10(y) - low) / max(1, high - low),
        )

    parts = [f'<text class="head" x="{x0}" y="18">{title}</text>']
    for power in range(low, high + 1):
        _, y = at(1, 10.0**power)
        parts.append(f'<path class="grid" d="M{x0} {y:.1f}h{WIDTH}"/>')
        parts.append(f'<text x="{x0 - 6}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:,g}</text>')
    for power in range(left, right + 1):
        x, _ = at(10.0**power, 1)
        label = f"{10**power:,}"
        parts.append(f'<text x="{x:.1f}" y="{TOP + HEIGHT + 18}" text-anchor="middle">{label}</text>')
    points = [at(x, y) for x, y in zip(xs, ys, strict=True)]
    parts.append(f'<path class="line" d="M{" L".join(f"{x:.1f} {y:.1f}" for x, y in points)}"/>')
    for (x, y), value in zip(points, ys, strict=True):
        parts.append(f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>')
        parts.append(f'<text x="{x:.1f}" y="{y - 9:.1f}" text-anchor="middle">{_told(value)}</text>')
    parts.append(f'<text x="{x0 + WIDTH / 2}" y="{TOP + HEIGHT + 38}" text-anchor="middle">{along}</text>')
    return "".join(parts)


def svg(results: dict[str, list[dict[str, float]]]) -> str:
    drawn = [
        chart(results[kind], title, along, key, LEFT + place * (WIDTH + GAP))
        for place, (kind, title, along, key) in enumerate(CHARTS)
    ]
    width = LEFT + len(CHARTS) * (WIDTH + GAP)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {TOP + HEIGHT + 50}" role="img"'
    label = "Peak memory by clients, seconds a round by clients sampled, and seconds to start by clients registered"
    return f'{head} aria-label="{label}"><style>{STYLE}</style>{"".join(drawn)}</svg>\n'


def _told(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def table(results: dict[str, list[dict[str, float]]]) -> str:
    lines: list[str] = []
    for kind, title, along, key in CHARTS:
        sizes, values = ([_told(row[name]) for row in results[kind]] for name in ("clients", key))
        lines += [f"| {along} | {' | '.join(sizes)} |", f"|{'---|' * (1 + len(sizes))}"]
        lines += [f"| {title} | {' | '.join(values)} |", ""]
    return "\n".join(lines[:-1])


def block(found: dict[str, Any], picture: str) -> str:
    about = found["environment"]
    where = f"{about['processor']}, Python {about['python']}, torch {about['torch']}; commit {about['commit']}"
    return f"![Memory, rounds and start-up by clients]({picture})\n\n{table(found['results'])}\n\n{where}."


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    found, page = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    picture = page.with_name("performance-scale.svg")
    write_between(page, BEGIN, END, block(found, picture.name))
    picture.write_text(svg(found["results"]))


if __name__ == "__main__":
    main()
