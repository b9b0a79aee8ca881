"""Channels and workers on emulated ranks: sound programs, each order left out in turn."""

from __future__ import annotations

import channel_kernels
import language_kernels as kernels
import pytest
import torch
from language_kernels import GPUS

import weft
import weft.language as wl
from weft.base.records import KernelRecord
from weft.base.target import TARGETS
from weft.language import triton_api
from weft.language.mapping import StaticMapping
from weft.verify import compiled


def gathering(rows=37, cols=12, chunks=2, push=4, use=8, programs=2, rounds=2, barrier=True,
              **leave_out):  # fmt: skip
    flags = {"NOTIFY": True, "WAIT": True, "CREDIT": False, **leave_out}

    def main():
        world = weft.init()
        channel = world.channel(
            *("rows", (rows, cols), torch.float32),
            chunks=chunks, push_rows=push, credits=flags["CREDIT"],
        )  # fmt: skip
        torch.manual_seed(0)
        whole = torch.randn(rounds, rows, cols)
        outs = torch.zeros(rounds, rows, cols)
        used = channel.consumed(use)
        for turn in range(rounds):
            x = whole[turn, channel.rows_of(world.rank)].contiguous()
            channel_kernels.gather[(programs,)](
                world.arg, channel.produced(), used, x, outs[turn], -(-rows // use),
                PER_RANK=channel.tiles_per_rank, ROWS=push, USED_ROWS=use, COLS=16, **flags,
            )  # fmt: skip
            channel.advance()
            if barrier:
                world.barrier()
        world.synchronize()
        return torch.equal(outs, whole)

    return main


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "rows, chunks, push, use", [(37, 2, 4, 8), (5, 3, 2, 16), (64, 4, 8, 4), (3, 1, 4, 2)]
)
def test_tiles_of_any_extent_meet_on_a_channel(ranks, num_ranks, rows, chunks, push, use):
    main = gathering(rows=rows, chunks=chunks, push=push, use=use)
    assert ranks(main, num_ranks, seed=rows) == [True] * num_ranks


def test_far_ranks_are_pushed_to(ranks):
    assert ranks(gathering(), 4, nodes=2) == [True] * 4


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("nodes", [1, 2])
def test_credits_instead_of_a_barrier(ranks, seed, nodes):
    main = gathering(rounds=4, barrier=False, CREDIT=True)
    assert ranks(main, 4, nodes=nodes, seed=seed) == [True] * 4


def test_without_credits_and_barrier_a_round_runs_over_the_last(ranks):
    """What a fast rank pushes, a slow one may still be about to read."""
    reports = [
        ranks(gathering(rounds=3, barrier=False), 3, collect=True, seed=seed) for seed in range(3)
    ]
    for report in reports:
        assert {finding.kind for finding in report.findings} == {"race"}, str(report)


@pytest.mark.parametrize("leave_out, kind", [("NOTIFY", "unsatisfiable wait"), ("WAIT", "race")])
@pytest.mark.parametrize("seed", range(2))
def test_each_half_that_is_left_out_is_found(ranks, leave_out, kind, seed):
    report = ranks(gathering(**{leave_out: False}), 3, collect=True, seed=seed)
    assert kind in {finding.kind for finding in report.findings}, str(report)


@pytest.mark.parametrize("wait", [True, False])
def test_pulling_waits_for_the_peer(ranks, wait):
    rows, cols = 8, 16

    def main():
        world = weft.init()
        n = world.num_ranks
        channel = world.channel("parts", (n * rows, cols), torch.float32, push_rows=rows)
        out = torch.zeros(rows, cols)
        for _ in range(2):
            channel_kernels.pull[(1,)](
                world.arg, channel.produced(), out, ROWS=rows, COLS=cols, PEER_WAIT=wait
            )
            world.barrier()
            channel.advance()
        world.synchronize()
        return out[0, 0].item()

    if wait:
        assert ranks(main, 3) == [2.0, 3.0, 1.0]
    else:
        report = ranks(main, 3, collect=True)
        assert "race" in {finding.kind for finding in report.findings}


@pytest.mark.parametrize("credit", [True, False])
def test_credits_on_streams(ranks, credit):
    rows, cols, rounds = 11, 16, 3

    def main():
        world = weft.init()
        channel = world.channel("rows", (rows, cols), torch.float32, push_rows=3, credits=credit)
        whole = torch.arange(rows * cols, dtype=torch.float32).view(rows, cols)
        own = channel.rows_of(world.rank)
        right = [torch.zeros(rows, cols) for _ in range(rounds)]
        for turn in range(rounds):
            for peer in range(world.num_ranks):
                if credit:
                    channel.rank_wait_free(to=peer)
            channel.data[own] = whole[own] + turn
            for peer in range(world.num_ranks):
                channel.rank_copy(to=peer)
                channel.rank_notify(to=peer)
            for peer in range(world.num_ranks):
                channel.rank_wait(peer)
            channel_kernels.copy_rows[(1,)](
                channel.consumed(4), right[turn], right[turn], 3, COLS=cols, ROWS=4
            )
            channel.advance()
        world.synchronize()
        return all(torch.equal(out, whole + turn) for turn, out in enumerate(right))

    if credit:
        assert ranks(main, 3) == [True] * 3
    else:
        report = ranks(main, 3, collect=True)
        assert "race" in {finding.kind for finding in report.findings}, str(report)


