"""Who receives from whom: a pure function of the graph, who takes part, the round and the seed.

Imported without torch, for lists and costs. A graph is a row of `KINDS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from sparsona.core import spec
from sparsona.core.errors import SparsonaError
from sparsona.core.reading import expand, parse_json, read_text
from sparsona.core.seeds import Seeds, generator
from sparsona.core.spec import Spec

USUAL_DEGREE = 10  # of the papers; fewer where there are fewer peers


@dataclass(frozen=True)
class Graph:
    """A graph by its name. `degree` is that of a random graph; `sources` has each client's senders, from a file."""

    kind: str
    degree: int | None = None
    bounded: bool = False
    one_peer: bool = False
    sources: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Kind:
    """A row of `KINDS`.

    Args:
        forms: how the graph is written, and what it does.
        read: makes it from its arguments and the number of clients; None: the arguments are invalid.
        places: the positions that the peer at a position receives from.
        degree: how many peers a client that joins later receives from.
        example: how it is written, for messages.
        is_drawn: positions come from a random generator, which needs torch.
        is_even: every peer has the same number of links.
        check: raises SparsonaError if these peers cannot have this graph.
    """

    forms: Mapping[str, str]
    read: Callable[[Spec, int], Graph | None]
    places: Callable[[Graph, int, int, Seeds], Iterable[int]]
    degree: Callable[[Graph, int], int]
    example: str
    is_drawn: bool = False
    is_even: bool = True
    check: Callable[[Graph, Sequence[int]], None] = lambda graph, members: None


def read_graph(text: str | None, num_clients: int) -> Graph:
    """The graph that a text names; None: the one of the papers. `check` tests whether it fits the participants."""
    found = spec.read("graph", text or "random", GRAPHS)
    kind = KINDS[found.name]
    graph = kind.read(found, num_clients)
    if graph is None:
        forms = [form for form in GRAPHS if form.partition(":")[0] == found.name]
        raise found.wrong(" or ".join(forms), f"--graph {kind.example}")
    return graph


def check(graph: Graph, members: Sequence[int]) -> None:
    """Raise SparsonaError if these peers cannot have this graph."""
    num = len(members)
    if num < 2:
        raise SparsonaError(
            f"a graph of {num} peers", expected="two or more", hint="raise --clients, or use a method for one"
        )
    KINDS[graph.kind].check(graph, members)


def senders(graph: Graph, members: Sequence[int], client: int, seeds: Seeds) -> tuple[int, ...]:
    """The clients that a client receives from, in client order; `seeds` are those of the round.

    Positions in the graph are those among `members`, the clients that take part. A client that joins later receives
    from as many of them as they do from each other, drawn at random; in a graph from a file, from those in the file.
    """
    num, kind = len(members), KINDS[graph.kind]
    if graph.sources:
        taking_part = set(members)
        return tuple(other for other in graph.sources[client] if other in taking_part)
    if client not in members:
        degree = min(kind.degree(graph, num), num)
        return tuple(sorted(members[place] for place in _draw(num, degree, seeds.of(client))))
    own = members.index(client)
    return tuple(sorted(members[place] for place in kind.places(graph, num, own, seeds.of(client))))


@dataclass(frozen=True)
class Links:
    """How many messages each peer receives and sends in a round.

    `each` if all have the same number, on average in a random graph; otherwise `received` lists each peer's senders.
    """

    each: int | None
    received: tuple[tuple[int, ...], ...] = ()


def links(graph: Graph, num: int) -> Links:
    """The links of a graph of so many peers, computed without torch: the cost of messages follows from them."""
    kind = KINDS[graph.kind]
    if kind.is_drawn:
        return Links(min(kind.degree(graph, num), num - 1))
    round_ = Seeds(0).at(0)
    if kind.is_even:
        return Links(len(set(kind.places(graph, num, 0, round_.of(0)))))
    return Links(None, tuple(senders(graph, range(num), client, round_) for client in range(num)))


def _read_random(found: Spec, num_clients: int) -> Graph | None:
    number, bound = (*found.args, "", "")[:2]
    degree = spec.as_count(number) if number else None
    if (number and degree is None) or bound not in ("", "bounded") or len(found.args) > 2 or found.options:
        return None
    return Graph("random", degree, bounded=bool(bound))


