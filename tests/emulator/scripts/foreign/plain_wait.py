"""A producer's words, and a consumer that waits for them in a loop that ends at what it has loaded.

The fault: the loads are plain. Nothing in the loop has an effect, so the compiler removes it.
"""

import torch
import triton
import triton.language as tl
from launch import FAULT, start


@triton.jit
def produce(x, words, N: tl.constexpr):
    pid, at = tl.program_id(0), tl.arange(0, N)
    tl.store(x + pid * N + at, at + 1.0)
    tl.debug_barrier()
    tl.atomic_xchg(words + pid, 1, sem="release", scope="gpu")


@triton.jit
def consume(x, out, words, N: tl.constexpr, PLAIN: tl.constexpr):
    pid, at = tl.program_id(0), tl.arange(0, N)
    if PLAIN:
        done = tl.load(words + pid)
        while done == 0:
            done = tl.load(words + pid)  # FAULT
    else:
        done = tl.atomic_add(words + pid, 0, sem="acquire", scope="gpu")
        while done == 0:
            done = tl.atomic_add(words + pid, 0, sem="acquire", scope="gpu")
    tl.store(out + pid * N + at, 2 * tl.load(x + pid * N + at))


def main():
    _, _, device = start()
    x, out = (torch.empty(4, 16, device=device) for _ in range(2))
    words = torch.zeros(4, dtype=torch.int32, device=device)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    produce[(4,)](x, words, 16)
    with torch.cuda.stream(side):
        consume[(4,)](x, out, words, 16, FAULT)
    torch.cuda.current_stream().wait_stream(side)
    if not FAULT:
        torch.testing.assert_close(out.cpu(), 2 * torch.arange(1.0, 17).repeat(4, 1))


if __name__ == "__main__":
    main()
