"""`Run.bounds` on linear models, whose constants are known, and on short runs of every method with a theorem."""

from __future__ import annotations

import json
from itertools import combinations

import numpy as np
import pytest
import torch
from torch import nn

import sparsona as sp
from sparsona.analysis.format import number
from sparsona.core.errors import SparsonaError
from sparsona.data.federation import Federation
from sparsona.engine.rounds import received_work, shared_model, simulate
from sparsona.executors.serial import Serial
from sparsona.experiment.theory.sample import check_constant_rate, mean_gradient, standard_error

SMALL = {"clients": 4, "rounds": 2, "data_rate": 0.1, "epochs": 1}
FEW = {"clients": 2, "batches": 2}
SAMPLED = "clients are sampled uniformly, without replacement"


@pytest.fixture(scope="module")
def lines() -> Federation:
    """Four clients of ten examples each, with a linear model of their own."""
    rng = np.random.default_rng(0)
    made = []
    for _ in range(4):
        x = rng.normal(size=(10, 3)).astype(np.float32)
        y = (x @ rng.normal(size=3)).astype(np.float32)
        made.append((x, y, x, y))
    return sp.Federation.from_clients(made, validation_rate=0)


def plain(tmp_path, method: str, lines: Federation, **options):
    known = {"lr": 0.001, "weight_decay": 0, "clip_norm": None, "epochs": 1, "rounds": 3, "batch_size": 10}
    return sp.train(method, lines, model=nn.Linear(3, 1), out=tmp_path / "run", per_round=4, **known | options)


def hessians(lines: Federation) -> list[np.ndarray]:
    """Of the mean squared error of a linear model with a bias."""
    found = []
    for client in range(lines.num_clients):
        x = lines.examples(client, "train").inputs.numpy().astype(float)
        features = np.hstack([x, np.ones((len(x), 1))])
        found.append(2 * features.T @ features / len(x))
    return found


def test_fedavg_on_quadratics_has_the_constants_that_algebra_gives(tmp_path, lines) -> None:
    run = plain(tmp_path, "fedavg", lines, weight="equal", lr_decay=1.0)
    found = run.bounds(clients=4)
    named = {one.symbol: one for one in found.constants}
    largest = [np.linalg.eigvalsh(one)[-1] for one in hessians(lines)]
    assert named["L"].value == pytest.approx(max(largest), rel=2e-3)
    assert named["L"].mean == pytest.approx(np.mean(largest), rel=2e-3)
    assert named["sigma^2"].value == pytest.approx(0, abs=1e-9)  # batches of everything
    assert named["beta"].value == 0
    assert named["N"].value == 1
    weight, gradients = run.personal_model(0), []
    theta = np.append(weight.weight.detach().numpy().ravel(), weight.bias.detach().numpy())
    for client, hessian in enumerate(hessians(lines)):
        some = lines.examples(client, "train")
        x, y = some.inputs.numpy().astype(float), some.targets.numpy().astype(float).ravel()
        features = np.hstack([x, np.ones((len(x), 1))])
        gradients.append(hessian @ theta - 2 * features.T @ y / len(x))
    gap = np.abs(gradients - np.mean(gradients, axis=0)).max()
    assert gap <= named["G, by coordinate"].value * 1.001  # the largest of two rounds
    iclr, journal = found.bounds
    assert iclr.measured_curve[-1][0] == 3
    last = np.mean([one @ one for one in gradients])
    assert 2 * iclr.measured - iclr.measured_curve[0][1] == pytest.approx(last, rel=1e-3)  # the mean of two ends
    mean = np.mean(gradients, axis=0)
    assert 2 * journal.measured - journal.measured_curve[0][1] == pytest.approx(mean @ mean, rel=1e-3)
    statuses = {one.text: one.status for one in iclr.assumptions}
    assert statuses["the step size is small enough"] == "held"
    assert statuses["clients take plain SGD steps"] == "held"
    assert statuses["the server's mean has equal weights"] == "held"
    assert statuses["the step size is constant"] == "held"
    assert iclr.value is not None
    assert iclr.value > iclr.measured  # a theorem whose assumptions hold


def test_the_bound_holds_where_its_assumptions_do_and_the_step_is_too_large_where_they_do_not(tmp_path, lines) -> None:
    run = plain(tmp_path, "fedavg", lines, lr=0.5, momentum=0.5, weight="equal", rounds=1)
    iclr = run.bounds(clients=4).bounds[0]
    assert iclr.value is None
    violated = {one.text for one in iclr.violated}
    assert {"the step size is small enough", "clients take plain SGD steps"} <= violated
    assert not iclr.curve
    assert iclr.allowed_curve[-1][1] > iclr.measured


