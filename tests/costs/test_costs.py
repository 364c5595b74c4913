"""What an experiment costs before it is run: against real runs, against its own parts, and against bad input."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from lenet5 import HALF, MASK, SIZE
from method_lines import anywhere
from PIL import Image
from torch import nn

import sparsona as sp
from sparsona.cli.app import cli
from sparsona.core.errors import SparsonaError
from sparsona.core.seeds import Seeds
from sparsona.costs import PAPERS, QUIRKS, CostOptions, cost, cost_options
from sparsona.costs.rules import COST_RULES
from sparsona.data import SOURCES
from sparsona.engine.graphs import KINDS, read_graph, senders
from sparsona.methods import METHODS
from sparsona.models import MODELS, outline
from sparsona.runs.options import OPTIONS

PAGE = Path(__file__).parents[2] / "docs" / "accounting.md"
EVERY = [*METHODS, *COST_RULES]
LENET = {"model": "lenet5"}


def told(*words: str) -> dict:
    done = CliRunner().invoke(cli, ["cost", *words, "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.output)


def test_the_example_of_the_issue():
    words = "fedspa --model vgg11 --classes 10 --rounds 1000 --per-round 10 --epochs 5 --samples 500 --density 0.5"
    found = told(*words.split(), "--counting", "paper")
    assert found["total"]["comm_gb"] == pytest.approx(369.24, abs=0.005)
    assert found["total"]["flops"] == pytest.approx(1.729e16, abs=5e12)
    assert found["total"]["flops"] == found["total"]["train_flops"] + found["total"]["search_flops"]
    assert {"method", "model", "counting", "total", "per_round", "per_client_round", "busiest_node"} <= set(found)
    assert {"memory", "inference_flops", "encoded", "paper"} <= set(found)
    assert {"up_mb", "down_mb", "flops"} <= set(found["per_client_round"])
    assert found["paper"]["total"]["comm_gb"] == found["total"]["comm_gb"] < found["encoded"]["total"]["comm_gb"]


@pytest.mark.parametrize(
    ("method", "options"),
    [
        *(("fedspa", {"density": 0.4}), ("fedspa-rsm", {}), ("fedavg-ft", {"tune_epochs": 2}), ("local", {})),
        ("fedem", {"num_models": 2, "tune_epochs": 2}),
    ],
)
def test_it_foretells_a_run(method, options, tmp_path):
    """The summary of a run of clients with equally many examples, to the byte and to the FLOP."""
    generator = torch.Generator().manual_seed(0)
    clients = [
        (
            torch.rand(24, 1, 8, 8, generator=generator),
            torch.arange(24) % 3,
            torch.rand(4, 1, 8, 8, generator=generator),
            torch.arange(4) % 3,
        )
        for _ in range(4)
    ]
    federation = sp.Federation.from_clients(clients)
    common = {"rounds": 3, "per_round": 2, "epochs": 2, "batch_size": 8, **options}
    samples = federation.examples(0, "train").inputs.shape[0]
    run = sp.train(method, federation, "digits-cnn", out=tmp_path / "run", executor="serial", **common).summary
    found = cost(method, model="digits-cnn", classes=3, clients=4, samples=samples, **common).to_json()
    for way, prefix in (("encoded", ""), ("paper", "paper_")):
        total = found[way]["total"]
        for key in ("up", "down", "total"):
            foretold = total["comm_gb" if key == "total" else f"{key}_gb"]
            assert round(foretold * 1e9) == run["bytes"][prefix + key], (way, key)
    assert found["total"]["train_flops"] == run["flops"]["train"]
    assert found["total"]["search_flops"] == run["flops"]["mask_search"]


def test_answers_without_torch():
    code = "import sys; from sparsona.cli import main; sys.argv = sys.argv[1:]\nmain()\nprint('torch' in sys.modules)"
    words = ["sparsona", "cost", "dispfl", "--data", "cifar100"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize("method", EVERY)
def test_every_method_has_a_cost_and_a_page(method):
    """Totals are sums of their parts, and the words of the terminal say the same."""
    own = anywhere(method)
    report = cost(method, **LENET, rounds=7, **own)
    found = report.to_json()
    turns = found["clients_per_round"]
    assert found["per_round"]["flops"] == turns * found["per_client_round"]["flops"]
    tuning = report.flops.tuning
    assert found["total"]["flops"] == 7 * found["per_round"]["flops"] + tuning
    assert bool(tuning) == ("tune_epochs" in {**METHODS, **COST_RULES}[method].engine)
    memory = report.memory
    assert memory.kept <= memory.at_hand
    assert memory.kept < memory.training
    for way in (found["encoded"], found["paper"]):
        client, all_ = way["per_client_round"], way["per_round"]
        assert all_["up_mb"] == pytest.approx(turns * client["up_mb"])
        if report.peers:
            assert client["up_mb"] == pytest.approx(client["down_mb"])
            assert all_["comm_mb"] == all_["up_mb"]  # what one sends another is sent
        else:
            assert all_["comm_mb"] == pytest.approx(turns * (client["up_mb"] + client["down_mb"]))
    assert found["encoded"]["total"]["comm_gb"] >= found["paper"]["total"]["comm_gb"]
    assert found["costs_only"] == (method in COST_RULES)
    written = f"{method}:{','.join(f'{key}={value}' for key, value in own.items())}" if own else method
    said = CliRunner().invoke(cli, ["cost", written, "--model", "lenet5", "--rounds", "7"], catch_exceptions=False)
    assert said.exit_code == 0
    assert ("costs only" in said.output) == (method in COST_RULES)
    assert bool(found["notes"]) == (not found["exact"])
    assert all(note in said.output for note in found["notes"])
    if method in METHODS:
        assert ("upper bounds" in said.output) == (not found["exact"])
    assert f"{found['total']['flops']:.4g}" in said.output


def test_whose_models_are_tuned_is_for_peers():
    with pytest.raises(SparsonaError, match="'tune_from' for a method with a server"):
        cost("fedavg", **LENET, tune_epochs=1, tune_from="all")
    cost("dpsgd", **LENET, tune_epochs=1, tune_from="all")


def test_totals_of_peers_count_a_round_without_messages():
    assert cost("fedavg", **LENET).exact
    peers = cost("dpsgd", **LENET)
    assert not peers.exact
    assert [note for note in peers.notes if "in the first round of a run no peer has a message yet" in note]


def test_no_method_has_both_a_file_and_a_rule():
    assert not set(METHODS) & set(COST_RULES)


@given(
    st.sampled_from(["fedspa", "dispfl"]),
    st.floats(0.05, 1.0),
    st.floats(0.05, 1.0),
    st.integers(1, 300),
    st.integers(1, 300),
)
@settings(max_examples=40, deadline=None)
def test_less_density_costs_less(method, first, second, samples, batch):
    low, high = (
        cost(method, **LENET, density=d, samples=samples, batch_size=batch).to_json() for d in sorted((first, second))
    )
    for found in (low, high):
        dense = MODELS["lenet5"].num_parameters
        assert found["paper"]["per_client_round"]["up_mb"] * 1e6 <= 4 * dense * found["options"]["density"] * (
            10 if method == "dispfl" else 1
        ) * (1 + 1e-9)
    for section, key in (("total", "comm_gb"), ("total", "train_flops"), ("memory", "training_mb")):
        assert low[section][key] <= high[section][key]
    assert low["inference_flops"] <= high["inference_flops"]
    assert low["total"]["search_flops"] == high["total"]["search_flops"]


PADDED_MASK = MASK + 1
# 24x24 and 8x8 positions for the convolutions, each bias once per position.
FORWARD = (2 * 500 + 20) * 576 + (2 * 25_000 + 50) * 64 + (2 * 400_000 + 500) + (2 * 13_000 + 26)
# Of each tensor a message says 3 bytes, its name ("0.weight" or "0.bias") and 4 bytes a dimension.
TENSORS = 2 * (3 + 8 + 16) + 4 * (3 + 6 + 4) + 2 * (3 + 8 + 8)
DIGEST = 8


def message(*parts: tuple[str, int]) -> int:
    """24 bytes, then 16, a name, the tensors and perhaps a digest per part; payloads; checksum."""
    head = 24 + sum(16 + len(name) + TENSORS for name, _ in parts)
    return -(-head // 4) * 4 + sum(payload for _, payload in parts) + 4


def aligned(*parts: tuple[str, int, int]) -> int:
    """The same for parts with so many bytes of digest in the head."""
    return message(*((name + "." * proof, payload) for name, payload, proof in parts))


DENSE = message(("model", SIZE))
BY_HAND = {  # options; bytes of a message up and down; FLOPs of search
    "pfedhn": ({}, DENSE, DENSE, 0),
    "pfedgate-table": ({}, aligned(("update", SIZE + PADDED_MASK, DIGEST)), DENSE, 0),
}


def test_every_rule_is_done_by_hand():
    assert set(BY_HAND) == set(COST_RULES)
    assert outline("lenet5", (1, 28, 28), 26).layout.forward_flops() == FORWARD


@pytest.mark.parametrize(
    ("clients", "graph", "links"),
    [
        *((6, None, 5), (12, None, 10), (6, "random:3", 3), (6, "random:3:bounded", 3), (2, "ring", 1), (6, "ring", 2)),
        *((6, "full", 5), (12, "grid", 4), (6, "grid", 3), (9, "exponential", 4), (9, "exponential:one", 1)),
    ],
)
def test_peers_have_as_many_neighbours_as_in_a_run(clients, graph, links):
    one = cost("dispfl", **LENET).encoded.up / 10
    report = cost("dispfl", **LENET, clients=clients, graph=graph)
    assert report.neighbours == links
    assert report.encoded.up == links * one
    members, round_ = range(clients), Seeds(3).at(0)
    heard = [len(senders(read_graph(graph, clients), members, client, round_)) for client in members]
    assert set(heard) == {links}


def test_every_graph_has_a_cost(tmp_path):
    """Of one's own graph, each peer is charged what it sends and receives."""
    (tmp_path / "star.csv").write_text("0,1\n0,2\n0,3\n")
    own = cost("dpsgd", **LENET, clients=4, graph=f"file:{tmp_path / 'star.csv'}")
    one = cost("dpsgd", **LENET, clients=4, graph="ring").paper.up / 2
    assert own.neighbours == 6 / 4
    assert (own.paper.up, own.paper.round) == (6 * one / 4, 6 * one)
    assert own.paper.busiest == own.paper.busiest_in == own.paper.busiest_out == 3 * one
    assert own.encoded.busiest == 2 * own.encoded.busiest_in
    assert set(KINDS) == {"random", "ring", "full", "grid", "exponential", "file"}  # the first five: see above


