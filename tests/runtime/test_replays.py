"""Recordings of calls: made when a call is seen again, kept by key, never inside another one."""

from __future__ import annotations

from types import SimpleNamespace

from weft.runtime import replays
from weft.runtime.replays import Recordings, Replays


class Machine:
    """A backend that writes down what is queued: launches, and recordings by their key."""

    def __init__(self, records: bool = True) -> None:
        self.queued: list[str] = []
        self.recording = False
        self.records = records

    def is_recording(self) -> bool:
        return self.recording

    def record_launches(self, launch):
        if not self.records:
            return None
        kept, self.queued = self.queued, []
        launch()
        frozen, self.queued = self.queued, kept
        self.made = SimpleNamespace(
            replay=lambda: self.queued.extend(f"replayed {x}" for x in frozen), is_current=True
        )
        return self.made

    def call(self, calls: Replays, key: str) -> None:
        calls.run(key, lambda: self.queued.append(key))


def test_a_call_that_comes_again_is_recorded_and_then_replayed():
    machine = Machine()
    calls = Replays(machine, Recordings(1024))
    for _ in range(replays.SIGHTINGS):
        machine.call(calls, "x")
    assert machine.queued == ["x"] * replays.SIGHTINGS
    machine.call(calls, "y")
    machine.call(calls, "x")
    assert machine.queued[replays.SIGHTINGS :] == ["y", "replayed x"]


def test_what_comes_behind_is_queued_each_time_and_before_anything_is_recorded():
    machine = Machine()
    calls = Replays(machine, Recordings(1024))
    told: list[str] = []
    machine.record_launches = lambda launch: (
        told.append("recorded") or Machine().record_launches(launch)
    )
    for _ in range(replays.SIGHTINGS + 2):
        calls.run("x", lambda: told.append("launched"), lambda: told.append("behind"))
    assert told == [
        *["launched", "behind"] * replays.SIGHTINGS, "recorded", "launched", "behind", "behind",
    ]  # fmt: skip


def test_a_recording_whose_memory_is_gone_is_not_replayed_but_made_anew():
    machine = Machine()
    calls = Replays(machine, Recordings(1024))
    for _ in range(replays.SIGHTINGS + 1):
        machine.call(calls, "x")
    assert machine.queued[-1] == "replayed x"
    machine.made.is_current = False
    for _ in range(replays.SIGHTINGS):
        machine.call(calls, "x")
        assert machine.queued[-1] == "x"
    machine.call(calls, "x")
    assert machine.queued[-1] == "replayed x"


def test_inside_a_recording_of_the_users_launches_are_launches():
    machine = Machine()
    calls = Replays(machine, Recordings(1024))
    for _ in range(replays.SIGHTINGS):
        machine.call(calls, "x")
    machine.recording = True
    for _ in range(replays.SIGHTINGS + 1):
        machine.call(calls, "x")
        machine.call(calls, "y")
    assert not any("replayed" in what for what in machine.queued)
    machine.recording = False
    machine.call(calls, "y")
    assert machine.queued[-1] == "y"


def test_where_no_call_comes_again_recordings_end():
    """As where each call's result lies elsewhere: the third call of each key would record it."""
    machine, made = Machine(), []
    record = machine.record_launches
    machine.record_launches = lambda launch: made.append(0) or record(launch)
    calls = Replays(machine, Recordings(1024))
    for i in range(10 * replays.FIRST):
        for _ in range(replays.SIGHTINGS):
            machine.call(calls, f"k{i}")
    assert len(made) == replays.FIRST


def test_of_many_keys_that_come_in_turns_more_and_more_are_replayed():
    """As in a model of 80 layers, whose weights are multiplied one after the other."""
    machine = Machine()
    calls = Replays(machine, Recordings(1024))
    keys = [f"k{i}" for i in range(160)]
    for _ in range(60):
        machine.queued.clear()
        for key in keys:
            machine.call(calls, key)
    assert machine.queued == [f"replayed {key}" for key in keys]


