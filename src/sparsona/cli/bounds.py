"""`sparsona bounds`: the papers' theorems on a run."""

from __future__ import annotations

import json
from pathlib import Path

import click

from sparsona.cli.analysis import JSON, OUT
from sparsona.cli.data import check_picture
from sparsona.cli.terminal import decoding_bar, echo, print_bounds


@click.command()
@click.argument("path", metavar="RUN")
@click.option("--clients", default=8, show_default=True, help="Clients that constants are estimated on.")
@click.option("--batches", default=8, show_default=True, help="Batches of each for variances and Hessian products.")
@click.option("--seed", default=0, show_default=True, help="Of clients, batches and power iterations.")
@click.option("--along", metavar="N", default=0, help="Replay the run; measure at N rounds between the ends, too.")
@click.option("--delta", default=1e-5, show_default=True, help="Probability of failure (DisPFL, pFedGate).")
@click.option("--noise", default=0.0, help="Noise on gradients that DisPFL's theorem is to suppose; runs add none.")
@OUT
@JSON
def bounds(
    path: str,
    clients: int,
    batches: int,
    seed: int,
    along: int,
    delta: float,
    noise: float,
    out: Path | None,
    as_json: bool,
) -> None:
    """Compare the bounds of a method's paper with what RUN measured.

    Variance, dissimilarity, smoothness and the other constants are estimated on training data of some clients, from the
    first and the last models. Each bound comes with its terms, the quantity that it bounds as measured, and the
    assumptions that RUN violates. FedSpa, FedAvg and Local, DisPFL and D-PSGD, pFedGate, FedSim and FedAlt (and
    FedPer, FedRep, LG-FedAvg, FedBN) have theorems; for other methods the command says that none applies.

    \b
      sparsona run fedspa --out runs/spa
      sparsona bounds spa --along 6 --out bounds.svg
    """
    if out is not None:
        check_picture(out)
    from sparsona.experiment import train as api
    from sparsona.runs.listing import find_run

    run = api.load(find_run(path))
    with decoding_bar("estimating") as listen:
        found = run.bounds(
            clients=clients, batches=batches, seed=seed, along=along, delta=delta, noise=noise, listen=listen
        )
    if as_json:
        echo(json.dumps(found.as_dict()))
    else:
        print_bounds(found)
    if out is not None and not found.curves:
        echo(f"picture: nothing was drawn, as no theorem speaks of the rounds of this run ({out})", err=as_json)
    elif out is not None:
        from sparsona.report.pictures import save_picture

        echo(f"picture: {save_picture(found, out)}", err=as_json)
