"""10. Two nodes: what is far is reached by put_signal, what is near also directly.

Every rank sends its row once to each other node, to the rank of its own place there, which hands
it on to its neighbours: the slow link carries each row once per node, not once per rank.

    weft emulate examples/10_two_nodes.py --ranks 4 --nodes 2
    weft emulate examples/10_two_nodes.py --ranks 4            one node: nothing is far

On GPUs each host is a node, or as WEFT_NODES=2 declares; what crosses goes through NVSHMEM.
"""

import torch
import triton
import triton.language as tl

import weft
import weft.language as wl

SIZE = 128


@triton.jit
def all_gather(world, row, gathered, arrived, out, size: tl.constexpr):
    rank = wl.rank(world)
    n = wl.num_ranks(world)
    at = tl.arange(0, size)
    values = tl.load(row + at)
    per_node = 0
    for peer in range(n):
        per_node += wl.is_near(world, peer).to(tl.int32)
    place = rank % per_node
    for step in range(n):  # to the rank of this place on every node; the own node's is oneself
        peer = (rank + step) % n
        if peer % per_node == place:
            wl.put_signal(world, gathered + rank * size + at, values, arrived + rank, to=peer)
    for node in range(n // per_node):  # what has come from each node goes to the neighbours
        source = node * per_node + place
        wl.wait(arrived + source, at_least=1)
        values = tl.load(gathered + source * size + at)
        for peer in range(n):
            if wl.is_near(world, peer) & (peer != rank):
                tl.store(wl.at(world, gathered + source * size + at, peer), values)
                wl.notify(world, arrived + source, to=peer)
    for source in range(n):
        wl.wait(arrived + source, at_least=1)
        tl.store(out + source * size + at, tl.load(gathered + source * size + at))


def main():
    world = weft.init()
    n = world.num_ranks
    row = torch.arange(SIZE, device=world.device) + 1000.0 * world.rank
    gathered = world.empty((n, SIZE), torch.float32)
    arrived = world.signals(n)
    out = torch.empty(n, SIZE, device=world.device)

    all_gather[(1,)](world.arg, row, gathered, arrived, out, SIZE)

    expected = torch.arange(SIZE) + 1000.0 * torch.arange(n)[:, None]
    assert torch.equal(out.cpu(), expected), f"rank {world.rank} gathered wrong rows"
    assert (arrived == 1).all(), "each row is announced once"
    print(f"rank {world.rank} on node {world.node} holds all {n} rows")
    world.close()


if __name__ == "__main__":
    main()
