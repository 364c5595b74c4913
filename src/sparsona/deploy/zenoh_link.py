"""The network link of a process: frames to other nodes and their answers, over zenoh.

A node that listens (a server, a seed, a peer with an open port) is a zenoh router; a node that only dials out is a
zenoh client of one of them. Routers pass on what is not for them, so that two nodes behind NAT reach each other through
a node that both can dial. (zenoh's own mode "peer" is not used: since zenoh 1.9 nobody relays between two peers.)

Let one or two nodes of a run listen, and all others dial both: in zenoh 1.10.2 the routing of a router that knows two
or more others can panic when one of them leaves (4 of 40 tries with three routers, none of 40 with two).

The link trusts nobody it carries frames for: with TLS, only holders of a certificate take part, but which of them sent
a frame is for the frame's signature to say.
"""

from __future__ import annotations

import atexit
import base64
import json
import logging
import os
import queue
import random
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from sparsona.core.errors import SparsonaError
from sparsona.deploy.addresses import parse_address
from sparsona.deploy.exchange import Handle

MEBIBYTE = 1 << 20
CLOSING_SECONDS = 2.0  # how long `close` waits for zenoh
SERVING_SECONDS = 1.0  # and then for answers that are under way: Python aborts if it ends while one is in foreign code
REDIAL_SECONDS = (0.2, 5.0)  # first and longest pause between two attempts to reach somebody
RESEND_SECONDS = (0.05, 1.0)  # first and longest pause before a frame is sent again
UNSEEN_SECONDS = 5.0  # a frame for a node that does not seem to be there is sent every so often nevertheless
SHORT = 65536  # bytes of a frame that waits for its answer in memory; longer ones wait in a file
MOST_HERE = 16  # answers, or ends of queries, that wait to be taken while further frames are made
MOST_IN_FLIGHT = 1024  # frames, however small: each has a thread while it is sent
MOST_WAITING = 64  # frames that may wait for a thread of `serve`; senders repeat what is dropped

# Sent instead of an answer, so that the sender does not wait for one, or send the frame again.
_NO_ANSWER = b"sparsona: no answer"

_RUN = re.compile(r"[A-Za-z0-9_.-]+")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tls:
    """What a node needs for mutual TLS 1.3: PEM texts, which are handed to zenoh in memory and never written to a file.

    Args:
        authority: certificate of the authority whose certificates are accepted.
        certificate: this node's certificate, signed by the authority.
        key: this node's private key.
    """

    authority: str
    certificate: str
    key: str = field(repr=False)


def endpoint(address: str, *, tls: bool, listening: bool) -> str:
    """An address as zenoh writes it.

    Args:
        address: "host:port", ":port" or "[IPv6]:port"; "tcp/" or "tls/" may stand before it.
        tls: whether the link is encrypted.
        listening: whether the address is listened on; without a host, on all interfaces. An address to dial is this
            machine's without a host.

    Returns:
        The endpoint.

    Example:
        >>> endpoint(":7447", tls=False, listening=True)
        'tcp/0.0.0.0:7447'
        >>> endpoint("[::1]:7447", tls=True, listening=False)
        'tls/[::1]:7447'
    """
    found, scheme = parse_address(address), "tls" if tls else "tcp"
    if found.scheme not in ("", scheme):
        raise SparsonaError(
            f"'{address}' is not for this link",
            expected=f"an address that begins with {scheme}/, or with no protocol",
            hint="with certificates a link uses tls, without them tcp",
        )
    return f"{scheme}/{found.host or ('0.0.0.0' if listening else '127.0.0.1')}:{found.port}"


@dataclass
class _Flight:
    """A frame that has no answer yet."""

    first: bytes | None  # the frame, until it is on its way
    again: Callable[[], bytes]  # reads it once more
    size: int
    ends: float  # when it counts as lost
    due: float  # when it is sent again; infinity while a query is under way
    pause: float = RESEND_SECONDS[0]
    blind: float = 0.0  # when it is sent even if the node does not seem to be there


