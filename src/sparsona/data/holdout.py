"""Which examples a client is tested on, and which of the others are for validation. Needs numpy alone.

To add a way to choose test examples, write a row of `TESTS` and, if they come from a published test set, its function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from sparsona.core import spec
from sparsona.core.errors import SparsonaError, unknown_name
from sparsona.core.seeds import Seeds
from sparsona.core.tokens import NUM_SPECIAL
from sparsona.data.partition.by_owner import count_by_owner, find_by_owner
from sparsona.data.partition.kind import Partition
from sparsona.data.pool import Array, Indices, Pool, has_scored_token
from sparsona.data.split_plan import SplitPlan

Rows = tuple[Array, Array, Array]  # for training, validation and testing


@dataclass(frozen=True)
class Published:
    """What test examples may be drawn from: the pool from `start` on, for clients with these training examples.

    `owners` are the clients' owners, for partition "natural". `per_client` is how many a client is tested on, if given.
    """

    pool: Pool
    start: int
    train: Sequence[Array]
    owners: Sequence[int]
    per_client: int | None
    seeds: Seeds


def draw_shares(published: Published) -> list[Indices]:
    """Published test examples in the label shares of each client's training data."""
    pool, start = published.pool, published.start
    counts = np.stack([np.bincount(pool.y[mine], minlength=pool.num_classes) for mine in published.train])
    drawn = draw_by_shares(counts, pool.y[start:], published.per_client, published.seeds.shared("test"))
    return [start + mine for mine in drawn]


def find_own(published: Published) -> list[Indices]:
    """The published test examples of each client's owner."""
    assert published.pool.owners is not None
    return find_by_owner(published.pool.owners, published.owners, published.start)


@dataclass(frozen=True)
class HoldoutRow:
    """A row of `sparsona data`: how a client's test examples are chosen.

    `draw` takes them from a published test set; without it they are split off the client's own examples. `from_all`:
    published training and test examples are pooled first.
    """

    form: str
    summary: str
    draw: Callable[[Published], list[Indices]] | None = None
    from_all: bool = False


TESTS: dict[str, HoldoutRow] = {
    "auto": HoldoutRow("auto", "By the data: shares or natural where there is a published test set, else split."),
    "split": HoldoutRow(
        "split", "All examples are shared out, and every client's own are split by test_rate.", from_all=True
    ),
    "split-train": HoldoutRow("split-train", "The same with the published training set alone."),
    "shares": HoldoutRow(
        "shares:N",
        "About N examples (none given: an even share) of the published test set, in the client's own label shares; "
        "clients may be tested on the same ones.",
        draw_shares,
    ),
    "natural": HoldoutRow("natural", "The published test examples of the same writer, user or speaker.", find_own),
}


@dataclass(frozen=True)
class Holdout:
    """How each client's examples are divided. `name` is a key of `TESTS` other than "auto"."""

    name: str
    per_client: int | None
    validation_rate: float
    test_rate: float
    overlap: int

    @property
    def tested_on(self) -> str:
        """The form in which results name it."""
        return self.name if self.per_client is None else f"{self.name}:{self.per_client}"

    @property
    def is_published(self) -> bool:
        """Whether clients are tested on a published test set, and not on a part of their own examples."""
        return TESTS[self.name].draw is not None

    @property
    def min_size(self) -> int:
        """One to train on and, unless those are published, one to test on with the overlapping ones in between."""
        return 1 if self.is_published else 2 + self.overlap

    def num_shared(self, pool: Pool) -> int:
        """How many examples, the first of the pool, are shared out among the clients."""
        return len(pool.y) if TESTS[self.name].from_all or pool.num_train is None else pool.num_train

    def sizes(self, count: int) -> tuple[int, int]:
        """How many of a client's `count` examples are for testing and for validation."""
        num_to_spare = count - self.min_size - self.overlap
        wants_validation = self.validation_rate > 0 and num_to_spare > 0
        count -= self.overlap * (wants_validation + (not self.is_published))
        num_test = 0 if self.is_published else round_to(count * self.test_rate, True, count - 1 - wants_validation)
        if not wants_validation:
            return num_test, 0
        return num_test, round_to(count * self.validation_rate, True, count - 1 - num_test)

    def split(self, client: int | str, mine: Array, tested: Array | None, y: Array, rng: np.random.Generator) -> Rows:
        """A client's examples for training, validation and testing; `tested` if the last are drawn already."""
        if len(mine) < (1 if self.is_published else 2):
            raise no_data(client, len(mine))
        train, validation, tested = self._divide(client, mine, tested, y, rng)
        if not len(tested):
            raise no_data(client, 0, "test ")
        if y.ndim == 2 and not has_scored_token(y[tested]).any():
            raise nothing_to_score(client)
        return train, validation, tested

    def _divide(self, client: int | str, mine: Array, tested: Array | None, y: Array, rng: np.random.Generator) -> Rows:
        num_test, num_validation = self.sizes(len(mine))
        if self.overlap:
            if tested is None:
                tested, mine = take_last(mine, num_test, self.overlap)
            validation, train = take_last(mine, num_validation, self.overlap)
            return train, validation, tested
        labels = strata(y)
        if tested is None:
            # A sequence without a scored token cannot be tested on.
            usable = mine if y.ndim == 1 else mine[has_scored_token(y[mine])]
            if not len(usable):
                raise nothing_to_score(client)
            tested, _ = take_stratified(usable, labels, min(num_test, len(usable)), rng)
            mine = np.setdiff1d(mine, tested, assume_unique=True)
        validation, train = take_stratified(mine, labels, num_validation, rng)
        return train, validation, tested


