"""What dropping filters saves: pFedGate's CIFAR networks at a budget of s, dense against compact, in one run.

A step is a forward and a backward pass, with gradients of the whole model and of the gate's factors; the gate itself is
left out, and the knapsack is timed apart. Scores are random: three draws, each timed several times next to the dense
network, of which the best counts; ratios are of means over the draws. One thread.

    python benchmarks/gates.py [--repeats 5]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from record import surroundings
from torch import Tensor
from torch.nn.functional import cross_entropy

from sparsona.core.task import Task
from sparsona.methods.pfedgate.blocks import Blocks, channels, filters, spread
from sparsona.methods.pfedgate.compact import chain, compact
from sparsona.methods.pfedgate.knapsack import greedy
from sparsona.models import builder

NETWORKS = {"pfedgate-cifar10": 10, "pfedgate-cifar100": 100}
SHARES = (1.0, 0.5, 0.3)
KINDS = ("dense", "masked", "compact", "knapsack", "dense inference", "compact inference")
BATCH, BLOCKS, SMALLEST, DRAWS = 128, 5, 0.2, 3


def chosen(blocks: Blocks, costs: tuple[int, ...], share: float, scores: Tensor) -> Tensor:
    always = torch.tensor(blocks.always)
    own = torch.tensor(costs)
    left = int(share * sum(costs)) - int((own * always).sum())
    return greedy(scores, own * ~always, torch.tensor(left)).maximum(always.float())


def seconds(work: Callable[[], object]) -> float:
    began = time.thread_time()
    work()
    return time.thread_time() - began


def measure(name: str, classes: int, split: Callable, counted: str, share: float, repeats: int) -> dict[str, float]:
    task = Task(builder(name, (3, 32, 32), classes), (3, 32, 32), classes)
    blocks = split(task.layout, BLOCKS, SMALLEST)
    links, (params, buffers) = chain(task, blocks), task.init(0)
    draws = torch.Generator().manual_seed(0)
    images, labels = torch.rand((BATCH, 3, 32, 32), generator=draws), torch.randint(classes, (BATCH,), generator=draws)
    costs = blocks.sizes if counted == "parameters" else blocks.flops
    flat = params.flat.requires_grad_()

    def step(model: Callable[[], object], *wanted: Tensor) -> None:
        outputs, _ = task.forward(model(), buffers, images, train=True)
        torch.autograd.grad(cross_entropy(outputs, labels), [flat, *wanted])

    kept_share, mean = 0.0, dict.fromkeys(KINDS, 0.0)
    for _ in range(DRAWS):
        scores = torch.rand(len(blocks), generator=draws)
        scale = (scores + 0.5).requires_grad_()
        kept = chosen(blocks, costs, share, scores)
        kept_share += float((kept * torch.tensor(blocks.sizes)).sum()) / task.layout.size / DRAWS
        with torch.no_grad():
            ready = compact(links, params, kept, scale)
        works = (
            partial(step, lambda: params.like(flat)),
            partial(step, lambda k=kept, s=scale: params.like(flat * spread(blocks, k * s)), scale),
            partial(step, lambda k=kept, s=scale: compact(links, params.like(flat), k, s), scale),
            partial(chosen, blocks, costs, share, scores),
            partial(task.forward, params, buffers, images, train=False),
            partial(task.forward, ready, buffers, images, train=False),
        )
        times: dict[str, list[float]] = {what: [] for what in KINDS}
        for _ in range(repeats + 1):  # the first one warms up
            for what, work in zip(KINDS, works, strict=True):
                with torch.set_grad_enabled("inference" not in what):
                    times[what].append(seconds(work))
        for what, found in times.items():
            mean[what] += min(found[1:]) / DRAWS
    return {
        "kept_parameters": kept_share,
        "dense_ms_per_step": 1e3 * mean["dense"],
        "compact_over_dense": mean["compact"] / mean["dense"],
        "masked_over_dense": mean["masked"] / mean["dense"],
        "knapsack_over_dense": mean["knapsack"] / mean["dense"],
        "inference_compact_over_dense": mean["compact inference"] / mean["dense inference"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="also write the figures here, as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    for name, classes in NETWORKS.items():
        for split, counted in ((filters, "parameters"), (filters, "flops"), (channels, "flops")):
            for share in SHARES:
                case = f"{name}, {split.__name__}, budget in {counted}, s = {share}"
                results[case] = found = measure(name, classes, split, counted, share, args.repeats)
                print(case)
                for key, value in found.items():
                    print(f"  {key:32} {value:.3f}")
    if args.out:
        args.out.write_text(json.dumps({"environment": surroundings(), "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