def test_the_latest_used_are_kept():
    machine = Machine()
    calls = Replays(machine, Recordings(8))
    keys = [f"k{i}" for i in range(8 + 1)]
    for key in keys:
        for _ in range(replays.SIGHTINGS):
            machine.call(calls, key)
        machine.call(calls, keys[0])
    machine.queued.clear()
    for key in (keys[0], keys[-1], keys[1]):
        machine.call(calls, key)
    assert machine.queued == ["replayed k0", f"replayed {keys[-1]}", "k1"]


def test_keys_that_never_come_again_are_forgotten():
    machine = Machine()
    calls = Replays(machine, Recordings(4))
    most = 4 * replays.SEEN_OF_EACH
    for i in range(most + 10):
        machine.call(calls, f"k{i}")
    assert len(calls._of_all.seen) == most


def test_callers_share_what_a_world_keeps_and_take_theirs_along():
    """Their keys may be alike; what a caller that is gone has recorded gives its memory back."""
    machine, of_world = Machine(), Recordings(3)
    one, other = Replays(machine, of_world), Replays(machine, of_world)
    for calls, keys in ((one, "ab"), (other, "ac")):
        for key in keys:
            for _ in range(replays.SIGHTINGS):
                machine.call(calls, key)
    machine.call(one, "seen")
    machine.call(other, "seen")
    assert len(of_world.recorded) == 3 and len(of_world.seen) == 2
    machine.queued.clear()
    machine.call(one, "a")
    machine.call(one, "b")
    assert machine.queued == ["a", "replayed b"], "its oldest was another caller's as well"
    del one
    assert len(of_world.recorded) == 2 and len(of_world.seen) == 1
    machine.call(other, "a")
    assert machine.queued[-1] == "replayed a"


def test_where_recording_spares_nothing_every_call_is_launched():
    machine = Machine(records=False)
    calls = Replays(machine, Recordings(1024))
    for _ in range(3 * replays.SIGHTINGS):
        machine.call(calls, "x")
    assert machine.queued == ["x"] * 3 * replays.SIGHTINGS


def test_callers_that_replay_nothing_spend_what_recordings_cost_all():
    """Each size has a caller of its own: sizes that never come again must not record for ever."""
    machine, of_world, made = Machine(), Recordings(1024), []
    record = machine.record_launches
    machine.record_launches = lambda launch: made.append(1) or record(launch)
    callers = [Replays(machine, of_world) for _ in range(4 * replays.FIRST)]
    for calls in callers:
        for _ in range(replays.SIGHTINGS):
            machine.call(calls, "x")
    assert len(made) == replays.FIRST
    for _ in range(replays.REPLAYS_THAT_PAY):
        machine.call(callers[0], "x")
    machine.call(callers[-1], "x")
    assert len(made) == replays.FIRST + 1, "what is replayed pays for others"


def test_what_a_command_list_queues_is_recorded_later_and_at_once():
    machine, kept = Machine(), Recordings(1024)
    calls = Replays(machine, kept)
    for _ in range(replays.SIGHTINGS_OF_LISTED - 1):
        assert not calls.is_due("x")
    assert machine.queued == []
    spared = kept.spared
    assert calls.is_due("x")
    assert spared - kept.spared == replays.REPLAYS_THAT_PAY_LISTED
    calls.run("x", lambda: machine.queued.append("x"), at_once=True)
    assert calls.is_due("x"), "it is recorded"
    machine.call(calls, "x")
    assert machine.queued == ["x", "replayed x"]


def test_what_a_command_list_queues_is_not_recorded_where_that_does_not_pay():
    machine, kept = Machine(), Recordings(1024)
    calls, due = Replays(machine, kept), 0
    for key in range(100):
        seen = [calls.is_due(key) for _ in range(replays.SIGHTINGS_OF_LISTED)]
        due += any(seen)
    assert due == replays.FIRST * replays.REPLAYS_THAT_PAY // replays.REPLAYS_THAT_PAY_LISTED
