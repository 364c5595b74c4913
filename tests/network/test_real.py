"""A server and clients, or peers, as processes, with keys and TLS: the simulation's bits, whoever is killed."""

from __future__ import annotations

import random

import pytest
from federations import free_addresses, make
from processes import wait_until
from real import Parties, finish, kill_at_random, undisturbed


def test_two_clients_and_a_server_give_the_simulations_records(forks, tmp_path):
    made = make(tmp_path / "federation", num_clients=2, rounds=2)
    with Parties(forks, made, tmp_path) as parties:
        parties.wait(60.0)
        found = parties.traces()
    assert found == undisturbed(made, tmp_path / "simulated")
    assert all((vault / "model.safetensors").exists() for vault in parties.vaults)


def peers(folder, **options):
    """Two that listen and one that dials."""
    return make(folder, "dispfl", 3, addresses=tuple(free_addresses(2)), graph="full", drop_rate=0.2, **options)


def test_a_peer_and_then_all_of_them_are_killed(forks, tmp_path):
    made = peers(tmp_path / "federation", rounds=3)
    with Parties(forks, made, tmp_path) as parties:
        for round_, names in ((1, ["site-1"]), (2, parties.clients)):
            wait_until(lambda round_=round_: parties.completed() >= round_ or parties.is_over())
            for name in names:
                if not parties.ended(name):
                    parties.kill(name)
                    parties.start(name)
        finish(parties, 100.0)
        assert parties.all["site-1"].starts > 1
        found = parties.traces()
    assert found == undisturbed(made, tmp_path / "simulated")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(3))
def test_peers_killed_at_random_moments_come_to_the_same_end(forks, tmp_path, seed):
    made = peers(tmp_path / "federation", rounds=8)
    with Parties(forks, made, tmp_path) as parties:
        kills = list(kill_at_random(parties, random.Random(seed), 10, pause=1.5))
        finish(parties, 300.0)
        found = parties.traces()
    assert found == undisturbed(made, tmp_path / "simulated"), kills


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg-ft", "fedspa", "pfedgate", "scaffold", "ditto"])
def test_methods_of_many_kinds(forks, tmp_path, method):
    made = make(tmp_path / "federation", method, 4, rounds=4, per_round=3, novel=1, drop_rate=0.2)
    with Parties(forks, made, tmp_path) as parties:
        parties.wait(200.0)
        found = parties.traces()
    assert found == undisturbed(made, tmp_path / "simulated")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(6))
def test_killed_at_random_moments_it_comes_to_the_same_end(forks, tmp_path, seed):
    """See kills.py, which does this as often as one likes."""
    made = make(tmp_path / "federation", rounds=8, drop_rate=0.2)
    with Parties(forks, made, tmp_path) as parties:
        kills = list(kill_at_random(parties, random.Random(seed), 10, pause=1.5))
        finish(parties, 300.0)
        found = parties.traces()
    assert found == undisturbed(made, tmp_path / "simulated"), kills