class _SentFrames:
    """Frames that wait for their answers, in a file: they are needed again only if a connection breaks."""

    def __init__(self) -> None:
        self._file: int | None = None
        self._end = 0

    def keep(self, frame: bytes) -> Callable[[], bytes]:
        """Store a frame; returns what reads it."""
        start, size = self._end, len(frame)
        if size < SHORT:
            return lambda: frame
        try:
            if self._file is None:
                self._file, name = tempfile.mkstemp(prefix="sparsona-sent-")
                os.unlink(name)
            rest = memoryview(frame)
            while rest:
                written = os.pwrite(self._file, rest, self._end)
                self._end, rest = self._end + written, rest[written:]
        except OSError:
            return lambda: frame  # no room there: then it stays in memory
        return lambda: self._read(start, size)

    def _read(self, start: int, size: int) -> bytes:
        assert self._file is not None
        data = os.pread(self._file, size, start)
        while len(data) < size:
            data += os.pread(self._file, size - len(data), start + len(data))
        return data

    def __del__(self) -> None:  # when no thread can read from it any more
        if self._file is not None:
            os.close(self._file)


@dataclass(frozen=True)
class _Event:
    """What became of a query: an answer, or its end without (further) answers."""

    client: int
    at: float
    answer: Any | None  # zenoh.ZBytes
    refused: bool = False  # the node is there and does not answer


