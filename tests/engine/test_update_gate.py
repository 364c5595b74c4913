"""Messages that decode well and mean harm, to servers and to peers; and those of honest clients, which pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sparsona import methods
from sparsona.core import transform
from sparsona.core.errors import SparsonaError
from sparsona.core.layout import Layout, Slot
from sparsona.core.method import Client, Cost, Update
from sparsona.core.tree import Tree, counts
from sparsona.core.update import Levels, Part, PartSize, Support, dense, masked
from sparsona.engine.gate import RefusedError, check_update, largest_message
from sparsona.testing import Case
from sparsona.testing.accounting import every_update_passes_the_gate
from sparsona.testing.case import History
from sparsona.transforms import read_transforms
from sparsona.wire.codec import decode, encode

FEW = {"clients": 4, "per_round": 2, "data_rate": 0.1, "epochs": 1, "model": "mlp"}


class Sent(NamedTuple):
    """An honest message, its cost and its sender."""

    update: Update
    cost: Cost
    client: Client

    def check(self, update: Update, **more: float) -> None:
        check_update(
            update,
            self.cost.up or (),
            client=self.client,
            round=self.update.round,
            exact=self.cost.exact,
            **more,
        )


@cache
def played(method: str) -> History:
    return Case(methods.card(method), FEW).start().play(2)


@cache
def honest(method: str, *transforms: str) -> Sent:
    """The last message of a short run, as it arrives."""
    history = played(method)
    _, index, update = [found for found in history.sent if found.way == "up"][-1]
    client, cost = history.context.clients[index], history.cost(index, update.round)
    if transforms:
        chain, round_ = read_transforms(transforms), history.round(update.round).on(client)
        update, _ = transform.send(chain, update, transform.init_memory(chain, cost.up or ()), round_)
        cost = transform.transform_cost(cost, chain)
    return Sent(decode(encode(update)), cost, client)


def with_part(update: Update, name: str, part: Part | None) -> Update:
    parts = {key: value for key, value in update.parts.items() if key != name}
    return replace(update, parts=parts if part is None else {**parts, name: part})


def carrying(update: Update, name: str, value: float) -> Update:
    part = update.parts[name]
    values = part.values.clone()
    values[len(values) // 2] = value
    return with_part(update, name, part.carrying(values))


def other_layout(part: Part) -> Layout:
    """As many entries under other names."""
    return Layout(tuple(replace(slot, name=f"{slot.name}.x") for slot in part.layout.slots))


def flags(update: Update, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Update:
    whole = update.parts[name].tree()
    return with_part(update, name, dense(whole.like(change(whole.flat.clone()))))


def own_mask(update: Update) -> Tree:
    """A mask of the model's layout, for forged supports."""
    return update.parts["mask"].tree()


def vast(update: Update, *shape: int) -> Update:
    """The right digest and number of values, and a layout of another size."""
    part = update.parts["update"]
    return with_part(update, "update", replace(part, layout=Layout((Slot("w", shape),))))


def one_moved(flat: torch.Tensor, layout: Layout) -> torch.Tensor:
    """As many ones in all, one of them in another tensor."""
    pieces = flat.split(layout.sizes)
    ones = [int(piece.sum()) for piece in pieces]
    taker = next(k for k, piece in enumerate(pieces) if ones[k] < len(piece))
    giver = next(k for k in range(len(pieces)) if ones[k] and k != taker)
    pieces[giver][pieces[giver].nonzero()[0]] = False
    pieces[taker][(~pieces[taker]).nonzero()[0]] = True
    return torch.cat(pieces)


def masked_by(update: Update, mask: Tree, value: float = 0.01) -> Part:
    flat = torch.full((mask.layout.size,), value)
    return masked(Tree(mask.layout, flat), mask, Support.BITS)


def moved_model(update: Update) -> Update:
    mask = update.parts["model"].mask
    assert mask is not None
    return with_part(update, "model", masked_by(update, mask.like(one_moved(mask.flat.clone(), mask.layout))))


