"""DisPFL: peers with masks. Its arithmetic is in tests/golden."""

from __future__ import annotations

import pytest
import torch
from lenet5 import HALF, MASK, SIZE, UNCLIPPED, UNIFORM

import sparsona as sp
from sparsona.engine.rounds import received_work, simulate
from sparsona.experiment.build import make_configs, make_context

BATTERY = {"dispfl": {"options": {"density": 0.6, "graph": "random:2"}, "accuracy": 0.35}}
MEMORY = [
    # The mask of what it has, and the next.
    ("dispfl", UNIFORM, HALF + 2 * MASK, 3 * HALF + 2 * MASK, *2 * [2 * HALF + 2 * MASK + SIZE]),
    ("dispfl", UNCLIPPED, HALF + 2 * MASK, *2 * [3 * HALF + 2 * MASK], 2 * HALF + 2 * MASK + SIZE),
]


def test_peers_have_no_global_model(tmp_path):
    with pytest.raises(sp.SparsonaError, match="dispfl"):
        sp.train("dispfl", clients=4, rounds=1, data_rate=0.3, points=["global"], out=tmp_path / "run")


def test_peers_may_start_from_weights_of_their_own():
    def first_weights(**options):
        config, own = make_configs("dispfl", {"clients": 3, "density": 1.0, **options})
        context = make_context(config, method_config=own)
        return [context.fresh_state(client).params.flat for client in range(3)], context.params.flat

    weights, common = first_weights(initial_weights="own")
    again, _ = first_weights(initial_weights="own")
    assert all(torch.equal(one, other) for one, other in zip(weights, again, strict=True))
    assert not any(torch.equal(one, common) for one in weights)
    assert not torch.equal(weights[0], weights[1])
    assert all(torch.equal(one, common) for one in first_weights()[0])


@pytest.mark.parametrize("divide_by", ["new", "used"])
def test_weights_of_their_own_are_mixed_in_the_first_round_and_not_sent(divide_by, tmp_path):
    """Algorithm 1, lines 6 to 8, at t = 0. The arithmetic is in tests/golden; here: whose, and that executors agree."""
    options = {"clients": 4, "graph": "ring", "data_rate": 0.3, "rounds": 3, "density": 0.5, "divide_by": divide_by}
    options |= {"initial_weights": "own", "per_round": 4}
    runs = [
        sp.train("dispfl", executor=way, transform=["half"], out=tmp_path / way, **options)
        for way in ("serial", "workers")
    ]
    sent = [run.to_frame("round").sort_values("round")["bytes_sent"].tolist() for run in runs]
    assert sent[0] == sent[1]
    assert sent[0][0] == 0 < sent[0][-1]
    assert runs[0].accuracies().tolist() == runs[1].accuracies().tolist()
    config, own = make_configs("dispfl", options)
    context = make_context(config, method_config=own)
    states = [context.fresh_state(client) for client in range(4)]
    work = received_work(context, simulate(context).start(), 0, completed=0)
    total = sum(states[client].params.flat for client in (0, 1, 3))
    count = sum(states[client].mask.flat.float() for client in (0, 1, 3))
    expected = total / count.clamp(min=1) * states[0].mask.flat
    torch.testing.assert_close(work.params.flat, expected)


def test_the_busiest_peer_as_the_paper_counts(tmp_path):
    """On a ring each peer receives two messages a round; half of the values, four bytes each, masks free."""
    run = sp.train("dispfl", clients=4, rounds=3, data_rate=0.3, graph="ring", density=0.5, out=tmp_path / "run")
    cost = sp.cost("dispfl", clients=4, graph="ring", density=0.5, data="digits", counting="paper")
    assert run.summary["bytes"]["busiest_round_paper"] == cost.paper.busiest
    assert run.summary["bytes"]["busiest_round_in"] > run.summary["bytes"]["busiest_round_paper"]
