"""Each transform on small numbers by hand, and what a chain of them keeps."""

import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from sparsona.core import transform
from sparsona.core.errors import SparsonaError
from sparsona.core.layout import Layout, Slot
from sparsona.core.round import Client, Round
from sparsona.core.seeds import Seeds
from sparsona.core.tree import Tree
from sparsona.core.update import Part, PartSize, Support, Update, dense, mask_digest, masked, message
from sparsona.transforms import TRANSFORMS, read_transforms, split_transforms
from sparsona.wire.codec import decode, encode
from sparsona.wire.format import message_size, sizes_of

LAYOUT = Layout((Slot("w", (2, 3)), Slot("b", (2,))))
MASK = Tree(LAYOUT, torch.tensor([True, True, False, True, True, False, False, True]))
FLAGS = Tree(LAYOUT, torch.tensor([True, False] * 4))
EXAMPLES = [card.example for card in TRANSFORMS.values()]
pytestmark = pytest.mark.usefixtures("untouched_generators")


def at(index: int = 0, client: int = 3) -> Round:
    return Round(index, 10, 1.0, 16, Seeds(7).at(index)).on(Client(client, 10))


def change(values: list[float], mask: Tree | None = None, support: Support = Support.KNOWN) -> Part:
    tree = Tree(LAYOUT, torch.tensor(values))
    return dense(tree, is_change=True) if mask is None else masked(tree, mask, support, bytes(16), is_change=True)


def update_of(part: Part, index: int = 0) -> Update:
    return message(at(index), {"update": part, "mask": dense(FLAGS)}, 2.0)


def sent(
    update: Update, *texts: str, memory: tuple[transform.Memory, ...] | None = None, index: int = 0
) -> tuple[Update, tuple[transform.Memory, ...]]:
    chain = read_transforms(texts)
    return transform.send(chain, update, memory or transform.init_memory(chain, sizes_of(update)), at(index))


def read_by_method(update: Update, *texts: str, mask: Tree | None = None) -> list[float]:
    """What a method reads of a message that travelled as bytes."""
    got = transform.receive(read_transforms(texts), decode(encode(update)))
    assert got.parts["update"].values.dtype is torch.float32
    assert torch.equal(got.parts["mask"].tree().flat, FLAGS.flat), "flags pass as they are"
    assert (got.sender, got.round, got.weight) == (3, 0, 2.0)
    return got.parts["update"].tree(mask).flat.tolist()


class TestHalf:
    def test_rounds_to_the_nearest_half(self) -> None:
        values = [1.0, -0.1, 1 + 2**-11, 1 + 3 * 2**-11, 65504.0, 1e6, -1e6, 2**-26]
        got, _ = sent(update_of(dense(Tree(LAYOUT, torch.tensor(values)))), "half")
        tenth = -0.0999755859375  # -1638 / 16384
        assert read_by_method(got, "half") == [1.0, tenth, 1.0, 1 + 2**-9, 65504.0, 65504.0, -65504.0, 0.0]

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("text", EXAMPLES)
    def test_what_is_no_number_is_not_hidden(self, text: str, value: float) -> None:
        got, _ = sent(update_of(change([1.0, 2.0, value, *[0.5] * 5])), text)
        assert not got.parts["update"].is_finite()

    def test_a_known_mask_is_still_checked(self) -> None:
        got, _ = sent(update_of(change([1.0] * 8, MASK)), "half")
        assert got.parts["update"].support is Support.KNOWN
        assert got.parts["update"].proof == mask_digest(MASK)
        assert read_by_method(got, "half", mask=MASK) == MASK.flat.float().tolist()
        with pytest.raises(SparsonaError, match="a mask that the receiver does not hold"):
            read_by_method(got, "half", mask=FLAGS)


