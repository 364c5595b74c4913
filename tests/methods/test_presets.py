"""Every preset of the four papers, field by field, against a second transcription of their settings.

Each value is beside its place in the paper: a section, table, figure or algorithm, or "code" where the text leaves it
open and the published code (for FedSpa: that of its family) settles it. What is listed is all that a preset sets.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

import sparsona as sp
from sparsona import methods
from sparsona.core.errors import SparsonaError
from sparsona.experiment import build
from sparsona.methods import METHODS

Table = dict[str, tuple[Any, str]]

# FedSpa: Achieving Personalized Federated Learning with Sparse Local Models.
FEDSPA: Table = {
    "clients": (100, "5.1: 100 clients in total"),
    "per_round": (10, "5.1: in each round 10 of them are picked; B.3: Local, too"),
    "rounds": (1000, "figure 3; table 2: > 1000"),
    "validation_rate": (0.0, "B.1: all training data is split among the clients"),
    "epochs": (5, "5.1: local epochs are fixed to 5"),
    "batch_size": (128, "5.1"),
    "lr": (0.1, "5.1"),
    "lr_decay": (0.998, "5.1: after each communication round"),
    "weight_decay": (0.0005, "5.1"),
    "momentum": (0.0, "5.1: SGD, no word of momentum"),
    "clip_norm": (None, "5.1: no word of clipping"),
}
FEDSPA_DATA: dict[str, Table] = {
    "cifar10": {
        "model": ("vgg11", "5.1"),
        "partition": ("dirichlet:0.3", "5.1, setting B"),
        "test": ("shares:100", "B.1: 100 pieces, in the proportions of the training labels"),
        "augment": (True, "code"),
    },
    "cifar100": {
        "model": ("resnet18", "5.1"),
        "partition": ("dirichlet:0.1", "5.1, setting B"),
        "test": ("shares:100", "B.1"),
        "augment": (True, "code"),
    },
    "emnist-letters": {
        "model": ("lenet5", "5.1"),
        "partition": ("dirichlet:0.1", "5.1, setting B"),
        "test": ("shares:100", "B.1"),
    },
}
FEDSPA_OWN: Table = {
    "density": (0.5, "5.2: the dense ratio"),
    "prune_rate": (0.5, "5.1: initial pruned rate"),
    "anneal": ("paper", "A: the cosine has T - 1"),
    "allocation": ("erk", "5.1"),
    "initial_masks": ("same", "Algorithm 2: one seed; B.4"),
    "regrowth": ("gradient", "Algorithm 2"),
}
TWO_BRANCHES: Table = {
    "epochs": (2, "5.1; DisPFL B.3: for the global model"),
    "personal_epochs": (3, "5.1; DisPFL B.3: for the local model"),
    "prox": (0.5, "5.1: the regularization factor"),
    "schedule": ("sequential", "B.3; DisPFL B.4: first the global model, then the local one"),
    "prox_step": ("decoupled", "code"),
    "personal_start": ("initial", "code"),
}
SUB_FEDAVG: Table = {
    "density": (0.5, "5.2: the final dense ratio"),
    "prune_rate": (0.05, "5.1"),
    "distance": (0.0001, "5.1"),
    "accuracy_threshold": (0.5, "5.1"),
    "accuracy_on": ("train", "code"),
    "divide_by": ("used", "code"),
    "prunes": ("weights", "code"),
    "overshoots": (True, "code"),
}
SUBSAMPLING: Table = {"density": (0.5, "5.2, table 1: half the uplink"), "rescale": (False, "B.3: not mentioned")}

# DisPFL: Towards Communication-Efficient Personalized Federated Learning via Decentralized Sparse Training.
DISPFL: Table = {
    "clients": (100, "4.1: the total client number"),
    "rounds": (500, "B.3: CIFAR-10 and CIFAR-100"),
    "validation_rate": (0.0, "B.1: all training data is split"),
    "epochs": (5, "B.3"),
    "batch_size": (128, "B.3"),
    "lr": (0.1, "B.3"),
    "lr_decay": (0.998, "B.3"),
    "weight_decay": (0.0005, "B.3"),
    "momentum": (0.0, "B.3: SGD, no word of momentum"),
    "clip_norm": (None, "B.3: no word of clipping"),
}
DISPFL_DATA: dict[str, Table] = {
    "cifar10": {
        "model": ("resnet18", "4.1"),
        "partition": ("dirichlet-equal:0.3", "4.1; 500 images each: code"),
        "test": ("shares:100", "B.1: 100 for all partitions"),
        "augment": (True, "code"),
    },
    "cifar100": {
        "model": ("resnet18", "4.1"),
        "partition": ("dirichlet-equal:0.2", "4.1"),
        "test": ("shares:100", "B.1"),
        "augment": (True, "code"),
    },
    "tiny-imagenet": {
        "model": ("resnet18", "4.1"),
        "partition": ("dirichlet-equal:0.2", "4.1"),
        "test": ("shares:100", "B.1"),
        "rounds": (300, "B.3"),
    },
}
SERVER: Table = {"per_round": (10, "4.1: a server has no more connections than the busiest node, ten")}
PEERS: Table = {
    "per_round": (100, "Algorithm 1, line 3: every client, in every round"),
    "graph": ("random:10:bounded", "4.1: the busiest node has at most 10 neighbours, drawn every round"),
}
TUNED: Table = {
    "tune_epochs": (5, "4.1: few fine-tuning steps; code"),
    "tune_lr_scale": (1 / 0.998, "code: the rate of round -1"),
}
DISPFL_OWN: Table = {
    "headline": ("trained", "Algorithm 1, line 3: the output is w_k,T"),
    "density": (0.5, "4.1"),
    "prune_rate": (0.5, "code"),
    "allocation": ("erk", "3.2"),
    "initial_masks": ("different", "Algorithm 1, line 2"),
    "initial_weights": ("own", "Algorithm 1, line 2"),
    "regrowth": ("gradient", "Algorithm 2"),
    "divide_by": ("new", "Algorithm 1, line 7"),
}
FOMO: Table = {
    "validation_rate": (0.1, "code"),
    "num_candidates": (10, "4.1: at most 10"),
    "order": ("train-mix", "code"),
    "explore": ("all", "code"),
    "explore_rate": (0.5, "code"),
    "explore_decay": (0.0, "code"),
    "if_none_helps": ("discard", "code"),
}

# pFedGate: Efficient Personalized Federated Learning via Sparse Model-Adaptation.
PFEDGATE: Table = {
    "clients": (100, "G: EMNIST and CIFAR-10"),
    "per_round": (100, "H.2: 20% of clients are the exception"),
    "rounds": (400, "G"),
    "epochs": (1, "G"),
    "batch_size": (128, "G"),
    "test": ("split", "7.1: local data is split"),
    "test_rate": (0.2, "7.1: 6:2:2"),
    "validation_rate": (0.2, "7.1: 6:2:2"),
    "headline_weight": ("examples", "7.2: weights proportional to local dataset sizes"),
}
PFEDGATE_DATA: dict[str, Table] = {
    "cifar10": {
        "model": ("pfedgate-cifar10", "G: 256,830 parameters"),
        "partition": ("dirichlet-uncapped:0.4", "G, as Marfoq et al."),
        "augment": (False, "code"),
    },
    "cifar100": {
        "model": ("pfedgate-cifar100", "G: 3,537,444 parameters"),
        "partition": ("dirichlet-uncapped:0.4", "G"),
        "augment": (False, "code"),
        "clients": (50, "G"),
        "per_round": (50, "all"),
    },
    "emnist-byclass": {
        "model": ("pfedgate-emnist", "G: two convolutions of 5x5"),
        "partition": ("dirichlet-uncapped:0.4", "G"),
        "data_rate": (0.1, "G: 81,425 samples"),
    },
    "femnist": {
        "model": ("pfedgate-emnist", "G"),
        "partition": ("natural", "G: by writer"),
        "data_rate": (0.15, "G"),
        "clients": (539, "G"),  # as published: all owners that the files have are taken
        "per_round": (539, "all"),
    },
}
MASKED_LAYERS = {"emnist-byclass": 1, "femnist": 1, "cifar10": 2, "cifar100": 2}  # G, of the 2-layer and 3-layer CNN
RATES = {  # table 4: eta_g and eta
    ("emnist-byclass", 1.0): (0.1, 0.1),
    ("emnist-byclass", 0.5): (0.1, 0.1),
    ("emnist-byclass", 0.3): (0.03, 0.5),
    ("femnist", 1.0): (0.1, 0.1),
    ("femnist", 0.5): (0.1, 0.05),
    ("femnist", 0.3): (0.3, 0.05),
    ("cifar10", 1.0): (0.03, 0.05),
    ("cifar10", 0.5): (0.03, 1.5),
    ("cifar10", 0.3): (0.03, 1.5),
    ("cifar100", 1.0): (0.1, 1.5),
    ("cifar100", 0.5): (0.03, 1.5),
    ("cifar100", 0.3): (0.05, 0.5),
}
README_RATES = {  # code: README; for CIFAR-10 at 0.3 it has them the other way round
    ("emnist-byclass", 1.0): (0.1, 0.1),
    ("emnist-byclass", 0.5): (0.1, 0.1),
    ("emnist-byclass", 0.3): (0.03, 0.5),  # table 4
    ("emnist-byclass", 0.25): (0.01, 0.5),
    ("femnist", 1.0): (0.1, 0.1),  # table 4
    ("femnist", 0.5): (0.1, 0.1),
    ("femnist", 0.3): (0.3, 0.05),  # table 4
    ("cifar10", 1.0): (0.05, 0.05),
    ("cifar10", 0.5): (0.05, 0.05),
    ("cifar10", 0.3): (0.03, 1.5),
    ("cifar100", 1.0): (0.1, 0.5),
    ("cifar100", 0.5): (0.03, 1.5),
    ("cifar100", 0.3): (0.05, 0.5),
}
PFEDGATE_OWN: Table = {
    "weight_decay": (0.0, "G: SGD, no word of decay"),
    "momentum": (0.0, "G: SGD, no word of momentum"),
    "clip_norm": (10.0, "D: gradients are clipped; the norm: code"),
    "lr_schedule": ("constant", "G: no schedule"),
    "density": (0.5, "table 1: 1, 0.5 and 0.3"),
    "num_blocks": (5, "G: B = 5"),
    "solver": ("exact", "5.2.3, equation 6: the maximum"),
    "blocks_of": ("operators", "5.2.2: the vector that parameterizes an operator is cut"),
    "gate_start": (0.5, "D: kaiming-uniform and zero initialization before a sigmoid"),
    "paths": (2, "5.2.1: G and M have a layer each"),
    "gating": ("sample", "5.1; Algorithm 1, line 5"),
    "deploy_gate": ("sample", "5.1"),
    "aggregation": ("uploaded", "G: by index"),
}
PFEDGATE_CODE: Table = {
    "headline": ("trained", "code: sampled clients are tested right after their training"),
    "weight_decay": (0.0005, "code"),
    "momentum": (0.9, "code"),
    "clip_norm": (10.0, "code"),
    "lr_schedule": ("steps:0.75", "code"),
    "optimizer_memory": ("keep", "code"),
    "density": (0.5, "table 1: 1, 0.5 and 0.3"),
    "num_blocks": (5, "code"),
    "gate_start": (0.5, "code"),
    "equal_chunks": (True, "code"),
    "split_budget": (True, "code"),
    "score_steps": (10, "code"),
    "floors_scores": (True, "code"),
    "smallest": ("authors", "code: min(max(1 / B, 0.1), s)"),
    "straight_through": ("authors", "code: none at s = 1"),
    "steps": ("all", "code"),
    "logits_relu": (True, "code"),
    "aggregation": ("dense", "code"),
    "deploy_gate": ("transductive", "code"),
}
PFEDGATE_LOADER: dict[str | None, Table] = {  # incomplete batches of training are dropped on CIFAR alone
    "cifar10": {"drop_last": (True, "code")},
    "cifar100": {"drop_last": (True, "code")},
}
PFEDGATE_BASELINE: Table = {
    "weight_decay": (0.0005, "code"),
    "momentum": (0.9, "code"),
    "clip_norm": (10.0, "code"),
    "lr_schedule": ("steps:0.5,0.75", "code"),
    "optimizer_memory": ("keep", "code"),
}

# FedSim and FedAlt: Federated Learning with Partial Model Personalization.
FEDALT: Table = {
    "validation_rate": (0.0, "B.3: rerun on the full training data"),
    "epochs": (1, "table 8"),
    "lr_schedule": ("constant", "only where table 8 has none"),
    "weight_decay": (0.0, "table 8: SGD"),
    "momentum": (0.0, "table 8: SGD"),
    "clip_norm": (None, "table 8: N/A"),
    "weight": ("examples", "B: alpha_k in proportion to the number of datapoints"),
    "headline_weight": ("examples", "B.3: the primary metric is the weighted average"),
}
FEDALT_DATA: dict[str, Table] = {
    "stackoverflow": {
        "model": ("transformer", "B.1.1"),
        "partition": ("natural", "B.1.1: a client is a user"),
        "partition_seed": (0, "B.1.1: a fixed subsample of 1000 users"),
        "test": ("natural", "B.1.1: testing sequences of the same user"),
        "vocabulary_size": (10000, "B.1.1"),
        "sequence_length": (20, "B.1.1"),
        "clients": (1000, "B.1.1"),
        "min_train": (100, "B.1.1"),
        "min_test": (10, "B.1.1"),
        "max_examples": (1000, "B.1.1"),
        "per_round": (50, "table 8"),
        "batch_size": (64, "table 8"),
        "lr_schedule": ("linear:0.1", "table 8: linear, warm-up of 10% of rounds"),
        "clip_norm": (0.1, "table 8: max. grad. norm."),
        "server_optimizer": ("fedadam", "table 8"),
    },
    "gldv2": {
        "model": ("resnet18-gldv2", "B.1.2"),
        "partition": ("natural", "B.1.2: a client is a user"),
        "partition_seed": (0, "code: the halves follow from the user"),
        "test": ("natural", "B.1.2: half of each client's data, which is what is read as its test set"),
        "augment": (True, "B.1.2: random crops and flips"),
        "min_train": (25, "B.1.2: at least 50 datapoints, half of them tested on"),
        "min_test": (25, "B.1.2: the same"),
        "max_examples": (1000, "figure 5: at most 1000"),
        "per_round": (50, "table 8"),
        "batch_size": (64, "table 8"),
        "lr_schedule": ("linear:0.1", "table 8"),
        "server_optimizer": ("fedadam", "table 8"),
    },
    "femnist": {
        "model": ("resnet18-emnist", "B.1.3"),
        "partition": ("natural", "B.1.3: a client is a writer"),
        "test": ("natural", "B.1.3: testing points of the same writer"),
        "min_train": (100, "B.1.3"),
        "min_test": (25, "B.1.3"),
        "per_round": (10, "table 8"),
        "batch_size": (32, "table 8"),
        "lr_schedule": ("halving:500", "table 8: exponential, 500 rounds; B.3: halves"),
        "server_optimizer": ("sgd", "table 8: FedAvg"),
    },
}
STEP_A: dict[str, Table] = {
    "stackoverflow": {"rounds": (1000, "table 8"), "server_lr": (5e-4, "table 8"), "lr": (1.0, "table 8")},
    "gldv2": {"rounds": (2500, "table 8"), "server_lr": (2e-4, "table 8"), "lr": (1e-2, "table 8")},
    "femnist": {"rounds": (2000, "table 8"), "server_lr": (1.0, "table 8"), "lr": (0.5, "table 8")},
}
STEP_B: dict[str, Table] = {
    "stackoverflow": {"rounds": (500, "table 8"), "server_lr": (5e-5, "table 8"), "lr": (1e-1, "table 8")},
    "gldv2": {"rounds": (600, "table 8"), "server_lr": (2e-5, "table 8"), "lr": (1e-3, "table 8")},
    "femnist": {"rounds": (500, "table 8"), "server_lr": (1.0, "table 8"), "lr": (1e-2, "table 8")},
}
TUNING_LR = {"stackoverflow": 1e-1, "gldv2": 1e-3, "femnist": 1e-2}  # table 8, step (c)
LAMBDA = {  # B.3, for Ditto and pFedMe; Ditto's penalty has no factor of one half (B.2), ours has
    "stackoverflow": (1e-3, 1e-4),
    "gldv2": (1e-1, 1e-1),
    "femnist": (1e-1, 1e-1),
}

Expected = dict[tuple[str, str, str | None, float | None], Table]  # by method, preset, data and density


def _experiments() -> Expected:
    found: Expected = {}
    none: Table = {}
    for data in (None, *FEDSPA_DATA):
        base = FEDSPA | FEDSPA_DATA.get(data or "", none)
        baselines = {"local": none, "fedavg": none, "ditto": TWO_BRANCHES, "sub-fedavg": SUB_FEDAVG}
        for method, own in (baselines | {"subsampling": SUBSAMPLING}).items():
            found[method, "fedspa", data, None] = base | own
        for method in ("fedspa", "fedspa-rsm"):
            for preset in ("paper", "fedspa"):
                found[method, preset, data, None] = base | FEDSPA_OWN
            code = {"anneal": ("family", "code"), "clip_norm": (10.0, "code")}
            found[method, "authors", data, None] = base | FEDSPA_OWN | code
    for data in (None, *DISPFL_DATA):
        base = DISPFL | DISPFL_DATA.get(data or "", none)
        found["local", "dispfl", data, None] = base | {"per_round": (100, "B.4: each client; code")}
        found["fedavg", "dispfl", data, None] = base | SERVER
        found["fedavg-ft", "dispfl", data, None] = base | SERVER | TUNED
        found["ditto", "dispfl", data, None] = base | SERVER | TWO_BRANCHES
        found["sub-fedavg", "dispfl", data, None] = base | SERVER | SUB_FEDAVG
        found["dpsgd", "dispfl", data, None] = base | PEERS
        consensus: Table = {"tune_from": ("all", "4.1: on the global consensus model")}
        found["dpsgd-ft", "dispfl", data, None] = base | PEERS | TUNED | consensus
        found["fedfomo", "dispfl", data, None] = base | FOMO
        for preset in ("paper", "dispfl"):
            found["dispfl", preset, data, None] = base | PEERS | DISPFL_OWN
        code = {
            "graph": ("random:10", "code"),
            "initial_weights": ("common", "code"),
            "regrowth": ("random", "code"),
            "divide_by": ("used", "code"),
            "clip_norm": (10.0, "code"),
            "rounds": (500, "code: for all three"),
        }
        if data is not None:
            code["partition"] = ("dirichlet-equal:0.3", "code: for all three")
        found["dispfl", "authors", data, None] = base | PEERS | DISPFL_OWN | code
    for data in (None, *PFEDGATE_DATA):
        base = PFEDGATE | PFEDGATE_DATA.get(data or "", none)
        for method, own in {
            "local": none,
            "fedavg": none,
            "lg-fedavg": none,
            "fedavg-ft": {"tune_epochs": (1, "G")},
            "ditto": {"prox": (0.5, "G: one of those searched"), "schedule": ("interleaved", "its own code")},
            "pfedme": {"variant": ("aggregator", "code"), "momentum": (0.0, "code")},
            "fedem": {"average_over": ("all", "code")},
            "fedrep": {"personal_epochs": (1, "G"), "tune_epochs": (0, "G: no word of it")},
            "heterofl": {"capacities": ((1.0, *[0.5] * 9), "G: the full model for 10%, 50% for the other 90%")},
            "fedmask": {"density": (0.5, "G"), "aggregation": ("intersection", "G")}
            | ({"num_masked_layers": (MASKED_LAYERS[data], "G")} if data else {}),
        }.items():
            found[method, "pfedgate", data, None] = base | PFEDGATE_BASELINE | PFEDGATE_LOADER.get(data, none) | own
        code = (
            PFEDGATE_CODE | PFEDGATE_LOADER.get(data, none) | ({"paths": (2, "README")} if data == "cifar100" else {})
        )
        for density in (1.0, 0.5, 0.3, 0.25):
            given: Table = {"density": (density, "given")}
            text, readme = (
                {key: (rate, where) for key, rate in zip(("lr", "gate_lr"), rates, strict=False)}
                for rates, where in (
                    (RATES.get((str(data), density), ()), "table 4"),
                    (README_RATES.get((str(data), density), ()), "code: README"),
                )
            )
            found["pfedgate", "paper", data, density] = base | PFEDGATE_OWN | text | given
            found["pfedgate", "authors", data, density] = base | code | readme | given
            # In a column of the paper all methods have the code's optimizer, and its own rates those of the paper.
            found["pfedgate", "pfedgate", data, density] = base | code | text | given
    for data in (None, *FEDALT_DATA):
        base = FEDALT | FEDALT_DATA.get(data or "", none)
        step_a, step_b = base | STEP_A.get(data or "", none), base | STEP_B.get(data or "", none)
        tuning: Table = {"tune_epochs": (5, "table 8")}
        of_a, of_b = dict(tuning), tuning | {"tune_lr_scale": (1.0, "table 8: one rate for (b) and (c)")}
        ditto: Table = {"schedule": ("tuning", "B.2"), "prox": (2 * 0.1, "B.3")}
        pfedme: Table = {"variant": ("detached", "code"), "inner_steps": (3, "code"), "prox": (0.1, "B.3")}
        if data is not None:
            of_a["tune_lr_scale"] = (TUNING_LR[data] / STEP_A[data]["lr"][0], "table 8: (c) over (a)")
            of_b["tune_lr_scale"] = (TUNING_LR[data] / STEP_B[data]["lr"][0], "table 8: (c) over (b)")
            ditto["prox"] = (2 * LAMBDA[data][0], "B.3")
            pfedme |= {"prox": (LAMBDA[data][1], "B.3"), "shared_lr": (STEP_B[data]["lr"][0], "code")}
        found["fedavg", "fedalt", data, None] = step_a
        for method in ("fedavg-ft", "fedavg-ft-part"):
            found[method, "fedalt", data, None] = step_a | of_a
        found["ditto", "fedalt", data, None] = step_a | of_a | ditto
        found["pfedme", "fedalt", data, None] = step_b | of_b | pfedme
        code = {
            "weight": ("batches", "code"),
            "max_personal_steps": (1000, "code"),
            "clip_stale": (True, "code"),
            **{
                "stackoverflow": {
                    "server_optimizer": ("adam", "code"),
                    "clip_norm": (0.25, "code"),
                    "lr_schedule": ("linear:0.1,from-zero", "code: round 0 has a rate of 0"),
                },
                "gldv2": {
                    "server_optimizer": ("adam", "code"),
                    "server_lr": (5e-5, "code: script"),
                    "lr_schedule": ("linear:0.1,from-zero", "code: round 0 has a rate of 0"),
                },
                "femnist": {"max_examples": (1000, "code")},
            }.get(data or "", {}),
        }
        for method in ("fedalt", "fedsim"):
            for preset in ("paper", "fedalt"):
                found[method, preset, data, None] = step_b | of_b
            found[method, "authors", data, None] = step_b | of_b | code
    return found


EXPERIMENTS = _experiments()
OTHERS = {  # presets of papers that are not among the four: training alone
    ("fedrep", "paper"),
    ("fedrep", "authors"),
    ("fedfomo", "paper"),
    ("fedfomo", "authors"),
    ("dpsgd", "paper"),
    *((name, "authors") for name in ("ditto", "pfedme", "fedem", "lg-fedavg", "fedbn", "fedproto", "lotteryfl")),
    *((name, "authors") for name in ("sub-fedavg", "sub-fedavg-hy", "heterofl", "fedrolex")),
}


def _given(preset: str, data: str | None, density: float | None) -> dict[str, Any]:
    chosen = {"preset": preset, "data": data, "density": density}
    return {key: value for key, value in chosen.items() if value is not None}


@pytest.mark.parametrize(("method", "preset", "data", "density"), EXPERIMENTS, ids=str)
def test_a_preset_is_what_its_paper_says(method, preset, data, density):
    expected = {key: value for key, (value, _) in EXPERIMENTS[method, preset, data, density].items()}
    given = _given(preset, data, density)
    assert methods.published(METHODS[method], given).keys() | given.keys() - {"preset", "data"} == expected.keys()
    config, own = build.make_configs(method, given)
    found = {**config.model_dump(), **own.model_dump()}
    if data is None:  # 20 clients unless the preset says otherwise
        assert found["data"] == "digits"
    for key, value in expected.items():
        same = pytest.approx(value) if isinstance(value, float) else value
        if (key, value) == ("clients", 539) and preset in ("paper", "authors", "pfedgate"):
            same = None  # only the files tell how many owners there are
        assert found[key] == same, (key, EXPERIMENTS[method, preset, data, density][key][1])
    assert found["optimizer"] == "sgd"


def test_a_search_tries_what_the_paper_tried():
    """pFedGate, appendix G; FedAlt, appendix B.3, whose penalty for Ditto has no half."""
    searched = {
        ("ditto", "pfedgate"): {"prox": (0.05, 0.1, 0.5, 0.8)},
        ("pfedme", "pfedgate"): {"prox": (0.0001, 0.001, 0.01, 0.1, 1, 10)},
        ("ditto", "fedalt"): {"prox": tuple(2 * 10.0**power for power in range(-4, 1))},
        ("pfedme", "fedalt"): {"prox": tuple(10.0**power for power in range(-4, 1))},
    }
    for name, row in METHODS.items():
        for preset in row.presets:
            found, expected = methods.preset(row, preset).grid, searched.pop((name, preset), {})
            assert found.keys() == expected.keys(), (name, preset)
            for key, values in found.items():
                assert values == pytest.approx(expected[key]), (name, preset)
    assert not searched


def test_every_preset_is_transcribed():
    there = {(name, preset) for name, row in METHODS.items() for preset in row.presets}
    assert {key[:2] for key in EXPERIMENTS} | OTHERS == there
    for name, preset in there:
        found = methods.preset(METHODS[name], preset)
        for data in {**found.by_data, **found.by_density}:
            assert any(key[:3] == (name, preset, data) for key in EXPERIMENTS), (name, preset, data)
        for data, rows in found.by_density.items():
            assert all((name, preset, data, density) in EXPERIMENTS for density in rows)
    assert all(methods.preset(METHODS[name], preset).by_data == {} for name, preset in OTHERS)


@pytest.mark.parametrize(("name", "preset"), sorted(OTHERS), ids=str)
def test_a_preset_of_another_paper_is_made_of_options(name, preset):
    config, own = build.make_configs(name, {"preset": preset})
    found = {**config.model_dump(), **own.model_dump()}
    for key, value in methods.preset(METHODS[name], preset).options.items():
        assert found[key] == value, key


def test_all_peers_take_part():
    config = build.make_config("dispfl", {"preset": "paper", "data": "cifar10"})
    assert build.make_plan(config, 100, peers=True).per_round == 100
    assert build.headline_of(config, METHODS["dispfl"]) == "trained"


def write_leaf(folder, writers, images=10):
    """FEMNIST's files with so many writers."""
    for part, count in (("train", images), ("test", 2)):
        users = [f"w{i}" for i in range(writers)]
        data = {
            user: {"x": [[(i + j) / 99] * 784 for j in range(count)], "y": [*range(count)]}
            for i, user in enumerate(users)
        }
        (folder / part).mkdir(parents=True)
        (folder / part / "all.json").write_text(
            json.dumps({"users": users, "num_samples": [count] * writers, "user_data": data})
        )
    return str(folder)


