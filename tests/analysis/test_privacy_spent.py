"""Epsilon: against closed forms and published figures, and from the records of runs."""

from __future__ import annotations

import json
import math
from statistics import NormalDist

import dp_accounting
import numpy as np
import pytest
from click.testing import CliRunner

import sparsona as sp
from sparsona.analysis import extra
from sparsona.analysis.numbers import numbers
from sparsona.analysis.privacy import (
    PrivacyPlan,
    Spent,
    gaussian_epsilon,
    noise_for,
    sampled_epsilon,
    show_epsilon,
)
from sparsona.analysis.protocol import compare_protocols, read_protocol
from sparsona.analysis.table import figures
from sparsona.cli.app import cli
from sparsona.core.errors import SparsonaError
from sparsona.experiment import build
from sparsona.experiment.train import describe_run
from sparsona.methods import card
from sparsona.transforms.privacy import Privacy

below = NormalDist().cdf


def gaussian_delta(epsilon: float, sensitivity: float) -> float:
    """Balle and Wang, theorem 8: the delta of noise of standard deviation 1 on a value of this sensitivity."""
    half, far = sensitivity / 2, epsilon / sensitivity
    return below(half - far) - math.exp(epsilon) * below(-half - far)


@pytest.mark.parametrize(("noise", "releases"), [(1.0, 1), (4.0, 7), (20.0, 100)])
def test_full_participation_is_the_gaussian_mechanism(noise, releases):
    """Replacing a client moves its clipped change by up to two norms in each release: 2 sqrt(releases) / noise."""
    found = gaussian_epsilon(noise, 1e-5, releases)
    assert gaussian_delta(found, 2 * math.sqrt(releases) / noise) == pytest.approx(1e-5, rel=1e-3)


def test_the_accountant_has_the_published_figures():
    """Abadi et al., CCS 2016, section 3.2: sampling 0.01, noise 4, 10,000 steps, delta 1e-5 spend epsilon 1.26, by the
    conversion of the paper (theorem 2.2); the package's own conversion is tighter."""
    one = dp_accounting.rdp.RdpAccountant()
    one.compose(dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(4.0)), 10_000)
    theirs = min(r + math.log(1e5) / (a - 1) for a, r in zip(one._orders, one._rdp, strict=True) if a > 1)
    assert theirs == pytest.approx(1.26, abs=0.01)
    assert one.get_epsilon(1e-5) < theirs


def sampled_delta(epsilon: float, noise: float, share: float) -> float:
    """A lower bound of the delta of one round: a client of one, drawn with this probability, whose change is one norm
    this way or that; by summation over outcomes."""
    at = np.linspace(-12 * noise, 12 * noise, 200_001)

    def density(middle: float) -> np.ndarray:
        return np.exp(-(((at - middle) / noise) ** 2) / 2) / (noise * math.sqrt(2 * math.pi))

    one, other = ((1 - share) * density(0.0) + share * density(change) for change in (1.0, -1.0))
    return float(np.maximum(one - math.exp(epsilon) * other, 0).sum() * (at[1] - at[0]))


@pytest.mark.parametrize(("noise", "cohort"), [(1.0, 50), (4.0, 50)])
def test_sampling_is_neither_counted_too_much_nor_for_nothing(noise, cohort):
    """The exact figure of one round, in norms of 1, must not be above what is reported."""
    found = sampled_epsilon(noise, 1e-5, 1, cohort, 100)
    assert found <= gaussian_epsilon(noise, 1e-5, 1)
    assert sampled_delta(found, noise, cohort / 100) <= 1e-5
    half = sampled_epsilon(2 * noise, 1e-5, 1, cohort, 100)  # what would be reported if replacing moved one norm only
    assert sampled_delta(half, noise, cohort / 100) > 1e-5


def test_epsilon_follows_noise_rounds_and_share():
    base = sampled_epsilon(4.0, 1e-5, 50, 10, 100)
    assert base < sampled_epsilon(4.0, 1e-5, 100, 10, 100)
    assert sampled_epsilon(4.0, 1e-5, 50, 5, 100) < base < gaussian_epsilon(4.0, 1e-5, 50)
    assert gaussian_epsilon(2.0, 1e-5, 5) > gaussian_epsilon(3.0, 1e-5, 5) > gaussian_epsilon(3.0, 1e-4, 5)
    assert gaussian_epsilon(1e-8, 1e-5, 10) == math.inf
    assert gaussian_epsilon(1.0, 1e-5, 0) == 0.0


