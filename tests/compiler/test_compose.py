"""Composed kernels: what is launched, that it compiles everywhere, what it computes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from composed_kernels import GOLDEN, PLANS, kernel_of

import weft
import weft.language as wl
from weft.base.dtypes import tolerance
from weft.base.place import Frame, Place
from weft.base.target import TARGETS
from weft.compiler.lower import compose, kernels, source
from weft.compiler.lower.signature import Specialised, record
from weft.ir import core, core_rules
from weft.language import slots, triton_api
from weft.language.mapping import StaticMapping
from weft.tiles import blocking, composition, gemm
from weft.tiles.composition import Call
from weft.tiles.hooks.whole import Turns
from weft.verify import compiled

WIDE = (128, 256, 64)


@triton.jit
def feed(a, gathered, rows_ready, slot, split, k, world, block: tl.constexpr):
    """One program for each peer: own rows, then the words of own chunks."""
    e = slots.slot_epoch(slot)
    slots.slot_wait_free(world, slot, e)
    rank, to = wl.rank(world).to(tl.int32), tl.program_id(0)
    first = min(rank * split.rank_rows, split.rows)
    size = (min(first + split.rank_rows, split.rows) - first) * k
    for start in range(0, size, block):
        i = start + tl.arange(0, block)
        wl.put(world, gathered + first * k + i, a + i, to=to, mask=i < size)
    for chunk in range(split.chunks):
        word = rows_ready + rank * split.chunks + chunk
        wl.notify(world, word, e, to=to, op=wl.SignalOp.SET)


@triton.jit
def give_back(slot, world):
    slots.slot_close(world, slot, slots.slot_epoch(slot))


def gather_and_multiply(
    world, a, b, m: int, chunks: int, *, tma: bool, programs: int, kernel, width: int = 1
):
    """C by the generated kernel, with rows that feeders push; of `width` columns one is left."""
    (rows, k), n = a.shape, b.shape[1]
    signals = {"rows_ready": (world.num_ranks * chunks, torch.int64)}
    slot = world.workspace("generated", {"gathered": ((m, k), a.dtype)}, signals)
    split = StaticMapping.of(m, world.num_ranks, chunks=chunks, tile_rows=16)
    c = torch.full((m, n // width), float("nan"), dtype=a.dtype)
    shape = gemm.Shape(m, n, k, k, n, n)
    tile = gemm.Tile.of(16, 16, 16, size_k=k, tma=tma)
    feed[(world.num_ranks,)](a, slot.gathered, slot.rows_ready, slot.arg, split, k, world.arg, 64)
    operands = [a, slot.gathered, b, c]
    if tma:
        whole = [a if rows else slot.gathered, slot.gathered, b, c]
        operands = [blocking.descriptor(one, (16, 16)) for one in whole]
    is_first = width > 1  # of two products in the call: another gives the slot back
    if is_first:
        operands[3:] = [c, c]  # as operand, and as pointer
    turns = Turns(2, max(1, split.rank_rows // 16), 1, 0, 0)
    kernel.plain[(programs,)](
        *kernel.arranged((*operands, slot.rows_ready)), slot.arg, shape, split, turns,
        tile.as_constexpr(), world.arg, 64,
    )  # fmt: skip
    if is_first:
        give_back[(1,)](slot.arg, world.arg)
    return c


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("num_ranks", "m", "n", "k", "tma"),
    [(3, 100, 72, 56, True), (4, 9, 16, 16, False), (1, 40, 48, 32, False)],
)
def test_ag_gemm_multiplies_as_rows_arrive(ranks, num_ranks, m, n, k, tma):
    kernel = source.load(kernel_of("ag_gemm_put"))
    whole = torch.randn(m, k)

    def main():
        world = weft.init()
        b = torch.randn(k, n)
        rows = -(-m // num_ranks)
        first = min(world.rank * rows, m)
        for turn in range(3):
            a = (whole + turn)[first : min(first + rows, m)].contiguous()
            c = gather_and_multiply(world, a, b, m, 2, tma=tma, programs=3, kernel=kernel)
            expected = (whole + turn) @ b
            assert (c - expected).norm() <= tolerance("float32", k) * expected.norm()
        world.close()

    ranks(main, num_ranks)


def test_what_follows_a_product_is_done_in_registers(ranks):
    """silu_mul of neighbouring columns; rows and columns that nothing divides."""
    kernel = source.load(kernel_of("mlp"))
    num_ranks, m, n, k = 2, 37, 44, 24
    whole, b = torch.randn(m, k), torch.randn(k, n)
    product = whole @ b
    expected = torch.nn.functional.silu(product[:, 0::2]) * product[:, 1::2]

    def main():
        world = weft.init()
        a = torch.chunk(whole, num_ranks)[world.rank].contiguous()
        for _ in range(2):
            c = gather_and_multiply(
                world, a, b, m, 1, tma=False, programs=2, kernel=kernel, width=2
            )
            assert (c - expected).norm() <= tolerance("float32", k) * expected.norm()

    ranks(main, num_ranks)


def all_calls(calls: Iterable[Call]) -> Iterator[Call]:
    for call in calls:
        yield call
        for inner in call.then.values():
            yield from all_calls(inner)


@pytest.mark.parametrize("name", PLANS)
def test_what_is_launched_is_golden(name):
    assert f"{source.shown(kernel_of(name))}\n" == (GOLDEN / f"{name}.launch").read_text(), (
        "run tests/compiler/composed_kernels.py and look at what has changed"
    )


@pytest.mark.parametrize("name", PLANS)
def test_functions_take_what_statements_give_them(name):
    for calls in compose.calls_of(kernel_of(name)).values():
        for call in all_calls(calls):
            assert len(composition.own_parameters(call.function)) == len(call.args), call


@triton.jit
def first_rounding(value):
    return value


@triton.jit
def second_rounding(value):
    return value + 0.0


def test_a_hook_that_changes_makes_another_binary():
    """Triton's cache on disk goes by `cache_key`, and by text within a process."""
    chains = [composition.Chain("combine", ("at", "cells", "value"), (Call(function),), {})
              for function in (first_rounding, second_rounding, first_rounding)]  # fmt: skip
    hooks = [composition.Hooks("kernel", {"combine": one}) for one in chains]
    assert hooks[0].cache_key != hooks[1].cache_key and repr(hooks[0]) != repr(hooks[1])
    assert hooks[0].cache_key == hooks[2].cache_key and repr(hooks[0]) == repr(hooks[2])


