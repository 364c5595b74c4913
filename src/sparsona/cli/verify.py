"""`sparsona verify`: whether the files of runs are complete, unchanged, and belong together."""

from __future__ import annotations

import json
import sys

import click

from sparsona.cli.terminal import echo, print_table, print_text


@click.command()
@click.argument("paths", nargs=-1, required=True, metavar="RUN...")
@click.option("--all", "every", is_flag=True, help="List every file, also those that are right.")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def verify(paths: tuple[str, ...], every: bool, as_json: bool) -> None:
    """Check that the files of runs are complete and unchanged. Runs, comparisons and searches can be checked.

    RUN is a folder, or a name in ./runs. Everything is read: options, facts, checkpoint, records round by round,
    summary, models. Each file is right, wrong (missing, damaged, edited, or of another run) or unknown (there is no
    checksum to compare it with, as in runs of older versions). Files that are not right are listed, with what to do;
    --all lists every file. The exit code is 1 if anything is wrong.

    \b
      sparsona verify runs/spa
      sparsona verify runs/spa --all
      sparsona verify runs/* --json
    """
    from sparsona.runs.listing import find_run
    from sparsona.runs.verify import verify as check

    found = [check(find_run(path)) for path in paths]
    if as_json:
        echo(json.dumps([one.as_dict() for one in found], indent=2))
    else:
        for one in found:
            print_text(f"{one.path}: {one.sentence}")
            for finding in one.findings:
                if finding.state == "wrong":
                    what = finding.what.replace(f"'{one.path / finding.file}'", "it")
                    print_text(f"wrong: {finding.file}: {what}", "  ", "      ")
                    if finding.hint:
                        print_text(f"hint: {finding.hint}", "    ", "      ")
                elif finding.state == "unknown" and not every:
                    print_text(f"unknown: {finding.file}: {finding.what}", "  ", "      ")
            if every:
                print_table(one.rows())
    if not all(one.is_right for one in found):
        sys.exit(1)
