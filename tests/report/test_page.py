"""The report as a file: whole, self-contained, escaped. What a browser makes of it is tested in tests/browser."""

from __future__ import annotations

import dataclasses
import html
import json
import re
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from sparsona.analysis import glossary
from sparsona.analysis.clients import Change, ClientEffects
from sparsona.analysis.similarity import Similarity
from sparsona.analysis.view import RunView
from sparsona.core.errors import SparsonaError
from sparsona.report import plots
from sparsona.report.page import render_report, write_report
from sparsona.report.palette import COLOURS

MakeView = Callable[..., RunView]
MakeComparison = Callable[..., list[RunView]]


class Page(HTMLParser):
    """The tags and the words of a page; scripts and styles are not words."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside not in ("script", "style"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def pictures_of(page: Page) -> list[dict[str, str | None]]:
    return [attributes for _, attributes in page.tags if "picture" in (attributes.get("class") or "").split()]


def figures_of(text: str) -> dict[str, list[dict[str, object]]]:
    return json.loads(re.search(r"^const figures = (.*);$", text, re.MULTILINE)[1])


def test_many_methods_and_seeds(make_comparison: MakeComparison, tmp_path: Path) -> None:
    path = write_report(make_comparison(seeds=3), tmp_path / "deep" / "page.html", title="Digits")
    assert path == tmp_path / "deep" / "page.html"
    assert [p.name for p in path.parent.iterdir()] == ["page.html"]  # no draft stays behind
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert "<title>Digits</title>" in text
    assert "5 methods" in page.text
    assert "3 seeds" in page.text
    assert page.text.count("The tuned model of every client") == 1
    assert "Local, FedAvg, FedSpa (DST), FedSpa (RSM): The received model" in page.text
    assert "Difference to Local" in page.text
    assert " to +" in page.text
    figures = figures_of(text)
    assert {key: len(found) for key, found in figures.items()} == {
        "traffic": 1,  # these runs lack the papers' count
        "curves": 2,
        "clients": 1,
        "differences": 4,
        "confusion": 5,
        "loss": 1,
    }
    shown = [picture["data-chart"] for picture in pictures_of(page)]
    assert shown == ["partition"] * 3 + ["targets"]  # partitions: one per seed, which changes the data
    assert [attributes["hidden"] for attributes in pictures_of(page) if "hidden" in attributes] == [None, None]
    assert all(f">seed {seed}</button>" in text for seed in (1, 2, 3))


def test_one_run(make_view: MakeView, tmp_path: Path) -> None:
    text = write_report([make_view()], tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<title>FedSpa (RSM)</title>" in text
    assert "Difference to" not in text
    assert "differences" not in figures_of(text)


def test_one_seed_has_no_differences_and_says_so(make_comparison: MakeComparison) -> None:
    page = Page(render_report(make_comparison(seeds=1)))
    assert "Difference to Local" not in page.text
    assert "(one seed: no spread is known)." in page.text


def test_the_answer_comes_first(make_comparison: MakeComparison) -> None:
    """Header, sentence, accuracy against traffic, then six columns; how it was measured is folded."""
    text = render_report(make_comparison(seeds=1, lr=0.1))
    page = Page(text)
    order = [
        page.text.index(words) for words in ("digits, dirichlet:0.3", "serves clients best", "up is better", "Bold")
    ]
    assert order == sorted(order)
    (first, every) = re.findall(r"<thead>(<tr><th scope=\"col\">method.*?)</thead>", text)[:2]
    assert first.count("<th") == 1 + 6
    assert every.count("<th") > first.count("<th")
    start = text.index("<summary>How this was measured, the same for all methods")
    folded = text[start : text.index("<summary>What the columns mean")]
    assert "Each client weighted alike" in folded
    assert text.count("Each client weighted alike") == 1
    # Methods differ in the model that is tested: that is not folded.
    assert text.index("The tuned model of every client") < start
    assert text.count("The tuned model of every client") == 1


def test_what_differs_is_not_folded(make_view: MakeView) -> None:
    one = make_view("Local", options={"momentum": 0.9, "epochs": 1}, executor="workers")
    other = make_view("FedAvg", options={"momentum": 0.0, "epochs": 1}, executor="serial")
    text = render_report([one, other])
    before = text[: text.index("<summary>How this was measured")]
    differs = "What differs between the methods: momentum 0.9 (Local), 0.0 (FedAvg); executor workers (Local), serial"
    assert differs in before
    assert ">seconds</th>" not in text  # of different executors, they do not compare


def test_lines_that_coincide_are_all_seen(make_view: MakeView) -> None:
    one = make_view("FedAvg")
    other = dataclasses.replace(make_view("FedAvg-FT"), point="received", curves={"received": one.curves["received"]})
    widths = [trace.line.width for trace in plots.learning_curves([one, other]).data]
    assert widths[0] > widths[1] + 2
    assert len(set(COLOURS)) == len(COLOURS) >= 12


def test_a_run_without_confusion_traffic_or_loss(make_view: MakeView) -> None:
    bare = dataclasses.replace(make_view("Local"), confusion=None, cumulative_bytes=[], train_loss=[])
    assert set(figures_of(render_report([bare]))) == {"curves", "clients"}


def test_the_partition_is_drawn_from_sizes(make_view: MakeView) -> None:
    view = make_view()
    train = view.label_counts.sum(axis=1)
    page = Page(render_report([dataclasses.replace(view, sizes=np.stack([train, train // 9, view.count], axis=1))]))
    assert len(pictures_of(page)) == 1
    assert f"{train.sum():,} train, {(train // 9).sum():,} validation, {view.count.sum():,} test" in page.text


def test_labels_that_are_tokens(make_comparison: MakeComparison) -> None:
    views = [dataclasses.replace(view, label_counts=None, confusion=None) for view in make_comparison(seeds=2)]
    page = Page(render_report([dataclasses.replace(view, sizes=np.full((20, 3), 7)) for view in views]))
    assert [picture["data-chart"] for picture in pictures_of(page)].count("partition") >= 1
    assert "Difference to Local" in page.text
    assert "no common seed" not in page.text  # the same clients, as far as sizes tell


def test_a_picture_adds_little(make_view: MakeView) -> None:
    view = make_view(clients=100, classes=100)
    view = dataclasses.replace(view, label_counts=np.random.default_rng(0).integers(0, 90, (100, 100)))
    text = render_report([view])
    start = text.index('<div class="picture')
    assert text.index("</svg>", start) - start < 200_000


def test_an_unfinished_run(make_view: MakeView) -> None:
    view = make_view("FedAvg-FT")
    view = dataclasses.replace(view, curves={"received": view.curves["received"][:1]}, correct=view.correct * 0)
    assert figures_of(render_report([view]))["curves"][0]["data"]


def test_nothing_is_loaded_from_anywhere(make_comparison: MakeComparison) -> None:
    text = render_report(make_comparison(seeds=1))
    page = Page(text)
    for tag, attributes in page.tags:
        assert tag not in ("link", "iframe", "img", "object", "embed", "base", "form")
        assert "src" not in attributes
        assert (attributes.get("href") or "#").startswith("#")
    (policy,) = [a["content"] for t, a in page.tags if t == "meta" and a.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert "http" not in policy
    own = text.replace(_plotlyjs(), "")
    assert len(own) < len(text)  # the library is there, once
    assert "http://" not in own
    assert "https://" not in own
    assert "@import" not in own
    assert not re.search(r"url\((?!#)", own)
    assert "showSendToCloud: false" in own


def _plotlyjs() -> str:
    from plotly.offline import get_plotlyjs

    return get_plotlyjs()


def test_names_are_text_and_never_markup(make_view: MakeView) -> None:
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    views = [
        dataclasses.replace(
            make_view(seed=seed),
            title=title,
            path=evil,
            name=evil,
            protocol=evil,
            config={evil: evil, "seed": seed, "rounds": 50},
        )
        for title in (evil, "<a href='http://example.org'>b</a>%{x}")
        for seed in (1, 2)
    ]
    text = render_report(views, title=evil)
    page = Page(text)
    assert sum(tag == "script" for tag, _ in page.tags) == 2
    assert not any(tag == "img" for tag, _ in page.tags)
    assert not any("onerror" in attributes for _, attributes in page.tags)
    names = [trace["name"] for trace in figures_of(text)["curves"][0]["data"] if "name" in trace]
    assert names
    assert not any("<" in name for name in names)


def test_curves_are_means_over_seeds_in_a_band(make_view: MakeView) -> None:
    def flat(seed: int, value: float) -> RunView:
        return dataclasses.replace(make_view(seed=seed), curves={"trained": [(1, value), (2, value)]})

    band, line = plots.learning_curves([flat(1, 0.5), flat(2, 0.7)]).data
    assert list(line.y) == pytest.approx([60, 60])
    assert list(band.y) == pytest.approx([70, 70, 50, 50])
    assert list(line.x) == [1, 2]
    few = dataclasses.replace(flat(1, 0.5), cumulative_bytes=[(1, 10), (2, 20)])
    assert plots.learning_curves([few]).layout.xaxis.dtick == 1  # no ticks between two rounds
    assert plots.learning_curves([flat(1, 0.5)]).layout.xaxis.dtick is None


def test_curves_against_bytes(make_comparison: MakeComparison) -> None:
    lines = {trace.name: trace for trace in plots.learning_curves(make_comparison(seeds=1), against="bytes").data}
    assert list(lines["FedSpa (RSM)"].x[:2]) == [1_290_000, 2_580_000]
    assert list(lines["Local"].x) == [0, 50 * 2_480_000]  # sends nothing: level across the whole width
    assert lines["Local"].y[0] == lines["Local"].y[1]


def test_a_tuned_headline_is_a_star(make_view: MakeView) -> None:
    view = make_view("FedAvg-FT")
    line, star = plots.learning_curves([view]).data
    assert len(line.x) == 50
    assert star.marker.symbol == "star"
    assert list(star.y) == pytest.approx([100 * view.summary["accuracy"]["mean"]])


def test_a_tuned_headline_is_a_star_in_curves_of_metrics(make_view: MakeView) -> None:
    curves = {"f1": {"received": [(1, 0.5), (2, 0.6)], "tuned": [(2, 0.75)]}}
    view = dataclasses.replace(make_view("FedAvg-FT"), metric_curves=curves, metrics={"f1": np.full(20, 0.75)})
    line, star = plots.learning_curves([view], metric="f1").data
    assert list(line.y) == pytest.approx([50, 60])
    assert (star.marker.symbol, list(star.x), list(star.y)) == ("star", [2], [75.0])
    assert (
        "a metric is defined for, after each round. Stars are headlines measured once, after the last round "
        "(FedAvg-FT: tuned); their lines show received"
    ) in render_report([view])


def test_curves_are_of_what_a_run_stops_by(make_view: MakeView) -> None:
    view = make_view()
    view = dataclasses.replace(
        view,
        config={**view.config, "patience": 2, "patience_metric": "f1"},
        patience_name="f1",
        metric_curves={"f1": {view.point: [(1, 0.25), (2, 0.5)]}},
        metrics={"f1": np.full(20, 0.5)},
        loss_curves={view.point: [(1, 2.0), (2, 1.5)]},
    )
    figure = plots.learning_curves([view])
    assert figure.layout.yaxis.title.text == "F1, mean over clients"
    assert list(figure.data[0].y) == pytest.approx([25, 50])
    by_accuracy = plots.learning_curves([view], metric="accuracy")
    assert by_accuracy.layout.yaxis.title.text == "accuracy, mean over clients"
    assert list(by_accuracy.data[0].y) == pytest.approx([100 * value for _, value in view.curves[view.point]])
    by_loss = plots.learning_curves([view], metric="loss")
    assert (by_loss.layout.yaxis.title.text, by_loss.layout.yaxis.ticksuffix) == ("loss, mean over clients", "")
    assert list(by_loss.data[0].y) == [2.0, 1.5]
    with pytest.raises(SparsonaError, match="one of accuracy, f1, loss"):
        plots.learning_curves([view], metric="auc")
    page = render_report([view])
    assert "Mean F1 over clients after each round. Patience goes by the F1 on validation data" in page
    assert "accuracy by rounds" in page
    # Nothing is drawn of a run that was not evaluated by it yet, and another run may stop by something else.
    assert plots.learning_curves([dataclasses.replace(view, metric_curves={})]).layout.yaxis.title.text[:3] == "acc"
    other = dataclasses.replace(view, config={**view.config, "patience_metric": "loss"})
    assert plots.learning_curves([view, other]).layout.yaxis.title.text[:3] == "acc"


def test_what_patience_goes_by_is_drawn_beside_what_is_judged(make_view: MakeView) -> None:
    view = make_view()
    config = {**view.config, "patience": 2}
    view = dataclasses.replace(view, config=config, patience_name="accuracy", patience_curve=[(1, 0.5), (2, 0.75)])
    line, validation = plots.learning_curves([view]).data
    assert line.name == "FedSpa (RSM)"
    assert (validation.name, list(validation.y)) == ("FedSpa (RSM), validation", [50, 75])
    assert validation.customdata[0] == "accuracy on validation data, by which a run with patience stops, round 1"
    assert "the accuracy on validation data: the thin dotted line. Other curves" in render_report([view])
    other = dataclasses.replace(view, title="Other", method="other")
    shown = {trace.name: trace.visible for trace in plots.learning_curves([view, other]).data}
    assert shown["FedSpa (RSM), validation"] == "legendonly"  # of several methods they would be too many lines
    assert "which a click in the legend shows. Other curves" in render_report([view, other])
    by_loss = dataclasses.replace(view, loss_curves={view.point: [(1, 2.0), (2, 1.5)]})
    assert len(plots.learning_curves([by_loss], metric="loss").data) == 1


def test_every_point_that_was_evaluated_over_the_rounds_is_drawn(make_view: MakeView) -> None:
    curves = {"received": [(1, 0.5), (2, 0.6)], "consensus": [(1, 0.4), (2, 0.3)], "start": [(2, 0.1)]}
    line, consensus = plots.learning_curves([dataclasses.replace(make_view(), curves=curves)]).data
    assert list(line.y) == pytest.approx([50, 60])
    assert consensus.name == "FedSpa (RSM), consensus"
    assert list(consensus.y) == pytest.approx([40, 30])
    assert consensus.customdata[0] == "the mean of all peers' models, round 1"


def test_client_dots_say_who_they_are(make_view: MakeView) -> None:
    view = make_view()
    (box,) = plots.client_accuracies([view]).data
    assert len(box.x) == 20
    note = box.customdata[3]
    assert note.startswith(f"<b>client 3: {100 * view.correct[3] / view.count[3]:.1f}%</b>")
    assert f"{view.count[3]} test, {view.label_counts[3].sum()} training examples" in note
    assert f"class {view.label_counts[3].argmax()}: " in note


def test_client_differences_are_sorted_gains(make_view: MakeView) -> None:
    local, spa = make_view("Local"), make_view("FedSpa (RSM)")
    (bars,) = plots.client_differences([local, spa], 1).data
    assert list(bars.y) == sorted(bars.y)
    assert sum(bars.y) == pytest.approx(float((100 * (spa.correct - local.correct) / local.count).sum()))
    assert plots.client_differences([local, make_view("FedSpa (RSM)", seed=2)], 1) is None


def test_confusion_is_summed_over_seeds(make_view: MakeView) -> None:
    views = [make_view(seed=1), make_view(seed=2)]
    (heat,) = plots.confusion(views, 0).data
    total = views[0].confusion + views[1].confusion
    assert np.array_equal(np.array(heat.text), total)
    assert np.array(heat.z)[2] == pytest.approx(100 * total[2] / total[2].sum())


def test_no_runs_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SparsonaError, match="no run to report"):
        write_report([], tmp_path / "page.html")


def test_a_failed_write_leaves_the_old_report(make_view: MakeView, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(SparsonaError, match="is a folder"):
        write_report([make_view()], tmp_path / "folder")
    (tmp_path / "file").write_text("kept")
    with pytest.raises(SparsonaError, match="could not be written"):
        write_report([make_view()], tmp_path / "file" / "page.html")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize("package", ["plotly", "jinja2", "matplotlib"])
def test_a_missing_package_names_the_extra(
    package: str, make_view: MakeView, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SparsonaError, match=re.escape("pip install 'sparsona[report]'")):
        write_report([make_view()], tmp_path / "page.html")
    assert not any(tmp_path.iterdir())


def test_the_room_is_light() -> None:
    code = (
        "import sys, sparsona.report.page, sparsona.analysis.table\n"
        "print([m for m in ('torch', 'plotly', 'jinja2', 'matplotlib', 'scipy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_effects_and_similarity_have_sections(make_view: MakeView) -> None:
    plain = make_view("FedAvg")
    change = Change("test", np.arange(4), np.full(4, 0.5), np.array([0.25, 0.5, 0.75, 1]), np.arange(4))
    evil = ClientEffects("<script>x</script>", (change,))
    masks = Similarity("masks of it", "mask", (0, 1, 2), np.ones((3, 3)) - np.eye(3), np.eye(3, dtype=int))
    distances = [(1, 0.1, 0.2), (2, 0.2, 0.3)]
    curves = {"received": [(1, 0.5), (2, 0.6)], "global": [(1, 0.4), (2, 0.3)]}
    rich = dataclasses.replace(
        make_view("FedSpa (RSM)"),
        effects=evil,
        similarity=masks,
        distances=distances,
        curves=curves,
        point="received",
    )
    text = render_report([plain, rich])
    page = Page(text)
    assert {"effects", "similarity", "distances"} <= {attributes.get("id") for _, attributes in page.tags}
    assert "<script>x" not in text
    assert "masks of it" in page.text
    apart, moved = figures_of(text)["distances"][0]["data"]
    assert (apart["y"], moved["y"]) == ([0.1, 0.2], [0.2, 0.3])
    (shared,) = [line for line in figures_of(text)["curves"][0]["data"] if line.get("name", "").endswith(", global")]
    assert shared["y"] == [40, 30]
    assert not {"effects", "similarity", "distances"} & {
        attributes.get("id") for _, attributes in Page(render_report([plain])).tags
    }


def test_words_are_explained_on_the_page_and_in_the_docs_alike(make_view: MakeView) -> None:
    page = render_report([make_view()])
    assert '<small title="the personal model a client would use next">received' in page
    words = page[page.index('<section id="words">') :]
    shown = html.unescape(words)
    for word, meaning in glossary.plain_words().items():
        assert f'<th scope="row">{word}</th><td>{meaning}</td>' in shown
    docs = Path(__file__).parents[2] / "docs" / "glossary.md"
    assert docs.read_text(encoding="utf-8") == glossary.to_markdown()


def test_it_is_said_that_unfinished_runs_are_never_the_best(make_view: MakeView) -> None:
    views = [make_view("Local"), make_view("FedAvg")]
    rule = "sending nothing does not count, nor do runs that have not finished."
    assert rule not in render_report(views)
    assert rule in render_report([views[0], dataclasses.replace(views[1], unfinished_at=7)])
