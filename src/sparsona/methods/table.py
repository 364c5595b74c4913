"""The methods of this package: one row each, in the order of their families.

A row is a method file with some of its options set, and engine options that belong to the method as published: several
rows may share a file. `presets` are named after whose experiment they repeat: `paper` and `authors` are the method's
own paper and its code, `fedspa`, `dispfl`, `pfedgate` and `fedalt` are how that paper ran the method, its own or a
baseline. One of these for every row is a column of that paper's table, but for how many clients train in a round, which
is a condition of a comparison (Local in DisPFL: all of them).
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

# Step (a) of that paper on EMNIST: the model that its baselines use or tune, at a rate of .01. Updates weigh by
# batches, as in its code.
_TRAINED_IN_FEDALT = {key: value for key, value in AS_IN_FEDALT.items() if key != "lr_decay"} | {
    "lr": 0.5,
    "lr_schedule": "halving:500",
    "weight": "batches",
}
_TUNED_IN_FEDALT = {**_TRAINED_IN_FEDALT, "tune_epochs": 5, "tune_lr_scale": 0.02}

_STEPS = {"epochs": 1, "weight_decay": 0.0, "clip_norm": None, "lr_decay": 1.0, "tune_epochs": 5}
_PARTIAL: Mapping[str, Mapping[str, Any]] = {
    "paper": {**_STEPS, "weight": "equal"},
    "fedalt": {**_STEPS, "weight": "equal"},
    "authors": {**_STEPS, "weight": "batches", "max_personal_steps": 1000, "clip_stale": True},
}
_TWO_BRANCHES = {  # of Ditto: the five epochs are shared out
    "schedule": "sequential",
    "epochs": 2,
    "personal_epochs": 3,
    "prox": 0.5,
    "prox_step": "decoupled",
}
_FEDSPA: Mapping[str, Mapping[str, Any]] = {
    "paper": {"batch_size": 128},
    "authors": {"batch_size": 128, "anneal": "family"},
    "fedspa": {"batch_size": 128},
}
_PFEDGATE = {
    "batch_size": 128,
    "lr_schedule": "constant",
    "epochs": 1,
    "gate_start": 0.5,
    "paths": 2,
    "gating": "sample",
    "deploy_gate": "sample",
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
_SERVER_RATES = (0.003, 0.01, 0.03, 0.1, 0.3)

ROWS = (
    MethodCard(
        "local",
        "Local",
        "the baseline of every paper: each client alone",
        "its own model",
        "nothing",
        "local",
        "LocalConfig",
        presets={"fedspa": AS_IN_FEDSPA, "dispfl": AS_IN_DISPFL, "pfedgate": AS_IN_PFEDGATE},
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
        presets={
            "fedspa": AS_IN_FEDSPA,
            "dispfl": AS_IN_DISPFL,
            "pfedgate": AS_IN_PFEDGATE,
            "fedalt": _TRAINED_IN_FEDALT,
        },
        family="general",
    ),
    MethodCard(
        "fedprox",
        "FedProx",
        "Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020",
        "nothing (BatchNorm statistics, if any)",
        "the dense model, both ways",
        "fedprox",
        "FedProxConfig",
        grid={"prox": (0.001, 0.01, 0.1, 1.0)},
        family="general",
    ),
    MethodCard(
        "scaffold",
        "SCAFFOLD",
        "Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020",
        "its control variate",
        "down: the dense model and the mean control variate; up: the changes of both",
        "scaffold",
        "ScaffoldConfig",
        family="general",
    ),
    MethodCard(
        "fedadam",
        "FedAdam",
        "Reddi et al., Adaptive Federated Optimization, ICLR 2021",
        "nothing (BatchNorm statistics, if any)",
        "the dense model, both ways",
        "fedavg",
        "FedAvgConfig",
        options={"server_optimizer": "fedadam"},
        grid={"server_lr": _SERVER_RATES},
        family="general",
    ),
    MethodCard(
        "fedyogi",
        "FedYogi",
        "Reddi et al., Adaptive Federated Optimization, ICLR 2021",
        "nothing (BatchNorm statistics, if any)",
        "the dense model, both ways",
        "fedavg",
        "FedAvgConfig",
        options={"server_optimizer": "fedyogi"},
        grid={"server_lr": _SERVER_RATES},
        family="general",
    ),
    MethodCard(
        "fedadagrad",
        "FedAdagrad",
        "Reddi et al., Adaptive Federated Optimization, ICLR 2021",
        "nothing (BatchNorm statistics, if any)",
        "the dense model, both ways",
        "fedavg",
        "FedAvgConfig",
        options={"server_optimizer": "fedadagrad"},
        grid={"server_lr": _SERVER_RATES},
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
        presets={
            # An accident: the rate of tuning is that of round -1, a little above the first one's.
            "dispfl": {**AS_IN_DISPFL, "tune_epochs": 5, "tune_lr_scale": 1 / 0.998},
            "pfedgate": {**AS_IN_PFEDGATE, "tune_epochs": 1},
            "fedalt": _TUNED_IN_FEDALT,
        },
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
            "fedalt": {**_TUNED_IN_FEDALT, "schedule": "tuning", "prox": 0.2},
        },
        grid={"prox": (0.05, 0.1, 0.5, 0.8, 1.0, 2.0)},
        family="whole",
    ),
    MethodCard(
        "apfl",
        "APFL",
        "Deng et al., Adaptive Personalized Federated Learning, 2020",
        "its own model, and its share of the mixture if that is learned",
        "the dense model, both ways",
        "apfl",
        "APFLConfig",
        grid={"mix": (0.25, 0.5, 0.75), "learn_mix": (False, True)},
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
        presets={"fedalt": _TUNED_IN_FEDALT},
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
        presets=_FEDSPA,
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
        presets=_FEDSPA,
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
            "paper": _PFEDGATE,
            "authors": PFEDGATE_AUTHORS,
            "pfedgate": _PFEDGATE,
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
            "dispfl": {"batch_size": 128},
        },
        peers=True,
        density_bounds=("up",),
        family="peers",
    ),
)
