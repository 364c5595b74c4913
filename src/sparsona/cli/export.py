"""`sparsona export` and `evaluate`: a run's models as files, and on new data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sparsona.cli.terminal import echo, print_table
from sparsona.core.errors import SparsonaError
from sparsona.core.formats import FORMATS

if TYPE_CHECKING:
    from sparsona.experiment.export import Exported

JSON = click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
GUARDED = click.option(
    "--guarded", is_flag=True, help="The shared model for a client that keeps it; a run with --guard."
)
CLIENT = "Number or name of the client; may be given again. 'all': every client."


@click.command()
@click.argument("path", metavar="RUN")
@click.option("--client", "clients", multiple=True, metavar="CLIENT", help=CLIENT)
@click.option("--global", "is_shared", is_flag=True, help="The shared model: the server's, or the mean of the peers'.")
@click.option(
    "--format", "kind", type=click.Choice([*FORMATS]), help="File format.  [by the suffix of --out; safetensors]"
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="File to write, or for several clients a folder.  [named after the run and its comparison, here]",
)
@click.option("--sparse", is_flag=True, help="In safetensors: store masked tensors as their values and a bit for each.")
@click.option(
    "--no-card", is_flag=True, help="Write no model card (FILE.md), and of whom and how good it is not into the file."
)
@GUARDED
@JSON
def export(
    path: str,
    clients: tuple[str, ...],
    is_shared: bool,
    kind: str | None,
    out: Path | None,
    sparse: bool,
    no_card: bool,
    guarded: bool,
    as_json: bool,
) -> None:
    """Write models of RUN to files that do not need sparsona. RUN is a folder, or its name in ./runs.

    Masks are applied, and in torch and ONNX files units that a mask removed are left out. Every file is read back: it
    predicts what the run predicts, or it is not written. The run's data is not needed. ONNX needs the extra `onnx`.

    \b
      safetensors  weights by name, for your own network: load_state_dict
      torch        a torch.export program (.pt2): torch.export.load
      onnx         an ONNX graph with any batch size, checked with onnxruntime

    \b
      sparsona export spa --client 7 --out client7.onnx
      sparsona export spa --client hospital-3
      sparsona export spa --client all --format onnx --out models
      sparsona export spa --global
    """
    if bool(clients) == is_shared:
        raise SparsonaError(
            "both --client and --global" if is_shared else "no model named",
            expected="--client NUMBER, or --global for the shared model",
            hint=f"sparsona export {path} --client 0",
        )
    from sparsona.experiment import train as api
    from sparsona.runs.listing import find_run, full_name

    run = find_run(path)
    exporter, own = api.load(run).exporter(), full_name(run).replace("/", "-")
    suffix = FORMATS[kind or "safetensors"]
    numbers = [*exporter.clients] if clients == ("all",) else [exporter.number(one) for one in clients]
    if clients != ("all",):
        _say_whose(clients, [exporter.name(one) for one in numbers])
    if len(clients) > 1 or clients == ("all",):
        folder = out or Path(f"{own}-models")
        places: list[tuple[Any, Path]] = [
            (one, folder / f"{exporter.file_name(one)}{suffix}") for one in dict.fromkeys(numbers)
        ]
    else:
        whose = numbers[0] if clients else None
        places = [(whose, out or Path(f"{own}-{exporter.file_name(whose)}{suffix}"))]
    made = [exporter.write(who, where, kind, guarded=guarded, sparse=sparse, card=not no_card) for who, where in places]
    if as_json:
        echo(json.dumps([one.as_dict() for one in made], indent=2))
        return
    print_table([_row(one, exporter.name(one.client)) for one in made])
    first = made[0].sizes
    echo(f"the run's network: {first.parameters_before:,} parameters, {first.bytes_before:,} bytes as float32")
    if made[0].card is not None:
        echo(f"model card{'s' * (len(made) > 1)}: {made[0].card}" + (" ..." if len(made) > 1 else ""))


def _row(made: Exported, name: str) -> dict[str, str]:
    sizes = made.sizes
    return {
        "file": str(made.path),
        "client": name,
        "parameters": f"{sizes.parameters:,}",
        "not 0": f"{sizes.nonzero:,} ({sizes.nonzero / sizes.parameters_before:.1%})",
        "bytes": f"{sizes.bytes:,}",
        "off by": f"{made.largest_difference:.1e} of {made.largest_output:.3g}",
    }


@click.command()
@click.argument("path", metavar="RUN")
@click.option("--client", "clients", multiple=True, metavar="CLIENT", help=CLIENT)
@click.option("--global", "is_shared", is_flag=True, help="The shared model, too.")
@click.option(
    "--data",
    required=True,
    type=click.Path(path_type=Path),
    metavar="FILE.npz",
    help="Arrays x and y (or x_test, y_test), and perhaps owners.",
)
@click.option("--all-rows", is_flag=True, help="Every model on all rows, whoever owns them.")
@GUARDED
@JSON
def evaluate(
    path: str,
    clients: tuple[str, ...],
    is_shared: bool,
    data: Path,
    all_rows: bool,
    guarded: bool,
    as_json: bool,
) -> None:
    """Evaluate models of RUN on new data. RUN is a folder, or its name in ./runs.

    x has examples as the run's data had them (images of bytes as bytes, not normalised), y their labels. Of one model
    a row for each class and the confusion matrix are shown as well. Where the file has owners, a client's model is
    evaluated on that client's rows, and the shared model on all. The run's own data is not needed.

    \b
      sparsona evaluate spa --client 7 --data new.npz
      sparsona evaluate spa --client all --data new.npz
      sparsona evaluate spa --client 1 --client 2 --global --data new.npz --json
    """
    if not clients and not is_shared:
        raise SparsonaError(
            "no model named",
            expected="--client NUMBER, or --global for the shared model",
            hint=f"sparsona evaluate {path} --client 0 --data {data}",
        )
    from sparsona.data.readers.npz import read_new
    from sparsona.experiment import train as api
    from sparsona.experiment.new_data import show_figure
    from sparsona.runs.listing import find_run

    run = api.load(find_run(path))
    x, y, owners = read_new(data)
    clients = tuple(dict.fromkeys(clients))
    which = [*clients, *([None] if is_shared else [])]
    found = run.evaluate(which, x, y, guarded, owners=None if all_rows else owners)
    if (names := found.client_names) and "all" not in clients:
        _say_whose(clients, [names[one.client] for one in found.results if one.client is not None])
    if as_json:
        echo(json.dumps(found.as_dict()))
        return
    print_table(found.table())
    if len(found.results) > 1:
        return
    (only,) = found.results
    names = found.class_names
    if rows := only.classes():
        print_table(
            [
                {
                    key: show_figure(key, names[value] if key == "class" and names else value)
                    for key, value in row.items()
                }
                for row in rows
            ]
        )
    if only.confusion is not None and len(rows) <= 20:
        kept = [row["class"] for row in rows]
        head = [names[number] if names else str(number) for number in kept]
        echo("predictions, true classes by row:")
        print_table(
            [
                {"true": head[place], **{head[at]: str(only.confusion[number, other]) for at, other in enumerate(kept)}}
                for place, number in enumerate(kept)
            ]
        )


def _say_whose(given: Sequence[str], names: Sequence[str]) -> None:
    """Say which clients are meant by numbers: they count from 0, and those in names often from 1."""
    for one, name in zip(given, names, strict=True):
        if one.isdecimal() and name not in (one, str(int(one))):
            echo(f"client {one} is {name}", err=True)
