"""What each argument of a primitive may be, by its name; checked while a kernel is traced.

Every check returns the argument as implementations take it: enums as their strings, numbers
that may differ from call to call as scalars of the right type.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from weft.base.errors import DtypeError, PeerError, ShapeError, UsageError
from weft.base.vocabulary import Order, Scope, SignalOp
from weft.language import triton_api as api
from weft.language.world_arg import WorldArg
from weft.language.world_layout import NUM_CHANNELS


@dataclass(frozen=True)
class Call:
    """The call that is being checked."""

    primitive: str
    orders: tuple[Order, ...]
    kinds: Mapping[str, str]
    semantic: Any

    def show(self, name: str, value: Any) -> str:
        return f"wl.{self.primitive}: {name} is {describe(value)}"


Check = Callable[[Call, str, Any, dict], Any]


def describe(value: Any) -> str:
    """A traced value in a reader's words."""
    if api.is_tensor(value):
        shape = tuple(api.unwrap(extent) for extent in value.shape)
        kind = str(value.dtype)
        return f"a tile {shape} of {kind}" if shape else f"a scalar {kind}"
    return repr(api.unwrap(value))


def is_world(value: Any) -> bool:
    """Is this traced value a kernel's world argument?"""
    return api.tuple_fields(value) == WorldArg._fields


def check_arguments(call: Call, values: dict[str, Any]) -> dict[str, Any]:
    """`values` by name, checked and converted, in the order of the declaration."""
    return {
        name: CHECKS[call.kinds.get(name, name)](call, name, value, values)
        for name, value in values.items()
    }


# ---------------------------------------------------------------------------------------------
# One check per kind of argument: (call, name, value, all values) -> converted value


def _world(call: Call, name: str, value: Any, values: dict) -> Any:
    if value is None:  # a local wait with no world in scope
        return None
    if not is_world(value):
        raise UsageError(f"{call.show(name, value)}; pass the kernel's world argument (world.arg)")
    return value


def _peer(call: Call, name: str, value: Any, values: dict) -> Any:
    constant = api.unwrap(value)
    if not api.is_tensor(value):
        if isinstance(constant, bool) or not isinstance(constant, int):
            raise UsageError(f"{call.show(name, value)}; pass a rank")
        num_ranks = api.unwrap(values["world"].num_ranks)
        if isinstance(num_ranks, int) and not 0 <= constant < num_ranks:
            raise PeerError(
                f"{call.show(name, value)}, but this world has ranks 0 to {num_ranks - 1}"
            )
    elif value.shape or not value.dtype.is_int():
        raise UsageError(f"{call.show(name, value)}; pass a rank, a scalar integer")
    return api.cast(call.semantic, value, api.INT32)


def _pointer_to(what: str, fits: Callable[[Any], bool], *, is_scalar: bool = True) -> Check:
    """A pointer, or a tile of them, to elements that fit."""

    def check(call: Call, name: str, value: Any, values: dict) -> Any:
        if is_scalar:
            _scalar_pointer(call, name, value)
        _pointers(call, name, value, values)
        if not fits(value.dtype.element_ty):
            raise DtypeError(f"{call.show(name, value)}; {what}")
        return value

    return check


def _is_word(element: Any) -> bool:
    return element.primitive_bitwidth in (32, 64)


def _scalar_pointer(call: Call, name: str, value: Any) -> None:
    if not api.is_pointer(value):
        raise UsageError(f"{call.show(name, value)}; pass a pointer such as flags + i")
    if value.shape:
        raise ShapeError(f"{call.show(name, value)}; pass a scalar pointer: one word")


def _pointers(call: Call, name: str, value: Any, values: dict) -> Any:
    if not api.is_pointer(value):
        raise UsageError(f"{call.show(name, value)}; pass a pointer, or a tile of pointers")
    return value


def _source(call: Call, name: str, value: Any, values: dict) -> Any:
    """What `put` writes: values, or pointers to them of dst's element type."""
    value = api.to_tensor(call.semantic, value)
    target = values["dst"].dtype.element_ty
    if api.is_pointer(value) and value.dtype.element_ty != target:
        raise DtypeError(f"{call.show(name, value)}, but dst holds {target}; they must agree")
    return value


def _packet_data(call: Call, name: str, value: Any, values: dict) -> Any:
    """What packets carry: 32-bit values, or pointers to them."""
    value = api.to_tensor(call.semantic, value)
    bits = _element(value).primitive_bitwidth
    if bits not in (8, 16, 32):
        raise DtypeError(f"{call.show(name, value)}; a packet carries values of 8, 16 or 32 bits")
    share = 32 // bits
    if value.shape and api.unwrap(value.shape[-1]) % share:
        raise ShapeError(f"{call.show(name, value)}; {share} neighbours of it share a packet")
    return value


def _packet_dtype(call: Call, name: str, value: Any, values: dict) -> Any:
    dtype = api.unwrap(value) or api.INT32
    if getattr(dtype, "primitive_bitwidth", 0) not in (8, 16, 32):
        raise DtypeError(f"{call.show(name, value)}; a packet carries values of 8, 16 or 32 bits")
    return dtype


def _element(value: Any) -> Any:
    return value.dtype.element_ty if api.is_pointer(value) else value.dtype


def _flag(call: Call, name: str, value: Any, values: dict) -> Any:
    return _integer_for(call, name, value, api.INT32)


def _signal_value(call: Call, name: str, value: Any, values: dict) -> Any:
    """A number that goes into, or is compared with, the signal word: cast to its type."""
    dtype = values["signal"].dtype.element_ty
    return _integer_for(call, name, value, dtype)


