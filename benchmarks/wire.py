"""Bytes of a message against the entropy of what it holds, and how fast it is encoded and decoded.

One message of ResNet18 (11,173,962 entries), masks by ERK at density 0.5, values N(0, 0.05), one thread. Speeds are MB
of the dense model in float32 per second of CPU time, best of several. Then the bytes of whole runs on the digits,
whose weights are trained ones, with and without `compact`.

    python benchmarks/wire.py [--repeats 5] [--model resnet18] [--density 0.5] [--no-runs]
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from record import surroundings

import sparsona as sp
from sparsona import models
from sparsona.core.layout import Layout
from sparsona.core.tree import Tree, counts
from sparsona.core.update import Part, Support, Update, dense, masked
from sparsona.sparsity.masks import random_mask
from sparsona.sparsity.search import mask_counts
from sparsona.transforms import read_transforms
from sparsona.wire.codec import decode, encode

FORMS = {
    "as it is": [],
    "compact": ["compact"],
    "half + compact": ["half", "compact"],
    "bf16 + compact": ["bf16", "compact"],
}


def messages(layout: Layout, density: float) -> dict[str, Update]:
    """What FedAvg, FedSpa (both ways) and DisPFL send."""
    draws = torch.Generator().manual_seed(0)
    model = Tree(layout, torch.randn(layout.size, generator=draws) * 0.05)
    kept = mask_counts(layout, density, "erk")
    mask, following = (random_mask(layout, kept, seed) for seed in (1, 2))
    parts: dict[str, dict[str, Part]] = {
        "dense": {"model": dense(model)},
        "down, mask known": {"model": masked(model, mask)},
        "up, mask known, next mask": {"update": masked(model, mask), "mask": dense(following)},
        "peers, mask, next mask": {"model": masked(model, mask, Support.BITS), "mask": dense(following)},
    }
    return {name: Update(0, 0, 1.0, found) for name, found in parts.items()}


def mask_entropy(mask: Tree) -> float:
    """Bytes that a mask of so many entries in each tensor takes at least."""

    def bits(share: float) -> float:
        return -sum(p * math.log2(p) for p in (share, 1 - share) if p)

    return sum(size * bits(ones / size) for ones, size in zip(counts(mask), mask.layout.sizes, strict=True)) / 8


def value_entropy(values: torch.Tensor) -> float:
    """Bytes of these values if each plane of their bytes took its entropy."""
    flat = values.view(torch.uint8).numpy().reshape(len(values), -1)
    total = 0.0
    for plane in flat.T:
        shares = np.bincount(plane, minlength=256) / len(plane)
        total -= len(plane) * float(sum(p * math.log2(p) for p in shares if p)) / 8
    return total


def bound(update: Update) -> float:
    """Bytes of an update at the entropy of its masks and of the planes of its values."""
    total = 0.0
    for part in update.parts.values():
        if part.support is Support.BITS:
            assert part.mask is not None
            total += mask_entropy(part.mask)
        total += mask_entropy(part.tree()) if part.is_mask else value_entropy(part.values)
    return total


def seconds(work: Callable[[], Any], repeats: int) -> float:
    """CPU time of the fastest."""
    found = []
    for _ in range(repeats):
        began = time.thread_time()
        work()
        found.append(time.thread_time() - began)
    return min(found)


def measure(update: Update, chain: list[str], repeats: int) -> dict[str, float]:
    for transform in read_transforms(chain):
        update = transform.send(update, {}, None)[0]
    data = encode(update)
    known = {name: part.mask for name, part in update.parts.items() if part.support is Support.KNOWN}
    full = 4 * next(iter(update.parts.values())).layout.size / 1e6

    def read() -> None:
        for name, part in decode(data).parts.items():
            part.plain().tree(known.get(name)).flat  # noqa: B018

    assert encode(decode(data)) == data
    return {
        "mb": len(data) / 1e6,
        "of_dense": len(data) / 1e6 / full,
        "over_entropy": len(data) / bound(update) - 1,
        "encode": full / seconds(lambda: encode(update), repeats),
        "decode": full / seconds(lambda: decode(data), repeats),
        "decode_expand": full / seconds(read, repeats),
    }


def measure_mask(layout: Layout, density: float) -> dict[str, float]:
    """A mask alone: bytes as it is, compact, and at its entropy."""
    mask = random_mask(layout, mask_counts(layout, density, "erk"), 3)
    update = Update(0, 0, 1.0, {"mask": dense(mask)})
    plain, compact = len(encode(update)), len(encode(replace(update, compact=True)))
    least = mask_entropy(mask)
    return {"mb": plain / 1e6, "compact_mb": compact / 1e6, "entropy_mb": least / 1e6, "over": compact / least - 1}


def measure_run(method: str, rounds: int) -> dict[str, float]:
    """Bytes of a run on the digits with trained weights, and of the same run compacted."""
    sent = []
    for chain in ([], ["compact"]):
        with tempfile.TemporaryDirectory() as folder:
            run = sp.train(method, rounds=rounds, clients=10, executor="serial", transform=chain, out=f"{folder}/run")
            sent.append(run.summary["bytes"])
    return {way: sent[1][way] / sent[0][way] for way in ("up", "down")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--density", type=float, default=0.5)
    parser.add_argument("--no-runs", action="store_true")
    parser.add_argument("--out", type=Path, help="also write the figures here, as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    layout = models.outline(args.model, (3, 32, 32), 10).layout
    results: dict[str, Any] = {"entries": layout.size, "messages": {}, "masks": {}, "runs": {}}
    print(f"{layout.size:,} entries, ERK {args.density}\n")
    print("| message | form | MB | of dense | above entropy | encode, decode, decode + expand: MB of dense/s |")
    print("|---|---|---|---|---|---|")
    for name, update in messages(layout, args.density).items():
        for form, chain in FORMS.items():
            found = results["messages"][f"{name}, {form}"] = measure(update, chain, args.repeats)
            speeds = ", ".join(f"{found[key]:.0f}" for key in ("encode", "decode", "decode_expand"))
            over = f"{found['over_entropy']:.1%}"
            print(f"| {name} | {form} | {found['mb']:.3f} | {found['of_dense']:.1%} | {over} | {speeds} |", flush=True)
    print("\n| mask alone, density | MB | compact | entropy | above it |\n|---|---|---|---|---|")
    for density in sorted({args.density, 0.8, 0.5, 0.2, 0.1, 0.05, 0.01}, reverse=True):
        found = results["masks"][density] = measure_mask(layout, density)
        sizes = " | ".join(f"{found[key]:.3f}" for key in ("mb", "compact_mb", "entropy_mb"))
        print(f"| {density} | {sizes} | {found['over']:.1%} |")
    for method in () if args.no_runs else ("fedavg", "fedspa", "dispfl"):
        found = results["runs"][method] = measure_run(method, 5)
        print(f"{method} on the digits, 5 rounds: {', '.join(f'{way} {share:.1%}' for way, share in found.items())}")
    if args.out:
        args.out.write_text(json.dumps({"environment": surroundings(), "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
