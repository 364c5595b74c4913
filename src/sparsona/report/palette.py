"""Colours, by their purpose: for charts, pictures and the terminal, on light and on dark pages."""

from __future__ import annotations

from typing import Any

# Okabe and Ito's palette without its yellow (invisible on white) and its black (invisible on dark), plus a grey; then
# five for comparisons of up to twelve methods: darker ones on white, lighter ones of similar hues on dark, since the
# colour-blind tell twelve apart by lightness. tests/report/test_palette.py has the least differences.
COLOURS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#757575"),
    *("#9774fb", "#7b2412", "#9a397c", "#795f2e", "#105d43"),
)
ON_DARK = (
    *("#3b78f0", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#b8b8b8"),
    *("#806aa7", "#ffc0b3", "#f5d2ff", "#ffff33", "#82e676"),
)
# A method has one colour, dash and mark in all charts of a page, by its place: as Plotly and Matplotlib call them.
_DASHES = (("solid", "-"), ("dash", "--"), ("dashdot", "-."), ("dot", ":"), ("8px,3px", (0, (6, 2))))
_MARKS = (
    *(("circle", "o"), ("square", "s"), ("diamond", "D"), ("cross", "P"), ("x", "X"), ("triangle-up", "^")),
    *(("triangle-down", "v"), ("pentagon", "p"), ("hexagon", "h"), ("star", "*")),
)


def colour_at(place: int) -> str:
    """The colour of the method at this place among those of a page."""
    return COLOURS[place % len(COLOURS)]


def dash_at(place: int) -> tuple[str, Any]:
    """How its lines are dashed, to distinguish those whose colours repeat: for Plotly and for Matplotlib."""
    return _DASHES[place // len(COLOURS) % len(_DASHES)]


def mark_at(place: int) -> tuple[str, str]:
    """Its mark, for Plotly and for Matplotlib."""
    return _MARKS[place % len(_MARKS)]


BETTER, WORSE, EQUAL = COLOURS[0], COLOURS[1], "#9aa5b0"
HEAT = [(0.0, "#f2f5f8"), (0.3, "#7fb4d6"), (1.0, "#005a8d")]

PAGE, INK, MUTED, RULE = "#ffffff", "#1c2430", "#5c6875", "#dde3e9"
ON_HEAT = "#fffffe"  # on a strong cell: white on every page, and so not PAGE
PARTS = {"train": COLOURS[0], "validation": COLOURS[4], "test": EQUAL}
# What a dark page shows in their place; all other colours are seen on both.
DARK = {PAGE: "#1a2129", INK: "#e6ebf0", MUTED: "#9aa7b4", RULE: "#2e3843"}
DARK |= {light: dark for light, dark in zip(COLOURS, ON_DARK, strict=True) if light != dark}

# A scale for terminals, whose background is unknown: more is brighter, from a blue that is nearly black.
TERMINAL_SCALE = ("#222b35", "#21435c", "#1f5a83", "#2679ac", "#5aa5d2", "#8fd0f7")
TERMINAL_BAR = "#2b8cc4"  # seen on black and on white
