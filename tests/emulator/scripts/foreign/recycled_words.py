"""Words of a step, taken anew for each: a kernel signals them, and a second stream waits for them.

The fault: the second stream has not waited for the zeros. In recycled memory the words of the step
before stand yet, and end its waits.
"""

import torch
import triton
import triton.language as tl
from cuda.bindings import driver
from launch import FAULT, start

EQUAL = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ


@triton.jit
def produce(x, words, step, N: tl.constexpr):
    pid, at = tl.program_id(0), tl.arange(0, N)
    tl.store(x + pid * N + at, at + 10.0 * step)
    tl.debug_barrier()
    tl.atomic_xchg(words + pid, 1, sem="release", scope="sys")


def main():
    _, _, device = start()
    copies = torch.cuda.Stream()
    x, out = (torch.empty(2, 16, device=device) for _ in range(2))
    for step in range(2):
        if FAULT:
            copies.wait_stream(torch.cuda.current_stream())
        words = torch.zeros(2, dtype=torch.int32, device=device)
        if not FAULT:
            copies.wait_stream(torch.cuda.current_stream())
        produce[(2,)](x, words, step, 16)
        for row in range(2):
            word = words.data_ptr() + 4 * row
            driver.cuStreamWaitValue32(copies.cuda_stream, word, 1, EQUAL)  # FAULT
            with torch.cuda.stream(copies):
                out[row].copy_(x[row])
        torch.cuda.current_stream().wait_stream(copies)
        torch.testing.assert_close(out.cpu(), torch.arange(16.0).repeat(2, 1) + 10.0 * step)


if __name__ == "__main__":
    main()
