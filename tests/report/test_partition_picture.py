"""The picture of a partition: what it shows is read back from its axes, its file and its lines."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from rich.cells import cell_len

from sparsona.analysis.partition import Partition, group_clients, merge_classes
from sparsona.cli.terminal import print_partition
from sparsona.core.errors import SparsonaError
from sparsona.report.palette import DARK, INK, PAGE, TERMINAL_SCALE
from sparsona.report.pictures import draw, save_picture
from sparsona.report.pictures.text import SHADES, Terminal, partition_lines

SHAPES = [(1, 1), (10, 10), (539, 10), (40, 2028), (7, 0)]


def make_partition(clients: int, classes: int, title: str = "digits, dirichlet:0.3") -> Partition:
    """Sizes that differ, and classes that many clients lack; 0 classes stands for tokens."""
    rng = np.random.default_rng([clients, classes])
    train = 20 + (rng.pareto(1.5, clients) * 60).astype(int)
    sizes = {"train": train, "validation": train // 9, "test": train // 3}
    if not classes:
        return Partition(title, sizes)
    shares = rng.dirichlet(np.full(classes, 0.3), clients)
    return Partition(title, sizes, np.array([rng.multinomial(n, p) for n, p in zip(train, shares, strict=True)]))


def titles_in(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter() if element.tag.endswith("}title")]


def test_every_cell_has_its_count() -> None:
    partition = make_partition(12, 30)
    assert partition.counts is not None
    heat, bars, _ = draw(partition).figure.axes
    (image,) = heat.images
    assert np.array_equal(image.get_array(), partition.counts)
    opacity = image.cmap(image.norm(np.arange(partition.counts.max() + 1)))[:, 3]
    assert opacity[0] == 0
    assert opacity[1] >= 0.1  # a single example is seen
    assert (np.diff(opacity) >= 0).all()
    assert opacity[-1] == 1
    widths = [[patch.get_width() for patch in container] for container in bars.containers]
    assert [list(map(int, found)) for found in widths] == [list(size) for _, size in partition.parts]


@pytest.mark.parametrize("clients", [1, 4])
def test_few_clients_and_long_names_of_classes_leave_room_for_both(clients: int) -> None:
    partition = replace(make_partition(clients, 6), class_names=tuple(f"{'W' * 19}{one}" for one in range(6)))
    picture = draw(partition)
    picture.svg()  # would warn that constrained_layout was not applied
    picture.inline()
    assert all(axes.get_position().height > 0.1 for axes in picture.figure.axes[:2])


def test_groups_of_equal_clients_have_one_size() -> None:
    sizes = {"train": np.full(600, 50), "validation": np.full(600, 4), "test": np.full(600, 20)}
    titles = titles_in(draw(Partition("many", sizes)).svg())
    assert any(title.endswith("clients with 74 examples") for title in titles)
    assert not any("74 to 74" in title for title in titles)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_file_that_stands_alone(shape: tuple[int, int]) -> None:
    partition = make_partition(*shape)
    svg = draw(partition).svg()
    root = ElementTree.fromstring(svg)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert root.attrib["class"] == "drawing"
    assert not re.search(r"url\((?!#)|@import|<script|href=\"(?!#|data:image/png)", svg)
    assert "prefers-color-scheme:dark" in svg
    assert f"fill: {INK}']{{fill:{DARK[INK]}" in svg
    assert len(svg) < 400_000
    words = " ".join(root.itertext())
    assert f"{partition.num_clients:,} client" in words
    assert f"{partition.totals.sum():,} examples" in words
    assert f"median {np.median(partition.totals):,.10g}" in words or shape[0] == 1


def test_the_same_partition_is_the_same_file() -> None:
    assert draw(make_partition(5, 4)).svg() == draw(make_partition(5, 4)).svg()


def test_inside_a_page_there_are_no_namespaces() -> None:
    found = draw(Partition('a xmlns="b"', {"train": np.array([1, 2])})).inline()
    assert found.svg.startswith("<svg ")
    assert "http://" not in found.svg
    assert "a xmlns=&quot;b&quot;" in found.svg
    assert found.title == 'a xmlns="b"'


def test_inside_a_page_words_are_text_of_the_page() -> None:
    """They would be cut at the edge of a phone; who cannot see the picture has them in its description."""
    partition = Partition("Owners", {"train": np.array([1, 2])})
    found, file = draw(partition).inline(), draw(partition).svg()
    assert (found.title, found.sentences) == ("Owners", tuple(partition.summary()))
    for text in (found.title, *found.sentences):
        assert f">{text}</text>" in file
        assert f">{text}</text>" not in found.svg
        assert text in found.svg
    heights = [float(re.search(r'viewBox="0 0 \S+ (\S+)"', svg)[1]) for svg in (file, found.svg)]
    assert heights[0] > heights[1] == pytest.approx(4.0 * 72)


def test_many_clients_share_rows_and_many_classes_columns() -> None:
    partition = make_partition(1000, 700)
    assert partition.counts is not None
    rows = group_clients(partition.totals, 300)
    merged, group = merge_classes(partition.counts, 280)
    assert (len(rows), merged.shape[1], group) == (250, 234, 3)
    assert merged.sum() == partition.counts.sum()
    assert sorted(k for members in rows for k in members) == list(range(1000))
    means = [partition.totals[members].mean() for members in rows]
    assert means == sorted(means, reverse=True)
    picture = draw(partition)
    assert picture.figure.axes[0].images[0].get_array().shape == (250, 234)
    assert "from the largest to the smallest; a row is the mean of 4" in picture.svg()
    assert "A column is 3 neighbouring classes together" in picture.svg()


def test_tokens_have_sizes_alone() -> None:
    partition = make_partition(40, 0)
    picture = draw(partition)
    (axes,) = picture.figure.axes
    assert not axes.images
    heights = np.sum([[patch.get_height() for patch in container] for container in axes.containers], axis=0)
    assert list(heights) == sorted(partition.totals, reverse=True)
    hints = titles_in(picture.svg())
    assert len(hints) == 40
    assert hints[0].startswith(f"client {partition.totals.argmax()}: ")


def test_a_client_tells_its_numbers() -> None:
    counts = np.array([[3, 0, 1], [0, 0, 5]])
    partition = Partition("any", {"train": counts.sum(axis=1), "test": np.array([2, 9])}, counts)
    hints = titles_in(draw(partition).svg())
    assert hints == 2 * ["client 0: 4 train, 2 test\nclass 0: 75%, 2: 25%", "client 1: 5 train, 9 test\nclass 2: 100%"]
    assert partition.summary() == (
        "2 clients, 20 examples: 9 train, 11 test",
        "Per client: 6 to 14 examples (median 10), 1 to 2 classes (median 1.5)",
    )


def test_names_are_text_and_never_markup() -> None:
    evil = "</title></svg><script>alert(1)</script>\"' & $x^2$ \x00\x1b\ud800"
    svg = draw(Partition(evil, {"train": np.ones(2, dtype=int)})).svg()
    root = ElementTree.fromstring(svg.encode())
    assert not any(element.tag.endswith("script") for element in root.iter())
    assert "</title></svg><script>alert(1)</script>\"' & $x^2$" in " ".join(root.itertext())


def test_saving(tmp_path: Path) -> None:
    partition = make_partition(10, 10)
    path = save_picture(partition, tmp_path / "deep" / "Picture.SVG")
    assert path.read_text(encoding="utf-8") == draw(partition).svg()
    assert save_picture(partition, tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SparsonaError, match=r"write picture\.svg; a browser"):
        save_picture(partition, tmp_path / "picture.pdf")
    with pytest.raises(SparsonaError, match="could not be written"):
        save_picture(partition, path / "picture.svg")


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SparsonaError, match=re.escape("pip install 'sparsona[report]'")):
        save_picture(make_partition(10, 10), tmp_path / "picture.svg")
    assert not any(tmp_path.iterdir())


def test_what_is_white_on_a_dark_page_is_not_the_page() -> None:
    assert len(set(DARK)) == len(set(DARK.values()))
    assert DARK[PAGE] not in DARK


@pytest.mark.parametrize(
    ("sizes", "counts", "message"),
    [
        ({}, None, "sizes of nothing"),
        ({"train": [1, 2], "test": [1]}, None, "sizes of train: 2, test: 1"),
        ({"trian": [1, 2]}, None, "trian"),
        ({"train": [1, 2]}, np.ones((3, 2)), r"counts of shape \(3, 2\)"),
    ],
)
def test_what_does_not_fit_together(sizes: dict[str, list[int]], counts: np.ndarray | None, message: str) -> None:
    with pytest.raises(SparsonaError, match=message):
        Partition("any", {part: np.array(size) for part, size in sizes.items()}, counts)


@pytest.mark.parametrize("width", [60, 80, 132])
@pytest.mark.parametrize("coloured", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_lines_fit_into_the_terminal(shape: tuple[int, int], coloured: bool, width: int) -> None:
    lines = partition_lines(make_partition(*shape), Terminal(width, coloured))
    assert max(cell_len(line.plain) for line in lines) <= width
    assert len(lines) < 50


def test_few_classes_are_numbers() -> None:
    partition = make_partition(10, 10)
    assert partition.counts is not None
    table = [line.plain.split() for line in partition_lines(partition, Terminal(80, False))]
    start = next(i for i, words in enumerate(table) if words[:1] == ["client"])
    assert table[start] == ["client", *map(str, range(10)), "train", "valid", "test"]
    for k in range(10):
        numbers = [0 if word == "." else int(word.replace(",", "")) for word in table[start + 1 + k]]
        assert numbers == [k, *partition.counts[k], *(size[k] for _, size in partition.parts)]


@pytest.mark.parametrize("coloured", [False, True])
def test_many_classes_are_shades_or_colours(coloured: bool) -> None:
    counts = np.arange(60)[None, :].repeat(2, axis=0) ** 2
    lines = partition_lines(Partition("any", {"train": counts.sum(axis=1)}, counts), Terminal(80, coloured))
    row = next(line for line in lines if line.plain.lstrip().startswith("0  "))
    cells = row.plain[8:68]
    if coloured:
        brightness = [sum(span.style.bgcolor.triplet) for span in row.spans if span.style.bgcolor]
        assert brightness == sorted(brightness)
        assert len(brightness) == 60
        assert len(set(brightness)) == len(TERMINAL_SCALE)
    else:
        assert list(cells) == sorted(cells, key=SHADES.index)
        assert set(cells) == set(SHADES)
    assert any("training examples of a class: 0" in line.plain and line.plain.endswith(" 3,481") for line in lines)


def test_many_clients_are_a_choice_and_a_histogram() -> None:
    partition = make_partition(539, 10)
    text = [line.plain for line in partition_lines(partition, Terminal(80, False))]
    start = next(i for i, line in enumerate(text) if line.startswith("client"))
    more = next(i for i, line in enumerate(text) if line.startswith("... 515 more"))
    shown = [int(line.split()[0]) for line in text[start + 1 : more]]
    sizes = partition.totals[shown]
    assert len(set(shown)) == 24
    assert list(sizes) == sorted(sizes, reverse=True)
    assert (sizes[0], sizes[-1]) == (partition.totals.max(), partition.totals.min())
    bars = text[next(i for i, line in enumerate(text) if line.split() == ["examples", "clients"]) + 1 :]
    assert sum(int(line.split()[-1].replace(",", "")) for line in bars) == 539
    for count in (24, 25):  # a line that says "1 more" would be as long as the one
        lines = [line.plain for line in partition_lines(make_partition(count, 10), Terminal(80, False))]
        assert "..." not in "".join(lines)
        assert any(line.startswith(f"{count - 1:>6}  ") for line in lines)


def test_clients_with_names_have_their_numbers() -> None:
    """Options such as client_epochs go by number in a shell."""
    named = replace(make_partition(12, 3), client_names=[f"ward-{number}" for number in range(12)])
    lines = [line.plain for line in partition_lines(named, Terminal(80, False))]
    for number in (0, 11):
        assert sum(line.split()[:2] == [str(number), f"ward-{number}"] for line in lines) == 1


def test_into_a_pipe_there_are_no_colours(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    print_partition(make_partition(100, 100, title="a [bold]title[/bold] " + "that is long " * 20))
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert max(map(cell_len, text.splitlines())) <= 80
    assert text.startswith("a [bold]title[/bold] that")


def test_names_of_classes_are_headers_where_they_fit() -> None:
    counts = np.array([[3, 0, 5], [1, 2, 0]])
    sizes = {"train": counts.sum(axis=1)}
    short = Partition("any", sizes, counts, class_names=("sit", "walk", "run"))
    lines = [line.plain for line in partition_lines(short, Terminal(80, False))]
    assert next(line for line in lines if "client " in line and "train" in line).split() == [
        *("client", "sit", "walk", "run", "train")
    ]
    assert not any(line.startswith("classes:") for line in lines)
    long = Partition("any", sizes, counts, class_names=("a" * 40, "b" * 40, "c" * 40))
    lines = [line.plain for line in partition_lines(long, Terminal(80, False))]
    assert next(line for line in lines if "client " in line and "train" in line).split() == [
        *("client", "0", "1", "2", "train")
    ]
    assert any(line.startswith("classes: 0: aaa") for line in lines)
