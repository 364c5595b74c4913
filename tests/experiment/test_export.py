"""Models leave a run as files, without its data, and predict what the run predicts."""

from __future__ import annotations

import builtins
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from older import unseal
from safetensors import safe_open
from torch import nn

import sparsona as sp
from sparsona.analysis.privacy import show_epsilon
from sparsona.cli.app import cli
from sparsona.core.points import GUARDED
from sparsona.data.client_index import Split
from sparsona.experiment import export as exports
from sparsona.experiment.export import Prepared, Trial, describe_inputs, restore
from sparsona.runs.facts import ExampleFacts

CLASSES = 3


def pictures(seed, count):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, CLASSES, count)
    x = rng.integers(0, 120, (count, 1, 6, 6)) + 60 * y[:, None, None, None]
    return x.astype(np.uint8), y


def net():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, CLASSES)
    )


VIEW = sp.View(mean=(0.4,), std=(0.2,), pad=1, crop=5, flip=True)


@pytest.fixture(scope="module")
def federation():
    return sp.Federation.from_clients([(*pictures(k, 30), *pictures(50 + k, 12)) for k in range(4)], view=VIEW)


@pytest.fixture(scope="module")
def run(federation, tmp_path_factory):
    """FedSpa on images of bytes that are cropped and normalised, with a module of one's own."""
    options = {"rounds": 2, "density": 0.3, "per_round": 4, "lr": 0.1, "guard": True, "points": ["global"]}
    return sp.train("fedspa", federation, net(), out=tmp_path_factory.mktemp("runs") / "spa", **options)


@pytest.fixture(scope="module")
def loaded(run):
    """The same run in a later process: no data, and a new module with other weights."""
    return sp.load(run.path, model=net())


def accuracy(predict, federation, client):
    """By hand, of stored bytes."""
    index = federation.splits[client].test
    right = predict(federation.x[index]).argmax(1) == federation.y[index]
    return float(right.float().mean())


def by_inputs(module, federation, client):
    test = federation.examples(client, "test")
    return float((module(test.inputs).argmax(1) == test.targets).float().mean())


def test_a_personal_model_needs_no_data(run, loaded, federation):
    for client in range(4):
        mine, theirs = loaded.personal_model(client).state_dict(), run.personal_model(client).state_dict()
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
        assert by_inputs(loaded.personal_model(client), federation, client) == pytest.approx(run.accuracies()[client])
    assert all(torch.equal(a, b) for a, b in zip(loaded.model().parameters(), run.model().parameters(), strict=True))
    means = [by_inputs(loaded.model(), federation, client) for client in range(4)]
    assert means == pytest.approx(run.accuracies("global").tolist())
    with pytest.raises(sp.SparsonaError, match="on its own model"):
        sp.load(run.path).personal_model(0)
    wrong = sp.load(run.path, model=nn.Sequential(nn.Flatten(), nn.Linear(25, CLASSES)))
    with pytest.raises(sp.SparsonaError, match=r"the model is not that of .*: its '1.weight' has shape "):
        wrong.personal_model(0)
    with pytest.raises(sp.SparsonaError, match="on its own data"):
        loaded.similarity()


@pytest.mark.parametrize(("client", "words"), [(4, "no client 4"), (-1, "no client -1"), ("ward", "no client 'ward'")])
def test_unknown_clients(loaded, client, words):
    with pytest.raises(sp.SparsonaError, match=words):
        loaded.personal_model(client)
    assert loaded.personal_model("2") is not None


def test_clients_by_name(loaded, monkeypatch):
    facts = loaded._folder.facts
    names = ("north", "south", "east", "7")
    monkeypatch.setitem(vars(facts), "client_names", names)
    chosen = [loaded.personal_model(one).state_dict() for one in ("east", 2)]
    assert all(torch.equal(chosen[0][name], chosen[1][name]) for name in chosen[0])
    assert loaded._models().number("7") == 3  # a name goes before a number
    with pytest.raises(sp.SparsonaError, match="unknown client 'eest'") as caught:
        loaded.personal_model("eest")
    assert "east" in caught.value.hint