def _random_places(graph: Graph, num: int, own: int, seeds: Seeds) -> Iterable[int]:
    if graph.bounded:
        # Neighbours at random distances on a circle in random order, both ways: whom a peer receives from, it sends to.
        order, distances = _circle(num, _random_degree(graph, num), seeds.shared("graph"))
        where = order.index(own)
        return {order[(where + distance) % num] for distance in distances}
    return [place + (place >= own) for place in _draw(num - 1, _random_degree(graph, num), seeds)]


def _random_degree(graph: Graph, num: int) -> int:
    return min(USUAL_DEGREE, num - 1) if graph.degree is None else graph.degree


def _check_random(graph: Graph, members: Sequence[int]) -> None:
    num = len(members)
    if graph.degree is not None and graph.degree >= num:
        raise SparsonaError(
            f"a graph in which each of {num} peers receives from {graph.degree} others",
            expected=f"at most {num - 1}",
            hint=f"--graph random:{min(USUAL_DEGREE, num - 1)}, or --graph full",
        )
    if graph.bounded and _random_degree(graph, num) * num % 2:
        raise SparsonaError(
            f"a graph in which each of {num} peers has {graph.degree} neighbours, all of them mutual",
            expected="an even number of neighbours, or of peers: each link has two ends",
            hint=f"--graph random:{graph.degree}, or --graph random:{_random_degree(graph, num) - 1 or 2}:bounded",
        )


def _plain(found: Spec, num_clients: int) -> Graph | None:
    """A graph without arguments."""
    return None if found.argument else Graph(found.name)


def _ring_places(graph: Graph, num: int, own: int, seeds: Seeds) -> Iterable[int]:
    return {(own - 1) % num, (own + 1) % num}


def _full_places(graph: Graph, num: int, own: int, seeds: Seeds) -> Iterable[int]:
    return (place for place in range(num) if place != own)


def _grid_places(graph: Graph, num: int, own: int, seeds: Seeds) -> Iterable[int]:
    rows = _rows(num)
    columns = num // rows
    row, column = divmod(own, columns)
    steps = ((row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1))
    return {down % rows * columns + right % columns for down, right in steps} - {own}


def _check_grid(graph: Graph, members: Sequence[int]) -> None:
    if _rows(len(members)) == 1:
        raise SparsonaError(
            f"a grid of {len(members)} peers",
            expected="a number that is a product of two",
            hint="use --graph ring, or another number of clients",
        )


def _rows(num: int) -> int:
    """Rows of the most nearly square grid."""
    return max(rows for rows in range(1, math.isqrt(num) + 1) if num % rows == 0)


def _read_exponential(found: Spec, num_clients: int) -> Graph | None:
    return Graph("exponential", one_peer=bool(found.argument)) if found.argument in (None, "", "one") else None


def _exponential_places(graph: Graph, num: int, own: int, seeds: Seeds) -> Iterable[int]:
    hops = [2**power for power in range(_powers(num))]
    if graph.one_peer:
        hops = [hops[(seeds.round or 0) % len(hops)]]
    return {(own - hop) % num for hop in hops}


def _powers(num: int) -> int:
    """Powers of two below a number."""
    return (num - 1).bit_length()


def _draw(num: int, count: int, seeds: Seeds) -> list[int]:
    import torch

    found: list[int] = torch.randperm(num, generator=generator(seeds.own("graph")))[:count].tolist()
    return found


