"""The battery finds what it is there to find: for each property, a method that breaks it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from sparsona import methods
from sparsona.core.method import Method, Tree, dense
from sparsona.methods.dispfl import dispfl
from sparsona.methods.fedavg import FedAvgConfig, fedavg
from sparsona.testing import PROPERTIES, SHORT, check

FEW = {"clients": 4, "data_rate": 0.15}


@dataclass(frozen=True)
class Longer:
    """A State with more in it than it began with."""

    buffers: Tree
    memory: tuple[Any, ...]
    extra: torch.Tensor


def with_finish(base: Method, change: Callable[..., Any]) -> Method:
    def finish(state, work, inbox, probe, round_):
        return change(*base.finish(state, work, inbox, probe, round_), work, round_, state)

    return replace(base, finish=finish)


def with_loss(base: Method, change: Callable[..., Any]) -> Method:
    (phase,) = base.phases

    def loss(work, batch):
        value, buffers = phase.loss(work, batch)
        return change(value, work), buffers

    return replace(base, phases=(replace(phase, loss=loss),))


def with_cost(base: Method, **more: Any) -> Method:
    def cost(layout, client, round_):
        found = base.cost(layout, client, round_)
        return replace(found, **{key: change(found, layout) for key, change in more.items()})

    return replace(base, cost=cost)


def draws_without_a_seed(base: Method) -> Method:
    return with_loss(base, lambda value, work: value * (1 + random.random()))


def counts_turns_outside_its_state(base: Method) -> Method:
    turns: dict[int, int] = {}

    def change(state, update, work, round_, old):
        turns[round_.client.index] = turns.get(round_.client.index, 0) + 1
        flat = work.params.flat + turns[round_.client.index]
        return state, replace(update, parts={"model": dense(work.params.like(flat))})

    return with_finish(base, change)


def edits_what_it_is_handed(base: Method) -> Method:
    def change(state, update, work, round_, old):
        return state, update

    def step(server, total, round_):
        after = base.server.step(server, total, round_)
        server.params.flat.add_(1.0)
        return after

    return replace(with_finish(base, change), server=replace(base.server, step=step))


def weighs_more_than_its_examples(base: Method) -> Method:
    def change(state, update, work, round_, old):
        return state, replace(update, weight=2.0 * update.weight)

    return with_finish(base, change)


def stores_more_than_at_first(base: Method) -> Method:
    def change(state, update, work, round_, old):
        return Longer(state.buffers, (), torch.zeros(1)), update

    return with_finish(base, change)


def learns_at_any_rate(base: Method) -> Method:
    (phase,) = base.phases

    def update(work, grads, tick):
        return phase.update(work, grads, tick._replace(lr_scale=torch.ones_like(tick.lr_scale)))

    return replace(base, phases=(replace(phase, update=update),))


def predicts_by_the_batch(base: Method) -> Method:
    return replace(base, predict=lambda work, inputs: base.predict(work, inputs - inputs.mean(0)))


def deploys_something_else(base: Method) -> Method:
    return replace(base, deploy=lambda work: (work.params.like(2 * work.params.flat), work.buffers))


def sends_its_statistics(base: Method) -> Method:
    def change(state, update, work, round_, old):
        parts = {"model": update.parts["model"], "statistics": dense(work.buffers.like(work.buffers.flat.float()))}
        return state, replace(update, parts=parts if work.buffers.layout.size else dict(update.parts))

    return with_finish(base, change)


def forgets_who_it_is_without_memory(base: Method) -> Method:
    served: set[int] = set()

    def receive(state, inbox, probe, round_):
        if round_.is_new and round_.client.index in served:
            raise RuntimeError("a client is new twice")
        served.add(round_.client.index)
        return base.receive(state, inbox, probe, round_)

    return replace(base, receive=receive)


def knows_only_whom_it_saw(base: Method) -> Method:
    """A server that serves nobody who has not sent an update, after the first rounds."""
    seen: set[int] = set()

    def add(server, total, update):
        seen.add(update.sender)
        return base.server.add(server, total, update)

    def reply(server, client, round_):
        if round_.index > 1 and client.index not in seen:
            raise RuntimeError("nobody knows this client")
        return base.server.reply(server, client, round_)

    return replace(base, server=replace(base.server, add=add, reply=reply))


def shares_no_model(base: Method) -> Method:
    half = replace(base.server, global_model=lambda server: server.params.like(server.params.flat / 0))
    return replace(base, server=half)


def loss_by_value(base: Method) -> Method:
    return with_loss(base, lambda value, work: value * (2.0 if value.item() > 0 else 1.0))


BROKEN = {
    "same_seed_same_bits": draws_without_a_seed,
    "generators_are_untouched": draws_without_a_seed,
    "state_survives_the_store": counts_turns_outside_its_state,
    "inputs_are_unchanged": edits_what_it_is_handed,
    "state_keeps_its_structure": stores_more_than_at_first,
    "loss_and_update_are_pure": draws_without_a_seed,
    "clients_run_together_as_alone": loss_by_value,
    "every_update_passes_the_gate": weighs_more_than_its_examples,
    "frames_give_the_same_bits": weighs_more_than_its_examples,
    "costs_equal_the_ledger": lambda base: with_cost(base, train_flops=lambda cost, layout: cost.train_flops + 1),
    "costs_say_what_is_kept": lambda base: with_cost(base, kept=lambda cost, layout: cost.down),
    "costs_say_what_training_holds": lambda base: with_cost(base, at_work=lambda cost, layout: ()),
    "learning_rate_takes_effect": learns_at_any_rate,
    "predictions_ignore_their_batch": predicts_by_the_batch,
    "deployed_module_predicts_the_same": deploys_something_else,
    "statistics_stay_at_home": sends_its_statistics,
    "shared_model_is_evaluated": shares_no_model,
    "clients_without_memory": forgets_who_it_is_without_memory,
    "lost_updates_change_nobody": forgets_who_it_is_without_memory,
    "novel_clients_join_at_the_end": knows_only_whom_it_saw,
    "learns": lambda base: with_loss(base, lambda value, work: -value),
}


def broken(name: str) -> methods.MethodCard:
    def wrong(task, config: FedAvgConfig) -> Method:
        return BROKEN[name](fedavg(task, config))

    return replace(methods.card("fedavg"), name="wrong", module=wrong, config=FedAvgConfig)


@pytest.mark.parametrize("name", sorted(BROKEN))
def test_a_method_that_breaks_it_is_found(name):
    options = {**FEW, "batch_size": 32} if name == "learns" else FEW  # fewer steps, in which fedavg reaches 0.66
    with pytest.raises(AssertionError, match=f"^wrong: {name.replace('_', ' ')}: "):
        check(broken(name), options, properties={name: PROPERTIES[name]})


@pytest.mark.parametrize(("decay", "words"), [(0.0, "counts the examples of weight 0"), (1.0, "batch.weight is 0")])
def test_a_mean_that_counts_padding_is_named(decay, words):
    """Also where decay hides from the executor that a loss is divided by too much."""

    def wrong(task, config: FedAvgConfig) -> Method:
        base = fedavg(task, config)

        def loss(work, batch):
            outputs, buffers = task.forward(work.params, work.buffers, batch.inputs, True, batch.noise)
            losses, weight = task.losses(outputs, batch)
            return (losses * weight).mean() + decay * work.params.flat.square().sum(), buffers

        return replace(base, phases=(replace(base.phases[0], loss=loss),))

    card = replace(methods.card("fedavg"), name="wrong", module=wrong, config=FedAvgConfig)
    name = "clients_run_together_as_alone"
    with pytest.raises(AssertionError, match=f"^wrong: clients run together as alone: .*{words}"):
        check(card, FEW, properties={name: PROPERTIES[name]})


def test_density_is_held_to_what_the_card_says():
    card = replace(methods.card("fedavg-ft"), name="wrong", density_bounds=("up",))
    with pytest.raises(AssertionError, match="no option 'density'"):
        check(card, FEW, properties={"density_bounds_messages": PROPERTIES["density_bounds_messages"]})

    class Dense(FedAvgConfig):
        density: float = 0.5

    card = replace(card, module=fedavg, config=Dense)
    with pytest.raises(AssertionError, match="density bounds messages: client"):
        check(card, FEW, properties={"density_bounds_messages": PROPERTIES["density_bounds_messages"]})


def test_consensus_is_called():
    """As D-PSGD with a mask: a part whose mask only its receiver knows cannot be read there."""

    def wrong(task, config):
        def consensus(inbox, round_):
            raise RuntimeError("cannot be read")

        base = dispfl(task, config)
        return replace(base, peer=replace(base.peer, consensus=consensus))

    card = replace(methods.card("dispfl"), name="wrong", module=wrong, config=methods.factory("dispfl")[1])
    name = "shared_model_is_evaluated"
    with pytest.raises(AssertionError, match="shared model is evaluated: cannot be read"):
        check(card, FEW, properties={name: PROPERTIES[name]})


def test_the_short_battery_is_part_of_the_whole():
    assert set(SHORT) < set(PROPERTIES)


def test_testing_needs_no_pytest():
    import subprocess
    import sys

    code = "import sys, sparsona.testing; print('pytest' in sys.modules, 'hypothesis' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_a_kept_count_of_steps_is_no_part_of_a_cost() -> None:
    names = ("costs_say_what_is_kept", "costs_say_what_training_holds")
    kept = {**FEW, "optimizer": "adam", "lr": 0.003, "optimizer_memory": "keep"}
    check(methods.card("fedavg"), kept, properties={name: PROPERTIES[name] for name in names})
