"""The protocol with a fake clock: turns, statistics, what is refused and what is left out."""

from __future__ import annotations

from typing import Any

import pytest
from fake_device import Call, FakeCase, FakeDevice

from weft.base.errors import TimeoutError, UsageError
from weft.tune import protocol
from weft.tune.figures import Parts, Times, percentile
from weft.tune.protocol import FatalError, attempt, check, measure
from weft.tune.variants import Variant


def variant(name: str, us: Any = 10.0, answer: Any = 1.0, **options: Any) -> Variant:
    call = Call(name, us, answer)
    return Variant(name, [call, call], **options)


def test_percentiles_are_of_the_sorted_values():
    times = Times((9.0, 1.0, 5.0, 3.0, 7.0, 2.0, 8.0, 4.0, 6.0, 10.0, 0.0))
    assert (times.p10, times.median, times.p90) == (1.0, 5.0, 9.0)
    with pytest.raises(UsageError):
        percentile([], 0.5)


def test_figures_are_those_of_the_targets():
    parts = Parts(gemm=100.0, comm=50.0, serial=150.0)
    assert parts.ceiling == 1.5
    assert parts.ratio(120.0) == 1.25
    assert parts.overlap_efficiency(100.0) == 1.0  # hides all of the shorter part
    assert parts.overlap_efficiency(150.0) == 0.0
    assert parts.overlap_efficiency(200.0) == -1.0
    assert Parts(comm=50.0).ceiling is None and Parts(comm=50.0).ratio(10.0) is None


def test_variants_take_turns():
    device = FakeDevice()
    _, failures = measure(
        device, FakeCase(), [variant("a"), variant("b"), variant("c")], "queued", rounds=7
    )
    assert not failures
    assert device.log == ["a", "b", "c"] * (7 + protocol.WARM_UP_ROUNDS)


def test_warm_up_is_not_in_the_times_and_the_slowest_rank_is():
    us = [1000.0, 1000.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0, 16.0]
    times, _ = measure(FakeDevice(slower=2.0), FakeCase(), [variant("a", us)], "queued", rounds=7)
    assert times["a"].rounds == (12.0, 13.0, 14.0, 15.0, 16.0, 17.0, 18.0)
    assert times["a"].median == 15.0


def test_eager_calls_come_in_bursts_as_long_as_they_may_be():
    for us, count in ((10.0, 10), (1000.0, 3), (50_000.0, 1)):
        device = FakeDevice()
        times, _ = measure(device, FakeCase(), [variant("a", us)], "eager", rounds=7)
        assert set(device.bursts[1:]) == {count} and times["a"].median == us
    for mode in ("graph", "queued"):
        device = FakeDevice()
        measure(device, FakeCase(), [variant("a")], mode, rounds=7)
        assert not device.bursts


@pytest.mark.parametrize(("theirs", "count"), [(3, 3), (50, 10)])
def test_all_ranks_time_bursts_of_the_shortest_length(theirs, count):
    class Other(FakeDevice):
        def agree(self, value: Any) -> list[Any]:
            is_burst = isinstance(value, tuple) and value[1] == 10
            return [value, (0.0, theirs) if is_burst else value]

    device = Other()
    measure(device, FakeCase(), [variant("a", 10.0)], "eager", rounds=7)
    assert set(device.bursts[1:]) == {count}


def test_rounds_in_which_the_host_showed_are_lost_and_made_up_for():
    lost, extra = [10.0, 10.0, *[10.0] * 6, None, None, None], [20.0, 20.0, 20.0]
    device = FakeDevice()
    times, failures = measure(
        device, FakeCase(), [variant("a", [*lost, *extra]), variant("b")], "queued", rounds=9
    )
    assert not failures
    assert times["a"].rounds == (*[10.0] * 6, *extra) and len(times["b"].rounds) == 9
    assert device.log[-3:] == ["a"] * 3, "only who lost some takes more turns"


def test_too_few_rounds_are_no_result():
    times, failures = measure(
        FakeDevice(), FakeCase(), [variant("a", [10.0] * 8 + [None] * 12), variant("b")], "queued",
        rounds=9,
    )  # fmt: skip
    assert set(times) == {"b"}
    assert [(f.variant, f.mode) for f in failures] == [("a", "queued")]
    assert "6 of 18" in failures[0].error


def test_a_wrong_answer_is_found_before_anything_is_timed():
    device = FakeDevice()
    error, why = check(device, FakeCase(), variant("a", answer=1.5))
    assert error == pytest.approx(0.5)
    assert why is not None and "wrong answer" in why and "5.00e-01" in why
    assert not device.log
    assert check(device, FakeCase(), variant("a"))[1] is None


def test_a_wrong_answer_of_any_rank_is_found():
    class Others(FakeDevice):
        def agree(self, value: Any) -> list[Any]:
            return [value, 0.25] if isinstance(value, float) else super().agree(value)

    error, why = check(Others(), FakeCase(), variant("a"))
    assert error == 0.25 and why is not None and "wrong answer" in why


def test_a_nan_is_no_answer():
    _, why = check(FakeDevice(), FakeCase(), variant("a", answer=float("nan")))
    assert why is not None and "wrong answer" in why


def test_a_recorded_answer_is_checked_again():
    """Right when called, and a replay that writes nothing: the poison stays."""

    class Recorded(FakeDevice):
        def record(self, call: Any) -> tuple[Any, Any]:
            return Call("a", 10.0), call()

    times, failures = measure(Recorded(), FakeCase(), [variant("a")], "graph", rounds=7)
    assert not times and "wrong answer" in failures[0].error


def test_one_that_raises_does_not_take_the_others_with_it():
    broken = variant("b", answer=ValueError("no such\n  kernel"))
    times, failures = measure(
        FakeDevice(), FakeCase(), [variant("a"), broken, variant("c")], "queued", rounds=7
    )
    assert set(times) == {"a", "c"}
    assert failures == [protocol.Failure("b", "queued", "rank 0: ValueError: no such kernel")]


def test_one_that_cannot_be_recorded_is_measured_in_other_modes():
    only_queued = variant("a", modes=("queued",))
    assert not measure(FakeDevice(), FakeCase(), [only_queued], "graph", rounds=7)[0]
    assert measure(FakeDevice(), FakeCase(), [only_queued], "queued", rounds=7)[0]


def test_what_leaves_no_usable_device_ends_the_process():
    def time_out() -> None:
        raise TimeoutError("a wait reached its deadline")

    with pytest.raises(FatalError, match="rank 0: TimeoutError"):
        attempt(FakeDevice(), time_out)
    device = FakeDevice()
    device.poisoned = True
    with pytest.raises(FatalError, match="CUDA error"):
        attempt(device, lambda: None)


def test_what_a_call_overwrites_is_restored_before_each():
    restored: list[int] = []
    one = variant("a", before=restored.append)
    measure(FakeDevice(), FakeCase(), [one], "queued", rounds=7)
    assert len(restored) == 2 + 7 + protocol.WARM_UP_ROUNDS and set(restored) == {0, 1}


def test_l2_is_swept_before_each_call_where_the_inputs_would_stay_in_it():
    case, device = FakeCase(), FakeDevice()
    case.is_swept = True
    measure(device, case, [variant("a"), variant("b")], "queued", rounds=7)
    assert device.log[:4] == ["sweep", "a", "sweep", "b"]


def test_who_watches_hears_which_variant_runs():
    heard: list[str] = []
    measure(FakeDevice(), FakeCase(), [variant("a")], "queued", rounds=7, on_variant=heard.append)
    assert set(heard) == {"a"}
