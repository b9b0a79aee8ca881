"""NVSHMEM's device functions, by their symbols: what kernels say through torch's `_nvshmem_triton`.

A symmetric object's address, here or on a peer, leads to the peer's by what was allocated together.
A put is delivered whenever it likes, until `fence`, `quiet` or a barrier: it is an asynchronous
store. A put of one word, which may be a flag, is a relaxed store of that word.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import ml_dtypes
import numpy as np

from weft.base.errors import NotSymmetricError, PeerError, UnsupportedError
from weft.base.vocabulary import Order, Scope
from weft.emulator.affine import AffinePointers
from weft.emulator.memory import wrap_add

WORD = np.dtype(np.int64)
# Both what NVSHMEM's header says and what torch's documentation does.
SETS, ADDS = (0, 9), (5, 10)
COMPARE = (operator.eq, operator.ne, operator.gt, operator.le, operator.lt, operator.ge)
EQUAL, AT_LEAST = 0, 5
REDUCE = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}
TYPES = {
    "int8": np.int8, "uint8": np.uint8, "int16": np.int16, "uint16": np.uint16, "int32": np.int32,
    "uint32": np.uint32, "int64": np.int64, "uint64": np.uint64, "float": np.float32,
    "double": np.float64, "half": np.float16, "bfloat16": ml_dtypes.bfloat16,
}  # fmt: skip
OWNER = "NVSHMEM"
# By device: of each rank, how often each of its peers has come to a barrier, and it itself.
_arrivals: WeakKeyDictionary[Any, list[np.ndarray]] = WeakKeyDictionary()

Handler = Callable[[Any, tuple, list[str], Any, tuple, int], Any]


def _peers(program: Any, address: int, pe: int, loc: int) -> int:
    """The address on `pe` of the symmetric object that lies at `address` on some rank."""
    if not 0 <= pe < program.device.num_ranks:
        program.fail(
            PeerError, "peer", f"PE {pe} is outside 0 .. {program.device.num_ranks - 1}", loc,
            remedy="compute the PE modulo nvshmem.n_pes()",
        )  # fmt: skip
    found = program.memory.find(address)
    there = None if found is None else program.memory.symmetric(found, pe)
    if found is None or there is None:
        what = f"{found.name} of rank {found.rank}" if found else f"address {address:#x}"
        program.fail(
            NotSymmetricError, "not symmetric",
            f"{what} is not symmetric memory, so it has no address on PE {pe}", loc,
            remedy="allocate it with symm_mem.empty(...), and rendezvous",
        )  # fmt: skip
        return address  # not reached
    return there.address + address - found.address


def _tile(program: Any, address: int, nbytes: int, *others: int) -> tuple[AffinePointers, Any]:
    """Pointers to `nbytes`, and the widest type that divides all that it is asked of."""
    found = program.memory.find(address)
    widest = 8 if found is None else found.cell_bytes
    parts = [one for one in (8, 4, 2, 1) if one <= widest and not any(n % one for n in others)]
    size = next(one for one in parts if not nbytes % one and not address % one)
    return AffinePointers(address, (size,), (nbytes // size,)), np.dtype(f"i{size}")


def _move(program: Any, dst: int, src: int, nbytes: int, loc: int, *, later: bool) -> None:
    if nbytes <= 0:
        return
    pointers, dtype = _tile(program, dst, nbytes, src)
    values = program.load(
        AffinePointers(src, pointers.steps, pointers.shape), None, None, dtype, pointers.shape, loc
    )
    if later and nbytes == dtype.itemsize and nbytes in (4, 8):
        _set(program, dst, dtype, values[0], Order.RELAXED, loc)
        return
    segment = program.async_segment(loc) if later else None
    program.store(pointers, values, None, dtype, pointers.shape, loc, segment)


def _change(
    program: Any, address: int, dtype: Any, change: Callable[[Any], Any], how: str, order: Order,
    loc: int,
) -> None:  # fmt: skip
    located = program.locate(address, dtype.itemsize, "signals", loc)
    if located is not None:
        program.atomic(*located, dtype, loc, order, Scope.SYSTEM, change, how=how, raw=True)


def _set(program: Any, address: int, dtype: Any, value: Any, order: Order, loc: int) -> None:
    _change(program, address, dtype, lambda old: dtype.type(value), "set", order, loc)


def _signal(program: Any, address: int, value: int, op: int, order: Order, loc: int) -> None:
    if op in SETS:
        _set(program, address, WORD, value, order, loc)
    elif op in ADDS:
        _change(program, address, WORD, lambda old: wrap_add(old, value, WORD), "add", order, loc)
    else:
        raise UnsupportedError(f"NVSHMEM's signal operation {op}", place=program.locations[loc])


def _wait(program: Any, address: int, dtype: Any, comparison: int, value: int, loc: int) -> None:
    """Until the word compares so with `value`; what its signals released is then known."""
    located = program.locate(address, dtype.itemsize, "waits for", loc)
    if located is None:
        return
    allocation, index = located
    view, compare = allocation.view(dtype), COMPARE[comparison]
    expected = value if comparison in (EQUAL, AT_LEAST) else None
    program.pause("wait", lambda: not compare(view[index], value))
    while not compare(view[index], value):
        program.set_aside(allocation, index, dtype.itemsize, loc, expected, int(view[index]))
    program.blocked = None
    program.sees_newest = True
    program.atomic(
        allocation, index, dtype, loc, Order.ACQUIRE, Scope.SYSTEM, lambda old: old, how="load"
    )


# ---------------------------------------------------------------------------------------------
# The functions: of a program at a place, with their arguments


def put(program, loc, dst, src, nbytes, pe):
    _move(program, _peers(program, dst, pe, loc), src, nbytes, loc, later=True)


def get(program, loc, dst, src, nbytes, pe):
    _move(program, dst, _peers(program, src, pe, loc), nbytes, loc, later=False)


def put_signal(program, loc, dst, src, nbytes, word, value, op, pe):
    _move(program, _peers(program, dst, pe, loc), src, nbytes, loc, later=False)
    _signal(program, _peers(program, word, pe, loc), value, op, Order.RELEASE, loc)


def signal(program, loc, word, value, op, pe):
    _signal(program, _peers(program, word, pe, loc), value, op, Order.RELAXED, loc)


def wait_signal(program, loc, word, comparison, value):
    _wait(program, word, WORD, comparison, value, loc)


def wait_int(program, loc, word, comparison, value):
    _wait(program, word, np.dtype(np.int32), comparison, value, loc)


def fence(program, loc):
    program.fence((), [], None, (), loc)


def barrier(program, loc):
    """All PEs come here, and what they have put is there."""
    device = program.device
    arrived = _arrivals.get(device)
    if arrived is None:
        arrived = _arrivals[device] = [np.zeros(2, WORD) for _ in range(device.num_ranks)]
        for rank, words in enumerate(arrived):
            program.memory.register(
                words.ctypes.data, words.nbytes, WORD.itemsize, rank, "NVSHMEM's barrier",
                heap=OWNER, heap_offset=0,
            )  # fmt: skip
    fence(program, loc)
    own = arrived[program.rank]
    own[1] += 1
    for words in arrived:
        _signal(program, words.ctypes.data, 1, ADDS[0], Order.RELEASE, loc)
    total = int(own[1]) * device.num_ranks
    _wait(program, own.ctypes.data, WORD, AT_LEAST, total, loc)


def broadcast(program, loc, team, dst, src, nbytes, root):
    barrier(program, loc)
    _move(program, dst, _peers(program, src, root, loc), nbytes, loc, later=False)
    barrier(program, loc)


def all_to_all(program, loc, team, dst, src, nbytes):
    barrier(program, loc)
    for pe in range(program.device.num_ranks):
        there = _peers(program, src, pe, loc) + program.rank * nbytes
        _move(program, dst + pe * nbytes, there, nbytes, loc, later=False)
    barrier(program, loc)


def reduced(kind: str, name: str) -> Callable[..., None]:
    """All PEs' elements, taken together on each."""
    element, change = np.dtype(TYPES[kind]), REDUCE[name]

    def reduce(program, loc, team, dst, src, count):
        barrier(program, loc)
        total = None
        for pe in range(program.device.num_ranks):
            pointers = AffinePointers(_peers(program, src, pe, loc), (element.itemsize,), (count,))
            values = program.load(pointers, None, None, element, (count,), loc)
            total = values if total is None else change(total, values)
        barrier(program, loc)  # the two may be one
        pointers = AffinePointers(dst, (element.itemsize,), (count,))
        program.store(pointers, total, None, element, (count,), loc)

    return reduce


