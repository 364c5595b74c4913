"""Which clients are available in a round: a pure function of the options, seed and round. Imported without torch.

A kind of availability is a row of `KINDS`.
"""

from __future__ import annotations

import csv
import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from sparsona.core import spec
from sparsona.core.errors import SparsonaError
from sparsona.core.reading import MOST_BYTES, expand, read_text
from sparsona.core.seeds import Seeds, generator
from sparsona.core.spec import Spec

Available = frozenset[int]
COLUMNS = ["client", "round_from", "round_to"]
MOST_CLIENTS = 1_000_000  # of a trace that is written out before they are known


@dataclass(frozen=True)
class Availability:
    """When clients are available.

    Args:
        kind: a row of `KINDS`.
        numbers: its arguments.
        windows: for each client its windows in a trace, as first and last round; empty for other kinds.
        length: the rounds of a trace, after which it starts again; 0: it ends.
    """

    kind: str
    numbers: tuple[float, ...] = ()
    windows: tuple[tuple[tuple[int, int], ...], ...] = ()
    length: int = 0

    @property
    def digest(self) -> str | None:
        """Identifies the content of a file, which may change before a run is resumed; None without one."""
        if not self.windows:
            return None
        return hashlib.blake2b(repr((self.windows, self.length)).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Kind:
    """A row of `KINDS`; `read` returns None where the arguments are not those expected."""

    form: str
    text: str
    read: Callable[[Spec, int], Availability | None]
    available: Callable[[Availability, int, int, Seeds], Available]
    expected: str
    example: str


def read_availability(text: str, num_clients: int) -> Availability:
    """The availability that a text names.

    Args:
        text: one of the forms in `KINDS`.
        num_clients: how many clients there are.

    Returns:
        The availability, with the content of its file if it names one.
    """
    found = spec.read("availability", text, [row.form for row in KINDS.values()])
    row = KINDS[found.name]
    made = None if found.options and found.name != "file" else row.read(found, num_clients)
    if made is None:
        raise found.wrong(row.expected, f"--set availability={row.example}")
    return made


def check_availability(text: str) -> None:
    """Raise SparsonaError if a text is none; a file is not read."""
    found = spec.read("availability", text, [row.form for row in KINDS.values()])
    if found.name != "file":
        read_availability(text, 1 + text.count("/"))  # as many clients as a trace has that is written out
    elif not found.argument:
        raise found.wrong(KINDS["file"].expected, f"--set availability={KINDS['file'].example}")


def available_clients(found: Availability, num_clients: int, index: int, seeds: Seeds) -> Available:
    """The clients that are available in the round of this index.

    Args:
        found: the availability.
        num_clients: how many clients there are.
        index: the round, from 0.
        seeds: those of the run.
    """
    return KINDS[found.kind].available(found, num_clients, index, seeds)


# Diurnal: every client is available for the same share of a period, from a phase of its own.


def _read_diurnal(found: Spec, _num: int) -> Availability | None:
    if len(found.args) != 2:
        return None
    period, share = spec.as_count(found.args[0]), spec.as_number(found.args[1])
    if period is None or share is None or not 0 < share <= 1:
        return None
    return Availability("diurnal", (period, share))


@lru_cache(maxsize=8)  # read in every round
def _phases(num: int, period: int, seed: int) -> tuple[int, ...]:
    import torch

    return tuple(torch.randint(period, (num,), generator=generator(seed)).tolist())


def _diurnal(found: Availability, num: int, index: int, seeds: Seeds) -> Available:
    period, share = int(found.numbers[0]), found.numbers[1]
    hours = max(1, round(period * share))
    phases = _phases(num, period, seeds.shared("diurnal"))
    return frozenset(client for client, phase in enumerate(phases) if (index + phase) % period < hours)


# Markov: an absent client returns with one probability in each round, an available one leaves with another.


def _read_markov(found: Spec, _num: int) -> Availability | None:
    numbers = [spec.as_number(one) for one in found.args]
    known = tuple(one for one in numbers if one is not None and 0 <= one <= 1)
    return Availability("markov", known) if len(numbers) == len(known) == 2 and known[0] > 0 else None


@lru_cache(maxsize=4)
def _history(num: int, up: float, down: float, root: int) -> list[Available]:
    """The rounds that were drawn so far: each follows from the one before."""
    return []


def _markov(found: Availability, num: int, index: int, seeds: Seeds) -> Available:
    import torch

    up, down = found.numbers
    history = _history(num, up, down, seeds.root)
    while len(history) <= index:
        at = seeds.at(len(history)).shared("markov")
        drawn = torch.rand(num, generator=generator(at), dtype=torch.float64).tolist()
        if not history:  # as often available as in the long run
            history.append(frozenset(client for client, one in enumerate(drawn) if one < up / (up + down)))
            continue
        before = history[-1]
        stays = (one >= down if client in before else one < up for client, one in enumerate(drawn))
        history.append(frozenset(client for client, stays_on in enumerate(stays) if stays_on))
    return history[index]


# A trace from a file.


def _read_file(found: Spec, num: int) -> Availability | None:
    return _read_trace(found.argument, num) if found.argument else None


def _read_trace(argument: str, num: int | None) -> Availability:
    """The trace in a file; `num` None: of as many clients as it names."""
    path = expand(argument)
    try:
        lines = csv.reader(read_text(path, MOST_BYTES).removeprefix("\ufeff").splitlines())
        rows = [[cell.strip() for cell in row] for row in lines if any(cell.strip() for cell in row)]
    except (OSError, ValueError, csv.Error) as error:
        raise SparsonaError(
            f"availability '{path}' cannot be read: {getattr(error, 'strerror', None) or error}",
            expected="a CSV file",
            hint="check the path, and see docs/experiments.md",
        ) from None
    if rows and rows[0] == COLUMNS:
        return _from_windows(path, rows[1:], num)
    return _from_matrix(path, rows, num)


def _wrong(path: Path, what: str) -> SparsonaError:
    return SparsonaError(
        f"availability '{path}': {what}",
        expected=f"a line '{','.join(COLUMNS)}' and such numbers below it, or a row of 0 and 1 for each client with a "
        "column for each round",
        hint="see docs/experiments.md",
    )


def _from_windows(path: Path, rows: list[list[str]], num: int | None) -> Availability:
    most = MOST_CLIENTS if num is None else num
    windows: dict[int, list[tuple[int, int]]] = {}
    for number, row in enumerate(rows, 2):
        if len(row) != 3 or not all(cell.isascii() and cell.isdecimal() and len(cell) < 10 for cell in row):
            raise _wrong(path, f"line {number} is not three whole numbers")
        client, first, last = map(int, row)
        if client >= most or last < first:
            what = f"names client {client} of {most}" if client >= most else f"ends in round {last} before it begins"
            raise _wrong(path, f"line {number} {what}")
        windows.setdefault(client, []).append((first, last))
    size = max(windows, default=-1) + 1 if num is None else num
    return Availability("file", windows=tuple(tuple(sorted(windows.get(client, ()))) for client in range(size)))


def _from_matrix(path: Path, rows: list[list[str]], num: int | None) -> Availability:
    if not rows or (num is not None and len(rows) != num):
        raise _wrong(path, f"{len(rows)} rows" + (f" for {num} clients" if num is not None else ""))
    length = len(rows[0])
    for number, row in enumerate(rows, 1):
        if len(row) != length or not set(row) <= {"0", "1"}:
            raise _wrong(path, f"row {number} is not {length} times 0 or 1")
    windows = tuple(tuple((place, place) for place, cell in enumerate(row) if cell == "1") for row in rows)
    return Availability("file", windows=windows, length=length)


def _file(found: Availability, _num: int, index: int, _seeds: Seeds) -> Available:
    place = index % found.length if found.length else index
    return frozenset(
        client for client, windows in enumerate(found.windows) if any(first <= place <= last for first, last in windows)
    )


# The same, written out: in a federation file, which other machines read.


def write_out(text: str) -> str:
    """An availability without files: a trace from a file with its windows in place of the path, others as they are.

    Args:
        text: one of the forms in `KINDS`.

    Returns:
        The text, whose trace is of as many clients as the file names: how many there will be may not be known yet.
    """
    found = spec.read("availability", text, [row.form for row in KINDS.values()])
    if found.name != "file" or not found.argument:
        return text
    trace = _read_trace(found.argument, None)
    windows = ("+".join(f"{first}-{last}" for first, last in _joined(one)) for one in trace.windows)
    return f"windows:{trace.length}:{'/'.join(windows)}"


def _joined(windows: tuple[tuple[int, int], ...]) -> list[tuple[int, int]]:
    """The same rounds in as few windows as there can be."""
    found: list[tuple[int, int]] = []
    for first, last in windows:
        if found and first <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], last))
        else:
            found.append((first, last))
    return found


