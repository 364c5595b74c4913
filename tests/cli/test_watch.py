"""`sparsona watch`: the page of a run while it trains, on loopback alone."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPResponse
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner

import sparsona as sp
from sparsona.cli.app import cli
from sparsona.cli.watch import make_server
from sparsona.core.errors import SparsonaError
from sparsona.report import live


@contextmanager
def served(folder: Path) -> Iterator[int]:
    server = make_server(folder, every=0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def get(port: int, path: str = "/", host: str | None = None) -> tuple[HTTPResponse, str]:
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", path, headers={} if host is None else {"Host": host})
        response = connection.getresponse()
        return response, response.read().decode()
    finally:
        connection.close()


def wait_for(port: int, text: str) -> tuple[HTTPResponse, str]:
    """The page that has this text: a page is served while a newer one is made."""
    for _ in range(300):
        response, page = get(port)
        if text in page:
            return response, page
        time.sleep(0.05)
    raise AssertionError(page[:2000])


def test_a_page_that_follows_the_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with served(folder) as port:
        response, page = get(port)
        assert (response.status, response.headers["Refresh"]) == (200, "5")
        assert '<p class="status" role="status">There is no run in this folder yet.</p>' in page
        assert "prefers-color-scheme: dark" in page  # styled as the report is
        assert len(page) < 50_000  # and loaded every few seconds: without what draws charts
        assert get(port, "/favicon.ico")[0].status == 204
        folder.rmdir()
        wait_for(port, f"Waiting for &#39;{folder}&#39;, which is not there yet.")
        options = {"clients": 4, "rounds": 2, "data_rate": 0.2, "device": "cpu"}
        running = "Running. 0 of 1 run finished. FedAvg: 1 of 2 rounds"
        with pytest.raises(KeyboardInterrupt):
            sp.train("fedavg", **options, out=folder, observers=[_StopAfter(1, lambda: wait_for(port, running))])
        stopped = f"Stopped; `sparsona resume {folder}` continues it. 0 of 1 run finished. FedAvg: 1 of 2 rounds"
        response, page = wait_for(port, stopped)
        assert response.headers["Refresh"] == "5"
        assert "FedAvg serves clients with" in page
        sp.resume(folder)
        response, page = wait_for(port, "after round 2 of 2")
        for _ in range(100):
            if response.headers["Refresh"] is None:
                break
            time.sleep(0.05)
            response, page = get(port)
        assert response.headers["Refresh"] is None
        assert 'role="status"' not in page
        assert get(port, "/../config.json")[0].status == 404
        # A site that resolves its own name to this machine must not read the page.
        assert get(port, host="evil.example:80")[0].status == 403


class _StopAfter:
    def __init__(self, rounds: int, look: Callable[[], None]) -> None:
        self.rounds, self.look = rounds, look

    def on_evaluation(self, result: object) -> None:
        if result.completed >= self.rounds:
            self.look()
            raise KeyboardInterrupt


def test_a_reader_that_leaves_in_the_middle_of_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors, is_over, end = [], threading.Event(), ThreadingHTTPServer.shutdown_request

    def shutdown_request(server: ThreadingHTTPServer, request: socket.socket) -> None:
        end(server, request)
        is_over.set()

    monkeypatch.setattr(ThreadingHTTPServer, "shutdown_request", shutdown_request)
    monkeypatch.setattr(ThreadingHTTPServer, "handle_error", lambda *_: errors.append(sys.exception()))
    monkeypatch.setattr(live, "live_page", lambda _: live.LivePage("x" * 50_000_000, is_final=True))
    with served(tmp_path) as port:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as reader:
            reader.sendall(f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
            assert reader.recv(100).startswith(b"HTTP/1.0 200")
        assert is_over.wait(60)
    assert not errors


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with served(tmp_path) as port, pytest.raises(SparsonaError, match=f"port {port} cannot be listened on"):
        make_server(tmp_path, port=port)


def test_a_folder_that_is_not_there_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs" / "spa").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("http.server.ThreadingHTTPServer.serve_forever", lambda *_, **__: None)
    found = CliRunner().invoke(cli, ["watch", "spq"], catch_exceptions=False)
    assert "waiting for 'runs/spq', which is not there yet; did you mean 'runs/spa'?" in found.output
    assert "waiting" not in CliRunner().invoke(cli, ["watch", "spa"], catch_exceptions=False).output
    assert "waiting for 'else/where'" in CliRunner().invoke(cli, ["watch", "else/where"]).output


def test_a_page_is_served_while_the_next_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state, made, may_end = [0], [], threading.Event()

    def make(folder: Path) -> live.LivePage:
        number = state[0]
        made.append(number)
        if number:
            assert may_end.wait(30)
        return live.LivePage(f"page {number}", is_final=True)

    monkeypatch.setattr(live, "live_page", make)
    monkeypatch.setattr(live, "last_change", lambda folder: state[0])
    pages = live.Pages(lambda: tmp_path, every=0)
    assert pages.current() == live.LivePage("page 0", True)
    state[0] = 1
    for _ in range(5):  # none waits, the second page is made once, and the browser asks again
        assert pages.current() == live.LivePage("page 0", False)
    may_end.set()
    for _ in range(200):
        if pages.current().html == "page 1":
            break
        time.sleep(0.02)
    assert pages.current() == live.LivePage("page 1", True)
    assert made == [0, 1]
    slow = live.Pages(lambda: tmp_path, every=3600)
    slow.current()
    state[0] = 2
    for _ in range(3):
        assert slow.current().html == "page 1"
    assert made == [0, 1, 1]  # not again so soon


def test_a_page_that_nobody_asked_for_in_a_while_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may say that a run has stopped which has been resumed since."""
    state, now = [0], [0.0]
    monkeypatch.setattr(live, "live_page", lambda folder: live.LivePage(f"page {state[0]}", is_final=False))
    monkeypatch.setattr(live, "last_change", lambda folder: state[0])
    monkeypatch.setattr(live.time, "monotonic", lambda: now[0])
    pages = live.Pages(lambda: tmp_path, every=1)
    assert pages.current().html == "page 0"
    state[0], now[0] = 1, live.IDLE
    assert pages.current().html == "page 1"
