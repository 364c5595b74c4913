"""Jobs and outcomes as frames, without what stays on either side: plain values in the head, messages as blobs."""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sparsona.core.errors import SparsonaError
from sparsona.core.layout import Layout
from sparsona.core.points import FEW, FEWEST, point
from sparsona.core.targets import ALL_METRICS, LOW_IS_BETTER
from sparsona.core.tree import Tree
from sparsona.core.update import SERVER
from sparsona.deploy.frames import Frame, printable
from sparsona.engine.evaluate import Evaluation
from sparsona.engine.failures import DIVERGED
from sparsona.engine.jobs import SHARED, Job, Outcome, Tally, shared_update
from sparsona.engine.plan import Plan
from sparsona.wire.codec import decode, encode

_COUNTS = ("examples", "steps", "train_flops", "search_flops")


def job_frame(job: Job, run: str, ticket: str, more: Mapping[str, Any]) -> Frame:
    """The frame of a job.

    Args:
        job: the job, without a State.
        run: the run's identity.
        ticket: of the State that it starts from; "": the initial one.
        more: what else the client needs to know, in its head.

    Returns:
        The frame, whose `job` identifies the job: the same one has the same name.
    """
    packed = job.packed()
    blobs = [message for message in packed.messages if isinstance(message, bytes)]
    if job.shared_model is not None:
        blobs.append(encode(shared_update(job.shared_model, job.round.index)))
    head = {
        "do": job.do,
        "points": list(job.points),
        "epochs": job.epochs,
        "ticket": ticket,
        "shared": job.shared_model is not None,
        **more,
    }
    name = hashlib.blake2b(digest_size=16)
    for text in (run, job.do, job.client, job.round.index, *job.points, job.epochs, ticket, more.get("session")):
        name.update(f"{text}\n".encode())
    for blob in blobs:  # only told apart, such as a message from the one with masks: what they are, the signature says
        name.update(f"{len(blob)} {zlib.crc32(blob)}\n".encode())
    return Frame(run, "job", SERVER, job.client, job.round.index, name.hexdigest(), head, tuple(blobs))


def read_job(frame: Frame, plan: Plan, layout: Layout) -> Job:
    """The job in a frame that the server sealed, without a State; `layout` is that of the model."""
    head = _Head(frame.head)
    do = head.one_of("do", ("train", "evaluate", "tune"))
    # The server says when the last round was: a run may end early.
    round_ = replace(plan, ends_after=frame.round).tuning_round if do == "tune" else plan.round_at(frame.round)
    blobs = [bytes(blob) for blob in frame.blobs]
    model: Tree | None = None
    if head.flag("shared"):
        if not blobs:
            raise SparsonaError("a job that names a shared model and has none", expected="the model")
        part = decode(blobs.pop()).parts.get(SHARED)
        if part is None or part.layout.digest != layout.digest:
            raise SparsonaError(
                "a job with a shared model of another layout", expected="the layout of this run's model"
            )
        model = Tree(layout, part.tree().flat)  # a decoded layout lacks what costs need
    return Job(
        do,  # type: ignore[arg-type]  # checked above
        frame.receiver,
        round_,
        tuple(blobs),
        points=head.texts("points"),
        epochs=head.number("epochs"),
        shared_model=model,
    )


