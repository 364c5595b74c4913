"""A server and clients as processes, with keys, certificates and TLS: the simulation's bits, whoever is killed."""

from __future__ import annotations

import random

import pytest
from federations import make, traces
from real import Parties, finish, kill_at_random


def test_two_clients_and_a_server_give_the_simulations_records(forks, tmp_path):
    made = make(tmp_path / "federation", num_clients=2, rounds=2)
    with Parties(forks, made, tmp_path) as parties:
        parties.wait(60.0)
        found = traces(parties.run)
    assert found == traces(made.simulate(tmp_path / "simulated").path)
    for index in range(2):
        assert (tmp_path / "vaults" / f"site-{index}" / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg-ft", "fedspa", "pfedgate", "scaffold", "ditto"])
def test_methods_of_many_kinds(forks, tmp_path, method):
    made = make(tmp_path / "federation", method, 4, rounds=4, per_round=3, novel=1, drop_rate=0.2)
    with Parties(forks, made, tmp_path) as parties:
        parties.wait(200.0)
        found = traces(parties.run)
    assert found == traces(made.simulate(tmp_path / "simulated").path)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(6))
def test_killed_at_random_moments_it_comes_to_the_same_end(forks, tmp_path, seed):
    """See kills.py, which does this as often as one likes."""
    made = make(tmp_path / "federation", rounds=8, drop_rate=0.2)
    with Parties(forks, made, tmp_path) as parties:
        kills = list(kill_at_random(parties, random.Random(seed), 10, pause=1.5))
        finish(parties, 300.0)
        found = traces(parties.run)
    assert found == traces(made.simulate(tmp_path / "simulated").path), kills