@pytest.mark.parametrize("name", BY_HAND)
def test_a_rule_by_hand(name):
    """100 clients: ten of them a round through the server, or all of them with ten neighbours each."""
    options, up, down, search = BY_HAND[name]
    report = cost(name, **LENET, rounds=3, **options)
    assert report.flops.search == search
    found = report.encoded
    tuning = 100 * DENSE if report.flops.tuning and down else 0
    if down is None:
        assert (found.up, found.down, found.round, found.busiest) == (10 * up, 10 * up, 1000 * up, 20 * up)
    else:
        assert (found.up, found.down, found.round) == (up, down, 10 * (up + down))
        assert found.busiest == 10 * (up + down)
    assert found.tuning == tuning  # nobody says how the mean of all models would reach a peer
    assert report.to_json()["encoded"]["total"]["comm_gb"] == (3 * found.round + tuning) / 1e9


@pytest.mark.parametrize(
    ("options", "parts", "search"),
    [
        ({}, (("model", HALF + PADDED_MASK, DIGEST), ("mask", PADDED_MASK, 0)), 128 * 3 * FORWARD),
        ({"divide_by": "used", "regrowth": "random"}, (("model", HALF + PADDED_MASK, DIGEST),), 0),
    ],
)
def test_dispfl_by_hand(options, parts, search):
    """The model inside the mask it was trained in, which travels along; the next mask where one divides by it."""
    report = cost("dispfl", **LENET, rounds=3, density=0.5, allocation="uniform", **options)
    found, one = report.encoded, aligned(*parts)
    assert report.flops.search == search
    assert (found.up, found.down, found.round, found.busiest) == (10 * one, 10 * one, 1000 * one, 20 * one)
    assert (found.busiest_in, found.busiest_out) == (10 * one, 10 * one)
    assert report.paper.busiest == 10 * HALF
    assert report.to_json()["busiest_node"]["in_mb"] == 10 * one / 1e6


