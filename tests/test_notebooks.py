"""The notebooks of the docs: what is stored in them can be shown to anybody, and their code runs."""

from __future__ import annotations

import getpass
import importlib.util
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parent.parent / "docs"
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
PLACES = re.compile(r"/(?:home|root|tmp|work|usr|opt|Users|var)/|[A-Z]:\\\\|https?://(?:localhost|127\.)|site-packages")


def code_of(path: Path) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def outputs_of(path: Path) -> list[dict[str, Any]]:
    return [output for cell in code_of(path) for output in cell["outputs"]]


def kinds(path: Path) -> list[set[str]]:
    """Of each cell, what kinds of things it shows."""
    return [{kind for one in cell["outputs"] for kind in one.get("data", {"text": ""})} for cell in code_of(path)]


def test_there_are_two_and_they_are_small() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["my-data", "papers"]
    assert sum(path.stat().st_size for path in NOTEBOOKS) < 1_500_000


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_was_run_in_order_and_without_an_error(path: Path) -> None:
    assert [cell["execution_count"] for cell in code_of(path)] == list(range(1, len(code_of(path)) + 1))
    shown = outputs_of(path)
    assert {one["output_type"] for one in shown} <= {"execute_result", "display_data", "stream"}
    assert not [one for one in shown if one.get("name") == "stderr"]
    found = set().union(*kinds(path))
    assert {"text/html", "image/svg+xml", "application/vnd.plotly.v1+json"} <= found
    assert max(len("".join(one.get("data", {}).get("text/plain", ""))) for one in shown) < 800  # no page of data
    assert "<script" not in json.dumps([one.get("data", {}).get("text/html", "") for one in shown])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_nothing_stored_tells_of_the_machine(path: Path) -> None:
    text = path.read_text()
    assert not PLACES.findall(text)
    assert str(DOCS.parent) not in text
    assert getpass.getuser() in ("root", "runner") or getpass.getuser() not in text


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the machinery of notebooks
def test_it_runs_and_shows_what_is_stored(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the command that makes them; numbers may differ on another processor, kinds of outputs do not."""
    spec = importlib.util.spec_from_file_location("run_notebooks", DOCS / "run_notebooks.py")
    assert spec is not None
    assert spec.loader is not None
    command = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(command)
    monkeypatch.setenv("PLOTLY_RENDERER", command.RENDERER)
    copy = Path(shutil.copy(path, tmp_path))
    command.run(copy)
    assert kinds(copy) == kinds(path)
