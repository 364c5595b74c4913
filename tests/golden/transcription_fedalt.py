"""FedSim and FedAlt as their paper writes them: Algorithm 1 (and 4, 5 of the appendix) around Algorithms 2 and 3.

Plain loops in double precision on dicts of tensors; shares no code with the product. What the text leaves open is read
as the published code has it: the server takes the weighted mean of the shared parts, u_bar, and makes an optimizer step
with the pseudo-gradient u - u_bar (SGD with rate 1 is the paper's line 7; Adam has betas .9 and .999, eps 1e-8 outside
the root and bias correction); the pull towards the initial personal part is coef * ||v - v0||^2 without a half, and
part of the loss; a gradient is clipped over everything that is being trained, and its norm has 1e-6 added, as torch
has it.
"""

import torch
from mlp_by_hand import backward, forward, hot, probabilities, squares

BETA_1, BETA_2, EPS = 0.9, 0.999, 1e-8


def norm(gradient):
    return sum(float((part * part).sum()) for part in gradient.values()) ** 0.5


def clipped(gradient, max_norm):
    """The gradient, shortened to max_norm if it is longer; and how long it was."""
    length = norm(gradient)
    factor = 1.0 if max_norm is None else min(1.0, max_norm / (length + 1e-6))
    return {name: part * factor for name, part in gradient.items()}, length


def step(values, gradient, rate, weight_decay=0.0):
    return {name: values[name] - rate * (gradient[name] + weight_decay * values[name]) for name in values}


def with_pull(gradient, v, v_start, coef):
    """Adds the gradient of coef * ||v - v0||^2."""
    return {name: gradient[name] + 2 * coef * (v[name] - v_start[name]) for name in v}


def local_sim(u, v, v_start, gradient, batches, rate_u, rate_v, *, pull=0.0, max_norm=None, weight_decay=0.0):
    """Algorithm 2: both parts move at once, by gradients taken at the same point."""
    lengths = []
    for x, y in batches:
        g = gradient({**u, **v}, x, y)
        g_u = {name: g[name] for name in u}
        g_v = with_pull(g, v, v_start, pull)
        both, length = clipped({**g_u, **g_v}, max_norm)
        lengths.append(length)
        v_next = step(v, both, rate_v, weight_decay)
        u_next = step(u, both, rate_u, weight_decay)
        u, v = u_next, v_next
    return u, v, lengths


def local_alt(
    u,
    v,
    v_start,
    gradient,
    batches_v,
    batches_u,
    rate_u,
    rate_v,
    *,
    pull=0.0,
    max_norm=None,
    weight_decay=0.0,
    stale=False,
):
    """Algorithm 3: first v with the received u, then u with the new v.

    `stale`: as the published code clips, the last gradient of v is still there while u trains. It counts in the norm,
    and every clipping shortens it along with the rest.
    """
    lengths, left_behind = [], {}
    for x, y in batches_v:
        g_v = with_pull(gradient({**u, **v}, x, y), v, v_start, pull)
        g_v, length = clipped(g_v, max_norm)
        lengths.append(length)
        v = step(v, g_v, rate_v, weight_decay)
        if stale:
            left_behind = g_v
    for x, y in batches_u:
        g = gradient({**u, **v}, x, y)
        g_all, length = clipped({**{name: g[name] for name in u}, **left_behind}, max_norm)
        lengths.append(length)
        left_behind = {name: g_all[name] for name in left_behind}
        u = step(u, g_all, rate_u, weight_decay)
    return u, v, lengths


class ServerSGD:
    def __init__(self, u, rate):
        self.rate = rate

    def step(self, u, pseudo_gradient):
        return step(u, pseudo_gradient, self.rate)


class ServerAdam:
    def __init__(self, u, rate):
        self.rate, self.steps = rate, 0
        self.first = {name: torch.zeros_like(value) for name, value in u.items()}
        self.second = {name: torch.zeros_like(value) for name, value in u.items()}

    def step(self, u, pseudo_gradient):
        self.steps += 1
        result = {}
        for name, g in pseudo_gradient.items():
            self.first[name] = BETA_1 * self.first[name] + (1 - BETA_1) * g
            self.second[name] = BETA_2 * self.second[name] + (1 - BETA_2) * g * g
            m = self.first[name] / (1 - BETA_1**self.steps)
            v = self.second[name] / (1 - BETA_2**self.steps)
            result[name] = u[name] - self.rate * m / (v.sqrt() + EPS)
        return result


