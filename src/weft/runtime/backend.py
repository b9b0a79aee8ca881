"""What differs between machines: the protocol that a world stands on.

One `Backend` belongs to one rank of one world. Everything that is the same everywhere (allocation,
the table, slots, call order) is in `world.py`, `heap.py` and `slots.py` and never asks which
backend it has. A method that says *collective* is called by every rank in the same order.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from weft.base.elements import Axes
from weft.base.target import Target
from weft.language.wait_report import WaitReport

# A rank's call log: a ring of its last collective calls, read by the ranks beside it.
CALL_LOG_ENTRIES = 256
CALL_LOG_ENTRY_BYTES = 512
CALL_LOG_BYTES = CALL_LOG_ENTRIES * CALL_LOG_ENTRY_BYTES


@dataclass(frozen=True)
class Seats:
    """Where each rank of a world sits: one entry per rank, in rank order.

    `global_ranks` are ranks of the default process group; `nodes` number the scale-up domains.
    """

    rank: int
    nodes: tuple[int, ...]
    local_ranks: tuple[int, ...]
    global_ranks: tuple[int, ...]

    @property
    def num_ranks(self) -> int:
        return len(self.nodes)


@dataclass(frozen=True)
class Far:
    """What kernels need to reach far peers: the version of the language that does, and where data
    lies on its way (world_layout's stage)."""

    version: int
    stage_address: int
    locks_address: int


class ByAddress(Protocol):
    """Work that is queued by addresses and handles of streams, with nothing to be looked at."""

    def handle(self, stream: Any) -> int: ...

    def copy(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        """As `Backend.copy`, of contiguous bytes."""

    def copy_rows(
        self, dst: int, src: int, extent: Sequence[int], pitches: Sequence[int], stream: int
    ) -> None:
        """The same of rows that do not lie one behind the other.

        Shapes  extent: rows, bytes of each; pitches: bytes from row to row, there and here
        """

    def take_token(self, word: int, stream: int) -> None:
        """As `Backend.take_token`."""


class Stream(Protocol):
    """A queue of device work. Entering it makes it current and orders nothing; `wait` orders."""

    name: str

    def wait(self, other: Stream) -> None:
        """Later work on this stream starts after the work that `other` holds now."""

    def synchronize(self) -> None:
        """The host waits until this stream's work is done."""

    def __enter__(self) -> Stream: ...

    def __exit__(self, *failure: Any) -> None: ...


class Recording(Protocol):
    """What was launched between the brackets of `record`, with its arguments frozen."""

    def replay(self) -> None:
        """Enqueue all of it again on the current stream."""


class KeptRecording(Recording, Protocol):
    """One that its caller keeps for calls to come; `device_bytes` is what it takes there."""

    device_bytes: int

    @property
    def is_current(self) -> bool:
        """Is the memory that its copies name still the one that it was recorded with?"""
        ...


class Life(Hashable, Protocol):
    """How long a recording of the user's lasts, without holding it."""

    @property
    def is_over(self) -> bool:
        """Can nothing replay it any more?"""
        ...


@dataclass(frozen=True)
class RecordingLife:
    """As long as somebody holds a recording of weft's own."""

    recording: weakref.ref[Any]

    @property
    def is_over(self) -> bool:
        return self.recording() is None


class Backend(Protocol):
    """One rank's machine.

    `abort_address` and `report_address` go into the world table; 0 where the machine has neither
    (the emulator finds deadlocks itself and needs no deadline). `far` is known once the heap is
    open: None where kernels need no help to reach all peers. `by_address`: None where each piece of
    work is looked at.
    """

    seats: Seats
    target: Target
    device: torch.device
    abort_address: int
    report_address: int
    far: Far | None
    by_address: ByAddress | None

    # ---- memory

    def open_heap(self, nbytes: int, span_bytes: int) -> Sequence[torch.Tensor | None]:
        """Every rank's heap as a flat uint8 tensor of `span_bytes`, None where out of reach: bytes
        behind the first `nbytes` are addresses without memory until `grow_heap`. Collective."""

    def grow_heap(self, offset: int, nbytes: int) -> bool:
        """Memory for so many bytes of every rank's heap from `offset` on; False on all ranks or on
        this one, where there is none. Collective."""

    def prepare(
        self, tensor: torch.Tensor, offset: int, name: str, *, zero: bool,
        axes: Callable[[], Axes] | None = None,
    ) -> None:  # fmt: skip
        """`tensor` was just allocated at `offset` of this rank's heap; zero it where asked.

        Returns when the zeros are in memory. The emulator registers the allocation here.
        """

    def release(self, tensor: torch.Tensor, offset: int) -> None:
        """The allocation at `offset` is gone (after `drain` on every rank)."""

    def local_words(self, values: Sequence[int], dtype: torch.dtype, name: str) -> torch.Tensor:
        """A new, initialised, one-dimensional tensor in this rank's own device memory."""

    def host_words(self, count: int, name: str) -> tuple[torch.Tensor, memoryview]:
        """Zeroed int64 words that kernels store to, and the host's view of them, which waits for
        nothing."""

    # ---- meeting the other ranks on the host

    def exchange(self, value: Any, timeout_s: float) -> list[Any]:
        """Every rank's small, plain `value` (numbers, strings, tuples), in rank order. Collective,
        blocks the host.

        Raises  TimeoutError: naming the ranks that did not come
        """

    def call_logs(self) -> Sequence[memoryview | None]:
        """One writable block of CALL_LOG_BYTES per rank, shared with it; None where it is not."""

    # ---- launches, streams and copies

    def load(self, kernel: Any, arguments: Sequence[Any], options: dict[str, Any]) -> Any:
        """Compile the kernel for these arguments, and have its binary on the device; what
        `triton_api.bound_launch` takes, where `by_address` is something."""

    def current_stream(self) -> Stream: ...

    def stream_number(self) -> int:
        """Tells the current stream from all others; asked at each call, so it costs next to
        nothing."""

    def wait_for(self, other: Stream) -> None:
        """The current stream waits for `other`, where one recording holds both or none does."""

    def stream(self, name: str) -> Stream:
        """The stream of that name; the same one each time."""

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Copy-engine transfer on the current stream; shapes and dtypes were checked.

        Both are 2-D with unit inner stride, or both contiguous.
        """

    def copy_word(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Copy one int64 on the current stream, behind everything before it."""

    def take_token(self, word: torch.Tensor) -> None:
        """Later work on the current stream starts when this int64 is 1; it is set to 0 then."""

    def record(self) -> AbstractContextManager[Recording]:
        """Freeze what is launched inside the brackets instead of running it."""

    def record_launches(self, launch: Callable[[], None]) -> KeptRecording:
        """Record what `launch` queues, which allocates nothing."""

    def is_recording(self) -> bool: ...

    def recorded_life(self) -> Life:
        """Of the recording under way; the same one each time."""

    def drain(self) -> None:
        """Block the host until all work of this rank has finished; returns at a timeout too."""

    # ---- trouble

    def aborted(self) -> bool:
        """Has any rank's wait reached its deadline?"""

    def abort(self) -> None:
        """Make every wait of every rank fall through, from the host."""

    def reports(self) -> Sequence[WaitReport]:
        """What the waits of every rank wrote down, as far as this rank can read it."""

    def heap_base(self, rank: int) -> int:
        """Where rank `rank` itself has its heap: its reports name signals by its own addresses."""

    def close(self) -> None:
        """Give back what this backend holds; the heap's tensors die with their last reference."""
