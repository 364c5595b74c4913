"""The side of clients in a process of its own: it has the data and the states, and is told nothing but bytes.

Reads frames from its standard input and answers each on its standard output; see test_two_processes.py.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import struct
import sys


def read(stream) -> bytes:
    (size,) = struct.unpack("<Q", stream.read(8))
    return stream.read(size)


def write(stream, body: bytes) -> None:
    stream.write(struct.pack("<Q", len(body)) + body)
    stream.flush()


def main() -> None:
    inbox, outbox = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever is printed must not end up among the answers
    import torch

    from sparsona.core.errors import MaskMismatchError
    from sparsona.core.tree import leaves
    from sparsona.engine.clients import LocalClients
    from sparsona.engine.jobs import Outcome
    from sparsona.executors.serial import Serial
    from sparsona.experiment import build

    torch.set_num_threads(1)
    method, options = pickle.loads(read(inbox))
    client_context = build.make_context(build.make_config(method, options))
    # All that a server is told about clients: how many examples each has, and what its device can hold.
    write(outbox, pickle.dumps(client_context.clients))
    clients = LocalClients(client_context, Serial(client_context))
    while True:
        what, value = pickle.loads(read(inbox))
        if what == "run":
            try:
                (answer,) = clients.run([value])
            except MaskMismatchError:
                answer = Outcome(value.client, lacks_mask=True)
            assert answer.state is None
            assert answer.work is None
        elif what == "keep":
            answer = clients.keep(value)
        elif what == "wanted":
            answer = clients.wanted(*value)
        elif what == "digest":
            state = hashlib.sha256()
            for path, tensor in leaves((clients.states, clients.tuned)):
                state.update(path.encode() + tensor.contiguous().numpy().tobytes())
            answer = state.hexdigest()
        else:
            return
        write(outbox, pickle.dumps(answer))


if __name__ == "__main__":
    main()
