"""Frames over real sockets of this machine: what arrives, what is lost, and what happens when nodes come and go."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import permutations
from pathlib import Path

import pytest
from federations import free_address, free_addresses

from sparsona.core.errors import SparsonaError
from sparsona.deploy import zenoh_link
from sparsona.deploy.identity import KeyFile, certify, new_authority, new_key, read_request
from sparsona.deploy.zenoh_link import Tls, ZenohLink, endpoint

SERVER = -1
LONG = 20.0  # a deadline that no test waits for


@pytest.fixture
def links() -> Iterator[contextlib.ExitStack]:
    """Closes, at the end, the links that are entered into it."""
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def address() -> str:
    return free_address()


def wait_for(condition: Callable[[], bool], seconds: float = LONG) -> None:
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, "it did not happen in time"
        time.sleep(0.01)


def server_at(links: contextlib.ExitStack, address: str, **options: object) -> ZenohLink:
    return links.enter_context(ZenohLink(SERVER, run="r", listen=(address,), **options))  # type: ignore[arg-type]


def client_at(links: contextlib.ExitStack, address: str, node: int, handle: object, **options: object) -> ZenohLink:
    link = links.enter_context(ZenohLink(node, run="r", connect=(address,), **options))  # type: ignore[arg-type]
    link.serve(handle)  # type: ignore[arg-type]
    return link


def reversed_(frame: bytes) -> bytes:
    return frame[::-1]


class Party:
    """Somebody who hands out certificates."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.authority = folder, new_authority("fed", folder / "authority.key")

    def tls(self, name: str, hosts: tuple[str, ...] = ()) -> Tls:
        key, request = new_key(name, self.folder)
        certificate = certify(read_request(request), self.authority, hosts=hosts)
        return Tls(self.authority.certificate, certificate, KeyFile.read(key).pem)


@pytest.fixture
def party(tmp_path: Path) -> Party:
    return Party(tmp_path)


@pytest.fixture
def other_party(tmp_path_factory: pytest.TempPathFactory) -> Party:
    return Party(tmp_path_factory.mktemp("other"))


# Round trips.


def test_answers_come_back_whatever_their_size(links: contextlib.ExitStack, address: str) -> None:
    server = server_at(links, address)
    client_at(links, address, 3, reversed_)
    for size in (0, 1, 1000, 10_000_000):
        frame = os.urandom(size)
        assert list(server.exchange([(3, frame)], LONG)) == [(3, frame[::-1])]


def test_each_client_gets_its_own_frame_and_items_are_taken_as_there_is_room(
    links: contextlib.ExitStack, address: str
) -> None:
    server, taken = server_at(links, address, window=3000), 0

    def items() -> Iterator[tuple[int, bytes]]:
        nonlocal taken
        for taken in range(1, 7):
            yield taken, bytes([taken]) * 1000

    for client in range(1, 7):
        client_at(links, address, client, lambda frame, client=client: frame + bytes([client]))
    answers, progress = [], []
    for answer in server.exchange(items(), LONG):
        answers.append(answer)
        progress.append(taken)
    assert sorted(answers) == [(client, bytes([client]) * 1001) for client in range(1, 7)]
    assert progress == [3, 4, 5, 6, 6, 6]  # three in flight, as long as there are more


def test_a_frame_larger_than_the_window_is_sent_alone(links: contextlib.ExitStack, address: str) -> None:
    server = server_at(links, address, window=10)
    for client in range(2):
        client_at(links, address, client, reversed_)
    assert dict(server.exchange([(0, b"a" * 100), (1, b"b" * 100)], LONG)) == {0: b"a" * 100, 1: b"b" * 100}


# Time and failure.


def test_a_client_that_comes_later_gets_its_frame(links: contextlib.ExitStack, address: str) -> None:
    server = server_at(links, address)
    began = time.monotonic()
    threading.Timer(0.5, lambda: client_at(links, address, 0, reversed_)).start()
    assert list(server.exchange([(0, b"abc")], LONG)) == [(0, b"cba")]
    assert 0.5 <= time.monotonic() - began < LONG / 2


def open_files() -> Iterator[str]:
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            yield os.readlink(f"/proc/self/fd/{number}")


