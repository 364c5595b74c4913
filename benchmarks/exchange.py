"""The network link on this machine: MB/s and latency of exchanges with many clients, and the server's memory.

One server and its clients, all on 127.0.0.1; a client answers a frame with a frame of the same length. The server, and
each group of clients, is a process of its own. A megabyte is 10^6 bytes, of both directions together; the plain copy
is what one socket carries one way between two processes, for comparison.

    python benchmarks/exchange.py [--repeats 3] [--tiny]
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from sparsona.deploy.zenoh_link import Tls, ZenohLink

# TLS or not, clients, processes of clients, bytes of a message.
SETTINGS = (
    (False, 16, 1, 10_000_000),
    (False, 16, 4, 10_000_000),
    (True, 16, 1, 10_000_000),
    (True, 16, 4, 10_000_000),
    (False, 16, 1, 1_000),
    (True, 16, 1, 1_000),
    (True, 1, 1, 64_000_000),
    (True, 16, 2, 1_000_000),
    (True, 64, 2, 1_000_000),
)
TINY = ((False, 2, 1, 10_000), (True, 2, 2, 10_000))


def certificates() -> Tls:
    """A certificate that everybody uses, and which signs itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "benchmark")])
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number()).not_valid_before(now - datetime.timedelta(minutes=1))
    builder = builder.not_valid_after(now + datetime.timedelta(hours=1))
    names = x509.SubjectAlternativeName([x509.DNSName("benchmark")])
    root = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    leaf = builder.add_extension(names, critical=False)
    pem = serialization.Encoding.PEM
    texts = [made.sign(key, hashes.SHA256()).public_bytes(pem).decode() for made in (root, leaf)]
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()).decode()
    return Tls(texts[0], texts[1], private)


def serve(setting: dict[str, object]) -> None:
    """The clients of one process, until their parent closes the standard input."""
    tls = setting["tls"] and Tls(**setting["tls"])
    links = [ZenohLink(node, run="bench", connect=(setting["address"],), tls=tls) for node in setting["nodes"]]
    for link in links:
        link.serve(lambda frame: frame)
    sys.stdin.read()
    for link in links:
        link.close()


def measure(with_tls: bool, clients: int, processes: int, size: int, repeats: int) -> dict[str, float]:
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

    seconds, waits = [], []
    try:
        with ZenohLink(-1, run="bench", listen=(address,), tls=tls) as server:
            while len(server.present()) < clients:
                time.sleep(0.05)
            for repeat in range(repeats + 1):
                began = time.perf_counter()
                for client, answer in server.exchange(items(), 60.0):
                    assert answer is not None, f"client {client} was lost"
                    assert len(answer) == size
                if repeat:
                    seconds.append(time.perf_counter() - began)
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
    print(
        "| link | clients (processes) | bytes a message | s an exchange | MB/s | ms, one client alone | server grows, MiB |"
    )
    print("|---|---|---|---|---|---|---|")
    for with_tls, clients, processes, size in TINY if arguments.tiny else SETTINGS:
        one = json.dumps([with_tls, clients, processes, size])
        command = [sys.executable, __file__, "--one", one, "--repeats", str(arguments.repeats)]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        print(
            f"| {'TLS' if with_tls else 'plain'} | {clients} ({processes}) | {size:,} | {found['seconds']:.3f} "
            f"| {found['mb_per_second']:,.0f} | {1000 * found['latency']:.1f} | {found['grown']:,.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
