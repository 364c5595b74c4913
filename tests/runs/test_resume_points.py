"""Stopped after its first round and resumed, a run of any method has the rows of one that was not stopped."""

from __future__ import annotations

import pytest
import torch
from method_lines import anywhere
from processes import traces
from torch import nn

import sparsona as sp
from sparsona.core import points
from sparsona.engine.final import has_partial_global
from sparsona.experiment.build import make_config, make_context
from sparsona.methods import METHODS

OPTIONS = {"rounds": 2, "epochs": 1, "batch_size": 8, "novel": 1, "train_accuracy": True, "executor": "serial"}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


@pytest.fixture(scope="module")
def federation() -> sp.Federation:
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(120) % 3
    x = torch.eye(3).repeat(1, 2)[y] + 0.3 * torch.randn(120, 6, generator=generator)
    return sp.federate(x, y, clients=5, partition="iid", seed=0, validation_rate=0.2)


class Stop:
    def on_round(self, result) -> None:
        raise KeyboardInterrupt


def options_of(method: str, federation: sp.Federation) -> dict:
    """Everything that can be evaluated of this method."""
    options = {**OPTIONS, **anywhere(method), **({} if METHODS[method].peers else {"per_round": 3})}
    context = make_context(make_config(method, options, federation, net), federation, net)
    made = context.method
    options["points"] = [points.TRAINED, *([made.shared_point] if made.shared_point else [])]
    if made.tune is not None:
        options |= {"tune_epochs": 1}
    if made.shared_point is not None and not has_partial_global(context):
        options |= {"guard": True}
    return options


@pytest.mark.parametrize("method", METHODS)
def test_resumed_after_the_first_round(federation, tmp_path, method):
    options = options_of(method, federation)
    whole = sp.train(method, federation, net, out=tmp_path / "whole", **options)
    with pytest.raises(KeyboardInterrupt):
        sp.train(method, federation, net, out=tmp_path / "run", observers=[Stop()], **options)
    kept = sp.load(tmp_path / "run")._folder.records.evaluations(1)
    assert {row.point for row in kept} == {points.RECEIVED, *options["points"]}
    run = sp.resume(tmp_path / "run", federation, net)
    assert run._folder.records.evaluations(1) == kept
    assert traces(run.path) == traces(whole.path)
    assert set(options["points"]) <= set(run.points)
    assert (points.GUARDED in run.points) == ("guard" in options)


def test_a_stop_between_two_evaluations_leaves_no_row(federation, tmp_path):
    """Where it stops it is evaluated, for the summary; uninterrupted, nobody would have been."""
    options = {"rounds": 14, "epochs": 1, "per_round": 2, "eval_every": 4, "record_traits": True, "executor": "serial"}
    whole = sp.train("fedspa", federation, net, out=tmp_path / "whole", **options)
    run = sp.train("fedspa", federation, net, out=tmp_path / "run", max_seconds=1e-9, **options)
    assert run.curve()[-1][0] == 1
    for reached in range(2, 15):
        run = sp.resume(tmp_path / "run", federation, net)
        assert run.curve()[-1][0] == reached
    assert [completed for completed, _ in run.curve()] == [4, *range(5, 15)]
    assert run._folder.records.evaluations() == whole._folder.records.evaluations()
    assert run._folder.records.traits() == whole._folder.records.traits()
