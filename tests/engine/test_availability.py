"""Who is available: traces from files, days and nights, chains; and rounds in which few are, or nobody is."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

import sparsona as sp
from sparsona import methods
from sparsona.core.errors import SparsonaError
from sparsona.core.round import Client
from sparsona.core.seeds import Seeds
from sparsona.engine.availability import available_clients, read_availability
from sparsona.engine.plan import Plan, participation
from sparsona.experiment import build

SEEDS = Seeds(5)


def available(text: str, num: int, rounds: int, seeds: Seeds = SEEDS) -> list[set[int]]:
    found = read_availability(text, num)
    return [set(available_clients(found, num, index, seeds)) for index in range(rounds)]


def test_a_client_is_available_for_its_share_of_every_period():
    found = available("diurnal:8:0.25", 50, 24)
    for client in range(50):
        rounds = [index for index, one in enumerate(found) if client in one]
        assert len(rounds) == 6
        assert {index + 8 for index in rounds[:4]} == set(rounds[2:])
    assert len({min(index for index in range(8) if client in found[index]) for client in range(50)}) > 3
    assert found != available("diurnal:8:0.25", 50, 24, Seeds(6))


def test_a_chain_is_as_often_available_as_its_probabilities_say_whatever_is_asked_first():
    found = available("markov:0.2:0.1", 400, 60)
    assert sum(map(len, found)) / (400 * 60) == pytest.approx(2 / 3, abs=0.02)
    fell = [len(before - after) / len(before) for before, after in pairwise(found)]
    assert sum(fell) / len(fell) == pytest.approx(0.1, abs=0.01)
    again = read_availability("markov:0.2:0.1", 400)
    assert set(available_clients(again, 400, 40, SEEDS)) == found[40]
    assert available("markov:1:0", 3, 3) == [{0, 1, 2}] * 3


def test_a_trace_of_windows_and_one_of_rows(tmp_path):
    windows, rows = tmp_path / "windows.csv", tmp_path / "rows.csv"
    windows.write_text("client,round_from,round_to\n0,0,1\n2,1,1\n0,3,9\n")
    rows.write_text("1,0\n0,0\n0, 1\n")
    assert available(f"file:{windows}", 3, 5) == [{0}, {0, 2}, set(), {0}, {0}]
    assert available(f"file:{rows}", 3, 4) == [{0}, {2}, {0}, {2}]  # it starts again


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "0 rows for 2 clients"),
        ("1,1\n", "1 rows for 2 clients"),
        ("1,1\n1\n", "row 2 is not 2 times"),
        ("1\nyes\n", "row 2"),
        ("client,round_from,round_to\n0,1\n", "line 2 is not three"),
        ("client,round_from,round_to\n0,1,-2\n", "line 2 is not three"),
        ("client,round_from,round_to\n2,1,2\n", "line 2 names client 2 of 2"),
        ("client,round_from,round_to\n1,3,2\n", "line 2 ends in round 2"),
    ],
)
def test_a_wrong_trace_says_where(tmp_path, text, words):
    (tmp_path / "trace.csv").write_text(text)
    with pytest.raises(SparsonaError, match=words):
        read_availability(f"file:{tmp_path / 'trace.csv'}", 2)


@pytest.mark.parametrize(
    "text", ["diurnal", "diurnal:0:0.5", "diurnal:4:2", "markov:0:1", "markov:1", "file:", "night"]
)
def test_a_wrong_availability_is_refused(text):
    with pytest.raises(SparsonaError, match="availability"):
        sp.train("fedavg", availability=text)
    with pytest.raises(SparsonaError, match="cannot be read"):
        read_availability("file:nowhere.csv", 1)


def test_rounds_go_on_with_those_that_are_available_and_without_any(tmp_path):
    """Also after a stop, on a server and among peers; and a trace that was changed is noticed."""
    trace = tmp_path / "trace.csv"
    trace.write_text("1,0,1\n1,0,1\n0,0,1\n0,0,1\n")
    options = {"clients": 4, "rounds": 3, "per_round": 3, "epochs": 1, "data_rate": 0.1, "device": "cpu"}
    options |= {"availability": f"file:{trace}", "executor": "serial", "model": "mlp:hidden=0"}
    turns = {}
    for method in ("fedavg", "dpsgd"):
        run = sp.train(method, out=tmp_path / method, **options, max_steps=1)
        assert run.summary["rounds"] == 1
        run = sp.resume(run.path)  # the limit counts anew, and nobody trains in round 2
        turns[method] = [(one.round, one.client) for one in run._folder.records.turns() if one.steps]
        assert run.summary["conditions"] == {"time": None, "late": None, "few": 2, "empty": 1}
        assert [row.num_awake for row in run._folder.records.conditions()] == [2, 0, 4]
        assert "in 2 rounds fewer than were wanted, in 1 none" in run.summary["protocol"]
    assert turns["fedavg"] == turns["dpsgd"]
    assert [one for one in turns["fedavg"] if one[0] < 2] == [(0, 0), (0, 1)]
    assert len(turns["fedavg"]) == 5
    trace.write_text("1\n1\n1\n1\n")
    with pytest.raises(SparsonaError, match="the trace of who is available is not that of"):
        sp.resume(tmp_path / "fedavg")


def test_everyone_that_is_available_trains_where_everyone_does():
    plan = Plan(rounds=4, per_round=2, batch_size=4, seed=5, everyone_trains=True)
    plan = replace(plan, availability=read_availability("diurnal:4:0.5", 20))
    clients = tuple(Client(index, 4) for index in range(20))
    who = participation(plan, clients, 1)
    assert set(who.trains) == available("diurnal:4:0.5", 20, 2)[1]
    assert len(who.aggregated) == 2
    assert who.aggregated <= set(who.trains)


def test_where_some_sleep_not_all_have_a_model_of_the_last_round():
    found = {}
    for availability in (None, "markov:0.5:0.5"):
        config = build.make_config("dispfl", {"clients": 4, "availability": availability})
        found[availability] = build.headline_of(config, methods.card("dispfl"))
    assert found == {None: "trained", "markov:0.5:0.5": "received"}