def test_chi_of_two_linear_models_of_one_input_is_one(tmp_path, lines) -> None:
    run = plain(tmp_path, "fedsim", lines, personal="additive", weight="equal")
    found = run.bounds(clients=4)
    named = {one.symbol: one.value for one in found.constants}
    largest = max(np.linalg.eigvalsh(one)[-1] for one in hessians(lines))
    assert [named["L_u"], named["L_v"], named["L_uv"]] == pytest.approx([largest] * 3, rel=2e-3)
    assert named["chi"] == pytest.approx(1, rel=4e-3)
    assert named["sigma_u^2"] == pytest.approx(0, abs=1e-9)
    assert found.bounds[0].theorem.startswith("FedSim")
    assert found.bounds[0].value > found.bounds[0].measured
    assert found.bounds[1].measured is None  # of FedAlt: for comparison


@pytest.mark.parametrize(
    ("method", "theorems", "constants"),
    [
        ("fedspa", ["FedSpa (ICLR), Theorem 1, Eq. (5)", "FedSpa (journal), Theorem 1, Eq. (5)"], {"p_t", "beta", "L"}),
        ("local", ["FedSpa (ICLR), Theorem 1, Eq. (5)", "FedSpa (journal), Theorem 1, Eq. (5)"], {"L"}),
        ("dispfl", ["DisPFL, Theorem 1"], {"beta", "D_g", "eps~"}),
        ("fedalt", ["FedAlt, Theorem 2", "FedSim, Theorem 1, Eq. (6)"], {"chi", "delta^2"}),
        (
            "pfedgate",
            [
                "pFedGate, Proposition 1, Eq. (4)",
                "pFedGate, Theorem 1",
                "pFedGate, Theorem 2, Eq. (7)",
                "pFedGate, appendix E",
            ],
            {"mu", "L_g", "p_1"},
        ),
    ],
)
def test_a_short_run_of_every_method_with_a_theorem(tmp_path, monkeypatch, method, theorems, constants) -> None:
    run = sp.train(method, out=tmp_path / "run", model="mlp", executor="serial", **SMALL)  # as the replay
    read = Federation.examples

    def no_test_data(self, client, part):
        assert part != "test"
        return read(self, client, part)

    monkeypatch.setattr(Federation, "examples", no_test_data)
    done: list[tuple[int, int]] = []
    found = run.bounds(**FEW, along=1, listen=lambda *where: done.append(where))
    assert [one.theorem for one in found.bounds] == theorems
    assert constants <= {one.symbol for one in found.constants}
    assert found.rounds == (0, 1, 2)
    assert "bit for bit" in " ".join(found.notes)  # the replay
    assert done[-1][0] == done[-1][1] == 2 + 3 * 2
    assert all(one.assumptions for one in found.bounds)
    assert json.loads(json.dumps(found.as_dict(), allow_nan=False))["clients"] == list(found.clients)
    assert sp.save_picture(found, tmp_path / "bounds.svg").read_text().count("<svg") == 1


def test_the_same_seed_gives_the_same_estimates_and_another_seed_others(tmp_path) -> None:
    run = sp.train("fedavg", out=tmp_path / "run", model="mlp", **SMALL)
    first, same, other = (run.bounds(**FEW, seed=seed).as_dict() for seed in (0, 0, 1))
    assert first == same
    assert first["constants"] != other["constants"]


def test_masks_and_their_union_are_those_of_the_run(tmp_path) -> None:
    spa = sp.train("fedspa", out=tmp_path / "spa", model="mlp", search="rsm", density=0.5, **SMALL)
    named = {one.symbol: one.value for one in spa.bounds(**FEW).constants}
    size = spa._folder.facts.num_parameters
    assert named["beta"] == pytest.approx(size / 2, rel=0.01)
    assert named["dist(m_k, m_k')"] == named["dist(m_k, m*_k)"] == 0  # one random mask for all, for ever
    peers = sp.train("dispfl", out=tmp_path / "peers", model="mlp", density=0.5, **SMALL)
    found = {one.symbol: one.value for one in peers.bounds(**FEW).constants}
    masks = np.stack(
        [(peers._progress(peers._make_context()).population.states[k].mask.flat.numpy()) for k in range(4)]
    )
    assert found["beta"] == pytest.approx(masks.any(axis=0).mean())
    assert found["beta_k"] == pytest.approx(masks.mean())
    assert 0.5 < found["beta"] < 1


