"""`sparsona latency`: how long each layer takes on this machine, as a file that a budget can be counted in."""

from __future__ import annotations

import json
from pathlib import Path

import click

from sparsona.cli.terminal import echo
from sparsona.core.errors import SparsonaError


@click.command()
@click.option("--data", help="Data set, a row of `sparsona data`: gives input, classes and model.")
@click.option("--model", help="Network, a row of `sparsona models`.  [the data set's default]")
@click.option("--batch-size", type=click.IntRange(1), default=1, show_default=True, help="Examples in a forward pass.")
@click.option("--device", default="cpu", show_default=True, help="auto | cpu | cuda")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The JSON file to write.")
def latency(data: str | None, model: str | None, batch_size: int, device: str, out: Path) -> None:
    """Time the layers of a network on this machine. It uses one thread, and is for runs that have a budget in latency.

    \b
      sparsona latency --data cifar10 --model pfedgate-cifar10 --out phone.json
    """
    from sparsona.data.catalog import get
    from sparsona.models import builder, read_spec

    source = None if data is None else get(data)
    name = model or (source.default_model if source else None)
    if name is None:
        raise SparsonaError("neither --data nor --model", expected="at least one of them", hint="see --help")
    usual = source or read_spec(name)[0]
    shape, classes = usual.input_shape, usual.num_classes
    build = builder(name, shape, classes)
    import torch

    from sparsona.core.task import Task
    from sparsona.executors import choose_device
    from sparsona.methods.pfedgate.latency import measure_latency
    from sparsona.runs.folder import environment, write_atomically

    tokens = len(shape) == 1
    task = Task(build, shape, classes, tokens=tokens)
    draws = torch.Generator().manual_seed(0)
    inputs = torch.rand((batch_size, *shape), generator=draws)
    inputs = (inputs * classes).long() if tokens else inputs
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = measure_latency(task, inputs.to(choose_device(device, "fp32")))
    finally:
        torch.set_num_threads(threads)
    about = {"model": name, "input_shape": shape, "classes": classes, "batch_size": batch_size, "device": device}
    content = {**found, "about": {**about, "unit": "ms", **environment()}}
    write_atomically(out, (json.dumps(content, indent=2) + "\n").encode())
    echo(f"{sum(found.values()):.3g} ms in {len(found)} tensors of {name}: {out}")
