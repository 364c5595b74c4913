"""Every entry in one block, and values spread as an index would spread them."""

import pickle

import pytest
import torch

from sparsona.core.errors import SparsonaError
from sparsona.core.layout import Layout, Slot
from sparsona.methods.pfedgate.blocks import channels, chunks, filters, heads, spread
from sparsona.models import outline

NET = outline("pfedgate-cifar10", (3, 32, 32), 10).layout
TEXT = outline("transformer:adapters=16", (20,), 300).layout
NORMS = Layout(outline("vgg11", (3, 32, 32), 10).layout.slots[:8])  # two convolutions, each with its norm
SPLITS = {
    "paper": lambda: chunks(NET, 5, 0.2),
    "authors": lambda: chunks(NET, 5, 0.2, equal=True),
    "operators": lambda: chunks(NET, 5, 0.2, by_operator=True),
    "operators, equal": lambda: chunks(NORMS, 5, 0.2, equal=True, by_operator=True),
    "uneven": lambda: chunks(NET, 7, 0.13),
    "filters": lambda: filters(NET, 10, 0.2),
    "each filter": lambda: filters(NET),
    "channels": lambda: channels(NET, 6, 0.25),
    "heads": lambda: heads(TEXT, 4, 5, 0.2),
    "norms": lambda: filters(NORMS, 4, 0.1),
}


def tree_of(layout, flat):
    parts = flat.split(layout.sizes)
    return {slot.name: part.view(slot.shape) for slot, part in zip(layout.slots, parts, strict=True)}


@pytest.mark.parametrize("split", SPLITS)
def test_blocks_cover_the_layout_once(split):
    blocks = SPLITS[split]()
    owner = blocks.owner()
    assert owner.dtype == torch.int64
    assert tuple(torch.bincount(owner, minlength=len(blocks)).tolist()) == blocks.sizes
    assert min(blocks.sizes) > 0
    assert sum(blocks.flops) == blocks.layout.forward_flops()
    rates = torch.cat([torch.full((slot.size,), slot.flops_per_weight) for slot in blocks.layout.slots])
    assert torch.zeros(len(blocks), dtype=torch.int64).index_add(0, owner, rates).tolist() == list(blocks.flops)
    assert len(blocks.always) == len(blocks.groups) == len(blocks)


def test_operators_by_hand():
    """Section 5.2.2 for two operators: a weight of 3 x 4 and a bias of 3 are a vector of 15; floor(15 * .2) = 3 first,
    the other 12 in four of 3: the last block is the bias. A weight of 10 and a bias of 1 are 11: 2, then 3, 3, 3, of
    which the last has two of the weight and the bias."""
    layout = Layout(
        (Slot("0.weight", (3, 4), 2), Slot("0.bias", (3,), 1), Slot("1.weight", (1, 10), 2), Slot("1.bias", (1,), 1))
    )
    blocks = chunks(layout, 5, 0.2, by_operator=True)
    assert blocks.sizes == (3, 3, 3, 3, 3, 2, 3, 3, 3)
    assert blocks.always == (True, False, False, False, False, True, False, False, False)
    assert blocks.owner().tolist() == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3 + [4] * 3 + [5, 5] + [6] * 3 + [7] * 3 + [
        8,
        8,
        8,
    ]
    assert blocks.flops == (6, 6, 6, 6, 3, 4, 6, 6, 5)


@pytest.mark.parametrize("split", SPLITS)
def test_spread_is_a_look_up_and_its_gradient_a_sum(split):
    blocks = SPLITS[split]()
    values = torch.randn(2, len(blocks), dtype=torch.float64, requires_grad=True)
    weight = torch.randn(blocks.layout.size, dtype=torch.float64)
    assert torch.equal(spread(blocks, values), values[:, blocks.owner()])
    (found,) = torch.autograd.grad((spread(blocks, values) * weight).sum(), values)
    expected = torch.zeros(len(blocks), dtype=torch.float64).index_add(0, blocks.owner(), weight)
    torch.testing.assert_close(found, expected.expand(2, -1))


def test_spread_under_vmap_and_tracing():
    from torch.fx.experimental.proxy_tensor import make_fx

    blocks = filters(NET, 4, 0.2)
    values = torch.randn(3, len(blocks))
    expected = values[:, blocks.owner()]
    assert torch.equal(torch.func.vmap(lambda v: spread(blocks, v))(values), expected)
    traced = make_fx(lambda v: spread(blocks, v))(values[0])
    assert torch.equal(traced(values[2]), expected[2])
    with pytest.raises(ValueError, match="values for"):
        spread(blocks, values[:, 1:])