@pytest.mark.parametrize("gating", ["sample", "client"])
def test_gates_of_examples_and_of_clients(tmp_path, gating) -> None:
    run = sp.train("pfedgate", out=tmp_path / "run", model="mlp:hidden=8", gating=gating, density=0.5, **SMALL)
    found = run.bounds(**FEW)
    uploads = found.bounds[-1]
    assert 0 < uploads.measured <= 1
    named = {one.symbol: one.value for one in found.constants}
    if gating == "client":  # one gate for all batches: what the first uses is all
        assert uploads.measured == pytest.approx(named["p_1"], abs=0.05)
    else:  # some example of the first batch uses it
        assert named["p_1"] >= 0.4


def test_noise_that_is_supposed_makes_dispfl_a_bound(tmp_path) -> None:
    run = sp.train("dispfl", out=tmp_path / "run", **SMALL | {"rounds": 30, "eval_every": 30})
    assert run.bounds(**FEW).bounds[0].value is None
    found = run.bounds(**FEW, noise=10, delta=1e-4)
    bound, named = found.bounds[0], {one.symbol: one.value for one in found.constants}
    assert 0 < named["delta'"] < 1
    assert 0 < bound.value == pytest.approx(sum(bound.terms.values()))
    assert any("with a probability of" in note for note in bound.notes)
    assert statuses(bound)["Gaussian noise on every gradient"] == "held"


def test_dispfl_has_no_bound_without_a_delta_below_one(tmp_path) -> None:
    bound = sp.train("dispfl", out=tmp_path / "run", **SMALL).bounds(**FEW, noise=1e4).bounds[0]
    assert bound.terms  # eps' is finite, but T eps~ <= eps', where delta' does not exist
    assert bound.value is None
    assert any("would be" in note for note in bound.notes)
    assert statuses(bound)["N >= 2 / eps'^2 ln(16 / (e^-eps' delta'))"] == "violated"


def test_no_theorem_is_about_other_methods(tmp_path) -> None:
    run = sp.train("ditto", out=tmp_path / "run", **SMALL)
    found = sp.bounds(tmp_path / "run")
    assert "None of the four papers' theorems is about Ditto" in found.applies
    assert not found.bounds
    with pytest.raises(SparsonaError, match="no bound over rounds"):
        sp.save_picture(run.bounds(), tmp_path / "none.svg")


@pytest.mark.parametrize("wrong", [{"clients": 1}, {"batches": 0}, {"delta": 1.0}, {"noise": -1}, {"along": -1}])
def test_options_are_checked(tmp_path, wrong) -> None:
    run = sp.train("local", out=tmp_path / "run", **SMALL)
    with pytest.raises(SparsonaError, match=next(iter(wrong))):
        run.bounds(**wrong)


def line_gradients(lines: Federation) -> list:
    """The gradient of each client's mean squared error, as a function of a linear model's weights and bias."""
    found = []
    for client, hessian in enumerate(hessians(lines)):
        some = lines.examples(client, "train")
        x, y = some.inputs.numpy().astype(float), some.targets.numpy().astype(float).ravel()
        slope = 2 * np.hstack([x, np.ones((len(x), 1))]).T @ y / len(x)
        found.append(lambda w, hessian=hessian, slope=slope: hessian @ w - slope)
    return found


def statuses(bound) -> dict[str, str]:
    return {one.text: one.status for one in bound.assumptions}


