"""Early stopping: by validation data alone, at the same round after a stop, and said wherever results are."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest

import sparsona as sp
from sparsona.analysis.table import notes
from sparsona.core.errors import SparsonaError
from sparsona.runs.stopping import Patience, score_of, validation_point

OPTIONS = {"clients": 4, "rounds": 9, "epochs": 1, "data_rate": 0.1, "device": "cpu", "executor": "serial"}
OPTIONS |= {"lr": 1e-9, "patience": 2, "model": "mlp:hidden=0"}  # nothing is learned: the first evaluation is the best


def test_patience_counts_evaluations_that_are_not_better():
    seen, waited = Patience(), []
    for completed, score in ((1, 0.5), (2, 0.55), (3, 0.55), (4, 0.52), (5, 0.61)):
        seen = seen.after(completed, {0: score}, 0.0)
        waited.append(seen.waited)
    assert waited == [0, 0, 1, 2, 0]
    assert seen == Patience(5, {0: 0.61})
    assert Patience(1, {0: 0.5}).after(2, {0: 0.55}, 0.1) == Patience(1, {0: 0.5}, 1)
    assert Patience().after(1, {0: -math.inf, 1: math.nan}, 0.0) == Patience(waited=1)  # models that are none


def test_one_client_whose_model_is_none_decides_nothing_for_the_others():
    broken = -math.inf
    seen = Patience()
    for completed, score in ((1, 0.5), (2, 0.6), (3, 0.7)):
        seen = seen.after(completed, {0: broken, 1: score}, 0.0)
        assert (seen.best, seen.waited) == (completed, 0)
    assert seen.after(4, {0: broken, 1: 0.6}, 0.0).waited == 1
    assert seen.after(4, {0: 0.1, 1: 0.6}, 0.0).best == 4  # one more client has a model
    later = seen.after(4, {0: 0.1, 1: 0.8}, 0.0)
    assert later.after(5, {0: broken, 1: 0.9}, 0.0).best == 5  # nor does one that loses its model later
    assert later.after(5, {0: broken, 1: 0.7}, 0.0).waited == 1
    assert later.after(5, {0: broken, 1: broken}, 0.0).waited == 1


@pytest.mark.parametrize("huge", [1.7e308, -1.7e308, math.inf, -math.inf, math.nan])
def test_a_value_that_is_none_raises_nothing(huge):
    seen = Patience()
    for completed in (1, 2):
        seen = seen.after(completed, {0: huge, 1: huge, 2: -huge, 3: 0.1 * completed}, 0.0)
    assert seen.best == 2


def test_who_is_not_heard_keeps_its_last_score():
    """Else those who come and go would always be compared with evaluations that never heard the others."""
    seen, found = Patience(), []
    heard = ({0: 0.9}, {0: 0.91, 1: 0.1}, {1: 0.2}, {0: 0.3, 1: 0.21}, {0: 0.31}, {0: 0.311, 1: 0.05}, {1: 0.06})
    for completed, scores in enumerate(heard, 1):
        seen = seen.after(completed, scores, 0.0)
        found.append(seen.waited)
    assert found == [0, 0, 0, 1, 2, 3, 4]
    assert seen.scores == {0: 0.91, 1: 0.2}


def test_means_are_compared_over_clients_that_were_heard_both_times():
    best = Patience(3, {0: 0.2, 1: 0.8, 2: 0.9})
    assert best.after(4, {0: 0.3}, 0.0) == Patience(
        4, {0: 0.3, 1: 0.8, 2: 0.9}
    )  # though 0.3 is below the mean of all three
    assert best.after(4, {1: 0.7, 2: 0.9}, 0.0).waited == 1  # though 0.8 is above it
    assert best.after(4, {3: 1.0}, 0.0) == best
    assert best.after(4, {}, 0.0) == best


@dataclass
class Result:
    correct: int | None
    loss: float | None
    count: int = 4
    client: int = 0


def test_a_score_is_better_the_higher_it_is():
    metrics = {"f1": 0.4, "mae": 2.0, "gain": 7.0}
    expected = {None: 0.75, "accuracy": 0.75, "loss": -1.5, "f1": 0.4, "mae": -2.0, "gain:high": 7.0, "gain:low": -7.0}
    assert {name: score_of(name, Result(3, 1.5), metrics) for name in expected} == expected
    assert score_of("auc", Result(3, 1.5), metrics) is None
    assert score_of(None, Result(None, 1.5), metrics, is_regression=True) == -1.5
    for name in ("loss", "f1"):
        assert [score_of(name, Result(3, loss), metrics) for loss in (None, math.nan, math.inf)] == [-math.inf] * 3


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
    by = {"point": "received/validation", "metric": "accuracy"}
    assert run.summary["early_stop"] == {"after": 3, "of": 9, "best": 1, **by}
    assert (end.finished, end.completed) == (True, 3)
    assert str(end) == "stopped early after round 3 of 9, best validation at round 1"
    said = "topped early after round 3 of 9, best validation at round 1"
    assert said in run.summary["protocol"]
    assert "by the mean accuracy of clients on validation data" in run.summary["protocol"]
    assert repr(run).endswith(f", s{said}")
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


def test_a_patience_of_one_is_said_in_the_singular(tmp_path):
    run = sp.train("fedavg", out=tmp_path / "run", **OPTIONS | {"patience": 1})
    assert "best validation at round 1: one evaluation was not better, by the mean accuracy" in run.protocol


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


# By a metric of the run.


def scripted(values):
    """A metric that says these numbers, one after the other, whenever it is asked."""
    left = list(values)

    def gain(outputs, targets):
        return left.pop(0)

    return gain


def ends_after(run):
    return run.summary.get("early_stop", {}).get("after")


@pytest.mark.parametrize(("end", "after"), [("high", 3), ("low", None)])
def test_a_function_ends_a_run_by_its_good_end(tmp_path, end, after):
    """Of two clients, at two points (test and validation) after each round: it falls from round to round."""
    values = [-float(place // 4) for place in range(4 * 5)]
    options = OPTIONS | {"clients": 2, "rounds": 5, "per_round": 2, "metrics": [scripted(values)]}
    run = sp.train("fedavg", out=tmp_path / "run", patience_metric=f"gain:{end}", **options)
    assert ends_after(run) == after
    assert after is None or run.summary["early_stop"]["metric"] == "gain"


def test_a_metric_that_is_too_large_to_add_up_ends_no_run(tmp_path, capsys):
    options = OPTIONS | {"rounds": 3, "metrics": [scripted([-1e308] * 50)], "patience_metric": "gain:low"}
    assert sp.train("fedavg", out=tmp_path / "run", **options).summary["rounds"] == 3
    assert "no client's gain on validation data is known" in capsys.readouterr().err


def test_the_metric_decides_and_so_it_does_after_a_stop(tmp_path):
    """Accuracy does not change where nothing is learned; the loss on validation data does, a little."""
    options = OPTIONS | {"lr": 1e-3, "rounds": 6, "metrics": ["f1"]}
    by_accuracy = sp.train("fedavg", out=tmp_path / "accuracy", **options)
    by_loss = sp.train("fedavg", out=tmp_path / "loss", patience_metric="loss", **options)
    assert ends_after(by_accuracy) is not None
    assert ends_after(by_loss) is None
    by_f1 = sp.train("fedavg", out=tmp_path / "f1", patience_metric="f1", **options)
    assert by_f1.summary["early_stop"]["metric"] == "f1"
    sp.train("fedavg", out=tmp_path / "part", patience_metric="f1", max_seconds=1e-9, **options)
    for _ in range(6):
        part = sp.resume(tmp_path / "part")
    assert part.summary["early_stop"] == by_f1.summary["early_stop"]


def test_test_data_decides_nothing(tmp_path):
    """Clients whose test labels are all wrong stop at the same round."""
    rng = np.random.default_rng(0)
    x, y = rng.random((2, 60, 1, 8, 8)).astype("float32"), rng.integers(0, 10, (2, 60))
    ends = []
    for shift in (0, 1):
        clients = [
            {
                "train": (x[i, :30], y[i, :30]),
                "validation": (x[i, 30:45], y[i, 30:45]),
                "test": (x[i, 45:], (y[i, 45:] + shift) % 10),
            }
            for i in range(2)
        ]
        made = sp.Federation.from_clients(clients)
        options = {"rounds": 12, "per_round": 2, "patience": 2, "metrics": ["f1"], "patience_metric": "f1", "seed": 1}
        run = sp.train(
            "fedavg", made, "mlp:hidden=4", out=tmp_path / str(shift), executor="serial", device="cpu", **options
        )
        ends.append((run.summary["rounds"], run.summary["accuracy"]))
    assert ends[0][0] == ends[1][0] < 12
    assert ends[0][1] != ends[1][1]


def test_metrics_that_cannot_be_waited_for(tmp_path):
    options = OPTIONS | {"out": tmp_path / "run"}
    with pytest.raises(SparsonaError, match="patience by 'f1', which this run does not compute") as told:
        sp.train("fedavg", patience_metric="f1", **options)
    assert told.value.hint == "--set metrics=f1 has it computed"
    with pytest.raises(SparsonaError, match="patience by 'gain', a function from Python"):
        sp.train("fedavg", patience_metric="gain", metrics=[scripted([])], **options)
    with pytest.raises(SparsonaError, match="patience_metric 'f1:low'"):
        sp.train("fedavg", patience_metric="f1:low", metrics=["f1"], **options)
    with pytest.raises(SparsonaError, match="patience_metric without patience"):
        sp.train("fedavg", patience_metric="loss")
    assert not (tmp_path / "run").exists()
