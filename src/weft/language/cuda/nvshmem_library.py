"""Where NVSHMEM's device code is: what kernels of a world with far peers are linked with."""

from __future__ import annotations

import functools
import importlib.util
import os
import zlib
from pathlib import Path

from weft.base.errors import UnsupportedError

NAME = "libnvshmem_device.bc"
# Where its package does not say, it is looked for here: the variable is torch's too.
FOLDER_VARIABLE = "NVSHMEM_LIB_DIR"
SYSTEM_FOLDERS = ("/opt/nvidia/nvshmem/lib", "/usr/local/lib", "/usr/lib")


@functools.lru_cache(maxsize=1)
def find() -> Path:
    """The file.

    Raises  UnsupportedError: it is in none of the places
    """
    folders = _folders()
    for folder in folders:
        if (folder / NAME).is_file():
            return folder / NAME
    raise UnsupportedError(
        f"NVSHMEM's device code, {NAME}, is in none of {', '.join(map(str, folders))}; pip install "
        f"nvidia-nvshmem-cu13 in the version that torch asks for, or set {FOLDER_VARIABLE}"
    )


def _folders() -> list[Path]:
    if chosen := os.environ.get(FOLDER_VARIABLE):
        return [Path(chosen)]
    try:
        package = importlib.util.find_spec("nvidia.nvshmem")
    except ModuleNotFoundError:
        package = None
    places = package.submodule_search_locations if package is not None else ()
    return [*(Path(place) / "lib" for place in places or ()), *map(Path, SYSTEM_FOLDERS)]


@functools.lru_cache(maxsize=1)
def checksum() -> int:
    """32 bits that change with it: it becomes part of every kernel that is linked with it."""
    return zlib.crc32(find().read_bytes())
