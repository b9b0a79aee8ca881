"""A script by somebody else: raw Triton atomics, pointer tables, torch.distributed; no `wl` at all.

It runs as it is; a race and a deadlock planted in it are reported with their lines.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weft.tools.main import main

SCRIPT = """
import argparse
import os

import torch
import torch.distributed as dist
import triton
import triton.language as tl

import weft


@triton.jit
def exchange(inbox_ptrs, flag_ptrs, outbox, result, rank, num_ranks, size, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < size
    peer = (rank + 1) % num_ranks
    inbox_of_peer = tl.load(inbox_ptrs + peer).to(tl.pointer_type(tl.float32))
    flag_of_peer = tl.load(flag_ptrs + peer).to(tl.pointer_type(tl.int32)) + tl.program_id(0)
    tl.store(inbox_of_peer + offsets, tl.load(outbox + offsets, mask=mask), mask=mask)
    tl.debug_barrier()
    tl.atomic_add(flag_of_peer, 1, sem="release", scope="sys")

    flag = tl.load(flag_ptrs + rank).to(tl.pointer_type(tl.int32)) + tl.program_id(0)
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") < 1:
        pass
    inbox = tl.load(inbox_ptrs + rank).to(tl.pointer_type(tl.float32))
    tl.store(result + offsets, tl.load(inbox + offsets, mask=mask), mask=mask)


def run(size):
    dist.init_process_group("nccl", init_method="env://")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    assert rank == int(os.environ["RANK"])
    world = weft.init()
    torch.manual_seed(7 + rank)
    outbox = torch.randn(size, device=world.device)
    result = torch.empty_like(outbox)
    inbox = world.empty((size,), torch.float32)
    flags = world.signals(triton.cdiv(size, 64))
    grid = lambda meta: (triton.cdiv(size, meta["BLOCK"]),)
    exchange[grid](world.pointers(inbox), world.pointers(flags), outbox, result, rank, num_ranks,
                   size, BLOCK=64)
    everything = [torch.empty_like(outbox) for _ in range(num_ranks)]
    dist.all_gather(everything, outbox)
    assert torch.equal(result, everything[(rank - 1) % num_ranks])
    if rank == 0:
        print("exchanged", size, "numbers among", num_ranks, "ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, default=200)
    run(parser.parse_args().size)
"""
STORE = "    tl.store(inbox_of_peer + offsets, tl.load(outbox + offsets, mask=mask), mask=mask)"
READ = "    tl.store(result + offsets, tl.load(inbox + offsets, mask=mask), mask=mask)"
SPIN = '    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") < 1:'
ADD = '    tl.atomic_add(flag_of_peer, 1, sem="release", scope="sys")'


@pytest.fixture
def emulate(tmp_path: Path, capsys):
    """Run the script with lines replaced: exit code, report, and what line a number stands for."""

    def run(*changes: tuple[str, str], words: str = "--ranks 4"):
        text = SCRIPT
        for before, after in changes:
            assert text.count(before) == 1
            text = text.replace(before, after)
        path = tmp_path / "theirs.py"
        path.write_text(text)
        code = main(["emulate", str(path), "--json", *words.split()])
        told = capsys.readouterr()
        return code, json.loads(told.out), text.splitlines(), told.err

    return run


def test_it_runs_as_it_is(emulate):
    code, report, _, said = emulate(words="--ranks 4 -- --size 300")
    assert code == 0, report
    assert "exchanged 300 numbers among 4 ranks" in said


@pytest.mark.parametrize(
    "change",
    [
        (SPIN, '    while tl.atomic_add(flag, 0, sem="relaxed", scope="sys") < 1:'),
        (SPIN, '    while tl.atomic_add(flag, 0, sem="acquire", scope="gpu") < 1:'),
        (ADD, '    tl.atomic_add(flag_of_peer, 1, sem="relaxed", scope="sys")'),
        (ADD, '    tl.atomic_add(flag_of_peer, 1, sem="release", scope="gpu")'),
    ],
    ids=["relaxed wait", "gpu-scoped wait", "relaxed signal", "gpu-scoped signal"],
)
def test_its_race_is_reported_with_both_lines(emulate, change: tuple[str, str]):
    code, report, lines, _ = emulate(change)
    assert code == 1 and report["ok"] is False
    pairs = [{lines[race[side]["line"] - 1] for side in ("first", "second")}
             for race in report["races"]]  # fmt: skip
    assert {STORE, READ} in pairs, report


def test_its_deadlock_is_reported_with_the_waiting_line(emulate):
    code, report, lines, _ = emulate((ADD, "    pass"))
    assert code == 1
    waits = {lines[deadlock["first"]["line"] - 1] for deadlock in report["deadlocks"]}
    assert SPIN in waits, report


def test_without_a_wait_unwritten_memory_is_read(emulate):
    code, report, lines, _ = emulate((SPIN, "    if size < 0:"))
    found = [*report["races"], *report.get("others", [])]
    assert code == 1 and READ in {lines[one["first"]["line"] - 1] for one in found}, report


def test_signals_before_data(emulate):
    code, report, lines, _ = emulate((STORE + "\n", ""), (ADD, ADD + "\n" + STORE))
    assert code == 1 and report["races"], report
