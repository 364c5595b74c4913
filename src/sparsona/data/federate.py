"""A data set becomes a federation: who gets which examples, and which of them each client is tested on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sparsona.core.errors import SparsonaError, unknown_name
from sparsona.core.seeds import Seeds
from sparsona.data import TESTS
from sparsona.data import validate as checked
from sparsona.data.client_index import Splits
from sparsona.data.federation import Federation
from sparsona.data.holdout import carve, check_rates, cut_off, no_data, nothing_to_score, round_to, stratum
from sparsona.data.partition import partition as partition_labels
from sparsona.data.partition.by_owner import asks, count_by_owner, find_by_owner, keep_able, number_owners
from sparsona.data.pool import Pool, View
from sparsona.data.testing import draw_by_shares

Array = npt.NDArray[Any]
Rows = tuple[Array, Array, Array]  # to train on, to decide by and to test on
MIN_SIZE = 10  # of clients that are made up; people may have as little as can be split


def federate(
    x: Any,
    y: Any,
    *,
    clients: int | None,
    partition: str = "dirichlet:0.3",
    seed: int = 0,
    num_classes: int | None = None,
    name: str = "arrays",
    num_train: int | None = None,
    owners: Any = None,
    view: View | None = None,
    tokens: bool = False,
    **options: Any,
) -> Federation:
    """Share a data set out among clients, then split each client's examples into train, validation and test.

    `x` and `y` are numpy arrays or torch tensors, one row and one whole number from 0 per example. Rows keep their
    shape. Whole-number inputs become float32 as they are: scaling them (say, by 255) is the caller's job, unless `view`
    says how images of bytes are to be seen; float32 inputs are shared with the caller, who must not change them
    afterwards.

    With `tokens`, rows of `x` are token numbers, and `y` may be of the same shape: the next token at each position.
    Numbers 0 to 3 are then reserved: 0 is padding, which is neither trained nor scored, and 1, 2 and 3 are begin, end
    and unknown words, which are not scored. One's own vocabulary begins at 4, and `num_classes` is its end.

    Numbers with a fraction in `y`, (N,) or (N, outputs), are targets of a regression: the loss is the squared error.

    `num_train`: the first so many rows are a published training set and the others a published test set. `owners`: one
    number per row, from 0, that says whose it is (partition "natural"); below 0: nobody's. The other options are those
    of `share`.
    """
    x = checked.inputs(x, as_bytes=view is not None, as_tokens=tokens)
    y = checked.targets(y, as_tokens=tokens)
    checked.check_lengths(x, y)
    if not len(x):
        raise SparsonaError("no examples", expected="at least one row in x and y")
    num_classes = checked.count_outputs(y, num_classes, x)
    if num_train is not None and not 0 < num_train < len(x):
        raise SparsonaError(
            f"num_train is {num_train} of {len(x)} examples", expected="some examples to train on and some to test on"
        )
    if owners is not None:
        owners = checked.labels(owners, "owners: ").numpy()
        if len(owners) != len(x):
            raise SparsonaError(f"{len(owners)} owners for {len(x)} examples", expected="one owner per example")
        owners = number_owners(owners)
    pool = Pool(name, x.numpy(), y.numpy(), num_classes, num_train, owners, view or View())
    return share(pool, clients=clients, partition=partition, seed=seed, **options)


def share(
    pool: Pool,
    *,
    clients: int | None,
    partition: str = "dirichlet:0.3",
    seed: int = 0,
    partition_seed: int | None = None,
    test: str = "auto",
    validation_rate: float = 0.1,
    test_rate: float = 0.25,
    data_rate: float = 1.0,
    min_size: int | None = None,
    min_train: int = 0,
    min_test: int = 0,
    max_examples: int | None = None,
) -> Federation:
    """Share a pool out among clients.

    `partition` is one of the forms that `sparsona data` lists, and gives each client `min_size` examples or more (10;
    "natural": as many as can be split); `clients` None: one for every owner (partition "natural"). `partition_seed`, if
    given, replaces `seed` here, so that runs with different seeds can share one partition and its splits. `test` is a
    row of `TESTS`. `data_rate`: only such a share of the examples (of the owners, for "natural") is used, rounded down.
    `max_examples`: a client keeps at most so many of what it is dealt. `min_train` counts what a client trains and
    decides on, `min_test` what it is tested on: owners with less are left out, and `Federation.left_out` tells how
    many; other clients with less are an error.

    A client's parts have the same share of each class as nearly as counts permit. Each client has at least one training
    and one test example, and one for validation if it has three or more and `validation_rate` is not 0. Where examples
    overlap, a client's parts are blocks in order, without the examples between them that know of both.
    """
    partition = partition.strip()
    how, per_client = _test_of(test, pool, partition)
    check_rates(validation_rate, test_rate if how.startswith("split") else None)
    if not 0 < data_rate <= 1:
        raise SparsonaError(f"data_rate is {data_rate}", expected="more than 0 and at most 1", mend="1 uses everything")
    cut = _Cut(how in ("shares", "natural"), validation_rate, test_rate, pool.overlap)
    if max_examples is not None and max_examples < cut.least:
        raise SparsonaError(
            f"max_examples is {max_examples}",
            expected=f"{cut.least} or more: something to train on{' and to test on' * (not cut.is_apart)}",
        )
    seeds = Seeds(seed if partition_seed is None else partition_seed)
    end = len(pool.y) if how == "split" or pool.num_train is None else pool.num_train
    left_out: dict[str, int] = {}
    tests: list[Array] = []
    if partition == "natural" and pool.owners is not None:
        limits = (min_size or 0, min_train, min_test, max_examples)
        able, left_out = _find_able(pool, end, cut, data_rate, clients, *limits, seeds)
        # By one example of each: which people are drawn depends on how many there are, not on what they have.
        drawn = partition_labels(partition, able, clients, seeds.shared("partition"), 0, owners=able)
        chosen = [int(able[one[0]]) for one in drawn]
        dealt = find_by_owner(pool.owners[:end], chosen)
        tests = find_by_owner(pool.owners, chosen, end) if cut.is_apart else []
    else:
        rows = _draw(np.arange(end), data_rate, seeds)
        mixed = pool.y[:end] if len(rows) == end else pool.y[rows]
        min_size = MIN_SIZE if min_size is None else min_size
        parts = partition_labels(partition, mixed, clients, seeds.shared("partition"), min_size)
        dealt = [rows[mine] for mine in parts]
    dealt = [_limited(mine, max_examples, seeds.of(index)) for index, mine in enumerate(dealt)]
    labels = stratum(pool.y)
    if how == "shares":
        counts = np.stack([np.bincount(labels[mine], minlength=pool.num_classes) for mine in dealt])
        tests = [end + mine for mine in draw_by_shares(counts, labels[end:], per_client, seeds.shared("test"))]
    splits = []
    for index, mine in enumerate(dealt):
        rng = np.random.Generator(np.random.PCG64(seeds.of(index).own("split")))
        if len(mine) < 2 - cut.is_apart:
            raise no_data(index, len(mine))
        train, validation, tested = _split(index, mine, tests[index] if tests else None, pool.y, cut, rng)
        if not len(tested):
            raise no_data(index, 0, "test ")
        if pool.y.ndim == 2 and not asks(pool.y[tested]).any():
            raise nothing_to_score(index)
        if len(train) + len(validation) < min_train or len(tested) < min_test:
            raise SparsonaError(
                f"client {index} has {len(train) + len(validation)} training and {len(tested)} test examples",
                expected=f"at least {min_train} and {min_test} (min_train, min_test)",
                mend="ask for fewer clients; partition natural leaves such clients out",
            )
        splits.append((train, validation, tested))
    x, y, splits = _compact(pool, splits)
    tested_on = how if per_client is None else f"{how}:{per_client}"
    tensors = [torch.from_numpy(np.require(array, requirements=["W"])) for array in (x, y)]
    return Federation(
        tensors[0], tensors[1], Splits.of(splits), pool.num_classes, pool.name, pool.view, tested_on, left_out
    )


@dataclass(frozen=True)
class _Cut:
    """How a client's examples are divided; `is_apart`: what it is tested on is not among them."""

    is_apart: bool
    validation_rate: float
    test_rate: float
    overlap: int

    @property
    def least(self) -> int:
        """One to train on, and, unless that is apart, one to test on with what overlaps in between."""
        return 1 if self.is_apart else 2 + self.overlap

    def sizes(self, count: int) -> tuple[int, int]:
        """How many of `count` examples a client is tested on and decides by."""
        num_to_spare = count - self.least - self.overlap
        wants_validation = self.validation_rate > 0 and num_to_spare > 0
        count -= self.overlap * (wants_validation + (not self.is_apart))
        num_test = 0 if self.is_apart else round_to(count * self.test_rate, True, count - 1 - wants_validation)
        if not wants_validation:
            return num_test, 0
        return num_test, round_to(count * self.validation_rate, True, count - 1 - num_test)


