"""ag_attention: right wherever sequences begin, by every transport, waiting for what it needs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import flash_attention
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import weft
from weft.base.dtypes import tolerance
from weft.base.errors import ConfigError, DtypeError, FindingError, ShapeError
from weft.base.target import TARGETS
from weft.language import triton_api
from weft.language.mapping import as_python
from weft.ops.ag_attention import Config, Problem, ag_attention, candidates, op, reference
from weft.plan import by_libraries
from weft.plan.attention_launches import GatheredAttention, shards_of
from weft.tiles import attention as tiles
from weft.tiles.attention_gather import Arrival, chunk_of, segments_of
from weft.tools.binaries import FORMATS, stack_bytes
from weft.tools.check import rel_err
from weft.tune.case import Case
from weft.verify import compiled

EMU = TARGETS["emu"]


def problem_for(num_ranks: int, m: int, dtype: str = "float32", nodes=(), **fields: Any) -> Problem:
    sizes = {"q_heads": 2, "kv_heads": 1, "d": 16, "causal": True, "sequences": 2, **fields}
    return Problem(m, sizes["kv_heads"] * sizes["d"], num_ranks, dtype, nodes, **sizes)


def config_for(problem: Problem, transport: str, **changes: Any) -> Config:
    first = next(c for c in candidates(problem, EMU) if c.transport == transport)
    return replace(first, tile_n=16, **changes)


def check(outputs: Any, problem: Problem, rank: int, seed: int = 0) -> None:
    inputs = [op.make_inputs(problem, other, seed) for other in range(problem.num_ranks)]
    expected = reference(problem, inputs)[rank]
    assert rel_err(outputs, expected) <= tolerance(problem.dtype, problem.k)


def call_once(problem: Problem, config: Config | None = None) -> Any:
    world = weft.init()
    outputs = op.run(world, problem, op.make_inputs(problem, world.rank), config)
    check(outputs, problem, world.rank)
    world.close()
    return outputs


# ---- what it computes


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("num_ranks", "transport"),
    [(2, "ce_push"), slow(2, "sm_push"), slow(3, "ce_push"), slow(3, "sm_push")],
)
@pytest.mark.parametrize("shape", [shape for _, shape in op.awkward_shapes], ids=str)
def test_awkward_shapes(ranks, num_ranks, shape, transport):
    problem = op.make_problem(num_ranks, shape, "float32")
    ranks(partial(call_once, problem, config_for(problem, transport)), num_ranks)


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_what_is_chosen(ranks, num_ranks):
    problem = problem_for(num_ranks, 45, sequences=4, q_heads=6, kv_heads=2, d=24)
    ranks(partial(call_once, problem), num_ranks)


@pytest.mark.parametrize("dtype", [slow("float16"), "bfloat16"])
def test_half_precision(ranks, dtype):
    ranks(partial(call_once, problem_for(2, 50, dtype, sequences=0)), 2)


@pytest.mark.parametrize("pack", [1, slow(2), 4])
def test_heads_that_share_a_tile(ranks, pack):
    problem = problem_for(2, 50, q_heads=4)
    ranks(partial(call_once, problem, config_for(problem, "ce_push", pack=pack)), 2)


@pytest.mark.few(1)
@pytest.mark.parametrize("sequences", [0, 3])
def test_zigzag_is_the_same_attention_of_other_shards(ranks, sequences):
    """Of the tokens that zigzag_split gives each rank, by every transport and by libraries."""
    problem = problem_for(3, 49, zigzag=True, sequences=sequences, q_heads=4)
    for config in (*candidates(problem, EMU), Config("unfused")):
        ranks(partial(call_once, problem, replace(config, tile_n=16)), 3)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("sequences", [0, 4])
def test_zigzag_by_torchs_flash_attention(ranks, sequences, causal, monkeypatch):
    """What is measured beside it on GPUs: each part of a sequence is one of the library's."""
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash_attention.forward)
    monkeypatch.setattr(by_libraries, "_has_flash", lambda q: True)
    problem = problem_for(3, 37, zigzag=True, sequences=sequences, causal=causal)
    ranks(partial(call_once, problem, Config("unfused")), 3)


def test_tokens_of_no_sequence_and_a_scale_of_ones_own(ranks):
    def main():
        world = weft.init()
        torch.manual_seed(world.rank)
        q, k, v = (torch.randn(10, heads, 16) for heads in (2, 1, 1))
        lengths = torch.tensor([3, 9, 15], dtype=torch.int32)
        out, lse = ag_attention(
            q, k, v, world=world, cu_seqlens=lengths, scale=0.0, with_lse=True, causal=False
        )
        return v, out, lse

    (v0, out0, lse0), (v1, out1, lse1) = ranks(main, 2)
    v, out, lse = torch.cat([v0, v1]), torch.cat([out0, out1]), torch.cat([lse0, lse1])
    assert not out[:3].any() and not out[15:].any()
    assert (lse[:3] == -torch.inf).all() and (lse[15:] == -torch.inf).all()
    for first, end in ((3, 9), (9, 15)):
        mean = v[first:end].mean(0).expand(end - first, 2, 16)
        torch.testing.assert_close(out[first:end], mean)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["ce_push", slow("sm_push")])
