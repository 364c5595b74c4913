"""`sparsona watch`: the page of a run while it trains, on loopback alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path

import pytest
from click.testing import CliRunner

import sparsona as sp
from sparsona.cli.app import cli
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
    seen: list[str] = []
    with served(folder) as port:
        response, page = get(port)
        assert (response.status, response.headers["Refresh"]) == (200, "5")
        assert "There is no run in this folder yet." in page
        folder.rmdir()
        assert f"Waiting for &#x27;{folder}&#x27;, which is not there yet." in get(port)[1]
        options = {"clients": 4, "rounds": 2, "data_rate": 0.2, "device": "cpu"}
        with pytest.raises(KeyboardInterrupt):
            sp.train("fedavg", **options, out=folder, observers=[_StopAfter(1, lambda: seen.append(get(port)[1]))])
        assert "Running. 0 of 1 run finished. FedAvg: 1 of 2 rounds" in seen[0]
        response, page = get(port)
        assert response.headers["Refresh"] == "5"
        assert f"Stopped; `sparsona resume {folder}` continues it. 0 of 1 run finished. FedAvg: 1 of 2 rounds" in page
        assert "FedAvg serves clients with" in page
        sp.resume(folder)
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
