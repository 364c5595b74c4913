"""A picture: a matplotlib figure that becomes an SVG, light or dark as its reader's system is, or a PNG."""

from __future__ import annotations

import io
import os
import re
import textwrap
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from sparsona.analysis.extra import import_extra
from sparsona.analysis.format import cut
from sparsona.core.errors import SparsonaError
from sparsona.core.files import replace_file
from sparsona.report.palette import COLOURS, DARK, INK, MUTED, PAGE, RULE

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import LayoutEngine

WIDTH = 10.0  # inches: 960 pixels of a page
LONGEST = 20  # characters of a name at an axis
LINE = 125  # characters that fit into it
SVG = "http://www.w3.org/2000/svg"
STYLE = {
    "font.family": "sans-serif",
    "font.sans-serif": ["system-ui", "Segoe UI", "Roboto", "Helvetica Neue", "Arial", "DejaVu Sans"],
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.titlesize": 9,
    "axes.edgecolor": RULE,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": RULE,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "legend.frameon": False,
    "figure.facecolor": PAGE,
    "axes.facecolor": "none",
    "savefig.facecolor": PAGE,
    "svg.fonttype": "none",  # text stays text, in the reader's font
}


@dataclass(frozen=True)
class Inline:
    """A picture as a page contains it: an SVG and, as text of the page, what a file has above its plots."""

    svg: str
    title: str
    sentences: tuple[str, ...]


