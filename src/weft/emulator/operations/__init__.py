"""Every TTIR operation the emulator knows, by dialect; importing this fills the table."""

from weft.emulator.operations import arithmetic, control, memory, tiles  # noqa: F401
from weft.emulator.operations.functions import LIBDEVICE
from weft.emulator.operations.table import OPERATIONS

__all__ = ["LIBDEVICE", "OPERATIONS"]
