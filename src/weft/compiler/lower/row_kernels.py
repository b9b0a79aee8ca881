"""Lower a launch that sums rows over ranks and works on them: hooks of the rows template.

    body=(all_reduce(x) -> reduced, add(reduced, residual) -> total, rms_norm(total, w) -> normed),
    writes=(total, normed)
    ->  wait(combine, partials_ready, others, parts)
        hook(combine, add_partials, (partials, parts))
        hook(combine, add_rows, (residual, parts))
        hook(combine, rounded, (gathered,))
        hook(emit, spread, (gathered, parts))
        ...
        hook(result, store_rows, (total, parts))
        hook(result, rms_norm, (w, eps, parts))
        hook(result, store_rows, (normed, parts))

Up to the value that travels rows are worked on by who sums them, behind it by every rank. Of rows
that are scattered each rank keeps its own:

    body=(scatter_rows(products, routing) -> sums, reduce_scatter(sums) -> scattered)
    ->  hook(ready, choices, (products, routing, top_k, parts))
        wait(combine, partials_ready, others, parts)
        hook(combine, add_partials, (partials, parts))
        hook(emit, push, (partials, parts))
        notify(announce, partials_ready, owner, parts)
        hook(result, store_own_rows, (scattered, parts))

Where they are relayed between nodes, only near ranks' rows go to their owners, and others' to who
adds them up on this node:

        wait(combine, partials_ready, relayed, parts)
        hook(combine, add_relayed, (partials, parts))
        hook(emit, push_near, (partials, parts))
        hook(emit, push_partner, (relayed, parts, groups))
        notify(announce, partials_ready, owner, parts)
        notify(announce, relayed_ready, partner, parts)

Rows of this rank alone are loaded once, worked on and stored, with no other rank to wait for:

    body=(add(h, residual) -> total, rms_norm(total, w) -> normed), writes=(total, normed)
    ->  hook(ready, load_view, (h, cut))
        hook(result, add_view, (residual, cut))
        hook(result, store_tile, (total,))
        hook(result, rounded, (w,))
        hook(result, rms_norm, (w, eps, cut))
        hook(result, store_tile, (normed,))
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile
from math import log2

from weft.base.errors import UnsupportedError
from weft.compiler.lower import params
from weft.compiler.lower.channels import travelling
from weft.compiler.passes.swizzle import BY_NODE
from weft.ir import core, core_in_plan
from weft.ir.device import Channel, Do, Launch, Plan
from weft.ir.kinds import OF_ONE_WIDTH
from weft.ir.shapes import GATED, ROWS
from weft.ir.text import untaken
from weft.tiles.rows import MOST_COLUMNS

# Of rows, and of heads as rows.
NORMS = ("rms_norm", "head_norm")
# Of a gate whose columns lie side by side.
HALVES = "_halves"
# What is done to rows, by kind.
WORK = {**{kind: f"{kind}_rows" for kind in OF_ONE_WIDTH}, "rms_norm": "rms_norm"}


def statements(plan: Plan, launch: Launch, formula: str) -> Iterator[core.Statement]:
    """Of one kernel.

    Raises  UnsupportedError: what no hook is known for, at the user's line
    """
    if is_alone(launch):
        yield from _alone(plan, launch, formula)
        return
    _require(launch)
    announced = params.announced(plan, launch)
    if any(one.by == "packet" for one in announced):
        yield from _by_packets(plan, launch, formula)
        return
    by_buffer = {one.buffer: one for one in announced}
    if silent := {*launch.pushes} - {*by_buffer}:
        message = f"{launch.kernel} pushes {', '.join(sorted(silent))}, which it does not announce"
        raise UnsupportedError(message, place=launch.place)
    if _body(launch)[0].kind == "reduce_scatter":
        yield from _scattered(plan, launch, [by_buffer[one] for one in launch.pushes], formula)
        return
    x, (partials, gathered) = launch.body[0].operands[0], launch.pushes
    by_owner, by_all = by_buffer[partials], by_buffer[gathered]
    epsilons = _epsilons(launch)
    yield from _params(launch, (partials, gathered))
    for channel in (by_owner, by_all):
        yield params.signals(plan, launch, channel)
    yield from _table(launch)
    mapping = core.Mapping("parts", "static", (x,), cuts="part")
    yield from params.begun(plan, launch, mapping, formula, "rows")
    yield core.Hook("order", launch.order, ("parts",))
    yield _ready(launch)
    yield core.Wait("combine", by_owner.name, "others", "parts", place=by_owner.place)
    yield core.Hook("combine", "add_partials", (partials, "parts"))
    for do in _summed(launch):
        yield _work(do, "combine", launch, epsilons)
    yield core.Hook("combine", "rounded", (gathered,))
    yield core.Hook("emit", "spread", (gathered, "parts"))
    yield core.Hook("emit", "push", (partials, "parts"))
    yield core.Notify("announce", by_all.name, "all", "parts", place=by_all.place)
    yield core.Notify("announce", by_owner.name, "owner", "parts", place=by_owner.place)
    yield core.Wait("collect", by_all.name, "tile", "parts", place=by_all.place)
    yield core.Hook("collect", "load_rows", (gathered, "parts"))
    yield from _results(launch, epsilons)
    yield from params.ended(launch, "end")


def _scattered(
    plan: Plan, launch: Launch, channels: Sequence[Channel], formula: str
) -> Iterator[core.Statement]:
    """A token's rows are added up, and its sum goes to the rank whose token it is; or, if that is
    far, to its partner on this node."""
    (result,), (partials, *relayed) = launch.writes, launch.pushes
    sums, *for_others = channels
    yield from _params(launch, launch.pushes)
    for channel in channels:
        yield params.signals(plan, launch, channel)
    if relayed:
        yield core.Param("groups", "number", "where a relay finds parts")
    yield from _table(launch)
    mapping = core.Mapping("parts", "static", (launch.body[0].operands[0],), cuts="part")
    yield from params.begun(plan, launch, mapping, formula, "rows")
    yield core.Hook("order", launch.order, ("parts",))
    yield _ready(launch)
    senders = "relayed" if relayed else "others"
    yield core.Wait("combine", sums.name, senders, "parts", place=sums.place)
    added, pushed = ("add_relayed", "push_near") if relayed else ("add_partials", "push")
    yield core.Hook("combine", added, (partials, "parts"))
    yield core.Hook("emit", pushed, (partials, "parts"))
    for name in relayed:
        yield core.Hook("emit", "push_partner", (name, "parts", "groups"))
    yield core.Notify("announce", sums.name, "owner", "parts", place=sums.place)
    for channel in for_others:
        yield core.Notify("announce", channel.name, "partner", "parts", place=channel.place)
    yield core.Hook("result", "store_own_rows", (result, "parts"))
    yield from params.ended(launch, "end")


def _by_packets(plan: Plan, launch: Launch, formula: str) -> Iterator[core.Statement]:
    """Each rank sums all rows; or who owns them does, and sends sums to all. What is added or
    multiplied right behind the sum is loaded before packets are waited for."""
    x, (partials, *gathered) = launch.body[0].operands[0], launch.pushes
    epsilons = _epsilons(launch)
    yield from _params(launch, ())
    for name in launch.pushes:
        yield core.Param(name, "packets", core.KERNEL)
    yield from _table(launch)
    mapping = core.Mapping("parts", "static", (x,), cuts="part" if gathered else "each")
    template = "rows" if gathered else "every_row"
    yield from params.begun(plan, launch, mapping, formula, template)
    yield core.Hook("order", "scatter" if gathered else "in_rows", ("parts",))
    yield _ready(launch)
    if not gathered:
        yield core.Hook("emit", "send_packets", (partials, x, "parts"))
    yield from _added_up(launch, x, partials, epsilons)
    for name in gathered:
        yield core.Hook("emit", "spread_packets", (name, x, "parts"))
        yield core.Hook("emit", "push_packets", (partials, x, "parts"))
        yield core.Hook("collect", "take_packets", (name, x, "parts"))
    yield from _results(launch, epsilons)
    if launch.gives:
        # Where no step waits for credits nobody need be told.
        by, _ = core_in_plan.of_slot(plan, launch)
        yield (core.Finish if by else core.Advance)("end", "slot")


def _added_up(
    launch: Launch, x: str, partials: str, epsilons: dict[str, tuple[str, float]]
) -> Iterator[core.Hook]:
    """All ranks' shares, and what is done to their sum up to what travels, or would."""
    summed = _summed(launch)
    ahead = list(takewhile(lambda do: do.kind in ("add", "mul"), summed))
    loaded = [_others(do, launch)[0] for do in ahead]
    for name in dict.fromkeys(loaded):
        yield core.Hook("combine", "ahead", (name, "parts"))
    yield core.Hook("combine", "add_packets", (partials, x, "parts"))
    for do, name in zip(ahead, loaded):
        yield core.Hook("combine", f"{do.kind}_ahead", (name,))
    for do in summed[len(ahead) :]:
        yield _work(do, "combine", launch, epsilons)
    # What follows is made of what results hold.
    yield core.Hook("combine", "rounded", (launch.writes[0],))