@lru_cache(maxsize=4)  # called for each peer of a round
def _circle(num: int, degree: int, seed: int) -> tuple[list[int], list[int]]:
    """An order of the peers, and the distances of neighbours in it: each both ways; half the circle for an odd one."""
    import torch

    random = generator(seed)
    order = torch.randperm(num, generator=random).tolist()
    near = (1 + torch.randperm((num - 1) // 2, generator=random)[: degree // 2]).tolist()
    return order, [*near, *(-distance for distance in near), *[num // 2] * (degree % 2)]


def _read_file(found: Spec, num_clients: int) -> Graph | None:
    if not found.argument:
        return None
    return Graph("file", sources=_read_edges(expand(found.argument), num_clients))


def _file_places(graph: Graph, num: int, own: int, seeds: Seeds) -> Iterable[int]:
    return graph.sources[own]


def _check_file(graph: Graph, members: Sequence[int]) -> None:
    taking_part = set(members)
    for client in members:
        if not taking_part & set(graph.sources[client]):
            raise SparsonaError(
                f"in this graph client {client} receives from no client that takes part",
                expected="at least one neighbour for each",
                hint="add an edge to it, or leave 'novel' out if its neighbours are held out",
            )


def _read_edges(path: Path, num_clients: int) -> tuple[tuple[int, ...], ...]:
    """The senders of each client, from a file: see docs/methods/dispfl.md."""
    try:
        text = read_text(path)
        edges, directed = _from_json(text) if path.suffix == ".json" else _from_csv(text)
    except FileNotFoundError:
        raise SparsonaError(
            f"there is no graph file '{path}'", expected="a .json or .csv file", hint="check --graph file:PATH"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SparsonaError(
            f"graph file '{path}' cannot be read: {error}",
            expected='lines like 0,1, or JSON like {"edges": [[0, 1], [1, 2]], "directed": false}',
            hint="correct the line that is named",
        ) from None
    sources: list[set[int]] = [set() for _ in range(num_clients)]
    for sender, receiver in edges:
        for client in (sender, receiver):
            if not 0 <= client < num_clients:
                raise SparsonaError(
                    f"graph file '{path}' names client {client}",
                    expected=f"clients 0 to {num_clients - 1}",
                    hint="correct the edge, or raise --clients",
                )
        if sender == receiver:
            raise SparsonaError(
                f"graph file '{path}' links client {sender} to itself",
                expected="edges between two clients: every peer has its own model anyway",
                hint="leave that edge out",
            )
        sources[receiver].add(sender)
        if not directed:
            sources[sender].add(receiver)
    return tuple(tuple(sorted(found)) for found in sources)


def _from_json(text: str) -> tuple[list[tuple[int, int]], bool]:
    found = parse_json(text)
    directed = isinstance(found, dict) and found.get("directed", False)
    if not isinstance(directed, bool):
        raise ValueError(f"'directed' is {directed!r}")
    return [_edge(pair) for pair in (found["edges"] if isinstance(found, dict) else found)], directed


def _from_csv(text: str) -> tuple[list[tuple[int, int]], bool]:
    rows = [line.split(",") for line in text.splitlines() if line.strip()]
    head = [word.strip() for word in rows[0]] if rows else []
    named = head in (["from", "to"], ["a", "b"])
    return [_edge(row) for row in rows[named:]], head == ["from", "to"]


def _edge(pair: Sequence[object]) -> tuple[int, int]:
    try:
        first, second = pair
        return int(str(first)), int(str(second))
    except (TypeError, ValueError):
        raise ValueError(f"{pair!r} is not a pair of clients") from None


KINDS = {
    "random": Kind(
        {
            "random:N": "each receives from N others, drawn every round; how many receive from it is random",
            "random:N:bounded": "each has N neighbours, drawn every round, whom it sends to and receives from",
        },
        _read_random,
        _random_places,
        _random_degree,
        "random:10",
        is_drawn=True,
        check=_check_random,
    ),
    "ring": Kind(
        {"ring": "each receives from its left and its right neighbour"},
        _plain,
        _ring_places,
        lambda graph, num: 2,
        "ring",
    ),
    "full": Kind({"full": "each receives from all others"}, _plain, _full_places, lambda graph, num: num, "full"),
    "grid": Kind(
        {"grid": "four neighbours on a torus, as square as the number of peers allows"},
        _plain,
        _grid_places,
        lambda graph, num: 4,
        "grid",
        check=_check_grid,
    ),
    "exponential": Kind(
        {
            "exponential": "each receives from those 1, 2, 4, 8 ... positions behind it",
            "exponential:one": "from one of those, the next one every round",
        },
        _read_exponential,
        _exponential_places,
        lambda graph, num: 1 if graph.one_peer else _powers(num),
        "exponential:one",
    ),
    "file": Kind(
        {"file:PATH": "a .json or .csv list of edges"},
        _read_file,
        _file_places,
        lambda graph, num: num,
        "file:edges.csv",
        is_even=False,
        check=_check_file,
    ),
}
GRAPHS = {form: text for kind in KINDS.values() for form, text in kind.forms.items()}  # all forms, for lists
