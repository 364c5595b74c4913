"""FedSpa against a literal transcription of its Algorithms 1, 2 and 3.

The first half of this file is the paper's pseudocode in plain torch, slow and with explicit loops, sharing no code with
the product. What the text leaves open is read as the sibling code and the cost tables settle it: gradients clipped to
norm 10 over all parameters before masking, weight decay 5e-4, no momentum, a dense step followed by the mask,
ceil(alpha * nnz) weights pruned per tensor, regrowth among all inactive positions (those just pruned included) by the
gradient of one batch in eval mode at the trained weights, ERK over every tensor with floored counts, a plain mean over
the sampled clients, and T-1 in the cosine.

The second half lends it the product's random draws (initial weights and masks, sampled clients, batches) and compares
the two round by round: weights to float tolerance, masks exactly.

The transcription computes in double precision, the product in single precision, so exact masks are owed only where no
choice hangs on a rounding error. The network is small and smooth so that this does not happen on any machine: a few
hundred weights lie far apart, and nothing switches on a rounding error as a ReLU would. That no mask was a matter of
rounding is checked choice by choice (`clearance`).
"""

import itertools
import math
from fractions import Fraction

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sparsona.data.batches import shuffled
from sparsona.data.federate import federate
from sparsona.data.read import read
from sparsona.engine.plan import participation
from sparsona.engine.rounds import received_work, simulate
from sparsona.executors.serial import Serial
from sparsona.experiment import build
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
BATCH_SIZE = 16
DENSITY = 0.5
LR = 0.3
CLEAR = 20.0  # 2 would do; the closest choice here is clear by 88
RUN = {"rounds": ROUNDS, "per_round": 3, "epochs": EPOCHS, "batch_size": BATCH_SIZE, "lr": LR}

# Options of the product, and the same in the transcription's words.
VARIANTS = {
    "dst": ("fedspa", {"seed": 3}, {"search": "dst"}),
    "dst, different masks": ("fedspa", {"seed": 3, "initial_masks": "different"}, {"search": "dst"}),
    "dst, uniform": ("fedspa", {"seed": 3, "allocation": "uniform"}, {"search": "dst"}),
    "dst, sparser": ("fedspa", {"seed": 3, "density": 0.3, "prune_rate": 0.2}, {"search": "dst", "alpha_0": 0.2}),
    "dst, clipped": (
        "fedspa",
        {"seed": 3, "clip_norm": 0.5, "weight_decay": 0.05},
        {"search": "dst", "clip_norm": 0.5, "weight_decay": 0.05},
    ),
    "rsm": ("fedspa-rsm", {"seed": 3}, {"search": "rsm"}),
    "rsm, different masks": ("fedspa-rsm", {"seed": 3, "initial_masks": "different"}, {"search": "rsm"}),
}


def noisy_digits(seed):
    """Digits for six clients, with noise on the pixels: in blank regions, pooling would have exact ties.

    Little of it is for training, to be fast. Clients have unequal amounts, so that a weighted mean would show.
    """
    digits = read("digits")
    x = torch.from_numpy(digits.x)
    x = x + 0.2 * torch.rand(x.shape, generator=torch.Generator().manual_seed(seed))
    return federate(x, digits.y, clients=6, partition="dirichlet:5", test_rate=0.8, seed=seed, num_classes=10)


def network():
    """A convolution and two linear layers: tensors of one, two and four dimensions."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(36, 8), nn.Tanh(), nn.Linear(8, 10)
    )


def make_context(method, options):
    federation = noisy_digits(options["seed"])
    return build.make_context(build.make_config(method, RUN | options, federation, network), federation, network)


class Recorder(Serial):
    """The product's executor, which also keeps what clients upload."""

    def __init__(self, context):
        super().__init__(context)
        self.uploads = {}

    def run(self, jobs):
        for outcome in super().run(jobs):
            self.uploads[outcome.client] = decode(outcome.message).parts["update"]
            yield outcome


