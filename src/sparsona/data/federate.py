"""A data set becomes a federation: shared out among clients, and each client's examples split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch

from sparsona.core.arguments import whole
from sparsona.core.errors import SparsonaError, unknown_name
from sparsona.core.printable import warn_once
from sparsona.core.seeds import Seeds
from sparsona.data import validate
from sparsona.data.catalog import SOURCES
from sparsona.data.client_index import ClientIndex
from sparsona.data.federation import Federation
from sparsona.data.given import Columns, is_clients, name_classes, owner_names, read_pool
from sparsona.data.holdout import HELD_OUT, TESTS, Holdout, Published, Rows, choose_holdout, hold_out
from sparsona.data.names import clean_names, name_of
from sparsona.data.packing import is_several, pack, refuse_other
from sparsona.data.partition import parse
from sparsona.data.partition import partition as partition_labels
from sparsona.data.partition.by_owner import (
    NAMED,
    count_by_owner,
    describe_left_out,
    find_by_owner,
    keep_eligible,
    known_owners,
    number_owners,
)
from sparsona.data.pool import Array, Pool, View
from sparsona.data.split_plan import SplitPlan, check_arguments

MIN_SIZE = 10  # of clients that a partition makes up; owners may have as few examples as can be split


def federate(
    x: Any,
    y: Any = None,
    *,
    clients: int | None = None,
    partition: str | None = None,
    seed: int = SplitPlan.seed,
    num_classes: int | None = None,
    name: str = "arrays",
    num_train: int | None = None,
    owners: Any = None,
    view: View | None = None,
    tokens: bool = False,
    task: str = "auto",
    target: str | None = None,
    inputs: str | Sequence[str] | None = None,
    owner: str | None = None,
    class_names: Sequence[str] | None = None,
    **options: Any,
) -> Federation:
    """Share a data set out among clients and split each client's examples into training, validation and test examples.

    Args:
        x: One row per example, a numpy array or torch tensor. Rows keep their shape. Whole numbers become float32 as
            they are: scaling them (say, by 255) is the caller's job, unless there is a `view`. Float32 inputs are
            shared with the caller, who must not change them afterwards. A tuple of arrays, or a dict of them by name,
            are several inputs, passed as `model(*x)` or `model(**x)`: real numbers as float32, whole ones as int64. Or,
            without `y`: a torch Dataset or DataLoader, a Hugging Face dataset or a data frame; a dict {"train": ...,
            "test": ...} of these, which is a published split; or a dict of clients by name, as for
            `Federation.from_clients`.
        y: One class per example, whole numbers from 0, or texts, which become classes with these names, sorted. Numbers
            with a fraction, (N,) or (N, outputs), are targets of a regression. Rows of 0.0 and 1.0, (N, labels), say
            which labels an example has. See `task`.
        clients: The number of clients; None: one for every owner (`partition="natural"`) or as many as the file has.
        partition: How the examples are shared out, one of the forms that `sparsona data` lists. None: "natural" where
            owners are given, else dirichlet:0.3.
        seed: Decides all that is random.
        num_classes: The number of classes; None: as many as there are labels.
        name: What the data set is called in results.
        num_train: The number of rows, the first ones, that are a published training set; the others are its test set.
        owners: Whose each row is: names, or whole numbers from 0; "" or below 0: unknown.
        view: How stored images of bytes become a model's inputs.
        tokens: Rows of `x` are token numbers, and `y` may have the same shape: the next token at each position. Then 0
            is padding, which is neither trained nor scored, and 1, 2 and 3 are begin, end and unknown words, which are
            not scored. The vocabulary begins at 4, and `num_classes` is its end.
        task: What `y` is where its values do not tell: "classification"; "binary", 0 or 1, for a model with one logit;
            "multilabel", a column of 0 and 1 for each label; "regression", also of whole numbers.
        target: Of a table, the column of labels; None: "label", "labels", "target" or "y".
        inputs: Of a table, the column of inputs, or columns of numbers; None: all others.
        owner: Of a table, the column that says whose each row is.
        class_names: The names of classes 0, 1, ...
        **options: The other options of `SplitPlan`: `test`, `validation_rate`, `min_size` and so on.

    Returns:
        The federation, to be handed to `sparsona.train`.

    Raises:
        SparsonaError: If the arrays, the partition or the split are not possible.

    Example:
        >>> import numpy as np
        >>> import sparsona as sp
        >>> x, y = np.random.default_rng(0).random((200, 4), dtype=np.float32), np.arange(200) % 4
        >>> federation = sp.federate(x, y, clients=5, partition="iid", seed=0)
        >>> federation.num_clients, federation.sizes()[0].tolist()
        (5, [26, 4, 10])
    """
    check_arguments(seed, num_classes, name, task, tokens, view)
    clients, num_train = whole("clients", clients, -(10**9), none=True), whole("num_train", num_train, none=True)
    if unknown := sorted(set(options) - {one.name for one in fields(SplitPlan)}):
        raise unknown_name("option of federate", unknown[0], {one.name for one in fields(SplitPlan)})
    if y is None and is_clients(x):
        given = {"clients": clients, "partition": partition, "num_train": num_train, "owners": owners, "owner": owner}
        if both := [key for key, value in given.items() if value is not None]:
            raise SparsonaError(
                f"'{both[0]}' together with a dict of clients",
                expected="one of the two: a dict says already who has what",
                hint=f"leave '{both[0]}' out",
            )
        if unknown := sorted(set(options) - {"validation_rate", "test_rate"}):
            raise unknown_name("option for a dict of clients", unknown[0], ("validation_rate", "test_rate"))
        return Federation.from_clients(
            x,
            seed=seed,
            num_classes=num_classes,
            name=name,
            view=view,
            tokens=tokens,
            target=target,
            inputs=inputs,
            class_names=class_names,
            task=task,
            **options,
        )
    if isinstance(owners, str | bytes):
        raise SparsonaError(
            f"owners = {owners!r}, a text",
            expected="whose each row is: a name or a number for each",
            hint=f"owner={owners!r} takes that column of a table",
        )
    if owner is not None and owners is not None:
        raise SparsonaError(
            f"owner={owner!r} together with owners=",
            expected="one of the two: each says whose each row is",
            hint="leave one of them out; inputs=[...] names the columns that are inputs",
        )
    table = read_pool(x, y, Columns(target, inputs, owner, owners), seed)
    if table.num_train is not None and num_train is None:
        num_train = table.num_train
    if owners is None:
        owners = table.owners
    if view is None and table.is_image:
        view = View()  # bytes are stored as such, and divided by 255
    classes = table.class_names if class_names is None else clean_names(class_names, "classes")
    of_owners, whose, known = None, None, None
    if owners is not None:
        owners, of_owners = owner_names(owners)
        whose = owners, of_owners
    (y,), classes = name_classes([table.y], [""], classes, whose)
    packing = None
    if is_several(table.x):
        x, packing = pack(table.x, owners=whose)
        refuse_other(packing, view, tokens)
    else:
        x = validate.check_inputs(
            table.x, as_bytes=view is not None, as_tokens=tokens, owners=whose, columns=table.columns
        )
    requested, task = task, validate.find_task([y], task)
    y = validate.check_targets(y, as_tokens=tokens, task=requested, owners=whose)
    validate.check_lengths(x, y)
    if not len(x):
        raise SparsonaError("no examples", expected="at least one row in x and y")
    num_classes = validate.count_outputs(y, num_classes, x, task, classes, requested)
    if num_train is not None and not 0 < num_train < len(x):
        raise SparsonaError(
            f"num_train is {num_train} of {len(x)} examples", expected="some examples to train on and some to test on"
        )
    if owners is not None:
        if len(owners) != len(x):
            raise SparsonaError(f"{len(owners)} owners for {len(x)} examples", expected="one owner per example")
        known = None if of_owners else known_owners(owners)
        owners = number_owners(owners)
    pool = Pool(
        name,
        x.numpy(),
        y.numpy(),
        num_classes,
        num_train,
        owners,
        view or View(),
        task=task,
        packing=packing,
        owner_names=of_owners,
        class_names=classes,
        owner_numbers=known,
    )
    if partition is None and owners is None and clients is None:
        raise SparsonaError(
            "neither owners nor a number of clients",
            expected="whose each example is, or how many clients to draw from all examples",
            hint="owners= takes a name or a number for each example, owner= a column of a table; clients=20 draws 20",
        )
    if partition is None:
        partition = SplitPlan.partition if owners is None else "natural"
    return share_out(pool, SplitPlan(clients=clients, partition=partition, seed=seed, **options))


def share_out(pool: Pool, plan: SplitPlan) -> Federation:
    """Share a pool out among clients.

    A client's parts have the same share of each class as nearly as counts permit. Each client has at least one training
    and one test example, and one for validation if it has three or more and `validation_rate` is not 0. Where examples
    overlap, a client's parts are blocks in order, without the examples between them that overlap with both.
    """
    validate.warn_of_one_class(pool.name, pool.task, pool.y, pool.num_classes)
    if pool.packing is None:
        validate.warn_of_scale(pool.name, pool.x)
    partition, _ = parse(plan.partition)
    if partition.name == "natural" and pool.owners is None and pool.name not in SOURCES:
        raise SparsonaError(
            f"partition natural, but '{pool.name}' does not say whose its examples are",
            expected="an owner for each example, a name or a number",
            hint="add an array `owners` to the npz file, or pass owners= in Python; or use another partition",
        )
    holdout = choose_holdout(plan, partition, pool)
    if not 0 < plan.data_rate <= 1:
        raise SparsonaError(
            f"data_rate is {plan.data_rate}", expected="more than 0 and at most 1", hint="1 uses everything"
        )
    if plan.max_examples is not None and plan.max_examples < holdout.min_size:
        raise SparsonaError(
            f"max_examples is {plan.max_examples}",
            expected=f"{holdout.min_size} or more: something to train on"
            + " and to test on" * (not holdout.is_published),
        )
    seeds = Seeds(plan.seed if plan.partition_seed is None else plan.partition_seed)
    end = holdout.num_shared(pool)
    owners: list[int] = []
    left_out: dict[str, int] = {}
    if partition.name == "natural" and pool.owners is not None:
        eligible, lost = _find_eligible(pool, plan, holdout, seeds)
        left_out = {missing: len(those) for missing, those in lost.items()}
        if left_out:
            names_of = pool.owner_names or ()
            called = {why: [names_of[one] for one in those[:NAMED]] for why, those in lost.items() if names_of}
            warn_once(describe_left_out(left_out, f"{pool.name}: owners left out: ", called))
        # By one example of each: which owners are drawn depends on how many there are, not on what they have.
        drawn = partition_labels(plan.partition, eligible, plan.clients, seeds.shared("partition"), 0, owners=eligible)
        owners = [int(eligible[one[0]]) for one in drawn]
        dealt = find_by_owner(pool.owners[:end], owners)
    else:
        rows = _draw(np.arange(end), plan.data_rate, seeds)
        labels = pool.y[:end] if len(rows) == end else pool.y[rows]
        min_size = MIN_SIZE if plan.min_size is None else plan.min_size
        parts = partition_labels(plan.partition, labels, plan.clients, seeds.shared("partition"), min_size)
        dealt = [rows[mine] for mine in parts]
    names = None if pool.owner_names is None or not owners else tuple(pool.owner_names[one] for one in owners)
    numbers = None if pool.owner_numbers is None or not owners else tuple(pool.owner_numbers[owners].tolist())
    dealt = [_limit(mine, plan.max_examples, seeds.of(client)) for client, mine in enumerate(dealt)]
    draw = TESTS[holdout.name].draw
    tests = None if draw is None else draw(Published(pool, end, dealt, owners, holdout.per_client, seeds))
    splits = []
    for client, mine in enumerate(dealt):
        rng = np.random.Generator(np.random.PCG64(seeds.of(client).own("split")))
        split = holdout.split(name_of(names, client), mine, None if tests is None else tests[client], pool.y, rng)
        num_train, num_test = len(split[0]) + len(split[1]), len(split[2])
        if num_train < plan.min_train or num_test < plan.min_test:
            raise SparsonaError(
                f"client {name_of(names, client)} has {num_train} training and {num_test} test examples",
                expected=f"at least {plan.min_train} and {plan.min_test} (min_train, min_test)",
                hint="ask for fewer clients; partition natural leaves such clients out",
            )
        if plan.holdout_rate:
            rng = np.random.Generator(np.random.PCG64(seeds.of(client).own("holdout")))
            split = hold_out(
                name_of(names, client), split, pool.y, (plan.validation_rate, plan.holdout_rate), pool.overlap, rng
            )
        splits.append(split)
    x, y, splits = _compact(pool, splits)
    tensors = [torch.from_numpy(np.require(array, requirements=["W"])) for array in (x, y)]
    return Federation(
        tensors[0],
        tensors[1],
        ClientIndex.of(splits),
        pool.num_classes,
        pool.name,
        pool.view,
        HELD_OUT if plan.holdout_rate else holdout.tested_on,
        left_out,
        pool.task,
        pool.packing,
        client_names=names,
        class_names=pool.class_names,
        client_owners=numbers,
        drawn_by="" if partition.finds_clients else plan.partition,
    )


def _find_eligible(pool: Pool, plan: SplitPlan, holdout: Holdout, seeds: Seeds) -> tuple[Array, dict[str, Array]]:
    """The owners with enough examples to be clients, and the others, by what they lack."""
    assert pool.owners is not None
    end = holdout.num_shared(pool)
    num_owners = int(pool.owners.max()) + 1
    counts = count_by_owner(pool.owners[:end], num_owners)
    owners = _draw(np.flatnonzero(counts), plan.data_rate, seeds)
    num_dealt, num_examples, num_known = counts[owners], end, counts.sum()
    num_kept = num_dealt if plan.max_examples is None else np.minimum(num_dealt, plan.max_examples)
    if holdout.is_published:
        counts = count_by_owner(pool.owners[end:], num_owners)
        num_train, num_test = num_kept, counts[owners]
        num_examples, num_known = len(pool.owners), num_known + counts.sum()
    else:
        num_test = np.array([holdout.sizes(count)[0] for count in num_kept.tolist()], dtype=np.int64)
        num_train = num_kept - num_test - holdout.overlap
    if num_unknown := int(num_examples - num_known):
        warn_once(f"{pool.name}: {num_unknown:,} of {num_examples:,} examples have no owner and belong to no client")
    min_size = max(plan.min_size or 0, holdout.min_size)
    too_few = f"fewer than {min_size} examples, too few to be split"
    if min_size > holdout.min_size:
        too_few = f"fewer than {min_size} examples (min_size)"
    has = {too_few: num_dealt >= min_size, "no published test examples": num_test > 0}
    if pool.y.ndim == 2:
        where = slice(end, None) if holdout.is_published else slice(end)
        num_scored = count_by_owner(pool.owners[where], num_owners, pool.y[where])[owners]
        has["no test sequence with a token that is scored"] = num_scored > 0
        num_test = num_test if holdout.is_published else np.minimum(num_test, num_scored)
    has[f"fewer than {plan.min_train} to train on (min_train)"] = num_train >= plan.min_train
    has[f"fewer than {plan.min_test} to test on (min_test)"] = num_test >= plan.min_test
    return keep_eligible(owners, has, plan.clients)


def _draw(what: Array, rate: float, seeds: Seeds) -> Array:
    """A share of rows or owners, rounded down; the millionth is for 0.29 * 100, which is less than 29."""
    if rate == 1 or not len(what):
        return what
    rng = np.random.Generator(np.random.PCG64(seeds.shared("subset")))
    return np.sort(rng.choice(what, max(1, int(len(what) * rate + 1e-6)), replace=False))


def _limit(mine: Array, max_examples: int | None, seeds: Seeds) -> Array:
    if max_examples is None or len(mine) <= max_examples:
        return mine
    rng = np.random.Generator(np.random.PCG64(seeds.own("limit")))
    return np.sort(rng.choice(mine, max_examples, replace=False))


def _compact(pool: Pool, splits: list[Rows]) -> tuple[Array, Array, list[Rows]]:
    """Only the rows that clients use, if these are less than half: less is stored, hashed and handed to workers."""
    used = np.unique(np.concatenate([part for split in splits for part in split]))
    if 2 * len(used) >= len(pool.y):
        return pool.x, pool.y, splits
    moved = [(np.searchsorted(used, a), np.searchsorted(used, b), np.searchsorted(used, c)) for a, b, c in splits]
    return pool.x[used], pool.y[used], moved
