"""A run over the network link against its simulation on the same cores: seconds of a round, CPU seconds, and memory.

One server and 16 clients of FedSpa on 127.0.0.1 with mutual TLS, a network of 4.9 million parameters, and so messages
of 10 MB. The server is a process; the clients share two, each with its own agent, vault and link. The simulation runs
in one process (`serial`) and in one process a core (`workers`). The first round of each is left out. Then the
server's memory by the number of clients, whose messages have 1 MB.

    python benchmarks/network.py [--only round|memory] [--rounds 3] [--tiny]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import sparsona as sp
from sparsona.core.update import SERVER
from sparsona.deploy import identity
from sparsona.deploy.federation_file import FederationFile, Server, key_path
from sparsona.deploy.identity import KeyFile, Roster
from sparsona.deploy.memory import return_large_buffers, share_memory_among_threads
from sparsona.deploy.zenoh_link import Tls, ZenohLink
from sparsona.experiment.agreement import agree
from sparsona.experiment.client_data import own_data
from sparsona.experiment.client_side import make_agent
from sparsona.experiment.network import Network
from sparsona.experiment.server_side import MANY_CLIENTS, play_network
from sparsona.experiment.terms import Terms

MODEL = "mlp:hidden={hidden}"
LARGE, SMALL = 65_333, 6_600  # hidden units: 4.9 and 0.5 million parameters
GROUPS = 2  # processes of clients


def make(folder: Path, clients: int, hidden: int, rounds: int) -> Path:
    """A federation file with its keys."""
    authority = identity.new_authority("bench", folder / "fed.authority.key")
    server = identity.write_new_key(key_path(folder / "fed.toml", "server"))
    certificate = identity.certify(identity.Request("server", server.public), authority, hosts=identity.LOCAL_HOSTS)
    run = agree(
        "fedspa", options(clients, rounds), model=MODEL.format(hidden=hidden), classes=10, input_shape=(1, 8, 8)
    )
    file = FederationFile("bench", run, authority.certificate, Server(server.public, certificate))
    for index in range(clients):
        key = KeyFile.read(identity.new_key(f"c{index}", folder)[0])
        file = file.admit(identity.Request(f"c{index}", key.public), authority)
    file.write(folder / "fed.toml")
    return folder / "fed.toml"


def options(clients: int, rounds: int) -> dict[str, Any]:
    return {
        "rounds": rounds,
        "per_round": clients,
        "epochs": 1,
        "batch_size": 16,
        "eval_clients": 1,
        "evaluate": "everyone",
        "seed": 3,
    }


def cpu_seconds(pids: list[int]) -> float:
    """CPU time of processes that are under way."""
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def children(pid: int) -> list[int]:
    return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class Watch:
    """Notes the time, the CPU time and the memory after each round."""

    def __init__(self, pids: list[int]) -> None:
        self._pids, self.rows, self.start = pids, [], memory()

    def on_round(self, result: Any) -> None:
        pids = self._pids or [os.getpid(), *children(os.getpid())]
        own = cpu_seconds([os.getpid()])
        self.bytes = result.total("bytes_up")
        self.rows.append([time.monotonic(), cpu_seconds(pids), own])

    def found(self) -> dict[str, float]:
        first, last = self.rows[0], self.rows[-1]
        wall, cpu, own = ((b - a) / (len(self.rows) - 1) for a, b in zip(first, last, strict=True))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        return {"wall": wall, "cpu": cpu, "own": own, "peak": peak, "bytes": self.bytes}


def be_server(given: dict[str, Any]) -> dict[str, float]:
    path = Path(given["path"])
    terms, key = Terms.read(path), KeyFile.read(key_path(path, "server"))
    if terms.num_clients > MANY_CLIENTS:
        return_large_buffers()  # as `sparsona server` does
    tls = Tls(terms.file.authority, terms.file.server.certificate, key.pem)
    watch = Watch([os.getpid(), *given["pids"]])
    with ZenohLink(SERVER, run=terms.run, listen=(given["address"],), tls=tls) as link:
        network = Network(
            terms, link.exchange, key, Roster(terms.file.keys()), deadline=600.0, report=note, present=link.present
        )
        network.wait(terms.num_clients, 300.0, lambda there, of: None)
        watch.start = memory()
        run = play_network(network, path.parent / "run", [watch])
    return watch.found() | {"start": watch.start, "accuracy": run.summary["accuracy"]["mean"]}


def note(text: str) -> None:
    if "is there" not in text:
        print(text, file=sys.stderr)


def memory() -> float:
    """MiB of this process now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def be_clients(given: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    share_memory_among_threads()  # as `sparsona join` does
    path = Path(given["path"])
    terms = Terms.read(path)
    agents, links = [], []
    for index in given["nodes"]:
        member, key = terms.file.clients[index], KeyFile.read(path.parent / f"c{index}.key")
        data = own_data(terms, index, given["source"], **given["data"])
        vault = path.parent / "vaults" / str(index)
        agent = make_agent(terms, index, data, vault, key, Roster(terms.file.keys()), device="cpu")
        tls = Tls(terms.file.authority, member.certificate, key.pem)
        link = ZenohLink(index, run=terms.run, connect=(given["address"],), tls=tls)
        agents.append(agent)
        links.append(link)
    turns = threading.Lock()  # one core each
    for agent, link in zip(agents, links, strict=True):
        link.serve(one_at_a_time(agent.handle, turns))
    for agent in agents:
        agent.finished.wait()
    time.sleep(0.5)
    for link in links:
        link.close()


def one_at_a_time(handle: Any, lock: threading.Lock) -> Any:
    def handled(data: bytes) -> bytes | None:
        with lock:
            return handle(data)

    return handled


def simulate(given: dict[str, Any]) -> dict[str, float]:
    watch = Watch([])
    run = sp.train(
        "fedspa",
        clients=given["clients"],
        model=given["model"],
        **given["options"],
        **given["data"],
        executor=given["executor"],
        device="cpu",
        observers=[watch],
        out=given["out"],
    )
    return watch.found() | {"accuracy": run.summary["accuracy"]["mean"]}


def in_process(role: str, given: dict[str, Any]) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--role", role]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert child.stdin is not None
    child.stdin.write(json.dumps(given) + "\n")
    child.stdin.flush()
    return child


def result(child: subprocess.Popen[str]) -> dict[str, float]:
    out, _ = child.communicate(timeout=1800)
    if child.returncode:
        raise SystemExit(f"a process ended with {child.returncode}")
    return json.loads(out.splitlines()[-1]) if out.strip() else {}


def on_network(
    folder: Path, clients: int, hidden: int, rounds: int, data: dict[str, Any], source: str = "digits"
) -> dict[str, float]:
    path = make(folder, clients, hidden, rounds)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    given = {"path": str(path), "address": address, "data": data, "source": source}
    groups = [in_process("clients", {**given, "nodes": list(range(g, clients, GROUPS))}) for g in range(GROUPS)]
    server = in_process("server", {**given, "pids": [group.pid for group in groups]})
    try:
        found = result(server)
        for group in groups:
            result(group)
        return found
    finally:
        for process in (server, *groups):
            if process.poll() is None:
                process.kill()
                process.wait()


def in_simulation(
    folder: Path, executor: str, clients: int, hidden: int, rounds: int, data: dict[str, Any]
) -> dict[str, float]:
    given = {
        "clients": clients,
        "model": MODEL.format(hidden=hidden),
        "options": options(clients, rounds),
        "executor": executor,
        "data": data,
        "out": str(folder / executor),
    }
    return result(in_process("simulation", given))


def compare_rounds(rounds: int, tiny: bool) -> None:
    clients, hidden = (4, 500) if tiny else (16, LARGE)
    data: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        found = {}
        for executor in ("serial", "workers"):
            found[executor] = in_simulation(Path(name), executor, clients, hidden, rounds + 1, data)
        found["network"] = on_network(Path(name), clients, hidden, rounds + 1, data)
    size = found["network"]["bytes"] / clients / 1e6
    print(f"{clients} clients, messages of {size:.1f} MB up, {rounds} rounds; load {os.getloadavg()[0]:.1f}\n")
    print("| | seconds a round | CPU seconds a round | of the server | peak memory of the server, MiB | accuracy |")
    print("|---|---|---|---|---|---|")
    for how, row in found.items():
        print(
            f"| {how} | {row['wall']:.2f} | {row['cpu']:.2f} | {row['own']:.2f} | {row['peak']:,.0f} "
            f"| {row['accuracy']:.6f} |"
        )
    for executor in ("serial", "workers"):
        ratios = (found["network"][what] / found[executor][what] for what in ("wall", "cpu"))
        print("network / {}: {:.2f} in seconds, {:.2f} in CPU seconds".format(executor, *ratios))


def compare_memory(rounds: int, tiny: bool) -> None:
    print("\n| clients | MB a message | server before the first round, MiB | its peak, MiB | grown, MiB |")
    print("|---|---|---|---|---|")
    for clients in (2, 4) if tiny else (16, 64, 256):
        with tempfile.TemporaryDirectory() as name:
            draws = np.random.default_rng(0)  # everybody has the same examples: digits are too few for so many clients
            np.savez(Path(name) / "made.npz", x=draws.random((40, 1, 8, 8), np.float32), y=draws.integers(0, 10, 40))
            source = f"arrays:{Path(name) / 'made.npz'}"
            row = on_network(Path(name), clients, 500 if tiny else SMALL, rounds + 1, {}, source)
        size = row["bytes"] / clients / 1e6
        print(
            f"| {clients} | {size:.2f} | {row['start']:.0f} | {row['peak']:.0f} | {row['peak'] - row['start']:.0f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=["round", "memory"])
    parser.add_argument("--tiny", action="store_true", help="a small network: shows that it runs")
    parser.add_argument("--role", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role:
        given = json.loads(sys.stdin.readline())
        role = {"server": be_server, "clients": be_clients, "simulation": simulate}[arguments.role]
        print(json.dumps(role(given)))
        return
    if arguments.only != "memory":
        compare_rounds(arguments.rounds, arguments.tiny)
    if arguments.only != "round":
        compare_memory(min(arguments.rounds, 2), arguments.tiny)


if __name__ == "__main__":
    main()
