"""A drawing as plain shapes, and the two files it can become: SVG, light or dark as its reader likes, and PNG."""

from __future__ import annotations

import html
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np

from sparsona.core.errors import SparsonaError
from sparsona.report.plots import COLOURS, HEAT

LEVELS = 16
FAINTEST = 0.15  # where the scale begins: one example must not look like none
FONT = "system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif"
XMLNS = ' xmlns="http://www.w3.org/2000/svg"'  # needed in a file of its own, and not inside a page


def _blend(stops: Sequence[str], position: float) -> str:
    """A colour on a scale of evenly spaced stops; `position` is from 0 to 1."""
    rgb = np.array([[int(stop[i : i + 2], 16) for i in (1, 3, 5)] for stop in stops])
    mixed = [np.interp(position * (len(stops) - 1), range(len(stops)), channel) for channel in rgb.T]
    return "#" + "".join(f"{round(value):02x}" for value in mixed)


def _heat(stops: Sequence[str]) -> list[str]:
    return [_blend(stops, FAINTEST + (1 - FAINTEST) * level / LEVELS) for level in range(1, LEVELS + 1)]


# Every colour by its purpose, on a light and on a dark page.
PAINTS: dict[str, tuple[str, str]] = {
    "page": ("#ffffff", "#1a2129"),
    "ink": ("#1c2430", "#e6ebf0"),
    "muted": ("#5c6875", "#9aa7b4"),
    "rule": ("#dde3e9", "#2e3843"),
    "none": ("#f2f5f8", "#222b35"),
    "faint": ("#1c2430", "#e6ebf0"),  # words on a faint cell
    "strong": ("#ffffff", "#10161d"),  # words on a strong cell
    "train": (COLOURS[0], COLOURS[5]),
    "validation": (COLOURS[4], COLOURS[4]),
    "test": ("#9aa5b0", "#7d8995"),
    "helps": (COLOURS[0], COLOURS[5]),
    "hurts": (COLOURS[1], COLOURS[1]),
}
PAINTS |= {
    f"h{level}": pair
    for level, pair in enumerate(
        zip(_heat([colour for _, colour in HEAT]), _heat(["#222b35", "#1f6ea5", "#8fd0f7"]), strict=True), start=1
    )
}


@dataclass(frozen=True)
class Box:
    """A filled rectangle."""

    x: float
    y: float
    width: float
    height: float
    paint: str


@dataclass(frozen=True)
class Words:
    """A line of text on its baseline; `turn` is in degrees, counter-clockwise."""

    x: float
    y: float
    text: str
    paint: str = "muted"
    align: Literal["start", "middle", "end"] = "start"
    size: int = 12
    bold: bool = False
    turn: int = 0


@dataclass(frozen=True, eq=False)
class Grid:
    """Cells side by side, coloured by `levels` from 0 (no colour) to LEVELS; `gap` is what each leaves free."""

    x: float
    y: float
    cell_width: float
    cell_height: float
    levels: np.ndarray
    gap: float


@dataclass(frozen=True)
class Line:
    """Straight strokes from point to point."""

    points: tuple[tuple[float, float], ...]
    paint: str
    width: float = 1.0
    is_dashed: bool = False


@dataclass(frozen=True)
class Area:
    """A filled polygon; one that is not solid lets what lies below shine through."""

    points: tuple[tuple[float, float], ...]
    paint: str
    opacity: float = 1.0


@dataclass(frozen=True)
class Dot:
    """A filled circle."""

    x: float
    y: float
    radius: float
    paint: str
    opacity: float = 1.0


@dataclass(frozen=True)
class Hint:
    """What a reader's pointer finds in a rectangle."""

    x: float
    y: float
    width: float
    height: float
    text: str


Shape = Box | Words | Grid | Line | Area | Dot | Hint


@dataclass(frozen=True)
class Drawing:
    """Shapes in the order of painting, in pixels of a page of this size."""

    width: float
    height: float
    shapes: tuple[Shape, ...]


def to_svg(drawing: Drawing, label: str) -> str:
    """One element without scripts, fonts or links; `label` is for those who hear it read.

    Its styles hold for its own class only, so that it can stand inside a page.
    """
    light, dark = (
        f".drawing{{background:{PAINTS['page'][i]}}}"  # a window that is larger than the drawing
        + "".join(f".drawing .{name}{{fill:{pair[i]};stroke:{pair[i]}}}" for name, pair in PAINTS.items())
        for i in (0, 1)
    )
    width, height = _number(drawing.width), _number(drawing.height)
    head = f'<svg{XMLNS} class="drawing" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    head += f' role="img" aria-label="{escape(label)}" font-family="{FONT}" stroke-width="0">'
    style = f"<style>{light}.drawing .hint{{fill:none;pointer-events:all}}"
    style += f".drawing .hint:hover{{stroke:{COLOURS[1]};stroke-width:1.5}}"
    style += f"@media (prefers-color-scheme:dark){{{dark}}}</style>"
    body = [_svg_boxes([Box(0, 0, drawing.width, drawing.height, "page")])]
    boxes: list[Box] = []
    for shape in drawing.shapes:
        if isinstance(shape, Box):
            boxes.append(shape)
            continue
        body.append(_svg_boxes(boxes))
        boxes = []
        if isinstance(shape, Grid):
            body.append(_svg_grid(shape))
        elif isinstance(shape, Words):
            body.append(_svg_words(shape))
        elif isinstance(shape, Line | Area):
            body.append(_svg_points(shape))
        elif isinstance(shape, Dot):
            body.append(_svg_dot(shape))
        else:
            place = _svg_place(shape.x, shape.y, shape.width, shape.height)
            body.append(f'<rect class="hint" {place}><title>{escape(shape.text)}</title></rect>')
    body.append(_svg_boxes(boxes))
    return head + style + "\n" + "\n".join(filter(None, body)) + "\n</svg>\n"


