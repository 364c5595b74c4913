"""The one error that is meant for the user."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from sparsona.core.printable import printable


class SparsonaError(Exception):
    """An error that a user can act on: what was wrong, what was expected, and a hint at what to do.

    Messages quote names and values of others: what cannot be printed is escaped.
    """

    def __init__(self, what: str, *, expected: str = "", hint: str = "") -> None:
        what, expected, hint = printable(what), printable(expected), printable(hint)
        self.what, self.expected, self.hint = what, expected, hint
        lines = [what]
        if expected:
            lines.append(f"  expected: {expected}")
        if hint:
            lines.append(f"  hint:     {hint}")
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[object, ...]:
        # Worker processes send errors to the parent, and pickle cannot pass keyword arguments by itself.
        return (_rebuild, (type(self), self.what, self.expected, self.hint))


def _rebuild(kind: type[SparsonaError], what: str, expected: str, hint: str) -> SparsonaError:
    return kind(what, expected=expected, hint=hint)


class MaskMismatchError(SparsonaError):
    """The receiver does not hold the mask that a message assumes; the full bitmap must be sent."""


class DivergedError(SparsonaError):
    """A client's training left the range of numbers that can be used: of finite ones, or of the other clients'."""


class MachineError(SparsonaError):
    """The machine's fault, such as a full disk: whatever else runs on it would meet it, too."""


class DataNeededError(SparsonaError):
    """A client's data was read where only its sizes and shapes are stored."""


# What other libraries and people call our names.
ELSEWHERE = {
    "learning_rate": "lr",
    "local_lr": "lr",
    "local_learning_rate": "lr",
    "step_size": "lr",
    "num_clients": "clients",
    "n_clients": "clients",
    "num_rounds": "rounds",
    "global_rounds": "rounds",
    "global_epoch": "rounds",
    "communication_rounds": "rounds",
    "local_epochs": "epochs",
    "local_epoch": "epochs",
    "num_epochs": "epochs",
    "batch": "batch_size",
    "local_batch_size": "batch_size",
    "join_ratio": "per_round",
    "fraction": "per_round",
    "fraction_fit": "per_round",
    "clients_per_round": "per_round",
    "sparsity": "density",
    "alpha": "partition",
    "dirichlet": "partition",
    "dataset": "data",
    "person": "natural",
    "user": "natural",
    "owner": "natural",
    "owners": "natural",
    "writer": "natural",
    "network": "model",
    "gpu": "device",
    "cuda": "device",
    "lr_scheduler": "lr_schedule",
    "scheduler": "lr_schedule",
    "decay": "lr_decay",
    "val_rate": "validation_rate",
    "compression": "transform",
    "finetune": "fedavg-ft",
    "fine-tuning": "fedavg-ft",
    "centralized": "fedavg",
    "standalone": "local",
    "acc": "accuracy",
    "balanced_acc": "balanced-accuracy",
    "bacc": "balanced-accuracy",
    "f1_macro": "f1",
    "f1_score": "f1",
    "macro_f1": "f1",
    "auroc": "auc",
    "roc_auc": "auc",
    "mse": "rmse",
    "mean_absolute_error": "mae",
    "r2_score": "r2",
}


def unknown_name(kind: str, name: str, known: Iterable[str]) -> SparsonaError:
    """An error for a misspelt name that suggests the right one."""
    names = sorted(known)
    near = nearest(name, names)
    hint = f"did you mean '{near}'?" if near else ""
    return SparsonaError(f"unknown {kind} '{name}'", expected="one of " + ", ".join(names), hint=hint)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The name that was probably meant: what we call it, or the most similar one.

    Case and leading zeros are ignored.

    Example:
        >>> nearest("learning-rate", ["lr", "rounds"]), nearest("person-7", ["person-07", "person-27"])
        ('lr', 'person-07')
    """
    names = list(known)
    ours = ELSEWHERE.get(name.lower(), ELSEWHERE.get(name.lower().replace("-", "_")))
    if ours in names:
        return ours
    by_key: dict[str, str] = {}
    for one in names:
        by_key.setdefault(_without_zeros(one.lower()), one)
    found = difflib.get_close_matches(_without_zeros(name.lower()), by_key, n=1, cutoff=0.6)
    return by_key[found[0]] if found else None


def _without_zeros(name: str) -> str:
    return re.sub(r"\d+", lambda number: number[0].lstrip("0") or "0", name)
