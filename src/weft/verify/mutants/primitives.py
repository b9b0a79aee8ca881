"""What of a TTIR operation says that it communicates: its order, its scope, its numbers, its peer.

One row for each symbol of the emulator's primitives, and for Triton's own atomics.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from weft.emulator.ttir import Op


@dataclass(frozen=True)
class Primitive:
    """How a primitive may be changed.

    `values`, `count` and `peer` are the numbers of operands; `order` and `scope` say which of the
    symbol's static words (or of an atomic's words) they are. `flag` operands are packets.
    """

    name: str
    values: tuple[int, ...] = ()
    count: int | None = None
    peer: int | None = None
    order: int | None = None
    scope: int | None = None
    packets: int | None = None
    can_drop: bool = True


_WAIT = Primitive("wait", values=(1,), count=2, order=0, scope=1)

EXTERNS = {
    "weft.notify": Primitive("notify", values=(1,), order=1, scope=2),
    "weft.notify_warp": Primitive("notify_warp", values=(1,), count=2, order=1, scope=2),
    "weft.wait": _WAIT,
    "weft.wait_bounded": _WAIT,
    "weft.test": Primitive("test", values=(1,), count=2, order=0, scope=1),
    "weft.load": Primitive("load", order=0, scope=1, can_drop=False),
    "weft.store": Primitive("store", values=(1,), order=0, scope=1),
    "weft.at": Primitive("at", peer=2, can_drop=False),
    "weft.translate": Primitive("at", peer=2, can_drop=False),
    "weft.put_packets": Primitive("put_packets", packets=1),
    "weft.wait_packets": Primitive("wait_packets", values=(1,)),
    "weft.put_lines": Primitive("put_lines", packets=1),
    "weft.wait_lines": Primitive("wait_lines", values=(1,)),
    "weft.fence": Primitive("fence"),
    "weft.quiet": Primitive("quiet"),
    "weft.complete_stores": Primitive("complete_stores"),
}

OPERATIONS = {
    "tt.atomic_rmw": Primitive("atomic", values=(1,), order=1, scope=2),
    "tt.atomic_cas": Primitive("atomic_cas", values=(2,), order=0, scope=1),
    "tt.atomic_load": Primitive("atomic_load", order=0, scope=1, can_drop=False),
    "tt.atomic_store": Primitive("atomic_store", values=(1,), order=0, scope=1),
    "tt.atomic_poll": Primitive("atomic_poll", values=(1,), order=0, scope=1),
}

# What a spin looks at memory with.
POLLS = ("weft.load", "tt.atomic_rmw", "tt.atomic_cas", "tt.atomic_load")

STORES = (
    "tt.store", "tt.descriptor_store", "tt.descriptor_scatter", "tt.descriptor_reduce",
    "tt.experimental_descriptor_store",
)  # fmt: skip
ASYNCHRONOUS = STORES[1:]


def symbol_of(op: Op) -> str:
    """`weft.notify` of `weft.notify:add.release.sys`; an operation's own name otherwise."""
    if op.name != "tt.extern_elementwise":
        return op.name
    return str(op.attributes.get("symbol", "")).partition(":")[0]


def primitive_of(op: Op) -> Primitive | None:
    if op.name == "tt.extern_elementwise":
        return EXTERNS.get(symbol_of(op))
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
    return op.name in STORES or symbol_of(op) in ("weft.put_packets", "weft.put_lines")
