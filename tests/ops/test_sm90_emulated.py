"""What runs on Hopper, two ranks of it in the emulator: Gluon kernels with their hooks, clean and
right, and found where a wait for a peer is left out."""

from __future__ import annotations

import importlib
import re
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from effort import slow_but
from multiplying import EMU, check

import weft
from weft.base.target import TARGETS
from weft.compiler import Settings, Shard, Tensor, all_gather, reduce_scatter, silu_mul
from weft.emulator.codegen import compile_ttir
from weft.emulator.observation import Recorder
from weft.emulator.rewriting import Rewrite
from weft.ops import ag_moe, cards, moe_route
from weft.tools.check import Work
from weft.tools.mutants import FEW_SMS, mutants_in_trials, op_run, runs_on_hopper
from weft.tools.subjects import on_hopper as on_hopper_of
from weft.verify.mutants import Bounds, Run
from weft.verify.mutants.rewrites import Census, OneMutant
from weft.verify.mutants.search import shows

HOPPER = TARGETS["cuda:90"]
# What orders accesses within a block.
BLOCK = {"mbarrier.wait", "mbarrier.arrive", "mbarrier.expect", "fence_async_shared",
         "tma.store_wait"}  # fmt: skip
GATHERED = {"m": 300, "n": 72, "k": 136}
FP8 = {"dtype": "float8_e4m3fn", "b_is_nk": True, "m": 300, "n": 80}
SM, CE = {"transport": "sm_push"}, {"transport": "ce_push"}
TMA = {**SM, "by_tma": True}
PARTS = {"transport": "ce_parts", "chunks": 2}
# Two ranks on one node, one on another; or by twos.
RELAY = {"transport": "relay", "nodes": (2, 1)}
EXPERTS = {"m": 150, "n": 72, "k": 128, "experts": 3, "top_k": 2, "tile_m": 128}
CASES = {
    "ag_gemm by engines": ("ag_gemm", GATHERED, CE),
    "ag_gemm by SMs": ("ag_gemm", GATHERED, SM),
    "ag_gemm, tiles divide": ("ag_gemm", {"m": 512, "n": 136, "k": 72}, CE),
    "ag_gemm over nodes": ("ag_gemm", GATHERED, RELAY),
    "ag_gemm over nodes, tiles divide": ("ag_gemm", {"m": 512, "n": 136, "k": 72},
                                         {**RELAY, "nodes": (2, 2)}),
    "ag_gemm of fp8": ("ag_gemm", {**FP8, "k": 400}, {"tile_n": 64, "tile_k": 128}),
    "ag_gemm of blocks of fp8": ("ag_gemm", {**FP8, "k": 256, "scaling": "blocks"},
                                 {"tile_k": 128}),
    "gemm_rs by SMs": ("gemm_rs", GATHERED, SM),
    "gemm_rs by TMA": ("gemm_rs", GATHERED, TMA),
    "gemm_rs by engines": ("gemm_rs", {"m": 512, "n": 256, "k": 72}, CE),
    # Each launch's last tiles are shared over k, and wide ones stored by halves.
    "gemm_rs in parts": ("gemm_rs", {"m": 256, "n": 512, "k": 1088},
                         {**PARTS, "tile_n": 256, "num_sms": 4}),
    "gemm_rs in parts, narrow tiles": ("gemm_rs", {"m": 392, "n": 256, "k": 72}, PARTS),
    "gemm_rs of fp8": ("gemm_rs", {**FP8, "k": 400}, {**SM, "tile_k": 128}),
    "gemm_rs of fp8 by TMA": ("gemm_rs", {**FP8, "k": 144}, {**TMA, "tile_n": 64, "tile_k": 128}),
    "gemm_rs of blocks of fp8 by engines": (
        "gemm_rs", {**FP8, "n": 256, "k": 272, "scaling": "blocks"}, {**CE, "tile_k": 128}),
    "gemm_ar of fp8": ("gemm_ar", {**FP8, "k": 144}, {**SM, "tile_n": 64, "tile_k": 128}),
    "gemm_ar of blocks of fp8 by TMA": (
        "gemm_ar", {**FP8, "k": 272, "scaling": "blocks"}, {**TMA, "tile_k": 128}),
    "gemm_rs over nodes": ("gemm_rs", GATHERED, RELAY),
    "gemm_rs over nodes, narrow tiles": ("gemm_rs", {**GATHERED, "n": 200},
                                         {**RELAY, "tile_n": 192, "nodes": (2, 2)}),
    "gemm_rs of fp8 over nodes": ("gemm_rs", {**FP8, "k": 144}, {**RELAY, "tile_k": 128}),
    # The gather behind it takes two programs.
    "gemm_ar over nodes": ("gemm_ar", GATHERED, {**RELAY, "nodes": (3, 1), "num_sms": 4}),
    "gemm_ar": ("gemm_ar", GATHERED, SM),
    "gemm_ar by TMA": ("gemm_ar", GATHERED, TMA),
    "ag_moe by SMs": ("ag_moe", EXPERTS, SM),
    "ag_moe by engines": ("ag_moe", EXPERTS, CE),
    "ag_moe, experts without tokens": ("ag_moe", {**EXPERTS, "m": 7, "experts": 12}, SM),
    "moe_rs": ("moe_rs", EXPERTS, SM),
    "moe_rs over nodes": ("moe_rs", {**EXPERTS, "m": 7}, RELAY),
    "moe_ar": ("moe_ar", EXPERTS, SM),
    "moe_rs, experts without tokens": ("moe_rs", {**EXPERTS, "m": 7, "experts": 12}, SM),
}  # fmt: skip
# On three ranks: parts that no tile divides, ranks without rows, one row in all.
AWKWARD = [
    pytest.param(op, m, transport, id=f"{op} of {m} by {name}")
    for op, ways in {
        "ag_gemm": {"engines": CE, "SMs": SM},
        "gemm_rs": {"engines": CE, "launches": PARTS, "SMs": SM, "TMA": TMA},
        "gemm_ar": {"SMs": SM, "TMA": TMA},
        "ag_moe": {"engines": CE, "SMs": SM},
        "moe_rs": {"SMs": SM},
        "moe_ar": {"SMs": SM},
    }.items()
    for name, transport in ways.items()
    for m in (401, 4, 1)
]


