"""What a call in a kernel means to lint: Triton's functions, weft's primitives, the file's own.

A handler takes the walker, the call and its arguments as values by parameter, writes down what is
done, and returns what the call gives.
"""

from __future__ import annotations

import ast
from collections.abc import Callable

from weft.verify.lint.device import Walker
from weft.verify.lint.signatures import signatures
from weft.verify.lint.source import Device
from weft.verify.lint.values import (
    DATA,
    NOTHING,
    OFFSET_RANK,
    RANK,
    TILE,
    UNCHECKED,
    Value,
    plain,
)

Arguments = dict[str, Value]
Handler = Callable[[Walker, ast.Call, Arguments], Value]
HANDLERS: dict[str, Handler] = {}

# Parameters of Triton's functions, as far as lint looks at them.
TRITON = {
    "load": ("pointer", "mask", "other", "boundary_check", "padding_option", "cache_modifier",
             "eviction_policy", "volatile"),
    "store": ("pointer", "value", "mask", "boundary_check", "cache_modifier"),
    "inline_asm_elementwise": ("asm", "constraints", "args", "dtype", "is_pure", "pack"),
    "atomic_cas": ("pointer", "cmp", "val", "sem", "scope"),
    "atomic_load": ("pointer", "sem", "scope"),
    "atomic_store": ("pointer", "val", "sem", "scope"),
    "atomic_poll": ("pointer", "val", "sem", "scope"),
    "store_tensor_descriptor": ("desc", "offsets", "value"),
    "load_tensor_descriptor": ("desc", "offsets"),
    "make_tensor_descriptor": ("base", "shape", "strides", "block_shape"),
    "cast": ("input", "dtype"),
}  # fmt: skip
ATOMICS = ("add", "and", "or", "xor", "max", "min", "xchg")
TRITON |= {f"atomic_{op}": ("pointer", "val", "mask", "sem", "scope") for op in ATOMICS}
KEEPS_ADDRESS = {"multiple_of", "max_contiguous", "max_constancy", "broadcast_to", "expand_dims"}
BRINGS_BACK = {"minimum", "maximum", "where", "min", "max", "clamp"}
REDUCES = {"sum", "max", "min", "argmax", "argmin", "reduce", "xor_sum"}
ORDERS = {"RELAXED": "relaxed", "ACQUIRE": "acquire", "RELEASE": "release", "ACQ_REL": "acq_rel"}
SCOPES = {"BLOCK": "cta", "DEVICE": "gpu", "SYSTEM": "sys"}


