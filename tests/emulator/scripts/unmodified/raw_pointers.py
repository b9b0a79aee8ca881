"""Vectors on raw pointers; the grid is a function of the meta-parameters."""

import argparse

import torch
import triton
import triton.language as tl

DEVICE = triton.runtime.driver.active.get_active_torch_device()


@triton.jit
def saxpy_kernel(x_ptr, y_ptr, out_ptr, alpha, n_elements, BLOCK_SIZE: tl.constexpr):
    pid = tl.program_id(axis=0)
    offsets = pid * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    x = tl.load(x_ptr + offsets, mask=mask)
    y = tl.load(y_ptr + offsets, mask=mask)
    tl.store(out_ptr + offsets, alpha * x + y, mask=mask)


def saxpy(alpha: float, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    grid = lambda meta: (triton.cdiv(out.numel(), meta["BLOCK_SIZE"]),)  # noqa: E731
    saxpy_kernel[grid](x, y, out, alpha, out.numel(), BLOCK_SIZE=256)
    return out


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, default=1000)
    args = parser.parse_args()
    for dtype in (torch.float32, torch.float16, torch.int32):
        x = torch.randint(-9, 9, (args.size,), device=DEVICE).to(dtype)
        y = torch.randint(-9, 9, (args.size,), device=DEVICE).to(dtype)
        if dtype.is_floating_point:
            torch.testing.assert_close(saxpy(0.5, x, y), 0.5 * x + y)
        else:
            assert torch.equal(saxpy(3, x, y), 3 * x + y)
    print("saxpy agrees with torch")
