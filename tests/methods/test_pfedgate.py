"""pFedGate keeps its promises: the budget in every batch, what is sent is what moved, predictions that stand alone."""

from __future__ import annotations

import json
import math

import pytest
import torch
from lenet5 import SIZE
from torch import nn

import sparsona as sp
from sparsona import methods, models
from sparsona.core.errors import SparsonaError
from sparsona.core.round import Client
from sparsona.engine.jobs import Job
from sparsona.engine.plan import novel_clients
from sparsona.engine.rounds import received_work, simulate
from sparsona.engine.turn import begin, end, phases_of, train_alone
from sparsona.executors.serial import Serial
from sparsona.executors.stacked import Stacked
from sparsona.experiment import build
from sparsona.methods.pfedgate import PFedGateConfig
from sparsona.methods.pfedgate.blocks import spread
from sparsona.methods.pfedgate.config import cut, make_budget, select
from sparsona.methods.pfedgate.model import GatedModel
from sparsona.runs.options import CONDITIONS

BATTERY = {
    "pfedgate": {
        "options": {"density": 0.7, "capacities": [1.0, 0.6, 0.15], "momentum": 0.5},
        "accuracy": 0.45,
    }
}
GATE = 4 * 31_488  # of a gate for 28x28 images and 40 blocks: 784 * 40 + 40, norms of 2 * 40 and 8
OWN = GATE + 4 * (2 + 2 * 40 + 2 * 40)
# 40 blocks of LeNet5's eight tensors: gate and statistics, two scores a block. At work two momenta, the budget, the
# mean input, the model behind the gate, and a gradient of both.
MEMORY = [("pfedgate", {}, OWN, OWN + SIZE, OWN + 2 * GATE + 4 * SIZE + 4 * (5 * 40 + 784), 0)]
COMMON = {
    "clients": 6,
    "per_round": 3,
    "rounds": 2,
    "batch_size": 16,
    "executor": "serial",
    "device": "cpu",
    "data_rate": 0.15,
}
AUTHORS = {
    key: value
    for key, value in methods.published(methods.METHODS["pfedgate"], {"preset": "authors"}).items()
    if key not in {*CONDITIONS, "density"}
}


def net():
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 20), nn.ReLU(), nn.Linear(20, 10))


def context_of(model=net, **more):
    return build.make_context(build.make_config("pfedgate", {**COMMON, **more}, model=model), None, model)


def turn_of(context, client=0):
    """A client's first turn: what it sends, and the work it ends with."""
    half, round_ = context.method.server, context.plan.round_at(0)
    server = half.init(context.params, context.clients, context.plan.seeds)
    turn = begin(context, Job("train", client, round_, (half.reply(server, context.clients[client], round_),)))
    for phase in phases_of(context, turn):
        train_alone(context, turn, phase)
    outcome = end(context, turn)
    return outcome.state, outcome.message, turn.work, turn.tally


