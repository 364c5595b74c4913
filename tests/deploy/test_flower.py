"""Flower: the socket and its relay, the link over a grid, and a whole run through a SuperLink."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from federations import free_addresses
from processes import wait_until

import sparsona as sp
from sparsona.cli.app import cli
from sparsona.core.errors import SparsonaError
from sparsona.deploy import flower
from sparsona.deploy.flower import FlowerLink, SocketServer, relay
from sparsona.deploy.identity import Roster
from sparsona.experiment import client_data, client_side, server_side
from sparsona.experiment.flower import serve
from sparsona.experiment.network import Network
from sparsona.experiment.terms import Terms
from sparsona.runs.records import Records

OPTIONS = {"rounds": 1, "epochs": 1, "per_round": 2, "seed": 3}


def command(*words: str) -> str:
    done = CliRunner().invoke(cli, list(words), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def new_federation(clients: int) -> None:
    words = "federation new fed.toml --method fedspa --model digits-cnn --classes 10 --input 1x8x8"
    command(*words.split(" "), *(f"--set={key}={value}" for key, value in OPTIONS.items()))
    for index in range(clients):
        command("keys", "new", f"site-{index}")
        command("federation", "admit", "fed.toml", f"site-{index}.pub")


def assert_is_simulation(path: Path, clients: int) -> None:
    schedule = {"evaluate": "participants"}  # as `federation new` writes it
    simulated = sp.train("fedspa", clients=clients, **OPTIONS, **schedule, executor="serial", out="runs/simulated")
    one, other = (Records(found / "records.sqlite") for found in (path, simulated.path))
    assert one.turns() == other.turns()
    assert one.evaluations() == other.evaluations()
    assert one.failures() == []
    assert (path / "global.safetensors").read_bytes() == (simulated.path / "global.safetensors").read_bytes()


# The socket, which needs no Flower.


def test_a_frame_is_relayed(tmp_path):
    path, faults = tmp_path / "a.sock", []

    def handle(frame: bytes) -> bytes | None:
        if frame == b"fault":
            raise ValueError("a fault")
        return None if frame == b"silent" else frame[::-1]

    assert relay(path, b"abc", 1.0) == ("absent", b"")
    with SocketServer(path, handle, faults.append, 4 << 20):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        large = os.urandom(3 << 20)
        assert relay(path, large, 5.0) == ("answered", large[::-1])
        assert relay(path, b"", 5.0) == ("answered", b"")
        assert relay(path, b"silent", 5.0) == ("silent", b"")
        assert relay(path, large, 5.0, max_bytes=len(large) - 1) == ("absent", b"")  # not read
        assert relay(path, b"fault", 5.0) == ("silent", b"")
        with pytest.raises(SparsonaError, match="somebody answers on"):
            SocketServer(path, handle, faults.append)
        with socket.socket(socket.AF_UNIX) as liar:  # says more than there may be
            liar.connect(str(path))
            liar.sendall(flower._LENGTH.pack((4 << 20) + 1))
            assert liar.recv(1) == b""
    assert [str(error) for error in faults] == ["a fault"]
    assert not path.exists()


def test_only_a_socket_that_nobody_answers_is_replaced(tmp_path):
    path = tmp_path / "a.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with SocketServer(path, bytes, print):
        assert relay(path, b"abc", 5.0) == ("answered", b"abc")
    path.write_text("a file of somebody")
    with pytest.raises(SparsonaError, match="cannot make the socket"):
        SocketServer(path, bytes, print)
    assert path.read_text() == "a file of somebody"


def test_a_relay_waits_no_longer_than_it_may(tmp_path):
    ended = threading.Event()

    def hang(frame: bytes) -> None:
        ended.wait(10)

    with SocketServer(tmp_path / "a.sock", hang, print):
        began = time.monotonic()
        assert relay(tmp_path / "a.sock", b"abc", 0.3) == ("absent", b"")
        assert time.monotonic() - began < 5
        ended.set()


def test_the_relay_imports_no_torch():
    script = "import sys, sparsona.deploy.flower; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_the_app_is_written(tmp_path, monkeypatch):
    import tomllib

    monkeypatch.chdir(tmp_path)
    new_federation(2)
    assert "flwr run app" in command("federation", "flower", "fed.toml", "app", "--out", "runs/x", "--at-least", "1")
    app = tomllib.loads((tmp_path / "app" / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    paths = {"federation": str(tmp_path / "fed.toml"), "out": str(tmp_path / "runs" / "x")}
    assert app["config"] == {**paths, "deadline": 300.0, "at-least": 1}
    for reference in app["components"].values():
        module, _, name = reference.partition(":")
        assert f"\n{name} = " in (tmp_path / "app" / f"{module.replace('.', '/')}.py").read_text()
    with pytest.raises(SparsonaError, match="exists already"):
        command("federation", "flower", "fed.toml", "app", "--out", "runs/x")
    with pytest.raises(SparsonaError, match="--at-least 3"):
        command("federation", "flower", "fed.toml", "other", "--out", "runs/x", "--at-least", "3")
    with pytest.raises(SparsonaError, match="beside --flower"):
        client_side.join("fed.toml", "digits", key="site-0.key", flower="a.sock", tls=False)


# The link, over a grid in this process.


class Grid:
    """Flower's grid, as far as a link uses it: each node's ClientApp is called when its answer is pulled."""

    def __init__(self, nodes: dict[int, dict[str, object]]) -> None:
        from flwr.supercore.task_identity import TaskIdentity

        TaskIdentity._run_id = TaskIdentity._task_id = TaskIdentity._node_id = 1  # as in the process of a ServerApp
        self.nodes = nodes  # their --node-config
        self.sent: dict[str, object] = {}
        self.alter_down = self.alter_up = lambda data: data

    def get_node_ids(self):
        return list(self.nodes)

    def push_messages(self, messages):
        for message in messages:
            message.metadata.__dict__["_message_id"] = f"m{len(self.sent)}-{time.monotonic_ns()}"
            self.sent[message.metadata.message_id] = message
        return [message.metadata.message_id for message in messages]

    def pull_messages(self, ids):
        app, replies = flower.client_app(), []
        for message in [self.sent.pop(one) for one in ids if one in self.sent]:
            if "frame" in message.content:
                message.content = flower._content(self.alter_down(flower._frame_of(message)))
            reply = app(message, SimpleNamespace(node_config=self.nodes[message.metadata.dst_node_id]))
            if "frame" in reply.content:
                status, data = flower._answer(reply)
                reply.content = flower._content(self.alter_up(data), status)
            replies.append(reply)
        return replies


@pytest.fixture
def fast(monkeypatch):
    for name in ("POLL_SECONDS", "NODES_SECONDS", "RESEND_SECONDS"):
        monkeypatch.setattr(flower, name, 0.02)


@pytest.mark.flower
def test_a_link_finds_clients_by_what_their_nodes_say(tmp_path, fast):
    nodes = {70 + index: {"client": index, "socket": str(tmp_path / f"{index}.sock")} for index in range(3)}
    link = FlowerLink(Grid({**nodes, 99: {}, 98: {"client": "2"}}))

    def answer(index: int):
        return SocketServer(
            tmp_path / f"{index}.sock", lambda frame: None if frame == b"silent" else b"%d" % index, print
        )

    began = time.monotonic()
    with answer(0), answer(1):
        items = [(0, b"a"), (1, b"silent"), (2, b"c"), (3, b"d")]
        assert dict(link.exchange(items, 0.5)) == {0: b"0", 1: None, 2: None, 3: None}  # 2: nobody on its socket
        assert link.present() == {0, 1, 2}
        assert time.monotonic() - began < 3
        link.max_bytes = 0
        assert dict(link.exchange([(0, b"a")], 0.5)) == {0: None}  # its answer is longer
        link.max_bytes = 9
        late = threading.Timer(0.3, lambda: opened.append(answer(2)))
        opened: list[SocketServer] = []
        late.start()
        assert dict(link.exchange([(2, b"c")], 10.0)) == {2: b"2"}  # sent again until somebody is there
        opened[0].close()


@contextlib.contextmanager
def agents(clients: int):
    """Clients that answer on sockets, as `sparsona join --flower` does."""
    terms, servers, heard = Terms.read("fed.toml"), [], []
    for index in range(clients):
        key, member = client_side.find_key(terms.file, Path("fed.toml"), f"site-{index}.key")
        roster = Roster(terms.file.keys())
        data = client_data.own_data(terms, index, "digits")
        made = client_side.make_agent(terms, index, data, Path(f"vault/{index}"), key, roster, report=heard.append)
        servers.append(SocketServer(f"{member.index}.sock", made.handle, lambda error: heard.append(repr(error))))
    try:
        yield heard
    finally:
        for server in servers:
            server.close()


@pytest.mark.flower
def test_a_run_over_a_grid_is_its_simulation(tmp_path, monkeypatch, fast):
    monkeypatch.chdir(tmp_path)
    new_federation(3)
    grid = Grid({50 + index: {"client": index, "socket": f"{index}.sock"} for index in range(3)})
    with agents(3):
        run = serve(FlowerLink(grid), "fed.toml", "runs/x", wait=60)
    assert_is_simulation(run.path, 3)
    with pytest.raises(SparsonaError, match="reached through Flower"):
        command("resume", "runs/x")


@pytest.mark.flower
def test_what_a_relay_alters_or_misdirects_is_refused(tmp_path, monkeypatch, fast):
    monkeypatch.chdir(tmp_path)
    new_federation(2)
    grid = Grid({50 + index: {"client": index, "socket": f"{index}.sock"} for index in range(2)})
    told: list[str] = []
    with agents(2) as heard:
        grid.alter_up = altered
        assert not has_clients(grid, told)
        assert sum("cannot take part" in text for text in told) == 2
        grid.alter_up, grid.alter_down = unaltered, altered
        assert not has_clients(grid, told)
        assert sum(text.startswith("refused: ") for text in heard) == 2
        grid.alter_down = unaltered
        grid.nodes = {50: {"client": 1, "socket": "0.sock"}, 51: {"client": 0, "socket": "1.sock"}}
        assert not has_clients(grid, told)
        assert sum(text.startswith("refused: ") for text in heard) == 4
        grid.nodes = {50: {"client": 0, "socket": "0.sock"}, 51: {"client": 1, "socket": "1.sock"}}
        assert has_clients(grid, told)


def altered(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1]) if data else data


def unaltered(data: bytes) -> bytes:
    return data


def has_clients(grid: Grid, told: list[str]) -> bool:
    terms, key = server_side.read_server("fed.toml", None, None)
    link = FlowerLink(grid)
    found = Network(terms, link.exchange, key, Roster(terms.file.keys()), report=told.append, hello=2.0)
    found.greet([0, 1])
    return len(found.guests) == 2


# Flower itself.


def descendants(pid: int) -> list[int]:
    """The processes that a process started, and those that they started: Flower's outlive it for a while."""
    parents = {}
    for stat_file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(stat_file.parent.name)] = int(stat_file.read_text().rpartition(")")[2].split()[1])
    children = [child for child, parent in parents.items() if parent == pid]
    return children + [one for child in children for one in descendants(child)]