def test_called_in_turns_recorded_and_replayed_on_one_slot(ranks, transport, monkeypatch):
    """The bits are those of every other schedule."""
    monkeypatch.setenv("WEFT_SLOTS", "1")
    problem = problem_for(3, 41)
    other = problem_for(3, 20, causal=False, sequences=0)

    def main():
        world = weft.init()
        inputs = [op.make_inputs(problem, world.rank, seed) for seed in range(2)]
        config = config_for(problem, transport)
        kept = {name: value.clone() for name, value in inputs[0].items()}
        first = [one.clone() for one in op.run(world, problem, kept, config)]
        check(first, problem, world.rank)
        with world.record() as recording:
            outputs = op.run(world, problem, kept, config)
        for seed, one in enumerate(inputs):
            for name, value in one.items():
                kept[name].copy_(value)
            for output in outputs:
                output.fill_(torch.nan)
            recording.replay()
            check([one.clone() for one in outputs], problem, world.rank, seed)
            mine = op.make_inputs(other, world.rank)
            found = op.run(world, other, mine, config_for(other, transport))
            check(found, other, world.rank)
        world.close()
        return first

    outs = [ranks(main, 3, seed=seed) for seed in range(2)]
    for left, right in zip(*outs, strict=True):
        assert all(map(torch.equal, left, right))


@pytest.mark.parametrize("num_sms", [1, slow(3)])
def test_machines_with_few_sms(ranks, num_sms):
    ranks(partial(call_once, problem_for(2, 40)), 2, num_sms=num_sms)


# ---- what it waits for


@given(
    st.integers(1, 5), st.integers(1, 60), st.integers(1, 6), st.integers(0, 4), st.integers(0, 59),
    st.integers(1, 60),
)  # fmt: skip
@settings(max_examples=300)
def test_segments_cover_what_a_tile_meets_once(num_ranks, m, chunks, rank, lo, hi):
    """Own keys are segment 0; the nearest rank before this one comes next, the last rank then."""
    rank, lo = rank % num_ranks, min(lo, m - 1)
    hi = min(max(hi, lo + 1), m)
    problem = problem_for(num_ranks, m)
    shards = shards_of(problem, Config(chunks=chunks))
    at, args = tiles.Met(0, 0, lo, hi, lo, hi), Arrival(*[None] * 8, rank, shards, None)
    met = [*range(*problem.shard(rank))]
    sources = []
    for segment in range(1, as_python(segments_of)(at, args)):
        source, chunk, first, end = as_python(chunk_of)(at, segment, args)
        assert 0 <= chunk < chunks and problem.shard(source)[0] <= first
        met += range(first, end)
        sources.append(source)
    assert len(set(met)) == len(met) and set(range(lo, hi)) <= set(met)
    order = list(dict.fromkeys(sources))
    before = [one for one in order if one < rank]
    assert order == sorted(before, reverse=True) + sorted(set(order) - set(before), reverse=True)
    assert rank not in order


@pytest.mark.parametrize(
    ("lengths", "waits"), [([0, 16, 32], False), ([0, 15, 32], True)], ids=["apart", "spanning"]
)
def test_a_tile_waits_only_for_what_its_sequences_have(ranks, lengths, waits):
    """Rank 0 never sends: rank 1 ends all the same where no sequence spans both."""
    problem = problem_for(2, 32, causal=False)

    def main():
        world = weft.init()
        mine = op.make_inputs(problem, world.rank)
        mine["cu_seqlens"] = torch.tensor(lengths, dtype=torch.int32)
        call = GatheredAttention(world, problem, config_for(problem, "sm_push"))
        slot = world.workspace("ag_attention", signals=call.signals, shared=call.buffers)
        out = torch.zeros_like(mine["q"])
        if world.rank == 1:
            tensors = (mine["q"], mine["k"], mine["v"], out, out[:, :, 0].clone())
            call.attend(slot, (*tensors, mine["cu_seqlens"]))
        return out

    if waits:
        with pytest.raises(FindingError, match="rows_ready"):
            ranks(main, 2)
    else:
        assert ranks(main, 2)[1].any()


# ---- what it is measured against


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("sequences", [0, 5])
def test_the_baseline_gives_the_answer(ranks, sequences, causal, monkeypatch):
    """Of several sequences too, of which own queries are the last of their keys."""
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash_attention.forward)
    problem = problem_for(3, 31, "bfloat16", sequences=sequences, causal=causal)

    def main():
        torch.distributed.init_process_group()
        case = Case(weft.init(), op, problem, l2_bytes=1 << 20)
        for index, call in enumerate(op.baselines["nccl_attention"](case).calls):
            assert case.error(index, call()) <= case.tolerance

    ranks(main, 3)


# ---- what it refuses


