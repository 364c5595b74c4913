"""`sparsona tune`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sparsona.cli.options import MATCH, OUT, check_names, check_reserved, gather_each, run_flags, with_table
from sparsona.cli.terminal import echo, print_results, print_table, print_text, write_page
from sparsona.core.errors import SparsonaError
from sparsona.runs.progress import progress_bar

if TYPE_CHECKING:
    from sparsona.experiment.tune import Tuning


@click.command(cls=with_table(run_flags))
@click.argument("methods", nargs=-1, required=True)
@click.option("--trials", type=int, default=10, show_default=True, help="Trials of every method.")
@click.option(
    "--search",
    "searches",
    multiple=True,
    metavar="KEY=A,B,...",
    help="Values of an option to try, for the methods that have it.  [learning rates, and each method's own grid]",
)
@click.option("--trial-rounds", type=int, help="Rounds of a trial.  [as many as a run has]")
@click.option(
    "--holdout-rate",
    type=float,
    default=0.2,
    show_default=True,
    help="Share of training data that trials are judged by.",
)
@click.option("--prune/--no-prune", default=True, help="Stop trials below the median of earlier ones.  [prune]")
@click.option(
    "--refit-seeds",
    type=int,
    default=1,
    show_default=True,
    help="Seeds under which the chosen options are then trained on all training data and tested; 0: none.",
)
@MATCH
@click.option("--jobs", type=int, help="Trials at a time, each in a process.  [one a core; on a GPU up to 4]")
@OUT
@click.option("--json", "as_json", is_flag=True, help="Print only the trials, as JSON, on stdout.")
def tune(
    methods: tuple[str, ...],
    searches: tuple[str, ...],
    out: Path | None,
    config: Path | None,
    pairs: tuple[str, ...],
    as_json: bool,
    **flags: Any,
) -> None:
    """Search options of METHODS on data held out of training. Every method gets the same number of trials.

    Learning rates and each method's own grid are searched, unless --search says otherwise; an option that is given is
    not searched. Test data has no part in the search. Then every method is trained with its chosen options on all
    training data, and they are written to a file that `run` and `compare` take with --config.

    \b
      sparsona tune fedavg ditto --trials 8
      sparsona tune ditto --search lr=0.01,0.1 --search prox=0.1,1 --refit-seeds 0
      sparsona compare --config runs/TUNE/tuned.toml --seeds 3
    """
    keys = ("trials", "trial_rounds", "holdout_rate", "prune", "refit_seeds", "match", "jobs")
    own = {key: flags.pop(key) for key in keys}
    options, tables = gather_each(config, pairs, flags)
    if tables:
        raise SparsonaError(
            f"tables of options for single methods in '{config}'",
            expected="options for all: `tune` chooses those of each method",
            hint="give options of one method after a colon, such as ditto:prox=0.1",
        )
    check_names(methods, options)
    search = dict(_parse_search(one) for one in searches)
    from sparsona.experiment import tune as api

    check_reserved(api.tune, options)
    with progress_bar(has_seeds=own["refit_seeds"] > 1) as bar:
        result = api.tune(methods, search=search, out=out, listen=bar.trials, observers=[bar], **own, **options)
    show_search(result, as_json)


def resume_search(folder: Path, as_json: bool, jobs: int | None) -> None:
    """Resume a search that was stopped."""
    from sparsona.experiment.tune import resume_tuning

    with progress_bar(has_seeds=True) as bar:
        result = resume_tuning(folder, jobs=jobs, listen=bar.trials, observers=[bar])
    show_search(result, as_json)


def _parse_search(text: str) -> tuple[str, list[Any]]:
    from sparsona.core.spec import parse_pairs

    key, _, values = text.partition("=")
    if not key or not values:
        raise SparsonaError(f"--search {text}", expected="an option and its values", hint="--search lr=0.01,0.1")
    return key.replace("-", "_"), [
        parse_pairs((f"{key}={value}",))[key.replace("-", "_")] for value in values.split(",")
    ]


def show_search(result: Tuning, as_json: bool) -> None:
    """What was chosen, and how it fares on test data."""
    if as_json:
        found = result.to_json()
        if result.comparison is not None:
            found["refit"] = result.comparison.figures()
        echo(json.dumps(found))
        return
    echo("Chosen on data held out of training:")
    print_table(result.table())
    for sentence in result.failures():
        print_text(f"Failed: {sentence}")
    if edges := result.at_the_edge():
        print_text(
            "At the edge of what was tried, so that --search with further values may find better:\n  "
            + "; ".join(edges)
        )
    if result.comparison is not None:
        echo("Trained again on all training data, on test data:")
        print_results(result.comparison.views())
        echo(f"report:  {write_page(result.comparison.report)}")
    echo(f"options: {result.config}")
    matched = "" if result.match == "rounds" else f" --match {result.match}"
    echo(f"`sparsona compare --config {result.config}{matched} --seeds 3` compares the methods with them.")
