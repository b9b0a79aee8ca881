"""NVIDIA: far peers, reached by NVSHMEM's device functions alone.

A network card reads and writes registered memory: what a program has in registers, or in memory of
its own, is laid down on a *stage* in the symmetric heap first. A tile whose rows are contiguous on
both sides goes as one block transfer a row; any other goes element by element.

Only kernels of worlds with far peers come here (`has_far_peers` is known at compile time), and only
they are linked with NVSHMEM's device code.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.base.errors import UnsupportedError
from weft.language import triton_api as api
from weft.language import world_layout as layout
from weft.language.cuda import nvshmem_library
from weft.language.world_arg import is_far_version

# NVSHMEM's own numbers: nvshmemx_signal_op_t and a comparison.
SIGNAL_SET = tl.constexpr(9)
SIGNAL_ADD = tl.constexpr(10)
AT_LEAST = tl.constexpr(5)
BEYOND = tl.constexpr(1 << 62)

_INTEGERS = {8: tl.int8, 16: tl.int16, 32: tl.int32, 64: tl.int64}


@api.builtin
def has_far_peers(world, _semantic=None):
    """Are there ranks that this world's kernels cannot reach by loads and stores? Known early."""
    return api.constexpr(is_far_version(api.unwrap(world.version)))


@api.builtin
def nvshmem(symbol, *args, _semantic=None):
    """Call NVSHMEM's function `symbol`, from every thread: on scalars once, on tiles for each
    element. What it returns is an int32 that only functions that return one define."""
    api.link_library(_semantic, "libnvshmem_device", str(nvshmem_library.find()))
    shape = [api.unwrap(extent) for extent in args[0].shape] if args else []
    return api.extern(_semantic, api.unwrap(symbol), args, api.INT32, shape)


@api.builtin
def nvshmem_result(dtype, symbol, *args, _semantic=None):
    """As `nvshmem`, of a function that returns a value of dtype."""
    api.link_library(_semantic, "libnvshmem_device", str(nvshmem_library.find()))
    shape = [api.unwrap(extent) for extent in args[0].shape]
    return api.extern(_semantic, api.unwrap(symbol), args, api.unwrap(dtype), shape)


@api.builtin
def integer(bits, _semantic=None):
    """The integer type of so many bits; a boolean is a byte."""
    return api.constexpr(_INTEGERS[max(8, api.unwrap(bits))])


@api.builtin
def in_rows(tile, _semantic=None):
    """A tile of any rank as [rows, last extent]."""
    *outer, last = (api.unwrap(extent) for extent in tile.shape)
    rows = 1
    for extent in outer:
        rows *= extent
    return api.reshape(_semantic, tile, [rows, last])


@api.builtin
def require_plain_triton(_semantic=None):
    """Raises  UnsupportedError: the kernel is Gluon's"""
    if api.is_gluon(_semantic):
        raise UnsupportedError(
            "tiles move to and from far peers in plain Triton kernels only; where a world has "
            "several nodes, communicate in a @triton.jit kernel beside this Gluon kernel"
        )
    return api.constexpr(True)


@api.builtin
def fits_a_slot(tile, item_bytes, _semantic=None):
    """Has a slot of the stage room for the tile?"""
    size = api.unwrap(item_bytes)
    for extent in tile.shape:
        size *= api.unwrap(extent)
    return api.constexpr(size <= layout.STAGE_SLOT_BYTES)


@triton.jit
def thread_index():
    return api.assembly("mov.u32 $0, %tid.x;", "=r", is_pure=True)


@triton.jit
def processing_element(world, peer):
    """NVSHMEM's number of a rank: its rank in the default process group."""
    return tl.load(world.table + layout.PEER_BASES + 2 * world.num_ranks + peer).to(tl.int32)


@triton.jit
def complete_far():
    """All far puts of each calling thread are in memory there; a barrier must follow."""
    nvshmem("nvshmem_quiet")


@triton.jit
def signal(world, word, value, to, op: tl.constexpr, order: tl.constexpr):
    """Change `word` on rank `to`, near or far. Sync  as notify's, behind its block barrier."""
    pe = processing_element(world, to)
    address = word.to(tl.int64)
    value = tl.cast(value, word.dtype.element_ty)
    # Threads differ here: nothing in this branch contains a block barrier.
    if thread_index() == 0:
        if order == "release":
            api.assembly("fence.acq_rel.sys; mov.u32 $0, 0;", "=r,~{memory}")
        if word.dtype.element_ty.primitive_bitwidth == 64:
            number: tl.constexpr = SIGNAL_ADD if op == "add" else SIGNAL_SET
            nvshmem("nvshmemx_signal_op", address, value, number, pe)
        else:
            nvshmem(f"nvshmem_int32_atomic_{op}", address, value, pe)