GATE = 4 * 21_955  # a twentieth of the parameters, rounded up
MEMORIES = [  # of what has costs only: options; kept, at hand, in training, in mask search
    ("pfedhn", {}, 0, SIZE, 2 * SIZE, 0),
    ("pfedgate-table", {}, GATE, GATE + SIZE, 2 * GATE + 3 * SIZE + HALF, 0),
]


@pytest.mark.parametrize(("method", "options", "kept", "at_hand", "training", "search"), MEMORIES)
def test_memory_by_hand(method, options, kept, at_hand, training, search):
    found = cost(method, **LENET, **options).memory
    assert vars(found) == {"kept": kept, "at_hand": at_hand, "training": training, "search": search}


def test_memory_of_every_rule_is_done_by_hand():
    assert {row[0] for row in MEMORIES} == {name for name in COST_RULES if not name.endswith("-ft")}


def test_links_of_peers():
    by = {key: cost("dpsgd", **LENET, clients=20, graph=key) for key in ("random:10", "ring", "full")}
    one = by["ring"].paper.busiest / 2
    assert {key: report.paper.busiest / one for key, report in by.items()} == {"random:10": 10, "ring": 2, "full": 19}
    assert all(report.encoded.busiest == 2 * report.encoded.up for report in by.values())  # both directions
    assert by["ring"].per_round == 20
    assert cost("dpsgd", **LENET, graph="random:3").paper.busiest == 3 * one
    told_of = {key: report.to_json()["busiest_node"]["who"] for key, report in by.items()}
    assert told_of == {"random:10": "any peer, on average", "ring": "any peer", "full": "any peer"}


