"""Frames over Flower, for organisations that run it already.

Flower starts a process for every message that reaches a SuperNode. That process is a relay: it hands the frame to the
client's own process, `sparsona join --flower SOCKET`, and returns the answer. It imports no torch and knows no secrets.
Frames are signed by their sender, so neither Flower nor the relay is trusted with more than delivery.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import socketserver
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparsona.core.errors import SparsonaError
from sparsona.deploy.exchange import Handle

MAX_BYTES = 256 << 20  # of a frame, where nobody says how long those of the run can be
MOST_IN_FLIGHT = 64  # frames under way at once
POLL_SECONDS = 0.1  # between two questions to the SuperLink for answers; Flower's own loop sleeps 3 s
NODES_SECONDS = 2.0  # between two questions for the nodes that are connected
RESEND_SECONDS = 2.0  # before a frame is sent again to a node that has nobody to hand it to
WHO_SECONDS = 60.0  # for a node to say whose it is, before it is asked again
NOBODY = -1  # a node that is no client's: others may share the SuperLink
_LENGTH = struct.Struct("<Q")
_NO_ANSWER = 2**64 - 1  # in place of a length
_WHO, _FRAME = "query.who", "query"  # types of Flower's messages
_ANSWERED, _SILENT, _ABSENT = "answered", "silent", "absent"  # what became of a frame


# The client's own process, and the relay to it.


class SocketServer:
    """Answers frames on a Unix socket that only this user can open.

    Args:
        path: of the socket. One that a killed process left behind is replaced.
        handle: what to do with a frame.
        failed: is called with what `handle` raised; the sender learns that there will be no answer.
        max_bytes: longest frame that is accepted. Longer ones are not buffered.
    """

    def __init__(
        self, path: str | Path, handle: Handle, failed: Callable[[Exception], None], max_bytes: int = MAX_BYTES
    ) -> None:
        self.path = Path(path)

        class Connection(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with contextlib.suppress(OSError):  # the relay has gone: the server sends its frame again
                    frame = _receive(self.request, max_bytes)
                    if frame is None:
                        return
                    try:
                        answer = handle(frame)
                    except Exception as error:
                        failed(error)
                        answer = None
                    _send(self.request, answer)

        class Server(socketserver.ThreadingUnixStreamServer):
            daemon_threads = True

        self._remove_stale()
        before = os.umask(0o177)
        try:
            self._server = Server(str(self.path), Connection)
        except OSError as error:
            raise SparsonaError(
                f"cannot make the socket '{self.path}': {error}",
                expected="a path of at most 107 bytes in a folder of yours",
            ) from error
        finally:
            os.umask(before)
        threading.Thread(target=self._server.serve_forever, args=(0.1,), name="sparsona-socket", daemon=True).start()

    def _remove_stale(self) -> None:
        if not self.path.is_socket():
            return  # binding to any other file fails
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(self.path))
            except OSError:
                self.path.unlink(missing_ok=True)
            else:
                raise SparsonaError(
                    f"somebody answers on '{self.path}' already", expected="a socket of its own for each client"
                )

    def __enter__(self) -> SocketServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop, and remove the socket."""
        self._server.shutdown()
        self._server.server_close()
        self.path.unlink(missing_ok=True)


def relay(path: str | Path, frame: bytes, seconds: float, max_bytes: int = MAX_BYTES) -> tuple[str, bytes]:
    """Hand a frame to the process that listens on a socket.

    Args:
        path: the socket.
        frame: what to hand over.
        seconds: how long to wait for the answer.
        max_bytes: longest answer. A longer one is not read.

    Returns:
        "answered" and the answer, "silent" if the process does not answer this frame, "absent" if it is not there.
    """
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(max(0.1, seconds))
        try:
            line.connect(str(path))
            _send(line, frame)
            answer = _receive(line, max_bytes)
        except OSError:
            return _ABSENT, b""
    return (_SILENT, b"") if answer is None else (_ANSWERED, answer)


def _send(line: socket.socket, data: bytes | None) -> None:
    line.sendall(_LENGTH.pack(_NO_ANSWER if data is None else len(data)))
    if data:  # after an empty one the other side may have closed already, and sending nothing would fail
        line.sendall(data)


def _receive(line: socket.socket, max_bytes: int) -> bytes | None:
    (length,) = _LENGTH.unpack(_read(line, _LENGTH.size))
    if length == _NO_ANSWER:
        return None
    if length > max_bytes:
        raise ConnectionError(f"a frame of {length:,} bytes")
    return _read(line, length)


