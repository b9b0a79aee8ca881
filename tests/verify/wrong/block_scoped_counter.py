"""A counter of a whole grid, added to with the scope of one block.

Met in  kernels written for one program and launched with more
Found   the addition: blocks of one GPU may keep such a word each for itself
"""

import torch
import triton
import triton.language as tl

FOUND = "race"
SAYS = "scope"


@triton.jit
def count(counter):
    tl.atomic_add(counter, 1, sem="relaxed", scope="cta")  # BUG: of the grid it is "gpu"


def main(world):
    count[(2,)](torch.zeros(1, dtype=torch.int32))
