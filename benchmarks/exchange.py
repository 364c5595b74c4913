"""The network link on this machine: MB/s and latency of exchanges with many clients, and the server's memory.

One server and its clients, all on 127.0.0.1; a client answers a frame with a frame of the same length. The server, and
each group of clients, is a process of its own. A megabyte is 10^6 bytes, of both directions together; the plain copy
is what one socket carries one way between two processes, for comparison.

    python benchmarks/exchange.py [--repeats 3] [--tiny]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from sparsona.deploy.identity import KeyFile, certify, new_authority, new_key, read_request
from sparsona.deploy.zenoh_link import Tls, ZenohLink

WINDOW = 256_000_000
# TLS or not, clients, processes of clients, bytes of a message, bytes in flight.
SETTINGS = (
    (False, 16, 1, 10_000_000, WINDOW),
    (False, 16, 4, 10_000_000, WINDOW),
    (True, 16, 1, 10_000_000, WINDOW),
    (True, 16, 4, 10_000_000, WINDOW),
    (True, 16, 4, 10_000_000, 50_000_000),
    (False, 16, 1, 1_000, WINDOW),
    (True, 16, 1, 1_000, WINDOW),
    (True, 1, 1, 64_000_000, WINDOW),
    (True, 16, 2, 1_000_000, 16_000_000),
    (True, 64, 2, 1_000_000, 16_000_000),
    (True, 256, 2, 1_000_000, 16_000_000),
)
TINY = ((False, 2, 1, 10_000, WINDOW), (True, 2, 2, 10_000, WINDOW))


def certificates() -> Tls:
    """A certificate that everybody uses."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        authority = new_authority("benchmark", folder / "authority.key")
        key, request = new_key("node", folder)
        certificate = certify(read_request(request), authority, hosts=["localhost"])
        return Tls(authority.certificate, certificate, KeyFile.read(key).pem)


def serve(setting: dict[str, object]) -> None:
    """The clients of one process, until their parent closes the standard input."""
    tls = setting["tls"] and Tls(**setting["tls"])
    links = [ZenohLink(node, run="bench", connect=(setting["address"],), tls=tls) for node in setting["nodes"]]
    for link in links:
        link.serve(lambda frame: frame)
    sys.stdin.read()
    for link in links:
        link.close()


def measure(with_tls: bool, clients: int, processes: int, size: int, window: int, repeats: int) -> dict[str, float]:
    """One setting, with the server in this process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    tls = certificates() if with_tls else None
    frame = os.urandom(size)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    children = []
    for process in range(processes):
        nodes = list(range(process, clients, processes))
        setting = json.dumps({"tls": tls and tls.__dict__, "address": address, "nodes": nodes})
        child = subprocess.Popen([sys.executable, __file__, "--serve"], stdin=subprocess.PIPE, text=True)
        assert child.stdin is not None
        child.stdin.write(setting + "\n")
        child.stdin.flush()
        children.append(child)

    def items() -> Iterator[tuple[int, bytes]]:
        for client in range(clients):
            yield client, bytes(frame)

    seconds, waits, spent = [], [], 0.0
    try:
        with ZenohLink(-1, run="bench", listen=(address,), tls=tls, window=window) as server:
            while len(server.present()) < clients:
                time.sleep(0.05)
            for repeat in range(repeats + 1):
                began, before_it = time.perf_counter(), time.process_time()
                for client, answer in server.exchange(items(), 60.0):
                    assert answer is not None, f"client {client} was lost"
                    assert len(answer) == size
                if repeat:
                    seconds.append(time.perf_counter() - began)
                    spent += time.process_time() - before_it
            for client in range(min(clients, 8)):
                began = time.perf_counter()
                assert list(server.exchange([(client, frame)], 60.0)) != [(client, None)]
                waits.append(time.perf_counter() - began)
    finally:
        for child in children:
            child.communicate("")
    return {
        "seconds": min(seconds),
        "mb_per_second": 2 * clients * size / min(seconds) / 1e6,
        "cpu_per_gb": spent / repeats / (2 * clients * size / 1e9),
        "latency": statistics.median(waits),
        "grown": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024,
    }


def plain_copy(size: int = 200_000_000) -> float:
    """MB/s through one socket of this machine, one way, without anything else."""
    ours, theirs = socket.socketpair()
    taken = bytearray(1 << 20)

    def drain() -> None:
        while theirs.recv_into(taken):
            pass

    reader = threading.Thread(target=drain)
    reader.start()
    frame = bytes(size)
    began = time.perf_counter()
    ours.sendall(frame)
    ours.close()
    reader.join()
    theirs.close()
    return size / (time.perf_counter() - began) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="small messages: shows that it runs")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(json.loads(sys.stdin.readline()))
        return
    if arguments.one:
        print(json.dumps(measure(*json.loads(arguments.one), arguments.repeats)))
        return
    print(f"plain copy through a socket: {plain_copy():,.0f} MB/s\n")
    columns = ("link", "clients (processes)", "MB a message", "MB in flight", "s an exchange", "MB/s")
    columns += ("CPU s of the server a GB", "ms, one client alone", "server grows, MiB")
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for setting in TINY if arguments.tiny else SETTINGS:
        with_tls, clients, processes, size, window = setting
        command = [sys.executable, __file__, "--one", json.dumps(setting), "--repeats", str(arguments.repeats)]
        found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
        print(
            f"| {'TLS' if with_tls else 'plain'} | {clients} ({processes}) | {size / 1e6:g} | {window / 1e6:g} "
            f"| {found['seconds']:.3f} | {found['mb_per_second']:,.0f} | {found['cpu_per_gb']:.1f} "
            f"| {1000 * found['latency']:.1f} | {found['grown']:,.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
