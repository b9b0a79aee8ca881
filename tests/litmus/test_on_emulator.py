"""Every litmus program on emulated ranks: nothing forbidden is seen, and races are found."""

import pytest
from axiomatic import is_allowed
from cases import cases
from harness import Bench, Effort

import weft
from weft.base.vocabulary import Scope

EFFORT = Effort(lanes=2, iterations=2, launches=1, stress=0, max_delay=3)


def run(test, seed):
    """The verdict of rank 0, and what the checker found."""

    def main():
        world = weft.init()

        def meet():
            world.barrier()
            world.synchronize()

        verdict = Bench(world, EFFORT, max_locations=3).run(test, meet)
        world.close()
        return verdict

    ranks = 1 + max(thread.rank for thread in test.threads)
    with weft.emulated(ranks=ranks, seed=seed, collect=True) as session:
        verdicts = session.run(main)
    return verdicts[0] if verdicts else None, session.report


def is_reported(test):
    """Plain data whose stale value the model allows, or a device's scope between ranks."""
    steps = [(thread.rank, step) for thread in test.threads for step in thread.steps]
    plain = any(step.order is None for _, step in steps)
    narrow = any(
        step.scope is Scope.DEVICE and other.location == step.location and rank != other_rank
        for rank, step in steps
        for other_rank, other in steps
    )
    return narrow or (plain and is_allowed(test))


@pytest.mark.few(24)
@pytest.mark.parametrize("test", cases(), ids=lambda test: test.name)
def test_the_emulator_keeps_to_the_model(test):
    verdict, report = run(test, seed=1)
    kinds = {finding.kind for finding in report.findings}
    if is_reported(test):
        assert kinds == {"race"}
        return
    assert not kinds, report
    assert verdict.instances == sum(verdict.seen.values())
    assert not verdict.forbidden_seen
