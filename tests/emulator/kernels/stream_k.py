"""Stream-k: programs share the inner steps of all tiles evenly; a tile's parts meet by signals."""

import torch
import triton
import triton.language as tl


@triton.jit
def multiply_part(a, b, tile, first, last, m, n, k, T: tl.constexpr):
    tiles_n = tl.cdiv(n, T)
    rows = tile // tiles_n * T + tl.arange(0, T)
    columns = tile % tiles_n * T + tl.arange(0, T)
    total = tl.zeros((T, T), tl.float32)
    for step in range(first, last):
        depth = step * T + tl.arange(0, T)
        left = tl.load(
            a + rows[:, None] * k + depth[None, :],
            mask=(rows[:, None] < m) & (depth[None, :] < k), other=0.0,
        )  # fmt: skip
        right = tl.load(
            b + depth[:, None] * n + columns[None, :],
            mask=(depth[:, None] < k) & (columns[None, :] < n), other=0.0,
        )  # fmt: skip
        total = tl.dot(left, right, total, input_precision="ieee")
    return total, rows, columns


@triton.jit
def stream_product(a, b, c, parts, ready, m, n, k, T: tl.constexpr):
    """A program that does not begin its tile leaves its part; the one that begins it adds up."""
    pid, programs = tl.program_id(0), tl.num_programs(0)
    steps = tl.cdiv(k, T)
    all_steps = tl.cdiv(m, T) * tl.cdiv(n, T) * steps
    at = pid * all_steps // programs
    end = (pid + 1) * all_steps // programs
    inner = tl.arange(0, T)[:, None] * T + tl.arange(0, T)[None, :]
    while at < end:
        tile = at // steps
        first = at % steps
        last = tl.minimum(steps, first + end - at)
        total, rows, columns = multiply_part(a, b, tile, first, last, m, n, k, T)
        if first != 0:
            tl.store(parts + pid * T * T + inner, total)
            tl.debug_barrier()
            tl.atomic_xchg(ready + pid, 1, sem="release")
        else:
            other, covered = pid + 1, last
            while covered < steps:
                while tl.atomic_add(ready + other, 0, sem="acquire") != 1:
                    pass
                tl.debug_barrier()
                total += tl.load(parts + other * T * T + inner)
                start = other * all_steps // programs
                stop = (other + 1) * all_steps // programs
                covered += tl.minimum(stop, (tile + 1) * steps) - start
                other += 1
            inside = (rows[:, None] < m) & (columns[None, :] < n)
            tl.store(c + rows[:, None] * n + columns[None, :], total, mask=inside)
        at += last - first


def stream_k(a, b, programs=5, tile=16):
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty(m, n)
    parts = torch.empty(programs, tile, tile)
    ready = torch.zeros(programs, dtype=torch.int32)
    stream_product[(programs,)](a, b, c, parts, ready, m, n, k, T=tile)
    return c
