"""What one client can change, how much noise hides it, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_runs import context_of, played
from torch import nn

from sparsona import methods
from sparsona.core.errors import SparsonaError
from sparsona.core.round import Client, Round
from sparsona.core.seeds import Seeds
from sparsona.core.task import Task
from sparsona.core.update import Support, dense, masked, message
from sparsona.engine.rounds import simulate
from sparsona.executors.serial import Serial
from sparsona.executors.workers import Workers
from sparsona.experiment import build
from sparsona.transforms.privacy import Privacy, read_privacy, sent_in_the_clear, with_privacy
from sparsona.wire.codec import decode, encode

TASK = Task(nn.Sequential(nn.Flatten(), nn.Linear(64, 60), nn.ReLU(), nn.Linear(60, 10)), (1, 8, 8), 10)
PARAMS, BUFFERS = TASK.init(0)
CLIENTS = tuple(Client(index, 20, num_clients=4) for index in range(4))
ROUND = Round(0, 2, 1.0, 8, Seeds(0).at(0))
QUIET = 1e-6  # a noise multiplier that hides nothing


def made(name: str, privacy: Privacy, cohort: int = 4):
    row = methods.card(name)
    return with_privacy(
        methods.make(TASK, row=row, config=methods.factory(row)[1](**row.options)), privacy, cohort, TASK.layout
    )


def update_of(method, server, client: Client, seed: int, size: float):
    """What a client might send: what it received, and a change of any size; decoded, as a server has it."""
    (sent,) = [part for part in method.cost(TASK.layout, client, ROUND).up if not part.is_mask]
    random = torch.Generator().manual_seed(seed)
    change = torch.randn(sent.layout.size, generator=random) * size
    like = method.server.reply(server, client, ROUND).parts
    if sent.is_change:
        mask = server.masks[client.index]
        parts = {"update": masked(PARAMS.like(change * mask.flat), mask, Support.KNOWN, is_change=True)}
        if method.name == "fedspa":
            parts["mask"] = dense(mask)
    else:
        start = like[sent.name].tree()
        parts = {sent.name: dense(start.like(start.flat + change))}
    return decode(encode(message(ROUND.on(client), parts, weight=float(1 + seed % 1000))))


def stepped(method, updates):
    half = method.server
    server = half.init(PARAMS, CLIENTS, Seeds(0))
    total = half.zero(server, ROUND)
    for client, (seed, size) in updates.items():
        total = half.add(server, total, update_of(method, server, CLIENTS[client], seed, size))
    return half.global_model(half.step(server, total, ROUND)).flat


contribution = st.tuples(st.integers(0, 10_000), st.sampled_from([0.0, 1e-4, 1.0, 1e3]))


@pytest.mark.parametrize("name", ["fedavg", "fedspa"])
@settings(max_examples=12, deadline=None)
@given(st.dictionaries(st.integers(0, 3), contribution, min_size=2), contribution)
def test_one_client_changes_the_mean_by_at_most_its_share(name, updates, other):
    method = made(name, Privacy("central", noise=1.0, clip=0.5))
    before = stepped(method, updates)
    first = next(iter(updates))
    replaced = stepped(method, {**updates, first: other})
    left_out = stepped(method, {key: value for key, value in updates.items() if key != first})
    assert (before - replaced).double().norm() <= 2 * 0.5 / 4 * (1 + 1e-4)
    assert (before - left_out).double().norm() <= 0.5 / 4 * (1 + 1e-4)


@pytest.mark.parametrize("name", ["fedavg", "fedalt", "fedspa-rsm"])
def test_short_changes_are_divided_by_the_cohort_and_not_by_those_that_came(name):
    method = made(name, Privacy("central", noise=QUIET, clip=1.0))
    half = method.server
    server = half.init(PARAMS, CLIENTS, Seeds(0))
    one = update_of(method, server, CLIENTS[1], 7, 0.01)
    (part,) = one.parts.values()
    change = part.tree(server.masks[1]) if name == "fedspa-rsm" else part.tree()
    after = half.step(server, half.add(server, half.zero(server, ROUND), one), ROUND)
    if name == "fedalt":
        moved, sent = after.shared.flat - server.shared.flat, change.flat - server.shared.flat
    else:
        moved = after.params.flat - server.params.flat
        sent = -change.flat if name == "fedspa-rsm" else change.flat - server.params.flat
    assert sent.norm() > 0.1
    torch.testing.assert_close(moved, sent / 4, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("name", ["fedavg", "fedspa"])
@pytest.mark.parametrize("came", [1, 4])
def test_noise_on_the_sum_has_the_variance_that_epsilon_is_computed_for(name, came):
    """Over every entry, also outside of masks, and however many clients came."""
    method = made(name, Privacy("central", noise=2.0, clip=0.5))
    noise = (stepped(method, dict.fromkeys(range(came), (0, 0.0))) - PARAMS.flat).double() * 4
    assert noise.std().item() == pytest.approx(1.0, rel=0.05)
    assert abs(noise.mean().item()) < 0.05
    outside = (method.server.init(PARAMS, CLIENTS, Seeds(0)).masks[0].flat == 0) if name == "fedspa" else slice(None)
    assert noise[outside].std().item() == pytest.approx(1.0, rel=0.08)


@pytest.mark.parametrize("name", ["fedavg", "fedalt", "fedspa", "fedspa-rsm"])
def test_a_round_in_which_nobody_came_has_the_same_noise(name):
    """Else one client's data would decide whether there is any."""
    half = made(name, Privacy("central", noise=2.0, clip=0.5)).server
    server = half.init(PARAMS, CLIENTS, Seeds(0))
    after = half.step(server, half.zero(server, ROUND), ROUND)
    tree, before = (after.shared, server.shared) if name == "fedalt" else (after.params, server.params)
    assert ((tree.flat - before.flat).double() * 4).std().item() == pytest.approx(1.0, rel=0.05)
    for memory in half.client_memory:
        assert getattr(after, memory) == getattr(server, memory)
    came = stepped(made(name, Privacy("central", noise=2.0, clip=0.5)), {1: (0, 0.0)}) if name == "fedavg" else None
    assert came is None or torch.allclose(came, after.params.flat, atol=1e-5)


