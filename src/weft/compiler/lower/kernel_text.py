"""The kernels of a generated module: who it is, then the call of the template with its hooks."""

from __future__ import annotations

from collections.abc import Sequence

from weft.compiler.lower.hooks import (
    body_of,
    by_index,
    is_by_node,
    is_by_tables,
    library,
    peers_of,
    stored,
    used,
)
from weft.compiler.lower.layout import WIDTH, call, fitting, wrapped
from weft.ir import core
from weft.tiles.hooks.scatter import MOST_PEERS


def kernel_text(kernel: core.Kernel, twin: str) -> str:
    (mapping,) = kernel.of(core.Mapping)
    apart = ("slot", "world", "order")
    names = [one.name for one in kernel.of(core.Param) if one.sort not in apart]
    is_whole = mapping.cuts == "whole"
    if twin == "sm90":
        names = [*_with_peers(kernel, names), "sums", "summed"]
    is_rows = kernel.of(core.Template)[0].function in core.OF_ROWS
    by_tables = is_by_tables(kernel)
    names += [_slot(kernel), *([] if is_rows else ["shape"]), mapping.name]
    names += ["group_m"] if is_whole else []
    if twin == "plain":
        names += ["tile", "world"]
        lines = ["@triton.jit", *call(f"def {kernel.name}(", names, "):", skip=True)]
        lines.append(f'    """{_ROWS if is_rows else _PLAIN}"""')
        module, tile_m = "tl", "tile.m"
    else:
        constants = ["tile_m", "tile_n", "tile_k", "stages", "b_is_nk"]
        names += ["world", *(f"{name}: gl.constexpr" for name in constants)]
        lines = ["@gluon.jit", *call(f"def {kernel.name}_sm90(", names, "):", skip=True)]
        lines.append(f'    """{_SM90}"""')
        module, tile_m = "gl", "tile_m"
    body = [
        f"rank = wl.rank(world).to({module}.int32)",
        f"e = slots.slot_epoch({_slot(kernel)})",
        f"program, num_programs = {module}.program_id(0), {module}.num_programs(0)",
        *fitting((line.replace("args.", "") for line in body_of(kernel, "begin")), 96),
    ]
    by_node = is_by_node(kernel)
    if is_whole:
        behind = "world" if by_node else "num_m"
        body += [
            f"num_m = {module}.cdiv(shape.m, {tile_m})",
            f"order_args = _order_args(rank, {mapping.name}, group_m, {tile_m}, {behind})",
        ]
    elif by_node:
        body += [f"order_args = hierarchy.to_scatter(world, rank, {mapping.name})"]
    if _feeds(kernel):
        lanes = f"{mapping.name}.lanes"
        body += [f"first = (program + num_programs - {lanes}) % num_programs  # feeders come last"]
    body += _rows(kernel) if is_rows else _template(kernel, twin)
    if kernel.at("collect") and by_tables:
        body += fitting((line.replace("args.", "") for line in body_of(kernel, "collect")), 96)
    elif kernel.at("collect") and not is_rows:
        body += _collect(kernel, twin)
    body += [line.replace("args.", "") for line in body_of(kernel, "end")]
    return "\n".join([*lines, *(f"    {line}" for line in body)])


# For `weft lint`, which cannot see who has written what a kernel reads.
_RANKS_OF_TABLES = "# weft: allow peer-from-data: moe_route writes lo and hi, and they are ranks"


def _with_peers(kernel: core.Kernel, names: Sequence[str]) -> list[str]:
    """The parameters with the peers' descriptors before the first array that they are of."""
    peers = peers_of(kernel)
    first = min((names.index(name) for name in peers), default=0)
    described = [f"{name}_peer_{hop}" for name in peers for hop in range(1, MOST_PEERS + 1)]
    return [*names[:first], *described, *names[first:]]


_PLAIN = "The GEMM template with the hooks above, on any target."
_ROWS = "The template for whole rows with the hooks above, on any target."
_SM90 = "The same on Hopper; operands are descriptors, `sums` and `summed` its own."


def _feeds(kernel: core.Kernel) -> bool:
    """Do its first programs give own rows to all ranks before they multiply?"""
    return any(one.slot == "begin" for one in kernel.of(core.Hook))


def _slot(kernel: core.Kernel) -> str:
    return next(one.name for one in kernel.of(core.Param) if one.sort == "slot")


