"""What a client keeps on its own disk: its States by ticket, its last answer, and its personal model.

A State never leaves this folder. The server holds its ticket, a digest of it, and names in each job the ticket that
the job starts from. If an update was lost on its way, or the server was restored from an earlier checkpoint, that is
the ticket of an older State.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import secrets
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock
import torch
from safetensors.torch import save
from torch import Tensor

from sparsona.core.errors import SparsonaError
from sparsona.core.files import replace_file
from sparsona.core.method import Work
from sparsona.core.points import NOVEL, NOVEL_TUNED, RECEIVED, TUNED
from sparsona.core.reading import parse_json, read_text
from sparsona.engine.context import ClientContext
from sparsona.engine.evaluate import Evaluation
from sparsona.engine.stored import fill, read_tensors, to_bytes

TICKET_BYTES = 16
SUFFIX = ".state"
ANSWER, VISITS, SECRET, MODEL = "answer", "visits.json", "secret", "model.safetensors"
LOCK, OWNER = "lock", "owner.json"
ABOUT, TESTED = "about.json", "model.json"  # whose model it is and of what data; what was measured of it


@dataclass(frozen=True)
class Ticket:
    """A State that lies in a client's vault, as the server knows it: its digest.

    Args:
        digest: uint8 [16].
    """

    digest: Tensor

    @classmethod
    def of(cls, digest: bytes) -> Ticket:
        """The ticket with this digest."""
        return cls(torch.frombuffer(bytearray(digest), dtype=torch.uint8))

    @classmethod
    def blank(cls) -> Ticket:
        """A ticket of no State, to read a stored one into."""
        return cls(torch.zeros(TICKET_BYTES, dtype=torch.uint8))

    @property
    def hex(self) -> str:
        return bytes(self.digest.tolist()).hex()


class LostStateError(SparsonaError):
    """The vault does not have a State that the server names, or it was damaged."""


class Vault:
    """A client's folder. Files are complete or absent, also after a power failure, and only their owner can read them.

    Args:
        folder: made if needed.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     vault = Vault(Path(folder))
        ...     ticket = vault.put({"weight": torch.ones(2)})
        ...     vault.get(ticket, {"weight": torch.zeros(2)})["weight"].tolist()
        [1.0, 1.0]
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock: filelock.BaseFileLock | None = None
        with self._explained():
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def claim(self, run: str, client: int, data: str) -> None:
        """Keep other processes out for as long as this one lives, and other clients, runs and data for good.

        Args:
            run: the run's identity.
            client: the client's index.
            data: a digest of its examples.
        """
        self._lock = filelock.FileLock(str(self.folder / LOCK), timeout=0)
        with self._explained():
            try:
                self._lock.acquire()
            except filelock.Timeout:  # an OSError, too
                raise SparsonaError(
                    f"'{self.folder}' is in use by another process",
                    expected="one process for each client",
                    hint="stop the other one, or choose another folder with --vault",
                ) from None
        mine, path = {"run": run, "client": client, "data": data}, self.folder / OWNER
        try:
            found = parse_json(read_text(path)) if path.exists() else None
        except (OSError, ValueError):
            found = {}
        if found is None:
            self._write(path, json.dumps(mine).encode())
        elif found != mine:
            found = found if isinstance(found, dict) else {}
            what = next((name for name in mine if found.get(name) != mine[name]), "owner")
            other = "other data" if what == "data" else f"another {what}"
            raise SparsonaError(
                f"'{self.folder}' belongs to {other}",
                expected="the run, the client and the data that it began with",
                hint="choose another folder with --vault: the client then starts anew",
            )

    def release(self) -> None:
        """Let other processes use the folder."""
        if self._lock is not None:
            self._lock.release()

    def put(self, state: Any) -> str:
        """Store a State, on the disk itself when this returns.

        Args:
            state: a State, or a model after final tuning.

        Returns:
            Its ticket, in hexadecimal digits.
        """
        data = to_bytes(state)
        ticket = _digest(data)
        path = self.folder / f"{ticket}{SUFFIX}"
        with self._explained():
            is_there = path.exists() and _digest(path.read_bytes()) == ticket
        if not is_there:
            self._write(path, data)
        return ticket

    def get(self, ticket: str, blank: Any) -> Any:
        """Read a State.

        Args:
            ticket: what `put` returned.
            blank: a value of the same structure.

        Returns:
            The State; LostStateError if it is not here as it was stored.
        """
        path = self.folder / f"{ticket}{SUFFIX}"
        try:
            data = path.read_bytes()
            if _digest(data) != ticket:
                raise ValueError("it is damaged")
            return fill(blank, read_tensors(data), f"'{path}'")
        except (OSError, ValueError) as error:
            raise LostStateError(
                f"the state '{ticket}' cannot be read: {error}",
                expected=f"a file in '{self.folder}' as it was written",
                hint="restore the folder from a copy; otherwise this client starts anew",
            ) from None

    def keep(self, tickets: Iterable[str]) -> None:
        """Delete all other States."""
        kept = {f"{ticket}{SUFFIX}" for ticket in tickets}
        for path in self.folder.glob(f"*{SUFFIX}"):
            if path.name not in kept:
                path.unlink(missing_ok=True)

    def tickets(self) -> list[str]:
        """The tickets of all States here, the newest first."""
        found = sorted(self.folder.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
        return [path.name.removesuffix(SUFFIX) for path in found]

    # The last answer, to be sent again if the same job comes again.

    def remember(self, job: str, answer: bytes) -> None:
        """Store the answer to a job in place of the one before.

        It need not survive a power failure, for which nobody waits here: then the job is done again.
        """
        self._write(self.folder / ANSWER, _first_line(job, answer), answer, is_durable=False)

    def answer(self, job: str) -> bytes | None:
        """The answer to this job, if it was the last."""
        with contextlib.suppress(OSError), (self.folder / ANSWER).open("rb") as file:
            first = file.readline()
            if first.split(b" ")[0] == job.encode():
                answer = file.read()
                if first == _first_line(job, answer):  # after a power failure the file may be incomplete
                    return answer
        return None

    # The last frame of the server: those before it are old ones, which somebody else sends again.

    def check_visit(self, session: int, number: int) -> None:
        """Raise SparsonaError if the server was heard later than that before.

        Args:
            session: which start of the server it was, larger than for all starts before.
            number: of the frame since then.
        """
        last = self._last_visit()
        if (session, number) < last:
            raise SparsonaError(
                f"frame {number} of the server's start {session} came again or too late",
                expected=f"frame {last[1]} of start {last[0]}, or a later one",
                hint="an old frame was sent again, or the server's clock went back",
            )

    def visit(self, session: int, number: int) -> None:
        """Note that the server was heard."""
        if (session, number) != self._last_visit():
            self._write(self.folder / VISITS, json.dumps([session, number]).encode())

    def _last_visit(self) -> tuple[int, int]:
        try:
            session, number = parse_json(read_text(self.folder / VISITS))
            return int(session), int(number)
        except (OSError, ValueError, TypeError, OverflowError):
            return 0, 0

    def secret(self) -> bytes:
        """32 random bytes that only this client has, drawn once."""
        path = self.folder / SECRET
        if not path.exists():
            self._write(path, secrets.token_bytes(32))
        return path.read_bytes()

    def describe(self, about: Mapping[str, Any]) -> None:
        """Note what an exported model says of its client and data, as values that JSON can write. It stays here."""
        self._write(self.folder / ABOUT, json.dumps(about).encode())

    def keep_model(
        self,
        context: ClientContext,
        work: Work,
        completed: int,
        evaluations: Iterable[Evaluation] = (),
        *,
        is_tuned: bool = False,
    ) -> None:
        """Store the client's personal model as a safetensors file of a state_dict, where the method has a plain one.

        Args:
            context: the client's context.
            work: what it would predict with.
            completed: after how many rounds.
            evaluations: of that time, perhaps of other models, too.
            is_tuned: it was tuned after the last round.
        """
        if context.method.deploy is None:
            return
        made = context.method.deploy(work)
        module = context.task.module(*made) if isinstance(made, tuple) else made
        weights = {name: value.detach().cpu().contiguous() for name, value in module.state_dict().items()}
        points = (TUNED, NOVEL_TUNED) if is_tuned else (RECEIVED, NOVEL)
        tested: dict[str, Any] = {"completed": completed, "point": points[0]}
        for one in evaluations:
            if one.point in points:
                tested |= {name: getattr(one, name) for name in ("point", "correct", "count", "loss")}
                tested["metrics"] = dict(one.metrics)
        # The model last: what is said of it is there when it is.
        self._write(self.folder / TESTED, json.dumps(tested).encode())
        self._write(self.folder / MODEL, save(weights))

    @property
    def model(self) -> Path | None:
        """The file of the personal model, once there is one."""
        path = self.folder / MODEL
        return path if path.exists() else None

    def _write(self, path: Path, *data: bytes, is_durable: bool = True) -> None:
        with self._explained():
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # somebody may have deleted it
        with self._explained(), replace_file(path, is_durable=is_durable) as file:
            for one in data:
                file.write(one)
            Path(file.name).chmod(0o600)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            raise SparsonaError(
                f"'{self.folder}' cannot be written: {'the disk is full' if is_full else error.strerror or error}",
                expected="room for a client's state",
                hint="free some space: what was written before is intact, and the client goes on with it"
                if is_full
                else "choose another folder with --vault, or change the permissions of this one",
            ) from error


def _first_line(job: str, answer: bytes) -> bytes:
    return f"{job} {len(answer)} {zlib.crc32(answer):08x}\n".encode()


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=TICKET_BYTES).hexdigest()
