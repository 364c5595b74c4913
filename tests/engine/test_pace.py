"""Clients that differ: learning rates, epochs, speeds and deadlines, for every kind of method and executor."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest
from small_runs import context_of, played
from torch import nn

import sparsona as sp
from sparsona.core.errors import SparsonaError
from sparsona.core.method import Phase, examples_seen, steps_taken
from sparsona.core.round import Client, Round
from sparsona.core.seeds import Seeds
from sparsona.engine.context import ClientContext
from sparsona.engine.forecast import forecast
from sparsona.engine.pace import client_speeds, round_time, spread, with_conditions
from sparsona.engine.plan import Plan, participation
from sparsona.engine.rounds import simulate
from sparsona.executors.serial import Serial
from sparsona.executors.stacked import Stacked
from sparsona.experiment import build

PLAN = Plan(rounds=4, per_round=4, batch_size=4, seed=3)
CLIENTS = tuple(Client(index, num, num_clients=4) for index, num in enumerate((10, 20, 30, 20)))
PHASE = Phase(name="train", trains=("params",), loss=lambda w, b: b, update=lambda w, g, t: w, epochs=5)
ROUND = Round(0, 4, 0.5, 4, Seeds(3))
NET = nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.Linear(4, 10))


def test_rates_and_epochs_are_repeated_over_clients_or_given_by_client():
    found = with_conditions(replace(PLAN, client_lr_scale=(1.0, 0.1), client_epochs={2: 7}), CLIENTS)
    assert [one.lr_scale for one in found] == [1, 0.1, 1, 0.1]
    assert [one.epochs for one in found] == [None, None, 7, None]
    assert [one.time for one in found] == [0] * 4
    assert ROUND.on(found[1]).lr_scale == 0.05
    assert with_conditions(PLAN, CLIENTS) is CLIENTS
    with pytest.raises(SparsonaError, match="client_epochs of client 4"):
        with_conditions(replace(PLAN, client_epochs={4: 1}), CLIENTS)


def test_time_is_work_over_speed():
    found = with_conditions(replace(PLAN, speeds=(1.0, 2.0)), CLIENTS)
    assert [one.time for one in found] == [0.5, 0.5, 1.5, 0.5]
    found = with_conditions(replace(PLAN, speeds=(1.0,), client_epochs=(2, 1, 1, 1)), CLIENTS)
    assert [round(one.time, 3) for one in found] == [0.889, 0.889, 1.333, 0.889]
    drawn = client_speeds("lognormal:0.5", 4, Seeds(3))
    assert drawn == client_speeds("lognormal:0.5", 4, Seeds(3)) != client_speeds("lognormal:0.5", 4, Seeds(4))
    assert client_speeds("lognormal:0", 3, Seeds(0)) == [1, 1, 1]
    assert spread((), 2, 9) == [9, 9]


def test_who_is_late_is_left_out_or_makes_fewer_steps():
    plan = replace(PLAN, speeds=(1.0,), deadline=1.0)
    clients = with_conditions(plan, CLIENTS)
    who = participation(plan, clients, 0)
    assert (who.trains, who.late, who.dropped) == ((0, 1, 2, 3), {2}, {2})
    assert who.aggregated == {0, 1, 3}
    assert round_time(plan, clients) == 1.0  # the server waits for client 2 until then
    assert round_time(plan, clients[:1]) == 0.5
    assert round_time(replace(plan, deadline=None), clients) == 1.5
    plan = replace(plan, late="partial")
    clients = with_conditions(plan, CLIENTS)
    who = participation(plan, clients, 0)
    assert (who.late, who.dropped, who.aggregated) == ({2}, set(), {0, 1, 2, 3})
    assert [one.share for one in clients] == [1, 1, 2 / 3, 1]
    # 8 batches a pass, 5 passes, two thirds of them: 26 steps, three passes of 30 and two batches of 4.
    assert steps_taken(PHASE, clients[2], ROUND) == 26
    assert examples_seen(PHASE, clients[2], ROUND) == 3 * 30 + 2 * 4
    assert steps_taken(replace(PHASE, max_steps=3), replace(clients[2], share=0.01), ROUND) == 1
    assert steps_taken(PHASE, clients[2].in_tuning, ROUND) == 40


def test_epochs_of_a_client_replace_those_of_each_phase():
    assert steps_taken(PHASE, replace(CLIENTS[0], epochs=2), ROUND) == 6
    assert steps_taken(replace(PHASE, own_epochs=lambda own: own - 1), replace(CLIENTS[0], epochs=1), ROUND) == 0


VARIED = {"data_rate": 0.1, "client_epochs": (1, 4, 2), "client_lr_scale": (1.0, 0.5), "speeds": "lognormal:1"}
VARIED |= {"deadline": 0.8, "late": "partial", "rounds": 1, "per_round": 5}


@pytest.mark.parametrize("method", ["fedavg", "sub-fedavg", "fedalt", "dpsgd"])
def test_costs_count_what_is_done(method):
    context = context_of(method, copy.deepcopy(NET), **VARIED)
    engine = simulate(context, Serial(context))
    _, record = engine.play(engine.start(), 0)
    steps = sum(turn.tally.steps for turn in record.turns)
    plain = context_of(method, copy.deepcopy(NET), data_rate=0.1, rounds=1, per_round=5)
    assert steps == forecast(context.server_side).steps != forecast(plain.server_side).steps
    if method != "sub-fedavg":  # whose masks decide what is used
        assert sum(turn.tally.train_flops for turn in record.turns) == forecast(context.server_side).flops


def test_epochs_of_clients_are_those_of_a_method_that_has_them():
    own = {"data_rate": 0.1, "rounds": 1}
    for method in ("sub-fedavg", "fedalt", "apfl"):
        as_given = [context_of(method, copy.deepcopy(NET), **own, epochs=epochs) for epochs in (1, 3)]
        replaced = [
            context_of(method, copy.deepcopy(NET), **own, epochs=4 - epochs, client_epochs=epochs) for epochs in (1, 3)
        ]
        for one, other in zip(as_given, replaced, strict=True):
            assert played(one, Serial(one), 1) == played(other, Serial(other), 1), method


def test_a_learning_rate_of_a_client_is_that_of_a_method_that_has_it():
    half = context_of("fedavg", copy.deepcopy(NET), data_rate=0.1, lr=0.05)
    scaled = context_of("fedavg", copy.deepcopy(NET), data_rate=0.1, lr=0.1, client_lr_scale=0.5)
    assert played(half, Serial(half), 1) == played(scaled, Serial(scaled), 1)


def test_executors_agree_about_clients_that_differ():
    context = context_of("fedavg", copy.deepcopy(NET), **VARIED)
    expected = played(context, Serial(context), 1)
    # A worker builds its own context, of what it is sent.
    plan = pickle.loads(pickle.dumps(context.plan))
    there = ClientContext(context.task, context.make_method, context.federation, plan)
    assert there.clients == context.clients
    assert played(there, Serial(there), 1) == expected
    one, other = (simulate(context, executor) for executor in (Serial(context), Stacked(context)))
    (_, serial), (_, stacked) = (engine.play(engine.start(), 0) for engine in (one, other))
    for a, b in zip(serial.turns, stacked.turns, strict=True):
        assert (a.client, a.tally.steps, a.tally.examples) == (b.client, b.tally.steps, b.tally.examples)
        assert a.tally.loss == pytest.approx(b.tally.loss, rel=1e-5)


def test_final_tuning_has_its_own_length_and_no_deadline(tmp_path):
    options = {"clients": 4, "rounds": 1, "epochs": 1, "tune_epochs": 2, "data_rate": 0.1, "executor": "serial"}
    options |= {"model": "mlp:hidden=0", "device": "cpu"}
    usual = sp.train("fedavg", out=tmp_path / "usual", **options)
    varied = {"client_epochs": 3, "speeds": [1, 0.5], "deadline": 0.5, "late": "partial"}
    slow = sp.train("fedavg", out=tmp_path / "slow", **options, **varied)
    steps = [[turn.steps for turn in run._folder.records.turns(1)] for run in (usual, slow)]
    assert steps[0] == steps[1]
    assert slow.summary["conditions"]["late"] > 0
    assert slow.summary["conditions"]["time"] == 0.5 == slow.view.cumulative_time[-1][1]
    assert "With a deadline of 0.5" in slow.summary["protocol"]
    assert "sim. time" in sp.Comparison(tmp_path, [slow]).table()[0]


def test_costs_before_training_have_epochs_of_clients():
    usual = sp.cost("fedavg", model="lenet5", epochs=3, tune_epochs=2)
    varied = sp.cost("fedavg", model="lenet5", epochs=9, client_epochs=[1, 5], tune_epochs=2)
    assert varied.flops == usual.flops
    few = sp.cost("fedavg", model="lenet5", epochs=1, client_epochs={0: 101})
    assert few.flops.train == 2 * sp.cost("fedavg", model="lenet5", epochs=1).flops.train
    with pytest.raises(SparsonaError, match="'speeds' in a cost"):
        sp.cost("fedavg", model="lenet5", speeds=[1, 2])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"client_lr_scale": [0]}, "greater than 0"),
        ({"client_epochs": [1.5]}, "integer"),
        ({"client_epochs": {-1: 2}}, "client_epochs"),
        ({"speeds": "lognormal:often"}, "a sigma from 0 to 10"),
        ({"speeds": "fast"}, "lognormal:SIGMA"),
        ({"late": "partial"}, "without a deadline"),
        ({"deadline": 0}, "deadline"),
    ],
)
def test_wrong_values_are_refused(options, words):
    with pytest.raises(SparsonaError, match=words):
        build.make_config("fedavg", options)


def test_peers_cannot_be_dropped_for_being_late():
    with pytest.raises(SparsonaError, match="late=drop for dpsgd"):
        sp.train("dpsgd", clients=4, rounds=1, data_rate=0.1, deadline=1)