class TestBFloat16:
    def test_rounds_to_the_nearest_bfloat16(self) -> None:
        values = [1.0, -0.1, 1 + 2**-8, 1 + 3 * 2**-8, 1e6, 3.4e38, -3.4e38, 2**-140]
        got, _ = sent(update_of(dense(Tree(LAYOUT, torch.tensor(values)))), "bf16")
        tenth = -0.10009765625  # -205 / 2048
        largest = 255 * 2.0**120
        assert read_by_method(got, "bf16") == [1.0, tenth, 1.0, 1 + 2**-6, 999424.0, largest, -largest, 0.0]

    def test_a_known_mask_is_still_checked(self) -> None:
        got, _ = sent(update_of(change([1.0] * 8, MASK)), "bf16")
        assert got.parts["update"].support is Support.KNOWN
        assert read_by_method(got, "bf16", mask=MASK) == MASK.flat.float().tolist()
        with pytest.raises(SparsonaError, match="a mask that the receiver does not hold"):
            read_by_method(got, "bf16", mask=FLAGS)


class TestCompact:
    @pytest.mark.parametrize("others", [[], ["half"], ["bf16"], ["topk:0.5", "quantize:4"], ["clip:1.0", "noise:0.01"]])
    @pytest.mark.parametrize("place", [0, 1, 2])
    def test_anywhere_in_a_chain_it_leaves_what_is_received(self, others: list[str], place: int) -> None:
        update = update_of(change([0.25, -1.0, 3.0, 0.5, 2.0, -0.125, 1.0, 0.75], MASK))
        texts = [*others[:place], "compact", *others[place:]]
        plain, _ = sent(update, *others)
        compact, kept = sent(update, *texts)
        assert compact.compact
        assert [name for one in kept for name in one] == ["update"] * ("topk:0.5" in others)
        assert sizes_of(compact) == sizes_of(plain)
        mask = None if "topk:0.5" in others else MASK
        assert read_by_method(compact, *texts, mask=mask) == read_by_method(plain, *others, mask=mask)

    def test_what_a_method_reads_is_not_compact(self) -> None:
        got, _ = sent(update_of(change([1.0] * 8)), "compact")
        assert not transform.receive(read_transforms(["compact"]), got).compact


class TestQuantize:
    def test_values_on_a_level_stay(self) -> None:
        """Three bits: steps of a third of the largest magnitude of each tensor."""
        values = [3.0, -1.0, 0.0, 2.0, -3.0, 1.0, 0.0, -0.5]
        got, _ = sent(update_of(change(values)), "quantize:3")
        part = got.parts["update"]
        assert part.values.tolist() == [6, 2, 3, 5, 0, 4, 3, 0]
        assert part.levels is not None
        assert part.levels.scales.tolist() == [3.0, 0.5]
        assert read_by_method(got, "quantize:3") == values

    def test_others_become_one_of_two_neighbours(self) -> None:
        """Two bits have levels -1, 0 and 1 of the scale."""
        got, _ = sent(update_of(change([4.0, 1.0, 1.0, 1.0, -3.0, -3.0, 0.0, 0.0])), "quantize:2")
        found = read_by_method(got, "quantize:2")
        assert found[0] == 4.0
        assert set(found[1:4]) <= {0.0, 4.0}
        assert set(found[4:6]) <= {-4.0, 0.0}
        assert found[6:] == [0.0, 0.0], "a tensor of zeros"

    @pytest.mark.parametrize("bits", range(2, 9))
    def test_is_right_on_average(self, bits: int) -> None:
        """The mean of 40,000 draws lies within 5 standard errors of each value; a step is at most 1 wide."""
        many = 40_000
        layout = Layout((Slot("w", (many,)),))
        for value in (0.1, -0.37, 0.77):
            flat = torch.full((many,), value)
            flat[0] = 1.0
            update = message(at(), {"p": dense(Tree(layout, flat))})
            got = read_transforms([f"quantize:{bits}"])[0].send(update, {}, at())[0]
            mean = float(got.parts["p"].plain().values[1:].double().mean())
            assert abs(mean - value) < 5 * 0.5 / (2 ** (bits - 1) - 1) / math.sqrt(many)

    def test_draws_differ_by_client_and_round_and_have_a_name(self) -> None:
        layout = Layout((Slot("w", (100,)),))
        update = message(at(), {"p": dense(Tree(layout, torch.linspace(-1, 1, 100)))})
        (quantize,) = read_transforms(["quantize:2"])

        def levels(round_: Round) -> list[int]:
            return quantize.send(update, {}, round_)[0].parts["p"].values.tolist()

        assert levels(at()) == levels(at())
        assert levels(at()) != levels(at(1))
        assert levels(at()) != levels(at(0, client=4))
        server = replace(at(), client=None, seeds=Seeds(7).at(0))
        assert levels(server) == levels(server), "a server, which has no draws of its own"

    @pytest.mark.parametrize("support", [Support.BITS, Support.SEED, Support.KNOWN])
    def test_scales_are_of_the_values_inside_the_mask(self, support: Support) -> None:
        got, _ = sent(update_of(change([1.0, 1.0, 9.0, -1.0, 1.0, 9.0, 9.0, 5.0], MASK, support)), "quantize:4")
        levels = got.parts["update"].levels
        assert levels is not None
        assert (levels.scales.tolist(), levels.counts) == ([1.0, 5.0], (4, 1))
        assert read_by_method(got, "quantize:4", mask=MASK) == [1.0, 1.0, 0.0, -1.0, 1.0, 0.0, 0.0, 5.0]