@pytest.mark.parametrize("is_full", [False, True])
def test_long_frames_wait_in_a_file_and_are_sent_whole(
    links: contextlib.ExitStack, address: str, monkeypatch: pytest.MonkeyPatch, is_full: bool
) -> None:
    def no_room(file: int, data: bytes, at: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    if is_full:
        monkeypatch.setattr("os.pwrite", no_room)  # then they stay in memory
    server, frames = server_at(links, address), [(client, os.urandom(300_000 + client)) for client in range(3)]
    threading.Timer(0.5, lambda: [client_at(links, address, client, reversed_) for client in range(3)]).start()
    exchange = server.exchange(iter(frames), LONG)
    assert sorted(exchange) == [(client, frame[::-1]) for client, frame in frames]
    del exchange
    wait_for(lambda: not any("sparsona-sent" in name for name in open_files()))


def test_nobody_waits_for_a_client_that_never_answers(links: contextlib.ExitStack, address: str) -> None:
    server, release = server_at(links, address), threading.Event()
    calls = []

    def hang(frame: bytes) -> bytes:
        calls.append(frame)
        release.wait(LONG)
        return b"late"

    client_at(links, address, 0, hang)
    client_at(links, address, 1, reversed_)
    wait_for(lambda: server.present() == {0, 1})
    began, arrived = time.monotonic(), {}
    for client, answer in server.exchange([(0, b"ab"), (1, b"ab"), (2, b"ab")], 0.6):
        arrived[client] = (answer, time.monotonic() - began)
    assert (arrived[0][0], arrived[1][0], arrived[2][0]) == (None, b"ba", None)
    assert arrived[1][1] < 0.5
    assert 0.6 <= arrived[0][1] < 1.5
    assert calls == [b"ab"]  # not sent again while the client is there
    # The late answer is nobody's.
    release.set()
    time.sleep(0.1)
    assert list(server.exchange([(0, b"cd")], LONG)) == [(0, b"late")]
    assert calls == [b"ab", b"cd"]


def test_an_answer_in_time_counts_even_if_it_is_taken_late(links: contextlib.ExitStack, address: str) -> None:
    server = server_at(links, address)
    for client in range(2):
        client_at(links, address, client, reversed_)
    wait_for(lambda: server.present() == {0, 1})
    arrived = {}
    for client, answer in server.exchange([(0, b"ab"), (1, b"ab")], 0.5):
        arrived[client] = answer
        time.sleep(0.8)
    assert arrived == {0: b"ba", 1: b"ba"}


def test_a_handle_that_fails_or_says_nothing_is_known_at_once(links: contextlib.ExitStack, address: str) -> None:
    server, reported = server_at(links, address), []

    def handle(frame: bytes) -> bytes | None:
        if frame == b"fail":
            raise ZeroDivisionError("on purpose")
        return None if frame == b"silent" else frame

    link = links.enter_context(ZenohLink(0, run="r", connect=(address,)))
    link.serve(handle, failed=reported.append)
    began = time.monotonic()
    answers = [next(iter(server.exchange([(0, frame)], LONG))) for frame in (b"fail", b"silent", b"ok")]
    assert answers == [(0, None), (0, None), (0, b"ok")]
    assert time.monotonic() - began < LONG / 2
    assert [str(error) for error in reported] == ["on purpose"]


def test_frames_and_answers_that_are_too_long(links: contextlib.ExitStack, address: str) -> None:
    server, reported = server_at(links, address, max_bytes=10_000), []
    generous = server_at(links, free_address())
    called: list[int] = []

    def handle(frame: bytes) -> bytes:
        called.append(len(frame))
        return bytes(20_000)

    link = links.enter_context(ZenohLink(0, run="r", connect=(address,), max_bytes=1000))
    link.serve(handle, failed=reported.append)
    with pytest.raises(SparsonaError, match="10,001 bytes"):
        list(server.exchange([(0, bytes(10_001))], LONG))
    # A client's own limit, before the frame is copied or handled.
    assert list(server.exchange([(0, bytes(1001))], LONG)) == [(0, None)]
    assert called == []
    # An answer that the client itself should not have made, and one that the server does not accept.
    assert list(server.exchange([(0, b"")], LONG)) == [(0, None)]
    assert [error.what for error in reported] == ["a frame of 1,001 bytes was refused", "an answer has 20,000 bytes"]
    client_at(links, address, 1, handle)
    assert list(server.exchange([(1, b"")], 0.5)) == [(1, None)]
    # Nor does zenoh buffer what is much longer; the link lives on.
    client_at(links, address, 2, lambda frame: bytes(1_000_000) if frame else b"short")
    assert list(server.exchange([(2, b"x")], 0.5)) == [(2, None)]
    assert list(server.exchange([(2, b"")], LONG)) == [(2, b"short")]
    assert generous.present() == set()


CLIENT = """
import sys, time
from sparsona.deploy.zenoh_link import ZenohLink
link = ZenohLink(0, run="r", connect=(sys.argv[1],))
def handle(frame):
    if frame == b"die":
        print("working", flush=True)
        time.sleep(float(sys.argv[2]))
    return frame[::-1]
link.serve(handle)
time.sleep(60)
"""


@contextlib.contextmanager
def client_process(address: str, seconds: float) -> Iterator[subprocess.Popen[str]]:
    arguments = [sys.executable, "-c", CLIENT, address, str(seconds)]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_client_that_is_killed_and_restarted_gets_the_frame_again(links: contextlib.ExitStack, address: str) -> None:
    server, answers = server_at(links, address), []
    with client_process(address, 60.0) as first:
        asking = threading.Thread(target=lambda: answers.extend(server.exchange([(0, b"die")], LONG)))
        asking.start()
        assert first.stdout is not None
        assert first.stdout.readline() == "working\n"
        first.send_signal(signal.SIGKILL)
        first.wait()
        wait_for(lambda: server.present() == set())
        with client_process(address, 0.0):
            asking.join(LONG)
    assert answers == [(0, b"eid")]


def test_a_client_that_stops_reading_delays_nobody(links: contextlib.ExitStack, address: str) -> None:
    """Its frame is larger than what sockets hold: zenoh keeps the sender waiting."""
    server = server_at(links, address)
    client_at(links, address, 1, reversed_)
    with client_process(address, 0.0) as stopped:
        wait_for(lambda: server.present() == {0, 1})
        stopped.send_signal(signal.SIGSTOP)
        began, arrived = time.monotonic(), {}
        for client, answer in server.exchange([(0, bytes(20_000_000)), (1, b"ab")], 1.0):
            arrived[client] = (answer, time.monotonic() - began)
        assert arrived[0][0] is None
        assert 1.0 <= arrived[0][1] < 2.0
        assert arrived[1][0] == b"ba"
        assert arrived[1][1] < 0.9


def test_frames_are_handled_side_by_side(links: contextlib.ExitStack, address: str) -> None:
    server, both = server_at(links, address), threading.Barrier(2)
    other = links.enter_context(ZenohLink(1, run="r", connect=(address,)))

    def meet(frame: bytes) -> bytes:
        both.wait(LONG)
        return frame

    link = links.enter_context(ZenohLink(0, run="r", connect=(address,)))
    link.serve(meet, threads=2)
    answers: list[tuple[int, bytes | None]] = []
    asking = threading.Thread(target=lambda: answers.extend(other.exchange([(0, b"from 1")], LONG)))
    asking.start()
    assert list(server.exchange([(0, b"from the server")], LONG)) == [(0, b"from the server")]
    asking.join(LONG)
    assert answers == [(0, b"from 1")]


def test_a_process_ends_although_its_links_are_open(address: str) -> None:
    code = """
import sys, threading
from sparsona.deploy.zenoh_link import ZenohLink
server = ZenohLink(-1, run="r", listen=(sys.argv[1],))
client = ZenohLink(0, run="r", connect=(sys.argv[1],))
client.serve(lambda frame: threading.Event().wait(60))
lonely = ZenohLink(1, run="r", connect=(sys.argv[2],))
print(list(server.exchange([(0, b"x")], 0.3)))
"""
    arguments = [sys.executable, "-c", code, address, free_address()]
    ended = subprocess.run(arguments, capture_output=True, text=True, timeout=LONG, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "[(0, None)]\n", "")


def test_clients_outlive_the_server(links: contextlib.ExitStack, address: str) -> None:
    first = ZenohLink(SERVER, run="r", listen=(address,))
    for client in range(2):
        client_at(links, address, client, reversed_)
    wait_for(lambda: first.present() == {0, 1})
    first.close()
    second = server_at(links, address)
    assert dict(second.exchange([(0, b"ab"), (1, b"cd")], LONG)) == {0: b"ba", 1: b"dc"}


def test_a_link_closes_at_once_with_frames_in_flight(links: contextlib.ExitStack, address: str) -> None:
    server, started, release = server_at(links, address), threading.Event(), threading.Event()

    def hang(frame: bytes) -> bytes:
        started.set()
        release.wait(LONG)
        return frame

    client = client_at(links, address, 0, hang)
    answers: list[tuple[int, bytes | None]] = []
    asking = threading.Thread(target=lambda: answers.extend(server.exchange([(0, b"ab"), (1, b"ab")], LONG)))
    asking.start()
    assert started.wait(LONG)
    for link in (server, client):
        began = time.monotonic()
        link.close()
        assert time.monotonic() - began < 2.5
    asking.join(2.0)
    assert sorted(answers) == [(0, None), (1, None)]
    release.set()
    assert list(server.exchange([(0, b"ab")], LONG)) == [(0, None)]
    server.close()  # again: nothing happens


def test_closing_a_link_that_never_connected(address: str) -> None:
    link = ZenohLink(0, run="r", connect=(address,))
    link.serve(reversed_)
    wait_for(lambda: f"nobody can be reached at tcp/{address}" in link.trouble)
    assert not link.connected()
    assert link.present() == set()
    began = time.monotonic()
    link.close()
    assert time.monotonic() - began < 2.5


# Who is there, and who is not.


def test_present_follows_those_who_serve(links: contextlib.ExitStack, address: str) -> None:
    server = server_at(links, address)
    first = client_at(links, address, 0, reversed_)
    idle = links.enter_context(ZenohLink(1, run="r", connect=(address,)))
    wait_for(lambda: server.present() == {0} and idle.connected())
    idle.serve(reversed_)
    wait_for(lambda: server.present() == {0, 1} and idle.present() == {0, 1})
    first.close()
    wait_for(lambda: server.present() == {1})


def test_two_runs_on_one_port_do_not_mix(links: contextlib.ExitStack, address: str) -> None:
    server = server_at(links, address)
    other = links.enter_context(ZenohLink(SERVER, run="other", connect=(address,)))
    client_at(links, address, 0, lambda frame: b"run r")
    stranger = links.enter_context(ZenohLink(0, run="other", connect=(address,)))
    stranger.serve(lambda frame: b"run other")
    wait_for(lambda: server.present() == {0} and other.present() == {0})
    assert list(server.exchange([(0, b"")], LONG)) == [(0, b"run r")]
    assert list(other.exchange([(0, b"")], LONG)) == [(0, b"run other")]


def test_peers_reach_each_other_through_seeds(links: contextlib.ExitStack) -> None:
    """Two seeds, and three that only dial out: to one, to the other, and to whichever answers."""
    seeds = tuple(free_addresses(2))
    peers = [
        ZenohLink(0, run="r", listen=seeds[:1]),
        ZenohLink(1, run="r", listen=seeds[1:], connect=seeds[:1]),
        ZenohLink(2, run="r", connect=seeds),
        ZenohLink(3, run="r", connect=seeds[:1]),
        ZenohLink(4, run="r", connect=seeds[1:]),
    ]
    for node, peer in enumerate(peers):
        links.enter_context(peer)
        peer.serve(lambda frame, node=node: frame + bytes([node]))
    everybody = set(range(len(peers)))
    wait_for(lambda: all(peer.present() == everybody for peer in peers))
    for asks, answers in permutations(range(len(peers)), 2):
        assert list(peers[asks].exchange([(answers, bytes([asks]))], LONG)) == [(answers, bytes([asks, answers]))]
    # A seed is lost: who knows the other turns to it.
    survivor = ZenohLink(5, run="r", connect=seeds)
    links.enter_context(survivor)
    wait_for(lambda: survivor.present() == everybody)
    peers[0].close()
    wait_for(lambda: survivor.present() == {1, 2, 4})
    assert list(survivor.exchange([(4, b"x")], LONG)) == [(4, b"x\x04")]


# Certificates.


def test_mutual_tls(links: contextlib.ExitStack, address: str, party: Party, other_party: Party) -> None:
    server = server_at(links, address, tls=party.tls("server", ("fed.example.org",)))
    client_at(links, address, 0, reversed_, tls=party.tls("client-0"))
    stranger = other_party.tls("client-1")
    client_at(links, address, 1, reversed_, tls=stranger)
    # The right authority is known to the stranger, whose own certificate is of another.
    known = Tls(party.authority.certificate, stranger.certificate, stranger.key)
    client_at(links, address, 2, reversed_, tls=known)
    client_at(links, address, 3, reversed_)
    frame = os.urandom(1_000_000)
    answers = dict(server.exchange([(client, frame) for client in range(4)], 2.0))
    assert answers == {0: frame[::-1], 1: None, 2: None, 3: None}
    assert server.present() == {0}
    _refuses_old_tls(address)


def _refuses_old_tls(address: str) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    host, _, port = address.partition(":")
    with (
        socket.create_connection((host, int(port))) as plain,
        pytest.raises(ssl.SSLError, match=r"(?i)protocol.version|handshake"),
    ):
        context.wrap_socket(plain)


@pytest.mark.parametrize("whose", ["another authority", "a client"])
def test_nobody_else_can_pose_as_the_server(
    links: contextlib.ExitStack, address: str, party: Party, other_party: Party, whose: str
) -> None:
    poses = party.tls("client-1") if whose == "a client" else other_party.tls("server", ("fed.example.org",))
    server = server_at(links, address, tls=poses)
    client = client_at(links, address, 0, reversed_, tls=party.tls("client-0"))
    wait_for(lambda: "nobody can be reached" in client.trouble)
    assert list(server.exchange([(0, b"ab")], 0.5)) == [(0, None)]
    assert not client.connected()


def test_the_private_key_is_not_shown(party: Party) -> None:
    assert "PRIVATE" not in repr(party.tls("x"))


# Mistakes.


@pytest.mark.parametrize(
    ("address", "listening", "expected"),
    [
        ("localhost:7447", True, "tcp/localhost:7447"),
        (":7447", True, "tcp/0.0.0.0:7447"),
        (":7447", False, "tcp/127.0.0.1:7447"),
        ("[::]:1", True, "tcp/[::]:1"),
        ("tcp/host-1.example.org:65535", False, "tcp/host-1.example.org:65535"),
    ],
)
def test_addresses(address: str, listening: bool, expected: str) -> None:
    assert endpoint(address, tls=False, listening=listening) == expected


@pytest.mark.parametrize(
    "address",
    [
        "",
        "host",
        "host:",
        "host:0",
        "host:65536",
        "host:x",
        "::1:7447",
        "udp/h:1",
        "tls/h:1",
        "h:1#iface=eth0",
        "a b:1",
    ],
)
def test_wrong_addresses(address: str) -> None:
    with pytest.raises(SparsonaError) as caught:
        ZenohLink(0, run="r", connect=(address,))
    assert caught.value.expected
    assert caught.value.hint


def test_a_port_in_use(links: contextlib.ExitStack, address: str) -> None:
    server_at(links, address)
    with pytest.raises(SparsonaError, match="cannot listen") as caught:
        ZenohLink(SERVER, run="r", listen=(address,))
    assert "another process" in caught.value.hint


def test_certificates_that_are_none(address: str) -> None:
    with pytest.raises(SparsonaError, match="cannot listen") as caught:
        ZenohLink(SERVER, run="r", listen=(address,), tls=Tls("a", "b", "c"))
    assert "PEM" in caught.value.hint


def test_a_link_to_nobody_and_a_run_with_slashes() -> None:
    with pytest.raises(SparsonaError, match="reaches nobody"):
        ZenohLink(0, run="r")
    with pytest.raises(SparsonaError, match="cannot identify"):
        ZenohLink(0, run="r/*", connect=("h:1",))


def test_serving_twice(links: contextlib.ExitStack, address: str) -> None:
    link = server_at(links, address)
    link.serve(reversed_)
    with pytest.raises(SparsonaError, match="serves already"):
        link.serve(reversed_)


def test_without_zenoh_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zenoh", None)
    with pytest.raises(SparsonaError) as caught:
        ZenohLink(0, run="r", connect=("h:1",))
    assert "sparsona[peers]" in caught.value.hint


def test_the_module_is_imported_without_zenoh() -> None:
    code = f"import sys, {zenoh_link.__name__}; sys.exit('zenoh' in sys.modules or 'torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(Path(zenoh_link.__file__).parents[2])}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


def test_a_client_cannot_pose_as_another_at_a_server_that_knows_their_names(
    links: contextlib.ExitStack, address: str, party: Party
) -> None:
    names = {0: "anna", 1: "ben"}
    server = server_at(links, address, tls=party.tls("server", ("127.0.0.1",)), names=names)
    anna, ben = party.tls("anna"), party.tls("ben")
    client_at(links, address, 1, lambda frame: b"ben", tls=ben)
    client_at(links, address, 0, lambda frame: b"ben as anna", tls=ben)
    wait_for(lambda: server.present() == {1})
    assert dict(server.exchange([(0, b"?"), (1, b"?")], 2.0)) == {0: None, 1: b"ben"}
    client_at(links, address, 0, lambda frame: b"anna", tls=anna)
    assert dict(server.exchange([(0, b"?"), (1, b"?")], LONG)) == {0: b"anna", 1: b"ben"}
    assert server.present() == {0, 1}