@pytest.mark.parametrize("kind", ["local", "central"])
def test_the_noise_for_an_epsilon_spends_it(kind):
    plan = PrivacyPlan(Privacy(kind), 20, 20, 20)
    noise = noise_for(3.0, plan)
    spends = PrivacyPlan(Privacy(kind, noise), 20, 20, 20).epsilon()
    assert 2.98 < spends <= 3.0
    with pytest.raises(SparsonaError, match="epsilon"):
        noise_for(math.nan, plan)


TINY = {"clients": 4, "per_round": 2, "rounds": 3, "epochs": 1, "data_rate": 0.1, "executor": "serial"}


@pytest.fixture(scope="module")
def private_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("private") / "run"
    return sp.train("fedspa", **TINY, drop_rate=0.7, privacy="local:noise=3.0,clip=0.5", out=folder)


def test_a_client_spends_by_its_turns_also_if_updates_were_lost(private_run):
    turns = private_run._folder.records.turns()
    numbers = [sum(row.client == client for row in turns) for client in range(4)]
    assert any(row.dropped for row in turns)
    assert len(set(numbers)) > 1
    found = private_run.privacy()
    assert found.clients.tolist() == [gaussian_epsilon(3.0, 1e-5, num) for num in numbers]
    assert found.epsilon == max(found.clients)
    assert private_run.summary["privacy"]["epsilon"] == found.epsilon


def test_the_protocol_says_what_is_covered(private_run):
    text = private_run.protocol
    assert f"Epsilon is {show_epsilon(private_run.privacy().epsilon)} at delta 1e-05" in text
    assert "It does not cover: mask (sent in the clear)" in text
    assert "Simulated" in text
    assert [topic for topic, _ in read_protocol(text)][-4:] == ["privacy", "epsilon", "not covered", "noise"]
    assert "epsilon" in sp.load(private_run.path)._alone.table()[0]


def test_commands_print_what_was_and_what_would_be_spent(private_run):
    run = CliRunner().invoke(cli, ["privacy", str(private_run.path), "--json"])
    assert json.loads(run.output)["clients"] == private_run.privacy().clients.tolist()
    args = ["privacy", "--clients", "20", "--per-round", "20", "--rounds", "20"]
    found = json.loads(CliRunner().invoke(cli, [*args, "--epsilon", "3", "--json"]).output)
    assert found["epsilon"] <= found["given_epsilon"] == 3.0
    said = " ".join(CliRunner().invoke(cli, [*args, "--epsilon", "3"]).output.split())
    assert f"Epsilon 3 was given, and the noise was found for it: {found['noise']:g} is the least" in said
    assert f"--privacy central:noise={found['noise']:g}" in said
    many = ["privacy", "--clients", "20", "--per-round", "20", "--rounds", "200000", "--epsilon", "1"]
    noise = json.loads(CliRunner().invoke(cli, [*many, "--json"]).output)["noise"]
    assert noise > 1000  # to three decimals that is more than six digits
    assert CliRunner().invoke(cli, many).output.split()[-1] == f"central:noise={noise}"
    said = CliRunner().invoke(cli, [*args, "--epsilon", "3", "--privacy", "local:delta=1e-6"]).output
    assert " --privacy local:delta=1e-6,noise=" in " ".join(said.split())
    both = CliRunner().invoke(cli, [*args, "--epsilon", "3", "--privacy", "local:noise=2"])
    assert both.exit_code
    assert "--epsilon 3 and the noise in --privacy local:noise=2" in str(both.exception)
    shown = CliRunner().invoke(cli, [*args, "--privacy", f"local:noise={found['noise']}"]).output
    assert show_epsilon(found["epsilon"]) in shown
    assert "was found" not in shown


def test_central_counts_sampling_only_where_it_is_uniform(tmp_path):
    spent = {
        sampler: sp.train(
            "fedavg", **TINY, sampler=sampler, privacy="central:noise=8.0", out=tmp_path / sampler
        ).privacy()
        for sampler in ("uniform", "round-robin")
    }
    assert spent["uniform"].drawn_from == 4
    assert spent["uniform"].epsilon == sampled_epsilon(8.0, 1e-5, 3, 2, 4)
    assert spent["round-robin"].drawn_from is None
    assert spent["round-robin"].epsilon == gaussian_epsilon(8.0, 1e-5, 2)  # nobody took part in all three rounds


