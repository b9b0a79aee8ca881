"""ag_wgrad: right in every way it can be called, by every transport, whichever is gathered."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from multiplying import EMU, call_every_way

import weft
from weft.base.errors import CallOrderError, ConfigError, DtypeError, ShapeError
from weft.base.target import TARGETS
from weft.language import triton_api
from weft.ops.ag_wgrad import Config, Problem, ag_wgrad, candidates, op
from weft.verify import compiled

# Ranks, m, n, k.
AWKWARD = {
    "shards-of-13": (4, 52, 20, 40),
    "nothing-divides": (3, 71, 35, 18),
    "one-row-each": (2, 2, 32, 16),
    "one-rank": (1, 40, 24, 32),
    "last-shard-empty": (4, 9, 16, 16),
    "tile-k-divides": (2, 64, 48, 32),
}
FEW = {"ce_push": 2, "sm_push": 1}
QUICK = (
    "nothing-divides-sm_push",
    "tile-k-divides-sm_push",
    "one-rank-sm_push",
    "one-row-each-ce_push",
)
WAYS = [
    pytest.param(
        transport, *shape, i % 2 == 1, id=f"{name}-{transport}",
        marks=() if f"{name}-{transport}" in QUICK else pytest.mark.slow,
    )
    for transport, step in FEW.items()
    for i, (name, shape) in enumerate(list(AWKWARD.items())[::step])
]  # fmt: skip


def config_for(problem: Problem, transport: str, **changes: int) -> Config:
    """Small tiles, so that there are several, in two turns."""
    config = next(c for c in candidates(problem, EMU) if c.transport == transport)
    small = {"tile_m": 16, "tile_n": 16, "tile_k": 16, "split_k": 2}
    return replace(config, **{**small, **changes})


@pytest.mark.few(1)
@pytest.mark.parametrize(("transport", "num_ranks", "m", "n", "k", "is_nk"), WAYS)
def test_every_way_of_calling(ranks, transport, num_ranks, m, n, k, is_nk):
    problem = Problem(m, n, k, num_ranks, "float32", b_is_nk=is_nk)
    ranks(lambda: call_every_way(op, problem, config_for(problem, transport)), num_ranks)


@pytest.mark.parametrize(
    ("dtype", "out_dtype"),
    [("bfloat16", "float32"), pytest.param("float16", "", marks=pytest.mark.slow)],
)
def test_half_precision(ranks, dtype, out_dtype):
    problem = Problem(48, 24, 40, 3, dtype, out_dtype)
    ranks(lambda: call_every_way(op, problem, config_for(problem, "sm_push")), 3)


@pytest.mark.parametrize("split", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_any_schedule_gives_the_same_bits(ranks, monkeypatch, split):
    """The order of sums is fixed; with one slot only credits keep calls apart."""
    monkeypatch.setenv("WEFT_SLOTS", "1")
    problem = Problem(39, 24, 20, 3, "float32")

    def main():
        with weft.init() as world:
            mine = op.make_inputs(problem, world.rank)
            config = config_for(problem, "sm_push", split_k=split)
            return [op.run(world, problem, mine, config) for _ in range(2)]

    runs = [ranks(main, 3, seed=seed) for seed in range(3)]
    for rank in range(3):
        first, *others = [out for run in runs for out in run[rank]]
        assert all(torch.equal(first, other) for other in others)


def test_machines_with_few_sms(ranks):
    """One program does all turns of all tiles."""
    problem = Problem(33, 24, 40, 2, "float32")

    def main():
        with weft.init() as world:
            return op.run(world, problem, op.make_inputs(problem, world.rank))

    inputs = [op.make_inputs(problem, rank) for rank in range(2)]
    for out, want in zip(ranks(main, 2, num_sms=2), op.reference(problem, inputs), strict=True):
        torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-4)


def test_rows_that_have_not_come_are_not_read(ranks):
    """What lies behind a segment's end may be anything, infinite in the operand that is whole."""

    def main():
        with weft.init() as world:
            x, y = torch.ones(9 - 5 * world.rank, 16)[:5], torch.ones(9, 16)
            return ag_wgrad(x, y, world=world, config=config_for(Problem(9, 16, 16, 2), "sm_push"))

    for out in ranks(main, 2):
        assert torch.equal(out, torch.full((16, 16), 9.0))


