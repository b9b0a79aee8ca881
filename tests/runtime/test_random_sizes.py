"""A server's life in small: sizes at random, eager and recorded in turns, in one world and one
heap: memory and caches stop growing, answers stay right."""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

import weft
from weft.base.target import TARGETS
from weft.emulator.codegen import compile_ttir
from weft.ops import cards
from weft.tools.check import Work, rel_err

RANKS, HEAP_BYTES, KEPT = 2, 64 << 20, 24
# What the sizes of a call are drawn from. The first calls have the largest, and one of each class
# of sizes (compiler/facts.py), for which operators may choose another way.
LARGEST, CLASSES = 40, (40, 1, 2, 3, 4, 8, 16, 24, 32)
# The emulator remembers each access: who made it, from which line, what that one knew, what it has
# published at which word, and the word's last values.
PAST = ("weft.emulator.clocks.", "weft.emulator.shadow.", "weft.emulator.ledger.",
        "weft.emulator.memory.SyncWord", "weft.emulator.word_values.",
        "weft.base.place.")  # fmt: skip
# Calls of one operator, with those that it makes of others.
HELD = 6
# Of one type as many objects more may live at a later moment, by what is under way.
SLACK = 60
# Each workspace keeps so many ways to cut a slot, with a tensor for each of its arrays.
CUTS = {"torch.Tensor": 100 * KEPT, "weft.runtime.slots.Slot": 25 * KEPT}


def work_of(op: Any, m: int) -> Work:
    return Work(op, RANKS, {**op.trials[0].shape, "m": m}, "float32", (RANKS,))


def traffic(names: Sequence[str], count: int, seed: int) -> list[tuple[str, int, bool]]:
    """(operator, m, is recorded): behind the first, small sizes more often than large ones."""
    draw = random.Random(seed)
    first = [(name, m, False) for m in CLASSES for name in names]
    sizes = (min(LARGEST, 1 + int(draw.expovariate(3 / LARGEST))) for _ in range(count))
    return first + [(draw.choice(names), m, draw.random() < 0.3) for m in sizes]


def living() -> Counter[str]:
    """Objects of weft's, and tensors, by type."""
    gc.collect()
    kinds = (type(one) for one in gc.get_objects())
    named = (f"{kind.__module__}.{kind.__qualname__}" for kind in kinds)
    return Counter(name for name in named if name == "torch.Tensor" or name.startswith("weft."))


def growth(before: Counter[str], now: Counter[str]) -> dict[str, int]:
    """What there is more of than what is under way explains."""
    more = {name: count - before[name] for name, count in now.items()}
    return {
        name: n
        for name, n in more.items()
        if n > CUTS.get(name, SLACK) and not name.startswith(PAST)
    }


def run_traffic(
    names: Sequence[str], count: int, seed: int, monkeypatch: Any, *, is_chosen: bool = False
) -> None:
    """`is_chosen`: calls name no configuration, and so are recorded by weft too, and bucketed."""
    monkeypatch.setenv("WEFT_KEPT_CALLS", str(KEPT))
    monkeypatch.setenv("WEFT_KEPT_RECORDINGS", str(KEPT))
    calls, known = traffic(names, count, seed), cards()
    # A hundred, or half, behind the first of each class.
    settled = (len(CLASSES) * len(names)) + min(100, count // 2)

    def main() -> None:
        with weft.init(heap_bytes=HEAP_BYTES) as world:
            most, before, kernels = 0, Counter(), 0
            for turn, (name, m, is_recorded) in enumerate(calls):
                work = work_of(known[name], m)
                problem, inputs = work.problem(), dict(work.inputs(world.rank, turn))
                config = None
                if not is_chosen:
                    config = next(iter(work.op.candidates(problem, TARGETS["emu"])))
                out = work.op.run(world, problem, inputs, config)
                if is_recorded:
                    with world.record() as recording:
                        out = work.op.run(world, problem, inputs, config)
                    recording.replay()
                    del recording
                    gc.collect()  # it holds its calls
                error = rel_err(out, work.reference(turn)[world.rank])
                assert error <= work.tolerance(), (turn, name, m, is_recorded, error)
                found = world.memory()
                # Beside the latest kinds, those that were recorded and have just gone.
                assert found.calls.count <= KEPT + HELD and found.recordings.count <= KEPT
                used = found.heap_bytes - found.free_bytes + found.scratch_bytes
                if turn < settled:
                    gc.collect()
                    most = max(most, used)
                elif turn == settled:
                    world.synchronize()
                    before, kernels = living(), compile_ttir.cache_info().currsize
                assert used <= most and found.heap_bytes == HEAP_BYTES, (turn, name, m, used, most)
            world.synchronize()
            assert compile_ttir.cache_info().currsize == kernels, "kernels of a new m"
            del out, inputs
            assert not (more := growth(before, living())), more

    # What was there before need not be looked at again and again.
    gc.collect()
    gc.freeze()
    try:
        with weft.emulated(ranks=RANKS, seed=seed) as ranks:
            ranks.run(main)
    finally:
        gc.unfreeze()


def test_sizes_at_random_leave_memory_as_it_was(monkeypatch):
    run_traffic(("gemm_rs", "all_reduce"), 12, 1, monkeypatch, is_chosen=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_sizes_at_random_of_operators_with_many_workspaces(monkeypatch):
    names = ("ag_rms_gemm", "all_reduce_rms_norm", "flash_decode", "moe_rs", "moe_ar")
    run_traffic(names, 125, 3, monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_five_hundred_sizes_of_every_operator_leave_memory_as_it_was(monkeypatch):
    run_traffic(tuple(cards()), 500, 5, monkeypatch, is_chosen=True)
