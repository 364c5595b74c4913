"""What every method must do, whatever it is. A new row in METHODS is taken in by itself."""

from __future__ import annotations

import dataclasses
import hashlib

import pytest
import torch
from torch import nn

from sparsona import methods, prepare
from sparsona.core.errors import SparsonaError
from sparsona.core.tree import leaves, map_leaves
from sparsona.data.batches import in_order
from sparsona.engine.clients import LocalClients
from sparsona.engine.context import Setting
from sparsona.engine.plan import novel_clients, participation
from sparsona.engine.rounds import check_plan, received_work, simulate
from sparsona.engine.serial import Serial
from sparsona.engine.turn import begin, phases_of, train_alone
from sparsona.runs.checkpoint import Checkpoints, Progress
from sparsona.wire.codec import decode, encode
from sparsona.wire.format import message_size, paper_size

pytestmark = pytest.mark.long

# One line per method: options under which it meets its hardest code on a problem of seconds, and the accuracy it must
# reach where guessing gets a tenth.
SETTINGS = {
    "local": ({}, 0.35),
    "fedavg": ({}, 0.35),
    "fedavg-ft": ({"tune_epochs": 2}, 0.5),
    "fedavg-ft-part": ({"tune_epochs": 2, "server_optimizer": "adam", "server_lr": 0.01}, 0.35),
    "fedalt": ({"pull": 0.01, "personal_epochs": 1, "max_personal_steps": 3, "clip_norm": 1.0}, 0.35),
    "fedsim": ({"personal": "additive,input", "server_optimizer": "adam", "server_lr": 0.01}, 0.35),
    "fedspa": ({"density": 0.6}, 0.35),
    "fedspa-rsm": ({"density": 0.6}, 0.35),
    "dispfl": ({"density": 0.6, "graph": "random:2"}, 0.35),
    "pfedgate": ({"density": 0.7, "capacities": [1.0, 0.6, 0.15], "momentum": 0.5}, 0.45),
}
COMMON = {"clients": 6, "per_round": 3, "rounds": 4, "epochs": 1, "batch_size": 8, "lr": 0.1, "executor": "serial"}


def test_every_row_has_a_line_here():
    assert set(SETTINGS) == set(methods.METHODS)


@pytest.fixture(params=sorted(SETTINGS))
def name(request):
    return request.param


def options(name: str, **more) -> dict:
    return {**COMMON, **SETTINGS[name][0], **more}


def setting_of(name: str, model=None, **more) -> Setting:
    return prepare.make_setting(prepare.make_config(name, options(name, **more), model=model), None, model)


def engine_of(setting: Setting):
    """With a server in the middle, or among peers."""
    return simulate(setting, Serial(setting))


def played(setting: Setting, rounds: int):
    star = engine_of(setting)
    population = star.start()
    for index in range(rounds):
        population, record = star.play(population, index)
    return star, population, record


def fingerprint(value) -> str:
    state = hashlib.sha256()
    for path, tensor in sorted(leaves(value), key=lambda item: item[0]):
        state.update(path.encode() + tensor.contiguous().numpy().tobytes())
    return state.hexdigest()


def population_print(population) -> str:
    said = {k: m if isinstance(m, bytes) else encode(m) for k, m in sorted(population.messages.items())}
    return fingerprint((population.server, population.states)) + hashlib.sha256(repr(said).encode()).hexdigest()


def test_same_seed_same_bits(name):
    first = population_print(played(setting_of(name), 3)[1])
    assert first == population_print(played(setting_of(name), 3)[1])
    assert first != population_print(played(setting_of(name, seed=1), 3)[1])


def test_global_generators_untouched(name, untouched_generators):
    setting = setting_of(name)
    star, population, _ = played(setting, 2)
    star.evaluate(population, 2)
    star.finish(population)


def test_inputs_are_not_changed(name):
    """No function of a method edits what it is handed."""
    setting = setting_of(name)
    star, population, _ = played(setting, 2)
    before = population_print(population), fingerprint((setting.params, setting.buffers))
    star.play(population, 2)
    star.evaluate(population, 2)
    star.finish(population)
    assert (population_print(population), fingerprint((setting.params, setting.buffers))) == before


def test_state_keeps_its_structure(name):
    setting = setting_of(name)
    _, population, _ = played(setting, 2)

    def shape(value):
        return [(path, tensor.shape, tensor.dtype) for path, tensor in leaves(value)]

    for client, state in population.states.items():
        assert shape(state) == shape(setting.fresh_state(client))
    assert shape(population.server) == shape(engine_of(setting).start().server)


