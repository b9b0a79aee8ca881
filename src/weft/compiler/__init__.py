"""The compiler: a tensor program with placements, as tasks, tiles, mappings and a plan.

from weft.compiler import Partial, Replicate, Shard, Tensor, all_gather, program
"""

from weft.compiler.compiled import Compiled
from weft.compiler.facts import Facts, Settings
from weft.compiler.frontend import (
    all_gather,
    all_reduce,
    attention,
    decode_attention,
    ep_combine,
    ep_dispatch,
    gather_rows,
    grouped_matmul,
    kv_append,
    moe_route,
    program,
    reduce_scatter,
    rms_norm,
    rope,
    scatter_rows,
    silu,
    silu_mul,
)
from weft.ir.tensor import ByExpert, Partial, Replicate, Shard, Times
from weft.ir.tensor import Type as Tensor

__all__ = [
    "ByExpert", "Compiled", "Facts", "Partial", "Replicate", "Settings", "Shard", "Tensor",
    "Times", "all_gather", "all_reduce", "attention", "decode_attention", "ep_combine",
    "ep_dispatch", "gather_rows", "grouped_matmul", "kv_append", "moe_route", "program",
    "reduce_scatter", "rms_norm", "rope", "scatter_rows", "silu", "silu_mul",
]  # fmt: skip