def test_all_writers_are_clients_however_many_the_files_have(tmp_path, monkeypatch):
    """15% of LEAF's are 532, not 539: an experiment of all owners takes those that there are."""
    monkeypatch.chdir(tmp_path)
    data = {"data": "femnist", "data_dir": write_leaf(tmp_path / "femnist", 27), "rounds": 1, "executor": "serial"}
    run = sp.train("pfedgate", preset="paper", **data)
    assert (run.config["clients"], run.config["per_round"]) == (4, 4)
    assert "not as published: " in run.protocol
    assert "clients=4 (539)" in run.protocol
    assert "per_round" not in run.protocol.partition("not as published: ")[2]
    assert sp.train("fedavg", preset="pfedgate", novel=0.25, **data).config["per_round"] == 3
    assert sp.train("fedavg", preset="pfedgate", per_round=2, **data).config["per_round"] == 2
    found = sp.compare(["local", "fedavg"], preset="pfedgate", **data)
    assert {(one.config["clients"], one.config["per_round"]) for one in found.runs} == {(4, 4)}
    given = sp.train("fedavg", preset="pfedgate", clients=3, **data)
    assert (given.config["clients"], given.config["per_round"]) == (3, 3)
    # A recipe's finished rows are as planned, though their numbers were not known.
    for _ in range(2):
        table = sp.reproduce("pfedgate/table1", rows="femnist/local", **data)
        assert [one.state for one in table.planned] == ["done"]


