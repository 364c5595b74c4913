"""What a run is asked for: where options come from, which are refused, and that all mistakes are told at once."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path

import pytest

from sparsona.core import points as eval_points
from sparsona.core.errors import SparsonaError
from sparsona.engine.graphs import GRAPHS, Graph
from sparsona.engine.plan import Plan
from sparsona.executors import EXECUTORS
from sparsona.experiment import compare as comparisons
from sparsona.experiment import train as api
from sparsona.experiment.build import headline_of, make_config, make_plan
from sparsona.learning.schedule import SCHEDULES
from sparsona.methods import METHODS, card, factory
from sparsona.methods.fedspa import FedSpaConfig
from sparsona.runs.declaration import GROUPS, options_of
from sparsona.runs.options import CIRCUMSTANCES, CONDITIONS, OF_DATA, OPTIONS, RunConfig, dump
from sparsona.runs.request import read_option_file, write_toml
from sparsona.runs.validation import check, merge_errors, validate


def test_our_own_words_about_options_that_do_not_go_together():
    with pytest.raises(SparsonaError, match="cannot be combined\n  expected: compute=compact with blocks=filter"):
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
    assert validate(RunConfig, json.loads(dump(config)), "a run") == config


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
    assert (headline_of(config, card("fedavg-ft")), config.all_points) == ("tuned", ("received",))


def test_a_run_names_its_headline():
    for method, options, point in (
        ("fedavg", {}, "received"),
        ("fedavg", {"headline": "global"}, "global"),
        ("fedavg-ft", {"headline": "received"}, "received"),
        ("dispfl", {}, "trained"),
        ("dispfl", {"tune_epochs": 1}, "tuned"),
        ("dispfl", {"headline": "received"}, "received"),
        ("dispfl", {"novel": 4}, "trained"),
        ("dispfl", {"per_round": 19}, "received"),  # one of them has no newly trained model
        ("dispfl", {"per_round": 16, "novel": 4}, "trained"),
        ("fedavg", {"headline": "trained"}, "received"),  # half of them are sampled
        ("fedavg", {"headline": "trained", "everyone_trains": True}, "trained"),
    ):
        config = make_config(method, options)
        assert headline_of(config, card(method)) == point, (method, options)
    assert make_config("fedavg", {"headline": "global"}).all_points == ("received", "global")
    for name in ("tuned", "trained/train", "best"):
        with pytest.raises(SparsonaError):
            make_config("fedavg", {"headline": name})


def test_all_mistakes_are_told_at_once():
    with pytest.raises(SparsonaError) as caught:
        make_config("fedspa", {"clientz": 4, "density": 1.5, "rounds": -1, "lr": -1, "searhc": "rsm", "seed": "x"})
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
        "rounds = -1",
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
    assert str(caught.value).startswith(
        "density = 0 (share of the parameters a client's model keeps; 1: as much as capacity allows)\n  expected: "
    )
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
        ("max_bytes", 0),
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
    assert key.removesuffix("s") in str(caught.value)


def test_a_config_of_another_version():
    values = {**json.loads(dump(make_config("fedavg", {}))), "telepathy": True}
    _, (found,) = check(RunConfig, values, "a run")
    assert found.what == "unknown option of a run 'telepathy'"


def test_toml(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text('rounds = 7\nbatch-size = 4\n[options]\nsearch = "rsm"\n')
    assert read_option_file(path).options == {"rounds": 7, "batch_size": 4, "search": "rsm"}


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
        read_option_file(path)
    assert caught.value.expected


def test_no_config_file(tmp_path):
    with pytest.raises(SparsonaError, match="there is no config file") as caught:
        read_option_file(tmp_path / "none.toml")
    assert caught.value.hint


def test_every_option_is_declared_in_full():
    assert set(OPTIONS) == set(RunConfig.model_fields) - {"method", "options", "matched"}
    for name, one in OPTIONS.items():
        assert one.text, name
        assert one.group in GROUPS, name
        assert one.default is not None or one.none or not one.flag, name  # a flag's help says what is done without it
        assert not (one.condition and one.circumstance), name
    for name in METHODS:
        for key, one in options_of(factory(name)[1]).items():
            assert one.text, (name, key)
            assert key not in OPTIONS, (name, key)


def test_texts_come_from_those_who_know():
    for name, forms in (
        ("executor", EXECUTORS),
        ("graph", GRAPHS),
        ("lr_schedule", [row.form for row in SCHEDULES.values()]),
        ("points", eval_points.OPTIONS),
    ):
        assert all(form in OPTIONS[name].text for form in forms), name


def test_key_sets_are_derived():
    assert {name for name, one in OPTIONS.items() if one.condition} == CONDITIONS
    assert set(OF_DATA) < CONDITIONS
    assert {"data", "clients", "partition", "resize"} <= set(OF_DATA)
    assert {"model", "seed", "rounds", "per_round", "max_seconds", "max_bytes", "precision"} <= CONDITIONS
    assert not {"lr_decay", "executor", "points", "tune_epochs"} & CONDITIONS
    where_and_when = {"executor", "turn_seconds", "eval_every", "evaluate", "metrics", "points", "record_traits"}
    assert where_and_when | {"headline"} == CIRCUMSTANCES


def test_a_plan_has_every_option_of_its_names():
    config = make_config(
        "dispfl", {"clients": 10, "novel": 2, "graph": "ring", "points": ["trained"], "drop_rate": 0.1}
    )
    plan = make_plan(config, 10, peers=True)
    assert (plan.per_round, plan.num_novel, plan.drop_rate, plan.points) == (8, 2, 0.1, ("received", "trained"))
    assert plan.graph == Graph("ring")
    same = {field.name for field in dataclasses.fields(Plan)} & set(OPTIONS) - {"per_round", "points", "graph"}
    assert len(same) > 10
    assert all(getattr(plan, name) == getattr(config, name) for name in same)


def test_each_config_is_validated_once(monkeypatch, tmp_path):
    counts = Counter()

    def counted(kind):
        made = kind.__init__

        def init(self, **values):
            counts[type(self).__name__] += 1
            made(self, **values)

        monkeypatch.setattr(kind, "__init__", init)

    counted(RunConfig)
    counted(FedSpaConfig)
    options = {"clients": 4, "rounds": 1, "epochs": 1, "executor": "serial", "device": "cpu"}
    api.train("fedspa", out=tmp_path / "run", **options)
    assert counts == {"RunConfig": 1, "FedSpaConfig": 1}
    counts.clear()
    comparisons.compare(["fedspa", "fedspa:density=0.2"], out=tmp_path / "both", **options)
    assert counts == {"RunConfig": 2, "FedSpaConfig": 2}


def test_paths_are_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = make_config("pfedgate", {"data_dir": "d", "partition": "file:p.npy", "data": "arrays:~/x,y=1.npz"})
    assert found.data_dir == str(tmp_path / "d")
    assert found.partition == f"file:{tmp_path / 'p.npy'}"
    assert found.data == f"arrays:{Path.home() / 'x,y=1.npz'}"
    (tmp_path / "l.json").write_text("{}")
    assert make_config("pfedgate", {"budget": "latency:l.json"}).options["budget"] == f"latency:{tmp_path / 'l.json'}"


def test_written_options_are_read_again(tmp_path):
    values = {"rounds": 3, "clip_norm": None, "points": ["trained"], "methods": {"fedspa:density=0.2": {"lr": 0.1}}}
    (tmp_path / "o.toml").write_text(write_toml(values))
    found = read_option_file(tmp_path / "o.toml")
    assert (found.options | {"methods": found.methods}) == values
