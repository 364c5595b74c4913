"""`sparsona replay`: a run on several machines, again in the simulator."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from sparsona.cli.options import gather
from sparsona.cli.terminal import echo
from sparsona.core.errors import SparsonaError
from sparsona.runs.progress import progress_bar


@click.command()
@click.argument("path", metavar="RUN")
@click.option(
    "--data",
    "sources",
    required=True,
    multiple=True,
    help="A data set, of which each client takes its share; or one arrays:FILE.npz or folder:DIR for each client.",
)
@click.option("--data-dir", help="Folder that is searched first for the data's files.")
@click.option("--set", "pairs", multiple=True, metavar="KEY=VALUE", help="How data is split, as clients were given it.")
@click.option("--out", type=click.Path(path_type=Path), help="The replay's folder.  [a new one in ./runs]")
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as JSON.")
def replay(
    path: str,
    sources: tuple[str, ...],
    data_dir: str | None,
    pairs: tuple[str, ...],
    out: Path | None,
    as_json: bool,
) -> None:
    """Repeat a run of several machines in the simulator. The two are compared.

    Clients that were not heard in a round, were refused, or had lost their state are treated in the same way in the
    replay. The last line says whether turns, evaluations and shared model are identical, or where they differ first;
    then the exit code is 1. Several --data are those of the clients, in the order of the roster.

    \b
      sparsona replay runs/x --data digits
      sparsona replay runs/x --data arrays:a.npz --data arrays:b.npz --data arrays:c.npz
    """
    from sparsona.experiment.replay import replay as play_again
    from sparsona.runs.listing import find_run

    options: dict[str, Any] = gather(None, pairs, {}, None)
    for key in ("data", "data_dir", "out", "observers", "path"):
        if key in options:
            raise SparsonaError(
                f"'{key}' is no option of how data is split",
                expected="options such as partition",
                hint="--data, --data-dir and --out are given on the command line itself",
            )
    with progress_bar() as bar:
        found = play_again(find_run(path), sources, out=out, data_dir=data_dir, observers=[bar], **options)
    if as_json:
        same = {"same": found.is_same, "same_data": found.same_data, "difference": found.difference}
        echo(json.dumps({**same, "run": str(found.of), "replay": str(found.run.path)}))
    else:
        echo(f"replay: {found.run.path}\n{found}")
    sys.exit(0 if found.is_same else 1)
