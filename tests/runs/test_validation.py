"""Values that fit no type of an option are one mistake, under the option's own name."""

from __future__ import annotations

from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field

from sparsona import methods
from sparsona.core.errors import SparsonaError
from sparsona.runs.validation import check, validate


class Tea(BaseModel):
    cups: int | Literal["pot"] | None = Field(2, description="how much")
    leaves: list[int] | Annotated[float, Field(gt=0)] = 1.0
    milk: float | None = None


@pytest.mark.parametrize("value", ["bogus", 2.0, 0])
def test_smallest_of_pfedgate(value):
    _, (error,) = check(methods.factory("pfedgate")[1], {"smallest": value}, "pfedgate")
    assert error.what.startswith(f"smallest = {value!r} (share of each tensor")
    assert error.expected.endswith(" or 'authors'")
    assert error.hint == "give smallest another value"


def test_a_union_is_one_mistake_and_two_options_are_two():
    _, errors = check(Tea, {"cups": "mug", "leaves": [1, "x"], "milk": "much"}, "tea")
    assert [error.what for error in errors] == [
        "milk = 'much'",
        "cups = 'mug' (how much)",
        "leaves = [1, 'x']",
    ]
    assert errors[1].expected == "a whole number or 'pot'"
    assert errors[2].expected.count(" or ") == 1
    with pytest.raises(SparsonaError, match="3 mistakes"):
        validate(Tea, {"cups": "mug", "leaves": [1, "x"], "milk": "much"}, "tea")


def test_values_of_every_type_are_taken():
    for value in (3, "pot", None):
        assert validate(Tea, {"cups": value}, "tea").cups == value
