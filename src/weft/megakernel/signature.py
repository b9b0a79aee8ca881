"""What a program's kernel takes: a record for ahead-of-time compilation and the checks behind."""

from __future__ import annotations

from collections.abc import Set

from weft.base.dtypes import DTYPES
from weft.base.records import KernelRecord
from weft.language.world_arg import SlotArg, WorldArg, language_version
from weft.megakernel import codegen
from weft.megakernel.bodies import bodies
from weft.megakernel.operands import Operands
from weft.megakernel.records import TaskGraph
from weft.megakernel.run import Persistent, tile_of
from weft.megakernel.tasks.scoreboard import Board

# Type words of the scoreboard's fields.
BOARD = [*["*i32"] * 5, "*i64", "*i64", "*i32", "*i32"]


def record(
    graph: TaskGraph, how: Persistent | None = None, transposed: Set[str] = frozenset()
) -> KernelRecord:
    """Of the kernel that runs `graph`; addresses, and columns that 16 divides, are said to be."""
    how = how or Persistent()
    found = bodies(graph, transposed)
    operands = Operands(graph, found, transposed)
    made = codegen.load(graph, transposed)
    mine = graph.ranks[0]
    pointers = [f"*{DTYPES[mine.buffer(name).dtype].triton}" for name in operands.buffers]
    even = [name for name in operands.sizes if not name.endswith(("_m", "_slab"))
            and operands.size(0, name) % 16 == 0 and name not in graph.sizes]  # fmt: skip
    tiles = {f"{body.name}_tile": tile_of(body) for body in found}
    signature = {
        "v": pointers, "s": ["i32"] * len(operands.sizes),
        **{name: ["constexpr"] * len(tile) for name, tile in tiles.items()},
        "board": BOARD, "slot": ["*i64", "*i32", "*i64"],
        "world": ["*i64", "constexpr", "constexpr"], "is_dynamic": "constexpr",
    }  # fmt: skip
    constants = {
        "v": made.values(*[None] * len(pointers)), "s": made.sizes(*[None] * len(operands.sizes)),
        **tiles, "board": Board(*[None] * len(BOARD)), "slot": SlotArg(None, None, None),
        "world": WorldArg(None, graph.num_ranks, language_version()),
        "is_dynamic": how.schedule == "dynamic",
    }  # fmt: skip
    divide = [*(f"v.{name}" for name in operands.buffers), *(f"s.{name}" for name in even)]
    options: dict[str, object] = {"num_warps": how.num_warps, "num_stages": how.num_stages}
    return KernelRecord(codegen.kernel_name(graph), signature, constants, options, tuple(divide))
