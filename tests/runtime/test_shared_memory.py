"""Calls of all operators in one memory: epochs and credits keep them apart, whatever comes next."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from fake_machine import run_ranks

import weft
from weft.base.errors import RaceError
from weft.base.target import TARGETS
from weft.ops import cards
from weft.runtime.slots import Workspace
from weft.tools.check import Work, one_slot, rel_err
from weft.verify.laggards import chooser_of
from weft.verify.mutants import Bounds, Run, WrongAnswer, search

RANKS, SEEDS = 3, 2
F32 = torch.float32


# ---- what a world hands out


def ask(world, key: str, rows: int, words: int = 1):
    shared = {"rows": ((rows, 16), F32), "more": ((rows,), torch.int32)}
    return world.workspace(key, signals={"ready": (words, torch.int64)}, shared=shared)


def test_workspaces_share_memory_epochs_and_turns_but_no_signal():
    def main(world):
        one, other = ask(world, "one", 8), ask(world, "other", 4)
        third = ask(world, "one", 2)
        assert one.index != other.index and third.index == one.index, "one turn for all"
        assert third.arg is one.arg and third.rows.data_ptr() == one.rows.data_ptr()
        assert third.ready.data_ptr() == one.ready.data_ptr()
        again = ask(world, "other", 4)
        assert again is other and again.ready.data_ptr() != one.ready.data_ptr()
        assert one.more.data_ptr() >= one.rows.data_ptr() + one.rows.nbytes

    assert run_ranks(main, 2) == [None, None]


def test_memory_that_grows_keeps_its_epochs_and_goes_when_it_is_needed():
    def main(world):
        small = ask(world, "one", 8)
        small.arg.epoch.fill_(5)
        arg, place = small.arg, small.rows.data_ptr()
        del small
        ask(world, "one", 8)
        large = ask(world, "other", 64)
        assert ask(world, "one", 8).arg is not arg, "the other slot's"
        slot = ask(world, "one", 8)
        assert slot.arg is arg and slot.arg.epoch.item() == 5 and slot.rows.data_ptr() != place
        del large, slot
        left = world.heap_free_bytes
        # More than there is, were it not for what was outgrown.
        room = next(n for n in range(left // 4, 0, -64) if world._heap.has_room([(n, "x", False)]))
        world.empty(room + 1024, torch.uint8)
        assert ask(world, "one", 8).arg.epoch.item() in (0, 5), "epochs are not freed"

    assert run_ranks(main, 2, heap_bytes=1 << 16) == [None, None]


# ---- what operators do with it


@cache
def works() -> tuple[tuple[Work, Any], ...]:
    """Every operator by every transport, at a small size."""
    found = []
    for op in cards().values():
        work = Work(op, RANKS, op.trials[0].shape, "float32", (RANKS,))
        by_transport: dict[str, Any] = {}
        for config in op.candidates(work.problem(), TARGETS["emu"]):
            if config.transport not in op.composed:
                by_transport.setdefault(config.transport, config)
        found += [(work, config) for config in by_transport.values()]
    return tuple(found)


@cache
def expected(which: int, seed: int) -> Sequence[Any]:
    return works()[which][0].reference(seed)


def mixed(calls: Sequence[int]) -> Any:
    """A main that makes these calls one behind the other, each with another's numbers."""

    def main() -> None:
        outs = []
        with weft.init(heap_bytes=1 << 20) as world:
            for turn, which in enumerate(calls):
                work, config = works()[which]
                inputs = dict(work.inputs(world.rank, turn % SEEDS))
                outs.append(work.op.run(world, work.problem(), inputs, config))
            world.synchronize()
            for turn, (which, out) in enumerate(zip(calls, outs, strict=True)):
                work, config = works()[which]
                right = expected(which, turn % SEEDS)[world.rank]
                if (error := rel_err(out, right)) > work.tolerance():
                    raise WrongAnswer(f"{work.op.name} {config.transport}: an error of {error:.2g}")

    return main


def run_mixed(seed: int, count: int) -> None:
    order = random.Random(seed)
    with one_slot(), weft.emulated(ranks=RANKS, seed=seed, chooser=chooser_of(seed)) as ranks:
        ranks.run(mixed([order.randrange(len(works())) for _ in range(count)]))


@pytest.mark.slow
def test_any_operator_may_follow_any_other():
    run_mixed(1, 12)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_any_operator_may_follow_any_other_for_long(seed):
    run_mixed(seed, 300)


@pytest.mark.slow
def test_epochs_of_their_own_are_a_race(monkeypatch):
    """The mistake that sharing invites: the memory of all, and credits of one operator alone."""
    own = Workspace._args

    def args(self, old):
        return own(self, old) if self._is_pool else [None] * self._num_slots

    monkeypatch.setattr(Workspace, "_args", args)
    with pytest.raises(RaceError, match=r"shared\[0\].memory@rank"):
        run_mixed(1, 12)


def of_credits(mutants: Sequence[Any]) -> list[Any]:
    """Those of waiting for a slot, and of releasing it to other ranks."""
    return [
        one for one in mutants
        if one.site.primitive in ("wait", "notify")
        and any("slots.py" in str(line) for line in one.site.lines)
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_each_credit_is_needed_between_operators():
    """Without one of them, what follows writes where the operator before still reads."""
    named = [(work.op.name, config.transport) for work, config in works()]
    asked = [("ag_gemm", "sm_push"), ("gemm_rs", "sm_push"), ("all_gather", "ce_pull")]
    # Each behind itself, and behind each of the others.
    calls = [named.index(asked[i]) for i in (0, 0, 1, 1, 2, 2, 0, 2, 1, 0)]

    def run(seed, rewrite, observers=()):
        options = {"collect": True, "rewrite": rewrite, "chooser": chooser_of(seed)}
        with one_slot(), weft.emulated(RANKS, 1, seed, observers=observers, **options) as session:
            session.run(mixed(calls))
        return session.report

    bounds = Bounds(schedules=16, census=1, jobs=1)
    report = search([Run("mixed", run)], bounds, subject="mixed", ranks=RANKS, choose=of_credits)
    assert len(report.verdicts) >= 12 and report.ok, str(report)
