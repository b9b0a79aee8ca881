"""Products whose tiles go to the ranks that own their columns, in one kernel with the product; and
products of rows whose columns arrive from all ranks while they run."""

from __future__ import annotations

import re
from itertools import product

import pytest
import torch
from effort import slow_but
from test_staged_sums import calls, of, one_call, one_slot, runs_with

import weft
from weft.base.hardware import hardware_of
from weft.base.target import TARGETS
from weft.compiler import Compiled, Facts, Replicate, Settings, Shard, all_to_all, program, silu
from weft.compiler.cost.plans import predict
from weft.compiler.lower import kernels, source
from weft.compiler.lower.signature import Specialised, record
from weft.emulator.observation import Recorder
from weft.ir.device import Launch
from weft.language import triton_api
from weft.verify import compiled as compiled_check
from weft.verify.laggards import chooser_of
from weft.verify.mutants import Bounds
from weft.verify.mutants.core_ir import mutations, search_core_ir

__all__ = ["one_slot"]
SMALL, HOPPER = (16, 16, 16), (128, 128, 64)
EMU = TARGETS["emu"]


def to_heads(k: int, n: int, dtype: str = "float32", tile=SMALL) -> Compiled:
    """Own tokens -> all tokens' own heads."""

    @program(mesh="tp", x=of("m", k, Shard(0), dtype=dtype), w=of(k, n, Replicate(), dtype=dtype))
    def gemm_a2a(x, w):
        return all_to_all(x @ w, dim=1)

    return gemm_a2a.options(settings=Settings({"product": tile} if tile else {}))


def from_heads(
    each: int, n: int, num_ranks: int, engine: str = "sm_push", chunks: int = 0,
    dtype: str = "float32", tile=SMALL,
) -> Compiled:  # fmt: skip
    """All tokens' own heads -> own tokens, times a weight of all heads."""
    k = each * num_ranks

    @program(mesh="tp", y=of("m", k, Shard(1), dtype=dtype), w=of(k, n, Replicate(), dtype=dtype))
    def a2a_gemm(y, w):
        return all_to_all(y, dim=0) @ w

    return a2a_gemm.options(settings=Settings(
        {"product": tile} if tile else {}, {"exchanged": engine},
        chunks={"exchanged": chunks} if chunks else {},
    ))  # fmt: skip


def launched(compiled: Compiled, num_ranks: int, m: int = 64, target=EMU, nodes=()):
    """The kernels that its plan launches."""
    return compiled.overlapped(Facts({"m": m}, num_ranks, target, nodes)).plan.of(Launch)


# Heads of 5, 8, 20 and 24 columns a rank: no whole tiles; rows that no rank, or one alone, has.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "each"), slow_but([(3, 20)], [(1, 24), (2, 16), (4, 5), (4, 33)])
)
def test_any_number_of_rows_and_columns(ranks, num_ranks: int, each: int):
    compiled = to_heads(24, each * num_ranks)
    assert launched(compiled, num_ranks)[0].order == "exchange"
    rows = (70, 1, 70, num_ranks + 1, 0, 33, 70, 70, 70)
    ranks(lambda: calls(compiled, rows), num_ranks)


# Slices of k that are whole steps of the product, by TMA, and of some more columns.
WAYS = slow_but(
    [(3, 20, "ce_push", 2), (2, 32, "sm_push", 3)],
    [(1, 24, "sm_push", 1), (2, 16, "ce_push", 1), (4, 5, "ce_push", 3), (4, 48, "sm_push", 1),
     (3, 33, "sm_push", 2)],
)  # fmt: skip


@pytest.mark.few(1)
@pytest.mark.parametrize(("num_ranks", "each", "engine", "chunks"), WAYS)
def test_any_number_of_rows_from_all_ranks(ranks, num_ranks, each, engine, chunks):
    compiled = from_heads(each, 40, num_ranks, engine, chunks)
    assert launched(compiled, num_ranks)[-1].order == "grouped"
    rows = (70, 1, 70, num_ranks + 1, 0, 33, 70, 70, 70)
    ranks(lambda: calls(compiled, rows), num_ranks)