def _integer_for(call: Call, name: str, value: Any, dtype: Any) -> Any:
    constant = api.unwrap(value)
    if api.is_tensor(value):
        if value.shape:
            raise ShapeError(f"{call.show(name, value)}; pass a scalar")
        if not value.dtype.is_int():
            raise DtypeError(f"{call.show(name, value)}; pass an integer")
        return api.cast(call.semantic, value, dtype)
    if isinstance(constant, bool) or not isinstance(constant, int):
        raise DtypeError(f"{call.show(name, value)}; pass an integer")
    bits = dtype.primitive_bitwidth
    if not -(1 << (bits - 1)) <= constant < 1 << bits:
        raise DtypeError(f"{call.show(name, value)}, which does not fit the word's {bits} bits")
    # Comparison is modular: words above the signed range are the same bits as negative ones.
    wrapped = (constant + (1 << (bits - 1))) % (1 << bits) - (1 << (bits - 1))
    return api.cast(call.semantic, wrapped, dtype)


def _word_value(call: Call, name: str, value: Any, values: dict) -> Any:
    """A number for the word, or words, behind `ptr`: of their type."""
    dtype = values["ptr"].dtype.element_ty
    if dtype.is_int() and not (api.is_tensor(value) and value.shape):
        return _integer_for(call, name, value, dtype)
    return api.cast(call.semantic, value, dtype)


def _value(call: Call, name: str, value: Any, values: dict) -> Any:
    if "signal" in values:
        return _signal_value(call, name, value, values)
    return _word_value(call, name, value, values)


def _count(call: Call, name: str, value: Any, values: dict) -> Any:
    constant = api.unwrap(value)
    if api.is_tensor(value):
        if value.shape or not value.dtype.is_int():
            raise UsageError(f"{call.show(name, value)}; pass how many words, a scalar integer")
        return value
    if isinstance(constant, bool) or not isinstance(constant, int) or constant < 0:
        raise UsageError(f"{call.show(name, value)}; pass how many words, 0 or more")
    return value


def _num_bytes(call: Call, name: str, value: Any, values: dict) -> Any:
    constant = api.unwrap(value)
    is_number = isinstance(constant, int) and not isinstance(constant, bool)
    if not is_number or constant <= 0 or constant % 16:
        raise UsageError(f"{call.show(name, value)}; pass a constant, a multiple of 16 bytes")
    return value


def _channel(call: Call, name: str, value: Any, values: dict) -> Any:
    constant = api.unwrap(value)
    if not api.is_tensor(value) and constant not in range(NUM_CHANNELS):
        raise UsageError(f"{call.show(name, value)}; channels are 0 to {NUM_CHANNELS - 1}")
    if api.is_tensor(value) and (value.shape or not value.dtype.is_int()):
        raise UsageError(f"{call.show(name, value)}; pass a scalar integer")
    return api.cast(call.semantic, value, api.INT32)


def _mask(call: Call, name: str, value: Any, values: dict) -> Any:
    if value is None or (api.is_tensor(value) and value.dtype.is_int()):
        return value
    raise UsageError(f"{call.show(name, value)}; pass a tile of booleans, or None")


def _order(call: Call, name: str, value: Any, values: dict) -> str:
    order = _enum(call, name, value, Order)
    if order not in call.orders:
        takes = ", ".join(f"wl.Order.{each.name}" for each in call.orders)
        raise UsageError(f"{call.show(name, value)}; this primitive takes {takes}")
    return order.value


def _scope(call: Call, name: str, value: Any, values: dict) -> str:
    return _enum(call, name, value, Scope).value


def _op(call: Call, name: str, value: Any, values: dict) -> str:
    return _enum(call, name, value, SignalOp).value


def _enum(call: Call, name: str, value: Any, kind: type[enum.Enum]) -> Any:
    """Members, or their values: on Triton 3.6 a jit helper cannot be handed an enum member."""
    member = api.unwrap(value)
    if isinstance(member, kind):
        return member
    values = {each.value: each for each in kind}
    if isinstance(member, str) and member in values:
        return values[member]
    takes = ", ".join(f"wl.{kind.__name__}.{each.name}" for each in kind)
    raise UsageError(f"{call.show(name, value)}; pass one of {takes}")


WORDS_ALONE = "ordered access is to words of 32 or 64 bits"
# By parameter name; a declaration may say that a parameter is of another kind.
CHECKS: dict[str, Check] = {
    "world": _world,
    "to": _peer,
    "peer": _peer,
    "source": _peer,
    "signal": _pointer_to(
        "a signal is a word of int32 or int64", lambda element: element in (api.INT32, api.INT64)
    ),
    "counter": _pointer_to(
        "the counter is one word of int32", lambda element: element == api.INT32
    ),
    "ptr": _pointers,
    "word": _pointer_to(WORDS_ALONE, _is_word),
    "words": _pointer_to(WORDS_ALONE, _is_word, is_scalar=False),
    "value": _value,
    "compare": _word_value,
    "at_least": _signal_value,
    "count": _count,
    "num_bytes": _num_bytes,
    "channel": _channel,
    "dst": _pointers,
    "src": _source,
    "mask": _mask,
    "packets": _pointer_to(
        "packets are words of int64", lambda element: element == api.INT64, is_scalar=False
    ),
    "packet_data": _packet_data,
    "packet_dtype": _packet_dtype,
    "flag": _flag,
    "op": _op,
    "order": _order,
    "scope": _scope,
}
