"""The search: what is caught, missed, equivalent, not run; what it does not take for a catch."""

from __future__ import annotations

import weakref

import pytest
import torch
import triton
import triton.language as tl
from mutated_programs import carrying, copying, exchanging, run_of, spinning, telling_twice

import weft
from weft.base.errors import UnsupportedError, UsageError
from weft.base.report import Report
from weft.emulator.rewriting import Rewrite
from weft.verify.mutants import Bounds, Run, search
from weft.verify.mutants.records import HOST
from weft.verify.mutants.rewrites import Census
from weft.verify.mutants.search import shows

BOUNDS = Bounds(schedules=4, census=2, jobs=1)


def look(main, ranks: int = 2, bounds: Bounds = BOUNDS, **options):
    return search([run_of(main, ranks)], bounds, subject="it", ranks=ranks, **options)


@pytest.mark.slow
def test_every_mutant_of_a_program_that_needs_all_its_signals_is_caught():
    report = look(exchanging(), 3)
    # The barrier's notify_all reaches everybody in any order: that is noted where it stands.
    assert report.ok and not report.unreached, str(report)
    assert report.caught > 25 and {one.mutant.kind for one in report.equivalent} == {"peer+1"}
    assert all(one.by for one in report.verdicts)
    values = report.to_json()
    assert values["mutants"] == report.caught + len(report.equivalent) and values["missed"] == []


@pytest.mark.parametrize(("rewrite", "is_kept"), [(Rewrite(), False), (Census(), True)])
def test_no_address_comes_twice_where_mutants_are_looked_for(rewrite, is_kept: bool):
    """Recordings are kept by addresses: which calls are replayed would be chance."""

    def main() -> bool:
        ones = torch.ones(8)
        assert ones.data_ptr()
        storage = weakref.ref(ones.untyped_storage())
        del ones
        return storage() is not None

    with weft.emulated(1, rewrite=rewrite) as session:
        assert session.run(main) == [is_kept]


def test_mutants_of_one_argument_go_round_all_runs():
    bounds = Bounds(schedules=16, argued=2)
    trials = [list(bounds.trials_of_argued(turn, (3, 5, 7))) for turn in range(3)]
    assert trials == [[(3, 1), (5, 2)], [(7, 3), (3, 4)], [(5, 5), (7, 6)]]


def test_what_the_host_queues_is_changed_too():
    report = look(copying)
    host = [one for one in report.verdicts if one.mutant.site.kernel == HOST]
    assert {f"{one.mutant.kind} {one.mutant.site.primitive}" for one in host} >= {
        "drop copy", "drop copy_word", "swap copy_word", "value+1 copy_word", "value-1 copy_word",
        "drop wait", "drop launch of take", "drop launch of barrier",
    }  # fmt: skip
    missed = [str(one.mutant) for one in report.missed]
    # The stream of the next call waits for the barrier, and so for the copies of this one.
    assert all("wait in host" in one for one in missed) and len(missed) <= 1, str(report)


@pytest.mark.slow
def test_tokens_that_streams_take_are_changed_too():
    report = look(carrying)
    changes = {f"{v.mutant.kind} {v.mutant.site.primitive}": v.outcome for v in report.verdicts}
    token = {"drop take_token", "swap copy", "relax-release notify", "narrow notify"}
    assert {changes.get(change) for change in token} == {"caught"}, str(report)
    # The stream of the next call waits for the barrier, and so for the copies of this one.
    assert all("wait in host" in str(one.mutant) for one in report.missed), str(report)


def test_hand_written_spins_are_found_out_too():
    report = look(spinning)
    missed = {f"{one.mutant.kind} {one.mutant.site.primitive}" for one in report.missed}
    assert "drop atomic" not in missed and "relax-acquire atomic" not in missed


@pytest.mark.slow
def test_a_signal_that_nobody_needs_is_named():
    report = look(telling_twice)
    missed = [str(one.mutant) for one in report.missed]
    assert not report.ok
    assert any(
        one.startswith("drop of wait in tell_twice at mutated_programs.py:") for one in missed
    )
    assert report.to_json()["missed"] == missed


def test_a_bound_on_time_is_kept_and_told():
    report = look(exchanging(), bounds=Bounds(schedules=4, limit_s=0.0, jobs=1))
    assert not report.ok and {one.outcome for one in report.verdicts} == {"not run"}
    assert "limit of 0 s" in report.bound and "not run: the limit" in str(report)


def test_some_of_the_mutants_and_the_progress():
    heard: list[tuple[int, int]] = []
    report = look(
        exchanging(), choose=lambda mutants: mutants[:3], on_mutant=lambda *n: heard.append(n)
    )
    assert len(report.verdicts) == 3 and heard == [(1, 3), (2, 3), (3, 3)]


@pytest.mark.slow
def test_several_processes_come_to_the_same_verdicts():
    alone = look(exchanging())
    together = look(exchanging(), bounds=Bounds(schedules=4, census=2, jobs=2))

    def outcomes(report):
        return {str(one.mutant): one.outcome for one in report.verdicts}

    assert outcomes(alone) == outcomes(together)


def test_a_program_that_is_wrong_itself_has_no_mutants():
    def main():
        world = weft.init()
        x = world.empty((1,), torch.int64)
        world.copy(world.peer(x, 0), torch.tensor([world.rank]))

    with pytest.raises(UsageError, match="it, seed 0: the program itself shows race"):
        look(main)


@triton.jit
def count_for_ever(counter):
    count = 0
    while count >= 0:
        count = tl.atomic_add(counter, 1)


@pytest.mark.parametrize("programs", [1, 2])
def test_what_never_ends_is_given_up(programs):
    """Nobody waits in vain here, alone or together with others: only the steps tell."""

    def counting():
        weft.init()
        count_for_ever[(programs,)](torch.zeros(1, dtype=torch.int32))

    rewrite = Rewrite()
    rewrite.most_steps = 1000
    assert shows(run_of(counting), 0, rewrite) == "no end"
    assert 1000 < rewrite.steps < 1010


def test_what_the_emulator_cannot_do_catches_nothing():
    def unable(seed: int, rewrite: Rewrite) -> Report:
        raise UnsupportedError("no such operation")

    with pytest.raises(UnsupportedError):
        shows(Run("it", unable), 0, Rewrite())
