"""Sizes that change call by call leave bounded memory and bounded caches behind."""

from __future__ import annotations

import gc
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_machine import run_ranks
from torchrun import on_two_and_four_gpus, once, torchrun

import weft
import weft.ops
from weft.base.errors import OutOfMemoryError
from weft.compiler import Settings, Shard, Tensor, all_gather, reduce_scatter, silu_mul
from weft.language import triton_api
from weft.ops import ag_gemm, card, gemm_ar, gemm_rs
from weft.plan.memory import Memory
from weft.plan.runner import PlanRunner
from weft.runtime import call_log, replays
from weft.tools.main import main as weft_verb

ROOT = Path(__file__).parent.parent.parent
SCRIPT = Path(__file__).parent / "scripts" / "sizes_that_grow.py"
GROWING = SCRIPT.with_name("heap_that_grows.py")
GREW = r"rank (\d) of \d: (\d+) MiB"
SAID = r"rank (\d) of \d: 6 sizes in \d+ bytes, all together take \d+"
K, N = 64, 32


class Nothing:
    """A kernel that nobody compiled."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **options: None

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: None


@pytest.fixture
def no_launches(monkeypatch):
    """The host's part of calls alone: nothing is compiled or run."""
    monkeypatch.setattr(triton_api.launching.JITFunction, "run", lambda *args, **kwargs: Nothing())
    monkeypatch.setattr(triton_api, "relauncher", lambda *args: None)


@weft.program(
    mesh="tp",
    settings=Settings(
        tiles={"product": (16, 32, 16), "product_2": (16, 16, 16)}, engines={"gathered": "sm_push"}
    ),
    x=Tensor("float32", ("m", K), Shard(0)),
    w1=Tensor("float32", (K, 2 * N), Shard(1)),
    w2=Tensor("float32", (N, K), Shard(0)),
)
def mlp(x, w1, w2):
    return reduce_scatter(silu_mul(all_gather(x) @ w1) @ w2)


