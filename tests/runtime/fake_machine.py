"""A machine with no device: ranks are threads, memory is the host's, nothing runs on a stream.

For what is common to all backends: allocation, tables, slots, call order.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

import weft
from weft.base.elements import Axes
from weft.base.errors import TimeoutError
from weft.base.settings import Settings
from weft.base.target import parse_target
from weft.language.wait_report import WaitReport
from weft.runtime import registry
from weft.runtime.backend import CALL_LOG_BYTES, RecordingLife, Seats
from weft.runtime.world import World

ROOT = os.path.dirname(weft.__file__)
# A rank that is gone is noticed, a machine that is busy is not taken for one.
PATIENCE_S = 60.0


class Meeting:
    """What the ranks' backends share."""

    def __init__(self, num_ranks: int, nodes: tuple[int, ...] | None = None) -> None:
        self.num_ranks = num_ranks
        self.nodes = nodes or (0,) * num_ranks
        self.barrier = threading.Barrier(num_ranks)
        self.values: list[Any] = [None] * num_ranks
        self.heaps: list[Any] = [None] * num_ranks
        self.logs = [bytearray(CALL_LOG_BYTES) for _ in range(num_ranks)]
        self.abort_word = 0
        self.reports: list[WaitReport] = []


class FakeRecording:
    def replay(self) -> None:
        pass


class FakeBackend:
    device = torch.device("cpu")
    target = parse_target("emu")
    report_address = 0
    far = None
    by_address = None

    def __init__(self, meeting: Meeting, rank: int, *, abort_address: int = 0) -> None:
        self.meeting = meeting
        self.abort_address = abort_address
        nodes = meeting.nodes
        local_ranks = tuple(nodes[:r].count(nodes[r]) for r in range(len(nodes)))
        self.seats = Seats(rank, nodes, local_ranks, tuple(10 + r for r in range(len(nodes))))
        self.recording: FakeRecording | None = None
        self.copies: list[tuple[Any, Any]] = []
        self.closed = False

    def open_heap(self, nbytes: int, span_bytes: int) -> Sequence[torch.Tensor | None]:
        rank = self.seats.rank
        self.meeting.heaps[rank] = torch.full((span_bytes,), 255, dtype=torch.uint8)
        self.exchange(None, 5)
        nodes = self.meeting.nodes
        return [
            heap if nodes[peer] == nodes[rank] else None
            for peer, heap in enumerate(self.meeting.heaps)
        ]

    def grow_heap(self, offset: int, nbytes: int) -> bool:
        return True

    def prepare(
        self, tensor: torch.Tensor, offset: int, name: str, *, zero: bool,
        axes: Callable[[], Axes] | None = None,
    ) -> None:  # fmt: skip
        if zero:
            tensor.zero_()

    def release(self, tensor: torch.Tensor, offset: int) -> None:
        pass

    def local_words(self, values: Sequence[int], dtype: torch.dtype, name: str) -> torch.Tensor:
        return torch.tensor(list(values), dtype=dtype)

    def host_words(self, count: int, name: str) -> tuple[torch.Tensor, memoryview]:
        words = torch.zeros(count, dtype=torch.int64)
        return words, memoryview(words.numpy())

    def exchange(self, value: Any, timeout_s: float) -> list[Any]:
        self.meeting.values[self.seats.rank] = value
        try:
            self.meeting.barrier.wait(PATIENCE_S)
            values = list(self.meeting.values)
            self.meeting.barrier.wait(PATIENCE_S)
        except threading.BrokenBarrierError as error:
            raise TimeoutError("the others did not come") from error
        return values

    def call_logs(self) -> list[memoryview | None]:
        return [memoryview(log) for log in self.meeting.logs]

    def load(self, kernel: Any, arguments: Sequence[Any], options: dict[str, Any]) -> None:
        pass

    def current_stream(self) -> Any:
        return None

    def stream_number(self) -> int:
        return 0

    def wait_for(self, other: Any) -> None:
        pass

    def stream(self, name: str) -> Any:
        return None

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        dst.copy_(src)

    copy_word = copy

    def take_token(self, word: torch.Tensor) -> None:
        assert word.item() == 1, "nothing runs here that could set it later"
        word.zero_()

    @contextmanager
    def record(self):
        self.recording = FakeRecording()
        yield self.recording
        self.recording = None

    def is_recording(self) -> bool:
        return self.recording is not None

    def recorded_life(self) -> RecordingLife:
        return RecordingLife(weakref.ref(self.recording))

    def drain(self) -> None:
        pass

    def aborted(self) -> bool:
        return self.meeting.abort_word != 0

    def abort(self) -> None:
        self.meeting.abort_word = 1
        self.meeting.barrier.abort()

    def reports(self) -> list[WaitReport]:
        return self.meeting.reports

    def heap_base(self, rank: int) -> int:
        return self.meeting.heaps[rank].data_ptr()

    def close(self) -> None:
        self.closed = True


