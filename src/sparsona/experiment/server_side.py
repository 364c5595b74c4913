"""The server of a run on several machines: it waits for its clients, plays the rounds, and resumes them."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sparsona.analysis.conditions import early_stop_sentence
from sparsona.core.errors import SparsonaError
from sparsona.core.printable import warn
from sparsona.core.torch_state import usual_torch
from sparsona.core.update import SERVER
from sparsona.deploy.federation_file import FederationFile, key_path
from sparsona.deploy.greeting import differing
from sparsona.deploy.identity import KeyFile, Roster, check_certificate
from sparsona.deploy.memory import return_large_buffers
from sparsona.deploy.zenoh_link import Tls, ZenohLink
from sparsona.engine.context import ClientContext
from sparsona.engine.failures import REFUSED, UNABLE, kind_of
from sparsona.experiment.guests import Guest, agreed_names, read_guests, with_guests, write_guests
from sparsona.experiment.network import Network
from sparsona.experiment.run import Run
from sparsona.experiment.stored_models import models_elsewhere
from sparsona.experiment.terms import Terms
from sparsona.experiment.train import describe_run, play
from sparsona.runs.folder import (
    FEDERATION_FILE,
    NETWORK,
    SERVER_FILE,
    RunFolder,
    make_empty_folder,
    reached,
    read_json,
    write_atomically,
)
from sparsona.runs.functions import changed_functions
from sparsona.runs.observers import ObserverList
from sparsona.runs.options import dump
from sparsona.runs.records import Records
from sparsona.runs.session import Session

MANY_CLIENTS = 32  # whose messages make a server grow unless freed memory is returned, which costs it some time


def play_network(
    network: Network, path: Path, observers: Sequence[object] = (), served: Mapping[str, Any] | None = None
) -> Run:
    """Play a run from its start or, if its folder exists, from its last checkpoint.

    Args:
        network: the server's side, whose clients are there.
        path: the run's folder.
        observers: as for `train`.
        served: how the server is reached, kept for `resume`.

    Returns:
        The finished run.
    """

    def no_models() -> ClientContext:
        raise models_elsewhere(path)

    exists = (path / "config.json").exists()  # otherwise it was killed before there was a run
    since: dict[int, int] = {}
    for client, (rounds, guest) in read_guests(path).items() if exists else ():
        if rounds <= reached(path).completed:  # when the checkpoint was made; who is not here is as it was then
            since[client] = rounds
            network.guests.setdefault(client, guest)
    network.admit(list(since or network.guests))
    network.admitted |= since
    if not exists or not reached(path).finished:
        network.check_patience()
    session = Session(network, ObserverList(observers))
    config, facts = describe_run(network.terms.config, network.client_context, network.terms.row, executor=NETWORK)
    if exists:
        folder = RunFolder.open(path)
        folder.check_resumable()
        if FederationFile.read(path / FEDERATION_FILE).digest != network.terms.run:
            raise SparsonaError(
                f"'{path}' is a run of another federation file",
                expected=f"a run of '{network.terms.file.path}'",
                hint="choose another folder with --out",
            )
    else:
        guests = [network.guests.get(one.index, Guest()) for one in network.terms.file.clients]
        make_empty_folder(path)
        network.terms.file.write(path / FEDERATION_FILE)  # both first: a folder with a config is a run, and complete
        write_guests(path, network.guests, network.admitted)
        facts = with_guests(facts, network.terms, guests, network.environment)
        folder = RunFolder.create(path, dump(config), facts, None)

    def note_arrival() -> None:
        """What is known of late clients must be there when the summary is made."""
        write_guests(path, network.guests, network.admitted)
        sizes = folder.facts.sizes.copy()
        environments: list[Mapping[str, Any]] = [{**folder.environment, "gpu": None}, network.environment]
        for client in network.admitted:
            sizes[client] = network.guests[client].sizes
            environments.append(network.guests[client].environment)
        names = agreed_names(network.terms, (network.guests[client] for client in network.admitted))
        folder.learn(replace(folder.facts, sizes=sizes, class_names=names, differing=differing(environments)))

    network.note_arrival = note_arrival
    with folder:
        if exists:
            if changed_functions(folder.facts.functions, config.functions):
                warn("not the sampler this run began with: the rounds so far had another function of that name")
            network.connection.refusals |= refusals_in_a_row(folder.records, reached(path).completed)
            note_arrival()  # the server, or a client, may be on another machine now
        if served is not None:
            write_atomically(path / SERVER_FILE, (json.dumps(dict(served), indent=2) + "\n").encode())
        try:
            found = play(folder, session, config, no_models, network.client_context.task.frozen)
        finally:
            if session.is_finished:
                network.end()
    if (stop := found.summary.get("early_stop")) is not None:
        network.report(early_stop_sentence(stop))
    return found


def refusals_in_a_row(records: Records, completed: int) -> dict[int, int]:
    """How often each client was refused since it was last heard, by the records: a restart does not lift a bar.

    Args:
        records: of the run.
        completed: rounds that the checkpoint has; what was recorded after it is played again.

    Returns:
        The number for each client that has one. A turn in which a client was lost, or said that it could not, counts
        neither way, as while a server runs.
    """
    reasons = {(row.round, row.client): row.reason for row in records.failures()}
    found: Counter[int] = Counter()
    for turn in records.turns():
        reason = reasons.get((turn.round, turn.client), "")
        if turn.round >= completed:
            continue
        if reason.startswith(REFUSED):
            found[turn.client] += not reason.startswith(f"{REFUSED}{UNABLE}")
        elif kind_of(reason) is None if reason else not turn.dropped:
            del found[turn.client]  # it was heard
    return {client: number for client, number in found.items() if number}


def read_server(
    path: str | Path,
    key: str | Path | None,
    at_least: int | None,
    sampler: Callable[..., Any] | None = None,
    by: str = "sp.serve",
) -> tuple[Terms, KeyFile]:
    """The terms of a run that has a server, and the server's key; SparsonaError names what does not fit.

    Args:
        path: the federation file.
        key: the server's key; None: the one that was made with the file.
        at_least: how many clients must be there; None: all.
        sampler: the function that samples clients, if the file names one.
        by: what takes that function, for an error.

    Returns:
        Both.
    """
    terms = Terms.read(path)
    if terms.row.peers or terms.file.server is None:
        raise SparsonaError(
            f"{terms.row.title} has no server",
            expected="a method with a server",
            hint=f"`sparsona peer {path}` on every machine",
        )
    check_certificate(terms.file.server.certificate, terms.file.authority, terms.file.server.key, "the server")
    signer = KeyFile.read(key or key_path(path, "server"))
    if signer.public != terms.file.server.key:
        raise SparsonaError(
            f"'{key or key_path(path, 'server')}' is not the key of this federation's server",
            expected=f"the key whose public half is {terms.file.server.key}",
            hint="--key FILE, the one that `sparsona federation new` made",
        )
    terms.check_at_least(at_least)
    return terms.with_sampler(sampler, by), signer


@usual_torch()
def serve(
    path: str | Path,
    out: str | Path,
    *,
    listen: Sequence[str] = (),
    key: str | Path | None = None,
    at_least: int | None = None,
    deadline: float = 60.0,
    wait: float | None = None,
    tls: bool = True,
    sampler: Callable[..., Any] | None = None,
    observers: Sequence[object] = (),
    report: Callable[[str], None] = lambda text: None,
    waiting: Callable[[int, int], None] = lambda there, of: None,
) -> Run:
    """Be the server of a run on several machines: wait for its clients, play its rounds, and tell them the end.

    Args:
        path: the federation file.
        out: the run's folder. If it exists, the run is resumed from its last checkpoint.
        listen: addresses to listen on; none: port 7447 of all interfaces.
        key: the server's key; None: the one that was made with the file.
        at_least: how many clients must be there before the first round; None: all of the roster.
        deadline: seconds after which a client that has not answered is left out of a round.
        wait: seconds to wait for the clients; None: as long as it takes.
        tls: encrypt, and accept those with a certificate of the federation only. Frames are signed in any case.
        sampler: the function that samples clients, if the file names one (`sampler = "given:NAME"`).
        observers: as for `train`.
        report: is called with what happens to clients, for people to read.
        waiting: is called with how many clients are there, and of how many.

    Returns:
        The finished run.

    Example:
        On one machine, while others call `join`::

            run = sp.serve("fed.toml", "runs/x", listen=["0.0.0.0:7447"], report=print)
            run.report("page.html")
    """
    terms, signer = read_server(path, key, at_least, sampler)
    if terms.num_clients > MANY_CLIENTS:
        return_large_buffers()
    assert terms.file.server is not None
    certificates = Tls(terms.file.authority, terms.file.server.certificate, signer.pem) if tls else None
    addresses = tuple(listen) or (":7447",)
    names = {one.index: one.name for one in terms.file.clients}
    longest = terms.longest_frame()
    with ZenohLink(SERVER, run=terms.run, listen=addresses, tls=certificates, names=names, max_bytes=longest) as link:
        roster = Roster(terms.file.keys())
        session = next_session(Path(out))
        network = Network(terms, link.exchange, signer, roster, deadline, report, link.present, session=session)
        report(f"listening on {', '.join(addresses)}")
        network.gather_guests(Path(out), terms.num_clients if at_least is None else at_least, wait, waiting)
        served = {
            "session": session,
            "listen": list(addresses),
            "key": str(Path(key or key_path(path, "server")).absolute()),
            "at_least": at_least,
            "deadline": deadline,
            "tls": tls,
        }
        return play_network(network, Path(out), observers, served)


def next_session(path: Path) -> int:
    """The number of the next start of a server: the time, or more if its clock went back since the last one."""
    file = path / SERVER_FILE
    last = read_json(file).get("session", 0) if file.is_file() else 0
    return max(time.time_ns(), int(last) + 1)


@usual_torch()
def resume_served(
    path: Path, observers: Sequence[object] = (), sampler: Callable[..., Any] | None = None, **reports: Any
) -> Run:
    """Resume a run on several machines, listening where it listened before.

    Args:
        path: the run's folder.
        observers: as for `train`.
        sampler: the function that samples clients, again, if the run was started with one.
        reports: `report` and `waiting`, as for `serve`.

    Returns:
        The finished run.
    """
    served = read_json(path / SERVER_FILE)
    if "flower" in served:
        raise SparsonaError(
            f"the clients of '{path}' are reached through Flower",
            expected="a run whose server listens itself",
            hint="start the same app again: `flwr run`",
        )
    known = {name: served[name] for name in ("listen", "key", "at_least", "deadline", "tls") if name in served}
    return serve(path / FEDERATION_FILE, path, observers=observers, sampler=sampler, **known, **reports)