@pytest.mark.parametrize("b_is_nk", [False, True])
def test_weights_as_they_lie_and_half_precision(ranks, b_is_nk: bool):
    x, w = torch.randn(37, 40).bfloat16(), torch.randn(40, 72).bfloat16()
    w = w.t().contiguous().t() if b_is_nk else w
    compiled = to_heads(40, 72, "bfloat16")

    def main():
        world, wanted = weft.init(), x.float() @ w.float()
        for _ in range(3):
            own = x.chunk(3)[world.rank].contiguous()
            got = compiled(own, w, world=world, m=37).float()
            part = wanted.chunk(3, 1)[world.rank]
            assert (got - part).norm() <= 0.01 * part.norm()

    ranks(main, 3)


@pytest.mark.parametrize("dim", [0, 1])
def test_recorded_and_replayed_as_it_was_called(ranks, dim: int):
    compiled = to_heads(48, 40) if dim == 0 else from_heads(24, 40, 2, "ce_push", 2)
    x, w = torch.randn(21, 48), torch.randn(48, 40)

    def main():
        world = weft.init()
        own = x.chunk(2, dim)[world.rank].clone()
        eager = compiled(own, w, world=world, m=21)
        with world.record() as recording:
            recorded = compiled(own, w, world=world, m=21)
        for _ in range(3):
            recording.replay()
        assert torch.equal(eager, recorded)
        own.mul_(2)
        recording.replay()
        torch.testing.assert_close(recorded, 2 * eager)
        one_call(world, compiled, 5, seed=1)
        recording.replay()
        torch.testing.assert_close(recorded, 2 * eager)

    ranks(main, 2)


def on_hopper(main, num_ranks: int, seed: int = 0) -> set[str]:
    """What ran: kernels for Hopper in the emulator, a few programs of each."""
    recorder = Recorder()
    with weft.emulated(num_ranks, arch=90, num_sms=2, seed=seed, observers=[recorder]) as ranks:
        ranks.run(main)
    assert ranks.report.ok, str(ranks.report)
    return {event.party.what for event in recorder.events}


def in_gluon(compiled: Compiled, num_ranks: int, m: int, x, w, dims: tuple[int, int]) -> None:
    """Three calls, the last is a replay; x is split along the first of dims, the result along the
    other one."""
    wanted = part_of((x.float() @ w.float()), dims[1], num_ranks)

    def main():
        world = weft.init()
        own = part_of(x, dims[0], num_ranks)[world.rank].contiguous()
        for _ in range(3):
            got = compiled(own, w, world=world, m=m).float()
            error = (got - wanted[world.rank]).norm()
            assert error <= 0.01 * wanted[world.rank].norm()

    ran = {party for party in on_hopper(main, num_ranks, m) if "multiply" in party}
    assert ran and all(party.endswith("_sm90") for party in ran), ran


def part_of(whole: torch.Tensor, dim: int, num_ranks: int) -> list[torch.Tensor]:
    """Each rank's, as torch.chunk splits it, the last ones empty."""
    found = list(whole.chunk(num_ranks, dim))
    return found + [whole.narrow(dim, 0, 0)] * (num_ranks - len(found))


# Columns of a rank: less than a tile, one, some; rows of a rank: none, some of a tile, two tiles.
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("num_ranks", "m", "each"),
    slow_but([(2, 300, 200)], [(3, 4, 136), (3, 401, 24), (2, 512, 256)]),
)
@pytest.mark.parametrize("b_is_nk", [False, True])
def test_in_gluon(num_ranks: int, m: int, each: int, b_is_nk: bool):
    x, w = torch.randn(m, 72).bfloat16(), torch.randn(72, each * num_ranks).bfloat16()
    w = w.t().contiguous().t() if b_is_nk else w
    compiled = to_heads(72, each * num_ranks, "bfloat16", tile=HOPPER if m < 128 else ())
    in_gluon(compiled, num_ranks, m, x, w, (0, 1))