def is_alone(launch: Launch) -> bool:
    """Does a launch work on rows that this rank has, and with no other rank?"""
    return launch.template == "rows" and not launch.pushes


def _alone(plan: Plan, launch: Launch, formula: str) -> Iterator[core.Statement]:
    """A chain on rows that are loaded once; and others that are loaded where they join it."""
    columns = {do.result: do.operands[0] for do in launch.body if do.kind == "columns"}
    first, *rest = [do for do in launch.body if do.kind != "columns"]
    epsilons, taken = _epsilons(launch), {*launch.reads, *launch.writes, *columns}
    given: dict[str, core.Param] = {}
    numbers = [core.Param(name, "number", f"{eps:g}") for name, eps in epsilons.values()]

    def param(name: str, sort: str, by: str = "") -> str:
        given.setdefault(name, core.Param(name, sort, by or columns.get(name, "")))
        return name

    there, *others = first.operands
    hooks: list[tuple[str, tuple[str, ...]]] = []
    loaded = (param(there, "view"), "cut")
    if first.kind.endswith(HALVES):
        hooks.append((first.kind.removesuffix(f"_mul{HALVES}"), ()))
        hooks.append(("mul_view", (param(untaken(f"{there}_up", taken), "view", there), "cut")))
    for do in (first, *rest):
        if do is not first:
            others = [name for name in do.operands if name != there]
        if do.kind in ROWS:
            hooks.append((f"{do.kind}_view", (param(others[0], "view"), "cut")))
        elif do.kind in NORMS:
            weight = param(others[0], "pointer")
            hooks += [("rounded", (weight,))] if do is not first else []
            hooks.append(("rms_norm", (weight, epsilons[do.result][0], "cut")))
        elif do.kind == "rope":
            assert do.base is not None
            base = untaken(f"log2_base_of_{do.result}", taken)
            numbers.append(core.Param(base, "number", repr(log2(do.base))))
            hooks.append(("turn", (loaded[0], param(others[0], "pointer"), base, "cut")))
        elif do.kind == "rope_by_table":
            tables = (param(name, "pointer") for name in others)
            hooks.append(("turn_by_table", (loaded[0], *tables, "cut")))
        elif not do.kind.endswith(HALVES):
            hooks.append((do.kind, tuple(param(name, "pointer") for name in others)))
        if do.result in launch.writes:
            hooks.append(("store_tile", (param(do.result, "pointer"),)))
        there = do.result
    yield from (*given.values(), *numbers)
    yield from params.around(plan, launch)
    yield core.Mapping("cut", "static", loaded[:1], cuts="own")
    yield core.Template(core.OWN_ROWS, launch.tile, formula)
    yield core.Hook("ready", "load_pairs" if first.kind in GATED else "load_view", loaded)
    for function, args in hooks:
        yield core.Hook("result", function, args)


