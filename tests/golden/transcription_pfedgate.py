"""pFedGate as its paper writes it: Algorithm 1, section 5.2 (gating layer, blocks, sparse weights) and appendices A, G.

Plain loops in double precision; shares no code with the product. The model's gradients come from `mlp_by_hand`, the
step from the adapted model through M' to theta, G and M is written out here, and only the gating layer in front of G
and M is differentiated by autograd.

`selection` is "paper" (the first block of floor(d_l * s_min) entries, the others of equal size, rounded up; one budget
over all blocks, |I.W| / d <= s) or "authors" (equal chunks of ceil(d_l / B); the first one free of charge; a budget for
linear layers and one for the rest, each round(size of what can be chosen * (s - s_min)); greedy by scores rounded to
0..10). `straight_through` is "paper" (M' = M * (I - sg(G) + G): dropped blocks still teach the gate) or "authors"
(M' = M * (1 - sg(G) + G) where kept, nothing where dropped; with s = 1 the published code leaves before that and M' =
M: G gets no gradient). `aggregation` is "index" (appendix G) or "dense" (the mean
of all clients' models by amount of data; those who were not sampled count with the model as it was).
"""

import itertools
import math
from fractions import Fraction

import torch

# --------------------------------------------------------------------------- the gating layer (5.2.1)

EPS = 1e-5


def switchable_norm(phi, buffers, x, training, unbiased):
    """Luo et al.: instance, layer and batch norm, mixed by softmax weights of their own for means and variances."""
    n, channels = x.shape[:2]
    flat = x.reshape(n, channels, -1)
    mean_in = flat.mean(2)
    var_in = ((flat - mean_in[:, :, None]) ** 2).sum(2) / (flat.shape[2] - (1 if unbiased else 0))
    square_in = var_in + mean_in**2
    mean_ln = mean_in.mean(1, keepdim=True)
    var_ln = square_in.mean(1, keepdim=True) - mean_ln**2
    after = dict(buffers)
    if training:
        mean_bn = mean_in.mean(0)
        var_bn = square_in.mean(0) - mean_bn**2
        after["norm.mean"] = 0.9 * buffers["norm.mean"] + 0.1 * mean_bn.detach()
        after["norm.var"] = 0.9 * buffers["norm.var"] + 0.1 * var_bn.detach()
    else:
        mean_bn, var_bn = buffers["norm.mean"], buffers["norm.var"]
    a = torch.exp(phi["norm.mean_weight"]) / torch.exp(phi["norm.mean_weight"]).sum()
    b = torch.exp(phi["norm.var_weight"]) / torch.exp(phi["norm.var_weight"]).sum()
    mean = a[0] * mean_in + a[1] * mean_ln + a[2] * mean_bn
    var = b[0] * var_in + b[1] * var_ln + b[2] * var_bn
    normed = (flat - mean[:, :, None]) / torch.sqrt(var[:, :, None] + EPS)
    return normed * phi["norm.weight"][:, None] + phi["norm.bias"][:, None], after


def path(phi, buffers, x, which, training, post_norm, sigmoid):
    """Linear, batch norm, sigmoid: one row per example."""
    after = dict(buffers)
    z = x @ phi[f"{which}.weight"].T + phi[f"{which}.bias"]
    if post_norm:
        if training:
            mean = z.mean(0)
            var = ((z - mean) ** 2).mean(0)
            n = len(z)
            after[f"{which}.mean"] = 0.9 * buffers[f"{which}.mean"] + 0.1 * mean.detach()
            after[f"{which}.var"] = 0.9 * buffers[f"{which}.var"] + 0.1 * var.detach() * n / (n - 1)
        else:
            mean, var = buffers[f"{which}.mean"], buffers[f"{which}.var"]
        z = (z - mean) / torch.sqrt(var + EPS) * phi[f"{which}.scale"] + phi[f"{which}.shift"]
    return (1 / (1 + torch.exp(-z)) if sigmoid else z), after


