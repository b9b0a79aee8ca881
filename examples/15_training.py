"""15. Training: a layer whose rows and weights are spread over the ranks learns.

Rows of x are spread over the ranks; columns of up and rows of down too. `ag_gemm` and `gemm_rs` are
differentiated by torch like any function: the one's gradient travels by the other, and that of a
weight by `ag_wgrad`, which sums over rows as they arrive. Nothing is said about gradients here, and
each rank ends with its part of those that one process would have found.

    weft emulate examples/15_training.py --ranks 4
    torchrun --nproc-per-node 4 examples/15_training.py

The forward pass may be compiled: torch.compile(layer, fullgraph=True) keeps the operators whole.
"""

import torch
from torch.nn.functional import silu

import weft
from weft.ops import ag_gemm, gemm_rs

ROWS, WIDTH, HIDDEN = 26, 16, 48
STEPS, RATE = 2, 1e-3


def part(whole, dim, world):
    """This rank's part of a tensor, as torch.chunk splits it."""
    each = -(-whole.shape[dim] // world.num_ranks)
    first = min(each * world.rank, whole.shape[dim])
    return whole.narrow(dim, first, min(each, whole.shape[dim] - first)).contiguous()


def layer(x, up, down, world):
    hidden = silu(ag_gemm(x, up, world=world, m=ROWS))
    return gemm_rs(hidden, down, world=world)


def train(forward, x, target, weights):
    """A few steps of descent on the squared error of these rows; the weights in the end."""
    weights = [weight.clone().requires_grad_() for weight in weights]
    for _ in range(STEPS):
        (forward(x, *weights) - target).square().sum().backward()
        with torch.no_grad():
            for weight in weights:
                weight -= RATE * weight.grad
                weight.grad = None
    return [weight.detach() for weight in weights]


def main():
    world = weft.init()
    generator = torch.Generator().manual_seed(0)
    x, target = (torch.randn(ROWS, WIDTH, generator=generator) for _ in range(2))
    up = torch.randn(WIDTH, HIDDEN, generator=generator) / 4
    down = torch.randn(HIDDEN, WIDTH, generator=generator) / 4

    own = [part(x, 0, world), part(target, 0, world), part(up, 1, world), part(down, 0, world)]
    x_own, target_own, *weights = [one.to(world.device) for one in own]
    # The loss of all ranks is the sum of theirs, each of its own rows.
    learned = train(lambda *given: layer(*given, world), x_own, target_own, weights)

    alone = train(lambda a, b, c: silu(a @ b) @ c, x, target, [up, down])
    for got, whole, dim in zip(learned, alone, (1, 0), strict=True):
        wanted = part(whole, dim, world).to(world.device)
        assert torch.allclose(got, wanted, rtol=1e-3, atol=1e-3), (got - wanted).abs().max()
    moved = (learned[0] - weights[0]).abs().max().item()
    print(f"rank {world.rank}: {STEPS} steps as one process takes them; up moved by {moved:.3f}")
    world.close()


if __name__ == "__main__":
    main()