@pytest.mark.parametrize("name", ["fedavg", "fedspa"])
def test_the_server_steps_in_a_round_whose_clients_all_diverge(name):
    context = context_of(name, privacy="central:noise=1,clip=1", rounds=1, data_rate=0.1, lr=1e30)
    engine = simulate(context, Serial(context))
    start = engine.start()
    after, record = engine.play(start, 0)
    assert not any(turn.aggregated for turn in record.turns)
    assert not torch.equal(after.server.params.flat, start.server.params.flat)


def finished(name: str, privacy: Privacy, client: int = 1, key: bytes = b"", moved: float = 1.0):
    """What a client sends, less what it received, after a turn that moved its model."""
    method = made(name, privacy)
    round_ = ROUND.on(CLIENTS[client])
    round_ = replace(round_, seeds=replace(round_.seeds, key=key))
    state = method.init_client(PARAMS, BUFFERS, CLIENTS[client], Seeds(0))
    inbox = (method.server.reply(method.server.init(PARAMS, CLIENTS, Seeds(0)), CLIENTS[client], ROUND),)
    work = method.receive(state, iter(inbox), None, round_)
    work = replace(work, params=work.params.like(work.params.flat + moved * work.params.flat.ne(0)))
    _, update = method.finish(state, work, iter(inbox), None, round_)
    (part,) = update.parts.values()
    return part.values if part.is_change else part.values - PARAMS.flat


@pytest.mark.parametrize("name", ["fedavg", "fedspa-rsm"])
def test_a_client_sends_a_clipped_change_with_noise(name):
    assert finished(name, Privacy("local", noise=QUIET, clip=0.5)).norm().item() == pytest.approx(0.5, rel=1e-3)
    short = finished(name, Privacy("local", noise=QUIET, clip=1.0), moved=1e-3)
    assert short.abs().median().item() == pytest.approx(1e-3, rel=0.1)  # below the norm nothing is scaled
    noised = finished(name, Privacy("local", noise=4.0, clip=0.5), moved=0.0).double()
    assert noised.std().item() == pytest.approx(2.0, rel=0.05)