@pytest.mark.parametrize("per_round", [1, 3])
def test_the_choice_of_a_bound_does_not_depend_on_the_draw(tmp_path, per_round):
    """Who reads a figure that was chosen by the draw learns of the draw, and then a bound that needs a secret draw is
    not proven: the run's is the same for every seed, also where that of its busiest client is smaller."""
    options = {**TINY, "clients": 10, "per_round": per_round, "rounds": 2, "privacy": "central:noise=1.0"}
    runs = [sp.train("fedavg", **options, seed=seed, out=tmp_path / str(seed)) for seed in range(3)]
    found = [run.privacy() for run in runs]
    secret = sampled_epsilon(1.0, 1e-5, 2, per_round, 10)
    assert {one.epsilon for one in found} == {secret}
    if per_round == 1:
        assert min(max(one.clients) for one in found) < secret  # else these seeds show nothing
    assert len({run.protocol.partition("epsilon: ")[2].partition("noise: ")[0] for run in runs}) == 1
    run, busiest = found[0].rows()[:2]
    assert run == {"of": "run, if nobody knows who was drawn", "epsilon": show_epsilon(secret)}
    assert busiest["of"] == "busiest client, for whoever knows who was drawn"
    assert busiest["epsilon"] == show_epsilon(max(found[0].clients))
    shown = " ".join(CliRunner().invoke(cli, ["privacy", str(runs[0].path)]).output.split())
    assert "publish the run's epsilon or those of clients, not both" in shown
    topics = dict(read_protocol(runs[0].protocol))
    assert f"It holds if nobody knows which {per_round} of the 10 clients are drawn in a round." in topics["epsilon"]
    known = show_epsilon(gaussian_epsilon(1.0, 1e-5, 2))
    assert f"Epsilon is at most {known} for whoever knows who was drawn" in topics["epsilon if draws are known"]
    assert Spent.of_brief(runs[0].summary["privacy"]).sentence() == found[0].sentence()


def test_the_condition_names_what_a_sampler_looks_at(tmp_path):
    def first(round_, clients, available, generator):
        return available

    options = {**TINY, "rounds": 1, "privacy": "central:noise=8.0"}
    said = {
        name: sp.train("fedavg", **options, sampler=sampler, out=tmp_path / name).protocol
        for name, sampler in (("size", "size"), ("function", first), ("round-robin", "round-robin"))
    }
    assert "replaced by any other of the same size, since clients are drawn by size." in said["size"]
    assert "It holds if the function that samples clients does not look at data." in said["function"]
    assert "replaced by any other.\n" in said["round-robin"]


def test_rounds_that_patience_decides_are_not_covered(tmp_path):
    said = {
        patience: sp.train(
            "fedavg", **{**TINY, "data_rate": 0.3}, patience=patience, privacy="central:noise=8.0",
            out=tmp_path / str(patience),
        ).protocol
        for patience in (1, None)
    }  # fmt: skip
    assert "the number of rounds, which patience decides by validation data" in said[1]
    assert "the number of rounds" not in said[None].partition("not covered: ")[2]


def test_of_several_seeds_the_largest_epsilon_is_that_of_the_method(tmp_path):
    """A mean of bounds is no bound."""
    options = {**TINY, "per_round": 1, "rounds": 4, "seeds": 3, "privacy": "local:noise=3.0"}
    both = sp.compare(["fedavg"], **options, out=tmp_path / "both")
    found = [run.privacy().epsilon for run in both.runs]
    assert min(found) < max(found)  # else these seeds show nothing
    (row,) = both.figures()
    assert row["epsilon"] == {"largest": max(found)}
    assert both.table()[0]["epsilon"] == show_epsilon(max(found))
    (line,) = numbers([run.view for run in both.runs])
    assert line["epsilon"] == max(found)
    assert "epsilon_spread" not in line
    shared, own = compare_protocols({"FedAvg": {run.view.seed: run.protocol for run in both.runs}})
    (said,) = [text for topic, text in shared if topic == "epsilon"]
    assert said.startswith(f"Epsilon is {show_epsilon(max(found))} at delta")
    assert said.endswith("That is the largest of 3 runs.")
    assert not own


