"""FedAvg written out in plain torch, without the framework's contract, engine or wire.

Only the random draws are taken from the framework: the clients sampled, the batches, the initial weights. It ends with
the same model as `sp.train("fedavg")`, as the last lines check. Read this first, then src/sparsona/methods/fedavg.py.
"""

import copy

import torch
from torch.nn.functional import cross_entropy

import sparsona as sp
from sparsona.data.batches import shuffled
from sparsona.data.read import read
from sparsona.engine.plan import Plan, participation
from sparsona.models import builder

ROUNDS, PER_ROUND, EPOCHS, BATCH, LR, DECAY, WEIGHT_DECAY, CLIP = 3, 4, 2, 16, 0.1, 0.998, 5e-4, 10.0

digits = read("digits")
federation = sp.federate(digits.x, digits.y, clients=8, partition="dirichlet:0.3", seed=0)
build = builder("digits-cnn", federation.input_shape, federation.num_classes)
plan = Plan(rounds=ROUNDS, per_round=PER_ROUND, batch_size=BATCH, seed=0, lr_decay=DECAY)

with torch.random.fork_rng(devices=[]):
    torch.manual_seed(plan.seeds.shared("model"))
    model = build()

for t in range(ROUNDS):
    total, weights = None, 0
    for k in participation(plan, federation.clients(), t).trains:
        client = copy.deepcopy(model)  # the server's model goes down
        optimizer = torch.optim.SGD(client.parameters(), lr=LR * DECAY**t, weight_decay=WEIGHT_DECAY)
        data = federation.examples(k, "train")
        for epoch in range(EPOCHS):
            for batch in shuffled(data, BATCH, plan.seeds.at(t).of(k).own(f"train/{epoch}")):
                optimizer.zero_grad()
                cross_entropy(client(batch.inputs), batch.targets).backward()
                torch.nn.utils.clip_grad_norm_(client.parameters(), CLIP)
                optimizer.step()
        n = data.num_examples  # the client's model goes up, and counts by its number of examples
        share = [p.detach().double() * n for p in client.parameters()]
        total = share if total is None else [a + b for a, b in zip(total, share, strict=True)]
        weights += n
    with torch.no_grad():
        for p, s in zip(model.parameters(), total, strict=True):
            p.copy_(s / weights)

run = sp.train(
    "fedavg",
    federation,
    model=build,
    rounds=ROUNDS,
    per_round=PER_ROUND,
    epochs=EPOCHS,
    batch_size=BATCH,
    lr=LR,
    lr_decay=DECAY,
    weight_decay=WEIGHT_DECAY,
    clip_norm=CLIP,
    seed=0,
)
ours = run.personal_model(0)
for (name, a), b in zip(ours.named_parameters(), model.parameters(), strict=True):
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
print("the same model by hand and by sparsona")
