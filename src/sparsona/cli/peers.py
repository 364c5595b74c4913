"""`sparsona peer` and `gather`: a run without a server, and its peers' journals as one run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from sparsona.cli.network import DATA, DATA_DIR, DEVICE, FILE, KEY, PLAIN, SPLITS, Waiting, say
from sparsona.cli.options import gather as gather_options


@click.command()
@FILE
@DATA
@DATA_DIR
@click.option("--listen", multiple=True, metavar="HOST:PORT", help="Where others can dial this peer.  [nowhere]")
@click.option("--connect", multiple=True, metavar="HOST:PORT", help="Where to dial.  [other peers, as the file says]")
@KEY
@click.option("--vault", type=click.Path(path_type=Path), help="Folder of state, model and journal.  [in ./vault]")
@click.option("--at-least", type=int, help="Peers to wait for before the first round.  [all of the roster]")
@click.option("--deadline", type=float, default=60.0, show_default=True, help="Seconds for a neighbour's answer.")
@click.option("--wait", type=float, help="Seconds to wait for peers before the first round.  [as long as it takes]")
@click.option("--grace", type=float, help="Seconds to stay for others at the end.  [the deadline]")
@click.option(
    "--share",
    type=click.Choice(["labels"]),
    help="Write into the journal how many examples of each class you have, and which are confused.  [nothing]",
)
@DEVICE
@SPLITS
@PLAIN
def peer(path: Path, data: str, share: str | None, pairs: tuple[str, ...], plain: bool, **options: Any) -> None:
    """Take part as a peer in the run that FED.TOML describes. It is for methods without a server.

    One or two peers listen, where all others can dial them; the rest may be behind NAT. A neighbour that does not
    answer in time, or whose message is refused, is left out of that round, and the round continues. At the end a peer
    stays until no other peer needs its messages. After a stop or a kill, the same command continues where it was.

    \b
      sparsona peer fed.toml --data arrays:mine.npz --listen :7447
      sparsona peer fed.toml --data digits           # a trial: this peer's share of a data set
    """
    from sparsona.experiment.peers import be_peer

    own: dict[str, Any] = gather_options(None, pairs, {}, None)
    try:
        folder = be_peer(
            path,
            data,
            shares_labels=share == "labels",
            tls=not plain,
            report=say,
            waiting=Waiting("peers"),
            **options,
            **own,
        )
    except KeyboardInterrupt:
        say("stopped; the same command goes on")
        raise
    say(f"the run is over; journal and model: {folder}")


@click.command()
@click.argument("out", metavar="RUN", type=click.Path(path_type=Path))
@click.argument("folders", metavar="PEER...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--partial", is_flag=True, help="Make a run though journals of some peers are missing.")
@click.option("--json", "as_json", is_flag=True, help="Print only the summary, as JSON, on stdout.")
def gather(out: Path, folders: tuple[Path, ...], partial: bool, as_json: bool) -> None:
    """Combine the journals of peers into one run. RUN is recorded as a simulation would be.

    A PEER is the folder that `sparsona peer` called its vault, or a copy of its journal.jsonl and federation.toml: what
    else is there stays with the peer. Reports and lists take the run as any other; the models are not in it.

    \b
      sparsona gather runs/x peers/*
      sparsona report runs/x
    """
    from sparsona.cli.app import show_run
    from sparsona.experiment.gather import gather as gather_journals

    show_run(gather_journals(out, folders, partial), as_json)
