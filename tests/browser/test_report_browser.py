"""The report in a real browser, without network."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from fake_runs import make_comparison

from sparsona.report.page import write_report

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = next((found for name in NAMES if (found := shutil.which(name))), None)

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome on the PATH"),
]


def open_page(page: Path, profile: Path, *options: str) -> tuple[str, list[str]]:
    """The page's DOM after its scripts have run, and what they wrote to the console."""
    assert BROWSER is not None
    command = [
        BROWSER,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--no-first-run",
        f"--user-data-dir={profile}",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        "--virtual-time-budget=10000",
        "--enable-logging=stderr",
        *options,
        "--dump-dom",
        page.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def drawn(dom: str, chart: str) -> str:
    """The part of the DOM that holds one chart."""
    return dom.split(f'<section id="{chart}">')[1].split("</section>")[0]


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    """A page of five methods and two seeds."""
    return write_report(make_comparison(seeds=2), tmp_path_factory.mktemp("report") / "page.html")


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (500, "dark")])
def test_every_chart_is_drawn_without_network(width: int, scheme: str, page: Path, tmp_path: Path) -> None:
    options = [f"--window-size={width},1000"] + (["--force-dark-mode"] if scheme == "dark" else [])
    dom, console = open_page(page, tmp_path / "profile", *options)
    assert console == []
    for chart in ("traffic", "curves", "clients", "differences", "confusion", "loss"):
        assert 'class="main-svg"' in drawn(dom, chart), chart
    assert drawn(dom, "partition").count('class="drawing"') == 2
    assert "main-svg" not in drawn(dom, "partition")
    assert drawn(dom, "curves").count('class="trace scatter') == 11  # five lines, five bands, one star
    assert drawn(dom, "clients").count('class="trace boxes"') == 5
    assert len(re.findall(r'<g class="points">', drawn(dom, "differences"))) == 1
    # Axis titles have the page's own text colour, which is light on dark.
    text = "rgb(28, 36, 48)" if scheme == "light" else "rgb(230, 235, 240)"
    assert f"fill: {text}" in drawn(dom, "curves")
    # So have lines that would be too dark there, and the bands around them.
    blue = "0, 114, 178" if scheme == "light" else "59, 120, 240"
    assert f"stroke: rgb({blue})" in drawn(dom, "curves")
    assert f"fill: rgb({blue}); fill-opacity: 0.15" in drawn(dom, "curves")


def test_buttons_change_the_chart(page: Path, tmp_path: Path) -> None:
    click = "<script>for (const b of document.querySelectorAll('.choices button:last-child')) b.click()</script></body>"
    text = page.read_text(encoding="utf-8")
    clicked = tmp_path / "clicked.html"
    clicked.write_text(text.replace("</body>", click), encoding="utf-8")
    dom, console = open_page(clicked, tmp_path / "profile")
    assert console == []
    assert "bytes sent, both directions" in drawn(dom, "curves")
    assert re.search(r'data-index="1" aria-pressed="true"', drawn(dom, "curves"))
    first, second = re.findall(r'<div class="picture[^>]*>', drawn(dom, "partition"))
    assert "hidden" in first
    assert "hidden" not in second


def test_a_fault_would_be_seen(tmp_path: Path) -> None:
    """The control: this way of opening a page does notice errors and refused requests."""
    page = tmp_path / "page.html"
    page.write_text("<body><script>missing()</script><script src='https://example.org/a.js'></script>")
    _, console = open_page(page, tmp_path / "profile")
    assert any("missing is not defined" in line for line in console)


def test_hostile_names_run_nothing(tmp_path: Path) -> None:
    evil = "</script><script>document.body.dataset.owned=1</script><img src=x onerror='document.body.dataset.owned=1'>"
    views = [dataclasses.replace(view, title=evil + view.title) for view in make_comparison(seeds=1)]
    page = write_report(views, tmp_path / "page.html", title=evil)
    dom, console = open_page(page, tmp_path / "profile")
    assert console == []
    assert "data-owned" not in dom
    assert 'class="main-svg"' in drawn(dom, "curves")


def test_the_first_screen_has_the_answer_and_what_is_cut_off_says_so(tmp_path: Path) -> None:
    """On a phone and on a desk, in one page of two frames: starting a browser takes seconds."""
    write_report(make_comparison(seeds=1), tmp_path / "page.html")
    measure = """<script>
    function measure(frame, line) {
      const inner = frame.contentDocument, styled = (of, pseudo) => frame.contentWindow.getComputedStyle(of, pseudo);
      line.dataset.width = frame.clientWidth;
      line.dataset.answer = Math.round(inner.querySelector(".answer").getBoundingClientRect().bottom);
      line.dataset.wide = inner.documentElement.scrollWidth;
      const cut = [...inner.querySelectorAll(".scroll")].filter(box => box.scrollWidth > box.clientWidth + 1);
      const said = cut.filter(box => styled(box, "::before").content.includes("scroll"));
      const faded = () => cut.filter(box => styled(box).maskImage !== "none").length;
      line.dataset.cut = [cut.length, said.length, faded()];
      const texts = [...inner.querySelectorAll(".picture:not([hidden]) svg text")];
      const scale = text => { const { a, b } = text.getScreenCTM(); return Math.hypot(a, b); };  // some are rotated
      line.dataset.text = Math.min(...texts.map(one => scale(one) * parseFloat(styled(one).fontSize))).toFixed(1);
      cut.forEach(box => { box.scrollLeft = box.scrollWidth; box.dispatchEvent(new Event("scroll")); });
      line.dataset.end = faded();
    }
    for (const width of [400, 1280]) {
      const frame = document.createElement("iframe"), line = document.createElement("p");
      frame.style.cssText = `width:${width}px;height:800px;border:0`;
      frame.onload = () => {
        frame.contentDocument.querySelectorAll("details").forEach(one => { one.open = true; });
        setTimeout(measure, 2000, frame, line);
      };
      frame.src = "page.html";
      document.body.append(frame, line);
    }</script>"""
    (tmp_path / "outer.html").write_text(f"<body>{measure}</body>")
    dom, console = open_page(tmp_path / "outer.html", tmp_path / "profile", "--allow-file-access-from-files")
    assert console == []
    names = ("width", "answer", "wide", "cut", "text", "end")
    found = {line[0]: line[1:] for line in re.findall(" ".join(rf'data-{name}="([\d.,]+)"' for name in names), dom)}
    assert found.keys() == {"400", "1280"}
    for width, (answer, wide, _, text, end) in found.items():
        assert int(answer) < 500
        assert int(wide) <= int(width)
        assert float(text) > 9  # pixels of the smallest letters in pictures
        assert end == "0"  # at its end nothing fades out
    cut, said, faded = map(int, found["400"][2].split(","))
    assert cut == said == faded >= 4  # tables and pictures say that they are cut off, and fade out
    cut, said, faded = map(int, found["1280"][2].split(","))
    assert cut == said == faded <= 1  # the table of all columns
