"""What primitives become for the emulator: a row for each symbol, and what its readers ask of it.

A kernel for the emulator says `weft.notify:add.release.sys`; the emulator gives it its meaning, its
report of a deadlock asks who may still signal, mutants what of it can be changed, lint what
waits. All of them read this table.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Symbol:
    """One operation that communicates, of the primitive `name`.

    `looks`: at words that others may change. `signals`: changes such words. `waits`: goes on only
    once somebody else has acted. `values`, `count`, `peer` and `packets` are the numbers of
    operands; `order` and `scope` say which of the symbol's static words they are. What does not
    `can_drop` gives a value that is needed.
    """

    name: str
    looks: bool = False
    signals: bool = False
    waits: bool = False
    values: tuple[int, ...] = ()
    count: int | None = None
    peer: int | None = None
    order: int | None = None
    scope: int | None = None
    packets: int | None = None
    can_drop: bool = True


_WAIT = Symbol("wait", looks=True, waits=True, values=(1,), count=2, order=0, scope=1)

SYMBOLS = {
    "weft.notify": Symbol("notify", signals=True, values=(1,), order=1, scope=2),
    "weft.wait": _WAIT,
    "weft.wait_bounded": _WAIT,
    "weft.test": Symbol("test", looks=True, values=(1,), count=2, order=0, scope=1),
    "weft.load": Symbol("load", looks=True, order=0, scope=1, can_drop=False),
    "weft.store": Symbol("store", signals=True, values=(1,), order=0, scope=1),
    "weft.at": Symbol("at", peer=2, can_drop=False),
    "weft.translate": Symbol("at", peer=2, can_drop=False),
    "weft.put_packets": Symbol("put_packets", signals=True, packets=1),
    "weft.wait_packets": Symbol("wait_packets", looks=True, waits=True, values=(1,)),
    "weft.fence": Symbol("fence"),
    "weft.complete_stores": Symbol("complete_stores"),
}

# They mark places and look at clocks: nothing of them can be changed, nobody communicates by them.
QUIET_SYMBOLS = ("weft.reached", "weft.clock_ns")


def base_symbol(symbol: str) -> str:
    """`weft.notify` of `weft.notify:add.release.sys`."""
    return symbol.partition(":")[0]


def with_trait(trait: str) -> frozenset[str]:
    """The symbols that have it, e.g. `looks`."""
    return frozenset(name for name, symbol in SYMBOLS.items() if getattr(symbol, trait))
