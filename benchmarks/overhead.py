"""What the engine costs over the bare in-place loop that a person would write by hand, on the same work.

Same network, data, batches and arithmetic (clip, decay, mask), one thread, interleaved, best of several.

    python benchmarks/overhead.py [--repeats 9] [--epochs 2]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from record import surroundings
from torch import nn

import sparsona as sp
from sparsona.core.task import with_channels_last
from sparsona.data.batches import shuffled
from sparsona.engine.rounds import simulate
from sparsona.engine.turn import perform
from sparsona.executors.serial import Serial
from sparsona.experiment.build import make_config, make_context
from sparsona.wire.codec import decode, encode

CASES = {
    "lenet5, 28x28, 500 examples, batch 50": ((1, 28, 28), "lenet5", 500, 50),
    "digits-cnn, 8x8, 60 examples, batch 16": ((1, 8, 8), "digits-cnn", 60, 16),
}


def federation_of(shape: tuple[int, ...], examples: int) -> sp.Federation:
    draws = torch.Generator().manual_seed(0)
    clients = []
    for _ in range(2):
        x = torch.rand((examples, *shape), generator=draws)
        y = torch.randint(10, (examples,), generator=draws)
        clients.append((x, y, x[:20], y[:20]))
    return sp.Federation.from_clients(clients, validation_rate=0.0, num_classes=10)


def bare_loop(module: nn.Module, mask: dict[str, torch.Tensor], context, round_, epochs: int) -> float:
    """Forward, backward, clip, decay, step, mask, all in place: nothing is counted, sent, checked or kept. Channels
    last, as the engine has them: what is measured is the engine, not the layout."""
    examples = context.federation.examples(0, "train")
    params = list(module.named_parameters())
    began = time.thread_time()
    module.train()
    for epoch in range(epochs):
        for batch in shuffled(examples, round_.batch_size, round_.seeds.own(f"train/{epoch}")):
            loss = nn.functional.cross_entropy(module(with_channels_last(batch.inputs)), batch.targets)
            grads = torch.autograd.grad(loss, [value for _, value in params])
            with torch.no_grad():
                norm = torch.sqrt(sum(grad.square().sum() for grad in grads))
                scale = 0.1 * round_.lr_scale * min(1.0, 10.0 / (float(norm) + 1e-6))
                for (name, value), grad in zip(params, grads, strict=True):
                    value.mul_(1 - 0.1 * round_.lr_scale * 5e-4).sub_(grad, alpha=scale).mul_(mask[name])
    return time.thread_time() - began


def measure(shape, model: str, examples: int, batch: int, epochs: int, repeats: int) -> dict[str, float]:
    federation = federation_of(shape, examples)
    options = {"rounds": 10, "per_round": 1, "epochs": epochs, "batch_size": batch, "search": "rsm"}
    context = make_context(make_config("fedspa", options, federation, model), federation, model)
    star = simulate(context, Serial(context))
    population = star.start()
    round_ = context.plan.round_at(0)
    reply = context.method.server.reply(population.server, context.clients[0], round_)
    mask = {name: value.float() for name, value in population.server.masks[0].items()}
    module = context.task.module(reply.parts["model"].tree(population.server.masks[0]), context.buffers)
    module = module.to(memory_format=torch.channels_last)
    job = star._job("train", 0, population.server, round_, (), {})
    bound = round_.on(context.clients[0])
    times: dict[str, list[float]] = {"bare": [], "turn": [], "turn and wire": []}
    perform(context, job)
    bare_loop(module, mask, context, bound, 1)
    for _ in range(repeats):
        times["bare"].append(bare_loop(module, mask, context, bound, epochs))
        began = time.thread_time()
        outcome = perform(context, job)
        turn = time.thread_time() - began
        began = time.thread_time()
        encode(reply)
        decode(outcome.message)
        times["turn"].append(turn)
        times["turn and wire"].append(turn + time.thread_time() - began)
    best = {name: min(values) for name, values in times.items()}
    pairs = [b / a for a, b in zip(times["bare"], times["turn"], strict=True)]
    return {
        "bare_ms_per_step": 1e3 * best["bare"] / (epochs * -(-examples // batch)),
        "turn_over_bare": best["turn"] / best["bare"],
        "turn_over_bare_median_of_pairs": statistics.median(pairs),
        "turn_and_wire_over_bare": best["turn and wire"] / best["bare"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--out", type=Path, help="also write the figures here, as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = {name: measure(*case, args.epochs, args.repeats) for name, case in CASES.items()}
    for name, found in results.items():
        print(name)
        for key, value in found.items():
            print(f"  {key:32} {value:.3f}")
    if args.out:
        args.out.write_text(json.dumps({"environment": surroundings(), "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
