"""Sums that copy engines carry in compiled plans: every schedule of the smallest world, several of
larger ones, and each signal of the kernel dropped or weakened."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from ir_reader import read
from random_programs import global_inputs, of_rank

import weft
import weft.ops
from weft.base.dtypes import tolerance
from weft.base.errors import IllegalError, UnsupportedError
from weft.base.target import TARGETS
from weft.compiler import (
    Compiled,
    Facts,
    Replicate,
    Settings,
    Shard,
    Tensor,
    all_gather,
    libraries,
    program,
    reduce_scatter,
    rms_norm,
    silu,
    silu_mul,
)
from weft.compiler.lower import kernels
from weft.ir import device, device_rules
from weft.ir.device import Copy, Launch
from weft.verify.exploration.search import Bounds as Executions
from weft.verify.exploration.search import Ran, outcome_bytes, search
from weft.verify.laggards import chooser_of
from weft.verify.mutants import Bounds, Run, WrongAnswer
from weft.verify.mutants.core_ir import mutations, search_core_ir

SMALL = (16, 16, 16)
STAGED = {"scattered": "ce_push"}
# Within the kernel that makes the tiles, by tokens; or behind a launch for each chunk.
BY_ENGINES = ("ce_push", "ce_parts")


def of(*sizes, dtype: str = "float32") -> Tensor:
    return Tensor(dtype, sizes[:-1], sizes[-1])


def gemm_rs(k: int, n: int, chunks: int = 1, by: str = "ce_push") -> Compiled:
    @program(mesh="tp", a=of("m", k, Shard(1)), b=of(k, n, Shard(0)))
    def gemm_rs(a, b):
        return reduce_scatter(a @ b)

    return gemm_rs.options(
        settings=Settings({"product": SMALL}, {"scattered": by}, chunks={"scattered": chunks})
    )


def mlp(k: int, hidden: int, **engines: str) -> Compiled:
    @program(
        mesh="tp", x=of("m", k, Shard(0)), w1=of(k, 2 * hidden, Shard(1)),
        w2=of(hidden, k, Shard(0)), residual=of("m", k, Shard(0)), weight=of(1, k, Replicate()),
    )  # fmt: skip
    def mlp(x, w1, w2, residual, weight):
        scattered = reduce_scatter(silu_mul(all_gather(x) @ w1) @ w2)
        return rms_norm(silu(scattered) + residual, weight)

    tiles = {"product": SMALL, "product_2": SMALL}
    return mlp.options(settings=Settings(tiles, STAGED | engines))


def one_call(world, compiled: Compiled, m: int, seed: int, whole=None) -> None:
    """With numbers of its own, against the reference."""
    traced, sizes = compiled.stages.program, {"m": m}
    whole = whole or global_inputs(traced, sizes, seed)
    parts = [
        of_rank(traced.task(name).type, one, sizes, world.rank, world.num_ranks)
        for name, one in whole.items()
    ]
    got = compiled(*parts, world=world, **sizes)
    (want,), kind = libraries.reference(traced, whole), traced.task(traced.results[0]).type
    want = of_rank(kind, want, sizes, world.rank, world.num_ranks)
    assert got.shape == want.shape
    if not (got - want).norm() <= tolerance(kind.dtype, 256) * max(float(want.norm()), 1e-6):
        raise WrongAnswer


def calls(compiled: Compiled, rows) -> None:
    world = weft.init()
    for seed, m in enumerate(rows):
        one_call(world, compiled, m, seed)
    world.close()


def carries(compiled: Compiled, num_ranks: int, m: int = 64) -> bool:
    plan = compiled.overlapped(Facts({"m": m}, num_ranks, TARGETS["emu"])).plan
    return [one.side for one in plan.of(Copy) if one.awaits] == ["owner"]


@pytest.mark.few(1)
@pytest.mark.parametrize("by", BY_ENGINES)
@pytest.mark.parametrize(("num_ranks", "chunks"), [(1, 1), (3, 1), (4, 2)])
def test_products_of_any_number_of_rows(ranks, num_ranks: int, chunks: int, by: str):
    """Ragged parts, parts without rows, one row, none; other sizes between; chunks of columns."""
    compiled = gemm_rs(5 * num_ranks, 32 * chunks if chunks > 1 else 40, chunks, by)
    assert carries(compiled, num_ranks) == (by == "ce_push")
    ranks(lambda: calls(compiled, (70, 1, 70, num_ranks + 1, 0, 33, 70, 70, 70)), num_ranks)


@pytest.mark.few(1)
@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("gathered", ["sm_push", "ce_push"])
def test_layers_whose_sums_are_carried(ranks, num_ranks: int, gathered: str):
    """What follows a sum is the libraries': it reads it behind the kernel. Gathers by engines have
    streams of their own."""
    engines = {"gathered": gathered} if num_ranks > 1 else {}
    compiled = mlp(10, 8 * num_ranks, **engines)
    assert carries(compiled, num_ranks)
    ranks(lambda: calls(compiled, (41, 2, 41, 9)), num_ranks)


@pytest.mark.slow
@pytest.mark.parametrize("by", BY_ENGINES)
def test_two_layers_share_one_stream(ranks, by: str):
    """The second's chunks go behind the first's, and its gather does not stand behind either."""

    @program(
        mesh="tp", x=of("m", 12, Shard(0)), w1=of(12, 12, Shard(1)), w2=of(12, 12, Shard(0)),
        w3=of(12, 12, Shard(1)), w4=of(12, 12, Shard(0)),
    )  # fmt: skip
    def two(x, w1, w2, w3, w4):
        first = reduce_scatter(silu(all_gather(x) @ w1) @ w2)
        return reduce_scatter(silu(all_gather(first) @ w3) @ w4)

    collectives = [one for one in two.stages.program.tasks if one.dim is not None]
    kinds = ["all_gather", "reduce_scatter"] * 2
    assert [one.kind for one in collectives] == kinds
    engines = ("sm_push", by, "ce_push", by)
    names = [one.name for one in collectives]
    compiled = two.options(settings=Settings(engines=dict(zip(names, engines))))
    plan = compiled.overlapped(Facts({"m": 48}, 3, TARGETS["emu"])).plan
    assert [one.stream for one in plan.of(Copy)] == ["send", "copy", "send"]
    ranks(lambda: calls(compiled, (48, 7, 48, 48, 48, 48)), 3)


def test_a_product_that_is_worked_on_before_its_sum_is_refused_as_with_pushes():
    """What a kernel does to tiles that leave is nothing yet, whatever carries them."""

    @program(
        mesh="tp", a=of("m", 8, Shard(1)), b=of(8, 16, Shard(0)), gate=of("m", 16, Replicate())
    )
    def gated(a, b, gate):
        return reduce_scatter((a @ b) * gate)

    facts = Facts({"m": 48}, 2, TARGETS["emu"])
    for engine in ("sm_push", *BY_ENGINES):
        with pytest.raises(UnsupportedError, match="no hooks are known for matmul then mul"):
            gated.options(settings=Settings(engines={"scattered": engine})).overlapped(facts)
    plan = gated.overlapped(facts).plan
    assert not plan.of(Launch) and not plan.of(Copy)


# ---------------------------------------------------------------------------------------------
# The verifier

RANKS = 3


@pytest.fixture
def one_slot(tmp_path, monkeypatch):
    """Only credits keep a call from the one before it."""
    monkeypatch.setenv("WEFT_SLOTS", "1")
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path))


@pytest.mark.few(1)
@pytest.mark.parametrize("by", BY_ENGINES)
def test_nothing_is_found_whoever_is_late(one_slot, by: str):
    compiled = gemm_rs(4 * RANKS, 32, 2, by)
    for seed in range(6):
        with weft.emulated(RANKS, seed=seed, collect=True, chooser=chooser_of(seed)) as session:
            session.run(lambda: calls(compiled, (40, 17, 40)))
        assert session.report.ok, str(session.report)


@pytest.mark.parametrize("by", BY_ENGINES)
def test_in_every_order_nothing_is_found_and_results_are_the_same(one_slot, by: str):
    """Two ranks, a tile for each: one leaves, one stays."""
    compiled = gemm_rs(2, 1, by=by)

    def main():
        world = weft.init()
        a, b = torch.full((2, 1), 1.0 + world.rank), torch.full((1, 1), 2.0)
        given = {"world": world, "m": 2}
        result = compiled(a, b, **given)
        assert result.tolist() == [[6.0]]
        return result

    def subject(execution) -> Ran:
        with weft.emulated(2, chooser=execution, collect=True) as session:
            results = session.run(main)
        return Ran(session.report, outcome_bytes(results))

    found = search(subject, Executions(executions=4000, seconds=math.inf), deterministic=True)
    assert found.report.ok, str(found.report)
    assert not found.bound, f"a bound was reached after {found.executions} executions"


def runs_with(compiled: Compiled):
    """The program with its kernel generated from what is given."""
    lower = kernels.lower

    def runs_of(kernel):
        def run(seed, rewrite):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(kernels, "lower", lambda plan: {**lower(plan), kernel.name: kernel})
                with weft.emulated(
                    RANKS, seed=seed, collect=True, rewrite=rewrite, chooser=chooser_of(seed)
                ) as session:
                    session.run(lambda: calls(compiled, (70, 70, 70)))
            return session.report

        return [Run("carried", run)]

    return runs_of


@pytest.mark.slow
@pytest.mark.parametrize(("by", "count"), [("ce_push", 15), ("ce_parts", 7)])
def test_every_mutant_of_the_kernel_is_caught(one_slot, by: str, count: int):
    compiled = gemm_rs(6, 32, 2, by)
    plan = compiled.overlapped(Facts({"m": 70}, RANKS, TARGETS["emu"])).plan
    *_, kernel = kernels.lower(plan).values()
    bounds = Bounds(schedules=8, census=2, jobs=1)
    report = search_core_ir(kernel, runs_with(compiled), bounds, subject="carried", ranks=RANKS)
    assert report.ok and report.caught == len(list(mutations(kernel))) == count, str(report)


def test_pieces_are_copied_behind_their_launches_and_looked_for_ahead_of_them():
    """Nothing waits on a stream but for what was launched before: a recording can hold it."""
    plan = gemm_rs(8, 32, 2, "ce_parts").overlapped(Facts({"m": 40}, 4, TARGETS["emu"])).plan
    assert read(device, device.show(plan)) == plan
    steps = [
        f"{one.kernel} {one.piece}" if isinstance(one, Launch)
        else f"{type(one).__name__} {getattr(one, 'piece', '') or one.stream}" for one in plan.steps
    ]  # fmt: skip
    assert steps == [
        "After send", "Take send", "gemm_rs_multiply_pieces (0, 2)", "After main", "After send",
        "Copy (0, 2)", "gemm_rs_multiply_pieces (1, 2)", "After send", "Copy (1, 2)",
        "gemm_rs_multiply ()", "After main",
    ]  # fmt: skip


def test_a_piece_that_nobody_copies_is_refused():
    """Its owner would wait for ever."""
    plan = gemm_rs(8, 32, 2, "ce_parts").overlapped(Facts({"m": 40}, 4, TARGETS["emu"])).plan
    copies, launches = plan.of(Copy), [one for one in plan.of(Launch) if one.piece]
    for gone, verb in ((copies[1], "copied"), (launches[0], "made")):
        kept = tuple(one for one in plan.statements if one is not gone)
        with pytest.raises(IllegalError, match=f"staged is {verb} in pieces"):
            device_rules.require(replace(plan, statements=kept))


def test_a_call_by_pieces_is_recorded_and_replayed(ranks):
    """All of it, copies among it, as one; other numbers each time."""

    def main():
        world, compiled = weft.init(), gemm_rs(8, 32, 2, "ce_parts")
        a, b = torch.zeros(40, 4), torch.zeros(4, 32)
        compiled(a, b, world=world, m=40)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = compiled(a, b, world=world, m=40)
        for number in (1.0, 2.0, 3.0):
            a.fill_(number + world.rank), b.fill_(2.0)
            graph.replay()
            assert result.unique().tolist() == [8.0 * (2 * number + 1)]
            other = compiled(a, b, world=world, m=40)  # between replays
            assert torch.equal(other, result)
        world.close()

    ranks(main, 2)


def test_a_plan_is_shown_and_read_back():
    plan = gemm_rs(8, 32, 2).overlapped(Facts({"m": 40}, 4, TARGETS["emu"])).plan
    assert read(device, device.show(plan)) == plan
    (staged,) = [one for one in plan.of(device.Buffer) if one.name == "staged"]
    assert staged.sizes == ("num_ranks", device.Tiles("m", 16), 32) and staged.role == "local"