@dataclass(eq=False)
class Picture:
    """A figure under a title and sentences, and the tooltips of its parts. `height` is that of the plots, in inches."""

    figure: Figure
    title: str
    sentences: tuple[str, ...]
    height: float
    hints: dict[str, list[str]] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Title and sentences, for who cannot see the picture."""
        return f"{self.title}. {' '.join(self.sentences)}".removeprefix(". ")

    def hint(self, artist: Artist, *texts: str) -> None:
        """Add a tooltip to an artist or, with several texts, to each of its parts."""
        name = f"hint{len(self.hints)}"
        artist.set_gid(name)
        self.hints[name] = list(texts)

    def hint_bands(self, axes: Axes, texts: Sequence[str], size: int = 1, are_columns: bool = False) -> None:
        """Add a tooltip to each row (or column) of a plot whose first begins at -0.5."""
        edges = [(place * size - 0.5, (place + 1) * size - 0.5) for place in range(len(texts))]
        corners = [[(0.0, low), (1.0, low), (1.0, high), (0.0, high)] for low, high in edges]
        if are_columns:
            corners = [[(y, x) for x, y in found] for found in corners]
        where = axes.get_xaxis_transform() if are_columns else axes.get_yaxis_transform()
        collections = import_extra("matplotlib.collections", "pictures")
        bands = collections.PolyCollection(corners, facecolor=(0, 0, 0, 0), linewidth=0, transform=where)
        bands.set_in_layout(False)
        axes.add_collection(bands, autolim=False)
        self.hint(bands, *texts)

    def svg(self) -> str:
        """One element without scripts, fonts or links. Its styles hold for its own class, so a page can contain it."""
        file = io.StringIO()
        self._settle()
        with style(_printable(f"{self.label}{self.hints}")):
            self.figure.savefig(file, format="svg", metadata={"Date": None})
        root = ElementTree.fromstring(file.getvalue())
        root.remove(root.find(f"{{{SVG}}}metadata"))  # type: ignore[arg-type]
        root.attrib |= {"class": "drawing", "role": "img", "aria-label": _printable(self.label)}
        for place in list(root.iter()):
            for element, text in zip(*self._find_hinted(place), strict=True):
                title = ElementTree.Element(f"{{{SVG}}}title")
                title.text = _printable(text)
                element.insert(0, title)
        ElementTree.SubElement(root, f"{{{SVG}}}style").text = _css()
        ElementTree.register_namespace("", SVG)
        ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")
        return ElementTree.tostring(root, encoding="unicode") + "\n"

    def _settle(self) -> None:
        """Lay the figure out once and round it: the solver's last digits differ from one time to the next."""
        if (engine := self.figure.get_layout_engine()) is None:
            return
        with style():
            engine.execute(self.figure)
        # Not "none": for that placeholder, `savefig` draws everything twice.
        self.figure.set_layout_engine(None)
        for axes in self.figure.axes:
            left, bottom, width, height = (round(value, 4) for value in axes.get_position(original=True).bounds)
            axes.set_position((left, bottom, width, height))

    def _find_hinted(self, place: ElementTree.Element) -> tuple[list[ElementTree.Element], list[str]]:
        """The parts of a group that hints are of: markers (uses of one path) or paths of their own."""
        texts = self.hints.get(place.attrib.get("id", ""), [])
        if not texts:
            return [], []
        place.set("class", "hint")
        drawn = list(place.iter(f"{{{SVG}}}use"))
        drawn = drawn or [path for path in place.iter(f"{{{SVG}}}path") if "id" not in path.attrib]
        return drawn if len(texts) > 1 else drawn[:1], texts

    def inline(self) -> Inline:
        """The picture as a page contains it. Title and sentences are removed from the figure."""
        for text in list(self.figure.texts):
            text.remove()
        self.figure.set_size_inches(WIDTH, self.height)
        self.figure.set_layout_engine(_layout(0.99))
        head, mark, body = self.svg().partition(">")
        svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", head) + mark + body  # namespaces are for files of their own
        return Inline(svg, _printable(self.title), tuple(map(_printable, self.sentences)))

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the picture to `path`, a .svg or a .png, and return it."""
        path = Path(path)
        ending = check_ending(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replace_file(path) as file:
                if ending == ".svg":
                    file.write(self.svg().encode(errors="backslashreplace"))
                else:
                    self._settle()
                    with style():
                        self.figure.savefig(file, format="png", dpi=192)
        except OSError as error:
            raise SparsonaError(
                f"the picture could not be written to {path}: {error.strerror or error}",
                expected="the path of a file in a folder that can be written",
                hint="choose another path",
            ) from error
        return path


def style(salt: str = "") -> AbstractContextManager[None]:
    """The style of everything drawn inside; ids of the SVG follow from `salt`, not from the clock."""
    found: AbstractContextManager[None] = import_extra("matplotlib", "pictures").rc_context(
        {**STYLE, "svg.hashsalt": salt}
    )
    return found


def new_picture(title: str, sentences: Sequence[str], height: float) -> Picture:
    """A page of this height in inches under a title and some lines.

    Draw on it inside `style()`.
    """
    lines = [line for sentence in sentences for line in textwrap.wrap(_printable(sentence), LINE)]
    above = 0.58  # to the first line
    head = above - 0.03 + 0.2 * len(lines)
    figure = import_extra("matplotlib.figure", "pictures").Figure(figsize=(WIDTH, height + head))
    total = height + head
    figure.set_layout_engine(_layout(height / total))
    shown = cut(" ".join(_printable(title).split()), 90)
    # `parse_math` off: a name may hold dollar signs.
    figure.text(0.02, 1 - 0.36 / total, shown, size=13, weight="bold", parse_math=False)
    for place, line in enumerate(lines):
        figure.text(0.02, 1 - (above + 0.2 * place) / total, line, size=9.5, parse_math=False)
    return Picture(figure, title, tuple(sentences), height)


def _layout(share: float) -> LayoutEngine:
    """Plots that fill this share of the height, from below."""
    engine = import_extra("matplotlib.layout_engine", "pictures").ConstrainedLayoutEngine
    made: LayoutEngine = engine(rect=(0.01, 0.01, 0.98, share - 0.01), w_pad=0.05)
    return made


def heat_map() -> Colormap:
    """From nothing to the first colour by opacity alone, so that any page shines through what is little."""
    colors = import_extra("matplotlib.colors", "pictures")
    rgb = colors.to_rgb(COLOURS[0])
    return colors.ListedColormap([(0, 0, 0, 0), *((*rgb, 0.1 + 0.9 * step / 63) for step in range(64))])


def add_scale(picture: Picture, image: Any, axes: Axes, label: str, **options: Any) -> None:
    """The colours of an image and the numbers they stand for, above it."""
    bar = picture.figure.colorbar(image, ax=axes, location="top", aspect=40, fraction=0.04, pad=0.02, **options)
    bar.set_label(label, color=INK)
    bar.outline.set_visible(False)


def mark_whole(axis: Any, count: int, names: Sequence[str] = (), most: int = 25) -> None:
    """Label whole numbers from 0 to `count`, or places by their names: as many as there is room for."""
    steps = (mantissa * 10**power for power in range(9) for mantissa in (1, 2, 5))
    places = range(0, count, next(step for step in steps if count / step <= most))
    if not names:
        axis.set_ticks(places, [f"{place:,}" for place in places])
        return
    # `parse_math` off: a name may hold dollar signs.
    shown = [cut(names[place], LONGEST) for place in places]
    axis.set_ticks(places, shown, parse_math=False)
    if axis.axis_name == "x" and max(map(len, shown)) * len(places) > 100:
        axis.set_tick_params(rotation=90)


def check_ending(path: Path) -> str:
    """The ending of a picture's name, if it is one that can be written."""
    ending = path.suffix.lower()
    if ending not in (".svg", ".png"):
        raise SparsonaError(
            f"a picture cannot be written as '{path.name}'",
            expected="a name that ends in .svg or .png",
            hint=f"write {path.stem or 'picture'}.svg; a browser opens it and prints it as PDF",
        )
    return ending


def _printable(text: str) -> str:
    """What cannot be printed would make XML invalid."""
    return "".join(c if c.isprintable() or c == "\n" else " " for c in text)


def _css() -> str:
    dark = "".join(
        f".drawing [style*='{kind}: {light}']{{{kind}:{dark}!important}}"
        for light, dark in DARK.items()
        for kind in ("fill", "stroke")
    )
    outline = f"stroke:{COLOURS[1]}!important;stroke-width:1!important"
    hover = f".drawing .hint *{{pointer-events:all}}.drawing .hint path:hover{{{outline}}}"
    return f"{hover}@media (prefers-color-scheme:dark){{.drawing{{background:{DARK[PAGE]}}}{dark}}}"
