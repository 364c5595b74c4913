"""Attackers: each attack changes what it says, and nothing else."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from small_runs import context_of

from sparsona.core.errors import SparsonaError
from sparsona.core.tree import Tree, counts
from sparsona.core.update import Update, mask_digest, masked
from sparsona.engine import plan as plans
from sparsona.engine.clients import LocalClients
from sparsona.engine.gate import check_update
from sparsona.engine.jobs import open_message
from sparsona.engine.plan import attackers
from sparsona.engine.rounds import engine_for
from sparsona.executors.serial import Serial
from sparsona.experiment.agreement import agree
from sparsona.experiment.build import make_config
from sparsona.robust import little_z, read_attack
from sparsona.robust.attacks import collude

SENDING = {"per_round": 5, "rounds": 2, "data_rate": 0.1}


class SpiedClients(LocalClients):
    """Keeps the messages that clients send."""

    messages: ClassVar[dict[int, Update]] = {}

    def run(self, jobs):
        for outcome in super().run(jobs):
            if outcome.message is not None:
                self.messages[outcome.client] = open_message(outcome.message)
            yield outcome


def sent(name: str, attack: str | None, rounds: int = 1, **more):
    """The messages of the last of these rounds as the server gets them, the context, and what it has afterwards."""
    context = context_of(name, attack=attack, **{**SENDING, **more})
    SpiedClients.messages = {}
    star = engine_for(context.server_side, SpiedClients(context, Serial(context)))
    population = star.start()
    for index in range(rounds):
        population, record = star.play(population, index)
    return SpiedClients.messages, context, population, record


def change(update: Update, start: torch.Tensor | None = None) -> torch.Tensor:
    (part,) = (part for part in update.parts.values() if not part.is_mask)
    return part.values if start is None else part.values - start


@pytest.fixture(scope="module")
def honest():
    return {name: sent(name, None) for name in ("fedavg", "fedspa", "dispfl")}


@pytest.mark.parametrize("name", ["fedavg", "fedspa"])
@pytest.mark.parametrize("attack", ["sign-flip", "scaled", "random", "same-value"])
def test_attackers_change_their_change(honest, name: str, attack: str) -> None:
    messages, context, _, record = sent(name, f"{attack}:0.4")
    liars = attackers(context.plan, 5)
    assert len(liars) == 2
    truth, _, _, before = honest[name]
    start = context.params.flat if name == "fedavg" else None
    for client, update in messages.items():
        true, lie = change(truth[client], start), change(update, start)
        if client not in liars:
            assert torch.equal(true, lie)
        elif attack == "sign-flip":
            torch.testing.assert_close(lie, -true, rtol=1e-4, atol=1e-6)
        elif attack == "scaled":
            torch.testing.assert_close(lie, 10 * true, rtol=1e-4, atol=1e-5)
        elif attack == "random":
            assert abs(float(torch.nn.functional.cosine_similarity(true, lie, dim=0))) < 0.2
            torch.testing.assert_close(lie.norm(), true.norm(), rtol=1e-3, atol=1e-5)
        else:
            torch.testing.assert_close(lie, torch.ones_like(lie), rtol=1e-4, atol=1e-5)
    # A lie has the size of the truth, takes no more FLOPs, and passes the gate.
    assert [turn.traffic for turn in record.turns] == [turn.traffic for turn in before.turns]
    assert [turn.tally.search_flops for turn in record.turns] == [turn.tally.search_flops for turn in before.turns]
    for client, update in messages.items():
        cost = context.method.cost(context.task.layout, context.clients[client], context.plan.round_at(0))
        check_update(update, cost.up, client=context.clients[client], round=0, exact=cost.exact)


def test_a_peer_lies_to_all_its_neighbours(honest) -> None:
    messages, context, _, record = sent("dispfl", "sign-flip:0.2")
    (liar,) = attackers(context.plan, 5)
    truth, _, _, before = honest["dispfl"]
    # What it compares with is no part of its work.
    assert [turn.tally.search_flops for turn in record.turns] == [turn.tally.search_flops for turn in before.turns]
    for client, update in messages.items():
        true, lie = truth[client].parts["model"], update.parts["model"]
        assert mask_digest(true.mask) == mask_digest(lie.mask)
        if client != liar:
            assert torch.equal(true.values, lie.values)
            continue
        begun = context.fresh_state(client).params.flat[true.mask.flat]  # in the first round nothing was received
        torch.testing.assert_close(lie.values, 2 * begun - true.values, rtol=1e-4, atol=1e-5)


def test_a_little_is_the_attackers_mean_less_some_of_their_spread(honest) -> None:
    messages, context, _, _ = sent("fedavg", "little:0.4,z=1.5")
    liars = sorted(attackers(context.plan, 5))
    true = torch.stack([change(honest["fedavg"][0][client]).double() for client in liars])
    expected = true.mean(0) - 1.5 * true.std(0, correction=0)
    for client in messages:
        if client in liars:
            torch.testing.assert_close(change(messages[client]).double(), expected, rtol=1e-4, atol=1e-6)
        else:
            assert torch.equal(change(messages[client]), change(honest["fedavg"][0][client]))
    assert little_z(50, 24) == pytest.approx(1.4260768)  # s = 2, and Phi(z) = 24 / 26
    assert little_z(20, 2) == little_z(5, 4) == little_z(2, 2) == little_z(0, 0) == 0
    assert little_z(50, 30) == pytest.approx(1.6448536)  # that of s = 1: Phi(z) = 19 / 20


@pytest.mark.parametrize(
    "more",
    [
        {"per_round": 3, "attack": "little:0.6"},
        {"per_round": 2, "attack": "little:0.6", "everyone_trains": True},
        {"per_round": 5, "attack": "little:0.4", "drop_rate": 0.4},
    ],
)
def test_z_is_of_the_updates_that_a_round_aggregates(monkeypatch, more: dict) -> None:
    """A round in which attackers are the majority by chance has a z, too."""
    asked = []

    def noted(num: int, attackers: int) -> float:
        asked.append((num, attackers))
        return little_z(num, attackers)

    monkeypatch.setattr("sparsona.engine.collusion.little_z", noted)
    context = context_of("fedavg", **{**SENDING, "rounds": 6, **more})
    star, liars = engine_for(context.server_side, LocalClients(context, Serial(context))), attackers(context.plan, 5)
    population, expected = star.start(), []
    for index in range(6):
        who = plans.participation(context.plan, context.clients, index)
        if set(who.trains) & liars:
            expected.append((len(who.aggregated), len(who.aggregated & liars)))
        population, record = star.play(population, index)
        assert {turn.client for turn in record.turns if turn.aggregated} == set(who.aggregated)
    assert asked == expected
    assert any(2 * found > num for num, found in asked) or "drop_rate" in more


def test_masked_attackers_agree_on_what_they_hold(honest) -> None:
    """FedSpa's server has the masks, and messages assume them."""
    messages, context, _, _ = sent("fedspa", "little:0.4,z=1.0")
    truth, liars = honest["fedspa"][0], sorted(attackers(context.plan, 5))
    masks = [context.fresh_state(client).mask.loaded().flat for client in liars]
    whole = torch.zeros(2, len(masks[0]), dtype=torch.float64)
    for row, client in enumerate(liars):
        whole[row, masks[row]] = change(truth[client]).double()
    count = (masks[0].int() + masks[1].int()).clamp(min=1)
    mean = whole.sum(0) / count
    gaps = torch.where(torch.stack(masks), whole - mean, 0.0).square().sum(0)
    expected = mean - (gaps / count).sqrt()
    for row, client in enumerate(liars):
        torch.testing.assert_close(change(messages[client]).double(), expected[masks[row]], rtol=1e-4, atol=1e-6)


