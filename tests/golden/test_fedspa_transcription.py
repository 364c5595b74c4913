"""FedSpa against a literal transcription of its Algorithms 1, 2 and 3.

The first half of this file is the paper's pseudocode in plain torch, slow and with explicit loops, sharing no code with
the product. What the text leaves open is read as the sibling code and the cost tables settle it: gradients clipped to
norm 10 over all parameters before masking, weight decay 5e-4, no momentum, a dense step followed by the mask,
ceil(alpha * nnz) weights pruned per tensor, regrowth among all inactive positions (those just pruned included) by the
gradient of one batch in eval mode at the trained weights, ERK over every tensor with floored counts, a plain mean over
the sampled clients, and T-1 in the cosine.

The second half lends it the product's random draws (initial weights and masks, sampled clients, batches) and compares
the two round by round: weights to float tolerance, masks exactly. The transcription runs in double precision, the
product in single precision, so an exact mask is only owed where no choice hangs on a rounding error. The transcription
therefore also runs in single precision: how far its two runs are apart is the rounding noise, and every choice of every
client must be clearer than that noise by a wide margin.
"""

import copy
import itertools
import math
from fractions import Fraction

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sparsona import api
from sparsona.data.batches import shuffled
from sparsona.engine.plan import participation
from sparsona.engine.serial import Serial
from sparsona.engine.star import Star, received_work
from sparsona.models.cnn import digits_cnn
from sparsona.wire.codec import decode

# --------------------------------------------------------------------------- the paper, transcribed


def erk_counts(shapes, density, power=1):
    """Kept entries per tensor under Erdos-Renyi-Kernel, in exact fractions. Every tensor counts, biases too."""
    density = Fraction(str(density))
    size, raw = {}, {}
    for name, shape in shapes.items():
        size[name] = math.prod(shape)
        raw[name] = Fraction(sum(shape), math.prod(shape)) ** power
    dense = set()
    while True:
        rhs = Fraction(0)
        divisor = Fraction(0)
        for name in shapes:
            if name in dense:
                rhs -= (1 - density) * size[name]
            else:
                rhs += density * size[name]
                divisor += raw[name] * size[name]
        eps = rhs / divisor
        largest = max(raw[name] for name in shapes if name not in dense)
        if eps * largest <= 1:
            break
        for name in shapes:
            if raw[name] == largest:
                dense.add(name)
    counts = {}
    for name in shapes:
        if name in dense:
            counts[name] = size[name]
        else:
            counts[name] = math.floor(eps * raw[name] * size[name])
    return counts


def uniform_counts(shapes, density):
    """Kept entries per tensor when every tensor, biases too, gets the same density."""
    return {name: math.floor(Fraction(str(density)) * math.prod(shape)) for name, shape in shapes.items()}


def pruning_rate(alpha_0, t, rounds):
    """Appendix A: alpha_t = 0.5 * alpha_0 * (1 + cos(t / (T - 1) * pi))."""
    return 0.5 * alpha_0 * (1 + math.cos(t / (rounds - 1) * math.pi))


def client_main_loop(model, w_start, mask, batches, lr, weight_decay, clip_norm):
    """Algorithm 1, lines 12-17: the trained weights w_{k,t,N} and the largest gradient norm met on the way."""
    model.load_state_dict(w_start)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.0, weight_decay=weight_decay)
    largest_norm = 0.0
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        largest_norm = max(largest_norm, float(norm))
        optimizer.step()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.mul_(mask[name])
    return {name: p.detach().clone() for name, p in model.named_parameters()}, largest_norm


def dense_gradient(model, w_trained, batch):
    """Algorithm 2, line 5: the gradient of one batch with respect to every coordinate, in eval mode."""
    model.load_state_dict(w_trained)
    model.eval()
    model.zero_grad()
    x, y = batch
    F.cross_entropy(model(x), y).backward()
    return {name: p.grad.detach().clone() for name, p in model.named_parameters()}


def next_mask(weight, mask, gradient, alpha):
    """Algorithm 2, lines 7-8, for one tensor: the next mask, and the edges at which its two choices were made.

    An edge is (largest magnitude on one side, smallest on the other), or None where there was nothing to choose.
    """
    size = weight.numel()
    w = [abs(value) for value in weight.flatten().tolist()]
    g = [abs(value) for value in gradient.flatten().tolist()]
    m = [value != 0 for value in mask.flatten().tolist()]

    active = sorted((i for i in range(size) if m[i]), key=lambda i: w[i])
    to_remove = math.ceil(alpha * len(active))
    removed, kept = active[:to_remove], active[to_remove:]
    for i in removed:
        m[i] = False

    candidates = sorted((i for i in range(size) if not m[i]), key=lambda i: g[i])
    left_out, grown = candidates[: len(candidates) - to_remove], candidates[len(candidates) - to_remove :]
    for i in grown:
        m[i] = True

    # Where all candidates come back, it does not matter which were pruned.
    prune_edge = (w[removed[-1]], w[kept[0]]) if removed and kept and left_out else None
    grow_edge = (g[left_out[-1]], g[grown[0]]) if grown and left_out else None
    return torch.tensor(m).reshape(mask.shape).to(mask.dtype), prune_edge, grow_edge


