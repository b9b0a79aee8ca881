"""flash_decode: right in every way it can be called, whoever has which keys; one result for all."""

from __future__ import annotations

from dataclasses import replace

import flash_attention
import pytest
import torch
from compiling import check_code

import weft
from weft.base.dtypes import tolerance
from weft.base.errors import CallOrderError, ConfigError, DtypeError, OutOfBoundsError, ShapeError
from weft.base.target import TARGETS
from weft.ops.flash_decode import Config, candidates, flash_decode, op
from weft.tune.case import Case

EMU, SLOW = TARGETS["emu"], pytest.mark.slow
SHAPE = {"m": 3, "n": 40, "k": 24, "heads": 6, "kv_heads": 2, "variable": 1}


def problem_for(num_ranks, dtype="float32", nodes=(), **sizes):
    return op.make_problem(num_ranks, {**SHAPE, **sizes}, dtype, nodes)


def check(out, problem, inputs):
    expected = op.reference(problem, inputs)[0]
    assert out.shape == expected.shape and out.dtype == expected.dtype and not out.isnan().any()
    if expected.numel():
        error = (out.double() - expected.double()).norm()
        assert error <= tolerance(problem.dtype, problem.k) * expected.double().norm()


def all_inputs(problem, seed=0):
    """Of all ranks; what lies behind a sequence's keys is NaN."""
    found = [op.make_inputs(problem, rank, seed) for rank in range(problem.num_ranks)]
    for one in found:
        for b, length in enumerate(one["lengths"].tolist()):
            one["k_cache"][b, length:], one["v_cache"][b, length:] = torch.nan, torch.nan
    return found


def call_every_way(problem, config):
    """Eager, recorded and replayed with other lengths, another shape, eager again; on one rank."""
    world = weft.init()
    first, second = all_inputs(problem), all_inputs(problem, seed=1)
    mine = {name: one.clone() for name, one in first[world.rank].items()}
    outs = [op.run(world, problem, mine, config)]
    check(outs[0], problem, first)
    with world.record() as recording:
        out = op.run(world, problem, mine, config)
    for inputs in (first, second):
        for name, one in inputs[world.rank].items():
            mine[name].copy_(one)
        out.fill_(torch.nan)
        recording.replay()
        check(out.clone(), problem, inputs)
    other = replace(problem, m=problem.m + 2, n=problem.n // 2 + 1)
    check(op.run(world, other, all_inputs(other)[world.rank], config), other, all_inputs(other))
    for inputs in (second, first):
        outs.append(op.run(world, problem, inputs[world.rank], config))
        check(outs[-1], problem, inputs)
    world.close()
    return outs


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("nodes", "sizes"),
    [
        pytest.param((1,), {}, marks=SLOW),
        ((2,), {"m": 1, "n": 1, "k": 1, "heads": 1, "kv_heads": 1}),
        ((3,), {"m": 1, "n": 12, "heads": 17, "kv_heads": 1}),
        pytest.param((4,), {"n": 9, "variable": 0}, marks=SLOW),
        ((2, 1), {"n": 70}),
    ],
    ids=str,
)
def test_every_way_of_calling(ranks, nodes, sizes, monkeypatch):
    monkeypatch.setenv("WEFT_SLOTS", "1")
    problem = problem_for(sum(nodes), "float32", nodes, **sizes)
    layout = {"nodes": len(nodes)} if len(nodes) > 1 else {}
    for config in candidates(problem, EMU):
        found = ranks(lambda config=config: call_every_way(problem, config), sum(nodes), **layout)
        for outs in found[1:]:
            assert all(map(torch.equal, found[0], outs))


@pytest.mark.parametrize("dtype", [pytest.param("float16", marks=SLOW), "bfloat16"])
def test_half_precision(ranks, dtype):
    problem = problem_for(2, dtype)
    ranks(lambda: call_every_way(problem, None), 2)


@pytest.mark.few(1)
@pytest.mark.parametrize("transport", ["ll", "sm_push"])
def test_the_same_bits_in_every_schedule(ranks, transport):
    problem = problem_for(3, n=64)
    config = Config(transport, tile_n=16, splits=3, num_stages=1)
    inputs = all_inputs(problem)

    def main():
        world = weft.init()
        return op.run(world, problem, inputs[world.rank], config)

    first, *others = [out for seed in range(3) for out in ranks(main, 3, seed=seed)]
    assert all(torch.equal(first, one) for one in others)


