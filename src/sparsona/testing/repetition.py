"""Repetition gives the same: with the same seed, after a checkpoint, on copies, and for several clients at once."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparsona.core.tree import leaves, map_leaves
from sparsona.engine.rounds import simulate
from sparsona.executors.stacked import Stacked
from sparsona.runs.checkpoint import Checkpoints, Progress
from sparsona.testing.case import (
    Case,
    fingerprint,
    population_print,
    require,
    shapes,
    smooth_net,
    step,
)


def same_seed_same_bits(case: Case) -> None:
    """Two runs of one seed are the same to the bit, and one of another seed is not."""
    prints, again = case.history.prints, case.start().play(2).prints
    require(prints[:3] == again, "two runs of the same seed differ after two rounds")
    require(prints[1] != case.start(seed=1).play(1).prints[1], "runs of two seeds are the same: draws have no seed")


def generators_are_untouched(case: Case) -> None:
    """Every draw has a name and a seed: the global generators are not used."""

    def states() -> tuple[Any, ...]:
        return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()  # type: ignore[index]

    before = states()
    history = case.start().play(1)
    history.engine.evaluate(history.last, 1)
    require(history.final, "no final record")
    for name, one, other in zip(("torch", "numpy", "random"), before, states(), strict=True):
        require(one == other, f"the global generator of {name} was used: draw from seeds.own(...) or seeds.shared(...)")


def inputs_are_unchanged(case: Case) -> None:
    """No function of a method edits what it is handed."""
    history = case.history
    history.engine.evaluate(history.last, len(history.records))
    require(history.final, "no final record")
    for index, (population, before) in enumerate(zip(history.populations, history.prints, strict=True)):
        require(population_print(population) == before, f"a State or the Server after {index} rounds was changed later")
    now = fingerprint((history.context.params, history.context.buffers))
    require(now == history.constants, "the initial weights or buffers were changed")


def state_keeps_its_structure(case: Case) -> None:
    """What is stored is read back into the structure that `init_client` and the server's `init` make."""
    history = case.history
    for client, state in history.last.states.items():
        fresh = history.context.fresh_state(client)
        require(shapes(state) == shapes(fresh), f"client {client}'s State has other names, shapes or dtypes than fresh")
    start = history.populations[0].server
    require(shapes(history.last.server) == shapes(start), "the Server has other names, shapes or dtypes than at first")


def state_survives_the_store(case: Case) -> None:
    """A run resumed from a checkpoint equals one that was never interrupted."""
    history, rounds = case.history, len(case.history.records) - 1
    population, (_, tuned) = history.populations[rounds], history.final
    fresh = case.start()
    initial = fresh.engine.start()
    with tempfile.TemporaryDirectory() as folder:
        store = Checkpoints(Path(folder), history.method)
        store.save(Progress(rounds, 1.5, population, tuned, True), history.populations[0])
        found = Checkpoints(Path(folder), fresh.method).load(fresh.engine, initial)
        assert found is not None
        require(population_print(found.population) == history.prints[rounds], "what is read back is not what was saved")
        require(
            fingerprint(tuple(found.tuned.values())) == fingerprint(tuple(tuned.values())), "tuned models differ then"
        )
        require((found.completed, found.seconds, found.finished) == (rounds, 1.5, True), "progress differs then")
        following, _ = fresh.engine.play(found.population, rounds)
        require(population_print(following) == history.prints[rounds + 1], "the round after a checkpoint differs")


def loss_and_update_are_pure(case: Case) -> None:
    """`loss` and `update` on copies give the same, and leave no trace in what they are handed."""
    history = case.history
    work = history.work(0)
    for phase in history.method.phases:
        here, batch = history.enter(phase, work, 0), history.batch(phase, 0)
        before = fingerprint(here)
        copy = map_leaves(lambda _path, value: value.clone(), here)
        loss, again = phase.loss(here, batch)[0], phase.loss(copy, batch)[0]
        require(torch.equal(loss, again), f"phase '{phase.name}': the loss of the same Work differs: {loss}, {again}")
        require(
            fingerprint(step(phase, here, batch, 1.0)) == fingerprint(step(phase, copy, batch, 1.0)),
            f"phase '{phase.name}': the same step gives different results",
        )
        require(fingerprint(here) == before, f"phase '{phase.name}': loss or update changed the Work it was handed")


def clients_run_together_as_alone(case: Case) -> None:
    """The executor that runs many clients at once gives what one after another gives, but for rounding."""
    alone, stacked = case.start(smooth_net, rounds=1).play(1), case.start(smooth_net, rounds=1)
    stacked.engine = simulate(stacked.context, Stacked(stacked.context))
    stacked.play(1)
    pairs = (alone.last.server, stacked.last.server), (alone.last.states, stacked.last.states)
    for one, other in pairs:
        for (path, value), (_, value2) in zip(leaves(one), leaves(other), strict=True):
            near = torch.equal(value, value2) if value.dtype is torch.bool else torch.allclose(value, value2, 0, 1e-5)
            require(
                near,
                f"{path} differs: perhaps a mean over a batch counts padding, whose batch.weight is 0 (divide by "
                "batch.weight.sum(), as task.mean_loss does); or loss and update are not functions of tensors alone",
            )
    for turn, turn2 in zip(alone.records[0].turns, stacked.records[0].turns, strict=True):
        require(turn.traffic == turn2.traffic, f"client {turn.client}'s messages have other sizes")
        require(
            (turn.tally.train_flops, turn.tally.search_flops) == (turn2.tally.train_flops, turn2.tally.search_flops),
            f"client {turn.client}'s FLOPs differ",
        )
