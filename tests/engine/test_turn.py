"""The reference turn: what a phase means, and what is counted."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from sparsona.core.errors import SparsonaError
from sparsona.core.method import Phase
from sparsona.core.round import Client, Round
from sparsona.core.seeds import Seeds
from sparsona.core.task import Task
from sparsona.core.tree import Tree, scale, subtract
from sparsona.core.update import dense, message
from sparsona.data.batches import Examples, in_order, shuffled
from sparsona.engine.evaluate import check_tested
from sparsona.engine.jobs import Job, Tally, unreadable
from sparsona.engine.population import check_finite
from sparsona.engine.turn import ClientProbe, run_phase


@dataclass(frozen=True)
class Work:
    params: Tree
    buffers: Tree
    extra: torch.Tensor


@pytest.fixture
def task():
    return Task(lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), (4,), 3)


@pytest.fixture
def examples():
    draws = torch.Generator().manual_seed(5)
    return Examples(torch.randn(11, 4, generator=draws), torch.randint(3, (11,), generator=draws))


ROUND = Round(2, 10, 0.5, 4, Seeds(3, client=1, round=2), Client(1, 11))


def phase_of(task, **more) -> Phase:
    def loss(work, batch):
        first = batch[0] if isinstance(batch, tuple) else batch
        outputs, buffers = task.forward(work.params, work.buffers, first.inputs, True)
        return task.mean_loss(outputs, first), buffers

    def update(work, grads, tick):
        return replace(work, params=subtract(work.params, scale(grads["params"], 0.1 * tick.lr_scale)))

    return Phase(name="train", trains=("params",), loss=loss, update=update, **more)


def run(task, examples, phase):
    params, buffers = task.init(0)
    tally = Tally()
    probe = ClientProbe(task, examples, examples, ROUND, tally)
    return run_phase(phase, Work(params, buffers, torch.zeros(())), task, examples, probe, ROUND, tally), tally, params


def test_equals_a_plain_loop(task, examples):
    work, tally, params = run(task, examples, phase_of(task, epochs=2))
    module = task.module(params, task.init(0)[1])
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1 * 0.5)
    for epoch in range(2):
        for batch in shuffled(examples, 4, ROUND.seeds.own(f"train/{epoch}")):
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(batch.inputs), batch.targets).backward()
            optimizer.step()
    for name, value in module.named_parameters():
        torch.testing.assert_close(work.params[name], value)
    assert (tally.examples, tally.steps) == (22, 6)
    assert tally.train_flops == 22 * 3 * (2 * 12 + 3)


def test_max_steps_repeats_and_after_batch(task, examples):
    calls = []

    def after(work, batch, tick):
        calls.append((len(batch.targets), int(tick.step)))
        return replace(work, extra=work.extra + 1)

    work, tally, _ = run(task, examples, phase_of(task, epochs=3, max_steps=4, repeats=2, after_batch=after))
    assert tally.steps == 8
    assert calls == [(4, 1), (4, 3), (3, 5), (4, 7)]
    assert int(work.extra) == 4


def test_two_batches_per_step(task, examples):
    _, tally, _ = run(task, examples, phase_of(task, batches_per_step=2))
    assert (tally.steps, tally.examples) == (1, 8)  # 4 and 4; the 3 that are left have no partner
    few = Examples(examples.inputs[:5], examples.targets[:5])
    _, tally, _ = run(task, few, phase_of(task, batches_per_step=2))
    assert (tally.steps, tally.examples) == (1, 4)  # batches of 2, since one of 4 would have no partner


def test_enter_sees_the_probe_and_is_charged(task, examples):
    def enter(work, probe, round_):
        return replace(work, extra=torch.tensor(float(sum(len(batch.targets) for batch in probe.train()))))

    work, tally, _ = run(task, examples, phase_of(task, enter=enter))
    assert int(work.extra) == 11
    assert tally.search_flops == 11 * task.layout.forward_flops()


def test_probe_batch_is_charged_as_a_gradient_and_differs_each_time(task, examples):
    tally = Tally()
    probe = ClientProbe(task, examples, examples, ROUND, tally)
    first, second = probe.batch(), probe.batch()
    assert not torch.equal(first.index, second.index)
    assert tally.search_flops == 2 * 4 * 3 * task.layout.forward_flops()
    assert not hasattr(probe, "test")


def test_divergence_names_client_and_round(task, examples):
    bad = replace(examples, inputs=examples.inputs * float("inf"))
    with pytest.raises(SparsonaError, match="client 1's loss is nan in round 3"):
        run(task, bad, phase_of(task))


def test_an_update_with_nan_is_refused(task):
    params, _ = task.init(0)
    poisoned = params.like(params.flat.clone().index_fill_(0, torch.tensor([3]), float("nan")))
    north = Client(1, 4, name="north")
    check_finite(message(ROUND, {"model": dense(params)}), north)
    with pytest.raises(SparsonaError, match=r"client north's update in round 3 .* 'model'"):
        check_finite(message(ROUND, {"model": dense(poisoned)}), north)
    with pytest.raises(SparsonaError, match="claims weight"):
        check_finite(message(ROUND, {"model": dense(params)}, weight=float("inf")), north)


def test_batches_cover_every_example_once(examples):
    assert sorted(i for b in shuffled(examples, 4, 1) for i in b.index.tolist()) == list(range(11))
    assert [len(b.targets) for b in in_order(examples, 4)] == [4, 4, 3]
    joined = [len(b.targets) for b in shuffled(examples, 5, 1, no_single=True)]
    assert joined == [5, 6]


def test_errors_call_a_client_by_its_name():
    with pytest.raises(SparsonaError, match="client ward 7 has no test data"):
        check_tested("ward 7", 0)
    job = Job("train", 3, Round(4, 5, 1.0, 8, Seeds(0)), ())
    assert unreadable(job, "ward 7").what.startswith("client ward 7 cannot read its message of round 5")
    tuning = replace(job, round=replace(job.round, index=5))
    assert "its message of final tuning" in unreadable(tuning).what
    assert unreadable(job).what.startswith("client 3 cannot read")
