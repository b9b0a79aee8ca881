"""A kernel on one stream, its reader on another one, with an event between.

The fault: the event is recorded, and nobody waits for it.
"""

import torch
import triton
import triton.language as tl
from launch import FAULT, start


@triton.jit
def add_one(x, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, tl.load(x + at) + 1)  # FAULT


def main():
    _, _, device = start()
    assert torch.cuda.is_available() and torch.cuda.device_count() >= 2
    assert torch.cuda.get_device_properties(device).multi_processor_count > 0
    x = torch.zeros(64).to(device, non_blocking=True)
    one, two = torch.empty_like(x), torch.empty_like(x)
    compute, other = torch.cuda.Stream(device), torch.cuda.Stream(device)
    compute.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(compute):
        add_one[(1,)](x, one, 64)
        done = compute.record_event()
    if not FAULT:
        other.wait_event(done)
    with torch.cuda.stream(other):
        add_one[(1,)](one, two, 64)
    other.synchronize()
    torch.testing.assert_close(two.cpu(), torch.full((64,), 2.0))


if __name__ == "__main__":
    main()