# What the user gives wins.


def test_options_of_the_user_win():
    small = {"clients": 3, "rounds": 1, "per_round": 1, "model": "lenet5", "density": 0.2, "lr_schedule": "constant"}
    config = build.make_config("fedspa", {"preset": "paper", "data": "cifar10", **small})
    assert (config.clients, config.rounds, config.per_round, config.model) == (3, 1, 1, "lenet5")
    assert (config.options["density"], config.lr_schedule, config.lr_decay) == (0.2, "constant", 1.0)
    assert (config.partition, config.batch_size) == ("dirichlet:0.3", 128)  # and the rest is the preset's
    config = build.make_config("fedavg", {"preset": "fedalt", "data": "femnist", "lr_decay": 0.9})
    assert (config.lr_schedule, config.lr_decay) == ("decay", 0.9)
    config = build.make_config("pfedgate", {"preset": "paper", "data": "cifar10", "density": 1, "gate_lr": 7.0})
    assert (config.options["lr"], config.options["gate_lr"]) == (0.03, 7.0)
    config = build.make_config("pfedgate", {"preset": "paper", "data": "cifar10", "density": 0.1})  # no rates published
    assert (config.options["lr"], config.options["gate_lr"]) == (0.05, 1.0)


def test_fewer_clients_than_published_all_take_part():
    config = build.make_config("fedspa", {"preset": "paper", "clients": 3})
    assert config.per_round == 3
    config = build.make_config("pfedgate", {"preset": "paper", "clients": 10, "novel": 0.2})
    assert config.per_round == 8
    config = build.make_config("dispfl", {"preset": "paper", "clients": 6, "novel": 1})
    assert config.graph == "random:4:bounded"
    assert build.make_config("dispfl", {"preset": "paper", "clients": 11}).graph == "random:10:bounded"
    assert build.make_config("dispfl", {"preset": "paper", "clients": 6, "graph": "ring"}).graph == "ring"
    with pytest.raises(SparsonaError, match="cannot sample 9"):  # what the user gives is not changed
        build.make_config("fedspa", {"preset": "paper", "clients": 3, "per_round": 9})


