"""`sparsona reproduce`: the papers' tables and figures, listed and run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from sparsona.analysis.format import UNKNOWN, human_seconds
from sparsona.cli.options import JOBS, LOG
from sparsona.cli.terminal import echo, print_table, print_text, write_page
from sparsona.core.errors import SparsonaError
from sparsona.runs.progress import progress_bar

if TYPE_CHECKING:
    from sparsona.reproduce.listing import Status
    from sparsona.reproduce.runner import Reproduction


@click.command()
@click.argument("name", required=False, metavar="[PAPER[/NAME]]")
@click.option("--rows", default="*", show_default=True, help="Rows to run, with wildcards: 'cifar10/B/*'.")
@click.option("--seeds", type=int, default=1, show_default=True, help="Number of seeds, counted from 0.")
@click.option("--scale", type=float, default=1.0, show_default=True, help="Share of the rounds and clients to run.")
@JOBS
@click.option("--out", type=click.Path(path_type=Path), help="Folder of the runs.  [runs/reproduce/PAPER/NAME]")
@click.option("--set", "pairs", multiple=True, metavar="KEY=VALUE", help="An option of all rows that have it.")
@click.option("--dry-run", is_flag=True, help="Train nothing: show the costs, what is done and what is to be run.")
@click.option("--page", type=click.Path(path_type=Path), help="The page to write.  [report.html in the folder]")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
@LOG
def reproduce(
    name: str | None,
    rows: str,
    seeds: int,
    scale: float,
    jobs: Any,
    out: Path | None,
    pairs: tuple[str, ...],
    dry_run: bool,
    page: Path | None,
    as_json: bool,
    logs: tuple[str, ...],
) -> None:
    """Reproduce tables and figures of the papers. Without a name they are listed; with one, what is missing is run and
    compared with what is printed.

    Finished runs are kept and interrupted ones resumed, so that the same command continues. Costs are computed without
    training. --scale shrinks rounds and clients; the result is marked, and not compared with the paper.
    docs/reproduce.md says how to read the table.

    \b
      sparsona reproduce
      sparsona reproduce fedspa/table1 --dry-run
      sparsona reproduce fedspa/table1 --rows 'cifar10/B/*' --seeds 3
      sparsona reproduce fedspa/table1 --scale 0.1 --set executor=serial
    """
    from sparsona.reproduce.recipe import PAPERS

    name = None if name is None else name.lower()
    if name is None or name in PAPERS:
        _refuse_options_of_runs()
        _list(name, as_json)
        return
    from sparsona.core.spec import parse_pairs
    from sparsona.reproduce.recipe import load
    from sparsona.reproduce.rows import select

    select(load(name), rows, name)  # refused before torch is imported
    from sparsona.reproduce import runner

    options = parse_pairs(pairs)
    if taken := sorted({"name", "rows", "seeds", "scale", "jobs", "out", "dry_run", "observers"} & set(options)):
        raise SparsonaError(
            f"'{taken[0]}' in --set", expected="options of runs", hint=f"--{taken[0].replace('_', '-')}"
        )
    given: dict[str, Any] = {"rows": rows, "seeds": seeds, "scale": scale, "out": out, **options}
    result = runner.reproduce(name, dry_run=True, **given)
    left = [one for one in result.planned if one.state != "done"]
    if left and not dry_run:
        rounds = sum(one.config.rounds for one in left)
        with progress_bar(has_seeds=seeds > 1, total=(f"all of {name}", rounds)) as bar:
            result = runner.reproduce(name, jobs=jobs, observers=[bar, *logs], **given)
    if as_json:
        echo(json.dumps(result.as_dict()))
    else:
        show(result, dry_run)
    if page is not None or (not dry_run and result.planned and not as_json):
        echo(f"report: {write_page(lambda: result.report(page))}", err=as_json)
    if result.failures:
        for (row, seed), what in result.failures.items():
            echo(f"error: row '{row}', seed {seed}: {what}", err=True)
        sys.exit(1)


def _refuse_options_of_runs() -> None:
    """Refuse what would have no effect on the list."""
    context = click.get_current_context()
    for parameter in context.command.params:
        key = parameter.name or ""
        is_given = context.get_parameter_source(key) is ParameterSource.COMMANDLINE
        if is_given and key not in ("name", "as_json"):
            raise SparsonaError(
                f"{parameter.opts[0]} without a table or figure",
                expected="PAPER/NAME: options of runs have no effect on the list",
                hint="`sparsona reproduce` lists the names",
            )


def _list(paper: str | None, as_json: bool) -> None:
    from sparsona.reproduce.listing import HOW_ESTIMATED, missing_data, statuses
    from sparsona.reproduce.recipe import PAPERS

    found = statuses(paper)
    if as_json:
        echo(json.dumps([one.as_dict() for one in found], indent=2))
        return
    for key, title in PAPERS.items():
        if mine := [one for one in found if one.name.startswith(f"{key}/")]:
            echo(title)
            print_table([_line(one) for one in mine])
    for command in missing_data(found):
        echo(f"`{command}` downloads what is missing")
    if any(_data_of(one)[1] for one in found):
        echo("absent: no command downloads it; `sparsona reproduce NAME --dry-run` says where to get it and put it")
    echo("done: of the runs with all seeds of the paper, `--seeds N`")
    echo(
        "`sparsona reproduce NAME` runs one and shows it beside the paper; --dry-run: its costs and what is done.\n"
        + HOW_ESTIMATED
    )


def _data_of(one: Status) -> tuple[list[str], list[str]]:
    """What a command downloads, and what none does."""
    to_get = [name for name, why in one.data.items() if why.startswith("`")]
    return to_get, [name for name, why in one.data.items() if why and name not in to_get]


def _line(one: Status) -> dict[str, str]:
    to_get, absent = _data_of(one)
    data = [f"get {', '.join(to_get)}"] * bool(to_get) + [f"absent: {', '.join(absent)}"] * bool(absent)
    if one.runs:
        data.insert(0, "here" if not data else "partly here")
    return {
        "name": one.name,
        "where": one.recipe.where,
        "what": one.recipe.title,
        "rows": str(len(one.recipe.rows)),
        "data": "; ".join(data) or UNKNOWN,
        "done": f"{one.done}/{one.runs} runs" if one.runs else UNKNOWN,
        "time": UNKNOWN if not one.runs else format_estimate(one.seconds),
    }


def format_estimate(seconds: float | None) -> str:
    """A duration that is only estimated."""
    return "unknown" if seconds is None else "–" if not seconds else f"about {human_seconds(seconds)}"


def show(result: Reproduction, with_plan: bool = False) -> None:
    """Print a reproduction: what is to be run, if asked for; the table; its notes."""
    from sparsona.reproduce.listing import HOW_ESTIMATED

    recipe = result.recipe
    echo(f"{result.name}, {recipe.where}: {recipe.title}{f'  [{result.mark}]' if result.mark else ''}")
    if with_plan and result.planned:
        print_table(_plan(result))
        print_text(HOW_ESTIMATED)
    if found := result.table():
        print_table(named_once(found) if sys.stdout.isatty() else found)
        echo("agrees: within the combined spread over seeds; costs: within a unit of the last digit printed")
    else:
        echo("no figure yet")
    for note in result.notes():
        print_text(f"note: {note}")
    for what in result.differs():
        print_text(f"known to differ: {what}")
    if not result.planned:
        print_text(f"\nnothing to run: {'; '.join(dict.fromkeys(result.costs_only.values()))}")
    elif result.path.exists():
        echo(f"\nruns:   {result.path}")
    else:
        echo(f"\nruns will be in {result.path}")


def named_once(lines: list[dict[str, str]]) -> list[dict[str, str]]:
    """The lines of a table for people: a row's name stands at the first of its figures alone."""
    before = ["", *(line["row"] for line in lines)]
    return [line | {"row": line["row"] * (line["row"] != last)} for line, last in zip(lines, before, strict=False)]


def _plan(result: Reproduction) -> list[dict[str, str]]:
    from sparsona.reproduce.listing import Speeds

    speeds = Speeds.measured(Path("runs"))
    lines: list[dict[str, Any]] = []
    for one in result.planned:
        seconds = None if one.state == "done" else speeds.estimate(result.recipe, one.row, result.changes)
        share = one.share_of_full_size
        estimate = UNKNOWN if one.state == "done" else format_estimate(None if seconds is None else seconds * share)
        lines.append(
            {
                "row": one.row,
                "seed": str(one.seed),
                "state": one.state,
                "rounds": str(one.config.rounds),
                "clients": "all" if one.config.clients is None else str(one.config.clients),
                "time": estimate,
            }
        )
    return lines
