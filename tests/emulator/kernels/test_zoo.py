"""Kernels of the kinds that Triton's users write, on one emulated rank, by torch."""

import pytest
import torch

import weft
from kernels import (
    attention,
    descriptor_matmul,
    dropout,
    grouped_gemm,
    layer_norm,
    matmul,
    quantised,
    softmax,
    stream_k,
    top_k,
)
from weft.base.dtypes import tolerance

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture
def emulate():
    """`emulate(host function, arguments)` on one rank; nothing may be found."""

    def run(function, *args, seed=0, **options):
        torch.manual_seed(seed)
        with weft.emulated(ranks=1, seed=seed, num_sms=4) as session:
            result = session.run(lambda: function(*args, **options))[0]
        assert session.report.ok, str(session.report)
        return result

    return run


def close(out, expected, k=1, dtype=None, factor=1):
    dtype = dtype or out.dtype
    error = (out.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30)
    assert error <= factor * tolerance(str(dtype).removeprefix("torch."), k), float(error)


@pytest.mark.parametrize(
    "shape, dtype", [*zip([(1, 1), (3, 7), (12, 100)], DTYPES), ((5, 128), torch.float16)]
)
def test_softmax(emulate, shape, dtype):
    x = torch.randn(shape).to(dtype)
    close(emulate(softmax.softmax, x), x.double().softmax(1), shape[1])


