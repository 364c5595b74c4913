"""stdout and stderr as they may be: closed, on a full disk, or unable to encode a character."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from sparsona.core.errors import SparsonaError


@contextmanager
def usable_streams() -> Iterator[None]:
    """Let commands print without care: a closed stream swallows what it is given, a character that cannot be encoded
    is escaped, and bars that cannot be shown end no run.

    Yields:
        Nothing.
    """
    before = sys.stdout, sys.stderr
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        sys.stdout, sys.stderr = sys.stdout or nowhere, sys.stderr or nowhere
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        sys.stdout = _Watched(sys.stdout)
        sys.stderr = quiet = _Quiet(sys.stderr)
        try:
            yield
        finally:
            if quiet.failed:
                abandon(quiet.stream)
            sys.stdout, sys.stderr = before


@contextmanager
def printing() -> Iterator[None]:
    """Print all of what is printed inside.

    Yields:
        Nothing. SparsonaError: stdout cannot be written. BrokenPipeError: who read it is gone.
    """
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        if error is not getattr(sys.stdout, "failure", None):
            raise  # of something else
        abandon(sys.stdout)
        if isinstance(error, BrokenPipeError):
            raise
        raise SparsonaError(
            f"the result could not be printed: {error.strerror or error}",
            expected="a stdout that can be written",
            hint="free some space; a run is stored whether printed or not, and `sparsona report RUN` shows it",
        ) from error


class _Watched:
    """A stream that remembers why it could not be written: by itself an error does not tell which file it is of."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.failure: OSError | None = None

    def write(self, text: str) -> int:
        return self._do(self.stream.write, text)

    def flush(self) -> None:
        self._do(self.stream.flush)

    def _do(self, act: Callable[..., Any], *args: str) -> Any:
        try:
            return act(*args)
        except OSError as error:
            self.failure = error
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class _Quiet:
    """A stream whose failures are of no interest: there is no place to report them."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.failed = stream, False

    def write(self, text: str) -> int:
        try:
            self.stream.write(text)
        except (OSError, ValueError):  # ValueError: it was closed
            self.failed = True
        return len(text)

    def flush(self) -> None:
        try:
            self.stream.flush()
        except (OSError, ValueError):
            self.failed = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def abandon(stream: Any) -> None:
    """Let a stream drop what it still holds: Python would fail to write it once more when it exits."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
