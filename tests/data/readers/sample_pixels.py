"""Pixels to write into the files that readers are tested with."""

import numpy as np


def random_bytes(*shape, seed=0):
    return np.random.Generator(np.random.PCG64(seed)).integers(0, 256, shape, dtype=np.uint8)
