"""What the documents say works: the code in README, the examples, and docs/add-a-method.md to the letter."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest
import torch
from PIL import Image

import sparsona as sp
from sparsona.data.readers.npz import read_new
from sparsona.testing import PROPERTIES

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    *sorted(ROOT.glob("docs/**/*.md")),
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    ROOT / "CHANGELOG.md",
]


def run(command: list[str], folder: Path, **environment: str) -> str:
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.long
@pytest.mark.parametrize(
    "example",
    [
        # Six runs: half a minute.
        pytest.param(path, id=path.name, marks=[pytest.mark.slow] * (path.name == "compare_methods.py"))
        for path in EXAMPLES
    ],
)
def test_example(example, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(example), run_name="__main__")
    assert capsys.readouterr().out.strip()


@pytest.mark.long
def test_readme_python(tmp_path, monkeypatch):
    """The Python in README runs as it stands, one block after another."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks
    (tmp_path / "readme.py").write_text("\n".join(blocks))
    monkeypatch.chdir(tmp_path)
    runpy.run_path("readme.py", run_name="__main__")


def test_observers_python(tmp_path, monkeypatch, capsys):
    """So does the example in docs/observers.md."""
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "observers.md").read_text(), re.DOTALL)
    (tmp_path / "observers.py").write_text(block)
    monkeypatch.chdir(tmp_path)
    runpy.run_path("observers.py", run_name="__main__")
    assert len(json.loads(capsys.readouterr().out)) == 3


def test_a_table_as_data(tmp_path, monkeypatch, capsys):
    """docs/data.md: a CSV file becomes an npz file, and inputs are standardised by the training examples."""
    page = (ROOT / "docs" / "data.md").read_text()
    to_npz, scaling = (
        next(block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if word in block)
        for word in ("visits.csv", "clamp_min")
    )
    monkeypatch.chdir(tmp_path)
    hospitals = ["south", "north", "north", "north", ""]
    lines = [f"{20 + k},{120 + k % 7},{k % 3},{k % 2},{hospitals[k % 5]}" for k in range(60)]
    Path("visits.csv").write_text("\n".join(["age,pressure,dose,diagnosis,hospital", *lines]))
    exec(to_npz, found := {"sp": sp, "torch": torch})
    found |= dict(zip(("x", "y", "owners"), read_new(Path("visits.npz")), strict=True))
    found.pop("torch", None)  # it imports that itself
    exec(scaling, found)
    assert found["federation"].client_names == ("north", "south")
    said = capsys.readouterr().err
    assert "12 of 60 examples have no owner" in said
    assert "1 of 3 inputs are large" in said
    seen = torch.cat([client.examples("train").inputs for client in found["federation"]])
    assert seen.mean(0).abs().max() < 1e-5
    assert (seen.std(0) - 1).abs().max() < 1e-5


