"""`sparsona privacy` and `sparsona leakage`: what a run spends of differential privacy, and what it reveals."""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import Any

import click

from sparsona.cli.analysis import JSON
from sparsona.cli.terminal import decoding_bar, echo, print_table, print_text
from sparsona.core.errors import SparsonaError


@click.command()
@click.argument("path", metavar="[RUN]", required=False)
@click.option("--privacy", "text", metavar="KIND:...", help="Of a planned run, as for `sparsona run`.  [central]")
@click.option("--clients", type=click.IntRange(1, 10**9), help="Of a planned run: clients that take part.")
@click.option("--per-round", type=click.IntRange(1, 10**9), help="Clients in a round.  [half of them]")
@click.option("--rounds", type=click.IntRange(1, 10**9), help="Of a planned run: rounds.")
@click.option("--epsilon", type=float, help="Of a planned run: find the least noise with which it is kept.")
@JSON
def privacy(
    path: str | None,
    text: str | None,
    clients: int | None,
    per_round: int | None,
    rounds: int | None,
    epsilon: float | None,
    as_json: bool,
) -> None:
    """Show the epsilon of RUN, or that of a planned run. It needs the extra `privacy`.

    \b
      sparsona run fedavg --privacy central:noise=1.0,clip=0.5 --out runs/private
      sparsona privacy private
      sparsona privacy --clients 100 --per-round 10 --rounds 200 --privacy central:noise=2
      sparsona privacy --clients 100 --per-round 10 --rounds 200 --epsilon 3
    """
    if path is not None:
        if given := [
            name
            for name, value in {
                "--privacy": text,
                "--clients": clients,
                "--per-round": per_round,
                "--rounds": rounds,
                "--epsilon": epsilon,
            }.items()
            if value is not None
        ]:
            raise SparsonaError(f"{given[0]} beside a RUN", expected="one of the two", hint="a RUN has its own options")
        _show_run(path, as_json)
        return
    if clients is None or rounds is None:
        raise SparsonaError(
            "neither a RUN nor --clients and --rounds",
            expected="a run, or the size of one",
            hint="sparsona privacy --clients 100 --per-round 10 --rounds 200 --epsilon 3",
        )
    cohort = max(1, clients // 2) if per_round is None else per_round
    if cohort > clients:
        raise SparsonaError(f"--per-round {cohort} of {clients} clients", expected=f"1 to {clients}")
    text = text or "central"
    _show_forecast(_forecast(text, clients, cohort, rounds, epsilon), text, as_json)


@click.command()
@click.argument("path", metavar="RUN")
@click.option("--batches", default="1,4,8", show_default=True, help="Sizes of batches to invert; none: masks alone.")
@click.option("--pictures", type=click.IntRange(1, 10**6), default=2, show_default=True, help="Batches of each size.")
@click.option("--steps", type=click.IntRange(1, 10**6), default=300, show_default=True, help="Steps of each search.")
@click.option("--noise", type=float, help="Noise multiplier of updates with noise.  [RUN's, or 1]")
@click.option("--seed", type=click.IntRange(0, 10**9), default=0, show_default=True, help="Of all that is drawn.")
@JSON
def leakage(path: str, batches: str, pictures: int, steps: int, noise: float | None, seed: int, as_json: bool) -> None:
    """Show what RUN reveals to attacks on masks and updates. Its last masks and updates of one step are attacked;
    epsilon is printed beside.

    Masks: someone who knows the classes of some clients guesses, from masks alone, which others have a class (AUC; 0.5
    is chance). Updates: an attacker searches for pictures whose gradient is the update (PSNR, beside that of another
    picture of the class), for a dense update, one inside a mask, and both with noise. docs/privacy.md says how to read
    them. The search takes minutes: `--batches 1` is the shortest.

    \b
      sparsona run fedspa --partition shards:2 --out runs/spa
      sparsona leakage spa
      sparsona leakage spa --batches none
    """
    from sparsona.experiment import train as api
    from sparsona.runs.listing import find_run

    try:
        sizes = () if batches == "none" else tuple(int(part) for part in batches.split(","))
    except ValueError:
        raise SparsonaError(f"--batches {batches}", expected="whole numbers, or none", hint="--batches 1,4,8") from None
    run = api.load(find_run(path))
    with nullcontext() if as_json else decoding_bar("searching for pictures") as listen:
        found = run.leakage(batch_sizes=sizes, batches=pictures, steps=steps, noise=noise, seed=seed, listen=listen)
    if as_json:
        echo(json.dumps(found.as_dict()))
        return
    echo(found.title)
    if rows := found.rows():
        print_table(rows)
    for sentence in found.sentences():
        print_text(sentence)


def _show_run(path: str, as_json: bool) -> None:
    from sparsona.analysis.privacy import spent
    from sparsona.runs.folder import RunFolder
    from sparsona.runs.listing import find_run

    found = spent(RunFolder.open(find_run(path)))
    if found is None:
        raise SparsonaError(
            f"'{path}' has no differential privacy",
            expected="a run with --privacy",
            hint="sparsona leakage RUN measures what a run reveals, with or without",
        )
    if as_json:
        echo(json.dumps(found.as_dict()))
    else:
        print_table(found.rows())
        if found.note:
            print_text(found.note)
        print_text(found.sentence())


def _forecast(text: str, clients: int, cohort: int, rounds: int, epsilon: float | None) -> dict[str, Any]:
    from dataclasses import replace

    from sparsona.analysis.privacy import PrivacyPlan, noise_for
    from sparsona.transforms.privacy import read_privacy

    plan = PrivacyPlan(read_privacy(text), rounds, cohort, clients)
    if epsilon is not None:
        if "noise=" in text.replace(" ", ""):
            raise SparsonaError(
                f"--epsilon {epsilon:g} and the noise in --privacy {text}",
                expected="one of the two: the other follows from it",
                hint="leave noise= out, and it is found",
            )
        plan = replace(plan, privacy=replace(plan.privacy, noise=noise_for(epsilon, plan)))
    return {
        "privacy": plan.privacy.kind,
        "noise": plan.privacy.noise,
        "delta": plan.privacy.delta,
        "clients": clients,
        "per_round": cohort,
        "rounds": rounds,
        "epsilon": plan.epsilon(),
        **({} if epsilon is None else {"given_epsilon": epsilon}),
    }


def _show_forecast(found: dict[str, Any], text: str, as_json: bool) -> None:
    """A forecast as a table of one row, or as JSON, in which an infinite epsilon is null."""
    import math

    from sparsona.analysis.format import plural
    from sparsona.analysis.privacy import show_epsilon

    if as_json:
        finite = math.isfinite(found["epsilon"])
        echo(json.dumps(found | {"epsilon": found["epsilon"] if finite else None}))
        return
    given = found.pop("given_epsilon", None)
    shown = {
        key.replace("_", " "): f"{value:.10g}" if isinstance(value, float) else value for key, value in found.items()
    }
    print_table([{key: str(value) for key, value in shown.items()} | {"epsilon": show_epsilon(found["epsilon"])}])
    if given is not None:
        noise = f"{found['noise']:.10g}"  # six digits would round a noise above 1000, and perhaps down
        print_text(
            f"Epsilon {given:g} was given, and the noise was found for it: {noise} is the least multiplier, to three "
            f"decimals, with which {plural(found['rounds'], 'round')} spend no more than that. To use it: "
            f"--privacy {text}{',' if ':' in text else ':'}noise={noise}"
        )
    if found["privacy"] == "local":
        echo("of a client that takes part in every round; one that takes part in fewer spends less")
    elif found["per_round"] < found["clients"]:
        echo("if nobody knows which clients are drawn in a round")
