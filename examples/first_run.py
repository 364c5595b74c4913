"""The shortest way to a result: FedSpa on the embedded digits."""

import sparsona as sp

run = sp.train("fedspa", rounds=10, clients=10, seed=0)
print(run)
print(run.protocol)
