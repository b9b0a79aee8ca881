"""Every TTIR operation the emulator knows, by dialect; importing this fills the table."""

from weft.emulator.operations import arithmetic, control, functions, memory, tiles  # noqa: F401
from weft.emulator.operations.libdevice import LIBDEVICE
from weft.emulator.operations.table import OPERATIONS, Operation

__all__ = ["LIBDEVICE", "OPERATIONS", "Operation", "operations_table"]

DIALECTS = {
    "arith": "Arithmetic: integers wrap, narrow floats are computed wide and rounded once",
    "math": "Functions of floats",
    "tt": "Triton's tiles, memory and calls",
    "scf": "Structured control flow",
    "cf": "Branches, as an early return makes them",
    "ub": "Values that nobody may look at",
    "gpu": "Between the threads of a block",
    "ttg": "Between the threads of a block",
    "llvm": "Hints",
}


def operations_table() -> str:
    """docs/emulator.md's list of operations, as Markdown."""
    parts = []
    for dialect, title in DIALECTS.items():
        rows = [row for row in OPERATIONS.values() if row.name.split(".")[0] == dialect]
        if not rows:
            continue
        parts.append(f"### {dialect}\n\n{title}.\n\n| operation | meaning |\n|---|---|")
        parts += [f"| `{row.name}` | {row.summary} |" for row in sorted(rows, key=_by_name)]
        parts.append("")
    names = ", ".join(f"`{name}`" for name in sorted(LIBDEVICE))
    parts.append(f"### libdevice\n\nFunctions of `tl.extra.libdevice` that are known: {names}.")
    return "\n".join(parts) + "\n"


def _by_name(row: Operation) -> str:
    return row.name