@pytest.mark.parametrize("transport", ["ll", "sm_push"])
def test_who_has_no_keys_adds_nothing(ranks, transport):
    """A sequence that one rank has alone is what that rank gives by itself; of none, zeros."""
    problem = problem_for(3)
    inputs = all_inputs(problem)
    for rank, one in enumerate(inputs):
        one["lengths"].copy_(torch.tensor([0, 0 if rank != 1 else 33, 7 * rank]))
        one["k_cache"][:, :33], one["v_cache"][:, :33] = torch.randn(
            2, *one["k_cache"][:, :33].shape
        )
    config = Config(transport, tile_n=16, splits=2, num_stages=1)
    alone = replace(problem, num_ranks=1, nodes=(1,))

    def main():
        world = weft.init()
        return op.run(world, problem, inputs[world.rank], config)

    outs = ranks(main, 3)
    (by_itself,) = ranks(lambda: op.run(weft.init(), alone, inputs[1], config), 1)
    for out in outs:
        check(out, problem, inputs)
        assert not out[0].any() and torch.equal(out[1], by_itself[1])


def test_caches_of_any_size_and_in_pages(ranks):
    """One rank's in pages, another's with more room than it needs; given scale and out."""
    page, width = 4, 3
    problem = problem_for(2, n=page * width)
    inputs = all_inputs(problem)
    order = torch.randperm(problem.m * width)
    pages = {}
    for name in ("k_cache", "v_cache"):
        pages[name] = torch.empty(problem.m * width, page, problem.kv_heads, problem.k)
        pages[name][order] = inputs[0][name].reshape(pages[name].shape)
        inputs[1][name] = torch.nn.functional.pad(
            inputs[1][name], (0, 0, 0, 0, 0, 5), value=torch.nan
        )
    table = order.reshape(problem.m, width).to(torch.int32)

    def main():
        world = weft.init()
        mine = dict(inputs[world.rank])
        if world.rank == 0:
            mine.update(pages, block_table=table)
        out = torch.empty(problem.m, problem.heads, problem.k)
        assert flash_decode(**mine, world=world, out=out, scale=problem.scale) is out
        flash_decode(**mine, world=world, scale=0.0)
        return out

    for out in ranks(main, 2):
        check(out, problem, inputs)


@pytest.mark.parametrize("sizes", [{"m": 0}, {"n": 0}], ids=str)
def test_nothing_to_do(ranks, sizes):
    problem = problem_for(2, **sizes)
    for out in ranks(lambda: op.run(weft.init(), problem, op.make_inputs(problem, 0)), 2):
        assert out.shape == (problem.m, problem.heads, problem.k) and not out.any()


def test_what_does_not_fit(ranks):
    q, cache, lengths = torch.ones(2, 4, 8), torch.ones(2, 5, 2, 8), torch.ones(2).int()

    def main():
        world = weft.init()
        for wrong, error, words in [
            (
                (q[0], cache, cache, lengths),
                ShapeError,
                r"q has shape \(4, 8\); it must be \[batch, heads, d",
            ),
            ((q, cache, cache[:, :4].clone(), lengths), ShapeError, r"v_cache has shape \(2, 4, 2"),
            (
                (q, cache, cache, lengths[:1]),
                ShapeError,
                r"lengths has shape \(1,\); .* batch=2 as in q",
            ),
            (
                (q, cache, cache, lengths.long()),
                DtypeError,
                r"lengths torch.int64; pass lengths.to\(torch.int32\)",
            ),
            (
                (q.half(), cache, cache, lengths),
                DtypeError,
                "q is torch.float16 and k_cache torch.float32; convert",
            ),
            (
                (q[:, :3].clone(), cache, cache, lengths),
                ShapeError,
                "q has 3 heads, k and v have 2; each head of k",
            ),
            ((q, cache.transpose(1, 2), cache, lengths), ShapeError, "must be contiguous"),
        ]:
            with pytest.raises(error, match=words):
                flash_decode(*wrong, world=world)
        with pytest.raises(ShapeError, match=r"out has shape \(2, 4\)"):
            flash_decode(q, cache, cache, lengths, world=world, out=q[:, :, 0].contiguous())

    ranks(main, 1)
    with pytest.raises(ShapeError, match="heads of d=512; they have 1 to 256"):
        problem_for(2, k=512)
    for config, words in [
        (Config("ring"), "transport='ring'; it must be one of ll, sm_push"),
        (Config(tile_n=8), "tile_n=8; it must be a power of two from 16"),
        (Config(splits=0), "splits=0; it must be from 1"),
        (Config("ll"), "but the world has 2 nodes; take 'sm_push'"),
    ]:
        with pytest.raises(ConfigError, match=words):
            config.check(problem_for(2, nodes=(1, 1)), EMU)


def test_ranks_that_differ_are_told(ranks):
    def main():
        world = weft.init()
        problem = problem_for(2, m=2 + world.rank)
        op.run(world, problem, op.make_inputs(problem, world.rank))

    with pytest.raises(CallOrderError, match="flash_decode m=2.*flash_decode m=3"):
        ranks(main, 2)


def test_ranks_that_scale_otherwise_are_told(ranks):
    problem = problem_for(2)

    def main():
        world = weft.init()
        mine = op.make_inputs(problem, world.rank)
        flash_decode(**mine, world=world, scale=0.5)  # of the right ones more than one is kept
        flash_decode(**mine, world=world)
        flash_decode(**mine, world=world, scale=0.25 + world.rank)

    told = r"call 2 .* rank 0 calls flash_decode .* scale=0.25 .* rank 1 calls .* scale=1.25 "
    with pytest.raises(CallOrderError, match=told):
        ranks(main, 2)


