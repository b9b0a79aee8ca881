"""Ranks that meet on the host through a store of torch: each leaves its value, then reads all.

A store holds one flat space of keys for all processes. So a key names the ranks that meet, not
what they call their world: two groups may use one name, and one rank may be in both. Values are
JSON: what a store holds is read, never run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from weft.base.errors import TimeoutError

# Ranks mostly come at once: so often the store is asked without a pause, then with one.
PROMPT, POLL_S = 20, 0.0005


class StoreMeetings:
    """One rank's part in the meetings of one group; `store` is any of torch.distributed's.

    Units   members: ranks of the default group, in the group's order; rank: place among them;
            number: of this group's worlds, counted alike by all members
    """

    def __init__(
        self, store: Any, members: Sequence[int], rank: int, *, number: int = 0,
        is_aborted: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        self.store = store
        self.members = tuple(members)
        self.rank = rank
        # Equal on all members, and no other world's of these members.
        self.name = f"{'-'.join(map(str, members))}/{number}"
        self._is_aborted = is_aborted
        self._count = 0

    def exchange(self, value: Any, timeout_s: float, remedy: str) -> list[Any]:
        """Every member's `value`, in the group's order; lists come as tuples. Blocks the host.

        Raises  TimeoutError: naming the ranks that did not come, and the remedy
        """
        number = self._count
        self._count += 1
        text = json.dumps(value)
        self.store.set(self._key(number, self.rank), text)
        everyone = range(len(self.members))
        others = [self._key(number, peer) for peer in everyone if peer != self.rank]
        deadline, looks = time.monotonic() + timeout_s, 0
        while others and not self.store.check(others):
            aborted = self._is_aborted()
            if aborted or time.monotonic() > deadline:
                # Who has come since is there at the next look.
                if late := [peer for peer in everyone if not self._is_there(number, peer)]:
                    self.store.delete_key(self._key(number, self.rank))
                    self._count = number
                    raise TimeoutError(self._lateness(late, timeout_s, aborted, remedy))
            looks += 1
            if looks > PROMPT:
                time.sleep(POLL_S)
        texts = [
            text if peer == self.rank else self.store.get(self._key(number, peer))
            for peer in everyone
        ]
        # All ranks have come to this meeting, so all have read the last one.
        if number > 0:
            self.store.delete_key(self._key(number - 1, self.rank))
        return [_as_tuples(json.loads(one)) for one in texts]

    def _key(self, number: int, rank: int) -> str:
        return f"weft/{self.name}/{number}/{rank}"

    def _is_there(self, number: int, rank: int) -> bool:
        return self.store.check([self._key(number, rank)])

    def _lateness(self, missing: list[int], timeout_s: float, aborted: bool, remedy: str) -> str:
        late = ", ".join(str(self.members[peer]) for peer in missing)
        why = "a wait of a kernel timed out" if aborted else f"they did not come in {timeout_s:g} s"
        return (
            f"rank {self.members[self.rank]} waits for rank {late} of the group "
            f"{list(self.members)}: {why}; {remedy}"
        )


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value
