"""`sparsona watch`: the page of a run while it trains, on loopback alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path

import pytest

import sparsona as sp
from sparsona.cli.watch import make_server
from sparsona.core.errors import SparsonaError


@contextmanager
def served(folder: Path) -> Iterator[int]:
    server = make_server(folder)
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


def test_a_page_that_follows_the_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with served(folder) as port:
        response, page = get(port)
        assert (response.status, response.headers["Refresh"]) == (200, "5")
        assert "There is no run in this folder yet." in page
        folder.rmdir()
        options = {"clients": 4, "rounds": 2, "data_rate": 0.2, "device": "cpu"}
        with pytest.raises(KeyboardInterrupt):
            sp.train("fedavg", **options, out=folder, observers=[_StopAfter(1)])
        response, page = get(port)
        assert response.headers["Refresh"] == "5"
        assert "Running, 0 of 1 run finished. FedAvg: 1 of 2 rounds" in page
        assert "FedAvg serves clients with" in page
        sp.resume(folder)
        response, page = get(port)
        assert response.headers["Refresh"] is None
        assert 'role="status"' not in page
        assert get(port, "/../config.json")[0].status == 404
        # A site that resolves its own name to this machine must not read the page.
        assert get(port, host="evil.example:80")[0].status == 403


class _StopAfter:
    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def on_evaluation(self, result: object) -> None:
        if result.completed >= self.rounds:
            raise KeyboardInterrupt


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with served(tmp_path) as port, pytest.raises(SparsonaError, match=f"port {port} cannot be listened on"):
        make_server(tmp_path, port)