def test_safetensors(loaded, run, federation, tmp_path):
    made = loaded.export(1, tmp_path / "one.safetensors")
    with safe_open(made.path, "pt") as file:
        weights, about = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    module = net()
    module.load_state_dict(weights)
    assert by_inputs(module.eval(), federation, 1) == pytest.approx(run.accuracies()[1])
    assert about["client"] == "1"
    assert about["model"] == "your own"
    assert json.loads(about["input_shape"]) == [1, 5, 5]
    assert about["input_preparation"] == (
        "cut 5 x 5 from the middle; divide by 255; subtract [0.4] and divide by [0.2], by channel"
    )
    assert float(about["test_accuracy"]) == pytest.approx(run.accuracies()[1], abs=1e-6)
    assert about["test_examples"] == "12"
    total = sum(value.numel() for value in module.parameters())
    assert made.sizes.parameters == made.sizes.parameters_before == total
    assert made.sizes.nonzero == sum(int(value.count_nonzero()) for value in module.parameters()) < total / 2
    assert made.sizes.bytes == made.path.stat().st_size


def test_sparse_safetensors(loaded, run, tmp_path):
    dense, sparse = (loaded.export(1, tmp_path / f"{way}.safetensors", sparse=way) for way in (False, True))
    assert sparse.sizes.nonzero == dense.sizes.nonzero
    with safe_open(sparse.path, "pt") as file:
        stored, about = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    assert "4.weight.bits" in stored
    assert sum(value.nbytes for value in stored.values()) < 4 * dense.sizes.parameters
    back = restore(stored, about)
    expected = run.personal_model(1).state_dict()
    assert back.keys() == expected.keys()
    assert all(torch.equal(back[name], expected[name]) for name in back)
    # The card's own snippet does the same.
    text = sparse.card.read_text(encoding="utf-8")
    code = text.partition("```python\n")[2].partition("```")[0].replace('"True.safetensors"', f'"{sparse.path}"')
    space = {"net": net()}
    exec(code, space)
    assert all(torch.equal(value, expected[name]) for name, value in space["net"].state_dict().items())


def test_a_torch_program_takes_stored_examples(loaded, run, federation, tmp_path):
    """Bytes in, logits out: cropping and normalisation are in it, for a batch of any size; and it is smaller."""
    extra = {"sparsona": ""}
    made = loaded.export(2, tmp_path / "two.pt2")
    program = torch.export.load(made.path, extra_files=extra)
    assert json.loads(extra["sparsona"])["input_shape"] == "[1, 6, 6]"
    assert json.loads(extra["sparsona"])["input_dtype"] == "uint8"
    assert json.loads(extra["sparsona"])["input_preparation"].startswith("none")
    assert accuracy(program.module(), federation, 2) == pytest.approx(run.accuracies()[2])
    assert program.module()(federation.x[:1]).shape == (1, CLASSES)
    assert made.largest_difference < 1e-5
    inside = sum(value.numel() for value in program.state_dict.values())
    assert inside == made.sizes.parameters


def test_an_onnx_file(loaded, run, federation, tmp_path):
    import onnxruntime

    made = loaded.export(0, tmp_path / "zero.onnx")
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["zero.onnx", "zero.onnx.md"]
    session = onnxruntime.InferenceSession(made.path, providers=["CPUExecutionProvider"])
    assert session.get_modelmeta().custom_metadata_map["client"] == "0"
    assert [one.shape[0] for one in (*session.get_inputs(), *session.get_outputs())] == ["batch", "batch"]

    def predict(x):
        return torch.from_numpy(session.run(None, {"inputs": x.numpy()})[0])

    assert accuracy(predict, federation, 0) == pytest.approx(run.accuracies()[0])
    assert made.largest_difference <= exports.RELATIVE * made.largest_output + exports.ABSOLUTE


def test_a_wrong_file_is_an_error_and_is_not_written(loaded, tmp_path, monkeypatch):
    right = Prepared.forward
    monkeypatch.setattr(Prepared, "forward", lambda self, inputs: right(self, inputs) + 1e-2)
    with pytest.raises(sp.SparsonaError, match=r"predicts something else than the run: outputs that differ by 0\.01"):
        loaded.export(0, tmp_path / "wrong.pt2")
    assert not list(tmp_path.iterdir())


