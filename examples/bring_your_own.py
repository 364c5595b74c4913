"""Your own data and your own network, in ten lines."""

import numpy as np
import torch

import sparsona as sp

rng = np.random.default_rng(0)
y = rng.integers(4, size=1200)
x = (rng.normal(size=(1200, 16)) + np.eye(4, 16)[y] * 3).astype("float32")  # your arrays
net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))  # your module

federation = sp.federate(x, y, clients=20, partition="dirichlet:0.3", seed=0)
run = sp.train("fedspa", federation, model=net, rounds=10, density=0.5, seed=0)

print(federation)
print(run)
print(run.accuracies().round(2))  # one per client, on its own test data
model = run.personal_model(7)  # client 7's own network, its mask applied: a plain nn.Module
kept, size = sum(int(p.count_nonzero()) for p in model.parameters()), sum(p.numel() for p in model.parameters())
print(f"client 7 keeps {kept} of {size} weights")
print(run.report(run.path / "page.html"))