def test_p_t_has_one_reading_of_the_start_in_both_of_its_parts(tmp_path) -> None:
    """Against the definition with w~_k,t = m*_k w_t, at local steps 0 and 1 of full batches."""
    rng = np.random.default_rng(1)
    made = [(x, x @ rng.normal(size=8).astype(np.float32)) for x in rng.normal(size=(3, 10, 8)).astype(np.float32)]
    wide = sp.Federation.from_clients([(x, y, x, y) for x, y in made], validation_rate=0)
    known = {"lr": 0.05, "weight_decay": 0, "clip_norm": None, "epochs": 2, "batch_size": 10, "lr_decay": 1.0}
    run = sp.train(
        "fedspa", wide, model=nn.Linear(8, 1), out=tmp_path / "run", per_round=3, rounds=4, density=0.5, **known
    )
    context = run._make_context()
    first, last = simulate(context, Serial(context)).start(), run._progress(context).population
    w = shared_model(context.server_side, first).flat.numpy().astype(float)
    gradients, expected, mixed = line_gradients(wide), [], []
    for client in range(3):
        mask, star = (
            received_work(context, population, client, completed).mask.flat.numpy().astype(float)
            for population, completed in ((first, 0), (last, 4))
        )
        grad = gradients[client]
        there, step = grad(star * w), mask * w
        for _ in range(2):
            here = grad(step)
            part = np.sum((mask * here - star * there) ** 2)
            expected.append(part / np.sum((here - there) ** 2) if (mask != star).any() else 0)
            start = np.sum((here - grad(mask * w)) ** 2)
            mixed.append(part / start if start else 0)
            step = step - 0.05 * mask * here
    found = run.bounds(clients=3)
    p_t = next(one for one in found.constants if one.symbol == "p_t")
    assert max(expected) > 1  # masks moved
    assert p_t.value == pytest.approx(max([*expected, 1]), rel=1e-3)  # 1: of rounds with the last masks
    assert abs(p_t.value / max(mixed) - 1) > 0.1
    assert any("With m_k,t w_t in both" in note for note in found.bounds[1].notes)


def test_uploads_are_those_that_the_run_recorded(tmp_path) -> None:
    run = sp.train("pfedgate", out=tmp_path / "run", model="mlp:hidden=8", density=0.5, capacities=[0.5, 0.3], **SMALL)
    turns = run.gates().turns
    of_clients = {turn.client: [one for one in turns if one.client == turn.client] for turn in turns}
    uploads = run.bounds(**FEW).bounds[-1]
    assert uploads.measured == pytest.approx(
        np.mean([np.mean([turn.upload_share for turn in some]) for some in of_clients.values()])
    )
    assert any(f"{len(of_clients)} clients" in note for note in uploads.notes)
    shares = np.mean([np.mean([turn.upload_share_formula for turn in some]) for some in of_clients.values()])
    assert any(f"whatever was used before: {shares:.3g}" in note for note in uploads.notes)


def test_p_1_is_compared_with_each_clients_own_share(tmp_path) -> None:
    options = {"density": 0.5, "capacities": [0.5, 0.25], "blocks": "chunk", "num_blocks": 20, "gating": "batch"}
    run = sp.train("pfedgate", out=tmp_path / "run", model="mlp:hidden=64", **SMALL, **options)
    (check, _) = run.bounds(**FEW).bounds[-1].assumptions
    assert check.status == "held"


def test_an_eigenvalue_that_was_seen_is_never_taken_for_mu(tmp_path, lines) -> None:
    run = sp.train(
        "pfedgate", lines, model=nn.Linear(3, 1), out=tmp_path / "run", per_round=4, rounds=1, density=1.0, epochs=1
    )
    found = run.bounds(clients=4)
    assert next(one for one in found.constants if one.symbol == "mu").value > 0
    assert found.bounds[0].value is None
    assert statuses(found.bounds[0])["f is strongly convex"] == "cannot be checked"
    deep = sp.train("pfedgate", out=tmp_path / "deep", model="mlp:hidden=8", **SMALL).bounds(**FEW)
    mu = next(one for one in deep.constants if one.symbol == "mu").value
    assert mu < 0
    assert statuses(deep.bounds[0])["f is strongly convex"] == "violated"


def test_a_run_that_was_stopped_is_judged_by_its_completed_rounds(tmp_path) -> None:
    class Stop:
        def on_round(self, result):
            if result.index == 1:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sp.train("fedavg", out=tmp_path / "run", model="mlp", observers=[Stop()], **SMALL | {"rounds": 8})
    found = sp.load(tmp_path / "run").bounds(**FEW)
    assert found.rounds == (0, 2)
    assert found.bounds[0].allowed_curve[-1][0] == found.bounds[0].measured_curve[-1][0] == 2


def test_the_step_size_is_looked_at_in_all_rounds() -> None:
    class Bumpy:
        rounds, lr_scales = 3, (1.0, 0.5, 1.0)

    assert check_constant_rate(Bumpy()).status == "violated"