def test_outputs_that_are_not_finite_are_compared():
    facts = ExampleFacts((4,), "float32", 4)
    trial = Trial(facts, "classes", lambda inputs: inputs.masked_fill(inputs < 0.2, -torch.inf))
    assert trial.check(lambda inputs: inputs.masked_fill(inputs < 0.2, -torch.inf), "it")[0] == 0
    for wrong in (lambda inputs: inputs, lambda inputs: inputs * torch.nan, lambda inputs: inputs[:, :3]):
        with pytest.raises(sp.SparsonaError, match="it predicts something else"):
            trial.check(wrong, "it")


def test_a_network_that_is_smaller_but_not_the_same_is_left_out(loaded, tmp_path, monkeypatch):
    """Dropping units is tried, and not trusted."""
    monkeypatch.setattr(exports, "drop_dead_units", lambda module: (net().eval(), {"0": 1}))
    made = loaded.export(0, tmp_path / "same.pt2")
    assert made.sizes.parameters == made.sizes.parameters_before


def test_dead_units_are_left_out_of_programs(federation, tmp_path):
    run = sp.train("fedspa", federation, net(), out=tmp_path / "run", rounds=1, density=0.08, per_round=4)
    made = run.export(0, tmp_path / "small.pt2")
    assert made.sizes.parameters < made.sizes.parameters_before
    assert made.sizes.nonzero <= made.sizes.parameters
    found = accuracy(torch.export.load(made.path).module(), federation, 0)
    assert found == pytest.approx(run.accuracies()[0])


def test_the_shared_model(loaded, run, federation, tmp_path):
    made = loaded.export(None, tmp_path / "shared.safetensors")
    assert made.client is None
    card = made.card.read_text(encoding="utf-8")
    assert f"Accuracy {run.accuracies('global').mean():.1%}: the mean over 4 clients" in card
    with pytest.raises(sp.SparsonaError, match="has no shared model"):
        sp.train("local", federation, net, out=tmp_path / "local", rounds=1).model()


def test_a_card_has_what_was_measured_and_nothing_else(loaded, run, tmp_path):
    card = loaded.export(3, tmp_path / "three.safetensors").card.read_text(encoding="utf-8")
    assert f"Accuracy {run.accuracies()[3]:.1%}, 95% interval" in card
    assert "on 12 test examples of this client, after 2 rounds, at the point `received`. One seed." in card
    assert "Measured on 12 examples of this client only" in card
    assert "licence | not stated" in card
    guarded = loaded.export(3, tmp_path / "guarded.safetensors", guarded=True)
    assert f"at the point `{GUARDED}`" in guarded.card.read_text(encoding="utf-8")
    assert loaded.export(3, tmp_path / "bare.safetensors", card=False).card is None
    assert not (tmp_path / "bare.safetensors.md").exists()


@pytest.mark.parametrize("suffix", [".safetensors", ".pt2", ".onnx"])
def test_a_file_without_a_card_tells_what_is_needed_to_run_it_alone(tmp_path, suffix):
    x, y = np.random.default_rng(0).random((12, 4), dtype=np.float32), np.arange(12) % 2
    data = sp.Federation.from_clients({"person-08": (x, y), "b": (x, y)}, class_names=["ill", "well"])
    run = sp.train("local", data, "mlp", out=tmp_path / "secret-run", rounds=1, progress=False)
    told, bare = (tmp_path / f"{name}{suffix}" for name in ("told", "bare"))
    run.export("person-08", told)
    run.export("person-08", bare, card=False)
    places = [str(Path(module.__file__).parent).encode() for module in (sp, torch)]
    for path, has_all in ((told, True), (bare, False)):
        body = path.read_bytes()
        for word in (b"person-08", b"secret-run", b"test_accuracy", b"test_examples"):
            assert (word in body) == has_all, word
        for word in (b"ill", b"input_preparation", b"input_shape"):
            assert word in body, word
        assert not any(place in body for place in places)  # of this machine


