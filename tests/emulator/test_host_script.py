"""SPMD scripts by somebody else: raw atomics, pointer tables, planted faults, exit codes."""

from __future__ import annotations

import textwrap

import pytest

import weft
from weft.emulator import run_script

ALL_REDUCE = """
import sys
import torch, triton, triton.language as tl
import weft

@triton.jit
def push(pointers, flags, src, rank, N_RANKS: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    value = tl.load(src + i)
    for p in range(N_RANKS):
        base = tl.load(pointers + p).to(tl.pointer_type(tl.float32))
        tl.store(base + rank * N + i, value)
        flag = tl.load(flags + p).to(tl.pointer_type(tl.int32))
        tl.atomic_add(flag + rank, 1, sem="release", scope="sys")

@triton.jit
def reduce(x, flag, out, N_RANKS: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    total = tl.zeros((N,), tl.float32)
    for p in range(N_RANKS):
        while tl.atomic_add(flag + p, 0, sem="acquire", scope="sys") < 1:
            pass
        total += tl.load(x + p * N + i)
    tl.store(out + i, total)

def main():
    world = weft.init()
    n = world.num_ranks
    x = world.empty((n, 64), torch.float32)
    arrived = world.signals(n)
    src = torch.full((64,), float(world.rank + 1), device=world.device)
    out = torch.empty(64, device=world.device)
    push[(1,)](world.pointers(x), world.pointers(arrived), src, world.rank, n, 64)
    reduce[(1,)](x, arrived, out, n, 64)
    expected = torch.full((64,), n * (n + 1) / 2)
    torch.testing.assert_close(out.cpu(), expected)
    print(f"rank {world.rank} of {n}: ok {sys.argv[1:]}")

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def script(tmp_path):
    def write(text: str, name: str = "script.py") -> str:
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return str(path)

    return write


def line_of(text: str, part: str) -> int:
    return next(i for i, line in enumerate(text.splitlines(), 1) if part in line)


@pytest.mark.parametrize("ranks, nodes, seed", [(1, 1, 0), (2, 1, 1), (4, 1, 2), (5, 1, 3)])
def test_raw_atomics_and_pointer_tables(script, capfd, ranks, nodes, seed):
    report = run_script(script(ALL_REDUCE), ["a", "-b"], ranks=ranks, nodes=nodes, seed=seed)
    assert report.ok, str(report)
    assert (report.op, report.ranks) == ("script.py", ranks)
    said = sorted(capfd.readouterr().out.splitlines())
    assert said == [f"rank {rank} of {ranks}: ok ['a', '-b']" for rank in range(ranks)]


@pytest.mark.parametrize("seed", range(3))
def test_a_planted_race_has_the_right_lines(script, seed):
    text = ALL_REDUCE.replace('sem="release"', 'sem="relaxed"')
    path = script(text)
    report = run_script(path, ranks=3, seed=seed)
    assert report.races and not report.deadlocks
    for race in report.races:
        assert {side.file for side in race.sides} == {path}
        assert {side.line for side in race.sides} == {
            line_of(text, "total += tl.load"), line_of(text, "tl.store(base"),
        }  # fmt: skip
        assert {side.kernel for side in race.sides} == {"push", "reduce"}
        assert {side.tensor.split("@")[0] for side in race.sides} == {"x"}


def test_a_planted_race_by_scope(script):
    text = ALL_REDUCE.replace('sem="release", scope="sys"', 'sem="release", scope="gpu"')
    report = run_script(script(text), ranks=2)
    assert report.races


@pytest.mark.parametrize("seed", range(3))
def test_a_planted_deadlock_has_the_right_line(script, seed):
    text = ALL_REDUCE.replace('"acquire", scope="sys") < 1', '"acquire", scope="sys") < 2')
    path = script(text, "deadlock.py")
    report = run_script(path, ranks=3, seed=seed)
    (first, *_) = report.deadlocks
    assert (first.first.file, first.first.line) == (path, line_of(text, "while tl.atomic_add"))
    assert first.first.tensor.split("@")[0] == "arrived"
    assert not report.races and not report.others


def test_the_same_kernel_in_another_file_is_named_there(script, tmp_path):
    first = script(ALL_REDUCE, "first.py")
    assert run_script(first, ranks=2).ok
    text = ALL_REDUCE.replace('sem="release"', 'sem="relaxed"')
    second = script(text, "second.py")
    report = run_script(second, ranks=2)
    assert {side.file for race in report.races for side in race.sides} == {second}


def test_modules_and_globals_are_each_ranks_own(script, tmp_path):
    (tmp_path / "neighbour.py").write_text("seen = []\n")
    text = """
        import sys
        import torch.distributed as dist
        import neighbour

        count = 0

        def step(rank):
            global count
            count += 1
            neighbour.seen.append(rank)
            dist.barrier()
            assert count == len(neighbour.seen)
            assert set(neighbour.seen) == {rank}
            assert sys.modules["__main__"].count == count
            assert sys.modules["neighbour"] is neighbour

        dist.init_process_group()
        for _ in range(3):
            step(dist.get_rank())
        import late
        assert late.rank is None
        late.rank = dist.get_rank()
        dist.barrier()
        import late as again
        assert again.rank == dist.get_rank()
        """
    (tmp_path / "late.py").write_text("rank = None\n")
    import sys

    report = run_script(script(text), ranks=3)
    assert report.ok, str(report)
    assert "neighbour" not in sys.modules and "late" not in sys.modules
    assert str(tmp_path) not in sys.path


def test_a_neighbour_that_waits_while_it_is_imported(script, tmp_path):
    (tmp_path / "meets.py").write_text(
        "import torch.distributed as dist\n"
        "dist.init_process_group()\n"
        "dist.barrier()\n"
        "rank = dist.get_rank()\n"
    )
    text = """
        import os
        import meets
        assert meets.rank == int(os.environ["RANK"])
        del os.environ["HOME"]
        """
    import os

    home = os.environ["HOME"]
    report = run_script(script(text), ranks=3)
    assert report.ok, str(report)
    assert os.environ["HOME"] == home


def test_spawn_runs_each_ranks_part(script):
    text = """
        import torch, torch.distributed as dist
        import torch.multiprocessing as mp

        def worker(rank, size, word):
            dist.init_process_group("gloo", rank=rank, world_size=size)
            total = torch.ones(1)
            dist.all_reduce(total)
            assert total.item() == size and word == "hello"
            dist.destroy_process_group()

        if __name__ == "__main__":
            mp.spawn(worker, args=(3, "hello"), nprocs=3)
        """
    path = script(text)
    assert run_script(path, ranks=3).ok
    (finding,) = run_script(path, ranks=2).findings
    assert "run it with --ranks 3" in finding.message


def test_an_exception_is_a_finding_with_its_line(script):
    text = """
        import torch

        def helper(x):
            torch.testing.assert_close(x, torch.ones(3))

        helper(torch.zeros(3))
        """
    path = script(text)
    report = run_script(path, ranks=2)
    assert [finding.kind for finding in report.others] == ["error"]
    side = report.others[0].first
    assert (side.file, side.line, side.rank) == (path, 5, 0)
    assert "AssertionError" in report.others[0].message


def test_one_rank_that_fails_is_the_cause_and_the_others_are_not_blamed(script):
    text = """
        import torch.distributed as dist
        dist.init_process_group()
        if dist.get_rank() == 1:
            raise RuntimeError("no luck")
        dist.barrier()
        """
    report = run_script(script(text), ranks=3)
    assert [finding.message for finding in report.findings] == ["RuntimeError: no luck"]


@pytest.mark.parametrize("code, ok", [("0", True), ("None", True), ("3", False), ("'bad'", False)])
def test_exit_codes(script, code, ok):
    assert run_script(script(f"import sys\nsys.exit({code})\n"), ranks=2).ok is ok


@pytest.mark.slow
def test_a_kernel_that_triton_cannot_compile(script):
    text = """
        import torch, triton, triton.language as tl

        @triton.jit
        def kernel(x):
            i = tl.arange(0, 7)
            tl.store(x + i, 0.0)

        kernel[(1,)](torch.zeros(8))
        """
    path = script(text)
    (finding,) = run_script(path, ranks=2).findings
    assert (finding.first.file, finding.first.line) == (path, 6)
    assert finding.message.startswith("CompileError")
    assert "power of 2" in finding.message


def test_no_script_and_no_python(script, tmp_path):
    with pytest.raises(weft.UsageError, match="cannot read"):
        run_script(str(tmp_path / "nothing.py"))
    with pytest.raises(weft.UsageError, match="is not Python"):
        run_script(script("def ("))


WORLD_ITSELF = """
import torch, triton, triton.language as tl, weft
import weft.language as wl

@triton.jit
def fill(world, row):
    tl.store(row, wl.rank(world))

world = weft.init()
fill[(1,)](world, world.empty((1,), torch.int32))  # here
"""

GENERATED = """
exec("def refuse():\\n    raise ValueError(3)")
refuse()
"""


def test_a_world_in_place_of_its_argument(script):
    report = run_script(script(WORLD_ITSELF), [], ranks=2, seed=0)
    (found,) = report.others
    assert "pass world.arg" in found.remedy
    assert WORLD_ITSELF.splitlines()[found.first.line - 1].endswith("# here")


def test_an_error_below_generated_code_is_at_a_line_that_can_be_shown(script):
    report = run_script(script(GENERATED), [], ranks=1, seed=0)
    (found,) = report.others
    assert found.first.file.endswith("script.py")
