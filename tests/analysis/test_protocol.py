"""What protocols of several seeds and methods have in common."""

from __future__ import annotations

import pytest

from sparsona.analysis.protocol import compare_protocols


def lines(*said: str, topic: str = "clients") -> list[tuple[str, str]]:
    """The lines of one method, whose seeds say these sentences; `labels` are empty where all seeds say it."""
    texts = {seed: f"{topic}: {text}" for seed, text in enumerate(said, 1)}
    shared, own = compare_protocols({"A": texts})
    return [("", text) for _, text in shared] + [line for _, found in own for line in found]


@pytest.mark.parametrize(
    ("said", "merged"),
    [
        (("17 to 24 examples.", "20 to 28 examples."), "17–20 to 24–28 examples."),
        (("1,200 steps.", "1,050 steps."), "1,050–1,200 steps."),
        (("1.24e+05 FLOPs.", "9.87e+04 FLOPs."), "9.87e+04–1.24e+05 FLOPs."),
        (("a loss of 0.5, at 93%", "a loss of 0.25, at 9%"), "a loss of 0.25–0.5, at 9–93%"),
        (("clients' rates are 2; peers' 3.", "clients' rates are 1; peers' 3."), "clients' rates are 1–2; peers' 3."),
    ],
)
def test_numbers_become_ranges(said, merged):
    assert lines(*said) == [("", merged)]


@pytest.mark.parametrize(
    "text",
    [
        "client {} diverged.",
        "Clients 1, {} and 9 diverged.",
        "hospital-{} diverged.",
        "conv{} is kept.",
        "'ward {}' diverged.",
        "a rate of 1/{}.",
        "v0.{}.1",
    ],
)
def test_names_do_not(text):
    said = text.format(3), text.format(7)
    assert lines(*said, said[0]) == [("A, seeds 1, 3", said[0]), ("A, seed 2", said[1])]


def test_what_one_seed_says_is_not_what_the_method_has():
    """Else a line of some seeds would be taken for one of all methods."""
    texts = {"A": {1: "clients: Client 3 diverged.", 2: "clients: None did."}, "B": {1: "clients: Client 3 diverged."}}
    shared, own = compare_protocols(texts)
    assert shared == []
    assert own == [("clients", [("A, seed 1; B", "Client 3 diverged."), ("A, seed 2", "None did.")])]
