"""The GEMM template for Hopper: its tile scheduler, what is compiled, what it computes."""

from __future__ import annotations

import re
from contextlib import suppress
from functools import cache, partial

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import weft
import weft.language as wl
from weft.base.dtypes import tolerance
from weft.base.errors import ConfigError
from weft.base.records import KernelRecord
from weft.base.target import TARGETS
from weft.emulator.codegen import compile_ttir
from weft.emulator.rewriting import Rewrite
from weft.language import triton_api
from weft.language.world_arg import WorldArg, language_version
from weft.tiles import (
    descriptors_sm90,
    fragments,
    gemm,
    gemm_sm90,
    multiply_sm90,
    swizzle,
    tile_scheduler,
)
from weft.tiles.blocking import Blocking
from weft.verify import compiled

BLOCKINGS = [gemm_sm90.WIDE, gemm_sm90.TURNS, gemm_sm90.WIDER, gemm_sm90.MIDDLE]
NAMES = ["wide", "turns", "wider", "middle"]
NARROW = Blocking(128, 64, 64, gemm_sm90.NUM_WARPS, 5)
# Others with a rest of columns.
WITH_REST = [Blocking(128, 192, 64, gemm_sm90.NUM_WARPS, 4),
             Blocking(128, 384, 64, gemm_sm90.NUM_WARPS, 3)]  # fmt: skip


@gluon.jit
def plain_gemm(a, b, c, partials, summed, e, shape, early, first_wave, tile_m: gl.constexpr,
               tile_n: gl.constexpr, tile_k: gl.constexpr, stages: gl.constexpr,
               b_is_nk: gl.constexpr):  # fmt: skip
    order: gl.constexpr = swizzle.grouped
    ready: gl.constexpr = gemm.ready_always
    emit: gl.constexpr = gemm.emit_store
    gemm_sm90.gemm(
        a, b, c, shape, gl.cdiv(shape.m, tile_m), gl.program_id(0), gl.num_programs(0),
        gemm_sm90.Shared(partials, summed, e, None),
        tile_m, tile_n, tile_k, stages, gemm_sm90.chunk_columns(tile_n), b_is_nk,
        order, (8,), ready, gemm.Always(a, shape.m), emit, gemm.Stored(c, shape), early=early,
        first_wave=first_wave,
    )  # fmt: skip


@triton.jit
def add_tile(at, cells, value, args):
    """What another rank would have summed. args: (fp32 [m, n], m, n); extents divide"""
    i, j = fragments.index(value, 0), fragments.index(value, 1)
    first = args[0] + cells.row * args[2] + cells.column
    return value + tl.load(first + i[:, None] * args[2] + j[None, :])


@triton.jit
def tell(at, part, args):
    wl.notify(args[1], args[0] + 2 * at.i_n + part, to=0, scope=wl.Scope.DEVICE)


@gluon.jit
def gemm_with_all_hooks(a, b, c, d, told, partials, summed, e, shape, world, tile_m: gl.constexpr,
                        tile_n: gl.constexpr, tile_k: gl.constexpr, stages: gl.constexpr,
                        b_is_nk: gl.constexpr):  # fmt: skip
    order: gl.constexpr = swizzle.grouped
    ready: gl.constexpr = gemm.ready_always
    emit: gl.constexpr = gemm.emit_store
    combine: gl.constexpr = add_tile
    announce: gl.constexpr = tell
    gemm_sm90.gemm(
        a, b, c, shape, gl.cdiv(shape.m, tile_m), gl.program_id(0), gl.num_programs(0),
        gemm_sm90.Shared(partials, summed, e, None),
        tile_m, tile_n, tile_k, stages, gemm_sm90.chunk_columns(tile_n), b_is_nk,
        order, (8,), ready, gemm.Always(a, shape.m), emit, gemm.Stored(c, shape),
        combine, (d, shape.m, shape.n), announce, (told, world),
    )  # fmt: skip


sizes = st.integers(1, 3000)


