"""A data set becomes a federation: who gets which examples, and which of them each client is tested on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sparsona.core.errors import SparsonaError, unknown_name
from sparsona.core.seeds import Seeds
from sparsona.data import TESTS
from sparsona.data import arrays as checked
from sparsona.data.federation import Federation, Split
from sparsona.data.partition import partition as partition_labels
from sparsona.data.pool import Pool, View
from sparsona.data.splitting import carve, check_rates, no_data, round_to, stratum
from sparsona.data.testing import draw_by_shares, find_by_owner

Array = npt.NDArray[Any]


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
    afterwards. With `tokens`, rows of `x` are token numbers, and `y` may have one next token per position.

    `num_train`: the first so many rows are a published training set and the others a published test set. `owners`: one
    number per row, from 0, that says whose it is (partition "natural"). The other options are those of `share`.
    """
    x = checked.inputs(x, as_bytes=view is not None, as_tokens=tokens)
    y = checked.labels(y, as_tokens=tokens)
    checked.check_lengths(x, y)
    if not len(x):
        raise SparsonaError("no examples", expected="at least one row in x and y")
    num_classes = checked.count_classes(y, num_classes)
    if num_train is not None and not 0 < num_train < len(x):
        raise SparsonaError(
            f"num_train is {num_train} of {len(x)} examples", expected="some examples to train on and some to test on"
        )
    if owners is not None:
        owners = checked.labels(owners, "owners: ").numpy()
        if len(owners) != len(x):
            raise SparsonaError(f"{len(owners)} owners for {len(x)} examples", expected="one owner per example")
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
    min_size: int = 10,
    min_train: int = 0,
    min_test: int = 0,
    max_examples: int | None = None,
) -> Federation:
    """Share a pool out among clients.

    `partition` is one of the forms that `sparsona data` lists, and gives each client `min_size` examples or more;
    `clients` None: one for every owner (partition "natural"). `partition_seed`, if given, replaces `seed` here, so that
    runs with different seeds can share one partition and its splits. `test` is a row of `TESTS`. `data_rate`: only such
    a share of the examples (of the owners, for "natural") is used. `max_examples`: a client keeps at most so many
    of what it is dealt. `min_train`, `min_test`: owners with less are left out; other clients with less are an error.

    A client's parts have the same share of each class as nearly as counts permit. Each client has at least one training
    and one test example, and one for validation if it has three or more and `validation_rate` is not 0.
    """
    how, per_client = _test_of(test, pool, partition)
    check_rates(validation_rate, test_rate if how.startswith("split") else None)
    if not 0 < data_rate <= 1:
        raise SparsonaError(f"data_rate is {data_rate}", expected="more than 0 and at most 1", mend="1 uses everything")
    seeds = Seeds(seed if partition_seed is None else partition_seed)
    rows = np.arange(len(pool.y) if how == "split" or pool.num_train is None else pool.num_train)
    owners = pool.owners
    if partition.strip() == "natural" and owners is not None:

        def has_enough(count: int, tested: int) -> bool:
            count = count if max_examples is None else min(count, max_examples)
            num_test, num_validation = _cut_sizes(count, how == "natural", validation_rate, test_rate)
            tested = tested if how == "natural" else num_test
            return count - num_test - num_validation >= max(1, min_train) and tested >= max(1, min_test)

        rng = np.random.Generator(np.random.PCG64(seeds.shared("subset")))
        owners = _keep_owners(owners, rows, data_rate, has_enough, rng)
    elif data_rate < 1:
        rng = np.random.Generator(np.random.PCG64(seeds.shared("subset")))
        rows = np.sort(rng.choice(rows, max(1, round(len(rows) * data_rate)), replace=False))
    labels = stratum(pool.y)
    dealt = partition_labels(
        partition,
        pool.y[rows],
        clients,
        seeds.shared("partition"),
        min_size,
        owners=None if owners is None else owners[rows],
    )
    parts = [_limited(rows[mine], max_examples, seeds.of(index)) for index, mine in enumerate(dealt)]
    tests: list[Array | None] = [None] * len(parts)
    if how == "shares":
        assert pool.num_train is not None
        counts = np.stack([np.bincount(labels[mine], minlength=pool.num_classes) for mine in parts])
        found = draw_by_shares(counts, labels[pool.num_train :], per_client, seeds.shared("test"))
        tests = [pool.num_train + mine for mine in found]
    elif how == "natural":
        assert owners is not None
        assert pool.num_train is not None
        tests = list(find_by_owner(owners, pool.num_train, [int(owners[mine[0]]) for mine in parts]))
    splits = []
    for index, (mine, tested) in enumerate(zip(parts, tests, strict=True)):
        rng = np.random.Generator(np.random.PCG64(seeds.of(index).own("split")))
        is_apart = tested is not None
        if len(mine) < 2 - is_apart:
            raise no_data(index, len(mine))
        num_test, num_validation = _cut_sizes(len(mine), is_apart, validation_rate, test_rate)
        if tested is None:
            tested, mine = carve(mine, labels, num_test, rng)
        if not len(tested):
            raise no_data(index, 0, "test ")
        validation, train = carve(mine, labels, num_validation, rng)
        if len(train) < min_train or len(tested) < min_test:
            raise SparsonaError(
                f"client {index} has {len(train)} training and {len(tested)} test examples",
                expected=f"at least {min_train} and {min_test} (min_train, min_test)",
                mend="ask for fewer clients; partition natural leaves such clients out",
            )
        splits.append(Split(*map(torch.from_numpy, (train, validation, tested))))
    x, y = (torch.from_numpy(np.require(array, requirements=["W"])) for array in (pool.x, pool.y))
    tested_on = how if per_client is None else f"{how}:{per_client}"
    return Federation(x, y, tuple(splits), pool.num_classes, pool.name, pool.view, tested_on)


