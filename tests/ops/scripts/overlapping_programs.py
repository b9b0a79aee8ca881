"""Programs whose plans overlap, with the kernels that are generated for them.

    torchrun --nproc-per-node 2 tests/ops/scripts/overlapping_programs.py
    WEFT_NODES=2 torchrun --nproc-per-node 4 tests/ops/scripts/overlapping_programs.py

Eager, with other rows in between, replayed; against the reference, which is what a library gives in
fp32. Each rank says `rank R of N: C programs`, or raises with all that went wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

import weft
import weft.ops
from weft.base.dtypes import tolerance
from weft.compiler import (
    Partial,
    Replicate,
    Shard,
    Tensor,
    all_gather,
    all_reduce,
    gather_rows,
    grouped_matmul,
    libraries,
    moe_route,
    reduce_scatter,
    rms_norm,
    scatter_rows,
    silu_mul,
)
from weft.compiler.facts import Facts, Settings
from weft.compiler.frontend import trace
from weft.compiler.passes.place import place
from weft.compiler.pipeline import overlap
from weft.plan import run_plan
from weft.plan.problems import nodes_of
from weft.tune.compiling import compile_together

EXPERTS = 8


def gemm_ar(a, b):
    return all_reduce(a @ b)


def moe(x, logits, w1, w2):
    routing = moe_route(logits, top_k=2)
    h = silu_mul(grouped_matmul(gather_rows(all_gather(x), routing), w1, routing))
    return reduce_scatter(scatter_rows(grouped_matmul(h, w2, routing), routing))


def mlp(x, w1, w2):
    return reduce_scatter(silu_mul(all_gather(x) @ w1) @ w2)


def few(x, residual, weight):
    return rms_norm(all_reduce(x) + residual, weight)


class Case:
    """One program at one number of rows, by one engine."""

    def __init__(
        self, world: Any, function: Any, engines: dict[str, str], sizes: tuple, columns: int = 256,
        padding: int = 0,
    ) -> None:  # fmt: skip
        m, k, n = sizes
        self.world, self.m, self.padding = world, m, padding
        self.name = f"{function.__name__} {engines} m={m} in tiles of {columns} columns"
        self.name += f", rows {padding} elements apart" if padding else ""
        parameters = self._parameters(function, k, n)
        self.placed = place(trace(function, "tp", parameters))
        nodes = nodes_of(world)
        nodes = nodes if len(nodes) > 1 else ()
        facts = Facts({"m": m}, world.num_ranks, world.target, nodes)
        tiles = {"product": (128, columns, 64), "product_2": (128, 128, 64)}
        tiles = {task.name: tiles[task.name] for task in self.placed.tasks if task.name in tiles}
        self.stages = overlap(self.placed, facts, Settings(tiles=tiles, engines=engines))
        if engines.get("scattered") == "ce_push":  # which is not for recordings
            instead = Settings(tiles=tiles, engines=engines | {"scattered": "sm_push"})
            self.stages = replace(self.stages, recorded=overlap(self.placed, facts, instead))
        self.kinds = parameters

    def _parameters(self, function: Any, k: int, n: int) -> dict[str, Tensor]:
        def of(*sizes: Any) -> Tensor:
            return Tensor("bfloat16", sizes[:-1], sizes[-1])

        if function is gemm_ar:
            return {"a": of("m", n, Shard(1)), "b": of(n, k, Shard(0))}
        if function is few:
            x, whole = of("m", k, Partial()), of("m", k, Replicate())
            return {"x": x, "residual": whole, "weight": of(1, k, Replicate())}
        if function is moe:
            w1, w2 = of(EXPERTS, k, 2 * n, Shard(2)), of(EXPERTS, n, k, Shard(1))
            return {"x": of("m", k, Shard(0)), "logits": of("m", EXPERTS, Shard(0)),
                    "w1": w1, "w2": w2}  # fmt: skip
        w2 = of(n, k, Shard(0))
        return {"x": of("m", k, Shard(0)), "w1": of(k, 2 * n, Shard(1)), "w2": w2}

    def tensors(self, m: int, seed: int) -> dict[str, torch.Tensor]:
        """All ranks' tensors, on each of them: alike devices draw alike."""
        device, found = self.world.device, {}
        generator = torch.Generator(device).manual_seed(seed)
        for name, kind in self.kinds.items():
            sizes = [m if size == "m" else size for size in kind.sizes]
            scale = 1 if kind.sizes[0] == "m" else sizes[-2] ** -0.5
            drawn = torch.randn(*sizes, generator=generator, device=device)
            found[name] = (drawn * scale).bfloat16()
        return found

    def given(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """This rank's parts."""
        mine = {name: self._part(one, self.kinds[name].placement) for name, one in tensors.items()}
        # Weights usually lie as [columns, rows].
        last = list(mine)[-1]
        mine[last] = mine[last].mT.contiguous().mT
        if self.padding:  # rows that are copied, weights that are read so in place
            mine = {name: torch.nn.functional.pad(one, (0, self.padding))[:, : one.shape[1]]
                    for name, one in mine.items()}  # fmt: skip
        return mine

    def call(self, m: int, mine: dict[str, torch.Tensor]) -> torch.Tensor:
        return run_plan(self.stages, mine, {"m": m}, world=self.world)[0]

    def is_right(self, result: torch.Tensor, tensors: dict[str, torch.Tensor]) -> bool:
        with self.world.device:
            (expected,) = libraries.reference(self.placed, tensors)
        kind = self.placed.task(self.placed.results[0]).type
        wanted = self._part(expected, kind.placement)
        error = (result.float() - wanted).norm()
        weights = [kind.sizes for kind in self.kinds.values() if kind.sizes[0] != "m"]
        size = max(int(sizes[-2]) for sizes in weights)
        return bool(error <= tolerance("bfloat16", size) * expected.norm())

    def _part(self, whole: torch.Tensor, placement: Any) -> torch.Tensor:
        if isinstance(placement, Partial):
            return whole / self.world.num_ranks
        if not isinstance(placement, Shard):
            return whole
        size = whole.shape[placement.dim]
        each = -(-size // self.world.num_ranks)
        first = min(self.world.rank * each, size)
        part = whole.narrow(placement.dim, first, min(first + each, size) - first)
        return part.contiguous()

    def failures(self) -> Iterator[str]:
        # Often enough for a call to become a replay.
        for turn, m in enumerate((self.m, self.m // 2 + 3, *[self.m] * 5)):
            tensors = self.tensors(m, turn)
            if not self.is_right(self.call(m, self.given(tensors)), tensors):
                yield f"{self.name}: call {turn} of {m} rows"
        mine = self.given(tensors)
        with self.world.record() as recording:
            result = self.call(self.m, mine)
        for turn in range(2):
            result.fill_(float("nan"))
            recording.replay()
            if not self.is_right(result, tensors):
                yield f"{self.name}: replay {turn}"


def main() -> None:
    world = weft.init()
    sizes = (600, 256, 512) if world.target.backend == "emu" else (1500, 2048, 4096)
    some = [
        # From node to node rows are put, and tiles go node by node.
        Case(world, mlp, {"gathered": "sm_put"}, sizes),
        Case(world, gemm_ar, {"reduced": "sm_put"}, sizes),
    ] if len(nodes_of(world)) > 1 else [
        Case(world, mlp, {"gathered": "sm_push"}, sizes),
        Case(world, mlp, {"gathered": "sm_push"}, sizes, columns=160),
        Case(world, mlp, {"gathered": "ce_push"}, sizes, columns=320),
        # Strides that TMA can have, and that it cannot.
        Case(world, mlp, {"gathered": "ce_push"}, sizes, padding=8),
        Case(world, mlp, {"gathered": "sm_push"}, sizes, padding=3),
        Case(world, mlp, {"gathered": "ce_push", "scattered": "ce_push"}, sizes),
        Case(world, gemm_ar, {"reduced": "sm_push"}, sizes),
        # The second call has more rows, which lie in the same boxes.
        Case(world, few, {"reduced": "one_shot_ll"}, (1, *sizes[1:])),
        Case(world, few, {"reduced": "two_shot_ll"}, (29, *sizes[1:])),
        Case(world, moe, {}, (sizes[0], sizes[1], sizes[2] // 2)),
    ]  # fmt: skip
    for one in some:
        mine = one.given(one.tensors(one.m, 0))
        compile_together(world, lambda one=one, mine=mine: one.call(one.m, mine))
    found = [failure for one in some for failure in one.failures()]
    world.synchronize()
    assert not found, "\n".join(found)
    print(f"rank {world.rank} of {world.num_ranks}: {len(some)} programs", flush=True)
    world.close()


if __name__ == "__main__":
    main()