def test_a_card_names_the_comparison_and_classes_without_examples(tmp_path):
    x, y = np.random.default_rng(0).random((12, 4), dtype=np.float32), np.arange(12) % 3
    clients = {"all": (x, y), "lacks one": (x[y > 0], y[y > 0]), "lacks two": (x[y == 1], y[y == 1])}
    quick = {"rounds": 1, "model": "mlp", "progress": False}
    (run,) = sp.compare(["local"], sp.Federation.from_clients(clients), out=tmp_path / "both", **quick).runs
    card, other = (run.export(who, tmp_path / f"{who}.onnx").card.read_text(encoding="utf-8") for who in (1, 2))
    assert "A model of the run both/local-seed0, exported by" in card
    assert b"both/local-seed0" in (tmp_path / "1.onnx").read_bytes()
    assert "The client has no training examples of 1 class: 0." in card
    assert "The client has no training examples of 2 classes: 0, 2." in other


def test_a_model_that_was_not_measured_has_no_figure(federation, tmp_path):
    run = sp.train("fedavg", federation, net, out=tmp_path / "run", rounds=1, eval_clients=2)
    untested = int(np.flatnonzero(np.isnan(run.accuracies()))[0])
    made = run.export(untested, tmp_path / "one.safetensors")
    card = made.card.read_text(encoding="utf-8")
    assert "Not measured" in card
    assert "Its accuracy is not known." in card
    assert "Accuracy" not in card
    assert run.export(None, tmp_path / "all.safetensors").card.read_text(encoding="utf-8").count("Not measured") == 1


ROWS = np.random.default_rng(3).normal(size=(16, 4)).astype(np.float32)
EVIL = ("<img src=x onerror=alert(1)>", "[here](http://evil)|`_*")
NAMED = np.array(EVIL)[np.arange(16) % 2]
CARDS = {
    "regression": (
        ROWS[:, :1],
        {"loss": "absolute-error"},
        (" (absolute-error)", "Also measured: RMSE ", "Outputs: one number for"),
        "squared",
    ),
    "binary": (
        NAMED,
        {"metrics": ["f1"]},
        ("one logit", "above 0 it is \\[here", ", otherwise &lt;img", "F1 "),
        "each of 1 ",
    ),
    "multilabel": ((ROWS[:, :3] > 0).astype(int), {}, ("a logit for each of 3 labels.",), "classes"),
    "classification": (NAMED, {}, ("2 classes, in order: &lt;img src=x",), "<img"),
}


@pytest.mark.parametrize("task", CARDS)
def test_cards_in_the_words_of_the_task(task, tmp_path):
    y, options, words, never = CARDS[task]
    data = sp.Federation.from_clients(dict.fromkeys(EVIL, (ROWS, y)), name=EVIL[0], task=task)
    run = sp.train("fedavg", data, out=tmp_path / "run`_<b>", rounds=1, points=["global"], **options)
    loaded = sp.load(run.path)
    cards = [loaded.export(who, tmp_path / f"{who is None}.safetensors").card.read_text() for who in (EVIL[1], None)]
    for card in cards:
        assert all(word in card for word in words)
        assert "Not measured" not in card
        assert never not in card
        assert "<" not in card
        assert "](" not in card.replace("\\]", "")
    assert "client 1, \\[here\\](http://evil)\\|\\`\\_\\*" in cards[0]
    names = {"regression": "absolute-error", "classification": "cross-entropy"}
    assert f" ({names.get(task, 'bce')})" in cards[0]
    if task == "regression":
        assert f"Also measured: RMSE {run.metric('rmse')[1]:.4g}, MAE " in cards[0]
        assert f"Loss {run.errors()[1]:.4g} (absolute-error) on " in cards[0]
        assert f"Loss {run.errors('global').mean():.4g} (absolute-error): the mean over 2 clients" in cards[1]


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("model.bin", {}, "no format has the suffix '.bin'"),
        ("model.onnx", {"format": "tflite"}, "unknown format 'tflite'"),
        ("model.pt", {"format": "torch"}, "for a torch.export program"),
        ("model.onnx", {"sparse": True}, "sparse onnx"),
        ("there.onnx", {}, "exists already"),
    ],
)
def test_what_is_refused(loaded, tmp_path, name, options, words):
    (tmp_path / "there.onnx").write_bytes(b"mine")
    with pytest.raises(sp.SparsonaError, match=words):
        loaded.export(0, tmp_path / name, **options)
    assert (tmp_path / "there.onnx").read_bytes() == b"mine"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_missing_extra_is_named(loaded, tmp_path, monkeypatch):
    known = builtins.__import__
    monkeypatch.setattr(
        exports, "import_module", lambda name: known("a_package_that_is_not_there") if name == "onnxruntime" else None
    )
    with pytest.raises(sp.SparsonaError, match="onnxruntime is not installed") as caught:
        loaded.export(0, tmp_path / "model.onnx")
    assert "sparsona[onnx]" in caught.value.hint