# Streams' numbers, by name.
HANDLES = {"main": 7}


class WrittenStream:
    """What is queued while it is entered is its."""

    def __init__(self, backend: WritingBackend, name: str) -> None:
        self.backend, self.name = backend, name
        self.handle = HANDLES.setdefault(name, 7 + len(HANDLES))

    def wait(self, other: WrittenStream) -> None:
        self.backend.log.append(("wait", self.handle, other.handle))

    def __enter__(self) -> WrittenStream:
        self.backend.entered.append(self)
        return self

    def __exit__(self, *failure: Any) -> None:
        self.backend.entered.pop()


class WritingBackend(FakeBackend):
    """A GPU's, which writes down what is queued, by whichever way, and does nothing."""

    target = parse_target("cuda:90")

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.log: list[tuple] = []
        self.streams: dict[str, WrittenStream] = {}
        self.entered: list[Any] = [self.stream("main")]
        self.by_address: Any = SimpleNamespace(
            handle=lambda stream: stream.handle,
            copy=lambda dst, src, nbytes, stream: self.log.append(
                ("copy", dst, src, nbytes, stream)
            ),
            copy_rows=lambda dst, src, extent, pitches, stream: self.log.append(
                ("copy", dst, src, (*extent, *pitches), stream)
            ),
            take_token=lambda word, stream: self.log.append(("token", word, stream)),
        )

    def stream(self, name: str) -> WrittenStream:
        return self.streams.setdefault(name, WrittenStream(self, name))

    def current_stream(self) -> Any:
        return self.entered[-1]

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        size: Any = src.nbytes
        if not (dst.is_contiguous() and src.is_contiguous()):
            (rows, columns), each = src.shape, src.element_size()
            size = rows, columns * each, dst.stride(0) * each, src.stride(0) * each
        place = dst.data_ptr(), src.data_ptr(), size
        self.log.append(("copy", *place, self.current_stream().handle))

    copy_word = copy

    def take_token(self, word: torch.Tensor) -> None:
        self.log.append(("token", word.data_ptr(), self.current_stream().handle))


def functions_of(call: Callable[[], Any]) -> int:
    """How many of weft's functions a call calls on this thread, steps of generators too.

    Within `run_ranks`, where no garbage is collected: finalisers of others' worlds would count.
    """
    assert not gc.isenabled()
    names: list[str] = []

    def look(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            names.append(frame.f_code.co_qualname)

    sys.setprofile(look)
    call()
    sys.setprofile(None)
    return len(names)


def by_stream(log: list[tuple]) -> dict[int, list[tuple]]:
    """In the order of each stream; of two streams only what they wait for says one."""
    found: dict[int, list[tuple]] = {}
    for kind, *what in log:
        stream = what[0] if kind == "wait" else what[-1]
        found.setdefault(stream, []).append((kind, *what))
    return found


def run_ranks(
    main: Callable[[World], Any],
    num_ranks: int = 2,
    *,
    nodes: tuple[int, ...] | None = None,
    abort_address: int = 0,
    heap_bytes: int = 1 << 20,
    heap_limit: int = 0,
    kind: type[FakeBackend] = FakeBackend,
) -> list[Any]:
    """`main(world)` on every rank's thread; what each returned, or the error it raised."""
    meeting = Meeting(num_ranks, nodes)
    results: list[Any] = [None] * num_ranks

    def body(rank: int) -> None:
        try:
            backend = kind(meeting, rank, abort_address=abort_address)
            settings = Settings.from_environment(heap_bytes=heap_bytes, heap_limit=heap_limit)
            results[rank] = main(
                World("test", backend, settings, scope=("fake", id(meeting), rank))
            )
        except Exception as error:
            results[rank] = error
        except BaseException as error:  # pytest's own, of what did not raise
            results[rank] = AssertionError(str(error))

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(num_ranks)]
    gc.disable()
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * PATIENCE_S)
            assert not thread.is_alive(), "a rank hangs"
    finally:
        gc.enable()
    for rank in range(num_ranks):
        registry.forget(("fake", id(meeting), rank))
    return results
