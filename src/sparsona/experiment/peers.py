"""Runs without a server: peers on machines of their own, from a federation file."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from sparsona.core.errors import SparsonaError
from sparsona.core.round import Client
from sparsona.core.torch_state import usual_torch
from sparsona.data.federation import Federation
from sparsona.deploy.exchange import Exchange
from sparsona.deploy.frames import Signer, Verifier
from sparsona.deploy.identity import Roster, check_certificate
from sparsona.deploy.peer import COMPUTING, Peer
from sparsona.deploy.vault import Vault
from sparsona.deploy.zenoh_link import Tls, ZenohLink
from sparsona.engine.context import ClientContext
from sparsona.executors import choose_device
from sparsona.experiment.client_data import own_data
from sparsona.experiment.client_side import describe_client, find_key, make_greeting
from sparsona.experiment.terms import Terms


def _check_peers(terms: Terms) -> None:
    """Raise SparsonaError for a method with a server."""
    if not terms.row.peers:
        raise SparsonaError(
            f"{terms.row.title} has a server",
            expected="a method whose clients send to each other, such as dispfl",
            hint=f"`sparsona server {terms.file.path}` on one machine, `sparsona join` on the others",
        )


def make_peer(
    terms: Terms,
    index: int,
    federation: Federation,
    folder: Path,
    exchange: Exchange,
    signer: Signer,
    verifier: Verifier,
    *,
    deadline: float = 60.0,
    grace: float | None = None,
    shares_labels: bool = False,
    device: str = "auto",
    report: Callable[[str], None] = lambda text: None,
) -> Peer:
    """One peer of a run.

    Args:
        terms: of the run.
        index: the peer.
        federation: its data, as `own_data` returns it.
        folder: where it keeps its State, its messages and its journal.
        exchange: the transport.
        signer: signs as this peer.
        verifier: knows the others' keys.
        deadline: seconds after which a neighbour that has not answered is left out of a round.
        grace: seconds that it stays at the end for others; None: as many.
        shares_labels: whether its journal tells its label counts.
        device: where it trains.
        report: is called with what happens.

    Returns:
        The peer: `handle` answers the others, `wait` and `play` do the rest.
    """
    _check_peers(terms)
    place = choose_device(device, "fp32")
    train, validation, _ = (int(count) for count in federation.sizes()[index])

    def make_context(cards: tuple[Client, ...]) -> ClientContext:
        return terms.context(federation, cards, place)

    num = terms.num_clients
    alone = tuple(Client(one.index, train, one.capacity, validation, num, train) for one in terms.file.clients)
    with COMPUTING:
        context = make_context(alone)
    greeting = make_greeting(context, federation, index, shares_labels)
    vault = Vault(folder)
    found = Peer(
        index,
        terms.run,
        [one.name for one in terms.file.clients],
        terms.file.capacities,
        make_context,
        greeting,
        vault,
        exchange,
        signer,
        verifier,
        deadline,
        grace,
        shares_labels,
        report,
    )
    describe_client(terms, index, federation, vault, greeting)
    return found


def play_together(peers: Sequence[Peer]) -> None:
    """Play peers of this process at the same time, each in a thread, to the end; an error of one is raised afterwards.

    Args:
        peers: made by `make_peer`; their exchange must reach each other's `handle`.
    """
    errors: list[BaseException] = []

    def play(peer: Peer) -> None:
        try:
            peer.wait()
            peer.play()
        except BaseException as error:
            errors.append(error)
        finally:
            peer.close()

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for all of them: sums that are split among threads differ in their last bits
    try:
        playing = [Thread(target=play, args=(peer,), daemon=True) for peer in peers]
        for thread in playing:
            thread.start()
        for thread in playing:
            thread.join()
    finally:
        torch.set_num_threads(threads)
    if errors:
        raise errors[0]


@usual_torch()
def be_peer(
    path: str | Path,
    data: str,
    *,
    listen: Sequence[str] = (),
    connect: Sequence[str] = (),
    key: str | Path | None = None,
    vault: str | Path | None = None,
    at_least: int | None = None,
    deadline: float = 60.0,
    wait: float | None = None,
    grace: float | None = None,
    shares_labels: bool = False,
    device: str = "auto",
    tls: bool = True,
    report: Callable[[str], None] = lambda text: None,
    waiting: Callable[[int, int], None] = lambda there, of: None,
    data_dir: str | None = None,
    **options: Any,
) -> Path:
    """Be a peer of a run on several machines, until it is over and the others need nothing more.

    Args:
        path: the federation file.
        data: as for `join`.
        listen: addresses to listen on; none: it dials out only, and needs no open port.
        connect: addresses to dial; none: those of the other peers in the file.
        key: this peer's key; None: the one here or beside the file that the roster has.
        vault: this peer's folder; None: a folder in ./vault.
        at_least: how many peers must be there before the first round; None: all of the roster.
        deadline: seconds after which a neighbour that has not answered is left out of a round.
        wait: seconds to wait for the others before the first round; None: as long as it takes.
        grace: seconds that it stays at the end for others that are not done; None: as many as the deadline.
        shares_labels: whether the journal, and so the gathered run, tells its label counts.
        device: where it trains.
        tls: encrypt, and accept those with a certificate of the federation only. Frames are signed in any case.
        report: is called with what happens, for people to read.
        waiting: is called with how many peers are there, and of how many.
        data_dir: folder that is searched first for the data's files.
        options: how the data is split: validation_rate, test_rate, and of a data set partition and so on.

    Returns:
        The peer's folder, with its journal and its model.
    """
    terms = Terms.read(path)
    _check_peers(terms)
    signer, member = find_key(terms.file, Path(path), key)
    check_certificate(member.certificate, terms.file.authority, member.key, member.name)
    terms.check_at_least(at_least)
    others = [address for one in terms.file.clients if one.index != member.index for address in one.addresses]
    addresses = tuple(connect) or tuple(others)
    if not (listen or addresses):
        raise SparsonaError(
            f"'{path}' does not say where any peer is, and this one does not listen",
            expected="an address to dial, or one to listen on",
            hint="--connect host:7447, --listen :7447, or `sparsona federation admit --address` for a few peers",
        )
    folder = terms.vault_of(member, vault)
    federation = own_data(terms, member.index, data, data_dir, **options)
    certificates = Tls(terms.file.authority, member.certificate, signer.pem) if tls else None
    with COMPUTING:
        longest = terms.longest_frame()
    claimed = Vault(folder)
    claimed.claim(terms.run, member.index, federation.digest())
    try:
        link: ZenohLink  # made below: when it carries the first question, the peer must be able to answer
        peer = make_peer(
            terms,
            member.index,
            federation,
            folder,
            lambda items, seconds: link.exchange(items, seconds),
            signer,
            Roster(terms.file.keys()),
            deadline=deadline,
            grace=grace,
            shares_labels=shares_labels,
            device=device,
            report=report,
        )
        # The link is closed first: to a peer that leaves early and comes back, others send their questions again.
        with (
            closing(peer),
            ZenohLink(
                member.index,
                run=terms.run,
                listen=tuple(listen),
                connect=addresses,
                tls=certificates,
                max_bytes=longest,
            ) as link,
        ):
            # Every other peer may have one question that waits, and ask another one.
            link.serve(
                peer.handle,
                threads=terms.num_clients + 4,
                failed=lambda error: report(f"a fault: {type(error).__name__}: {error}"),
            )
            where = [*(f"listening on {one}" for one in listen), *(f"dialling {one}" for one in addresses)]
            report(f"{member.name}: peer {member.index} of {terms.num_clients}, {', '.join(where)}")
            peer.wait(at_least, wait, waiting)
            peer.play(lambda completed, rounds: report(f"{completed} of {rounds} rounds"))
            time.sleep(0.5)  # the last answers are on their way
    finally:
        claimed.release()
    return folder