class Processes:
    """Processes that end with the test, and all that they have started."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder, self._environment = folder, environment
        self._running: list[subprocess.Popen] = []

    def start(self, name: str, *words: object) -> subprocess.Popen:
        with (self.folder / f"{name}.log").open("w") as log:
            started = subprocess.Popen(
                [sys.executable, "-c", START, *map(str, words)],
                cwd=self.folder,
                env=self._environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._running.append(started)
        return started

    def logs(self) -> str:
        return "\n".join(f"{path.name}:\n{path.read_text()[-2000:]}" for path in sorted(self.folder.glob("*.log")))

    def close(self) -> None:
        for one in reversed(self._running):
            if one.poll() is None:
                others = descendants(one.pid)
                one.terminate()
                try:
                    one.wait(timeout=10)
                except subprocess.TimeoutExpired:
                    one.kill()
                    one.wait()
                for other in others:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(other, signal.SIGKILL)


# A command of the environment that runs the tests, whether that is active or not.
START = """
import sys
from importlib.metadata import entry_points
sys.argv = sys.argv[1:]
(command,) = entry_points(group="console_scripts", name=sys.argv[0])
sys.exit(command.load()())
"""


@pytest.fixture
def processes(tmp_path):
    (tmp_path / "flwr").mkdir()
    settings = {
        "FLWR_HOME": str(tmp_path / "flwr"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.05",
        "OMP_NUM_THREADS": "1",
        # Flower finds its own commands there.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }
    made = Processes(tmp_path, {**os.environ, **settings})
    yield made
    made.close()


@pytest.mark.flower
@pytest.mark.timeout(500)
def test_a_run_through_flower_is_its_simulation(tmp_path, monkeypatch, processes):
    monkeypatch.chdir(tmp_path)
    new_federation(2)
    command("federation", "flower", "fed.toml", "app", "--out", "runs/x", "--wait", "120")
    link, *nodes = (address.partition(":")[2] for address in free_addresses(3))
    (tmp_path / "flwr" / "config.toml").write_text(f'[superlink.here]\naddress = "127.0.0.1:{link}"\ninsecure = true\n')
    own = ["--insecure", "--host", "127.0.0.1"]
    processes.start("link", "flower-superlink", *own, "--port", link, "--disable-runtime-dependency-installation")
    joined = []
    for index, port in enumerate(nodes):
        key, path = f"site-{index}.key", tmp_path / f"{index}.sock"
        words = ["join", "fed.toml", "--data", "digits", "--key", key, "--flower", path]
        joined.append(processes.start(f"join-{index}", "sparsona", *words))
        settings = ["--superlink", f"127.0.0.1:{link}", "--node-config", f'client={index} socket="{path}"']
        processes.start(f"node-{index}", "flower-supernode", *own, "--port", port, *settings)
    wait_until(lambda: "200" in (tmp_path / "link.log").read_text(), 60)
    started = processes.start("run", "flwr", "run", "app", "here", "--stream")
    try:
        started.wait(timeout=300)
        for one in joined:
            assert one.wait(timeout=30) == 0
    except BaseException:
        print(processes.logs())
        raise
    assert (tmp_path / "runs" / "x" / "summary.json").exists(), processes.logs()
    assert_is_simulation(tmp_path / "runs" / "x", 2)
    assert len(list(tmp_path.glob("vault/*/model.safetensors"))) == 2
