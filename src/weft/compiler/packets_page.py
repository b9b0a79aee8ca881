"""What docs/compiler.md says of few rows: sums by packets, followed to their kernel."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace

from weft.compiler import (
    Facts,
    Partial,
    Replicate,
    Tensor,
    all_reduce,
    pipeline,
    rms_norm,
)
from weft.compiler.frontend import trace
from weft.compiler.lower import kernels
from weft.compiler.passes.place import place
from weft.ir import core, device
from weft.ir.choice import Choice
from weft.ir.device import Buffer, Channel, Launch

PARAMETERS = {
    "x": Tensor("bfloat16", ("m", 4096), Partial()),
    "residual": Tensor("bfloat16", ("m", 4096), Replicate()),
    "weight": Tensor("bfloat16", (1, 4096), Replicate()),
}
ROWS, TWICE_ROWS = 8, 64


def between(x, residual, weight):
    total = all_reduce(x) + residual
    return rms_norm(total, weight), total


def section(call: Facts) -> Iterator[str]:
    """What is between the halves of a decoder's layer, at ROWS rows of this call."""
    placed = place(trace(between, "tp", PARAMETERS))
    plan = pipeline.overlap(placed, replace(call, sizes={"m": ROWS})).plan
    yield BEGIN
    yield _code(inspect.getsource(between))
    yield DRAWN
    told = [
        one for one in plan.statements
        if isinstance(one, Channel | Launch)
        or (isinstance(one, Choice) and one.what == "engine")
        or (isinstance(one, Buffer) and one.role == "packets")
    ]  # fmt: skip
    yield _code(device.text.show(told, places=False))
    yield WOVEN
    (kernel,) = kernels.lower(plan).values()
    yield _code(core.show(kernel, places=False))
    yield TWICE
    twice = pipeline.overlap(placed, replace(call, sizes={"m": TWICE_ROWS})).plan
    (kernel,) = kernels.lower(twice).values()
    own = [one for one in kernel.of(core.Hook) if one.slot in ("combine", "emit", "collect")]
    yield _code(core.text.show(own, places=False))
    yield END


def _code(text: str) -> str:
    return f"```python\n{text.rstrip()}\n```"


BEGIN = """\
## Few rows

Where rows are few, a signal and its fence take longer than the data. At decode sizes a sum over
ranks that is worked on where it is summed therefore goes by *packets*: words of 8 bytes, half of
them data and half a flag, which say themselves that they have come."""
DRAWN = f"""\
Here m = {ROWS}. Every rank sends its share of all rows to every other rank, and sums all rows: so
nothing comes back, and no value travels but the summands. Packets have a buffer of their own, whose
words never hold anything else, and a channel without words. The call's number is their flag. There
is no `takes`: calls use two halves of the buffer in turns, and whoever has summed all rows of a
call knows that all ranks have begun it, so have ended the one before."""
WOVEN = """\
Packets order nothing but themselves: rows that another kernel pushed before still need their words.
In the kernel all rows are sent before the first is summed. What is added right behind the sum is
loaded `ahead` of the wait. `advance` ends the call and tells nobody; where other kernels of the
plan take credits, `finish` stands there, which tells all ranks."""
TWICE = f"""\
Some more rows, {TWICE_ROWS} here, go to their owners, and sums go back (`engine=packets_twice`).
That is the template for pushed rows, with packets where it had data and signals:"""
END = """\
Both kernels are in `tests/compiler/golden/`, `all_reduce_rms_norm_few.py` and `.._twice.py`. Their
results have the same bits as those of the operator's `one_shot` and `two_shot`, which were written
by hand. What bent for this is told in
[021](decisions/021-packets-in-generated-kernels.md)."""
