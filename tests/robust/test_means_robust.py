"""Robust means against small references in numpy, over dense and masked updates, and inside methods."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from small_runs import context_of, played
from torch import nn

import sparsona as sp
from sparsona.core.errors import SparsonaError
from sparsona.core.method import Round, Seeds
from sparsona.core.tree import Tree, leaves
from sparsona.core.update import Support, Update, dense, masked
from sparsona.engine.population import Population
from sparsona.engine.rounds import simulate
from sparsona.executors.serial import Serial
from sparsona.executors.stacked import Stacked
from sparsona.executors.workers import Workers
from sparsona.robust import Mean, means, read_mean
from sparsona.robust.means import CHOOSING, RULES, Own, judged_inbox, median, norms, squared_distances
from sparsona.wire.codec import decode, encode

NUM, SIZE = 7, 11


def smooth_net() -> nn.Module:
    """Without kinks, where rounding would become a difference."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.Tanh(), nn.Linear(12, 10))


RANDOM = np.random.default_rng(0)
VALUES = RANDOM.normal(size=(NUM, SIZE)).astype(np.float32)
VALUES[2] += 50  # a liar
HELD = RANDOM.random((NUM, SIZE)) < 0.6
HELD[:, 0], HELD[:, 1] = False, True
HELD[3, 0] = True
HELD[:, 2] = [True, False, False, False, False, False, True]
UNHELD = torch.arange(SIZE) + 100.0  # what an entry is that no chosen update holds


def taken(text: str, held: np.ndarray | None = None) -> np.ndarray:
    mean = read_mean(text)
    assert mean is not None
    values = VALUES if held is None else VALUES * held
    mask = None if held is None else torch.from_numpy(held)
    if mean.name in CHOOSING:
        return CHOOSING[mean.name](torch.from_numpy(values), mask, mean, UNHELD).numpy()
    return RULES[mean.name](torch.from_numpy(values), mask, mean).numpy()


def by_entry(function, held: np.ndarray | None) -> np.ndarray:
    whole = np.ones_like(VALUES, dtype=bool) if held is None else held
    return np.array([function(np.sort(VALUES[whole[:, entry], entry].astype(float))) for entry in range(SIZE)])