class ZenohLink:
    """One process's link to the others of a run.

    A link that listens is ready when it has been made. One that only dials out may be made before there is anybody to
    reach: it keeps dialling for as long as it lives, and again when the connection breaks.

    Args:
        node: this process's index: a client's, or core.update.SERVER.
        run: identity of the run. Links of different runs do not see each other's frames, even on one port.
        listen: addresses to listen on (see `endpoint`); none for a process that needs no open port.
        connect: addresses to dial. A process that listens dials all of them; one that does not stays with the first
            that answers, and turns to the next when it is lost.
        tls: certificates; None: not encrypted, for one machine or tests.
        max_bytes: longest frame that is sent or accepted. Longer ones are not buffered.
        window: bytes of frames that `exchange` has under way at once; answers of about as many bytes may wait to be
            taken. This, and not the number of clients, bounds its memory, and its file of frames to be sent again.
        names: of a server: the name in each client's certificate. A client can then neither receive what is for another
            nor answer for it; without TLS there are no certificates, and this is not enforced.

    Example:
        >>> with ZenohLink(-1, run="doc", listen=("127.0.0.1:17447",)) as server:
        ...     with ZenohLink(0, run="doc", connect=("127.0.0.1:17447",)) as client:
        ...         client.serve(lambda frame: frame[::-1])
        ...         list(server.exchange([(0, b"abc")], deadline=10.0))
        [(0, b'cba')]
    """

    def __init__(
        self,
        node: int,
        *,
        run: str,
        listen: tuple[str, ...] = (),
        connect: tuple[str, ...] = (),
        tls: Tls | None = None,
        max_bytes: int = 256 * MEBIBYTE,
        window: int = 256 * MEBIBYTE,
        names: Mapping[int, str] | None = None,
    ) -> None:
        if not _RUN.fullmatch(run):
            raise SparsonaError(f"'{run}' cannot identify a run", expected="letters, digits, '-', '_' and '.'")
        if not (listen or connect):
            raise SparsonaError("a link with no address to listen on and none to dial reaches nobody")
        self.node, self.max_bytes = node, max_bytes
        self._zenoh = _import_zenoh()
        self._prefix, self._window = f"sparsona/{run}", window
        self._listens = bool(listen)
        self._listen = [endpoint(address, tls=tls is not None, listening=True) for address in listen]
        self._connect = [endpoint(address, tls=tls is not None, listening=False) for address in connect]
        self._config = _config(self._zenoh, self._listen, self._connect, tls, max_bytes)
        if names is not None and tls is not None:
            _insert(self._zenoh, self._config, "access_control", _access(self._prefix, names))
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._alive: dict[int, set[str]] = {}  # tokens of each node: one that was restarted has two for a moment
        self._session: Any = None
        self._trouble = ""
        self._watches = False
        self._declared: list[Any] = []
        self._queries: queue.SimpleQueue[Any] | None = None
        self._serving: list[threading.Thread] = []
        if self._listens:
            try:
                self._opened(self._zenoh.open(self._config))
            except self._zenoh.ZError as error:
                raise _cannot_open(error, self._listen, tls) from error
        else:
            threading.Thread(target=self._dial, name="sparsona-dial").start()
        atexit.register(self._close_at_exit)

    def __enter__(self) -> ZenohLink:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def present(self) -> set[int]:
        """The nodes that can be asked now: those that `serve`, and that this link reaches.

        A link that only dials out learns of them from its first call on. A process that was killed is gone at once, a
        machine that was switched off after ten seconds, a process that hangs within twenty.
        """
        self._watch()
        with self._lock:
            return {node for node, tokens in self._alive.items() if tokens}

    def connected(self) -> bool:
        """Whether this link has a connection to anybody."""
        if self._session is None or self._closed.is_set():
            return False
        try:
            return bool(self._session.info.links())
        except self._zenoh.ZError:
            return False

    @property
    def trouble(self) -> str:
        """Why a link that only dials out has not reached anybody yet; empty when it has."""
        return self._trouble

    def exchange(self, items: Iterable[tuple[int, bytes]], deadline: float) -> Iterator[tuple[int, bytes | None]]:
        """Sends frames to nodes, and yields their answers as they arrive: see `sparsona.deploy.exchange.Exchange`.

        Frames are under way at once while they fit into the window. A node that is there and does not answer (its
        handle returned None, or failed) counts as lost at once; one whose connection breaks gets the frame again.
        """
        self._watch()
        events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        flights: dict[int, _Flight] = {}
        sent = _SentFrames()
        source, exhausted, held = iter(items), False, 0
        while True:
            # When many answers are here they come first: they take more room than frames that are still to be made.
            while not exhausted and (not flights or (events.qsize() < MOST_HERE and self._has_room(flights, held))):
                item = next(source, None)
                if item is None:
                    exhausted = True
                    break
                client, frame = item
                flights[client] = flight = self._flight(client, frame, deadline, sent)
                held += flight.size
                self._send(client, flight, events, flight.due)
                del item, frame, flight  # zenoh has a copy; this one would stay until the next is taken
            if not flights:
                return
            if self._closed.is_set():
                lost = list(flights)
            else:
                lost = []
                now = time.monotonic()
                wait = max(0.0, min(min(flight.due, flight.ends) for flight in flights.values()) - now)
                try:
                    event = events.get(timeout=wait)
                except queue.Empty:
                    now = time.monotonic()
                    lost = [client for client, flight in flights.items() if flight.ends <= now]
                    for client, flight in flights.items():
                        if flight.due <= now < flight.ends:
                            self._send(client, flight, events, now)
                else:
                    known = flights.get(event.client)
                    if known is None:
                        continue  # late, or a second answer
                    if event.answer is not None and event.at <= known.ends:
                        held -= flights.pop(event.client).size
                        yield event.client, event.answer.to_bytes()
                    elif event.refused:
                        lost = [event.client]
                    else:
                        known.due = event.at + known.pause
                        known.pause = min(2 * known.pause, RESEND_SECONDS[1])
            for client in lost:
                held -= flights.pop(client).size
                yield client, None

    def serve(self, handle: Handle, threads: int = 1, *, failed: Callable[[Exception], None] | None = None) -> None:
        """Answers the frames for this node, from now on until the link is closed.

        Args:
            handle: what to do with a frame; if it returns None, the sender learns that there will be no answer.
            threads: how many frames are handled at once.
            failed: is called with what `handle` raised, and with a SparsonaError for a frame that is too long; the
                sender learns that there will be no answer. By default they are logged.
        """
        with self._lock:
            if self._queries is not None:
                raise SparsonaError("this link serves already", hint="one link answers for one node")
            self._queries = queue.SimpleQueue()
            session = self._session
        report = failed or (lambda error: _log.error("a frame was not answered: %s", error))
        for _ in range(threads):
            target, arguments = self._answer_queries, (self._queries, handle, report)
            # A daemon: a handle that hangs must not keep the process. `close` waits for those that do not.
            thread = threading.Thread(target=target, args=arguments, name="sparsona-serve", daemon=True)
            thread.start()
            self._serving.append(thread)
        if session is not None:
            self._declare_served(session)

    def close(self) -> None:
        """Ends the link within three seconds, whatever is under way: exchanges lose what has no answer yet."""
        atexit.unregister(self._close_at_exit)
        session = self._mark_closed()
        if session is not None:
            # zenoh takes up to ten seconds where the other side has stopped reading. Not a daemon: see `_send`.
            closing = threading.Thread(target=self._close_session, args=(session,), name="sparsona-close")
            closing.start()
            closing.join(CLOSING_SECONDS)
        ends = time.monotonic() + SERVING_SECONDS
        for thread in self._serving:
            if thread is not threading.current_thread():
                thread.join(max(0.0, ends - time.monotonic()))

    def _close_at_exit(self) -> None:
        # Callbacks of a session that is still open would find the interpreter gone. No thread can be started here.
        session = self._mark_closed()
        if session is not None:
            self._close_session(session)

    def _mark_closed(self) -> Any:
        """The session, if it is still to be closed."""
        with self._lock:
            session = None if self._closed.is_set() else self._session
            self._closed.set()
            self._alive.clear()
        return session

    def _close_session(self, session: Any) -> None:
        try:
            session.close()
        except self._zenoh.ZError as error:
            _log.debug("zenoh did not close: %s", error)

    def _callback(self, called: Callable[[Any], None], ended: Callable[[], None] | None = None) -> Any:
        # Called in zenoh's own threads, and therefore brief. Otherwise zenoh would start a thread for each of them,
        # and Python waits for those when it ends.
        return self._zenoh.handlers.Callback(called, ended, indirect=False)

    # Connecting.

    def _dial(self) -> None:
        # zenoh redials a connection that it has had, but waits, uninterruptibly, for the first one. Not a daemon: see
        # `_send`. Pauses differ, so that many clients of a server that comes back do not all knock at once.
        pause, draw = REDIAL_SECONDS[0], random.SystemRandom()
        while not self._closed.is_set():
            try:
                session = self._zenoh.open(self._config)
            except self._zenoh.ZError as error:
                self._trouble = (
                    f"nobody can be reached at {', '.join(self._connect)} (not started yet, another address, or its "
                    f"certificate is of another federation): {_reason(error)}"
                )
                ends = time.monotonic() + pause * draw.uniform(0.5, 1.0)
                pause = min(2 * pause, REDIAL_SECONDS[1])
                while time.monotonic() < ends and not self._closed.wait(0.1):
                    if not threading.main_thread().is_alive():
                        return
            else:
                self._trouble = ""
                self._opened(session)
                return

    def _opened(self, session: Any) -> None:
        with self._lock:
            self._session = session
            closed, serves = self._closed.is_set(), self._queries is not None
        if closed:
            self._close_session(session)
            return
        if serves:
            self._declare_served(session)
        if self._listens:
            self._watch()

    def _watch(self) -> None:
        # Only those that ask others: tokens of everybody to everybody would be a flood that grows as their square.
        with self._lock:
            if self._watches or self._session is None or self._closed.is_set():
                return
            self._watches = True
        key, changed = f"{self._prefix}/alive/**", self._callback(self._token_changed)
        try:
            self._declared.append(self._session.liveliness().declare_subscriber(key, changed, history=True))
        except self._zenoh.ZError as error:
            if not self._closed.is_set():
                raise SparsonaError(f"cannot watch this link: {error}") from error

    def _declare_served(self, session: Any) -> None:
        key, queries = f"{self._prefix}/{self.node}", self._queries
        assert queries is not None

        def accept(query: Any) -> None:
            if queries.qsize() < MOST_WAITING:
                queries.put(query)
            else:
                query.drop()

        try:
            self._declared.append(session.declare_queryable(key, self._callback(accept)))
            # After the queryable, so that whoever sees the token can ask.
            token = f"{self._prefix}/alive/{self.node}/{session.zid()}"
            self._declared.append(session.liveliness().declare_token(token))
        except self._zenoh.ZError as error:
            if not self._closed.is_set():
                raise SparsonaError(f"cannot serve on this link: {error}") from error

    def _token_changed(self, sample: Any) -> None:
        node, _, session = str(sample.key_expr).removeprefix(f"{self._prefix}/alive/").partition("/")
        try:
            index = int(node)
        except ValueError:
            return  # somebody's mistake, or malice
        with self._lock:
            tokens = self._alive.setdefault(index, set())
            if sample.kind == self._zenoh.SampleKind.PUT and not self._closed.is_set():
                tokens.add(session)
            else:
                tokens.discard(session)

    # Sending.

    def _has_room(self, flights: dict[int, _Flight], held: int) -> bool:
        return len(flights) < MOST_IN_FLIGHT and held < self._window

    def _flight(self, client: int, frame: bytes, deadline: float, sent: _SentFrames) -> _Flight:
        if len(frame) > self.max_bytes:
            raise SparsonaError(
                f"the frame for client {client} has {len(frame):,} bytes",
                expected=f"{self.max_bytes:,} bytes at most: no node of this run accepts more",
            )
        now = time.monotonic()
        return _Flight(first=frame, again=sent.keep(frame), size=len(frame), ends=now + deadline, due=now)

    def _send(self, client: int, flight: _Flight, events: queue.SimpleQueue[_Event], now: float) -> None:
        with self._lock:
            session, is_there = self._session, bool(self._alive.get(client))
        if session is None or not (is_there or flight.blind <= now):
            flight.first, flight.due = None, now + RESEND_SECONDS[0]
            return
        flight.due, flight.blind = float("inf"), now + UNSEEN_SECONDS
        # A thread of its own: zenoh returns when the last bytes are on their way, and a slow client keeps it waiting,
        # five seconds at most for each 64 KiB. Not a daemon: Python aborts if it ends while one is in foreign code.
        frame, flight.first = flight.first or flight.again(), None
        arguments = (session, client, self._zenoh.ZBytes(frame), flight.ends - now, events)
        threading.Thread(target=self._ask, args=arguments, name=f"sparsona-send-{client}").start()

    def _ask(self, session: Any, client: int, payload: Any, seconds: float, events: queue.SimpleQueue[_Event]) -> None:
        zenoh, refused = self._zenoh, False

        def replied(reply: Any) -> None:
            nonlocal refused
            now, sample = time.monotonic(), reply.ok
            if sample is None:
                # A timeout of zenoh is an error, too.
                refused = refused or reply.err.payload.to_bytes() == _NO_ANSWER
            elif len(sample.payload) <= self.max_bytes:
                events.put(_Event(client, now, sample.payload))

        def ended() -> None:
            events.put(_Event(client, time.monotonic(), None, refused))

        try:
            session.get(
                f"{self._prefix}/{client}",
                self._callback(replied, ended),
                payload=payload,
                # A node that was restarted may still have its former queryable, which nobody answers, beside the new.
                target=zenoh.QueryTarget.ALL,
                consolidation=zenoh.ConsolidationMode.NONE,
                congestion_control=zenoh.CongestionControl.BLOCK,
                timeout=seconds,
            )
        except BaseException:  # zenoh's panics are no Exceptions
            ended()  # the link is closing, or the connection has just broken

    # Answering.

    def _answer_queries(
        self, queries: queue.SimpleQueue[Any], handle: Handle, report: Callable[[Exception], None]
    ) -> None:
        while not self._closed.is_set():
            try:
                query = queries.get(timeout=0.2)
            except queue.Empty:
                continue
            try:
                with query:
                    answer = self._answer(query, handle, report)
                    if answer is None:
                        query.reply_err(_NO_ANSWER)
                    else:
                        query.reply(f"{self._prefix}/{self.node}", answer)
            except BaseException as error:  # zenoh's panics are no Exceptions
                _log.debug("an answer could not be sent: %s", error)  # the sender asks again
            del query

    def _answer(self, query: Any, handle: Handle, report: Callable[[Exception], None]) -> bytes | None:
        payload = query.payload
        try:
            size = 0 if payload is None else len(payload)
            if size > self.max_bytes:
                raise SparsonaError(f"a frame of {size:,} bytes was refused", expected=f"{self.max_bytes:,} at most")
            answer = handle(b"" if payload is None else payload.to_bytes())
            if answer is not None and len(answer) > self.max_bytes:
                raise SparsonaError(f"an answer has {len(answer):,} bytes", expected=f"{self.max_bytes:,} at most")
            return answer
        except Exception as error:
            report(error)
            return None