def fedspa(
    model,
    w_0,
    masks_0,
    sampled,
    batches,
    probe,
    *,
    search,
    rounds,
    lr=0.1,
    lr_decay=0.998,
    weight_decay=5e-4,
    clip_norm=10.0,
    alpha_0=0.5,
):
    """Algorithm 1: yields (w_{t+1}, all m_{k,t+1}, a diary of what decided the masks) after each round t.

    sampled(t) are the clients of S_t; batches(t, k) and probe(t, k) the data client k meets in round t.
    """
    w = {name: tensor.clone() for name, tensor in w_0.items()}
    masks = {k: dict(mask) for k, mask in masks_0.items()}
    for t in range(rounds):
        lr_t = lr * lr_decay**t
        alpha_t = pruning_rate(alpha_0, t, rounds)
        s_t = sampled(t)
        next_masks = {k: dict(mask) for k, mask in masks.items()}  # inherited if not chosen
        updates = []
        diary = {}
        for k in s_t:
            w_start = {name: masks[k][name] * w[name] for name in w}
            w_trained, largest_norm = client_main_loop(
                model, w_start, masks[k], batches(t, k), lr_t, weight_decay, clip_norm
            )
            updates.append({name: w_start[name] - w_trained[name] for name in w})
            diary[k] = {"w": w_trained, "norm": largest_norm, "alpha": alpha_t}
            if search == "dst":  # Algorithm 2
                diary[k]["g"] = dense_gradient(model, w_trained, probe(t, k))
                diary[k]["edges"] = {}
                for name in w:
                    next_masks[k][name], prune_edge, grow_edge = next_mask(
                        w_trained[name], masks[k][name], diary[k]["g"][name], alpha_t
                    )
                    diary[k]["edges"][name] = (prune_edge, grow_edge)
            else:  # Algorithm 3: m_{k,t+1} = m_{k,t}
                assert search == "rsm"
        for name in w:
            total = torch.zeros_like(w[name])
            for update in updates:
                total += update[name]
            w[name] = w[name] - total / len(s_t)
        masks = next_masks
        yield {name: tensor.clone() for name, tensor in w.items()}, masks, diary


# --------------------------------------------------------------------------- the product, and its draws

ROUNDS = 6
EPOCHS = 2
BATCH_SIZE = 32
RUN = {"data": "digits", "clients": 6, "per_round": 3, "model": "digits-cnn", "rounds": ROUNDS}
RUN |= {"batch_size": BATCH_SIZE, "epochs": EPOCHS, "partition": "dirichlet:1", "test_rate": 0.7, "lr": 0.3}

VARIANTS = {
    "dst": ("fedspa", {"seed": 0}, {}),
    "dst, different masks": ("fedspa", {"seed": 0, "initial_masks": "different"}, {}),
    "dst, uniform": ("fedspa", {"seed": 0, "allocation": "uniform"}, {}),
    "dst, sparser": ("fedspa", {"seed": 0, "density": 0.3, "prune_rate": 0.2}, {"alpha_0": 0.2}),
    "dst, clipped": (
        "fedspa",
        {"seed": 0, "clip_norm": 0.5, "weight_decay": 0.05},
        {"clip_norm": 0.5, "weight_decay": 0.05},
    ),
    "rsm": ("fedspa-rsm", {"seed": 0}, {}),
    "rsm, different masks": ("fedspa-rsm", {"seed": 0, "initial_masks": "different"}, {}),
}


class Recorder(Serial):
    """The product's executor, which also keeps what clients upload."""

    def __init__(self, setting):
        super().__init__(setting)
        self.uploads = {}

    def run(self, jobs):
        for outcome in super().run(jobs):
            self.uploads[outcome.client] = decode(outcome.message).parts["update"]
            yield outcome


def play(method, options):
    """The product's setting, its populations before the first and after every round, and each round's U_{k,t}."""
    setting = api._setting(api.make_config(method, RUN | options), None, None)
    recorder = Recorder(setting)
    star = Star(setting, recorder)
    populations, uploads = [star.start()], []
    for t in range(ROUNDS):
        before = populations[-1]
        recorder.uploads = {}
        populations.append(star.play(before, t)[0])
        uploads.append({k: part.tree(before.server.masks[k]) for k, part in recorder.uploads.items()})
    return setting, populations, uploads


class Draws:
    """The product's random draws, in the form the transcription takes them."""

    def __init__(self, setting, dtype):
        self.setting, self.dtype = setting, dtype

    def sampled(self, t):
        return participation(self.setting.plan, self.setting.clients, t).trains

    def batches(self, t, k):
        return [pair for epoch in range(EPOCHS) for pair in self._pass(t, k, f"train/{epoch}")]

    def probe(self, t, k):
        return self._pass(t, k, "probe/1")[0]

    def _pass(self, t, k, purpose):
        seed = self.setting.plan.round_at(t).on(self.setting.clients[k]).seeds.own(purpose)
        examples = self.setting.federation.examples(k, "train")
        return [(batch.inputs.to(self.dtype), batch.targets) for batch in shuffled(examples, BATCH_SIZE, seed)]


def as_dict(tree, dtype):
    return {name: tree[name].to(dtype) for name in tree}


def transcribe(setting, start, search, options):
    """The transcription, in double precision, on the product's draws: a list of what `fedspa` yields."""
    model = digits_cnn((1, 8, 8), 10).double()
    draws = Draws(setting, torch.float64)
    w_0 = as_dict(setting.params, torch.float64)
    masks_0 = {k: as_dict(mask, torch.float64) for k, mask in start.server.masks.items()}
    options = {"search": search, "rounds": ROUNDS, "lr": RUN["lr"]} | options
    return list(fedspa(model, w_0, masks_0, draws.sampled, draws.batches, draws.probe, **options))


def clearance(exact, rounded, edge):
    """By how many times its rounding error a choice was clear: beyond 2, no rounding error can have changed it.

    Around the edge, two values may each have moved by the largest error found among values up to twice the edge; larger
    values are away from the edge by more than the edge itself.
    """
    if edge is None:
        return math.inf
    low, high = edge
    error = (exact.abs() - rounded.abs()).abs()
    around = error[exact.abs() <= 2 * high].max()
    return min(float((high - low) / around), float(high / error.max()))