def test_state_survives_the_store_bit_for_bit(name, tmp_path):
    setting = setting_of(name)
    star, population, _ = played(setting, 3)
    _, tuned = star.finish(population)
    initial = engine_of(setting).start()
    Checkpoints(tmp_path, setting.method).save(Progress(3, 1.5, population, tuned, True), initial)
    fresh = setting_of(name)
    found = Checkpoints(tmp_path, fresh.method).load(fresh, engine_of(fresh).start())
    assert population_print(found.population) == population_print(population)
    assert fingerprint(tuple(found.tuned.values())) == fingerprint(tuple(tuned.values()))
    assert (found.completed, found.seconds, found.finished) == (3, 1.5, True)


def test_every_message_survives_the_wire_and_cost_equals_the_ledger(name):
    setting = setting_of(name)
    star = engine_of(setting)
    population = star.start()
    for index in range(3):
        round_ = setting.plan.round_at(index)
        before = population
        population, record = star.play(population, index)
        assert record.turns
        for turn in record.turns:
            client = setting.clients[turn.client]
            cost = setting.method.cost(setting.task.layout, client, round_)
            down, up = cost.down or (), cost.up or ()
            if turn.trained:
                assert (turn.tally.train_flops, turn.tally.search_flops) == (cost.train_flops, cost.search_flops)
            if setting.method.peer is not None:  # one message for each who asks; all clients here are alike
                one, papers = message_size(up), paper_size(up)
                for sent, paper in ("up", "paper_up"), ("down", "paper_down"):
                    copies = getattr(turn.traffic, sent) // one
                    assert getattr(turn.traffic, sent) == copies * one
                    assert getattr(turn.traffic, paper) == copies * papers
                continue
            assert turn.traffic.down == (message_size(down) if down else 0)
            sent, most = (turn.traffic.up, turn.traffic.paper_up), (message_size(up) if up else 0, paper_size(up))
            # Where training decides what is sent, costs are a bound that is met or stayed below.
            assert sent == most if cost.exact else 0 < sent[0] <= most[0] and 0 < sent[1] <= most[1]
            assert turn.traffic.paper_down == paper_size(down)
            if setting.method.server is not None:
                update = setting.method.server.reply(before.server, client, round_)
                again = decode(encode(update))
                for part, value in update.parts.items():
                    assert value.values.numpy().tobytes() == again.parts[part].values.numpy().tobytes()
        if setting.method.peer is not None:
            assert sum(turn.traffic.up for turn in record.turns) == sum(turn.traffic.down for turn in record.turns)
            assert bool(index) == any(turn.traffic.up for turn in record.turns)  # at first nobody has said anything
            for said in population.messages.values():
                assert encode(decode(said)) == said


def test_cost_tells_what_a_client_keeps_and_what_a_prediction_costs(name):
    """`Cost.kept` is the State, BatchNorm statistics aside: entries of masks, and numbers that are not zero."""
    setting = setting_of(name)
    _, population, _ = played(setting, 2)
    for index, state in population.states.items():
        cost = setting.method.cost(setting.task.layout, setting.clients[index], setting.plan.round_at(0))
        own = [tensor for path, tensor in leaves(state) if not path.startswith("buffers")]
        masks = [tensor.numel() for tensor in own if tensor.dtype == torch.bool]
        assert sum(masks) == sum(part.num_values for part in cost.kept if part.is_mask)
        rest, parts = [t for t in own if t.dtype != torch.bool], [part for part in cost.kept if not part.is_mask]
        assert sum(tensor.numel() for tensor in rest) == sum(part.layout.size for part in parts)
        assert sum(int(tensor.count_nonzero()) for tensor in rest) <= sum(part.num_values for part in parts)
        if setting.method.deploy is not None:
            params, _ = setting.method.deploy(received_work(setting, population, index))
            dense = setting.task.layout.forward_flops()
            used = setting.task.layout.forward_flops([int(params[key].count_nonzero()) for key in params])
            assert used <= (dense if cost.infer_flops is None else cost.infer_flops) <= dense