def _import_zenoh() -> ModuleType:
    try:
        import zenoh
    except ImportError as error:
        raise SparsonaError("links need the package zenoh", hint="pip install 'sparsona[peers]'") from error
    return zenoh


def _config(zenoh: ModuleType, listen: list[str], connect: list[str], tls: Tls | None, max_bytes: int) -> Any:
    first, longest = (int(1000 * seconds) for seconds in REDIAL_SECONDS)
    settings: dict[str, object] = {
        "mode": "router" if listen else "client",
        "listen/endpoints": listen,
        "listen/exit_on_failure": True,
        "listen/timeout_ms": 0,
        "connect/endpoints": connect,
        # A node that listens dials in the background; one that does not is opened again by the link.
        "connect/timeout_ms": -1 if listen else 0,
        "connect/exit_on_failure": not listen,
        "connect/retry": {"period_init_ms": first, "period_max_ms": longest, "period_increase_factor": 2},
        "scouting/multicast/enabled": False,
        "scouting/delay": 0,
        "scouting/gossip/autoconnect": {"router": ["router"], "peer": [], "client": []},
        "adminspace/enabled": False,
        "transport/shared_memory/enabled": False,
        "transport/unicast/max_sessions": 10_000,
        "transport/unicast/accept_pending": 1_000,
        "transport/unicast/open_timeout": 5_000,
        "transport/link/protocols": ["tls" if tls else "tcp"],
        # What one frame may take before this link sees it, with zenoh's own head.
        "transport/link/rx/max_message_size": max_bytes + 65536,
    }
    if tls is not None:
        certificate, key = _base64(tls.certificate), _base64(tls.key)
        settings["transport/link/tls"] = {
            "root_ca_certificate_base64": _base64(tls.authority),
            "listen_certificate_base64": certificate,
            "listen_private_key_base64": key,
            "connect_certificate_base64": certificate,
            "connect_private_key_base64": key,
            "enable_mtls": True,
            # Addresses are no names: a node may be dialled by any address that leads to it. Who it is, its frames say,
            # which are signed with a key of the roster; the authority says that it may take part.
            "verify_name_on_connect": False,
        }
    config = zenoh.Config()
    for key_, value in settings.items():
        _insert(zenoh, config, key_, value)
    return config


