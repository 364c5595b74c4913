"""Which clients take part: by name, by a function from Python, and that a resumed run has the same ones."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

import sparsona as sp
from sparsona.core.errors import SparsonaError
from sparsona.core.round import Client
from sparsona.core.seeds import generator
from sparsona.engine.plan import Plan, participation
from sparsona.engine.sampling import known_losses

PLAN = Plan(rounds=400, per_round=2, batch_size=4, seed=3)
CLIENTS = tuple(Client(index, 10 * (index + 1)) for index in range(5))
OPTIONS = {"clients": 6, "rounds": 3, "per_round": 2, "epochs": 1, "data_rate": 0.1, "device": "cpu"}
OPTIONS |= {"executor": "serial", "model": "mlp:hidden=0"}


def sampled(plan: Plan, index: int, **more) -> tuple[int, ...]:
    return participation(plan, CLIENTS, index, **more).trains


def test_uniform_draws_what_it_always_drew():
    order = torch.randperm(5, generator=generator(PLAN.seeds.at(7).shared("sample")))
    assert sampled(PLAN, 7) == tuple(sorted(order[:2].tolist()))


def test_by_size():
    plan = replace(PLAN, sampler="size", per_round=1)
    counts = Counter(client for index in range(400) for client in sampled(plan, index))
    assert [counts[client] / 400 for client in range(5)] == pytest.approx([n / 15 for n in range(1, 6)], abs=0.05)
    assert len(sampled(replace(plan, per_round=4), 0)) == 4


def test_one_after_the_other():
    plan = replace(PLAN, sampler="round-robin")
    assert [sampled(plan, index) for index in range(5)] == [(0, 1), (2, 3), (0, 4), (1, 2), (3, 4)]
    plan = replace(plan, num_novel=2)
    counts = Counter(client for index in range(3) for client in sampled(plan, index))
    assert sorted(counts.values()) == [2, 2, 2]


def test_by_loss_of_those_that_are_known_and_first_those_that_are_not():
    plan = replace(PLAN, sampler="loss", per_round=3)  # all five are candidates
    assert sampled(plan, 0, losses={0: 5.0, 1: 1.0, 2: 2.0, 3: 0.5}) == (0, 2, 4)


def test_who_was_asked_and_told_no_loss_has_the_lowest():
    before = {0: 5.0, 1: 1.0, 2: 2.0}
    assert known_losses(before, {0: None, 3: math.nan, 4: 0.7}) == {0: 0.7, 1: 1.0, 2: 2.0, 3: 0.7, 4: 0.7}
    assert known_losses({0: 0.2, 1: 3.0}, {0: math.inf}) == {0: 3.0, 1: 3.0}  # not its own, which would never rise
    assert known_losses({}, {1: None}) == {1: 0.0}


@pytest.mark.parametrize("more", [{}, {"min_updates": 2}])  # rounds without effect
def test_a_client_that_diverges_is_not_asked_in_every_round(tmp_path, more):
    chance = torch.Generator().manual_seed(0)
    clients = [
        (
            torch.rand(20, 4, generator=chance),
            torch.arange(20) % 3,
            torch.rand(6, 4, generator=chance),
            torch.arange(6) % 3,
        )
        for _ in range(6)
    ]
    clients[0][0][:] = 3e38
    data = sp.Federation.from_clients(clients, validation_rate=0.0)
    options = {"rounds": 12, "per_round": 2, "epochs": 1, "device": "cpu", "executor": "serial", "sampler": "loss"}
    run = sp.train("fedavg", data, "mlp:hidden=0", out=tmp_path / "run", **options, **more)
    asked = [turn.round for turn in run._folder.records.turns() if turn.client == 0]
    assert 1 <= len(asked) <= 4
    sp.train("fedavg", data, "mlp:hidden=0", out=tmp_path / "part", max_seconds=1e-9, **options, **more)
    for _ in range(11):
        part = sp.resume(tmp_path / "part", data)
    assert part._folder.records.turns() == run._folder.records.turns()


def test_a_function_from_python():
    plan, seen = replace(PLAN, sampler="given:choose"), []

    def choose(round_, clients, available, random):
        seen.append((round_.index, len(clients), available, torch.rand(1, generator=random).item()))
        return [4, 1, 0]

    assert sampled(plan, 2, sampler=choose) == (1, 4)  # the first two
    assert sampled(plan, 2, sampler=choose) == (1, 4)
    assert seen[0] == seen[1]
    assert seen[0][:3] == (2, 5, (0, 1, 2, 3, 4))
    for wrong, words in (
        ([5], "client 5, which is not there"),
        ([1, 1], "a client twice"),
        (None, "returned NoneType"),
    ):
        with pytest.raises(SparsonaError, match=words):
            sampled(plan, 0, sampler=lambda *_, wrong=wrong: wrong)


def last_two(round_, clients, available, random):
    return available[-2:]


def test_a_function_is_passed_again_and_a_comparison_takes_it(tmp_path, capsys):
    run = sp.train("fedavg", out=tmp_path / "run", sampler=last_two, max_seconds=1e-9, **OPTIONS)
    assert run.config["sampler"] == "given:last_two"
    assert "sampled by a function from Python" in run.summary["protocol"]
    assert len(sp.load(run.path).accuracies()) == 6
    with pytest.raises(SparsonaError, match="a function from Python"):
        sp.resume(run.path)
    run = sp.resume(run.path, sampler=last_two)
    assert {turn.client for turn in run._folder.records.turns()} == {4, 5}
    other = type(last_two)((lambda round_, clients, available, random: available[:2]).__code__, {}, "last_two")
    assert "not the code" not in capsys.readouterr().err
    sp.resume(run.path, sampler=other)
    assert "not the code this run began with: last_two (sampler)" in capsys.readouterr().err
    both = sp.compare(["local", "fedavg"], sampler=last_two, out=tmp_path / "both", **OPTIONS | {"rounds": 1})
    assert [{turn.client for turn in one._folder.records.turns()} for one in both.runs] == [{4, 5}] * 2


def test_a_run_that_samples_by_loss_goes_on_with_the_same_clients(tmp_path):
    whole = sp.train("fedavg", out=tmp_path / "whole", sampler="loss", **OPTIONS)
    sp.train("fedavg", out=tmp_path / "part", sampler="loss", max_seconds=1e-9, **OPTIONS)
    for _ in range(2):
        part = sp.resume(tmp_path / "part")
    assert part._folder.records.turns() == whole._folder.records.turns()
    assert len({turn.client for turn in whole._folder.records.turns()}) > 3  # unknown ones come first
    with pytest.raises(SparsonaError, match="--match steps with sampler=loss"):
        sp.compare(["local", "fedavg"], sampler="loss", match="steps", **OPTIONS)
    with pytest.raises(SparsonaError, match="sampler=loss for dpsgd"):
        sp.train("dpsgd", sampler="loss", **OPTIONS)
    with pytest.raises(SparsonaError, match="sampler 'dice'"):
        sp.train("fedavg", sampler="dice", **OPTIONS)
