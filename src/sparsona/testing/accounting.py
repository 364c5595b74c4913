"""The costs that a method states are those that are measured: bytes, FLOPs and memory, client by client."""

from __future__ import annotations

import torch
from torch import nn

from sparsona.core.tree import leaves
from sparsona.engine.gate import check_update, largest_message
from sparsona.testing.case import Case, History, require
from sparsona.wire.codec import decode, encode
from sparsona.wire.format import message_size, paper_size
from sparsona.wire.ledger import paper_bytes


def every_update_survives_the_wire(case: Case) -> None:
    """Whatever is sent arrives as it was."""
    history = case.history
    if history.method.server is not None or history.method.peer is not None:
        require(history.sent, "a method with a server or peers sent nothing")
    for way, client, update in history.sent:
        body = encode(update)
        arrived = decode(body)
        who = f"the message {'to' if way == 'down' else 'of'} client {client}"
        for name, part in update.parts.items():
            same = part.values.cpu().numpy().tobytes() == arrived.parts[name].values.cpu().numpy().tobytes()
            require(same, f"{who}: part '{name}' arrives with other values")
        require(encode(arrived) == body, f"{who}: it changes when it is encoded again")


def every_update_passes_the_gate(case: Case) -> None:
    """What clients send is what `cost` says that they send: a server or a peer on another machine refuses the rest."""
    history = case.history
    for way, client, update in history.sent:
        if way == "down":
            continue
        cost, sender = history.cost(client, update.round), history.context.clients[client]
        require(cost.up is not None, f"client {client} sent a message, and its cost says none")
        expected, body = cost.up or (), encode(update)
        most = largest_message(expected)
        require(len(body) <= most, f"client {client}'s message has {len(body)} bytes; the gate allows {most}")
        check_update(decode(body, expected), expected, client=sender, round=update.round, exact=cost.exact)


def costs_equal_the_ledger(case: Case) -> None:
    """`cost` states the bytes and FLOPs of every turn: exactly, or as a bound where training decides."""
    history = case.history
    for index, record in enumerate(history.records):
        require(record.turns, f"no client had a turn in round {index}")
        for turn in record.turns:
            cost, who = history.cost(turn.client, index), f"client {turn.client} in round {index}"
            if turn.trained:
                found = (turn.tally.train_flops, turn.tally.search_flops)
                for what, spent, stated in zip(
                    ("training", "search"), found, (cost.train_flops, cost.search_flops), strict=True
                ):
                    _compare(f"{who}: FLOPs of {what}", spent, stated, cost.exact)
            if history.method.peer is None:
                traffic = turn.traffic
                for way, parts, size, paper in (
                    ("up", cost.up or (), traffic.up, traffic.paper_up),
                    ("down", cost.down or (), traffic.down, traffic.paper_down),
                ):
                    exact = cost.exact and not cost.compact
                    _compare(f"{who}: bytes {way}", size, message_size(parts) if parts else 0, exact)
                    _compare(f"{who}: bytes {way} as papers count", paper, paper_size(parts), cost.exact)
                    require(bool(size) == bool(parts), f"{who}: whether something is sent {way} contradicts the cost")
    if history.method.peer is not None:
        _messages_of_peers(history)


def _compare(what: str, found: int, stated: int, exact: bool) -> None:
    require(found == stated if exact else found <= stated, f"{what}: {found:,}, but the cost is {stated:,}")


def _messages_of_peers(history: History) -> None:
    """Each peer's message has the size that its cost says, and all that is sent is received; who chooses its peers
    receives at most as many messages as its cost says."""
    chooses = history.method.peer is not None and history.method.peer.wants is not None
    for index, record in enumerate(history.records):
        for client, message in history.populations[index + 1].messages.items():
            body = message if isinstance(message, bytes) else encode(message)
            require(encode(decode(body)) == body, f"client {client}'s last message does not survive the wire")
            cost = history.cost(client, index)
            exact = cost.exact and not cost.compact
            _compare(f"client {client}: bytes of a message", len(body), message_size(cost.up or ()), exact)
            papers = paper_bytes(decode(body))
            _compare(f"client {client}: the papers' count", papers, paper_size(cost.up or ()), cost.exact)
        sizes = {
            client: len(message if isinstance(message, bytes) else encode(message))
            for client, message in history.populations[index].messages.items()
        }
        for turn in record.turns:
            size = sizes.get(turn.client, 0)
            whole = turn.traffic.up % size == 0 if size else turn.traffic.up == 0
            require(whole, f"client {turn.client} sent {turn.traffic.up} bytes, its last message has {size}")
            if chooses:
                requests, received = history.cost(turn.client, index).requests, turn.traffic.down
                require(requests is not None, "a method with `wants` has a cost without `requests`")
                most = (requests or 0) * max(sizes.values(), default=0)
                require(received <= most, f"client {turn.client} received {received} bytes for {requests} requests")
        up, down = (sum(getattr(turn.traffic, way) for turn in record.turns) for way in ("up", "down"))
        require(up == down, f"round {index}: peers sent {up} bytes and received {down}")
        require(bool(up) == bool(index), f"round {index}: {up} bytes were sent; in the first there is no message yet")


