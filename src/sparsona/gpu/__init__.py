"""How turns get fast on a GPU: stacks, lanes, captured programs, fused kernels."""