def test_what_one_attacker_does_not_hold_has_no_spread() -> None:
    trees = [Tree.of({"w": torch.tensor(values)}) for values in ([1.0, 2.0, 0.0], [3.0, 0.0, 5.0])]
    masks = [tree.like(tree.flat > 0) for tree in trees]
    updates = [
        Update(k, 0, 1.0, {"u": masked(tree, mask)}) for k, (tree, mask) in enumerate(zip(trees, masks, strict=True))
    ]
    found = collude(updates, [{"u": mask} for mask in masks], 0.5)
    assert [update.parts["u"].values.tolist() for update in found] == [[1.5, 2.0], [1.5, 5.0]]


@pytest.mark.parametrize("name", ["fedspa", "dispfl"])
def test_a_forged_mask_has_the_density_of_the_true_one(honest, name: str) -> None:
    messages, context, population, _ = sent(name, "forged-mask:0.2")
    (liar,) = attackers(context.plan, 5)
    truth, lie = honest[name][0][liar], messages[liar]
    masks = [(truth.parts["mask"].tree(), lie.parts["mask"].tree())] if name == "fedspa" else []
    masks += [(truth.parts["model"].mask, lie.parts["model"].mask)] if name == "dispfl" else []
    for true, forged in masks:
        assert counts(true) == counts(forged)
        assert not torch.equal(true.flat, forged.flat)
    assert not torch.equal(change(truth), change(lie))
    torch.testing.assert_close(change(truth).sort().values, change(lie).sort().values)  # the same values elsewhere
    cost = context.method.cost(context.task.layout, context.clients[liar], context.plan.round_at(0))
    check_update(lie, cost.up, client=context.clients[liar], round=0, exact=cost.exact)
    if name == "fedspa":  # server and client have the same mask, so that the next message is no longer than others
        assert mask_digest(population.server.masks[liar]) == mask_digest(population.states[liar].mask)
        _, _, _, later = sent(name, "forged-mask:0.2", rounds=2)
        assert len({turn.traffic.down for turn in later.turns}) == 1


