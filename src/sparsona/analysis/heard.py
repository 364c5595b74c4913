"""Whose turns had no effect: who diverged, and who was not heard on a machine of its own; and what evaluations took."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from sparsona.analysis.format import plural
from sparsona.core.points import FEWEST
from sparsona.deploy.greeting import LAST_BITS
from sparsona.engine.failures import DIVERGENCE, LEFT_OUT, STARTED_ANEW, TOO_FEW, WITHHELD, kind_of
from sparsona.runs.folder import RunFolder

MOST_NAMES = 8  # in a sentence


def heard(folder: RunFolder) -> dict[str, Any] | None:
    """Turns in which clients were not heard, by reason, and what else happened to them; None where nothing did."""
    rows = [row for row in folder.records.failures() if kind_of(row.reason) != DIVERGENCE]
    if not rows:
        return None
    silent = [(row.client, kind) for row in rows if (kind := kind_of(row.reason)) is not None]
    return {
        "turns": len(silent),
        "clients": len({client for client, _ in silent}),
        "names": _names(folder, {client for client, _ in silent}),
        "reasons": dict(Counter(kind for _, kind in silent).most_common()),
        "started_anew": sum(STARTED_ANEW in row.reason for row in rows),
        "rounds_without_effect": len({row.round for row in rows if row.reason.endswith(TOO_FEW)}),
    }


def heard_sentence(folder: RunFolder) -> str:
    """The same in words, with a space before it; "" where there is nothing to say."""
    found = heard(folder)
    if found is None:
        return ""
    text, num = "", len(folder.facts.sizes)
    if found["turns"]:
        # The unit stands with the first figure only, as people write it.
        (first, count), *others = found["reasons"].items()
        reasons = ", ".join([f"{first}: {plural(count, 'turn')}", *(f"{kind}: {n}" for kind, n in others)])
        be = "was" if found["clients"] == 1 else "were"
        text += f" {found['clients']} of {plural(num, 'client')} {be} not heard in some rounds ({reasons})."
        text += f" Not heard: {_listed(found['names'])}."
    if found["started_anew"]:
        text += f" A client that had lost its state started anew in {plural(found['started_anew'], 'turn')}."
    if found["rounds_without_effect"]:
        text += f" {plural(found['rounds_without_effect'], 'round')} changed nothing, for too few updates arrived."
    return text


def divergences(folder: RunFolder) -> dict[str, Any] | None:
    """Turns whose training diverged, of all that trained; None where none did."""
    failures = folder.records.failures()
    rows = [row for row in failures if kind_of(row.reason) == DIVERGENCE]
    left_out = [row for row in failures if LEFT_OUT in row.reason]
    if not rows and not left_out:
        return None
    trained = sum(row.num_trained for row in folder.records.rounds())
    clients = {row.client for row in rows}
    return {
        "turns": len(rows),
        "of": trained + len(rows),
        "clients": len(clients),
        "names": _names(folder, clients),
        "rounds": sorted({row.round for row in rows}),
        "receivers": len(left_out),
        "first": (rows or left_out)[0].reason,
    }


def divergence_note(found: Mapping[str, Any]) -> str:
    """For a table and a sentence: "3 of 400 turns diverged and were left out"."""
    be, text = "was" if found["turns"] == 1 else "were", f"{found['turns']:,} of {plural(found['of'], 'turn')}"
    text += f" diverged and {be} left out"
    if found["receivers"]:
        text += f", and in {plural(found['receivers'], 'turn')} a peer left out messages far larger than the others"
    return text


def divergence_sentence(folder: RunFolder) -> str:
    """The same for a protocol, with who it was and what became of them; "" where none did."""
    found = divergences(folder)
    if found is None:
        return ""
    who = f" ({_listed(found['names'])})" if found["names"] else ""
    return f" {divergence_note(found)}{who}: a client that diverges keeps what it had before the round."


def untested_sentence(folder: RunFolder, completed: int) -> str:
    """Who has no result in the last evaluation, and why; "" if all do."""
    rows = [row for row in folder.records.evaluation_failures() if row.completed == completed]
    few = {row.client for row in rows if WITHHELD in row.reason}
    silent = {row.client for row in rows if kind_of(row.reason) is not None} - few
    anew = {row.client for row in rows if STARTED_ANEW in row.reason}
    missing = [
        f"{plural(len(few), 'client')} with fewer than {FEWEST} test examples, whose result is not told" if few else "",
        f"{plural(len(silent), 'client')} not heard in the last evaluation" if silent else "",
    ]
    where = "Not in the mean" if folder.records.has_evaluations() else "Without a result"
    text = f" {where}: {'; '.join(filter(None, missing))}." if any(missing) else ""
    text += f" Not tested: {_listed(_names(folder, few | silent))}." if text else ""
    if anew:
        text += f" {plural(len(anew), 'client')} had lost the state, and was evaluated as a new one."
    return text


def _names(folder: RunFolder, clients: set[int]) -> list[str]:
    """What clients are called: by the roster, or by their numbers."""
    known = folder.facts.client_names
    return [known[client] if client < len(known) else f"client {client}" for client in sorted(clients)]


def _listed(names: list[str]) -> str:
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {plural(more, 'other')}" if more > 0 else "")


def machines_sentence(folder: RunFolder) -> str:
    """In what the machines of the run differ; "" if in nothing that matters."""
    found = [f"{key} ({' and '.join(values)})" for key, values in folder.facts.differing.items()]
    return f" Its machines differ in {', '.join(found)}: {LAST_BITS}." if found else ""


def evaluation_bytes(folder: RunFolder) -> dict[str, int | None] | None:
    """Bytes sent for evaluations alone, to clients and back; None where an older version did not count them.

    `up` is None where no answer was encoded, as in a simulation.
    """
    rows = folder.records.evaluation_traffic()
    if not rows:
        return None
    answers = [row.bytes_up for row in rows if row.bytes_up is not None]
    return {"up": sum(answers) if answers else None, "down": sum(row.bytes_down for row in rows)}
