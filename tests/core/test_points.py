"""The table of evaluation points."""

import pytest

from sparsona.core import points
from sparsona.core.errors import SparsonaError


def test_every_row_says_whose_model_it_is_and_what_it_is():
    for name, found in points.POINTS.items():
        assert found.name == name
        assert found.text
        assert found.data == "test"
    assert points.OPTIONS == ("received", "trained", "tuned", "global", "consensus")


def test_a_point_on_other_data_is_the_same_model():
    found = points.point("global/validation")
    assert (found.base, found.model, found.when, found.data) == ("global", "shared", "round", "validation")
    assert points.on("global/validation", "train") == "global/train"
    assert points.on("global/train", "test") == "global"


@pytest.mark.parametrize(
    ("name", "words"),
    [("recieved", "did you mean 'received'"), ("received/tset", "received/train"), ("received/test", "received/train")],
)
def test_unknown_points_are_refused(name, words):
    with pytest.raises(SparsonaError, match=words):
        points.point(name)


def test_what_is_evaluated_by_itself_cannot_be_asked_for():
    with pytest.raises(SparsonaError, match="leave it out"):
        points.check_option("novel_tuned")
    assert points.check_option("trained/train") == "trained/train"


def test_points_by_time():
    names = ("received", "trained", "tuned", "consensus/train")
    assert points.select(names, "round") == ("received", "consensus/train")
    assert points.select(names, "turn") == ("trained",)
    assert [name for name in names if points.is_own(name)] == ["received", "trained", "tuned"]