def gate(phi, buffers, x, training, *, pre_norm=True, post_norm=True, sigmoid=True, unbiased=False):
    """(scores, weights, buffers) with one row per example and one column per block. One path: both are the same."""
    x = x.double()
    if pre_norm:
        x, buffers = switchable_norm(phi, buffers, x, training, unbiased)
    x = x.reshape(len(x), -1)
    scores, buffers = path(phi, buffers, x, "scores", training, post_norm, sigmoid)
    if "weights.weight" not in phi:
        return scores, scores, buffers
    weights, buffers = path(phi, buffers, x, "weights", training, post_norm, sigmoid)
    return scores, weights, buffers


# --------------------------------------------------------------------------- blocks (5.2.2) and their choice (5.2.3)


def split(size, factor, s_min, selection):
    """Where each block of a flat tensor begins and ends, and whether it is the first one, which is never dropped."""
    if selection == "authors":
        chunk = math.ceil(size / factor)
        ends = [min(size, chunk * (i + 1)) for i in range(factor)]
    else:
        first = math.floor(Fraction(str(s_min)) * size)
        chunk = math.ceil((size - first) / (factor - 1))
        ends = [first] + [min(size, first + chunk * (i + 1)) for i in range(factor - 1)]
    # A tensor may be too short for so many blocks, or for a first one.
    return [(begin, end, i == 0) for i, (begin, end) in enumerate(itertools.pairwise([0, *ends])) if end > begin]


class Blocks:
    """All blocks of a model: their places (tensor, begin, end), which are never dropped, which are of linear layers."""

    def __init__(self, shapes, linear, factor, s_min, selection, operators=None):
        """`operators` are names of tensors that are one vector, end to end; None: every tensor is one."""
        self.places, self.sizes, self.first, self.linear = [], [], [], []
        for names in operators or [[name] for name in shapes]:
            entries = [(name, place) for name in names for place in range(math.prod(shapes[name]))]
            for begin, end, is_first in split(len(entries), factor, s_min, selection):
                places = []
                for name in names:
                    own = [place for tensor, place in entries[begin:end] if tensor == name]
                    places += [(name, own[0], own[-1] + 1)] if own else []
                self.add(places, is_first, names[0] in linear)

    def add(self, places, is_first, is_linear):
        self.places.append(places)
        self.sizes.append(sum(end - begin for _, begin, end in places))
        self.first.append(is_first)
        self.linear.append(is_linear)

    @property
    def total(self):
        return sum(self.sizes)

    def spread(self, values, like):
        """One value per block becomes one per entry."""
        result = {name: torch.zeros(tensor.numel(), dtype=torch.float64) for name, tensor in like.items()}
        for value, places in zip(values, self.places, strict=True):
            for name, begin, end in places:
                result[name][begin:end] = float(value)
        return {name: flat.reshape(like[name].shape) for name, flat in result.items()}


class Filters(Blocks):
    """Blocks filter by filter: rows of a layer's weight with their entries of the bias, cut as entries are otherwise.

    One row at least is never dropped, and of the last layer none: its rows are the classes.
    """

    def __init__(self, shapes, layers, factor, s_min):
        self.places, self.sizes, self.first, self.linear = [], [], [], []
        for weight, bias in layers[:-1]:
            rows, width = shapes[weight][0], math.prod(shapes[weight][1:])
            least = max(math.floor(Fraction(str(s_min)) * rows), 1)
            for begin, end, is_first in split(rows, factor, Fraction(least, rows), "paper"):
                self.add([(weight, begin * width, end * width), (bias, begin, end)], is_first, False)
        for name in layers[-1]:
            self.add([(name, 0, math.prod(shapes[name]))], True, False)


def greedy(scores, sizes, budget):
    """By falling score, the lower index first among equals; what does not fit is passed over.

    Returns the chosen ones, and the narrowest gap between two neighbours in that order who could not trade places
    without a change of the choice.
    """

    def walk(order):
        chosen, left = set(), budget
        for i in order:
            if sizes[i] <= left:
                chosen.add(i)
                left -= sizes[i]
        return chosen

    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    chosen, gaps = walk(order), []
    for place, (a, b) in enumerate(itertools.pairwise(order)):
        # Equal scores are no matter of rounding: they were cut off at s_min, or rounded on purpose.
        if scores[a] != scores[b] and walk([*order[:place], b, a, *order[place + 2 :]]) != chosen:
            gaps.append(scores[a] - scores[b])
    return chosen, min(gaps, default=math.inf)