def _body(launch: Launch) -> tuple[Do, ...]:
    """The sum over ranks and what is done to its rows."""
    return launch.body[launch.body[0].kind == "scatter_rows" :]


def _table(launch: Launch) -> Iterator[core.Param]:
    """Where a token's rows are added up: which they are, and how many."""
    if launch.body[0].kind == "scatter_rows":
        _, routing = launch.body[0].operands
        yield core.Param(routing, "tables", "moe_route")
        yield core.Param(_choices(launch), "count", routing)


def _choices(launch: Launch) -> str:
    return untaken("top_k", {*launch.reads, *launch.writes, *launch.pushes})


def _ready(launch: Launch) -> core.Hook:
    """This rank's share of a tile: rows, or the sums of tokens' choices."""
    if launch.body[0].kind == "scatter_rows":
        given = (*launch.body[0].operands, _choices(launch), "parts")
        return core.Hook("ready", "choices", given)
    return core.Hook("ready", "read_owned", (launch.body[0].operands[0], "parts"))


def _params(launch: Launch, sum_buffers: tuple[str, ...]) -> Iterator[core.Param]:
    yield core.Param(launch.body[0].operands[0], "operand")
    others = [name for do in _body(launch)[1:] for name in _others(do, launch)]
    for name in dict.fromkeys((*others, *launch.writes, *sum_buffers)):
        yield core.Param(name, "pointer")
    for name, eps in _epsilons(launch).values():
        yield core.Param(name, "number", f"{eps:g}")


