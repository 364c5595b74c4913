"""Early stopping: by validation data alone, at the same round after a stop, and said wherever results are."""

from __future__ import annotations

import pytest

import sparsona as sp
from sparsona.analysis.table import notes
from sparsona.core.errors import SparsonaError
from sparsona.runs.stopping import Patience, mean_score, validation_point

OPTIONS = {"clients": 4, "rounds": 9, "epochs": 1, "data_rate": 0.2, "device": "cpu", "executor": "serial"}
OPTIONS |= {"lr": 1e-9, "patience": 2, "model": "mlp:hidden=0"}  # nothing is learned: the first evaluation is the best


def test_patience_counts_evaluations_that_are_not_better():
    seen = Patience()
    for completed, score in ((1, 0.5), (2, 0.55), (3, 0.55), (4, 0.52), (5, 0.61)):
        seen = seen.after(completed, score, 0.0)
    assert seen == Patience(5, 0.61)
    assert Patience(1, 0.5).after(2, 0.55, 0.1) == Patience(1, 0.5, 1)
    assert mean_score([(1, 2, 9.0), (0, 3, 9.0)]) == 0.25
    assert mean_score([(None, 2, 3.0), (None, 3, 1.0)]) == -2.0


def test_it_goes_by_the_headlines_model_on_validation_data():
    points = ("received", "tuned", "trained", "consensus", "global")
    expected = ("received", "received", "trained", "consensus", "global")
    assert [validation_point(one) for one in points] == [f"{one}/validation" for one in expected]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    ends = []
    path = tmp_path_factory.mktemp("patience") / "run"
    sp.train("fedavg", out=path, tune_epochs=1, observers=[ends.append], **OPTIONS)
    return sp.load(path), ends[-1]


def test_a_run_ends_as_finished_and_says_so(stopped):
    run, end = stopped
    assert run.summary["early_stop"] == {"after": 3, "of": 9, "best": 1, "point": "received/validation"}
    assert (end.finished, end.completed) == (True, 3)
    assert str(end) == "stopped early after round 3 of 9, best validation at round 1"
    said = "topped early after round 3 of 9, best validation at round 1"
    assert said in run.summary["protocol"]
    assert notes([run.view]) == [f"FedAvg s{said}."]


def test_final_tuning_and_evaluation_are_of_the_round_that_was_reached(stopped):
    run, _ = stopped
    records = run._folder.records
    assert records.last_evaluated("tuned") == records.last_evaluated() == 3
    assert [row.round for row in records.rounds()] == [0, 1, 2, 3]
    assert run.summary["turns"] == {"rounds": 6, "tuning": 4, "total": 10}
    assert len(run.view.train_loss) == 3
    assert run.personal_model(1) is not None
    before = run.path / "summary.json"
    text = before.read_text()
    assert sp.resume(run.path).summary["early_stop"]["after"] == 3
    assert before.read_text() == text


def test_a_run_that_is_stopped_in_between_ends_at_the_same_round(stopped, tmp_path):
    whole, _ = stopped
    sp.train("fedavg", out=tmp_path / "run", tune_epochs=1, max_seconds=1e-9, **OPTIONS)
    for _ in range(2):
        part = sp.resume(tmp_path / "run")
    assert part.summary["early_stop"] == whole.summary["early_stop"]
    assert part._folder.records.evaluations() == whole._folder.records.evaluations()
    assert part._folder.records.turns() == whole._folder.records.turns()


def test_patience_waits_for_a_better_mean(tmp_path):
    run = sp.train("local", out=tmp_path / "run", **OPTIONS | {"lr": 0.1, "patience": 3, "rounds": 4})
    assert run.summary["rounds"] == 4
    assert "early_stop" not in run.summary


def test_what_is_refused(stopped):
    run, _ = stopped
    with pytest.raises(SparsonaError, match="its validation data ended after round 3"):
        sp.resume(run.path, rounds=20)
    with pytest.raises(SparsonaError, match="evaluate=participants"):
        sp.train("fedavg", evaluate="participants", **OPTIONS)
    with pytest.raises(SparsonaError, match="min_delta without patience"):
        sp.train("fedavg", min_delta=0.1)
    with pytest.raises(SparsonaError, match="no validation data"):
        sp.train("fedavg", validation_rate=0, **OPTIONS)
    with pytest.raises(SparsonaError, match="--match steps with patience"):
        sp.compare(["local", "fedavg"], match="steps", **OPTIONS)
