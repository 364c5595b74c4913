"""A run's rounds where clients differ in pace and presence, in numbers and in words, and why the run ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparsona.core.targets import TITLES, given_name
from sparsona.engine.availability import KINDS
from sparsona.engine.sampling import SAMPLERS
from sparsona.runs.folder import RunFolder, reached
from sparsona.runs.stopping import recorded_patience, validation_point, watched


def conditions(folder: RunFolder) -> dict[str, Any] | None:
    """What was simulated of a run's rounds: time, late turns, rounds with few clients; None where nothing was.

    `few` are rounds in which fewer clients were available than were wanted, `empty` those with none.
    """
    rows = folder.records.conditions()
    if not rows:
        return None
    times = [row.time for row in rows if row.time is not None]
    present = [row.num_awake for row in rows if row.num_awake is not None]
    wanted = _wanted(folder)
    return {
        "time": sum(times) if times else None,
        "late": sum(row.num_late for row in rows if row.num_late is not None) if folder.config["deadline"] else None,
        "few": sum(num < wanted for num in present) if present else None,
        "empty": sum(num == 0 for num in present) if present else None,
    }


def _wanted(folder: RunFolder) -> int:
    """Clients per round as far as there are so many."""
    num = len(folder.facts.sizes) - len(folder.facts.novel)
    asked = folder.config.get("per_round")
    return asked or (num if folder.facts.peers else max(1, num // 2))


def early_stop(folder: RunFolder) -> dict[str, Any] | None:
    """Where and why a run ended before its last round; None: it did not, or a limit stopped it."""
    found, rounds = reached(folder.path), folder.config["rounds"]
    if folder.config.get("patience") is None or not found.finished or found.completed >= rounds:
        return None
    facts, metric = folder.facts, folder.config.get("patience_metric")
    seen = recorded_patience(folder.records, facts, metric, folder.config["min_delta"])
    point, by = validation_point(facts.point), watched(metric, facts.is_regression)
    return {"after": found.completed, "of": rounds, "best": seen.best, "point": point, "metric": by}


def early_stop_sentence(found: Mapping[str, Any]) -> str:
    """For a table, a summary and a sentence."""
    return f"stopped early after round {found['after']} of {found['of']}, best validation at round {found['best']}"


def conditions_sentence(folder: RunFolder, summary: Mapping[str, Any]) -> str:
    """In words: what differs from client to client, who could take part, and when the run ended."""
    config, text = folder.config, ""
    if (scales := _values(config.get("client_lr_scale"))) not in ((), (1.0,)):
        text += f" Clients' learning rates are multiplied by {_range(scales)}."
    if epochs := _values(given := config.get("client_epochs")):
        who, rest = "Clients", "in place of the method's"
        if isinstance(given, Mapping):
            who, rest = f"{len(given)} of the clients", "the others as many as the method has"
        text += f" {who} have epochs of their own, {_range(epochs)} in a round, {rest}."
    if (sampler := config.get("sampler", "uniform")) != "uniform":
        how = (
            "by a function from Python" if given_name(sampler) is not None else f"'{sampler}': {SAMPLERS[sampler].text}"
        )
        text += f" Clients are sampled {how}."
        if sampler == "loss":
            text += " So methods do not have the same clients in a round."
    found = summary.get("conditions") or {}
    if availability := config.get("availability"):
        kind = availability.partition(":")[0]
        shown = "by a trace" if kind in ("file", "windows") else f"{availability}: {KINDS[kind].text}"
        text += f" Not all clients are always available ({shown})"
        text += f": in {found.get('few') or 0} rounds fewer than were wanted, in {found.get('empty') or 0} none."
    if config.get("speeds") or config.get("deadline") is not None:
        text += _time_sentence(config, found)
    for one in folder.facts.extensions:
        text += f" Rounds were added to the {one.rounds} it had, up to {one.total}"
        text += f", of which {' and '.join(one.changed)} followed the progress of each." if one.changed else "."
    if stop := summary.get("early_stop"):
        ended = early_stop_sentence(stop)
        num = config["patience"]
        waited = "one evaluation was" if num == 1 else f"{num} evaluations in a row were"
        text += f" {ended[0].upper()}{ended[1:]}: {waited} not better, by the mean "
        text += f"{TITLES.get(stop['metric'], stop['metric'])} of clients on validation data."
        text += " The result is that of the last round."
    return text


def _time_sentence(config: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    speeds, deadline, time = config.get("speeds"), config.get("deadline"), found.get("time") or 0.0
    shown = speeds if isinstance(speeds, str) else _range(_values(speeds) or (1.0,))
    text = (
        f" Clients' speeds are {shown}; in simulated time the rounds took {time:.4g}, where 1 is the turn of a client "
    )
    text += "of speed 1 with the mean amount of data"
    if deadline is None:
        return f"{text}."
    became = "lost" if config.get("late") == "drop" else "cut short"
    return f"{text}. With a deadline of {deadline:g}, {found.get('late') or 0} turns were {became}."


def _values(given: Any) -> tuple[float, ...]:
    return tuple(given.values()) if isinstance(given, Mapping) else tuple(given or ())


def _range(values: tuple[float, ...]) -> str:
    low, high = min(values), max(values)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"
