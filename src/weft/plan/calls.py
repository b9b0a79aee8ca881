"""Run a plan's calls of libraries on one rank: torch for what is local, operators for the rest.

The executor stands below the operators and names them only: whatever provides "collectives" has
all_gather, reduce_scatter and so on, with the signatures of weft.ops.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.nn.functional import pad

from weft.base.errors import UnsupportedError
from weft.base.parts import full_part, part_of
from weft.base.providers import provider
from weft.compiler import attending, experts, libraries
from weft.compiler.passes.tile import number
from weft.ir.device import Buffer, Call, Part, Plan, Tiles
from weft.plan.sizes import columns_here


@dataclass(frozen=True)
class Here:
    """What a call may ask beside its operands: whose rank it runs on, what is whose size; and what
    calls before it have `kept`, by table."""

    world: Any
    sizes: Mapping[str, int]
    buffers: Mapping[str, Buffer]
    kept: dict[str, Any] = field(default_factory=dict)

    def size(self, name: str, dim: int = 0) -> int:
        """The global size of a buffer along a dimension."""
        size = self.buffers[name].sizes[dim]
        return number(size.size if isinstance(size, Part | Tiles) else size, self.sizes)

    def own_experts(self, name: str) -> tuple[int, int]:
        """Those of a table's experts that this rank has."""
        return part_of(self.size(name, 2), self.world.rank, self.world.num_ranks)


# What gives a call's operands in another form.
Adapted = Callable[[Call, list[Any]], list[Any]]