def _insert(zenoh: ModuleType, config: Any, key: str, value: object) -> None:
    try:
        config.insert_json5(key, json.dumps(value))
    except zenoh.ZError as error:
        raise SparsonaError(f"zenoh refuses the setting {key}: {error}") from error


def _access(prefix: str, names: Mapping[int, str]) -> dict[str, object]:
    """What the clients of a server may do: be asked under their own index, and answer."""
    rules, subjects, policies = [], [], []
    for node, name in names.items():
        keys = [f"{prefix}/{node}", f"{prefix}/alive/{node}/**"]
        served = ["declare_queryable", "reply", "liveliness_token"]
        rules.append(
            {"id": f"serve-{node}", "permission": "allow", "flows": ["ingress"], "messages": served, "key_exprs": keys}
        )
        rules.append(
            {"id": f"ask-{node}", "permission": "allow", "flows": ["egress"], "messages": ["query"], "key_exprs": keys}
        )
        subjects.append({"id": f"client-{node}", "cert_common_names": [name]})
        policies.append({"rules": [f"serve-{node}", f"ask-{node}"], "subjects": [f"client-{node}"]})
    return {
        "enabled": True,
        "default_permission": "deny",
        "rules": rules,
        "subjects": subjects,
        "policies": policies,
    }


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _cannot_open(error: Exception, listen: list[str], tls: Tls | None) -> SparsonaError:
    hint = "another process may listen there already, or the address may not be this machine's"
    if tls is not None:
        hint += "; or a certificate or key is no PEM text"
    return SparsonaError(f"cannot listen on {', '.join(listen)}: {_reason(error)}", hint=hint)


def _reason(error: Exception) -> str:
    """What zenoh says, without the places in its source."""
    return re.sub(r" at /\S+:\d+\.?", "", str(error))
