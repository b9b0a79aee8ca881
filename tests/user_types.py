"""What a user's file looks like to a type checker: `make lint` checks it, test_types.py runs it.

Each `assert_type` fails where a name of weft has lost its type, and each call where a parameter is
annotated otherwise than the documents say.
"""

import torch
import triton
import triton.language as tl
from typing_extensions import assert_type

import weft
import weft.language as wl
import weft.ops
from weft.compiler import Compiled, Replicate, Shard, Tensor, all_gather, program, silu
from weft.language.world_arg import WorldArg


@triton.jit
def read_neighbour(world, row, out, ready, size: tl.constexpr):
    neighbour = (wl.rank(world) + 1) % wl.num_ranks(world)
    at = tl.arange(0, size)
    wl.notify(world, ready, to=neighbour, op="set")
    wl.wait(ready, at_least=1, order=weft.Order.ACQUIRE)
    row_of_neighbour = wl.at(world, row + at, neighbour)
    tl.store(out + at, tl.load(row_of_neighbour))


@program(
    mesh="tp",
    x=Tensor(torch.bfloat16, ("m", 32), Shard(0)),
    w=Tensor("bfloat16", (32, 64), Shard(1)),
    gain=Tensor("bf16", (1, 32), Replicate()),
)
def project(x, w, gain):
    return silu(all_gather(x) @ w)


def launch(world: weft.World) -> torch.Tensor:
    """A kernel of the user's own."""
    assert_type(world.rank, int)
    assert_type(world.device, torch.device)
    assert_type(world.arg, WorldArg)
    row = world.empty((64,), torch.float32)
    ready = world.signals(1)
    out = torch.empty(64, device=world.device)
    row.fill_(world.rank)
    size = tl.constexpr(64)
    read_neighbour[(1,)](world.arg, row, out, ready, size)
    assert_type(world.peer(row, 0), torch.Tensor)
    with world.stream("copy") as stream:
        stream.wait(world.current_stream())
    slot = world.workspace("example", {"rows": ((2, 4), torch.float32)}, {"full": (1, torch.int64)})
    assert slot.rows.shape == (2, 4)
    world.barrier()
    world.synchronize()
    return out


def call_operators(world: weft.World) -> None:
    """Operators, and a program that the compiler takes."""
    a = torch.randn(8, 32, device=world.device).bfloat16()
    w = torch.randn(32, 64 // world.num_ranks, device=world.device).bfloat16()
    assert_type(weft.ops.ag_gemm(a, w, world=world), torch.Tensor)
    assert_type(weft.ops.all_gather(a, world=world), torch.Tensor)
    assert_type(weft.ops.all_to_all(a, world=world), torch.Tensor)
    splits = torch.full((world.num_ranks,), 2, device=world.device)
    rows, received = weft.ops.all_to_all(a, world=world, splits=splits)
    assert_type(received, torch.Tensor)
    assert rows.shape[1] == a.shape[1] and int(received.sum()) == 2 * world.num_ranks
    weft.mailbox(a.nbytes, world=world, hops=(1,))
    if world.num_ranks > 1:
        weft.ops.send(a, (world.rank + 1) % world.num_ranks, world=world)
        before = (world.rank - 1) % world.num_ranks
        assert_type(weft.ops.recv(a, before, world=world), torch.Tensor)
    assert_type(project, Compiled)
    gain = torch.ones(1, 32, device=world.device).bfloat16()
    project(a, w, gain=gain, world=world)


def main() -> int:
    world = weft.init()
    assert_type(world, weft.World)
    neighbour = (world.rank + 1) % world.num_ranks
    assert (launch(world) == neighbour).all()
    call_operators(world)
    try:
        world.empty((-1,), torch.float32)
    except weft.ShapeError:
        pass
    world.close()
    return neighbour


def on_emulated_ranks() -> list[int]:
    with weft.emulated(ranks=2) as ranks:
        return ranks.run(main)
