"""A server and its clients as processes on 127.0.0.1, to be killed and started again."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from federations import Made
from processes import EAGER, ForkServer, Process, start

SERVER = "server"


def free_port() -> int:
    with contextlib.closing(socket.socket()) as chosen:
        chosen.bind(("127.0.0.1", 0))
        return chosen.getsockname()[1]


@dataclass
class Party:
    """The server or a client: the command, and the process that is it now."""

    name: str
    folder: Path
    command: list[object]
    process: Process | None = None
    starts: int = 0

    def log(self) -> str:
        texts = [path.read_text() for path in sorted(self.folder.glob("stderr*"))]
        return f"--- {self.name}, {self.starts} starts\n" + "".join(texts)


@dataclass
class Parties:
    """All processes of one run. Use as a context manager: those that are left at the end are killed."""

    forks: ForkServer
    made: Made
    folder: Path
    deadline: float = 300.0
    server_options: tuple[object, ...] = ()
    all: dict[str, Party] = field(default_factory=dict)

    def __post_init__(self) -> None:
        port = free_port()
        self.run = self.folder / "run"
        command = [SERVER, self.made.path, "--listen", f"127.0.0.1:{port}", "--out", self.run, "--json"]
        self._add(SERVER, [*command, "--deadline", self.deadline, *self.server_options])
        for index in range(self.made.num_clients):
            name = f"site-{index}"
            command = ["join", self.made.path, "--data", "digits", "--key", self.made.key(index)]
            command += ["--connect", f"127.0.0.1:{port}", "--vault", self.folder / "vaults" / name, "--device", "cpu"]
            command += [word for key, value in self.made.data.items() for word in ("--set", f"{key}={value}")]
            self._add(name, command)

    def _add(self, name: str, command: list[object]) -> None:
        folder = self.folder / name
        folder.mkdir(parents=True)
        self.all[name] = Party(name, folder, command)

    def __enter__(self) -> Parties:
        for name in self.all:
            self.start(name)
        return self

    def __exit__(self, *_: object) -> None:
        for name, party in self.all.items():
            if party.process is not None:
                self.kill(name)

    def start(self, name: str) -> None:
        party = self.all[name]
        party.starts += 1
        log = party.folder / "stderr"
        if log.exists():
            log.rename(party.folder / f"stderr.{party.starts:04d}")
        party.process = start(self.forks, party.folder, *party.command, setup=EAGER)

    def kill(self, name: str) -> None:
        """kill -9, and wait until it is gone."""
        party = self.all[name]
        assert party.process is not None
        party.process.kill(signal.SIGKILL)
        party.process.wait()
        party.process = None

    def ended(self, name: str) -> bool:
        """Whether its process has ended by itself."""
        process = self.all[name].process
        assert process is not None
        try:
            return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except FileNotFoundError:
            return True

    def code(self, name: str) -> int:
        """The exit code of a process that has ended."""
        party = self.all[name]
        assert party.process is not None
        code, _, _ = party.process.wait()
        party.process = None
        return code

    def logs(self) -> str:
        return "\n".join(party.log() for party in self.all.values())

    def wait(self, seconds: float) -> None:
        """Wait for the server to end, and then for its clients."""
        ends = time.monotonic() + seconds
        while not self.ended(SERVER):
            assert time.monotonic() < ends, f"the server has not ended\n{self.logs()}"
            time.sleep(0.02)
        code = self.code(SERVER)
        assert code == 0, self.logs()
        for name, party in self.all.items():
            if party.process is not None:
                while not self.ended(name):
                    assert time.monotonic() < ends, f"{name} has not ended\n{self.logs()}"
                    time.sleep(0.02)
                assert self.code(name) == 0, self.logs()


@dataclass(frozen=True)
class Kill:
    """Who was killed together, and when."""

    names: tuple[str, ...]
    after: float  # seconds since the last one
    round: int


def completed(run: Path) -> int:
    try:
        return json.loads((run / "checkpoint" / "manifest.json").read_text())["completed"]
    except (OSError, ValueError):
        return 0


def kill_at_random(parties: Parties, draws: random.Random, most: int, pause: float) -> Iterator[Kill]:
    """Kill somebody every now and then and start them again, until the server has ended.

    Args:
        parties: the processes of a run.
        draws: decides who and when: a client, the server, several clients, or all at once.
        most: how many times at most.
        pause: seconds between two kills, in the mean.

    Yields:
        Each kill, after those killed were started again.
    """
    names = list(parties.all)
    clients = names[1:]
    for _ in range(most):
        after = draws.uniform(0, 2 * pause)
        ends = time.monotonic() + after
        while time.monotonic() < ends:
            if parties.ended(SERVER):
                return
            time.sleep(0.005)
        kind = draws.choices(["client", SERVER, "several", "all"], [5, 3, 1, 1])[0]
        chosen = {
            "client": lambda: [draws.choice(clients)],
            SERVER: lambda: [SERVER],
            "several": lambda: draws.sample(names, draws.randint(2, len(names) - 1)),
            "all": lambda: names,
        }[kind]()
        chosen = [name for name in chosen if not parties.ended(name)]
        if not chosen:
            continue
        reached = completed(parties.run)
        for name in chosen:  # the signals first: at once
            process = parties.all[name].process
            assert process is not None
            process.kill(signal.SIGKILL)
        for name in chosen:
            parties.kill(name)
        time.sleep(draws.choice([0.0, 0.0, draws.uniform(0, 1)]))
        for name in draws.sample(chosen, len(chosen)):
            parties.start(name)
        yield Kill(tuple(chosen), after, reached)


def finish(parties: Parties, seconds: float) -> None:
    """Wait for the server's end. Clients that it could not tell, because they were killed then, are ended here."""
    ends = time.monotonic() + seconds
    while not parties.ended(SERVER):
        assert time.monotonic() < ends, f"the server has not ended\n{parties.logs()}"
        time.sleep(0.02)
    code = parties.code(SERVER)
    assert code == 0, f"exit code {code}\n{parties.logs()}"