def _read(line: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        piece = line.recv(min(length - len(data), 1 << 20))
        if not piece:
            raise ConnectionError("cut off")
        data += piece
    return bytes(data)


# Flower.


def client_app() -> Any:
    """The ClientApp: a relay to the socket that `--node-config` names.

    Returns:
        A flwr.clientapp.ClientApp.
    """
    _import_flwr()
    from flwr.app import ConfigRecord, Message, RecordDict
    from flwr.clientapp import ClientApp

    def who(message: Any, context: Any) -> Any:
        client = context.node_config.get("client", NOBODY)
        return Message(RecordDict({"about": ConfigRecord({"client": client})}), reply_to=message)

    def pass_on(message: Any, context: Any) -> Any:
        left = message.metadata.created_at + message.metadata.ttl - time.time()
        limit = message.content["about"].get("limit", MAX_BYTES)
        limit = limit if type(limit) is int and limit > 0 else MAX_BYTES
        status, answer = relay(str(context.node_config["socket"]), _frame_of(message, limit), left, limit)
        return Message(_content(answer, status), reply_to=message)

    app = ClientApp()
    app.query("who")(who)
    app.query()(pass_on)
    return app


def server_app(play: Callable[[FlowerLink, Mapping[str, Any]], None]) -> Any:
    """The ServerApp.

    Args:
        play: plays a run over the link; it is also given Flower's run config.

    Returns:
        A flwr.serverapp.ServerApp.
    """
    _import_flwr()
    from flwr.serverapp import ServerApp

    def main(grid: Any, context: Any) -> None:
        play(FlowerLink(grid), context.run_config)

    app = ServerApp()
    app.main()(main)
    return app


@dataclass
class _Flight:
    """A frame that has no answer yet."""

    frame: bytes
    ends: float  # when it counts as lost
    due: float  # when it is sent again, if no message is under way
    messages: set[str] = field(default_factory=set)  # Flower's ids of what is under way


class FlowerLink:
    """A server's link to its clients through Flower's grid.

    Which node is which client's, the nodes say themselves (`--node-config client=3`). A node that says what is not true
    gains nothing: it has not the key with which that client's answers are signed.

    Args:
        grid: what Flower gives to a ServerApp.

    `max_bytes` is the longest frame, of either direction, once the run is known: relays are told, and longer answers
    are dropped unread.
    """

    def __init__(self, grid: Any) -> None:
        self._grid, self.max_bytes = grid, MAX_BYTES
        self._clients: dict[int, int] = {}  # of connected nodes, as far as they have said
        self._asked: dict[str, int] = {}  # nodes that were asked whose they are, by Flower's id of the question
        self._again: dict[int, float] = {}  # when a node that has not said so is asked again
        self._refreshed = 0.0

    def present(self) -> set[int]:
        """The clients whose nodes are connected."""
        self._refresh()
        self._pull({})
        return set(self._clients.values()) - {NOBODY}

    def exchange(self, items: Iterable[tuple[int, bytes]], deadline: float) -> Iterator[tuple[int, bytes | None]]:
        """See `deploy.exchange.Exchange`."""
        waiting, flights = iter(items), dict[int, _Flight]()
        is_more = True
        while True:
            while is_more and len(flights) < MOST_IN_FLIGHT:
                item = next(waiting, None)
                if item is None:
                    is_more = False
                    break
                now = time.monotonic()
                flights[item[0]] = _Flight(item[1], now + deadline, now)
                self._push(item[0], flights[item[0]], now)
            if not flights:
                return
            self._refresh()
            answers = self._pull(flights)
            now = time.monotonic()
            for client, flight in flights.items():
                if client not in answers and flight.ends <= now:
                    answers[client] = None
                elif not flight.messages and flight.due <= now:
                    self._push(client, flight, now)
            for client in answers:
                del flights[client]
            yield from answers.items()
            if not answers:
                time.sleep(POLL_SECONDS)

    def _push(self, client: int, flight: _Flight, now: float) -> None:
        """Send a frame to the nodes that say they are this client's: one, unless somebody is mistaken."""
        from flwr.app import Message

        nodes = [node for node, whose in self._clients.items() if whose == client]
        ttl = flight.ends - now
        messages = (
            [Message(_content(flight.frame, limit=self.max_bytes), node, _FRAME, ttl=ttl) for node in nodes]
            if ttl > 0
            else []
        )
        flight.messages = {one for one in self._grid.push_messages(messages) if one} if messages else set()
        flight.due = now + RESEND_SECONDS if nodes else now

    def _refresh(self) -> None:
        """Learn which nodes are connected, and ask new ones whose they are."""
        from flwr.app import ConfigRecord, Message, RecordDict

        now = time.monotonic()
        if now < self._refreshed + NODES_SECONDS:
            return
        self._refreshed = now
        nodes = set(self._grid.get_node_ids())
        self._clients = {node: client for node, client in self._clients.items() if node in nodes}
        self._again = {node: then for node, then in self._again.items() if node in nodes}
        new = [node for node in sorted(nodes - set(self._clients)) if self._again.get(node, now) <= now]
        self._asked = {one: node for one, node in self._asked.items() if node in nodes and node not in new}
        asking = [Message(RecordDict({"about": ConfigRecord({})}), node, _WHO, ttl=WHO_SECONDS) for node in new]
        if asking:
            self._again.update(dict.fromkeys(new, now + WHO_SECONDS))
            pushed = self._grid.push_messages(asking)
            self._asked.update({one: node for node, one in zip(new, pushed, strict=True) if one})

    def _pull(self, flights: Mapping[int, _Flight]) -> dict[int, bytes | None]:
        """What has arrived since: answers, None for a frame that is not going to be answered."""
        owners = {one: client for client, flight in flights.items() for one in flight.messages}
        if not (ids := [*owners, *self._asked]):
            return {}
        answers: dict[int, bytes | None] = {}
        for reply in self._grid.pull_messages(ids):
            name = reply.metadata.reply_to_message_id
            if name in self._asked:
                node = self._asked.pop(name)
                if not reply.has_error():
                    self._clients[node] = _who(reply)
            elif name in owners:
                client = owners[name]
                flights[client].messages.discard(name)
                flights[client].due = time.monotonic() + RESEND_SECONDS
                status, answer = (_ABSENT, b"") if reply.has_error() else _answer(reply, self.max_bytes)
                if status == _ANSWERED:
                    answers[client] = answer
                elif status == _SILENT and not flights[client].messages:
                    answers.setdefault(client, None)
        return answers


def _content(frame: bytes, status: str = "", limit: int = MAX_BYTES) -> Any:
    """A frame as Flower carries it: arrays are sent in pieces, so that they may be large. `limit` is for its answer."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    array = Array("uint8", (len(frame),), "sparsona.frame", bytes(frame))
    about = ConfigRecord({"status": status, "limit": limit})
    return RecordDict({"frame": ArrayRecord({"frame": array}), "about": about})


def _frame_of(message: Any, max_bytes: int = MAX_BYTES) -> bytes:
    data = message.content["frame"]["frame"].data
    if len(data) > max_bytes:
        raise ValueError(f"a frame of {len(data):,} bytes")
    return bytes(data)


def _answer(reply: Any, max_bytes: int = MAX_BYTES) -> tuple[str, bytes]:
    try:
        return str(reply.content["about"]["status"]), _frame_of(reply, max_bytes)
    except (KeyError, TypeError, AttributeError, ValueError):
        return _SILENT, b""  # no relay of ours


def _who(reply: Any) -> int:
    try:
        client = reply.content["about"]["client"]
    except (KeyError, TypeError, AttributeError):
        return NOBODY
    return client if type(client) is int and client >= 0 else NOBODY


def write_app(folder: Path, config: Mapping[str, str | int | float]) -> None:
    """Write the folder that `flwr run` wants.

    Args:
        folder: a new folder.
        config: Flower's run config, for `server_app`.
    """
    if folder.exists():
        raise SparsonaError(f"'{folder}' exists already", expected="a new folder", hint="give it another name")
    package = folder / "sparsona_app"
    package.mkdir(parents=True)
    values = "\n".join(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in config.items())
    (folder / "pyproject.toml").write_text(_PROJECT.format(values=values), encoding="utf-8")
    (package / "__init__.py").write_text("")
    (package / "server_app.py").write_text("from sparsona.experiment.flower import server_app\n\napp = server_app()\n")
    (package / "client_app.py").write_text("from sparsona.deploy.flower import client_app\n\napp = client_app()\n")


# Dependencies are none, because Flower would fetch them for every run: they are installed on the machines.
_PROJECT = """\
[project]
name = "sparsona-app"
version = "1.0.0"
description = "Sparsona over Flower"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "sparsona"

[tool.flwr.app.components]
serverapp = "sparsona_app.server_app:app"
clientapp = "sparsona_app.client_app:app"

# Paths on the SuperLink's machine, where the server's side runs.
[tool.flwr.app.config]
{values}
"""


def _import_flwr() -> None:
    try:
        import flwr.app  # noqa: F401
    except ImportError as error:
        raise SparsonaError("Flower needs the package flwr", hint="pip install 'sparsona[flower]'") from error
