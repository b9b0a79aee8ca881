"""tl's operations in a few kernels whose results are rows; run by the emulator, or interpreted.

    TRITON_INTERPRET=1 python interpreter_ops.py RESULTS.npz

Imports nothing of weft's, so that Triton's own interpreter runs the same text in another process.
"""

import builtins
import sys

import numpy as np
import torch
import triton
import triton.language as tl

N = 32


@triton.jit
def float_functions(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i)
    p = tl.abs(a) + 0.25
    tl.store(out + 0 * N + i, tl.exp(a))
    tl.store(out + 1 * N + i, tl.exp2(a))
    tl.store(out + 2 * N + i, tl.log(p))
    tl.store(out + 3 * N + i, tl.log2(p))
    tl.store(out + 4 * N + i, tl.sin(a))
    tl.store(out + 5 * N + i, tl.cos(a))
    tl.store(out + 6 * N + i, tl.sqrt(p))
    tl.store(out + 7 * N + i, tl.rsqrt(p))
    tl.store(out + 8 * N + i, tl.abs(a))
    tl.store(out + 9 * N + i, tl.floor(a))
    tl.store(out + 10 * N + i, tl.ceil(a))
    tl.store(out + 11 * N + i, tl.erf(a))
    tl.store(out + 12 * N + i, tl.sigmoid(a))
    tl.store(out + 13 * N + i, tl.softmax(a))
    tl.store(out + 14 * N + i, -a)
    tl.store(out + 15 * N + i, tl.sqrt_rn(p))
    tl.store(out + 16 * N + i, (a * 10).to(tl.int32).to(tl.float32))
    tl.store(out + 17 * N + i, a.to(tl.float16).to(tl.float32))
    tl.store(out + 18 * N + i, a.to(tl.int32, bitcast=True).to(tl.float32, bitcast=True))
    tl.store(out + 19 * N + i, (a > 0).to(tl.float32))


@triton.jit
def float_pairs(x, y, out, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i)
    b = tl.load(y + i)
    tl.store(out + 0 * N + i, a + b)
    tl.store(out + 1 * N + i, a - b)
    tl.store(out + 2 * N + i, a * b)
    tl.store(out + 3 * N + i, a / b)
    tl.store(out + 4 * N + i, tl.maximum(a, b))
    tl.store(out + 5 * N + i, tl.minimum(a, b))
    tl.store(out + 6 * N + i, tl.fma(a, b, a))
    tl.store(out + 7 * N + i, tl.where(a < b, a, b))
    tl.store(out + 8 * N + i, tl.clamp(a, -0.5, 0.5))
    tl.store(out + 9 * N + i, tl.fdiv(a, b))
    tl.store(out + 10 * N + i, (a == b).to(tl.float32))
    tl.store(out + 11 * N + i, (a != b).to(tl.float32) + (a <= b).to(tl.float32))
    tl.store(out + 12 * N + i, tl.load(x + i, mask=i < 7, other=-1.0))
    tl.store(out + 13 * N + i, a + 2)
    tl.store(out + 14 * N + i, 1.5 * a)
    tl.store(out + 15 * N + i, 3 / a)


