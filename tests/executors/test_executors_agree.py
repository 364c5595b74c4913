"""What runs many clients at once does what `serial` does: the same messages, costs and masks, weights within rounding.

On a CPU `graphed` and `stacked` neither compile nor capture; how they load, schedule and unload clients is the same.
SPARSONA_TEST_DEVICE=cuda runs all of this on a GPU.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
import torch
from method_lines import anywhere, further_rows_are_slow
from torch import nn

import sparsona as sp
from sparsona import methods
from sparsona.core.errors import SparsonaError
from sparsona.core.tree import leaves
from sparsona.engine.rounds import simulate
from sparsona.executors import choose, choose_device, graphed, numeric_mode, open_executor
from sparsona.executors.devices import Devices
from sparsona.executors.graphed import Graphed
from sparsona.executors.serial import Serial
from sparsona.executors.stacked import Stacked
from sparsona.experiment import build

pytestmark = pytest.mark.long

DEVICE = os.environ.get("SPARSONA_TEST_DEVICE", "cpu")
COMMON = {"per_round": 4, "rounds": 2, "epochs": 1, "batch_size": 8, "lr_decay": 0.5, "device": DEVICE}
FEWER = {"clients": 6, "data_rate": 0.2}  # where the data are digits
EXECUTORS = {"stacked": Stacked, "stacked by two": lambda s: Stacked(s, 2), "graphed": lambda s: Graphed(s, 3)}
# Stacks of two are in test_phase_options and test_shapes; here they are more of the same.
SHOWN = ["stacked", "graphed", pytest.param("stacked by two", marks=pytest.mark.slow)]


@pytest.fixture(autouse=True)
def results_of_few_clients_are_read_together(monkeypatch):
    """So that four clients a round are more than one group."""
    monkeypatch.setattr(graphed, "FINISHED_TOGETHER", 3)


def _is_more_of_the_same(name, executor):
    own = ("fedspa", "dispfl", "pfedgate", "fedalt", "fedavg")
    return executor == "stacked by two" or (executor == "graphed" and DEVICE == "cpu" and name not in own)


def smooth_net():
    """Without kinks: where ReLU or a maximum of equal pixels falls either way, rounding becomes a difference."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 24),
        nn.Tanh(),
        nn.Linear(24, 10),
    )


def play(make, name, model=smooth_net, federation=None, **more):
    """A method by its name, for two rounds."""
    options = {**COMMON, **(FEWER if federation is None else {}), "points": ["trained"], **more}
    config = build.make_config(name, options, federation, model)
    context = build.make_context(config, federation, model)
    return played(make, context)


@lru_cache(maxsize=1)  # tests of one method come one after another, each with another executor
def in_turn(name, more):
    """The same by `serial`, which all are compared with."""
    return play(Serial, name, **json.loads(more))


def assert_agrees(executor, name, **more):
    assert_agree(in_turn(name, json.dumps(more)), play(EXECUTORS[executor], name, **more))


def played(make, context):
    """Everything that a run's rounds and its closing leave behind."""
    star, rounds = simulate(context, make(context)), context.plan.rounds
    with numeric_mode(context):
        population, records = star.start(), []
        for index in range(rounds):
            population, record = star.play(population, index)
            records.append(record)
        records[-1].evaluations.extend(star.evaluate(population, rounds))
        closing, tuned = star.finish(population)
    return population, [*records, closing], tuned