def handles(*names: str) -> Callable[[Handler], Handler]:
    def add(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return add


def call(walker: Walker, node: ast.Call) -> Value:
    """Evaluate one call."""
    name = walker.source.spelling(node.func)
    handler = HANDLERS.get(name)
    if handler is not None:
        return handler(walker, node, _bind(walker, node, name))
    device = _called(walker, node, name)
    if device is not None:
        return walker.follow(device, node, _by_position(walker, node, device.names))
    if isinstance(node.func, ast.Attribute) and not name.startswith(("tl.", "wl.")):
        return _method(walker, node)
    values = _values(walker, node)
    short = name.rsplit(".", 1)[-1]
    if name in walker.source.records:
        fields = tuple(walker.source.records[name])
        return Value(items=tuple(values[: len(fields)]), fields=fields[: len(values)])
    if short in BRINGS_BACK and (name.startswith("tl.") or "." not in name):
        return plain(*values).without(OFFSET_RANK, UNCHECKED, *([TILE] if short in REDUCES else []))
    if name.startswith("tl."):
        if short in KEEPS_ADDRESS and values:
            return values[0]
        return plain(*values).without(*([TILE] if short in REDUCES else []))
    if name.startswith("wl.") or name in ("int", "float", "bool", "len", "range"):
        return plain(*values)
    for value in values:
        for one in (value, *value.items):
            walker.emit("opaque", name or ast.unparse(node.func), node, pointer=one)
    return NOTHING


def _called(walker: Walker, node: ast.Call, name: str) -> Device | None:
    """The device function that is called, by its name or as a hook that was handed over."""
    if isinstance(node.func, ast.Name) and node.func.id in walker.env:
        hook = walker.env[node.func.id].number
        return hook if isinstance(hook, Device) else None
    return walker.source.device(name)


def _values(walker: Walker, node: ast.Call) -> list[Value]:
    values = []
    for argument in node.args:
        inner = argument.value if isinstance(argument, ast.Starred) else argument
        values.append(walker.eval(inner))
    return values + [walker.eval(word.value) for word in node.keywords]


def _by_position(walker: Walker, node: ast.Call, names: list[str] | tuple[str, ...]) -> Arguments:
    bound: Arguments = {}
    rest = list(names)
    for argument in node.args:
        starred = isinstance(argument, ast.Starred)
        value = walker.eval(argument.value if starred else argument)  # type: ignore[union-attr]
        for one in value.items if starred else (value,):
            if rest:
                bound[rest.pop(0)] = one
    bound.update({w.arg: walker.eval(w.value) for w in node.keywords if w.arg})
    return bound


def _bind(walker: Walker, node: ast.Call, name: str) -> Arguments:
    short = name.split(".", 1)[-1]
    if name.startswith("wl.") and short in signatures():
        return _by_position(walker, node, signatures()[short])
    return _by_position(walker, node, TRITON.get(short, ()))


def word(node: ast.Call, name: str, position: int | None = None) -> ast.expr | None:
    """The argument `name` as written."""
    for keyword in node.keywords:
        if keyword.arg == name:
            return keyword.value
    if position is not None and position < len(node.args):
        return node.args[position]
    return None


def written(walker: Walker, node: ast.Call, name: str, values: Arguments, default: str) -> str:
    """An order or scope as a word; "" where it is not known."""
    if name not in values:
        return default
    if isinstance(values[name].number, str):
        return str(values[name].number)
    expression = word(node, name)
    last = walker.source.spelling(expression).rsplit(".", 1)[-1] if expression else ""
    return {**ORDERS, **SCOPES}.get(last, "")


def _method(walker: Walker, node: ast.Call) -> Value:
    """`x.to(...)`, `desc.load(...)`, and what tensors can do by themselves."""
    assert isinstance(node.func, ast.Attribute)
    target, what = walker.eval(node.func.value), node.func.attr
    values = _values(walker, node)
    if what in ("to", "cast"):
        return _converted(walker, target, node)
    if what in ("store", "scatter", "atomic_add") and values:
        pointer = target if target.roots else NOTHING
        kind = "descriptor store"
        walker.emit(kind, f".{what}", node, pointer=pointer, value=values[-1])
        return NOTHING
    if what in ("load", "gather"):
        walker.emit("descriptor load", f".{what}", node, pointer=target)
        return Value(traits=frozenset({DATA, TILE}))
    if what in REDUCES:
        return plain(target, *values).without(TILE)
    if what in ("item", "reshape", "trans", "permute", "broadcast_to", "value"):
        return target
    if not target.roots and not any(value.roots for value in values):
        return plain(target, *values)
    for value in (target, *values):
        walker.emit("opaque", what, node, pointer=value)
    return NOTHING


def _converted(walker: Walker, value: Value, node: ast.Call) -> Value:
    kind = node.args[0] if node.args else word(node, "dtype")
    return as_address(walker, value, kind, node)


def as_address(walker: Walker, value: Value, kind: ast.expr | None, node: ast.Call) -> Value:
    """A number from a table of addresses, once it is called a pointer."""
    if value.entry is None or kind is None or "pointer_type" not in ast.unparse(kind):
        return value
    walker.emit("address", "a table of addresses", node, pointer=value.entry, to=value.index)
    return value.entry


def loaded(pointer: Value, trait: str = DATA) -> Value:
    """What a load or an atomic gives; the world's own table holds no data."""
    if any(root.endswith(".table") for root in pointer.roots):
        return Value(traits=frozenset({TILE}) if pointer.is_tile else frozenset())
    of_tile = {TILE} if pointer.is_tile else set()
    traits = frozenset({trait, UNCHECKED} | of_tile)
    entry = index = None
    if pointer.roots:
        index = pointer.offset
        is_own = index is not None and index.form == RANK
        remote = index is not None and not is_own
        roots = frozenset(f"{root}[]" for root in pointer.roots)
        entry = Value(roots=roots, remote=remote, traits=(index or NOTHING).traits - {TILE})
    return Value(traits=traits, entry=entry, index=index)
