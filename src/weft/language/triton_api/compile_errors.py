"""Triton's compilation errors, with the user's line.

Of Triton: `CompilationError`, with the node it is about and the source of its function; a
`JITFunction`'s source and Python function; of the scan for what a kernel depends on, which runs
before it is traced, the variables `self` and `node` in a traceback.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
from collections.abc import Mapping, Sequence
from types import TracebackType

import triton
from triton.compiler.errors import CompilationError

from weft.base.errors import CompileError, WeftError
from weft.base.place import Frame, Place

JITFunction = triton.runtime.jit.JITFunction
Scan = triton.runtime.jit.DependenciesFinder
# An exception as Triton writes it: its `repr`.
WRITTEN = re.compile(r"""(\w+)\((['"])(.*)\2\)""", re.DOTALL)


def compile_error(
    error: CompilationError, kernel: str, target: str, fn: JITFunction | None = None
) -> WeftError:
    """Triton's compilation error with the user's line first, of the kernel `fn` where it is known.

    What a primitive raised while it was traced keeps its class; the rest is a CompileError.
    """
    chain = []
    reason: BaseException = error
    while isinstance(reason, CompilationError):
        chain.append(reason)
        if reason.__cause__ is None:
            break
        reason = reason.__cause__
    text = str(reason).strip() or type(reason).__name__
    if isinstance(reason, CompilationError):
        text = (reason.error_message or "").strip() or text.splitlines()[-1]
        if written := WRITTEN.fullmatch(text):
            text = f"{written[1]}: {written[3]}"
    # A list first: a tuple must not be half built while the collector's objects are walked.
    # A call that raises is met twice, as the caller's node and as the callee's.
    functions = _functions_with({one.src for one in chain}, fn)
    places = [_frame_of(one, functions, fn) for one in chain]
    frames = [frame for frame, _ in itertools.groupby(places) if frame]
    place = Place(tuple(frames))
    if isinstance(reason, WeftError):
        return type(reason)(f"{reason.message} (in {kernel}, for {target})", place=place)
    return CompileError(f"{kernel} does not compile for {target}: {text}", place=place)


def scan_error(error: BaseException, target: str) -> CompileError | None:
    """What Triton met while it looked for what a kernel depends on, such as a name that a module
    has not, with the kernel's line; None where the error is of another kind."""
    functions: list[tuple[JITFunction, int]] = []
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        names = trace.tb_frame.f_locals
        by, node = names.get("self"), names.get("node")
        if isinstance(by, JITFunction) and trace.tb_frame.f_code.co_name == "cache_key":
            functions.append((by, 1))
        elif isinstance(by, Scan) and isinstance(node, ast.AST) and functions:
            functions[-1] = functions[-1][0], getattr(node, "lineno", functions[-1][1])
        trace = trace.tb_next
    if not functions or isinstance(error, WeftError):
        return None
    frames = [Frame(file_of(fn), first_line(fn) + line - 1) for fn, line in functions]
    text = str(error) if isinstance(error, AttributeError) else f"{type(error).__name__}: {error}"
    kernel = functions[0][0].__name__
    return CompileError(
        f"{kernel} does not compile for {target}: {text}", place=Place(tuple(frames))
    )


def file_of(fn: JITFunction) -> str:
    return inspect.getsourcefile(fn.fn) or fn.fn.__code__.co_filename


def first_line(fn: JITFunction) -> int:
    """The line of `def`, from which Triton counts: decorators stand above it."""
    lines, start = inspect.getsourcelines(fn.fn)
    return start + next(i for i, line in enumerate(lines) if line.lstrip().startswith("def "))


def _frame_of(
    error: CompilationError, functions: Mapping[str, Sequence[JITFunction]], fn: JITFunction | None
) -> Frame | None:
    node = error.node
    if node is None or error.src is None:
        return None
    # Triton numbers lines within the function; the file is found by its text. Of copies of a file
    # the kernel's own is meant.
    found = functions[error.src]
    if not found:
        return Frame("<kernel>", node.lineno)
    own = file_of(fn) if fn is not None else None
    meant = next((one for one in found if file_of(one) == own), found[0])
    return Frame(file_of(meant), first_line(meant) + node.lineno - 1)


def _functions_with(
    sources: set[str], fn: JITFunction | None
) -> Mapping[str, Sequence[JITFunction]]:
    """By text the jit functions that have it; of that of `fn`, it alone."""
    import gc

    found: dict[str, list[JITFunction]] = {source: [] for source in sources}
    if fn is not None and fn.src in found:
        found[fn.src].append(fn)
    missing = {source for source, functions in found.items() if not functions}
    for candidate in gc.get_objects() if missing else ():
        # By type: isinstance would ask every object, deprecated ones too, for its __class__.
        if issubclass(type(candidate), JITFunction) and candidate.src in missing:
            found[candidate.src].append(candidate)
    return found
