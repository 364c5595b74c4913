"""Trees, layouts and what travels."""

from __future__ import annotations

import pickle
from dataclasses import dataclass

import pytest
import torch

from sparsona.core import tree
from sparsona.core.errors import MaskMismatchError, SparsonaError, unknown_name
from sparsona.core.layout import Layout, Slot
from sparsona.core.seeds import Seeds
from sparsona.core.storage import COUNTED, Stored, count_bits, pack_bits, unpack_bits
from sparsona.core.tree import Tree, leaves, map_leaves
from sparsona.core.update import Part, Support, dense, mask_digest, masked

NAMED = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(7.0), "c": torch.arange(2.0)}


@pytest.fixture
def some() -> Tree:
    return Tree.of(NAMED)


def test_views_share_the_flat_buffer(some):
    assert list(some) == ["a", "b", "c"]
    for name, value in NAMED.items():
        assert torch.equal(some[name], value)
        assert some[name].untyped_storage().data_ptr() == some.flat.untyped_storage().data_ptr()


def test_gradient_of_views_arrives_in_one_buffer(some):
    live = some.like(some.flat.clone().requires_grad_())
    (live["a"].sum() * 2 + live["c"].sum()).backward()
    assert live.flat.grad.tolist() == [2.0] * 6 + [0.0] + [1.0] * 2


def test_arithmetic_leaves_its_arguments_alone(some):
    before = some.flat.clone()
    assert tree.add(some, some).flat.tolist() == (2 * before).tolist()
    assert tree.subtract(some, some).flat.abs().sum() == 0
    assert tree.scale(some, 3.0).flat.tolist() == (3 * before).tolist()
    assert float(tree.norm(some)) == pytest.approx(float(before.norm()))
    assert torch.equal(some.flat, before)


def test_trees_of_different_layouts_do_not_mix(some):
    other = Tree.of({"a": torch.zeros(3, 2), "b": torch.zeros(()), "c": torch.zeros(2)})
    with pytest.raises(ValueError, match="different layouts"):
        tree.add(some, other)


def test_select_and_join(some):
    part, rest = some.select(("c", "a")), some.select(("b",))
    assert list(part) == ["a", "c"]
    live = part.like(part.flat.requires_grad_())
    again = tree.join(some.layout, rest, live)
    assert torch.equal(again.flat, some.flat)
    again["a"].sum().backward()
    assert live.flat.grad.tolist() == [1.0] * 6 + [0.0] * 2


def test_pickle(some):
    again = pickle.loads(pickle.dumps(some))
    assert again.layout == some.layout
    assert torch.equal(again.flat, some.flat)


@dataclass(frozen=True)
class Nested:
    model: Tree
    pair: tuple[torch.Tensor, torch.Tensor]
    memory: dict[int, torch.Tensor]
    nothing: None = None


def test_leaves_and_map_leaves(some):
    value = Nested(some, (torch.zeros(1), torch.ones(1)), {3: torch.ones(2)})
    assert [path for path, _ in leaves(value)] == ["model", "pair[0]", "pair[1]", "memory[3]"]
    doubled = map_leaves(lambda _path, tensor: tensor * 2, value)
    assert doubled.memory[3].tolist() == [2, 2]
    assert isinstance(doubled.model, Tree)
    with pytest.raises(TypeError, match="0-dim tensor"):
        list(leaves(Nested(some, (0.5, 1.0), {})))


def test_layout_digest_tells_names_from_shapes():
    one = Layout((Slot("a", (1,)), Slot("b", (2,))))
    other = Layout((Slot("a:1;1:b", (2,)),))
    assert one.digest != other.digest
    assert one.digest == Layout((Slot("a", (1,), 9), Slot("b", (2,)))).digest  # costs do not count


def test_forward_flops_counts_non_zeros_and_dense_conv_biases():
    layout = Layout((Slot("conv.weight", (2, 1, 3, 3), 2 * 16), Slot("conv.bias", (2,), 16, True), Slot("norm", (2,))))
    assert layout.forward_flops() == 32 * 18 + 16 * 2
    assert layout.forward_flops((9, 1, 1)) == 32 * 9 + 16 * 2


def test_masked_part_round_trip(some):
    mask = some.like(torch.tensor([1, 0, 1, 0, 0, 1, 1, 0, 0]).bool())
    part = masked(some, mask)
    assert part.values.tolist() == [0.0, 2.0, 5.0, 7.0]
    assert part.tree(mask).flat.tolist() == (some.flat * mask.flat).tolist()
    assert dense(some).tree().flat is some.flat