@pytest.mark.parametrize("how", ["sound", "no wait", "no notify"])
def test_copy_engines_move_whole_parts(ranks, how):
    rows, cols = 11, 16

    def main():
        world = weft.init()
        channel = world.channel("rows", (rows, cols), torch.float32, chunks=2, push_rows=3)
        whole = torch.arange(rows * cols, dtype=torch.float32).view(rows, cols)
        own = channel.rows_of(world.rank)
        channel.data[own] = whole[own]
        out = torch.zeros(rows, cols)
        world.synchronize()
        with world.stream("copy") as stream:
            for step in range(world.num_ranks):
                peer = (world.rank + step) % world.num_ranks
                channel.rank_copy(to=peer)
                if how != "no notify":
                    channel.rank_notify(to=peer)
        if how != "no wait":
            for peer in range(world.num_ranks):
                channel.rank_wait(peer)
        channel_kernels.copy_rows[(1,)](channel.consumed(4), out, out, 3, COLS=cols, ROWS=4)
        world.current_stream().wait(stream)
        world.synchronize()
        return torch.equal(out, whole)

    if how == "sound":
        assert ranks(main, 3) == [True] * 3
    else:
        report = ranks(main, 3, collect=True)
        expected = {"no wait": {"race", "uninitialised"}, "no notify": {"unsatisfiable wait"}}[how]
        assert expected & {finding.kind for finding in report.findings}, str(report)


def test_bad_channels_are_told():
    def main():
        world = weft.init()
        with pytest.raises(weft.ShapeError, match="push_rows is 0; it must be 1"):
            world.channel("bad", (4, 4), torch.float32, push_rows=0)
        with pytest.raises(weft.UsageError, match="make it with credits=True"):
            world.channel("none", (4, 4), torch.float32).rank_wait_free(to=0)
        with pytest.raises(weft.ShapeError, match="rows, columns"):
            world.channel("bad", (4,), torch.float32)

    with weft.emulated(ranks=1) as session:
        session.run(main)


# ---------------------------------------------------------------------------------------------
# Workers


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("num_tasks", [0, 1, 7])
def test_every_task_is_taken_once_launch_after_launch(ranks, static, num_tasks):
    def main():
        world = weft.init()
        counter = torch.zeros(1, dtype=torch.int32)
        taken = torch.zeros(8, dtype=torch.int32)
        for _ in range(3):
            channel_kernels.draw[(3,)](world.arg, counter, taken, num_tasks, STATIC=static)
        world.synchronize()
        assert counter.item() == 0
        return taken.tolist()

    assert ranks(main, 1) == [[3] * num_tasks + [0] * (8 - num_tasks)]


DEPS = {0: [], 1: [0], 2: [0, 1], 3: [1], 4: [2, 3], 5: [4, 0]}


def tasks_of(world):
    first = torch.tensor([0, *torch.tensor([len(d) for d in DEPS.values()]).cumsum(0).tolist()])
    deps = torch.tensor([d for each in DEPS.values() for d in each])
    done = world.signals(len(DEPS), torch.int64, name="done")
    epoch = torch.zeros(1, dtype=torch.int64)
    return wl.TaskTable(first.to(torch.int32), deps.to(torch.int32), done, epoch)


def working(**leave_out):
    flags = {"DEPS": True, "RELEASE": True, **leave_out}

    def main():
        world = weft.init()
        values = world.zeros((len(DEPS),), torch.int64, name="values")
        split = wl.Split(communicate=1, compute=2).as_constexpr()
        channel_kernels.run_tasks[(3,)](
            world.arg, split, tasks_of(world), values, len(DEPS), **flags
        )
        world.barrier()
        world.synchronize()
        return values.tolist()

    return main


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_tasks_run_in_the_order_of_their_dependencies(ranks, num_ranks):
    expected = []
    for t, deps in DEPS.items():
        expected.append(t + sum(expected[d] for d in deps))
    assert ranks(working(), num_ranks, seed=num_ranks) == [expected] * num_ranks


@pytest.mark.parametrize("leave_out, kind", [("DEPS", "race"), ("RELEASE", "unsatisfiable wait")])
@pytest.mark.parametrize("seed", range(2))
def test_dependencies_that_are_left_out_are_found(ranks, leave_out, kind, seed):
    report = ranks(working(**{leave_out: False}), 2, collect=True, seed=seed)
    assert kind in {finding.kind for finding in report.findings}, str(report)


STATIC = StaticMapping.of(997, 4, chunks=4, push_rows=32, tile_rows=64)
TABLES = wl.DynamicMapping(*[None] * 5)


@pytest.mark.parametrize("mapping", [STATIC, TABLES], ids=["static", "tables"])
@pytest.mark.parametrize("target", [*GPUS, "emu"])
def test_it_compiles_and_the_check_finds_nothing(target, mapping):
    words = ["constexpr"] * 7 if mapping is STATIC else ["*i32"] * 5
    kernel = channel_kernels.channels_and_workers
    record = KernelRecord(
        name="channels_and_workers",
        signature={
            "world": kernels.WORLD,
            "channel": ("*fp32", "i32", *["*i64"] * 5, "constexpr", words),
            "tasks": ("*i32", "*i32", "*i64", "*i64"),
            "split": ["constexpr"] * 4,
            "out": "*fp32",
            "counter": "*i32",
            "n": "i32",
        },
        constants={
            "world": wl.WorldArg(None, 4, wl.language_version()),
            "channel": wl.ChannelArg(*[None] * 7, 1, mapping),
            "tasks": wl.TaskTable(*[None] * 4),
            "split": wl.Split(1, 2, 1, 1),
        },
        divisible_by_16=("out", "channel.data", "channel.cols"),
    )
    binary = triton_api.compile_kernel(kernel, record, TARGETS[target])
    if target != "emu":
        report = compiled(binary)
        assert report.ok, str(report)
