"""LeNet5 counted by hand, for the memory and the messages that methods are said to cost with it.

It has 439,096 parameters: 1 to 20 and 20 to 50 channels in 5x5, 800 to 500 to 26 units. A uniform mask of 0.5 keeps
250 + 10 + 12,500 + 25 + 200,000 + 250 + 6,500 + 13 of them.
"""

from __future__ import annotations

SIZE, HALF, MASK = 4 * 439_096, 4 * 219_548, 54_887  # bytes: four a number, a bit an entry of a mask
OUTPUT = 4 * 13_026  # the last layer
UNIFORM = {"density": 0.5, "allocation": "uniform"}
UNCLIPPED = {**UNIFORM, "clip_norm": None}
