"""What a comparison says, in one sentence, what it is of, and what its methods were not given alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from sparsona.analysis.format import human_bytes, plural
from sparsona.analysis.groups import (
    WITHOUT,
    Group,
    flatten,
    group_views,
    is_unset,
    pairs,
    setting_label,
    shared_and_differing,
)
from sparsona.analysis.measure import ACCURACY, WEIGHTED, Measure, headline_score
from sparsona.analysis.protocol import join_labels
from sparsona.analysis.statistics import mean_and_spread, paired_difference
from sparsona.analysis.view import RunView
from sparsona.core.targets import GIVEN

UNNAMED = "arrays"  # what data that was passed from Python is called where nobody named it
LESS = 0.9  # the share of the best method's traffic below which another method is worth naming beside it

# Options of a run that change how a method was trained, rather than how it was tested or stored.
TRAINING = (
    "rounds",
    "per_round",
    "batch_size",
    "loss",
    "class_weights",
    "label_smoothing",
    "lr_schedule",
    "lr_decay",
    "tune_epochs",
    "tune_lr_scale",
    "transform",
    "mean",
    "privacy",
    "precision",
    "device",
    "executor",
    "preset",
)


@dataclass(frozen=True)
class _Result:
    """A method's result: its score, the mean of what it is judged by, and all bytes that it sent."""

    group: Group
    score: float
    sent: float
    measure: Measure
    in_full: bool = False  # with the digits of a table

    @property
    def printed(self) -> str:
        """The score as tables have it."""
        return f"{self.measure.show(self.score)}{self.measure.unit}"

    @property
    def text(self) -> str:
        return self.printed if self.in_full else self.measure.brief(self.score)


def answer(views: Sequence[RunView]) -> str:
    """The result of these runs in one sentence: who serves clients best, and who comes near with less traffic; and
    before it, whether some have not finished.

    Args:
        views: the runs of a comparison, or one.

    Returns:
        A sentence; "" where nothing was measured.
    """
    open_ = [view for view in views if view.unfinished_at is not None]
    text = _answer(views, "best so far" if open_ else "best")
    if not text or not open_:
        return text
    how_far = f"round {open_[0].unfinished_at} of {open_[0].config['rounds']}"
    return f"Not finished ({how_far if len(views) == 1 else f'{len(open_)} of {len(views)} runs'}): {text}"


def _answer(views: Sequence[RunView], best_word: str) -> str:
    found = [result for group in group_views(views) if (result := _result(group)) is not None]
    if not found:
        return ""
    measure = found[0].measure
    found = sorted(
        (one for one in found if one.measure == measure), key=lambda one: (-measure.sign * one.score, one.sent)
    )
    if any(one.text == other.text and one.printed != other.printed for one, other in pairwise(found)):
        found = [replace(one, in_full=True) for one in found]
    # What prints alike is equally good, as in the table; of these the one that sends least comes first.
    equal = sorted((one for one in found if one.printed == found[0].printed), key=lambda one: one.sent)
    best, others = equal[0], found[len(equal) :]
    unit = "" if measure == ACCURACY else f" ({measure.over})" if measure == WEIGHTED else f" ({measure.title})"
    if len(equal) > 1:
        *first, last = (one.group.label for one in equal)
        text = f"{join_labels(first)} and {last} serve clients equally well, {best.text}{unit}"
        if best.sent < equal[1].sent:
            sent = f"the least of these, {human_bytes(best.sent)}" if best.sent else "nothing"
            text += f"; {best.group.label} sends {sent}"
        elif others:
            text += f"; next is {others[0].group.label}, {others[0].text}"
        return text + _seeds(found)
    if not others:
        sent = f"{human_bytes(best.sent)} sent" if best.sent else "nothing sent"
        return f"{best.group.label} serves clients with {best.text}{unit} on average, {sent}."
    text = f"{best.group.label} serves clients {best_word}, {best.text}{unit}"
    if best.sent == 0:
        text += ", and sends nothing"
    rival = _unclear(best, others)
    cheap = [one for one in others if 0 < one.sent < LESS * best.sent]
    near = cheap[0] if cheap else None  # the best of those that send less
    if rival is not None and rival is near:
        text += f", though not clearly better than {near.group.label}, which reaches {_with_less(near, best)}"
        return text + _seeds(found)
    if rival is not None:
        text += f", though not clearly better than {rival.group.label} ({rival.text})"
    silent = next((one for one in others if one.sent == 0), None)
    if near is not None and silent is not None and others.index(silent) < others.index(near):
        # Less traffic is no reason to choose a method where sending nothing does better.
        if silent is not rival:
            text += f"; {silent.group.label} reaches {silent.text} and sends nothing"
    elif near is not None:
        text += f"; {near.group.label} reaches {_with_less(near, best)}"
    elif rival is None:
        text += f"; next is {others[0].group.label}, {others[0].text}"
    return text + _seeds(found)


