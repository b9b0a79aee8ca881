"""Runs a user's SPMD script, unchanged, on every emulated rank.

Each rank runs the script as `__main__` with globals, arguments, environment and imported
neighbours of its own, as if a launcher had started one process per rank.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, ModuleType, TracebackType
from typing import Any

import torch.multiprocessing

from weft.base.errors import UsageError
from weft.base.place import Frame, Place
from weft.base.report import Finding, Report, Side
from weft.base.user_place import is_users, user_place
from weft.emulator.context import current
from weft.emulator.session import Session, emulated


def run_script(
    path: str, args: Sequence[str] = (), ranks: int | None = None, **options: Any
) -> Report:
    """Run the script at `path` with `args` on every rank; what is found is in the report.

    An exception of the script, or an exit code other than 0, is a finding of kind "error".
    `options` are those of `emulated`.

    Raises  UsageError: there is no such file, or it is no Python
    """
    path = os.path.abspath(path)
    _compile(path)  # what is wrong with it is said before anything begins
    folder, name = os.path.split(path)
    options = {"name": name, "local_root": folder, "collect": True, **options}
    with emulated(ranks, **options) as session, _import_path(folder), _spawning(session.num_ranks):
        # A code for each rank: torch.compile keeps what it makes of a function with its code.
        mains = [
            _main_of(session, rank, path, _compile(path), args) for rank in range(session.num_ranks)
        ]
        session.run_each(mains, raising=False)
        for rank, error in sorted(session.errors.items()):
            if not _is_clean_exit(error):
                session.report.add(finding_of(error, rank))
        return session.report


def _compile(path: str) -> CodeType:
    try:
        with open(path, "rb") as file:
            return compile(file.read(), path, "exec", dont_inherit=True)
    except OSError as error:
        raise UsageError(f"cannot read the script {path}: {error.strerror}") from None
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        place = Place((Frame(path, line),)) if line else Place()
        raise UsageError(f"{path} is not Python: {error}", place=place) from None


def _main_of(
    session: Session, rank: int, path: str, code: CodeType, args: Sequence[str]
) -> Callable[[], None]:
    """The script as one rank's `__main__`."""
    module = ModuleType("__main__")
    module.__dict__.update(__file__=path, __builtins__=__builtins__)
    session.isolation.set_main(rank, module)

    def main() -> None:
        sys.argv = [path, *args]
        exec(code, module.__dict__)

    return main


@contextmanager
def _import_path(folder: str) -> Iterator[None]:
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        if folder in sys.path:
            sys.path.remove(folder)


@contextmanager
def _spawning(ranks: int) -> Iterator[None]:
    """`torch.multiprocessing.spawn` in a script: every rank is there already and runs its part."""
    own = torch.multiprocessing.spawn

    def spawn(fn, args=(), nprocs=1, join=True, *more: Any, **options: Any):
        context = current()
        if context is None:
            return own(fn, args, nprocs, join, *more, **options)
        if nprocs != ranks:
            raise UsageError(
                f"the script spawns {nprocs} processes, but --ranks is {ranks}; run it "
                f"with --ranks {nprocs}",
                place=user_place(),
            )
        fn(context.rank, *args)
        return None if join else _Joined()

    torch.multiprocessing.spawn = spawn  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.multiprocessing.spawn = own


class _Joined:
    """What `spawn(join=False)` returns, once the rank's part has ended."""

    processes: tuple = ()

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        return True


def _is_clean_exit(error: BaseException) -> bool:
    return isinstance(error, SystemExit) and error.code in (None, 0)


# Below Triton's compiled module a stock Triton has no others.
FORKED = "triton._C.libtriton."
OF_A_FORK = (
    "this is part of a fork of Triton (Triton-distributed's dl.* is): weft runs what is written for"
    " stock Triton; docs/memory_model.md says what its words are in weft.language"
)
# Triton names the type that no kernel takes, and not what to do.
PASS_ARG = "pass world.arg: it is what kernels take, as the argument they call `world`"


def finding_of(error: BaseException, rank: int | None) -> Finding:
    """An exception that ended a rank's code, with the script's own line."""
    place = getattr(error, "place", None) or Place()
    if not place.frames:
        place = _place_of(error.__traceback__)
    said = getattr(error, "message", None) or str(error)
    if isinstance(error, SystemExit):
        message = f"the script exits with {error.code!r}"
    else:
        message = f"{type(error).__name__}: {said}" if said else type(error).__name__
    remedy = PASS_ARG if isinstance(error, TypeError) and said.endswith("type: World") else ""
    if isinstance(error, ModuleNotFoundError) and (error.name or "").startswith(FORKED):
        remedy = OF_A_FORK
    side = Side.at(place, rank=rank, kernel="host", note="raises")
    return Finding("error", message, side, remedy=remedy)


def _place_of(trace: TracebackType | None) -> Place:
    """The user's innermost frame of a traceback, then the chain into weft."""
    frames: list[Frame] = []
    for frame, line in traceback.walk_tb(trace):
        code = frame.f_code
        here = Frame(code.co_filename, line, code.co_name)
        kind = is_users(code.co_filename)
        if kind is True and not (frames and code.co_filename == "<string>"):
            frames = [here]  # generated code, such as a dataclass's __init__, has no line to show
        elif kind is None and frames:
            frames.append(here)
    return Place(tuple(frames))
