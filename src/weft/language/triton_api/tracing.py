"""While a kernel is traced: builtins that know their target and call `@triton.jit` code.

Of Triton: `builtin` and the types of `triton.language.core`; of a builtin's `_semantic` its
builder, with the options that the kernel is compiled with; of its `_generator` the call of a jit
function, the place that is traced and the builder's location; the cache key of jit callables and of
aggregates.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import triton
from triton.language import core

constexpr = core.constexpr
INT1, INT32, INT64 = core.int1, core.int32, core.int64
FLOAT32 = core.float32


def builtin(fn: Callable) -> Callable:
    """Make `fn` callable from kernels; it receives `_semantic` and `_generator` by keyword."""
    return core.builtin(fn)


class _SourceStamp(triton.runtime.jit.JITCallable):
    """Something that only has a cache key: what it stamps enters the key of kernels using it."""

    def __init__(self, version: Callable[[], int]) -> None:  # no source of its own to parse
        self.version = version
        self.used_global_vals: dict = {}
        self.__name__ = "weft_source_stamp"

    @property
    def cache_key(self) -> str:
        return f"weft-{self.version()}"


def stamped_builtin(fn: Callable, version: Callable[[], int]) -> Callable:
    """A builtin whose `version()` enters the cache key of every kernel that mentions it.

    Triton leaves builtins out of its keys, and with them the `@triton.jit` code they call; but
    it does look into what calls itself an aggregate.
    """
    traced = core.builtin(fn)
    traced.__triton_aggregate__ = True
    traced.hash_attrs = [_SourceStamp(version)]
    return traced


class Traced:
    """What is called from kernels as a builtin is: a subclass has `__call__`, which receives
    `_semantic` and `_generator` by keyword; its text enters the names of traced functions."""

    __triton_builtin__ = True


def unwrap(value: Any) -> Any:
    """The Python value of a constexpr; anything else unchanged."""
    return value.value if isinstance(value, core.constexpr) else value


def is_tensor(value: Any) -> bool:
    """Is `value` a traced tensor (or scalar) rather than a compile-time constant?"""
    return isinstance(value, core.tensor)


def is_pointer(value: Any) -> bool:
    return is_tensor(value) and value.dtype.is_ptr()


def to_tensor(semantic: Any, value: Any) -> Any:
    """`value` as a traced tensor: Python numbers become scalars."""
    return value if is_tensor(value) else semantic.to_tensor(unwrap(value))


def backend_name(semantic: Any) -> str:
    """The compile target's backend, "cuda", "hip" or "emu": not the active driver's."""
    return semantic.builder.options.backend_name


def cuda_arch(semantic: Any) -> int:
    """The compute capability that is compiled for, times ten: 80, 90, 100; 0 when not CUDA."""
    if backend_name(semantic) != "cuda":
        return 0
    return int(re.sub(r"\D", "", str(semantic.builder.options.arch)))


def is_gluon(semantic: Any) -> bool:
    """Is a Gluon kernel traced, whose new tiles need layouts?"""
    return type(semantic).__name__ == "GluonSemantic"


def cast(semantic: Any, value: Any, dtype: Any) -> Any:
    """`value`, a number or a traced scalar, as a traced value of `dtype`."""
    if not is_tensor(value):
        return semantic.scalar_constant(unwrap(value), dtype)
    return semantic.cast(value, dtype)


def reshape(semantic: Any, value: Any, shape: Sequence[int]) -> Any:
    """A tile in another shape, its elements in the same order."""
    return core.reshape(value, list(shape), _semantic=semantic)


def num_warps(semantic: Any) -> int:
    """With how many warps the kernel is launched."""
    return semantic.builder.options.num_warps


def is_tuple(value: Any) -> bool:
    return isinstance(value, core.tuple)


def tuple_fields(value: Any) -> tuple[str, ...]:
    """The field names of a named tuple that a kernel was handed; empty for anything else."""
    return tuple(value.type.fields or ()) if is_tuple(value) else ()


def is_one_of(*kinds: Any) -> Callable:
    """A builtin: is what a kernel was handed one of these named tuples? A constant."""
    known = [kind._fields for kind in kinds]

    @builtin
    def is_one(value, _semantic=None):
        return constexpr(tuple_fields(value) in known)

    return is_one


def make_tuple(values: Sequence[Any]) -> Any:
    """A traced tuple, to be handed to `@triton.jit` code."""
    return core.tuple(list(values))


def taken_apart(value: Any) -> tuple[list[Any], Any]:
    """The traced values in a tuple, however deep, and its form, which has its constants.

    Triton 3.6 forgets constants of tuples in tuples where a branch or a loop ends.
    """
    if isinstance(value, core.tuple):
        parts = [taken_apart(one) for one in value.values]
        form = ("tuple", tuple(value.type.fields or ()), tuple(inner for _, inner in parts))
        return [leaf for leaves, _ in parts for leaf in leaves], form
    if isinstance(value, core.constexpr):
        return [], ("constant", value.value)
    return [value], ("value",)


def put_together(form: Any, leaves: Iterator[Any]) -> Any:
    """What `taken_apart` took apart."""
    if form[0] == "tuple":
        values = [put_together(inner, leaves) for inner in form[2]]
        kind = core.tuple_type([one.type for one in values], list(form[1]) or None)
        return core.tuple(values, kind)
    return next(leaves) if form[0] == "value" else constexpr(form[1])


def call_jit(generator: Any, fn: Any, args: Sequence[Any]) -> Any:
    """Call a `@triton.jit` function from a builtin; constants become constexprs. None where it
    returns nothing, which Triton 3.7 calls a constant."""
    wrapped = [arg if isinstance(arg, core.base_value) else constexpr(arg) for arg in args]
    made = generator.call_JitFunction(fn, wrapped, {})
    return None if isinstance(made, core.constexpr) and made.value is None else made


@contextmanager
def at_line(generator: Any, file: str, line: int) -> Iterator[None]:
    """What is traced in the brackets is said to stand at this line; where there is none, at the
    line that is traced."""
    builder = generator.builder
    before = builder.get_loc()
    if file:
        builder.set_loc(builder.create_loc(file, line, 0))
    try:
        yield
    finally:
        builder.set_loc(before)


def enclosing_scope(generator: Any) -> Mapping[str, Any]:
    """The variables of the device function that is being traced, by name."""
    return generator.lscope


def enclosing_function(generator: Any) -> str:
    """The name of the device function that is being traced."""
    return getattr(generator, "function_name", "") or ""


def enclosing_name(generator: Any) -> str:
    """The name of that function as its author wrote it."""
    return generator.jit_fn.__name__


def enclosing_line(generator: Any) -> int:
    """The line of the source file that is being traced; 0 when unknown."""
    node = generator.cur_node
    return generator.begin_line + node.lineno if hasattr(node, "lineno") else 0


def extern(semantic: Any, symbol: str, args: Sequence[Any], result: Any, shape: Sequence[int] = ()):
    """An opaque, impure operation named `symbol`; only the emulator knows what it means.

    `result` is the element dtype (or pointer type) of what it returns, `shape` its shape; in Gluon
    it has the layout of the first operand that has one.
    """
    tensors = [to_tensor(semantic, arg) for arg in args]
    kind = core.block_type(result, list(shape)) if shape else result
    if shape and is_gluon(semantic):
        like = next(tensor.type for tensor in tensors if tensor.type.is_block())
        kind = type(like)(result, list(shape), like.layout)
    handles = [tensor.handle for tensor in tensors]
    ir_type = kind.to_ir(semantic.builder)
    value = semantic.builder.create_extern_elementwise("", "", symbol, handles, ir_type, False)
    return core.tensor(value, kind)


def link_library(semantic: Any, name: str, path: str) -> None:
    """The kernel that is being traced is linked with the LLVM bitcode at `path`.

    Triton has read its cache's key by now: what decides whether a kernel comes here, and the
    library's version, must be in the kernel's arguments or source.
    """
    options = semantic.builder.options
    libraries = dict(options.extern_libs or ())
    if libraries.setdefault(name, path) == path:
        object.__setattr__(options, "extern_libs", tuple(libraries.items()))


@core.builtin
def assembly(text, constraints, *operands, dtype=INT32, is_pure=False, _semantic=None):
    """One line of a target's assembly for each element of the operands, whose $0 is of `dtype`.

    Unless it is pure, compilers neither move it across other such lines nor leave it out.
    """
    return core.inline_asm_elementwise(
        unwrap(text), unwrap(constraints), list(operands), unwrap(dtype), unwrap(is_pure), 1,
        _semantic=_semantic,
    )  # fmt: skip
