"""What a run is asked for: where options come from, which are refused, and that all mistakes are told at once."""

from __future__ import annotations

import json

import pytest

from sparsona.core.errors import SparsonaError
from sparsona.methods import METHODS
from sparsona.prepare import make_config
from sparsona.runs.options import RunConfig, dump
from sparsona.runs.request import read_toml
from sparsona.runs.validation import errors_in, merge_errors, validated


def test_our_own_words_about_options_that_do_not_go_together():
    with pytest.raises(SparsonaError, match="do not go together\n  expected: compute=compact with blocks=filter"):
        make_config("pfedgate", {"compute": "compact"})
    with pytest.raises(SparsonaError, match=r"expected: parameters, flops or latency:FILE\.json"):
        make_config("pfedgate", {"budget": "size"})


def test_the_more_special_wins():
    """Row of the table, then options given, then options after the method's colon."""
    assert make_config("fedavg", {}).tune_epochs == 0
    assert make_config("fedavg-ft", {}).tune_epochs == METHODS["fedavg-ft"].engine["tune_epochs"] == 5
    assert make_config("fedavg-ft", {"tune_epochs": 2}).tune_epochs == 2
    assert make_config("fedavg-ft:tune_epochs=3", {"tune_epochs": 2}).tune_epochs == 3
    assert make_config("fedspa", {}).options["search"] == "dst"
    assert make_config("fedspa-rsm", {}).options["search"] == "rsm"
    assert make_config("fedspa", {"density": 0.2}).options["density"] == 0.2
    assert make_config("fedspa:density=0.3", {"density": 0.2}).options["density"] == 0.3


def test_every_option_of_a_method_is_stored():
    """A default that changes in a later version must not change a run that is resumed."""
    assert set(make_config("fedspa", {}).options) >= {"lr", "epochs", "weight_decay", "density", "search", "prune_rate"}


def test_a_stored_config_is_read_back_the_same():
    config = make_config("fedspa", {"capacities": [0.2, 1.0], "points": ["global"], "partition_seed": 3, "rounds": 7})
    assert validated(RunConfig, json.loads(dump(config)), "a run") == config


def test_how_many_are_sampled():
    assert make_config("fedavg", {"clients": 20}).sampled == 10
    assert make_config("fedavg", {"clients": 20, "novel": 4}).sampled == 8
    assert make_config("fedavg", {"clients": 20, "novel": 0.2}).sampled == 8
    assert make_config("fedavg", {"clients": 4, "novel": 0.01}).num_novel == 1
    assert make_config("fedavg", {"clients": 1}).sampled == 1
    assert make_config("fedavg", {"clients": 20, "per_round": 3}).sampled == 3


def test_points():
    assert make_config("fedavg", {}).all_points == ("received",)
    assert make_config("fedavg", {"points": ["global", "received", "global"]}).all_points == ("received", "global")
    config = make_config("fedavg-ft", {"points": ["tuned"]})
    assert (config.headline, config.all_points) == ("tuned", ("received",))


def test_all_mistakes_are_told_at_once():
    with pytest.raises(SparsonaError) as caught:
        make_config("fedspa", {"clientz": 4, "density": 1.5, "rounds": 0, "lr": -1, "searhc": "rsm", "seed": "x"})
    text = str(caught.value)
    assert text.startswith("6 mistakes\n")
    for number in range(1, 7):
        assert f"\n  {number}. " in text
    for part in (
        "unknown option of fedspa 'clientz'",
        "did you mean 'clients'?",
        "unknown option of fedspa 'searhc'",
        "did you mean 'search'?",
        "density = 1.5",
        "less than or equal to 1",
        "rounds = 0",
        "lr = -1",
        "seed = 'x'",
    ):
        assert part in text


def test_what_does_not_go_together_is_told_at_once():
    options = {"clients": 3, "per_round": 9, "novel": 1, "capacities": [0.5, 2.0], "points": ["tuned"]}
    with pytest.raises(SparsonaError) as caught:
        make_config("fedavg", options)
    text = str(caught.value)
    assert text.startswith("3 mistakes\n")
    assert "cannot sample 9 clients per round: only 2 take part" in text
    assert "capacities [0.5, 2.0]" in text
    assert "point 'tuned' without tuning" in text


def test_one_mistake_is_told_alone():
    with pytest.raises(SparsonaError) as caught:
        make_config("fedspa", {"density": 0})
    assert str(caught.value).startswith("density = 0 (share of the parameters a client's model keeps)\n  expected: ")
    only = SparsonaError("a", expected="b")
    assert merge_errors([only]) is only


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("clients", 0),
        ("clients", 2.5),
        ("rounds", 0),
        ("per_round", 0),
        ("batch_size", 0),
        ("lr_decay", 0),
        ("lr_decay", 1.1),
        ("lr_decay", float("nan")),
        ("seed", -1),
        ("partition_seed", -1),
        ("validation_rate", 1),
        ("test_rate", 0),
        ("min_size", 1),
        ("drop_rate", 1),
        ("drop_rate", float("nan")),
        ("eval_every", 0),
        ("tune_epochs", -1),
        ("tune_lr_scale", float("inf")),
        ("max_seconds", 0),
        ("max_seconds", float("nan")),
        ("capacities", []),
        ("capacities", [float("nan")]),
        ("points", ["recieved"]),
        ("novel", 20),
        ("novel", 1.5),
        ("novel", float("inf")),
        ("novel_epochs", 1),
        ("lr", 0),
        ("lr", float("inf")),
        ("epochs", 0),
        ("clip_norm", 0),
        ("weight_decay", -1),
        ("density", 0),
        ("density", 1.5),
        ("density", float("nan")),
        ("search", "rms"),
        ("prune_rate", 1.1),
        ("options", {}),
        ("method", "fedavg"),
    ],
)
def test_values_out_of_range(key, value):
    with pytest.raises(SparsonaError) as caught:
        make_config("fedspa", {key: value})
    assert caught.value.expected
    assert key in str(caught.value)


def test_a_config_of_another_version():
    values = {**json.loads(dump(make_config("fedavg", {}))), "telepathy": True}
    (found,) = errors_in(RunConfig, values, "a run")
    assert found.what == "unknown option of a run 'telepathy'"


def test_toml(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text('rounds = 7\nbatch-size = 4\n[options]\nsearch = "rsm"\n')
    assert read_toml(path) == {"rounds": 7, "batch_size": 4, "search": "rsm"}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"rounds = \n", "cannot be read: Invalid value"),
        (b"\xff\xfe", "cannot be read"),
        (b"options = 3\n", "'options' in"),
    ],
)
def test_a_config_file_that_cannot_be_read(tmp_path, content, words):
    path = tmp_path / "config.toml"
    path.write_bytes(content)
    with pytest.raises(SparsonaError, match=words) as caught:
        read_toml(path)
    assert caught.value.expected


def test_no_config_file(tmp_path):
    with pytest.raises(SparsonaError, match="there is no config file") as caught:
        read_toml(tmp_path / "none.toml")
    assert caught.value.mend
