"""The server of a run whose clients are reached through Flower."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sparsona.deploy import flower
from sparsona.deploy.identity import Roster
from sparsona.experiment.network import Network
from sparsona.experiment.run import Run
from sparsona.experiment.server_side import next_session, play_network, read_server
from sparsona.runs.observers import EvaluationResult, RoundResult

HELLO_SECONDS = 60.0  # for a client to say that it is there: Flower starts a process for that


def server_app(sampler: Callable[..., Any] | None = None) -> Any:
    """The ServerApp that plays a run, as the run config of its app says (`sparsona federation flower`).

    Args:
        sampler: the function that samples clients, if the federation file names one (`sampler = "given:NAME"`).

    Returns:
        A flwr.serverapp.ServerApp.
    """

    def play(link: flower.FlowerLink, config: Mapping[str, Any]) -> None:
        serve(
            link,
            config["federation"],
            config["out"],
            key=config.get("key"),
            at_least=config.get("at-least"),
            deadline=float(config["deadline"]),
            wait=config.get("wait"),
            sampler=sampler,
            report=lambda text: print(text, flush=True),
        )

    return flower.server_app(play)


def serve(
    link: flower.FlowerLink,
    path: str | Path,
    out: str | Path,
    *,
    key: str | Path | None = None,
    at_least: int | None = None,
    deadline: float = 300.0,
    wait: float | None = None,
    sampler: Callable[..., Any] | None = None,
    report: Callable[[str], None] = lambda text: None,
) -> Run:
    """Be the server of a run: wait for its clients, play its rounds, and tell them the end.

    Args:
        link: to the clients.
        path: the federation file.
        out: the run's folder. If it exists, the run is resumed from its last checkpoint.
        key: the server's key; None: the one that was made with the file.
        at_least: how many clients must be there before the first round; None: all of the roster.
        deadline: seconds after which a client that has not answered is left out of a round.
        wait: seconds to wait for the clients; None: as long as it takes.
        sampler: as for `server_app`.
        report: is called with what happens, for people to read.

    Returns:
        The finished run.
    """
    terms, signer = read_server(path, key, at_least, sampler, "in the app's server_app.py, server_app")
    roster = Roster(terms.file.keys())
    link.max_bytes = terms.longest_frame()
    session = next_session(Path(out))
    network = Network(terms, link.exchange, signer, roster, deadline, report, link.present, HELLO_SECONDS, session)
    needed = terms.num_clients if at_least is None else at_least
    network.gather_guests(Path(out), needed, wait, lambda there, of: report(f"{there} of {of} clients there"))
    run = play_network(network, Path(out), [_Rounds(report)], {"flower": True, "session": session})
    report(f"the run is over: {out}")
    return run


class _Rounds:
    """An observer that says what was reached: a ServerApp has no progress bar."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report

    def on_round(self, result: RoundResult) -> None:
        self._report(str(result))

    def on_evaluation(self, result: EvaluationResult) -> None:
        self._report(str(result))