def test_the_busiest_of_unequal_peers():
    """All connected, three peers: the largest sends its message twice and receives the two smaller ones once each."""
    capacities = (0.2, 0.5, 1.0)
    options = {**LENET, "clients": 3, "graph": "full", "density": 1.0}
    sizes = [round(cost("dispfl", **options, capacities=c).encoded.up) // 2 for c in capacities]
    found = cost("dispfl", **options, capacities=capacities)
    assert found.encoded.busiest == 2 * sizes[2] + sizes[0] + sizes[1]
    assert found.paper.busiest == 2 * SIZE


def test_capacities():
    """What clients of different capacity cost is a mean; what the busiest and the largest of them cost is not."""
    alone = {c: cost("fedspa", **LENET, density=c) for c in (0.2, 1.0)}
    mixed = cost("fedspa", **LENET, density=1.0, capacities=(0.2, 1.0))
    assert mixed.paper.up == (alone[0.2].paper.up + alone[1.0].paper.up) / 2
    assert mixed.flops.train == (alone[0.2].flops.train + alone[1.0].flops.train) / 2
    assert mixed.memory == alone[1.0].memory
    assert mixed.inference_flops == alone[1.0].inference_flops
    uneven = cost("fedspa", **LENET, density=1.0, capacities=(0.2, 1.0), clients=11)  # six of the first kind
    assert uneven.paper.up == (6 * alone[0.2].paper.up + 5 * alone[1.0].paper.up) / 11


def test_many_clients_take_no_longer():
    found = cost("fedspa", **LENET, clients=10**7, capacities=(0.5, 1.0), tune_epochs=1)
    assert found.paper.tuning == 10**7 * found.paper.down


def test_capacities_that_are_not_kept_are_told():
    for name, kept in (("fedavg", False), ("dpsgd", False), ("local", False), ("fedspa", True), ("dispfl", True)):
        notes = cost(name, **LENET, capacities=(0.3, 1.0)).notes
        assert any("capacities are not kept" in note for note in notes) != kept, name


def test_quirks_change_what_they_name_and_nothing_else():
    plain, phantom = (cost("fedspa-rsm", model="vgg11", batch_size=32, quirks=q) for q in ((), "phantom-screening"))
    dense = outline("vgg11", (3, 32, 32), 10).layout
    assert (plain.flops.search, phantom.flops.search) == (0, 128 * 3 * dense.forward_flops())
    assert phantom.paper == plain.paper
    zeros = cost("fedavg", model="vgg11", quirks=["zero-biases"])
    assert cost("fedavg", model="vgg11").paper.up - zeros.paper.up == 2 * 2752  # 2,752 GroupNorms' biases, half of each
    assert zeros.encoded == cost("fedavg", model="vgg11").encoded
    assert cost("fedavg", **LENET, quirks=["zero-biases"]).paper == cost("fedavg", **LENET).paper  # it has no norms
    half, less = (cost("dpsgd", model="vgg11", density=0.5, quirks=q).paper.up for q in ((), "zero-biases"))
    assert half - less == 10 * 2752  # a uniform mask has half of them, and half of each goes, to ten neighbours
    assert cost("fedavg", **LENET, quirks=["emnist-400-rounds"]).rounds == 400
    assert cost("fedavg", model="vgg11", quirks=["phantom-screening"]).flops.search == 0  # no mask, no screening
    small = cost("fedspa", model="vgg11", samples=20)
    assert small.flops.search == 20 * 3 * dense.forward_flops()  # the batch's real size


def test_the_data_gives_what_is_not_said():
    found = told("fedspa", "--data", "emnist-letters")
    assert (found["model"], found["num_parameters"], found["samples"]) == ("lenet5", 439_096, 1248)
    found = told("fedavg", "--data", "cifar10", "--model", "resnet18", "--clients", "50")
    assert (found["num_parameters"], found["samples"]) == (11_173_962, 1000)
    found = told("fedavg", "--data", "cifar10", "--classes", "100", "--samples", "3", "--model", "resnet18")
    assert (found["num_parameters"], found["samples"]) == (11_220_132, 3)
    assert (
        told("fedavg", "--model", "resnet18", "--input", "3x64x64", "--classes", "200")["num_parameters"] == 11_271_432
    )
    assert all((card.num_train or 0) <= card.num_examples for card in SOURCES.values())
    assert (
        told("fedspa:density=0.25,epochs=2", "--model", "lenet5", "--set", "search=rsm")["options"]["density"] == 0.25
    )


def test_what_is_charged_stands_below_several_methods():
    words = "examples a client (50,000 published training examples / 50 clients, none held out"
    said = CliRunner().invoke(cli, ["cost", "fedavg", "fedspa", "--data", "cifar10", "--clients", "50"]).output
    assert " ".join(said.split()).count(f"1,000 rounds, 10 of 50 clients in each, 1,000 {words}") == 1
    said = CliRunner().invoke(cli, ["cost", "fedavg", "dispfl", "--data", "cifar10", "--clients", "50"]).output
    assert f"fedavg: 1,000 rounds, 10 of 50 clients in each, 1,000 {words}" in " ".join(said.split())
    assert f"dispfl: 1,000 rounds, 50 of 50 clients in each, 1,000 {words}" in " ".join(said.split())


def test_where_the_number_of_examples_comes_from():
    words = "50,000 published training examples / 50 clients, none held out for validation or testing"
    assert cost("fedavg", data="cifar10", clients=50).samples_from == words
    said = CliRunner().invoke(cli, ["cost", "fedavg", "--data", "cifar10", "--clients", "50"]).output
    assert f"1,000 examples a client ({words})" in " ".join(said.split())
    assert cost("fedavg", data="digits").samples_from.startswith("1,797 published examples / 100")
    assert cost("fedavg", data="cifar10", samples=7).samples_from == cost("fedavg", **LENET).samples_from == ""
    natural = {name for name, card in SOURCES.items() if card.is_natural}
    assert natural == {"femnist", "shakespeare", "shakespeare-words", "stackoverflow", "gldv2"}
    for name in natural:
        with pytest.raises(SparsonaError, match="its clients are people"):
            cost("fedavg", data=name)
        assert cost("fedavg", data=name, samples=50).samples == 50


@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_model(name):
    found = cost("fedspa", model=name, density=0.5)
    assert found.num_parameters == MODELS[name].num_parameters
    assert (
        0
        < found.inference_flops
        < outline(name, MODELS[name].input_shape, MODELS[name].num_classes).layout.forward_flops()
    )


def test_a_module_of_ones_own():
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, 2))
    found = cost("fedavg", model=net, input_shape=(3, 2, 2), classes=2)
    assert (found.num_parameters, found.model) == (77, "Sequential")
    assert found.inference_flops == 2 * 70 + 7
    with pytest.raises(SparsonaError, match="without its input"):
        cost("fedavg", model=net)
    with pytest.raises(SparsonaError, match="a model of type int"):
        cost("fedavg", model=3)
    with pytest.raises(SparsonaError, match="without a size yet"):
        cost("fedavg", model=nn.LazyLinear(2), input_shape=(4,), classes=2)