def _handler(function: Callable[..., None]) -> Handler:
    """As the emulator calls what is no part of a kernel: the result is an error's number, none."""

    def handle(program, args, static, dtype, shape, loc):
        function(program, loc, *map(int, args))
        return np.int32(0)

    return handle


FUNCTIONS: dict[str, Handler] = {
    symbol: _handler(function)
    for symbol, function in {
        "nvshmemx_putmem_block": put, "nvshmemx_putmem_nbi_block": put,
        "nvshmemx_getmem_block": get, "nvshmemx_getmem_nbi_block": get,
        "nvshmemx_putmem_signal_block": put_signal,
        "nvshmemx_putmem_signal_nbi_block": put_signal, "nvshmemx_signal_op": signal,
        "nvshmem_signal_wait_until": wait_signal, "nvshmem_int_wait_until": wait_int,
        "nvshmem_fence": fence, "nvshmem_quiet": fence, "nvshmem_barrier_all": barrier,
        "nvshmem_sync_all": barrier, "nvshmemx_barrier_all_block": barrier,
        "nvshmemx_sync_all_block": barrier, "nvshmemx_broadcastmem_block": broadcast,
        "nvshmemx_alltoallmem_block": all_to_all,
        **{f"nvshmem_{kind}_{name}_reduce": reduced(kind, name)
           for kind in TYPES for name in REDUCE},
    }.items()
} | {
    "nvshmem_my_pe": lambda program, *_: np.int32(program.rank),
    "nvshmem_n_pes": lambda program, *_: np.int32(program.device.num_ranks),
}  # fmt: skip
