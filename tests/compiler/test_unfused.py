"""Programs run by calls of libraries on emulated ranks, held against what they mean."""

from __future__ import annotations

import pytest
import torch
from ir_reader import read
from random_programs import STEPS, global_inputs, of_rank, random_program

import weft
from weft.base.dtypes import tolerance
from weft.base.errors import (
    AllocationOrderError,
    CallOrderError,
    DtypeError,
    ShapeError,
    UnsupportedError,
    UsageError,
)
from weft.compiler import Compiled, Shard, Tensor, all_gather, libraries, reduce_scatter, silu_mul
from weft.compiler import program as compiled_for
from weft.ir import device, task
from weft.ir.shapes import ROWS
from weft.ir.tensor import Partial
from weft.plan import run_calls


def mlp_of(k: int, f: int, n: int, dtype: str = "float32") -> Compiled:
    @compiled_for(
        mesh="tp",
        x=Tensor(dtype, ("m", k), Shard(0)),
        w1=Tensor(dtype, (k, 2 * f), Shard(1)),
        w2=Tensor(dtype, (f, n), Shard(0)),
    )
    def mlp(x, w1, w2):
        return reduce_scatter(silu_mul(all_gather(x) @ w1) @ w2)

    return mlp


def run(
    world,
    compiled: Compiled,
    sizes: dict[str, int],
    seed: int = 0,
    lowering: str | None = "unfused",
) -> None:
    """One rank's call, and its results against the reference's part."""
    program = compiled.stages.program
    whole = global_inputs(program, sizes, seed)
    parts = [
        of_rank(program.task(name).type, tensor, sizes, world.rank, world.num_ranks)
        for name, tensor in whole.items()
    ]
    results = compiled.options(lowering=lowering)(*parts, world=world, **sizes)
    results = results if isinstance(results, tuple) else (results,)
    wanted = libraries.reference(program, whole)
    assert len(results) == len(wanted) == len(program.results)
    for name, got, want in zip(program.results, results, wanted):
        kind = program.task(name).type
        if kind.placement == Partial():
            got = weft.ops.all_reduce(got.contiguous(), world=world)
        else:
            want = of_rank(kind, want, sizes, world.rank, world.num_ranks)
        assert got.shape == want.shape and str(got.dtype) == f"torch.{kind.dtype}"
        if want.numel():
            scale = max(float(want.double().norm()), 1e-30)
            error = float((got.double() - want.double()).norm()) / scale
            assert error <= tolerance(kind.dtype, 1024), (name, error)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_mlp_equals_its_reference(ranks, num_ranks: int):
    """Ragged m, one row, none of a rank; the same compiled program for every size."""
    compiled = mlp_of(12, 24, 10)

    def main():
        world = weft.init()
        for m in (7, 1, 12):
            run(world, compiled, {"m": m}, seed=m)
        world.close()

    ranks(main, num_ranks)


def test_the_mlp_in_bfloat16(ranks):
    compiled = mlp_of(16, 8, 12, "bfloat16")

    def main():
        world = weft.init()
        program = compiled.stages.program
        whole = global_inputs(program, {"m": 6}, 1)
        parts = [
            of_rank(program.task(name).type, tensor, {"m": 6}, world.rank, 2)
            for name, tensor in whole.items()
        ]
        # Shards are full: m needs not be said.
        got = compiled.options(lowering="unfused")(*parts, world=world)
        (want,) = libraries.reference(program, whole)
        want = of_rank(program.tasks[-1].type, want, {"m": 6}, world.rank, 2)
        assert got.dtype == torch.bfloat16
        # Rounded five times on its way.
        error = (got.float() - want).norm() / want.norm()
        assert error <= 5 * tolerance("bfloat16", 32)
        world.close()

    ranks(main, 2)


