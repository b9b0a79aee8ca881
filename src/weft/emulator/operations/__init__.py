"""Every TTIR operation the emulator knows, by dialect; importing this fills the table."""

from weft.emulator.operations import arithmetic, control, functions, memory, tiles  # noqa: F401
from weft.emulator.operations.libdevice import LIBDEVICE
from weft.emulator.operations.table import OPERATIONS, Operation

__all__ = ["LIBDEVICE", "OPERATIONS", "Operation"]
