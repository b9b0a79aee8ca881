"""What weft's primitives do, for lint."""

from __future__ import annotations

import ast
from dataclasses import replace

from weft.verify.lint.calls import Arguments, handles, loaded, written
from weft.verify.lint.device import Walker
from weft.verify.lint.values import (
    DATA,
    NOTHING,
    NUM_RANKS,
    RANK,
    TICKET,
    TILE,
    TILE_DATA,
    Value,
    exactly,
)


@handles("wl.rank")
def _rank(walker: Walker, node: ast.Call, values: Arguments) -> Value:
    return exactly(RANK)


@handles("wl.num_ranks")
def _num_ranks(walker: Walker, node: ast.Call, values: Arguments) -> Value:
    return exactly(NUM_RANKS)


@handles("wl.at")
def _at(walker: Walker, node: ast.Call, values: Arguments) -> Value:
    pointer, peer = values.get("ptr", NOTHING), values.get("peer", NOTHING)
    walker.emit("address", "wl.at", node, pointer=pointer, to=peer)
    return _there(walker, pointer, peer)


def _there(walker: Walker, pointer: Value, to: Value) -> Value:
    """`pointer` on rank `to`, which may be the own one."""
    is_own = to.form == RANK or (to.number is not None and to.number == walker.own_rank())
    return replace(pointer, remote=not is_own)


def _ordered(walker: Walker, node: ast.Call, values: Arguments, order: str) -> dict[str, object]:
    return {
        "order": written(walker, node, "order", values, order),
        "scope": written(walker, node, "scope", values, "sys"),
        "options": values,
    }


@handles("wl.notify", "wl.notify_all", "wl.notify_warp")
def _notify(walker: Walker, node: ast.Call, values: Arguments) -> Value:
    to = values.get("to", NOTHING)
    walker.emit(
        "notify",
        walker.source.spelling(node.func),
        node,
        pointer=_there(walker, values.get("signal", NOTHING), to),
        value=values.get("value", Value(number=1)),
        to=to if "to" in values else None,
        **_ordered(walker, node, values, "release"),
    )
    return NOTHING


@handles("wl.put", "wl.put_nbi", "wl.put_packets", "wl.put_signal", "wl.put_signal_warp")
def _put(walker: Walker, node: ast.Call, values: Arguments) -> Value:
    name, to = walker.source.spelling(node.func), values.get("to", NOTHING)
    walker.emit("put", name, node, pointer=_there(walker, values.get("dst", NOTHING), to),
                value=values.get("src", NOTHING), to=to, options=values)  # fmt: skip
    if name.startswith("wl.put_signal"):
        walker.emit(
            "notify",
            name,
            node,
            pointer=_there(walker, values.get("signal", NOTHING), to),
            value=values.get("value", Value(number=1)),
            to=to,
            **_ordered(walker, node, values, "release"),
        )
    return NOTHING


@handles("wl.get", "wl.get_nbi")
def _get(walker: Walker, node: ast.Call, values: Arguments) -> Value:
    walker.emit("get", walker.source.spelling(node.func), node,
                pointer=_there(walker, values.get("src", NOTHING), values.get("source", NOTHING)),
                value=values.get("dst", NOTHING), to=values.get("source", NOTHING))  # fmt: skip
    return NOTHING


@handles("wl.wait", "wl.test")
def _wait(walker: Walker, node: ast.Call, values: Arguments) -> Value:
    name = walker.source.spelling(node.func)
    walker.emit(
        name.split(".")[1],
        name,
        node,
        pointer=values.get("signal", NOTHING),
        value=values.get("at_least", NOTHING),
        count=values.get("count", Value(number=1)),
        **_ordered(walker, node, values, "acquire"),
    )
    return NOTHING


@handles("wl.wait_packets")
def _wait_packets(walker: Walker, node: ast.Call, values: Arguments) -> Value:
    walker.emit("wait", "wl.wait_packets", node, pointer=values.get("packets", NOTHING),
                value=values.get("flag", NOTHING), order="acquire", scope="sys")  # fmt: skip
    return Value(traits=frozenset({DATA, TILE, TILE_DATA}))


@handles("wl.load", "wl.store", "wl.atomic_add", "wl.atomic_exchange", "wl.atomic_cas")
def _word(walker: Walker, node: ast.Call, values: Arguments) -> Value:
    name = walker.source.spelling(node.func)
    plain_orders = {"wl.load": "relaxed", "wl.store": "relaxed"}
    pointer = values.get("ptr", NOTHING)
    walker.emit("atomic", name, node, pointer=pointer, value=values.get("value", NOTHING),
                **_ordered(walker, node, values, plain_orders.get(name, "acq_rel")))  # fmt: skip
    return loaded(pointer, DATA if name == "wl.load" else TICKET)


@handles("wl.barrier", "wl.barrier_grid")
def _barrier(walker: Walker, node: ast.Call, values: Arguments) -> Value:
    walker.emit("barrier", walker.source.spelling(node.func), node, order="acq_rel", scope="sys",
                pointer=values.get("counter", NOTHING))  # fmt: skip
    return NOTHING


@handles("wl.fence", "wl.quiet")
def _fence(walker: Walker, node: ast.Call, values: Arguments) -> Value:
    walker.emit("fence", walker.source.spelling(node.func), node, order="release")
    return NOTHING


@handles("wl.complete_stores")
def _complete(walker: Walker, node: ast.Call, values: Arguments) -> Value:
    walker.emit("complete", "wl.complete_stores", node)
    return NOTHING


@handles("wl.consume")
def _consume(walker: Walker, node: ast.Call, values: Arguments) -> Value:
    return values.get("value", NOTHING)


@handles("wl.slot_wait_free")
def _slot_wait_free(walker: Walker, node: ast.Call, values: Arguments) -> Value:
    if "slot" in values:
        walker.emit("wait", "wl.slot_wait_free", node, pointer=values["slot"],
                    order="acquire", scope="sys")  # fmt: skip
    return NOTHING


@handles("wl.slot_finish")
def _slot_finish(walker: Walker, node: ast.Call, values: Arguments) -> Value:
    if "slot" in values:
        walker.emit("notify", "wl.slot_finish", node, pointer=values["slot"],
                    order="release", scope="sys")  # fmt: skip
    return NOTHING


@handles("wl.next_task")
def _next_task(walker: Walker, node: ast.Call, values: Arguments) -> Value:
    walker.emit("atomic", "wl.next_task", node, pointer=values.get("counter", NOTHING),
                order="relaxed", scope="gpu")  # fmt: skip
    return Value(traits=frozenset({TICKET}))
