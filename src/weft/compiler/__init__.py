"""The compiler: a tensor program with collectives in it becomes kernels that overlap.

    from weft.compiler import Shard, Tensor, all_gather, program

    @program(mesh="tp", x=Tensor("bfloat16", ("m", 4096), Shard(0)),
             w=Tensor("bfloat16", (4096, 8192), Shard(1)))
    def project(x, w):
        return all_gather(x) @ w

    y = project(x, w, world=world)

Each parameter is declared with its global sizes and its placement; a call passes this rank's part.
docs/compiler.md follows a program through every pass; `weft explain FILE.py:project` shows one's
plan.
"""

from weft.compiler.compiled import Compiled
from weft.compiler.facts import Facts, Settings
from weft.compiler.frontend import (
    all_gather,
    all_reduce,
    all_to_all,
    attention,
    decode_attention,
    embedding,
    ep_combine,
    ep_dispatch,
    gather_rows,
    gelu,
    gelu_mul,
    grouped_matmul,
    kv_append,
    matmul_tn,
    moe_route,
    program,
    reduce_scatter,
    rms_norm,
    rope,
    rope_by_table,
    scatter_rows,
    silu,
    silu_mul,
    split,
)
from weft.ir.tensor import ByExpert, Halves, Partial, Pieces, Replicate, Shard, Times
from weft.ir.tensor import Type as Tensor

__all__ = [
    "ByExpert", "Compiled", "Facts", "Halves", "Partial", "Pieces", "Replicate", "Settings",
    "Shard", "Tensor", "Times", "all_gather", "all_reduce", "all_to_all", "attention",
    "decode_attention", "embedding", "ep_combine", "ep_dispatch", "gather_rows", "gelu", "gelu_mul",
    "grouped_matmul", "kv_append", "matmul_tn", "moe_route", "program", "reduce_scatter",
    "rms_norm", "rope", "rope_by_table", "scatter_rows", "silu", "silu_mul", "split",
]  # fmt: skip