@triton.jit
def see_what_came(word):
    """Behind a wait on `word`: what a network card wrote before that is seen too."""
    if thread_index() == 0:
        bits: tl.constexpr = word.dtype.element_ty.primitive_bitwidth
        least = tl.cast(-(1 << (bits - 1)), word.dtype.element_ty)
        nvshmem(f"nvshmem_int{bits}_test", word.to(tl.int64), AT_LEAST, least)


# ---------------------------------------------------------------------------------------------
# The stage


@triton.jit
def claim_slot(world):
    """The number of a slot of the stage that nobody else uses. Its holder waits for no other
    program, so whoever looks for one finds one."""
    locks = tl.load(world.table + layout.STAGE_LOCKS).to(tl.pointer_type(tl.int32))
    program = tl.program_id(0) + tl.num_programs(0) * (
        tl.program_id(1) + tl.num_programs(1) * tl.program_id(2)
    )
    slot = program % layout.STAGE_SLOTS
    while tl.atomic_cas(locks + slot, 0, 1, sem="acquire", scope="gpu") != 0:
        slot = (slot + 1) % layout.STAGE_SLOTS
    return slot


@triton.jit
def return_slot(world, slot):
    locks = tl.load(world.table + layout.STAGE_LOCKS).to(tl.pointer_type(tl.int32))
    tl.debug_barrier()
    tl.atomic_xchg(locks + slot, 0, sem="release", scope="gpu")


@triton.jit
def slot_address(world, slot):
    return (
        tl.load(world.table + layout.STAGE_PTR) + tl.cast(slot, tl.int64) * layout.STAGE_SLOT_BYTES
    )


@triton.jit
def spare_address(world):
    """A symmetric word that holds nothing: where elements go whose mask does not hold."""
    return tl.load(world.table + layout.STAGE_PTR) + layout.STAGE_BYTES


@triton.jit
def both_parts(low, high, first, last, count, low_, high_, first_, last_, count_):
    """What is known of two parts of a row, together; in one pass over it."""
    return (
        tl.minimum(low, low_),
        tl.maximum(high, high_),
        tl.minimum(first, first_),
        tl.maximum(last, last_),
        count + count_,
    )


@triton.jit
def find_runs(address, lives, item_bytes: tl.constexpr):
    """Of each row [rows, n]: address of column 0, first live column, how many live; and whether
    the live ones of every row lie one behind another."""
    n: tl.constexpr = address.shape[1]
    j = tl.arange(0, n)[None, :]
    begin = address - j * item_bytes
    low, high, first, last, count = tl.reduce(
        (
            tl.where(lives, begin, BEYOND),
            tl.where(lives, begin, -BEYOND),
            tl.where(lives, j, n),
            tl.where(lives, j, -1),
            lives.to(tl.int32),
        ),
        1,
        both_parts,
    )
    is_run = (count == 0) | ((low == high) & (last - first + 1 == count))
    return low, first, count, tl.min(is_run.to(tl.int32)) != 0


@triton.jit
def of_row(values, row):
    """Element `row` of a tile [rows], the same in all threads."""
    rows: tl.constexpr = values.shape[0]
    return tl.sum(tl.where(tl.arange(0, rows) == row, values, 0))


@triton.jit
def move_runs(symbol: tl.constexpr, far, first, count, stage, pe, n: tl.constexpr,
              item_bytes: tl.constexpr, to_far: tl.constexpr):  # fmt: skip
    """Rows between a slot of the stage, where they lie `n` elements apart, and a far rank."""
    for row in range(far.shape[0]):
        begin, size = of_row(first, row).to(tl.int64) * item_bytes, of_row(count, row)
        there = of_row(far, row) + begin
        here = stage + row * n * item_bytes + begin
        if size > 0:
            if to_far:
                nvshmem(symbol, there, here, size.to(tl.int64) * item_bytes, pe)
            else:
                nvshmem(symbol, here, there, size.to(tl.int64) * item_bytes, pe)


# ---------------------------------------------------------------------------------------------
# put and get


@triton.jit
def lives_of(tile, mask):
    """The mask, or none, as one of the tile's shape."""
    if mask is None:
        return tl.full(tile.shape, 1, tl.int1)
    else:
        return tl.broadcast_to(mask, tile.shape)


@triton.jit
def as_integers(values, bits: tl.constexpr):
    """The same bits; a boolean becomes a byte."""
    if bits == 1:
        return values.to(tl.int8)
    else:
        return values.to(integer(bits), bitcast=True)


