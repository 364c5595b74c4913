"""What a prompt and a notebook show of a federation."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

import sparsona as sp
from sparsona.data.batches import Examples
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


def test_a_prompt_prints_none_of_the_examples(federation: Federation) -> None:
    shown = repr(federation.examples(1, "train"))
    assert shown == "Examples(18, inputs float32 (18, 1, 4, 4), targets int64 (18,))"
    several = Examples({"age": torch.zeros(2, 1), "scan": torch.zeros(2, 3)}, torch.zeros(2))
    assert repr(several) == "Examples(2, inputs {'age': float32 (2, 1), 'scan': float32 (2, 3)}, targets float32 (2,))"


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


def test_yes_or_no_and_labels() -> None:
    x = np.zeros((30, 2), dtype=np.float32)
    binary = sp.federate(x, np.arange(30) % 2, clients=2, partition="iid", task="binary")
    assert repr(binary).endswith("2 classes)")
    labels = sp.federate(x, np.tile([0, 1, 1], (30, 1)), clients=2, partition="iid", task="multilabel")
    assert repr(labels).endswith("3 labels)")
    assert "classes" not in labels._repr_html_()


def test_names_are_shown_and_escaped(federation: Federation) -> None:
    odd = replace(federation, name="a\u202eb\x1b[2J\u2028c")._repr_html_()
    assert "a\\u202eb\\x1b[2J\\u2028c: " in odd
    assert odd.isprintable()
    assert "3 clients (&lt;i&gt;, b, c), " in replace(federation, client_names=("<i>", "b", "c"))._repr_html_()
    many = tuple(f"person {number}" for number in range(5))
    x = np.zeros((5, 12, 1), dtype=np.float32)
    people = sp.Federation.from_clients({name: (one, np.arange(12) % 2) for name, one in zip(many, x, strict=True)})
    assert "5 clients (person 0, person 1, person 2, …), " in people._repr_html_()


def test_shapes_without_examples(federation: Federation) -> None:
    """What is known of a run whose data is elsewhere."""
    empty = (federation.x[:0], federation.y[:0], 3, "there", federation.view)
    bare = Federation.outline(federation.sizes().numpy(), *empty, train_counts=None)
    assert repr(bare) == "Federation('there', 3 clients, 61 examples, inputs (1, 4, 4), 3 classes)"
    assert "classes in training" not in bare._repr_html_()
    counts = federation.label_counts("train")
    assert counts is not None
    known = Federation.outline(federation.sizes().numpy(), *empty, train_counts=counts.numpy())
    assert "classes in training" in known._repr_html_()