class TestTopK:
    def test_sends_the_largest_and_keeps_the_rest(self) -> None:
        values = [1.0, -4.0, 0.5, 3.0, 0.0, -0.25, 2.0, 0.125]
        got, kept = sent(update_of(change(values)), "topk:0.25")
        assert got.parts["update"].support is Support.BITS
        assert read_by_method(got, "topk:0.25") == [0.0, -4.0, 0.0, 3.0, 0.0, 0.0, 0.0, 0.0]
        assert kept[0]["update"].flat.tolist() == [1.0, 0.0, 0.5, 0.0, 0.0, -0.25, 2.0, 0.125]

    def test_what_was_kept_is_added_to_the_next(self) -> None:
        _, kept = sent(update_of(change([1.0, -4.0, 0.5, 3.0, 0.0, -0.25, 2.0, 0.125])), "topk:0.25")
        got, kept = sent(update_of(change([1.5] + [0.0] * 7)), "topk:0.25", memory=kept)
        assert read_by_method(got, "topk:0.25") == [2.5, 0.0, 0.0, 0.0, 0.0, 0.0, 2.0, 0.0]
        assert kept[0]["update"].flat.tolist() == [0.0, 0.0, 0.5, 0.0, 0.0, -0.25, 0.0, 0.125]

    def test_over_rounds_sent_and_kept_are_the_whole(self) -> None:
        draws = torch.Generator().manual_seed(5)
        kept = None
        total = arrived = torch.zeros(8, dtype=torch.float64)
        for index in range(40):
            values = torch.randn(8, generator=draws).mul(64).round().div(64)  # sums of these are exact
            total = total + values
            got, kept = sent(update_of(change(values.tolist())), "topk:0.3", memory=kept, index=index)
            assert got.parts["update"].num_values == 3
            arrived = arrived + got.parts["update"].tree().flat
        assert torch.equal(arrived + kept[0]["update"].flat, total)

    def test_inside_a_known_mask_that_moves(self) -> None:
        """Five values inside the mask, two are sent; what is outside the next mask waits."""
        got, kept = sent(update_of(change([5.0, 1.0, 9.0, 2.0, -6.0, 9.0, 9.0, 3.0], MASK)), "topk:0.4")
        assert read_by_method(got, "topk:0.4", mask=MASK) == [5.0, 0.0, 0.0, 0.0, -6.0, 0.0, 0.0, 0.0]
        assert kept[0]["update"].flat.tolist() == [0.0, 1.0, 0.0, 2.0, 0.0, 0.0, 0.0, 3.0]
        moved = Tree(LAYOUT, torch.tensor([True, False, True, True, False, False, False, False]))
        got, kept = sent(update_of(change([1.0] * 8, moved)), "topk:0.3", memory=kept)
        assert read_by_method(got, "topk:0.3", mask=moved) == [0.0, 0.0, 0.0, 3.0, 0.0, 0.0, 0.0, 0.0]
        assert kept[0]["update"].flat.tolist() == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 3.0]

    def test_ties_go_to_the_first(self) -> None:
        got, _ = sent(update_of(change([1.0, -1.0] * 4)), "topk:0.375")
        assert read_by_method(got, "topk:0.375") == [1.0, -1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]

    @pytest.mark.parametrize(
        ("rate", "of", "number"), [(0.1, 30, 3), (0.07, 100, 7), (0.1, 31, 4), (1e-9, 5, 1), (1, 5, 5), (0.5, 0, 0)]
    )
    def test_how_many(self, rate: float, of: int, number: int) -> None:
        (topk,) = read_transforms([f"topk:{rate}"])
        part = PartSize("p", Layout((Slot("w", (of,)),)), of)
        assert topk.size(part).num_values == number