# Several tiles of a program: parts of k that programs share begin within a slice.
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("num_ranks", "m", "each", "engine"),
    slow_but([(2, 300, 128, "ce_push")],
             [(3, 4, 64, "sm_push"), (3, 401, 192, "ce_push"), (2, 700, 64, "sm_push")]),
)  # fmt: skip
@pytest.mark.parametrize("b_is_nk", [False, True])
def test_slices_in_gluon(num_ranks: int, m: int, each: int, engine: str, b_is_nk: bool):
    x, w = torch.randn(m, each * num_ranks).bfloat16(), torch.randn(each * num_ranks, 200)
    w = w.bfloat16().t().contiguous().t() if b_is_nk else w.bfloat16()
    tile = HOPPER if m < 128 else ()
    compiled = from_heads(each, 200, num_ranks, engine, dtype="bfloat16", tile=tile)
    in_gluon(compiled, num_ranks, m, x, w, (1, 0))


def test_what_is_done_to_a_product_of_arriving_rows(ranks):
    """Two products of one exchange, one of which is worked on in registers."""

    @program(
        mesh="tp", y=of("m", 40, Shard(1)), w=of(40, 24, Replicate()), v=of(40, 12, Replicate()),
        bias=of(1, 24, Replicate()), residual=of("m", 24, Shard(0)),
    )  # fmt: skip
    def both(y, w, v, bias, residual):
        rows = all_to_all(y, dim=0)
        return silu(rows @ w + bias) + residual, rows @ v

    kernels_of = [one.kernel for one in launched(both, 2)]
    assert kernels_of == ["both_exchange", "both_multiply", "both_multiply_2"]
    x = [torch.randn(size) for size in ((21, 40), (40, 24), (40, 12), (1, 24), (21, 24))]
    wide, narrow = torch.nn.functional.silu(x[0] @ x[1] + x[3]) + x[4], x[0] @ x[2]

    def main():
        world = weft.init()
        y, residual = x[0].chunk(2, 1)[world.rank], x[4].chunk(2)[world.rank]
        for _ in range(3):
            got = both(y.contiguous(), *x[1:4], residual.contiguous(), world=world)
            for one, wanted in zip(got, (wide, narrow), strict=True):
                torch.testing.assert_close(one, wanted.chunk(2)[world.rank])

    ranks(main, 2)


TARGETS_COMPILED = ("cuda:90", "cuda:100", "hip:gfx942")


COMPILED = {
    "to heads": to_heads(4096, 6144, "bfloat16", tile=()),
    "from heads": from_heads(1024, 4096, 4, "ce_push", dtype="bfloat16", tile=()),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "target", "b_is_nk"),
    slow_but([("to heads", "cuda:90", False), ("from heads", "cuda:90", True),
              ("to heads", "hip:gfx942", True), ("from heads", "cuda:100", False)],
             product(COMPILED, TARGETS_COMPILED, (False, True))),
)  # fmt: skip
def test_compiles_everywhere_and_keeps_its_waits(name: str, target: str, b_is_nk: bool):
    compiled = COMPILED[name]
    asked = {"exchanged": compiled.settings.engines.get("exchanged", "sm_push")}
    compiled = compiled.options(settings=Settings(engines=asked))
    plan = compiled.overlapped(Facts({"m": 32768}, 4, TARGETS[target])).plan
    (kernel,) = kernels.lower(plan).values()
    is_hopper = target == "cuda:90"
    variant, warps = ("sm90", 4) if is_hopper else ("plain", 8)
    tile = plan.of(Launch)[-1].tile
    given = Specialised("bfloat16", tile, 4, b_is_nk, TARGETS[target].has_tma, warps)
    made = record(kernel, variant, given)
    binary = triton_api.compile_kernel(getattr(source.load(kernel), variant), made, TARGETS[target])
    report = compiled_check(binary, TARGETS[target])
    assert report.ok, str(report)