def run_calls(
    plan: Plan, tensors: Mapping[str, Any], sizes: Mapping[str, int], *, world: Any,
    adapted: Adapted | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """One rank's results. `adapted` gives a call's operands in another form.

    Raises  UnsupportedError: a plan with other steps than calls
    """
    key = ("calls", id(plan))
    found = world.calls.get(key)
    if found is None:
        # The plan is kept: its number is then its alone.
        found = world.calls[key] = LibraryCalls(plan)
    return found.run(world, tensors, sizes, adapted)


def is_of_calls(plan: Plan) -> bool:
    """Is all of it done by libraries?"""
    return all(isinstance(step, Call) for step in plan.steps)


# Of its operands, whom it runs for, and where the caller wants the result, if anywhere: a gather
# alone gives it there.
Doing = Callable[[Sequence[Any], Here, Any], Any]


class LibraryCalls:
    """A plan of library calls alone: what does them is found once."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._buffers = {buffer.name: buffer for buffer in plan.of(Buffer)}
        kept = {*plan.results}
        # Each step, what does it, what it reads and makes, and what it is the last reader of.
        self._steps: list[tuple[Call, Doing, tuple[str, ...], str, list[str]]] = []
        for step in reversed(plan.steps):
            if not isinstance(step, Call):
                message = f"{plan.name}: {type(step).__name__} is not a call of a library"
                raise UnsupportedError(message, place=step.place)
            (result,) = step.writes
            last = [name for name in dict.fromkeys(step.reads) if name not in kept]
            kept.update(step.reads)
            self._steps.append((step, doing(step), step.reads, result, last))
        self._steps.reverse()

    def run(
        self, world: Any, tensors: Mapping[str, Any], sizes: Mapping[str, int],
        adapted: Adapted | None = None,
    ) -> tuple[Any, ...]:  # fmt: skip
        """One rank's results. A value is let go after its last reader."""
        values, here = dict(tensors), Here(world, sizes, self._buffers)
        for step, call, reads, result, last in self._steps:
            operands = [values[name] for name in reads]
            if adapted is not None:
                operands = adapted(step, operands)
            values[result] = call(operands, here, None)
            for name in last:
                del values[name]
        return tuple(values[name] for name in self.plan.results)


def doing(step: Call) -> Doing:
    """What does a call, found once."""
    if step.function == "all_gather":
        return partial(_rows, step)
    if (asks := CALLS.get(step.function)) is not None:
        return lambda operands, here, out: asks(step, operands, here)
    function, attributes = libraries.LOCAL[step.function], libraries.attributes(step)
    return lambda operands, here, out: function(*operands, **attributes)


def _rows(step: Call, operands: Sequence[Any], here: Here, out: Any = None) -> Any:
    """A gather or a sum of rows. Columns are rows of the transposed."""
    (x,) = operands
    rows = x.t().contiguous() if step.dim == 1 else x.contiguous()
    if step.function == "all_gather":
        size, into = here.size(step.writes[0], step.dim or 0), None if step.dim else out
        out = provider("collectives").all_gather(rows, world=here.world, m=size, out=into)
    else:
        out = provider("collectives").reduce_scatter(rows, world=here.world)
    return out.t().contiguous() if step.dim == 1 else out


def _all_to_all(step: Call, operands: Sequence[Any], here: Here) -> Any:
    """A part of what this rank has to each other one: all are sent as the largest of all is."""
    (x,), world, dim = operands, here.world, step.dim or 0
    ranks, shape = world.num_ranks, [here.size(step.writes[0], i) for i in range(2)]
    parts, theirs = ([part_of(size, rank, ranks) for rank in range(ranks)]
                     for size in (shape[dim], shape[1 - dim]))  # fmt: skip
    most = [full_part(size, ranks) for size in shape]
    sent = []
    for first, end in parts:
        part = x.narrow(dim, first, end - first)
        lacks = [extent - size for extent, size in zip(most, part.shape, strict=True)]
        sent.append(pad(part, (0, lacks[1], 0, lacks[0])))
    got = provider("collectives").all_to_all(torch.cat(sent), world=world).chunk(ranks)
    first, end = parts[world.rank]
    mine = [one.narrow(dim, 0, end - first) for one in got]
    of_others = [one.narrow(1 - dim, 0, last - begin)
                 for one, (begin, last) in zip(mine, theirs, strict=True)]  # fmt: skip
    return torch.cat(of_others, 1 - dim)


def _all_reduce(step: Call, operands: Sequence[Any], here: Here) -> Any:
    return provider("collectives").all_reduce(operands[0].contiguous(), world=here.world)


def _columns(step: Call, operands: Sequence[Any], here: Here) -> Any:
    """Of columns that are split, which are those of one piece, this rank's part of the piece."""
    assert step.between is not None
    buffer, num_ranks = here.buffers[step.reads[0]], here.world.num_ranks
    return libraries.columns(operands[0], columns_here(buffer, step.between, num_ranks))


def _embedding(step: Call, operands: Sequence[Any], here: Here) -> Any:
    """Of rows that are split a rank has those from its first one on."""
    first, world = None, here.world
    if isinstance(here.buffers[step.reads[0]].sizes[0], Part):
        first, _ = part_of(here.size(step.reads[0]), world.rank, world.num_ranks)
    return libraries.embedding(*operands, first=first)


def _moe_route(step: Call, operands: Sequence[Any], here: Here) -> Any:
    m, logits = here.size(step.writes[0]), operands[0]
    if not isinstance(here.buffers[step.reads[0]].sizes[0], Part):  # each rank routes its own part
        logits = logits[slice(*part_of(m, here.world.rank, here.world.num_ranks))]
    logits = logits.contiguous()
    assert step.top_k is not None
    tiles = {"tile_m": step.tile_rows} if step.tile_rows else {}
    is_split = step.function == "ep_route"
    return provider("collectives").moe_route(
        logits, step.top_k, world=here.world, m=m, split_experts=is_split, **tiles
    )


def _grouped_matmul(step: Call, operands: Sequence[Any], here: Here) -> Any:
    """Where experts are split over ranks the own ones' rows begin at the first of these; tables of
    own experts have no others."""
    is_part = isinstance(here.buffers[step.reads[1]].sizes[0], Part)
    is_among_all = is_part and not operands[2].split_experts
    first = here.own_experts(step.reads[2])[0] if is_among_all else 0
    return experts.grouped_matmul(*operands, first=first)


def _ep_dispatch(step: Call, operands: Sequence[Any], here: Here) -> Any:
    """Rows to their experts' ranks; how they went is kept with the table, for their way back."""
    x, routing = operands
    table, tables, m = step.reads[1], routing.tables, here.size(step.reads[1])
    # By tables of own experts all ranks know all choices: none is sent again.
    routed = routing if routing.split_experts else None
    given: dict[str, Any] = {"handle": here.kept.get(table) or routed}
    if given["handle"] is None:
        most = full_part(m, here.world.num_ranks)
        given = {
            "ids": tables.ids, "weights": tables.weights, "experts": here.size(table, 2),
            "max_tokens": most, "capacity": tables.token_of.shape[0] or None,
        }  # fmt: skip
    # Cleared: libraries read all rows that there is room for.
    rows, here.kept[table] = provider("collectives").ep_dispatch(
        x.contiguous(), world=here.world, clear=True, **given
    )
    return rows


def _ep_combine(step: Call, operands: Sequence[Any], here: Here) -> Any:
    y, handle = operands[0].contiguous(), here.kept[step.reads[1]]
    return provider("collectives").ep_combine(y, handle, world=here.world)


def _attention(step: Call, operands: Sequence[Any], here: Here) -> Any:
    """Where tokens are split over ranks the own ones begin at the first of these."""
    tokens, first = here.buffers[step.reads[0]].sizes[0], 0
    if isinstance(tokens, Part):
        rank, num_ranks = here.world.rank, here.world.num_ranks
        first, _ = part_of(here.size(step.reads[0]), rank, num_ranks)
    return attending.attention(*operands, **libraries.attributes(step), first=first)


def _ag_attention(step: Call, operands: Sequence[Any], here: Here) -> Any:
    """Own tokens over all ranks' keys, which travel meanwhile."""
    q, k, v = (one.unflatten(1, (-1, step.head)).contiguous() for one in operands)
    m, causal = here.size(step.reads[0]), bool(step.causal)
    attend = provider("collectives").ag_attention
    return attend(q, k, v, world=here.world, causal=causal, m=m).flatten(1)


# What asks for more than its operands.
CALLS: Mapping[str, Callable[[Call, Sequence[Any], Here], Any]] = {
    "all_gather": _rows,
    "reduce_scatter": _rows,
    "all_to_all": _all_to_all,
    "all_reduce": _all_reduce,
    "columns": _columns,
    "embedding": _embedding,
    "moe_route": _moe_route,
    "ep_route": _moe_route,
    "grouped_matmul": _grouped_matmul,
    "attention": _attention,
    "ag_attention": _ag_attention,
    "ep_dispatch": _ep_dispatch,
    "ep_combine": _ep_combine,
}
