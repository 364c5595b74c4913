"""The product on a tiny problem, and its random draws in the form the transcriptions take them.

Images of two channels and 3 x 3 pixels, three classes, six clients with unequal amounts of data. The network is smooth,
so that nothing switches on a rounding error, and has a convolution, whose kernel covers the whole image, and two linear
layers: `mlp_by_hand` knows its gradients.
"""

import torch
from torch import nn

from sparsona.data.batches import shuffled
from sparsona.data.federation import Federation
from sparsona.engine.plan import participation
from sparsona.executors.serial import Serial
from sparsona.experiment import build
from sparsona.wire.codec import decode

CLASSES = 3
SIZES = (8, 12, 14, 16, 20, 22)  # with batches of 8, none is smaller than 4: two have no batch norm to speak of
CLIENTS = len(SIZES)
LAYERS = [("0.weight", "0.bias"), ("3.weight", "3.bias"), ("5.weight", "5.bias")]
LINEAR = {"3.weight", "3.bias", "5.weight", "5.bias"}

# Weights agree within RTOL * |weight| + ATOL: forty times what single precision was seen to lose here, and five times
# where a gate learns at a rate of 4.
RTOL, ATOL = 1e-4, 1e-6


def network():
    model = nn.Sequential(
        nn.Conv2d(2, 8, 3), nn.Flatten(), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, CLASSES)
    )
    with torch.no_grad():
        model[-1].bias += 1.0  # a ReLU on the outputs must let something through
    return model


def tiny_federation(seed=3):
    """Data of a class lies around its centre; each client has its own shares of the classes."""
    random = torch.Generator().manual_seed(seed)
    centres = torch.randn(CLASSES, 2, 3, 3, generator=random)

    def examples(size, shares):
        y = torch.multinomial(shares, size, replacement=True, generator=random)
        return centres[y] + 0.8 * torch.randn(size, 2, 3, 3, generator=random), y

    clients = []
    for size in SIZES:
        shares = 0.2 + torch.rand(CLASSES, generator=random)
        clients.append((*examples(size, shares), *examples(2, shares), *examples(6, shares)))
    return Federation.from_clients(clients, num_classes=CLASSES)


def make_context(method, options, federation=None, model=network):
    federation = tiny_federation() if federation is None else federation
    return build.make_context(build.make_config(method, options, federation, model), federation, model)


class Recorder(Serial):
    """The product's executor, which also keeps what clients upload."""

    def __init__(self, context):
        super().__init__(context)
        self.uploads = {}

    def run(self, jobs):
        for outcome in super().run(jobs):
            if outcome.message is not None:
                self.uploads[outcome.client] = decode(outcome.message)
            yield outcome


class Draws:
    """Who is sampled, and the batches that clients meet."""

    def __init__(self, context, no_single=False):
        self.context, self.no_single = context, no_single

    def sampled(self, t):
        return participation(self.context.plan, self.context.clients, t).trains

    def batches(self, t, k, phase, epochs):
        return [pair for epoch in range(epochs) for pair in self._pass(t, k, f"{phase}/{epoch}")]

    def probe(self, t, k):
        return self._pass(t, k, "probe/1")[0]

    def _pass(self, t, k, purpose):
        plan = self.context.plan
        seed = plan.round_at(t).on(self.context.clients[k]).seeds.own(purpose)
        examples = self.context.federation.examples(k, "train")
        found = list(shuffled(examples, plan.batch_size, seed, self.no_single))
        if plan.drop_last:  # a loader that drops what is incomplete, where there is more than one batch
            found = [batch for batch in found if len(batch.targets) == plan.batch_size or len(found) == 1]
        return [(batch.inputs.double(), batch.targets) for batch in found]


def exact(tree):
    """A tree as the transcriptions take it."""
    return {name: tree[name].double() for name in tree}


def distance(found, expected):
    """The largest difference, as a share of what is allowed; below 1 is equal."""
    assert sorted(found) == sorted(expected)
    worst = 0.0
    for name, value in expected.items():
        gap = (found[name].double() - value).abs() / (ATOL + RTOL * value.abs())
        worst = max(worst, float(gap.max()))
    return worst
