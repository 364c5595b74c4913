"""`sparsona data`: the data sets, how to download them, and pictures of their partition among clients."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from sparsona.cli.options import check_names, data_flags, gather, with_table
from sparsona.cli.terminal import decoding_bar, download_bar, echo, print_partition, print_table, show_rows
from sparsona.core.errors import SparsonaError
from sparsona.core.spec import parse


@click.group(invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
@click.pass_context
def data(context: click.Context, as_json: bool) -> None:
    """List data sets, partitions and choices of test examples. Download a data set, or draw a partition:

    \b
      sparsona data
      sparsona data get cifar10
      sparsona data show cifar10 --clients 100 --partition dirichlet:0.3
    """
    if context.invoked_subcommand is not None:
        return
    from sparsona.data import SOURCES
    from sparsona.data.catalog import OWN
    from sparsona.data.holdout import TESTS
    from sparsona.data.partition import PARTITIONS

    sources = [
        {"name": s.name, "what": s.summary, "examples": s.num_examples, "classes": s.num_classes, "from": s.origin}
        for s in SOURCES.values()
    ]
    own = [{"your own": one.form, "what": one.summary} for one in OWN.values()]
    partitions = [{"partition": p.form, "what": p.summary} for p in PARTITIONS.values()]
    tests = [{"test": p.form, "what": p.summary} for p in TESTS.values()]
    if as_json:
        echo(json.dumps({"data": sources, "own": own, "partitions": partitions, "tests": tests}, indent=2))
        return
    print_table(sources)
    print_table(own)
    print_table(partitions)
    hint = (
        "`sparsona data get NAME` downloads one. Your own data: `--data mine.npz`, `--data photos/`, or in Python "
        "sparsona.federate(x, y, clients=20)."
    )
    show_rows(tests, False, hint)


@data.command()
@click.argument("name")
@click.option("--to", "folder", type=click.Path(path_type=Path), help="Folder to put it into.  [the cache]")
def get(name: str, folder: Path | None) -> None:
    """Download the data set NAME, and check it.

    It is put where `--data NAME` finds it. Files without the published checksum are not kept. Files that are there
    already are not downloaded again.
    """
    from sparsona.data.cache import cache_folder
    from sparsona.data.download import download

    with download_bar(name) as listen:
        files = download(name, folder or cache_folder(), listen, notify=lambda text: echo(text, err=True))
    for file in files:
        echo(str(file))


def check_picture(path: Path) -> None:
    """Raise an error for a picture that could not be written, before any work."""
    from sparsona.report.pictures.figure import check_ending

    check_ending(path)
    if not path.absolute().parent.is_dir():
        raise SparsonaError(
            f"there is no folder '{path.parent}'", expected="a folder to put the picture into", hint="make it first"
        )


@data.command(cls=with_table(data_flags))
@click.argument("name")
@click.option("--out", type=click.Path(path_type=Path), help="Picture to write as well: .svg or .png.")
@click.option("--json", "as_json", is_flag=True, help="Print the counts as JSON.")
def show(name: str, config: Path | None, pairs: tuple[str, ...], out: Path | None, as_json: bool, **flags: Any) -> None:
    """Draw how NAME would be shared out.

    Clients by classes, and their sizes.

    \b
      sparsona data show digits --partition shards:2
      sparsona data show mnist --partition natural --out writers.svg
      sparsona data show cifar10 --clients 100 --test shares:100 --set validation_rate=0
    """
    check_names([], {"data": name})
    if out is not None:
        check_picture(out)
    from sparsona.analysis.partition import Partition
    from sparsona.data.client_index import PARTS
    from sparsona.data.partition.by_owner import describe_left_out
    from sparsona.experiment import build
    from sparsona.runs.options import OF_DATA

    options = gather(config, pairs, flags)
    if others := sorted(set(options) - {*OF_DATA, "seed"}):
        raise SparsonaError(
            f"'{others[0]}' is not an option of the data",
            expected="one that is",
            hint="see `sparsona data show --help`",
        )
    settings = build.make_config("local", {**options, "data": name})
    with decoding_bar(f"decoding {parse('data set', settings.data).name}") as listen:  # a path would fill the line
        federation = build.read_data(settings, listen)
    counts = federation.label_counts("train")
    sizes = dict(zip(PARTS, federation.sizes().T.numpy(), strict=True))
    title = f"{federation.name}, {settings.partition}, test {federation.tested_on}, seed {settings.seed}"
    of = {"client_names": federation.client_names, "class_names": federation.class_names}
    picture = Partition(title, sizes, None if counts is None else counts.numpy(), **of)
    if as_json:
        found: dict[str, Any] = {"data": name, "partition": settings.partition, "tested_on": federation.tested_on}
        found |= {"clients": federation.num_clients, "classes": federation.num_classes}
        found |= {name: None if names is None else list(names) for name, names in of.items()}
        found |= {"left_out": dict(federation.left_out)} | {part: size.tolist() for part, size in sizes.items()}
        echo(json.dumps(found | {"label_counts": None if counts is None else counts.tolist()}))
    else:
        print_partition(picture)
        echo(_in_words(federation, settings))
        notes = ["numbers by class count training examples"] if counts is not None else []
        if federation.tested_on.startswith("shares"):
            notes.append("clients are tested on some of the same examples, counted for each")
        echo("\n" + "; ".join(notes) if notes else "")
    if federation.left_out:
        echo(describe_left_out(federation.left_out, "owners left out: "), err=as_json)
    if out is not None:
        from sparsona.report.pictures import save_picture

        echo(f"picture: {save_picture(picture, out)}", err=as_json)


def _in_words(federation: Any, settings: Any) -> str:
    """What one example is, and which network would be trained on it."""
    from sparsona.experiment import build

    shape = federation.input_shape
    words = f"an example: {' x '.join(map(str, shape))}"
    if federation.packing is not None:
        words = f"an example: {federation.packing.describe()}"
    elif len(shape) == 2 and not federation.has_tokens:
        words = f"an example: {shape[0]} channels of {shape[1]} steps"
        if shape[0] > shape[1]:
            words += " (more channels than steps: is time the first axis? x.transpose(0, 2, 1) makes it the last)"
    try:
        return f"{words}; network: {settings.model or build.default_model(settings, federation)}"
    except SparsonaError as error:
        return f"{words}; {error.what}"