def exact(scores, sizes, budget):
    """The best of all subsets, and by how much it beats the next best."""
    values = []
    for choice in itertools.product((0, 1), repeat=len(scores)):
        if sum(size for size, taken in zip(sizes, choice, strict=True) if taken) <= budget:
            values.append((sum(score for score, taken in zip(scores, choice, strict=True) if taken), choice))
    values.sort(reverse=True)
    best = {i for i, taken in enumerate(values[0][1]) if taken}
    return best, values[0][0] - values[1][0] if len(values) > 1 else math.inf


def select(scores, blocks, s, s_min, selection, solver):
    """I*, one 0 or 1 per block, and how narrow the closest decision was."""
    scores = [float(score) for score in scores]
    share = Fraction(str(s))
    keep = [1 if first else 0 for first in blocks.first]
    if share >= 1:
        return [1] * len(keep), math.inf
    free = [i for i in range(len(keep)) if not blocks.first[i]]
    if selection == "authors":
        margin = math.inf
        for linear in (True, False):
            group = [i for i in free if blocks.linear[i] is linear]
            # The published code rounds half to even, as Python does.
            budget = round(sum(blocks.sizes[i] for i in group) * (share - Fraction(str(s_min))))
            rounded = [round(10 * scores[i]) for i in group]
            margin = min([margin, *(abs(10 * scores[i] % 1 - 0.5) / 10 for i in group)])
            chosen, _ = greedy(rounded, [blocks.sizes[i] for i in group], budget)
            for place in chosen:
                keep[group[place]] = 1
        return keep, margin
    always = sum(size for size, first in zip(blocks.sizes, blocks.first, strict=True) if first)
    budget = math.floor(share * blocks.total) - always
    chosen, margin = solver([scores[i] for i in free], [blocks.sizes[i] for i in free], budget)
    for place in chosen:
        keep[free[place]] = 1
    used = sum(size for size, kept in zip(blocks.sizes, keep, strict=True) if kept)
    assert used <= share * blocks.total
    return keep, margin


# --------------------------------------------------------------------------- one step (Algorithm 1, lines 5 to 8)


def adapt(theta, scale, blocks):
    factors = blocks.spread(scale, theta)
    return {name: theta[name] * factors[name] for name in theta}


def block_sums(products, blocks):
    return torch.stack(
        [sum(products[name].flatten()[begin:end].sum() for name, begin, end in places) for places in blocks.places]
    )


