"""The block of docs/emulator.md: the operations of TTIR that the emulator knows."""

from __future__ import annotations

from generate.blocks import table

from weft.emulator.operations import LIBDEVICE, OPERATIONS


def operations() -> str:
    """Names by dialect; what each means is said in the source's table."""
    dialects: dict[str, list[str]] = {}
    for name in sorted(OPERATIONS):
        dialect, _, operation = name.partition(".")
        dialects.setdefault(f"`{dialect}`", []).append(f"`{operation}`")
    dialects["`tl.extra.libdevice`"] = [f"`{name}`" for name in sorted(LIBDEVICE)]
    return table(("dialect", "operations"), [(one, ", ".join(dialects[one])) for one in dialects])
