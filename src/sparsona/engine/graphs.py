"""Who hears from whom: a pure function of the graph, who takes part, the round and the seed.

Imported without torch, to be listed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from sparsona.core.errors import SparsonaError, unknown_name
from sparsona.core.seeds import Seeds, generator

GRAPHS = {
    "random:N": "each hears from N others, drawn anew every round; how many hear it is left to chance",
    "random:N:bounded": "the same, and each is heard by N others: the busiest peer is no busier than the rest",
    "ring": "each hears from its left and its right neighbour",
    "full": "each hears from all others",
    "grid": "four neighbours on a torus, as square as the number of peers allows",
    "exponential": "each hears from those 1, 2, 4, 8 ... places behind it",
    "exponential:one": "from one of those, the next one every round",
    "file:PATH": "one's own: a .json or .csv list of edges",
}
USUAL_DEGREE = 10  # of the papers; fewer where there are fewer peers


@dataclass(frozen=True)
class Graph:
    """A graph by its name. `degree` is that of a random graph; `heard` says whom each client hears, from a file."""

    kind: str
    degree: int | None = None
    bounded: bool = False
    one_peer: bool = False
    heard: tuple[tuple[int, ...], ...] = ()


def read_graph(text: str | None, num_clients: int) -> Graph:
    """The graph that is meant; None is what the papers use. Whether it fits those who take part, `check` tells."""
    kind, _, rest = (text or "random").strip().partition(":")
    if kind == "random":
        number, _, bound = rest.partition(":")
        if (number and not (number.isdecimal() and int(number))) or bound not in ("", "bounded"):
            raise SparsonaError(
                f"graph '{text}'",
                expected="random:N or random:N:bounded, with N neighbours each",
                mend="for example --graph random:10",
            )
        return Graph(kind, int(number) if number else None, bounded=bool(bound))
    if kind == "exponential" and rest in ("", "one"):
        return Graph(kind, one_peer=bool(rest))
    if kind == "file":
        return Graph(kind, heard=_read_edges(Path(rest).expanduser(), num_clients))
    if kind not in ("ring", "full", "grid") or rest:
        raise unknown_name("graph", str(text), GRAPHS)
    return Graph(kind)


def check(graph: Graph, members: Sequence[int]) -> None:
    """Refuse a graph that these peers cannot have."""
    num = len(members)
    if num < 2:
        raise SparsonaError(
            f"a graph of {num} peers", expected="two or more", mend="raise --clients, or use a method for one"
        )
    if graph.degree is not None and graph.degree >= num:
        raise SparsonaError(
            f"a graph in which each of {num} peers hears from {graph.degree} others",
            expected=f"at most {num - 1}",
            mend=f"--graph random:{min(USUAL_DEGREE, num - 1)}, or --graph full",
        )
    if graph.kind == "grid" and _rows(num) == 1:
        raise SparsonaError(
            f"a grid of {num} peers",
            expected="a number that is a product of two",
            mend="use --graph ring, or another number of clients",
        )
    if graph.kind == "file":
        taking_part = set(members)
        for client in members:
            if not taking_part & set(graph.heard[client]):
                raise SparsonaError(
                    f"in this graph client {client} hears from nobody who takes part",
                    expected="at least one neighbour for each",
                    mend="add an edge to it, or leave 'novel' out if its neighbours are held out",
                )


def senders(graph: Graph, members: Sequence[int], client: int, seeds: Seeds) -> tuple[int, ...]:
    """Whom a client hears from, in client order; `seeds` are those of the round.

    Places in the graph are those among `members`, who take part. Somebody else, who joins them, asks as many of them
    as they ask each other, drawn at random; in a graph from a file, those the file says.
    """
    num = len(members)
    if graph.kind == "file":
        taking_part = set(members)
        return tuple(other for other in graph.heard[client] if other in taking_part)
    if client not in members:
        return tuple(sorted(members[place] for place in _drawn(num, min(_degree(graph, num), num), seeds.of(client))))
    own = members.index(client)
    return tuple(sorted(members[place] for place in _places(graph, num, own, seeds.of(client))))


def _places(graph: Graph, num: int, own: int, seeds: Seeds) -> Iterable[int]:
    """Whom the peer in place `own` hears from, as places."""
    if graph.kind == "random" and graph.bounded:
        # A circle in random order, heard from at random distances: all are different, and none is nought.
        order, distances = _circle(num, _degree(graph, num), seeds.shared("graph"))
        where = order.index(own)
        return {order[(where + distance) % num] for distance in distances}
    if graph.kind == "random":
        return [place + (place >= own) for place in _drawn(num - 1, _degree(graph, num), seeds)]
    if graph.kind == "ring":
        return {(own - 1) % num, (own + 1) % num}
    if graph.kind == "full":
        return (place for place in range(num) if place != own)
    if graph.kind == "grid":
        rows = _rows(num)
        columns = num // rows
        row, column = divmod(own, columns)
        steps = ((row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1))
        return {down % rows * columns + right % columns for down, right in steps} - {own}
    hops = [2**power for power in range(_powers(num))]
    if graph.one_peer:
        hops = [hops[(seeds.round or 0) % len(hops)]]
    return {(own - hop) % num for hop in hops}


def _degree(graph: Graph, num: int) -> int:
    """How many each of so many peers hears from."""
    if graph.kind == "random":
        return min(USUAL_DEGREE, num - 1) if graph.degree is None else graph.degree
    hops = 1 if graph.one_peer else _powers(num)
    return {"ring": 2, "full": num, "grid": 4, "exponential": hops}[graph.kind]


def _drawn(num: int, count: int, seeds: Seeds) -> list[int]:
    import torch

    found: list[int] = torch.randperm(num, generator=generator(seeds.own("graph")))[:count].tolist()
    return found


@lru_cache(maxsize=4)  # asked for by each peer of a round
def _circle(num: int, degree: int, seed: int) -> tuple[list[int], list[int]]:
    import torch

    random = generator(seed)
    order = torch.randperm(num, generator=random).tolist()
    return order, (1 + torch.randperm(num - 1, generator=random)[:degree]).tolist()


def _rows(num: int) -> int:
    """Rows of the most nearly square grid."""
    return max(rows for rows in range(1, math.isqrt(num) + 1) if num % rows == 0)


def _powers(num: int) -> int:
    """Powers of two below a number."""
    return (num - 1).bit_length()


def _read_edges(path: Path, num_clients: int) -> tuple[tuple[int, ...], ...]:
    """Whom each client hears, from a file: see docs/methods/dispfl.md."""
    try:
        text = path.read_text(encoding="utf-8")
        edges, directed = _from_json(text) if path.suffix == ".json" else _from_csv(text)
    except FileNotFoundError:
        raise SparsonaError(
            f"there is no graph file '{path}'", expected="a .json or .csv file", mend="check --graph file:PATH"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SparsonaError(
            f"graph file '{path}' cannot be read: {error}",
            expected='lines like 0,1, or JSON like {"edges": [[0, 1], [1, 2]], "directed": false}',
            mend="correct it at the place named",
        ) from None
    heard: list[set[int]] = [set() for _ in range(num_clients)]
    for sender, receiver in edges:
        for client in (sender, receiver):
            if not 0 <= client < num_clients:
                raise SparsonaError(
                    f"graph file '{path}' names client {client}",
                    expected=f"clients 0 to {num_clients - 1}",
                    mend="correct the edge, or raise --clients",
                )
        if sender == receiver:
            raise SparsonaError(
                f"graph file '{path}' links client {sender} to itself",
                expected="edges between two clients: every peer has its own model anyway",
                mend="leave that edge out",
            )
        heard[receiver].add(sender)
        if not directed:
            heard[sender].add(receiver)
    return tuple(tuple(sorted(found)) for found in heard)


def _from_json(text: str) -> tuple[list[tuple[int, int]], bool]:
    found = json.loads(text)
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
        raise ValueError(f"{pair!r} is no pair of clients") from None