def gradients(theta, phi, buffers, x, y, model_gradient, blocks, budget, s_min, options, pooled=None):
    """Gradients by theta and phi at once, the gate's buffers, all blocks used, and the narrowest decision.

    model_gradient(w, x, y) is that of the mean loss by every weight of the model; `pooled` the mean of the client's
    inputs, which is all that a gate for the whole client sees (table 2). One input has no statistics of a batch: its
    norms go by the running ones.
    """
    live = {name: value.clone().requires_grad_() for name, value in phi.items()}
    if options["gating"] == "client":
        scores, weights, after = gate(live, buffers, pooled[None], False, **options["gate"])
        groups = [(x, y)]
    else:
        scores, weights, after = gate(live, buffers, x, True, **options["gate"])
        groups = [(x[j : j + 1], y[j : j + 1]) for j in range(len(x))]
    if options["gating"] == "batch":  # one gate for the whole batch
        scores, weights = scores.mean(0, keepdim=True), weights.mean(0, keepdim=True)
        groups = [(x, y)]
    if options["floors"]:
        scores = scores.clamp(min=s_min)
    by_theta = {name: torch.zeros_like(value) for name, value in theta.items()}
    by_scores, by_weights = torch.zeros_like(scores), torch.zeros_like(weights)
    used, margin, keeps = [0] * len(blocks.sizes), math.inf, []
    for row, (inputs, targets) in enumerate(groups):
        score, weight = scores[row].detach(), weights[row].detach()
        keep, gap = select(score, blocks, budget, s_min, options["selection"], options["solver"])
        keeps.append(keep)
        margin = min(margin, gap)
        used = [max(pair) for pair in zip(used, keep, strict=True)]
        chosen = torch.tensor(keep, dtype=torch.float64)  # I*
        adapted = adapt(theta, weight * chosen, blocks)
        g = model_gradient(adapted, inputs, targets)
        share = len(inputs) / len(x)
        through = blocks.spread(weight * chosen, theta)
        for name in theta:
            by_theta[name] = by_theta[name] + share * g[name] * through[name]
        by_scale = share * block_sums({name: theta[name] * g[name] for name in theta}, blocks)  # d loss / d M'
        by_weights[row] = by_scale * chosen
        reached = 1.0 if options["straight_through"] == "paper" else chosen
        if options["straight_through"] == "authors" and budget >= 1:
            reached = 0.0
        by_scores[row] = by_scale * weight * reached
    names = list(live)
    found = torch.autograd.grad(
        [scores, weights], [live[name] for name in names], [by_scores, by_weights], materialize_grads=True
    )
    by_phi = dict(zip(names, found, strict=True))
    return by_theta, by_phi, {name: value.detach() for name, value in after.items()}, used, margin, keeps


class SGD:
    """torch's: clip, add the decay, gather speed."""

    def __init__(self, rate, momentum, weight_decay, max_norm):
        self.rate, self.momentum, self.weight_decay, self.max_norm = rate, momentum, weight_decay, max_norm

    def step(self, values, speed, gradient, scale=1.0, moves=None):
        """`moves`: 0 for an entry that is left alone, its speed too. Returns values, speed, the gradient's length."""
        length = sum(float((part * part).sum()) for part in gradient.values()) ** 0.5
        factor = 1.0 if self.max_norm is None else min(1.0, self.max_norm / (length + 1e-6))
        new_values, new_speed = {}, {}
        for name, value in values.items():
            pace = self.momentum * speed[name] + gradient[name] * factor + self.weight_decay * value
            moved = value - self.rate * scale * pace
            stays = torch.zeros_like(value) if moves is None else 1 - moves[name]
            new_values[name] = stays * value + (1 - stays) * moved
            new_speed[name] = stays * speed[name] + (1 - stays) * pace
        return new_values, new_speed, length


# --------------------------------------------------------------------------- Algorithm 1


def zeros(values):
    return {name: torch.zeros_like(value) for name, value in values.items()}


