"""`sparsona table`: results for a paper or another program."""

from __future__ import annotations

from pathlib import Path

import click

from sparsona.cli.analysis import read_views
from sparsona.cli.terminal import echo
from sparsona.core.errors import SparsonaError


@click.command()
@click.argument("paths", nargs=-1, required=True, metavar="RUN...")
@click.option(
    "--format",
    "kind",
    type=click.Choice(["markdown", "latex", "csv"]),
    default="markdown",
    show_default=True,
    help="markdown and latex: the table as it is printed; csv: numbers, unrounded.",
)
@click.option(
    "--per",
    type=click.Choice(["method", "client", "round"]),
    default="method",
    show_default=True,
    help="What a line of csv is about.",
)
@click.option("--all", "every", is_flag=True, help="All columns instead of the first ones (csv always has all).")
@click.option("--caption", default="", help="latex: put the tabular into a table with this caption.")
@click.option("--label", default="", help=r"latex: put the tabular into a table with this label, for \ref.")
@click.option("--out", type=click.Path(path_type=Path), help="Write to this file instead of stdout.")
def table(paths: tuple[str, ...], kind: str, per: str, every: bool, caption: str, label: str, out: Path | None) -> None:
    """Print results as a table for a paper or another program.

    RUN is a folder, or a name in ./runs.

    \b
      sparsona table runs/compare-1 --format latex --caption 'Digits, 20 clients' --label tab:digits
      sparsona table runs/compare-1 --format csv --per client --out clients.csv
    """
    if kind != "csv" and per != "method":
        raise SparsonaError(
            f"--per {per} of {kind}", expected="--format csv", hint="tables have a line for each method"
        )
    for name, text in (("--caption", caption), ("--label", label)):
        if text and kind != "latex":
            raise SparsonaError(f"{name} of {kind}", expected="--format latex", hint="leave it out")
    from sparsona.analysis.numbers import to_csv, to_latex, to_markdown
    from sparsona.analysis.table import notes, round_notes
    from sparsona.core.files import replace_file
    from sparsona.core.printable import warn
    from sparsona.experiment.run import missing_in
    from sparsona.runs.listing import find_run

    views, missing = read_views(paths), [one for path in paths for one in missing_in(find_run(path))]
    for sentence in notes(views, missing) if kind == "csv" else round_notes(views):  # the others are in the text
        warn(sentence)
    if kind == "csv":
        text = to_csv(views, per)  # type: ignore[arg-type]  # click has checked it
    else:
        text = (
            to_latex(views, every, caption, label, missing) if kind == "latex" else to_markdown(views, every, missing)
        )
    if out is None:
        echo(text, nl=False)
        return
    try:
        with replace_file(out) as file:
            file.write(text.encode(errors="backslashreplace"))
    except OSError as error:
        raise SparsonaError(
            f"'{out}' could not be written: {error.strerror or error}",
            expected="a file in a folder that can be written",
        ) from error
    echo(str(out))
