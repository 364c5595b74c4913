"""`Run.bounds` on linear models, whose constants are known, and on short runs of every method with a theorem."""

from __future__ import annotations

import json

import numpy as np
import pytest
from torch import nn

import sparsona as sp
from sparsona.core.errors import SparsonaError
from sparsona.data.federation import Federation

SMALL = {"clients": 4, "rounds": 2, "data_rate": 0.2, "epochs": 1}
FEW = {"clients": 2, "batches": 2}


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
    for client in range(4):
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
    run = sp.train(method, out=tmp_path / "run", model="mlp", **SMALL)
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
    run = sp.train("dispfl", out=tmp_path / "run", **SMALL)
    assert run.bounds(**FEW).bounds[0].value is None
    bound = run.bounds(**FEW, noise=1e4).bounds[0]
    assert 0 < bound.value == pytest.approx(sum(bound.terms.values()))
    violated = {one.text for one in bound.violated}
    assert "Gaussian noise on every gradient" not in violated
    assert "N >= 2 / eps'^2 ln(16 / (e^-eps' delta'))" in violated  # so small an eps' asks for many examples


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
