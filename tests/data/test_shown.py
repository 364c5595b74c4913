"""What a prompt and a notebook show of a federation."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

import sparsona as sp
from sparsona.data.federation import Federation

SECRET = 0.123456789


@pytest.fixture(scope="module")
def federation() -> Federation:
    x, y = np.full((61, 1, 4, 4), SECRET, dtype=np.float32), np.arange(61) % 3
    clients = [(0, 12), (12, 34), (34, 61)]
    return sp.Federation.from_clients(
        [(x[a : b - 2], y[a : b - 2], x[b - 2 : b], y[b - 2 : b]) for a, b in clients], num_classes=3, name="<b>wards"
    )


def test_a_prompt_prints_one_short_line(federation: Federation) -> None:
    assert repr(federation) == "Federation('<b>wards', 3 clients, 61 examples, inputs (1, 4, 4), 3 classes)"
    assert len(repr(replace(federation, name="a/long/path\n" * 50))) < 140
    assert "\n" not in repr(replace(federation, name="two\nlines"))


def test_a_notebook_shows_sizes_and_no_data(federation: Federation) -> None:
    page = federation._repr_html_()
    assert "<b>" not in page
    assert "&lt;b&gt;wards: 3 clients" in page
    assert "test examples: given" in page
    rows = re.findall(r"<tr><th>([^<]*)</th><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td></tr>", page)
    sizes = federation.sizes()[:, 0].sort().values.tolist()
    assert rows[0] == ("train examples", *map(str, sizes))
    assert [row[0] for row in rows[1:]] == ["validation examples", "test examples", "classes in training"]
    assert rows[3][1:] == ("3", "3", "3")
    assert "0.123" not in page + repr(federation)


def test_classes_are_those_of_each_client() -> None:
    x = np.eye(40, dtype=np.float32)
    skewed = sp.federate(x, np.arange(40) % 2, clients=2, partition="shards:1", min_size=1)
    assert "<tr><th>classes in training</th><td>1</td><td>1</td><td>1</td></tr>" in skewed._repr_html_()


def test_several_inputs_and_numbers_to_predict() -> None:
    x, y = np.zeros((30, 2), dtype=np.float32), np.linspace(0, 1, 30, dtype=np.float32)
    several = sp.federate({"age": x[:, 0], "blood": x}, np.arange(30) % 2, clients=2, partition="iid")
    assert "inputs age (), blood (2,), 2 classes" in repr(several)
    numbers = sp.federate(x, y, clients=2, partition="iid")
    assert "1 number to predict" in repr(numbers)
    assert "classes" not in numbers._repr_html_()


def test_names_are_shown_where_there_are_any(federation: Federation) -> None:
    names = ("<i>north", "south", "east", "west")
    object.__setattr__(named := replace(federation), "client_names", names)
    assert "3 clients (&lt;i&gt;north, south, east, …)" in named._repr_html_()
