"""Torch works in place on what kernels read and write; kernels sit in an autograd function."""

import torch
import torch.distributed as dist
import triton
import triton.language as tl

DEVICE = triton.runtime.driver.active.get_active_torch_device()


@triton.jit
def square_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    tl.store(out_ptr + i, x * x, mask=i < n)


@triton.jit
def square_grad_kernel(x_ptr, grad_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    grad = tl.load(grad_ptr + i, mask=i < n)
    tl.store(out_ptr + i, 2 * x * grad, mask=i < n)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        out = torch.empty_like(x)
        square_kernel[(triton.cdiv(x.numel(), 64),)](x, out, x.numel(), BLOCK=64)
        return out

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        out, grad = torch.empty_like(x), grad.contiguous()
        square_grad_kernel[(triton.cdiv(x.numel(), 64),)](x, grad, out, x.numel(), BLOCK=64)
        return out


def main():
    dist.init_process_group("nccl" if DEVICE.type == "cuda" else "gloo")
    x = torch.arange(100, device=DEVICE, dtype=torch.float32) / 10
    out = torch.empty_like(x)
    expected = x.clone()
    for step in range(4):
        square_kernel[(2,)](x, out, x.numel(), BLOCK=64)
        expected = expected * expected
        out.clamp_(max=50).add_(step)
        expected = expected.clamp(max=50) + step
        x[10:90:2].copy_(out[10:90:2])
        x[:10], x[90:], x[11:90:2] = out[:10], out[90:], out[11:90:2]
        x.mul_(0.5)
        expected = expected * 0.5
    torch.testing.assert_close(x, expected)

    weight = torch.full((50,), float(dist.get_rank() + 1), device=DEVICE, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        Square.apply(weight).sum().backward()
        dist.all_reduce(weight.grad)
        optimizer.step()
    ranks = range(1, dist.get_world_size() + 1)
    values = [float(rank) for rank in ranks]
    for _ in range(3):
        total = sum(2 * value for value in values)
        values = [value - 0.1 * total for value in values]
    torch.testing.assert_close(
        weight.detach(), torch.full((50,), values[dist.get_rank()], device=DEVICE)
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