def pfedgate(
    theta_0,
    phi_0,
    buffers_0,
    sampled,
    batches,
    model_gradient,
    blocks_of,
    amount,
    budget,
    s_min,
    *,
    rounds,
    rate_theta,
    rate_phi,
    schedule=lambda t: 1.0,
    momentum=0.0,
    weight_decay=0.0,
    max_norm=None,
    keeps_speed=True,
    confined=False,
    updates="joint",
    pooled=lambda k: None,
    floors=False,
    aggregation="index",
    gating="batch",
    selection="paper",
    solver=greedy,
    straight_through="paper",
    **gate_options,
):
    """Yields (theta, all phi, all buffers, a diary) after each round.

    phi_0 and buffers_0 are by client; blocks_of(k), amount(k), budget(k), s_min(k) a client's blocks, number of
    examples, s_i and s_min. `confined`: entries outside a batch's choice stay as they are, whatever momentum and decay
    say. `updates`: one backward pass for both ("joint", both lines 7 and 8 speak of one theta'), or a pass over the
    data for the gate and then one for the model ("alternating"). `floors`: scores are cut off below at s_min, after
    the batch's mean. `keeps_speed`: a client's momentum outlives the round.
    """
    options = {
        "gate": gate_options,
        "gating": gating,
        "selection": selection,
        "solver": solver,
        "straight_through": straight_through,
        "floors": floors,
    }
    passes = [("train", True, True)] if updates == "joint" else [("gate", False, True), ("model", True, False)]
    theta = dict(theta_0)
    phi = {k: dict(value) for k, value in phi_0.items()}
    buffers = {k: dict(value) for k, value in buffers_0.items()}
    speeds = {k: (zeros(theta), zeros(phi[k])) for k in phi}
    by_model = SGD(rate_theta, momentum, weight_decay, max_norm)
    by_gate = SGD(rate_phi, momentum, weight_decay, max_norm)
    for t in range(rounds):
        uploads, local, diary = {}, {}, {}
        for k in sampled(t):
            blocks, w = blocks_of(k), dict(theta)
            model_speed, gate_speed = speeds[k] if keeps_speed else (zeros(theta), zeros(phi[k]))
            union, margin, lengths, seen = [0] * len(blocks.sizes), math.inf, [], []
            for name, moves_model, moves_gate in passes:
                for x, y in batches(t, k, name):
                    by_theta, by_phi, buffers[k], used, gap, keeps = gradients(
                        w, phi[k], buffers[k], x, y, model_gradient, blocks, budget(k), s_min(k), options, pooled(k)
                    )
                    seen.append(keeps)
                    margin = min(margin, gap)
                    if moves_model:
                        union = [max(pair) for pair in zip(union, used, strict=True)]
                        moves = blocks.spread(used, w) if confined else None
                        w, model_speed, length = by_model.step(w, model_speed, by_theta, schedule(t), moves)
                        lengths.append(length)
                    if moves_gate:
                        phi[k], gate_speed, length = by_gate.step(phi[k], gate_speed, by_phi, schedule(t))
                        lengths.append(length)
            speeds[k] = (model_speed, gate_speed)
            inside = blocks.spread(union, theta)
            uploads[k] = ({name: (w[name] - theta[name]) * inside[name] for name in theta}, inside)
            local[k] = w
            diary[k] = {"w": w, "union": union, "margin": margin, "lengths": lengths, "keeps": seen}
        theta = aggregate(theta, uploads, local, amount, phi, aggregation)
        copies = ({k: dict(value) for k, value in many.items()} for many in (phi, buffers))
        yield dict(theta), *copies, diary


def aggregate(theta, uploads, local, amount, everybody, aggregation):
    result = {}
    for name in theta:
        if aggregation == "dense":
            total = sum(amount(k) for k in everybody)
            result[name] = sum(amount(k) / total * (local[k][name] if k in local else theta[name]) for k in everybody)
            continue
        assert aggregation == "index"
        sent = {
            k: (change[name].flatten().tolist(), mask[name].flatten().tolist()) for k, (change, mask) in uploads.items()
        }
        changes = []
        for place in range(theta[name].numel()):
            holders = [k for k in sent if sent[k][1][place]]
            total = sum(amount(k) for k in holders)
            changes.append(sum(amount(k) / total * sent[k][0][place] for k in holders))
        result[name] = theta[name] + torch.tensor(changes, dtype=torch.float64).reshape(theta[name].shape)
    return result


def predict(
    theta,
    phi,
    buffers,
    x,
    outputs,
    blocks,
    s,
    s_min,
    selection,
    solver,
    floors=False,
    whole_batch=False,
    **gate_options,
):
    """What a client deploys: outputs(w, inputs) with a gate of its own for each example, or one for all of them."""
    with torch.no_grad():
        scores, weights, _ = gate(phi, buffers, x, False, **gate_options)
    groups = [x] if whole_batch else [x[j : j + 1] for j in range(len(x))]
    if whole_batch:
        scores, weights = scores.mean(0, keepdim=True), weights.mean(0, keepdim=True)
    rows, margin = [], math.inf
    for j, inputs in enumerate(groups):
        score = scores[j].clamp(min=s_min) if floors else scores[j]
        keep, gap = select(score, blocks, s, s_min, selection, solver)
        margin = min(margin, gap)
        rows.append(outputs(adapt(theta, weights[j] * torch.tensor(keep, dtype=torch.float64), blocks), inputs))
    return torch.cat(rows), margin