def test_what_does_not_fit(ranks):
    def main():
        world = weft.init()
        q, k = torch.ones(4, 4, 8), torch.ones(4, 2, 8)
        call = partial(ag_attention, world=world)
        with pytest.raises(ShapeError, match=r"q has shape \(4, 32\); it must be \[tokens"):
            call(q.flatten(1), k, k)
        with pytest.raises(ShapeError, match=r"v has shape \(4, 1, 8\); .*, with kv_heads=2 as"):
            call(q, k, k[:, :1].contiguous())
        with pytest.raises(ShapeError, match="q has 4 heads, k and v have 3; each head of k"):
            call(q, torch.ones(4, 3, 8), torch.ones(4, 3, 8))
        with pytest.raises(DtypeError, match="q is torch.float32 and k torch.float16; convert"):
            call(q, k.half(), k.half())
        with pytest.raises(ShapeError, match="k of shape .* contiguous"):
            call(q, torch.ones(2, 4, 8).transpose(0, 1), k)
        with pytest.raises(ShapeError, match="passes q with 4 rows, but of m=11 .* pass m="):
            call(q, k, k, m=11)
        with pytest.raises(ShapeError, match=r"with 4 rows, but of m=11 it holds [56] \(zigzag\)"):
            call(q, k, k, m=11, zigzag=True)
        with pytest.raises(ShapeError, match="heads of d=300; they have 1 to 256"):
            call(torch.ones(4, 1, 300), torch.ones(4, 1, 300), torch.ones(4, 1, 300))
        with pytest.raises(DtypeError, match=r"torch.int64; pass cu_seqlens.to\(torch.int32\)"):
            call(q, k, k, cu_seqlens=torch.tensor([0, 8]))
        with pytest.raises(ShapeError, match=r"cu_seqlens has shape \(1,\)"):
            call(q, k, k, cu_seqlens=torch.zeros(1, dtype=torch.int32))
        with pytest.raises(ShapeError, match=r"out has shape \(4, 2, 8\); the result is"):
            call(q, k, k, out=torch.ones(4, 2, 8))

    ranks(main, 2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"transport": "ring"}, "transport='ring'; it must be one of ce_push, sm_push"),
        ({"pack": 3}, "pack=3; heads of a tile share their keys, so it must divide 2"),
        ({"tile_n": 48}, "tile_n=48; it must be a power of two"),
        ({"num_warps": 3}, "num_warps=3"),
        ({"chunks": 0}, "chunks=0"),
        ({"pushers": 132}, "pushers=132; it must be from 1 to 131"),
        ({"tile_n": 1024}, "tile_n=1024 with 2 stages and d=128 needs .* take fewer stages"),
    ],
)
def test_configurations_that_cannot_be(changes, words):
    with pytest.raises(ConfigError, match=words):
        replace(Config(), **changes).check(problem_for(2, 64, "float16", d=128), TARGETS["cuda:90"])
    far = problem_for(3, 64, nodes=(2, 1))
    with pytest.raises(
        ConfigError, match="transport='ce_push' on 2 nodes; .* take transport='sm_push'"
    ):
        Config().check(far, TARGETS["cuda:90"])


@pytest.mark.parametrize("target", TARGETS.values(), ids=str)
@pytest.mark.parametrize("d", [16, 64, 80, 128, 256])
def test_choices_are_checked(target, d):
    for dtype in op.dtypes:
        for m in (1, 512, 65536):
            problem = problem_for(4, m, dtype, q_heads=32, kv_heads=8, d=d)
            for config in candidates(problem, target):
                config.check(problem, target)


# ---- compiled


@pytest.mark.slow
@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize(
    ("target", "d", "dtype"),
    [
        ("cuda:90", 128, "bfloat16"),
        *(
            slow(*one)
            for one in [
                ("cuda:80", 128, "bfloat16"),
                ("cuda:90", 256, "bfloat16"),
                ("cuda:90", 128, "float32"),
                ("cuda:100", 64, "float16"),
                ("cuda:100", 256, "bfloat16"),
                ("hip:gfx942", 128, "bfloat16"),
            ]
        ),
    ],
)
def test_compiles_keeps_its_waits_and_spills_nothing(target, d, dtype, zigzag):
    sizes = {"q_heads": 32, "kv_heads": 8, "d": d, "sequences": 8, "zigzag": zigzag}
    problem = problem_for(4, 16384, dtype, **sizes)
    there = TARGETS[target]
    kind, text = FORMATS[there.backend]
    for fn, record in op.kernels(problem, next(candidates(problem, there)), there):
        binary = triton_api.compile_kernel(fn, record, there)
        report = compiled(binary, there)
        assert report.ok, "\n".join(map(str, report.findings))
        most = 24 if zigzag and dtype == "float32" else 0  # products without tensor cores
        assert (stack_bytes(there, binary.asm[kind], binary.asm[text]) or 0) <= most
        if "attend" in record.name and dtype != "float32" and there.backend == "cuda":
            assert "cp.async" in binary.asm["ptx"]
