"""17. A mixture of experts as a tensor program: who works for which token is known on the device.

A router says which two of four experts each token goes to; every rank has columns of every expert.
The function says it with tables, as `moe_route` gives them: a row for each choice of each token,
sorted by expert; a product for each expert; and back, weighted. The host never learns how many
rows an expert has, yet tokens travel beneath the products of others and sums beneath theirs.

    weft emulate examples/17_experts.py --ranks 4
    torchrun --nproc-per-node 4 examples/17_experts.py

`weft explain examples/17_experts.py:layer` tells what becomes of it: a router, and two kernels.
"""

import sys

import torch

import weft
import weft.ops
from weft.compiler import (
    Settings,
    Shard,
    Tensor,
    all_gather,
    gather_rows,
    grouped_matmul,
    moe_route,
    reduce_scatter,
    scatter_rows,
    silu_mul,
)

EXPERTS, TOP_K, K, N = 4, 2, 16, 24


@weft.program(
    mesh="tp",
    # Left out, the compiler chooses; the tiles of products by one table are of one height.
    settings=Settings(tiles={"products": (16, 16, 16), "products_2": (16, 16, 16)}),
    x=Tensor("float32", ("m", K), Shard(0)),
    router=Tensor("float32", (K, EXPERTS)),
    up=Tensor("float32", (EXPERTS, K, 2 * N), Shard(2)),
    down=Tensor("float32", (EXPERTS, N, K), Shard(1)),
)
def layer(x, router, up, down):
    routing = moe_route(x @ router, top_k=TOP_K)
    h = silu_mul(grouped_matmul(gather_rows(all_gather(x), routing), up, routing))
    return reduce_scatter(scatter_rows(grouped_matmul(h, down, routing), routing))


def by_one_device(x, router, up, down):
    """The same with all tokens at once, every expert on every token."""
    share, ids = (x @ router).softmax(1).topk(TOP_K)
    h = torch.einsum("mk,ekn->emn", x, up)
    of_all = (torch.nn.functional.silu(h[..., 0::2]) * h[..., 1::2]) @ down
    weight = torch.zeros(len(x), EXPERTS, device=x.device).scatter(1, ids, share)
    return torch.einsum("me,emk->mk", weight / share.sum(1, keepdim=True), of_all)


def main():
    # Small ones can be verified in full.
    num_tokens, num_calls = map(int, sys.argv[1:] or (9, 2))
    world = weft.init()
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=generator).to(world.device)

    def part(whole, dim):  # this rank's, as torch.chunk splits it; there may be none left
        each = -(-whole.shape[dim] // world.num_ranks)
        first = min(each * world.rank, whole.shape[dim])
        return whole.narrow(dim, first, min(each, whole.shape[dim] - first)).contiguous()

    router, up, down = random(K, EXPERTS), random(EXPERTS, K, 2 * N), random(EXPERTS, N, K)
    for _ in range(num_calls):  # other tokens, other tables each time
        x = random(num_tokens, K)
        y = layer(
            part(x, 0), router, part(up, 2), part(down, 1),
            world=world, m=num_tokens,
        )  # fmt: skip
        expected = part(by_one_device(x, router, up, down), 0)
        assert torch.allclose(y, expected, rtol=1e-3, atol=1e-2), f"rank {world.rank} is wrong"
    print(f"rank {world.rank}: {len(y)} of {num_tokens} tokens, as one device would have them")
    world.close()


if __name__ == "__main__":
    main()