@pytest.mark.parametrize("shape", [(0, 16, 16), (8, 0, 16), (8, 16, 0)], ids=str)
def test_nothing_to_do(ranks, shape):
    problem = Problem(*shape, 2, "float32")

    def main():
        with weft.init() as world:
            out = op.run(world, problem, op.make_inputs(problem, world.rank))
            assert out.shape == problem.result and not out.any()

    ranks(main, 2)


# ---- what it refuses


def test_what_does_not_fit(ranks):
    def main():
        with weft.init() as world:
            x, y = torch.ones(4, 8), torch.ones(8, 4)
            with pytest.raises(ShapeError, match=r"passes x with 4 rows, but of m=8 it holds 8"):
                ag_wgrad(x, y, world=world)
            with pytest.raises(ShapeError, match="gathered='both'; it is 'x' or 'y'"):
                ag_wgrad(x, x, world=world, gathered="both")
            with pytest.raises(DtypeError, match=r"x is torch.float32 and y torch.float16"):
                ag_wgrad(x, x.half(), world=world)
            with pytest.raises(DtypeError, match="int32; it takes float16"):
                ag_wgrad(x.int(), x.int(), world=world)
            with pytest.raises(
                ShapeError, match=r"y has shape \(4,\); it must be \[rows_of_y, q\]"
            ):
                ag_wgrad(x, x[:, 0], world=world)

    ranks(main, 1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"transport": "ll"}, "ag_wgrad: transport='ll'; it must be one of ce_push, sm_push"),
        ({"template": "sm90"}, "ag_wgrad: template='sm90'; it must be one of plain"),
        ({"split_k": 9}, "ag_wgrad: split_k=9; it must be from 1 to 8"),
        ({"tile_k": 100}, "ag_wgrad: tile_k=100"),
    ],
)
def test_configurations_that_cannot_run(change, words):
    problem = Problem(8192, 2560, 8192, 4)
    with pytest.raises(ConfigError, match=words):
        replace(Config(), **change).check(problem, TARGETS["cuda:90"])


def test_ranks_that_call_with_different_rows(ranks):
    def main():
        with weft.init() as world:
            ag_wgrad(torch.ones(4, 8 + world.rank), torch.ones(8, 16), world=world)

    with pytest.raises(CallOrderError, match="ag_wgrad m=8,n=16,k=8"):
        ranks(main, 2)


# ---- configuration and code


@pytest.mark.parametrize("target", ["emu", "cuda:80", "cuda:90", "hip:gfx942"])
@pytest.mark.parametrize("shape", [(8192, 2560, 8192), (64, 256, 512), (291, 70, 50), (1, 8, 8)])
def test_every_candidate_passes_its_own_check(target, shape):
    target, problem = TARGETS[target], Problem(*shape, 4)
    found = list(candidates(problem, target))
    assert {"sm_push", "ce_push"} <= {config.transport for config in found}
    for config in found:
        config.check(problem, target)
        assert config.num_pushers < target.num_sms
    # A result of few tiles is split.
    tiles = found[0].blocking.num_tiles(*problem.result)
    assert (found[0].split_k > 1) == (tiles * 2 <= target.num_sms - 20)


COMPILED = [
    pytest.param("cuda:80", (4096, 2560, 8192), False, marks=pytest.mark.slow),
    *((target, (4096, 2560, 8192), False) for target in ("emu", "cuda:90")),
    pytest.param("cuda:90", (4096, 256, 512), True, marks=pytest.mark.slow),
    pytest.param("hip:gfx942", (291, 70, 50), True, marks=pytest.mark.slow),
]


@pytest.mark.few(1)
@pytest.mark.parametrize(("target", "shape", "is_nk"), COMPILED, ids=str)
def test_compiles_everywhere_and_keeps_its_waits(target, shape, is_nk):
    target = TARGETS[target]
    problem = Problem(*shape, 4, b_is_nk=is_nk)
    for fn, record in op.kernels(problem, None, target):
        binary = triton_api.compile_kernel(fn, record, target)
        if target.backend != "emu":
            report = compiled(binary, target)
            assert report.ok, "\n".join(map(str, report.findings))
        if target.backend == "cuda":
            assert "ld.local" not in binary.asm["ptx"] and "st.local" not in binary.asm["ptx"]


def test_is_found_by_its_name():
    assert weft.ops.ag_wgrad is ag_wgrad
    assert weft.ops.cards()["ag_wgrad"] is op