def _sent(launch: Launch) -> int:
    """Which of its body's values travels, or would."""
    body = _body(launch)
    sent = travelling([(do.result, do.operands) for do in body], launch.writes)
    return [do.result for do in body].index(sent)


def _summed(launch: Launch) -> tuple[Do, ...]:
    """What is done to rows where they are summed."""
    return _body(launch)[1 : _sent(launch) + 1]


def _results(launch: Launch, epsilons: dict[str, tuple[str, float]]) -> Iterator[core.Hook]:
    """What every rank makes of the sums."""
    sent, body = _sent(launch), _body(launch)
    if body[sent].result in launch.writes:
        yield core.Hook("result", "store_rows", (body[sent].result, "parts"))
    for do in body[sent + 1 :]:
        yield _work(do, "result", launch, epsilons)
        if do.result in launch.writes:
            yield core.Hook("result", "store_rows", (do.result, "parts"))


def _others(do: Do, launch: Launch) -> list[str]:
    """What it takes beside the rows that are there."""
    return [name for name in do.operands if name in launch.reads]


def _work(do: Do, slot: str, launch: Launch, epsilons: dict[str, tuple[str, float]]) -> core.Hook:
    others = _others(do, launch)
    if do.result in epsilons:
        others.append(epsilons[do.result][0])
    return core.Hook(slot, WORK[do.kind], (*others, "parts") if others else ())


def _epsilons(launch: Launch) -> dict[str, tuple[str, float]]:
    """By the norm, what its parameter is called and is."""
    taken = {*launch.reads, *launch.writes}
    found: dict[str, tuple[str, float]] = {}
    for do in launch.body:
        if do.kind in NORMS:
            assert do.eps is not None
            name = f"eps_of_{do.result}" if "eps" in taken else "eps"
            taken.add(name)
            found[do.result] = (name, do.eps)
    return found


def _require(launch: Launch) -> None:
    """Raises  UnsupportedError: work that is no chain on the rows that there are"""
    first, *rest = _body(launch)
    message = ""
    # Scattered, or relayed to others too; or summed by owners, whose sums travel back; or by each
    # rank.
    order, sent = launch.order.removeprefix(BY_NODE), len(launch.pushes)
    known = (
        ("reduce_scatter", "scatter", 1),
        ("reduce_scatter", "scatter", 2),
        ("all_reduce", "scatter", 2),
        ("all_reduce", "rows", 1),
    )
    if (first.kind, order, sent) not in known or (rest and first.kind == "reduce_scatter"):
        message = f"{first.kind} in order={launch.order} with pushes={launch.pushes}"
    elif launch.tile[1] > MOST_COLUMNS:
        message = f"rows of {launch.tile[1]} columns; a row is one tile, of up to {MOST_COLUMNS}"
    there = first.result
    for do in rest:
        inner = [name for name in do.operands if name not in launch.reads]
        if do.kind not in WORK or inner != [there]:
            message = f"{do.kind}({', '.join(do.operands)}) behind {there}"
            break
        there = do.result
    if message:
        raise UnsupportedError(
            f"{launch.kernel}: no hooks are known for {message}; lower the program unfused",
            place=launch.place,
        )