def test_a_federation_has_its_clients_and_splits(digits_federation):
    config = build.make_config("pfedgate", {"preset": "paper"}, digits_federation)
    assert (config.clients, config.per_round) == (digits_federation.num_clients,) * 2
    assert (config.partition, config.rounds) == ("given", 400)


@pytest.fixture(scope="module")
def digits_federation():
    return build.read_data(build.make_config("fedavg", {"clients": 4, "data_rate": 0.3}))


# Costs.


def test_a_cost_is_that_of_the_preset():
    found = sp.cost("dispfl", preset="paper", data="tiny-imagenet")
    assert (found.rounds, found.graph, found.model) == (300, "random:10:bounded", "resnet18")
    assert found.busiest == "any peer"
    assert sp.cost("dispfl", preset="authors", data="cifar10").busiest == "any peer, on average"
    assert sp.cost("dispfl", preset="paper", data="cifar10", graph="ring").neighbours == 2
    found = sp.cost("pfedgate", preset="paper", data="cifar10")
    assert (found.samples, found.per_round, found.rounds) == (360, 100, 400)  # 60,000 images, 6:2:2, 100 clients
    assert "held out: 20% for validation and 20% for testing" in found.samples_from
    assert sp.cost("fedavg", preset="pfedgate", data="emnist-byclass").samples == 488  # 81,425 images
    assert sp.cost("fedspa", preset="paper", data="cifar10").samples == 500
    assert sp.cost("fedspa", preset="paper", data="cifar10", clients=4).per_round == 4


