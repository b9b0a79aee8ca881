"""16. A whole decode step as one kernel: its tiles are tasks, the kernel's programs take them.

A layer of a transformer, one new token of each sequence: norm, queries, keys and values, positions,
the caches appended to, attention, its projection, the MLP. Heads and columns are split over the
ranks, so two sums go over all of them. Each rank launches a single kernel: a task begins when the
tiles that it reads are there, on whichever rank they are made, and nobody waits for a whole
operation, nor for the host.

    weft emulate examples/16_megakernel.py --ranks 4
    torchrun --nproc-per-node 4 examples/16_megakernel.py
    weft compile examples/16_megakernel.py:one_kernel --shape b=1..4 --target cuda:90 -o DIR

The kernel's source, made to be read, is kept under ~/.cache/weft/generated.
"""

import torch

import weft
import weft.megakernel
import weft.ops
from weft.compiler import (
    Replicate,
    Shard,
    Tensor,
    Times,
    all_reduce,
    decode_attention,
    kv_append,
    rms_norm,
    rope,
    silu_mul,
)

BATCH, HIDDEN, INNER, HEAD, HEADS, MAX_KV = 2, 16, 16, 8, 4, 4


def of(rows, columns, placement, dtype="float32"):
    return Tensor(dtype, (rows, columns), placement)


@weft.program(
    mesh="tp",
    x=of("b", HIDDEN, Replicate()),
    lengths=of(1, "b", Replicate(), "int32"),
    gain=of(1, HIDDEN, Replicate()),
    wq=of(HIDDEN, HEADS * HEAD, Shard(1)),
    wk=of(HIDDEN, HEADS * HEAD, Shard(1)),
    wv=of(HIDDEN, HEADS * HEAD, Shard(1)),
    keys=of(Times("b", MAX_KV), HEADS * HEAD, Shard(1)),
    values=of(Times("b", MAX_KV), HEADS * HEAD, Shard(1)),
    wo=of(HEADS * HEAD, HIDDEN, Shard(0)),
    up=of(HIDDEN, 2 * INNER, Shard(1)),
    down=of(INNER, HIDDEN, Shard(0)),
)
def layer(x, lengths, gain, wq, wk, wv, keys, values, wo, up, down):
    h = rms_norm(x, gain)
    keys = kv_append(keys, rope(h @ wk, lengths, head=HEAD), lengths)
    values = kv_append(values, h @ wv, lengths)
    queries = rope(h @ wq, lengths, head=HEAD)
    x = all_reduce(decode_attention(queries, keys, values, lengths, head=HEAD) @ wo) + x
    return all_reduce(silu_mul(rms_norm(x, gain) @ up) @ down) + x


one_kernel = layer.options(lowering="persistent")


def part(whole, name, world):
    """This rank's part of a tensor, as the declaration splits it; its own memory."""
    placement = layer.stages.program.task(name).type.placement
    if isinstance(placement, Shard):
        whole = whole.chunk(world.num_ranks, placement.dim)[world.rank]
    return whole.clone(memory_format=torch.contiguous_format)


def main():
    world = weft.init()
    generator = torch.Generator().manual_seed(0)
    mine = {}
    for task in layer.stages.program.tasks:
        if task.kind == "input":
            known = {"b": BATCH, Times("b", MAX_KV): BATCH * MAX_KV}
            shape = [known.get(size, size) for size in task.type.sizes]
            whole = torch.randn(*shape, generator=generator).to(world.device) / 4
            mine[task.name] = part(whole, task.name, world)
    theirs = {name: tensor.clone() for name, tensor in mine.items()}

    for step in range(2):  # each sequence gets a token more; the caches stay
        lengths = torch.tensor([[step + 1, step + 2]], dtype=torch.int32, device=world.device)
        mine["lengths"] = theirs["lengths"] = lengths
        y = one_kernel(*mine.values(), world=world)
        expected = layer.options(lowering="unfused")(*theirs.values(), world=world)
        assert torch.allclose(y, expected, rtol=1e-3, atol=1e-4), f"rank {world.rank} is wrong"
        assert torch.allclose(mine["keys"], theirs["keys"], atol=1e-5)
        mine["x"] = theirs["x"] = expected
    print(f"rank {world.rank}: two steps of {BATCH} sequences, a kernel each, as libraries have it")
    world.close()


if __name__ == "__main__":
    main()
