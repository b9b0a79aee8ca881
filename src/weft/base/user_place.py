"""The user's line on the host: the innermost frame that is neither a library's nor weft's."""

from __future__ import annotations

import os
import sys
import sysconfig
from functools import cache
from importlib.util import find_spec
from types import FrameType

from weft.base.place import Frame, Place

_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_LIBRARIES = tuple(
    os.path.join(path, "")
    for path in {
        sysconfig.get_paths()["stdlib"],
        sysconfig.get_paths()["purelib"],
        sysconfig.get_paths()["platlib"],
        # Wherever they are: a checkout, a folder on PYTHONPATH.
        *(
            os.path.dirname(spec.origin)
            for spec in map(find_spec, ("triton", "torch"))
            if spec is not None and spec.origin is not None
        ),
    }
)


@cache
def _foreign(file: str) -> bool:
    return file.startswith(("<frozen", *_LIBRARIES))


def user_place() -> Place:
    """The call chain from the user's innermost frame down into weft.

    Frames of Python's and installed packages are left out. Where everything is weft's own code
    (an operator that is run by weft's tools), the chain begins at its outermost frame.
    """
    return place_of(sys._getframe(1))


def place_of(frame: FrameType | None) -> Place:
    """The same of any frame, also of another thread's."""
    inner: list[Frame] = []
    while frame is not None:
        code = frame.f_code
        file = code.co_filename
        whose = _whose(file)
        if whose == "user":
            here = Frame(file, frame.f_lineno, code.co_name)
            return Place((here, *reversed(inner)))
        if whose == "weft":
            inner.append(Frame(file, frame.f_lineno, code.co_name))
        frame = frame.f_back
    return Place(tuple(reversed(inner)))


def is_users(file: str) -> bool | None:
    """Is code from `file` the user's (True), weft's (None), or somebody else's (False)?"""
    if _foreign(file):
        return False
    return None if file.startswith(_PACKAGE) else True


_MACHINERY = (
    os.path.join(_PACKAGE, "emulator", ""),
    # What is launched by one line, again and again or from a recording, has one place.
    os.path.join(_PACKAGE, "runtime", "replays.py"),
)


@cache
def _whose(file: str) -> str:
    """ "user", "weft", or of no interest."""
    if _foreign(file) or file.startswith(_MACHINERY):
        return "nobody"
    return "weft" if file.startswith(_PACKAGE) else "user"
