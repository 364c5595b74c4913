"""Training and prediction: the model learns, predictions depend on their own input, and it can be deployed."""

from __future__ import annotations

import torch
from torch import nn

from sparsona.core.tree import leaves
from sparsona.engine.rounds import shared_model
from sparsona.testing.case import Case, net_with_statistics, require, step, trained_print


def is_named_like_its_row(case: Case) -> None:
    """Errors, records and reports call a method by its row's name, also where rows share a file."""
    name = case.history.method.name
    require(name == case.card.name, f"its name is '{name}'")


def learns(case: Case) -> None:
    """It beats guessing by far, on handwritten digits that six clients hold unequal shares of."""
    history = case.start(data_rate=1.0, rounds=5, epochs=3, per_round=4, lr=0.15).play(5)
    found = history.final[0].evaluations or history.engine.evaluate(history.last, 5)
    own = [e for e in found if "/" not in e.point]
    accuracy = sum((e.correct or 0) / e.count for e in own) / len(own)
    require(accuracy > case.accuracy, f"accuracy {accuracy:.3f}, but more than {case.accuracy} is required")


def predictions_ignore_their_batch(case: Case) -> None:
    """Each prediction depends on its own input alone, unless the method says that it is transductive."""
    history = case.history
    if history.method.transductive:
        return
    predict, work = history.method.predict, history.work(0)
    inputs = history.context.federation.packed_examples(0, "test").inputs
    whole = predict(work, inputs)
    single = torch.cat([predict(work, row[None]) for row in inputs])
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
    require(torch.allclose(single, whole, 1e-4, 1e-5), "predictions one by one differ from those of a batch")
    mixed = predict(work, inputs[order])
    require(torch.allclose(mixed, whole[order], 1e-4, 1e-5), "predictions depend on the order of a batch")


def deployed_module_predicts_the_same(case: Case) -> None:
    """What `deploy` hands out is what `predict` evaluates."""
    history = case.history
    if history.method.deploy is None:
        return
    work, inputs = history.work(1), history.context.federation.packed_examples(1, "test").inputs
    found = history.method.deploy(work)
    module = found if isinstance(found, nn.Module) else history.context.task.module(*found)
    with torch.no_grad():
        one, other = module.to(inputs.device)(inputs), history.method.predict(work, inputs)
    require(torch.allclose(one, other, 1.3e-6, 1e-5), "the deployed module predicts something else")


def learning_rate_takes_effect(case: Case) -> None:
    """A step at another learning rate gives another model, and `update` at learning rate 0 moves nothing."""
    history = case.history
    for phase in history.method.phases:
        work, batch = history.enter(phase, history.work(0), 0), history.batch(phase, 0)
        found = [trained_print(phase, step(phase, work, batch, scale)) for scale in (1.0, 0.1, 0.0)]
        require(len(set(found)) == 3, f"phase '{phase.name}': a step is the same whatever `tick.lr_scale`")
        require(
            found[2] == trained_print(phase, work), f"phase '{phase.name}': a step at learning rate 0 moves something"
        )


def statistics_stay_at_home(case: Case) -> None:
    """A model with BatchNorm and dropout trains, stays exact, and no buffer's name travels."""
    history, again = (case.start(net_with_statistics).play(2) for _ in range(2))
    require(history.prints == again.prints, "two runs of the same seed differ")
    buffers = history.context.buffers
    moved = [
        path
        for state in history.last.states.values()
        for path, tensor in leaves(state)
        if path.startswith("buffers") and not torch.equal(tensor, buffers.flat)
    ]
    require(moved, "no State has `buffers` that moved: a client keeps its own statistics there")
    require(all(e.count for e in history.engine.evaluate(history.last, 2)), "a client was not evaluated")
    names = {slot.name for slot in buffers.layout.slots}
    for way, client, update in history.sent:
        travels = {slot.name for part in update.parts.values() for slot in part.layout.slots}
        require(not names & travels, f"client {client}: {sorted(names & travels)} are buffers, and travel {way}")


def shared_model_is_evaluated(case: Case) -> None:
    """The server's model, or the peers' consensus, is one of the task's module, and finite."""
    history, task = case.history, case.history.context.task
    if (point := history.method.shared_point) is None:
        return
    model = shared_model(history.context.server_side, history.last)
    require(
        model is not None and model.layout.digest == task.layout.digest,
        f"the {point} model has not the layout of the task",
    )
    assert model is not None
    require(bool(model.flat.isfinite().all()), f"the {point} model has values that are not finite")
    other = case.start(points=[point])
    found = [e.client for e in other.engine.evaluate(history.last, len(history.records)) if e.point == point]
    require(sorted(found) == list(range(len(history.context.clients))), f"point '{point}' was evaluated for {found}")
