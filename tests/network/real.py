"""A server and its clients, or peers, as processes on 127.0.0.1, to be killed and started again."""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from federations import Made, free_address, rows, traces
from processes import EAGER, ForkServer, Process, start

import sparsona as sp

SERVER = "server"


@dataclass
class Party:
    """The server, a client or a peer: the command, and the process that is it now."""

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
        address, self.run, members = free_address(), self.folder / "run", self.made.terms.file.clients
        self.has_server = self.made.terms.file.server is not None
        if self.has_server:
            command = [SERVER, self.made.path, "--listen", address, "--out", self.run, "--json"]
            self._add(SERVER, [*command, "--deadline", self.deadline, *self.server_options])
        for index, member in enumerate(members):
            command = ["join" if self.has_server else "peer", self.made.path, "--data", "digits", "--device", "cpu"]
            command += ["--key", self.made.key_path(index), "--vault", self.vaults[index]]
            command += [word for key, value in self.made.data.items() for word in ("--set", f"{key}={value}")]
            if self.has_server:
                command += ["--connect", address]
            else:
                command += [
                    "--deadline",
                    self.deadline,
                    *(word for one in member.addresses for word in ("--listen", one)),
                ]
            self._add(f"site-{index}", command)

    @property
    def vaults(self) -> list[Path]:
        return [self.folder / "vaults" / f"site-{index}" for index in range(self.made.num_clients)]

    @property
    def clients(self) -> list[str]:
        return [name for name in self.all if name != SERVER]

    @property
    def last(self) -> list[str]:
        """Those with whose end the run is over."""
        return [SERVER] if self.has_server else self.clients

    def is_over(self) -> bool:
        return all(self.ended(name) for name in self.last)

    def traces(self) -> tuple[Any, ...]:
        """What the run left behind, once it is over; comparable with `undisturbed`."""
        return traces(self.run) if self.has_server else rows(sp.gather(self.run, self.vaults).path)

    def completed(self) -> int:
        """Rounds that cannot be lost any more."""
        if self.has_server:
            try:
                return json.loads((self.run / "checkpoint" / "manifest.json").read_text())["completed"]
            except (OSError, ValueError):
                return 0
        journals = [folder / "journal.jsonl" for folder in self.vaults]
        return min(path.read_text().count('"kind": "turn"') if path.exists() else 0 for path in journals)

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
        """Wait for all to end, as they do by themselves."""
        ends = time.monotonic() + seconds
        while not all(self.ended(name) for name in self.all):
            assert time.monotonic() < ends, f"some have not ended\n{self.logs()}"
            time.sleep(0.02)
        for name in self.all:
            assert self.code(name) == 0, self.logs()


@dataclass(frozen=True)
class Kill:
    """Who was killed together, and when."""

    names: tuple[str, ...]
    after: float  # seconds since the last one
    round: int


def undisturbed(made: Made, folder: Path) -> tuple[Any, ...]:
    """What `Parties.traces` must be."""
    path = made.simulate(folder).path
    return rows(path) if made.terms.file.server is None else traces(path)


def kill_at_random(parties: Parties, draws: random.Random, most: int, pause: float) -> Iterator[Kill]:
    """Kill somebody every now and then and start them again, until the run is over.

    Args:
        parties: the processes of a run.
        draws: decides who and when: a client or peer, the server, several, or all at once.
        most: how many times at most.
        pause: seconds between two kills, in the mean.

    Yields:
        Each kill, after those killed were started again.
    """
    names, kinds = list(parties.all), {"one": 5, SERVER: 3 * parties.has_server, "several": 1, "all": 1}
    for _ in range(most):
        after = draws.uniform(0, 2 * pause)
        ends = time.monotonic() + after
        while time.monotonic() < ends:
            if parties.is_over():
                return
            time.sleep(0.005)
        kind = draws.choices([*kinds], [*kinds.values()])[0]
        chosen = {
            "one": lambda: [draws.choice(parties.clients)],
            SERVER: lambda: [SERVER],
            "several": lambda: draws.sample(names, draws.randint(2, len(names) - 1)),
            "all": lambda: names,
        }[kind]()
        chosen = [name for name in chosen if not parties.ended(name)]
        if not chosen:
            continue
        reached = parties.completed()
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
    """Wait for the end; not for clients whom a server could not tell of it, because they were killed then."""
    ends = time.monotonic() + seconds
    while not parties.is_over():
        assert time.monotonic() < ends, f"the run has not ended\n{parties.logs()}"
        time.sleep(0.02)
    for name in parties.last:
        code = parties.code(name)
        assert code == 0, f"exit code {code} of {name}\n{parties.logs()}"