def _test_of(test: str, pool: Pool, partition: str) -> tuple[str, int | None]:
    """The row of `TESTS` that is meant, and its argument, checked against the data."""
    name, colon, argument = test.strip().partition(":")
    if name not in TESTS:
        raise unknown_name("way to test", name, (card.form for card in TESTS.values()))
    if colon and not (name == "shares" and argument.isascii() and argument.isdigit() and int(argument)):
        raise SparsonaError(
            f"test '{test}'", expected="shares:N with N a positive whole number", mend="write for example shares:100"
        )
    is_natural = partition.strip() == "natural"
    has_own_tests = False
    if pool.num_train is not None and pool.owners is not None:
        train, tests = pool.owners[: pool.num_train], pool.owners[pool.num_train :]
        has_own_tests = bool(np.intersect1d(train[train >= 0], tests).size)
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
        raise SparsonaError(f"test '{test}' for tokens", expected="one class per example", mend="test=split-train")
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


def _keep_owners(
    owners: Array, rows: Array, rate: float, has_enough: Callable[[int, int], bool], rng: np.random.Generator
) -> Array:
    """Owners with only a share of them left, and of those the ones with enough examples; the others become -1."""
    num_owners = int(owners.max()) + 1
    count = np.bincount(owners[rows][owners[rows] >= 0], minlength=num_owners)
    apart = owners[len(rows) :]
    tested = np.bincount(apart[apart >= 0], minlength=num_owners)
    present = np.flatnonzero(count)
    if rate < 1:
        present = np.sort(rng.choice(present, max(1, round(len(present) * rate)), replace=False))
    keeps = np.zeros(num_owners + 1, dtype=bool)  # the last one stands for -1
    for owner in present:
        keeps[owner] = has_enough(int(count[owner]), int(tested[owner]))
    return np.where(keeps[owners], owners, -1)


def _cut_sizes(count: int, is_apart: bool, validation_rate: float, test_rate: float) -> tuple[int, int]:
    """How many of a client's `count` examples it is tested on (none if its test data is apart) and decides by."""
    least = 2 - is_apart  # one to train on, and one to test on unless that is apart
    wants_validation = validation_rate > 0 and count > least
    num_test = 0 if is_apart else round_to(count * test_rate, True, count - 1 - wants_validation)
    return num_test, round_to(count * validation_rate, wants_validation, count - 1 - num_test)


def _limited(mine: Array, max_examples: int | None, seeds: Seeds) -> Array:
    if max_examples is None or len(mine) <= max_examples:
        return mine
    rng = np.random.Generator(np.random.PCG64(seeds.own("limit")))
    return np.sort(rng.choice(mine, max_examples, replace=False))
