"""What docs/compiler.md says of programs by tables: one followed to its kernels."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from weft.compiler import (
    Facts,
    Shard,
    Tensor,
    all_gather,
    gather_rows,
    grouped_matmul,
    moe_route,
    pipeline,
    reduce_scatter,
    scatter_rows,
    silu_mul,
)
from weft.compiler.frontend import trace
from weft.compiler.lower import kernels
from weft.compiler.passes.place import place
from weft.ir import core, device, task
from weft.ir.device import Channel, Launch

PARAMETERS = {
    "x": Tensor("bfloat16", ("m", 4096), Shard(0)),
    "logits": Tensor("bfloat16", ("m", 128), Shard(0)),
    "up": Tensor("bfloat16", (128, 4096, 3072), Shard(2)),
    "down": Tensor("bfloat16", (128, 1536, 4096), Shard(1)),
}


def moe(x, logits, up, down):
    routing = moe_route(logits, top_k=8)
    h = silu_mul(grouped_matmul(gather_rows(all_gather(x), routing), up, routing))
    return reduce_scatter(scatter_rows(grouped_matmul(h, down, routing), routing))


def section(call: Facts) -> Iterator[str]:
    """A mixture of experts, for this call."""
    placed = place(trace(moe, "tp", PARAMETERS))
    plan = pipeline.overlap(placed, call).plan
    tasks = [one for one in placed.tasks if one.kind != "input"]
    yield BEGIN
    yield _code(inspect.getsource(moe))
    yield TYPED
    yield _code(task.text.show(tasks, places=False))
    yield DRAWN
    told = [one for one in plan.statements if isinstance(one, Channel | Launch | device.Call)]
    yield _code(device.text.show(told, places=False))
    yield WOVEN
    first = next(iter(kernels.lower(plan).values()))
    yield _code(core.show(first, places=False))
    yield END


def _code(text: str) -> str:
    return f"```python\n{text.rstrip()}\n```"


BEGIN = """\
## Rows that the device alone knows

In a mixture of experts a router says which rows go where, and the host does not wait to hear it.
Such a program works by *tables*:"""
TYPED = """\
Their type has sizes that are known: tokens, choices of each, experts. Sorted by expert there is a
row for each choice, however many an expert has."""
DRAWN = """\
The passes are those above. A gather of tokens that one product reads becomes part of it: its first
programs feed all ranks (`engine=feed`). A product whose weighted rows go back to their tokens, and
are summed, is one kernel too. A channel says of which table its tiles are."""
WOVEN = """\
In the kernels the order of tiles, the ranks that a tile waits for and those that it tells are read
from a row of the table: `lo .. hi`, the ranks whose tokens it has."""
END = """\
What bent for this is told in [014](decisions/014-mappings-by-tables.md)."""
