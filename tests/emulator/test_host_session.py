"""Sessions: plain Triton launches on emulated ranks, results, errors and isolation."""

from __future__ import annotations

import gc
import os
import random
import weakref
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

import weft
import weft.language as wl
from weft.emulator import active


@triton.jit
def add(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    total = tl.load(x_ptr + i, mask=mask) + tl.load(y_ptr + i, mask=mask)
    tl.store(out_ptr + i, total, mask=mask)


@triton.jit
def scale(x_ptr, factor, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(x_ptr + i, tl.load(x_ptr + i) * factor)


@triton.jit
def read_beyond(x_ptr, out_ptr):
    tl.store(out_ptr, tl.load(x_ptr + 1000))


@triton.jit
def wrong(x_ptr):
    tl.store(x_ptr, tl.arange(0, 4) + tl.arange(0, 8))


def test_a_plain_kernel_runs_on_every_rank():
    def main(rank):
        x, y = torch.full((1000,), float(rank)), torch.ones(1000)
        out = torch.empty(1000)
        add[lambda meta: (triton.cdiv(1000, meta["BLOCK"]),)](x, y, out, 1000, BLOCK=256)
        return out.sum().item()

    with weft.emulated(ranks=3) as ranks:
        assert ranks.run(main) == [1000.0, 2000.0, 3000.0]
        assert ranks.report.ok
    assert not active()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int32])
def test_dtypes_and_scalars(dtype):
    def main():
        x = torch.arange(8).to(dtype)
        scale[(1,)](x, 3, BLOCK=8)
        assert x.tolist() == [3 * i for i in range(8)]
        if dtype.is_floating_point:
            scale[(1,)](x, 0.5, BLOCK=8)
            assert x.tolist() == [1.5 * i for i in range(8)]

    with weft.emulated(ranks=1) as ranks:
        ranks.run(main)