@pytest.fixture
def selections(monkeypatch):
    """What every batch kept (every example, where each has a model of its own), as rows of zeros and ones."""
    seen = []
    adapt, each = GatedModel.adapt, GatedModel.each

    def watched_adapt(self, work, scores, weights):
        params, kept = adapt(self, work, scores, weights)
        if not torch._C._functorch.is_batchedtensor(kept):
            seen.append((work, kept[None]))
        return params, kept

    def watched_each(self, work, *rest):
        outputs, kept = each(self, work, *rest)
        seen.append((work, kept))
        return outputs, kept

    monkeypatch.setattr(GatedModel, "adapt", watched_adapt)
    monkeypatch.setattr(GatedModel, "each", watched_each)
    return seen


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"solver": "exact"},
        {"solver": "exact", "blocks_of": "operators", "gating": "sample", "density": 0.6},
        {"greedy_by": "density", "paths": 2},
        {"gating": "sample", "deploy_gate": "sample"},
        {"gating": "client"},
        {"updates": "alternating"},
        {"blocks": "filter", "density": 0.7, "num_blocks": 10, "smallest": 0.1},
        {"blocks": "channel", "density": 0.7, "smallest": 0.05},
        {"equal_chunks": True, "density": 0.45},
        {"budget": "flops"},
        {"sigmoid": False, "pre_norm": False, "post_norm": False},
    ],
    ids=lambda more: "-".join(f"{key}={value}" for key, value in more.items()) or "default",
)
def test_the_budget_holds_in_every_batch(more, selections):
    context = context_of(**{"density": 0.4, **more})
    model = context.method.phases[0].loss.__self__
    _, update, _, _ = turn_of(context)
    assert len(selections) >= 3
    for work, kept in selections:
        blocks = model.of(work)[0].blocks
        costs = torch.tensor(blocks.flops if more.get("budget") == "flops" else blocks.sizes)
        spent = (kept * costs).sum(-1)
        assert float(spent.max()) <= more.get("density", 0.4) * int(costs.sum())
        assert float(kept[:, list(blocks.always)].min()) == 1
        assert float(spent.min()) > 0.6 * more.get("density", 0.4) * int(costs.sum())  # and it is made use of
    q = update.parts["update"].num_values / context.task.layout.size
    assert 0.2 <= q <= 1


@pytest.mark.parametrize("gating", ["batch", "sample"])
def test_a_turn_is_measured(gating, selections):
    """FLOPs, s', q, the formula's q and the chosen blocks, against sums over what every batch kept."""
    context = context_of(density=0.4, gating=gating, deploy_gate="sample" if gating == "sample" else "stored")
    _, update, work, tally = turn_of(context)
    here = context.method.phases[0].loss.__self__.of(work)[0]
    sizes, layout = torch.tensor(here.blocks.sizes).double(), context.task.layout
    spread_to = [spread(here.blocks, kept) for _, kept in selections]
    count = context.clients[0].num_examples
    batches = [min(16, count - start) for start in range(0, count, 16)]
    epochs = len(selections) // len(batches)
    flops, density, newly = 0.0, 0.0, []
    missed, frequency, union = 1.0, torch.zeros(len(here.blocks)), torch.zeros(len(here.blocks))
    for (_, kept), entries, size in zip(selections, spread_to, batches * epochs, strict=True):
        each = size / len(kept)  # one row for the batch, or one for each example
        assert each == (1 if gating == "sample" else size)
        for row in entries:
            nonzeros = [int(part.count_nonzero()) for part in row.split(layout.sizes)]
            flops += each * (layout.forward_flops(nonzeros) + here.form.layout.forward_flops())
        density += each * float((kept.double() @ sizes).sum()) / sum(here.blocks.sizes)
        used = kept.amax(0)
        before = float(union.double() @ sizes)
        added = float(union.maximum(used).double() @ sizes) - before
        newly.append(added / (sum(here.blocks.sizes) - before) if added else 0.0)
        missed *= 1 - float(used.double() @ sizes) / sum(here.blocks.sizes)
        frequency, union = frequency + used, union.maximum(used)
    steps = context.method.phases[0].step_flops(work)
    assert tally.train_flops == 3 * flops + len(selections) * steps
    measured = {name: torch.tensor(values) for name, values in tally.measures.items()}
    assert float(measured["density_used"]) == pytest.approx(density / (epochs * count), rel=1e-5)
    assert float(measured["upload_share"]) == pytest.approx(update.parts["update"].num_values / layout.size, rel=1e-6)
    assert float(measured["upload_share_formula"]) == pytest.approx(1 - missed, rel=1e-5)
    first = [*newly, *[math.nan] * 8][:8]
    assert measured["newly_used"].tolist() == pytest.approx(first, rel=1e-4, abs=1e-6, nan_ok=True)
    assert 1 - math.prod(1 - p for p in newly) == pytest.approx(float(measured["upload_share"]), rel=1e-5)
    torch.testing.assert_close(measured["chosen"], frequency / len(selections))
    assert torch.equal(measured["chosen"] > 0, union > 0)
    torch.testing.assert_close(measured["scores"], work.buffers.scores[0] / (epochs * count))
    assert bool(((measured["gates"] > 0) == (union > 0)).all())
    assert bool((measured["gates"] <= measured["scores"] + 1e-6).all())  # one path: M = G