def constant(t, rounds):
    return 1.0


def halving(every):
    """The paper's exponential schedule: halved once every so many rounds."""
    return lambda t, rounds: 0.5 ** (t // every)


def linear(warm_up):
    """Up from 0 during the first share of the rounds, then down to 0. Round 0 has rate 0."""

    def scale(t, rounds):
        warm = int(warm_up * rounds)
        return t / warm if t < warm else (rounds - t) / (rounds - warm)

    return scale


def fedsim_fedalt(
    u_0,
    v_0,
    sampled,
    batches,
    gradient,
    *,
    local,
    rounds,
    rate_u,
    rate_v,
    alpha,
    schedule=constant,
    server=ServerSGD,
    server_rate=1.0,
    stateless=False,
    **options,
):
    """Algorithm 1: yields (u, all v, the server's optimizer, a diary) after each round.

    sampled(t) are the devices of S(t); batches(t, i, part) the data that device i meets while it trains `part`, which
    is "u", "v" or "both"; alpha(i) its weight; gradient(w, x, y) that of the mean loss by all of (u, v).
    """
    u = dict(u_0)
    v = {i: dict(part) for i, part in v_0.items()}
    optimizer = server(u, server_rate)
    for t in range(rounds):
        scale = schedule(t, rounds)
        returned, diary = {}, {}
        for i in sampled(t):
            v_i = v_0[i] if stateless else v[i]
            rates = (rate_u * scale, rate_v * scale)
            if local == "sim":
                u_i, v_i, lengths = local_sim(u, v_i, v_0[i], gradient, batches(t, i, "both"), *rates, **options)
            else:
                assert local == "alt"
                data = batches(t, i, "v"), batches(t, i, "u")
                u_i, v_i, lengths = local_alt(u, v_i, v_0[i], gradient, *data, *rates, **options)
            v[i] = v_i
            returned[i] = u_i
            diary[i] = {"u": u_i, "v": v_i, "lengths": lengths}
        total = sum(alpha(i) for i in returned)
        mean = {name: sum(alpha(i) / total * returned[i][name] for i in returned) for name in u}
        u = optimizer.step(u, {name: u[name] - mean[name] for name in u})
        yield dict(u), {i: dict(part) for i, part in v.items()}, optimizer, diary


# --------------------------------------------------------------------------- generalized additive model (figure 2b)


def mixture_gradient(shared, personal, theta_name):
    """Section 2's fusion of two models, for classification: theta * h(u, x) + (1 - theta) * h_i(v_i, x).

    `shared` and `personal` are the two models' layers, whose names lie in u and v; theta is the sigmoid of one more
    personal number.
    """

    def gradient(w, x, y):
        theta = 1 / (1 + (-w[theta_name]).exp())
        a, b = forward(w, shared, x), forward(w, personal, x)
        p, q, right = probabilities(a[-1]), probabilities(b[-1]), hot(a[-1], y)
        p_right, q_right = (p * right).sum(1, keepdim=True), (q * right).sum(1, keepdim=True)
        mixed = theta * p_right + (1 - theta) * q_right
        # The loss is -log(mixed), and the derivative of p_right by the logits is p_right * (onehot - p).
        found = backward(w, shared, a, -theta * p_right / mixed * (right - p))
        found |= backward(w, personal, b, -(1 - theta) * q_right / mixed * (right - q))
        found[theta_name] = (-(p_right - q_right) / mixed).mean() * theta * (1 - theta)
        return found

    return gradient


def residual_gradient(shared, personal):
    """The same for regression: ||y - h(u, x) - h_i(v_i, x)||^2."""

    def gradient(w, x, y):
        a, b = forward(w, shared, x), forward(w, personal, x)
        _, slopes = squares(a[-1] + b[-1], y)
        return backward(w, shared, a, slopes) | backward(w, personal, b, slopes)

    return gradient