def _split(client: int, mine: Array, tested: Array | None, y: Array, cut: _Cut, rng: np.random.Generator) -> Rows:
    """Those to train on, to decide by and to test on; `tested` if the last are known already."""
    num_test, num_validation = cut.sizes(len(mine))
    if cut.overlap:
        if tested is None:
            tested, mine = cut_off(mine, num_test, cut.overlap)
        validation, train = cut_off(mine, num_validation, cut.overlap)
        return train, validation, tested
    labels = stratum(y)
    if tested is None:
        able = mine if y.ndim == 1 else mine[asks(y[mine])]  # a sequence in which nothing is scored tests nothing
        if not len(able):
            raise nothing_to_score(client)
        tested, _ = carve(able, labels, min(num_test, len(able)), rng)
        mine = np.setdiff1d(mine, tested, assume_unique=True)
    validation, train = carve(mine, labels, num_validation, rng)
    return train, validation, tested


def _find_able(
    pool: Pool,
    end: int,
    cut: _Cut,
    data_rate: float,
    clients: int | None,
    min_size: int,
    min_train: int,
    min_test: int,
    max_examples: int | None,
    seeds: Seeds,
) -> tuple[Array, dict[str, int]]:
    """The people among the first `end` examples who have enough, and how many have not, by what they lack."""
    assert pool.owners is not None
    num_owners = int(pool.owners.max()) + 1
    counts = count_by_owner(pool.owners[:end], num_owners)
    people = _draw(np.flatnonzero(counts), data_rate, seeds)
    num_dealt = counts[people]
    num_kept = num_dealt if max_examples is None else np.minimum(num_dealt, max_examples)
    if cut.is_apart:
        num_train, num_test = num_kept, count_by_owner(pool.owners[end:], num_owners)[people]
    else:
        num_test = np.array([cut.sizes(count)[0] for count in num_kept.tolist()], dtype=np.int64)
        num_train = num_kept - num_test - cut.overlap
    too_few = f"fewer than {cut.least} examples, too few to be split"
    if min_size > cut.least:
        too_few = f"fewer than {min_size} examples (min_size)"
    has = {
        too_few: num_dealt >= max(min_size, cut.least),
        "nothing published to test on": num_test > 0,
    }
    if pool.y.ndim == 2:
        where = slice(end, None) if cut.is_apart else slice(end)
        num_scored = count_by_owner(pool.owners[where], num_owners, pool.y[where])[people]
        has["no sequence to test on in which a token is scored"] = num_scored > 0
        num_test = num_test if cut.is_apart else np.minimum(num_test, num_scored)
    has[f"fewer than {min_train} to train on (min_train)"] = num_train >= min_train
    has[f"fewer than {min_test} to test on (min_test)"] = num_test >= min_test
    return keep_able(people, has, clients)


