"""A barrier over the programs of one GPU: an add by release, a spin on acquiring loads.

The fault: the spin ends one program too early.
"""

import torch
import triton
import triton.language as tl
from launch import FAULT, start
from signals import get_flat_tid


@triton.jit
def meet(counter, target):
    tl.debug_barrier()
    if get_flat_tid() == 0:
        tl.inline_asm_elementwise(
            """
            {
                .reg .u32 seen;
                .reg .pred early;
                red.release.gpu.global.add.u32 [$1], 1;
                spin_${:uid}:
                    ld.acquire.gpu.global.u32 seen, [$1];
                    setp.lt.u32 early, seen, $2;
                    @early bra.uni spin_${:uid};
            }
            """,
            "=r,l,r", [counter, target], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    tl.debug_barrier()


@triton.jit
def reverse(x, scratch, counter, N: tl.constexpr, FAULT: tl.constexpr):
    pid, programs, at = tl.program_id(0), tl.num_programs(0), tl.arange(0, N)
    tl.store(scratch + pid * N + at, tl.load(x + pid * N + at))
    meet(counter, programs - 1 if FAULT else programs)
    there = tl.load(scratch + (programs - 1 - pid) * N + at)  # FAULT
    tl.store(x + pid * N + at, there)


def main():
    _, _, device = start()
    x = torch.arange(64, dtype=torch.float32, device=device).view(4, 16)
    scratch, expected = torch.empty_like(x), x.flip(0)
    reverse[(4,)](x, scratch, torch.zeros(1, dtype=torch.int32, device=device), 16, FAULT)
    torch.testing.assert_close(x, expected)


if __name__ == "__main__":
    main()
