"""Options of methods that train inside an evolving mask; sparsity/search.py implements them."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from sparsona.learning.optimizer import FLAG


class MaskSearchOptions(BaseModel):
    """Options that a method's Config inherits besides those of training."""

    density: float = Field(
        0.5,
        gt=0,
        le=1,
        description="share of the parameters a client's model keeps; 1: as much as capacity allows",
        json_schema_extra=FLAG,
    )
    regrowth: Literal["gradient", "random"] = Field("gradient", description="what decides where a mask grows")
    initial_masks: Literal["same", "different"] = Field("same", description="whether clients start with one mask")
    allocation: Literal["erk", "uniform"] = Field("erk", description="how density is shared among the tensors")
    prune_rate: float = Field(0.5, ge=0, le=1, description="share of a mask replaced in the first round")