@pytest.mark.parametrize("page", [-1, 6, 2**30])
def test_a_page_that_the_cache_has_not_is_found_on_the_emulator(ranks, page):
    problem = problem_for(2, n=8)
    inputs = all_inputs(problem)

    def main():
        world = weft.init()
        mine = dict(inputs[world.rank])
        for name in ("k_cache", "v_cache"):
            mine[name] = torch.zeros(6, 4, problem.kv_heads, problem.k)
        mine["lengths"] = torch.full_like(mine["lengths"], 8)
        table = torch.zeros(problem.m, 2, dtype=torch.int32)
        flash_decode(**mine, block_table=table, world=world)
        world.synchronize()
        table[0, 1] = page
        flash_decode(**mine, block_table=table, world=world)
        world.synchronize()

    with pytest.raises(OutOfBoundsError, match="attention_decode.py"):
        ranks(main, 2)


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 8, 16, 17, 20, 32, 33, 64])
def test_programs_have_units_alike(batch: int):
    """One with a unit more than others is what all wait for."""
    problem = problem_for(2, "bfloat16", m=batch, n=1 << 17, k=128, heads=32, kv_heads=8)
    config = next(candidates(problem, TARGETS["cuda:90"]))
    units, sms = 8 * batch * config.splits, TARGETS["cuda:90"].num_sms
    assert -(-units // sms) * sms <= 1.25 * units


def test_few_heads_go_by_packets_and_most_sms_have_keys():
    def first(**sizes):
        problem = problem_for(4, "bfloat16", **{"n": 32768, "k": 128, **sizes})
        return next(candidates(problem, TARGETS["cuda:90"]))

    few, many = first(m=1, heads=32, kv_heads=8), first(m=64, heads=64, kv_heads=8)
    assert (few.transport, many.transport) == ("ll", "sm_push")
    assert (few.splits, many.splits) == (16, 1), "128 units of 132 programs, and 512"
    assert first(m=1, n=300, heads=32, kv_heads=8).splits == 2
    assert first(m=1, heads=8, kv_heads=8, nodes=(2, 2)).transport == "sm_push"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "dtype", "sizes"),
    [
        ("cuda:90", "bfloat16", {"k": 128, "heads": 64, "kv_heads": 8}),
        pytest.param("cuda:90", "float32", {"k": 64, "heads": 4, "kv_heads": 2}, marks=SLOW),
        pytest.param("cuda:100", "bfloat16", {"k": 128, "heads": 64, "kv_heads": 1}, marks=SLOW),
        pytest.param("hip:gfx942", "bfloat16", {"k": 128, "heads": 32, "kv_heads": 8}, marks=SLOW),
    ],
    ids=str,
)
def test_compiles_and_keeps_its_waits(target, dtype, sizes):
    target = TARGETS[target]
    problem = problem_for(4, dtype, m=8, n=4096, **sizes)
    for config in candidates(problem, target):
        # Nothing by Triton 3.6 and 3.7; 24 bytes of push's by 3.9, on sm_90.
        check_code(op.kernels(problem, config, target), target, most_bytes=24)


@pytest.mark.parametrize("variable", [0, 1])
@pytest.mark.parametrize("name", ["attention_nccl_merge", "nccl_cache_attention"])
def test_baselines_give_the_answer(ranks, name, variable, monkeypatch):
    """With attention by plain torch where theirs needs a GPU: what is gathered and merged."""
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash_attention.forward)

    def main():
        torch.distributed.init_process_group()
        world = weft.init()
        case = Case(world, op, problem_for(2, variable=variable), l2_bytes=1 << 20)
        variant = op.baselines[name](case)
        for index, call in enumerate(variant.calls):
            assert case.error(index, call()) <= case.tolerance

    ranks(main, 2)


@pytest.mark.few(1)
@pytest.mark.parametrize("paged", [False, True])
def test_it_is_whole_in_a_compiled_graph_and_has_no_gradient(ranks, paged):
    def main():
        with weft.init() as world:
            q, cache = torch.randn(2, 4, 16), torch.randn(2, 8, 2, 16)
            lengths = torch.tensor([3, 8], dtype=torch.int32)
            table = torch.tensor([[1], [0]], dtype=torch.int32) if paged else None

            def decode(q, lengths):
                return flash_decode(q, cache, cache, lengths, world=world, block_table=table)

            # A function of this rank's: ranks share what torch compiled of one.
            compiled = torch.compile(lambda *given: decode(*given), fullgraph=True)
            assert torch.equal(compiled(q, lengths), decode(q, lengths))
            with pytest.raises(weft.UsageError, match=r"no gradient; call it under torch.no_grad"):
                decode(q.requires_grad_(), lengths).sum().backward()

    ranks(main, 2)