def play(method, options):
    """The product's setting, its populations before the first and after every round, and each round's U_{k,t}."""
    context = make_context(method, options)
    recorder = Recorder(context)
    star = simulate(context, recorder)
    populations, uploads = [star.start()], []
    for t in range(ROUNDS):
        before = populations[-1]
        recorder.uploads = {}
        populations.append(star.play(before, t)[0])
        uploads.append({k: part.tree(before.server.masks[k]) for k, part in recorder.uploads.items()})
    return context, populations, uploads


class Draws:
    """The product's random draws, in the form the transcription takes them."""

    def __init__(self, context, dtype):
        self.context, self.dtype = context, dtype

    def sampled(self, t):
        return participation(self.context.plan, self.context.clients, t).trains

    def batches(self, t, k):
        return [pair for epoch in range(EPOCHS) for pair in self._pass(t, k, f"train/{epoch}")]

    def probe(self, t, k):
        return self._pass(t, k, "probe/1")[0]

    def _pass(self, t, k, purpose):
        seed = self.context.plan.round_at(t).on(self.context.clients[k]).seeds.own(purpose)
        examples = self.context.federation.examples(k, "train")
        return [(batch.inputs.to(self.dtype), batch.targets) for batch in shuffled(examples, BATCH_SIZE, seed)]


def as_dict(tree, dtype):
    return {name: tree[name].to(dtype) for name in tree}


def transcribe(context, start, options):
    """The transcription, in double precision, on the product's draws: a list of what `fedspa` yields."""
    model = network().double()
    draws = Draws(context, torch.float64)
    w_0 = as_dict(context.params, torch.float64)
    masks_0 = {k: as_dict(mask, torch.float64) for k, mask in start.server.masks.items()}
    return list(fedspa(model, w_0, masks_0, draws.sampled, draws.batches, draws.probe, rounds=ROUNDS, lr=LR, **options))


def clearance(exact, rounded, edge):
    """By how many times its rounding error a choice was clear: beyond 2, no rounding error can have changed it.

    Around the edge, two values may each have moved by the largest error found among values up to twice the edge; larger
    values are away from the edge by more than the edge itself.
    """
    if edge is None:
        return math.inf
    low, high = edge
    if low == high:
        return 0.0
    error = (exact.abs() - rounded.abs()).abs()
    around = error[exact.abs() <= 2 * high].max()
    return min(float((high - low) / around), float(high / error.max()))


def clearances(context, before, uploads, t, diary):
    """How clear each choice of round t was, given the weights at which the product made it."""
    model = network()
    draws = Draws(context, torch.float32)
    for k, entry in diary.items():
        w = {name: before.params[name] * before.masks[k][name] - uploads[k][name] for name in before.params}
        g = dense_gradient(model, w, draws.probe(t, k))
        for name, (prune_edge, grow_edge) in entry["edges"].items():
            yield clearance(entry["w"][name], w[name], prune_edge)
            yield clearance(entry["g"][name], g[name], grow_edge)


def expected_counts(shapes, options):
    counts = uniform_counts if options.get("allocation") == "uniform" else erk_counts
    return counts(shapes, options.get("density", DENSITY))


# --------------------------------------------------------------------------- the comparison


def test_the_transcribed_erk_gives_the_published_densities():
    """LeNet5 with 26 classes at density 0.5: convolutions 1 and 0.476, linear layers 0.484 and 1, biases dense."""
    shapes = {"c1": (20, 1, 5, 5), "b1": (20,), "c2": (50, 20, 5, 5), "b2": (50,)}
    shapes |= {"f1": (500, 800), "b3": (500,), "f2": (26, 500), "b4": (26,)}
    counts = erk_counts(shapes, 0.5)
    densities = {name: counts[name] / math.prod(shape) for name, shape in shapes.items()}
    assert densities == pytest.approx(
        {"c1": 1, "b1": 1, "c2": 0.476, "b2": 1, "f1": 0.484, "b3": 1, "f2": 1, "b4": 1}, abs=5e-4
    )
    assert 0 <= 0.5 * 439_096 - sum(counts.values()) < len(shapes)