def test_shell_commands_exist():
    """Every `sparsona ...` on a line of its own in a page, and every `make ...` in README, has these options."""
    text = (ROOT / "README.md").read_text()
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^make (\w+)", text, re.MULTILINE))
    assert {"run", "test"} <= targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    from sparsona.cli.app import cli

    everything = "\n".join(page.read_text() for page in PAGES)
    for line in re.findall(r"^(?:\.venv/bin/)?sparsona (.+)$", everything, re.MULTILINE):
        words = line.split("#")[0].split()
        command = cli.commands[words.pop(0)]
        if words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words[0]]
        known = {option for parameter in command.get_params(click.Context(command)) for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known, line


def test_the_map_of_the_source_lists_rooms_as_the_import_rules_order_them():
    text = (ROOT / "docs" / "one-round.md").read_text()
    listed = re.findall(r"^\| ([a-z]+)/ \|", text[text.index("## Rooms") :], re.MULTILINE)
    rules = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(rule["layers"] for rule in rules if rule["type"] == "layers")
    place = {room: -index for index, layer in enumerate(layers) for room in layer.split(" | ")}
    assert sorted(listed) == sorted(place)
    assert [place[room] for room in listed] == sorted(place.values())


def test_readme_names_every_method():
    from sparsona import methods

    text = (ROOT / "README.md").read_text()
    table = text[text.index("| family | methods |") : text.index("`sparsona methods` says")]
    assert sorted(re.findall(r"`([\w-]+)`", table)) == sorted(methods.METHODS)


@pytest.mark.slow
def test_benchmarks_run(tmp_path):
    """That they run, not what they measure."""
    words = ["--repeats", "1", "--epochs", "1", "--out", "found.json"]
    run([sys.executable, str(ROOT / "benchmarks" / "overhead.py"), *words], tmp_path)
    assert "turn_over_bare" in (tmp_path / "found.json").read_text()
    run(
        [sys.executable, str(ROOT / "benchmarks" / "scale.py"), "--tiny", "--only", "round", "--out", "scale.json"],
        tmp_path,
    )
    found = json.loads((tmp_path / "scale.json").read_text())
    (row,) = found["results"]["round"]
    assert row["peak_mib_here"] > 0
    found["results"] |= {"memory": [row], "start": [row]}
    (tmp_path / "scale.json").write_text(json.dumps(found))
    page = tmp_path / "performance.md"
    shutil.copy(ROOT / "docs" / "performance.md", page)
    run([sys.executable, str(ROOT / "benchmarks" / "draw.py"), "scale.json", page.name], tmp_path)
    assert "Peak memory, MiB" in (tmp_path / "performance-scale.svg").read_text()


@pytest.mark.slow
def test_the_tables_of_partial_personalisation_run(tmp_path):
    """All of it on little, and again: the second time nothing is left to do."""
    words = ["digits", "--clients", "4", "--seeds", "1", "--rounds", "1", "1", "--out", "partial"]
    first, second = (run([sys.executable, str(ROOT / "benchmarks" / "partial.py"), *words], tmp_path) for _ in range(2))
    assert first == second
    tables = json.loads((tmp_path / "partial" / "tables.json").read_text())["tables"]
    assert [title.partition(":")[0] for title in tables] == ["3", "4", "10", "11", "12"]
    assert [len(rows) for rows in tables.values()] == [7, 9, 6, 9, 6]


@pytest.mark.slow
def test_the_comparison_runs(tmp_path):
    """Ours and the bare way on a little of the work: the same steps, a ratio, a table and a picture."""
    words = ["--tiny", "--repeats", "1", "--rounds", "1", "--only", "naive", "--work", "lenet5", "--out", "found.json"]
    told = run([sys.executable, str(ROOT / "benchmarks" / "compare.py"), *words], tmp_path)
    assert "deepcopy + DataLoader" in told
    rows = json.loads((tmp_path / "found.json").read_text())["results"]["lenet5"]["rows"]
    assert {row["contender"] for row in rows} == {"sparsona", "naive"}
    assert {row["steps"] for row in rows} == {10}
    assert all(row["loss_after"] < row["loss_before"] for row in rows)
    page = tmp_path / "performance.md"
    shutil.copy(ROOT / "docs" / "performance.md", page)
    for _ in range(2):  # the second time over what the first wrote
        run([sys.executable, str(ROOT / "benchmarks" / "draw.py"), "found.json", page.name], tmp_path)
        assert page.read_text().count("\n| LeNet5") == len(rows)
    assert "deepcopy + DataLoader" in (tmp_path / "performance-cpu.svg").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith("http"):
            found = page.parent / target
            assert found.is_dir() or found.stat().st_size > 0, target


@pytest.mark.long
def test_add_a_method_to_the_letter(tmp_path):
    """Do what the page says to a copy of the project, then run the battery for the new method there."""
    for name in ("src", "tests", "pyproject.toml"):
        source, target = ROOT / name, tmp_path / name
        if source.is_dir():
            shutil.copytree(source, target)  # with what was compiled
        else:
            shutil.copy(source, target)
    page = (ROOT / "docs" / "add-a-method.md").read_text()
    done = []
    for head, code in re.findall(r"```python (\w+=[^\n]+)\n(.*?)```", page, re.DOTALL):
        if head.startswith("file="):
            (tmp_path / head.removeprefix("file=")).write_text(code)
        else:
            place, before = re.fullmatch(r"insert=(\S+) before=(.+)", head).groups()
            path = tmp_path / place
            lines = path.read_text().splitlines(keepends=True)
            at = next(i for i, line in enumerate(lines) if line.strip().startswith(before) or _opens(lines, i, before))
            path.write_text("".join(lines[:at]) + code + "".join(lines[at:]))
        done.append(head)
    assert len(done) == 3
    page = (ROOT / "docs" / "add-a-method.md").read_text()
    command = next(line for line in page.splitlines() if line.startswith(".venv/bin/python -m pytest"))
    words = [*shlex.split(command)[3:], "-p", "no:xdist"]
    found = run([sys.executable, "-m", "pytest", *words, "-vv"], tmp_path, PYTHONPATH=str(tmp_path / "src"))
    passed = set(re.findall(r"test_battery\[fedlc-(\w+)\] PASSED", found))
    assert passed == set(PROPERTIES), found
    assert "test_without_margins_it_is_fedavg PASSED" in found
    told = run([sys.executable, "-m", "sparsona", "methods", "fedlc"], tmp_path, PYTHONPATH=str(tmp_path / "src"))
    assert "margin = 1.0" in told


def _opens(lines: list[str], at: int, before: str) -> bool:
    """Whether a call that is written over several lines starts here: `MethodCard(` and its first argument below."""
    return "".join(line.strip() for line in lines[at : at + 2]).startswith(before)


def test_the_picture_of_the_report_is_current() -> None:
    spec = importlib.util.spec_from_file_location("report_picture", ROOT / "docs" / "report_picture.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    kept = Image.open(made.PICTURE).text.get("sources")
    assert kept == made.digest(), "the page has changed since: `make picture` makes docs/report.png anew"
