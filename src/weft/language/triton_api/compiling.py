"""Compiling ahead of time, for a target that need not be here.

Of Triton: `GPUTarget`; `triton.compile` of an `ASTSource` (of Gluon's, where a kernel is Gluon),
whose signature, constants and attributes go by the paths of arguments.
"""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.errors import CompilationError

from weft.base.records import KernelRecord
from weft.base.target import Target
from weft.language.triton_api.compile_errors import compile_error, scan_error
from weft.language.triton_api.emulator_driver import install_emulator_backend
from weft.language.triton_api.tracing import unwrap


def gpu_target(target: Target) -> GPUTarget:
    """Triton's own record for `target`."""
    return GPUTarget(target.backend, target.arch, target.warp_size)


def compile_kernel(fn: Any, record: KernelRecord, target: Target) -> Any:
    """Compile `fn` as `record` says, for `target`; no device is needed.

    Returns Triton's compiled kernel: `.asm` holds every stage, `.metadata` what was decided.
    Raises  CompileError: with the user's line and Triton's reason; what a primitive raised
            while it was traced, with the user's line
    """
    signature, constants, attributes = _specialise(fn, record)
    # Triton 3.10 turns the fusion of multiplies and adds off by default: say it, either way.
    options = {"enable_fp_fusion": True, **record.options}
    if target.backend == "emu":
        install_emulator_backend()
    source_class = ASTSource
    if getattr(fn, "is_gluon", lambda: False)():
        from triton.experimental.gluon._runtime import GluonASTSource

        source_class = GluonASTSource
    try:
        source = source_class(fn, signature, constants, attributes)
        return triton.compile(source, target=gpu_target(target), options=options)
    except CompilationError as error:
        raise compile_error(error, record.name, target.name, fn) from error
    except Exception as error:
        if (found := scan_error(error, target.name)) is not None:
            raise found from error
        raise


def _specialise(fn: Any, record: KernelRecord) -> tuple[dict, dict, dict]:
    """Triton's signature, constants and attributes, keyed by argument path."""
    signature: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for index, name in enumerate(fn.arg_names):
        kind = record.signature.get(name, "constexpr")
        value = record.constants.get(name)
        signature[name] = _type_words(kind, value, (index,), constants)
        if kind == "constexpr":
            constants[(index,)] = value
        if name in record.divisible_by_16:
            attributes[(index,)] = [["tt.divisibility", 16]]
    for path in filter(lambda name: "." in name, record.divisible_by_16):
        place = (fn.arg_names.index(path.partition(".")[0]), *record.places_of(path))
        attributes[place] = [["tt.divisibility", 16]]
    return signature, constants, attributes


def _type_words(kind: Any, value: Any, path: tuple[int, ...], constants: dict) -> Any:
    """A nested list of type words as the tuple (or named tuple) that Triton expects."""
    if not isinstance(kind, (list, tuple)):
        return kind
    words = []
    for index, word in enumerate(kind):
        inner = value[index] if value is not None else None
        words.append(_type_words(word, inner, (*path, index), constants))
        if word == "constexpr":
            constants[(*path, index)] = unwrap(inner)
    named = value if value is not None and hasattr(value, "_fields") else None
    return type(named)(*words) if named is not None else tuple(words)
