"""Gradients of ag_attention: those of its reference by torch, the same bits in every schedule."""

from __future__ import annotations

import pytest
import torch
from compiling import check_code, launched_by

import weft
from weft.base.dtypes import tolerance
from weft.base.target import TARGETS
from weft.ops.ag_attention import ag_attention, op
from weft.plan.attention_launches import gradients
from weft.plan.operator_gradients import ag_attention_backward

NAMES = ("q", "k", "v")
SLOW = pytest.mark.slow


def problem_for(num_ranks, dtype="float32", **sizes):
    usual = {"m": 37, "q_heads": 4, "kv_heads": 2, "d": 24, "sequences": 0, "causal": 1}
    return op.make_problem(num_ranks, {**usual, **sizes}, dtype)


def given(problem, lengths=None):
    """Inputs of all ranks, gradients of their results, and by torch those of their inputs."""
    inputs = [op.make_inputs(problem, rank) for rank in range(problem.num_ranks)]
    for one in inputs:
        one["cu_seqlens"] = one["cu_seqlens"] if lengths is None else torch.tensor(lengths).int()
    leaves = [{n: one[n].clone().requires_grad_() for n in NAMES} for one in inputs]
    results = op.reference(
        problem, [{**one, **leaf} for one, leaf in zip(inputs, leaves, strict=True)]
    )
    slopes = [(torch.randn_like(out), torch.randn_like(lse)) for out, lse in results]
    total = sum(
        (out * d_out).sum() + torch.where(lse.isfinite(), lse * d_lse, 0.0).sum()
        for (out, lse), (d_out, d_lse) in zip(results, slopes, strict=True)
    )
    total.backward()
    return inputs, slopes, [[leaf[name].grad for name in NAMES] for leaf in leaves]


def backward(problem, inputs, slopes):
    """On one rank, forward and back."""
    world = weft.init()
    one, (d_out, d_lse) = inputs[world.rank], slopes[world.rank]
    way = {
        "causal": problem.causal,
        "zigzag": problem.zigzag,
        "cu_seqlens": one["cu_seqlens"],
        "m": problem.m,
    }
    tensors = [one[name] for name in NAMES]
    out, lse = ag_attention(*tensors, world=world, with_lse=True, **way)
    d_out = d_out.to(out.dtype)
    return ag_attention_backward(*tensors, out, lse, d_out, d_lse, world=world, **way)


def check(found, expected, problem):
    for got, wanted in zip(found, expected, strict=True):
        assert got.shape == wanted.shape and got.dtype == wanted.dtype and got.is_contiguous()
        # Operands of second products are rounded once more than in the forward pass.
        error = (got.double() - wanted.double()).norm()
        assert error <= 2 * tolerance(problem.dtype, problem.k) * wanted.double().norm()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("num_ranks", "dtype", "sizes"),
    [
        (2, "float32", {"sequences": 4}),
        pytest.param(
            3, "float32", {"m": 50, "kv_heads": 1, "q_heads": 3, "d": 16, "causal": 0}, marks=SLOW
        ),
        (2, "bfloat16", {"kv_heads": 4, "sequences": 3, "causal": 0}),
        (3, "float32", {"sequences": 3, "zigzag": 1}),
        (2, "bfloat16", {"m": 38, "zigzag": 1, "causal": 0}),
        pytest.param(1, "float16", {}, marks=SLOW),
        pytest.param(4, "float32", {"m": 5, "d": 1, "q_heads": 1, "kv_heads": 1}, marks=SLOW),
    ],
    ids=str,
)
def test_gradients_are_torchs(ranks, num_ranks, dtype, sizes):
    problem = problem_for(num_ranks, dtype, **sizes)
    inputs, slopes, expected = given(problem)
    found = ranks(lambda: backward(problem, inputs, slopes), num_ranks)
    for got, wanted in zip(found, expected, strict=True):
        check(got, wanted, problem)


def test_sequences_that_are_empty_span_ranks_and_leave_tokens_out(ranks):
    """What nothing sees, and what sees nothing, has gradients of zero."""
    problem = problem_for(3, m=40, sequences=5)
    inputs, slopes, expected = given(problem, [3, 3, 9, 30, 30, 34])
    found = ranks(lambda: backward(problem, inputs, slopes), 3)
    for got, wanted in zip(found, expected, strict=True):
        check(got, wanted, problem)
    assert not any(one[:3].any() for one in found[0]) and not any(
        one[-6:].any() for one in found[2]
    )


@pytest.mark.slow
def test_the_same_bits_in_every_schedule(ranks):
    problem = problem_for(2, m=24, d=16)
    inputs, slopes, _ = given(problem)
    runs = [ranks(lambda: backward(problem, inputs, slopes), 2, seed=seed) for seed in range(3)]
    for other in runs[1:]:
        for one, same in zip(runs[0], other, strict=True):
            assert all(map(torch.equal, one, same))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "dtype", "d"),
    [
        ("cuda:90", "bfloat16", 128),
        pytest.param("cuda:90", "float32", 64, marks=SLOW),
        pytest.param("cuda:90", "float16", 256, marks=SLOW),
        pytest.param("cuda:100", "bfloat16", 128, marks=SLOW),
        pytest.param("hip:gfx942", "bfloat16", 128, marks=SLOW),
    ],
)
def test_compiles_without_spills(target, dtype, d):
    q = torch.empty(512, 8, d, dtype=getattr(torch, dtype), device="meta")
    k, lse = q[:, :2].contiguous(), torch.empty(512, 8, device="meta")
    lengths = torch.empty(3, dtype=torch.int32, device="meta")
    there = TARGETS[target]
    found = launched_by(
        lambda: gradients(
            q, k, k, q, lse, q, None, first=512, causal=True, cu_seqlens=lengths, scale=None,
            target=there,
        )
    )  # fmt: skip
    assert len(found) == 2
    check_code(found, there)
