"""FedLC: FedAvg whose clients learn with logits that are calibrated by their numbers of examples of each class.

Paper: Zhang et al., Federated Learning with Label Distribution Skew via Logits Calibration, ICML 2022.
Kept: nothing but BatchNorm statistics. Travels: the dense model, both ways. Costs: dense training.
Differences from the text: a class without examples, whose margin would be infinite, counts as 1e-8 of an example. Its
margin of 100 takes it out of the loss all the same, and keeps the loss finite.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from pydantic import Field

from sparsona.core.layout import Layout, Slot
from sparsona.core.method import Method, PartSize
from sparsona.learning.phases import Model
from sparsona.methods.fedavg import FedAvgConfig, fedavg


class FedLCConfig(FedAvgConfig):
    """What FedLC adds to the options of FedAvg."""

    margin: float = Field(1.0, ge=0, description="what the logit of a class with one example is lowered by")


@dataclass(frozen=True, kw_only=True)
class FedLCWork(Model):
    """FedAvg's Work, and what each class's logit is lowered by."""

    margins: Any


def fedlc(task, config: FedLCConfig) -> Method:
    """FedAvg with calibrated logits."""
    base = fedavg(task, config)
    (plain,) = base.phases

    def receive(state, inbox, probe, round_):
        work = base.receive(state, inbox, probe, round_)
        counts = probe.label_counts().float().clamp(min=1e-8)
        return FedLCWork(**vars(work), margins=config.margin * counts**-0.25)

    def loss(work: FedLCWork, batch):
        outputs, buffers = task.forward(work.params, work.buffers, batch.inputs, True, batch.noise)
        return task.mean_loss(outputs - work.margins, batch), buffers  # the paper's L_Cal

    def cost(layout, client, round_):
        found, classes = base.cost(layout, client, round_), task.num_classes
        margins = PartSize("margins", Layout((Slot("margins", (classes,)),)), classes)
        return replace(found, at_work=(margins, *found.at_work))

    phase = replace(plain, loss=loss)
    return replace(base, receive=receive, phases=(phase,), tune=phase, cost=cost)
