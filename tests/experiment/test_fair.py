"""What makes a comparison fair: the same conditions for all, equal work where it is asked for, and what each spent."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from older_runs import unseal

import sparsona as sp
from sparsona import methods
from sparsona.core.errors import SparsonaError
from sparsona.engine.forecast import forecast
from sparsona.experiment import compare as comparisons
from sparsona.experiment import tune
from sparsona.experiment.build import make_configs, make_context
from sparsona.experiment.match import amounts, rounds_for
from sparsona.runs.folder import RunFolder

FEDSPA = {"preset": "fedspa", "clients": 20, "data_rate": 0.5}  # what that paper has but for the data
SMALL = {"clients": 6, "rounds": 4, "epochs": 1, "data_rate": 0.2, "executor": "serial", "device": "cpu"}


def side(name, **options):
    config, of_method = make_configs(name, {**SMALL, **options})
    return make_context(config, method_config=of_method).server_side


# Validation data.


@pytest.fixture
def needy(monkeypatch):
    row = replace(methods.card("local"), name="needy", title="Needy", needs_validation=True)
    monkeypatch.setitem(methods.METHODS, "needy", row)
    return row


def test_a_method_that_needs_validation_data_is_refused_without_any(needy, tmp_path):
    with pytest.raises(SparsonaError, match=r"needy decides by validation data, and validation_rate is 0"):
        sp.train("needy", **SMALL, validation_rate=0, out=tmp_path / "none")
    data = [(torch.randn(8, 3), torch.arange(8) % 2, torch.randn(4, 3), torch.arange(4) % 2) for _ in range(2)]
    bare = sp.Federation.from_clients(data, validation_rate=0)
    with pytest.raises(SparsonaError, match=r"2 clients have none"):
        sp.train("needy", bare, torch.nn.Linear(3, 2), rounds=1, out=tmp_path / "bare")
    assert not (tmp_path / "none").exists()


def test_if_one_method_needs_validation_data_all_give_up_the_same(needy, tmp_path):
    with pytest.raises(SparsonaError, match="needy decides by validation data"):
        sp.compare(["fedavg", "needy"], **SMALL, validation_rate=0, out=tmp_path / "none")
    with pytest.raises(SparsonaError, match="sets validation_rate for one method alone"):
        sp.compare(["fedavg", "needy:validation_rate=0.2"], **SMALL, out=tmp_path / "none")
    options = SMALL | {"rounds": 1, "validation_rate": 0.2}
    both = sp.compare(["fedavg", "needy"], **options, out=tmp_path / "both")
    folders = [RunFolder.open(run.path) for run in both.runs]
    assert len({folder.facts.federation for folder in folders}) == 1
    told = [run.protocol for run in both.runs]
    assert all("% of the other examples are held back for validation, and trained on by no method" in t for t in told)
    assert ["training decides by them" in text for text in told] == [False, True]


# What a run spends, before and after.


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fedavg-ft", {"drop_rate": 0.3, "novel": 2, "novel_epochs": 2, "everyone_trains": True}),
        ("fedalt", {"batch_size": 7, "max_personal_steps": 2}),
        ("fedspa", {"stateless": True, "transform": ["half"]}),
        ("dispfl", {"per_round": 3, "drop_rate": 0.3, "tune_epochs": 1, "novel": 2}),
        ("dpsgd-ft", {"graph": "ring", "tune_epochs": 1, "tune_from": "all", "per_round": 2, "novel": 1}),
        ("fedem", {"tune_epochs": 1}),
    ],
)
def test_a_forecast_is_what_the_run_spends(name, options, tmp_path):
    expected = forecast(side(name, **options))
    run = sp.train(name, **SMALL, **options, out=tmp_path / "run")
    found, flops = run.summary, run.summary["flops"]
    assert expected.exact
    assert (expected.turns, expected.steps) == (found["turns"]["total"], found["steps"]["total"])
    assert (expected.flops, expected.bytes) == (flops["train"] + flops["mask_search"], found["bytes"]["total"])
    if options.get("tune_epochs") or name == "fedavg-ft":
        assert found["steps"]["tuning"] > 0
        assert found["steps"]["rounds"] + found["steps"]["tuning"] == found["steps"]["total"]


@pytest.mark.parametrize(
    ("options", "all_requested"),
    [
        ({"clients": 14, "data_rate": 0.5, "num_candidates": 12}, True),  # more than in the default graph
        ({"num_candidates": 2, "tune_epochs": 1, "novel": 2, "novel_epochs": 1}, True),
        ({"num_candidates": 2, "tune_epochs": 1, "tune_from": "all"}, True),
        ({"num_candidates": 2, "tune_epochs": 1, "tune_from": "all", "order": "train-mix", "novel": 1}, True),
        ({"num_candidates": 3, "per_round": 3, "drop_rate": 0.3}, False),
    ],
)
def test_a_forecast_bounds_what_peers_request(options, all_requested, tmp_path):
    """Who is out of reach may have been requested; otherwise every request for a message is answered."""
    options = SMALL | {"rounds": 2, "min_size": 5} | options
    expected = forecast(side("fedfomo", **options))
    found = sp.train("fedfomo", **options, out=tmp_path / "run").summary
    assert not expected.exact
    assert (expected.turns, expected.steps) == (found["turns"]["total"], found["steps"]["total"])
    assert found["flops"]["train"] < found["flops"]["train"] + found["flops"]["mask_search"] <= expected.flops
    assert found["bytes"]["total"] <= expected.bytes
    assert (found["bytes"]["total"] == expected.bytes) or not all_requested


def test_steps_and_turns_survive_a_resumption(tmp_path):
    whole = sp.train("fedavg-ft", **SMALL, tune_epochs=1, out=tmp_path / "whole")
    stopped = sp.train("fedavg-ft", **SMALL, tune_epochs=1, max_steps=1, out=tmp_path / "stopped")
    assert stopped.summary["rounds"] == 1
    assert stopped.summary["steps"]["tuning"] == 0
    for _ in range(3):
        resumed = sp.resume(tmp_path / "stopped")
    assert resumed.summary["rounds"] == 4
    assert [resumed.summary[key] for key in ("turns", "steps")] == [whole.summary[key] for key in ("turns", "steps")]
    assert resumed.view.cumulative_steps == whole.view.cumulative_steps
    assert whole.view.cumulative_steps[-1] == (5, whole.summary["steps"]["total"])  # tuning is the fifth


def test_effort_of_a_run_whose_summary_lacks_it_is_read_from_its_records(tmp_path):
    run = sp.train("local", **SMALL, out=tmp_path / "run")
    file = tmp_path / "run" / "summary.json"
    unseal(tmp_path / "run")
    old = {key: value for key, value in json.loads(file.read_text()).items() if key not in ("turns", "steps")}
    file.write_text(json.dumps(old))
    assert sp.load(tmp_path / "run").view.summary["steps"] == run.summary["steps"]


# --match.


@pytest.mark.parametrize("by", ["steps", "flops", "bytes"])
def test_the_number_of_rounds_is_the_nearest(by):
    budget = sum(amounts([side("fedavg", rounds=9, seed=seed) for seed in (0, 1)], by)[0])
    for name, options in (("fedavg-ft", {"tune_epochs": 2}), ("fedalt", {}), ("dispfl", {"graph": "ring"})):
        contexts = [side(name, rounds=9, seed=seed, **options) for seed in (0, 1)]
        chosen = rounds_for(contexts, by, budget)
        off = {n: abs(sum(amounts(contexts, by, n)[0]) - budget) for n in range(1, 30)}
        assert off[chosen] == min(off.values()), (name, off)


def test_peers_get_a_share_of_the_rounds():
    """All peers train in every round, a sixth of the others' clients do."""
    fedavg = side("fedavg", rounds=24, per_round=1)
    (budget,), _ = amounts([fedavg], "steps")
    assert rounds_for([side("dispfl", rounds=24)], "steps", budget) == pytest.approx(4, abs=1)
    assert rounds_for([side("local", rounds=24)], "bytes", budget) is None


