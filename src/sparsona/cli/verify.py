"""`sparsona verify`: whether the files of runs are those that were written, and belong together."""

from __future__ import annotations

import json
import sys

import click

from sparsona.cli.terminal import echo, print_table


@click.command()
@click.argument("paths", nargs=-1, required=True, metavar="RUN...")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def verify(paths: tuple[str, ...], as_json: bool) -> None:
    """Check that the files of RUN... (folders, names in ./runs, comparisons, or searches) belong together.

    Everything is read: options, facts, checkpoint, records round by round, summary, models. Each file is right, wrong
    (it is missing, damaged, edited, or of another run) or unknown (nothing vouches for it, as in runs of older
    versions). The exit code is 1 if anything is wrong.

    \b
      sparsona verify runs/spa
      sparsona verify runs/* --json
    """
    from sparsona.runs.listing import find_run
    from sparsona.runs.verify import verify as check

    found = [check(find_run(path)) for path in paths]
    if as_json:
        echo(json.dumps([one.as_dict() for one in found], indent=2))
    else:
        for one in found:
            echo(f"{one.path}: {'right' if one.is_right else 'wrong'}")
            print_table(one.rows())
    if not all(one.is_right for one in found):
        sys.exit(1)