def test_a_text_model_of_ones_own():
    net = nn.Sequential(nn.Embedding(90, 8), nn.Linear(8, 69))
    assert cost("fedavg", model=net, data="shakespeare", samples=9).inference_flops == 20 * (2 * 8 * 69 + 69)
    assert cost("fedavg", model=net, input_shape=5, classes=69, tokens=True).num_parameters == 720 + 621
    with pytest.raises(SparsonaError, match="does not take one example"):
        cost("fedavg", model=net, input_shape=5, classes=69)


def test_a_module_whose_flops_are_not_known():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.memory, self.last = nn.GRU(3, 4, batch_first=True), nn.Linear(4, 2)

        def forward(self, x):
            return self.last(self.memory(x)[0][:, -1])

    found = cost("fedavg", model=Recurrent(), input_shape=(5, 3), classes=2)
    assert not found.exact
    assert any("memory.weight_ih_l0, memory.weight_hh_l0" in note for note in found.notes)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("fedspaa --model lenet5", "did you mean 'fedspa'"),
        ("nothing --model lenet5", "costs only: pfedhn"),
        ("fedavg --model lenet5 --density 0.5", "unknown option of fedavg 'density'"),
        ("fedspa --model lenet5 --density 0", "density = 0.0"),
        ("fedspa --model lenet5 --density 1.1", "density = 1.1"),
        ("fedspa --model lenet", "did you mean 'lenet5'"),
        ("fedspa --data cifar", "did you mean 'cifar10'"),
        ("fedspa", "--model or --data"),
        ("fedspa --model lenet5 --quirk zero-bias", "did you mean 'zero-biases'"),
        ("fedspa --model lenet5 --rounds -1 --samples -1", "2 mistakes"),
        ("fedspa --model lenet5 --clients 5", "lower --per-round"),
        ("fedspa --model lenet5 --input 28y28", "a shape like 3x32x32"),
        ("fedspa --model lenet5 --input 28", "images"),
        ("fedspa --model lenet5 --set ronuds=3", "did you mean 'rounds'"),
        ("fedspa --model lenet5 --graph ring", "a method whose clients send to each other"),
        ("dpsgd --model lenet5 --per-round 10", "each trains in every round"),
        ("dpsgd --model lenet5 --clients 8 --graph random:8", "at most 7"),
        ("dpsgd --model lenet5 --graph rings", "did you mean 'ring'?"),
        ("dpsgd --model lenet5 --set topology=ring", "unknown option of dpsgd 'topology'"),
        ("fedspa --model lenet5 --preset papers", "did you mean 'paper'?"),
        ("pfedhn --model lenet5 --preset paper", "pfedhn has no presets"),
        ("fedspa --model lenet5 --lr-decay 0.9 --lr-schedule constant", "lr_decay together with the schedule"),
        ("fedspa --model lenet5 --set method=local", "'method' is no option of a run"),
        ("fedavg --model lenet5 --rounds 1000 --quirk emnist-400-rounds", "leave --rounds out"),
        ("fedavg --model lenet5 --set capacities=[]", "capacities"),
        ("dpsgd --model lenet5 --density 1e-7", "keeps no parameter at all"),
        ("dispfl --model lenet5 --density 1e-7", "keeps no parameter at all"),
        ("subsampling --model lenet5 --density 1e-7", "keeps no parameter at all"),
        ("fedspa --model lenet5 --set capacities=1e-7", "keeps no parameter at all"),
        ("fedavg --data femnist", "--samples 200"),
        ("fedspa --model lenet5 --set stateless=true", "clients are charged as if they remembered"),
    ],
)
def test_bad_input_is_told(words, expected):
    done = CliRunner().invoke(cli, ["cost", *words.split()])
    assert isinstance(done.exception, SparsonaError)
    assert expected in str(done.exception)


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_of_a_run_is_taken_or_refused_with_a_reason(name):
    usual = {
        "data": "mnist",
        "data_dir": "x",
        "warm_start": "x",
        "model": "lenet5",
        "graph": "ring",
        "preset": "paper",
        "novel": 1,
        "availability": "markov:1:0",
        "divergence_factor": 2.0,
    }
    found = {int: 2, float: 0.5, bool: True, str: OPTIONS[name].default}[OPTIONS[name].type]
    value = usual.get(name, 1.0 if name == "capacities" else found)
    values = {"model": "lenet5", "samples": 9, **({} if value is None else {name: value})}
    if isinstance(OPTIONS[name].cost, str):
        with pytest.raises(SparsonaError, match=f"'{name}' in a cost") as caught:
            cost("dispfl", **values)
        assert caught.value.hint == OPTIONS[name].cost
        return
    method = {"per_round": "fedspa", "subnetwork": "dpsgd"}.get(name, "dispfl")
    plain, changed = (cost(method, **each).to_json() for each in ({"model": "lenet5", "samples": 9}, values))
    assert OPTIONS[name].cost or plain == changed