@given(m=sizes, n=sizes, k=sizes, num_programs=st.integers(1, 140), head=st.integers(0, 3))
def test_every_tile_is_dealt_out_once(m, n, k, num_programs, head):
    for blocking in BLOCKINGS:
        num_n, num_k = -(-n // blocking.tile_n), -(-k // blocking.tile_k)
        tiles = -(-m // blocking.tile_m) * num_n
        early = min(head * num_n, tiles)
        first_wave = tile_scheduler.first_wave_of(early, num_k, num_programs)
        waves = tile_scheduler.waves_of(m, n, k, blocking, num_programs, early, first_wave)
        assert waves.early + waves.whole + waves.shared == tiles
        # Shared tiles come last, one for each program at most: their parts run side by side.
        assert waves.shared * waves.parts <= num_programs
        assert waves.shared == 0 or waves.whole % num_programs == 0
        assert 1 <= waves.parts <= max(1, waves.num_k)

        done: dict[int, list] = {}
        for program in range(num_programs):
            units = tile_scheduler.units(program, waves, num_programs)
            # Consumers in turns reckon with it: only the first and the last may be shorter.
            assert all(unit.end - unit.begin == waves.num_k for unit in units[1:-1])
            for unit in units:
                done.setdefault(unit.tile, []).append(unit)
        assert sorted(done) == list(range(tiles))
        # Part 0's too: of halved tiles it leaves sums like the others.
        places = [unit.place for units in done.values() for unit in units if unit.parts > 1]
        assert len(places) == len(set(places))
        room = tile_scheduler.partial_flags(num_programs, first_wave) // 2
        assert all(0 <= place < room for place in places)
        for units in done.values():
            first, *others = sorted(units, key=lambda unit: unit.part)
            ends = [unit.end for unit in (first, *others)]
            assert [unit.begin for unit in (first, *others)] == [0, *ends[:-1]]
            assert ends[-1] == waves.num_k and {len(units)} == {unit.parts for unit in units}
            for part, unit in enumerate(others, 1):
                assert unit.place == first.place + part * first.apart


@pytest.mark.parametrize(("field", "text"), [
    ({"tile_n": 96}, "tile_n=64, 128, 160, 192, 256, 320 or 384, tile_k=32 or 64 of 2-byte"),
    ({"itemsize": 1}, "tile_n=64 or 128, tile_k=128 of 1-byte"),
    ({"tile_n": 320}, "num_stages=4 of 57344 bytes .* take 2 to 3"),
    ({"tile_n": 160, "stages": 6}, "36864 bytes beside 16384 bytes of results; .* take 2 to 5"),
    ({"tile_m": 64}, "takes tile_m=128"),
    ({"stages": 5}, "take 2 to 4"),
])  # fmt: skip
def test_a_tile_that_does_not_fit(field, text):
    wide = {"tile_m": 128, "tile_n": 256, "tile_k": 64, "stages": 4}
    gemm_sm90.check("gemm", **wide, target=TARGETS["cuda:90"])
    with pytest.raises(ConfigError, match=text):
        gemm_sm90.check("gemm", **{**wide, **field}, target=TARGETS["cuda:90"])


@pytest.mark.parametrize(("tile_n", "stages", "block", "chunk"), [
    (64, 6, 64, 64), (128, 5, 128, 64), (160, 5, 32, 32), (192, 4, 64, 64), (256, 4, 256, 64),
    (320, 3, 64, 64), (384, 3, 128, 64),
])  # fmt: skip
def test_stages_and_blocks_of_each_width(tile_n, stages, block, chunk):
    assert gemm_sm90.most_stages(128, tile_n, 64, TARGETS["cuda:90"]) == stages
    assert gemm_sm90.block_columns(tile_n) == block
    assert gemm_sm90.chunk_columns(tile_n) == chunk
    wide = multiply_sm90.wide_columns(tile_n)
    assert wide % block == (tile_n - wide) % block == 0


def block_of_b(blocking, b_is_nk: bool) -> tuple[int, int]:
    columns = gemm_sm90.block_columns(blocking.tile_n)
    return (columns, blocking.tile_k) if b_is_nk else (blocking.tile_k, columns)


def record_of(blocking, dtype: str, b_is_nk: bool, **more: str) -> KernelRecord:
    tile_m, tile_n, tile_k = blocking.tile_m, blocking.tile_n, blocking.tile_k
    chunk = gemm_sm90.chunk_of(tile_m, tile_n)

    def operand(block) -> str:
        layout = descriptors_sm90.block_layout(block, 2)
        return f"tensordesc<{dtype}[{block[0]}, {block[1]}],{layout!r}>"

    return KernelRecord(
        name="plain_gemm",
        signature={
            "a": operand((tile_m, tile_k)),
            "b": operand(block_of_b(blocking, b_is_nk)),
            "c": operand(chunk),
            "partials": "*fp32",
            "summed": "*i64",
            "e": "i64",
            "shape": ["i32"] * len(gemm.Shape._fields),
            **more,
        },
        constants={
            "shape": gemm.Shape(*[None] * len(gemm.Shape._fields)),
            "early": 0,
            "first_wave": 1,
            "tile_m": tile_m,
            "tile_n": tile_n,
            "tile_k": tile_k,
            "stages": blocking.num_stages,
            "b_is_nk": b_is_nk,
        },
        options={"num_warps": blocking.num_warps},
        divisible_by_16=("partials", "summed"),
    )


@cache
def plain_binary(blocking, b_is_nk: bool):
    """Compiled once for the tests that read it."""
    record = record_of(blocking, "bf16", b_is_nk)
    return triton_api.compile_kernel(plain_gemm, record, TARGETS["cuda:90"])


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize(("blocking", "b_is_nk"), [
    (gemm_sm90.WIDE, True), (gemm_sm90.WIDE, False), (gemm_sm90.TURNS, False),
    slow(gemm_sm90.MIDDLE, True), slow(gemm_sm90.WIDER, True), slow(gemm_sm90.TURNS, True),
    slow(gemm_sm90.WIDER, False), slow(gemm_sm90.MIDDLE, False),
    *(slow(one, b_is_nk) for one in WITH_REST for b_is_nk in (False, True)),
])  # fmt: skip
def test_products_run_on_tensor_cores_and_sums_stay_in_registers(blocking, b_is_nk):
    target = TARGETS["cuda:90"]
    binary = plain_binary(blocking, b_is_nk)
    ptx = binary.asm["ptx"]
    wide = multiply_sm90.wide_columns(blocking.tile_n)
    found = set(re.findall(r"wgmma.mma_async.sync.aligned.m64n(\d+)k16.f32.bf16.bf16", ptx))
    assert found == {str(columns) for columns in (wide, blocking.tile_n - wide) if columns}
    assert "ld.local" not in ptx and "st.local" not in ptx
    assert binary.metadata.shared <= target.shared_bytes
    report = compiled(binary, target)
    assert report.ok, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("blocking", [
    gemm_sm90.WIDE, gemm_sm90.TURNS, slow(gemm_sm90.WIDER), slow(gemm_sm90.MIDDLE),
], ids=NAMES)  # fmt: skip
def test_a_tile_is_announced_when_its_stores_are_complete(blocking):
    record = record_of(blocking, "bf16", False, d="*fp32", told="*i64",
                       world=["*i64", "constexpr", "constexpr"])  # fmt: skip
    record.constants["world"] = WorldArg(None, 1, language_version())
    binary = triton_api.compile_kernel(gemm_with_all_hooks, record, TARGETS["cuda:90"])
    ptx = binary.asm["ptx"]
    *_, told = re.finditer(r"\b(atom|red)\.\S*release", ptx)
    stored = ptx.rindex("cp.async.bulk.tensor.2d.global", 0, told.start())
    # Not wait_group.read, after which a chunk may be reused but C may not be told of.
    assert "cp.async.bulk.wait_group 0" in ptx[stored : told.start()]
    assert "ld.local" not in ptx and "st.local" not in ptx
    left_out = plain_binary(blocking, b_is_nk=False)
    # Each consumer's, where it leaves its sums of a shared tile; and where it announces a tile.
    assert left_out.asm["ptx"].count("cp.async.bulk.wait_group 0") == 2
    assert ptx.count("cp.async.bulk.wait_group 0") == 4


@pytest.mark.slow
@pytest.mark.parametrize(("blocking", "waits"), [
    (gemm_sm90.WIDE, 4), slow(gemm_sm90.TURNS, 2), slow(gemm_sm90.WIDER, 4),
    slow(gemm_sm90.MIDDLE, 4), slow(NARROW, 4),
], ids=[*NAMES, "narrow"])  # fmt: skip
def test_a_chunk_is_not_overwritten_that_is_still_stored_from(blocking, waits):
    """Of an odd number of chunks a tile's last lies where the next one's first will; of halves of a
    tile, in whichever the tile before had."""
    record = record_of(blocking, "bf16", False)
    ptx = triton_api.compile_kernel(plain_gemm, record, TARGETS["cuda:90"]).asm["ptx"]
    # Each consumer's at its end, and before a tile.
    assert len(re.findall(r"cp\.async\.bulk\.wait_group\.read\s+0\b", ptx)) == waits


@pytest.mark.gpu(n=1)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("b_is_nk", [False, True])
@pytest.mark.parametrize("blocking", BLOCKINGS, ids=NAMES)
@pytest.mark.parametrize(
    ("shape", "head"),
    [((2048, 2560, 1024), 0), ((200, 136, 72), 0), ((128, 128, 2048), 0), ((600, 2504, 1024), 1),
     ((384, 512, 4096), 2)],
    ids=str,
)  # fmt: skip
def test_multiplies_as_the_generic_variant(shape, head, blocking, b_is_nk, dtype):
    """`head`: the first rows of tiles are a round of their own, and shared."""
    assert_multiplies(shape, blocking, b_is_nk, dtype, 132, head, "cuda")


def assert_multiplies(shape, blocking, b_is_nk, dtype, programs, head=0, device="cpu", calls=2):
    m, n, k = shape
    torch.manual_seed(0)
    a = torch.randn(m, k, device=device).to(dtype)
    right = torch.randn(n, k, device=device).to(dtype)
    if not b_is_nk:
        right = right.t().contiguous()
    c = torch.empty(m, n, device=device, dtype=dtype)
    tile_m, tile_n, tile_k = blocking.tile_m, blocking.tile_n, blocking.tile_k
    early = head * -(-n // tile_n)
    first_wave = tile_scheduler.first_wave_of(early, -(-k // tile_k), programs)
    assert (first_wave > 1) == (head > 0)
    shares = (programs, first_wave)
    partials = torch.empty(tile_scheduler.partial_elements(tile_m, tile_n, *shares), device=device)
    summed = torch.zeros(tile_scheduler.partial_flags(*shares), device=device, dtype=torch.int64)
    chunk = gemm_sm90.chunk_of(tile_m, tile_n)
    results = []
    for e in range(1, calls + 1):
        c.fill_(float("nan"))
        plain_gemm[(programs,)](
            descriptors_sm90.descriptor(a, (tile_m, tile_k)),
            descriptors_sm90.descriptor(right, block_of_b(blocking, b_is_nk)),
            descriptors_sm90.descriptor(c, chunk), partials, summed, e,
            gemm.Shape(m, n, k, k, right.stride(0), n), early, first_wave, tile_m, tile_n, tile_k,
            blocking.num_stages, b_is_nk, num_warps=blocking.num_warps,
        )  # fmt: skip
        results.append(c.clone())
    assert torch.equal(results[0], results[-1])
    expected = a.float() @ (right.t() if b_is_nk else right).float()
    error = (results[0].float() - expected).norm() / expected.norm()
    assert error <= tolerance(str(dtype).removeprefix("torch."), k)


@pytest.mark.few(1)
@pytest.mark.parametrize(("blocking", "shape", "b_is_nk", "programs", "head"), [
    (gemm_sm90.TURNS, (640, 136, 1032), False, 3, 0),
    (gemm_sm90.TURNS, (256, 136, 1032), True, 4, 1),
    (gemm_sm90.WIDE, (200, 136, 1032), True, 2, 0),
    (gemm_sm90.MIDDLE, (256, 328, 200), True, 3, 0),
], ids=["turns", "early tiles", "wide", "middle"])  # fmt: skip
def test_runs_in_the_emulator_without_a_finding(blocking, shape, b_is_nk, programs, head):
    with weft.emulated(ranks=1, seed=1) as ranks:
        ranks.run(assert_multiplies, shape, blocking, b_is_nk, torch.bfloat16, programs, head)


class Without(Rewrite):
    """The `number`-th of the lines that hold `mark` is left out, or is weaker."""

    def __init__(self, mark: str, number: int | None) -> None:
        self.mark, self.number, self.count = mark, number, 0

    def kernel(self, text: str):
        lines = text.splitlines()
        marked = [i for i, line in enumerate(lines) if self.mark in line]
        self.count = len(marked)
        if self.number is not None:
            i = marked[self.number]
            if "dot_wait" in self.mark:
                pending = re.search(r"pendings = (\d)", lines[i])
                lines[i] = lines[i].replace(pending[0], f"pendings = {int(pending[1]) + 1}")
            elif "weft." in lines[i]:
                lines[i] = re.sub(r'"weft\.\w+:[^"]*"', '"weft.complete_stores"', lines[i])
            else:
                del lines[i]
        return compile_ttir("\n".join(lines))


# By what is left out, which of them this product can do without, in the order of the TTGIR.
SPARED = {
    "ttng.wait_barrier": [],
    "ttng.arrive_barrier": [],
    "ttng.barrier_expect": [],
    "ttng.fence_async_shared": [],
    "ttng.warp_group_dot_wait": [],
    "ttng.async_tma_store_wait": [],
    "weft.wait": [0],  # the first consumer has no part of the shared tile
    "weft.store": [0],
}


@pytest.mark.slow
@pytest.mark.parametrize("mark", [one if "fence" in one else slow(one) for one in SPARED])
def test_what_orders_its_partitions_is_missed_where_it_is_left_out(mark):
    def found(number):
        rewrite = Without(mark, number)
        kinds = set()
        for seed in (0, 1):
            with weft.emulated(ranks=1, seed=seed, collect=True, rewrite=rewrite) as ranks:
                args = ((640, 136, 1032), gemm_sm90.TURNS, False, torch.bfloat16, 3)
                with suppress(AssertionError):  # a wrong result is for the findings to explain
                    ranks.run(partial(assert_multiplies, *args, calls=1))
            kinds |= {finding.kind for finding in ranks.report.findings}
        return rewrite.count, kinds

    count, kinds = found(None)
    assert count > 0 and not kinds
    assert [number for number in range(count) if not found(number)[1]] == SPARED[mark]


@pytest.mark.gpu(n=1)
@pytest.mark.parametrize("blocking", BLOCKINGS, ids=NAMES)
def test_hooks_combine_and_announce(blocking):
    m, n, k, programs = 1024, 2560, 1024, 132
    torch.manual_seed(0)
    a = torch.randn(m, k, device="cuda").bfloat16()
    b = torch.randn(k, n, device="cuda").bfloat16()
    d = torch.randn(m, n, device="cuda")
    c = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    tile_m, tile_n, tile_k = blocking.tile_m, blocking.tile_n, blocking.tile_k
    chunk = gemm_sm90.chunk_of(tile_m, tile_n)
    table = torch.zeros(1 << 16, device="cuda", dtype=torch.int64)
    told = torch.zeros(2 * n // tile_n, device="cuda", dtype=torch.int64)
    partials = torch.empty(tile_scheduler.partial_elements(tile_m, tile_n, programs), device="cuda")
    summed = torch.zeros(2 * programs, device="cuda", dtype=torch.int64)
    gemm_with_all_hooks[(programs,)](
        descriptors_sm90.descriptor(a, (tile_m, tile_k)),
        descriptors_sm90.descriptor(b, block_of_b(blocking, False)),
        descriptors_sm90.descriptor(c, chunk), d, told, partials, summed, 5,
        gemm.Shape(m, n, k, k, n, n),
        WorldArg(table, gl.constexpr(1), gl.constexpr(language_version())),
        tile_m, tile_n, tile_k, blocking.num_stages, False, num_warps=blocking.num_warps,
    )  # fmt: skip
    expected = a.float() @ b.float() + d
    assert ((c.float() - expected).norm() / expected.norm()).item() <= tolerance("bfloat16", k)
    parts = tile_m // chunk[0]
    assert told.view(-1, 2)[:, :parts].unique().tolist() == [m // tile_m]
