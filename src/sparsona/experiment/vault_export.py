"""A client's personal model out of its vault, as a file that is used without sparsona."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from sparsona.analysis.statistics import wilson_interval
from sparsona.core.errors import SparsonaError
from sparsona.core.points import point as point_of
from sparsona.core.reading import parse_json, read_text
from sparsona.core.version import VERSION
from sparsona.data.names import clean_names
from sparsona.deploy.vault import ABOUT, TESTED
from sparsona.experiment.build import ExampleKind
from sparsona.experiment.export import (
    Exported,
    Trial,
    check_place,
    describe_file,
    describe_inputs,
    first_line,
    format_of,
    write_model,
)
from sparsona.experiment.guests import Cards
from sparsona.experiment.terms import Terms
from sparsona.experiment.train import describe_run
from sparsona.report.model_card import Card, Measured, write_card
from sparsona.runs.facts import ExampleFacts, RunFacts
from sparsona.runs.folder import NETWORK, write_atomically


class OtherNetworkError(SparsonaError):
    """Weights of a vault that are not those of the federation file's network."""


@dataclass(frozen=True)
class _Kept:
    """What a vault knows of its model."""

    client: int
    completed: int
    point: str
    measured: Measured | None
    examples: ExampleFacts
    facts: RunFacts
    environment: Mapping[str, Any]


def export_client(weights: Path, federation: Path, path: Path) -> Exported:
    """Write the model that a client of a run on several machines keeps in its vault.

    Args:
        weights: the vault's model.safetensors. What is known of it is beside it: vaults of older versions lack that.
        federation: the federation file, which says what the network is.
        path: the file to write, which must not exist; its suffix is its format. Its model card is written beside it,
            where the vault knows what is in one.

    Returns:
        The path, sizes, and the largest difference to the network's own outputs.
    """
    kind, terms = format_of(path, None), Terms.read(federation)
    check_place(path, kind, sparse=False)
    known = _read_vault(weights.parent, terms)
    task = terms.task()
    module = task.module(*task.init(0))
    try:
        module.load_state_dict(load_file(weights))
    except (OSError, RuntimeError, SafetensorError) as error:
        raise OtherNetworkError(
            f"'{weights}' is not the network of '{federation}': {first_line(error)}",
            expected="the federation file of the run, and a method whose models have the network's shape",
            hint="export it as .safetensors, which takes any model",
        ) from error
    if known is None:
        examples = _unknown_examples(terms.kind)
        about = {
            "tool": f"sparsona {VERSION}",
            "run": terms.file.name,
            "method": terms.row.title,
            "model": str(terms.config.model),
            "targets": terms.kind.targets,
            "num_outputs": str(terms.kind.num_classes),
            **describe_inputs(examples, in_graph=False),
            "input_preparation": "as the client's data is prepared: its normalisation is not in this file",
        }
    else:
        examples, config = known.examples, {**terms.config.model_dump(mode="json"), "model": terms.config.model}
        about = describe_file(
            terms.file.name,
            known.facts,
            config,
            examples,
            kind,
            known.client,
            known.completed,
            known.point,
            known.measured,
        )
    trial = Trial(examples, terms.kind.targets, module.eval())
    sizes, largest = write_model(path, kind, module, trial, about, task.whole_layout.size, sparse=False)
    if known is None:
        return Exported(path, None, None, kind, sizes, *largest)
    beside = path.with_name(f"{path.name}.md")
    found = Card(
        file=path.name,
        about=about,
        format=kind,
        sizes=sizes,
        largest=largest,
        measured=known.measured,
        point=point_of(known.point).text,
        config=config,
        facts=known.facts,
        summary=None,  # that is with the server
        environment=known.environment,
        infer_flops=None,
        client=known.client,
        is_finished=known.completed >= terms.config.rounds or terms.config.patience is not None,
    )
    write_atomically(beside, write_card(found).encode(errors="backslashreplace"))
    return Exported(path, beside, known.client, kind, sizes, *largest)


def _unknown_examples(kind: ExampleKind) -> ExampleFacts:
    return ExampleFacts(kind.shape, "int32" if kind.has_tokens else "float32", kind.num_classes, name="the client's")


def _read_vault(folder: Path, terms: Terms) -> _Kept | None:
    """What a vault knows of its model; None for one of an older version."""
    if not (folder / ABOUT).exists() or not (folder / TESTED).exists():
        return None
    try:
        about, tested = (parse_json(read_text(folder / name)) for name in (ABOUT, TESTED))
        client, row = int(about["client"]), [int(number) for number in about["sizes"]]
        examples = ExampleFacts.from_json(about["examples"]) if about["examples"] else _unknown_examples(terms.kind)
        sizes, counts = np.zeros((terms.num_clients, 3), np.int64), None
        sizes[client] = row
        if about["label_counts"] is not None:
            counts = np.zeros((terms.num_clients, len(about["label_counts"])), np.int64)
            counts[client] = about["label_counts"]
        names = clean_names(about["class_names"], "classes") or terms.class_names
        completed, point = int(tested["completed"]), point_of(str(tested["point"])).name
        measured = None
        if "count" in tested:
            correct, count, loss = tested["correct"], int(tested["count"]), float(tested["loss"])
            rate, interval = (None, None) if correct is None else (correct / count, wilson_interval(correct, count))
            measured = Measured(count, rate, interval, loss, metrics=dict(tested["metrics"]))
        environment = dict(about["environment"])
    except (OSError, KeyError, TypeError, ValueError, IndexError, ZeroDivisionError, SparsonaError) as error:
        raise SparsonaError(
            f"'{folder / ABOUT}' or '{TESTED}' cannot be read: {error}",
            expected="what the client wrote",
            hint="restore them from a copy, or remove them: the model is then exported without a card",
        ) from None
    # What privacy was spent is not counted here, which needs an extra.
    config = terms.config.model_copy(update={"privacy": None})
    context = terms.context(terms.no_data(), Cards(terms.file.clients, terms.plan()), torch.device("cpu"))
    _, facts = describe_run(config, context, terms.row, executor=NETWORK)
    facts = replace(
        facts,
        sizes=sizes,
        label_counts=counts,
        client_names=tuple(one.name for one in terms.file.clients),
        class_names=names,
        examples=examples,
        targets=terms.kind.targets,
    )
    return _Kept(client, completed, point, measured, examples, facts, environment)
