"""`weft prepare`: kernels for all sizes of a server, in Triton's cache before it starts."""

from __future__ import annotations

import re
from typing import Annotated

from weft.base.errors import ShapeError
from weft.tools import console, options
from weft.tools.programs import find_op
from weft.tools.words import op_dtype, parse_shape, parse_targets, parse_topology

_RANGE = re.compile(r"(\w+)=(\d+)\.\.(\d+)")


def prepare(
    op: options.ProgramWord,
    target: options.Targets = "cuda:90",
    ranks: options.Ranks = None,
    nodes: options.Nodes = "1",
    shape: options.Ranges = "",
    dtype: options.Dtype = "",
    gradients: Annotated[
        bool, options.flag("also what torch calls to differentiate such calls", "--gradients")
    ] = False,
    processes: Annotated[
        int | None,
        options.option("N", "processes that compile (default: one for each core)", min=1),
    ] = None,
    json: options.AsJson = False,
) -> int:
    """Compile all kernels that calls of these sizes launch, into Triton's cache; no GPU is needed.

    Calls then find them there: nothing is compiled while a server runs. Set TRITON_CACHE_DIR to
    say where that is.
    """
    from weft.plan.prepare import prepare as compile_all

    card, topology = find_op(op), parse_topology(ranks, nodes)
    sizes = sizes_of(shape, card.default_shape)
    results = {}
    for one in parse_targets(target):
        results[one.name] = compile_all(
            card, sizes, target=one, num_ranks=topology.num_ranks, nodes=topology.sizes,
            dtype=op_dtype(card, dtype).name, gradients=gradients, processes=processes,
        )  # fmt: skip
    if json:
        console.print_json({"op": op, **{name: vars(one) for name, one in results.items()}})
    else:
        for name, one in results.items():
            console.results().print(f"{op} for {name}: {one}", markup=False)
    return console.FINE


def sizes_of(text: str, known: dict) -> dict[str, int | range]:
    """Only those that are named: calls' sizes have no default."""
    several = {name: range(int(a), int(b) + 1) for name, a, b in _RANGE.findall(text)}
    if empty := [name for name, extents in several.items() if not extents]:
        raise ShapeError(f"--shape {text}: {', '.join(empty)} goes from more to less")
    first = parse_shape(_RANGE.sub(r"\1=\2", text), known)
    named = {word.partition("=")[0].strip() for word in text.split(",")}
    return {name: several.get(name, size) for name, size in first.items() if name in named}
