"""Emulated ranks: symmetric heaps in this process's memory, streams of the emulated machine.

Everything that a kernel or a copy does is the emulator's; here only the runtime's protocol is
put into its words. There is no deadline: where nobody can go on, the emulator says who waits.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from weft.base.elements import Axes
from weft.base.errors import UsageError
from weft.base.settings import Settings
from weft.base.target import TARGETS
from weft.base.user_place import user_place
from weft.emulator.actors import address_of, span_of
from weft.emulator.context import RankContext, RankStream, context_of_rank
from weft.emulator.device import HeapView
from weft.emulator.process_group import EmulatedGroup
from weft.emulator.recording import LaunchRecording, Recording
from weft.emulator.session import open_session
from weft.emulator.torch_ops import GARBAGE_BYTE, NAN_BYTE
from weft.emulator.works import CopyWork, TokenWork, WordCopyWork
from weft.language.wait_report import WaitReport
from weft.runtime import registry
from weft.runtime.backend import CALL_LOG_BYTES, RecordingLife, Seats
from weft.runtime.heap import ALIGNMENT_BYTES, round_up

# Shadow cells of untyped buffers; they shrink to the elements that are accessed.
UNTYPED_CELL_BYTES = 8


def scope() -> Hashable:
    """Worlds are looked up by name per emulated rank."""
    context = context_of_rank("a world")
    return (id(context.machine), context.rank)


def connect(
    group: Any, settings: Settings, *, name: str, asked: str,
    nodes: int | Sequence[int] | None = None,
) -> EmulatedBackend:  # fmt: skip
    """The calling rank's backend for a world over `group`; None is all ranks.

    As on GPUs, torch has a default process group afterwards. The session has settled who sits
    where, and finds by itself that a rank does not come: `nodes` and `settings` are for GPUs.
    """
    context = context_of_rank("a world")
    if not dist.is_initialized():
        dist.init_process_group("nccl")
    if group is None:
        members: Sequence[int] = range(context.device.num_ranks)
    elif isinstance(group, EmulatedGroup):
        members = group.members
    else:
        raise UsageError(
            f"rank {context.rank} passes {group!r} to weft.init: pass a process group that was "
            "made in this session and that this rank is a member of",
            place=user_place(),
        )
    return EmulatedBackend(context, tuple(members), name, asked)


_DEFAULT_NAME = re.compile(r"(tensor|signals)\d+")
_MAKERS = {"tensor": ("empty", "zeros"), "signals": ("signals",)}


def _variable(context: RankContext, name: str) -> str:
    """What the user calls an object that has no name: the variable it is assigned to."""
    default = _DEFAULT_NAME.fullmatch(name)
    return name if default is None else context.variable(_MAKERS[default[1]]) or name


class WorldStream(RankStream):
    """A stream of the calling rank, as `runtime.backend.Stream` asks for it."""

    @property
    def name(self) -> str:
        return self.stream.name

    def wait(self, other: WorldStream) -> None:
        self.context.order(self.stream, other.stream)


class EmulatedBackend:
    """One emulated rank's machine, as one world sees it."""

    abort_address = 0
    report_address = 0
    far = None
    by_address = None
    device = torch.device("cpu")

    def __init__(
        self, context: RankContext, members: tuple[int, ...], name: str, asked: str
    ) -> None:
        self.context = context
        self.session = open_session()
        self.machine = context.machine
        self.memory = context.memory
        self.name = name
        self.asked = asked
        self.members = members
        # Worlds of these ranks are numbered, alike on all: their names may differ, where one of
        # them has another world of that name with others.
        numbers = context.belongings.setdefault("worlds of members", {})
        numbers[members] = self._number = numbers.get(members, 0) + 1
        device = self.machine.device
        self.target = replace(TARGETS["emu"], arch=device.arch, num_sms=device.num_sms)
        places = [self.session.topology.seat(rank) for rank in members]
        self.seats = Seats(
            rank=members.index(context.rank),
            nodes=tuple(node for node, _, _ in places),
            local_ranks=tuple(local for _, local, _ in places),
            global_ranks=members,
        )
        self._failed = False
        self._bases: tuple[int, ...] = ()
        own_scope = scope()
        if not any(known == own_scope for known, _ in self.session.closing):
            self.session.closing.append((own_scope, lambda: registry.forget(own_scope)))

    # ---- memory

    def open_heap(self, nbytes: int, span_bytes: int) -> Sequence[torch.Tensor | None]:
        # numpy's memory: untouched pages cost nothing, and torch need not know of it.
        nbytes = self._nbytes = round_up(span_bytes)
        self._bytes = np.empty(nbytes, np.uint8)
        self._is_used = np.zeros(nbytes // ALIGNMENT_BYTES, np.bool_)  # ever allocated?
        own = torch.from_numpy(self._bytes)
        base = address_of(own)
        self.machine.device.add_heap(range(base, base + nbytes), self._bytes)
        heaps = self.exchange(own, 0.0)
        self._bases = tuple(address_of(heap) for heap in heaps)
        return [heap if near else None for heap, near in zip(heaps, self._near(), strict=True)]

    def grow_heap(self, offset: int, nbytes: int) -> bool:
        return True  # the pages are there once they are touched

    def _near(self) -> tuple[bool, ...]:
        own = self.seats.nodes[self.seats.rank]
        return tuple(node == own for node in self.seats.nodes)

    def prepare(
        self, tensor: torch.Tensor, offset: int, name: str, *, zero: bool,
        axes: Callable[[], Axes] | None = None,
    ) -> None:  # fmt: skip
        nbytes = tensor.numel() * tensor.element_size()
        if not nbytes:
            return
        lines = slice(offset // ALIGNMENT_BYTES, round_up(offset + nbytes) // ALIGNMENT_BYTES)
        if zero:
            self._bytes[offset : offset + nbytes] = 0
        else:
            # Recycled memory keeps its old words.
            numbers = not (tensor.is_floating_point() or tensor.dtype is torch.uint8)
            fresh = self._bytes.reshape(-1, ALIGNMENT_BYTES)[lines]
            fresh[~self._is_used[lines]] = GARBAGE_BYTE if numbers else NAN_BYTE
        self._is_used[lines] = True
        cell_bytes = tensor.element_size()
        if tensor.dtype is torch.uint8 and offset % UNTYPED_CELL_BYTES == 0:
            cell_bytes = UNTYPED_CELL_BYTES
        self.memory.register(
            address_of(tensor), nbytes, cell_bytes, self.context.rank,
            _variable(self.context, name), heap_offset=offset, heap=self.name, initialised=zero,
            shape=tuple(tensor.shape), axes=axes,
        )  # fmt: skip

    def release(self, tensor: torch.Tensor, offset: int) -> None:
        known = self.memory.find(address_of(tensor))
        if known is not None:
            self.memory.forget(known)

    def local_words(self, values: Sequence[int], dtype: torch.dtype, name: str) -> torch.Tensor:
        words = torch.tensor(values, dtype=dtype)
        self.context.track(words, name)
        if name == "world_table":
            self.machine.device.heaps[address_of(words)] = HeapView(
                self.seats.rank, self._bases, self._near(), self._nbytes
            )
        return words

    def host_words(self, count: int, name: str) -> tuple[torch.Tensor, memoryview]:
        seen = np.zeros(count, np.int64)
        words = torch.from_numpy(seen)
        self.context.track(words, name)
        return words, memoryview(seen)

    # ---- meeting the other ranks on the host

    def exchange(self, value: Any, timeout_s: float) -> list[Any]:
        return self.session.meetings.exchange(
            ("world", self.members, self._number), self.members, self.seats.rank,
            f"a collective step of world {self.asked!r}", value,
        )  # fmt: skip

    def call_logs(self) -> Sequence[memoryview | None]:
        logs = self.session.shared.setdefault(
            ("call logs", self.members, self._number),
            [bytearray(CALL_LOG_BYTES) for _ in self.members],
        )
        return [memoryview(log) for log in logs]

    # ---- streams and copies

    def load(self, kernel: Any, arguments: Sequence[Any], options: dict[str, Any]) -> None:
        """Nothing waits for a binary here."""

    def current_stream(self) -> WorldStream:
        return self.stream(self.context.stream.name)

    def stream_number(self) -> int:
        return self.context.stream.number

    def wait_for(self, other: WorldStream) -> None:
        recording = self.context.recording
        if recording is None or recording.holds(other.stream):
            self.current_stream().wait(other)

    def stream(self, name: str) -> WorldStream:
        streams = self.context.belongings.setdefault("streams", {})
        if name not in streams:
            streams[name] = WorldStream(
                self.context, self.machine.device.stream(self.context.rank, name)
            )
        return streams[name]

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        self._queue_copy(CopyWork, span_of, dst, src, "copied tensor")

    def copy_word(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        self._queue_copy(WordCopyWork, address_of, dst, src, "copied word")

    def _queue_copy(
        self, work: Any, where: Callable[[torch.Tensor], Any], dst: torch.Tensor,
        src: torch.Tensor, what: str,
    ) -> None:  # fmt: skip
        for one in (src, dst):
            self.context.reach(one, address_of(one), what)
        to, source, place = where(dst), where(src), user_place()
        kept = self.context.keeping(dst, src)
        self.context.enqueue(lambda: work(to, source, place=place, keep=kept()))

    def take_token(self, word: torch.Tensor) -> None:
        address, place = address_of(word), user_place()
        kept = self.context.keeping(word)
        self.context.enqueue(lambda: TokenWork(address, place=place, keep=kept()))

    def record(self) -> Recording:
        return Recording(self.context)

    def record_launches(self, launch: Callable[[], None]) -> LaunchRecording:
        return LaunchRecording.of(self.context, launch)

    def is_recording(self) -> bool:
        return self.context.recording is not None

    def recorded_life(self) -> RecordingLife:
        assert self.context.recording is not None, "no recording is under way"
        return RecordingLife(weakref.ref(self.context.recording))

    def drain(self) -> None:
        if self._failed:
            return
        for stream in self.machine.device.streams(self.context.rank):
            self.context.synchronize(stream)

    # ---- trouble

    def aborted(self) -> bool:
        return self._failed

    def abort(self) -> None:
        # The other ranks need no message: the emulator ends what waits for this one, and this
        # rank's own error is the one to report.
        self._failed = True

    def reports(self) -> Sequence[WaitReport]:
        return []

    def heap_base(self, rank: int) -> int:
        return self._bases[rank]

    def close(self) -> None:
        if self._failed:
            # What is queued still runs: a finding in memory that is gone would hide the error.
            self.context.belongings.setdefault("heaps that errors left", []).append(self._bytes)
            return
        base = self._bases[self.seats.rank]
        for known in self.memory:
            if base <= known.address < base + self._nbytes:
                self.memory.forget(known)