class WithoutWait(Rewrite):
    """Hopper's kernel does not wait for what others signal."""

    def kernel(self, text: str):
        if "_sm90" in text:
            text = re.sub(r'"weft\.wait_bounded:[^"]*"', '"weft.complete_stores"', text)
        return compile_ttir(text)


def emulated(case: tuple, seed: int, rewrite: Rewrite | None = None, num_ranks: int = 2):
    """The findings of three calls, and the kernels that ran."""
    name, sizes, fields = case
    fields = dict(fields)
    num_sms = fields.pop("num_sms", 2)
    if nodes := fields.pop("nodes", ()):
        sizes, num_ranks = {**sizes, "nodes": nodes}, sum(nodes)
    op = importlib.import_module(f"weft.ops.{name}").op
    problem = op.problem(**{"num_ranks": num_ranks, "dtype": "bfloat16", **sizes})
    cut = {
        "tile_m": 128,
        "tile_n": 128,
        "tile_k": 64,
        "num_stages": 3,
        "num_warps": 4,
        "pushers": 1,
    }
    config = next(iter(op.candidates(problem, EMU)))
    config = replace(config, template="sm90", **{**cut, **fields})

    def main():
        world = weft.init()
        mine = op.make_inputs(problem, world.rank)
        for _ in range(3):
            check(op, op.run(world, problem, mine, config), problem, world.rank)

    return on_hopper(main, seed, num_ranks, rewrite, num_sms, nodes)


def on_hopper(
    main, seed=0, num_ranks=2, rewrite: Rewrite | None = None, num_sms: int = 2, nodes=()
):
    recorder = Recorder()
    how = {"rewrite": rewrite, "observers": [recorder], "collect": rewrite is not None}
    # Few programs: both consumers of each have tiles, and more than one.
    how |= {"num_sms": num_sms, "seed": seed, "arch": 90}
    with weft.emulated(num_ranks, nodes or 1, **how) as ranks:
        with suppress(*((AssertionError,) if rewrite else ())):
            ranks.run(main)
    return ranks.report.findings, {event.party.what for event in recorder.events}