def differing(views: Sequence[RunView]) -> list[str]:
    """What methods of a comparison were not given alike in training: optimizers, rates, passes, executors.

    Args:
        views: the runs.

    Returns:
        One phrase for each setting that differs, such as "momentum 0.9 (pFedGate), 0.0 (FedAvg, Local)". A setting that
        only one method has is no difference. Those without an option, such as a transform, are not listed.
    """
    groups = group_views(views)
    tables = [_training(group.views[0]) for group in groups]
    _, names = shared_and_differing(tables)
    found = []
    for name in names:
        users: dict[str, list[str]] = {}
        for group, table in zip(groups, tables, strict=True):
            if name in table:
                users.setdefault(table[name], []).append(group.label)
        if len(users) > 1:
            usual = next((value for value in users if name in WITHOUT and is_unset(name, value)), None)
            values = [
                f"{_value(name, value)} ({join_labels(labels)})" for value, labels in users.items() if value != usual
            ]
            values += [] if usual is None else [f"otherwise {_value(name, usual)}"]
            found.append(("" if name in WITHOUT else f"{name} ") + ", ".join(values))
    return found


def scope(views: Sequence[RunView]) -> list[str]:
    """What these runs are of: data, model, and how many methods, seeds, clients and rounds.

    Args:
        views: the runs.

    Returns:
        Phrases for one line, such as "digits, dirichlet:0.3" and "20 clients, 10 a round".
    """

    def shared(name: str) -> str | None:
        values = {str(view.config.get(name)) for view in views}
        return values.pop() if len(values) == 1 and values != {"None"} else None

    called = {view.data or str(view.config.get("data")) for view in views}  # the name, and not the path of a file
    parts = (called.pop() if len(called) == 1 else None, shared("partition"))
    data = [value for value in parts if value is not None and value not in (GIVEN, UNNAMED, "None")]
    sizes = {view.num_parameters for view in views}
    model = shared("model")
    if model in (None, GIVEN):
        model = "own model" if model else "the data's usual network"
    if len(sizes) == 1 and None not in sizes:
        model += f" ({next(iter(sizes)):,} parameters)"
    sampled = shared("per_round")
    own = [options for view in views if isinstance(options := view.config.get("options"), dict)]
    epochs = {str(options["epochs"]) for options in own if "epochs" in options}
    return [
        *([", ".join(data)] if data else []),
        model,
        _range([len(group_views(views))], "method"),
        _range([len({view.seed for view in views})], "seed"),
        _range([len(view.count) for view in views], "client") + (f", {sampled} a round" if sampled else ""),
        _range([int(view.summary["rounds"]) for view in views], "round"),
        *([plural(int(epochs.pop()), "epoch") + " a turn"] if len(epochs) == 1 else []),
    ]


def _range(counts: Sequence[int], noun: str) -> str:
    low, high = min(counts), max(counts)
    return plural(low, noun) if low == high else f"{low:,}–{plural(high, noun)}"


def _value(name: str, value: str) -> str:
    return setting_label(name, value) if name in WITHOUT else "none" if value == "null" else value


def _training(view: RunView) -> dict[str, str]:
    options = view.config.get("options")
    own = dict(options) if isinstance(options, dict) else {}
    chosen = {name: view.config[name] for name in TRAINING if name in view.config}
    return flatten({**own, **chosen})


def _result(group: Group) -> _Result | None:
    scores = [score for view in group.views if (score := headline_score(view.measure, view.summary)) is not None]
    if not scores:
        return None
    sent, _ = mean_and_spread([float(view.summary["bytes"]["total"]) for view in group.views])
    return _Result(group, mean_and_spread(scores)[0], sent, group.views[0].measure)


def _with_less(near: _Result, best: _Result) -> str:
    return f"{near.text} with {near.sent / best.sent:.0%} of the traffic"


def _unclear(best: _Result, others: Sequence[_Result]) -> _Result | None:
    """The next best method, where seeds leave open which of the two is better; None of one seed, which says nothing."""
    rival = others[0]
    known = [[headline_score(view.measure, view.summary) for view in pair] for pair in pairs(rival.group, best.group)]
    matched = [(old, new) for old, new in known if old is not None and new is not None]
    if len(matched) < 2:
        return None
    before, after = ([pair[which] for pair in matched] for which in (0, 1))
    found = paired_difference(after, before)
    return rival if found.low is not None and found.high is not None and found.low <= 0 <= found.high else None


def _seeds(found: Sequence[_Result]) -> str:
    least = min(len(one.group.views) for one in found)
    return "." if least > 1 else " (one seed: no spread is known)."
