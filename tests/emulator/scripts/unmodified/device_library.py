"""Functions of libdevice beside tl.math, in single and double precision."""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

DEVICE = triton.runtime.driver.active.get_active_torch_device()


@triton.jit
def library_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    mask = i < n
    x = tl.load(x_ptr + i, mask=mask, other=0.0)
    tl.store(out_ptr + 0 * n + i, libdevice.asin(x), mask=mask)
    tl.store(out_ptr + 1 * n + i, libdevice.tanh(x), mask=mask)
    tl.store(out_ptr + 2 * n + i, libdevice.pow(tl.abs(x) + 1, x), mask=mask)
    tl.store(out_ptr + 3 * n + i, libdevice.acosh(tl.abs(x) + 1), mask=mask)
    tl.store(out_ptr + 4 * n + i, libdevice.log1p(tl.abs(x)), mask=mask)
    tl.store(out_ptr + 5 * n + i, libdevice.rint(x * 10), mask=mask)
    tl.store(out_ptr + 6 * n + i, tl.math.rsqrt(tl.abs(x) + 1), mask=mask)
    tl.store(out_ptr + 7 * n + i, libdevice.hypot(x, x), mask=mask)


for dtype in (torch.float32, torch.float64):
    x = torch.rand(100, device=DEVICE, dtype=dtype) * 2 - 1
    out = torch.empty(8, 100, device=DEVICE, dtype=dtype)
    library_kernel[(1,)](x, out, 100, BLOCK=128)
    expected = [
        x.asin(), x.tanh(), (x.abs() + 1) ** x, (x.abs() + 1).acosh(), x.abs().log1p(),
        (x * 10).round(),
        (x.abs() + 1).rsqrt(), x.hypot(x),
    ]  # fmt: skip
    torch.testing.assert_close(out, torch.stack(expected), atol=1e-5, rtol=1e-5)
