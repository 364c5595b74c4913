"""Layers are timed into a file; blocks take their share of it."""

import json

import pytest
import torch
from click.testing import CliRunner

from sparsona.cli.app import cli
from sparsona.core.errors import SparsonaError
from sparsona.core.layout import Layout, Slot
from sparsona.methods.pfedgate.blocks import chunks, filters
from sparsona.methods.pfedgate.knapsack import greedy
from sparsona.methods.pfedgate.latency import block_latencies, read_latency
from sparsona.models import outline


def test_blocks_take_their_share_of_each_tensor():
    layout = Layout((Slot("0.weight", (4, 2), 2), Slot("0.bias", (4,), 1), Slot("1.weight", (2, 4), 2)))
    blocks = filters(layout)
    found = block_latencies(blocks, {"0.weight": 8e-6, "0.bias": 4e-6, "1.weight": 5e-6})
    assert found == (3, 3, 3, 3, 5)  # a quarter of 8 and of 4 ns each, and the output layer
    # Rounded up, so that what is counted is never less than what was measured.
    assert block_latencies(chunks(layout, 2, 0.5), dict.fromkeys(layout.names, 1e-7)) == (1,) * 6


def test_the_command_writes_what_a_run_reads(tmp_path):
    path = tmp_path / "here.json"
    told = CliRunner().invoke(cli, ["latency", "--data", "digits", "--out", str(path)], catch_exceptions=False)
    assert told.exit_code == 0
    layout = outline("digits-cnn", (1, 8, 8), 10).layout
    times = read_latency(path, layout)
    assert set(times) == set(layout.names)
    assert min(times.values()) > 0
    blocks = filters(layout, 5, 0.2)
    costs = torch.tensor(block_latencies(blocks, times))
    assert int(costs.sum()) == pytest.approx(1e6 * sum(times.values()), rel=0.01)
    kept = greedy(torch.rand(len(blocks)), costs, costs.sum() // 2)
    assert 0 < int((kept.long() * costs).sum()) <= int(costs.sum()) // 2


@pytest.mark.parametrize("content", ["", "{}", '{"0.weight": 1}', "3", "[1]"])
def test_other_files_are_refused(tmp_path, content):
    layout = outline("digits-cnn", (1, 8, 8), 10).layout
    path = tmp_path / "there.json"
    with pytest.raises(SparsonaError, match="no latencies"):
        read_latency(path, layout)
    path.write_text(content)
    with pytest.raises(SparsonaError, match="no latencies"):
        read_latency(path, layout)
    path.write_text(json.dumps(dict.fromkeys(layout.names, -1.0)))
    with pytest.raises(SparsonaError, match="a number from 0 to"):
        read_latency(path, layout)


def test_a_network_or_data_must_be_named(tmp_path):
    with pytest.raises(SparsonaError, match="neither"):
        CliRunner().invoke(cli, ["latency", "--out", str(tmp_path / "x")], catch_exceptions=False)
