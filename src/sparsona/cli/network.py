"""`sparsona server`, `join` and `vault`: a run whose clients are on machines of their own."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import click

from sparsona.cli.options import gather
from sparsona.cli.terminal import echo, print_table
from sparsona.core.errors import SparsonaError
from sparsona.runs.progress import progress_bar

FILE = click.argument("path", metavar="FED.TOML", type=click.Path(path_type=Path))
KEY = click.option("--key", type=click.Path(path_type=Path), help="The secret key.  [the one beside the file]")
PLAIN = click.option("--plain", is_flag=True, help="Do not encrypt: for one machine. Frames are signed all the same.")
DATA = click.option(
    "--data", required=True, help="arrays:FILE.npz or folder:DIR, all yours; or a data set: your share."
)
DATA_DIR = click.option("--data-dir", help="Folder that is searched first for the data's files.")
DEVICE = click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", help="Where to train.")
SPLITS = click.option(
    "--set", "pairs", multiple=True, metavar="KEY=VALUE", help="How data is split, such as test_rate=0.3."
)


@click.command()
@FILE
@click.option("--listen", multiple=True, metavar="HOST:PORT", help="Where to listen.  [:7447, on all interfaces]")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="The run's folder; resumed if it exists.")
@KEY
@click.option("--at-least", type=int, help="Clients to wait for before the first round.  [all of the roster]")
@click.option("--deadline", type=float, default=60.0, show_default=True, help="Seconds for a client's answer.")
@click.option("--wait", type=float, help="Seconds to wait for clients.  [as long as it takes]")
@PLAIN
@click.option("--json", "as_json", is_flag=True, help="Print only the summary, as JSON, on stdout.")
def server(
    path: Path,
    listen: tuple[str, ...],
    out: Path,
    key: Path | None,
    at_least: int | None,
    deadline: float,
    wait: float | None,
    plain: bool,
    as_json: bool,
) -> None:
    """Run the server of the run that FED.TOML describes.

    It waits for its clients, runs all rounds, and ends. A client that does not answer in time, or whose answer is
    refused, is left out of that round, and the round continues. After a stop or a kill, the same command resumes the
    run.

    \b
      sparsona server fed.toml --listen 0.0.0.0:7447 --out runs/x
    """
    from sparsona.cli.app import show_run
    from sparsona.experiment.server_side import serve

    with progress_bar() as bar:
        run = serve(
            path,
            out,
            listen=listen,
            key=key,
            at_least=at_least,
            deadline=deadline,
            wait=wait,
            tls=not plain,
            observers=[bar],
            report=say,
            waiting=Waiting(),
        )
    show_run(run, as_json)


def resume_server(folder: Path, as_json: bool) -> None:
    """Resume the run in a server's folder."""
    from sparsona.cli.app import show_run
    from sparsona.experiment.server_side import resume_served

    with progress_bar() as bar:
        run = resume_served(folder, [bar], report=say, waiting=Waiting())
    show_run(run, as_json)


class Waiting:
    """Says how many are there, whenever that changes."""

    def __init__(self, who: str = "clients") -> None:
        self._there, self._who = -1, who

    def __call__(self, there: int, of: int) -> None:
        if there != self._there:
            self._there = there
            say(f"{there} of {of} {self._who if of != 1 else self._who.removesuffix('s')} there")


@click.command()
@FILE
@DATA
@DATA_DIR
@KEY
@click.option("--connect", multiple=True, metavar="HOST:PORT", help="Where the server is.  [as the file says]")
@click.option(
    "--flower",
    type=click.Path(path_type=Path),
    metavar="SOCKET",
    help="Answer a Flower SuperNode on this Unix socket, instead of dialling the server.",
)
@click.option("--vault", type=click.Path(path_type=Path), help="Folder of states and model.  [in ./vault]")
@click.option(
    "--share",
    type=click.Choice(["labels"]),
    help="Let the server know how many examples of each class you have, and which are confused.  [nothing]",
)
@DEVICE
@SPLITS
@PLAIN
def join(
    path: Path,
    data: str,
    data_dir: str | None,
    key: Path | None,
    connect: tuple[str, ...],
    flower: Path | None,
    vault: Path | None,
    share: str | None,
    device: str,
    pairs: tuple[str, ...],
    plain: bool,
) -> None:
    """Take part as a client in the run that FED.TOML describes. A client dials out and needs no open port.

    Data and state stay on this machine: the server receives updates and the number of right test examples. If the
    method keeps masks on the server (FedSpa), the server can compute this client's personal model.
    After a stop or a kill, the same command continues where it was.

    \b
      sparsona join fed.toml --data arrays:mine.npz
      sparsona join fed.toml --data digits            # a trial: this client's share of a data set
    """
    from sparsona.experiment.client_side import join as be_client

    options: dict[str, Any] = gather(None, pairs, {}, None)
    try:
        model = be_client(
            path,
            data,
            key=key,
            connect=connect,
            vault=vault,
            shares_labels=share == "labels",
            device=device,
            tls=not plain,
            flower=flower,
            report=say,
            data_dir=data_dir,
            **options,
        )
    except KeyboardInterrupt:
        say("stopped; the same command goes on")
        raise
    say("the run is over" + ("" if model is None else f"; your model: {model}"))