def test_of_two_conditions_that_of_the_largest_epsilon_is_said():
    """Runs of older versions have either."""
    secret = "Epsilon is 4.4 at delta 1e-05 after 2 rounds. It holds if nobody knows who was drawn."
    for known in ("Epsilon is 4.38 at delta 1e-05.", "Epsilon is above 1e+06 at delta 1e-05."):
        shared, _ = compare_protocols({"FedAvg": {0: f"epsilon: {secret}", 1: f"epsilon: {known}"}})
        largest = known if "above" in known else secret
        assert shared == [("epsilon", f"{largest} That is the largest of 2 runs.")]


def test_epsilon_is_rounded_up():
    assert [show_epsilon(value) for value in (0.0, 10.001, 4.371, 0.01234, 123456.0, 9.999, 1.1, 4.38, 100.0)] == [
        "0", "10.1", "4.38", "0.0124", "1.24e+05", "10", "1.1", "4.38", "100"
    ]  # fmt: skip
    for value in (math.nextafter(4.38, 5), 4.38 * (1 + 1e-12), math.nextafter(0.1, 1)):
        assert float(show_epsilon(value)) >= value


def test_every_round_with_central_noise_counts_also_if_nobody_came(tmp_path):
    run = sp.train("fedavg", **TINY, drop_rate=0.999, privacy="central:noise=8.0", out=tmp_path / "run")
    assert not any(row.aggregated for row in run._folder.records.turns())
    assert run.privacy().releases == 3
    assert run.privacy().epsilon == sampled_epsilon(8.0, 1e-5, 3, 2, 4)


def test_a_start_from_the_same_data_is_refused_and_another_is_named(tmp_path):
    """What the first model tells is not in epsilon, so it must not be of the same clients."""
    short = {**TINY, "rounds": 1}
    first = sp.train("fedavg", **short, out=tmp_path / "first")
    for more in ({}, {"seed": 1}):  # other clients of one data set have the same examples
        with pytest.raises(SparsonaError, match="--privacy with a warm start"):
            sp.train("fedavg", **short, **more, privacy="local:noise=9", warm_start=str(first.path))
    arrays = sp.Federation.from_clients(
        [(np.random.default_rng(k).random((20, 1, 8, 8), np.float32), np.arange(20) % 10) for k in range(4)]
    )
    options = {key: value for key, value in short.items() if key not in ("clients", "data_rate")}
    start = str(first.path)
    run = sp.train("fedavg", arrays, "digits-cnn", **options, privacy="local:noise=9", warm_start=start)
    assert f"what the model of '{first.path}' tells, which training began with" in run.protocol


def test_a_search_says_that_trials_spend_too(tmp_path, capsys):
    quick = {**TINY, "rounds": 1, "trials": 1, "refit_seeds": 0, "jobs": 1, "search": {"lr": [0.1]}}
    sp.tune(["fedavg:privacy=local:noise=9"], **quick, out=tmp_path / "tune")
    assert "every trial spends" in capsys.readouterr().err


def test_an_epsilon_above_all_measure_is_shown(tmp_path):
    runs = [
        sp.train("fedavg", **{**TINY, "rounds": 1}, seed=seed, privacy="local:noise=1e-6", out=tmp_path / str(seed))
        for seed in (0, 1)
    ]
    assert runs[0].privacy().epsilon == math.inf
    (row,) = figures([run.view for run in runs])
    assert row["epsilon"] == {"largest": None}  # JSON has no infinity
    for args in ([str(run.path) for run in runs], [str(runs[0].path)]):
        shown = CliRunner().invoke(cli, ["table", *args], env={"COLUMNS": "300"})
        assert "above 1e+06" in shown.output


def test_more_noise_than_the_accountant_can_tell_from_none():
    assert sampled_epsilon(1e9, 1e-5, 5, 5, 10) == gaussian_epsilon(1e9, 1e-5, 5)
    shown = CliRunner().invoke(cli, ["privacy", "--clients", "10", "--rounds", "5", "--privacy", "central:noise=1e9"])
    assert shown.exit_code == 0
    assert CliRunner().invoke(cli, ["privacy", "--clients", "10", "--rounds", "9" * 309]).exit_code == 2


def test_without_the_extra_a_run_is_refused_before_it_trains(monkeypatch):
    config = build.make_config("fedavg", {**TINY, "privacy": "local"})
    context = build.make_context(config)

    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(extra, "import_module", missing)
    with pytest.raises(SparsonaError, match=r"sparsona\[privacy\]"):
        describe_run(config, context, card("fedavg"))
