"""The options that say how a data set is shared out among clients and split. Free of torch and numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sparsona.core.arguments import number, text, truth, whole
from sparsona.core.errors import SparsonaError

MOST_SEED = 2**63 - 1


def check_arguments(seed: Any, num_classes: Any, name: Any, task: Any, tokens: Any, view: Any) -> None:
    """Raise SparsonaError if an argument that every way to make a federation has is not one."""
    text("task", task, "auto")
    truth("tokens", tokens)
    if view is not None and not hasattr(view, "augments"):
        raise SparsonaError(
            f"view as a {type(view).__name__}", expected="a sparsona View", hint="leave it out, or write sp.View()"
        )
    whole("seed", seed, 0, MOST_SEED)
    whole("num_classes", num_classes, -(10**9), none=True)  # a range is told by what counts them
    text("name", name, "arrays")


@dataclass(frozen=True, kw_only=True)
class SplitPlan:
    """How a pool of examples becomes a federation. The defaults of these options are declared here and nowhere else.

    Args:
        clients: The number of clients; None: one for every owner (partition "natural") or as many as the file has.
        partition: One of the forms that `sparsona data` lists.
        seed: Decides all that is random.
        partition_seed: If given, used in place of `seed`: runs with different seeds then share partition and splits.
        test: How a client's test examples are chosen, one of the forms that `sparsona data` lists.
        validation_rate: Share of a client's examples held for validation.
        test_rate: Share of a client's examples held for testing, where they are split off its own.
        holdout_rate: Share of a client's training and validation examples that it is tested on in place of its test
            examples, which are then not used at all: for choosing options.
        data_rate: Share of the examples (of the owners, for "natural") that is used, rounded down.
        min_size: The fewest examples a client is dealt; None: 10, or for "natural" as many as can be split.
        min_train: The fewest examples for training and validation. Owners with fewer are left out (partition
            "natural"); for other partitions a client with fewer is an error.
        min_test: The fewest test examples, likewise.
        max_examples: The most examples that a client keeps of those it is dealt.
    """

    clients: int | None = None
    partition: str = "dirichlet:0.3"
    seed: int = 0
    partition_seed: int | None = None
    test: str = "auto"
    validation_rate: float = 0.1
    test_rate: float = 0.25
    holdout_rate: float = 0.0
    data_rate: float = 1.0
    min_size: int | None = None
    min_train: int = 0
    min_test: int = 0
    max_examples: int | None = None

    def __post_init__(self) -> None:
        counts = {"min_size": 0, "max_examples": 0, "clients": -(10**9), "partition_seed": 0}
        for name, least in {**counts, "seed": 0, "min_train": 0, "min_test": 0}.items():
            most = MOST_SEED if "seed" in name else 10**9
            object.__setattr__(self, name, whole(name, getattr(self, name), least, most, none=name in counts))
        for name in ("validation_rate", "test_rate", "holdout_rate", "data_rate"):
            object.__setattr__(self, name, number(name, getattr(self, name)))
        if not 0 <= self.holdout_rate < 1:
            raise SparsonaError(
                f"holdout_rate is {self.holdout_rate}", expected="0 or more, and less than 1", hint="0.2 is usual"
            )
        text("partition", self.partition, "dirichlet:0.3")
        text("test", self.test, "auto")