def run_mlp(world, m: int) -> torch.Tensor:
    ranks = world.num_ranks
    return mlp(
        torch.ones(m // ranks, K), torch.ones(K, 2 * N // ranks), torch.ones(N // ranks, K),
        world=world, m=m,
    )  # fmt: skip


def check_bounds(world) -> None:
    found, most = world.memory(), world.settings.kept_calls
    assert found.calls.count <= found.calls.most == most
    assert found.recordings.count <= found.recordings.most
    assert len(world._log._texts) <= call_log.MOST_TEXTS
    assert all(len(one._cuts) <= most for one in world._workspaces.values())
    assert len(world._recordings.seen) <= replays.SEEN_OF_EACH * found.recordings.most


@pytest.mark.slow
def test_two_thousand_sizes_leave_bounded_memory(no_launches):
    """An unfused product kept memory for each size: 8 MiB were full after 78."""
    unfused = card("gemm_ar").config(transport="all_reduce")

    def main(world):
        b = torch.ones(K, 8)
        before = world.heap_free_bytes
        for m in range(1, 2001):
            gemm_ar(torch.ones(m, K), b, world=world, config=unfused)
            if m == 1000:
                half = before - world.heap_free_bytes
        check_bounds(world)
        used = before - world.heap_free_bytes
        # Products of twice the size take twice the memory, and what was outgrown as much again.
        assert used < 4 * half and used < 2 << 20, (half, used)
        return used

    used, other = run_ranks(main, 2, heap_bytes=8 << 20)
    assert used == other, (used, other)


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setenv("WEFT_KEPT_CALLS", "16")


@pytest.fixture
def runners(monkeypatch):
    """All runners that exist. A walk over the collector's objects meets tuples half built."""
    made, own = weakref.WeakSet(), PlanRunner.__init__

    def init(runner, *args, **options):
        own(runner, *args, **options)
        made.add(runner)

    monkeypatch.setattr(PlanRunner, "__init__", init)
    return made


@pytest.mark.slow
def test_programs_of_many_sizes_leave_few_runners_and_share_their_memory(no_launches, few, runners):
    def main(world):
        for m in range(2, 202, 2):
            run_mlp(world, m)
        check_bounds(world)
        gc.collect()  # runners that were dropped hold each other
        assert 0 < len([one for one in runners if one.world is world]) <= 16
        (scratch,) = world._scratch._latest.values()
        # The activations of the largest size, on a rank.
        return scratch.numel()

    size, other = run_ranks(main, 2)
    assert size == other and size <= 2 * 200 * N * 4, (size, other)


@pytest.mark.slow
def test_eviction_changes_no_result(few):
    """With real kernels, where every kind of call has been forgotten when it comes again."""
    to_sum = card("gemm_ar").config(transport="all_reduce")
    to_scatter = card("gemm_rs").config(transport="reduce_scatter")

    def main():
        world = weft.init(heap_bytes=1 << 20)
        b = torch.ones(K, 8)
        expected = run_mlp(world, 4)
        for _ in range(2):
            for m in (4, 6, 10, 18, 34):
                a = torch.full((m, K), float(m))
                total = gemm_ar(a, b, world=world, config=to_sum)
                rows = gemm_rs(a, b, world=world, config=to_scatter)
                assert (total == 2 * m * K).all() and (rows == 2 * m * K).all()
                assert torch.equal(run_mlp(world, m)[:1], expected[:1])
        check_bounds(world)
        world.close()

    with weft.emulated(ranks=2) as ranks:
        ranks.run(main)


def test_what_was_recorded_with_scratch_memory_that_is_gone_is_not_replayed(monkeypatch):
    """Another program of the name has needed more of it since; results lie where they lay."""
    monkeypatch.setattr(replays, "SIGHTINGS", 1)
    fresh, results, keys = Memory.results, {}, []

    def where_they_lay(self):
        return results.setdefault(id(self), fresh(self))

    run = replays.Replays.run
    monkeypatch.setattr(Memory, "results", where_they_lay)
    monkeypatch.setattr(
        replays.Replays,
        "run",
        lambda self, key, *work, **named: keys.append(key) or run(self, key, *work, **named),
    )
    given = (torch.ones(2, K), torch.ones(K, N), torch.ones(N // 2, K))

    def main():
        with weft.init(heap_bytes=1 << 20) as world:
            expected = None
            for i in range(6):
                if i == 3:
                    world.scratch("program mlp", 1 << 16)
                result = mlp(*given, world=world, m=4)
                expected = result.clone() if expected is None else expected
                assert torch.equal(result, expected)
                result.zero_()

    monkeypatch.setenv("WEFT_SLOTS", "1")
    with weft.emulated(ranks=2) as ranks:
        ranks.run(main)
    assert len(set(keys)) == 2 * 2, "on each rank one before and one after"


# ---- the heap


@pytest.mark.few(1)
@pytest.mark.parametrize(("transport", "recorded"), [("sm_push", False), ("ce_push", True)])
def test_sizes_that_grow_fit_in_a_heap_of_the_largest(transport, recorded, monkeypatch):
    """All sizes together do not; what the user has recorded of a small one is right in the end, and
    so are the calls that weft has recorded itself."""
    monkeypatch.setattr(replays, "SIGHTINGS", 1)
    op, n = card("ag_gemm"), 16

    def main():
        world = weft.init(heap_bytes=640 << 10)
        problem = op.make_problem(2, {"m": 8, "n": n, "k": K}, "float32")
        config = next(c for c in op.candidates(problem, world.target) if c.transport == transport)
        b, x, kept = torch.ones(K, n), torch.ones(4, K), torch.empty(8, n)

        def call(a: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
            return ag_gemm(a, b, world=world, config=config, out=out)

        call(x, kept)
        recording = None
        if recorded:
            with world.record() as recording:
                call(x, kept)
        for m in (16, 64, 128, 256, 384, 512, 600):
            for value in (1.0, 2.0, 3.0):
                assert (call(torch.full((m // 2, K), value)) == value * K).all()
            if recording:
                x.fill_(m)
                recording.replay()
                assert (kept == m * K).all()
        with pytest.raises(OutOfMemoryError) as found:
            call(torch.ones(1 << 13, K))
        assert "workspace 'program ag_gemm'" in str(found.value)
        # The gathered rows, and nothing else.
        needed = f"shared[0].memory needs {(1 << 14) * K * 4} bytes"
        assert needed in str(found.value)
        assert ("kept for what was recorded at" in str(found.value)) == recorded
        assert (call(torch.ones(8, K)) == K).all(), "smaller calls go on"
        world.close()

    with weft.emulated(ranks=2) as ranks:
        ranks.run(main)


@pytest.mark.parametrize("recorded", [False, True], ids=["called", "recorded"])
def test_mailboxes_that_grow_fit_too(recorded):
    """What is kept of calls holds them: it is forgotten where the heap is full."""
    config = card("all_gather").config(transport="sm_pull", channels=2, block=1024, num_warps=4)

    def main():
        world = weft.init(heap_bytes=256 << 10)
        x, kept = torch.ones(8, K), torch.empty(16, K)

        def call(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
            return weft.ops.all_gather(x, world=world, config=config, out=out)

        call(x, kept)
        recording = None
        if recorded:
            with world.record() as recording:
                call(x, kept)
        for m in (32, 64, 100, 160, 256, 400, 480):
            assert (call(torch.full((m, K), float(m))) == m).all()
            assert len(world.calls) <= 9
            if recording:
                x.fill_(m)
                recording.replay()
                assert (kept == m).all()
        told = [text for one in world._workspaces.values() for _, text, _ in one.holdings()]
        assert any("recorded at" in text for text in told) == recorded, told
        world.close()

    with weft.emulated(ranks=2) as ranks:
        ranks.run(main)


@pytest.mark.few(1)
@pytest.mark.parametrize("recorded", [False, True], ids=["called", "recorded"])
def test_mailboxes_of_tiles_that_none_moves_any_more_make_room(recorded):
    """Each has another one, for tiles of another size; the heap holds some of them."""
    op = card("all_gather")
    ways = [op.config(transport="sm_pull", channels=channels, block=block, num_warps=4)
            for channels in (1, 2, 4) for block in (256, 512, 1024)]  # fmt: skip

    def main():
        world = weft.init(heap_bytes=192 << 10)
        x, kept = torch.ones(256, K), torch.empty(512, K)

        def call(value: float, config: Any, out: torch.Tensor | None = None) -> torch.Tensor:
            x.fill_(value)
            return weft.ops.all_gather(x, world=world, config=config, out=out)

        call(1.0, ways[0], kept)
        recording = None
        if recorded:
            with world.record() as recording:
                weft.ops.all_gather(x, world=world, config=ways[0], out=kept)
        for value in range(2, 5):
            for config in ways:
                assert (call(float(value), config) == value).all()
                if recording:
                    x.fill_(-value)
                    recording.replay()
                    assert (kept == -value).all()
        held = [text for one in world._workspaces.values() for _, text, _ in one.holdings()]
        assert len(held) < len(ways), held
        world.close()

    with weft.emulated(ranks=2) as ranks:
        ranks.run(main)


def emulated(capsys: Any, script: Path, said: str) -> list[str]:
    code = weft_verb(["emulate", str(script), "--ranks", "2"])
    told = capsys.readouterr()
    assert code == 0, told.out[-3000:] + told.err[-3000:]
    return sorted(re.findall(f"^{said}$", told.out, re.MULTILINE))


@pytest.mark.slow
def test_all_operators_emulated(capsys):
    assert emulated(capsys, SCRIPT, SAID) == ["0", "1"]


def test_a_heap_that_grows_emulated(capsys):
    said = emulated(capsys, GROWING, GREW)
    assert [rank for rank, _ in said] == ["0", "1"] and all(int(mib) >= 3 for _, mib in said)


@on_two_and_four_gpus
def test_a_heap_that_grows_on_gpus(ranks):
    """Addresses that were reserved, and torch's memory mapped there once more."""
    said = once(torchrun(GROWING, ranks), GREW)
    assert [rank for rank, _ in said] == [str(rank) for rank in range(ranks)]
    assert all(int(mib) > 24 for _, mib in said)


@on_two_and_four_gpus
def test_all_operators_on_gpus(ranks):
    """What was recorded is a torch.cuda.graph; where nothing has to be freed the script fails."""
    said = once(torchrun(SCRIPT, ranks), SAID)
    assert said == [str(rank) for rank in range(ranks)]