def _read_windows(found: Spec, num: int) -> Availability | None:
    if len(found.args) != 2 or not re.fullmatch(_WINDOWS, found.args[1]) or not re.fullmatch(_ROUND, found.args[0]):
        return None
    length, clients = int(found.args[0]), found.args[1].split("/")
    rows = [[tuple(map(int, one.split("-"))) for one in row.split("+")] if row else [] for row in clients]
    if any(last < first or 0 < length <= last for row in rows for first, last in row):
        return None
    # A trace that starts again has a row for each client. One that does not names those that ever are available.
    if len(rows) > num or (length and len(rows) < num):
        raise SparsonaError(
            f"a trace of {len(rows)} clients for {num}",
            expected="who is available when, of the clients that there are",
            hint="admit as many clients as the trace has, or make the federation file anew with another one",
        )
    rows += [[] for _ in range(num - len(rows))]
    return Availability(
        "windows", windows=tuple(tuple((first, last) for first, last in row) for row in rows), length=length
    )


_ROUND = r"[0-9]{1,9}"
_ROW = rf"({_ROUND}-{_ROUND}(\+{_ROUND}-{_ROUND})*)?"
_WINDOWS = rf"{_ROW}(/{_ROW})*"

KINDS = {
    row.form.partition(":")[0]: row
    for row in (
        Kind(
            "diurnal:PERIOD:SHARE",
            "available for a share of every PERIOD rounds, from a phase drawn for each client",
            _read_diurnal,
            _diurnal,
            "a period in rounds and a share above 0 and at most 1",
            "diurnal:24:0.5",
        ),
        Kind(
            "markov:P_UP:P_DOWN",
            "in each round an absent client returns with probability P_UP, an available one leaves with P_DOWN",
            _read_markov,
            _markov,
            "two probabilities, the first above 0",
            "markov:0.2:0.1",
        ),
        Kind(
            "file:TRACE.csv",
            "a trace: lines client,round_from,round_to, or a row of 0 and 1 for each client",
            _read_file,
            _file,
            "the path of a CSV file",
            "file:trace.csv",
        ),
        Kind(
            "windows:LENGTH:ROUNDS/...",
            "a trace, written out: the rounds of each client in turn; it starts again after LENGTH of them, 0: never",
            _read_windows,
            _file,
            "a length, and for each client windows of rounds such as 0-4+9-12, which end before it",
            "windows:24:0-11/6-17/12-23",
        ),
    )
}
