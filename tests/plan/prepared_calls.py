"""A script for test_prepare.py, with a cache of its own: calls on emulated ranks that nothing was
prepared for, then those of as many sizes as it is told, prepared: plain ones, or `others`: with
gradients, a configuration of their own, as one persistent kernel, barriers of all channels. Prints
the error, then what was compiled behind prepare."""

from __future__ import annotations

import random
import sys

import torch

import weft
from weft.base.parts import part_of
from weft.compiler import Replicate, Shard, Tensor, all_reduce, silu

N, K, MOST = 48, 32, 20


def call(world, m: int) -> torch.Tensor:
    first, end = part_of(m, world.rank, world.num_ranks)
    x, up, down = torch.ones(end - first, K), torch.ones(K, N), torch.ones(N, K)
    rows = weft.ops.ag_gemm(x, up, world=world, m=m)
    return weft.ops.gemm_rs(rows, down, world=world)


def unprepared():
    call(weft.init(strict=True), 13)


def prepared(count: int):
    world, rng = weft.init(strict=True), random.Random(7)
    of_calls = {"world": world, "dtype": "float32"}
    weft.prepare(weft.ops.ag_gemm, {"m": range(1, MOST + 1), "n": N, "k": K}, **of_calls)
    weft.prepare("gemm_rs", {"m": range(1, MOST + 1), "n": K, "k": N}, **of_calls)
    for _ in range(count):
        found = call(world, rng.randint(1, MOST))
        assert (found == world.num_ranks * K * N).all()
    return world.compiled


@weft.program(
    mesh="tp",
    x=Tensor("float32", ("m", K), Replicate()),
    v=Tensor("float32", (K, N), Shard(1)),
    w=Tensor("float32", (N, K), Shard(0)),
)
def layer(x, v, w):
    return all_reduce(silu(x @ v) @ w)


def others(count: int):
    world, rows = weft.init(strict=True), (16, 1, 5, 2)[:count]
    of_calls = {"world": world, "dtype": "float32"}
    pushed = weft.ops.card("gemm_rs").config(tile_m=16, tile_n=16, tile_k=16)
    in_one = layer.options(lowering="persistent")
    weft.prepare(weft.ops.ag_gemm, {"m": rows, "n": N, "k": K}, gradients=True, **of_calls)
    weft.prepare("gemm_rs", {"m": rows, "n": K, "k": N}, config=pushed, **of_calls)
    weft.prepare(in_one, {"m": rows}, world=world)
    weft.prepare(layer, {"m": rows}, gradients=True, world=world)
    v, w = torch.ones(K, N // world.num_ranks), torch.ones(N // world.num_ranks, K)
    for turn, m in enumerate(rows):
        first, end = part_of(m, world.rank, world.num_ranks)
        a, b = torch.ones(end - first, K, requires_grad=True), torch.ones(K, N, requires_grad=True)
        made = weft.ops.ag_gemm(a, b, world=world, m=m)
        made.sum().backward()
        assert (a.grad == world.num_ranks * N).all() and (b.grad == m).all()
        down = torch.ones(N, K)
        found = weft.ops.gemm_rs(made.detach(), down, world=world, config=pushed)
        assert (found == world.num_ranks * K * N).all()
        x = torch.ones(m, K, requires_grad=True)
        out = layer(x, v, w, world=world)
        out.sum().backward()
        assert torch.allclose(in_one(x.detach(), v, w, world=world), out.detach())
        world.barrier(turn % 64)
    return world.compiled


def main():
    with weft.emulated(ranks=2) as ranks:
        try:
            ranks.run(unprepared)
        except weft.NotPreparedError as error:
            print(error.message)
    with weft.emulated(ranks=2) as ranks:
        calls = others if "others" in sys.argv else prepared
        print(ranks.run(calls, int(sys.argv[1])))


if __name__ == "__main__":
    main()
