"""What Triton's functions and weft's primitives do, for lint: a table with a row for each one."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from weft.verify.lint.calls import (
    ATOMICS,
    HANDLERS,
    Arguments,
    as_address,
    handles,
    loaded,
    word,
    written,
)
from weft.verify.lint.device import Walker
from weft.verify.lint.values import (
    DATA,
    NOTHING,
    NUM_RANKS,
    PROGRAM,
    RANK,
    TICKET,
    TILE,
    Value,
    exactly,
)

ONE = Value(number=1)
LOADED_TILE = Value(traits=frozenset({DATA, TILE}))


def _nothing(pointer: Value) -> Value:
    return NOTHING


@dataclass(frozen=True)
class Effect:
    """One operation that a call is.

    `pointer`, `value` and `to` are names of its parameters: the address, what is stored or waited
    for, and the peer in whose memory the address is meant. `order` and `scope` are those of a call
    that does not say others. `gives` makes the call's result from the address.
    """

    kind: str
    pointer: str = ""
    value: str = ""
    to: str = ""
    order: str = ""
    scope: str = "sys"
    default: Value = NOTHING
    gives: Callable[[Value], Value] = _nothing


def _tile(pointer: Value) -> Value:
    return LOADED_TILE


def _ticket(pointer: Value) -> Value:
    return loaded(pointer, TICKET)


_NOTIFY = Effect("notify", "signal", "value", "to", "release", default=ONE)
_PUT = Effect("put", "dst", "src", "to")
_GET = Effect("get", "src", "dst", "source")
_ATOMIC = Effect("atomic", "pointer", "val", order="acq_rel", scope="gpu", gives=_ticket)
_WORD = Effect("atomic", "ptr", "value", order="acq_rel", gives=_ticket)
_BARRIER = Effect("barrier", "counter", order="acq_rel")
_FENCE = Effect("fence", order="release")
_BLOCK_BARRIER = Effect("block barrier")
_DOT = Effect("dot", gives=_tile)

EFFECTS: dict[str, tuple[Effect, ...]] = {
    "tl.load": (Effect("load", "pointer", gives=loaded),),
    "tl.store": (Effect("store", "pointer", "value"),),
    **{f"tl.atomic_{op}": (_ATOMIC,) for op in (*ATOMICS, "cas", "load", "store")},
    "tl.atomic_poll": (Effect("wait", "pointer", "val", order="acquire", scope="gpu"),),
    "tl.debug_barrier": (_BLOCK_BARRIER,),
    "gl.thread_barrier": (_BLOCK_BARRIER,),
    "gl.barrier": (_BLOCK_BARRIER,),
    "tl.dot": (_DOT,),
    "tl.dot_scaled": (_DOT,),
    "tl.store_tensor_descriptor": (Effect("descriptor store", "desc"),),
    "tl.load_tensor_descriptor": (Effect("descriptor load", "desc", gives=_tile),),
    **dict.fromkeys(("wl.notify", "wl.notify_all"), (_NOTIFY,)),
    **dict.fromkeys(("wl.put", "wl.put_packets"), (_PUT,)),
    "wl.put_signal": (_PUT, _NOTIFY),
    "wl.get": (_GET,),
    "wl.wait": (Effect("wait", "signal", "at_least", order="acquire"),),
    "wl.test": (Effect("test", "signal", "at_least", order="acquire"),),
    "wl.wait_packets": (Effect("wait", "packets", "flag", order="acquire", gives=_tile),),
    "wl.load": (Effect("atomic", "ptr", order="relaxed", gives=loaded),),
    "wl.store": (replace(_WORD, order="relaxed"),),
    **dict.fromkeys(("wl.atomic_add", "wl.atomic_exchange", "wl.atomic_cas"), (_WORD,)),
    **dict.fromkeys(("wl.barrier", "wl.barrier_grid"), (_BARRIER,)),
    "wl.fence": (_FENCE,),
    "wl.complete_stores": (Effect("complete"),),
    "wl.slot_wait_free": (Effect("wait", "slot", order="acquire"),),
    "wl.slot_finish": (Effect("notify", "slot", order="release"),),
    "wl.next_task": (
        Effect("atomic", "counter", order="relaxed", scope="gpu",
               gives=lambda pointer: Value(traits=frozenset({TICKET}))),
    ),
}  # fmt: skip

# Calls that do nothing for others, and what they give.
GIVES = {
    "tl.arange": Value(traits=frozenset({TILE})),
    "tl.zeros": Value(traits=frozenset({TILE})),
    "tl.full": Value(traits=frozenset({TILE})),
    "tl.program_id": exactly(PROGRAM),
    "wl.rank": exactly(RANK),
    "wl.num_ranks": exactly(NUM_RANKS),
}
# Calls whose result is one of their arguments, by its name.
HANDS_ON = {"tl.make_tensor_descriptor": "base", "tl.make_block_ptr": "base"}


def _act(
    name: str, effects: tuple[Effect, ...], walker: Walker, node: ast.Call, values: Arguments
) -> Value:
    """Write down what a call does; what its last effect gives is its result."""
    result = NOTHING
    for one in effects:
        pointer = values.get(one.pointer, NOTHING)
        order = written(walker, node, "sem" if name.startswith("tl.") else "order", values,
                        one.order)  # fmt: skip
        walker.emit(
            one.kind, name, node, options=values,
            pointer=_there(walker, pointer, values.get(one.to, NOTHING)) if one.to else pointer,
            value=values.get(one.value, one.default), to=values.get(one.to), order=order,
            scope=written(walker, node, "scope", values, one.scope),
        )  # fmt: skip
        result = one.gives(pointer)
    return result


def _there(walker: Walker, pointer: Value, to: Value) -> Value:
    """`pointer` on rank `to`, which may be the own one."""
    is_own = to.form == RANK or (to.number is not None and to.number == walker.own_rank())
    return replace(pointer, remote=not is_own)


HANDLERS.update({name: partial(_act, name, effects) for name, effects in EFFECTS.items()})
HANDLERS.update({name: lambda w, n, v, result=result: result for name, result in GIVES.items()})
HANDLERS.update({
    name: lambda w, n, values, which=which: values.get(which, NOTHING)
    for name, which in HANDS_ON.items()
})  # fmt: skip


@handles("wl.at")
def _at(walker: Walker, node: ast.Call, values: Arguments) -> Value:
    pointer, peer = values.get("ptr", NOTHING), values.get("peer", NOTHING)
    walker.emit("address", "wl.at", node, pointer=pointer, to=peer)
    return _there(walker, pointer, peer)


@handles("tl.cast")
def _cast(walker: Walker, node: ast.Call, values: Arguments) -> Value:
    return as_address(walker, values.get("input", NOTHING), word(node, "dtype", 1), node)


@handles("tl.inline_asm_elementwise", "gl.inline_asm_elementwise")
def _assembly(walker: Walker, node: ast.Call, values: Arguments) -> Value:
    walker.emit("assembly", "tl.inline_asm_elementwise", node, options=values)
    for pointer in values.get("args", NOTHING).items:
        walker.emit("opaque", "tl.inline_asm_elementwise", node, pointer=pointer)
    return Value(traits=frozenset({DATA}))
