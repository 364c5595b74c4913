"""Who receives from whom: degrees, determinism, one's own graphs, and what is refused."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from sparsona.core.errors import SparsonaError
from sparsona.core.seeds import Seeds
from sparsona.engine.graphs import Graph, check, read_graph, senders


def heard(text, members, index=0, seed=0):
    graph = read_graph(text, 100)
    check(graph, members)
    return {client: senders(graph, members, client, Seeds(seed).at(index)) for client in members}


@pytest.mark.parametrize("text", ["random:4", "random:4:bounded", "ring", "full", "grid", "exponential", None])
@pytest.mark.parametrize("members", [range(12), [1, 3, 4, 5, 8, 9, 10, 20]], ids=["all", "some"])
def test_everybody_hears_others_who_take_part(text, members):
    found = heard(text, members)
    for client, others in found.items():
        assert others
        assert list(others) == sorted(set(others) & set(members))
        assert client not in others
    assert found == heard(text, members)


def test_random_graphs_change_by_round_and_by_seed():
    for text in ("random:3", "random:3:bounded"):
        assert len({str(heard(text, range(30), index, seed)) for index in range(3) for seed in range(3)}) == 9
    assert heard("ring", range(30), 0) == heard("ring", range(30), 1)


@pytest.mark.parametrize(("num", "degree"), [(25, 4), (24, 5), (12, 11), (7, 6), (2, 1)])
def test_bounded_neighbours_are_mutual(num, degree):
    """The busiest node of DisPFL's text communicates with ten others in all, not with ten each way."""
    for index in range(5):
        found = heard(f"random:{degree}:bounded", range(num), index)
        assert {len(others) for others in found.values()} == {degree}
        assert all(client in found[other] for client, others in found.items() for other in others)


def test_an_odd_number_of_peers_cannot_each_have_an_odd_number_of_neighbours():
    with pytest.raises(SparsonaError, match="each link has two ends"):
        heard("random:3:bounded", range(7))
    assert len(heard("random:3", range(7))[0]) == 3


def test_in_degree_is_exact_and_out_degree_is_so_only_where_bounded():
    free, bounded = Counter(), Counter()
    for index in range(20):
        for text, counted in (("random:4", free), ("random:4:bounded", bounded)):
            found = heard(text, range(25), index)
            assert {len(others) for others in found.values()} == {4}
            out = Counter(sender for others in found.values() for sender in others)
            counted.update([max(out.values())])
    assert set(bounded) == {4}
    assert min(free) > 4


def test_everybody_is_equally_likely_to_be_heard():
    for text in ("random:2", "random:2:bounded"):
        pairs = Counter()
        for index in range(600):
            pairs.update((client, other) for client, two in heard(text, range(5), index).items() for other in two)
        assert len(pairs) == 20
        assert all(230 < count < 370 for count in pairs.values())  # 300, give or take 6 standard deviations


def test_few_peers_have_fewer_neighbours_unless_a_number_was_said():
    assert heard(None, range(4)) == heard("full", range(4))
    assert {len(others) for others in heard(None, range(30)).values()} == {10}
    with pytest.raises(SparsonaError, match="each of 4 peers receives from 10"):
        heard("random:10", range(4))
    assert heard("random:3", range(4)) == heard("random:3:bounded", range(4)) == heard("full", range(4))


def test_named_graphs():
    assert heard("ring", range(4))[0] == (1, 3)
    assert heard("ring", range(2)) == {0: (1,), 1: (0,)}
    assert heard("exponential", range(9))[0] == (1, 5, 7, 8)  # 8, 4, 2 and 1 places behind it
    assert [heard("exponential:one", range(9), index)[0] for index in range(5)] == [(8,), (7,), (5,), (1,), (8,)]
    #  0 1 2 3
    #  4 5 6 7
    #  8 9 . .
    assert heard("grid", range(12))[0] == (1, 3, 4, 8)
    assert heard("grid", range(12))[6] == (2, 5, 7, 10)
    assert heard("grid", range(4)) == {0: (1, 2), 1: (0, 3), 2: (0, 3), 3: (1, 2)}


def test_who_joins_asks_as_many_as_the_others_do():
    members = [0, 2, 3, 5, 6, 8]
    for text, count in (("random:3", 3), ("ring", 2), ("full", 6), ("grid", 4), ("exponential", 3), (None, 5)):
        found = senders(read_graph(text, 9), members, 4, Seeds(0).at(3))
        assert len(found) == count
        assert set(found) <= set(members)


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("g.json", [[0, 1], [2, 1]], ((1,), (0, 2), (1,))),
        ("g.json", {"edges": [[0, 1], [2, 1]]}, ((1,), (0, 2), (1,))),
        ("g.json", {"edges": [[0, 1], [1, 2], [2, 0]], "directed": True}, ((2,), (0,), (1,))),
        ("g.csv", "0,1\n2, 1\n", ((1,), (0, 2), (1,))),
        ("g.csv", "a,b\n0,1\n2,1\n\n", ((1,), (0, 2), (1,))),
        ("g.csv", "from,to\n0,1\n1,2\n2,0\n", ((2,), (0,), (1,))),
    ],
)
def test_ones_own_graph(tmp_path, name, content, found):
    path = tmp_path / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    graph = read_graph(f"file:{path}", 3)
    check(graph, range(3))
    assert graph.sources == found


def test_a_graph_among_those_who_take_part(tmp_path):
    path = tmp_path / "g.csv"
    path.write_text("0,1\n1,2\n2,3\n")
    graph = read_graph(f"file:{path}", 4)
    assert senders(graph, [0, 1, 2], 3, Seeds(0)) == (2,)  # it joins
    assert senders(graph, [0, 1, 2], 2, Seeds(0)) == (1,)
    with pytest.raises(SparsonaError, match="client 0 receives from no client that takes part"):
        check(graph, [0, 2, 3])


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("0,1\n", "client 2 receives from no client"),
        ("from,to\n0,1\n1,2\n", "client 0 receives from no client"),
        ("0,1\n1,2\n2,2\n", "links client 2 to itself"),
        ("0,1\n1,7\n", "names client 7"),
        ("0,1\n1,-1\n", "names client -1"),
        ("0,1,2\n", "cannot be read"),
        ("0,x\n", "cannot be read"),
        ("", "client 0 receives from no client"),
    ],
)
def test_what_is_wrong_with_ones_own_graph(tmp_path, content, told):
    path = tmp_path / "g.csv"
    path.write_text(content)
    with pytest.raises(SparsonaError, match=told) as caught:
        check(read_graph(f"file:{path}", 3), range(3))
    assert caught.value.expected
    assert caught.value.hint


@pytest.mark.parametrize(
    "content", ["{", "3", '{"nodes": []}', '{"edges": [[0]]}', '{"edges": [], "directed": 1}', "[[0.5, 1]]"]
)
def test_json_that_is_no_graph(tmp_path, content):
    path = tmp_path / "g.json"
    path.write_text(content)
    with pytest.raises(SparsonaError, match="cannot be read"):
        read_graph(f"file:{path}", 3)


@pytest.mark.parametrize(
    "text", ["random:0", "random:x", "random:3:bound", "rings", "ring:2", "exponential:2", "file:no.csv"]
)
def test_names_that_are_none(text):
    with pytest.raises(SparsonaError) as caught:
        read_graph(text, 5)
    assert caught.value.hint


def test_what_some_numbers_of_peers_cannot_have():
    with pytest.raises(SparsonaError, match="a grid of 7 peers"):
        check(Graph("grid"), range(7))
    with pytest.raises(SparsonaError, match="a graph of 1 peers"):
        check(Graph("ring"), range(1))
