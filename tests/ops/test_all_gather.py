"""all_gather: bit by bit in every way it can be called, by every transport, near and far."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from calling import COMPILED, Caller, cases, check_kernels, one_slot_for_all, transports

import weft
from weft.base.errors import ConfigError, DtypeError, FarPointerError, ShapeError
from weft.base.target import TARGETS
from weft.ops.all_gather import Config, Problem, all_gather, candidates, op
from weft.plan.vectors import width_of, words_in_vector

SHAPES = [
    {"m": 37, "n": 6},  # nothing divides, four-byte words
    {"m": 3, "n": 16},  # empty shards, whole vectors
    {"m": 24, "n": 35},  # two-byte words
    {"m": 1, "n": 1},
]


@pytest.mark.few(2)
@pytest.mark.parametrize(("nodes", "transport", "shape"), cases(op, SHAPES))
def test_every_way_of_calling(ranks, nodes, transport, shape):
    ranks(Caller(op, nodes, transport).every_way(shape, "bfloat16"), sum(nodes), nodes=nodes)


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [(3,), (2, 1)], ids=str)
def test_one_slot_twice_in_a_row_and_shapes_that_change(ranks, nodes, monkeypatch):
    one_slot_for_all(monkeypatch)
    shapes = [SHAPES[0], SHAPES[0], SHAPES[1], SHAPES[2], SHAPES[0]]
    for transport in transports(op, nodes):
        for seed in range(2):
            main = Caller(op, nodes, transport).in_turns(shapes, "float32")
            ranks(main, sum(nodes), nodes=nodes, seed=seed)


@pytest.mark.few(7)
@pytest.mark.parametrize("dtype", op.dtypes)
def test_any_dtype(ranks, dtype):
    ranks(Caller(op, (2,), "sm_push").in_turns([SHAPES[0]], dtype), 2)


def test_out_more_dimensions_and_rows_that_begin_anywhere(ranks):
    """One rank's tensors begin at 16 bytes, another's at 2: their channels must still agree."""

    def main():
        world = weft.init()
        store = torch.arange(2 * 3 * 8 + 1, dtype=torch.int16) + 100 * world.rank
        x = store[world.rank :][: 2 * 3 * 8].view(2, 3, 8)
        out = torch.empty(4, 3, 8, dtype=torch.int16)
        assert all_gather(x, world=world, out=out, config=Config("sm_push", channels=3)) is out
        assert torch.equal(out[2 * world.rank :][:2], x)
        return out

    first, second = ranks(main, 2)
    assert torch.equal(first, second)


@pytest.mark.parametrize("transport", ["sm_push", "ll"])
@pytest.mark.parametrize("off", [0, 1, 2])
def test_one_rank_whose_tensors_begin_elsewhere(ranks, transport, off):
    """Ranks that move one shard by accesses of different widths agree on what is where."""

    def main():
        world = weft.init()
        store = torch.arange(40, dtype=torch.uint8)
        x = store[world.rank * off :][:36].view(2, 18)
        out = torch.zeros(80, dtype=torch.uint8)[world.rank * off :][:72].view(4, 18)
        all_gather(x, world=world, out=out, config=Config(transport, channels=2, block=16))
        assert out[:2].flatten().tolist() == list(range(36))
        assert out[2:].flatten().tolist() == list(range(off, 36 + off))

    ranks(main, 2)


def test_nothing_to_do(ranks):
    def main():
        world = weft.init()
        assert all_gather(torch.ones(0, 4), world=world).shape == (0, 4)
        assert all_gather(torch.ones(3, 0), world=world).shape == (6, 0)

    ranks(main, 2)


# ---- signals


def test_peers_memory_is_not_read_from_another_node(ranks):
    with pytest.raises(ConfigError, match="transport='sm_pull' reaches into peers' memory.*relay"):
        Config("sm_pull").check(Problem(8, 8, 4, nodes=(2, 2)), TARGETS["emu"])
    unchecked = replace(Config("sm_pull"), channels=1)

    def main():
        world = weft.init()
        # The check is what keeps this from the far node.
        object.__setattr__(unchecked, "check", lambda *_: None)
        all_gather(torch.ones(2, 4), world=world, config=unchecked)

    with pytest.raises(FarPointerError):
        ranks(main, 2, nodes=(1, 1))


# ---- what it refuses


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"transport": "carrier_pigeon"},
            "'carrier_pigeon'; it must be one of sm_push, relay, ll",
        ),
        ({"channels": 0}, "channels=0; programs that wait for peers must all be resident"),
        ({"channels": 263}, "channels=263; .* cuda:90 takes 1 to 262 of 8 warps"),
        ({"block": 100}, "block=100"),
        ({"num_warps": 3}, "num_warps=3"),
    ],
)
def test_configurations_that_cannot_run(change, words):
    with pytest.raises(ConfigError, match=words):
        replace(Config("sm_push"), **change).check(Problem(64, 64, 4), TARGETS["cuda:90"])


@pytest.mark.parametrize(
    ("x", "keywords", "error", "words"),
    [
        (torch.ones(4, 8).t(), {}, ShapeError, r"x of shape \(8, 4\) has strides \(1, 8\)"),
        (torch.tensor(1.0), {}, ShapeError, "x is a scalar"),
        (torch.ones(4, 8), {"m": 9}, ShapeError, "passes x with 4 rows, but of m=9 it holds"),
        (torch.ones(4, 8), {"out": torch.ones(8, 7)}, ShapeError, r"the result is \(8, 8\)"),
        (torch.ones(4, 8), {"out": torch.ones(8, 8).half()}, DtypeError, "nothing is converted"),
        (torch.ones(4, 8).cfloat(), {}, DtypeError, "complex64"),
    ],
)
def test_tensors_that_do_not_fit(ranks, x, keywords, error, words):
    with pytest.raises(error, match=words):
        ranks(lambda: all_gather(x, world=weft.init(), **keywords), 2)


# ---- configuration and code


@pytest.mark.parametrize("target", TARGETS.values(), ids=str)
def test_choices_are_checked_and_follow_size_and_nodes(target):
    small, large = Problem(64, 64, 4), Problem(8192, 8192, 4)
    for problem in (small, large, replace(small, nodes=(2, 2))):
        found = list(candidates(problem, target))
        for config in found:
            config.check(problem, target)
    assert next(candidates(small, target)).transport == "ll"
    assert next(candidates(large, target)).transport == "sm_push"
    for num_ranks, transport in ((2, "sm_pull"), (4, "sm_push")):
        alike = Problem(2048, 8192, num_ranks, in_place=True)
        assert next(candidates(alike, target)).transport == transport
    assert next(candidates(replace(large, in_place=True), target)).transport == "ce_pull"
    assert next(candidates(replace(large, m=8191), target)).transport == "sm_push"
    assert next(candidates(replace(large, nodes=(2, 2)), target)).transport == "relay"


@pytest.mark.few(1)
@pytest.mark.parametrize(("target", "every"), COMPILED)
def test_compiles_everywhere_and_keeps_its_waits(target, every):
    check_kernels(op, target, every, {"m": 4096, "n": 4096}, "bfloat16")


def test_lines_are_16_bytes_wide_where_rows_allow():
    aligned = width_of(4096)
    assert aligned == 16 and words_in_vector(aligned) == 2
    assert [width_of(n) for n in (2, 7, 12, 24, 48)] == [2, 1, 4, 8, 16]


def test_a_single_element_may_have_any_stride(ranks):
    """It is contiguous, whatever it was cut from: found by a random program of the compiler."""

    def main():
        world = weft.init()
        x = torch.arange(3.0)[world.rank :: 3].as_strided((1, 1), (3, 3), world.rank)
        assert x.is_contiguous()
        assert all_gather(x, world=world).flatten().tolist() == [0.0, 1.0]
        world.close()

    ranks(main, 2)