def test_cost_tells_what_a_client_holds_at_work(name):
    """Whatever a Work holds, buffers aside, is kept, received or in `Cost.at_work`, where the gradient comes on top."""
    setting = setting_of(name)
    _, population, _ = played(setting, 2)
    for client in setting.clients:
        cost = setting.method.cost(setting.task.layout, client, setting.plan.round_at(0))
        work = received_work(setting, population, client.index)
        own = [tensor for path, tensor in leaves(work) if not path.startswith("buffers")]
        at_work = cost.at_work or ()
        parts = [part for part in (*cost.kept, *(cost.down or ()), *at_work) if part.name != "gradient"]
        assert sum(int(tensor.count_nonzero()) for tensor in own) <= sum(part.num_values for part in parts)
        assert cost.at_work is None or [part.name for part in at_work].count("gradient") == 1


def test_density_bound_holds_each_round(name):
    """No client ever sends or is sent more values than its density allows, and the same number in every round."""
    density = prepare.make_config(name, options(name)).options.get("density", 1.0)
    setting = setting_of(name)
    cost = setting.method.cost(setting.task.layout, setting.clients[0], setting.plan.round_at(0))
    for sizes in (cost.down or (), cost.up or ()) if cost.exact else ():  # otherwise density bounds what is used
        values = [size.num_values for size in sizes if not size.is_mask]
        assert sum(values) <= density * setting.task.layout.size * len(values)
    star = engine_of(setting)
    population = star.start()
    seen = set()
    for index in range(4):
        population, record = star.play(population, index)
        seen |= {(turn.traffic.paper_up, turn.traffic.paper_down) for turn in record.turns}
    if setting.method.peer is not None:  # so many copies of it, and never a larger one
        assert {traffic % paper_size(cost.up) for pair in seen for traffic in pair} == {0}
        return
    assert max(up for up, _ in seen) <= paper_size(cost.up or ())
    assert max(down for _, down in seen) <= paper_size(cost.down or ())
    if cost.exact:
        assert len(seen) == 1


