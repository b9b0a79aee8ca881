"""What Triton's functions do, for lint."""

from __future__ import annotations

import ast

from weft.verify.lint.calls import ATOMICS, Arguments, as_address, handles, loaded, word, written
from weft.verify.lint.device import Walker
from weft.verify.lint.values import (
    DATA,
    NOTHING,
    NUM_PROGRAMS,
    PROGRAM,
    TICKET,
    TILE,
    TILE_DATA,
    Value,
    exactly,
)


@handles("tl.cast")
def _cast(walker: Walker, node: ast.Call, values: Arguments) -> Value:
    value, kind = values.get("input", NOTHING), word(node, "dtype", 1)
    return as_address(walker, value, kind, node)


@handles("tl.load")
def _load(walker: Walker, node: ast.Call, values: Arguments) -> Value:
    pointer = values.get("pointer", NOTHING)
    walker.emit("load", "tl.load", node, pointer=pointer, options=values)
    return loaded(pointer)


@handles("tl.store")
def _store(walker: Walker, node: ast.Call, values: Arguments) -> Value:
    pointer, value = values.get("pointer", NOTHING), values.get("value", NOTHING)
    walker.emit("store", "tl.store", node, pointer=pointer, value=value)
    return NOTHING


@handles(*(f"tl.atomic_{op}" for op in (*ATOMICS, "cas", "load", "store")))
def _atomic(walker: Walker, node: ast.Call, values: Arguments) -> Value:
    name = walker.source.spelling(node.func)
    pointer = values.get("pointer", NOTHING)
    walker.emit(
        "atomic",
        name,
        node,
        pointer=pointer,
        value=values.get("val", NOTHING),
        order=written(walker, node, "sem", values, "acq_rel"),
        scope=written(walker, node, "scope", values, "gpu"),
        options=values,
    )
    return loaded(pointer, TICKET)


@handles("tl.atomic_poll")
def _atomic_poll(walker: Walker, node: ast.Call, values: Arguments) -> Value:
    walker.emit(
        "wait",
        "tl.atomic_poll",
        node,
        pointer=values.get("pointer", NOTHING),
        value=values.get("val", NOTHING),
        order=written(walker, node, "sem", values, "acquire"),
        scope=written(walker, node, "scope", values, "gpu"),
    )
    return NOTHING


@handles("tl.debug_barrier", "gl.thread_barrier", "gl.barrier")
def _block_barrier(walker: Walker, node: ast.Call, values: Arguments) -> Value:
    walker.emit("block barrier", "tl.debug_barrier", node)
    return NOTHING


@handles("tl.inline_asm_elementwise", "gl.inline_asm_elementwise")
def _assembly(walker: Walker, node: ast.Call, values: Arguments) -> Value:
    walker.emit("assembly", "tl.inline_asm_elementwise", node, options=values)
    for pointer in values.get("args", NOTHING).items:
        walker.emit("opaque", "tl.inline_asm_elementwise", node, pointer=pointer)
    return Value(traits=frozenset({DATA}))


@handles("tl.dot", "tl.dot_scaled")
def _dot(walker: Walker, node: ast.Call, values: Arguments) -> Value:
    walker.emit("dot", "tl.dot", node)
    return Value(traits=frozenset({DATA, TILE, TILE_DATA}))


@handles("tl.store_tensor_descriptor")
def _descriptor_store(walker: Walker, node: ast.Call, values: Arguments) -> Value:
    walker.emit("descriptor store", "tl.store_tensor_descriptor", node,
                pointer=values.get("desc", NOTHING))  # fmt: skip
    return NOTHING


@handles("tl.load_tensor_descriptor")
def _descriptor_load(walker: Walker, node: ast.Call, values: Arguments) -> Value:
    walker.emit("descriptor load", "tl.load_tensor_descriptor", node,
                pointer=values.get("desc", NOTHING))  # fmt: skip
    return Value(traits=frozenset({DATA, TILE, TILE_DATA}))


@handles("tl.make_tensor_descriptor", "tl.make_block_ptr")
def _descriptor(walker: Walker, node: ast.Call, values: Arguments) -> Value:
    return values.get("base", NOTHING)


@handles("tl.arange")
def _arange(walker: Walker, node: ast.Call, values: Arguments) -> Value:
    return Value(traits=frozenset({TILE}))


@handles("tl.zeros", "tl.full")
def _full(walker: Walker, node: ast.Call, values: Arguments) -> Value:
    return Value(traits=frozenset({TILE}))


@handles("tl.program_id")
def _program(walker: Walker, node: ast.Call, values: Arguments) -> Value:
    return exactly(PROGRAM)


@handles("tl.num_programs")
def _programs(walker: Walker, node: ast.Call, values: Arguments) -> Value:
    return exactly(NUM_PROGRAMS)