def test_with_s_of_1_the_bound_is_what_is_used():
    context = context_of(density=1.0)
    _, _, _, tally = turn_of(context)
    cost = context.method.cost(context.task.layout, context.clients[0], context.plan.round_at(0))
    assert tally.train_flops == cost.train_flops
    assert tally.measures["density_used"] == pytest.approx((1.0,))
    assert tally.measures["upload_share"] == pytest.approx((1.0,))
    assert tally.measures["upload_share_formula"] == (1.0,)


@pytest.mark.parametrize("executor", [Serial, Stacked])
def test_measures_are_those_of_evaluated_rounds(executor):
    context = context_of(rounds=14, eval_every=3, epochs=1)
    star = simulate(context, executor(context))
    population, measured = star.start(), []
    for index in range(4):
        population, record = star.play(population, index)
        measured.append([sorted(turn.tally.measures) for turn in record.turns])
    names = ["chosen", "density_used", "gates", "newly_used", "scores", "upload_share", "upload_share_formula"]
    assert measured == [[[]] * 3, [[]] * 3, [names] * 3, [[]] * 3]


@pytest.mark.parametrize("capacity", [0.5, pytest.param(0.1, marks=pytest.mark.slow), 0.03])
def test_mixed_capacities(capacity, selections):
    """A client's budget is what it can hold; below s_min, its first blocks shrink with it."""
    context = context_of(capacities=[0.9, capacity], density=0.6)
    small = next(c for c in context.clients if c.capacity == capacity)
    large = next(c for c in context.clients if c.capacity == 0.9)
    for client, share in ((small, capacity), (large, 0.6)):
        selections.clear()
        turn_of(context, client.index)
        sizes = [
            (kept @ torch.tensor(context.method.phases[0].loss.__self__.of(work)[0].blocks.sizes).float()).max()
            for work, kept in selections
        ]
        assert 0.5 * share < float(max(sizes)) / context.task.layout.size <= share
    star = simulate(context, Serial(context))
    population, record = star.play(star.start(), 0)  # the server reads what both kinds send
    assert len(record.turns) == 3
    assert len(star.evaluate(population, 1)) == 6


@pytest.mark.parametrize(("density", "realised"), [(0.5, 0.432), (0.3, 0.242)])
def test_the_authors_realised_density(density, realised):
    """On CIFAR-10's network it does not depend on the scores, and is what the paper's table 1 prints as s'."""
    layout = models.outline("pfedgate-cifar10", (3, 32, 32), 10).layout
    options = {k: v for k, v in AUTHORS.items() if k in PFedGateConfig.model_fields}
    config = PFedGateConfig(density=density, **options)
    blocks = cut(layout, config, 0.2)
    assert len(blocks) == 50
    budget = make_budget(blocks, config, density, 0.2, torch.zeros(1))
    random = torch.Generator().manual_seed(0)
    for _ in range(5):
        kept = select(budget, torch.rand(50, generator=random), config)
        assert float(kept @ torch.tensor(blocks.sizes).float()) / layout.size == pytest.approx(realised, abs=6e-4)


def test_the_authors_smallest_share():
    """min(max(1/B, 0.1), s): table 7 varies B."""
    for num_blocks, density, expected in ((2, 0.7, 0.5), (5, 0.5, 0.2), (10, 0.5, 0.1), (20, 0.5, 0.1), (2, 0.3, 0.3)):
        context = context_of(**{**AUTHORS, "density": density, "num_blocks": num_blocks})
        work = received_work(context, simulate(context, Serial(context)).start(), 0)
        assert context.method.phases[0].loss.__self__.of(work)[2] == expected