def write_png(drawing: Drawing, path: Path, scale: int = 2) -> None:
    """The light version as pixels, `scale` of them for each of the drawing's."""
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError as error:
        raise SparsonaError(
            "Pillow is not installed; PNG pictures need it",
            mend="pip install 'sparsona[images]', or save the picture as .svg",
        ) from error
    image = Image.new("RGB", (round(drawing.width * scale), round(drawing.height * scale)), PAINTS["page"][0])
    canvas = ImageDraw.Draw(image)

    def fill(x: float, y: float, width: float, height: float, paint: str) -> None:
        left, top, right, bottom = (round(scale * side) for side in (x, y, x + width, y + height))
        canvas.rectangle((left, top, max(right - 1, left), max(bottom - 1, top)), fill=PAINTS[paint][0])

    def write(words: Words) -> None:
        font, colour = ImageFont.load_default(scale * words.size), PAINTS[words.paint][0]
        anchor = {"start": "ls", "middle": "ms", "end": "rs"}[words.align]
        thick = scale // 2 if words.bold else 0
        x, y, text = (
            round(scale * words.x),
            round(scale * words.y),
            words.text.replace("−", "-"),
        )  # the font has no minus
        if not words.turn:
            canvas.text((x, y), text, colour, font, anchor, stroke_width=thick, stroke_fill=colour)
            return
        half = round(font.getlength(text)) + 4 * scale  # the point that the text turns about is in the middle
        stencil = Image.new("L", (2 * half, 2 * half))
        ImageDraw.Draw(stencil).text((half, half), text, 255, font, anchor)
        stencil = stencil.rotate(words.turn, resample=Image.Resampling.BICUBIC)
        image.paste(colour, (x - half, y - half), stencil)

    def tint(shape: Area | Dot) -> None:
        points = shape.points if isinstance(shape, Area) else [(shape.x - shape.radius, shape.y - shape.radius)]
        points = points if isinstance(shape, Area) else [*points, (shape.x + shape.radius, shape.y + shape.radius)]
        ends = [(scale * x, scale * y) for x, y in points]
        left, top = (math.floor(min(end[i] for end in ends)) for i in (0, 1))  # a stencil no larger than the shape
        right, bottom = (math.ceil(max(end[i] for end in ends)) + 1 for i in (0, 1))
        stencil = Image.new("L", (right - left, bottom - top))
        ends = [(x - left, y - top) for x, y in ends]
        pen = ImageDraw.Draw(stencil)
        (pen.polygon if isinstance(shape, Area) else pen.ellipse)(ends, fill=round(255 * shape.opacity))
        image.paste(PAINTS[shape.paint][0], (left, top), stencil)

    for shape in drawing.shapes:
        if isinstance(shape, Box):
            fill(shape.x, shape.y, shape.width, shape.height, shape.paint)
        elif isinstance(shape, Words):
            write(shape)
        elif isinstance(shape, Line):
            for start, end in _dashes(shape) if shape.is_dashed else pairwise(shape.points):
                ends = [(scale * x, scale * y) for x, y in (start, end)]
                canvas.line(ends, PAINTS[shape.paint][0], max(1, round(scale * shape.width)))
        elif isinstance(shape, Area | Dot):
            tint(shape)
        elif isinstance(shape, Grid):
            width, height = shape.cell_width, shape.cell_height
            for row, column in np.argwhere(shape.levels > 0):
                level = f"h{shape.levels[row, column]}"
                fill(shape.x + width * column, shape.y + height * row, width - shape.gap, height - shape.gap, level)
    image.save(path, format="PNG")


def check_ending(path: Path) -> str:
    """The ending of a picture's name, if it is one that can be written."""
    ending = path.suffix.lower()
    if ending not in (".svg", ".png"):
        raise SparsonaError(
            f"a picture cannot be written as '{path.name}'",
            expected="a name that ends in .svg or .png",
            mend=f"write {path.stem or 'picture'}.svg; a browser opens it and prints it as PDF",
        )
    return ending