def assert_agree(one, other):
    (population, records, tuned), (population2, records2, tuned2) = one, other
    for value, value2 in (
        (population.server, population2.server),
        (population.states, population2.states),
        (tuned, tuned2),
    ):
        pairs = list(zip(leaves(value), leaves(value2), strict=True))
        for (path, tensor), (path2, tensor2) in pairs:
            assert path == path2
            if tensor.dtype is torch.bool:
                assert torch.equal(tensor, tensor2), path
            else:
                torch.testing.assert_close(tensor, tensor2, rtol=0, atol=1e-5)
    for record, record2 in zip(records, records2, strict=True):
        for turn, turn2 in zip(record.turns, record2.turns, strict=True):
            assert (turn.client, turn.traffic, turn.aggregated, turn.dropped) == (
                turn2.client,
                turn2.traffic,
                turn2.aggregated,
                turn2.dropped,
            )
            for count in ("examples", "steps", "train_flops", "search_flops"):
                assert getattr(turn.tally, count) == getattr(turn2.tally, count), count
            assert turn.tally.loss == pytest.approx(turn2.tally.loss, rel=1e-4)
            assert list(turn.tally.measures) == list(turn2.tally.measures)
            for name, values in turn.tally.measures.items():
                assert values == pytest.approx(turn2.tally.measures[name], abs=1e-4, nan_ok=True), name
        for found, found2 in zip(record.evaluations, record2.evaluations, strict=True):
            assert (found.client, found.point, found.count) == (found2.client, found2.point, found2.count)
            assert abs(found.correct - found2.correct) <= 1  # a tie may fall either way
            assert found.loss == pytest.approx(found2.loss, rel=1e-3)
            assert int((found.confusion - found2.confusion).abs().sum()) <= 2


# Without a GPU `graphed` captures nothing, and what is left of it does not depend on the method: a few show it.
@pytest.mark.parametrize(
    ("name", "executor"),
    [
        pytest.param(
            *(*param.values, executor),
            marks=[*param.marks, *([pytest.mark.slow] if _is_more_of_the_same(*param.values, executor) else [])],
        )
        for param in further_rows_are_slow(sorted(methods.METHODS))
        for executor in EXECUTORS
    ],
)
def test_every_method(name, executor):
    assert_agrees(executor, name, **anywhere(name))


@pytest.mark.parametrize("executor", SHOWN)
@pytest.mark.parametrize(
    "more",
    [
        {"batch_size": 1000},  # larger than anybody's data
        {"drop_rate": 0.4, "novel": 1, "tune_epochs": 1},
        {"everyone_trains": True},  # masks must be sent again
        {"stateless": True, "points": ["trained", "global"]},
        {"capacities": [0.2, 0.5, 1.0], "partition": "dirichlet:0.5"},
    ],
    ids=lambda more: "-".join(more),
)
def test_whatever_the_engine_is_asked(executor, more):
    assert_agrees(executor, "fedspa", **more)


@pytest.mark.parametrize("executor", SHOWN)
@pytest.mark.parametrize(
    "more",
    [
        {"per_round": None, "drop_rate": 0.3, "novel": 1, "tune_epochs": 1, "graph": "ring"},
        {"points": ["trained", "consensus"], "divide_by": "used", "capacities": [0.2, 0.5, 1.0], "graph": "full"},
    ],
    ids=lambda more: "-".join(more),
)
def test_whatever_peers_are_asked(executor, more):
    assert_agrees(executor, "dispfl", rounds=3, **more)


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(16), nn.Dropout(0.5)], ids=["BatchNorm", "dropout"])
@pytest.mark.parametrize("executor", sorted(EXECUTORS))
def test_what_must_not_be_stacked_is_not(executor, layer):
    def model():
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), layer, nn.Tanh(), nn.Linear(16, 10))

    assert_agree(play(Serial, "fedavg", model), play(EXECUTORS[executor], "fedavg", model))


@pytest.mark.parametrize("executor", sorted(EXECUTORS))
def test_images_are_cropped_and_mirrored_alike(executor):
    rng, y = np.random.default_rng(0), np.arange(240) % 4
    x = (rng.integers(60, size=(240, 3, 8, 8)) + 45 * y[:, None, None, None]).astype(np.uint8)
    look = sp.View((0.5,) * 3, (0.25,) * 3, pad=2, flip=True)
    federation = sp.federate(x, y, clients=5, partition="dirichlet:1", view=look)

    def model():
        return nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(72, 4))

    one, other = (play(make, "fedspa", model, federation) for make in (Serial, EXECUTORS[executor]))
    assert_agree(one, other)


