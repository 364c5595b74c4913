"""Results weighted by clients' test examples: what runs print, draw and choose by follows the option."""

from __future__ import annotations

import numpy as np
import pytest

import sparsona as sp
from sparsona.analysis.answer import answer
from sparsona.analysis.charts import accuracy_by_bytes, accuracy_by_density, accuracy_by_rounds
from sparsona.analysis.clients import client_effects
from sparsona.analysis.numbers import numbers
from sparsona.analysis.table import difference_unit, notes, rows
from sparsona.analysis.targets import targets_of
from sparsona.core.errors import SparsonaError
from sparsona.report.page import write_report
from sparsona.runs.facts import RunFacts
from sparsona.runs.folder import RunFolder
from sparsona.runs.listing import list_runs
from sparsona.runs.observers import ClientEvaluation, EvaluationResult
from sparsona.runs.trackers import Figures

UNEVEN = {
    "clients": 5,
    "rounds": 10,
    "epochs": 1,
    "partition": "dirichlet-uncapped:0.4",
    "test": "split",
    "test_rate": 0.2,
    "validation_rate": 0.2,
    "batch_size": 64,
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> sp.Comparison:
    where = tmp_path_factory.mktemp("weighted")
    return sp.compare(["fedavg", "local"], headline_weight="examples", out=where / "pair", **UNEVEN)


def test_the_result_weighs_clients_by_their_test_examples(pair):
    for run in pair.runs:
        correct, count = run.counts()
        weighted, mean = correct.sum() / count.sum(), (correct / count).mean()
        assert weighted != pytest.approx(mean, abs=1e-6)
        assert len(set(count.tolist())) > 1
        assert run.curve()[-1] == (10, pytest.approx(weighted))
        assert run.summary["accuracy"]["weighted"] == pytest.approx(weighted)
        assert run.summary["accuracy"]["mean"] == pytest.approx(mean)
        assert run.summary["accuracy"]["last10"] == pytest.approx(np.mean([value for _, value in run.curve()]))
        assert f"weighted accuracy {weighted:.1%}" in repr(run)
        assert "The mean over 5 clients weighted by their test examples, after round 10 of 10" in run.protocol


def test_tables_lists_and_the_answer_show_it(pair):
    shown = [100 * run.summary["accuracy"]["weighted"] for run in pair.runs]
    views = [run.view for run in pair.runs]
    for row, value in zip(rows(views), shown, strict=True):
        assert list(row)[1] == "weighted accuracy"
        assert row["weighted accuracy"] == f"{value:.2f}%"
    best = max(shown)
    assert f"serves clients best, {best:.1f}% (clients weighted by their test examples)" in answer(views)
    assert {row["accuracy"] for row in list_runs(pair.path)} == {f"{value:.1f}% weighted" for value in shown}
    assert all("accuracy_weighted" in row for row in numbers(views, "round"))


def test_pages_and_curves_name_the_mean(pair, tmp_path):
    page = write_report([run.view for run in pair.runs], tmp_path / "page.html").read_text()
    assert "Mean accuracy over clients weighted by their test examples after each round." in page
    title = pair.runs[0].plot_curves().layout.yaxis.title.text
    assert title == "weighted accuracy, mean over clients"


def test_a_comparison_has_one_mean(pair, tmp_path):
    other = sp.train("local", out=tmp_path / "plain", **UNEVEN)
    with pytest.raises(SparsonaError, match=r"judged by different figures: .*by weighted accuracy, mean over clients"):
        write_report([pair.runs[0].view, other.view], tmp_path / "page.html")
    with pytest.raises(SparsonaError, match="headline_weight for one method alone"):
        sp.compare(["local", ("fedavg", {"headline_weight": "examples"})], **UNEVEN)
    both = sp.compare(["pfedgate", "local"], preset="paper", out=tmp_path / "both", **UNEVEN)  # which local has not
    assert {run.config["headline_weight"] for run in both.runs} == {"examples"}


def test_a_search_chooses_by_it(tmp_path):
    values = []
    for weight in ("clients", "examples"):
        found = sp.tune(["local"], trials=1, out=tmp_path / weight, headline_weight=weight, **UNEVEN)
        (trial,) = found.methods["local"].trials
        assert trial.curve[10] == pytest.approx(trial.value)  # what trials are pruned by is what they are chosen by
        values.append(trial.value)
    assert values[0] != pytest.approx(values[1], abs=1e-6)


def test_observers_receive_the_mean_that_is_the_result():
    clients = (ClientEvaluation(0, "received", 1, 2, 0.5), ClientEvaluation(1, "received", 8, 8, 0.5))
    assert EvaluationResult(1, "received", clients).accuracy == 0.75
    weighted = EvaluationResult(1, "received", clients, weight="examples")
    assert weighted.accuracy == weighted.mean("received") == 0.9
    assert weighted.mean("tuned") is None
    untested = (*clients, ClientEvaluation(2, "received", 0, 0, 0.0))
    assert EvaluationResult(1, "received", untested).accuracy == 0.75


def test_facts_with_another_weight_are_refused(pair):
    values = pair.runs[0]._folder.facts.as_json() | {"headline_weight": "votes"}
    with pytest.raises(SparsonaError, match="headline_weight is 'votes'"):
        RunFacts.from_json(values, "about.json")


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> sp.Comparison:
    """Runs with all that is evaluated at the end: tuned models, a guard, novel clients, the global model."""
    return sp.compare(
        ["fedavg", "fedspa"],
        out=tmp_path_factory.mktemp("ended") / "ended",
        headline_weight="examples",
        tune_epochs=1,
        guard=True,
        novel=2,
        points=["global"],
        **UNEVEN | {"clients": 7, "rounds": 2},
    )


def weighted_at(run: sp.Run, point: str) -> float:
    correct, count = run.counts(point)
    assert correct.sum() / count.sum() != pytest.approx((correct / np.maximum(count, 1))[count > 0].mean(), abs=1e-6)
    return float(correct.sum() / count.sum())


def test_differences_are_of_the_result(ended):
    first, second = (run.summary["accuracy"]["weighted"] for run in ended.runs)
    (found,) = ended.differences()
    assert found["difference"] == f"{100 * (second - first):+.2f}".replace("-", "−")
    assert "weighted" not in found
    assert difference_unit([run.view for run in ended.runs]) == "percentage points of weighted accuracy"


def test_sentences_on_novel_clients_and_the_guard_have_the_same_mean(ended):
    run = ended.runs[0]
    tuned, novel = weighted_at(run, "tuned"), weighted_at(run, "novel_tuned")
    assert run.summary["novel"]["participants"] == pytest.approx(tuned)
    assert run.summary["novel"]["gap"] == pytest.approx(tuned - novel)
    (gap, *_) = client_effects(RunFolder.open(run.path)).sentences()
    assert f"({100 * tuned:.2f}% of those that took part, {100 * novel:.2f}% of the novel ones)" in gap
    guarded = weighted_at(run, "guarded")
    assert run.summary["guard"]["accuracy"]["guarded"] == pytest.approx(guarded)
    assert f"validation data: mean accuracy {guarded:.1%}" in run.protocol


def test_a_model_card_names_the_mean(ended, tmp_path):
    run = ended.runs[0]
    exported = run.export(None, tmp_path / "model.safetensors")
    text = exported.card.read_text()
    mean = weighted_at(run, "global")
    assert f"Accuracy {mean:.1%}: the mean over 5 clients weighted by their test examples" in text


def test_trackers_receive_it():
    clients = (ClientEvaluation(0, "received", 1, 2, 0.5), ClientEvaluation(1, "received", 8, 8, 0.5))
    assert Figures().of_evaluation(EvaluationResult(1, "received", clients, weight="examples"))[
        "received/accuracy"
    ] == pytest.approx(0.9)


def test_regressions_count_clients_alike(tmp_path):
    x = np.random.default_rng(0).normal(size=(200, 5)).astype(np.float32)
    data = sp.federate(x, x @ np.ones(5, np.float32), owners=np.repeat([0, 1, 2], [40, 60, 100]))
    run = sp.train("fedavg", data, rounds=2, headline_weight="examples", out=tmp_path / "run", progress=False)
    assert "each counting the same" in run.protocol
    assert "weighted by" not in run.protocol


def test_figures_of_runs_with_different_means_are_not_put_together(pair, tmp_path):
    other = sp.train("local", out=tmp_path / "plain", **UNEVEN)
    views = [pair.runs[0].view, other.view]
    for make in (accuracy_by_rounds, accuracy_by_bytes, accuracy_by_density, lambda views: targets_of(views, [10.0])):
        with pytest.raises(SparsonaError, match="judged by different figures"):
            make(views)
    assert notes(views) == ["Clients count alike here; the result of fedavg-seed0 is the weighted mean."]
    # One client's change has no weight.
    assert client_effects(RunFolder.open(pair.runs[0].path), RunFolder.open(other.path)).rows()