@pytest.mark.parametrize(("density", "straight_through"), [(1.0, "authors"), (1.0, "kept"), (0.5, "authors")])
def test_with_s_of_1_the_authors_gates_are_as_they_are(density, straight_through):
    """One path: M = G, so that with the factor the gate's gradient is (1 + M) times as large, 1.5 times at first."""
    context = context_of(**{**AUTHORS, "density": density, "straight_through": straight_through})
    model = context.method.phases[0].loss.__self__
    work = received_work(context, simulate(context, Serial(context)).start(), 0)
    size = len(model.of(work)[0].blocks)
    gates = torch.full((size,), 0.5, requires_grad=True)
    found, kept = model._gates(work, gates, gates)
    (by_gates,) = torch.autograd.grad(found.sum(), gates)
    factor = 1.0 if (density, straight_through) == (1.0, "authors") else 1.5
    assert torch.equal(by_gates, factor * kept)
    assert bool(kept.sum() == size) is (density == 1)


def test_the_authors_first_chunks_break_a_small_budget():
    """A fifth of everything is never dropped and never paid for: with s = 0.1 the model in use is twice as large. The
    paper's chunks hold it."""
    layout, scores = models.outline("pfedgate-cifar10", (3, 32, 32), 10).layout, torch.linspace(0.1, 0.9, 50)
    options = {k: v for k, v in AUTHORS.items() if k in PFedGateConfig.model_fields}
    found = []
    for more in (options, {}):
        config = PFedGateConfig(density=0.1, **more)
        blocks = cut(layout, config, 0.1)
        budget = make_budget(blocks, config, 0.1, 0.1, torch.zeros(1))
        kept = select(budget, scores[: len(blocks)], config)
        found.append(float(kept @ torch.tensor(blocks.sizes).float()) / layout.size)
    assert found[0] > 0.19
    assert 0.09 < found[1] <= 0.1


def test_what_is_sent_is_what_was_used_and_all_that_moved(selections):
    context = context_of(density=0.4, epochs=2)
    _, update, work, _ = turn_of(context)
    model = context.method.phases[0].loss.__self__
    used = torch.stack([kept[0] for _, kept in selections]).amax(0) > 0
    assert torch.equal(update.parts["blocks"].tree().flat, used)
    mask = spread(model.of(work)[0].blocks, used)
    assert update.parts["update"].num_values == int(mask.sum()) < context.task.layout.size
    moved = work.params.flat != context.params.flat
    assert not bool((moved & ~mask).any())
    assert float(moved.float().sum() / mask.sum()) > 0.8  # decay alone moves whatever is not zero
    sent = update.parts["update"].tree(work.params.like(mask))
    assert torch.equal(sent.flat, work.params.flat - context.params.flat)


def test_decay_everywhere_moves_what_nobody_used():
    """The authors' way, and why their uploads are dense."""
    _, update, work, _ = turn_of(context := context_of(density=0.4, steps="all", aggregation="dense"))
    moved = work.params.flat != context.params.flat
    assert float(moved.float().mean()) > 0.95
    assert set(update.parts) == {"update"}


def predictions(context, batches):
    star = simulate(context, Serial(context))
    population = star.start()
    for index in range(2):
        population, _ = star.play(population, index)
    work = received_work(context, population, population.states and next(iter(population.states)))
    inputs = context.federation.examples(0, "train").inputs[:12]
    return [torch.cat([context.method.predict(work, some) for some in inputs.split(size)]) for size in batches]


@pytest.mark.parametrize("deploy_gate", ["stored", "sample"])
def test_rebatching_changes_no_prediction(deploy_gate):
    whole, some, single = predictions(context_of(deploy_gate=deploy_gate), (12, 5, 1))
    torch.testing.assert_close(some, whole)
    torch.testing.assert_close(single, whole)


def test_transductive_predictions_depend_on_their_batch_and_are_labelled(tmp_path):
    whole, single = predictions(context_of(**AUTHORS), (12, 1))
    assert float((whole - single).abs().max()) > 1e-3
    for name, options in (("authors", {"preset": "authors"}), ("ours", {"epochs": 1, "density": 0.3})):
        run = sp.train("pfedgate", out=tmp_path / name, **{**COMMON, "rounds": 1}, **options)
        assert ("TRANSDUCTIVE" in run.protocol) == (name == "authors")
        share = run.summary["bytes"]["upload_share"]  # q
        assert share == 1 if name == "authors" else 0.3 < share < 1


