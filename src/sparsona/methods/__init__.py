"""Methods by name. Rows are plain data: listing them imports neither torch nor a method.

A row is a method file with some of its options set, and engine options that belong to the method as published: several
rows may share a file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Protocol

from sparsona.core.errors import SparsonaError, unknown_name


@dataclass(frozen=True)
class MethodCard:
    """A row of `sparsona methods`."""

    name: str
    title: str
    paper: str
    kept: str  # what stays on the client between rounds
    travels: str  # what is sent, and which way
    module: str  # the file in this folder, which is also the name of its factory
    config: str  # the class of its options
    options: Mapping[str, Any] = field(default_factory=dict)  # of the method
    engine: Mapping[str, Any] = field(default_factory=dict)  # of the engine: see sparsona.runs.options
    # What `--preset NAME` sets, of the method and the engine alike; whatever a person gives as well has the last word.
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    peers: bool = False  # clients send to each other: `graph` says who to whom, and all take part unless told otherwise


class Published(Protocol):
    """What is read of a row for its presets."""

    @property
    def name(self) -> str: ...
    @property
    def presets(self) -> Mapping[str, Mapping[str, Any]]: ...


_STEPS = {"epochs": 1, "weight_decay": 0.0, "clip_norm": None, "lr_decay": 1.0, "tune_epochs": 5}
_PARTIAL: Mapping[str, Mapping[str, Any]] = {
    "paper": {**_STEPS, "weight": "equal"},
    "authors": {**_STEPS, "weight": "batches", "max_personal_steps": 1000, "clip_stale": True},
}
PFEDGATE_AUTHORS = {
    "batch_size": 128,
    "lr_schedule": "steps:0.75",
    "epochs": 1,
    "gate_start": 0.5,
    "equal_chunks": True,
    "split_budget": True,
    "score_steps": 10,
    "floors_scores": True,
    "straight_through": "kept",
    "steps": "all",
    "optimizer_memory": "keep",
    "logits_relu": True,
    "aggregation": "dense",
    "deploy_gate": "transductive",
}

METHODS = {
    card.name: card
    for card in (
        MethodCard(
            "local",
            "Local",
            "the baseline of every paper: each client alone",
            "its own model",
            "nothing",
            "local",
            "LocalConfig",
        ),
        MethodCard(
            "fedavg",
            "FedAvg",
            "McMahan et al., AISTATS 2017",
            "nothing (BatchNorm statistics, if any)",
            "the dense model, both ways",
            "fedavg",
            "FedAvgConfig",
        ),
        MethodCard(
            "fedavg-ft",
            "FedAvg-FT",
            "FedAvg, then every client tunes the last model on its own data",
            "nothing until the end, then its tuned model",
            "the dense model, both ways; once more down for tuning",
            "fedavg",
            "FedAvgConfig",
            engine={"tune_epochs": 5},
        ),
        MethodCard(
            "fedavg-ft-part",
            "FedAvg-FT (part.)",
            "FedAvg, then every client tunes a part of the last model: FT (part.) of Pillutla et al., 2022",
            "nothing until the end, then its tuned model",
            "the dense model, both ways; once more down for tuning",
            "fedavg",
            "FedAvgPartConfig",
            engine={"tune_epochs": 5},
        ),
        MethodCard(
            "fedalt",
            "FedAlt",
            "Pillutla et al., Federated Learning with Partial Model Personalization, ICML 2022",
            "the personal part of the model",
            "the shared part of the model, both ways",
            "fedalt",
            "FedAltConfig",
            presets=_PARTIAL,
        ),
        MethodCard(
            "fedsim",
            "FedSim",
            "the same paper; both parts are trained at once",
            "the personal part of the model",
            "the shared part of the model, both ways",
            "fedalt",
            "FedAltConfig",
            options={"updates": "simultaneous"},
            presets=_PARTIAL,
        ),
        MethodCard(
            "fedspa",
            "FedSpa (DST)",
            "Huang et al., Achieving Personalized Federated Learning with Sparse Local Models, 2022",
            "its mask",
            "down: the model inside the mask; up: the change inside the mask, and the new mask as bits",
            "fedspa",
            "FedSpaConfig",
            presets={"paper": {"batch_size": 128}, "authors": {"batch_size": 128, "anneal": "family"}},
        ),
        MethodCard(
            "fedspa-rsm",
            "FedSpa (RSM)",
            "the same paper with one random static mask for all",
            "its mask, which never changes",
            "down: the model inside the mask; up: the change inside the mask",
            "fedspa",
            "FedSpaConfig",
            options={"search": "rsm"},
            presets={"paper": {"batch_size": 128}, "authors": {"batch_size": 128, "anneal": "family"}},
        ),
        MethodCard(
            "dispfl",
            "DisPFL",
            "Dai et al., DisPFL: Towards Communication-Efficient Personalized Federated Learning, ICML 2022",
            "its model inside its mask, and the next mask",
            "between peers: the model inside its mask, and masks as bits",
            "dispfl",
            "DisPFLConfig",
            presets={
                "paper": {"batch_size": 128},
                "authors": {"batch_size": 128, "regrowth": "random", "divide_by": "used"},
            },
            peers=True,
        ),
        MethodCard(
            "pfedgate",
            "pFedGate",
            "Chen et al., Efficient Personalized Federated Learning via Sparse Model-Adaptation, ICML 2023",
            "its gate, and the scores of its last training",
            "down: the dense model; up: the change of the blocks that training used, and which they are",
            "pfedgate",
            "PFedGateConfig",
            presets={
                "paper": {
                    "batch_size": 128,
                    "lr_schedule": "constant",
                    "epochs": 1,
                    "gate_start": 0.5,
                    "paths": 2,
                    "gating": "sample",
                    "deploy_gate": "sample",
                },
                "authors": PFEDGATE_AUTHORS,
            },
        ),
    )
}


# What `sparsona cost` knows the costs of, by the rules in cost_rules.py; a name leaves when its method arrives.
COST_ONLY = (*("ditto", "pfedhn", "subsampling", "sub-fedavg", "dpsgd", "dpsgd-ft", "fomo", "fedem", "pfedgate-table"),)


def card(name: str) -> MethodCard:
    """The row of this name."""
    if name in COST_ONLY:
        raise SparsonaError(
            f"'{name}' cannot be run yet: only its costs are known",
            expected=f"one of {', '.join(METHODS)}",
            mend=f"`sparsona cost {name}` tells what it would cost",
        )
    if name not in METHODS:
        raise unknown_name("method", name, METHODS)
    return METHODS[name]


def preset(row: Published, name: str) -> Mapping[str, Any]:
    """What this preset of a method sets."""
    if not row.presets:
        raise SparsonaError(
            f"{row.name} has no presets", expected="a method of one of the papers", mend="leave --preset out"
        )
    if name not in row.presets:
        raise unknown_name(f"preset of {row.name}", name, row.presets)
    return row.presets[name]


def factory(name: str) -> tuple[Callable[..., Any], Any]:
    """The function that makes this method for a task, and the class of its options."""
    row = card(name)
    module = import_module(f"sparsona.methods.{row.module}")
    return getattr(module, row.module), getattr(module, row.config)