def test_what_is_left_to_libraries():
    """Columns that ranks do not own alike, other nodes' ranks, what is done to the product."""
    assert not launched(to_heads(24, 41), 2)
    assert not launched(to_heads(24, 40), 4, target=TARGETS["cuda:90"], nodes=(2, 2))

    @program(mesh="tp", x=of("m", 8, Shard(0)), w=of(8, 16, Replicate()))
    def worked_on(x, w):
        return all_to_all(silu(x @ w), dim=1)

    assert not launched(worked_on, 2)


def test_fused_where_it_is_predicted_to_end_first():
    """A layer's product hides what is sent; of few rows the libraries are ahead."""
    wide = to_heads(4096, 6144, "bfloat16", tile=())
    engines = []
    for m in (64, 32768):
        stages = wide.overlapped(Facts({"m": m}, 4, TARGETS["cuda:90"]))
        (chosen,) = [one for one in stages.program.choices if one.what == "engine"]
        engines.append(chosen.taken)
        assert "sm_push" in chosen.why and "library" in chosen.why
    assert engines == ["library", "sm_push"]


@pytest.mark.parametrize("m", [8191, 8192, 32768])
@pytest.mark.parametrize("compiled", [
    to_heads(4096, 6144, "bfloat16", tile=()),
    from_heads(1024, 4096, 4, "ce_push", 2, dtype="bfloat16", tile=()),
    from_heads(1024, 4096, 4, "sm_push", dtype="bfloat16", tile=()),
], ids=["to heads", "by engines", "by SMs"])  # fmt: skip
def test_a_plan_is_drawn_as_it_was_predicted(compiled: Compiled, m: int):
    """By rank and time: what the choice was made by, within a fifth of it."""
    stages = compiled.overlapped(Facts({"m": m}, 4, TARGETS["cuda:90"]))
    (why,) = [one.why for one in stages.program.choices if one.what == "engine"]
    engine = next(one.engine for one in stages.program.tasks if one.engine)
    (said,) = re.findall(rf"{engine} ([0-9]+) us", why)
    machine = hardware_of(TARGETS["cuda:90"])
    assert machine is not None
    drawn = predict(stages.plan, {"m": m}, 4, machine)
    assert drawn.end_us == pytest.approx(float(said), rel=0.2)


# ---------------------------------------------------------------------------------------------
# The verifier

RANKS = 3


def test_nothing_is_found_whoever_is_late(one_slot):
    compiled = to_heads(12, 20 * RANKS)
    for seed in range(4):
        with weft.emulated(RANKS, seed=seed, collect=True, chooser=chooser_of(seed)) as session:
            session.run(lambda: calls(compiled, (40, 17, 40)))
        assert session.report.ok, str(session.report)


@pytest.mark.slow
@pytest.mark.parametrize(("compiled", "caught"), [
    (to_heads(6, 20 * RANKS), 13),
    (from_heads(20, 24, RANKS, "ce_push", 2), 11),
    (from_heads(20, 24, RANKS, "sm_push", 2), 7),
], ids=["to heads", "from heads by engines", "from heads by SMs"])  # fmt: skip
def test_every_mutant_of_the_kernel_is_caught(one_slot, compiled, caught):
    plan = compiled.overlapped(Facts({"m": 70}, RANKS, EMU)).plan
    (kernel,) = kernels.lower(plan).values()
    bounds = Bounds(schedules=8, census=2, jobs=1)
    report = search_core_ir(kernel, runs_with(compiled), bounds, subject="exchanged", ranks=RANKS)
    assert report.ok and report.caught == len(list(mutations(kernel))) == caught, str(report)
