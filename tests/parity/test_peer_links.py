"""Methods without a server, over real links with mutual TLS and no server anywhere: the simulator's bits and bytes."""

from __future__ import annotations

import threading

import pytest
from federations import free_addresses, make, rows

import sparsona as sp

pytestmark = pytest.mark.long

CASES = {
    "dispfl": {"graph": "random:2", "drop_rate": 0.2, "sampler": "round-robin", "per_round": 3},
    "dispfl, own starts": {"graph": "ring", "drop_rate": 0.2, "initial_weights": "own", "points": ["trained"]},
    "dpsgd": {"graph": "ring", "points": ["received", "consensus"], "availability": "diurnal:3:0.7"},
}


@pytest.mark.parametrize("case", CASES)
def test_peers_give_the_simulators_bits(case, tmp_path):
    """Two seeds that listen, and two peers that only dial."""
    addresses, errors = tuple(free_addresses(2)), []
    method = case.partition(",")[0]
    made = make(tmp_path, method, 4, addresses=addresses, rounds=3, **CASES[case])

    def play(index):
        own = {"key": made.key_path(index), "vault": tmp_path / f"peers/{index}", "device": "cpu"}
        try:
            sp.be_peer(made.path, "digits", listen=addresses[index : index + 1], **own, **made.data)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=play, args=(index,), daemon=True) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert errors == []
    run = sp.gather(tmp_path / "run", sorted((tmp_path / "peers").iterdir()))
    assert rows(run.path) == rows(made.simulate(tmp_path / "simulated").path)
    assert run.summary["bytes"]["total"] > 0
    assert sp.replay(run.path, ["digits"], out=tmp_path / "replay", **made.data).is_same