def test_a_step_that_is_too_large_leaves_no_value_and_no_ratio(tmp_path, lines) -> None:
    run = plain(tmp_path, "fedsim", lines, personal="additive", weight="equal", lr=0.5)
    bound = run.bounds(clients=4).bounds[0]
    assert statuses(bound)["eta is small enough"] == "violated"
    assert bound.value is None
    assert bound.ratio is None
    assert bound.curve_label == "for a smaller step size"
    assert any(f"would be {number(sum(bound.terms.values()))}" in note for note in bound.notes)
    journal = plain(tmp_path / "spa", "fedavg", lines, weight="equal", lr=0.5, epochs=2).bounds(clients=4).bounds[1]
    assert statuses(journal)["the step size is at most sqrt(1 / (16 L^2 N^2 p_t T))"] == "violated"
    assert journal.value is None
    assert any("would be" in note for note in journal.notes)


def test_gradients_are_of_all_examples_however_few_batches(tmp_path, lines) -> None:
    run = plain(tmp_path, "fedavg", lines, weight="equal", batch_size=2)
    iclr = run.bounds(clients=4, batches=2).bounds[0]
    model = run.personal_model(0)
    theta = np.append(model.weight.detach().numpy().ravel(), model.bias.detach().numpy())
    last = np.mean([grad(theta) @ grad(theta) for grad in line_gradients(lines)])
    assert 2 * iclr.measured - iclr.measured_curve[0][1] == pytest.approx(last, rel=1e-3)
    assert iclr.measured_error is None  # all clients were measured
    assert run.bounds(clients=3, batches=2).bounds[0].measured_error > 0


def test_the_squared_mean_gradient_of_a_sample_of_clients_is_unbiased() -> None:
    rows = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 2
    mean = rows.mean(0)
    found = [mean_gradient([rows[place] for place in some], 5) for some in combinations(range(5), 3)]
    assert np.mean([one.squared for one in found]) == pytest.approx(float(mean @ mean))
    assert np.mean([one.diversity for one in found]) == pytest.approx(float((rows - mean).square().sum() / 5))
    assert mean_gradient(list(rows), 5).squared == pytest.approx(float(mean @ mean))


def test_standard_errors_are_of_the_clients_means_over_time() -> None:
    class Some:
        taking_part, points = range(8), [(0, None), (2, None)]

    steady = np.array([[1.0, 5.0], [5.0, 1.0]])  # each client has a mean of 3
    assert standard_error(Some(), steady) == 0
    assert standard_error(Some(), np.array([[1.0, 5.0]] * 2)) == pytest.approx(2 * np.sqrt(1 - 2 / 8))
    assert standard_error(Some(), np.ones((2, 8))) is None


def test_gaps_are_between_errors_of_the_same_clients(tmp_path) -> None:
    run = sp.train("dispfl", out=tmp_path / "run", model="mlp", **SMALL)
    found = run.bounds(**FEW)
    tested = {row.client: 1 - row.correct / row.count for row in run._folder.records.evaluations(2, "received")}
    context, gaps = run._make_context(), []
    for client in found.clients:
        work = received_work(context, run._progress(context).population, client)
        some = context.federation.examples(client, "train")
        wrong = context.method.predict(work, some.inputs).argmax(1) != some.targets
        gaps.append(tested[client] - float(wrong.float().mean()))
    assert found.bounds[0].measured == pytest.approx(abs(np.mean(gaps)), abs=1e-6)
    expected = np.std(gaps, ddof=1) / np.sqrt(2) * np.sqrt(1 - 2 / 4)
    assert found.bounds[0].measured_error == pytest.approx(expected, abs=1e-6)


def test_losses_of_gated_models_are_both_of_what_is_deployed(tmp_path) -> None:
    run = sp.train("pfedgate", out=tmp_path / "run", model="mlp:hidden=8", density=0.5, **SMALL)
    found = run.bounds(**FEW)
    tested = {row.client: row.loss for row in run._folder.records.evaluations(2, "received")}
    context, gaps = run._make_context(), []
    for client in found.clients:
        work = received_work(context, run._progress(context).population, client)
        some = context.federation.examples(client, "train")
        outputs = context.method.predict(work, some.inputs)
        gaps.append(tested[client] - float(nn.functional.cross_entropy(outputs, some.targets.long())))
    assert found.bounds[1].measured == pytest.approx(abs(np.mean(gaps)), rel=1e-4)


