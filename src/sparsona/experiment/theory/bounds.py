"""`Run.bounds`: the models of a run at some rounds, and the theorems that speak of its method.

A run folder has its last models, and the first follow from the seed. Models in between come from replaying the run,
whose end is compared with the stored one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sparsona import methods
from sparsona.analysis.bounds import Bound, Bounds, Constant
from sparsona.analysis.format import plural
from sparsona.core.errors import SparsonaError
from sparsona.core.points import RECEIVED
from sparsona.core.seeds import Seeds, generator
from sparsona.core.targets import GIVEN
from sparsona.core.tree import leaves
from sparsona.engine.context import ClientContext
from sparsona.engine.plan import novel_clients
from sparsona.engine.population import Population
from sparsona.engine.rounds import simulate
from sparsona.executors.serial import Serial
from sparsona.experiment.theory.dispfl import dispfl_bounds
from sparsona.experiment.theory.fedalt import fedalt_bounds
from sparsona.experiment.theory.fedspa import fedspa_bounds
from sparsona.experiment.theory.pfedgate import pfedgate_bounds
from sparsona.experiment.theory.sample import Sample
from sparsona.runs.folder import RunFolder
from sparsona.runs.listing import find_run

if TYPE_CHECKING:
    from sparsona.experiment.run import Run

ABOUT = {
    "fedspa": "FedSpa: Theorem 1 of the ICLR submission and Theorem 1 of the journal version.",
    "fedavg": "FedAvg is FedSpa with masks of ones (beta = 0, all distances 0): both versions of its Theorem 1.",
    "local": "Training alone is FedSpa with one client and a mask of ones (K = S = 1, G = 0), client by client.",
    "dispfl": "DisPFL: Theorem 1, on generalization. The paper has no theorem on convergence.",
    "dpsgd": "D-PSGD is DisPFL with one mask for all, of ones (beta = 1) where the model is not cut: its Theorem 1.",
    "pfedgate": "pFedGate: Proposition 1, Theorems 1 and 2, and q of appendix E.",
    "fedalt": "FedSim and FedAlt: Theorems 1 and 2, and Table 1.",
}


def bounds(run: Run | str | Path, **options: Any) -> Bounds:
    """What the theorems of a method's paper say of a run, beside what was measured.

    Args:
        run: a run, or its folder.
        options: those of `Run.bounds`.

    Returns:
        Constants, bounds and assumptions.

    Example:
        >>> import sparsona as sp
        >>> run = sp.train("fedprox", clients=4, rounds=1, data_rate=0.2)
        >>> sp.bounds(run).applies[:21]
        'None of the four pape'
    """
    if isinstance(run, str | Path):
        from sparsona.experiment.train import load

        run = load(find_run(run))
    return run.bounds(**options)


def estimate_bounds(
    folder: RunFolder,
    context: ClientContext,
    stored: Population,
    completed: int,
    *,
    clients: int,
    batches: int,
    seed: int,
    along: int,
    delta: float,
    noise: float,
    listen: Callable[[int, int], None] | None,
) -> Bounds:
    """What `Run.bounds` returns; arguments are described there. `stored` are the run's models after `completed`."""
    for name, value, least in (("clients", clients, 2), ("batches", batches, 2), ("along", along, 0)):
        if value < least:
            raise SparsonaError(f"{name}={value}", expected=f"{least} or more", hint=f"--{name} {max(least, 8)}")
    if not 0 < delta < 1:
        raise SparsonaError(f"delta={delta:g}", expected="a probability between 0 and 1", hint="--delta 1e-5")
    if not 0 <= noise < math.inf:
        raise SparsonaError(f"noise={noise:g}", expected="a standard deviation, 0 or more", hint="--noise 1")
    row = methods.card(context.method.name)
    kind = methods.factory(row)[0].__name__
    source = str(folder.config["data"]).partition(":")[0]
    data = folder.facts.data or "own data" if source == GIVEN else source
    title = f"{folder.facts.title}, {data}, {plural(completed, 'round')}"
    if kind not in ABOUT:
        text = f"None of the four papers' theorems is about {row.title}, and it is no special case of their methods."
        return Bounds(title, text, (), batches, seed, ())
    novel = novel_clients(context.plan, context.clients)
    pool = [client.index for client in context.clients if client.index not in novel]
    order = torch.randperm(len(pool), generator=generator(Seeds(seed).shared("bounds/clients")))[:clients]
    chosen = tuple(sorted(pool[place] for place in order.tolist()))
    wanted = sorted({round(place) for place in np.linspace(0, completed, along + 2)[1:-1]} - {0, completed})
    done, total = 0, (completed if wanted else 0) + len(chosen) * (len(wanted) + 2)

    def advance() -> None:
        nonlocal done
        done += 1
        if listen is not None:
            listen(done, total)

    points, notes = _points(context, stored, completed, wanted, advance)
    sample = Sample(folder, context, points, chosen, batches, seed, delta, noise, advance)
    constants, bounds = KINDS[kind](sample)
    return Bounds(
        title, ABOUT[kind], chosen, batches, seed, tuple(place for place, _ in points), constants, bounds, notes
    )


def _points(
    context: ClientContext, stored: Population, completed: int, wanted: Sequence[int], advance: Callable[[], None]
) -> tuple[list[tuple[int, Population]], list[str]]:
    """The first models, those of the wanted rounds by replaying the run, and the stored ones."""
    context = replace(context, plan=replace(context.plan, points=(RECEIVED,)))  # nothing is tested again in turns
    engine = simulate(context, Serial(context))
    first = population = engine.start()
    found = [(0, first)]
    for index in range(completed if wanted else 0):
        population, _ = engine.play(population, index)
        if index + 1 in wanted:
            found.append((index + 1, population))
        advance()
    notes = [] if completed else ["The run has no round yet: all models are the first."]
    if wanted:
        notes.append(_compare(population, stored))
    return [*found, (completed, stored)] if completed else found, notes


def _compare(replayed: Population, stored: Population) -> str:
    """Whether a replay ended where the run did."""
    first, second = (dict(leaves((one.server, one.states))) for one in (replayed, stored))
    apart = max(
        (float((first[path].double() - second[path].double()).abs().max()) for path in first if first[path].numel()),
        default=0.0,
    )
    if not apart:
        return "The rounds between were replayed, and ended with the stored models, bit for bit."
    return f"The rounds between were replayed; the end differs from the stored models by up to {apart:.2g} in an entry."


KINDS: dict[str, Callable[[Sample], tuple[list[Constant], list[Bound]]]] = {
    "fedspa": fedspa_bounds,
    "fedavg": fedspa_bounds,
    "local": fedspa_bounds,
    "fedalt": fedalt_bounds,
    "dispfl": dispfl_bounds,
    "dpsgd": dispfl_bounds,
    "pfedgate": pfedgate_bounds,
}
