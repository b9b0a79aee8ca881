"""The emulator's opaque operations: a symbol that only weft.emulator gives a meaning.

Everything static is in the symbol, after ":" and separated by "."; operands are traced values.
"""

from __future__ import annotations

from weft.language import triton_api as api


def _emit(semantic, symbol, operands, dtype, like=None):
    shape = like.shape if like is not None else ()
    return api.extern(semantic, api.unwrap(symbol), operands, dtype, [api.unwrap(n) for n in shape])


@api.builtin
def same_as_first(symbol, first, *rest, _semantic=None):
    """An operation whose result has the type and shape of its first operand."""
    return _emit(_semantic, symbol, [first, *rest], first.dtype, like=first)


@api.builtin
def element_of(symbol, ptr, _semantic=None):
    """An operation on a scalar pointer whose result is of the type it points to."""
    return _emit(_semantic, symbol, [ptr], ptr.dtype.element_ty)


@api.builtin
def elements_of(symbol, ptr, *rest, _semantic=None):
    """An operation on a (tile of) pointer(s) that results in what they point to."""
    return _emit(_semantic, symbol, [ptr, *rest], ptr.dtype.element_ty, like=ptr)


@api.builtin
def boolean(symbol, *operands, _semantic=None):
    return _emit(_semantic, symbol, operands, api.INT1)


@api.builtin
def long(symbol, *operands, _semantic=None):
    return _emit(_semantic, symbol, operands, api.INT64)


@api.builtin
def token(symbol, *operands, _semantic=None):
    return _emit(_semantic, symbol, operands, api.INT32)