@pytest.mark.parametrize("name", ["stacked", "graphed"])
def test_they_can_tell_of_compiling(name):
    def report(text):
        assert text == ""  # nothing is compiled here

    context = build.make_context(build.make_config("fedavg", {"device": "cpu"}))
    assert open_executor(name, context, report)._programs.report is report


class _Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.last = nn.LSTM(8, 6, batch_first=True), nn.Linear(6, 10)

    def forward(self, images):
        return self.last(self.lstm(images.squeeze(1))[0][:, -1])


def test_choices_that_cannot_be_are_refused():
    context = build.make_context(build.make_config("fedavg", {"device": "cpu"}))
    assert choose("auto", context) == choose("stacked", context) == "stacked"
    with pytest.raises(SparsonaError, match="without a GPU"):
        choose("graphed", context)
    with pytest.raises(SparsonaError, match="precision bf16 on a CPU"):
        choose_device("cpu", "bf16")
    recurrent = build.make_context(build.make_config("fedavg", {"device": "cpu"}, model=_Recurrent), model=_Recurrent)
    with pytest.raises(SparsonaError, match="several clients at once"):
        choose("stacked", recurrent)
    if not torch.cuda.is_available():
        with pytest.raises(SparsonaError, match="no GPU"):
            choose_device("cuda", "fp32")


@pytest.fixture
def on_two():
    """Opens an executor of two processes, on one and the same device here."""
    opened = []

    def make(context):
        name, kind = ("cuda:0", "graphed") if DEVICE == "cuda" else ("cpu", "stacked")
        opened.append(open_executor(kind, replace(context, devices=(name, name))))
        return opened[-1]

    yield make
    for executor in opened:
        executor.close()


@pytest.fixture
def quick_starts(request):
    """Forks on a CPU: new processes import torch for seconds. The tests below start such."""
    if DEVICE == "cpu":
        request.getfixturevalue("forked_workers")


@pytest.mark.parametrize(("name", "more"), [("fedspa", {}), ("dispfl", {}), ("fedalt", {"everyone_trains": True})])
def test_two_devices_share_out_the_turns(quick_starts, on_two, name, more):
    assert_agree(in_turn(name, json.dumps(more)), play(on_two, name, **more))


def test_a_process_that_ends_is_named_with_its_device(on_two):
    def with_one_killed(context):
        executor = on_two(context)
        assert isinstance(executor, Devices)
        executor._workers[1].process.kill()
        return executor

    with pytest.raises(SparsonaError, match=r"the process on (cpu|cuda:0) ended \(exit code -9\)"):
        play(with_one_killed, "fedavg")


def test_a_process_that_ends_between_rounds_is_named_too(quick_starts, on_two):
    config = build.make_config("fedavg", {**COMMON, **FEWER}, None, smooth_net)
    context = build.make_context(config, None, smooth_net)
    executor = on_two(context)
    star = simulate(context, executor)
    population, _ = star.play(star.start(), 0)
    executor._workers[1].process.kill()
    executor._workers[1].process.wait()
    with pytest.raises(SparsonaError, match=r"the process on (cpu|cuda:0) ended \(exit code -9\)"):
        star.play(population, 1)


@pytest.mark.parametrize("name", ["cuda:1", "cuda:1,cuda:0", "cuda:0,cpu", "cuda:0,", "gpu", "cpu,cpu"])
def test_a_list_of_devices_has_gpus_and_begins_with_the_first(name):
    with pytest.raises(SparsonaError, match="begins with cuda:0"):
        build.make_config("fedavg", {"device": name}, None, None)


def test_a_list_of_devices_needs_as_many():
    if torch.cuda.is_available():
        with pytest.raises(SparsonaError, match="torch sees"):
            choose_device("cuda:0,cuda:99", "fp32")
    else:
        with pytest.raises(SparsonaError, match="torch sees no GPU here"):
            choose_device("cuda:0,cuda:1", "fp32")