def save_drawing(drawing: Drawing, label: str, path: str | os.PathLike[str]) -> Path:
    """Write a drawing to `path`, a .svg or (with Pillow) a .png, and return it."""
    path = Path(path)
    ending = check_ending(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if ending == ".png":
            write_png(drawing, path)
        else:
            path.write_text(to_svg(drawing, label), encoding="utf-8")
    except OSError as error:
        raise SparsonaError(
            f"the picture could not be written to {path}: {error.strerror or error}",
            expected="the path of a file in a folder that can be written",
            mend="choose another path",
        ) from error
    return path


def escape(text: str) -> str:
    """Text for an SVG or HTML file; what cannot be printed (and would make XML invalid) is a blank."""
    return html.escape("".join(c if c.isprintable() or c == "\n" else " " for c in text))


def _svg_boxes(boxes: Sequence[Box]) -> str:
    """Neighbours of one colour are one path, which is a third of the bytes."""
    by_paint: dict[str, list[str]] = {}
    for box in boxes:
        width, height = _number(box.width), _number(box.height)
        by_paint.setdefault(box.paint, []).append(
            f"M{_number(box.x)} {_number(box.y)}h{width}v{height}h-{width}z" if box.width > 0 else ""
        )
    return "\n".join(f'<path class="{paint}" d="{"".join(parts)}"/>' for paint, parts in by_paint.items())


def _svg_grid(grid: Grid) -> str:
    """A path per colour, of one stroke per run of cells: six bytes a cell instead of a rectangle's sixty."""
    width, height = grid.cell_width, grid.cell_height
    gap_x, gap_y = grid.gap / width, grid.gap / height
    crisp = "" if grid.gap else ' shape-rendering="crispEdges"'  # else hairs of the background shine through
    paths = []
    for level in range(1, LEVELS + 1):
        strokes = [_strokes(row, np.flatnonzero(levels == level), gap_x) for row, levels in enumerate(grid.levels)]
        if any(strokes):
            paths.append(f'<path class="h{level}" d="{"".join(strokes)}"/>')
    place = f"translate({_number(grid.x)} {_number(grid.y + (height - grid.gap) / 2)})"
    scale = f"scale({width:.6g} {height:.6g})"
    thick = f'stroke-width="{1 - gap_y:.4g}"'
    return f'<g transform="{place} {scale}" {thick}{crisp}>\n' + "\n".join(paths) + "\n</g>"


def _strokes(row: int, columns: np.ndarray, gap: float) -> str:
    if not len(columns):
        return ""
    starts = columns if gap else columns[np.diff(columns, prepend=-2) > 1]
    ends = columns if gap else columns[np.diff(columns, append=columns[-1] + 2) > 1]
    pieces: list[str] = []
    at = 0.0
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        length = _number(end + 1 - start - gap)
        move = f"M{start} {row}" if not pieces else f"m{_number(start - at)} 0"
        pieces.append(f"{move}h{length}")
        at = start + float(length)
    return "".join(pieces)


def _svg_points(shape: Line | Area) -> str:
    path = "M" + "L".join(f"{_number(x)} {_number(y)}" for x, y in shape.points)
    if isinstance(shape, Area):
        solid = "" if shape.opacity == 1 else f' opacity="{shape.opacity:g}"'
        return f'<path class="{shape.paint}"{solid} d="{path}z"/>'
    dashed = ' stroke-dasharray="4 3"' if shape.is_dashed else ""
    # A style, because the class that colours it would fill it.
    return f'<path class="{shape.paint}" style="fill:none" stroke-width="{_number(shape.width)}"{dashed} d="{path}"/>'


def _svg_dot(dot: Dot) -> str:
    solid = "" if dot.opacity == 1 else f' opacity="{dot.opacity:g}"'
    place = f'cx="{_number(dot.x)}" cy="{_number(dot.y)}" r="{_number(dot.radius)}"'
    return f'<circle class="{dot.paint}"{solid} {place}/>'


def _dashes(line: Line, drawn: float = 4.0, free: float = 3.0) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """The strokes of a dashed line, each piece beginning anew."""
    found = []
    for (x, y), (to_x, to_y) in pairwise(line.points):
        length = math.hypot(to_x - x, to_y - y)
        for start in np.arange(0, length, drawn + free).tolist():
            ends = [at / length for at in (start, min(start + drawn, length))]
            first, last = ((x + at * (to_x - x), y + at * (to_y - y)) for at in ends)
            found.append((first, last))
    return found


def _svg_words(words: Words) -> str:
    attributes = f'class="{words.paint}" x="{_number(words.x)}" y="{_number(words.y)}" font-size="{words.size}"'
    if words.align != "start":
        attributes += f' text-anchor="{words.align}"'
    if words.bold:
        attributes += ' font-weight="600"'
    if words.turn:
        attributes += f' transform="rotate({-words.turn} {_number(words.x)} {_number(words.y)})"'
    return f"<text {attributes}>{escape(words.text)}</text>"


def _svg_place(x: float, y: float, width: float, height: float) -> str:
    return f'x="{_number(x)}" y="{_number(y)}" width="{_number(width)}" height="{_number(height)}"'


def _number(value: float) -> str:
    shown = f"{value:.2f}".rstrip("0").rstrip(".")
    return shown.removeprefix("0") if shown.startswith("0.") else shown
