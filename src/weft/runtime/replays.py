"""Device work that is queued again and again: a few times launch by launch, then as one.

What a call queues holds no number that the host knows (docs/decisions/003), so the same launches
serve for ever, and a recording of them is as good as they are. It costs the host one launch where
they cost one each, and events and copies besides: on 4 x H200, ag_gemm by pull 25 us, not 260.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.runtime.backend import Backend, KeptRecording

# Calls before a recording pays: the first loads kernels, and many keys are never seen again.
SIGHTINGS = 3
# For each recording that a world keeps, keys that it remembers before they are recorded.
SEEN_OF_EACH = 4
# A recording takes a millisecond or two, a replay spares the host 0.2: where addresses are new all
# the time, or keys more than are kept, recordings behind the first ones would be made for nothing.
FIRST, REPLAYS_THAT_PAY = 32, 8
# The same of what a caller queues by a command list, which costs the host some 60 us.
SIGHTINGS_OF_LISTED, REPLAYS_THAT_PAY_LISTED = 16, 32


def _nothing() -> None:
    pass


# A caller's number, and its own key.
Key = tuple[int, Hashable]

_numbers = itertools.count()


class Recordings:
    """Those of all callers in a world, by the caller's number and its key."""

    def __init__(self, most: int) -> None:
        # The latest used: each holds some hundred KB of the device. A model of 80 layers has as
        # many weights of each kind, twice by slots that take turns.
        self.most = most
        # Replays, less those that paid for recordings: of all callers, since each size has its own.
        self.spared = FIRST * REPLAYS_THAT_PAY
        self.seen: OrderedDict[Key, int] = OrderedDict()
        self.recorded: OrderedDict[Key, KeptRecording] = OrderedDict()

    @property
    def device_bytes(self) -> int:
        return sum(one.device_bytes for one in self.recorded.values())

    def forget(self, caller: int) -> None:
        """Drop those of a caller that is gone."""
        # Of a copy: others may be gone while this goes on.
        for key in [key for key in (*self.seen, *self.recorded) if key[0] == caller]:
            self.seen.pop(key, None)
            self.recorded.pop(key, None)


class Replays:
    """Recordings of one caller's device work, by all that it depends on."""

    def __init__(self, backend: Backend, recordings: Recordings) -> None:
        self._backend, self._of_all = backend, recordings
        self._number = next(_numbers)

    def __del__(self) -> None:
        self._of_all.forget(self._number)

    def replay(self, key: Hashable) -> bool:
        """Queue what was recorded for this key, if something was. Not while the user records."""
        kept, of_all = self._of_all, (self._number, key)
        recording = kept.recorded.get(of_all)
        if recording is None:
            return False
        if not recording.is_current:
            # The caller's memory went back to the device, and came again at the same address.
            del kept.recorded[of_all]
            return False
        if 2 * len(kept.recorded) > kept.most:
            # While few are kept their order decides nothing, and a key is hashed at each look.
            kept.recorded.move_to_end(of_all)
        kept.spared += 1
        recording.replay()
        return True

    def is_due(self, key: Hashable) -> bool:
        """For a caller that has a command list of this key: is it recorded, or seen so often that
        it is to be recorded now, by `run(.., at_once=True)`?"""
        of_all, kept = (self._number, key), self._of_all
        if of_all in kept.recorded:
            return True
        seen = self._see(of_all)
        if seen < SIGHTINGS_OF_LISTED or kept.spared < REPLAYS_THAT_PAY_LISTED:
            return False
        kept.spared -= REPLAYS_THAT_PAY_LISTED
        return True

    def _see(self, key: Key) -> int:
        """How often it was seen, this time too."""
        seen = self._of_all.seen
        seen[key] = count = seen.pop(key, 0) + 1
        if len(seen) > SEEN_OF_EACH * self._of_all.most:
            seen.popitem(last=False)
        return count

    def run(
        self, key: Hashable, launch: Callable[[], object], behind: Callable[[], None] = _nothing,
        *, at_once: bool = False,
    ) -> None:  # fmt: skip
        """Queue on the current stream what `launch` queues; for one key that is always the same.

        `key` holds every address and choice that goes into it. `launch` allocates nothing, and
        what it queues on other streams ends before what comes next on the current one. `behind`
        queues what comes next each time and is not recorded: what has been launched may wait for
        it, and the device may have to come to rest before a recording is made. With `at_once` it
        is made now, not once the key was seen some times.
        """
        is_recording = self._backend.is_recording()
        if not is_recording and self.replay(key):
            behind()
            return
        launch()
        behind()
        if is_recording:
            return
        of_all, kept = (self._number, key), self._of_all
        if not at_once:
            if self._see(of_all) < SIGHTINGS or kept.spared < REPLAYS_THAT_PAY:
                return
            kept.spared -= REPLAYS_THAT_PAY
        kept.seen.pop(of_all, None)
        kept.recorded[of_all] = self._backend.record_launches(launch)
        if len(kept.recorded) > kept.most:
            kept.recorded.popitem(last=False)
