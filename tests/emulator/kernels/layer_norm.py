"""Layer norm, forward and backward: the gradients of weight and bias add up under locks."""

import torch
import triton
import triton.language as tl


@triton.jit
def normalise(x, weight, bias, out, mean, scale, columns, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    x += row * columns
    out += row * columns
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(x + at, mask=at < columns, other=0.0).to(tl.float32)
    middle = tl.sum(total, axis=0) / columns
    square = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(x + at, mask=at < columns, other=0.0).to(tl.float32)
        off = tl.where(at < columns, value - middle, 0.0)
        square += off * off
    factor = tl.rsqrt(tl.sum(square, axis=0) / columns + eps)
    tl.store(mean + row, middle)
    tl.store(scale + row, factor)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < columns
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        w = tl.load(weight + at, mask=inside)
        b = tl.load(bias + at, mask=inside)
        tl.store(out + at, (value - middle) * factor * w + b, mask=inside)


@triton.jit
def input_gradient(
    x, weight, d_out, d_x, part_w, part_b, lock, mean, scale, columns,
    GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    value = tl.load(x + row * columns + at, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(d_out + row * columns + at, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(scale + row)
    normal = tl.where(inside, (value - tl.load(mean + row)) * factor, 0.0)
    through = w * grad
    along = tl.sum(normal * through, axis=0) / columns
    constant = tl.sum(through, axis=0) / columns
    tl.store(d_x + row * columns + at, (through - normal * along - constant) * factor, mask=inside)
    # Rows of one group take turns at its partial sums.
    group = row % GROUPS
    part_w += group * columns + at
    part_b += group * columns + at
    while tl.atomic_cas(lock + group, 0, 1) == 1:
        pass
    tl.store(part_w, tl.load(part_w, mask=inside) + grad * normal, mask=inside)
    tl.store(part_b, tl.load(part_b, mask=inside) + grad, mask=inside)
    tl.debug_barrier()
    tl.atomic_xchg(lock + group, 0)


@triton.jit
def add_parts(part, total, groups, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    sums = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, groups, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row[:, None] < groups) & (at[None, :] < columns)
        sums += tl.load(part + row[:, None] * columns + at[None, :], mask=inside, other=0.0)
    tl.store(total + at, tl.sum(sums, axis=0), mask=at < columns)


def forward(x, weight, bias, eps=1e-5, block=64):
    rows, columns = x.shape
    out = torch.empty_like(x)
    mean, scale = torch.empty(rows), torch.empty(rows)
    normalise[(rows,)](x, weight, bias, out, mean, scale, columns, eps, BLOCK=block)
    return out, mean, scale


def backward(x, weight, d_out, mean, scale, groups=3):
    rows, columns = x.shape
    d_x = torch.empty_like(x)
    parts = torch.zeros(2, groups, columns)
    lock = torch.zeros(groups, dtype=torch.int32)
    input_gradient[(rows,)](
        x, weight, d_out, d_x, parts[0], parts[1], lock, mean, scale, columns,
        GROUPS=groups, BLOCK=triton.next_power_of_2(columns),
    )  # fmt: skip
    sums = torch.empty(2, columns)
    for part, total in zip(parts, sums, strict=True):
        add_parts[(triton.cdiv(columns, 32),)](part, total, groups, columns, ROWS=4, BLOCK=32)
    return d_x, sums[0], sums[1]