def test_flipped_labels_are_trained_on_and_not_tested_on() -> None:
    plain, flipped, shifted = (
        context_of("fedavg", attack=a) for a in (None, "label-flip:0.2", "label-flip:0.2,shift=1")
    )
    (liar,) = attackers(flipped.plan, 5)
    for client in range(5):
        for part in ("train", "validation", "test"):
            true, found, moved = (c.federation.examples(client, part).targets for c in (plain, flipped, shifted))
            lies = client == liar and part == "train"
            assert torch.equal(found, 9 - true if lies else true)
            assert torch.equal(moved, (true + 1) % 10 if lies else true)
    assert liar not in plans.tested_clients(flipped.plan, flipped.clients)


def test_who_attacks_is_drawn_once_among_those_that_take_part() -> None:
    context = context_of("fedavg", clients=12, attack="scaled:0.25", novel=4)
    drawn = attackers(context.plan, 12)
    assert len(drawn) == 2
    assert not drawn & set(range(12)) - set(
        plans.tested_clients(context_of("fedavg", clients=12, novel=4).plan, context.clients)
    )
    assert drawn != attackers(context_of("fedavg", clients=12, attack="scaled:0.25", novel=4, seed=3).plan, 12)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sign-flip", "the share of clients"),
        ("sign-flip:1", "the share of clients"),
        ("sign-flip:0.2,power=2", "option of the attack"),
        ("sign-flip:0.2,factor=inf", "a number between"),
        ("scaled:0.2,factor=-1e39", "a number between"),
        ("same-value:0.2,value=1e39", "a number between"),
        ("little:0.2,z=1e300", "a number between"),
        ("random:0.2,norm=1e39", "above 0 and below"),
        ("random:0.2,norm=0", "above 0 and below"),
        ("label-flip:0.2,shift=1e300", "64 bits"),
        ("label-flip:0.2,shift=9223372036854775808", "64 bits"),
        ("label-flip:0.2,shift=0.5", "a whole number"),
        ("ddos:0.2", "unknown attack"),
    ],
)
def test_what_names_no_attack_is_refused(text: str, said: str) -> None:
    with pytest.raises(SparsonaError, match=said):
        read_attack(text)


@pytest.mark.parametrize(
    ("name", "attack", "more", "said"),
    [
        ("local", "sign-flip:0.2", {}, "send nothing"),
        ("fedavg", "forged-mask:0.2", {}, "choose no mask"),
        ("pfedgate", "forged-mask:0.2", {}, "choose no mask"),
        ("fedmask", "sign-flip:0.2", {}, "masks only"),
        ("fedavg", "little:0.2", {"transform": "half"}, "with transforms"),
        ("fedavg", "scaled:0.99", {}, "at least one honest client"),
    ],
)
def test_attacks_that_do_not_fit_are_refused(name: str, attack: str, more: dict, said: str) -> None:
    with pytest.raises(SparsonaError, match=said):
        context_of(name, attack=attack, **more)


def test_nobody_makes_a_liar_clip_and_noise_its_lies() -> None:
    for attack in ("scaled:0.2", "little:0.2"):
        with pytest.raises(SparsonaError, match="with --privacy local"):
            make_config("fedavg", {"attack": attack, "privacy": "local:noise=1"})
        make_config("fedavg", {"attack": attack, "privacy": "central:noise=1"})
    make_config("fedavg", {"attack": "label-flip:0.2", "privacy": "local:noise=1"})


def test_a_federation_file_takes_a_mean_and_no_attack() -> None:
    """A real attacker is not configured by the others."""
    assert agree("fedavg", {"mean": "median"}, model="cnn28", classes=10)["mean"] == "median"
    with pytest.raises(SparsonaError, match="'attack' in a federation file"):
        agree("fedavg", {"attack": "sign-flip:0.2"}, model="cnn28", classes=10)


def test_a_lie_goes_through_transforms() -> None:
    messages, context, _, _ = sent("fedspa", "scaled:0.2,factor=1000", transform="clip:0.01")
    (liar,) = attackers(context.plan, 5)
    assert float(change(messages[liar]).norm()) == pytest.approx(0.01, rel=1e-3)
    assert isinstance(context.params, Tree)
