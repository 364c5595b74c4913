"""Models of a run on data that it has not seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from sparsona.analysis.format import plural
from sparsona.analysis.measure import ACCURACY, measure_of_metric
from sparsona.analysis.statistics import wilson_interval
from sparsona.core.errors import SparsonaError
from sparsona.core.losses import GivenLoss
from sparsona.core.printable import warn
from sparsona.core.rows import html_table, text_table
from sparsona.data import validate
from sparsona.data.augment import as_inputs
from sparsona.data.batches import Examples, as_targets
from sparsona.data.federation import Federation
from sparsona.data.given import name_classes, owner_names
from sparsona.data.names import listed, name_of
from sparsona.data.packing import is_several, pack
from sparsona.data.partition.by_owner import find_by_owner, known_owners
from sparsona.data.pool import Indices
from sparsona.data.readers.images import channels_first
from sparsona.engine.evaluate import Evaluation, evaluate
from sparsona.experiment.build import unknown_loss
from sparsona.experiment.stored_models import StoredModels

ALL = "all"  # in place of a client: every one of them
ALL_ROWS = "--all-rows (in Python no owners=) evaluates every model on all rows"

SHARES = ("accuracy", "low", "high", "recall", "precision")  # figures from 0 to 1


@dataclass(frozen=True)
class NewResult:
    """One model on new data. `confusion` counts predictions, true classes by row; None where there are no classes."""

    client: int | None
    evaluation: Evaluation
    confusion: np.ndarray | None

    def __repr__(self) -> str:
        which = "shared" if self.client is None else f"client {self.client}"
        reached = f"loss {self.evaluation.loss:.4g}" if self.accuracy is None else f"accuracy {self.accuracy:.1%}"
        return f"NewResult({which}, {plural(self.evaluation.count, 'example')}, {reached})"

    @property
    def accuracy(self) -> float | None:
        """The share of right predictions; None in a regression."""
        found = self.evaluation
        return None if found.correct is None else found.correct / found.count

    def classes(self) -> list[dict[str, Any]]:
        """A row for each class that occurs or is predicted: its examples, precision and recall."""
        if self.confusion is None:
            return []
        right, true, guessed = np.diag(self.confusion), self.confusion.sum(1), self.confusion.sum(0)
        return [
            {
                "class": number,
                "examples": int(true[number]),
                "predicted": int(guessed[number]),
                "recall": float(right[number] / true[number]) if true[number] else None,
                "precision": float(right[number] / guessed[number]) if guessed[number] else None,
            }
            for number in range(len(true))
            if true[number] or guessed[number]
        ]


@dataclass(frozen=True)
class NewResults:
    """Models on new data, in the order in which they were named.

    `has_loss` is False where the loss is a function from Python that was not passed again: rows leave it out then.
    `client_owners`: as in Federation.
    """

    results: tuple[NewResult, ...]
    class_names: tuple[str, ...] | None = None
    has_loss: bool = True
    client_names: tuple[str, ...] | None = None
    client_owners: tuple[int, ...] | None = None

    def __repr__(self) -> str:
        return f"NewResults({plural(len(self.results), 'model')})\n{text_table(self.table())}"

    def _repr_html_(self) -> str:
        return html_table(self.table(), f"{plural(len(self.results), 'model')} on new data")

    def table(self) -> list[dict[str, str]]:
        """The rows, ready to print."""
        return [{key: show_figure(key, value) for key, value in row.items()} for row in self.rows()]

    def rows(self) -> list[dict[str, Any]]:
        """A row for each model: its client, with its name or its owner's number if it has one, examples, accuracy with
        a 95% interval, and loss."""
        rows = []
        for one in self.results:
            found = one.evaluation
            row: dict[str, Any] = {"client": "shared" if one.client is None else one.client}
            if self.client_names:
                row["name"] = "" if one.client is None else self.client_names[one.client]
            elif self.client_owners:
                row["owner"] = "" if one.client is None else str(self.client_owners[one.client])
            row["examples"] = found.count
            if found.correct is not None:
                low, high = wilson_interval(found.correct, found.count)
                row |= {"accuracy": found.correct / found.count, "low": low, "high": high}
            rows.append(row | ({"loss": found.loss} if self.has_loss else {}) | dict(found.metrics))
        return rows

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        found = [
            row | {"classes": one.classes(), "confusion": None if one.confusion is None else one.confusion.tolist()}
            for row, one in zip(self.rows(), self.results, strict=True)
        ]
        return {"class_names": None if self.class_names is None else list(self.class_names), "models": found}


def show_figure(key: str, value: Any) -> str:
    """A figure of a row, ready to print: with the unit and the digits that it has in tables of runs."""
    if value is None:
        return "–"
    if isinstance(value, float):
        measure = ACCURACY if key in SHARES else measure_of_metric(key)
        return f"{measure.show(value)}{measure.unit}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def evaluate_models(
    models: StoredModels,
    clients: Sequence[int | str | None],
    x: Any,
    y: Any,
    guarded: bool = False,
    owners: Any = None,
) -> NewResults:
    """Evaluate clients' models, and for None the shared one, on new examples, as `Run.evaluate` says."""
    federation, task = models.context.federation, models.context.task
    examples = read_examples(federation, x, y)
    if not len(clients):
        raise SparsonaError("no client to evaluate", expected="one or more")
    everyone = ALL in clients
    chosen = [None if one is None else models.number(one) for one in clients if one != ALL]
    if everyone:
        chosen = [*range(federation.num_clients), *([None] if None in chosen else [])]
    own: dict[int, Indices] = {}
    if owners is not None and any(client is not None for client in chosen):
        own = _own_rows(federation, owners, examples.num_examples, chosen, everyone)
        chosen = [client for client in chosen if client is None or client in own]
    results = []
    for client in chosen:
        model = models.shared() if client is None else models.personal(client, guarded)
        rows = None if client is None else own.get(client)
        mine = examples if rows is None else _take(examples, rows)
        found = evaluate(-1 if model.client is None else model.client, "", model.predict, task, mine)
        square = found.confusion is not None and found.confusion.shape[0] == found.confusion.shape[1]
        confusion = found.confusion.numpy() if square and found.confusion is not None else None
        results.append(NewResult(model.client, found, confusion))
    is_unknown = isinstance(task.losses, GivenLoss) and task.losses.function is unknown_loss
    names = federation.client_names, federation.client_owners
    return NewResults(tuple(results), federation.class_names, not is_unknown, *names)


