"""The shortest way to a result: FedSpa on the embedded digits, 20 clients, each with half a network of its own."""

import sparsona as sp

run = sp.train("fedspa", model="mlp", rounds=20, lr=0.05, momentum=0.9, seed=0)
print(run)
print(f"the worst client: {run.accuracies().min():.1%}")
print(run.protocol)  # how it was measured