def test_a_preset_gives_way_to_a_quirk_but_the_user_does_not():
    options = {"preset": "paper", "data": "emnist-letters", "quirks": ["emnist-400-rounds"]}
    assert sp.cost("fedspa", **options).rounds == 400
    with pytest.raises(SparsonaError, match="quirk of 400 rounds"):
        sp.cost("fedspa", rounds=1000, **options)


def test_all_clients_of_an_experiment_are_all_of_the_users():
    assert build.make_config("pfedgate", {"preset": "paper", "data": "cifar10", "clients": 200}).per_round == 200
    assert (
        build.make_config("pfedgate", {"preset": "paper", "data": "cifar10", "clients": 200, "novel": 0.2}).per_round
        == 160
    )
    assert build.make_config("fedavg", {"preset": "fedspa", "data": "cifar10", "clients": 200}).per_round == 10


def test_rates_by_density_also_where_it_is_written_as_text():
    found = build.make_config("pfedgate", {"preset": "paper", "data": "cifar10", "density": "0.3"}).options
    assert (found["lr"], found["gate_lr"]) == (0.03, 1.5)


def test_tuning_by_the_user_is_the_result_whatever_the_preset_names():
    tuned = {"preset": "paper", "tune_epochs": 1}
    assert build.make_config("dispfl", tuned).headline is None
    assert build.make_config("dispfl", {**tuned, "headline": "trained"}).headline == "trained"
    assert build.make_config("fedavg", {"tune_epochs": 1, "headline": "tuned"}).headline is None
    with pytest.raises(sp.SparsonaError, match="tuned"):
        build.make_config("fedavg", {"headline": "tuned"})


def test_results_say_where_they_are_not_at_the_published_point(tmp_path):
    run = sp.train("dispfl", preset="paper", clients=5, rounds=1, per_round=2, data_rate=0.3, out=tmp_path / "run")
    _, _, otherwise = run.protocol.partition("not as published: ")
    assert "headline=received (trained)" in otherwise
    assert "per_round=2 (5)" in otherwise