def test_the_stored_gate_is_the_mean_of_training():
    context = context_of()
    state, *_ = turn_of(context)
    model = context.method.phases[0].loss.__self__
    start = context.fresh_state(0)
    assert bool((start.scores == 0.9).all())
    assert not torch.equal(state.scores, start.scores)
    assert torch.equal(context.method.trait(state), state.scores[0])
    assert state.scores.shape == (2, len(model.cut(0.2).blocks))
    assert float(state.scores.min()) > 0.6


def test_the_dense_mean_is_over_those_who_take_part():
    """A novel client's data is not known to the server: everybody else sampled, theirs is the mean."""
    context = context_of(**{**AUTHORS, "novel": 2, "per_round": 4})
    star = simulate(context, Serial(context))
    population, _ = star.play(star.start(), 0)
    found, weights = torch.zeros_like(context.params.flat), 0
    for client in set(range(6)) - novel_clients(context.plan, context.clients):
        _, update, _, _ = turn_of(context, client)
        found += update.weight * update.parts["update"].tree().flat
        weights += update.weight
    torch.testing.assert_close(population.server.params.flat, context.params.flat + found / weights)


def test_a_file_of_latencies_that_changed_is_told(tmp_path):
    path = tmp_path / "phone.json"
    names = context_of().task.layout.names
    path.write_text(json.dumps(dict.fromkeys(names, 1.0)))
    options = {**COMMON, "epochs": 1, "model": net, "budget": f"latency:{path}"}
    sp.train("pfedgate", out=tmp_path / "run", max_seconds=1e-9, **options)
    path.write_text(json.dumps({**dict.fromkeys(names, 1.0), names[0]: 2.0}))
    with pytest.raises(SparsonaError, match="the latencies are not those of"):
        sp.resume(tmp_path / "run", model=net)


def test_tuning_moves_the_gate_alone():
    context = context_of(tune_epochs=1, novel=1)
    star = simulate(context, Serial(context))
    population, _ = star.play(star.start(), 0)
    _, tuned = star.finish(population)
    for client, work in tuned.items():
        before = received_work(context, population, client)
        assert torch.equal(work.params.flat, before.params.flat)
        assert not torch.equal(work.gate.flat, before.gate.flat)


def test_alternating_trains_the_gate_and_then_the_model():
    context = context_of(updates="alternating")
    gate, model = context.method.phases
    assert (gate.trains, model.trains) == (("gate",), ("params",))
    _, _, work, tally = turn_of(context)
    assert not torch.equal(work.params.flat, context.params.flat)
    cost = context.method.cost(context.task.layout, context.clients[0], context.plan.round_at(0))
    assert 0.5 * cost.train_flops < tally.train_flops <= cost.train_flops


def test_client_wise_gates_look_at_the_mean_input():
    context = context_of(gating="client")
    _, _, work, tally = turn_of(context)
    expected = context.federation.examples(0, "train").inputs.mean(0)
    torch.testing.assert_close(work.pooled, expected)
    cost = context.method.cost(context.task.layout, context.clients[0], context.plan.round_at(0))
    assert (
        tally.search_flops
        == cost.search_flops
        == len(context.federation.examples(0, "train").targets) * (context.task.layout.forward_flops())
    )


@pytest.mark.parametrize(
    "more",
    [
        {"preset": "authors", "batch_size": 16},
        {"preset": "paper", "batch_size": 16},
        {"gating": "client", "updates": "alternating"},
        {"solver": "exact", "capacities": [0.5, 0.1]},
    ],
    ids=["authors", "paper", "client-alternating", "exact-mixed"],
)
def test_many_clients_at_once(more):
    """Stacked, clients of unequal size are padded: it changes neither what they send nor their results."""

    def smooth():
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))

    found = []
    for executor in (Serial, Stacked):
        context = context_of(smooth, **more, points=["trained"], rounds=1)
        star = simulate(context, executor(context))
        population, record = star.play(star.start(), 0)
        found.append((population.server.params.flat, record.turns, record.evaluations))
    (one, turns, tested), (other, turns2, tested2) = found
    torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    assert [turn.traffic for turn in turns] == [turn.traffic for turn in turns2]
    assert [e.loss for e in tested] == pytest.approx([e.loss for e in tested2], rel=1e-3)


