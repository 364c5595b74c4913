"""Examples of several inputs: a tuple or a dict, for model(*inputs) or model(**inputs)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from small_runs import played
from torch import nn

import sparsona as sp
from sparsona.core.errors import SparsonaError
from sparsona.data.read import read
from sparsona.executors.graphed import Graphed
from sparsona.executors.serial import Serial
from sparsona.executors.stacked import Stacked
from sparsona.executors.workers import Workers
from sparsona.experiment import export as exports
from sparsona.experiment.build import make_config, make_context
from sparsona.report.model_card import _feed

NUM = 48
Y = np.arange(NUM) % 3
IMAGES = np.random.default_rng(0).random((NUM, 1, 4, 4)).astype(np.float64)
WORDS = np.stack([Y, Y + 3], 1).astype(np.int32)
SEEN = Y == 0
INPUTS = {"image": IMAGES, "words": WORDS, "seen": SEEN}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.images, self.words = nn.Linear(16, 4), nn.Embedding(6, 4)
        self.last = nn.Linear(9, 3)

    def forward(self, image, words, seen):
        assert (image.dtype, words.dtype, seen.dtype) == (torch.float32, torch.int64, torch.bool)
        assert image.shape[1:] == (1, 4, 4)
        parts = self.images(image.flatten(1)), self.words(words).mean(1), seen.float().unsqueeze(1)
        return self.last(torch.cat(parts, 1))


def federation(inputs) -> sp.Federation:
    return sp.federate(inputs, Y, clients=3, partition="iid")


@pytest.fixture(scope="module")
def by_name() -> sp.Federation:
    return federation(INPUTS)


@pytest.fixture(scope="module")
def in_order() -> sp.Federation:
    return federation(tuple(INPUTS.values()))


def context_of(data, method="fedspa", **options):
    torch.manual_seed(0)
    net = Net()
    config = make_config(method, {"rounds": 2, "device": "cpu", "batch_size": 8, **options}, data, net)
    return make_context(config, data, net)


def test_examples_are_what_the_model_is_passed(by_name, in_order):
    rows = by_name.splits[1].test
    found, same = by_name.examples(1, "test").inputs, in_order.examples(1, "test").inputs
    assert list(found) == list(INPUTS)
    assert isinstance(same, tuple)
    for got, twin, given in zip(found.values(), same, INPUTS.values(), strict=True):
        assert torch.equal(got, twin)
        assert np.array_equal(got.numpy(), given[rows].astype(got.numpy().dtype))
    assert by_name.packed_examples(1, "test").inputs.shape == (len(rows), 19)


def test_a_saved_federation_is_the_same(by_name, in_order, tmp_path):
    by_name.save(tmp_path)
    opened = sp.Federation.open(tmp_path)
    assert (opened.packing, opened.digest()) == (by_name.packing, by_name.digest())
    assert by_name.digest() != in_order.digest()
    manifest = (tmp_path / "federation.json").read_text()
    (tmp_path / "federation.json").write_text(manifest.replace('"image", "shape": [1, 4, 4]', '"image", "shape": [4]'))
    with pytest.raises(SparsonaError, match="rows of shape"):
        sp.Federation.open(tmp_path)


def test_executors_agree_and_a_dict_is_a_tuple(by_name, in_order):
    expected = played(context_of(by_name), Serial(context_of(by_name)), 2)
    other = context_of(in_order)
    assert played(other, Serial(other), 2) == expected
    for make in (Stacked, Graphed):
        context = context_of(by_name, "fedavg")
        assert context.task.layout.forward_flops() == 2 * 16 * 4 + 4 + 2 * 9 * 3 + 3
        assert played(context, make(context), 1)


@pytest.mark.slow  # a process is started
def test_worker_processes_have_the_same_bits(by_name):
    context = context_of(by_name)
    workers = Workers(context, 1)
    try:
        assert played(context, workers, 2) == played(context, Serial(context), 2)
    finally:
        workers.close()


def test_a_card_says_how_an_onnx_session_is_passed_them(by_name, in_order):
    assert _feed(by_name.packing) == "inputs"
    assert _feed(in_order.packing) == '{"input_0": inputs[0], "input_1": inputs[1], "input_2": inputs[2]}'


@pytest.mark.parametrize("inputs", [INPUTS, tuple(INPUTS.values())], ids=["dict", "tuple"])
def test_a_personal_model_takes_the_inputs(inputs, tmp_path, monkeypatch):
    data = federation(inputs)
    run = sp.train("pfedgate", data, Net(), rounds=1, executor="serial", out=tmp_path / "run")
    model, test = run.personal_model(0), data.examples(0, "test")
    outputs = model(**test.inputs) if isinstance(inputs, dict) else model(*test.inputs)
    right = int((outputs.argmax(1) == test.targets).sum())
    assert right == round(len(test.targets) * run.accuracies()[0])
    monkeypatch.setitem(exports._MAKERS, "torch", exports._MAKERS["safetensors"])  # for its card, and quicker
    card = run.export(0, tmp_path / "one.pt2").card.read_text(encoding="utf-8")
    first, how = ("image", "**inputs") if isinstance(inputs, dict) else ("0", "*inputs")
    assert f"Inputs: {first} (1, 4, 4), " in card
    assert "in this order they are float32, int64, bool. Preparation: none: pass them as \\*" in card
    assert f"outputs = net({how})  # {first} (1, 4, 4), " in card
    assert "{" not in card


def test_clients_with_data_of_their_own():
    def rows(start, end, names=("image", "words", "seen")):
        return {name: INPUTS[name][start:end] for name in names}, Y[start:end]

    data = sp.Federation.from_clients(
        [(*rows(0, 16), *rows(16, 22)), (*rows(22, 40, ("seen", "words", "image")), *rows(40, 48))]
    )
    assert [field.name for field in data.packing.fields] == list(INPUTS)
    assert data.examples(1, "test").inputs["words"].tolist() == WORDS[40:48].tolist()
    with pytest.raises(SparsonaError, match=r"(?s)client 1, train: inputs image .* as in the examples before"):
        sp.Federation.from_clients([(*rows(0, 16), *rows(16, 22)), (*rows(22, 40, ("image", "seen")), *rows(40, 48))])
    with pytest.raises(SparsonaError, match=r"(?s)client 0, test: one array of inputs.*as of client 0"):
        sp.Federation.from_clients([(*rows(0, 16), IMAGES[:4], Y[:4])])


@pytest.mark.parametrize("parts", [("",), ("_train", "_test")])
def test_arrays_of_a_file(tmp_path, parts):
    rows = {"": slice(None), "_train": slice(0, 30), "_test": slice(30, None)}
    arrays = {f"x_{name}{part}": value[rows[part]] for part in parts for name, value in INPUTS.items()}
    np.savez(tmp_path / "mine.npz", **arrays, **{f"y{part}": Y[rows[part]] for part in parts})
    pool = read(f"arrays:{tmp_path / 'mine.npz'}", [])
    assert [field.name for field in pool.packing.fields] == list(INPUTS)
    assert pool.num_train == (30 if len(parts) == 2 else None)
    assert np.array_equal(pool.packing.unpack(torch.from_numpy(pool.x))["words"], WORDS)


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ({"image": IMAGES, "words": WORDS[:5]}, "input 'words': 5 examples"),
        ({"ids": np.arange(NUM) + 2**24}, r"whole numbers from 16777216.*-16,777,216 to 16,777,216"),
        ({0: IMAGES}, "an input called 0"),
        ({}, "a dict without inputs"),
        ({"names": np.array(["a"] * NUM)}, "input 'names': x is an array of <U1"),
        ((IMAGES, np.full(NUM, np.nan)), "input 1: x holds NaN"),
        ({"none": np.zeros((NUM, 0))}, "at least one number in an example"),
    ],
)
def test_is_refused(inputs, reason):
    with pytest.raises(SparsonaError, match=f"(?s){reason}"):
        federation(inputs)


def test_what_takes_one_array_says_so(by_name):
    with pytest.raises(SparsonaError, match="tokens of several inputs"):
        sp.federate(INPUTS, Y, clients=3, partition="iid", tokens=True)
    inputs = r"image \(1, 4, 4\), words \(2,\), seen \(\)"
    with pytest.raises(SparsonaError, match=rf"(?s){inputs}.*forward\(\*\*inputs\)"):
        sp.train("fedavg", by_name, nn.Linear(19, 3), rounds=1)