@pytest.mark.parametrize("held", [None, HELD], ids=["dense", "masked"])
def test_median_and_trimmed_mean_are_of_those_who_hold_an_entry(held) -> None:
    def trimmed(column: np.ndarray) -> float:
        cut = min(int(np.ceil(0.2 * len(column))), (len(column) - 1) // 2)
        return float(np.mean(column[cut : len(column) - cut]))

    np.testing.assert_allclose(taken("median", held), by_entry(np.median, held), rtol=1e-6)
    np.testing.assert_allclose(taken("trimmed:0.2", held), by_entry(trimmed, held), rtol=1e-5)


def distances(held: np.ndarray) -> np.ndarray:
    found = np.zeros((NUM, NUM))
    for one in range(NUM):
        for other in range(NUM):
            both = held[one] & held[other]
            found[one, other] = SIZE * np.mean((VALUES[one, both].astype(float) - VALUES[other, both]) ** 2)
    return found


def test_krum_is_not_won_by_one_well_chosen_entry() -> None:
    random = torch.Generator().manual_seed(0)
    held = torch.rand((NUM, 200), generator=random) < 0.4
    values = torch.randn((NUM, 200), generator=random).where(held, 0.0)
    entry = int(held.sum(0).argmax())
    held[2] = torch.arange(200) == entry
    values[2, entry] = float(median(values, held, read_mean("median"))[entry])
    found = squared_distances(values, held)
    assert found[2].isinf().sum() == found[:, 2].isinf().sum() == NUM - 1
    others = [row for row in range(NUM) if row != 2]
    assert found[others][:, others].isfinite().all()
    chosen = CHOOSING["krum"](values, held, read_mean("krum:1"), torch.zeros(200))
    assert any(torch.equal(chosen[held[row]], values[row, held[row]]) for row in others)


@pytest.mark.parametrize("held", [None, HELD], ids=["dense", "masked"])
def test_krum_chooses_by_distances_over_common_entries(held) -> None:
    whole = np.ones_like(HELD) if held is None else held
    known = distances(whole)
    mask = None if held is None else torch.from_numpy(held)
    np.testing.assert_allclose(squared_distances(torch.from_numpy(VALUES), mask).numpy(), known, rtol=1e-4)
    order = np.argsort([np.sort(row)[1 : 1 + NUM - 1 - 2].sum() for row in known], kind="stable")
    assert 2 not in order[:-1]  # the liar is the last
    for text, chosen in (("krum:1", order[:1]), ("multi-krum:1", order[:6]), ("multi-krum:1,3", order[:3])):
        expected = UNHELD.numpy().astype(float)
        for entry in range(SIZE):
            holders = [one for one in chosen if whole[one, entry]]
            if holders:
                expected[entry] = VALUES[holders, entry].astype(float).mean()
        np.testing.assert_allclose(taken(text, held), expected, rtol=1e-5)


def test_geometric_median_has_the_smallest_sum_of_distances() -> None:
    found = taken("geometric-median").astype(float)

    def total(point: np.ndarray) -> float:
        return float(np.linalg.norm(VALUES - point, axis=1).sum())

    steps = RANDOM.normal(size=(50, SIZE)) * 0.1
    assert all(total(found) < total(found + step) for step in steps)
    assert np.isfinite(taken("geometric-median", HELD)).all()


CHANGES = frozenset({"model"})


def message_of(sender: int, tree: Tree, mask: Tree | None = None) -> Update:
    part = dense(tree) if mask is None else masked(tree, mask, Support.BITS)
    return Update(sender, 0, 1.0, {"model": part})


def test_a_judged_message_keeps_its_support_and_norms_are_bounded() -> None:
    trees = [Tree.of({"w": torch.from_numpy(row)}) for row in VALUES]
    masks = [Tree.of({"w": torch.from_numpy(row)}) for row in HELD]
    messages = [message_of(place, tree, mask) for place, (tree, mask) in enumerate(zip(trees, masks, strict=True))]
    expected = taken("median", HELD)
    for place, found in enumerate(judged_inbox(messages, Mean("median"))):
        assert found.sender == place
        np.testing.assert_allclose(found.parts["model"].values.numpy(), expected[HELD[place]])
    dense_ones = [message_of(place, tree) for place, tree in enumerate(trees)]

    def bounded(mean: Mean) -> np.ndarray:
        return np.stack([one.parts["model"].values.numpy() for one in judged_inbox(dense_ones, mean, changes=CHANGES)])

    lengths = np.linalg.norm(VALUES, axis=1)
    found = bounded(Mean("norm-bound"))
    within = lengths <= np.median(lengths)
    assert np.array_equal(found[within], VALUES[within])  # to the bit
    np.testing.assert_allclose(np.linalg.norm(found[~within], axis=1), np.median(lengths), rtol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(bounded(Mean("norm-bound", 0.5)), axis=1), 0.5, rtol=1e-5)
    # Of models, the distance to their median is bounded.
    near = torch.stack([one.parts["model"].values for one in judged_inbox(dense_ones, Mean("norm-bound", 0.5))])
    centre = torch.from_numpy(np.median(VALUES, axis=0).astype(np.float32))
    assert float(norms(near, None, centre).max()) < 0.5001


@pytest.mark.parametrize("is_change", [False, True], ids=["models", "changes"])
@pytest.mark.parametrize("text", ["krum:2", "multi-krum:2"])
def test_an_entry_that_only_lies_hold_keeps_the_value_of_who_judges(text: str, is_change: bool) -> None:
    """Six honest messages near each other, two lies far off, and entries that none of the honest ones holds."""
    mean = read_mean(text)
    assert mean is not None
    values = torch.randn((8, 40), generator=torch.Generator().manual_seed(0)) * 0.01
    values[6:] += 1.0
    held = torch.ones_like(values, dtype=torch.bool)
    held[:6, 30:] = False
    own = Tree.of({"w": torch.full((40,), 0.25)})
    messages = [
        decode(encode(message_of(place, Tree.of({"w": row.where(mask, 0.0)}), Tree.of({"w": mask}))))
        for place, (row, mask) in enumerate(zip(values, held, strict=True))
    ]
    changes = CHANGES if is_change else frozenset()
    liar = list(judged_inbox(messages, mean, lambda: Own(own), changes))[7].parts["model"].values
    assert torch.equal(liar[30:], torch.full((10,), 0.0 if is_change else 0.25))
    assert liar[:30].abs().max() < 0.1


def test_a_peer_is_moved_by_a_bounded_norm_from_its_own_model() -> None:
    """Its neighbours' median is no centre: of an entry that few hold, lies can be the median."""
    own = Tree.of({"w": torch.from_numpy(VALUES[0])})
    messages = [message_of(place, Tree.of({"w": torch.from_numpy(row)})) for place, row in enumerate(VALUES)]
    near = [one.parts["model"].values for one in judged_inbox(messages, Mean("norm-bound", 0.5), lambda: Own(own))]
    assert torch.equal(near[0], own.flat)
    assert float(norms(torch.stack(near), None, own.flat).max()) < 0.5001


def test_entries_that_a_peer_cuts_away_do_not_count_in_norms() -> None:
    """Its own model is 0 there, so that they would make the bound larger. A regrown entry is 0 as well, and counts."""
    random = torch.Generator().manual_seed(0)
    inside = torch.arange(40) < 20
    own = torch.ones(40).where(inside, 0.0)
    own[0] = 0.0  # regrown
    values = torch.ones(40) + torch.randn((NUM, 40), generator=random) * 0.01
    values[:, 0] = 0.0
    values[2, :20] += 2.0
    values[3, 0] = 9.0
    trees = [Tree.of({"w": row}) for row in values]
    masks = [Tree.of({"w": torch.rand(40, generator=random) < 0.8}) for _ in trees]
    for mask in masks:
        mask.flat[0] = True
    held = torch.stack([mask.flat for mask in masks])
    messages = [message_of(place, tree, mask) for place, (tree, mask) in enumerate(zip(trees, masks, strict=True))]
    mine = Own(Tree.of({"w": own}), Tree.of({"w": inside}))
    found = torch.zeros_like(values)
    for row, one in enumerate(judged_inbox(messages, Mean("norm-bound"), lambda: mine)):
        found[row, held[row]] = one.parts["model"].values
    bound = norms(values, held & inside, own).median()
    assert bound < 0.1
    after = norms(found, held & inside, own)
    assert float(after.max()) < 1.001 * bound
    np.testing.assert_allclose(after[2:4], bound, rtol=1e-4)  # the two that lie


PEERS = ["dispfl", "dpsgd", "dpsgd:density=0.5"]


def played_both_ways(context, rounds: int) -> list[Population]:
    """What a run ends with where messages are encoded, and where they are not."""
    found = []
    for executor in (Serial, Stacked):
        engine = simulate(context, executor(context))
        population = engine.start()
        for index in range(rounds):
            population, _ = engine.play(population, index)
        found.append(population)
    return found


@pytest.mark.parametrize("mean", ["norm-bound", "krum:1"])
@pytest.mark.parametrize("name", PEERS)
def test_peers_judge_alike_whether_messages_were_encoded_or_not(name: str, mean: str, monkeypatch) -> None:
    """Where messages have no bitmap, the mask is the peer's own: the centre is its model, not the median of others."""
    context = context_of(name, smooth_net, mean=mean, per_round=5, rounds=3, data_rate=0.1)
    medians: list[int] = []
    monkeypatch.setattr(means, "median", lambda values, held, mean: medians.append(1) or median(values, held, mean))
    found = [
        [state.params.flat for _, state in sorted(population.states.items())]
        for population in played_both_ways(context, rounds=3)
    ]
    assert not medians
    for one, same in zip(*found, strict=True):
        torch.testing.assert_close(one, same, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", PEERS)
def test_peers_judge_by_the_model_that_they_have(name: str, monkeypatch) -> None:
    """What `judged` is given is the State's model inside the mask that is trained next, whatever arrived."""
    context = context_of(name, mean="krum:1", rounds=2, per_round=5, data_rate=0.1)
    given: list[torch.Tensor] = []
    judge = means.judged

    def watched(held, mean, own, changes):
        if own.model is not None:
            assert (own.mask is None) == (name == "dpsgd")
            assert own.mask is None or not own.model.flat[~own.mask.flat].any()
            given.append(own.model.flat.clone())
        return judge(held, mean, own, changes)

    monkeypatch.setattr(means, "judged", watched)
    gossip = simulate(context, Serial(context))
    population, _ = gossip.play(gossip.start(), 0)
    expected = []
    for _, state in sorted(population.states.items()):
        flat = state.params.flat
        expected.append(flat.where(state.mask.loaded().flat, 0.0) if name == "dispfl" else flat.clone())
    given.clear()
    gossip.play(population, 1)
    assert len(given) == len(expected) > 0
    assert all(torch.equal(one, own) for one, own in zip(given, expected, strict=True))


@pytest.mark.parametrize("name", ["fedavg", "fedspa", "pfedgate", "subsampling", "sub-fedavg", "heterofl"])
def test_the_robust_mean_of_one_client_is_that_client(name: str) -> None:
    """Of one update every mean is that update, so that the next server is as without one, masks included."""
    found = []
    for mean in ("mean", "median", "norm-bound", "geometric-median"):
        context = context_of(name, mean=mean, per_round=1, rounds=1, data_rate=0.1)
        star = simulate(context, Serial(context))
        population, _ = star.play(star.start(), 0)
        found.append([tensor.clone() for _, tensor in leaves(population.server)])
    for other in found[1:]:
        for one, same in zip(found[0], other, strict=True):
            torch.testing.assert_close(one, same, rtol=1e-6, atol=1e-7)


EVERY_MEAN = ["median", "trimmed:0.2", "norm-bound", "krum:1", "multi-krum:1,2", "geometric-median"]


@pytest.mark.parametrize("mean", EVERY_MEAN)
@pytest.mark.parametrize("name", ["fedspa", "pfedgate", "scaffold"])
def test_changes_are_judged_alike_whether_they_were_encoded_or_not(name: str, mean: str) -> None:
    """`serial` encodes updates, `stacked` does not: which parts are changes must not be read from a part."""
    context = context_of(name, smooth_net, mean=mean, per_round=5, rounds=2, data_rate=0.1)
    half = context.method.server
    assert half is not None
    assert half.global_model is not None
    one, same = (half.global_model(population.server).flat for population in played_both_ways(context, rounds=2))
    torch.testing.assert_close(one, same, rtol=0, atol=1e-5)
    assert not torch.allclose(one, context.params.flat, atol=1e-3)


def test_partial_sums_merge_in_client_order() -> None:
    context = context_of("fedavg", mean="median")
    half = context.method.server
    assert half is not None
    server = half.init(context.params, tuple(context.clients), Seeds(0))
    round_ = Round(0, 1, 1.0, 16, Seeds(0))
    noise = [torch.randn(context.params.flat.shape, generator=torch.Generator().manual_seed(k)) for k in range(4)]
    updates = [message_of(k, context.params.like(flat)) for k, flat in enumerate(noise)]
    one_by_one = half.zero(server, round_)
    for update in updates:
        one_by_one = half.add(server, one_by_one, update)
    halves = [half.zero(server, round_), half.zero(server, round_)]
    for update in updates:
        halves[update.sender % 2] = half.add(server, halves[update.sender % 2], update)
    assert half.merge is not None
    both = half.merge(halves[1], halves[0])
    assert [held.update.sender for held in both.held] == [0, 1, 2, 3]
    merged = half.step(server, both, round_)
    expected = half.step(server, one_by_one, round_)
    assert torch.equal(merged.params.flat, expected.params.flat)
    np.testing.assert_allclose(merged.params.flat.numpy(), np.median(np.stack(noise), axis=0), rtol=1e-5, atol=1e-7)


def test_an_update_is_held_in_memory_of_its_own() -> None:
    """Executors fill the memory of a stack again for the next clients of a round."""
    context = context_of("fedavg", mean="median")
    half = context.method.server
    assert half is not None
    server, round_ = half.init(context.params, tuple(context.clients), Seeds(0)), Round(0, 1, 1.0, 16, Seeds(0))
    stack = torch.ones_like(context.params.flat)
    total = half.add(server, half.zero(server, round_), message_of(0, context.params.like(stack)))
    stack.zero_()
    assert torch.equal(half.step(server, total, round_).params.flat, torch.ones_like(stack))


@pytest.mark.parametrize(
    ("name", "mean"), [pytest.param("fedspa", "multi-krum:1", marks=pytest.mark.slow), ("dispfl", "median")]
)
def test_workers_have_the_bits_of_one_process(forked_workers, name: str, mean: str) -> None:
    more = {"mean": mean, "attack": "little:0.4,z=1.5", "per_round": 5, "rounds": 2, "data_rate": 0.1}
    context = context_of(name, **more)
    alone = played(context, Serial(context), rounds=2)
    workers = Workers(context, 2)
    try:
        assert played(context, workers, rounds=2) == alone
    finally:
        workers.close()


def test_a_robust_run_resumes_to_the_same_bits(tmp_path: Path) -> None:
    options = {"clients": 5, "per_round": 5, "data_rate": 0.1, "executor": "serial", "progress": False}
    attacked = options | {"mean": "trimmed:0.2", "attack": "random:0.2,factor=10"}
    whole = sp.train("fedavg", out=tmp_path / "whole", rounds=2, **attacked)
    sp.train("fedavg", out=tmp_path / "part", rounds=1, **attacked)
    resumed = sp.resume(tmp_path / "part", rounds=2)
    weights = [(one.path / "global.safetensors").read_bytes() for one in (whole, resumed)]
    assert weights[0] == weights[1]
    assert np.isnan(whole.accuracies()).sum() == 1
    assert "robust mean, trimmed:0.2" in whole.protocol
    assert "1 of 5 clients attack by random, factor=10" in whole.protocol
    assert "results are those of 4 honest clients" in whole.protocol


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("mode", "unknown mean"),
        ("median:2", "no value"),
        ("trimmed", "one value"),
        ("trimmed:0.5", "a share below 0.5"),
        ("krum", "one value"),
        ("krum:1.5", "a whole number"),
        ("krum:-1", "a number above 0"),
        ("multi-krum:1,none", "the number of updates"),
        ("norm-bound:nan", "a number above 0"),
    ],
)
def test_what_names_no_mean_is_refused(text: str, said: str) -> None:
    with pytest.raises(SparsonaError, match=said):
        read_mean(text)


@pytest.mark.parametrize(
    ("name", "mean", "said"),
    [
        ("local", "median", "its clients send nothing"),
        ("fedproto", "median", "mean something else"),
        ("fedmask", "median", "masks only"),
        ("fedfomo", "median", "judge each other"),
        ("fedavg", "krum:1", "2 f \\+ 3 updates"),
    ],
)
def test_methods_without_such_a_mean_are_refused(name: str, mean: str, said: str) -> None:
    more = {"validation_rate": 0.2} if name == "fedfomo" else {}
    with pytest.raises(SparsonaError, match=said):
        context_of(name, mean=mean, **more)


def test_the_default_wraps_nothing() -> None:
    plain, named = context_of("fedavg"), context_of("fedavg", mean="mean")
    assert plain.make_method == named.make_method or type(plain.make_method) is type(named.make_method)
    assert replace(plain.plan) == named.plan