def several(ranks, seeds, num_ranks: int) -> None:
    programs = {seed: random_program(seed, num_ranks) for seed in seeds}
    for compiled in programs.values():
        program = compiled.stages.program
        assert read(task, task.show(program)) == program
        assert read(device, device.show(compiled.plan)) == compiled.plan

    def main():
        world = weft.init()
        for seed, compiled in programs.items():
            for m in (seed % 5 + 1, 2 * num_ranks + 1):
                run(world, compiled, {"m": m}, seed)
        world.close()

    ranks(main, num_ranks)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_random_programs(ranks, num_ranks: int):
    several(ranks, range(10 * num_ranks, 10 * num_ranks + 4), num_ranks)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_many_random_programs(ranks, num_ranks: int):
    several(ranks, range(1000 * num_ranks, 1000 * num_ranks + 20), num_ranks)


def test_random_programs_are_not_trivial():
    """Every operation occurs among those that the quick test runs, and placements of each sort."""
    programs = [random_program(10 * n + i, n).stages.program for n in (1, 2, 3) for i in range(4)]
    tasks = [one for program in programs for one in program.tasks]
    of_rows = {row: kind for kind, row in ROWS.items()}
    assert {of_rows.get(one.kind, one.kind) for one in tasks} == {"input", *STEPS}
    assert len({one.type.placement for one in tasks}) == 4


class World:
    """What binding asks of a world."""

    rank, num_ranks, choices = 1, 3, ()

    def __init__(self) -> None:
        self.calls: dict = {}

    def offset(self, tensor: torch.Tensor) -> None:
        """None of these is on a symmetric heap."""


@pytest.mark.parametrize(
    ("shapes", "sizes", "error", "told"),
    [
        ([(2, 12), (12, 16), (8, 10)], {"m": 7}, ShapeError,
         r"rank 1 of 3 passes x of shape \(2, 12\), but of float32\[m, 12\] @ Shard\(0\) with m=7 "
         r"it holds \(3, 12\)"),
        ([(3, 12), (12, 15), (8, 10)], {"m": 7}, ShapeError, "passes w1"),
        ([(3, 12), (12, 16, 1), (8, 10)], {"m": 7}, ShapeError, "w1 has shape .*; it must have"),
        ([(3, 12), (12, 16)], {}, UsageError, "takes x, w1, w2; given are x, w1"),
        ([(3, 12), (12, 16), (8, 10), (8, 10)], {}, UsageError, "argument 3"),
        ([(3, 12), (12, 16), (8, 10)], {"n": 7}, UsageError, "mlp has no parameter or size n; its"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit(shapes, sizes, error: type, told: str):
    compiled = mlp_of(12, 24, 10)
    with pytest.raises(error, match=told) as caught:
        compiled(*map(torch.zeros, shapes), world=World(), **sizes)
    frame = caught.value.place.outermost
    assert frame is not None and frame.file == __file__


def test_ranks_that_disagree_on_a_size(ranks):
    compiled = mlp_of(12, 24, 10)

    def main():
        world = weft.init()
        m = 6 + 2 * world.rank  # 3 rows of 6, 4 of 8
        shapes = [(m // 2, 12), (12, 24), (12, 10)]
        compiled(*map(torch.zeros, shapes), world=world)

    with pytest.raises((CallOrderError, AllocationOrderError), match="m=6.*m=8|rank 0.*rank 1"):
        ranks(main, 2)


def test_a_dtype_that_differs():
    compiled = mlp_of(12, 24, 10, "bfloat16")
    tensors = [torch.zeros(3, 12), torch.zeros(12, 16), torch.zeros(8, 10)]
    with pytest.raises(DtypeError, match="x is float32, declared as bfloat16"):
        compiled(*tensors, world=World())


def test_pairs_that_ranks_would_tear():
    """Of 10 columns on 3 ranks each has 4, 4, 2: fine. Of 14 each has 5."""
    tensors = [torch.zeros(1, 4), torch.zeros(4, 5), torch.zeros(3, 6)]
    with pytest.raises(ShapeError, match="of 14 on 3 ranks each has 5"):
        mlp_of(4, 7, 6)(*tensors, world=World())


def test_a_plan_of_other_steps_is_refused():
    plan = read(device, "program(p)\nx = buffer(float32, (4, 4))\nlaunch(k, (x,), writes=(x,))\n")
    with pytest.raises(UnsupportedError, match="Launch is not a call of a library"):
        run_calls(plan, {}, {}, world=World())