class TestClip:
    def test_scales_a_long_change_and_leaves_a_short_one(self) -> None:
        long, short = change([3.0, 4.0] + [0.0] * 6), change([0.3, 0.4] + [0.0] * 6)
        assert read_by_method(sent(update_of(long), "clip:1.0")[0]) == pytest.approx([0.6, 0.8] + [0.0] * 6)
        assert read_by_method(sent(update_of(short), "clip:1.0")[0]) == short.tree().flat.tolist()

    def test_the_norm_is_over_all_parts_and_inside_masks(self) -> None:
        parts = {"a": change([3.0, 9.0, 9.0, 0.0, 0.0, 9.0, 9.0, 0.0], MASK), "b": change([4.0] + [0.0] * 7)}
        parts["a"] = replace(parts["a"], mask=Tree(LAYOUT, torch.tensor([True] + [False] * 7)))
        (clip,) = read_transforms(["clip:2.5"])
        got = clip.send(message(at(), parts), {}, at())[0]
        assert got.parts["a"].values.tolist() == [1.5]
        assert got.parts["b"].values.tolist() == [2.0] + [0.0] * 7


class TestNoise:
    def test_has_the_deviation_and_no_bias(self) -> None:
        layout = Layout((Slot("w", (100_000,)),))
        update = message(at(), {"p": dense(Tree(layout, torch.ones(100_000)), is_change=True)})
        (noise,) = read_transforms(["noise:0.5"])
        drawn = noise.send(update, {}, at())[0].parts["p"].values - 1
        assert abs(float(drawn.mean())) < 5 * 0.5 / math.sqrt(100_000)
        assert float(drawn.std()) == pytest.approx(0.5, rel=0.02)
        again = noise.send(update, {}, at())[0].parts["p"].values - 1
        assert torch.equal(drawn, again)