def costs_say_what_is_kept(case: Case) -> None:
    """`Cost.kept` is the State, BatchNorm statistics and an optimizer's count of steps aside: entries of masks, and
    numbers that are not zero; and `infer_flops` is what the deployed model costs."""
    history = case.history
    for index, state in history.last.states.items():
        cost = history.cost(index)
        own = [tensor for path, tensor in leaves(state) if not path.startswith("buffers") and not _counts_steps(tensor)]
        masks, stated = [t for t in own if t.dtype == torch.bool], [part for part in cost.kept if part.is_mask]
        entries = sum(tensor.numel() for tensor in masks), sum(part.num_values for part in stated)
        require(entries[0] == entries[1], f"client {index} keeps masks of {entries[0]} entries, cost says {entries[1]}")
        others, parts = [t for t in own if t.dtype != torch.bool], [part for part in cost.kept if not part.is_mask]
        sizes = sum(tensor.numel() for tensor in others), sum(part.layout.size for part in parts)
        require(sizes[0] == sizes[1], f"client {index} keeps {sizes[0]} numbers, and the cost says {sizes[1]}")
        held = sum(int(tensor.count_nonzero()) for tensor in others)
        most = sum(part.num_values for part in parts)
        require(held <= most, f"client {index} keeps {held} numbers that are not zero, and the cost says {most}")
        _check_inference(history, index)


def _check_inference(history: History, client: int) -> None:
    deploy, layout = history.method.deploy, history.context.task.layout
    found = None if deploy is None else deploy(history.work(client))
    if found is None or isinstance(found, nn.Module):
        return
    params, stated, dense = found[0], history.cost(client).infer_flops, layout.forward_flops()
    own = layout if params.layout.digest == layout.digest else params.layout  # a client's network may be another one
    used = own.forward_flops([int(params[key].count_nonzero()) for key in params])
    most = dense if stated is None else stated
    require(used <= most <= dense, f"client {client}: a prediction takes {used} FLOPs, cost says {most} of {dense}")


def costs_say_what_training_holds(case: Case) -> None:
    """Whatever a Work holds, buffers aside, is kept, received or in `Cost.at_work`, where the gradient comes on top."""
    history = case.history
    for client in history.context.clients:
        cost, at_work = history.cost(client.index), history.cost(client.index).at_work
        work = leaves(history.work(client.index))
        own = [tensor for path, tensor in work if not path.startswith("buffers") and not _counts_steps(tensor)]
        parts = [part for part in (*cost.kept, *(cost.down or ()), *(at_work or ())) if part.name != "gradient"]
        held, most = sum(int(t.count_nonzero()) for t in own), sum(part.num_values for part in parts)
        require(held <= most, f"client {client.index} holds {held} numbers at work, and the cost says {most}")
        gradients = [part.name for part in at_work or ()].count("gradient")
        require(at_work is None or gradients == 1, f"{gradients} parts named 'gradient' in Cost.at_work, not one")


def _counts_steps(tensor: torch.Tensor) -> bool:
    """Whether this is `Moments.step`: one number, which no paper counts."""
    return tensor.dim() == 0 and tensor.dtype == torch.float64


def density_bounds_messages(case: Case) -> None:
    """In the directions that the card names, no part of a message has more values than `density` allows."""
    if not case.card.density_bounds:
        return
    history, density = case.history, case.option("density")
    require(density is not None, "the card has density_bounds, and the method no option 'density'")
    for way, client, update in history.sent:
        if way not in case.card.density_bounds:
            continue
        values = [part.num_values for part in update.parts.values() if part.dtype.is_floating_point]
        most = density * history.context.task.layout.size * len(values)
        require(sum(values) <= most, f"client {client}: {sum(values)} values {way}, density {density} allows {most:g}")