def test_matched_by_steps(tmp_path):
    found = sp.compare(
        ["fedavg", ("fedalt", {"personal_epochs": 2})], match="steps", seeds=2, **SMALL, out=tmp_path / "c"
    )
    fedavg, fedalt = (found.runs[place].summary for place in (0, 2))
    assert fedavg["rounds"] == 4
    assert fedalt["rounds"] in (1, 2)  # it takes three times the steps in a round
    assert [run.config["rounds"] for run in found.runs] == [4, 4, fedalt["rounds"], fedalt["rounds"]]
    budget, spent = fedavg["steps"]["total"], fedalt["steps"]["total"]
    assert f"nearest to the {budget:,} local steps that FedAvg spends in 4 rounds" in fedalt["protocol"]
    assert f"it spent {spent / budget:.1%} of them, final tuning included" in fedalt["protocol"]
    rows = found.table()
    assert [row["method"] for row in rows] == ["FedAvg", "FedAlt"]  # one row for both seeds
    assert rows[0]["of budget"] == "100.0%"
    assert (rows[0]["rounds"], rows[1]["rounds"]) == ("4", str(fedalt["rounds"]))
    assert not [note for note in found.notes() if "trained in no round" not in note]
    again = comparisons.resume_comparison(tmp_path / "c")
    assert [run.summary for run in again.runs] == [run.summary for run in found.runs]