def runs_in_gluon(found) -> bool:
    findings, parties = found
    assert not findings
    return any(party.endswith("_sm90") for party in parties)


# Of each operator by each engine one, of scales and of nodes those that no other one has.
QUICK = (
    "ag_gemm by engines", "ag_gemm by SMs", "ag_gemm over nodes", "ag_gemm of blocks of fp8",
    "gemm_rs by SMs", "gemm_rs by TMA", "gemm_rs by engines", "gemm_rs in parts",
    "gemm_rs of fp8 by TMA",
    "gemm_rs over nodes", "gemm_ar of fp8", "gemm_ar by TMA", "ag_moe by SMs", "ag_moe by engines",
    "moe_rs over nodes", "moe_ar", "moe_rs, experts without tokens",
)  # fmt: skip


@pytest.mark.few(2)
@pytest.mark.parametrize(("case",), slow_but(zip(QUICK), zip(CASES)))
def test_is_right_and_clean(case):
    assert runs_in_gluon(emulated(CASES[case], seed=len(case)))


@pytest.mark.slow
@pytest.mark.parametrize(("op", "m", "transport"), AWKWARD)
def test_awkward_shapes_on_three_ranks(op, m, transport):
    sizes = {**(EXPERTS if "moe" in op else GATHERED), "m": m}
    if op == "gemm_rs" and transport in (CE, PARTS):  # engines move chunks of whole tiles
        sizes["n"] = 128 * transport.get("chunks", 1)
    assert runs_in_gluon(emulated((op, sizes, transport), m, num_ranks=3))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("m", "transport"),
    slow_but([(150, "sm_push"), (9, "ce_push")], [(150, "ce_push"), (9, "sm_push")]),
)
def test_all_tokens_go_to_one_expert(m, transport):
    """Behind the router, which gives the others none."""
    card = cards()["ag_moe"]
    problem = card.problem(**{**EXPERTS, "m": m, "top_k": 1}, num_ranks=2, dtype="bfloat16")
    inputs = [card.make_inputs(problem, rank) for rank in range(2)]
    wanted = [torch.cat([one["x"] for one in inputs]).float() @ one["b"][2].float()
              for one in inputs]  # fmt: skip
    logits = 9 * torch.eye(3)[torch.full((m,), 2)]
    wide = next(one for one in card.candidates(problem, HOPPER) if one.template == "sm90")

    def main():
        world = weft.init()
        own, mine = slice(*problem.shard(world.rank)), inputs[world.rank]
        routing = moe_route(logits[own], 1, world=world, m=m, tile_m=128)
        config = replace(wide, transport=transport, pushers=2)
        out = ag_moe(mine["x"], mine["b"], routing, world=world, config=config)
        got = out[routing.tables.slot_of[:, 0].long()].float()
        assert (got - wanted[world.rank]).norm() <= 0.01 * got.norm()

    assert runs_in_gluon(on_hopper(main, num_sms=4))


@weft.program(
    mesh="tp",
    x=Tensor("bfloat16", ("m", 64), Shard(0)),
    w1=Tensor("bfloat16", (64, 256), Shard(1)),
    w2=Tensor("bfloat16", (128, 64), Shard(0)),
)
def mlp(x, w1, w2):
    return reduce_scatter(silu_mul(all_gather(x) @ w1) @ w2)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["", "ce_push", "sm_push"])
