"""`sparsona peer` and `gather`: what they refuse before anything is trained."""

from __future__ import annotations

import pytest

MODEL = ("--model", "digits-cnn", "--input", "1x8x8", "--classes", "10")


@pytest.fixture
def made(say, tmp_path):
    """A function that makes fed.toml with one client, for a method."""

    def make(method, *more):
        for command in (
            ["federation", "new", "fed.toml", "--method", method, *MODEL],
            ["keys", "new", "lab-1"],
            ["federation", "admit", "fed.toml", "lab-1.pub", *more],
        ):
            said = say(*command)
            assert said.code == 0, said.err

    return make


def test_a_method_with_a_server_has_no_peers(say, made):
    made("fedspa")
    said = say("peer", "fed.toml", "--data", "digits", "--listen", "127.0.0.1:7447")
    assert said.code != 0
    assert "has a server" in said.err
    assert "sparsona join" in said.err


def test_a_peer_that_reaches_nobody(say, made):
    made("dispfl")
    said = say("peer", "fed.toml", "--data", "digits")
    assert said.code != 0
    assert "does not say where any peer is" in said.err
    assert "--listen" in said.err
    said = say("peer", "fed.toml", "--data", "digits", "--listen", ":7447", "--at-least", "2")
    assert "--at-least 2" in said.err


def test_what_is_no_journal(say, made, tmp_path):
    made("dispfl")
    assert "Missing argument" in say("gather", "runs/x").err
    said = say("gather", "runs/x", tmp_path)
    assert said.code != 0
    assert "has no journal" in said.err
    (tmp_path / "journal.jsonl").write_text('{"format": 1}\n')
    assert "cannot be read" in say("gather", "runs/x", tmp_path).err
    assert not (tmp_path / "runs").exists()
