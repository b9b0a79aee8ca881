"""Lower a launch that sums rows over ranks and works on them: what is woven into the rows template.

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

Up to the value that travels rows are worked on by who sums them, behind it by every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from weft.base.errors import UnsupportedError
from weft.compiler.passes.map import travelling
from weft.ir import core
from weft.ir.device import Channel, Do, Launch
from weft.tiles.rows import MOST_COLUMNS

# What is done to rows, by kind.
WORK = {"add": "add_rows", "mul": "mul_rows", "silu": "silu_rows", "rms_norm": "rms_norm"}


def statements(
    launch: Launch, announced: Sequence[Channel], formula: str
) -> Iterator[core.Statement]:
    """Of one kernel. Raises  UnsupportedError: what no hook is known for, at the user's line"""
    _require(launch)
    told = {one.buffer: one for one in announced}
    (x,), (partials, gathered) = launch.body[0].operands, launch.pushes
    by_owner, by_all = told[partials], told[gathered]
    epsilons = _epsilons(launch)
    yield core.Param(x, "operand")
    others = [name for do in launch.body[1:] for name in do.operands if name in launch.reads]
    for name in dict.fromkeys((*others, *launch.writes, partials, gathered)):
        yield core.Param(name, "pointer")
    for name, eps in epsilons.values():
        yield core.Param(name, "number", f"{eps:g}")
    for channel in (by_owner, by_all):
        yield core.Param(channel.name, "signals", f"{launch.kernel} on the other ranks")
    yield core.Param("slot", "slot")
    yield core.Param("world", "world")
    yield core.Mapping("parts", "static", (x,), cuts="part")
    yield core.Template("rows", launch.tile, formula)
    if launch.takes:
        yield core.Credit("begin", "slot")
    yield core.Hook("order", "scatter", ("parts",))
    yield core.Hook("ready", "read_owned", (x, "parts"))
    yield core.Wait("combine", by_owner.name, "others", "parts", place=by_owner.place)
    yield core.Hook("combine", "add_partials", (partials, "parts"))
    sent = travelling([(do.result, do.operands) for do in launch.body], launch.writes)
    behind = [do.result for do in launch.body].index(sent) + 1
    for do in launch.body[1:behind]:
        yield _work(do, "combine", launch, epsilons)
    yield core.Hook("combine", "rounded", (gathered,))
    yield core.Hook("emit", "spread", (gathered, "parts"))
    yield core.Hook("emit", "push", (partials, "parts"))
    yield core.Notify("announce", by_all.name, "all", "parts", place=by_all.place)
    yield core.Notify("announce", by_owner.name, "owner", "parts", place=by_owner.place)
    yield core.Wait("collect", by_all.name, "tile", "parts", place=by_all.place)
    yield core.Hook("collect", "load_rows", (gathered, "parts"))
    if sent in launch.writes:
        yield core.Hook("result", "store_rows", (sent, "parts"))
    for do in launch.body[behind:]:
        yield _work(do, "result", launch, epsilons)
        if do.result in launch.writes:
            yield core.Hook("result", "store_rows", (do.result, "parts"))
    if launch.gives:
        yield core.Finish("end", "slot")


def _work(do: Do, slot: str, launch: Launch, epsilons: dict[str, tuple[str, float]]) -> core.Hook:
    others = [name for name in do.operands if name in launch.reads]
    if do.result in epsilons:
        others.append(epsilons[do.result][0])
    return core.Hook(slot, WORK[do.kind], (*others, "parts") if others else ())


def _epsilons(launch: Launch) -> dict[str, tuple[str, float]]:
    """By the norm, what its parameter is called and is."""
    taken = {*launch.reads, *launch.writes}
    found: dict[str, tuple[str, float]] = {}
    for do in launch.body:
        if do.kind == "rms_norm":
            assert do.eps is not None
            name = f"eps_of_{do.result}" if "eps" in taken else "eps"
            taken.add(name)
            found[do.result] = (name, do.eps)
    return found


def _require(launch: Launch) -> None:
    """Raises  UnsupportedError: work that is no chain on the rows that there are"""
    first, *rest = launch.body
    told = ""
    if first.kind != "all_reduce" or launch.order != "scatter" or len(launch.pushes) != 2:
        told = f"{first.kind} in order={launch.order} with pushes={launch.pushes}"
    elif launch.tile[1] > MOST_COLUMNS:
        told = f"rows of {launch.tile[1]} columns; a row is one tile, of up to {MOST_COLUMNS}"
    there = first.result
    for do in rest:
        inner = [name for name in do.operands if name not in launch.reads]
        if do.kind not in WORK or inner != [there]:
            told = f"{do.kind}({', '.join(do.operands)}) behind {there}"
            break
        there = do.result
    if told:
        raise UnsupportedError(
            f"{launch.kernel}: no hooks are known for {told}; lower the program unfused",
            place=launch.place,
        )