def _own_rows(
    federation: Federation, owners: Any, count: int, chosen: Sequence[int | None], everyone: bool
) -> dict[int, Indices]:
    """The rows of each chosen client that has some, found by its name or by its owner's number.

    A client without rows is an error, or with `everyone` left out; then it is said who is.
    """
    numbers, names = owner_names(owners)
    if len(numbers) != count:
        raise SparsonaError(f"{len(numbers)} owners for {count} examples", expected="one owner per example")
    clients = federation.client_names or tuple(map(str, federation.client_owners or ()))
    if not clients:
        raise SparsonaError(
            "the new data has owners, and which of them the run's clients are is not known",
            expected="a run whose clients have names, or are numbered owners (and of no older version)",
            hint=ALL_ROWS,
        )
    there = {name_of(names, number): number for number in known_owners(numbers).tolist()}
    having = [client for client in chosen if client is not None and clients[client] in there]
    rows = find_by_owner(numbers, [there[clients[client]] for client in having])
    lacking = [
        clients[client] if federation.client_names else f"{client} (owner {clients[client]})"
        for client in chosen
        if client is not None and clients[client] not in there
    ]
    if lacking and not (everyone and having):
        raise SparsonaError(
            f"the new data has no rows of client {listed(lacking)}",
            expected=f"rows of each; its owners are {listed(list(there)) or 'not known'}",
            hint=ALL_ROWS,
        )
    if everyone:
        if lacking:
            warn(f"clients without rows in the new data are left out: {listed(lacking)}")
        known = set(clients)
        if strangers := [name for name in there if name not in known]:
            warn(f"owners in the new data that are no clients of the run: {listed(strangers)}")
        if num_unknown := np.count_nonzero(numbers < 0):
            warn(f"{num_unknown:,} of {count:,} examples have no owner and belong to no client")
    return dict(zip(having, rows, strict=True))