class TestChain:
    def test_order_is_kept_and_matters(self) -> None:
        """Clipped, then quantised: on levels of a scale of one. Quantised, then clipped: floats again."""
        update = update_of(change([3.0, 4.0] + [0.0] * 6))
        first, _ = sent(update, "clip:1.0", "quantize:4")
        other, _ = sent(update, "quantize:4", "clip:1.0")
        assert first.parts["update"].levels is not None
        assert first.parts["update"].levels.scales[0] == pytest.approx(0.8)
        assert other.parts["update"].levels is None
        assert sum(value**2 for value in read_by_method(other, "quantize:4", "clip:1.0")) == pytest.approx(1.0)

    def test_each_keeps_its_own(self) -> None:
        update = update_of(change([4.0, 3.0, 2.0, 1.0, 0.0, 0.0, 0.0, 0.0]))
        got, kept = sent(update, "topk:0.5", "topk:0.5")
        assert kept[1]["update"].flat.tolist() == [0.0, 0.0, 2.0, 1.0, 0.0, 0.0, 0.0, 0.0]
        assert read_by_method(got) == [4.0, 3.0] + [0.0] * 6
        _, kept = sent(update, "topk:0.5", "topk:0.5", memory=kept)  # 4, 3, 2 + 2 and 1 + 1
        assert kept[1]["update"].flat.tolist() == [0.0, 3.0, 0.0, 2.0, 0.0, 0.0, 0.0, 0.0]

    def test_nothing_changes_without_transforms(self) -> None:
        update = update_of(change([1.0] * 8))
        assert transform.send((), update, (), at()) == (update, ())
        assert transform.receive((), update) is update

    @pytest.mark.parametrize("mask", [None, MASK])
    @pytest.mark.parametrize("first", ["", *EXAMPLES])
    @pytest.mark.parametrize("last", EXAMPLES)
    def test_bytes_are_known_before_training(self, first: str, last: str, mask: Tree | None) -> None:
        """The length of the message, what is counted where nothing is encoded, and what follows from sizes alone."""
        texts = [first, last] if first else [last]
        update = update_of(change([0.25, -1.0, 3.0, 0.5, 2.0, -0.125, 1.0, 0.75], mask))
        got, _ = sent(update, *texts)
        known = transform.sizes(read_transforms(texts), sizes_of(update))
        assert known == sizes_of(got)
        size = len(encode(got))
        assert size <= message_size(known) if "compact" in texts else size == message_size(known)

    def test_inputs_stay_as_they_are(self) -> None:
        values = [0.25, -1.0, 3.0, 0.5, 2.0, -0.125, 1.0, 0.75]
        update = update_of(change(values))
        memory = tuple({"update": Tree(LAYOUT, torch.ones(8))} if text.startswith("topk") else {} for text in EXAMPLES)
        sent(update, *EXAMPLES, memory=memory)
        assert update.parts["update"].values.tolist() == values
        assert [tree.flat.tolist() for own in memory for tree in own.values()] == [[1.0] * 8]

    @pytest.mark.parametrize("text", ["topk:0.1", "clip:1.0", "noise:0.1"])
    def test_a_model_is_refused_where_only_a_change_makes_sense(self, text: str) -> None:
        update = update_of(dense(Tree(LAYOUT, torch.ones(8))))
        with pytest.raises(SparsonaError, match="part 'update', which is a model"):
            sent(update, text)
        with pytest.raises(SparsonaError, match="part 'update', which is a model"):
            transform.sizes(read_transforms([text]), sizes_of(update))

    def test_ways(self) -> None:
        chain = read_transforms(["half", "quantize:4", "topk:0.1", "clip:1", "noise:1", "quantize:bits=8,way=down"])
        assert [one.name for one in transform.upward(chain)] == ["half", "quantize", "topk", "clip", "noise"]
        assert [one.describe() for one in transform.downward(chain)] == [
            "half precision",
            "stochastic quantisation to 8 bits",
        ]


class TestNames:
    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("haf", ["unknown transform 'haf'", "did you mean 'half'?"]),
            ("", ["unknown transform ''"]),
            ("quantize:bit=4", ["option of the transform 'quantize' 'bit'", "did you mean 'bits'?"]),
            ("quantize:9", ["9 bits a value", "2 to 8"]),
            ("quantize:four", ["'four' for 'bits' of the transform 'quantize'", "quantize:4"]),
            ("half:sideways", ["'sideways' for 'way'", "up, down, both"]),
            ("topk:0", ["a share of 0.0"]),
            ("topk:nan", ["a share of nan"]),
            ("topk:0.1,way=down", ["option of the transform 'topk' 'way'"]),
            ("clip:-1", ["a norm of -1.0"]),
            ("clip:inf", ["a norm of inf"]),
            ("noise:0", ["a standard deviation of 0.0"]),
        ],
    )
    def test_mistakes_are_told(self, text: str, words: list[str]) -> None:
        with pytest.raises(SparsonaError) as error:
            read_transforms([text])
        for word in words:
            assert word in str(error.value)

    def test_every_row_has_a_file_of_its_name_and_an_example(self) -> None:
        for name, card in TRANSFORMS.items():
            (made,) = read_transforms([card.example])
            assert made.name == name == card.example.partition(":")[0]
            assert made.describe()

    def test_several_in_one_text(self) -> None:
        assert split_transforms("clip:1e+2+quantize:4 + half") == ("clip:1e+2", "quantize:4", "half")
        assert split_transforms(["half"]) == ["half"]
        assert split_transforms("") == ()

    def test_reading_them_needs_no_torch(self) -> None:
        code = (
            "import sys; from sparsona.transforms import TRANSFORMS, read_transforms\n"
            "read_transforms([card.example for card in TRANSFORMS.values()])\n"
            "assert 'torch' not in sys.modules"
        )
        subprocess.run([sys.executable, "-c", code], check=True)