def test_noise_is_each_clients_own_and_secret_where_it_has_a_secret():
    noise = Privacy("local", noise=1.0, clip=1.0)
    drawn = [finished("fedavg", noise, 1), finished("fedavg", noise, 2), finished("fedavg", noise, 1, b"secret")]
    assert torch.equal(drawn[0], finished("fedavg", noise, 1))
    for one, other in ((0, 1), (0, 2)):
        correlation = torch.corrcoef(torch.stack([drawn[one], drawn[other]]))[0, 1]
        assert abs(correlation.item()) < 0.1


def central_context(name: str):
    return context_of(name, privacy="central:noise=0.1,clip=1", rounds=2, data_rate=0.1, drop_rate=0.3)


@pytest.mark.parametrize("name", ["fedspa", "fedavg"])
def test_central_noise_is_the_same_after_a_stop(name):
    context, again = central_context(name), central_context(name)
    engine = simulate(context, Serial(context))
    halfway, _ = engine.play(engine.start(), 0)
    one, other = engine.play(halfway, 1)[0], simulate(again, Serial(again)).play(halfway, 1)[0]
    assert torch.equal(one.server.params.flat, other.server.params.flat)
    assert not torch.equal(one.server.params.flat, halfway.server.params.flat)


@pytest.mark.slow  # a process is started
def test_central_noise_is_the_same_from_workers():
    context = central_context("fedspa")
    workers = Workers(context, 1)
    try:
        assert played(context, workers, rounds=2) == played(context, Serial(context), rounds=2)
    finally:
        workers.close()


REFUSED = {
    ("dispfl", "local"): "whose clients send to each other",
    ("local", "local"): "whose clients send nothing",
    ("fedproto", "local"): "something other than models",
    ("fedmask", "local"): "masks only",
    ("lotteryfl", "local"): "a mask of the client's own",
    ("scaffold", "central"): "does more with updates",
    ("subsampling", "central"): "does more with updates",
    ("pfedgate", "central"): "does more with updates",
}


@pytest.mark.parametrize(("name", "kind"), REFUSED)
def test_methods_whose_sensitivity_is_not_known_are_refused(name, kind):
    with pytest.raises(SparsonaError, match=REFUSED[name, kind]):
        made(name, Privacy(kind))


def test_what_is_sent_in_the_clear_is_named():
    assert sent_in_the_clear(made("fedspa", Privacy("local")), TASK.layout) == ("mask",)
    assert sent_in_the_clear(made("fedspa-rsm", Privacy("local")), TASK.layout) == ()


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("global:noise=1", "global"),
        ("local:noise=0", "noise=0"),
        ("local:noise=nan", "noise"),
        ("local:clip=-1", "clip=-1"),
        ("local:clip=1e30", "clip=1e\\+30"),
        ("central:delta=1", "delta=1"),
        ("central:sigma=1", "sigma"),
        ("local:0.5", "by name"),
    ],
)
def test_bad_texts_are_refused(text, match):
    with pytest.raises(SparsonaError, match=match):
        build.make_config("fedavg", {"privacy": text})


def test_a_text_can_have_plus_signs_between_its_options():
    assert read_privacy("local:noise=1e+1+clip=2") == read_privacy("local:noise=10,clip=2") == Privacy("local", 10, 2)


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"transform": "clip:1"}, "clips and adds noise itself"),
        ({"sampler": "loss"}, "losses"),
        ({"privacy": "central", "min_updates": 1}, "min_updates=1"),
    ],
)
def test_options_that_do_not_go_with_it_are_refused(more, match):
    with pytest.raises(SparsonaError, match=match):
        build.make_config("fedspa", {"privacy": "local", **more})