def _test_of(test: str, pool: Pool, partition: str) -> tuple[str, int | None]:
    """The row of `TESTS` that is meant, and its argument, checked against the data."""
    name, colon, argument = test.strip().partition(":")
    if name not in TESTS:
        raise unknown_name("way to test", name, (card.form for card in TESTS.values()))
    if colon:
        most = len(pool.y) - (pool.num_train or 0)
        is_number = name == "shares" and argument.isascii() and argument.isdigit() and len(argument) < 10
        if not (is_number and 0 < int(argument) <= most):
            raise SparsonaError(
                f"test '{test[:40]}'",
                expected=f"shares:N with N a positive whole number, at most {most:,}",
                mend="write for example shares:100",
            )
    if pool.overlap and partition != "natural":
        raise SparsonaError(
            f"partition '{partition}' of {pool.name}, whose examples overlap",
            expected=f"natural: an example and the {pool.overlap} after it have text in common, and what one client is "
            "tested on another would train on",
            mend="--partition natural, or data whose examples are apart (shakespeare as a text file)",
        )
    is_natural = partition == "natural"
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
            mend="leave test out",
        )
    elif name == "shares" and pool.y.ndim != 1:
        raise SparsonaError(
            f"test '{test}' for tokens or numbers", expected="one class per example", mend="test=split-train"
        )
    elif name == "natural" and not (is_natural and has_own_tests):
        raise SparsonaError(
            f"test 'natural' for {pool.name} with partition '{partition}'",
            expected="partition natural, and a published test set with examples of the same owners",
            mend="leave test out",
        )
    if name != "shares" and partition.startswith("pathological-refill"):
        raise SparsonaError(
            f"partition '{partition}' with test '{name}'",
            expected="a published test set: clients share examples, and one would be tested on what another trains on",
            mend="use data that has one (test=shares), or pathological:C, which shares no example",
        )
    return name, int(argument) if argument else None


def _has_own_tests(pool: Pool) -> bool:
    """Whether somebody has published examples to train and to test on."""
    if pool.num_train is None or pool.owners is None:
        return False
    num_owners = int(pool.owners.max()) + 1
    train, test = (
        count_by_owner(part, num_owners) for part in (pool.owners[: pool.num_train], pool.owners[pool.num_train :])
    )
    return bool(((train > 0) & (test > 0)).any())


def _draw(what: Array, rate: float, seeds: Seeds) -> Array:
    """A share of rows or people, rounded down; the millionth is for 0.29 * 100, which is less than 29."""
    if rate == 1 or not len(what):
        return what
    rng = np.random.Generator(np.random.PCG64(seeds.shared("subset")))
    return np.sort(rng.choice(what, max(1, int(len(what) * rate + 1e-6)), replace=False))


def _limited(mine: Array, max_examples: int | None, seeds: Seeds) -> Array:
    if max_examples is None or len(mine) <= max_examples:
        return mine
    rng = np.random.Generator(np.random.PCG64(seeds.own("limit")))
    return np.sort(rng.choice(mine, max_examples, replace=False))


def _compact(pool: Pool, splits: list[Rows]) -> tuple[Array, Array, list[Rows]]:
    """Only the rows that somebody uses, if they are the fewer: what is read, hashed and saved follows the clients."""
    used = np.unique(np.concatenate([part for split in splits for part in split]))
    if 2 * len(used) >= len(pool.y):
        return pool.x, pool.y, splits
    moved = [(np.searchsorted(used, a), np.searchsorted(used, b), np.searchsorted(used, c)) for a, b, c in splits]
    return pool.x[used], pool.y[used], moved