HELD_OUT = "held-out"  # what clients are tested on where test examples are kept for later


def hold_out(
    client: int | str, split: Rows, y: Array, rates: tuple[float, float], overlap: int, rng: np.random.Generator
) -> Rows:
    """A client's examples without its test examples: some of the others are in their place.

    `rates` are the shares for validation and for testing.
    """
    again = Holdout("split", None, *rates, overlap)
    return again.split(client, np.sort(np.concatenate(split[:2])), None, y, rng)


def choose_holdout(plan: SplitPlan, partition: Partition, pool: Pool) -> Holdout:
    """The holdout of a plan, checked against the data; "auto" becomes one of the others."""
    test, shared_by = plan.test, plan.partition.strip()
    found = spec.parse("test choice", test)
    name, argument = found.name, found.argument or ""
    if name not in TESTS:
        raise unknown_name("test choice", name, (card.form for card in TESTS.values()))
    if found.argument is not None:
        most = len(pool.y) - (pool.num_train or 0)
        is_number = name == "shares" and argument.isascii() and argument.isdigit() and len(argument) < 10
        if not (is_number and 0 < int(argument) <= most):
            raise SparsonaError(
                f"test '{test[:40]}'",
                expected=f"shares:N with N a positive whole number, at most {most:,}",
                hint="write for example shares:100",
            )
    if pool.overlap and partition.name != "natural":
        raise SparsonaError(
            f"partition '{shared_by}' of {pool.name}, whose examples overlap",
            expected=f"natural: an example and the {pool.overlap} after it have text in common, so "
            "that one client would be tested on text that another trains on",
            hint="--partition natural, or data whose examples do not overlap (shakespeare as a text file)",
        )
    is_natural = partition.name == "natural"
    has_own_tests = is_natural and _has_own_tests(pool)
    if name == "auto":
        if pool.num_train is None:
            name = "split"
        elif is_natural:
            name = "natural" if has_own_tests else "split-train"
        else:
            name = "shares" if pool.y.ndim == 1 else "split-train"
    elif name != "split" and pool.num_train is None:
        raise SparsonaError(
            f"test '{test}' for {pool.name}, which has no published test set",
            expected="split: every client's own examples are split",
            hint="leave test out",
        )
    elif name == "shares" and pool.y.ndim != 1:
        raise SparsonaError(
            f"test '{test}' for tokens or numbers", expected="one class per example", hint="test=split-train"
        )
    elif name == "natural" and not (is_natural and has_own_tests):
        raise SparsonaError(
            f"test 'natural' for {pool.name} with partition '{shared_by}'",
            expected="partition natural, and a published test set with examples of the same owners",
            hint="leave test out",
        )
    if name != "shares" and partition.repeats_examples:
        raise SparsonaError(
            f"partition '{shared_by}' with test '{name}'",
            expected="a published test set: clients share examples, and one would be tested on what another trains on",
            hint="use data that has one (test=shares), or pathological:C, which shares no example",
        )
    per_client = int(argument) if argument else None
    holdout = Holdout(name, per_client, plan.validation_rate, plan.test_rate, pool.overlap)
    check_rates(plan.validation_rate, None if holdout.is_published else plan.test_rate)
    return holdout


def _has_own_tests(pool: Pool) -> bool:
    """Whether any owner has published examples both to train and to test on."""
    if pool.num_train is None or pool.owners is None:
        return False
    num_owners = int(pool.owners.max()) + 1
    train, test = (
        count_by_owner(part, num_owners) for part in (pool.owners[: pool.num_train], pool.owners[pool.num_train :])
    )
    return bool(((train > 0) & (test > 0)).any())


