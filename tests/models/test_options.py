"""name:key=value,key=value"""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsona import models
from sparsona.core.errors import SparsonaError


def test_defaults_are_the_rows_own():
    assert models.read_spec("lenet5")[1] == {}
    assert models.read_spec("lenet5:")[1] == {}
    of_row = {name: models.read_spec(name)[1] for name in models.MODELS}
    assert (of_row["resnet18"]["groups"], of_row["resnet18"]["stem"]) == (32, "3x3")
    assert (of_row["resnet18-emnist"]["groups"], of_row["resnet18-emnist"]["stem"]) == ("width", "3x3")
    assert (of_row["resnet18-gldv2"]["groups"], of_row["resnet18-gldv2"]["stem"]) == ("width", "7x7")
    assert of_row["transformer"] == {"adapters": 0, "adapter_form": "paper", "dropout": 0.0}


def test_options_are_read_by_kind():
    _, options = models.read_spec(
        "resnet18: groups=width, adapters=TRUE,adapter-form=authors,dropout=.5,weights=A/b=c.pth"
    )
    assert options == {
        "groups": "width",
        "stem": "3x3",
        "adapters": True,
        "adapter_form": "authors",
        "dropout": 0.5,
        "weights": "A/b=c.pth",
        "split": False,
    }
    assert models.read_spec("transformer:adapters=16,dropout=0")[1]["adapters"] == 16


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("resnet", ["unknown model 'resnet'", "did you mean 'resnet18'?"]),
        ("lenet5:dropout=0.5", ["model 'lenet5' has no options"]),
        (
            "resnet18:grups=32",
            ["unknown option of model 'resnet18' 'grups'", "groups, split, stem", "did you mean 'groups'?"],
        ),
        ("resnet18:groups=16", ["groups of model 'resnet18' cannot be '16'", "32 | width"]),
        ("resnet18:stem=5x5", ["3x3 | 7x7"]),
        ("resnet18:adapters=16", ["false | true"]),
        ("resnet18:adapters", ["'adapters' is not an option", "key=value"]),
        ("resnet18:adapters=true,", ["'' is not an option"]),
        ("resnet18:dropout=1", ["dropout of model 'resnet18' cannot be '1'", "without, 1"]),
        ("resnet18:dropout=nan", ["without, 1"]),
        ("resnet18:dropout=often", ["without, 1"]),
        ("transformer:adapters=-1", ["a whole number, 0 or more"]),
        ("transformer:adapters=true", ["a whole number, 0 or more"]),
        ("transformer:adapters=1.5", ["a whole number, 0 or more"]),
        ("transformer:stem=3x3", ["adapter_form, adapters, dropout"]),
    ],
)
def test_mistakes_are_named(spec, words):
    with pytest.raises(SparsonaError) as caught:
        models.read_spec(spec)
    for word in words:
        assert word in str(caught.value)


@given(text=st.text(alphabet="adpterso=,:0123.xwid²", max_size=30))
@settings(max_examples=150, deadline=None)
def test_any_text_is_read_or_refused(text):
    """And what is read is of the option's kind."""
    try:
        row, options = models.read_spec(f"transformer:{text}")
    except SparsonaError:
        return
    assert set(options) == set(row.options)
    assert isinstance(options["adapters"], int)
    assert options["adapter_form"] in ("paper", "authors")
    assert 0 <= options["dropout"] < 1


def test_a_network_is_described_for_any_input(say):
    found = json.loads(say("models", "resnet18", "--classes", "200", "--input", "3x64x64", "--json").out)
    assert found["parameters"] == 11_271_432
    found = json.loads(say("models", "resnet18-emnist:adapters=true", "--json").out)
    assert found["roles"]["adapter"]["parameters"] == 1_400_320
    assert found["options"]["adapters"]["value"] is True
    assert "704" in say("models", "resnet18-emnist").out
    for words in (("--classes", "3"), ("resnet18", "--input", "3xa"), ("resnet18", "--classes", "0"), ("resnet81",)):
        assert say("models", *words).code == 1
    listed = {row["name"]: row["parameters"] for row in json.loads(say("models", "--json").out)}
    assert (listed["lenet5"], listed["vgg11"], listed["transformer"]) == (439_096, 9_231_114, 5_731_092)