def reported_points(
    points: Sequence[str], sizes: Sequence[int], fewest: int = FEWEST
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Those points whose results a client tells, and those that it withholds, for they are of a few examples.

    Args:
        points: the points of a job.
        sizes: the client's training, validation and test examples.
        fewest: examples whose result is reported.
    """
    held = dict(zip(("train", "validation", "test"), sizes, strict=True))
    reported = tuple(name for name in points if held[point(name).data] >= max(fewest, 1))
    return reported, tuple(name for name in points if name not in reported)


def reported_counts(counts: Any) -> Any:
    """Counts as nested lists, of any depth, as a client tells them: None stands for 1 to 4."""
    if isinstance(counts, list):
        return [reported_counts(one) for one in counts]
    return None if 0 < counts < FEWEST else counts


def answer_head(outcome: Outcome, shares_labels: bool) -> dict[str, Any]:
    """What the head of an answer says of an outcome; its message is a blob, and its State stays.

    Args:
        outcome: what came of a job.
        shares_labels: whether the client agrees that its label counts become known, which confusions tell.
    """
    tally = outcome.tally
    failure = {"failure": outcome.failure} if outcome.failure else {}
    return {
        **failure,
        "lacks_mask": outcome.lacks_mask,
        "has_message": outcome.message is not None,
        "tally": {
            **{name: getattr(tally, name) for name in _COUNTS},
            "loss": tally.loss.hex(),
            "measures": {name: [value.hex() for value in values] for name, values in tally.measures.items()},
        },
        "evaluations": [_evaluation_values(one, shares_labels) for one in outcome.evaluations],
        "withheld": list(outcome.withheld),
    }


def _evaluation_values(found: Evaluation, shares_labels: bool) -> dict[str, Any]:
    confusion = found.confusion if shares_labels else None
    return {
        "point": found.point,
        "correct": found.correct,
        "count": found.count,
        "loss": float(found.loss).hex(),
        "confusion": None if confusion is None else reported_counts(confusion.tolist()),
        "metrics": {name: value.hex() for name, value in reported_metrics(found, shares_labels).items()},
    }


def reported_metrics(found: Evaluation, shares_labels: bool) -> dict[str, float]:
    """The metrics of an evaluation that a client reports.

    Those that say no more than the right predictions and the loss are reported with them. Others reveal the counts of
    its classes: like confusions, they are reported by a client that shares these, and not where a class has 1 to 4
    examples, or where several labels leave their counts unknown.
    """
    own = found.metrics
    if found.correct is not None:
        told_by = found.confusion if shares_labels else None
        counts = None if told_by is None else told_by.sum(dim=1).tolist()
        if counts is None or any(0 < count < FEWEST for count in counts):
            own = {name: value for name, value in own.items() if name == "accuracy"}
    elif not shares_labels:
        own = {name: value for name, value in own.items() if name in LOW_IS_BETTER}
    return {name: float(value) for name, value in own.items()}


def is_reported(metric: str, targets: str, shares_labels: bool) -> bool:
    """Whether a client may report a metric, or the loss, where `targets` are predicted: `reported_metrics` says why."""
    return metric in ("loss", "accuracy", *LOW_IS_BETTER) or (shares_labels and targets != "labels")


def read_answer(frame: Frame, client: int) -> Outcome:
    """The outcome that an answer tells of, as far as its form goes: any wrong type or range is a SparsonaError."""
    head = _Head(frame.head)
    message = None
    if head.flag("has_message"):
        if len(frame.blobs) != 1:
            raise SparsonaError(f"an answer with {len(frame.blobs)} messages", expected="one")
        message = bytes(frame.blobs[0])
    elif frame.blobs:
        raise SparsonaError("an answer with a message that it does not name", expected="none")
    return replace(read_outcome(frame.head, client), message=message)


def read_outcome(values: Any, client: int) -> Outcome:
    """The outcome, without its message, that `answer_head` wrote down; a SparsonaError if it did not."""
    head = _Head(values)
    reported = head.table("tally")
    tally = Tally(
        **{name: reported.number(name) for name in _COUNTS},
        loss=reported.real("loss"),
        measures={name: reported.table("measures").reals(name) for name in reported.table("measures").values},
    )
    evaluations = tuple(_read_evaluation(_Head(one), client) for one in head.rows("evaluations"))
    failure = ""
    if "failure" in head.values:  # the one that a client reports itself
        failure = DIVERGED + printable(head.text("failure").removeprefix(DIVERGED))
    return Outcome(
        client,
        head.flag("lacks_mask"),
        tally=tally,
        evaluations=evaluations,
        withheld=head.texts("withheld"),
        failure=failure,
    )


def _read_evaluation(head: _Head, client: int) -> Evaluation:
    correct = None if head.values.get("correct") is None else head.number("correct")
    count = head.number("count")
    if count < 1 or (correct is not None and correct > count):
        raise SparsonaError(f"an evaluation with {correct} right of {count}", expected="counts that are possible")
    confusion: Tensor | None = None
    if head.values.get("confusion") is not None:
        try:
            rows = [[FEW if cell is None else cell for cell in row] for row in head.rows("confusion")]
            confusion = torch.tensor(rows, dtype=torch.int32)
            least = confusion.where(confusion != FEW, 1)
        except (ValueError, TypeError, RuntimeError, OverflowError) as error:
            raise SparsonaError(f"a confusion matrix that is none: {error}", expected="rows of counts") from None
        if confusion.dim() != 2 or bool((least < 0).any()) or not _can_be(confusion, least, count):
            raise SparsonaError("a confusion matrix that does not fit", expected=f"rows of {count} counts in all")
    reported = head.table("metrics") if "metrics" in head.values else _Head({})  # an older version tells none
    metrics = {name: reported.real(name) for name in reported.values}
    if any(name not in ALL_METRICS or not math.isfinite(value) for name, value in metrics.items()):
        raise SparsonaError("metrics of an evaluation that are none", expected="finite numbers by known names")
    return Evaluation(client, head.text("point"), correct, count, head.real("loss"), confusion, metrics)


def _can_be(confusion: Tensor, least: Tensor, count: int) -> bool:
    """Whether cells can add up to a count, of which some are known as 1 to 4 only."""
    low, num_few = int(least.sum(dtype=torch.int64)), int((confusion == FEW).sum())
    return low <= count <= low + num_few * (FEWEST - 2)


def in_words(found: Sequence[Evaluation]) -> str:
    """Results of a client, as it reads them in its terminal: of which model only where there are several.

    Example:
        >>> found = [Evaluation(0, "received", 1, 4, 0.5), Evaluation(0, "received/validation", 3, 4, 0.5)]
        >>> in_words(found)
        'accuracy 25.0% on test data, 75.0% on validation data'
    """
    points, texts, last = [point(one.point) for one in found], [], ""
    has_several = len({about.base for about in points}) > 1
    for one, about in zip(found, points, strict=True):
        measure = "loss" if one.correct is None else "accuracy"
        if has_several:
            measure = f"{about.text}: {measure}"
        value = f"{one.loss:.4g}" if one.correct is None else f"{one.correct / one.count:.1%}"
        texts.append(f"{measure} {value}" if measure != last else value)
        texts[-1] += f" on {about.data} data"
        last = measure
    return ", ".join(texts)


def during(do: str, index: int) -> str:
    """The time of a job: of training the round, of all else what was completed before it."""
    return f"round {index + 1}" if do == "train" else when(index)


def when(completed: int) -> str:
    """The time of an evaluation after so many rounds, which are counted from 1 where people read them."""
    return f"after round {completed}" if completed else "before round 1"


class _Head:
    """Reads plain values of a known type from a head: whatever is missing or of another type is a SparsonaError."""

    def __init__(self, values: Any) -> None:
        if not isinstance(values, Mapping):
            raise SparsonaError(f"a {type(values).__name__} in a head", expected="a table")
        self.values = values

    def _get(self, name: str, kind: type) -> Any:
        value = self.values.get(name)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise SparsonaError(f"'{name}' in a head is a {type(value).__name__}", expected=f"a {kind.__name__}")
        return value

    def text(self, name: str) -> str:
        value: str = self._get(name, str)
        return value

    def flag(self, name: str) -> bool:
        value: bool = self._get(name, bool)
        return value

    def number(self, name: str) -> int:
        value: int = self._get(name, int)
        if value < 0:
            raise SparsonaError(f"'{name}' in a head is {value}", expected="0 or more")
        return value

    def one_of(self, name: str, known: Sequence[str]) -> str:
        value = self.text(name)
        if value not in known:
            raise SparsonaError(f"'{name}' in a head is '{value[:40]}'", expected=" or ".join(known))
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        values = self._get(name, list)
        if not all(isinstance(value, str) for value in values):
            raise SparsonaError(f"'{name}' in a head", expected="a list of texts")
        return tuple(values)

    def table(self, name: str) -> _Head:
        return _Head(self._get(name, dict))

    def rows(self, name: str) -> list[Any]:
        values: list[Any] = self._get(name, list)
        return values

    def real(self, name: str) -> float:
        """A float as `float.hex` writes it: exact, and NaN can be written."""
        return _from_hex(self.text(name))

    def reals(self, name: str) -> tuple[float, ...]:
        return tuple(_from_hex(text) for text in self.texts(name))


def _from_hex(text: str) -> float:
    try:
        return float.fromhex(text)
    except (ValueError, OverflowError):
        raise SparsonaError(f"'{text[:40]}' in a head", expected="a number in hexadecimal digits") from None
