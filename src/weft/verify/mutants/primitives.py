"""What of a TTIR operation says that it communicates: its order, its scope, its numbers, its peer.

The emulator's primitives are rows of weft.language.symbols; here are Triton's own atomics.
"""

from __future__ import annotations

from dataclasses import replace

from weft.ir.ttir import Op
from weft.language.symbols import SYMBOLS, Symbol, base_symbol

OPERATIONS = {
    "tt.atomic_rmw": Symbol("atomic", values=(1,), order=1, scope=2),
    "tt.atomic_cas": Symbol("atomic_cas", values=(2,), order=0, scope=1),
    "tt.atomic_load": Symbol("atomic_load", order=0, scope=1, can_drop=False),
    "tt.atomic_store": Symbol("atomic_store", values=(1,), order=0, scope=1),
    "ttng.wait_barrier": Symbol("mbarrier.wait"),
    "ttng.arrive_barrier": Symbol("mbarrier.arrive"),
    "ttng.barrier_expect": Symbol("mbarrier.expect"),
    "ttng.async_copy_mbarrier_arrive": Symbol("async_copy.mbarrier_arrive"),
    "ttng.fence_async_shared": Symbol("fence_async_shared"),
    "ttng.async_tma_store_wait": Symbol("tma.store_wait"),
}

# What a spin looks at memory with.
POLLS = ("weft.load", "tt.atomic_rmw", "tt.atomic_cas", "tt.atomic_load")

STORES = (
    "tt.store", "tt.descriptor_store", "tt.descriptor_scatter", "tt.descriptor_reduce",
    "tt.experimental_descriptor_store", "ttng.async_tma_copy_local_to_global",
)  # fmt: skip
ASYNCHRONOUS = STORES[1:]


def symbol_of(op: Op) -> str:
    """`weft.notify` of `weft.notify:add.release.sys`; an operation's own name otherwise."""
    if op.name != "tt.extern_elementwise":
        return op.name
    return base_symbol(str(op.attributes.get("symbol", "")))


def primitive_of(op: Op) -> Symbol | None:
    if op.name == "tt.extern_elementwise":
        return SYMBOLS.get(symbol_of(op))
    return OPERATIONS.get(op.name)


def words_of(op: Op) -> list[str]:
    """The static words that order and scope are among."""
    if op.name == "tt.extern_elementwise":
        return str(op.attributes["symbol"]).partition(":")[2].split(".")
    return op.words


def with_word(op: Op, index: int, word: str) -> Op:
    words = [*words_of(op)]
    words[index] = word
    if op.name != "tt.extern_elementwise":
        return replace(op, words=words)
    symbol = f"{symbol_of(op)}:{'.'.join(words)}"
    return replace(op, attributes={**op.attributes, "symbol": symbol})


def order_of(op: Op) -> str:
    primitive = primitive_of(op)
    if primitive is None or primitive.order is None:
        return ""
    return words_of(op)[primitive.order]


def releases(op: Op) -> bool:
    return order_of(op) in ("release", "acq_rel")


def writes_data(op: Op) -> bool:
    return op.name in STORES or symbol_of(op) == "weft.put_packets"
