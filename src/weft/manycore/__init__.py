"""Programs for a many-core machine: cores with scratchpads and DMA, as C that is compiled ahead.

    plan = weft.manycore.compile_program(mlp, {"m": 97}, num_ranks=2)
    print(weft.manycore.source(plan))
    run = weft.manycore.execute(plan, inputs)      inputs: the parts of each rank, by name

`weft run model.py:mlp --target manycore`; docs/manycore.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from weft.manycore.nest import Choices
from weft.manycore.record import MACHINES, SMALL, SW26010, Machine

if TYPE_CHECKING:
    from weft.manycore.emit import source
    from weft.manycore.lower import Plan
    from weft.manycore.run import execute
    from weft.manycore.vendor import register

__all__ = ["MACHINES", "SMALL", "SW26010", "Choices", "Machine", "compile_program", "execute",
           "register", "source"]  # fmt: skip


def compile_program(
    program: Any, sizes: Mapping[str, int] | None = None, *, num_ranks: int = 1,
    machine: Machine = SMALL, choices: Choices = Choices(),
) -> Plan:  # fmt: skip
    """A `weft.program` at these sizes, as kernels of a rank.

    Raises  UnsupportedError: a task that there is no kernel and no vendor's routine for
    """
    from weft.manycore.lower import lower

    return lower(program.stages.tasks["place"], sizes or {}, num_ranks, machine, choices)


_WHERE = {"execute": "run", "register": "vendor", "source": "emit"}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"weft.manycore has no {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"weft.manycore.{_WHERE[name]}"), name)
