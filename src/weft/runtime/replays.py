"""Device work that is queued again and again: a few times launch by launch, then as one.

What a call queues holds no number that the host knows (docs/decisions/003), so the same launches
serve for ever, and a recording of them is as good as they are. It costs the host one launch where
they cost one each, and events and copies besides: on 4 x H200, ag_gemm by pull 25 us, not 260.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.runtime.backend import Backend, KeptRecording

# Calls before a recording pays: the first loads kernels, and many keys are never seen again.
SIGHTINGS = 3
# Recordings that are kept, the latest used: each holds some hundred KB of the device. A model of 80
# layers has as many weights, twice by slots that take turns.
MOST = 256
# Keys that are remembered before they are recorded.
MOST_SEEN = 1024
# A recording takes a millisecond or two, a replay spares the host 0.2: where addresses are new all
# the time, or keys more than are kept, recordings behind the first ones would be made for nothing.
FIRST, REPLAYS_THAT_PAY = 32, 8


def _nothing() -> None:
    pass


class Replays:
    """Recordings of one caller's device work, by all that it depends on."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._seen: OrderedDict[Hashable, int] = OrderedDict()
        self._recorded: OrderedDict[Hashable, KeptRecording] = OrderedDict()
        # Replays, less those that paid for recordings.
        self._spared = FIRST * REPLAYS_THAT_PAY

    def run(
        self, key: Hashable, launch: Callable[[], None], behind: Callable[[], None] = _nothing
    ) -> None:
        """Queue on the current stream what `launch` queues; for one key that is always the same.

        `key` holds every address and choice that goes into it. `launch` allocates nothing, and
        what it queues on other streams ends before what comes next on the current one. `behind`
        queues what comes next each time and is not recorded: what has been launched may wait for
        it, and the device may have to come to rest before a recording is made.
        """
        recording = None if self._backend.is_recording() else self._recorded.get(key)
        if recording is not None and not recording.is_current:
            # The caller's memory went back to the device, and came again at the same address.
            del self._recorded[key]
            recording = None
        if recording is not None:
            self._recorded.move_to_end(key)
            self._spared += 1
            recording.replay()
            behind()
            return
        launch()
        behind()
        if self._backend.is_recording():
            return
        seen = self._seen[key] = self._seen.pop(key, 0) + 1
        if len(self._seen) > MOST_SEEN:
            self._seen.popitem(last=False)
        if seen >= SIGHTINGS and self._spared >= REPLAYS_THAT_PAY:
            del self._seen[key]
            self._spared -= REPLAYS_THAT_PAY
            recording = self._backend.record_launches(launch)
            if recording is not None:
                self._recorded[key] = recording
            if len(self._recorded) > MOST:
                self._recorded.popitem(last=False)