def _template(kernel: core.Kernel, twin: str) -> list[str]:
    """The call of the template."""
    operands = [one.name for one in kernel.of(core.Param) if one.sort == "operand"]
    (mapping,) = kernel.of(core.Mapping)
    gathered, by_tables = by_index(kernel), is_by_tables(kernel)
    if by_tables:  # results leave by pointers
        operands = [*gathered, *operands, *stored(kernel)]
    is_whole, right, result = mapping.cuts == "whole", operands[-2], operands[-1]
    num_m = "num_m" if is_whole else f"world.num_ranks * {mapping.name}.tiles_m"
    if by_tables:
        num_m = f"hooks.table.num_tiles({mapping.of[0]}, {mapping.name})"
    first = "first" if _feeds(kernel) else "program"
    if twin == "plain":
        rows = [f"{right}, shape, tile, {num_m}, {first}, num_programs,"]
    else:
        shared = "gemm_sm90.Shared(sums, summed, e, world)"
        rows = [
            f"{operands[0]}, {right}, {result}, shape, {num_m}, {first}, num_programs,",
            f"{shared},",
            "tile_m, tile_n, tile_k, stages, gemm_sm90.chunk_columns(tile_n), b_is_nk,",
        ]
    locals_ = []
    for array in peers_of(kernel) if twin == "sm90" else ():
        given = [f"{array}_peer_{hop}" for hop in range(1, MOST_PEERS + 1)]
        locals_ += call(f"{array}_peers = (", given, ")", skip=True)
    for slot in ("order", "ready", "emit", "combine", "announce", "done"):
        if not kernel.at(slot):
            continue
        name, given = _hook(kernel, slot, twin)
        if twin == "sm90":
            # In Gluon a function is passed as a constant by that name.
            locals_.append(f"{slot}: gl.constexpr = {name}")
            name = slot
        is_named = slot in ("combine", "announce", "done")
        rows += wrapped(f"{slot}={name}, {slot}_args={given}," if is_named else f"{name}, {given},")
    if twin == "sm90" and any(one.late for one in kernel.of(core.Notify)):
        rows.append("late=True,")
    if twin == "sm90" and gathered:
        rows.append("by_index=True,")
    home = "gemm" if twin == "plain" else "gemm_sm90"
    if any(one.function == "push_rows" for one in kernel.of(core.Hook)):
        locals_.append(_RANKS_OF_TABLES)
    return [*locals_, f"{home}.gemm(", *(f"    {row}" for row in rows), ")  # fmt: skip"]


def _rows(kernel: core.Kernel) -> list[str]:
    """The call of the template for whole rows."""
    (mapping,) = kernel.of(core.Mapping)
    slots = ("order", "ready", "combine", "emit", "announce", "collect", "result")
    call, given, behind = "rows.rows(", [f"rank, {mapping.name}, tile,"], ["    world.num_ranks,"]
    if kernel.of(core.Template)[0].function == "every_row":
        slots = ("order", "ready", "emit", "combine", "result")
        call, given, behind = "row_packets.every_row(", [f"{mapping.name}, tile,"], []
    given[0] += " program, num_programs,"
    for slot in slots:
        # Packets are announced by themselves.
        name, args = _hook(kernel, slot, "plain") if kernel.at(slot) else ("rows.untold", "None")
        given += wrapped(f"{name}, {args},")
    return [call, *(f"    {row}" for row in given), *behind, ")  # fmt: skip"]


def _collect(kernel: core.Kernel, twin: str) -> list[str]:
    """Other ranks' tiles, in the order in which they were multiplied here."""
    name, given = _hook(kernel, "collect", twin)
    (mapping,) = kernel.of(core.Mapping)
    extents = "tile.m, tile.n" if twin == "plain" else "tile_m, tile_n"
    order, args = _hook(kernel, "order", twin)
    return [
        f"num_m = world.num_ranks * {mapping.name}.tiles_m",
        f"for i in range(program, num_m * {mapping.name}.num_n, num_programs):",
        f"    at = {order}(i, num_m, {mapping.name}.num_n, {args})",
        "    if at.owner != rank:",
        *fitting([f"        {name}(at, {extents}, {given})"], WIDTH - 4),
    ]


def _hook(kernel: core.Kernel, slot: str, twin: str) -> tuple[str, str]:
    """(function, arguments) of one place, as the template takes them."""
    if found := library(kernel, slot):
        return found
    if slot == "order":
        return "_order", "order_args"
    # Written out each time: a variable would make numbers of the world's constants.
    names = used(kernel, slot)
    if twin == "plain":
        peers = [f"{name}_peers" for name in peers_of(kernel)]
        names = ["None" if name in peers else name for name in names]
    return f"_{slot}", f"{slot.title()}({', '.join(names)})"
