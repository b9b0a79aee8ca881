"""Triton's compilation errors, told with the user's line.

Of Triton: `CompilationError`, with the node it is about and the source of its function; a
`JITFunction`'s source and Python function.
"""

from __future__ import annotations

import inspect
import itertools

import triton
from triton.compiler.errors import CompilationError

from weft.base.errors import CompileError, WeftError
from weft.base.place import Frame, Place

JITFunction = triton.runtime.jit.JITFunction


def compile_error(error: CompilationError, kernel: str, target: str) -> WeftError:
    """Triton's compilation error with the user's line first.

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
    # A list first: a tuple must not be half built while the collector's objects are walked.
    # A call that raises is met twice, as the caller's node and as the callee's.
    frames = [frame for frame, _ in itertools.groupby(map(_frame_of, chain)) if frame]
    place = Place(tuple(frames))
    if isinstance(reason, WeftError):
        return type(reason)(f"{reason.message} (in {kernel}, for {target})", place=place)
    return CompileError(f"{kernel} does not compile for {target}: {text}", place=place)


def _frame_of(error: CompilationError) -> Frame | None:
    node = error.node
    if node is None or error.src is None:
        return None
    # Triton numbers lines within the function; the file is found by its text.
    for file, start in _files_with(error.src):
        return Frame(file, start + node.lineno - 1)
    return Frame("<kernel>", node.lineno)


def _files_with(source: str):
    """(file, first line) of jit functions whose text is `source`."""
    import gc

    for candidate in gc.get_objects():
        # By type: isinstance would ask every object, deprecated ones too, for its __class__.
        if issubclass(type(candidate), JITFunction) and candidate.src == source:
            lines, start = inspect.getsourcelines(candidate.fn)
            offset = next(i for i, line in enumerate(lines) if line.lstrip().startswith("def "))
            yield inspect.getsourcefile(candidate.fn), start + offset
            return
