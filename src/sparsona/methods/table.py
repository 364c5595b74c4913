"""The methods of this package: one row each, in the order of their families.

A row is a method file with some of its options set, and engine options that belong to the method as published: several
rows may share a file. `presets` are named after whose experiment they repeat: `paper` and `authors` are the method's
own paper and its code, `fedspa`, `dispfl`, `pfedgate` and `fedalt` are how that paper ran the method as a baseline.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparsona.methods.card import MethodCard

# Training of every baseline in the paper of this name; a row adds what is the method's own.
AS_IN_FEDSPA: Mapping[str, Any] = {
    "epochs": 5,
    "batch_size": 128,
    "lr": 0.1,
    "lr_decay": 0.998,
    "weight_decay": 5e-4,
    "momentum": 0.0,
    "clip_norm": 10.0,
}
AS_IN_DISPFL = AS_IN_FEDSPA  # the same family of code
AS_IN_PFEDGATE: Mapping[str, Any] = {
    "epochs": 1,
    "batch_size": 128,
    "weight_decay": 5e-4,
    "momentum": 0.9,
    "clip_norm": 10.0,
    "lr_schedule": "steps:0.5,0.75",
    "optimizer_memory": "keep",
}
AS_IN_FEDALT: Mapping[str, Any] = {
    "epochs": 1,
    "batch_size": 32,
    "lr": 0.01,
    "lr_decay": 1.0,
    "weight_decay": 0.0,
    "momentum": 0.0,
    "clip_norm": None,
}

_STEPS = {"epochs": 1, "weight_decay": 0.0, "clip_norm": None, "lr_decay": 1.0, "tune_epochs": 5}
_PARTIAL: Mapping[str, Mapping[str, Any]] = {
    "paper": {**_STEPS, "weight": "equal"},
    "authors": {**_STEPS, "weight": "batches", "max_personal_steps": 1000, "clip_stale": True},
}
_TWO_BRANCHES = {  # of Ditto: the five epochs are shared out
    "schedule": "sequential",
    "epochs": 2,
    "personal_epochs": 3,
    "prox": 0.5,
    "prox_step": "decoupled",
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

ROWS = (
    MethodCard(
        "local",
        "Local",
        "the baseline of every paper: each client alone",
        "its own model",
        "nothing",
        "local",
        "LocalConfig",
        family="general",
    ),
    MethodCard(
        "fedavg",
        "FedAvg",
        "McMahan et al., AISTATS 2017",
        "nothing (BatchNorm statistics, if any)",
        "the dense model, both ways",
        "fedavg",
        "FedAvgConfig",
        family="general",
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
        family="whole",
    ),
    MethodCard(
        "ditto",
        "Ditto",
        "Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021",
        "its own model, as of its last turn",
        "the dense model, both ways",
        "ditto",
        "DittoConfig",
        presets={
            "authors": {
                "schedule": "interleaved",
                "weight": "equal",
                "lr_decay": 1.0,
                "weight_decay": 0.0,
                "clip_norm": None,
            },
            "fedspa": {**AS_IN_FEDSPA, **_TWO_BRANCHES},
            "dispfl": {**AS_IN_DISPFL, **_TWO_BRANCHES},
            "pfedgate": {**AS_IN_PFEDGATE, "schedule": "interleaved", "prox": 0.5},
            "fedalt": {**AS_IN_FEDALT, "schedule": "tuning", "prox": 0.2, "weight": "batches", "tune_epochs": 5},
        },
        grid={"prox": (0.05, 0.1, 0.5, 0.8, 1.0, 2.0)},
        family="whole",
    ),
    MethodCard(
        "pfedme",
        "pFedMe",
        "T. Dinh et al., Personalized Federated Learning with Moreau Envelopes, NeurIPS 2020",
        "its own model, as of its last turn",
        "the dense shared model, both ways",
        "pfedme",
        "PFedMeConfig",
        presets={
            "authors": {
                "epochs": 20,
                "max_batches": 20,
                "batch_size": 20,
                "inner_steps": 5,
                "prox": 15.0,
                "lr": 0.09,
                "shared_lr": 0.005,
                "server_lr": 1.0,
                "lr_decay": 1.0,
                "weight_decay": 0.001,
                "clip_norm": None,
            },
            "pfedgate": {**AS_IN_PFEDGATE, "variant": "aggregator", "momentum": 0.0},
            "fedalt": {
                **AS_IN_FEDALT,
                "variant": "detached",
                "inner_steps": 3,
                "prox": 0.1,
                "shared_lr": 0.01,
                "weight": "batches",
                "tune_epochs": 5,
            },
        },
        grid={"prox": (0.0001, 0.001, 0.01, 0.1, 1.0, 10.0, 15.0)},
        family="whole",
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
        family="split",
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
        family="split",
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
        family="split",
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
        density_bounds=("up", "down"),
        family="sub",
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
        density_bounds=("up", "down"),
        family="sub",
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
        family="sub",
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
        density_bounds=("up",),
        family="peers",
    ),
)