@pytest.mark.parametrize(
    ("examples", "in_graph", "expected"),
    [
        (ExampleFacts((3, 8, 8), "uint8", 2), True, ("[3, 8, 8]", "uint8", "none")),
        (ExampleFacts((3, 8, 8), "uint8", 2), False, ("[3, 8, 8]", "float32", "divide by 255")),
        (ExampleFacts((4,), "float32", 2), False, ("[4]", "float32", "none")),
        (ExampleFacts((9,), "int32", 2), False, ("[9]", "int64", "none")),
        (
            ExampleFacts((3, 8, 8), "uint8", 2, crop=4, test_resize=True),
            True,
            ("[3, 4, 4]", "uint8", "resize to 4 x 4"),
        ),
        (ExampleFacts((3, 8, 8), "uint8", 2, crop=4), True, ("[3, 8, 8]", "uint8", "none")),
    ],
)
def test_what_inputs_must_look_like(examples, in_graph, expected):
    found = describe_inputs(examples, in_graph)
    assert (found["input_shape"], found["input_dtype"]) == expected[:2]
    assert found["input_preparation"].startswith(expected[2])


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_preparation_in_a_graph_is_the_federations_to_the_bit(dtype):
    x = torch.randint(0, 256, (5, 2, 7, 7)).to(getattr(torch, dtype))
    view = sp.View(mean=(0.3, 0.6), std=(0.2, 0.7), crop=4)
    split = Split(torch.arange(3), torch.arange(3, 4), torch.arange(4, 5))
    federation = sp.Federation(x, torch.zeros(5).long(), [split], 2, view=view)
    facts = ExampleFacts((2, 7, 7), dtype, 2, view.mean, view.std, view.crop)
    assert torch.equal(Prepared(nn.Identity(), facts)(x[4:]), federation.examples(0, "test").inputs)


def blobs(seed, count):
    rng = np.random.default_rng(seed)
    y = np.arange(count) % CLASSES
    return (rng.random((count, 6)) + y[:, None]).astype(np.float32), y


# Methods whose models are made of more than the checkpoint's masks: with data, without, or not at all.
WAYS = {
    "fedavg-ft": None,
    "fedalt:personal=output": None,
    "heterofl": None,
    "pfedgate": None,
    "dispfl": None,
    "fedfomo": "with that client's data: only the sizes of the validation data",
    "fedem": None,
    "fedem:newcomer_steps=2": "with that client's data: only the sizes of the train data",
}


SLOW = ("pfedgate", "dispfl", "fedem", "fedalt:personal=output")


