"""name:value,key=value: what is read, what is refused, and that no text breaks it."""

from __future__ import annotations

import contextlib
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsona.core import spec
from sparsona.core.errors import SparsonaError
from sparsona.engine.graphs import read_graph
from sparsona.learning.schedule import SCHEDULES, lr_schedule
from sparsona.models import read_spec
from sparsona.runs.request import parse_method


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("-2", -2),
        ("0.5", 0.5),
        (".5", 0.5),
        ("1e-3", 1e-3),
        ("5.", 5.0),
        ("true", True),
        ("false", False),
        ("none", None),
        ("None", None),
        ("rsm", "rsm"),
        ("'rsm'", "rsm"),
        ("[0.2, 1.0]", [0.2, 1.0]),
        ('["global", "trained"]', ["global", "trained"]),
        ("dirichlet:0.3", "dirichlet:0.3"),
        ("3 apples", "3 apples"),
        ("", ""),
    ],
)
def test_values_are_read_as_toml_or_left_as_text(text, value):
    found = spec.parse_value(text)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "name", "argument", "args", "options"),
    [
        ("ring", "ring", None, (), {}),
        (" ring ", "ring", None, (), {}),
        ("lenet5:", "lenet5", "", (), {}),
        ("random:10:bounded", "random", "10:bounded", ("10", "bounded"), {}),
        ("groups:4:0.3", "groups", "4:0.3", ("4", "0.3"), {}),
        ("steps:0.5, 0.75", "steps", "0.5, 0.75", ("0.5", "0.75"), {}),
        ("file:/a,b=c:d.npy", "file", "/a,b=c:d.npy", ("/a",), {"b": "c:d.npy"}),  # a path is the argument as written
        ("topk:0.1,memory=true", "topk", "0.1,memory=true", ("0.1",), {"memory": "true"}),
        ("m:a-form=a, rate = .5", "m", "a-form=a, rate = .5", (), {"a_form": "a", "rate": ".5"}),
        ("m:w=A/b=c.pth", "m", "w=A/b=c.pth", (), {"w": "A/b=c.pth"}),
    ],
)
def test_parts(text, name, argument, args, options):
    found = spec.parse("thing", text)
    assert (found.name, found.argument, found.args, dict(found.options)) == (name, argument, args, options)


def test_methods_and_pairs():
    assert spec.parse_pairs(["per-round=3", "search = rsm"]) == {"per_round": 3, "search": "rsm"}
    assert parse_method("fedspa:density=0.2,search=rsm") == ("fedspa", {"density": 0.2, "search": "rsm"})
    assert parse_method("fedspa") == ("fedspa", {})
    found = parse_method("fedalt:personal=norm,output,lr_schedule=steps:0.5,0.75,epochs=2")[1]
    assert found == {"personal": "norm,output", "lr_schedule": "steps:0.5,0.75", "epochs": 2}
    assert parse_method("pfedgate:capacities=[0.5,0.1],density=0.5")[1] == {"capacities": [0.5, 0.1], "density": 0.5}


@pytest.mark.parametrize("pair", ["density", "=3", "density:0.5", " =3"])
def test_a_pair_without_key_or_value(pair):
    with pytest.raises(SparsonaError, match=f"'{pair}' is not an option\n  expected: key=value"):
        spec.parse_pairs([pair])


@pytest.mark.parametrize("text", ["fedspa:density", "fedspa:=3", "fedspa:density,search=rsm"])
def test_a_method_has_options_alone(text):
    with pytest.raises(SparsonaError, match="is not an option\n  expected: key=value"):
        parse_method(text)


def test_a_misspelt_name_is_answered_with_the_form_it_is_written_in():
    with pytest.raises(SparsonaError) as caught:
        spec.read("graph", "rendom:3", ("ring", "random:N", "random:N:bounded"))
    assert str(caught.value).startswith("unknown graph 'rendom:3'\n  expected: one of random:N, random:N:bounded, ring")
    assert caught.value.hint == "did you mean 'random:N'?"
    with pytest.raises(SparsonaError) as caught:
        spec.read("graph", "x" * 100, ("ring",))
    assert caught.value.hint == ""
    assert len(caught.value.what) < 100


@pytest.mark.parametrize(
    ("text", "count"), [("1", 1), ("007", 7), ("0", None), ("-1", None), ("1.0", None), ("²", None)]
)
def test_counts(text, count):
    assert spec.as_count(text) == count
    assert spec.as_count("1" * 10) is None


@pytest.mark.parametrize(("text", "number"), [("1", 1.0), ("-.5", -0.5), ("1e3", 1e3), ("nan", None), ("inf", None)])
def test_numbers(text, number):
    assert spec.as_number(text) == number
    assert spec.as_number("1_0") is spec.as_number("") is spec.as_number("٣") is None


NAMES = st.text(string.ascii_lowercase + string.digits + "_", min_size=1, max_size=8)
WORDS = st.text(string.ascii_letters + string.digits + ".-", min_size=1, max_size=8)
VALUES = st.text(string.ascii_letters + string.digits + ".:/ -", max_size=8).map(str.strip)


@given(
    NAMES, st.lists(VALUES.filter(lambda text: text and ":" not in text), max_size=3), st.dictionaries(NAMES, VALUES)
)
@settings(max_examples=100, deadline=None)
def test_what_is_written_is_read_back(name, args, options):
    text = ",".join([*args, *(f"{key}={value}" for key, value in options.items())])
    found = spec.parse("thing", f"{name}:{text}" if text else name)
    assert (found.name, list(found.args), dict(found.options)) == (name, args, options)


@given(st.text(alphabet="abrinfuldgx:=,[]0123.-_ '\"²\n", max_size=40))
@settings(max_examples=300, deadline=None)
def test_any_text_is_read_or_refused_in_words(text):
    for read in (
        lambda: spec.parse("thing", text),
        lambda: spec.named_options(spec.parse("thing", text)),
        lambda: spec.parse_pairs([text]),
        lambda: parse_method(f"fedspa:{text}"),
        lambda: read_spec(f"transformer:{text}"),
        lambda: lr_schedule(f"linear:{text}"),
        lambda: lr_schedule(text),
        lambda: read_graph(f"random:{text}", 5),
        lambda: read_graph(text, 5),
    ):
        with contextlib.suppress(SparsonaError):  # and nothing else
            read()


def test_every_schedule_has_an_example_that_is_one():
    for row in SCHEDULES.values():
        assert lr_schedule(row.example)(0, 10, 0.9) <= 1
        assert row.text
        with pytest.raises(SparsonaError, match=row.example):
            lr_schedule(f"{row.example},nonsense")