@triton.jit
def put_words(address, words, pe):
    """Words, or a tile of them, one by one."""
    bits: tl.constexpr = words.dtype.primitive_bitwidth
    nvshmem(f"nvshmem_int{bits}_p", address, words, pe)


@triton.jit
def put_each(world, address, words, pe, lives):
    own = processing_element(world, tl.load(world.table + layout.RANK))
    put_words(tl.where(lives, address, spare_address(world)), words, tl.where(lives, pe, own))


@triton.jit
def put_tile(world, address, words, pe, lives):
    item_bytes: tl.constexpr = words.dtype.primitive_bitwidth // 8
    if fits_a_slot(words, item_bytes):
        n: tl.constexpr = words.shape[1]
        far, first, count, are_runs = find_runs(address, lives, item_bytes)
        if are_runs:
            slot = claim_slot(world)
            stage = slot_address(world, slot)
            i = tl.arange(0, words.shape[0])[:, None] * n + tl.arange(0, n)[None, :]
            tl.store(stage.to(tl.pointer_type(words.dtype)) + i, words, mask=lives)
            tl.debug_barrier()
            move_runs("nvshmemx_putmem_block", far, first, count, stage, pe, n, item_bytes, True)
            return_slot(world, slot)
        else:
            put_each(world, address, words, pe, lives)
    else:
        put_each(world, address, words, pe, lives)


@triton.jit
def put_far(world, dst, src, to, mask):
    """`put` to a far rank; complete there after `complete_far`."""
    pe = processing_element(world, to)
    bits: tl.constexpr = dst.dtype.element_ty.primitive_bitwidth
    if src.dtype.is_ptr():
        values = tl.load(src, mask=mask)
    else:
        values = src
    words = as_integers(values.to(dst.dtype.element_ty), bits)
    address = dst.to(tl.int64)
    if dst.type.is_block():
        require_plain_triton()
        words = in_rows(tl.broadcast_to(words, dst.shape))
        put_tile(world, in_rows(address), words, pe, in_rows(lives_of(dst, mask)))
    else:
        if mask is None:
            put_words(address, words, pe)
        elif mask:
            put_words(address, words, pe)


@triton.jit
def get_words(address, pe, bits: tl.constexpr):
    """Words, or a tile of them, one by one."""
    return nvshmem_result(integer(bits), f"nvshmem_int{bits}_g", address, pe)


@triton.jit
def get_each(world, address, pe, lives, bits: tl.constexpr):
    own = processing_element(world, tl.load(world.table + layout.RANK))
    return get_words(tl.where(lives, address, spare_address(world)), tl.where(lives, pe, own), bits)


@triton.jit
def get_tile(world, address, pe, lives, bits: tl.constexpr):
    item_bytes: tl.constexpr = bits // 8
    if fits_a_slot(address, item_bytes):
        n: tl.constexpr = address.shape[1]
        far, first, count, are_runs = find_runs(address, lives, item_bytes)
        if are_runs:
            slot = claim_slot(world)
            stage = slot_address(world, slot)
            move_runs("nvshmemx_getmem_block", far, first, count, stage, pe, n, item_bytes, False)
            i = tl.arange(0, address.shape[0])[:, None] * n + tl.arange(0, n)[None, :]
            staged = stage.to(tl.pointer_type(integer(bits))) + i
            tl.debug_barrier()
            words = tl.load(staged, mask=lives, other=0, volatile=True)
            return_slot(world, slot)
        else:
            words = get_each(world, address, pe, lives, bits)
        return words
    else:
        return get_each(world, address, pe, lives, bits)


@triton.jit
def get_far(world, dst, src, source, mask):
    """`get` from a far rank."""
    pe = processing_element(world, source)
    bits: tl.constexpr = src.dtype.element_ty.primitive_bitwidth
    address = src.to(tl.int64)
    if src.type.is_block():
        require_plain_triton()
        lives = in_rows(lives_of(src, mask))
        words = tl.reshape(get_tile(world, in_rows(address), pe, lives, max(bits, 8)), src.shape)
        store_words(dst, words, src.dtype.element_ty, mask)
    else:
        if mask is None:
            store_words(dst, get_words(address, pe, max(bits, 8)), src.dtype.element_ty, mask)
        elif mask:
            store_words(dst, get_words(address, pe, max(bits, 8)), src.dtype.element_ty, mask)


@triton.jit
def store_words(dst, words, dtype: tl.constexpr, mask):
    if dtype.primitive_bitwidth == 1:
        tl.store(dst, words != 0, mask=mask)
    else:
        tl.store(dst, words.to(dtype, bitcast=True), mask=mask)
