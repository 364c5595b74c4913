"""Partitions by class, and the even one: how much of each class each client gets, and which examples."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from sparsona.core.errors import SparsonaError
from sparsona.data.partition.kind import CONCENTRATION, Partition, PartitionInput, count
from sparsona.data.pool import Array, Indices

Floats = npt.NDArray[np.float64]

MAX_TRIES, MAX_DRAWS = 5_000, 50_000  # of sizes until every client has enough; impossible requests end in seconds
MAX_SHARES = 10_000_000  # of those drawn for all classes and clients at once


def cut_shards(inputs: PartitionInput, per_client: int) -> list[Indices]:
    """McMahan et al. (2017): sorted by label, cut into C*K shards, C of them to each client at random."""
    labels, num_clients, rng = inputs.labels, inputs.num, inputs.rng
    num_shards = per_client * num_clients
    size = len(labels) // num_shards
    if size * per_client < inputs.min_size or not size:
        raise SparsonaError(
            f"shards:{per_client} for {num_clients} clients cuts {len(labels)} examples into {num_shards} shards "
            f"of {size}, {size * per_client} for some clients",
            expected=f"shards of at least 1 example, and at least {inputs.min_size} examples per client (min_size)",
            hint="use a smaller C, fewer clients or a smaller min_size",
        )
    shards = np.array_split(np.argsort(labels, kind="stable"), num_shards)
    dealt = rng.permutation(num_shards).reshape(num_clients, per_client)
    return [np.concatenate([shards[shard] for shard in hand]) for hand in dealt]


def share_dirichlet(inputs: PartitionInput, concentration: float) -> list[Indices]:
    """FedML's "hetero": class after class shared out by Dir(A) among the clients that have less than n/K so far."""
    labels, num_clients, rng = inputs.labels, inputs.num, inputs.rng
    members = _by_class(labels)
    class_sizes = [len(indices) for indices in members]
    counts = _draw_until_enough(
        lambda: _dirichlet_counts(class_sizes, num_clients, concentration, rng),
        f"dirichlet:{concentration:g}",
        min(max(100, MAX_DRAWS // len(members)), MAX_TRIES),
        inputs.min_size,
        "use a larger A, fewer clients or a smaller min_size; dirichlet-equal:A has equal sizes by design",
    )
    return _deal(members, counts, rng)


def share_dirichlet_uncapped(inputs: PartitionInput, concentration: float) -> list[Indices]:
    """pFedGate: each class shared out by Dir(A) among all clients, each example going its own way (multinomial)."""
    labels, num_clients, rng = inputs.labels, inputs.num, inputs.rng
    members = _by_class(labels)
    class_sizes = [len(indices) for indices in members]
    concentrations = np.full(num_clients, concentration)
    counts = _draw_until_enough(
        lambda: rng.multinomial(class_sizes, rng.dirichlet(concentrations, size=len(members))),
        f"dirichlet-uncapped:{concentration:g}",
        min(max(10, MAX_SHARES // (len(members) * num_clients)), MAX_TRIES),
        inputs.min_size,
        "use a larger A, fewer clients or a smaller min_size; dirichlet:A evens sizes out, dirichlet-equal:A more so",
    )
    return _deal(members, counts, rng)


def _draw_until_enough(draw: Callable[[], Indices], spec: str, tries: int, min_size: int, hint: str) -> Indices:
    """The first draw of counts (classes, clients) in which every client has enough.

    Counts are drawn first and examples only once they will do: a try costs little.
    """
    best = -1
    for _ in range(tries):
        counts = draw()
        smallest = int(counts.sum(axis=0).min())
        if smallest >= min_size:
            return counts
        best = max(best, smallest)
    raise SparsonaError(
        f"no draw of {spec} in {tries:,} gave each of {counts.shape[1]} clients "
        f"{min_size} examples; the best left a client with {best}",
        expected=f"a partition with at least {min_size} examples per client (min_size)",
        hint=hint,
    )


def _deal(members: list[Indices], counts: Indices, rng: np.random.Generator) -> list[Indices]:
    """The examples of each class, shuffled and dealt out by count (classes, clients)."""
    pieces = [
        np.split(rng.permutation(indices), np.cumsum(row)[:-1]) for indices, row in zip(members, counts, strict=True)
    ]
    return [np.concatenate(part) for part in zip(*pieces, strict=True)]


def _dirichlet_counts(
    class_sizes: list[int], num_clients: int, concentration: float, rng: np.random.Generator
) -> Indices:
    """How many examples of each class (row) each client (column) gets."""
    cap = sum(class_sizes) / num_clients
    counts = np.zeros((len(class_sizes), num_clients), dtype=np.int64)
    sizes = np.zeros(num_clients, dtype=np.int64)
    for row, class_size in zip(counts, class_sizes, strict=True):
        # While examples are left some client is below the mean. A Dirichlet draw with some shares set to zero and the
        # rest renormalised is a Dirichlet draw over the rest: drawing only those can neither divide by zero nor hand
        # a rounding leftover to a full client.
        is_open = np.flatnonzero(sizes < cap)
        shares = rng.dirichlet(np.full(len(is_open), concentration))
        ends = (np.cumsum(shares) * class_size).astype(np.int64)
        ends[-1] = class_size  # the last open client takes what rounding left
        ends[1:] -= ends[:-1].copy()
        row[is_open] = ends
        sizes += row
    return counts


def share_in_groups(inputs: PartitionInput, num_groups: int, concentration: float) -> list[Indices]:
    """DisPFL: equal sizes; examples drawn one by one, by class priors from Dir(A), for a client that still lacks some.

    "dir" is as many groups as clients. In its section 4.4 ("my_part") a group's clients, which follow each other,
    share one prior. The last clients to be filled take the classes that are left, whatever their prior.
    """
    labels, num_clients, rng = inputs.labels, inputs.num, inputs.rng
    if num_groups > num_clients:
        raise SparsonaError(
            f"{num_groups} groups of {num_clients} clients",
            expected="at least one client per group",
            hint=f"use at most {num_clients} groups, or more clients",
        )
    pools = [rng.permutation(indices).tolist() for indices in _by_class(labels)]
    priors = rng.dirichlet(np.full(len(pools), concentration), size=num_groups)
    priors = priors[np.arange(num_clients) * num_groups // num_clients]
    parts: list[list[int]] = [[] for _ in range(num_clients)]
    bounds = _cumulative(priors, pools)
    for client, where in _take_turns(len(labels), num_clients, rng):
        label = bisect_right(bounds[client], where)
        parts[client].append(pools[label].pop())
        if not pools[label]:
            bounds = _cumulative(priors, pools)
    return [np.array(part, dtype=np.int64) for part in parts]


def _take_turns(count: int, num_clients: int, rng: np.random.Generator) -> Iterator[tuple[int, float]]:
    """`count` times a client at random, n/K times each, and a random number from 0 to 1 for its own use."""
    lacks = [size for _, size in _equal_sizes(count, num_clients)]
    unfilled = [client for client, size in enumerate(lacks) if size]
    # Plain lists: one scalar at a time, they are ten times faster than numpy.
    for which, where in rng.random((count, 2)).tolist():
        position = int(which * len(unfilled))
        client = unfilled[position]
        yield client, where
        lacks[client] -= 1
        if not lacks[client]:
            unfilled[position] = unfilled[-1]
            unfilled.pop()


def _cumulative(priors: Floats, pools: list[list[int]]) -> list[list[float]]:
    """Cumulative class priors over the classes not exhausted; a draw u picks the first entry above u.

    To redraw until the class is not exhausted is to draw from the prior restricted to the others.
    """
    is_left = np.array([bool(pool) for pool in pools])
    if not is_left.any():
        return []
    left = np.where(is_left, priors, 0.0)
    # If every class with a positive prior is exhausted, the others are equally likely; redrawing would never end.
    left = np.where(left.sum(axis=1, keepdims=True) > 1e-300, left, is_left.astype(np.float64))
    bounds = np.cumsum(left, axis=1)
    bounds /= bounds[:, -1:]  # the last entry becomes exactly 1, and every draw is below 1
    rows: list[list[float]] = bounds.tolist()
    return rows


def deal_classes(inputs: PartitionInput, per_client: int) -> list[Indices]:
    """Exactly C classes for each client, and every example to exactly one client.

    Classes are dealt like cards: every class is held by the same number of clients, C*K over the number of classes,
    give or take one; a class with fewer examples than that by as many clients as it has examples. A class's examples
    are dealt evenly among its holders, the odd ones to those who have least so far. Where C*K is less than the number
    of classes, some class would have no client: an error, since a class dropped in silence is never tested.
    """
    labels, num_clients, rng = inputs.labels, inputs.num, inputs.rng
    members = _by_class(labels)
    class_sizes = np.array([len(indices) for indices in members])
    _check_num_classes(f"pathological:{per_client}", per_client, len(members))
    if per_client * num_clients < len(members):
        raise SparsonaError(
            f"pathological:{per_client} gives {num_clients} clients {per_client * num_clients} classes in all, "
            f"but there are {len(members)}: some classes would have no client",
            expected="a client for every class",
            hint=f"use {-(-len(members) // num_clients)} classes per client or more, or more clients; "
            f"pathological-refill:{per_client} leaves classes out",
        )
    if (reach := int(np.minimum(class_sizes, num_clients).sum())) < per_client * num_clients:
        raise SparsonaError(
            f"pathological:{per_client}: {num_clients} clients cannot have {per_client} classes each, since "
            f"{int((class_sizes < num_clients).sum())} classes have fewer examples than there are clients",
            expected="at least one example of each of its classes for every client",
            hint=f"use at most {reach // num_clients} classes per client, or fewer clients",
        )
    counts = _draw_until_enough(
        lambda: _hand_counts(class_sizes, _deal_hands(class_sizes, num_clients, per_client, rng), rng),
        f"pathological:{per_client}",
        min(max(10, MAX_DRAWS // num_clients), MAX_TRIES),
        inputs.min_size,
        "use a larger C, fewer clients or a smaller min_size",
    )
    return _deal(members, counts, rng)


def _deal_hands(
    class_sizes: Indices, num_clients: int, per_client: int, rng: np.random.Generator
) -> npt.NDArray[np.bool_]:
    """Which clients (column) hold which classes (row): C classes in each hand, without repetition."""
    most, total = np.minimum(class_sizes, num_clients), num_clients * per_client
    left = np.zeros_like(class_sizes)  # cards of each class
    while missing := total - int(left.sum()):
        is_open = np.flatnonzero(left < most)
        if missing < len(is_open):
            left[rng.choice(is_open, missing, replace=False)] += 1
        else:
            left[is_open] += min(missing // len(is_open), int((most - left)[is_open].min()))
    hands = np.zeros((len(class_sizes), num_clients), dtype=bool)
    for client, luck in enumerate(rng.standard_exponential((num_clients, len(class_sizes)))):
        # The C lowest of such keys are a draw without replacement by number of cards.
        keys = np.divide(luck, left, out=np.full(len(left), np.inf), where=left > 0)
        # A class with a card for everyone who has no hand yet must be taken, or the last would hold it twice.
        keys[left == num_clients - client] = -1
        hand = np.argpartition(keys, per_client - 1)[:per_client]
        hands[hand, client] = True
        left[hand] -= 1
    return hands


def _hand_counts(class_sizes: Indices, hands: npt.NDArray[np.bool_], rng: np.random.Generator) -> Indices:
    """How many examples of each class (row) each client (column) gets, given who holds what."""
    counts = np.zeros(hands.shape, dtype=np.int64)
    sizes = np.zeros(hands.shape[1], dtype=np.int64)
    for row, is_holder, class_size in zip(counts, hands, class_sizes, strict=True):
        holders = rng.permutation(np.flatnonzero(is_holder))
        row[holders], odd = divmod(class_size, len(holders))
        row[holders[np.argsort(sizes[holders], kind="stable")[:odd]]] += 1
        sizes += row
    return counts


def refill_classes(inputs: PartitionInput, per_client: int) -> list[Indices]:
    """DisPFL's "n_cls": equal sizes; each client draws C classes, and its examples from these in equal parts by chance.

    A class's examples are given out one after another. When they are used up, they are given out again from a random
    place on: CLIENTS THEN SHARE EXAMPLES. Classes that few clients drew are left over in part, others altogether.
    A client never gets an example twice (the authors' code lets it): it takes another of the class at random.
    """
    labels, num_clients, rng = inputs.labels, inputs.num, inputs.rng
    orders = [rng.permutation(indices).tolist() for indices in _by_class(labels)]
    _check_num_classes(f"pathological-refill:{per_client}", per_client, len(orders))
    classes = [rng.choice(len(orders), per_client, replace=False).tolist() for _ in range(num_clients)]
    for client, size in _equal_sizes(len(labels), num_clients):
        if (reach := sum(len(orders[label]) for label in classes[client])) < size:
            raise SparsonaError(
                f"pathological-refill:{per_client} with {num_clients} clients of {size} examples: the classes of "
                f"client {client} have only {reach}",
                expected="as many examples in any C classes as a client gets",
                hint="use a larger C or more clients",
            )
    left = [len(order) for order in orders]
    held: list[set[int]] = [set() for _ in range(num_clients)]
    num_held = [dict.fromkeys(labels, 0) for labels in classes]
    for client, where in _take_turns(len(labels), num_clients, rng):
        open_classes, mine = classes[client], held[client]
        label = open_classes[int(where * len(open_classes))]
        order = orders[label]
        left[label] = (left[label] or int(rng.integers(len(order))) + 1) - 1
        example = order[left[label]]
        while example in mine:
            example = order[int(rng.integers(len(order)))]
        mine.add(example)
        num_held[client][label] += 1
        if num_held[client][label] == len(order):
            open_classes.remove(label)  # nothing of it is left to give to this client
    return [np.array(list(mine), dtype=np.int64) for mine in held]


def _check_num_classes(spec: str, per_client: int, num_classes: int) -> None:
    if per_client > num_classes:
        raise SparsonaError(
            f"{spec} needs {per_client} classes per client, but there are {num_classes}",
            expected="no more classes per client than there are classes",
            hint=f"use at most {num_classes}",
        )


def _equal_sizes(count: int, num_clients: int) -> Iterator[tuple[int, int]]:
    """Each client and its number of examples: n/K, and one more for the first few if that leaves a rest."""
    return ((client, (count + num_clients - 1 - client) // num_clients) for client in range(num_clients))


def _by_class(labels: Array) -> list[Indices]:
    """The indices of each class that occurs, in label order."""
    _, counts = np.unique(labels, return_counts=True)
    return np.split(np.argsort(labels, kind="stable"), np.cumsum(counts)[:-1])


def deal_evenly(inputs: PartitionInput) -> list[Indices]:
    """Shuffled, and cut into parts of equal size."""
    return np.array_split(inputs.rng.permutation(len(inputs.labels)), inputs.num)


def share_equally(inputs: PartitionInput, concentration: float) -> list[Indices]:
    """DisPFL's "dir": as many groups as clients."""
    return share_in_groups(inputs, inputs.num, concentration)


ROWS = (
    Partition(
        "iid", "Shuffled and dealt out evenly: every client's data is distributed alike.", deal_evenly, by_class=False
    ),
    Partition(
        "dirichlet",
        "Each class is shared out by a Dirichlet(A) draw: classes and sizes differ by client, more so for small A.",
        share_dirichlet,
        (CONCENTRATION,),
    ),
    Partition(
        "dirichlet-uncapped",
        "The same, where a client may receive more than its even share: sizes differ more.",
        share_dirichlet_uncapped,
        (CONCENTRATION,),
    ),
    Partition(
        "dirichlet-equal",
        "Every client has the same number of examples, its classes mixed by a Dirichlet(A) draw of its own.",
        share_equally,
        (CONCENTRATION,),
    ),
    Partition(
        "groups",
        "Every client has the same number of examples, its classes mixed by a Dirichlet(A) draw that it shares with "
        "its group, one of G.",
        share_in_groups,
        (count("groups", "G", "4"), CONCENTRATION),
    ),
    Partition(
        "shards",
        "Sorted by label and cut into equal shards, C to each client: about C classes per client.",
        cut_shards,
        (count("shards"),),
    ),
    Partition(
        "pathological",
        "Exactly C classes to each client, every class to equally many; its examples dealt evenly among them.",
        deal_classes,
        (count("classes"),),
    ),
    Partition(
        "pathological-refill",
        "C random classes and equally many examples to each client. A class that runs out is given out again: clients "
        "share examples, and others go unused.",
        refill_classes,
        (count("classes"),),
        repeats_examples=True,
    ),
)