def test_defaults_are_the_papers():
    config = build.make_config("fedspa", {})
    asked = {"lr": 0.1, "epochs": 5, "weight_decay": 5e-4, "clip_norm": 10.0, "density": 0.5, "prune_rate": 0.5}
    asked |= {"search": "dst", "regrowth": "gradient", "initial_masks": "same", "allocation": "erk", "anneal": "paper"}
    asked |= {"optimizer": "sgd", "momentum": 0.0, "nesterov": False, "optimizer_memory": "reset"}
    others = {"beta1", "beta2", "eps"}  # of optimizers that are not asked for
    assert {key: value for key, value in config.options.items() if key not in others} == asked
    assert config.lr_decay == 0.998
    assert build.make_config("fedspa-rsm", {}).options == config.options | {"search": "rsm"}


@pytest.mark.parametrize("variant", VARIANTS)
def test_initial_masks(variant):
    method, options, _ = VARIANTS[variant]
    context = make_context(method, options)
    masks = simulate(context, Serial(context)).start().server.masks
    shapes = {name: tuple(context.params[name].shape) for name in context.params}
    assert sorted(masks) == list(range(6))
    for k, mask in masks.items():
        assert {name: int(mask[name].sum()) for name in mask} == expected_counts(shapes, options)
        held = context.fresh_state(k).mask
        assert all(torch.equal(mask[name], held[name]) for name in mask), "server and client disagree"
    same = options.get("initial_masks", "same") == "same"
    for one, other in itertools.combinations(masks.values(), 2):
        assert all(torch.equal(one[name], other[name]) for name in one) is same


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_round_is_the_papers(variant):
    method, options, transcribed_options = VARIANTS[variant]
    context, populations, uploads = play(method, options)
    rounds = transcribe(context, populations[0], transcribed_options)
    shapes = {name: tuple(context.params[name].shape) for name in context.params}
    counts = expected_counts(shapes, options)
    evolves = transcribed_options["search"] == "dst"
    largest_norm = 0.0
    for t, (w, masks, diary) in enumerate(rounds):
        before, after = populations[t].server, populations[t + 1].server
        assert sorted(uploads[t]) == sorted(diary)
        assert len(diary) == 3
        for name in w:
            torch.testing.assert_close(after.params[name].double(), w[name], rtol=1e-4, atol=1e-6)
            assert (after.params[name] - before.params[name]).abs().max() > 1e-4, "nothing happened"
            for k, mask in masks.items():
                assert torch.equal(after.masks[k][name], mask[name].bool()), f"round {t}, client {k}, {name}"
                assert int(after.masks[k][name].sum()) == counts[name]
        for k, entry in diary.items():
            largest_norm = max(largest_norm, entry["norm"])
            held = populations[t + 1].states[k].mask
            moved = 0
            for name in w:
                torch.testing.assert_close(
                    before.params[name].double() * before.masks[k][name] - uploads[t][k][name],
                    entry["w"][name],
                    rtol=1e-4,
                    atol=1e-6,
                )
                assert torch.equal(held[name], after.masks[k][name]), "server and client disagree"
                moved += int((after.masks[k][name] != before.masks[k][name]).sum())
                # No rounding decides how many weights to prune.
                exact = entry["alpha"] * counts[name]
                assert exact == round(exact) or abs(exact - round(exact)) > 1e-9
            # The paper's rate is 0 in the last round, and only there.
            assert (moved > 0) is (evolves and t < ROUNDS - 1)
        if evolves:
            assert min(clearances(context, before, uploads[t], t, diary)) > CLEAR, "a near tie: use another seed"
    if "clip_norm" in options:
        assert largest_norm > options["clip_norm"], "nothing was clipped"

    # What a client would use now, and is evaluated on: its next mask on the server's weights.
    for k in range(6):
        received = received_work(context, populations[-1], k).params
        for name, value in rounds[-1][0].items():
            torch.testing.assert_close(received[name].double(), value * rounds[-1][1][k][name], rtol=1e-4, atol=1e-6)
