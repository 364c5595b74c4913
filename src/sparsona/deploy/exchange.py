"""A transport: one function that sends frames to clients and returns their answers, and one that answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Protocol

# What the receiving side does with a frame: its answer, or None to say nothing. It may take as long as it likes, and
# may be called from several threads at once.
Handle = Callable[[bytes], bytes | None]


class Exchange(Protocol):
    """Sends frames to clients, and yields their answers as they arrive.

    Args:
        items: pairs of a client's index and the frame for it, taken one by one while there is room in flight, so that
            the frames of many clients are not in memory at once. No client appears twice.
        deadline: seconds from the sending of a frame until its answer counts as lost.

    Returns:
        Pairs of a client's index and its answer, one for each item, in any order; None: lost. While a client cannot be
        reached its frame is sent again, until the deadline. What arrives later is dropped.
    """

    def __call__(self, items: Iterable[tuple[int, bytes]], deadline: float) -> Iterator[tuple[int, bytes | None]]: ...


def in_memory(handles: Mapping[int, Handle]) -> Exchange:
    """An exchange with clients in this process: for tests, and to see what a network run does without a network.

    Args:
        handles: what each client does with a frame. A client that is not there does not answer.

    Returns:
        The exchange.

    Example:
        >>> exchange = in_memory({0: lambda frame: frame[::-1]})
        >>> list(exchange([(0, b"abc"), (1, b"abc")], deadline=1.0))
        [(0, b'cba'), (1, None)]
    """

    def exchange(items: Iterable[tuple[int, bytes]], deadline: float) -> Iterator[tuple[int, bytes | None]]:
        for client, frame in items:
            handle = handles.get(client)
            yield client, None if handle is None else handle(frame)

    return exchange


def in_threads(handles: Mapping[int, Handle]) -> Exchange:
    """An exchange with clients in this process that answer at the same time, each in its own time.

    Args:
        handles: what each client does with a frame. It may change while frames are under way: a frame for a client that
            is not there waits for it until the deadline.

    Returns:
        The exchange.

    Example:
        >>> exchange = in_threads({0: lambda frame: frame[::-1]})
        >>> sorted(exchange([(0, b"abc"), (1, b"abc")], deadline=0.1))
        [(0, b'cba'), (1, None)]
    """

    def exchange(items: Iterable[tuple[int, bytes]], deadline: float) -> Iterator[tuple[int, bytes | None]]:
        answers: SimpleQueue[tuple[int, bytes | None]] = SimpleQueue()

        def ask(client: int, frame: bytes, ends: float) -> None:
            while time.monotonic() <= ends:
                if (handle := handles.get(client)) is not None:
                    answer = handle(frame)
                    if answer is not None or handles.get(client) is handle:
                        answers.put((client, answer))
                        return
                time.sleep(0.005)  # it is not there, or went away meanwhile

        waiting: dict[int, float] = {}
        for client, frame in items:
            waiting[client] = time.monotonic() + deadline
            Thread(target=ask, args=(client, frame, waiting[client]), daemon=True).start()
        while waiting:
            try:
                client, answer = answers.get(timeout=max(0.0, min(waiting.values()) - time.monotonic()))
            except Empty:
                client, answer = min(waiting, key=lambda one: waiting[one]), None
            del waiting[client]
            yield client, answer

    return exchange