FORGED: dict[str, dict[str, Callable[[Update], Update]]] = {
    "fedavg": {
        "nan": lambda u: carrying(u, "model", float("nan")),
        "another round": lambda u: replace(u, round=u.round - 1),
        "another sender": lambda u: replace(u, sender=u.sender ^ 1),
        "the model is missing": lambda u: with_part(u, "model", None),
        "other names": lambda u: with_part(
            u, "model", replace(u.parts["model"], layout=other_layout(u.parts["model"]))
        ),
        "flags for a model": lambda u: flags(u, "model", lambda flat: flat > 0),
        "3e38": lambda u: carrying(u, "model", 3e38),
        "a weight of 1e300": lambda u: replace(u, weight=1e300),
        "a weight of 1.7e308": lambda u: replace(u, weight=1.7e308),
        "a weight of 0": lambda u: replace(u, weight=0.0),
    },
    "fedspa": {
        "the update is missing": lambda u: with_part(u, "update", None),
        "the mask is missing": lambda u: with_part(u, "mask", None),
        "all entries, dense": lambda u: with_part(
            u, "update", dense(Tree(own_mask(u).layout, torch.full((own_mask(u).layout.size,), 0.01)))
        ),
        "all entries, with bits": lambda u: with_part(
            u, "update", masked_by(u, own_mask(u).like(own_mask(u).flat | True))
        ),
        "a layout of 2**31": lambda u: vast(u, 2**31),
        "a layout of 2**40": lambda u: vast(u, 2**20, 2**20),
        "a small layout": lambda u: vast(u, u.parts["update"].num_values),
        "a mask of all ones": lambda u: flags(u, "mask", lambda flat: flat | True),
        "a mask of none": lambda u: flags(u, "mask", lambda flat: flat & False),
        "a mask of other names": lambda u: with_part(
            u, "mask", dense(Tree(other_layout(u.parts["mask"]), own_mask(u).flat))
        ),
        "a mask of numbers": lambda u: flags(u, "mask", lambda flat: flat.float()),
    },
    "dispfl": {
        "nan": lambda u: carrying(u, "model", float("nan")),
        "the mask is missing": lambda u: with_part(u, "mask", None),
        "other names": lambda u: with_part(
            u, "model", masked_by(u, Tree(other_layout(u.parts["mask"]), own_mask(u).flat))
        ),
        "a mask of none": lambda u: flags(u, "mask", lambda flat: flat & False),
        "a mask of all ones": lambda u: flags(u, "mask", lambda flat: flat | True),
        "3e38": lambda u: carrying(u, "model", 3e38),
    },
}
FURTHER: dict[str, dict[str, Callable[[Update], Update]]] = {
    "fedavg": {
        "infinity": lambda u: carrying(u, "model", -float("inf")),
        "one part more": lambda u: with_part(u, "more", u.parts["model"]),
        "half precision": lambda u: with_part(u, "model", u.parts["model"].carrying(u.parts["model"].values.half())),
        "-3e38": lambda u: carrying(u, "model", -3e38),
        "a weight above its examples": lambda u: replace(u, weight=u.weight + 1),
        "the layout in another order": lambda u: with_part(
            u, "model", replace(u.parts["model"], layout=Layout(u.parts["model"].layout.slots[::-1]))
        ),
    },
    "fedspa": {
        "the model's mask in bits": lambda u: with_part(u, "update", masked_by(u, own_mask(u))),
        "a one in another tensor": lambda u: flags(u, "mask", lambda flat: one_moved(flat, own_mask(u).layout)),
        "a value more": lambda u: with_part(
            u, "update", u.parts["update"].carrying(torch.zeros(u.parts["update"].num_values + 1))
        ),
    },
    "fedspa-rsm": {
        "a value less": lambda u: with_part(u, "update", u.parts["update"].carrying(u.parts["update"].values[1:])),
    },
    "dispfl": {
        "a mask that nobody has": lambda u: with_part(
            u, "model", replace(u.parts["model"], support=Support.KNOWN, mask=None)
        ),
        "a value of another tensor": moved_model,
        "an older round": lambda u: replace(u, round=0),
    },
}


def cases(table):
    return [
        pytest.param(method, forge, id=f"{method}-{name}") for method in table for name, forge in table[method].items()
    ]


def test_these_are_27():
    assert sum(len(found) for found in FORGED.values()) == 27


