"""Costs of methods that the papers' tables need and that cannot be run yet.

A rule is `Method.cost` with the method's options as one more argument. When a method's file arrives, its row in METHODS
takes the place of its rule: a test checks that no name has both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field

from sparsona.core.layout import Layout, Slot
from sparsona.core.round import Client, Round
from sparsona.core.update import Cost, PartSize, Support
from sparsona.learning.phases import Training
from sparsona.methods.card import Preset


@dataclass(frozen=True)
class RuleCard:
    """A row of `sparsona cost` that is not in `sparsona methods`."""

    name: str
    title: str
    paper: str
    rule: Callable[[Layout, Client, Round, Any], Cost]
    config: type[Training]
    peers: bool = False  # clients send to each other, and all of them train in every round
    engine: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    presets: Mapping[str, Preset] = field(default_factory=dict)
    note: str = ""  # how the figures are to be read, where training decides them


def training_flops(layout: Layout, client: Client, config: Training, nonzeros: tuple[int, ...] | None = None) -> int:
    """FLOPs of one client's local epochs: three forward passes an example."""
    return config.epochs * client.num_examples * layout.train_flops(nonzeros)


def _model(layout: Layout, name: str = "model") -> PartSize:
    return PartSize(name, layout, layout.size)


def _inside(layout: Layout, name: str, num_values: int, support: Support = Support.KNOWN) -> PartSize:
    return PartSize(name, layout, num_values, support)


def _mask(layout: Layout) -> PartSize:
    return PartSize("mask", layout, layout.size, is_mask=True)


def _vector(name: str, size: int) -> PartSize:
    return PartSize(name, Layout((Slot(name, (size,)),)), size)


def _density(default: float, description: str) -> Any:
    return Field(default, gt=0, le=1, description=description)


def pfedhn(layout: Layout, client: Client, round_: Round, config: Training) -> Cost:
    """The client's costs only: it trains the dense model that a network on the server makes for it."""
    return Cost((_model(layout),), (_model(layout),), training_flops(layout, client, config))


class PFedGateTableConfig(Training):
    """What pFedGate's table of costs needs to know."""

    epochs: int = Field(1, ge=1, description="passes over the client's data in one round")
    density: float = _density(0.5, "share of the parameters a client's model uses, s")
    gate_share: float = Field(0.05, ge=0, le=1, description="size of the gating layer as a share of the model, s_phi")
    upload_share: float = Field(
        1.0, gt=0, le=1, description="share of the parameters that training changes, q: known only afterwards"
    )


def pfedgate_table(layout: Layout, client: Client, round_: Round, config: PFedGateTableConfig) -> Cost:
    """As multiples of a dense model's cost, which is all that its paper states: FLOPs go with the share in use."""
    share = config.density + config.gate_share
    update = _inside(layout, "update", math.floor(config.upload_share * layout.size), Support.BITS)
    gate, used = math.ceil(config.gate_share * layout.size), math.ceil(config.density * layout.size)
    return Cost(
        (_model(layout),),
        (update,),
        round(share * training_flops(layout, client, config)),
        exact=False,
        kept=(_vector("gate", gate),),
        infer_flops=round(share * layout.forward_flops()),
        # The model inside the gate's mask, and where the dense one started, since its change is sent.
        at_work=(
            _inside(layout, "gated", used),
            _model(layout, "start"),
            _vector("gate's gradient", gate),
            _model(layout, "gradient"),
        ),
    )


COST_RULES = {
    card.name: card
    for card in (
        RuleCard("pfedhn", "pFedHN (client's part)", "Shamsian et al., ICML 2021", pfedhn, Training),
        RuleCard(
            "pfedgate-table",
            "pFedGate (as its table 3 states)",
            "Chen et al., ICML 2023",
            pfedgate_table,
            PFedGateTableConfig,
            note="multiples of a dense model's costs, as its paper states them, and no bounds: the gate's size "
            "(gate_share) depends on the input, what is sent (upload_share) on training",
        ),
    )
}
