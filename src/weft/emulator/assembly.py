"""Inline assembly run: by the threads that run it, where it matters which and how many they are.

A program is one thread here. Of inline assembly on a GPU every thread of the block runs a copy: of
a scalar all of them, of a tile each those elements that it holds. So an assembly that adds, or
asks for %tid, has a `Lane` for each thread; of any other one lane per element is enough. Lanes
take turns at the backward branches of their loops: one that spins holds no other one up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import numpy as np

from weft.base.errors import EndlessLoopError, UnsupportedError
from weft.base.settings import Settings
from weft.base.vocabulary import Order, Scope
from weft.emulator.device import Device
from weft.emulator.inline_ptx import ALL_BITS, THREADS_OF_A_WARP, Assembly, Kind
from weft.emulator.packets import Fences
from weft.emulator.works import KernelWork

TURNS_BETWEEN_LOOKS = 65536


class Lane:
    """One thread's run through an assembly, for one element: registers, and where it is."""

    def __init__(self, program: Any, assembly: Assembly, loc: int, thread: int) -> None:
        self.program = program
        self.instructions = assembly.instructions
        self.loc = loc
        self.thread = thread
        self.registers: dict[str, int] = {}
        self.at = 0
        self.turns = 0
        self.polled: Any = None  # what its last look saw, None where it has changed memory

    def turn(self) -> bool:
        """Go on to the next backward branch, or to the end; says whether that is reached."""
        instructions, at = self.instructions, self.at
        while at < len(instructions):
            _, guard, step, target = instructions[at]
            at += 1
            if guard is not None and bool(guard[0](self)) is not guard[1]:
                continue
            if step is not None:
                step(self)
            elif target is not None:
                backward, at = target < at, target
                if backward:
                    self.at = at
                    self.turns += 1
                    if not self.polled and not self.turns % TURNS_BETWEEN_LOOKS:
                        self.program.turned(self.turns, self.loc)
                    return False
        return True

    def special(self, name: str, axis: int) -> int:
        program = self.program
        if name in ("ctaid", "nctaid"):
            return int((program.pid if name == "ctaid" else program.grid)[axis])
        if name in ("tid", "ntid"):
            first = self.thread if name == "tid" else program.num_threads
            return first if axis == 0 else int(name == "ntid")
        if name in ("smid", "nsmid"):
            num_sms, (x, y, z), (nx, ny, _) = program.device.num_sms, program.pid, program.grid
            return num_sms if name == "nsmid" else int(x + nx * (y + ny * z)) % num_sms
        if name == "nwarpid":
            return program.num_threads // THREADS_OF_A_WARP
        if name in ("laneid", "warpid"):
            warp, lane = divmod(self.thread, THREADS_OF_A_WARP)
            return lane if name == "laneid" else warp
        return int(program.clock_ns())

    # -- memory, through the program's own accesses

    def load(self, address: int, kind: Kind, order: Order | None, scope: Scope | None) -> int:
        if order is None or scope is None:
            value = self.program.load(address, None, None, kind.dtype, (), self.loc)
        else:
            where = self._located(address, kind, "reads")
            if where is None:
                return 0
            value = self.program.atomic(
                *where, kind.dtype, self.loc, order, scope, lambda old: old, how="load", raw=True
            )
        self.polled = self.loc, address, int(value), kind.dtype, order is None
        return kind.value(int(value)) & ALL_BITS

    def store(
        self, address: int, bits: int, kind: Kind, order: Order | None, scope: Scope | None
    ) -> None:
        self.polled, value = None, _word(bits, kind)
        if order is None or scope is None:
            self.program.store(address, value, None, kind.dtype, (), self.loc)
        elif where := self._located(address, kind, "writes"):
            self.program.atomic(
                *where, kind.dtype, self.loc, order, scope, lambda old: value, how="set", raw=True
            )

    def update(
        self, address: int, change: Callable[..., int | None], values: list[int], kind: Kind,
        order: Order, scope: Scope,
    ) -> int:  # fmt: skip
        where = self._located(address, kind, "updates")
        if where is None:
            return 0

        def changed(old: Any) -> Any:
            new = change(int(old) & kind.mask, *values)
            new = None if new is None else _word(new, kind)
            look = self.loc, address, int(old), kind.dtype, False
            self.polled = look if new is None or new == old else None
            return new

        old = self.program.atomic(*where, kind.dtype, self.loc, order, scope, changed, raw=True)
        return kind.value(int(old)) & ALL_BITS

    def _located(self, address: int, kind: Kind, what: str) -> Any:
        return self.program.locate(address, kind.dtype.itemsize, what, self.loc)

    def fence(self, scope: Scope) -> None:
        self.program.fence_of(scope)