def test_a_kernel_has_its_name_and_one_function_of_its_template():
    kernels_ = [source.load(kernel_of(name)) for name in ("gemm_rs", "mlp")]
    assert [one.plain.__name__ for one in kernels_] == ["gemm_rs_multiply", "mlp_multiply"]
    assert len({one.plain.fn.__code__ for one in kernels_}) == 1


PLAIN = {
    "hip:gfx942": Specialised("bfloat16", (128, 128, 64), 4, num_stages=2),
    "cuda:90": Specialised("bfloat16", (128, 128, 64), 4, tma=True, num_warps=8),
}
COMPILED = [(name, "sm90", "cuda:90", Specialised("bfloat16", WIDE, 4, num_stages=4))
            for name in ("mlp",)]  # fmt: skip
COMPILED += [("gemm_rs_staged", "plain", "hip:gfx942", PLAIN["hip:gfx942"])]
# Tiles node by node, of rows that another kernel brings; what tests/ops compiles of the operators;
# and tiles that are taken more rarely.
COMPILED += [
    pytest.param(name, "sm90", "cuda:90", Specialised("bfloat16", WIDE, 4, num_stages=4),
                 marks=pytest.mark.slow)
    for name in ("ag_gemm_relay", "ag_gemm_put", "gemm_rs", "gemm_rs_staged")
]  # fmt: skip
COMPILED += [
    pytest.param(name, variant, target, given, marks=pytest.mark.slow)
    for name in ("ag_gemm_put", "gemm_rs", "gemm_rs_staged", "mlp")
    for variant, target, given in [
        *(("plain", target, given) for target, given in PLAIN.items()),
        *(("sm90", "cuda:90", Specialised("bfloat16", (128, columns, 64), 4, num_stages=stages))
          for columns, stages in ((128, 5), (160, 5), (192, 4))),
    ]
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("name", "variant", "target", "given"), COMPILED)
def test_both_variants_compile_and_their_waits_hold(name, variant, target, given):
    kernel = kernel_of(name)
    binary = triton_api.compile_kernel(
        getattr(source.load(kernel), variant), record(kernel, variant, given), TARGETS[target]
    )
    report = compiled(binary, TARGETS[target])
    assert report.ok, str(report)
    assert "ld.local" not in binary.asm.get("ptx", "")


def of_one_node(kernel: core.Kernel) -> core.Kernel:
    """The same with its tiles rank by rank."""
    statements = tuple(
        replace(one, function=one.function.removeprefix("hierarchical_"))
        if isinstance(one, core.Hook) else one
        for one in kernel.statements
    )  # fmt: skip
    return replace(kernel, statements=statements)


BY_NODE = {
    "ag_gemm_nodes": ["arrange   whole.arrange_by_node(split)", "order     whole.by_node()"],
    "gemm_ar_nodes": ["arrange   hierarchy.to_scatter(parts)", "order     hierarchy.scattered()"],
}


