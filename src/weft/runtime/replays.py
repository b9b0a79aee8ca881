"""Device work that is queued again and again: a few times launch by launch, then as one.

What a call queues holds no number that the host knows (docs/decisions/003), so the same launches
serve for ever, and a recording of them is as good as they are. It costs the host one launch where
they cost one each, and events and copies besides: on 4 x H200, ag_gemm by pull 25 us, not 260.
"""

from __future__ import annotations

import itertools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.runtime.backend import Backend, KeptRecording

# Calls before a recording pays: the first loads kernels, and many keys are never seen again.
SIGHTINGS = 3
# Recordings that a world keeps, the latest used: each holds some hundred KB of the device. A model
# of 80 layers has as many weights of each kind, twice by slots that take turns.
MOST = 1024
# Keys that a world remembers before they are recorded.
MOST_SEEN = 4096
# A recording takes a millisecond or two, a replay spares the host 0.2: where addresses are new all
# the time, or keys more than are kept, recordings behind the first ones would be made for nothing.
FIRST, REPLAYS_THAT_PAY = 32, 8


def _nothing() -> None:
    pass


# A caller's number, and its own key.
Key = tuple[int, Hashable]

_numbers = itertools.count()


class Recordings:
    """Those of all callers in a world, by the caller's number and its key."""

    def __init__(self) -> None:
        self.seen: OrderedDict[Key, int] = OrderedDict()
        self.recorded: OrderedDict[Key, KeptRecording] = OrderedDict()

    def forget(self, caller: int) -> None:
        """Drop those of a caller that is gone."""
        # Of a copy: others may be gone while this goes on.
        for key in [key for key in (*self.seen, *self.recorded) if key[0] == caller]:
            self.seen.pop(key, None)
            self.recorded.pop(key, None)


class Replays:
    """Recordings of one caller's device work, by all that it depends on."""

    def __init__(self, backend: Backend, recordings: Recordings | None = None) -> None:
        self._backend = backend
        self._of_all = recordings or Recordings()
        self._number = next(_numbers)
        # Replays, less those that paid for recordings.
        self._spared = FIRST * REPLAYS_THAT_PAY
        weakref.finalize(self, self._of_all.forget, self._number).atexit = False

    def run(
        self, key: Hashable, launch: Callable[[], object], behind: Callable[[], None] = _nothing
    ) -> None:
        """Queue on the current stream what `launch` queues; for one key that is always the same.

        `key` holds every address and choice that goes into it. `launch` allocates nothing, and
        what it queues on other streams ends before what comes next on the current one. `behind`
        queues what comes next each time and is not recorded: what has been launched may wait for
        it, and the device may have to come to rest before a recording is made.
        """
        of_all = (self._number, key)
        seen, recorded = self._of_all.seen, self._of_all.recorded
        recording = None if self._backend.is_recording() else recorded.get(of_all)
        if recording is not None and not recording.is_current:
            # The caller's memory went back to the device, and came again at the same address.
            del recorded[of_all]
            recording = None
        if recording is not None:
            recorded.move_to_end(of_all)
            self._spared += 1
            recording.replay()
            behind()
            return
        launch()
        behind()
        if self._backend.is_recording():
            return
        sightings = seen[of_all] = seen.pop(of_all, 0) + 1
        if len(seen) > MOST_SEEN:
            seen.popitem(last=False)
        if sightings >= SIGHTINGS and self._spared >= REPLAYS_THAT_PAY:
            del seen[of_all]
            self._spared -= REPLAYS_THAT_PAY
            recording = self._backend.record_launches(launch)
            if recording is not None:
                recorded[of_all] = recording
            if len(recorded) > MOST:
                recorded.popitem(last=False)
