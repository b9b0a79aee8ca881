"""Rows that no product takes: chains that become one kernel, what stays a library's, and why."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from ir_reader import read
from test_unfused import run

import weft
from weft.base.hardware import H200X4
from weft.base.target import TARGETS, parse_target
from weft.compiler import (
    Compiled,
    Facts,
    Partial,
    Pieces,
    Replicate,
    Settings,
    Shard,
    Tensor,
    all_gather,
    attention,
    gelu,
    reduce_scatter,
    rms_norm,
    rope,
    rope_by_table,
    silu,
    silu_mul,
)
from weft.compiler.cost.plans import predict
from weft.compiler.frontend import trace
from weft.compiler.lower import kernels, source
from weft.compiler.lower.signature import Specialised, record
from weft.compiler.passes.place import place
from weft.compiler.pipeline import overlap
from weft.ir import core, core_rules, device_rules
from weft.ir.choice import Choice
from weft.ir.device import Call, Launch, Plan, Step
from weft.language import triton_api
from weft.plan.row_launches import own_tile

K, INNER, HEAD = 40, 24, 8
PUSHED = Settings(engines={"gathered": "sm_push", "scattered": "sm_push"})


def layer_of(inner: int):
    def layer(x, gamma, bias, up, down, residual):
        """A norm, products between which rows are gated, a bias, and what goes on and is normed."""
        h = all_gather(rms_norm(x, gamma)) @ up
        part = reduce_scatter((silu(h[:, :inner]) * h[:, inner : 2 * inner]) @ down)
        total = gelu(part + bias) + residual
        return total, rms_norm(total, gamma, eps=1e-5)

    return layer


layer = layer_of(INNER)


def types(dtype: str = "bfloat16", k: int = K, inner: int = INNER):
    return {
        "x": Tensor(dtype, ("m", k), Shard(0)),
        "gamma": Tensor(dtype, (1, k), Replicate()),
        "bias": Tensor(dtype, (1, k), Replicate()),
        "up": Tensor(dtype, (k, 2 * inner), Pieces(1, (inner, inner))),
        "down": Tensor(dtype, (inner, k), Shard(0)),
        "residual": Tensor(dtype, ("m", k), Shard(0)),
    }


def gated(x, w, gate, positions, lengths, table, gain):
    """Gates of halves and of pairs, heads that are normed and turned, by table and by angle."""
    h = silu_mul(all_gather(x) @ w, side_by_side=True)
    q = rope_by_table(rms_norm(h[:, : 4 * HEAD], gain, head=HEAD), positions, table, head=HEAD)
    k = rope(h[:, 4 * HEAD : 6 * HEAD], lengths, head=HEAD, base=1e4)
    return q, k, silu_mul(gate), h * h


GATED = {
    "x": Tensor("float32", ("m", 16), Shard(0)),
    "w": Tensor("float32", (16, 12 * HEAD), Replicate()),
    "gate": Tensor("float32", ("m", 300), Shard(0)),
    "positions": Tensor("int32", (1, "m"), Replicate()),
    "lengths": Tensor("int32", (1, "m"), Replicate()),
    "table": Tensor("float32", (64, HEAD), Replicate()),
    "gain": Tensor("float32", (1, HEAD), Replicate()),
}


def made(function, of, settings: Settings = PUSHED) -> Compiled:
    return Compiled(trace(function, "tp", of), settings)


def plan_of(function, of, settings: Settings = PUSHED, **facts) -> Plan:
    placed = place(trace(function, "tp", of))
    return overlap(placed, Facts({"m": 4096}, **facts), settings).plan


def own_kernels(plan: Plan) -> list[core.Kernel]:
    return [one for one in kernels.lower(plan).values()
            if one.of(core.Template)[0].function == core.OWN_ROWS]  # fmt: skip


def hooks_of(kernel: core.Kernel) -> list[str]:
    return [one.function for one in kernel.of(core.Hook)]


def test_a_chain_is_one_kernel_and_its_columns_are_read_where_they_lie():
    plan = plan_of(layer, types())
    assert not plan.of(Call)
    first, gate, last = own_kernels(plan)
    assert hooks_of(first) == ["load_view", "rms_norm", "store_tile"]
    assert hooks_of(gate) == ["load_view", "silu", "mul_view", "store_tile"]
    assert hooks_of(last) == ["load_view", "add_row", "gelu", "add_view", "store_tile", "rounded",
                              "rms_norm", "store_tile"]  # fmt: skip
    views = {one.name: one.by for one in gate.of(core.Param) if one.sort == "view"}
    assert [*views.values()] == ["product", "product"]
    assert not any(one.of(core.SIGNALS) for one in (first, gate, last))


def test_heads_are_rows_of_their_own():
    plan = plan_of(gated, GATED, Settings(engines={"gathered": "sm_push"}))
    found = [hooks_of(one) for one in own_kernels(plan)]
    assert ["load_view", "silu", "mul_view", "store_tile"] in found
    assert ["load_view", "rms_norm", "turn_by_table", "store_tile"] in found
    assert ["load_view", "turn", "store_tile"] in found
    assert ["load_pairs", "silu_mul", "store_tile"] in found and len(found) == 5


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_layers_on_ranks(ranks, dtype: str):
    """Of 23 rows shares differ, of 2 one is empty; another m of a class compiles nothing."""
    compiled = made(layer, types(dtype))

    def main():
        with weft.init() as world:
            for m in (23, 2):
                run(world, compiled, {"m": m}, lowering="overlapped")
            world.barrier()
            before = world.compiled
            for m in (24, 19):
                run(world, compiled, {"m": m}, lowering="overlapped")
            assert world.compiled == before

    ranks(main, 3)
    assert not compiled.overlapped(Facts({"m": 23}, 3, TARGETS["emu"])).plan.of(Call)


def test_a_kernel_stands_behind_what_it_reads():
    plan = plan_of(layer, types())
    steps = [one for one in plan.statements if isinstance(one, Step)]
    gate = next(one for one in steps if "product" in one.reads)
    others = [one for one in plan.statements if one is not gate]
    first = others.index(steps[0])
    moved = replace(plan, statements=(*others[:first], gate, *others[first:]))
    (breach,) = [one.message for one in device_rules.check(moved) if one.rule == "written"]
    assert breach == "launch reads product, which nothing before it writes"


def test_what_is_read_and_written_is_reckoned_with():
    """Of columns those that are read: gate and value once, their product once."""
    inner = 4096
    plan = plan_of(layer_of(inner), types(k=4096, inner=inner))
    spans = predict(plan, {"m": 4096}, 4, H200X4).spans
    took = {one.name: one.end_us - one.start_us for one in spans if one.kind == "kernel"}
    moved = 4096 * 3 * (inner // 4) * 2 / (H200X4.memory_gbps * 1e3)
    assert took["layer_rows_2"] == pytest.approx(moved + H200X4.end_us, rel=0.01)


def test_gates_and_heads_on_ranks(ranks):
    compiled = made(gated, GATED, Settings(engines={"gathered": "sm_push"}))

    def main():
        with weft.init() as world:
            run(world, compiled, {"m": 13}, lowering="overlapped")
            run(world, compiled, {"m": 1}, lowering="overlapped")

    ranks(main, 2)


def test_heads_and_whole_rows_are_kernels_of_their_own():
    def turned(x, w, gamma, gain):
        h = all_gather(x) @ w
        return rms_norm(rms_norm(h, gain, head=HEAD), gamma)

    of = {
        "x": Tensor("bfloat16", ("m", 16), Shard(0)),
        "w": Tensor("bfloat16", (16, 4 * HEAD), Replicate()),
        "gamma": Tensor("bfloat16", (1, 4 * HEAD), Replicate()),
        "gain": Tensor("bfloat16", (1, HEAD), Replicate()),
    }
    plan = plan_of(turned, of, Settings(engines={"gathered": "sm_push"}))
    assert [hooks_of(one) for one in own_kernels(plan)] == [
        ["load_view", "rms_norm", "store_tile"]
    ] * 2


def test_columns_that_a_product_takes_are_packed(ranks):
    """A product reads rows one behind the other; a kernel of rows reads them where they lie."""

    def both(x, w, down):
        part = (all_gather(x) @ w)[:, 8:25]
        return reduce_scatter(part @ down), silu(part)

    compiled = made(both, {
        "x": Tensor("float32", ("m", 16), Shard(0)),
        "w": Tensor("float32", (16, 40), Replicate()),
        "down": Tensor("float32", (17, 24), Partial()),
    })  # fmt: skip

    def main():
        with weft.init() as world:
            for _ in range(2):
                run(world, compiled, {"m": 9}, lowering="overlapped")

    ranks(main, 2)


def test_two_calls_have_the_same_bits(ranks):
    compiled = made(layer, types("float16"))

    def main():
        with weft.init() as world:
            generator = torch.Generator().manual_seed(world.rank)
            shapes = ((7, K), (1, K), (1, K), (K, INNER), (INNER // 2, K), (7, K))
            given = [torch.randn(one, generator=generator).half() for one in shapes]
            first = compiled(*given, world=world)
            assert all(map(torch.equal, first, compiled(*given, world=world)))

    ranks(main, 2)


def unread(x, gamma, w, q):
    """Columns that a library reads too, a row for a row, a value twice: and attention between."""
    h = all_gather(rms_norm(x, gamma)) @ w
    part = h[:, :K]
    return attention(part, part, part, head=8), gelu(part), q * q


def test_what_stays_a_librarys_says_why():
    of = {
        "x": Tensor("bfloat16", ("m", K), Shard(0)),
        "gamma": Tensor("bfloat16", (1, K), Replicate()),
        "w": Tensor("bfloat16", (K, 2 * K), Replicate()),
        "q": Tensor("bfloat16", ("m", "n"), Replicate()),
    }
    plan = plan_of(unread, of, Settings(engines={"gathered": "sm_push"}))
    why = {one.subject: one.why for one in plan.of(Choice) if one.taken == "library"}
    assert [one.function for one in plan.of(Call)] == ["columns", "attention", "mul"]
    assert [*why.values()] == [
        "a view: nothing is launched", "no kernel is made for attention",
        "how many columns it has is known at the call alone",
    ]  # fmt: skip
    norm, activation = own_kernels(plan)
    assert hooks_of(activation) == ["load_view", "gelu", "store_tile"]


def test_rows_that_are_no_one_tile_stay_and_without_a_norm_become_several():
    wide = 1 << 16

    def beside(x, w, gamma, r):
        return all_gather(x) @ w, rms_norm(r, gamma), silu(r) * r

    of = {
        "x": Tensor("bfloat16", ("m", 16), Shard(0)),
        "w": Tensor("bfloat16", (16, 32), Shard(1)),
        "gamma": Tensor("bfloat16", (1, wide), Replicate()),
        "r": Tensor("bfloat16", ("m", wide), Replicate()),
    }
    plan = plan_of(beside, of, Settings(engines={"gathered": "sm_push"}))
    (kernel,), (call,) = own_kernels(plan), plan.of(Call)
    assert hooks_of(kernel) == ["load_view", "silu", "mul_view", "store_tile"]
    (why,) = [one.why for one in plan.of(Choice) if one.taken == "library"]
    assert call.function == "rms_norm" and "65536 columns is no one tile" in why
    assert not plan_of(beside, of, Settings(engines={"gathered": "library"})).of(Launch)


def test_one_row_is_either_the_row_or_what_it_is_for():
    def single(x, w, row, gamma):
        y = rms_norm(row * gamma, gamma)
        return all_gather(x) @ w, y, rms_norm(row, row)

    of = {
        "x": Tensor("bfloat16", ("m", 16), Shard(0)),
        "w": Tensor("bfloat16", (16, 32), Shard(1)),
        "row": Tensor("bfloat16", (1, K), Replicate()),
        "gamma": Tensor("bfloat16", (1, K), Replicate()),
    }
    plan = plan_of(single, of, Settings(engines={"gathered": "sm_push"}))
    assert [hooks_of(one)[1] for one in own_kernels(plan)] == ["mul_view", "rms_norm"]
    assert [one.reads for one in plan.of(Call)] == [("row", "row")]


def test_an_epilogue_of_another_template_is_refused():
    (kernel,) = [one for one in own_kernels(plan_of(layer, types())) if "silu" in hooks_of(one)]
    text = core.show(kernel).replace("template(own_rows", "template(every_row")
    told = " ".join(one.message for one in core_rules.check(read(core, text)))
    assert "every_row needs the hooks order, emit, combine" in told


@pytest.mark.parametrize("n", [1, 8, 40, 2048, 5000, 14336, 32768, 1 << 17])
@pytest.mark.parametrize("is_whole", [True, False])
def test_tiles_follow_from_the_width_of_rows(n: int, is_whole: bool):
    tile, threads = own_tile(n, is_whole, parse_target("cuda:90"))
    assert tile.m * tile.n >= 2048 and (tile.m == 1 or tile.m * tile.n == 2048)
    assert not is_whole or tile.n >= n
    assert 128 <= threads <= 1024 or n > 32768


@pytest.mark.few(1)
@pytest.mark.parametrize("target", ["cuda:90", "cuda:100", "hip:gfx942"])
def test_kernels_load_and_store_16_bytes(target: str):
    wide = own_kernels(plan_of(layer_of(4096), types(k=4096, inner=4096)))
    heads = own_kernels(plan_of(gated, GATED, Settings(engines={"gathered": "sm_push"})))
    for kernel, tile in [*((one, (1, 4096)) for one in wide), *((one, (64, 8)) for one in heads)]:
        given = Specialised("bfloat16", tile, 4)
        plain = source.load(kernel).plain
        binary = triton_api.compile_kernel(plain, record(kernel, "plain", given), TARGETS[target])
        if target.startswith("cuda"):
            assert "ld.local" not in binary.asm["ptx"]
            moved = re.findall(r"(?:ld|st)\.global\S*(?:v4\.b32|v2\.b64)", binary.asm["ptx"])
            assert kernel not in wide or len(moved) >= 4, kernel.name
        elif kernel in wide:
            assert "_load_dwordx4" in binary.asm["amdgcn"]