@pytest.mark.few(4)
@pytest.mark.parametrize("shape", [(1, 8), (7, 50), (10, 130)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norm(emulate, shape, dtype):
    x = torch.randn(shape).to(dtype)
    weight, bias = (torch.randn(shape[1]).to(dtype) for _ in range(2))
    d_out = torch.randn(shape).to(dtype)
    exact = [t.double().requires_grad_() for t in (x, weight, bias)]
    expected = torch.nn.functional.layer_norm(exact[0], (shape[1],), *exact[1:], eps=1e-5)
    expected.backward(d_out.double())
    out, mean, scale = emulate(layer_norm.forward, x, weight, bias)
    close(out, expected.detach(), shape[1], factor=2)
    for seed in range(3):
        grads = emulate(layer_norm.backward, x, weight, d_out, mean, scale, seed=seed)
        for grad, tensor in zip(grads, exact, strict=True):
            close(grad, tensor.grad, shape[1], dtype=dtype, factor=2)


def test_dropout_draws_the_same_mask_again(emulate):
    x = torch.randn(1000)
    out = emulate(dropout.dropout, x, 0.3, 7)
    dropped = out == 0
    assert 0.25 < dropped.float().mean() < 0.35
    torch.testing.assert_close(out[~dropped], x[~dropped] / 0.7)
    assert torch.equal(dropped, emulate(dropout.dropout, torch.ones(1000), 0.3, 7, block=64) == 0)
    assert not torch.equal(dropped, emulate(dropout.dropout, x, 0.3, 8) == 0)


def philox(seed, counter, rounds=10):
    """The generator by its definition, in Python's integers."""
    state, key = [counter, 0, 0, 0], [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(rounds):
        high, low = divmod(0xD2511F53 * state[0], 1 << 32)
        high_2, low_2 = divmod(0xCD9E8D57 * state[2], 1 << 32)
        state = [high_2 ^ state[1] ^ key[0], low_2, high ^ state[3] ^ key[1], low]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return state


def test_random_numbers(emulate):
    n, seed = 500, 1234
    uniform, normal = torch.empty(n), torch.empty(n)
    integers, four = torch.empty(n, dtype=torch.int32), torch.empty(4, n, dtype=torch.int32)
    emulate(
        lambda: dropout.draw[(1,)](uniform, normal, integers, four, n, seed, BLOCK=512)
    )  # fmt: skip
    expected = torch.tensor([philox(seed, at) for at in range(n)]).T
    assert torch.equal(four.long() & 0xFFFFFFFF, expected)
    assert torch.equal(integers, four[0])
    signed = four[0].long()
    scaled = torch.where(signed < 0, -signed - 1, signed).double() * 4.6566127342e-10
    torch.testing.assert_close(uniform.double(), scaled, rtol=1e-6, atol=1e-7)
    assert abs(normal.mean()) < 0.15 and 0.85 < normal.std() < 1.15


@pytest.mark.parametrize("m, n, k", [(32, 32, 32), (70, 40, 50), (1, 33, 17)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_matmul_with_activation(emulate, m, n, k, dtype):
    a, b = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype).T
    expected = torch.nn.functional.leaky_relu(a.double() @ b.double(), 0.01)
    close(emulate(matmul.matmul, a, b, activation="leaky_relu"), expected, k)


@pytest.mark.parametrize("m, n, k", [(32, 32, 96), (33, 20, 100)])
@pytest.mark.parametrize("product", [matmul.split_k, stream_k.stream_k])
def test_products_cut_along_k(emulate, m, n, k, product):
    a, b = torch.randn(m, k), torch.randn(k, n)
    for seed in range(3):
        close(emulate(product, a, b, seed=seed), a.double() @ b.double(), k, factor=2)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "length, causal, dtype",
    [
        (32, True, torch.float16), (45, True, torch.float32), (50, False, torch.float32),
        (50, False, torch.bfloat16), (1, True, torch.bfloat16),
    ],
)  # fmt: skip
def test_attention(emulate, length, causal, dtype):
    q, k, v, d_out = (torch.randn(2, length, 32).to(dtype) for _ in range(4))
    exact = [t.double().requires_grad_() for t in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(*exact, is_causal=causal)
    expected.backward(d_out.double())
    out, log_sum = emulate(attention.forward, q, k, v, causal)
    close(out, expected.detach(), length, factor=2)
    grads = emulate(attention.backward, q, k, v, out, log_sum, d_out, causal)
    for grad, tensor in zip(grads, exact, strict=True):
        if length > 1 or tensor is exact[2]:
            close(grad, tensor.grad, length, factor=4)


def test_grouped_gemm(emulate):
    shapes = [(16, 16, 16), (40, 20, 33), (5, 50, 8)]
    pairs = [(torch.randn(m, k).half(), torch.randn(k, n).half()) for m, n, k in shapes]
    outs = emulate(grouped_gemm.grouped_gemm, pairs)
    for out, (a, b) in zip(outs, pairs, strict=True):
        close(out, a.double() @ b.double(), a.shape[1])


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("m, n, k", [(64, 32, 32), (72, 40, 56)])
def test_persistent_matmul_on_descriptors(emulate, on_host, m, n, k):
    a, b = torch.randn(m, k).half(), torch.randn(n, k).half()
    out = emulate(descriptor_matmul.matmul, a, b, on_host)
    close(out, a.double() @ b.double().T, k)


@pytest.mark.parametrize("columns, k", [(8, 8), (50, 3), (64, 1)])
def test_top_k(emulate, columns, k):
    x = torch.randn(6, columns)
    values, indices = emulate(top_k.top_k, x, k)
    expected = x.topk(k)
    assert torch.equal(values, expected.values)
    assert torch.equal(indices.long(), expected.indices)


def test_int8_matmul(emulate):
    a = torch.randint(-128, 128, (40, 70), dtype=torch.int8)
    b = torch.randint(-128, 128, (70, 36), dtype=torch.int8)
    a_scale, b_scale = torch.rand(40), torch.rand(36)
    out = emulate(quantised.int8_matmul, a, b, a_scale, b_scale)
    expected = (a.double() @ b.double()) * a_scale[:, None] * b_scale[None, :]
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-6)


def test_int4_matmul(emulate):
    m, n, k, group = 20, 40, 64, 32
    whole = torch.randint(-8, 8, (k, n), dtype=torch.int8)
    packed = (whole[0::2] & 15) | (whole[1::2] << 4)
    a, scales = torch.randn(m, k).half(), torch.rand(k // group, n)
    weights = (whole * scales.repeat_interleave(group, 0)).half()
    out = emulate(quantised.int4_matmul, a, packed, scales, group)
    close(out, a.double() @ weights.double(), k)