def test_a_cost_has_the_defaults_of_a_run_but_for_those_of_the_papers():
    assert not set(CostOptions.model_fields) & set(OPTIONS)
    for name, one in cost_options().items():
        if name in OPTIONS and name != "data":
            assert one.default == PAPERS.get(name, OPTIONS[name].default)


def test_presets_are_those_of_a_run():
    assert cost("dispfl", **LENET, preset="authors").options["regrowth"] == "random"
    assert cost("dispfl", **LENET, preset="authors", regrowth="gradient").options["regrowth"] == "gradient"
    assert cost("fedalt", **LENET, preset="paper").options["epochs"] == 1
    assert told("dispfl", "--model", "lenet5", "--preset", "authors")["options"]["divide_by"] == "used"


def test_a_config_file_of_a_run(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text('rounds = 7\nexecutor = "serial"\nseed = 3\n[options]\ndensity = 0.25\n')
    found = told("fedspa", "--model", "lenet5", "--config", str(path), "--device", "cpu")
    assert (found["rounds"], found["options"]["density"]) == (7, 0.25)


def table(heading: str) -> list[list[str]]:
    """The rows of the page's table under a heading."""
    part = PAGE.read_text().partition(f"{heading}\n")[2].partition("\n##")[0]
    lines = [line for line in part.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_page_shows_both_numbers_of_each_quirk():
    """docs/accounting.md: every row's commands are run, with its quirks and without them."""
    rows = table("### Quirks")
    assert {quirk for row in rows for quirk in QUIRKS if quirk in row[-1]} == set(QUIRKS)
    for _, _, without, with_, key, command in rows:
        words = shlex.split(re.fullmatch(r"`sparsona cost (.+)`", command).group(1))
        bare = [w for i, w in enumerate(words) if w != "--quirk" and words[max(i - 1, 0)] != "--quirk"]
        assert len(bare) < len(words)
        section, name = key.strip("`").split(".")
        for shown, asked in ((without, bare), (with_, words)):
            assert float(shown) == pytest.approx(told(*asked, "--counting", "paper")[section][name], rel=5e-5), asked


def test_methods_side_by_side(say):
    words = ("cost", "fedavg", "fedspa:density=0.2", "fedspa", "--model", "lenet5", "--density", "0.4")
    found = json.loads(say(*words, "--json").out)
    assert [row["method"] for row in found] == ["fedavg", "fedspa", "fedspa"]
    assert [row["options"].get("density") for row in found] == [None, 0.2, 0.4]
    alone = json.loads(say("cost", "fedavg", "--model", "lenet5", "--json").out)
    assert found[0] == alone
    shown = say(*words).out
    assert "fedspa:density=0.2" in shown
    assert "35.13 GB" in shown  # FedAvg: 439,096 parameters, 4 bytes, two ways, 10,000 turns
    assert "'densty'" in say("cost", "fedavg", "fedspa", "--model", "lenet5", "--set", "densty=0.4").err


def test_what_has_costs_only_is_known_by_name(say):
    from sparsona.costs.rules import COST_RULES
    from sparsona.methods import COST_ONLY

    assert set(COST_ONLY) == set(COST_RULES)
    assert "sparsona cost pfedhn" in say("run", "pfedhn").err
    assert "pfedhn" in say("methods").out
    told_options = say("methods", "pfedhn").out
    assert "graph = none" in told_options
    assert "rounds = 1000" in told_options  # as the papers have it
    assert "capacities = [1.0]" in told_options


def test_costs_of_my_own_data(say, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    x, y = np.zeros((60, 9, 16), np.float32), np.arange(60) % 3
    np.savez("mine.npz", x=x, y=y)
    np.savez("people.npz", x=x, y=y, owners=np.repeat(["a", "b", "c"], 20))
    found = cost("fedavg", data="mine.npz", clients=10, per_round=5)
    assert (found.model, found.input_shape, found.classes, found.samples) == ("signal-cnn", (9, 16), 3, 3)
    assert found.samples_from == "60 examples / 10 clients, held out: 10% for validation and 25% for testing"
    by_person = cost("fedavg", data="arrays:people.npz")
    assert (by_person.experiment.clients, by_person.per_round, by_person.samples) == (3, 1, 13)
    assert cost("fedavg", data="people.npz", clients=6, per_round=2).samples == 7
    options = {"data": "people.npz", "rounds": 4, "per_round": 3, "seed": 0}  # a run's defaults: its own bytes
    assert cost("fedavg", **options).to_json()["encoded"]["total"]["comm_gb"] * 1e9 == pytest.approx(
        sp.train("fedavg", **options, out="run", progress=False).summary["bytes"]["total"]
    )
    of_run, of_papers = cost("fedavg", data="people.npz"), cost("fedavg", data="digits")
    assert (of_run.rounds, of_run.experiment.run.batch_size) == (30, 16)
    assert (of_papers.rounds, of_papers.experiment.run.batch_size) == (1000, 128)
    assert "signal-cnn of" in say("cost", "fedavg", "--data", "mine.npz", "--clients", "10").out
    assert "does not exist" in say("cost", "fedavg", "--data", "arrays:x.npz").err
    Image.fromarray(np.zeros((8, 8), np.uint8)).save("a.png")
    for name in ("cat", "dog"):
        (tmp_path / "pets" / name).mkdir(parents=True)
        (tmp_path / "pets" / name / "a.png").write_bytes((tmp_path / "a.png").read_bytes())
    pictures = cost("local", data="pets", clients=2, per_round=1)
    assert (pictures.input_shape, pictures.classes, pictures.model) == ((1, 8, 8), 2, "digits-cnn")
    np.savez("two.npz", x_age=np.zeros((8, 1), np.float32), x_dose=np.zeros((8, 2), np.float32), y=np.arange(8) % 2)
    with pytest.raises(SparsonaError, match="no network fits examples"):
        cost("fedavg", data="two.npz", clients=2, per_round=1)
