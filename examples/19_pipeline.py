"""19. A pipeline: a model in stages, two to a rank, learns as one process would.

Each rank has stages of its own, and hands what they make to the next rank: `send` on one, `recv` on
the other, and nobody else calls. `weft.layers.Pipeline` does so for microbatches that pass through
one behind another, forwards and backwards in turns. With two stages to a rank the ranks wait less
at the begin and at the end: `weft timeline pipeline` draws it.

    weft emulate examples/19_pipeline.py --ranks 4
    torchrun --nproc-per-node 4 examples/19_pipeline.py

The number of microbatches is a multiple of the number of ranks; with one stage to a rank it is any.
"""

import torch
from torch import nn
from torch.nn.functional import mse_loss

import weft

ROWS, WIDTH, STEPS, RATE = 6, 8, 2, 0.1


def stages_of(count):
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count)]


def pass_on(world):
    """One message from the first rank to the last: these two alone call."""
    x = torch.arange(4.0, device=world.device)
    if world.rank == 0:
        weft.ops.send(x, world.num_ranks - 1, world=world)
    if world.rank == world.num_ranks - 1:
        got = weft.ops.recv(torch.empty_like(x), 0, world=world)
        assert torch.equal(got, x)


def alone(stages, inputs, targets):
    """One process, one microbatch after the other."""
    model = nn.Sequential(*stages)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for x, target in zip(inputs, targets, strict=True):
            (mse_loss(model(x), target) / len(inputs)).backward()
        optimizer.step()


def main():
    world = weft.init()
    chunks, microbatches = 2, 2 * world.num_ranks
    if world.num_ranks > 1:
        weft.mailbox(64, world=world)  # memory for messages, allocated by all ranks together
        pass_on(world)

    drawn = torch.randn(2, microbatches, ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    inputs, targets = (list(part.to(world.device)) for part in drawn)
    whole = [one.to(world.device) for one in stages_of(chunks * world.num_ranks)]
    mine = [one.to(world.device) for one in stages_of(chunks * world.num_ranks)]
    mine = nn.ModuleList(mine[world.rank :: world.num_ranks])

    pipeline = weft.layers.Pipeline(
        mine, world, shape=(ROWS, WIDTH), microbatches=microbatches, loss=mse_loss
    )
    optimizer = torch.optim.SGD(mine.parameters(), lr=RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        pipeline.step(inputs, targets)
        optimizer.step()

    alone(whole, inputs, targets)
    wanted = nn.ModuleList(whole[world.rank :: world.num_ranks])
    for got, want in zip(mine.parameters(), wanted.parameters(), strict=True):
        assert torch.allclose(got, want, rtol=1e-5, atol=1e-6), (got - want).abs().max()
    waits = weft.layers.bubble(world.num_ranks, microbatches, chunks)
    print(f"rank {world.rank}: {STEPS} steps as one process takes them; {waits:.0%} of one waits")
    world.close()


if __name__ == "__main__":
    main()