def test_what_sends_nothing_is_not_matched_by_bytes(tmp_path):
    options = SMALL | {"rounds": 2}
    found = sp.compare(["local", "fedavg", "fedspa"], match="bytes", **options, out=tmp_path / "c")
    local, fedavg, fedspa = found.runs
    assert "Not matched by bytes, of which it spends none in its 2 rounds" in local.protocol
    assert fedavg.summary["rounds"] == 2
    assert fedspa.summary["rounds"] == 4  # at half the density
    assert [row["budget_share"]["mean"] for row in found.figures()][:2] == [None, 1.0]
    with pytest.raises(SparsonaError, match="none of these methods spends any bytes"):
        sp.compare(["local"], match="bytes", **options, out=tmp_path / "none")
    with pytest.raises(SparsonaError, match=r"unknown thing to match 'step'(.|\n)*did you mean 'steps'"):
        sp.compare(["local"], match="step", **options, out=tmp_path / "none")


def test_unequal_work_is_noted_and_shown(say, tmp_path):
    args = ("--clients", 6, "--rounds", 1, "--epochs", 1, "--set", "data_rate=0.2", "--executor", "serial")
    said = say("compare", "local", "fedavg", "fedalt", *args, "--out", "c")
    assert said.code == 0
    assert "note: These methods did not train equally long, in local steps: FedAlt" in " ".join(said.out.split())
    assert "`--match steps`" in said.out
    assert "hurt vs Local" in said.out
    assert "hurt vs FedAvg" in said.out
    page = (tmp_path / "c" / "report.html").read_text()
    assert "These methods did not train equally long" in page
    assert "by local steps" in page
    said = say("compare", "fedavg", "fedalt", *args, "--match", "steps", "--out", "d", "--json")
    found = json.loads(said.out)
    assert [note for note in found["notes"] if "trained in no round" not in note] == []
    assert {"turns", "steps", "budget_share", "train_flops", "bytes_up"} <= set(found["table"][0])
    say("compare", "fedavg", *args, "--match", "time").refused("unknown thing to match 'time'")


# Equal conditions.


def test_a_preset_that_sets_a_condition_for_one_method_is_refused(monkeypatch, tmp_path):
    row = replace(methods.card("fedspa"), presets={"paper": {"rounds": 7, "batch_size": 128}})
    monkeypatch.setitem(methods.METHODS, "fedspa", row)
    with pytest.raises(SparsonaError, match=r"the preset 'paper' sets .*: rounds \(fedavg 30, fedspa:preset=paper 7\)"):
        sp.compare(["fedavg", "fedspa:preset=paper"], clients=4, out=tmp_path / "c")
    assert not (tmp_path / "c").exists()
    both = sp.compare(["fedavg", "fedspa"], preset="paper", **SMALL | {"rounds": 1}, out=tmp_path / "c")  # set for all
    assert [run.summary["rounds"] for run in both.runs] == [1, 1]


