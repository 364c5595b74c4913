"""docs/results/coverage.md: whole, and its commands are real."""

from __future__ import annotations

import re
import shlex
from collections import defaultdict
from fnmatch import fnmatchcase
from pathlib import Path

import click
import pytest

from sparsona.cli.app import cli
from sparsona.experiment.build import make_config
from sparsona.reproduce.recipe import PAPERS, load, names
from sparsona.runs.request import parse_method

PAGE = Path(__file__).parents[2] / "docs" / "results" / "coverage.md"
FEWEST = {"FedSpa": 32, "DisPFL": 28, "pFedGate": 36, "FedSim and FedAlt": 30}  # items of an earlier reading


def lines() -> dict[str, list[list[str]]]:
    """The cells of each line of each section."""
    found: dict[str, list[list[str]]] = defaultdict(list)
    section = ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        elif line.startswith("| ") and not line.startswith("| item"):
            found[section].append([cell.strip() for cell in line.strip("|").split(" | ")])
    return found


def commands() -> list[str]:
    return re.findall(r"`sparsona ([^`]+)`", PAGE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("section", FEWEST)
def test_every_item_has_a_command_and_a_status(section: str) -> None:
    items = lines()[section]
    assert len(items) >= FEWEST[section]
    for item, where, command, status, _ in items:
        assert item
        assert where
        assert "`sparsona " in command, item
        assert status in ("yes", "data"), item


@pytest.mark.parametrize("section", FEWEST)
def test_what_needs_absent_data_is_not_called_done(section: str) -> None:
    """Where data that cannot be had is named, or a stand-in, the status is data."""
    for item, _, _, status, differs in lines()[section]:
        words = re.sub(r"\]\([^)]*\)", "]", differs)  # without the addresses of links
        assert status == "data" or not re.search(r"cannot be had|stand-ins?\b(?! shows)", words), item


def test_items_of_an_earlier_reading_are_there() -> None:
    assert any(item.startswith("At least two random seeds") for item, *_ in lines()["DisPFL"])
    assert any("Sub-FedAvg's FLOPs" in item for item, *_ in lines()["FedSpa"])


@pytest.mark.parametrize("paper", PAPERS)
def test_every_recipe_is_on_the_page(paper: str) -> None:
    told = {words[1] for command in commands() if (words := shlex.split(command))[0] == "reproduce"}
    assert {name for name in names() if name.startswith(f"{paper}/")} <= told


@pytest.mark.parametrize("command", sorted({one for one in commands() if one.startswith("reproduce ")}))
def test_recipes_have_these_rows(command: str) -> None:
    _, name, *options = shlex.split(command)
    found = load(name)
    if "--rows" in options:
        pattern = options[options.index("--rows") + 1]
        assert any(fnmatchcase(row, pattern) for row in found.rows)


@pytest.mark.parametrize(
    "command", sorted({one for one in commands() if one.startswith(("run ", "compare ", "cost ", "data ", "models "))})
)
def test_commands_have_these_options(command: str) -> None:
    name, *words = shlex.split(command)
    found = cli.commands[name]
    if isinstance(found, click.Group) and words[0] in found.commands:
        found = found.commands[words.pop(0)]
    known = {option for parameter in found.get_params(click.Context(found)) for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= known
    if name == "run":
        method, own = parse_method(words.pop(0))
        options = dict(own)
        while words:
            flag = words.pop(0)
            if flag == "--set":
                key, _, value = words.pop(0).partition("=")
                options[key] = _value(value)
            elif flag != "--profile":
                options[flag.removeprefix("--").replace("-", "_")] = words.pop(0)
        starts_warm = options.pop("warm_start", None) is not None  # from a run that is not here
        config = make_config(method, options)
        assert not config.guard or starts_warm, "there is no model that a client could keep instead"


def _value(text: str) -> object:
    if text.startswith("["):
        return tuple(part if part.isalpha() else float(part) for part in text.strip("[]").replace('"', "").split(","))
    return {"true": True, "false": False}.get(text, text)
