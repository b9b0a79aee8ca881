"""The operators as programs: what the tests of passes, plans and kernels compile."""

from __future__ import annotations

from weft.compiler import (
    Compiled,
    Partial,
    Replicate,
    Shard,
    Tensor,
    Times,
    all_gather,
    all_reduce,
    all_to_all,
    gather_rows,
    grouped_matmul,
    matmul_tn,
    moe_route,
    program,
    reduce_scatter,
    rms_norm,
    scatter_rows,
    silu_mul,
)
from weft.compiler.facts import Facts, Settings
from weft.compiler.frontend import matmul, trace
from weft.compiler.passes.place import place
from weft.compiler.pipeline import Stages, overlap
from weft.ir.task import Program


def ag_gemm(a, b):
    return all_gather(a) @ b


def ag_gemm_scaled(a, b):
    return matmul(all_gather(a), b, dtype="bfloat16", scaling="rows")


def ag_wgrad(x, y):
    return matmul_tn(all_gather(x), y)


def gemm_rs(a, b):
    return reduce_scatter(a @ b)


def gemm_rs_scaled(a, b):
    return reduce_scatter(matmul(a, b, dtype="bfloat16", scaling="blocks"))


def gemm_ar(a, b):
    return all_reduce(a @ b)


def gemm_a2a(x, w):
    return all_to_all(x @ w)


def a2a_gemm(y, w):
    return all_to_all(y, dim=0) @ w


def all_reduce_rms_norm(x, residual, weight):
    total = all_reduce(x) + residual
    return rms_norm(total, weight), total


def mlp(x, w1, w2):
    return reduce_scatter(silu_mul(all_gather(x) @ w1) @ w2)


def ag_moe(x, logits, b):
    routing = moe_route(logits, top_k=8)
    return grouped_matmul(gather_rows(all_gather(x), routing), b, routing)


def moe_rs(x, logits, b):
    routing = moe_route(logits, top_k=8)
    return reduce_scatter(scatter_rows(grouped_matmul(x, b, routing), routing))


def moe(x, logits, w1, w2):
    routing = moe_route(logits, top_k=8)
    h = silu_mul(grouped_matmul(gather_rows(all_gather(x), routing), w1, routing))
    return reduce_scatter(scatter_rows(grouped_matmul(h, w2, routing), routing))


def of_type(*sizes, dtype: str = "bfloat16") -> Tensor:
    return Tensor(dtype, sizes[:-1], sizes[-1])


PARAMETERS = {
    ag_gemm: {"a": of_type("m", 4096, Shard(0)), "b": of_type(4096, 28672, Shard(1))},
    ag_gemm_scaled: {
        "a": of_type("m", 4096, Shard(0), dtype="float8_e4m3fn"),
        "b": of_type(4096, 28672, Shard(1), dtype="float8_e4m3fn"),
    },
    ag_wgrad: {"x": of_type("m", 4096, Shard(0)), "y": of_type("m", 28672, Shard(1))},
    gemm_rs: {"a": of_type("m", 14336, Shard(1)), "b": of_type(14336, 4096, Shard(0))},
    gemm_rs_scaled: {
        "a": of_type("m", 14336, Shard(1), dtype="float8_e4m3fn"),
        "b": of_type(14336, 4096, Shard(0), dtype="float8_e4m3fn"),
    },
    gemm_ar: {"a": of_type("m", 14336, Shard(1)), "b": of_type(14336, 4096, Shard(0))},
    gemm_a2a: {"x": of_type("m", 4096, Shard(0)), "w": of_type(4096, 6144, Replicate())},
    a2a_gemm: {"y": of_type("m", 4096, Shard(1)), "w": of_type(4096, 4096, Replicate())},
    all_reduce_rms_norm: {
        "x": of_type("m", 4096, Partial()), "residual": of_type("m", 4096, Replicate()),
        "weight": of_type(1, 4096, Replicate()),
    },
    ag_moe: {
        "x": of_type("m", 4096, Shard(0)), "logits": of_type("m", 128, Shard(0)),
        "b": of_type(128, 4096, 3072, Shard(2)),
    },
    moe_rs: {
        "x": of_type(Times("m", 8), 1536, Shard(1)), "logits": of_type("m", 128, Shard(0)),
        "b": of_type(128, 1536, 4096, Shard(1)),
    },
    moe: {
        "x": of_type("m", 4096, Shard(0)), "logits": of_type("m", 128, Shard(0)),
        "w1": of_type(128, 4096, 3072, Shard(2)), "w2": of_type(128, 1536, 4096, Shard(1)),
    },
    mlp: {
        "x": of_type("m", 4096, Shard(0)), "w1": of_type(4096, 24576, Shard(1)),
        "w2": of_type(12288, 4096, Shard(0)),
    },
}  # fmt: skip


def placed(function) -> Program:
    return place(trace(function, "tp", PARAMETERS[function]))


def declared(function) -> Compiled:
    return program(mesh="tp", **PARAMETERS[function])(function)


def compiled(function, m: int = 8192, nodes: tuple[int, ...] = (), **settings) -> Stages:
    """For m rows on four H200s."""
    facts = Facts({"m": m}, nodes=nodes)
    return overlap(placed(function), facts, Settings(**settings))
