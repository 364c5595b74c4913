"""The papers' figures about several runs, by name. A figure is one row here: commands, page and recipes read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sparsona.analysis.changes import ClientBands, ClientChanges, client_bands, client_changes
from sparsona.analysis.charts import (
    LineChart,
    accuracy_by_bytes,
    accuracy_by_capacity,
    accuracy_by_density,
    accuracy_by_rounds,
    gain_by_personal,
    gap_by_density,
    targets_chart,
)
from sparsona.analysis.targets import default_targets, targets_of
from sparsona.analysis.view import RunView
from sparsona.core.errors import SparsonaError, unknown_name

Drawn = LineChart | ClientBands | ClientChanges


@dataclass(frozen=True)
class Figure:
    """A row of `FIGURES`.

    Args:
        text: what it shows.
        papers: the figures of papers that it is.
        needs: what runs must have for it, for the message where they have not.
        make: makes it of runs and of those they are compared with; None: the runs do not have what it needs.
        hint: how to get such runs.
        compares: whether it takes runs to compare with.
    """

    text: str
    papers: str
    needs: str
    make: Callable[[Sequence[RunView], Sequence[RunView]], Drawn | None]
    hint: str = ""
    compares: bool = False


def figure_of(name: str, views: Sequence[RunView], against: Sequence[RunView] = ()) -> Drawn:
    """A figure of runs, to be printed or drawn.

    Args:
        name: a row of `FIGURES`.
        views: the runs; seeds of one method belong together.
        against: runs to compare with, for figures that do.

    Returns:
        An analysis with `rows()`, `sentences()` and `as_dict()`; `sparsona.save_picture` draws it.

    Raises:
        SparsonaError: the runs do not have what the figure needs.
    """
    if name not in FIGURES:
        raise unknown_name("figure", name, FIGURES)
    row = FIGURES[name]
    if any("error" in view.summary for view in views):
        raise SparsonaError(f"{name} of runs that predict numbers", expected="runs on classes")
    if against and not row.compares:
        raise SparsonaError(f"{name} compares runs with no other", expected="no --against", hint="leave it out")
    views = [view for view in views if view.count.any()]  # of the others nothing was evaluated
    if not views or (found := row.make(views, against)) is None:
        raise SparsonaError(f"these runs have nothing to draw as {name}", expected=row.needs, hint=row.hint)
    return found


def _targets(views: Sequence[RunView]) -> LineChart | None:
    chosen = default_targets(views)
    return targets_chart(targets_of(views, chosen)) if chosen else None


OVER = "a shared model that every run evaluated, runs to compare with, or several methods on the same clients"
OVER_HINT = "run with --set 'points=[\"global\"]' (and train_accuracy=true), or give --against RUN"
FIGURES: dict[str, Figure] = {
    "accuracy-by-rounds": Figure(
        "learning curves, with bands over seeds",
        "FedSpa 3-8, DisPFL 3 and 6, pFedGate 6",
        "evaluated rounds",
        lambda views, _: accuracy_by_rounds(views),
    ),
    "accuracy-by-bytes": Figure(
        "accuracy at the end against bytes as encoded, over the learning curve",
        "FedSpa 1",
        "methods that send something",
        lambda views, _: accuracy_by_bytes(views),
    ),
    "accuracy-by-paper-bytes": Figure(
        "the same, with bytes as the papers count them",
        "FedSpa 1",
        "methods that send something",
        lambda views, _: accuracy_by_bytes(views, "paper"),
    ),
    "rounds-to-target": Figure(
        "rounds until targets are reached (`sparsona targets` has the table)",
        "FedSpa table 2, DisPFL tables 5-7",
        "a multiple of 5% that every seed of a method reached",
        lambda views, _: _targets(views),
    ),
    "accuracy-by-capacity": Figure(
        "accuracy of clients of each capacity",
        "DisPFL 4",
        "clients of several capacities",
        lambda views, _: accuracy_by_capacity(views),
        "run with --set 'capacities=[0.2, 0.6, 1.0]'",
    ),
    "accuracy-by-density": Figure(
        "accuracy of a method at several densities",
        "FedSpa 4 and table 3, DisPFL table 4, pFedGate 5",
        "a method with several densities",
        lambda views, _: accuracy_by_density(views),
        "sparsona compare fedspa:density=0.2 fedspa:density=0.8",
    ),
    "gap-by-density": Figure(
        "train less test accuracy at several densities",
        "DisPFL 3.3",
        "a method with several densities, and accuracies on training data",
        lambda views, _: gap_by_density(views),
        "sparsona compare dispfl:density=0.2 dispfl:density=0.8 --set train_accuracy=true",
    ),
    "gain-by-personal-parameters": Figure(
        "gain in accuracy against the number of personal parameters",
        "FedSim and FedAlt 3",
        f"methods with personal parameters, and {OVER}",
        gain_by_personal,
        OVER_HINT,
        compares=True,
    ),
    "violins": Figure(
        "distribution of clients' changes, methods side by side",
        "FedSim and FedAlt 6",
        OVER,
        lambda views, against: client_changes(views, "violins", against),
        OVER_HINT,
        compares=True,
    ),
    "change-by-samples": Figure(
        "each client's change against its number of training examples",
        "FedSim and FedAlt 4, 7-9",
        OVER,
        lambda views, against: client_changes(views, "samples", against),
        OVER_HINT,
        compares=True,
    ),
    "client-differences": Figure(
        "each client's change, sorted",
        "pFedGate 3",
        OVER,
        lambda views, against: client_changes(views, "differences", against),
        OVER_HINT,
        compares=True,
    ),
    "client-bands": Figure(
        "each client's change from the lowest to the highest seed, sorted",
        "FedSim and FedAlt 10",
        f"several seeds on the same clients, and {OVER}",
        client_bands,
        "run with --seeds 5 --partition-seed 0",
        compares=True,
    ),
}