@triton.jit
def integer_pairs(x, y, out, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i)
    b = tl.load(y + i)
    d = tl.where(b == 0, 1, b)
    s = tl.abs(b) % 8
    tl.store(out + 0 * N + i, a + b)
    tl.store(out + 1 * N + i, a - b)
    tl.store(out + 2 * N + i, a * b)
    tl.store(out + 3 * N + i, a // d)
    tl.store(out + 4 * N + i, a % d)
    tl.store(out + 5 * N + i, a & b)
    tl.store(out + 6 * N + i, a | b)
    tl.store(out + 7 * N + i, a ^ b)
    tl.store(out + 8 * N + i, a << s)
    tl.store(out + 9 * N + i, a >> s)
    tl.store(out + 10 * N + i, ~a)
    tl.store(out + 11 * N + i, tl.maximum(a, b))
    tl.store(out + 12 * N + i, tl.minimum(a, b))
    tl.store(out + 13 * N + i, tl.abs(a))
    tl.store(out + 14 * N + i, (a < b).to(tl.int32) + (a >= b).to(tl.int32) * 2)
    tl.store(out + 15 * N + i, tl.cdiv(a, d))
    tl.store(out + 16 * N + i, a.to(tl.int8).to(tl.int32))
    tl.store(out + 17 * N + i, a.to(tl.int16).to(tl.int32))
    tl.store(out + 18 * N + i, a.to(tl.int64).to(tl.int32))
    tl.store(out + 19 * N + i, a.to(tl.float32).to(tl.int32))


@triton.jit
def first_larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def affine_pair(a, b, c, d):
    return a * c, b * c + d


@triton.jit
def reductions(x, whole, out, counts, N: tl.constexpr):
    i = tl.arange(0, N)
    tile = i[:, None] * N + i[None, :]
    a = tl.load(x + tile)
    k = tl.load(whole + tile)
    tl.store(out + 0 * N + i, tl.sum(a, axis=0))
    tl.store(out + 1 * N + i, tl.sum(a, axis=1))
    tl.store(out + 2 * N + i, tl.max(a, axis=0))
    tl.store(out + 3 * N + i, tl.min(a, axis=1))
    tl.store(out + 4 * N + i, tl.reduce(a, 1, first_larger))
    tl.store(out + 5 * N + i, tl.cumsum(tl.sum(a, axis=0), axis=0))
    tl.store(out + 6 * N + i, tl.sum(tl.cumsum(a, axis=1), axis=0))
    tl.store(out + 7 * N + i, tl.cumprod(tl.max(a, axis=0), axis=0))
    m, c = tl.associative_scan((tl.sum(a, axis=0) / 8, tl.max(a, axis=0)), 0, affine_pair)
    tl.store(out + 8 * N + i, c)
    tl.store(out + 9 * N + i, tl.associative_scan(tl.sum(a, 0), 0, first_larger, reverse=True))
    tl.store(out + 10 * N + i, tl.sum(tl.trans(a) * a, axis=1))
    tl.store(counts + 0 * N + i, tl.argmax(a, axis=1))
    tl.store(counts + 1 * N + i, tl.argmin(a, axis=0))
    tl.store(counts + 2 * N + i, tl.sum(k, axis=0))
    tl.store(counts + 3 * N + i, tl.xor_sum(k, axis=1))
    tl.store(counts + 4 * N + i, tl.max(k, axis=0) - tl.min(k, axis=0))
    tl.store(counts + 5 * N + i, tl.histogram(tl.reshape(tl.abs(k) % N, (N * N,)), N))


@triton.jit
def shapes(x, whole, out, N: tl.constexpr):
    i = tl.arange(0, N)
    h = tl.arange(0, N // 2)
    a = tl.load(x + i)
    p = tl.load(x + h)
    q = tl.load(x + N // 2 + h)
    tl.store(out + 0 * N + i, tl.sort(a))
    tl.store(out + 1 * N + i, tl.sort(a, descending=True))
    tl.store(out + 2 * N + i, tl.flip(a, 0))
    tl.store(out + 3 * N + i, tl.interleave(p, q))
    tl.store(out + 4 * N + i, tl.ravel(tl.trans(tl.reshape(a, (4, N // 4)))))
    even, odd = tl.split(tl.reshape(a, (N // 2, 2)))
    tl.store(out + 5 * N + h, even)
    tl.store(out + 5 * N + N // 2 + h, odd)
    tl.store(out + 6 * N + i, tl.ravel(tl.join(p, q)))
    tl.store(out + 7 * N + i, tl.gather(a, tl.load(whole + i) & (N - 1), 0))
    tl.store(out + 8 * N + i, tl.ravel(tl.permute(tl.reshape(a, (2, 4, N // 8)), (2, 0, 1))))
    rows = tl.broadcast_to(tl.reshape(p, (N // 2, 1)), (N // 2, 2))
    tl.store(out + 9 * N + i, tl.ravel(rows))
    tl.store(out + 10 * N + i, tl.full((N,), 3.5, tl.float32) + tl.zeros_like(a))


@triton.jit
def products(x, y, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tile = i[:, None] * N + i[None, :]
    a = tl.load(x + tile)
    b = tl.load(y + tile)
    tl.store(out + tile, tl.dot(a, b, input_precision="ieee"))
    tl.store(out + N * N + tile, tl.dot(a.to(tl.float16), b.to(tl.float16), a))
    three = tl.reshape(a, (2, N // 2, N))
    turned = tl.permute(tl.reshape(b, (2, N // 2, N)), (0, 2, 1))
    batch = tl.reshape(tl.dot(three, turned, input_precision="ieee"), (N, N // 2))
    half = tl.arange(0, N // 2)
    tl.store(out + 2 * N * N + i[:, None] * (N // 2) + half[None, :], batch)


@triton.jit
def atomics(memory, values, old, N: tl.constexpr):
    i = tl.arange(0, N)
    v = tl.load(values + i)
    tl.store(old + 0 * N + i, tl.atomic_add(memory + 0 * N + i, v))
    tl.store(old + 1 * N + i, tl.atomic_max(memory + 1 * N + i, v))
    tl.store(old + 2 * N + i, tl.atomic_min(memory + 2 * N + i, v))
    tl.store(old + 3 * N + i, tl.atomic_and(memory + 3 * N + i, v))
    tl.store(old + 4 * N + i, tl.atomic_or(memory + 4 * N + i, v))
    tl.store(old + 5 * N + i, tl.atomic_xor(memory + 5 * N + i, v))
    tl.store(old + 6 * N + i, tl.atomic_xchg(memory + 6 * N + i, v))
    tl.store(old + 7 * N + i, tl.atomic_cas(memory + 7 * N + i, v, v + 1))
    tl.store(old + 8 * N + i, tl.atomic_add(memory + 8 * N + i, v, mask=i < 5), mask=i < 5)


@triton.jit
def random_numbers(out, whole, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + 0 * N + i, tl.rand(11, i))
    tl.store(out + 1 * N + i, tl.randn(12, i))
    tl.store(whole + 0 * N + i, tl.randint(13, i))
    a, b, c, d = tl.randint4x(14, i)
    tl.store(whole + 1 * N + i, a ^ b)
    tl.store(whole + 2 * N + i, c ^ d)


@triton.jit
def control(x, out, n, N: tl.constexpr):
    i = tl.arange(0, N)
    total = tl.load(x + i)
    turn = 0
    while turn < n:
        if turn % 3 == 0:
            total = total * 0.5
        elif turn % 3 == 1:
            total += tl.load(x + turn)
        else:
            for k in range(turn):
                total -= k
        turn += 1
    for k in tl.static_range(3):
        tl.store(out + k * N + i, total + k)


def results():
    """Name -> result of everything above, from one seed."""
    generator = torch.Generator().manual_seed(0)

    def floats(*shape):
        return torch.randn(*shape, generator=generator)

    def integers(*shape):
        return torch.randint(-1000, 1000, shape, generator=generator, dtype=torch.int32)

    found = {}
    for dtype in (torch.float32, torch.float16):
        word = str(dtype).removeprefix("torch.")
        x, y = floats(N).to(dtype), floats(N).to(dtype)
        if dtype is torch.float32:
            out = torch.zeros(20, N)
            float_functions[(1,)](x, out, N=N)
            found["float_functions"] = out
        out = torch.zeros(16, N, dtype=dtype)
        float_pairs[(1,)](x, y, out, N=N)
        found[f"float_pairs_{word}"] = out
    out = torch.zeros(20, N, dtype=torch.int32)
    integer_pairs[(1,)](integers(N), integers(N), out, N=N)
    found["integer_pairs"] = out
    out, counts = torch.zeros(11, N), torch.zeros(6, N, dtype=torch.int32)
    reductions[(1,)](floats(N, N), integers(N, N), out, counts, N=N)
    found["reductions"], found["counts"] = out, counts
    out = torch.zeros(11, N)
    shapes[(1,)](floats(N), integers(N), out, N=N)
    found["shapes"] = out
    out = torch.zeros(3, N, N)
    products[(1,)](floats(N, N), floats(N, N), out, N=N)
    found["products"] = out
    memory, old = integers(9, N), torch.zeros(9, N, dtype=torch.int32)
    values = integers(N)
    memory[7, ::2] = values[::2]
    atomics[(1,)](memory, values, old, N=N)
    found["atomics"], found["atomics_old"] = memory, old
    out, whole = torch.zeros(2, N), torch.zeros(3, N, dtype=torch.int32)
    random_numbers[(1,)](out, whole, N=N)
    found["random"], found["random_whole"] = out, whole
    out = torch.zeros(3, N)
    control[(1,)](floats(N), out, 8, N=N)
    found["control"] = out
    return {name: tensor.numpy() for name, tensor in found.items()}


class _Scalar(type):
    def __call__(cls, value=0, *more):
        return builtins.int(value.item() if isinstance(value, np.ndarray) else value, *more)

    def __instancecheck__(cls, value):
        return isinstance(value, builtins.int)


class Int(int, metaclass=_Scalar):
    """An `int` that also takes arrays of one element, which numpy 2.4 no longer converts.

    The interpreter of Triton 3.6 needs it, and copies its globals into those of the kernels.
    """


if __name__ == "__main__":
    from triton.runtime import interpreter

    interpreter.int = Int
    np.savez(sys.argv[1], **results())