def test_programs(engine):
    """Every kernel of a product is Gluon's; called three times, the last is a replay."""
    torch.manual_seed(0)
    x, w1, w2 = (torch.randn(size).bfloat16() for size in ((300, 64), (64, 256), (128, 64)))
    h = (x.float() @ w1.float()).bfloat16().float()
    wanted = (torch.nn.functional.silu(h[:, ::2]) * h[:, 1::2]).bfloat16().float() @ w2.float()
    gathered = next(one.name for one in mlp.stages.program.tasks if one.kind == "all_gather")
    settings = Settings(engines={gathered: engine} if engine else {})

    def main():
        world = weft.init()
        of = [one.chunk(2, dim)[world.rank] for one, dim in ((x, 0), (w1, 1), (w2, 0))]
        of = [one.contiguous() for one in of]
        for _ in range(3):
            got = mlp.options(settings=settings)(*of, world=world).float()
            assert (got - wanted.chunk(2)[world.rank]).norm() <= 0.01 * got.norm()

    found = on_hopper(main)
    assert runs_in_gluon(found)
    products = {party for party in found[1] if "@" in party or "multiply" in party}
    assert products and all(party.endswith("_sm90") for party in products), found[1]


@pytest.mark.few(1)
@pytest.mark.parametrize("case", ["ag_gemm by engines", "ag_gemm by SMs", "ag_gemm over nodes"])
def test_rows_of_a_peer_that_are_not_waited_for(case):
    findings, _ = emulated(CASES[case], 1, WithoutWait())
    races = [finding for finding in findings if finding.kind == "race"]
    assert races
    ranks = {side.rank for side in races[0].sides}
    assert ranks == {0, 1} or any("copy engine" in str(side.kernel) for side in races[0].sides)


def of_few_programs(calls=(0, 0, 1, 2, 0)) -> Run:
    """ag_gemm by engines: both consumers have several tiles, and stages come round."""
    work = Work(cards()["ag_gemm"], 2, {"m": 300, "n": 264, "k": 136}, "bfloat16", (2,))
    work, ways = on_hopper_of(work, FEW_SMS)
    way = next(one for one in ways if one.transport == "ce_push")
    return op_run(work, [replace(way, tile_n=128, num_stages=2)] * 3, calls=calls, arch=90)


@pytest.mark.slow
def test_waits_arrivals_fences_and_parity_within_a_block_are_needed():
    """One mutant of each."""
    run, census = of_few_programs(calls=(0,)), Census()
    assert not run.run(0, census).findings
    kinds = {}
    for mutant in census.mutants:
        if mutant.site in census.sites and mutant.site.primitive in BLOCK:
            kinds.setdefault((mutant.site.primitive, mutant.kind), mutant)
    assert {name for name, _ in kinds} == BLOCK
    assert ("mbarrier.wait", "parity") in kinds
    for kind, mutant in kinds.items():
        assert any(shows(run, seed, OneMutant(mutant)) for seed in range(6)), kind


@pytest.mark.slow
def test_a_tile_that_nobody_is_told_of_is_waited_for_by_the_next_alone():
    """Own tiles of gemm_rs, the last: each place is written again when it has been read, in tiles
    of one chunk; and at the end, by both consumers."""
    runs = runs_on_hopper(cards()["gemm_rs"], "sm_push", "bfloat16")
    run, census = next(one for one in runs if "tiles of 64" in one.name), Census()
    assert not run.run(0, census).findings
    waits = [one for one in census.mutants if one.site.primitive == "tma.store_wait"]
    assert len(waits) == 4
    assert [shows(run, 0, OneMutant(one)) for one in waits] == ["race"] * 4


@pytest.mark.slow
def test_where_threads_store_results_a_wait_for_tma_is_no_signal():
    """Experts' tiles end where another's rows begin: nothing could show such a mutant."""
    run, census = next(runs_on_hopper(cards()["ag_moe"], "sm_push", "bfloat16")), Census()
    assert not run.run(0, census).findings
    names = {one.site.primitive for one in census.mutants}
    assert "fence_async_shared" in names and "tma.store_wait" not in names


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("name", "fewest"),
    [("ag_gemm", 150), ("gemm_rs", 250), ("gemm_ar", 250), ("ag_moe", 100)],
)
def test_every_signal_is_needed(name, fewest):
    bounds = Bounds(schedules=16, argued=2, jobs=1)
    report = mutants_in_trials(cards()[name], bounds, dtype="bfloat16", arch=90)
    assert report.ok, str(report)
    assert len(report.verdicts) > fewest
