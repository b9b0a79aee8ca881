"""Lower a launch of a product by tables: the mapping is what a router has written on the device.

body=(all_gather(x) -> gathered, gather_rows(gathered, routing) -> rows,
      grouped_matmul(rows, w, routing) -> products)
->  hook(begin, feed, (x, gathered, experts))
    notify(begin, gathered_ready, each, experts)
    hook(order, in_turn, (routing, experts))
    wait(ready, gathered_ready, sources, experts)
    hook(ready, rows_by_token, (gathered, routing))
    hook(emit, store_slots, (products,))

Where copy engines bring tokens the first two are left out.

body=(grouped_matmul(h, w, routing) -> products, scatter_rows(products, routing) -> sums,
      reduce_scatter(sums) -> scattered)
->  hook(order, in_turn_backwards, (routing, experts))
    hook(ready, rows_by_slot, (h,))
    hook(emit, push_rows, (partials, routing, experts))
    notify(announce, partials_ready, all, experts)
    wait(collect, partials_ready, all, experts)
    hook(collect, sum_rows, (partials, scattered, experts))
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from weft.compiler.lower import params
from weft.ir import core
from weft.ir.device import Channel, Do, Launch, Plan


def statements(plan: Plan, launch: Launch, formula: str) -> Iterator[core.Statement]:
    """Of one kernel; what the compiler fuses by tables is one of the two."""
    product = next(do for do in launch.body if do.kind == "grouped_matmul")
    rows, weights, routing = product.operands
    (channel,) = [one for one in plan.of(Channel) if one.name in launch.awaits]
    (result,) = launch.writes
    arrived = next((do.operands[0] for do in launch.body if do.kind == "gather_rows"), "")
    fed = next((do.operands[0] for do in launch.body if do.kind == "all_gather"), "")
    carried = arrived or launch.pushes[0]
    source = fed or ("" if arrived else rows)
    if source:
        yield core.Param(source, "pointer", "own tokens" if fed else "rows by slot")
    yield core.Param(weights, "operand")
    yield core.Param(result, "pointer")
    yield core.Param(carried, "pointer")
    yield params.signals(plan, launch, channel)
    yield core.Param(routing, "tables", "moe_route")
    yield from params.around(plan, launch)
    by = "experts"
    while by in (source, weights, result, carried, routing):
        by += "_"
    yield core.Mapping(by, "tables", (routing,), cuts="experts")
    yield core.Template("gemm", launch.tile, formula)
    if launch.takes:
        yield core.Credit("begin", "slot")
    if arrived:
        behind = launch.body[launch.body.index(product) + 1 :]
        yield from _gathered(channel, source, carried, result, routing, by, behind)
    else:
        yield from _scattered(channel, source, carried, result, routing, by)
    if launch.gives:
        yield core.Finish("end", "slot")


def _gathered(
    channel: Channel, source: str, gathered: str, result: str, routing: str, by: str,
    behind: Sequence[Do],
) -> Iterator[core.Statement]:  # fmt: skip
    """Tokens arrive while others' products are made; a tile waits for the ranks in it alone.
    `source`: own ones, where this kernel sends them."""
    if source:
        yield core.Hook("begin", "feed", (source, gathered, by))
        yield core.Notify("begin", channel.name, "each", by, place=channel.place)
    yield core.Hook("order", "in_turn", (routing, by))
    yield core.Wait("ready", channel.name, "sources", by, place=channel.place)
    yield core.Hook("ready", "rows_by_token", (gathered, routing))
    for do in behind:
        yield core.Hook("value", do.kind, ())
    yield core.Hook("emit", "store_slots", (result,))


def _scattered(
    channel: Channel, source: str, partials: str, result: str, routing: str, by: str
) -> Iterator[core.Statement]:
    """Weighted rows go to their tokens' ranks, which add them up when all have come."""
    yield core.Hook("order", "in_turn_backwards", (routing, by))
    yield core.Hook("ready", "rows_by_slot", (source,))
    yield core.Hook("emit", "push_rows", (partials, routing, by))
    yield core.Notify("announce", channel.name, "all", by, place=channel.place)
    yield core.Wait("collect", channel.name, "all", by, place=channel.place)
    yield core.Hook("collect", "sum_rows", (partials, result, by))
