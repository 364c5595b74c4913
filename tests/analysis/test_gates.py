"""What is read back of gates: two clients, two rounds and four blocks, by hand."""

import json

import numpy as np
import pytest

import sparsona as sp
from sparsona.analysis.gates import Gates, GateTurn
from sparsona.core.errors import SparsonaError
from sparsona.runs.folder import RunFolder


def turn(completed, client, gates, newly=(0.5, 0.2), **more):
    shares = {"density_used": 0.5, "upload_share": 0.6, "upload_share_formula": 0.8, **more}
    vector = np.array(gates, dtype=np.float32)
    return GateTurn(completed, client, **shares, newly_used=np.array(newly), scores=vector, gates=vector, chosen=vector)


GATES = Gates(
    "by hand",
    (
        turn(1, 0, [0.0, 0.1, 0.6, 0.9]),
        turn(1, 1, [0.0, 0.4, 0.6, 1.0], density_used=0.3),
        turn(5, 1, [0.0, 0.0, 0.9, 0.9], upload_share=0.9),
    ),
)


def test_the_histogram_by_hand():
    """Quarters of 0 to 1: round 1 has 0, .1, 0 | .4 | .6, .6 | .9, 1; round 5 has 0, 0 | | | .9, .9."""
    rounds, edges, counts = GATES.histogram(bins=4)
    assert rounds == [1, 5]
    assert edges.tolist() == [0, 0.25, 0.5, 0.75, 1]
    assert counts.tolist() == [[3, 1, 2, 2], [2, 0, 0, 2]]


def test_gates_without_a_sigmoid_widen_the_range():
    _, edges, counts = Gates("wide", (turn(1, 0, [-1.0, 0.2, 3.0, 0.0]),)).histogram(bins=4)
    assert (edges[0], edges[-1]) == (-1, 3)
    assert counts.sum() == 4


def test_means_rows_and_json():
    assert GATES.mean("density_used") == pytest.approx((0.5 + 0.3 + 0.5) / 3)
    assert GATES.mean("upload_share") == pytest.approx(0.7)
    first, last = GATES.rows()
    assert (first["round"], first["clients"], first["density used"]) == ("1", "2", "0.400")
    assert (last["round"], last["upload share"], last["gates at 0"]) == ("5", "0.900", "0.500")
    assert "0.700" in GATES.sentences()[0]
    assert "0.500, 0.200" in GATES.sentences()[1]
    assert json.loads(json.dumps(GATES.as_dict()))["turns"][2]["gates"] == pytest.approx([0, 0, 0.9, 0.9])


def test_batches_that_a_turn_did_not_have_count_nowhere():
    nan = float("nan")
    turns = (turn(1, 0, [0.5], newly=(0.5, 0.2, nan)), turn(1, 1, [0.5], newly=(0.9, nan, nan)))
    found = Gates("by hand", turns)
    assert found.newly_used == pytest.approx([0.7, 0.2])
    assert found.sentences()[1].endswith("used 0.700, 0.200.")
    assert "NaN" not in json.dumps(found.as_dict())
    assert [one["newly_used"] for one in found.as_dict()["turns"]] == [[0.5, 0.2, None], [0.9, None, None]]
    assert Gates("earlier", (turn(1, 0, [0.5], newly=(0.5, 0.0)),)).newly_used == [0.5, 0.0]


@pytest.mark.parametrize("executor", ["serial", "stacked", pytest.param("workers", marks=pytest.mark.slow)])
def test_turns_have_as_many_shares_as_batches(executor):
    """Clients differ in their number of batches, and the shares of each end with its last."""
    options = {"clients": 6, "rounds": 1, "batch_size": 64, "per_round": 6, "epochs": 1, "partition": "dirichlet:0.5"}
    run = sp.train("pfedgate", executor=executor, **options)
    sizes = run.view.sizes[:, 0]
    assert len(set(-(-sizes // 64))) > 1
    for one in run.gates().turns:
        assert np.isfinite(one.newly_used).tolist() == [place < -(-sizes[one.client] // 64) for place in range(8)]
    assert len(run.gates().newly_used) == min(8, -(-sizes.max() // 64))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    options = {"clients": 5, "per_round": 3, "rounds": 14, "eval_every": 3, "epochs": 1, "data_rate": 0.3}
    return sp.train("pfedgate", out=tmp_path_factory.mktemp("gates") / "run", executor="serial", density=0.4, **options)


def test_a_run_records_its_gates_where_it_is_evaluated(run):
    gates = run.gates()
    assert gates.rounds == [3, *range(5, 15)]  # every third, and the last ten
    assert len(gates.turns) == 3 * len(gates.rounds)
    assert all(one.density_used <= 0.4 + 1e-6 for one in gates.turns)
    for name in ("density_used", "upload_share", "upload_share_formula"):
        assert run.summary[name] == pytest.approx(gates.mean(name))
    by_bytes = {(row.round + 1, row.client): row.paper_up for row in RunFolder.open(run.path).records.turns()}
    size = sum(4 * value.numel() for value in run.personal_model(0).parameters())
    for one in gates.turns:  # what was measured at the client is what the ledger counted
        assert one.upload_share == pytest.approx(by_bytes[one.completed, one.client] / size, rel=1e-5)


def test_the_tree_may_be_of_phi(run):
    scores, phi = run.similarity(), run.similarity("phi")
    assert scores.clients == phi.clients
    assert phi.kind == "vector"
    assert phi.title.endswith(", phi")
    assert not np.allclose(scores.distances, phi.distances)
    with pytest.raises(SparsonaError, match="trait 'mean'"):
        run.similarity("mean")


def test_phi_is_the_gates_parameters(run):
    context = run._make_context()
    states = run._progress(context).population.states
    one, other = ((states.get(client) or context.fresh_state(client)).gate.flat.double() for client in (0, 1))
    assert run.similarity("phi").distances[0, 1] == pytest.approx(float((one - other).norm()))


def test_a_run_without_gates(tmp_path):
    run = sp.train("fedavg", out=tmp_path / "run", clients=3, rounds=1, data_rate=0.1, executor="serial")
    with pytest.raises(SparsonaError, match="no gates on record"):
        run.gates()
    with pytest.raises(SparsonaError, match="neither masks nor gates"):
        run.similarity("phi")
    assert "density_used" not in run.summary


def test_pictures(run, tmp_path):
    path = sp.save_picture(run.gates(), tmp_path / "gates.svg")
    assert "completed rounds" in path.read_text()
    page = run.report(tmp_path / "page.html").read_text()
    assert 'id="gates"' in page
    assert "Gates over the rounds" in page
