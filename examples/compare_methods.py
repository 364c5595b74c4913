"""Three methods under equal conditions, over two seeds: means, spread, paired differences and a page.

Twenty clients with different mixtures of the embedded digits. The schedule (rounds, rate, momentum) was chosen on data
held out of training, by `holdout_rate=0.25`, for all three together: long enough that sharing and sparsity have
something to show. It takes half a minute. docs/results has comparisons on more data, with more methods and seeds.
"""

import sparsona as sp

comparison = sp.compare(
    ["local", "fedavg-ft", "fedspa"], seeds=2, model="mlp", clients=20, rounds=20, lr=0.05, momentum=0.9, eval_every=10
)
print(comparison)  # the answer in a sentence
for row in comparison.table():
    print(f"{row['method']:12} {row['accuracy']:>18} correct, {row['bytes up']:>8} sent up")
for row in comparison.differences():
    print(row)
print(comparison.report())