def test_one_preset_is_one_experiment():
    """Conditions of a paper are those of all its methods; two papers' are refused."""
    _, planned = comparisons._plan(["local", "fedavg", "ditto", "fedspa"], None, None, 1, "rounds", FEDSPA)
    configs = [config for config, _ in planned.values()]
    assert {(c.clients, c.rounds, c.per_round, c.validation_rate) for c in configs} == {(20, 1000, 10, 0.0)}
    assert {c.batch_size for c in configs} == {128}
    with pytest.raises(SparsonaError, match=r"rounds \(fedspa 1000, dispfl 500\)"):
        comparisons._plan(["fedspa", "dispfl"], None, None, 1, "rounds", {**FEDSPA, "preset": "paper"})
    with pytest.raises(SparsonaError, match=r"clients \(dispfl:preset=paper 100, fedavg 20\)"):
        comparisons._plan(["dispfl:preset=paper", "fedavg"], None, None, 1, "rounds", {"data_rate": 0.5})


def test_exceptions_of_one_experiment_are_told(capfd):
    """In DisPFL's comparison Local trains everybody, and FedFomo alone holds data back."""
    names = ["fedavg", "local", "fedfomo", "dispfl"]
    _, planned = comparisons._plan(names, None, None, 1, "steps", {**FEDSPA, "preset": "dispfl"})
    found = {name: config for (name, _), (config, _) in planned.items()}
    assert [found[name].per_round for name in names] == [10, 20, None, 20]
    assert [found[name].validation_rate for name in names] == [0, 0, 0.1, 0]
    told = capfd.readouterr().err
    assert "local has per_round=20, the others 10, as in the preset 'dispfl': alone, all clients train" in told
    assert "fedfomo has validation_rate=0.1, the others 0.0, as in the preset 'dispfl'" in told
    with pytest.raises(SparsonaError, match=r"the preset 'dispfl' sets .*: per_round"):  # not all have it
        comparisons._plan(
            ["fedavg", "local:preset=dispfl"],
            None,
            None,
            1,
            "rounds",
            {"clients": 20, "rounds": 1, "validation_rate": 0, "data_rate": 0.5},
        )


def test_a_method_without_the_preset_has_its_conditions(capfd):
    """As they are, not as published: eight of ten clients take part here."""
    names = ["fedprox", "dpsgd", "pfedgate"]
    options = {"preset": "pfedgate", "clients": 10, "novel": 2, "data_rate": 0.5}
    _, planned = comparisons._plan(names, None, None, 1, "rounds", options)
    configs = [config for config, _ in planned.values()]
    assert [c.per_round for c in configs] == [8, None, 8]  # all peers take part anyway
    assert {(c.test, c.test_rate, c.rounds) for c in configs} == {("split", 0.2, 400)}
    assert "fedprox, dpsgd without the preset 'pfedgate'" in capfd.readouterr().err


def test_a_row_that_sets_a_condition_is_refused_beside_one_that_does_not(monkeypatch, tmp_path):
    row = replace(methods.card("local"), name="eager", engine={"everyone_trains": True})
    monkeypatch.setitem(methods.METHODS, "eager", row)
    with pytest.raises(SparsonaError, match=r"a row sets .*: everyone_trains \(eager True, fedavg False\)"):
        sp.compare(["eager", "fedavg"], **SMALL, out=tmp_path / "c")


def test_options_of_one_method_may_be_a_dict(tmp_path):
    names = ["fedspa", ("fedspa", {"density": 0.2}), ("fedspa:search=rsm", {"density": 0.2})]
    found = sp.compare(names, **SMALL | {"rounds": 1}, out=tmp_path / "c")
    assert [run.config["options"]["density"] for run in found.runs] == [0.5, 0.2, 0.2]
    assert found.runs[2].config["options"]["search"] == "rsm"
    with pytest.raises(SparsonaError, match="sets rounds for one method alone"):
        sp.compare(["fedavg", ("fedspa", {"rounds": 3})], out=tmp_path / "d")
    with pytest.raises(SparsonaError, match="a tuple among the methods"):
        sp.compare([("fedspa", 3)], out=tmp_path / "d")
    with pytest.raises(SparsonaError, match="a method twice"):
        sp.compare(["fedspa:density=0.2", ("fedspa", {"density": 0.2})], out=tmp_path / "d")