@click.group()
def vault() -> None:
    """What a client of a run on several machines keeps to itself.

    \b
      sparsona vault show
      sparsona vault export model.safetensors
    """


FOLDER = click.option(
    "--vault", "folder", type=click.Path(path_type=Path), help="The client's folder.  [the only one in ./vault]"
)


@vault.command()
@FOLDER
def show(folder: Path | None) -> None:
    """Show what is in it: states by ticket, and the personal model."""
    from sparsona.deploy.vault import MODEL, SUFFIX

    found = _find_vault(folder)
    rows = [
        {
            "file": path.name,
            "what": "personal model" if path.name == MODEL else "state",
            "bytes": f"{path.stat().st_size:,}",
            "written": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(path.stat().st_mtime)),
        }
        for path in sorted(found.iterdir())
        if path.name == MODEL or path.suffix == SUFFIX
    ]
    echo(f"{found}: {len(rows)} files")
    if rows:
        print_table(rows)


@vault.command()
@FOLDER
@click.argument("out", metavar="FILE", type=click.Path(path_type=Path))
@click.option(
    "--federation",
    "terms",
    type=click.Path(path_type=Path),
    help="The federation file, for .pt2 and .onnx.  [federation.toml in the vault]",
)
def export(folder: Path | None, out: Path, terms: Path | None) -> None:
    """Write the personal model to FILE, its mask applied.

    FILE ends with .safetensors, .pt2 or .onnx. A safetensors file has the weights by name. The others have the network
    as well, are checked to predict the same, and lack units that a mask removed; ONNX needs the extra `onnx`. A client
    has a model when its run is over. Beside FILE is its model card, FILE.md.
    """
    from sparsona.deploy.vault import MODEL
    from sparsona.runs.folder import FEDERATION_FILE

    found = _find_vault(folder) / MODEL
    if not found.exists():
        raise SparsonaError(
            f"'{found.parent}' has no model yet",
            expected="a client whose run is over, of a method that has a plain model",
            hint="wait for the end of the run",
        )
    if out.exists():
        raise SparsonaError(f"'{out}' exists already", expected="a new file", hint="give it another name")
    is_copied, terms = out.suffix == found.suffix, terms or found.parent / FEDERATION_FILE
    if is_copied and not terms.exists():
        shutil.copyfile(found, out)
        echo(str(out))
        return
    from sparsona.experiment.vault_export import OtherNetworkError, export_client

    try:
        made = export_client(found, terms, out)
        echo(str(out) + ("" if made.card is None else f", with its card {made.card}"))
    except OtherNetworkError:  # a method whose models have another shape
        if not is_copied:
            raise
        shutil.copyfile(found, out)
        echo(str(out))


def _find_vault(folder: Path | None) -> Path:
    if folder is not None:
        if not folder.is_dir():
            raise SparsonaError(f"there is no folder '{folder}'", expected="what `sparsona join` called its vault")
        return folder
    found = sorted(path for path in Path("vault").glob("*") if path.is_dir())
    if len(found) != 1:
        names = ", ".join(map(str, found))
        raise SparsonaError(
            f"{len(found)} vaults in ./vault" + (f": {names}" if names else ""), expected="one", hint="--vault DIR"
        )
    return found[0]


def say(text: str) -> None:
    """Say what happens, on stderr so that --json stays clean."""
    echo(f"{time.strftime('%H:%M:%S')}  {text}", err=True)
