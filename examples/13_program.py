"""13. A tensor program with collectives in it: the compiler weaves them into its products.

Rows of x are spread over the ranks, columns of w1 and rows of w2 too. The function says what is
computed, on whole tensors; what is sent when, by whom, and who waits for what is the compiler's
work: rows are multiplied as they arrive, sums leave tile by tile while others are multiplied.

    weft emulate examples/13_program.py --ranks 4
    torchrun --nproc-per-node 4 examples/13_program.py

`weft explain examples/13_program.py:mlp` tells what it does and why; the Triton source that it
makes is kept under ~/.cache/weft/generated, to be read.
"""

import sys

import torch

import weft
import weft.ops
from weft.compiler import Settings, Shard, Tensor, all_gather, reduce_scatter, silu_mul

K, N = 16, 32


@weft.program(
    mesh="tp",
    # Left out, the compiler chooses: engines and tiles by what it predicts.
    settings=Settings(
        tiles={"product": (16, 32, 16), "product_2": (16, 16, 16)}, engines={"gathered": "sm_push"}
    ),
    x=Tensor("float32", ("m", K), Shard(0)),
    w1=Tensor("float32", (K, 2 * N), Shard(1)),
    w2=Tensor("float32", (N, K), Shard(0)),
)
def mlp(x, w1, w2):
    return reduce_scatter(silu_mul(all_gather(x) @ w1) @ w2)


def part(whole, dim, world):
    """This rank's part of a tensor, as torch.chunk splits it."""
    each = -(-whole.shape[dim] // world.num_ranks)
    first = min(each * world.rank, whole.shape[dim])
    return whole.narrow(dim, first, min(each, whole.shape[dim] - first)).contiguous()


def main():
    # Small ones can be verified in full.
    num_rows, num_calls = map(int, sys.argv[1:] or (40, 3))
    world = weft.init()
    generator = torch.Generator().manual_seed(0)
    w1 = torch.randn(K, 2 * N, generator=generator).to(world.device)
    w2 = torch.randn(N, K, generator=generator).to(world.device)

    for _ in range(num_calls):  # other rows each time, and no barrier between
        x = torch.randn(num_rows, K, generator=generator).to(world.device)
        y = mlp(
            part(x, 0, world), part(w1, 1, world), part(w2, 0, world),
            world=world, m=num_rows,
        )  # fmt: skip

        h = x @ w1
        expected = part((torch.nn.functional.silu(h[:, 0::2]) * h[:, 1::2]) @ w2, 0, world)
        assert torch.allclose(y, expected, rtol=1e-3, atol=1e-2), f"rank {world.rank} is wrong"
    print(f"rank {world.rank}: {tuple(y.shape)} of {num_rows} rows, as one device would have it")
    world.close()


if __name__ == "__main__":
    main()
