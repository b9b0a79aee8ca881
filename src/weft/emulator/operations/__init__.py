"""Every TTIR and TTGIR operation the emulator knows, by dialect; importing this fills the table."""

from weft.emulator.operations import (  # noqa: F401
    arithmetic,
    control,
    gluon,
    memory,
    tensor_memory,
    tiles,
)
from weft.emulator.operations.functions import LIBDEVICE
from weft.emulator.operations.table import OPERATIONS

__all__ = ["LIBDEVICE", "OPERATIONS"]