@pytest.mark.parametrize("blocks", ["filter", "channel"])
def test_what_is_left_out_of_the_computation_changes_nothing(blocks):
    """Compact, dropped filters are not computed: the same training, and the same predictions, within rounding."""
    options = {"blocks": blocks, "density": 0.7, "num_blocks": 8, "smallest": 0.1, "straight_through": "kept"}
    found = []
    for compute in ("masked", "compact"):
        context = context_of(**options, compute=compute)
        _, update, work, _ = turn_of(context)
        outputs = context.method.predict(work, context.federation.examples(0, "test").inputs)
        params, _ = context.method.deploy(work)
        found.append((update.parts["blocks"].tree().flat, work.params.flat, work.gate.flat, outputs, params.flat))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4)
    assert 0 in found[0][4]


def test_latencies_from_a_file(tmp_path):
    layout = context_of().task.layout
    path = tmp_path / "times.json"
    path.write_text(json.dumps({slot.name: float(place + 1) for place, slot in enumerate(layout.slots)}))
    context = context_of(budget=f"latency:{path}", density=0.3)
    _, update, _, _ = turn_of(context)
    assert update.parts["update"].num_values > 0
    path.write_text("{}")
    with pytest.raises(SparsonaError, match="no latencies of this model"):
        turn_of(context_of(budget=f"latency:{path}"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"split_budget": True}, "split_budget with equal_chunks"),
        ({"steps": "all"}, "what moves must be what is sent"),
        ({"gating": "client", "deploy_gate": "sample"}, "never seen a single input"),
        ({"budget": "energy"}, "latency:FILE"),
        ({"compute": "compact"}, "has no gradient"),
    ],
)
def test_bad_combinations_are_refused(options, said):
    with pytest.raises(SparsonaError, match=said) as told:
        build.make_config("pfedgate", options)
    # Where no single one is wrong, the rule is told, and not a list of all options.
    assert told.value.what.startswith(
        "budget = " if "budget" in options else "options of pfedgate that cannot be combined"
    )


def test_bad_models_are_refused():
    def normed():
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))

    with pytest.raises(SparsonaError, match="BatchNorm"):
        context_of(normed, gating="sample")
    with pytest.raises(SparsonaError, match="always used"):
        turn_of(context_of(blocks="filter", density=0.01))
    with pytest.raises(SparsonaError, match="on text"):
        methods.factory("pfedgate")[0](models.outline("transformer", (20,), 100), PFedGateConfig())


def test_cost_is_a_bound_by_capacity():
    context = context_of()
    dense = 3 * context.task.layout.forward_flops()
    costs = [context.method.cost(context.task.layout, Client(0, 10, c), context.plan.round_at(0)) for c in (1.0, 0.1)]
    assert costs[1].train_flops < costs[0].train_flops
    assert costs[1].infer_flops < 0.5 * dense / 3


def test_a_file_of_latencies_is_found_from_anywhere_and_must_stay_as_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = build.make_context(build.make_config("fedavg", {})).task.layout.names
    (tmp_path / "phone.json").write_text(json.dumps(dict.fromkeys(names, 1.0)))
    options = {"rounds": 3, "epochs": 1, "clients": 4, "executor": "serial", "device": "cpu", "max_seconds": 1e-9}
    sp.train("pfedgate", budget="latency:phone.json", out=tmp_path / "run", **options)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert sp.resume(tmp_path / "run").summary["rounds"] == 2
    (tmp_path / "phone.json").write_text(json.dumps(dict.fromkeys(names, 2.0)))
    with pytest.raises(SparsonaError, match="latencies are not those"):
        sp.resume(tmp_path / "run")