@pytest.mark.parametrize("name", BY_NODE)
def test_lines_that_the_order_by_nodes_asks_for(name):
    """All others are those of one node, which has a sm90 variant, too."""
    kernel = kernel_of(name)
    known = set(source.shown(of_one_node(kernel)).splitlines())
    assert [line for line in source.shown(kernel).splitlines() if line not in known] == BY_NODE[
        name
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "target"),
    [("ag_gemm_nodes", "cuda:100"), ("ag_gemm_nodes", "hip:gfx942"), ("gemm_ar_nodes", "cuda:90")],
)
def test_kernels_for_several_nodes_compile_and_their_waits_hold(name, target):
    """Those that put have no sm90 variant: kernels in Gluon put nothing to other nodes."""
    kernel, target = kernel_of(name), TARGETS[target]
    variants, is_cuda = source.load(kernel), target.backend == "cuda"
    assert (variants.sm90 is None) == (name == "gemm_ar_nodes")
    given = Specialised("bfloat16", (128, 128, 64), 4, tma=is_cuda, num_warps=8, num_stages=2)
    binary = triton_api.compile_kernel(variants.plain, record(kernel, "plain", given), target)
    report = compiled(binary, target)
    assert report.ok, str(report)
    assert "ld.local" not in binary.asm.get("ptx", "")


def test_what_a_statement_does_has_the_users_line():
    """So every report that shows where something happened shows whose wish it was."""
    kernel = kernel_of("gemm_rs")
    here = Place((Frame("/home/me/mlp.py", 12, "mlp"),))
    kernel = replace(
        kernel, statements=tuple(replace(one, place=here) for one in kernel.statements)
    )
    binary = triton_api.compile_kernel(
        source.load(kernel).plain,
        record(kernel, "plain", Specialised("float32", (16, 16, 16), 2)),
        TARGETS["emu"],
    )
    text = binary.asm["ttir"]
    assert 'loc("/home/me/mlp.py":12:0)' in text and "triton_poll" not in text
    shown = [line for line in source.shown(kernel).splitlines() if "signals.wait" in line]
    assert shown and all(line.endswith("  # mlp.py:12") for line in shown)


@pytest.mark.slow
def test_tiles_that_leave_by_tma_have_a_descriptor_for_each_peer():
    """Both kinds of sending, announced late, compile for Hopper; elsewhere they are stores."""
    kernel = kernel_of("gemm_ar_two_shot")
    sending = core_rules.require(kernels.sending(kernel))
    assert compose.peers_of(sending) == ["partials", "gathered"]
    assert not compose.peers_of(kernel)
    variants, given = source.load(sending), Specialised("bfloat16", WIDE, 4, num_stages=4)
    assert variants.plain.arg_names == source.load(kernel).plain.arg_names
    target = TARGETS["cuda:90"]
    binary = triton_api.compile_kernel(variants.sm90, record(sending, "sm90", given), target)
    report = compiled(binary, target)
    assert report.ok, str(report)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "target", "given"),
    [
        ("all_reduce_rms_norm", "cuda:90", Specialised("bfloat16", (2, 4096), 4, num_warps=8)),
        pytest.param("all_reduce_rms_norm", "hip:gfx942",
                     Specialised("bfloat16", (2, 4096), 4, num_warps=8), marks=pytest.mark.slow),
        ("all_reduce_rms_norm_few", "cuda:90", Specialised("bfloat16", (1, 8192), 8, num_warps=16)),
        pytest.param("all_reduce_rms_norm_twice", "cuda:90",
                     Specialised("bfloat16", (1, 8192), 8, num_warps=16), marks=pytest.mark.slow),
        pytest.param("all_reduce_rms_norm_twice", "cuda:100",
                     Specialised("bfloat16", (1, 8192), 8, num_warps=16), marks=pytest.mark.slow),
        pytest.param("all_reduce_rms_norm_twice", "hip:gfx942",
                     Specialised("float16", (1, 4096), 4, num_warps=8), marks=pytest.mark.slow),
        pytest.param("all_reduce_rms_norm_few", "cuda:100",
                     Specialised("float32", (1, 4096), 4, num_warps=16), marks=pytest.mark.slow),
        pytest.param("all_reduce_rms_norm_few", "hip:gfx942",
                     Specialised("float16", (1, 4096), 4, num_warps=8), marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_kernels_of_rows_compile_and_their_waits_hold(name, target, given):
    kernel, target = kernel_of(name), TARGETS[target]
    variants = source.load(kernel)
    assert variants.sm90 is None
    binary = triton_api.compile_kernel(variants.plain, record(kernel, "plain", given), target)
    report = compiled(binary, target)
    assert report.ok, str(report)
    assert "ld.local" not in binary.asm.get("ptx", "")
