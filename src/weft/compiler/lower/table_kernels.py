"""Lower a launch of a product by tables: the mapping is what a router has written on the device.

body=(all_gather(x) -> gathered, gather_rows(gathered, routing) -> rows,
      grouped_matmul(rows, w, routing) -> products)
->  hook(begin, feed, (x, gathered, experts))
    notify(begin, gathered_ready, each, experts)
    hook(order, in_turn, (routing, experts))
    wait(ready, gathered_ready, sources, experts)
    hook(ready, rows_by_token, (gathered, routing))
    hook(emit, store_slots, (products,))

Where copy engines bring tokens the first two are left out; where they are relayed a wait for all
of them stands before the end. Where rows lie by slot from the start
nothing is waited for:

body=(grouped_matmul(h, w, routing) -> products)
->  hook(order, by_expert, (routing, experts))
    hook(ready, rows_by_slot, (h,))
    hook(emit, store_slots, (products,))
"""

from __future__ import annotations

from collections.abc import Iterator

from weft.compiler.lower import params
from weft.ir import core
from weft.ir.device import Channel, Launch, Plan, announced, is_relay
from weft.ir.text import untaken


def statements(plan: Plan, launch: Launch, formula: str) -> Iterator[core.Statement]:
    """Of one kernel."""
    product = next(do for do in launch.body if do.kind == "grouped_matmul")
    rows, weights, routing = product.operands
    channel = next((one for one in plan.of(Channel) if one.name in launch.awaits), None)
    (result,) = launch.writes
    gathered = next((do.operands[0] for do in launch.body if do.kind == "gather_rows"), "")
    fed = next((do.operands[0] for do in launch.body if do.kind == "all_gather"), "")
    if fed:
        yield core.Param(fed, "pointer", "own tokens")
    if not gathered:
        yield core.Param(rows, "operand", "rows by slot")
    yield core.Param(weights, "operand")
    yield core.Param(result, "pointer")
    if gathered:
        yield core.Param(gathered, "pointer")
    if channel is not None:
        yield params.signals(plan, launch, channel)
    yield core.Param(routing, "tables", "moe_route")
    by = untaken("experts", (fed, rows, weights, result, gathered, routing))
    mapping = core.Mapping(by, "tables", (routing,), cuts="experts")
    yield from params.begun(plan, launch, mapping, formula)
    if fed and channel is not None:
        yield core.Hook("begin", "feed", (fed, gathered, by))
        yield core.Notify("begin", channel.name, "each", by, place=channel.place)
    yield core.Hook("order", launch.order, (routing, by))
    if channel is not None:  # tokens arrive while others are multiplied
        yield core.Wait("ready", channel.name, "sources", by, place=channel.place)
    if gathered:
        yield core.Hook("ready", "rows_by_token", (gathered, routing))
    else:
        yield core.Hook("ready", "rows_by_slot", (rows,))
    for do in launch.body[launch.body.index(product) + 1 :]:
        yield core.Hook("value", do.kind, ())
    yield core.Hook("emit", "store_slots", (result,))
    relayed = [name for one in plan.steps if is_relay(one) for name in announced(one)]
    if channel is not None and channel.name in relayed:
        # Also words of ranks of whose tokens no tile has any: who passes them on reads the slot
        # until then.
        yield core.Wait("end", channel.name, "all", by, by="last", place=channel.place)
    yield from params.ended(launch, "end")