# Capacities.


def test_methods_of_one_size_run_at_the_weakest_clients_density(tmp_path):
    options = SMALL | {"rounds": 1, "capacities": [0.25, 1.0]}
    found = sp.compare(["local", "fedavg", "fedspa", "dispfl"], **options, out=tmp_path / "c")
    assert [run.config["subnetwork"] for run in found.runs] == [0.25, 0.25, None, None]
    local, fedavg, fedspa, _ = found.runs
    assert fedavg.summary["bytes"]["upload_share"] == pytest.approx(0.25, abs=0.005)
    sentence = "a fixed random sub-network of density 0.25 in place of the whole model, as much as the weakest can hold"
    assert all(sentence in run.protocol for run in (local, fedavg))
    assert "Capacities are not kept" not in fedavg.protocol + fedspa.protocol
    weights = torch.cat([p.flatten() for p in fedavg.personal_model(0).parameters()])
    assert float((weights != 0).float().mean()) == pytest.approx(0.25, abs=0.01)
    whole = sp.train("fedavg", **options, out=tmp_path / "alone")  # a run by itself is as its options say
    assert "Capacities are not kept" in whole.protocol


@pytest.mark.parametrize("name", ["fedmask", "lotteryfl"])
def test_methods_that_keep_a_whole_model_are_fitted_too(name, tmp_path):
    """FedMask keeps all frozen weights, however few its mask uses; LotteryFL's masks begin full."""
    options = SMALL | {"rounds": 1, "capacities": [0.5, 1.0], "validation_rate": 0.2}
    (run,) = sp.compare([name], **options, out=tmp_path / "c").runs
    assert run.config["subnetwork"] == 0.5
    assert "Capacities are not kept" not in run.protocol


@pytest.mark.parametrize("name", ["fedspa", "heterofl", "dispfl"])
def test_a_sub_network_is_for_methods_of_one_size(name, tmp_path):
    with pytest.raises(SparsonaError, match=f"a sub-network for {name}"):
        sp.train(name, **SMALL, subnetwork=0.5, out=tmp_path / "run")
    with pytest.raises(SparsonaError, match=f"a sub-network for {name}"):
        sp.cost(name, model="lenet5", subnetwork=0.5)


def test_a_sub_network_is_the_same_on_every_executor(tmp_path):
    options = SMALL | {"rounds": 2, "subnetwork": 0.3}
    one, other = (
        sp.train("fedavg", **options | {"executor": executor}, out=tmp_path / executor)
        for executor in ("serial", "stacked")
    )
    first, second = (run.personal_model(0).state_dict() for run in (one, other))
    for name, value in first.items():
        torch.testing.assert_close(value, second[name], rtol=1e-4, atol=1e-5)
        assert torch.equal(value == 0, second[name] == 0)


def test_a_method_with_a_density_runs_at_that_of_the_weakest(monkeypatch, tmp_path):
    """A mask whose size does not depend on capacity."""
    factory, kind = methods.factory("fedspa")

    def blind(task, config):
        made = factory(task, config)

        def cost(layout, client, round_):
            return made.cost(layout, replace(client, capacity=1.0), round_)

        return replace(made, cost=cost)

    row = replace(methods.card("fedspa"), name="blind", title="Blind", module=blind, config=kind)
    monkeypatch.setitem(methods.METHODS, "blind", row)
    options = SMALL | {"rounds": 1, "capacities": [0.25, 1.0]}
    (run,) = sp.compare(["blind"], **options, out=tmp_path / "c").runs
    assert (run.config["options"]["density"], run.config["subnetwork"]) == (0.25, None)
    assert "models that the weakest, of capacity 0.25, can hold" in run.protocol


