"""What an experiment costs before it is run: against real runs, against its own parts, and against bad input."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import sparsona as sp
from sparsona.cli import cli
from sparsona.core.errors import SparsonaError
from sparsona.costs import QUIRKS, cost
from sparsona.data import SOURCES
from sparsona.methods import METHODS
from sparsona.methods.cost_rules import COST_RULES
from sparsona.models import MODELS, outline

PAGE = Path(__file__).parents[1] / "docs" / "accounting.md"
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
    [("fedspa", {"density": 0.4}), ("fedspa-rsm", {}), ("fedavg-ft", {"tune_epochs": 2}), ("local", {})],
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
    report = cost(method, **LENET, rounds=7)
    found = report.to_json()
    turns = found["clients_per_round"]
    assert found["per_round"]["flops"] == turns * found["per_client_round"]["flops"]
    tuning = report.flops.tuning
    assert found["total"]["flops"] == 7 * found["per_round"]["flops"] + tuning
    assert bool(tuning) == method.endswith("-ft")
    memory = report.memory
    assert memory.kept <= memory.at_hand < memory.training
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
    said = CliRunner().invoke(cli, ["cost", method, "--model", "lenet5", "--rounds", "7"], catch_exceptions=False)
    assert said.exit_code == 0
    assert ("costs only" in said.output) == (method in COST_RULES)
    assert ("upper bounds" in said.output) == (not found["exact"])
    assert f"{found['total']['flops']:.4g}" in said.output


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


def test_memory_of_a_client():
    """By hand: LeNet5 has 439,096 parameters, and half of them rounded down per tensor is what FedSpa keeps."""
    size, mask = 4 * 439_096, 439_096 // 8
    half = round(cost("fedspa", **LENET).paper.down)
    memories = {name: cost(name, **LENET).memory for name in ("local", "fedavg", "fedspa", "fedspa-rsm", "ditto")}
    assert vars(memories["local"]) == {"kept": size, "at_hand": size, "training": 2 * size, "search": 0}
    assert vars(memories["fedavg"]) == {"kept": 0, "at_hand": size, "training": 2 * size, "search": 0}
    at_hand = mask + half
    with_gradient = {"kept": mask, "at_hand": at_hand, "training": at_hand + half}
    assert vars(memories["fedspa"]) == {**with_gradient, "search": at_hand + size}
    assert vars(memories["fedspa-rsm"]) == {**with_gradient, "search": 0}
    assert vars(memories["ditto"]) == {"kept": size, "at_hand": 2 * size, "training": 3 * size, "search": 0}


def test_links_of_peers():
    by = {key: cost("dpsgd", **LENET, clients=20, topology=key) for key in ("random", "ring", "full")}
    one = by["ring"].paper.busiest / 2
    assert {key: report.paper.busiest / one for key, report in by.items()} == {"random": 10, "ring": 2, "full": 19}
    assert all(report.encoded.busiest == 2 * report.encoded.up for report in by.values())  # both directions
    assert by["ring"].per_round == 20
    assert cost("dpsgd", **LENET, neighbours=3).paper.busiest == 3 * one


def test_capacities():
    """What clients of different capacity cost is a mean; what the busiest and the largest of them cost is not."""
    alone = {c: cost("fedspa", **LENET, density=c) for c in (0.2, 1.0)}
    mixed = cost("fedspa", **LENET, density=1.0, capacities=(0.2, 1.0))
    assert mixed.paper.up == (alone[0.2].paper.up + alone[1.0].paper.up) / 2
    assert mixed.flops.train == (alone[0.2].flops.train + alone[1.0].flops.train) / 2
    assert mixed.memory == alone[1.0].memory
    assert mixed.inference_flops == alone[1.0].inference_flops


def test_quirks_change_what_they_name_and_nothing_else():
    plain, phantom = (cost("fedspa-rsm", model="vgg11", batch_size=32, quirks=q) for q in ((), "phantom-screening"))
    dense = outline("vgg11", (3, 32, 32), 10).layout
    assert (plain.flops.search, phantom.flops.search) == (0, 128 * 3 * dense.forward_flops())
    assert phantom.paper == plain.paper
    zeros = cost("fedavg", model="vgg11", quirks=["zero-biases"])
    assert cost("fedavg", model="vgg11").paper.up - zeros.paper.up == 2 * 2752  # 2,752 GroupNorms' biases, half of each
    assert zeros.encoded == cost("fedavg", model="vgg11").encoded
    assert cost("fedavg", **LENET, quirks=["zero-biases"]).paper == cost("fedavg", **LENET).paper  # it has no norms
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


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("fedspaa --model lenet5", "did you mean 'fedspa'"),
        ("nothing --model lenet5", "costs only: ditto"),
        ("fedavg --model lenet5 --density 0.5", "unknown option of fedavg 'density'"),
        ("fedspa --model lenet5 --density 0", "density = 0.0"),
        ("fedspa --model lenet5 --density 1.1", "density = 1.1"),
        ("fedspa --model lenet", "did you mean 'lenet5'"),
        ("fedspa --data cifar", "did you mean 'cifar10'"),
        ("fedspa", "--model or --data"),
        ("fedspa --model lenet5 --quirk zero-bias", "did you mean 'zero-biases'"),
        ("fedspa --model lenet5 --rounds 0 --samples -1", "2 mistakes"),
        ("fedspa --model lenet5 --clients 5", "lower --per-round"),
        ("fedspa --model lenet5 --input 28y28", "a shape like 3x32x32"),
        ("fedspa --model lenet5 --input 28", "images"),
        ("fedspa --model lenet5 --set ronuds=3", "did you mean 'rounds'"),
        ("fedspa --model lenet5 --set topology=ring", "a method whose clients send to each other"),
        ("dpsgd --model lenet5 --per-round 10", "each trains in every round"),
        ("dpsgd --model lenet5 --clients 8", "at most 7"),
        ("fedavg --model lenet5 --rounds 1000 --quirk emnist-400-rounds", "leave --rounds out"),
        ("fedavg --model lenet5 --set capacities=[]", "capacities"),
    ],
)
def test_bad_input_is_told(words, expected):
    done = CliRunner().invoke(cli, ["cost", *words.split()])
    assert isinstance(done.exception, SparsonaError)
    assert expected in str(done.exception)


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
