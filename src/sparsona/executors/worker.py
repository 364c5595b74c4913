"""A worker process: reads jobs from its standard input, writes outcomes to its original standard output.

Started by `start_command`, so the user's script is never imported again. It ignores Ctrl-C, which the parent handles,
and ends with its parent, also in the middle of a turn.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import signal
import struct
import sys
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO, cast

from sparsona.core.parents import end_with_parent, exit_when_closed, parent_to_die_with
from sparsona.engine.profiler import IDLE, OFF, START, Clock, WorkerReport

Readable = io.BufferedIOBase | io.RawIOBase
FRAME = struct.Struct("<Q")
# Python of a new worker: it imports from where its parent does. Before that, `-P` keeps the current folder out, whose
# files nobody meant to run; json is the only import then.
_BEGIN = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from sparsona.executors.worker import main; main(json.loads(sys.argv[2]))"
)


def start_command() -> list[str]:
    """The command that starts a worker of this process."""
    path = [folder for folder in sys.path if isinstance(folder, str)]
    return [sys.executable, "-P", "-c", _BEGIN, json.dumps(path), json.dumps(parent_to_die_with())]


def read_frame(stream: Readable, clock: Clock = OFF) -> Any:
    """Read the next object; raises EOFError when the other side has closed the pipe."""
    with clock.measure(IDLE):
        (size,) = FRAME.unpack(_read(stream, FRAME.size))
    with clock.measure("pipe"):
        # Only the parent that started this process can write to this pipe.
        return pickle.loads(_read(stream, size))


def _read(stream: Readable, size: int) -> bytearray:
    """Read exactly `size` bytes, which a pipe returns in pieces."""
    body, done = bytearray(size), 0
    while done < size:
        count = stream.readinto(memoryview(body)[done:])
        if not count:
            raise EOFError
        done += count
    return body


def pack(value: Any, by_value: bool = False) -> bytes:
    """Pickle an object; `by_value`: with classes that another process cannot import, which takes longer."""
    if by_value:
        import cloudpickle

        body: bytes = cloudpickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
        return body
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def is_importable(make_method: Any) -> bool:
    """Whether another process can import a method's classes: not those of a script, a notebook or a function."""
    try:
        return b"__main__" not in pickle.dumps(make_method)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False


def answer(act: Callable[[], Any], clock: Clock, by_value: bool) -> bytes:
    """What `act` returned and what was measured meanwhile, or the error that it raised: packed, for `open_answer`."""
    from sparsona.core.errors import SparsonaError

    try:
        value = act()
        report = clock.take() if clock.is_on else None
        with clock.measure("pipe"):
            return pack(("done", (value, report)), by_value)
    except SparsonaError as error:
        return pack(("error", error))
    except Exception:
        return pack(("crash", traceback.format_exc()))


def open_answer(message: tuple[str, Any]) -> tuple[Any, WorkerReport | None]:
    """What a worker returned and measured; raises the error that its answer is."""
    kind, value = message
    if kind == "error":
        raise value
    if kind == "crash":
        raise RuntimeError(f"a worker process failed:\n{value}")
    found: tuple[Any, WorkerReport | None] = value
    return found


def write_frame(stream: BinaryIO, value: Any) -> None:
    write_body(stream, pack(value))


def write_body(stream: BinaryIO, body: bytes) -> None:
    stream.write(FRAME.pack(len(body)))
    stream.write(body)
    stream.flush()


def main(parent: int | None = None) -> None:
    """Be a worker until the pipe closes.

    Args:
        parent: the process that this one was started by, if it can be bound to that: `parent_to_die_with`.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(parent)
    exit_when_closed(sys.stdin.fileno())
    inbox = cast(Readable, sys.stdin.buffer)
    # The output of a user's model must not be mixed with the outcomes.
    outbox = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        is_profiled, by_value = read_frame(inbox)
        # Before torch is imported, so that the parent can write to all workers while they start together.
        _serve(read_frame(inbox), inbox, outbox, Clock(is_on=is_profiled), by_value)
    except (EOFError, BrokenPipeError):
        os._exit(0)  # the parent has ended: there is nothing to flush


def _serve(request: tuple[str, Any], inbox: Readable, outbox: BinaryIO, clock: Clock, by_value: bool) -> None:
    with clock.measure(f"{START}import"):
        import torch

        from sparsona.data.federation import Federation
        from sparsona.engine.context import ClientContext
        from sparsona.engine.jobs import Executor
        from sparsona.executors import numeric_mode, open_executor
        from sparsona.executors.serial import take_turn

    torch.set_num_threads(1)
    context: ClientContext | None = None

    executor: Executor | None = None  # of a process that runs groups of jobs

    def act() -> Any:
        nonlocal context, executor
        kind, value = request
        if kind == "open":
            with clock.measure(f"{START}build"):
                fields, folder, name = pickle.loads(value)
                context = ClientContext(federation=Federation.open(folder), clock=clock, **fields)
                executor = None if name is None else open_executor(name, context)
        elif kind == "job":
            assert context is not None
            return take_turn(context, value)
        elif kind == "jobs":
            assert context is not None
            assert executor is not None
            with numeric_mode(context):
                return list(executor.run(value))
        return None  # "report" asks for what was measured alone

    while True:
        body = answer(act, clock, by_value)
        with clock.measure("pipe"):
            write_body(outbox, body)
        request = read_frame(inbox, clock)


if __name__ == "__main__":
    main()