def test_a_result_names_the_rates_that_its_preset_leaves_open():
    """pFedGate prints no rates of its baselines, and its own for its data alone."""
    for method, left in (("fedavg", "lr=0.1"), ("pfedgate", "lr=0.05, gate_lr=1.0")):
        run = sp.train(method, preset="pfedgate", clients=4, rounds=1, data_rate=0.2, partition="iid")
        assert f"; rates that it leaves open: {left}." in run.protocol


def test_a_result_names_what_its_preset_changed():
    """The result lists all that came from the preset, each accident of a published setting too, and what did not."""
    run = sp.train("sub-fedavg", preset="dispfl", clients=4, rounds=1, data_rate=0.2, prune_rate=0.1)
    told = run.protocol.split("preset")[1].partition(". ")[0]
    assert told == (
        " 'dispfl': validation_rate=0.0, epochs=5, batch_size=128, lr=0.1, lr_decay=0.998, weight_decay=0.0005, "
        "momentum=0.0, clip_norm=none, density=0.5, distance=0.0001, accuracy_threshold=0.5, accuracy_on=train, "
        "divide_by=used, prunes=weights, overshoots=True; not as published: clients=4 (100), rounds=1 (500), "
        "per_round=4 (10), prune_rate=0.1 (0.05).\nclients: The 4 clients were drawn from all examples by partition "
        "dirichlet:0.3."
    )


def test_rounds_of_peers_come_nearest_to_the_bytes(capfd):
    """In their first round peers have nothing to send, so that costs are not in proportion to rounds."""
    tiny = {"clients": 6, "per_round": 1, "rounds": 8, "data_rate": 0.2, "epochs": 1, "graph": "full"}
    server, peers = sp.compare(["fedavg", "dpsgd"], match="bytes", **tiny).runs
    share = peers.summary["bytes"]["total"] / server.summary["bytes"]["total"]
    assert 0.85 < share < 1.15
    assert "matched only roughly" not in capfd.readouterr().err


def test_a_method_that_cannot_be_matched_is_named(capfd):
    """Its final tuning alone costs more than FedAvg's one round."""
    tiny = {"clients": 4, "per_round": 1, "rounds": 1, "data_rate": 0.2, "epochs": 1}
    sp.compare(["fedavg", "fedavg-ft"], match="steps", **tiny)
    assert "fedavg-ft is matched only roughly" in capfd.readouterr().err


def test_runs_whose_results_are_at_other_points_are_not_averaged(tmp_path):
    common = {"clients": 4, "per_round": 4, "rounds": 1, "data_rate": 0.2, "partition_seed": 0}
    trained = sp.train("fedavg", seed=0, headline="trained", out=tmp_path / "a", **common)
    received = sp.train("fedavg", seed=1, out=tmp_path / "b", **common)
    assert len(sp.Comparison(tmp_path, [trained, received]).table()) == 2


def test_eval_clients_hold_where_trained_models_are_the_result(tmp_path):
    """They are a condition of a comparison: both methods are tested on the same two clients."""
    found = sp.compare(["fedavg", "dispfl"], clients=5, rounds=2, data_rate=0.3, eval_clients=2, out=tmp_path / "both")
    tested = [np.flatnonzero(run.counts()[1]).tolist() for run in found.runs]
    assert found.runs[1].view.point == "trained"
    assert tested[0] == tested[1]
    assert len(tested[0]) == 2


def test_trials_are_shortened_from_the_rounds_of_a_preset():
    options = {"preset": "fedspa", "clients": 6, "data_rate": 0.3}
    assert tune._plan_trials(["fedspa", "fedavg"], None, None, "rounds", options, 10)["fedavg"]["rounds"] == 10


def test_the_validation_share_of_one_methods_preset_is_kept():
    assert "validation_rate" not in tune._settle(["pfedgate:preset=paper"], {}, {"clients": 6}, None, 0)
    assert tune._settle(["pfedgate"], {}, {"clients": 6}, None, 0)["validation_rate"] == 0.0