class Threads(Fences):
    """A program where it matters that it is several threads; `threads` says which of them run, None
    if all do."""

    threads: np.ndarray | None = None

    def __init__(self, device: Device, work: KernelWork, pid: tuple[int, int, int]) -> None:
        super().__init__(device, work, pid)
        self.pid = tuple(np.int32(i) for i in pid)
        self.grid = work.grid_values
        self.num_threads = work.kernel.num_threads
        self.looked = 0  # how often at the clock

    def narrow(self, condition: np.ndarray) -> bool:
        """Leave out the threads for which `condition` does not hold; says whether any are left."""
        self.threads = condition if self.threads is None else condition & self.threads
        return bool(self.threads.any())

    def on(self, mask: Any) -> Any:
        """The mask of what each thread does for itself."""
        if self.threads is None:
            return mask
        return self.threads if mask is None else self.threads & mask

    def merged(self, before: Any, now: Any) -> np.ndarray:
        """`now` in the threads that run, `before` in the others."""
        return np.where(True if self.threads is None else self.threads, now, before)

    def assembly(self, assembly: Assembly, accesses, operands, shape, dtypes, loc):
        return run_assembly(self, assembly, operands, shape, dtypes, loc)

    def wait_for_any(self, looks: list[tuple[int, int, int, np.dtype, bool]]) -> None:
        """Each thread that is left has looked in vain: wait as if the first one did."""
        loc, address, value, dtype, is_plain = looks[0]
        allocation = self.memory.find(address)
        if allocation is not None:
            index = (address - allocation.address) // dtype.itemsize
            if is_plain:
                self.findings.fault("plain spin", self, loc, allocation, index)
            self.spin(allocation, index, dtype, loc, value)

    def clock_ns(self, *_):
        """A count: the same in every schedule."""
        self.looked += 1
        return np.int64(self.looked)

    def turned(self, turns, loc):
        """A loop without an access to memory has gone round `turns` times."""
        if turns >= Settings.from_environment().endless_turns:
            self.fail(
                EndlessLoopError, "endless loop",
                f"a loop that touches no memory has gone round {turns} times", loc,
                remedy="check what ends it; if it does end, set WEFT_ENDLESS_TURNS higher",
            )  # fmt: skip


def _word(bits: int, kind: Kind) -> Any:
    return kind.dtype.type(Kind("s", kind.bits).value(bits))


def run_assembly(
    program: Any, assembly: Assembly, operands: tuple, shape: tuple[int, ...],
    dtypes: tuple[np.dtype, ...], loc: int,
) -> list[Any]:  # fmt: skip
    """Run it on operands that are numbers, tiles of `shape`, or, being vectors where `shape` is
    (), numbers of each thread; gives such results."""
    by_thread = shape == () and any(np.ndim(operand) for operand in operands)
    elements, threads = prod(shape), program.num_threads
    bits = [_bits(np.broadcast_to(x, shape or np.shape(x))).ravel() for x in operands]
    lanes: list[tuple[int, Lane]] = []
    chosen = list(_lanes(program, assembly, elements, by_thread, loc))
    for thread, element in chosen:
        lane = Lane(program, assembly, loc, thread)
        for number, values in enumerate(bits, assembly.num_results):
            index = thread if shape == () and values.size > 1 else element
            lane.registers[f"${number}"] = int(values[index])
        lanes.append((element, lane))
    _take_turns(program, [lane for _, lane in lanes])
    differs = shape == () and (assembly.differs or by_thread)
    results = []
    for number, dtype in enumerate(dtypes):
        vector = differs and number in assembly.written
        found = np.zeros(threads if vector else elements, np.uint64)
        for element, lane in lanes:
            found[lane.thread if vector else element] = lane.registers.get(f"${number}", 0)
        typed = found.astype(f"u{dtype.itemsize}").view(dtype)
        results.append(typed if vector else typed.reshape(shape)[()])
    return results


def _bits(values: np.ndarray) -> np.ndarray:
    if values.dtype == np.bool_:
        return values.astype(np.uint64)
    return np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}")


def _lanes(
    program: Any, assembly: Assembly, elements: int, by_thread: bool, loc: int
) -> Iterator[tuple[int, int]]:
    """(thread, element) for every lane: a tile's element i lies in thread i, and again in every
    thread behind whose number is that modulo the tile's size."""
    on, threads = program.threads, program.num_threads
    if elements > threads:
        if assembly.per_thread or (on is not None and not np.all(on)):
            raise UnsupportedError(
                f"inline assembly on a tile of {elements} elements asks which of {threads} threads"
                " runs it; the emulator knows that of tiles with an element per thread at most",
                place=program.locations[loc],
            )
        yield from zip(np.arange(elements) % threads, range(elements), strict=True)
        return
    alike = not (assembly.differs or by_thread)
    seen: set[int] = set()
    for thread in range(threads) if on is None else np.flatnonzero(on).tolist():
        element = thread % elements
        if not (alike and element in seen):
            seen.add(element)
            yield thread, element


def _take_turns(program: Any, lanes: list[Lane]) -> None:
    """Run lanes to their ends; where all that are left look in vain, the program waits."""
    before: list[Any] | None = None
    while lanes := [lane for lane in lanes if not lane.turn()]:
        looks = [lane.polled for lane in lanes]
        if None not in looks and looks == before and len({look[1] for look in looks}) > 1:
            program.wait_for_any(looks)
            looks = None
        before = looks