def test_assumptions_that_a_run_keeps_are_not_called_violated(tmp_path, lines) -> None:
    exact = plain(tmp_path, "fedavg", lines, weight="equal").bounds(clients=4).bounds[0]
    assert statuses(exact)["stochastic gradients are unbiased at every step"] == "held"
    assert statuses(exact)["optimal masks m*"] == "held"
    several = plain(tmp_path / "several", "fedavg", lines, weight="equal", batch_size=5).bounds(clients=4).bounds[0]
    assert statuses(several)["stochastic gradients are unbiased at every step"] == "violated"
    peers = sp.train("dpsgd", out=tmp_path / "peers", partition="iid", graph="full", **SMALL).bounds(**FEW)
    kept = statuses(peers.bounds[0])
    assert kept["examples are i.i.d."] == kept["all clients mix to one consensus"] == "held"
    masked = sp.train("dispfl", out=tmp_path / "masked", graph="full", **SMALL).bounds(**FEW).bounds[0]
    assert statuses(masked)["all clients mix to one consensus"] == "cannot be checked"
    assert statuses(masked)["examples are i.i.d."] == "violated"


def first_client(round_, clients, available, random):
    return available[:1]


@pytest.mark.parametrize(
    ("options", "text", "why"),
    [
        ({"sampler": "size"}, SAMPLED, "sampler=size"),
        ({"sampler": first_client}, SAMPLED, "the sampler is a function, first_client"),
        ({"availability": "markov:0.9:0.1"}, SAMPLED, "availability: not all clients are always available"),
        ({"speeds": (1, 1, 1, 0.1), "deadline": 2}, SAMPLED, "deadline=2: late updates are lost"),
        ({"client_lr_scale": {1: 0.5}}, "all clients have the same step size", "client_lr_scale: from 0.5 to 1"),
        ({"deadline": 2}, SAMPLED, None),
    ],
)
def test_assumptions_on_clients_are_looked_up_in_the_options(tmp_path, lines, options, text, why) -> None:
    found = plain(tmp_path, "fedavg", lines, rounds=1, **options).bounds(**FEW)
    assert found.title == "FedAvg, arrays, 1 round"
    (one,) = [one for one in found.bounds[0].assumptions if one.text == text]
    assert one.status == ("held" if why is None else "violated")
    assert (why or "") in one.why


def test_full_batches_of_all_clients_reach_the_regimes_without_noise(tmp_path, lines) -> None:
    found = plain(tmp_path, "fedsim", lines, personal="additive", weight="equal").bounds(clients=4)
    assert any("sigma_u = sigma_v = 0, m = n, tau = 1" in note for note in found.bounds[0].notes)
    for bound, corollary in zip(found.bounds, (3, 10), strict=True):
        to_epsilon = f"Corollary {corollary}, epsilon = {number(found.bounds[0].measured)} as measured: "
        assert any(note.startswith(to_epsilon) and " rounds, eta = " in note for note in bound.notes)


def test_one_participating_client_has_no_pairs_of_masks(tmp_path) -> None:
    run = sp.train("fedspa", out=tmp_path / "run", model="mlp", **SMALL | {"clients": 2}, novel=1)
    named = {one.symbol: one.value for one in run.bounds(**FEW).constants}
    assert named["dist(m_k, m_k')"] == 0


def test_a_regression_has_no_errors_to_compare(tmp_path, lines) -> None:
    bound = (
        sp.train("dispfl", lines, model=nn.Linear(3, 1), out=tmp_path / "run", rounds=2, epochs=1).bounds().bounds[0]
    )
    assert bound.row()["measured"] == "–"
    words = " ".join([*bound.notes, *(one.why for one in bound.assumptions)])
    assert "cross-entropy" not in words
    assert "A regression has no share of errors" in words


def test_d_psgd_is_dispfl_with_masks_of_ones(tmp_path) -> None:
    run = sp.train("dpsgd", out=tmp_path / "run", model="mlp", **SMALL)
    found = run.bounds(**FEW)
    assert [one.theorem for one in found.bounds] == ["DisPFL, Theorem 1"]
    named = {one.symbol: one.value for one in found.constants}
    assert named["beta"] == named["beta_k"] == 1
    cut = sp.train("dpsgd", out=tmp_path / "cut", model="mlp", density=0.5, **SMALL).bounds(**FEW)
    assert next(one.value for one in cut.constants if one.symbol == "beta") == pytest.approx(0.5, abs=0.02)


def test_the_slope_of_the_network_is_counted_once(tmp_path) -> None:
    found = sp.train("pfedgate", out=tmp_path / "run", model="mlp:hidden=8", **SMALL).bounds(**FEW)
    named = {one.symbol: one.value for one in found.constants}
    assert 0 < named["L_f"] <= np.sqrt(2)  # of cross-entropy by outputs
    assert named["L_f, by theta"] <= named["L_f"] * named["L_h"] * 1.001