@pytest.mark.parametrize(("method", "forge"), [*cases(FORGED), *cases(FURTHER)])
def test_a_forged_message_is_refused(method, forge):
    sent = honest(method)
    sent.check(sent.update)
    body = encode(forge(sent.update))
    with pytest.raises(RefusedError) as refused:
        sent.check(decode(body))
    assert f"client {sent.client.index}'s update in round {sent.update.round + 1}" in str(refused.value)
    assert len(str(refused.value)) < 600
    with pytest.raises(SparsonaError):  # many of them before their names and shapes become objects
        sent.check(decode(body, sent.cost.up))


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("fedavg", {"weight": "batches"}),
        ("fedavg", {"weight": "equal", "drop_rate": 0.3}),
        ("fedspa", {"stateless": True}),
        ("fedspa", {"capacities": (0.2, 0.6, 1.0), "initial_masks": "same"}),
        ("fedspa", {"regrowth": "random", "allocation": "uniform", "drop_rate": 0.3}),
        ("dispfl", {"divide_by": "used", "capacities": (0.2, 0.6, 1.0)}),
        ("dpsgd", {"density": 0.5}),
        ("fedmask", {"stateless": True, "drop_rate": 0.3}),
        ("fedmask", {"drop_rate": 0.3, "aggregation": "intersection"}),
        ("fedrolex", {"capacities": (0.2, 0.6, 1.0), "weight": "examples"}),
        ("sub-fedavg", {"accuracy_threshold": 0.0, "density": 0.1}),
        ("lotteryfl", {"accuracy_threshold": 0.0, "overshoots": True, "prune_rate": 0.5}),
    ],
)
def test_honest_messages_pass_whatever_the_options(method, options):
    """Of every row: tests/conformance, by the battery's `every_update_passes_the_gate`."""
    every_update_passes_the_gate(Case(methods.card(method), {**FEW, "validation_rate": 0.2, **options}))


class TestServers:
    def test_the_sum_of_a_round_sees_none_of_it(self):
        """Weights of 1.7e308 add up to infinity: a mean of them says so, and one of no weight changes nothing."""
        history, sent = played("fedavg"), honest("fedavg")
        half, server, round_ = history.method.server, history.last.server, history.round(2)
        heavy = replace(sent.update, weight=1.7e308)
        total = half.zero(server, round_)
        for _ in range(2):
            total = half.add(server, total, heavy)
        with pytest.raises(SparsonaError, match="add up to inf"):
            half.step(server, total, round_)
        total = half.add(server, half.zero(server, round_), replace(sent.update, weight=0.0))
        assert torch.equal(half.step(server, total, round_).params.flat, server.params.flat)

    @pytest.mark.parametrize("shape", [(2**31,), (2**20, 2**20), (3,)])
    def test_no_layout_beside_the_right_digest_is_allocated(self, shape):
        """The server asked for 4 TiB once: the digest is that of its own mask, and the layout is another."""
        sent = honest("fedspa")
        mask = played("fedspa").populations[-2].server.masks[sent.client.index]
        assert sent.update.parts["update"].tree(mask).layout.digest == mask.layout.digest
        forged = vast(sent.update, *shape).parts["update"]
        with pytest.raises(SparsonaError, match="for a mask of"):
            forged.tree(mask)

    @pytest.mark.parametrize("method", ["sub-fedavg", "lotteryfl"])
    def test_a_mask_is_sent_where_it_changed(self, method):
        sent = honest(method)
        part = sent.update.parts["model"]
        mask = Tree(part.layout, torch.ones(part.layout.size, dtype=torch.bool))
        whole = Tree(part.layout, torch.zeros(part.layout.size))
        assert not sent.cost.exact
        for support in (Support.BITS, Support.KNOWN):
            sent.check(with_part(sent.update, "model", masked(whole, mask, support)))
        sent.check(with_part(sent.update, "model", masked(whole, mask.like(mask.flat & False), Support.BITS)))
        for wrong in (dense(whole), masked(whole, mask, Support.SEED, bytes(16))):
            with pytest.raises(RefusedError, match="support"):
                sent.check(with_part(sent.update, "model", wrong))

    def test_fewer_values_where_training_decides_and_never_more(self):
        sent = honest("pfedgate")
        part, most = sent.update.parts["update"], sent.cost.up[0].num_values
        sent.check(with_part(sent.update, "update", part.carrying(torch.zeros(most))))
        sent.check(with_part(sent.update, "update", part.carrying(torch.zeros(1))))
        with pytest.raises(RefusedError, match="at most"):
            sent.check(with_part(sent.update, "update", part.carrying(torch.zeros(most + 1))))


class TestWeights:
    @pytest.mark.parametrize(("weight", "examples"), [(1.0, 0), (0.0, 0), (1.0, 5), (5.0, 5), (0.5, 5)])
    def test_those_of_honest_clients(self, weight, examples):
        self.check(weight, examples)

    @pytest.mark.parametrize(
        ("weight", "examples"),
        [(2.0, 0), (5.001, 5), (0.0, 5), (-1.0, 5), (float("nan"), 5), (float("inf"), 5), (1e300, 5)],
    )
    def test_those_that_are_refused(self, weight, examples):
        with pytest.raises(RefusedError, match="weight"):
            self.check(weight, examples)

    @staticmethod
    def check(weight: float, examples: int) -> None:
        tree = Tree.of({"w": torch.ones(3)})
        size = (PartSize("model", tree.layout, 3),)
        update = Update(7, 2, weight, {"model": dense(tree)})
        check_update(update, size, client=Client(7, examples), round=2, exact=True)


