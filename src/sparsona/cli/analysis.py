"""`sparsona clients`, `gates`, `similarity`, `targets` and `figure`: the papers' own analyses of runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sparsona.cli.data import check_picture
from sparsona.cli.terminal import echo, print_analysis, print_clients, print_gates, print_similarity, show_rows
from sparsona.core.errors import SparsonaError, unknown_name

if TYPE_CHECKING:
    from sparsona.analysis.view import RunView

OUT = click.option("--out", type=click.Path(path_type=Path), help="Picture to write as well: .svg or .png.")
JSON = click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")


@click.command()
@click.argument("path", metavar="RUN")
@click.option("--against", metavar="RUN|POINT", help="Another run on the same clients, or a point of RUN.  [global]")
@OUT
@JSON
def clients(path: str, against: str | None, out: Path | None, as_json: bool) -> None:
    """Show which clients gain and lose by their personal models. The table has how many are hurt, and whether
    they have little data.

    The accuracy of each client's own model is compared with that of another model: of a second run, or a shared model
    that RUN evaluated (points, such as global or start). If RUN has novel clients, they may take part in the second
    run. Each client counts the same, whatever `headline_weight` says.

    \b
      sparsona run fedspa --set 'points=["global"]' --out runs/spa
      sparsona clients spa
      sparsona clients spa --against runs/fedavg --out clients.svg
    """
    if out is not None:
        check_picture(out)
    from sparsona.analysis.clients import client_effects
    from sparsona.analysis.summary import points
    from sparsona.runs.folder import RunFolder
    from sparsona.runs.listing import find_run

    run = RunFolder.open(find_run(path))
    other = against if against is None or against in points(run) else RunFolder.open(find_run(against))
    _show(client_effects(run, other), print_clients, out, as_json)


@click.command()
@click.argument("path", metavar="RUN")
@OUT
@JSON
def gates(path: str, out: Path | None, as_json: bool) -> None:
    """Show how clients used the blocks of a gated model. RUN is a run of pfedgate; the figures are by round.

    The density used (s'), the upload share (q) beside appendix E's formula for it, and how the gates of all blocks are
    distributed, which the picture shows over the rounds (figure 7). They are recorded in the rounds that are evaluated.

    \b
      sparsona run pfedgate --density 0.3 --out runs/gates
      sparsona gates gates --out histogram.svg
    """
    if out is not None:
        check_picture(out)
    from sparsona.analysis.gates import gates_of
    from sparsona.runs.folder import RunFolder
    from sparsona.runs.listing import find_run

    _show(gates_of(RunFolder.open(find_run(path))), print_gates, out, as_json)


@click.command()
@click.argument("path", metavar="RUN")
@click.option(
    "--of", metavar="NAME", help="What is compared: phi, of pfedgate, its gates' parameters.  [scores, masks]"
)
@OUT
@JSON
def similarity(path: str, of: str | None, out: Path | None, as_json: bool) -> None:
    """Show how similar clients are in masks, gates and labels.

    Masks are compared position by position and drawn as two heatmaps; gates are clustered by Ward's method and drawn as
    a tree over the clients' classes (in the terminal: heatmaps, too). Of gates, the mean scores of the last turn are
    compared, or with --of phi their parameters, as figure 4 of pFedGate has it. The picture needs the extra
    `report`. To see distances round by round in the report, run with --set record_traits=true.

    \b
      sparsona run fedspa --partition groups:4:0.3 --set record_traits=true --out runs/spa
      sparsona similarity spa --out masks.svg
    """
    if out is not None:
        check_picture(out)
    from sparsona.experiment import train as api
    from sparsona.runs.listing import find_run

    _show(api.load(find_run(path)).similarity(of), print_similarity, out, as_json)


@click.command()
@click.argument("paths", nargs=-1, required=True, metavar="RUN...")
@click.option("--at", "targets", default="", metavar="A,B,...", help="Accuracies to reach, in percent.")
@click.option("--share", type=float, help="Also rounds to this share of a method's own final accuracy, such as 0.8.")
@click.option("--point", help="Whose learning curve is read.  [each method's headline]")
@OUT
@JSON
def targets(
    paths: tuple[str, ...], targets: str, share: float | None, point: str | None, out: Path | None, as_json: bool
) -> None:
    """Show after how many rounds a target accuracy was reached.

    RUN is a folder, or a name in ./runs. The figure is the first evaluated round whose mean accuracy over clients is at
    or above the target, as mean and standard deviation over seeds. ">1000" means that no seed reached it in 1000
    rounds. If only some did, the others count with the rounds that they ran, and the mean is a lower bound.

    \b
      sparsona compare fedavg fedspa --seeds 3 --out runs/both
      sparsona targets both --at 70,75,80 --out rounds.svg
      sparsona targets both --share 0.8
    """
    if out is not None:
        check_picture(out)
    from sparsona.analysis.targets import targets_of

    _show(targets_of(read_views(paths), _numbers(targets), point, share), print_analysis, out, as_json)


@click.command()
@click.argument("name", required=False)
@click.argument("paths", nargs=-1, metavar="RUN...")
@click.option(
    "--against",
    multiple=True,
    metavar="RUN",
    help="A run, or a comparison of one method, to compare with, where the figure does. May be given for each seed.",
)
@OUT
@JSON
def figure(name: str | None, paths: tuple[str, ...], against: tuple[str, ...], out: Path | None, as_json: bool) -> None:
    """Show a figure of the papers: its numbers, or a picture.

    RUN is a folder, or a name in ./runs. Without NAME: the list of figures. Pictures need the extra `report`.

    \b
      sparsona figure
      sparsona figure accuracy-by-density both
      sparsona figure violins runs/fedalt runs/ditto --against runs/fedavg --out violins.svg
    """
    from sparsona.analysis.figures import FIGURES, figure_of

    if name is None:
        rows = [{"figure": key, "what": row.text, "in papers": row.papers} for key, row in FIGURES.items()]
        show_rows(rows, as_json, "`sparsona figure NAME RUN...` shows one; `--out FILE.svg` draws it.")
        return
    if out is not None:
        check_picture(out)
    if name not in FIGURES:
        raise unknown_name("figure", name, FIGURES)
    if not paths:
        raise SparsonaError(f"{name} of no run", expected="one or more runs or comparisons", hint="see --help")
    found = figure_of(name, read_views(paths), read_views(against))
    _show(found, print_analysis, out, as_json)


def read_views(paths: Sequence[str]) -> list[RunView]:
    """The runs in these folders, names in ./runs, or comparisons."""
    from sparsona.experiment.run import views_in
    from sparsona.runs.listing import find_run

    return [view for path in paths for view in views_in(find_run(path))]


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise SparsonaError(f"--at {text}", expected="numbers with commas between them", hint="--at 70,75,80") from None


def _show(found: Any, show: Any, out: Path | None, as_json: bool) -> None:
    if as_json:
        echo(json.dumps(found.as_dict()))
    else:
        show(found)
    if out is not None:
        from sparsona.report.pictures import save_picture

        echo(f"picture: {save_picture(found, out)}", err=as_json)
