"""Two methods under equal conditions, over two seeds: means, spread and paired differences.

Only a few rounds, to be quick: too few to judge a method. docs/results has full comparisons.
"""

import sparsona as sp

comparison = sp.compare(["local", "fedspa"], seeds=2, rounds=4, clients=10, epochs=1)
for row in comparison.table():
    print(row["method"], row["accuracy"], row["bytes up"])
print(comparison.differences())
print(comparison.report())
