"""Sparse, personalized federated learning: many clients, a small model of its own for each.

    import sparsona as sp
    federation = sp.federate(x, y, clients=20, partition="dirichlet:0.3", seed=0)
    run = sp.train("fedspa", federation, model=net, rounds=50, density=0.5)
    run.accuracies(), run.personal_model(7), run.report("page.html")

Names are fetched when they are first used, so that importing this imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sparsona.core.version import VERSION

__version__ = VERSION

if TYPE_CHECKING:
    from sparsona.core.errors import SparsonaError
    from sparsona.costs import cost
    from sparsona.data import SOURCES
    from sparsona.data.federate import federate
    from sparsona.data.federation import Federation
    from sparsona.data.pool import View
    from sparsona.experiment.client_side import join
    from sparsona.experiment.compare import compare, load_comparison, resume_comparison
    from sparsona.experiment.gather import gather
    from sparsona.experiment.peers import be_peer
    from sparsona.experiment.replay import Replay, replay
    from sparsona.experiment.run import Comparison, Run
    from sparsona.experiment.server_side import serve
    from sparsona.experiment.theory.bounds import bounds
    from sparsona.experiment.train import load, resume, train
    from sparsona.experiment.tune import Tuning, tune
    from sparsona.methods import METHODS
    from sparsona.models import MODELS
    from sparsona.report.pictures import save_picture
    from sparsona.reproduce.runner import Reproduction, reproduce

_WHERE = {
    "Comparison": "experiment.run",
    "Run": "experiment.run",
    "compare": "experiment.compare",
    "bounds": "experiment.theory.bounds",
    "be_peer": "experiment.peers",
    "gather": "experiment.gather",
    "join": "experiment.client_side",
    "serve": "experiment.server_side",
    "load": "experiment.train",
    "Replay": "experiment.replay",
    "replay": "experiment.replay",
    "resume": "experiment.train",
    "load_comparison": "experiment.compare",
    "resume_comparison": "experiment.compare",
    "train": "experiment.train",
    "Tuning": "experiment.tune",
    "tune": "experiment.tune",
    "Reproduction": "reproduce.runner",
    "reproduce": "reproduce.runner",
    "cost": "costs",
    "Federation": "data.federation",
    "federate": "data.federate",
    "View": "data.pool",
    "METHODS": "methods",
    "MODELS": "models",
    "SOURCES": "data",
    "SparsonaError": "core.errors",
    "save_picture": "report.pictures",
}

__all__ = [
    "METHODS",
    "MODELS",
    "SOURCES",
    "Comparison",
    "Federation",
    "Replay",
    "Reproduction",
    "Run",
    "SparsonaError",
    "Tuning",
    "View",
    "be_peer",
    "bounds",
    "compare",
    "cost",
    "federate",
    "gather",
    "join",
    "load",
    "load_comparison",
    "replay",
    "reproduce",
    "resume",
    "resume_comparison",
    "save_picture",
    "serve",
    "train",
    "tune",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'sparsona' has no attribute '{name}'")
    return getattr(import_module(f"sparsona.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
