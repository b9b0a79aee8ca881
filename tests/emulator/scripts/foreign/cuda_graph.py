"""A graph of a kernel on a second stream and one behind it, replayed with other inputs.

The fault: the second stream starts without waiting for what fills its input.
"""

import torch
import triton
import triton.language as tl
from launch import FAULT, start


@triton.jit
def scale(x, out, factor, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, tl.load(x + at) * factor)  # FAULT


def main():
    _, _, device = start()
    x = torch.ones(32, device=device)
    doubled, tripled, out = (torch.zeros(32, device=device) for _ in range(3))
    main_stream, side = torch.cuda.current_stream(), torch.cuda.Stream()
    ready, done = torch.cuda.Event(), torch.cuda.Event()
    side.wait_stream(main_stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        if FAULT:
            ready.record()
        scale[(1,)](x, doubled, 2.0, 32)
        if not FAULT:
            ready.record()
        side.wait_event(ready)
        with torch.cuda.stream(side):
            scale[(1,)](doubled, tripled, 3.0, 32)
            done.record(side)
        torch.cuda.current_stream().wait_event(done)
        out.copy_(tripled + x)
    for turn in range(3):
        x.fill_(turn)
        graph.replay()
        torch.cuda.synchronize()
        torch.testing.assert_close(out, torch.full_like(out, 7.0 * turn))


if __name__ == "__main__":
    main()