def test_autotuned_and_heuristic_launches():
    @triton.autotune([triton.Config({"BLOCK": 8}), triton.Config({"BLOCK": 4})], key=[])
    @triton.jit
    def tuned(x_ptr, BLOCK: tl.constexpr):
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(x_ptr + i, tl.load(x_ptr + i) + 1)

    @triton.heuristics({"BLOCK": lambda args: 8})
    @triton.jit
    def guessed(x_ptr, BLOCK: tl.constexpr):
        i = tl.arange(0, BLOCK)
        tl.store(x_ptr + i, tl.load(x_ptr + i) + 1)

    def main():
        x = torch.zeros(8)
        guessed[(1,)](x)
        assert x.tolist() == [1.0] * 8
        tuned[lambda meta: (8 // meta["BLOCK"],)](x)
        assert x.tolist() == [2.0] * 8

    with weft.emulated(ranks=1) as ranks:
        ranks.run(main)


class Row(NamedTuple):
    x: object
    n: object
    factor: object


@triton.jit
def scale_row(row, flag, absent, offset, large, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    value = tl.load(row.x + i, mask=i < row.n, other=0.0)
    if flag:
        value += offset
    if absent is not None:
        value += 100
    value += (large // 1000000000000).to(tl.float32)
    tl.store(row.x + i, value * row.factor, mask=i < row.n)


@triton.jit
def double_blocks(source, target, M: tl.constexpr):
    row = tl.program_id(0) * M
    target.store([row, 0], source.load([row, 0]) * 2)


def test_named_tuples_numbers_flags_and_none():
    def main():
        x = torch.ones(8)
        scale_row[(1,)](Row(x, 6, tl.constexpr(3)), True, None, 0.5, 5 * 10**12, BLOCK=8)
        assert x.tolist() == [19.5] * 6 + [1.0] * 2
        scale_row[(1,)](Row(x, 1, tl.constexpr(2)), False, 3, 1.0, 5 * 10**12, BLOCK=8)
        assert x.tolist() == [249.0] + [19.5] * 5 + [1.0] * 2
        scale_row[(0,)](Row(x, 1, tl.constexpr(2)), False, 3, 1.0, 5 * 10**12, BLOCK=8)
        assert x[0].item() == 249.0

    with weft.emulated(ranks=1) as ranks:
        ranks.run(main)


def test_descriptors_made_on_the_host():
    def main():
        source, target = torch.arange(80.0).reshape(10, 8), torch.zeros(10, 8)
        descriptors = [TensorDescriptor.from_tensor(t, [4, 8]) for t in (source, target)]
        double_blocks[(3,)](*descriptors, M=4)
        assert torch.equal(target, source * 2)

    with weft.emulated(ranks=1) as ranks:
        ranks.run(main)
        assert ranks.report.ok


def test_do_bench_runs_the_kernel_without_a_clock():
    def main():
        x = torch.ones(8)
        triton.testing.do_bench(lambda: scale[(1,)](x, 2.0, BLOCK=8), warmup=1, rep=1)
        return x[0].item()

    with weft.emulated(ranks=1) as ranks:
        assert ranks.run(main)[0] >= 2.0


def test_the_device_has_the_sms_that_were_asked_for():
    def main():
        device = triton.runtime.driver.active
        return device.utils.get_device_properties(0)["multiprocessor_count"]

    with weft.emulated(ranks=1, num_sms=7) as ranks:
        assert ranks.run(main) == [7]


def test_a_process_is_what_every_rank_believes_to_be():
    before = dict(os.environ)

    def main(rank):
        assert os.environ["RANK"] == os.environ["LOCAL_RANK"] == str(rank)
        assert os.environ["WORLD_SIZE"] == os.environ["LOCAL_WORLD_SIZE"] == "3"
        os.environ["MINE"] = str(rank)
        torch.manual_seed(rank)
        random.seed(rank)
        np.random.seed(rank)
        dist.init_process_group("gloo")
        dist.barrier()
        drawn = (torch.rand(1).item(), random.random(), np.random.rand())
        dist.barrier()
        assert os.environ["MINE"] == str(rank)
        dist.destroy_process_group()
        return drawn

    state = torch.get_rng_state()
    with weft.emulated(ranks=3) as ranks:
        results = ranks.run(main)
    for rank, drawn in enumerate(results):
        torch.manual_seed(rank)
        random.seed(rank)
        np.random.seed(rank)
        assert drawn == (torch.rand(1).item(), random.random(), np.random.rand())
    torch.set_rng_state(state)
    assert dict(os.environ) == before


def test_ranks_print_whole_lines(capsys):
    """Text of a tensor waits for the device, and meanwhile another rank goes on."""

    def main():
        x = torch.zeros(1)
        scale[(1,)](x, 1.0, BLOCK=1)
        print("rank", os.environ["RANK"], x)
        print("no newline", end="")

    with weft.emulated(ranks=4) as ranks:
        ranks.run(main)
    out = capsys.readouterr().out
    lines = [f"rank {rank} tensor([0.])" for rank in range(4)]
    assert sorted(out.splitlines()[:4]) == lines and out.count("no newline") == 4


def test_nodes_share_the_ranks_unevenly():
    def main():
        return tuple(os.environ[key] for key in ("GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))

    with weft.emulated(ranks=5, nodes=2) as ranks:
        assert ranks.run(main) == [
            ("0", "0", "3"), ("0", "1", "3"), ("0", "2", "3"), ("1", "0", "2"), ("1", "1", "2"),
        ]  # fmt: skip


def test_the_same_seed_is_the_same_random_numbers():
    def main():
        return random.random(), np.random.rand(), torch.rand(1).item()

    def run(seed):
        with weft.emulated(ranks=2, seed=seed) as ranks:
            return ranks.run(main)

    assert run(1) == run(1)
    assert run(1)[0][0] != run(1)[1][0]


def test_later_runs_of_a_session_know_of_earlier_ones():
    def main(rank, x):
        scale[(1,)](x, 2.0, BLOCK=8)
        return None

    shared = torch.ones(8)
    with weft.emulated(ranks=1) as ranks:
        ranks.run(main, shared)
        ranks.run(main, shared)
    assert shared.tolist() == [4.0] * 8


def test_an_exception_of_one_rank_is_raised():
    def main(rank):
        if rank == 1:
            raise ValueError("rank one has had enough")
        dist.init_process_group()
        dist.barrier()

    with weft.emulated(ranks=2) as ranks, pytest.raises(ValueError, match="had enough"):
        ranks.run(main)


@pytest.mark.skipif(not hasattr(Exception, "add_note"), reason="notes came with Python 3.11")
def test_who_waits_for_a_rank_that_raised_is_noted():
    """Of this run alone: in the next nobody waits."""

    def main(rank, meets):
        if not dist.is_initialized():
            dist.init_process_group()
        if rank == 1:
            raise ValueError("rank 1 has had enough")
        if meets:
            dist.all_reduce(torch.ones(1))

    with weft.emulated(ranks=2) as session:
        notes = []
        for meets in (True, False):
            with pytest.raises(ValueError, match="had enough") as raised:
                session.run(main, meets)
            notes.append(raised.value.__notes__)
    assert notes[0][0] == notes[1][0] == "(raised on emulated rank 1)"
    assert "rank 0 waits for all_reduce(sum) on ranks [0, 1]: rank 1 did not" in notes[0][1]
    assert len(notes[1]) == 1


def test_out_of_bounds_is_raised_or_collected():
    def main():
        x, out = torch.zeros(8), torch.zeros(1)
        read_beyond[(1,)](x, out)

    with weft.emulated(ranks=1) as ranks, pytest.raises(weft.OutOfBoundsError, match="x_ptr"):
        ranks.run(main)
    with weft.emulated(ranks=1, collect=True) as ranks:
        ranks.run(main)
        (finding,) = ranks.report.findings
    assert finding.kind == "out of bounds"
    assert finding.first.file == __file__
    assert finding.first.kernel == "read_beyond"


def test_a_kernel_that_does_not_compile_names_the_users_line():
    def main():
        wrong[(1,)](torch.zeros(8))

    with weft.emulated(ranks=1) as ranks, pytest.raises(weft.CompileError) as caught:
        ranks.run(main)
    assert caught.value.place.outermost.source().startswith("tl.store(x_ptr, tl.arange(0, 4)")
    assert caught.value.message.startswith("wrong does not compile")


def test_bad_sessions():
    with pytest.raises(weft.UsageError, match="3 nodes"), weft.emulated(ranks=2, nodes=3):
        pass
    with weft.emulated(ranks=1) as ranks:
        with pytest.raises(weft.UsageError, match="nest"), weft.emulated(ranks=1):
            pass
        with pytest.raises(weft.UsageError, match="takes neither"):
            ranks.run(lambda a, b, c: None)
        with pytest.raises(weft.UsageError, match="not by a rank"):
            scale[(1,)](torch.ones(8), 2.0, BLOCK=8)
    with pytest.raises(weft.UsageError, match="block"):
        ranks.run(lambda: None)


@triton.jit
def wait_in_vain(world, ready):
    wl.wait(ready, at_least=1, world=world)


@pytest.mark.slow
def test_nothing_is_left_of_a_session_whose_programs_never_ended():
    """A suspended coroutine's frames are unknown to the garbage collector."""

    def main():
        world = weft.init()
        wait_in_vain[(2,)](world.arg, world.signals(1))

    with weft.emulated(ranks=2, collect=True) as session:
        session.run(main)
    assert {finding.kind for finding in session.report} == {"unsatisfiable wait"}
    machine = weakref.ref(session.machine)
    del session
    gc.collect()
    assert machine() is None