def _take(examples: Examples, rows: Indices) -> Examples:
    index = torch.from_numpy(rows)
    return replace(examples, inputs=examples.inputs[index], targets=examples.targets[index])


def read_examples(federation: Federation, x: Any, y: Any) -> Examples:
    """New examples, checked to be of the kind that a federation has, as a model takes them."""
    stored = federation.x
    if federation.packing is not None:
        if not is_several(x):
            raise SparsonaError(
                f"x is a {type(x).__name__}",
                expected=f"the inputs of the run, a dict or tuple of arrays: {federation.packing.describe()}",
            )
        x = pack(x, expected=federation.packing)[0]
    is_bytes = stored.dtype == torch.uint8
    if is_bytes and isinstance(x, np.ndarray) and x.dtype == np.uint8:
        x = channels_first(x)
    inputs = validate.check_inputs(x, as_bytes=is_bytes, as_tokens=federation.has_tokens)
    shape = tuple(stored.shape[1:])
    if tuple(inputs.shape[1:]) != shape:
        hint = "reshape x, or prepare it as the run's data was prepared"
        raise SparsonaError(
            f"x has examples of shape {tuple(inputs.shape[1:])}", expected=f"{shape}, as in the run's data", hint=hint
        )
    if inputs.dtype != stored.dtype:
        raise SparsonaError(
            f"x is {np.asarray(x).dtype}, and the run's data was images of bytes",
            expected="uint8 from 0 to 255, not normalised: that is done here as it was in the run",
            hint="x.astype(numpy.uint8) of values from 0 to 255",
        )
    y = _numbered(y, federation)
    if federation.is_regression:
        targets = _numbers(y, federation.num_classes)
    elif federation.task in ("binary", "multilabel"):
        targets = validate.check_targets(y, task=federation.task)
        if targets.dim() == 2 and targets.shape[1] != federation.num_classes:
            raise SparsonaError(
                f"y has {targets.shape[1]} labels", expected=f"{federation.num_classes}, as in the run's data"
            )
    else:
        targets = validate.check_labels(y, as_tokens=federation.predicts_tokens)
        if federation.predicts_tokens and targets.shape != inputs.shape:
            raise SparsonaError(
                f"y has shape {tuple(targets.shape)}",
                expected=f"the next token at each position, {tuple(inputs.shape)}",
            )
        if len(targets) and not 0 <= int(targets.min()) <= int(targets.max()) < federation.num_classes:
            raise SparsonaError(
                f"labels from {int(targets.min())} to {int(targets.max())}",
                expected=f"whole numbers from 0 to {federation.num_classes - 1}, the classes of the run",
                hint="number the classes as the run's data did",
            )
    validate.check_lengths(inputs, targets)
    if not len(inputs):
        raise SparsonaError("x has no examples", expected="one or more")
    return Examples(as_inputs(inputs, federation.view), as_targets(targets))


def _numbered(y: Any, federation: Federation) -> Any:
    """Classes by number, where they are given by the names that the run's data gave them."""
    if federation.targets in ("numbers", "labels"):
        return y
    if (names := federation.class_names) is not None:
        (y,), _ = name_classes([y], [""], names)
    array = validate.as_array("y", y, "")
    if array.dtype.kind not in "iufb" and array.size:
        last = federation.num_labels - 1
        raise SparsonaError(
            f"labels of type {array.dtype}{validate.what_is_in(array)}",
            expected=f"whole numbers from 0 to {last}"
            + (": the run's classes have no names" if names is None else f", or names such as '{names[0]}'"),
            hint="number the classes as the run's data did: an order of your own would name other classes",
        )
    return array


def _numbers(y: Any, num_outputs: int) -> torch.Tensor:
    try:
        array = np.asarray(y, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise SparsonaError(f"y is no array of numbers: {error}", expected=f"{num_outputs} for each example") from None
    array = array.reshape(len(array), -1) if array.ndim else array.reshape(1, 1)
    if array.shape[1] != num_outputs or not np.isfinite(array).all():
        raise SparsonaError(
            f"y has {array.shape[1]} numbers for each example, or some that are not finite",
            expected=f"{num_outputs} finite numbers, as the run predicts",
        )
    return torch.from_numpy(array)
