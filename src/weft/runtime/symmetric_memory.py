"""What one rank has of a world's memory: symmetric tensors, peers' parts of them, and signals.

Every rank allocates the same things in the same order; each such step is compared with the other
ranks'. Streams, copies and what kernels say when they fail are here too, since all of them are of
this memory. `world.py` is what a script holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch

from weft.base.elements import Axes, Element
from weft.base.errors import (
    AllocationOrderError,
    CallOrderError,
    DtypeError,
    FarPointerError,
    NotSymmetricError,
    OutOfMemoryError,
    PeerError,
    PoisonedError,
    ShapeError,
    TimeoutError,
    UsageError,
    WeftError,
)
from weft.base.settings import Settings
from weft.base.target import Target
from weft.base.whole_numbers import extents_of, whole_number
from weft.language import world_layout as layout
from weft.language.wait_report import WaitReport
from weft.language.world_arg import WorldArg, language_version, traced_version
from weft.runtime import choices, world_table
from weft.runtime.backend import Backend, Stream
from weft.runtime.call_log import CallLog
from weft.runtime.collective_steps import ALLOCATIONS, difference
from weft.runtime.heap import Block, HeapAllocator, Wanted
from weft.runtime.holders import Holding, describe_full
from weft.runtime.stream_order import StreamOrder

# A rank may still be compiling or loading: on the host ranks wait longer for each other.
HOST_PATIENCE = 3
# Once one wait has given up the others follow within moments: one table shows them all.
REPORT_PATIENCE_S = 0.25


class SymmetricMemory:
    """One rank's part of the symmetric heap, and the way to the other ranks' parts."""

    def __init__(self, name: str, backend: Backend, settings: Settings) -> None:
        self.name = name
        self.settings = settings
        self.backend = backend
        self.rank: int = backend.seats.rank
        self.num_ranks: int = backend.seats.num_ranks
        self.local_rank: int = backend.seats.local_ranks[self.rank]
        self.node: int = backend.seats.nodes[self.rank]
        self.device: torch.device = backend.device
        self.target: Target = backend.target
        self.is_recording: Callable[[], bool] = backend.is_recording
        self._closed = False
        self._reported: str | None = None
        self._raised = False
        self._sequence = 0
        # Of allocations that ranks meet once for, each one's step.
        self._joint: list[tuple] | None = None
        self._pointers: dict[int, torch.Tensor] = {}
        self._dtypes: dict[int, torch.dtype] = {}
        self._axes: dict[int, Callable[[], Axes] | None] = {}
        self._words: set[tuple[int, int]] = set()
        self._tokens: set[int] = set()
        self._errors: list[tuple[torch.Tensor, memoryview, Callable[[int], WeftError]]] = []
        heap_bytes = whole_number("weft.init: heap_bytes", settings.heap_bytes, 1, UsageError)
        limit = whole_number("WEFT_HEAP_LIMIT", settings.heap_limit, 0, UsageError)
        self._heap = HeapAllocator(heap_bytes, f"world {name!r}", limit)
        heaps = backend.open_heap(self._heap.capacity_bytes, self._heap.span_bytes)
        self._heaps = list(heaps)
        self._base = self._heaps[self.rank].data_ptr()
        found = choices.read(settings, self.target, self.num_ranks) if self.rank == 0 else None
        self._arrivals = self._allocate(
            layout.NUM_CHANNELS, torch.int32, "barrier_arrivals", zero=True, is_signal=True,
            brings=found,
        )  # fmt: skip
        # What was measured, as rank 0 has read it; see there.
        self.choices: choices.Choices = choices.checked(self._brought[0])
        self.target = choices.probed(self.target, self.choices)
        self._generations = backend.local_words(
            [0] * layout.NUM_CHANNELS, torch.int32, "barrier_generations"
        )
        # What tiles of the last product leave (world_layout's TRACE_*); None unless asked for.
        self.trace: torch.Tensor | None = self._trace_words()
        words = world_table.words_of(
            backend, settings, self._heaps, self._base,
            (self._arrivals.data_ptr(), self._generations.data_ptr()), self.trace,
        )  # fmt: skip
        self.table: torch.Tensor = backend.local_words(words, torch.int64, "world_table")
        version = language_version() if backend.far is None else backend.far.version
        if self.trace is not None:
            version = traced_version(version)
        self._version = version
        self._log = CallLog(name, self.rank, backend.call_logs())
        self.orders: list[StreamOrder] = []

    @cached_property
    def arg(self) -> WorldArg:
        """What kernels take. It is Triton's, so a world whose calls come from an artefact has
        none."""
        from weft.runtime import kernels

        return kernels.world_arg(self.table, self.num_ranks, self._version)

    # ---- symmetric memory

    def empty(
        self, shape: int | Sequence[int], dtype: torch.dtype, name: str | None = None
    ) -> torch.Tensor:
        """A symmetric tensor: this rank's part, unwritten. Collective."""
        return self._allocate(shape, dtype, name, zero=False, is_signal=False)

    def zeros(
        self, shape: int | Sequence[int], dtype: torch.dtype, name: str | None = None
    ) -> torch.Tensor:
        """A symmetric tensor of zeros, zero on every rank when this returns. Collective."""
        return self._allocate(shape, dtype, name, zero=True, is_signal=False)

    def signals(
        self, n: int, dtype: torch.dtype = torch.int32, name: str | None = None, *,
        axes: Callable[[], Axes] | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """`n` zeroed signal words, in memory that was never used before. Collective.

        `axes` gives what an index stands for, in findings and in the table of waits.
        """
        if isinstance(n, str):
            raise UsageError(
                f"world.signals({n!r}, ..): first how many words, e.g. world.signals(4); a name is"
                " passed as name="
            )
        if dtype not in (torch.int32, torch.int64):
            raise DtypeError(f"signals are int32 or int64 words, not {dtype}")
        return self._allocate(n, dtype, name, zero=True, is_signal=True, axes=axes)

    def free(self, tensor: torch.Tensor) -> None:
        """Give back a symmetric tensor, once no rank uses it any more. Collective.

        Dropping the last reference frees nothing: a peer may still be using this rank's part.
        """
        self._check_usable("free")
        block = self._whole_block(tensor)
        if self.backend.is_recording():
            raise UsageError(
                f"{block.name!r} cannot be freed while a recording is under way: work that uses it "
                "may be recorded; free it when the recording is not replayed any more"
            )
        self.backend.drain()
        self._agree("free", block.offset, block.nbytes)
        self._release(block.offset)

    def _release(self, offset: int) -> None:
        """Give an allocation back that no rank uses any more."""
        block = self._heap.free(offset)
        self._pointers.pop(self._base + offset, None)
        self._axes.pop(offset, None)
        self.backend.release(self._view(self.rank, block), block.offset)

    def _whole_block(self, tensor: torch.Tensor) -> Block:
        """The allocation that `tensor` is all of: checked here, before ranks agree on anything.

        Raises  UsageError: a view of a part
        """
        if not isinstance(tensor, torch.Tensor):
            raise UsageError(f"world.free({tensor!r}): pass the tensor that is to be freed")
        address, nbytes = _address_of(tensor), tensor.numel() * tensor.element_size()
        block = self._heap.locate(address, self._base, 1, "the tensor to free")
        first = address - self._base - block.offset
        if first or nbytes != block.nbytes:
            raise UsageError(
                f"world.free: the tensor of shape {tuple(tensor.shape)} is a view of bytes {first} "
                f"to {first + nbytes} of {block.name!r}, which has {block.nbytes}; pass the whole "
                "tensor, as it was allocated"
            )
        return block

    def peer(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """Rank `rank`'s part of a symmetric tensor, as a tensor of the same shape and strides.

        Raises  FarPointerError: the rank is in another scale-up domain
        """
        return self.peers(tensor, (rank,))[0]

    def peers(self, tensor: torch.Tensor, ranks: Iterable[int]) -> list[torch.Tensor]:
        """`peer` of several ranks, by one look for the tensor."""
        offset, found = self._offset_of(tensor), []
        for rank in ranks:
            if rank not in range(self.num_ranks):
                raise PeerError(f"rank {rank} is outside 0 .. {self.num_ranks - 1} of {self!r}")
            heap = self._heaps[rank]
            if heap is None:
                raise FarPointerError(
                    f"rank {rank} (node {self.backend.seats.nodes[rank]}) is out of direct reach "
                    f"of rank {self.rank} (node {self.node}); use put, get or put_signal"
                )
            flat = heap[offset:]
            usable = flat.numel() // tensor.element_size() * tensor.element_size()
            found.append(flat[:usable].view(tensor.dtype).as_strided(tensor.shape, tensor.stride()))
        return found

    @property
    def distances(self) -> list[int]:
        """By rank how far its part of a symmetric tensor is behind this rank's, in bytes of
        address; 0 of this rank itself, and where it is far."""
        heaps = self._heaps
        return [0 if one is None else one.data_ptr() - self._base for one in heaps]

    def offset(self, tensor: torch.Tensor) -> int | None:
        """Where a symmetric tensor lies on the heap, in bytes; None where it is not symmetric."""
        offset = tensor.data_ptr() - self._base
        return offset if 0 <= offset < self._heap.end else None

    @property
    def meeting_timeout_s(self) -> float:
        """How long ranks wait for each other on the host, in seconds."""
        return max(self.settings.timeout_s, 1.0) * HOST_PATIENCE

    @property
    def heap_bytes(self) -> int:
        """Of the symmetric heap, all that there is; it grows where `heap_limit` lets it."""
        return self._heap.capacity_bytes

    @property
    def heap_free_bytes(self) -> int:
        """Of the symmetric heap, what nothing holds; the same on every rank."""
        return self._heap.free_bytes

    def pointers(self, tensor: torch.Tensor) -> torch.Tensor:
        """int64[num_ranks]: the address of each rank's part (0 where far), on the device."""
        address = tensor.data_ptr()
        if address not in self._pointers:
            offset = self._offset_of(tensor)
            bases = [0 if heap is None else heap.data_ptr() + offset for heap in self._heaps]
            self._pointers[address] = self.backend.local_words(bases, torch.int64, "pointers")
        return self._pointers[address]

    def has_room(self, wanted: Sequence[Wanted]) -> bool:
        """Has the heap room for all of these allocations?"""
        return self._heap.has_room(wanted)

    def make_room(self, wanted: Sequence[Wanted]) -> None:
        """There is room for all of these allocations, if need be in a further segment. Collective.

        Raises  OutOfMemoryError: with what holds the heap
        """
        if not (self.has_room(wanted) or self._grow(wanted) or self._forget_calls(wanted)):
            raise OutOfMemoryError(
                describe_full(self._heap, wanted, self.holdings(), self._offset_of)
            )

    def _grow(self, wanted: Sequence[Wanted]) -> bool:
        """Has every rank memory for a segment that these fit in, and does the limit let it?"""
        if (segment := self._heap.next_segment(wanted)) is None:
            return False
        has = self.backend.grow_heap(*segment)
        if not all(self._meet(has, "grow", *segment)):
            return False
        self._heap.grow(*segment)
        return True

    def _forget_calls(self, wanted: Sequence[Wanted]) -> bool:
        """Is there room without what is kept of calls?"""
        return False

    def holdings(self) -> Iterable[Holding]:
        """What holds memory of the heap beside tensors of the user's own."""
        return ()

    # ---- streams, copies

    def load(self, kernel: Any, *arguments: Any, **options: Any) -> Any:
        """Load the binary that `kernel[grid](*arguments, **options)` would launch; on GPUs returns
        the compiled kernel.

        The first launch of a binary blocks the host until running kernels have ended. Kernels of
        one rank that wait for each other, or for copies that are enqueued after them, must all be
        loaded before the first of them is launched.
        """
        return self.backend.load(kernel, arguments, options)

    def current_stream(self) -> Stream:
        return self.backend.current_stream()

    def stream(self, name: str) -> Stream:
        """The stream called `name`. Entering it orders nothing; `wait` does."""
        return self.backend.stream(name)

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Transfer by a copy engine on the current stream; rows may be strided.

        Raises  ShapeError, DtypeError: nothing is broadcast or converted
        """
        if dst.dtype != src.dtype:
            raise DtypeError(
                f"copy: dst is {dst.dtype} but src is {src.dtype}; copies convert nothing"
            )
        if dst.shape != src.shape:
            raise ShapeError(f"copy: dst is {tuple(dst.shape)} but src is {tuple(src.shape)}")
        if not (dst.is_contiguous() and src.is_contiguous()):
            for what, tensor in (("dst", dst), ("src", src)):
                if tensor.dim() != 2 or tensor.stride(1) != 1:
                    raise ShapeError(
                        f"copy: {what} of shape {tuple(tensor.shape)} has strides "
                        f"{tensor.stride()}; both must be contiguous, or 2-D with unit inner stride"
                    )
        if dst.numel():
            self.backend.copy(dst, src)

    def copy_word(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Copy one int64 word on the current stream, behind everything before it.

        Sync    the copy engine's signal: a kernel that sees the word with an acquire sees the
                data that this stream copied before it
        Raises  UsageError: neither side is a peer's. A copy within one device is a kernel, not a
                copy engine's work: a grid that fills the device would starve it
        """
        if (dst.data_ptr(), src.data_ptr()) not in self._words:
            self._check_word(dst, src)
        self.backend.copy_word(dst, src)

    def take_token(self, word: torch.Tensor) -> None:
        """Later work on the current stream starts when `word` is 1, and it is 0 again then.

            0  --a kernel of this rank-->  1  --this stream-->  0

        No SM is needed: the stream itself waits. The word is one of `signals`, and nothing else
        uses it: one kernel sets it to 1, one stream takes it, and is behind when it is set again.
        Take it after the launch of that kernel: what a device runs of two streams at once is its
        own choice, and a kernel that stands behind this wait never starts.

        Sync    pairs with a SET to 1 of system scope, `wl.notify(world, word, 1, to=own rank,
                op="set")`: later work on this stream sees what its program saw and wrote before
        Raises  ShapeError: not one int64
                UsageError: not on this rank's heap. Nothing bounds this wait, so it is for no
                peer: wait for those in a kernel
        """
        if word.data_ptr() not in self._tokens:
            self._check_token(word)
        self.backend.take_token(word)

    def _check_token(self, word: torch.Tensor) -> None:
        _check_one_word("take_token: word", word)
        if self.offset(word) is None:
            owner = self._owner(word)
            where = "on no symmetric heap" if owner == self.rank else f"rank {owner}'s"
            raise UsageError(
                f"take_token: the word is {where}; a stream takes what kernels of its own rank "
                "set, in a word of its own heap: wait for peers in a kernel, by wl.wait"
            )
        self._tokens.add(word.data_ptr())

    def _check_word(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        _check_one_word("copy_word: dst", dst)
        _check_one_word("copy_word: src", src)
        if self._owner(dst) == self._owner(src):
            raise UsageError(
                "copy_word: dst and src are on one device, where a copy is a kernel that a full "
                "grid starves; copy from or to a peer's word: world.peer(words, rank)"
            )
        self._words.add((dst.data_ptr(), src.data_ptr()))

    def _owner(self, tensor: torch.Tensor) -> int:
        """The rank on whose heap `tensor` is; this rank where it is on none."""
        for rank, heap in enumerate(self._heaps):
            if heap is not None and 0 <= tensor.data_ptr() - heap.data_ptr() < heap.numel():
                return rank
        return self.rank

    def stream_order(self) -> StreamOrder:
        """For calls that share memory, whichever streams of this rank they are made on."""
        self.orders.append(StreamOrder(self.backend))
        return self.orders[-1]

    # ---- trouble

    def check(self) -> None:
        """Raise what went wrong on the device so far.

        Raises  TimeoutError: a wait reached its deadline; the message is the table of waits
                CallOrderError: ranks made calls that differ; all ranks of the node raise it
                PoisonedError: one of these was raised before; only close() works now
                others: what a kernel has said in an `error_word`; the world goes on
        """
        if self._closed:
            raise UsageError(f"{self!r} is closed")
        if not self.backend.aborted():
            self._raise_errors()
            return
        if self._raised:
            raise PoisonedError(
                f"{self!r} met a timeout, or calls that differ by rank; its memory holds undefined "
                "data and only close() works"
            )
        self._raised = True
        message = self._log.disagreement()
        raise TimeoutError(self.table_of_waits()) if message is None else CallOrderError(message)

    def error_word(self, explain: Callable[[int], WeftError]) -> torch.Tensor:
        """An int64 word in which a kernel says that it was given what it cannot take.

        Once it is not 0, the next call or `check` zeroes it and raises explain(word); a kernel that
        still runs is not waited for, which `synchronize` does. Kernels of all ranks say the same.
        """
        words, seen = self.backend.host_words(1, "error_word")
        self._errors.append((words, seen, explain))
        return words

    def _raise_errors(self) -> None:
        for error in self._said():
            raise error

    def _said(self) -> Iterator[WeftError]:
        """What kernels have said in error words, each once."""
        for _, seen, explain in self._errors:
            if word := seen[0]:
                seen[0] = 0
                yield explain(word)

    def _forget_errors_of(self, calls: Sequence[Any]) -> None:
        """Of calls whose kernels have ended: words in which nothing was said, or can be."""
        gone = {id(one) for one in calls}
        self._errors = [one for one in self._errors if id(one[0]) not in gone or one[1][0]]

    def table_of_waits(self) -> str:
        """All waits at the moment the deadline passed, on every rank within reach."""
        patience = time.monotonic() + REPORT_PATIENCE_S
        while time.monotonic() < patience:
            reports = self.backend.reports()
            if len({report.rank for report in reports}) == self.num_ranks:
                break
            time.sleep(0.005)
        lines = [
            f"a wait in world {self.name!r} reached its deadline of {self.settings.timeout_s:g} s "
            f"(seen by rank {self.rank}); WEFT_TIMEOUT_S sets it"
        ]
        if not reports:
            lines.append("  no wait was reported: a rank aborted the world from its host")
        alike: dict[tuple, list[WaitReport]] = {}
        for report in reports:
            where = f"rank {report.rank}: {report.function}:{report.line}"
            what = f"{self._name_of(report)} >= {report.expected}, seen {report.seen}"
            alike.setdefault((where, what), []).append(report)
        for (where, what), waits in alike.items():
            who = f"program {list(waits[0].program)}"
            if len(waits) > 1:
                who = f"{len(waits)} programs, from {list(waits[0].program)} on,"
            ended = "" if any(wait.expired for wait in waits) else " (ended with the others)"
            verb = "waits" if len(waits) == 1 else "wait"
            lines.append(f"  {where} {who} {verb} for {what}{ended}")
        silent = sorted(set(range(self.num_ranks)) - {report.rank for report in reports})
        if reports and silent:
            who = ", ".join(map(str, silent))
            lines.append(f"  no wait is reported by rank {who}: gone, stalled, or past its waits")
        return "\n".join(lines)

    def _name_of(self, report: WaitReport) -> str:
        """The signal's name: an object has one offset on all ranks, so any rank can tell it."""
        offset = report.signal_address - self.backend.heap_base(report.rank)
        block = self._heap.find(offset)
        if block is None:
            return f"the word at {report.signal_address:#x}"
        itemsize = self._dtypes[block.offset].itemsize
        axes = self._axes.get(block.offset)
        index = Element((offset - block.offset) // itemsize, axes() if axes else ())
        return f"{block.name}[{index}]"

    def _check_usable(self, what: str) -> None:
        if self._closed:
            raise UsageError(f"{what}: {self!r} is closed")
        if self.backend.aborted():
            self.check()

    # ---- allocation

    def _allocate(
        self,
        shape: int | Sequence[int],
        dtype: torch.dtype,
        name: str | None,
        *,
        zero: bool,
        is_signal: bool,
        axes: Callable[[], Axes] | None = None,
        brings: Any = None,
    ) -> torch.Tensor:
        if not isinstance(dtype, torch.dtype):
            raise DtypeError(f"a symmetric tensor of {dtype!r}: pass a dtype as torch.float32 is")
        label = name or f"{'signals' if is_signal else 'tensor'}{self._sequence}"
        if is_signal:
            shape = (whole_number(f"world.signals: the number of words of {label!r}", shape),)
        else:
            shape = extents_of(f"the symmetric tensor {label!r}", shape)
        self._check_usable("allocate")
        if self.backend.is_recording():
            raise UsageError(
                f"{label} cannot be allocated while a recording is under way; allocate it before"
            )
        nbytes = dtype.itemsize
        for extent in shape:
            nbytes *= extent
        if self._joint is None:
            self.make_room([Wanted(nbytes, label, is_signal)])
        block = self._heap.allocate(nbytes, label, is_signal=is_signal)
        tensor = self._view(self.rank, block).view(dtype).view(shape)
        self.backend.prepare(tensor, block.offset, label, zero=zero, axes=axes)
        self._dtypes[block.offset], self._axes[block.offset] = dtype, axes
        # Also a barrier: no peer writes here before it was zeroed.
        kind = "signals" if is_signal else "tensor"
        step = (kind, block.offset, str(dtype), shape, label)
        if self._joint is not None:
            self._joint.append(step)
        else:
            self._brought = self._meet(brings, *step)
        return tensor

    @contextmanager
    def allocating_together(self) -> Iterator[None]:
        """Ranks meet once for all allocations within, behind the last: a meeting takes 0.3 ms or
        more. There is room for them, and no peer's work uses them within. Collective."""
        self._joint = steps = []
        try:
            yield
        finally:
            self._joint = None
        self._agree(ALLOCATIONS, *steps)

    def _view(self, rank: int, block: Block) -> torch.Tensor:
        return self._heaps[rank][block.offset : block.offset + block.nbytes]

    def _agree(self, *what: Any) -> None:
        """Compare this rank's collective step with the others'; returns when all have come."""
        self._meet(None, *what)

    def _meet(self, brought: Any, *what: Any) -> list[Any]:
        """The same; what each rank has brought, in rank order."""
        mine = (self._sequence, *what)
        self._sequence += 1
        try:
            everyone = self.backend.exchange((mine, brought), self.meeting_timeout_s)
        except TimeoutError as error:
            if (message := self._log.disagreement()) is None:
                raise
            self._raised = True
            raise CallOrderError(message) from error
        for rank, (theirs, _) in enumerate(everyone):
            if theirs != mine:
                step = difference(self.name, (self.rank, mine), (rank, theirs))
                if "close" in (mine[1], theirs[1]) and (call := self._log.unmatched()):
                    raise CallOrderError(f"{call}; {step}")
                raise AllocationOrderError(
                    f"{step}; every rank must allocate and free the same things in the same order"
                )
        return [theirs for _, theirs in everyone]

    def _offset_of(self, tensor: torch.Tensor) -> int:
        extent = 1
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            extent += (size - 1) * stride
        nbytes = max(extent, 0) * tensor.element_size() if tensor.numel() else 0
        if not self._heaps:
            raise NotSymmetricError(f"{self!r} is closed")
        address = _address_of(tensor)
        self._heap.locate(address, self._base, nbytes, "the tensor")
        return address - self._base

    def _trace_words(self) -> torch.Tensor | None:
        tiles = whole_number("weft.init: trace_tiles", self.settings.trace_tiles, 0, UsageError)
        words = [0] * tiles * layout.TRACE_WORDS
        named = (torch.int64, "trace")
        return self.backend.local_words(words, *named).view(tiles, -1) if tiles else None


def _address_of(tensor: torch.Tensor) -> int:
    """Where its first element is; torch knows no address of a tensor without elements."""
    if tensor.numel():
        return tensor.data_ptr()
    return tensor.untyped_storage().data_ptr() + tensor.storage_offset() * tensor.element_size()


def _check_one_word(what: str, tensor: torch.Tensor) -> None:
    if tensor.dtype != torch.int64 or tensor.numel() != 1:
        raise ShapeError(f"{what} is {tensor.dtype}{tuple(tensor.shape)}, not one int64")