def test_chunks_of_the_paper():
    layout = Layout((Slot("0.weight", (10, 10), 2), Slot("0.bias", (10,), 1), Slot("1.weight", (3, 1), 2)))
    blocks = chunks(layout, 4, 0.29)
    # floor(29), then 71 in three; floor(2.9), then 8 in three; floor(0.87) is none, so nothing of it is always kept.
    assert blocks.sizes == (29, 24, 24, 23, 2, 3, 3, 2, 1, 1, 1)
    assert blocks.always == (True, False, False, False, True, False, False, False, False, False, False)
    assert set(blocks.groups) == {0}
    assert blocks.flops[:5] == (58, 48, 48, 46, 2)


@pytest.mark.parametrize("smallest", [0.05, 0.29, 0.5, 1.0])
def test_what_is_always_kept_never_exceeds_the_smallest_share(smallest):
    blocks = chunks(NET, 5, smallest)
    kept = sum(size for size, always in zip(blocks.sizes, blocks.always, strict=True) if always)
    assert smallest * NET.size - len(NET.slots) < kept <= smallest * NET.size


def test_chunks_of_the_authors():
    blocks = chunks(NET, 5, 0.2, equal=True)
    assert len(blocks) == 50
    assert blocks.sizes[:5] == (480,) * 5
    assert blocks.sizes[5:10] == (7, 7, 7, 7, 4)
    assert blocks.always == (True, False, False, False, False) * 10
    assert blocks.groups == (0,) * 20 + (1,) * 30  # convolutions, then linear layers
    short = chunks(Layout((Slot("a.bias", (6,)),)), 5, 0.2, equal=True)
    assert short.sizes == (2, 2, 2)


def test_a_filter_is_its_row_and_its_bias():
    blocks = filters(NET)
    owner = tree_of(NET, blocks.owner())
    for layer, rows in (("0", 32), ("3", 64), ("7", 120), ("9", 84)):
        weight = owner[f"{layer}.weight"].flatten(1)
        assert (weight == owner[f"{layer}.bias"][:, None]).all()
        assert weight[:, 0].unique().numel() == rows
        assert [blocks.always[place] for place in weight[:, 0]] == [True] + [False] * (rows - 1)
    # The output layer is kept whole.
    for name in ("11.weight", "11.bias"):
        assert owner[name].unique().numel() == 1
        assert blocks.always[int(owner[name].flatten()[0])]


def test_a_channel_is_what_one_filter_feeds():
    blocks = channels(NET)
    owner = tree_of(NET, blocks.owner())
    assert (owner["3.weight"] == owner["3.weight"][:1, :, :1, :1]).all()
    flat = owner["7.weight"].view(120, 64, 25)  # 64 channels of 5x5 positions
    assert (flat == flat[:1, :, :1]).all()
    assert flat[0, :, 0].unique().numel() == 64
    assert owner["9.weight"][0].unique().numel() == 120
    for name in ("0.weight", "0.bias", "3.bias", "11.bias"):
        assert owner[name].unique().numel() == 1
        assert blocks.always[int(owner[name].flatten()[0])]


def test_a_head_is_rows_of_three_and_columns_of_the_fourth():
    blocks = heads(TEXT, 4)
    owner = tree_of(TEXT, blocks.owner())
    own = owner["blocks.1.query.weight"][::64, 0]
    assert own.unique().numel() == 4
    for part in ("query", "key", "value"):
        assert (owner[f"blocks.1.{part}.weight"] == own.repeat_interleave(64)[:, None]).all()
    assert (owner["blocks.1.projection.weight"] == own.repeat_interleave(64)).all()
    assert blocks.sizes[int(own[1])] == 4 * 64 * 256
    for name in (
        "embedding.weight",
        "output.bias",
        "positions.weight",
        "blocks.0.norm1.weight",
    ):  # the words, and norms
        assert blocks.always[int(owner[name].flatten()[0])]
        assert owner[name].unique().numel() == 1
    # The feed-forward layers are cut into filters.
    assert (owner["blocks.1.widen.weight"] == owner["blocks.1.widen.bias"][:, None]).all()


def test_blocks_travel_without_what_can_be_worked_out():
    blocks = chunks(NET, 5, 0.2)
    blocks.owner()
    copy = pickle.loads(pickle.dumps(blocks))
    assert copy == blocks
    assert len(pickle.dumps(blocks)) < 20_000
    assert torch.equal(copy.owner(), blocks.owner())


@pytest.mark.parametrize(
    "cut",
    [
        lambda: chunks(NET, 1, 0.2),
        lambda: chunks(NET, 5, 0.0),
        lambda: chunks(NET, 5, 1.2),
        lambda: filters(NET, 5, -0.1),
        lambda: heads(NET, 4),
        lambda: heads(TEXT, 5),
    ],
)
def test_what_cannot_be_cut_is_refused(cut):
    with pytest.raises(SparsonaError):
        cut()
