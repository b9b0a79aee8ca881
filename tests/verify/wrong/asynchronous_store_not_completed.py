"""A TMA store, then a raw atomic release: the signal fires before the data is written.

Met in  persistent GEMMs with `desc.store` and `tl.atomic_xchg(sem="release")`, up to Triton 3.7
Found   the load behind the wait
"""

import torch
import triton
import triton.language as tl
from pieces import N, take

import weft.language as wl

FOUND = "race"
SAYS = "the write is asynchronous, and not complete where"
TRITON = "< 3.8"


@triton.jit
def exchange(world, x, ready, out, n: tl.constexpr):
    if wl.rank(world) == 0:
        theirs = tl.make_tensor_descriptor(wl.at(world, x, 1), [n, n], [n, 1], [n, n])
        theirs.store([0, 0], tl.full([n, n], 1.0, tl.float32))
        tl.atomic_xchg(wl.at(world, ready, 1), 1, sem="release", scope="sys")
    else:
        wl.wait(ready, at_least=1, world=world)
        take(x, out)  # BUG: the store may be under way


def main(world):
    x = world.zeros((N, N), torch.float32)
    exchange[(1,)](world.arg, x, world.signals(1), torch.empty(N), N)