@pytest.mark.parametrize("method", [pytest.param(one, marks=[pytest.mark.slow] * (one in SLOW)) for one in WAYS])
def test_methods(method, tmp_path):
    """Each method's models come without data, or it is said why not; with data they come."""
    words = WAYS[method]
    federation = sp.Federation.from_clients([(*blobs(k, 24), *blobs(50 + k, 9)) for k in range(3)])

    def small():
        return nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, CLASSES))

    options = (
        {"capacities": [0.5, 1.0]}
        if method == "heterofl"
        else {"novel": 1, "per_round": 2}
        if "newcomer" in method
        else {}
    )
    run = sp.train(method, federation, small, out=tmp_path / "run", rounds=1, **{"per_round": 3, **options})
    without = sp.load(run.path, model=small)
    if words is None:
        for client in range(3):
            found = without.personal_model(client)
            x = federation.examples(client, "test")
            right = (found(x.inputs).argmax(1) == x.targets).float().mean()
            assert float(right) == pytest.approx(run.accuracies()[client])
        assert without.export(1, tmp_path / "one.safetensors").largest_difference < 1e-5
        return
    client = run.novel[0] if run.novel else 0
    with pytest.raises(sp.SparsonaError, match=words) as caught:
        without.export(client, tmp_path / "one.safetensors")
    assert caught.value.hint
    if "data" in words:
        full = sp.load(run.path, federation, small)
        made = full.export(client, tmp_path / "one.safetensors")
        assert made.largest_difference < 1e-5
        assert ("at the point `novel" in made.card.read_text(encoding="utf-8")) == bool(run.novel)


def test_a_run_of_an_older_version_still_needs_its_data(run, federation, tmp_path):
    shutil.copytree(run.path, tmp_path / "old")
    about = json.loads((tmp_path / "old" / "about.json").read_text())
    del about["examples"]
    (tmp_path / "old" / "about.json").write_text(json.dumps(about))
    (tmp_path / "old" / "initial.safetensors").unlink()
    unseal(tmp_path / "old")
    with pytest.raises(sp.SparsonaError, match="on its own data"):
        sp.load(tmp_path / "old", model=net()).personal_model(0)
    with pytest.raises(sp.SparsonaError, match="does not start with the weights"):
        sp.load(tmp_path / "old", federation, net()).personal_model(0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", ["fedspa", "fedavg-ft", "heterofl", "pfedgate", "fedem", "ditto", "sub-fedavg", "apfl"]
)
def test_every_format_of_every_kind_of_method(method, tmp_path):
    run = sp.train(method, out=tmp_path / "run", rounds=2, clients=4, data_rate=0.3, validation_rate=0.2)
    for suffix in exports.FORMATS.values():
        made = run.export(1, tmp_path / f"one{suffix}")
        assert made.largest_difference < 1e-4


def test_a_card_says_who_lied_and_what_privacy_was_spent(federation, tmp_path):
    options = {"rounds": 1, "per_round": 4, "attack": "label-flip:0.25", "mean": "median"}
    run = sp.train("fedavg", federation, net(), out=tmp_path / "run", **options, privacy="local:noise=9")
    (liar,) = run._folder.facts.attackers
    cards = {
        client: run.export(client, tmp_path / f"{client}.safetensors").card.read_text(encoding="utf-8")
        for client in (liar, (liar + 1) % 4, None)
    }
    assert [("THIS CLIENT ATTACKED" in card) for card in cards.values()] == [True, False, False]
    for card in cards.values():
        assert "1 of 4 clients attack by label-flip" in card
        assert "by a robust mean, median" in card
        assert f"Epsilon is {show_epsilon(run.privacy().epsilon)} at delta" in card


def test_what_has_not_finished_says_so(federation, tmp_path, capsys):
    """Its models and figures are of the round that it reached, and look like a result."""

    def stop(record):
        if getattr(record, "completed", 0) == 2:
            raise KeyboardInterrupt

    path = tmp_path / "stopped"
    with pytest.raises(KeyboardInterrupt):
        sp.train("fedavg", federation, net(), rounds=9, out=path, progress=False, observers=[stop])
    stopped = sp.load(path, model=net())
    stopped.export(1, tmp_path / "model.safetensors")
    said = "warning: the run has not finished: its models are those after round 2 of 9\n"
    assert capsys.readouterr().err.endswith(said)
    table = CliRunner().invoke(cli, ["table", str(path), "--format", "latex"])
    assert table.stderr == "warning: FedAvg has not finished: round 2 of 9.\n"
    assert "\n% FedAvg has not finished: round 2 of 9.\n" in table.stdout
    sp.resume(path, federation, model=net()).export(1, tmp_path / "later.safetensors")
    assert "not finished" not in capsys.readouterr().err
