"""Names of clients and classes, and one client of a federation."""

import json
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsona.core.errors import SparsonaError
from sparsona.data.federation import Federation
from sparsona.data.names import clean_name, clean_names, file_names, find_client, name_of

X, Y = np.arange(24, dtype=np.float32).reshape(12, 2), np.array(["up", "down"])[np.arange(12) % 2]


@pytest.fixture(scope="module")
def federation():
    return Federation.from_clients({"hospital-1": (X, Y), "hospital-3": (X + 50, Y)}, name="wards")


@settings(deadline=None, max_examples=40)
@given(st.one_of(st.text(max_size=200), st.binary(max_size=50)))
def test_a_name_can_be_printed(name):
    shown = clean_name(name) if len(str(name)) <= 200 else ""
    assert shown.isprintable()
    assert clean_name(shown[:200]) == shown[:200]
    assert "\x1b" not in shown
    assert "\u202e" not in shown  # it would turn the rest of a line around


def test_names_are_told_apart_and_complete():
    assert clean_names(["a", 2, b"c"], "clients") == ("a", "2", "c")
    for names, message in (
        (["a", "a"], "two clients are called 'a'"),
        (["\x00", "\\x00"], "two clients are called"),
        (["a", ""], "an empty name"),
        ("ab", "expected: a list of names"),
        (["a"], "1 names for 2 clients"),
    ):
        with pytest.raises(SparsonaError, match=message):
            clean_names(names, "clients", 2)


def test_a_client_by_name_or_number():
    assert (name_of(("a", "b"), 1), name_of((), 1), name_of(None, 7)) == ("b", "1", "7")
    assert [find_client(key, ("a", "b"), 2) for key in ("b", 0, np.int64(1))] == [1, 0, 1]
    for key, names, message in (
        ("c", ("a", "b"), r"unknown client 'c'\n  expected: one of a, b"),
        ("hospitl-3", ("hospital-3",), "did you mean 'hospital-3'"),
        ("3", None, r"there is no client '3'\n  expected: a number from 0 to 1: these have no names"),
        (2, ("a", "b"), r"there is no client 2\n  expected: 0 to 1"),
        (-1, None, "there is no client -1"),
        (1.0, None, "a client by a float"),
        (True, None, "a client by a bool"),
        (slice(2), None, "a client by a slice"),
    ):
        with pytest.raises(SparsonaError, match=message):
            find_client(key, names, 2)


def test_one_client_of_a_federation(federation):
    assert len(federation) == 2
    one = federation["hospital-3"]
    assert (one.index, one.name, federation[1].name) == (1, "hospital-3", "hospital-3")
    assert repr(one) == "Client 1 'hospital-3': 8 train, 1 validation, 3 test"
    assert one.sizes == {"train": 8, "validation": 1, "test": 3}
    assert one.label_counts("test").sum() == 3
    assert one.examples("train").inputs.min() >= 50
    assert [client.name for client in federation] == ["hospital-1", "hospital-3"]
    assert federation.examples("hospital-3", "test").inputs.tolist() == one.examples("test").inputs.tolist()
    numbered = Federation.from_clients([(X, Y)])
    assert (numbered[0].name, repr(numbered[0])) == ("0", "Client 0: 8 train, 1 validation, 3 test")


def test_names_are_kept(federation, tmp_path):
    """Saved, opened, pickled, split anew; the digest is that of the examples alone."""
    federation.save(tmp_path)
    for kept in (Federation.open(tmp_path), pickle.loads(pickle.dumps(federation)), federation.hold_out(0.3)):
        assert kept.client_names == ("hospital-1", "hospital-3")
        assert kept.class_names == ("down", "up")
    unnamed = Federation.from_clients([(X, 1 - np.arange(12) % 2), (X + 50, 1 - np.arange(12) % 2)])
    assert unnamed.client_names is None
    assert unnamed.digest() == federation.digest()
    manifest = json.loads((tmp_path / "federation.json").read_text())
    manifest["client_names"] = ["a"]
    (tmp_path / "federation.json").write_text(json.dumps(manifest))
    with pytest.raises(SparsonaError, match="holds no federation that can be read: 1 names for 2 clients"):
        Federation.open(tmp_path)
    del manifest["client_names"], manifest["class_names"]  # as older versions wrote it
    (tmp_path / "federation.json").write_text(json.dumps(manifest))
    assert Federation.open(tmp_path).client_names is None


def test_a_list_of_clients_may_have_names():
    federation = Federation.from_clients([(X, Y)], client_names=["one"], class_names=["up", "down", "still"])
    assert (federation.client_names, federation.class_names) == (("one",), ("up", "down", "still"))
    assert federation.num_classes == 3
    with pytest.raises(SparsonaError, match="client_names together with a dict"):
        Federation.from_clients({"a": (X, Y)}, client_names=["b"])


@settings(deadline=None, max_examples=200)
@given(st.lists(st.one_of(st.text("aA-01/. \0", min_size=1, max_size=4), st.text(min_size=1)), unique=True, max_size=8))
def test_parts_of_file_names_are_different_and_no_paths(names):
    found = file_names(names)
    assert len({part.casefold() for part in found}) == len(names)
    for part in found:
        assert part.strip("._-") or part.isdecimal()
        assert not set(part) & set('/\\:\0 *?<>|"')
        assert len(part.encode()) < 140
