"""Dis-PFL as its paper writes it: Algorithm 1 (gossip, local sparse training) and Algorithm 2 (mask search).

Plain loops in double precision; shares no code with the product. What the text leaves open is read as the published
code has it: gradients clipped to norm 10 over all coordinates before masking, weight decay 5e-4, no momentum, a dense
step followed by the mask, alpha_t = alpha_0 / 2 * (1 + cos(pi t / T)), ceil(alpha_t * nnz) weights pruned per tensor,
regrowth among all inactive positions, those just pruned included.

Line 7 divides by m_{j,t}, the masks that Algorithm 2 has just made (`divide_by="new"`). The weights w_{j,t} were
trained inside m_{j,t-1}; the text adds them up as they are. The published code divides by m_{j,t-1}
(`divide_by="used"`), and has 0 where nobody has a weight. A client's own new mask is applied to the result either way.
"""

import math

import torch


def prune_rate(alpha_0, t, last):
    """Cosine annealing; the published code has last = T."""
    return alpha_0 / 2 * (1 + math.cos(math.pi * t / last))


def gossip(k, heard, weights, used, masks, divide_by):
    """Line 7 for client k, which heard of these others: w_{k,t+1/2}."""
    result = {}
    divisors = masks if divide_by == "new" else used
    for name, own in weights[k].items():
        inside = masks[k][name].flatten().tolist()
        values = {j: weights[j][name].flatten().tolist() for j in [k, *heard]}
        counted = {j: divisors[j][name].flatten().tolist() for j in [k, *heard]}
        mixed = []
        for place in range(own.numel()):
            total, count = 0.0, 0
            for j in [k, *heard]:
                total += values[j][place]
                count += 1 if counted[j][place] else 0
            mixed.append(total / count if inside[place] and count else 0.0)
        result[name] = torch.tensor(mixed, dtype=torch.float64).reshape(own.shape)
    return result


def train(w, mask, gradient, batches, rate, weight_decay, max_norm):
    """Lines 8 to 14: w_{k,t+1} and the gradient norms met on the way."""
    lengths = []
    for x, y in batches:
        g = gradient(w, x, y)
        length = sum(float((part * part).sum()) for part in g.values()) ** 0.5
        lengths.append(length)
        factor = min(1.0, max_norm / (length + 1e-6))
        w = {name: (w[name] - rate * (factor * g[name] + weight_decay * w[name])) * mask[name] for name in w}
    return w, lengths


def search(weight, mask, alpha, score):
    """Algorithm 2 for one tensor: the next mask, and the edges at which its two choices were made.

    Regrows where |score| is largest: the gradient, or, where chance decides, a random number for each position.
    """
    m = [bool(value) for value in mask.flatten().tolist()]
    w = [abs(value) for value in weight.flatten().tolist()]
    g = [abs(value) for value in score.flatten().tolist()]
    active = sorted((i for i in range(len(m)) if m[i]), key=lambda i: w[i])
    number = math.ceil(alpha * len(active))
    if len(active) == len(m):
        return mask.clone(), None, None  # what is pruned is all that could regrow
    pruned, kept = active[:number], active[number:]
    for i in pruned:
        m[i] = False
    order = sorted((i for i in range(len(m)) if not m[i]), key=lambda i: -g[i])
    grown, left_out = order[:number], order[number:]
    for i in grown:
        m[i] = True
    prune_edge = (w[pruned[-1]], w[kept[0]]) if pruned and kept else None
    grow_edge = (g[left_out[0]], g[grown[-1]]) if grown and left_out else None
    return torch.tensor(m).reshape(mask.shape), prune_edge, grow_edge


def dispfl(
    w_0,
    masks_0,
    heard,
    batches,
    probe,
    chance,
    gradient,
    *,
    rounds,
    rate,
    rate_decay=0.998,
    weight_decay=5e-4,
    max_norm=10.0,
    alpha_0=0.5,
    anneal_over=None,
    divide_by="new",
    regrowth="gradient",
):
    """Algorithm 1: yields (all w_{k,t+1}, all m_{k,t+1}, all m_{k,t}, a diary) after each round t.

    heard(t, k) are those whose models reach client k; batches(t, k) and probe(t, k) the data it meets; chance(t, k) a
    random number for each position, by which masks regrow where chance decides. w_0 has the weights that each client
    starts with, inside its mask; they are mixed in round 0, as those of later rounds are.
    """
    masks = {k: dict(mask) for k, mask in masks_0.items()}
    used = masks
    weights = {k: {name: w_0[k][name] * masks[k][name] for name in w_0[k]} for k in masks}
    for t in range(rounds):
        alpha = prune_rate(alpha_0, t, rounds if anneal_over is None else anneal_over)
        after, next_masks, diary = {}, {}, {}
        for k in masks:
            mixed = gossip(k, heard(t, k), weights, used, masks, divide_by)
            trained, lengths = train(
                mixed, masks[k], gradient, batches(t, k), rate * rate_decay**t, weight_decay, max_norm
            )
            g = gradient(trained, *probe(t, k)) if regrowth == "gradient" else chance(t, k)
            next_masks[k], edges = {}, {}
            for name in trained:
                next_masks[k][name], *edges[name] = search(trained[name], masks[k][name], alpha, g[name])
            after[k] = trained
            diary[k] = {"mixed": mixed, "lengths": lengths, "g": g, "edges": edges, "alpha": alpha}
        used, masks, weights = masks, next_masks, after
        yield weights, masks, used, diary


def consensus(weights, used):
    """The one model of all: per coordinate the mean over those whose weights cover it, 0 where nobody's do."""
    result = {}
    for name in next(iter(weights.values())):
        total = sum(weights[k][name] for k in weights)
        count = sum(used[k][name].double() for k in used)
        result[name] = torch.where(count > 0, total / count.clamp(min=1), torch.zeros_like(total))
    return result
