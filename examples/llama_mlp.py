"""The feed-forward part of Llama-3 70B as a tensor program: tokens and inner columns are spread
over all ranks. To be planned, drawn and predicted; nothing in it runs by itself.

    weft explain examples/llama_mlp.py:mlp --shape m=8192 --ranks 8
    weft simulate examples/llama_mlp.py:mlp --ranks 8,64,512,4096 --shape m=65536
"""

import weft
from weft.compiler import Shard, Tensor, all_gather, reduce_scatter, silu_mul

HIDDEN, INNER = 8192, 28672


@weft.program(
    mesh="tp",
    x=Tensor("bfloat16", ("m", HIDDEN), Shard(0)),
    w1=Tensor("bfloat16", (HIDDEN, 2 * INNER), Shard(1)),
    w2=Tensor("bfloat16", (INNER, HIDDEN), Shard(0)),
)
def mlp(x, w1, w2):
    return reduce_scatter(silu_mul(all_gather(x) @ w1) @ w2)