def test_a_part_is_gathered_only_if_its_values_are_asked_for(some, monkeypatch):
    whole = some.like(torch.tensor([-1.0, float("nan"), -0.0, float("inf"), 1.0, 2.0, -2.0, -0.0, -0.0]))
    mask = some.like(torch.tensor([1, 0, 1, 0, 0, 1, 1, 0, 0]).bool())
    part = masked(whole, mask)
    arrived = Part(part.layout, part.values, part.support, mask)  # as from another process
    bits = arrived.tree(mask).flat.numpy().tobytes()
    monkeypatch.setattr("sparsona.core.update.places", None)
    assert (part.num_values, part.dtype) == (4, torch.float32)
    assert part.tree(mask).flat.numpy().tobytes() == bits
    assert part.with_bitmap().tree().flat.numpy().tobytes() == bits
    assert part.is_finite()  # what is outside the mask does not travel
    assert not masked(whole, some.like(~mask.flat)).is_finite()
    assert not dense(whole).is_finite()


def test_a_mask_that_differs_is_noticed_and_a_bitmap_mends_it(some):
    mask = some.like(torch.tensor([1, 0, 1, 0, 0, 1, 1, 0, 0]).bool())
    other = some.like(~mask.flat)
    part = masked(some, mask)
    with pytest.raises(MaskMismatchError, match="does not hold"):
        part.tree(other)
    with pytest.raises(MaskMismatchError, match="needs the receiver's mask"):
        part.tree()
    assert part.with_bitmap().support is Support.BITS
    assert part.with_bitmap().tree(other).flat.tolist() == (some.flat * mask.flat).tolist()


def test_too_few_values_are_refused(some):
    mask = some.like(torch.ones(9, dtype=torch.bool))
    forged = Part(some.layout, torch.ones(1), Support.KNOWN, None, mask_digest(mask))
    with pytest.raises(SparsonaError, match="1 values for a mask of 9"):
        forged.tree(mask)


def test_bits():
    flags = torch.rand(77, generator=torch.Generator().manual_seed(1)) < 0.5
    assert len(pack_bits(flags)) == 10
    assert torch.equal(unpack_bits(pack_bits(flags), 77), flags)


def test_ones_are_counted_in_packed_bits():
    draw = torch.Generator().manual_seed(5)
    for _ in range(50):
        sizes = torch.randint(0, 40, (6,), generator=draw).tolist()
        layout = Layout(tuple(Slot(str(place), (size,)) for place, size in enumerate(sizes)))
        mask = Tree(layout, torch.rand(layout.size, generator=draw) < 0.5)
        here = tree.counts(mask)
        stored = Tree(layout, Stored(mask.flat))
        assert tree.counts(stored) == here == tuple(int(mask[name].sum()) for name in mask)
    flags = torch.rand(5 * COUNTED * 8 // 2 + 3, generator=draw) < 0.3
    assert count_bits(pack_bits(flags), (5, len(flags) - 5)) == (int(flags[:5].sum()), int(flags[5:].sum()))


def test_seeds_differ_by_purpose_client_and_round_and_nothing_else():
    seeds = Seeds(4)
    assert seeds.shared("mask") == Seeds(4, client=2).shared("mask")
    drawn = {
        seeds.shared("mask"),
        seeds.shared("other"),
        Seeds(5).shared("mask"),
        seeds.of(1).own("mask"),
        seeds.of(2).own("mask"),
        seeds.at(1).shared("mask"),
        seeds.of(1).at(1).own("mask"),
    }
    assert len(drawn) == 7
    assert all(0 <= seed < 2**63 for seed in drawn)
    with pytest.raises(ValueError, match="no draws of its own"):
        seeds.own("mask")


def test_unknown_name_suggests_the_nearest():
    error = unknown_name("method", "fedspaa", ["fedspa", "fedavg"])
    assert "did you mean 'fedspa'?" in str(error)
    assert pickle.loads(pickle.dumps(error)).hint == error.hint


def test_counts_are_taken_once_and_passed_on(monkeypatch):
    mask = Tree.of({"a": torch.tensor([True, False, True]), "b": torch.tensor([[False, True]])})
    assert tree.counts(tree.as_numbers(mask, torch.float32)) == (2, 1)  # nobody asked the mask itself yet
    assert tree.counts(mask) == (2, 1)
    numbers = tree.as_numbers(mask, torch.float32)
    monkeypatch.setattr(torch.Tensor, "count_nonzero", None)
    assert tree.counts(mask) == tree.counts(numbers) == (2, 1)
    assert numbers.flat.tolist() == [1.0, 0.0, 1.0, 0.0, 1.0]