def test_rebatching_changes_no_prediction(name):
    setting = setting_of(name)
    _, population, _ = played(setting, 2)
    work = received_work(setting, population, 0)
    inputs = setting.federation.examples(0, "test").inputs
    whole = setting.method.predict(work, inputs)
    single = torch.cat([setting.method.predict(work, row[None]) for row in inputs])
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(single, whole, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(setting.method.predict(work, inputs[order]), whole[order], rtol=1e-4, atol=1e-5)


def test_deployed_module_predicts_the_same(name):
    setting = setting_of(name)
    _, population, _ = played(setting, 2)
    work = received_work(setting, population, 1)
    inputs = setting.federation.examples(1, "test").inputs
    if setting.method.deploy is not None:
        module = setting.task.module(*setting.method.deploy(work))
        with torch.no_grad():
            torch.testing.assert_close(module(inputs), setting.method.predict(work, inputs))


def test_learning_rate_takes_effect_each_round(name):
    """A turn at another learning-rate scale gives another model, and at scale 0 the one that was received."""
    setting = setting_of(name, weight_decay=0.0)
    _, population, _ = played(setting, 1)
    clients = LocalClients(setting, None, population.states)
    engine = engine_of(setting)
    whose = population if setting.method.peer is not None else population.server
    job = clients.with_state(engine.evaluation_job(whose, 0, setting.plan.round_at(1)))
    assert job.messages or (setting.method.peer is None and setting.method.server is None)

    def trained(scale: float) -> str:
        here = dataclasses.replace(job, do="train", round=dataclasses.replace(job.round, lr_scale=scale))
        turn = begin(setting, here)
        for phase in phases_of(setting, turn):
            train_alone(setting, turn, phase)
        return learned(turn.work)

    def learned(work) -> str:
        """What is trained: statistics and momentum move at any learning rate."""
        return fingerprint(tuple(getattr(work, name) for phase in setting.method.phases for name in phase.trains))

    assert len({trained(scale) for scale in (1.0, 0.1, 0.0)}) == 3
    assert trained(0.0) == learned(received_work(setting, population, 0))


def test_beats_chance_on_the_toy(name):
    setting = setting_of(name, rounds=5, epochs=3, per_round=4, lr=0.15)
    star, population, _ = played(setting, 5)
    record, _ = star.finish(population)
    found = record.evaluations or star.evaluate(population, 5)
    accuracy = sum(e.correct / e.count for e in found) / len(found)
    assert accuracy > SETTINGS[name][1], accuracy


def test_stateless_clients(name):
    setting = setting_of(name, stateless=True)
    if setting.method.server is None:  # nothing would be left of it
        with pytest.raises(SparsonaError, match="forget what they learn"):
            check_plan(setting.server_side)
        return
    _, population, record = played(setting, 3)
    assert population.states == {}
    assert record.turns


def test_a_lost_update_changes_nobody(name):
    """A dropped client keeps its old State, and the server never hears of it: their masks cannot drift apart."""
    setting = setting_of(name, drop_rate=0.6, rounds=6)
    star = engine_of(setting)
    population = star.start()
    lost = 0
    for index in range(6):
        who = participation(setting.plan, setting.clients, index)
        after, record = star.play(population, index)
        assert not {turn.client for turn in record.turns if turn.aggregated} & who.dropped
        if setting.method.peer is not None:  # who is out of reach trains alone
            assert {turn.client for turn in record.turns if turn.dropped} == who.dropped
            assert all(turn.traffic.total == 0 and turn.tally.steps for turn in record.turns if turn.dropped)
            assert set(who.trains) <= set(after.states)
            lost += bool(index and who.dropped)
            population = after
            continue
        if not any(turn.traffic.up for turn in record.turns):
            assert not any(turn.dropped for turn in record.turns)  # who sends nothing can lose nothing
            assert set(who.trains) <= set(after.states)
            lost = 1
            break
        assert {turn.client for turn in record.turns if turn.dropped} == who.dropped
        for client in who.dropped:
            assert after.states.get(client) is population.states.get(client)
            lost += 1
        if not who.aggregated:
            assert after.server is population.server
        population = after
    assert lost


def test_novel_clients(name):
    setting = setting_of(name, novel=2, rounds=3)
    star, population, _ = played(setting, 3)
    novel = novel_clients(setting.plan, setting.clients)
    assert len(novel) == 2
    assert not novel & set(population.states)
    record, _ = star.finish(population)
    assert {e.client for e in record.evaluations if e.point == "novel"} == novel
    assert not {e.client for e in star.evaluate(population, 3)} & novel


def test_everyone_trains_but_only_the_sampled_are_aggregated(name):
    """Also a method whose clients move on without the server's knowledge (masks) goes on: it is sent what it lacks."""
    setting = setting_of(name, everyone_trains=True)
    if setting.method.peer is not None:
        with pytest.raises(SparsonaError, match="no server that could leave some of them out"):
            check_plan(setting.server_side)
        return
    star, population, record = played(setting, 3)
    assert len(record.turns) == 6
    assert len(star.evaluate(population, 3)) == 6
    assert received_work(setting, population, 0)
    if setting.method.server is not None:
        assert sum(turn.aggregated for turn in record.turns) == 3


def test_batch_norm_and_dropout(name):
    """A model with buffers and noise trains, stays exact, and keeps its statistics off the wire."""

    def net():
        return nn.Sequential(
            nn.Flatten(), nn.Linear(64, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, 10)
        )

    first, second = (played(setting_of(name, model=net), 2)[1] for _ in range(2))
    assert population_print(first) == population_print(second)
    setting = setting_of(name, model=net)
    star, population, _ = played(setting, 2)
    assert setting.task.mixes_examples
    assert setting.task.draws_noise
    moved = [
        tensor
        for state in population.states.values()
        for path, tensor in leaves(state)
        if path.startswith("buffers") and not torch.equal(tensor, setting.buffers.flat)
    ]
    assert moved
    assert all(e.count for e in star.evaluate(population, 2))
    if setting.method.server is not None:
        update = setting.method.server.reply(population.server, setting.clients[0], setting.plan.round_at(2))
        assert sum(part.layout.size for part in update.parts.values()) <= 2 * setting.task.layout.size


def test_loss_and_update_are_pure(name):
    """Running loss and update on read-only copies gives the same, and leaves no trace in Work."""
    setting = setting_of(name)
    _, population, _ = played(setting, 1)
    work = received_work(setting, population, 0)
    batches = list(in_order(setting.federation.examples(0, "train"), 8))
    before = fingerprint(work)
    for phase in setting.method.phases:
        batch = batches[0] if phase.batches_per_step == 1 else tuple(batches[: phase.batches_per_step])
        loss, _ = phase.loss(work, batch)
        again, _ = phase.loss(map_leaves(lambda _path, value: value.clone(), work), batch)
        assert torch.equal(loss, again)
    assert fingerprint(work) == before