class TestMagnitude:
    def test_is_an_option(self):
        sent = honest("fedavg")
        large = carrying(sent.update, "model", 1500.0)
        sent.check(large, max_magnitude=2e3)
        with pytest.raises(RefusedError, match="at most 1000"):
            sent.check(large)
        with pytest.raises(RefusedError, match=r"at most 0\.001"):
            check_update(
                replace(large, weight=1.0),
                sent.cost.up,
                client=replace(sent.client, num_examples=0),
                round=large.round,
                exact=True,
                max_magnitude=1e-3,
            )

    def test_counts_of_examples_are_no_magnitude(self):
        """FedProto sends how many examples of each class a client has."""
        sent = honest("fedproto")
        many = carrying(sent.update, "prototypes", 5000.0)
        with pytest.raises(RefusedError):
            sent.check(many)
        sent._replace(client=replace(sent.client, num_examples=5000)).check(many)


class TestTransforms:
    @pytest.mark.parametrize(
        ("method", "chain"),
        [
            ("fedavg", ("half",)),
            ("fedspa", ("half",)),
            ("fedspa", ("bf16",)),
            ("fedspa", ("bf16", "compact")),
            ("fedspa", ("quantize:4",)),
            ("fedspa", ("topk:0.1",)),
            ("fedspa", ("topk:0.1", "quantize:2")),
            ("subsampling", ("quantize:8",)),
            ("pfedgate", ("topk:0.1",)),
            ("dispfl", ("half",)),
            ("dispfl", ("quantize:3",)),
        ],
    )
    def test_honest_messages_pass(self, method, chain):
        sent = honest(method, *chain)
        sent.check(sent.update)
        sent.check(decode(encode(sent.update), sent.cost.up))
        with pytest.raises(RefusedError):
            sent._replace(cost=honest(method).cost).check(sent.update)

    def test_half_precision_has_two_kinds(self):
        half, brain = honest("fedavg", "half"), honest("fedavg", "bf16")
        with pytest.raises(RefusedError, match=r"has numbers of 16 bits \(bfloat16\)"):
            half.check(brain.update)

    def test_compact_messages(self):
        sent = honest("dispfl", "compact")
        assert sent.update.compact
        sent.check(decode(encode(sent.update), sent.cost.up))
        assert len(encode(sent.update)) < largest_message(sent.cost.up)

    def test_levels(self):
        sent = honest("fedspa", "quantize:4")
        part = sent.update.parts["update"]
        assert part.levels is not None
        scales, numbers = part.levels.scales.clone(), list(part.levels.counts)
        scales[0] = 3e38
        large = part.carrying(part.values, Levels(4, scales, part.levels.counts))
        with pytest.raises(RefusedError, match="magnitudes"):
            sent.check(with_part(sent.update, "update", large))
        numbers[0], numbers[1] = numbers[0] - 1, numbers[1] + 1
        moved = part.carrying(part.values, Levels(4, part.levels.scales, tuple(numbers)))
        with pytest.raises(RefusedError, match="ones in tensor"):
            sent.check(with_part(sent.update, "update", moved))


class Largest(TorchDispatchMode):
    """The entries of the largest tensor that any operation makes."""

    num_entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        old = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, torch.Tensor)}
        for one in found if isinstance(found, tuple | list) else (found,):
            if isinstance(one, torch.Tensor) and one.untyped_storage().data_ptr() not in old:
                self.num_entries = max(self.num_entries, one.numel())
        return found


@pytest.mark.parametrize("method", ["fedavg", "fedspa", "dispfl"])
def test_no_values_are_copied_and_no_mask_is_unpacked(method):
    sent = honest(method)
    update = decode(encode(sent.update), sent.cost.up)
    with Largest() as made:
        sent.check(update)
    assert made.num_entries <= 1


@pytest.mark.parametrize("method", ["fedavg", "fedspa", "dispfl", "heterofl"])
def test_the_largest_message_is_known(method):
    sent = honest(method)
    assert largest_message(sent.cost.up) == len(encode(sent.update))


def test_a_peer_counts_what_its_neighbour_covers():
    """The ones that costs state are those of the masks that travel, tensor by tensor."""
    sent = honest("dispfl")
    model, mask = sent.cost.up
    assert (
        model.ones == mask.ones == counts(sent.update.parts["model"].mask) == counts(sent.update.parts["mask"].tree())
    )
    assert sum(model.ones) == model.num_values
