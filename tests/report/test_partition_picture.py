"""The picture of a partition: what it shows is read back from its shapes, its file and its lines."""

from __future__ import annotations

import re
import sys
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from rich.cells import cell_len
from sparsona.report.pictures.drawing import LEVELS, PAINTS, XMLNS, Box, Grid, Hint, Words

from sparsona.core.errors import SparsonaError
from sparsona.report.pictures.partition import Partition, draw, fit_cells, levels_of, partition_svg, save_picture
from sparsona.report.pictures.text import SHADES, partition_lines
from sparsona.terminal import print_partition

SHAPES = [(1, 1), (10, 10), (100, 100), (539, 10), (1200, 200), (40, 2028), (7, 0)]


def make_partition(clients: int, classes: int, title: str = "digits, dirichlet:0.3") -> Partition:
    """Sizes that differ, and classes that many clients lack; 0 classes stands for tokens."""
    rng = np.random.default_rng([clients, classes])
    train = 20 + (rng.pareto(1.5, clients) * 60).astype(int)
    sizes = {"train": train, "validation": train // 9, "test": train // 3}
    if not classes:
        return Partition(title, sizes)
    shares = rng.dirichlet(np.full(classes, 0.3), clients)
    return Partition(title, sizes, np.array([rng.multinomial(n, p) for n, p in zip(train, shares, strict=True)]))


def read_grid(svg: str, shape: tuple[int, int]) -> np.ndarray:
    """The levels back from the strokes of the cells."""
    levels = np.zeros(shape, dtype=int)
    (group,) = re.findall(r'<g transform="translate.*?</g>', svg, re.DOTALL)
    for level, path in re.findall(r'<path class="h(\d+)" d="([^"]*)"', group):
        column, row = 0.0, 0
        for kind, numbers in re.findall(r"([Mmh])([^Mmh]*)", path):
            values = [float(number) for number in numbers.split()]
            if kind == "M":
                column, row = values[0], int(values[1])
            elif kind == "m":
                column += values[0]
            else:
                first, last = round(column), round(column + values[0])  # a gap is much less than half a cell
                assert not levels[row, first:last].any()
                levels[row, first:last] = int(level)
                column += values[0]
    return levels


@settings(max_examples=40, deadline=None)
@given(arrays(int, st.tuples(st.integers(1, 12), st.integers(1, 120)), elements=st.integers(0, 40)))
def test_every_cell_has_the_colour_of_its_count(counts: np.ndarray) -> None:
    svg = partition_svg(Partition("any", {"train": counts.sum(axis=1)}, counts))
    found = read_grid(svg, counts.shape)
    assert np.array_equal(found, levels_of(counts, max(counts.max(), 1)))
    assert np.array_equal(found > 0, counts > 0)  # a single example is seen


def test_more_is_darker_on_light_and_brighter_on_dark() -> None:
    def brightness(paint: str, dark: bool) -> float:
        colour = PAINTS[paint][dark]
        return float(np.dot([0.2126, 0.7152, 0.0722], [int(colour[i : i + 2], 16) for i in (1, 3, 5)]))

    names = ["none", *(f"h{level}" for level in range(1, LEVELS + 1))]
    for dark in (False, True):
        steps = np.diff([brightness(name, dark) for name in names])
        assert (steps > 2).all() if dark else (steps < -2).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_a_file_that_stands_alone(shape: tuple[int, int]) -> None:
    partition = make_partition(*shape)
    svg = partition_svg(partition)
    root = ElementTree.fromstring(svg)
    assert svg.count(XMLNS) == 1
    assert not re.search(r"https?:|url\(|@import|<script|href|<image", svg.replace(XMLNS, ""))
    assert "prefers-color-scheme:dark" in svg
    assert len(svg) < 400_000
    words = " ".join(root.itertext())
    assert f"{partition.num_clients:,} client" in words
    assert f"{partition.totals.sum():,} examples" in words
    assert f"median {np.median(partition.totals):,.10g}" in words or shape[0] == 1


@pytest.mark.parametrize("shape", SHAPES)
def test_nothing_leaves_the_page_or_covers_its_neighbour(shape: tuple[int, int]) -> None:
    drawing = draw(make_partition(*shape))
    assert drawing.height < 1000
    lines: dict[float, list[tuple[float, float]]] = {}
    for item in drawing.shapes:
        if isinstance(item, Words):
            wide = 0.53 * item.size * len(item.text)
            start = item.x - {"start": 0, "middle": wide / 2, "end": wide}[item.align]
            assert item.turn or 0 <= start < start + wide <= drawing.width + 12
            assert 0 < item.y <= drawing.height
            if not item.turn:
                lines.setdefault(round(item.y, 1), []).append((start, start + wide))
        elif isinstance(item, Box | Hint):
            assert min(item.x, item.y) >= 0
            assert item.x + item.width <= drawing.width + 1e-6
            assert item.y + item.height <= drawing.height
    for spans in lines.values():
        spans.sort()
        assert all(before[1] <= after[0] + 1 for before, after in pairwise(spans))


def test_many_clients_share_rows_and_many_classes_columns() -> None:
    partition = make_partition(1000, 700)
    assert partition.counts is not None
    cells = fit_cells(partition, partition.counts, 300, 280)
    assert cells.values.shape == (250, 234)
    held = sum(values.sum() * len(members) for values, members in zip(cells.values, cells.row_clients, strict=True))
    assert held == pytest.approx(partition.counts.sum())
    assert sorted(k for members in cells.row_clients for k in members) == list(range(1000))
    means = [partition.totals[members].mean() for members in cells.row_clients]
    assert means == sorted(means, reverse=True)
    svg = partition_svg(partition)
    assert "from the largest to the smallest; a row is the mean of 4" in svg
    assert "A column is 3 neighbouring classes together" in svg
    assert "mean of" not in partition_svg(make_partition(100, 100))


def test_bars_are_as_long_as_sizes() -> None:
    partition = Partition("two", {"train": np.array([30, 60]), "test": np.array([10, 40])}, np.array([[30], [60]]))
    boxes = [shape for shape in draw(partition).shapes if isinstance(shape, Box) and shape.height > 11]
    train, test = ([box.width for box in boxes if box.paint == part] for part in ("train", "test"))
    assert train[1] == pytest.approx(2 * train[0])
    assert test[1] == pytest.approx(4 * test[0])
    assert train[0] == pytest.approx(3 * test[0])
    assert not any(shape.text == "validation" for shape in draw(partition).shapes if isinstance(shape, Words))


def test_tokens_have_sizes_alone() -> None:
    partition = make_partition(90, 0)
    shapes = draw(partition).shapes
    assert not any(isinstance(shape, Grid) for shape in shapes)
    train = [shape for shape in shapes if isinstance(shape, Box) and shape.paint == "train" and shape.height > 11]
    assert len({round(box.x, 3) for box in train}) == len(train)
    hints = [shape.text for shape in shapes if isinstance(shape, Hint)]
    assert len(hints) == 90
    assert hints[0].startswith(f"client {partition.totals.argmax()}: ")


def test_a_client_tells_its_numbers() -> None:
    counts = np.array([[3, 0, 1], [0, 0, 5]])
    partition = Partition("any", {"train": counts.sum(axis=1), "test": np.array([2, 9])}, counts, ["cat", "dog", "owl"])
    first, second = (shape.text for shape in draw(partition).shapes if isinstance(shape, Hint))
    assert first == "client 0: 4 train, 2 test\nclass cat: 75%, owl: 25%"
    assert second == "client 1: 5 train, 9 test\nclass owl: 100%"
    assert partition.summary() == (
        "2 clients, 20 examples: 9 train, 11 test",
        "Per client: 6 to 14 examples (median 10), 1 to 2 classes (median 1.5)",
    )


def test_names_are_text_and_never_markup() -> None:
    evil = "</title></svg><script>alert(1)</script>\"' &\x00\x1b\ud800"
    counts = np.ones((2, 2), dtype=int)
    svg = partition_svg(Partition(evil, {"train": counts.sum(axis=1)}, counts, [evil, "b"]))
    root = ElementTree.fromstring(svg.encode())
    assert not any(element.tag.endswith("script") for element in root.iter())
    assert "</title></svg><script>alert(1)</script>\"' &" in " ".join(root.itertext())


def test_saving(tmp_path: Path) -> None:
    partition = make_partition(10, 10)
    path = save_picture(partition, tmp_path / "deep" / "Picture.SVG")
    assert path.read_text(encoding="utf-8") == partition_svg(partition)
    with pytest.raises(SparsonaError, match=r"write picture\.svg; a browser"):
        save_picture(partition, tmp_path / "picture.pdf")
    with pytest.raises(SparsonaError, match="could not be written"):
        save_picture(partition, path / "picture.svg")


def test_png_shows_the_same_cells(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    partition = make_partition(100, 10)
    with image.open(save_picture(partition, tmp_path / "picture.png")) as picture:
        (grid,) = [shape for shape in draw(partition).shapes if isinstance(shape, Grid)]
        for (row, column), level in np.ndenumerate(grid.levels):
            x, y = grid.x + grid.cell_width * (column + 0.5), grid.y + grid.cell_height * (row + 0.5)
            found = "#{:02x}{:02x}{:02x}".format(*picture.getpixel((round(2 * x), round(2 * y))))
            assert found == PAINTS[f"h{level}" if level else "none"][0]


def test_png_without_pillow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(SparsonaError, match=re.escape("pip install 'sparsona[images]', or save the picture as .svg")):
        save_picture(make_partition(10, 10), tmp_path / "picture.png")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("sizes", "counts", "names", "message"),
    [
        ({}, None, None, "sizes of nothing"),
        ({"train": [1, 2], "test": [1]}, None, None, "sizes of train: 2, test: 1"),
        ({"trian": [1, 2]}, None, None, "trian"),
        ({"train": [1, 2]}, np.ones((3, 2)), None, r"counts of shape \(3, 2\)"),
        ({"train": [1, 2]}, np.ones((2, 2)), ["a"], "1 class names"),
    ],
)
def test_what_does_not_fit_together(
    sizes: dict[str, list[int]], counts: np.ndarray | None, names: list[str] | None, message: str
) -> None:
    with pytest.raises(SparsonaError, match=message):
        Partition("any", {part: np.array(size) for part, size in sizes.items()}, counts, names)


@pytest.mark.parametrize("width", [60, 80, 132])
@pytest.mark.parametrize("coloured", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_lines_fit_into_the_terminal(shape: tuple[int, int], coloured: bool, width: int) -> None:
    lines = partition_lines(make_partition(*shape), width, coloured)
    assert max(cell_len(line.plain) for line in lines) <= width
    assert len(lines) < 50


def test_few_classes_are_numbers() -> None:
    partition = make_partition(10, 10)
    assert partition.counts is not None
    table = [line.plain.split() for line in partition_lines(partition, 80, coloured=False)]
    start = next(i for i, words in enumerate(table) if words[:1] == ["client"])
    assert table[start] == ["client", *map(str, range(10)), "train", "valid", "test"]
    for k in range(10):
        numbers = [0 if word == "." else int(word.replace(",", "")) for word in table[start + 1 + k]]
        assert numbers == [k, *partition.counts[k], *(size[k] for _, size in partition.parts)]


@pytest.mark.parametrize("coloured", [False, True])
def test_many_classes_are_shades_or_colours(coloured: bool) -> None:
    counts = np.arange(60)[None, :].repeat(2, axis=0) ** 2
    lines = partition_lines(Partition("any", {"train": counts.sum(axis=1)}, counts), 80, coloured)
    row = next(line for line in lines if line.plain.lstrip().startswith("0  "))
    cells = row.plain[8:68]
    if coloured:
        brightness = [sum(span.style.bgcolor.triplet) for span in row.spans if span.style.bgcolor]
        assert brightness == sorted(brightness)
        assert len(brightness) == 60
        assert len(set(brightness)) == LEVELS + 1
    else:
        assert list(cells) == sorted(cells, key=SHADES.index)
        assert set(cells) == set(SHADES)
    assert any("training examples of a class: 0" in line.plain and line.plain.endswith(" 3,481") for line in lines)


def test_many_clients_are_a_choice_and_a_histogram() -> None:
    partition = make_partition(539, 10)
    text = [line.plain for line in partition_lines(partition, 80, coloured=False)]
    start = next(i for i, line in enumerate(text) if line.startswith("client"))
    more = next(i for i, line in enumerate(text) if line.startswith("... 515 more"))
    shown = [int(line.split()[0]) for line in text[start + 1 : more]]
    sizes = partition.totals[shown]
    assert len(set(shown)) == 24
    assert list(sizes) == sorted(sizes, reverse=True)
    assert (sizes[0], sizes[-1]) == (partition.totals.max(), partition.totals.min())
    bars = text[next(i for i, line in enumerate(text) if line.split() == ["examples", "clients"]) + 1 :]
    assert sum(int(line.split()[-1].replace(",", "")) for line in bars) == 539
    assert "..." not in "".join(line.plain for line in partition_lines(make_partition(24, 10), 80, coloured=False))


def test_into_a_pipe_there_are_no_colours(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    print_partition(make_partition(100, 100, title="a [bold]title[/bold] " + "that is long " * 20))
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert max(map(cell_len, text.splitlines())) <= 80
    assert text.startswith("a [bold]title[/bold] that")