def draw_by_shares(train_counts: Array, test_labels: Array, per_client: int | None, seed: int) -> list[Indices]:
    """FedSpa and DisPFL: about `per_client` test examples for each client, in the label shares of its training data.

    `train_counts` (clients, classes) says how many training examples each client has of each class. Of each class a
    client is tested on its share times `per_client` (None: an even share of the test set, rounded up), rounded up: on
    up to one example per class more than `per_client`, and on all its training classes. Examples are drawn without
    repetition for one client, but for each by itself: clients are tested on some of the same. Of a class with fewer
    test examples than that all are taken, and nothing in their stead. Indices are positions in `test_labels`, sorted;
    a client's depend on its own counts, its number, `per_client` and `seed` alone.
    """
    train_counts, test_labels = np.asarray(train_counts, dtype=np.int64), np.asarray(test_labels)
    if train_counts.ndim != 2 or test_labels.ndim != 1:
        raise SparsonaError(
            f"test examples by label shares, with labels of shape {test_labels.shape}",
            expected="one label per example: sequences have a label at each position, and no shares",
            hint="test by owner, or split each client's own examples",
        )
    if per_client is None:
        per_client = -(-len(test_labels) // len(train_counts))
    if per_client < 1:
        raise SparsonaError(f"{per_client} test examples per client", expected="1 or more", hint="100 are usual")
    order = np.argsort(test_labels, kind="stable")
    ends = np.searchsorted(test_labels[order], np.arange(train_counts.shape[1] + 1))
    members = [order[start:end] for start, end in pairwise(ends)]
    chosen = []
    for client, counts in enumerate(train_counts):
        rng = np.random.Generator(np.random.PCG64(Seeds(seed).of(client).own("test")))
        # Whole numbers: 0.07 * 100 is a little more than 7 in floating point, and would be rounded up to 8.
        wanted = -(-counts * per_client // max(1, int(counts.sum())))
        drawn = [
            rng.choice(members[label], min(wanted[label], len(members[label])), replace=False)
            for label in np.flatnonzero(wanted)
        ]
        chosen.append(np.sort(np.concatenate([*drawn, np.empty(0, dtype=np.int64)])))
    return chosen


def strata(y: Array) -> Array:
    """What a split keeps in proportion: the class, or nothing where tokens or numbers are predicted."""
    return y if y.ndim == 1 else np.broadcast_to(np.int64(0), len(y))


def round_to(exact: float, at_least_one: bool, at_most: int) -> int:
    """To the nearest whole number, within bounds."""
    return min(max(int(exact + 0.5), int(at_least_one)), at_most)


def take_stratified(mine: Array, labels: Array, total: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """`total` of a client's examples, and the others, with the same share of each class as nearly as counts permit.

    Largest remainder: each class gives its exact quota rounded down, and those that lost most by it give one more.
    """
    mine = rng.permutation(mine)
    mine = mine[np.argsort(labels[mine], kind="stable")]
    _, counts = np.unique(labels[mine], return_counts=True)
    taken, lost = np.divmod(counts * total, len(mine))  # whole numbers: a quota of exactly 2 stays 2
    # Classes that lost equally much take turns at random; by label, the last classes would never be tested.
    order = rng.permutation(len(counts))
    taken[order[np.argsort(-lost[order], kind="stable")][: total - taken.sum()]] += 1
    rank = np.arange(len(mine)) - np.repeat(np.cumsum(counts) - counts, counts)
    is_taken = rank < np.repeat(taken, counts)
    return np.sort(mine[is_taken]), np.sort(mine[~is_taken])


def take_last(mine: Array, total: int, overlap: int) -> tuple[Array, Array]:
    """The last `total` of a client's examples, and the others without the `overlap` examples next to them."""
    if not total:
        return mine[:0], mine
    return mine[-total:], mine[: max(0, len(mine) - total - overlap)]


def check_rates(validation_rate: float, test_rate: float | None = None) -> None:
    if not 0 <= validation_rate < 1:
        raise SparsonaError(
            f"validation_rate is {validation_rate}", expected="0 or more, and less than 1", hint="0.1 is usual"
        )
    if test_rate is None:
        return
    if not 0 < test_rate < 1:
        raise SparsonaError(f"test_rate is {test_rate}", expected="between 0 and 1", hint="0.25 is usual")
    if validation_rate + test_rate >= 1:
        raise SparsonaError(
            f"validation_rate {validation_rate} and test_rate {test_rate} leave nothing to train on",
            expected="a sum below 1",
            hint="0.1 and 0.25 are usual",
        )


def nothing_to_score(client: int | str) -> SparsonaError:
    return SparsonaError(
        f"client {client} has test sequences, but no token in them that is scored",
        expected=f"targets of {NUM_SPECIAL} and up: 0 to {NUM_SPECIAL - 1} are padding, begin, end and unknown words",
        hint=f"number your tokens from {NUM_SPECIAL}, leave this client out, or give it more",
    )


def no_data(client: int | str, count: int, part: str = "") -> SparsonaError:
    return SparsonaError(
        f"client {client} has {'no' if not count else 'only one'} {part}example{'s' * (not count)}",
        expected="at least one to train and one to test on",
        hint="leave this client out, ask for fewer clients, or give it more; in Federation.from_clients, "
        '{"train": (x, y)} trains without being tested',
    )
