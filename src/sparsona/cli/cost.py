"""`sparsona cost`: what an experiment would cost, before it is run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sparsona.cli.options import check_reserved, flag, gather, method_flags, with_table
from sparsona.cli.terminal import echo, print_table, print_text

if TYPE_CHECKING:
    from sparsona.costs.report import CostReport, Number, Traffic


def _cost_flags() -> list[click.Option]:
    """The flags of a run (those that a cost does not depend on are accepted but hidden), and the cost's own."""
    from sparsona.costs import cost_options
    from sparsona.costs.rules import COST_RULES

    rules = {name: rule.config for name, rule in COST_RULES.items()}
    options = [one for one in cost_options().values() if one.flag]
    return [*(flag(one, hidden=one.cost is not True) for one in options), *method_flags(rules)]


@click.command(cls=with_table(_cost_flags))
@click.argument("methods", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="Print as JSON, in decimal MB and GB, unrounded.")
def cost(methods: tuple[str, ...], config: Path | None, pairs: tuple[str, ...], as_json: bool, **flags: Any) -> None:
    """Show what METHODS would cost: bytes, FLOPs, memory. Nothing is trained, and no data is read but your own.

    Each is a row of `sparsona methods`, with options of its own after a colon if you like, or one of which only the
    costs are known yet (`sparsona methods` names them). Several are set side by side; an option that only some of them
    have is given to those. Options are those of `sparsona run`, with the papers' numbers for defaults, and those of a
    run for data of your own. docs/accounting.md says what is counted.

    \b
      sparsona cost fedspa --data cifar10 --model vgg11
      sparsona cost fedavg fedspa fedspa:density=0.2 --data cifar10
      sparsona cost fedspa:search=rsm --model vgg11 --quirk phantom-screening
      sparsona cost dispfl --model resnet18 --classes 10 --graph ring
      sparsona cost fedspa --data mine.npz --clients 20
    """
    from sparsona.costs import cost as find_cost
    from sparsona.costs import options_for
    from sparsona.methods import unknown_option

    options = gather(config, pairs, {key: value for key, value in flags.items() if value != ()})
    check_reserved(find_cost, options)
    if len(methods) == 1:
        report = find_cost(methods[0], **options)
        if as_json:
            echo(json.dumps(report.to_json()))
        else:
            show(report)
        return
    known = {method: options_for(method) for method in methods}
    if unknown := sorted(set(options) - set().union(*known.values())):
        raise unknown_option(methods, unknown[0], set().union(*known.values()))
    reports = [find_cost(m, **{key: options[key] for key in options if key in known[m]}) for m in methods]
    if as_json:
        echo(json.dumps([report.to_json() for report in reports]))
    else:
        print_table([{"method": method} | report.row() for method, report in zip(methods, reports, strict=True)])
        experiments: dict[str, list[str]] = {}
        for method, report in zip(methods, reports, strict=True):
            experiments.setdefault(report.scope, []).append(method)
        for text, users in experiments.items():
            print_text(text if len(experiments) == 1 else f"{', '.join(users)}: {text}")
        echo("totals of all rounds and clients; memory while a client trains; one METHOD alone shows more")


def show(report: CostReport) -> None:
    """Print the report."""
    from sparsona.costs.report import show_bytes

    echo(report.head)
    echo(report.scope)
    if report.peers:
        echo(f"peers: graph {report.graph}, {report.neighbours:.4g} neighbours each")
    ways = [("bytes as encoded", report.encoded), ("bytes as papers count", report.paper)]
    print_table(
        [
            _traffic(name, way, report.rounds)
            for name, way in (ways if report.experiment.options.counting == "encoded" else ways[::-1])
        ]
    )
    flops = report.flops
    print_table(
        [
            _flops(report, "training", flops.train, flops.tuning),
            _flops(report, "mask search", flops.search, 0),
            _flops(report, "both", flops.train + flops.search, flops.tuning),
        ]
    )
    memory = {
        "kept between rounds": report.memory.kept,
        "that, and what is received": report.memory.at_hand,
        "in training, with gradients and copies": report.memory.training,
        "in mask search, with a dense gradient": report.memory.search,
    }
    print_table([{"memory on a client": what, "": show_bytes(size)} for what, size in memory.items()])
    echo(f"inference: {report.inference_flops:.4g} FLOPs an example\n")
    for note in notes(report):
        echo(note)


def notes(report: CostReport) -> list[str]:
    """What a reader must know to interpret the figures."""
    from sparsona.costs import QUIRKS

    found = [f"busiest node: {report.busiest}; both directions as encoded, one as the papers count"]
    if report.peers:
        found.append("between peers each message is sent and received: a round and the total count it once")
    if report.flops.tuning:
        found.append(f"totals include the final tuning of all clients, {report.experiment.run.tune_epochs} epochs")
    found.append("memory: four bytes a parameter, a bit an entry of a mask; activations are not counted")
    return [*found, *report.notes, *(f"quirk {name}: {QUIRKS[name]}" for name in report.experiment.options.quirks)]


def _traffic(name: str, traffic: Traffic, rounds: int) -> dict[str, str]:
    from sparsona.costs.report import show_bytes

    return {
        "": name,
        "client up": show_bytes(traffic.up),
        "client down": show_bytes(traffic.down),
        "a round": show_bytes(traffic.round),
        "busiest node": show_bytes(traffic.busiest),
        "total": show_bytes(traffic.round * rounds + traffic.tuning),
    }


def _flops(report: CostReport, name: str, turn: Number, tuning: Number) -> dict[str, str]:
    per_round = turn * report.per_round
    return {
        "FLOPs": name,
        "client and round": f"{turn:.4g}",
        "a round": f"{per_round:.4g}",
        "total": f"{per_round * report.rounds + tuning:.4g}",
    }
