"""The functions of a generated module that the template is handed: mapping and hooks.

A hook that is one function of tiles/ is passed as it is (`library`); of the others the statements
of Core IR are put together in order, and their arguments are a tuple of what these use.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from textwrap import indent

from weft.compiler.lower import rendering
from weft.compiler.lower.layout import fitting
from weft.compiler.passes.swizzle import BY_NODE
from weft.ir import core

TWINS = ("plain", "sm90")


def twins_of(kernel: core.Kernel) -> tuple[str, ...]:
    """Which forms there are of a kernel."""
    is_gemm = kernel.of(core.Template)[0].function == "gemm"
    # Rows of results go to their tokens' ranks one by one, and not by the template's chunks.
    has_chunks = not any(one.function == "push_rows" for one in kernel.of(core.Hook))
    # Kernels in Gluon put nothing to other nodes.
    return TWINS if is_gemm and has_chunks and not is_by_node(kernel) else ("plain",)


def mapping(kernel: core.Kernel) -> Iterator[str]:
    """What asks of the mapping; tiles cut within parts have theirs in tiles/hooks/."""
    if kernel.of(core.Mapping)[0].cuts == "whole":
        given = [one.name for one in kernel.of(core.Param) if one.sort == "order"]
        yield _WHOLE
        if is_by_node(kernel):
            yield _BY_NODE.replace("TILE", _TILE)
        else:
            order = given[0] if given else "swizzle.rotated"
            yield _ROTATED.replace("TILE", _TILE).replace("ORDER", order)


_WHOLE = '''class At(NamedTuple):
    """A tile: rows first .. end - 1, which are all this rank's own or not."""

    i_m: Any
    i_n: Any
    first: Any
    end: Any
    is_own: Any


@triton.jit
def _own_rows(rank, split):
    first = min(rank * split.rank_rows, split.rows)
    return first, min(first + split.rank_rows, split.rows)


@triton.jit
def _word_of(row, split):
    """The word that announces `row`: that of its chunk."""
    rank = row // split.rank_rows
    return rank * split.chunks + (row - rank * split.rank_rows) // split.chunk_rows'''

_TILE = """\
    first = tile[0] * args.tile_m
    end = min(first + args.tile_m, args.split.rows)
    own_first, own_end = _own_rows(args.rank, args.split)
    return At(tile[0], tile[1], first, end, (first >= own_first) & (end <= own_end))"""

_ROTATED = '''class Order(NamedTuple):
    """Arguments of `_order`; tuples last, no constant: Triton 3.6 would forget those behind it."""

    group_m: Any
    start: Any
    head: Any
    tile_m: Any
    rank: Any
    split: Any


@triton.jit
def _order(i, num_m, num_n, args):
    """Which tile is next, and whether its rows are own. args: Order"""
    tile = ORDER(i, num_m, num_n, (args.group_m, args.start, args.head))
TILE


@triton.jit
def _order_args(rank, split, group_m, tile_m, num_m):
    """Where this rank begins, and how many rows of tiles no group may reach over."""
    own_first, own_end = _own_rows(rank, split)
    start = swizzle.first_to_gather(own_first, own_end, tile_m, num_m)
    head = max(1, min(split.rank_rows // tile_m, num_m))
    return Order(
        tl.cast(group_m, tl.int32), start, tl.cast(head, tl.int32), tl.cast(tile_m, tl.int32),
        rank, split,
    )  # fmt: skip'''

_BY_NODE = '''class Order(NamedTuple):
    """Arguments of `_order`; tuples last, no constant: Triton 3.6 would forget those behind it."""

    tile_m: Any
    rank: Any
    split: Any
    nodes: Any


@triton.jit
def _order(i, num_m, num_n, args):
    """Which tile is next, and whether its rows are own. args: Order"""
    tile = hierarchy.by_node(i, num_m, num_n, args.nodes)
TILE


@triton.jit
def _order_args(rank, split, group_m, tile_m, world):
    """Which ranks share a node."""
    nodes = hierarchy.to_gather(world, rank, split.rank_rows, tile_m, group_m)
    return Order(tl.cast(tile_m, tl.int32), rank, split, nodes)'''

# Place -> (parameters, what it says); one source for each template.
_FORMS = {
    "ready": ("at, segment, tile", "Before a tile's operands are read."),
    "combine": ("at, cells, value", "A tile's accumulator, and what else belongs to it."),
    "emit": ("at, cells, fragment", "What becomes of a tile."),
    "announce": ("at, part", "When the stores of a part of a tile are complete."),
    "collect": ("at, EXTENTS", "Another rank's tile, when that rank has done it."),
    "result": ("at, value, tile", "What every rank makes of a tile's rows."),
    "done": ("", "When this program has read all operands."),
}
# The same where a tile is whole rows (tiles/rows.py).
_FORMS_OF_ROWS = {
    "combine": ("at, cells, value, tile", "A tile's sums, and what else belongs to them."),
    "emit": ("at, cells, fragment, tile", "What becomes of a tile."),
    "collect": ("at, tile", "Another rank's tile, when that rank has done it."),
}


def hooks(kernel: core.Kernel) -> Iterator[str]:
    """The functions of hooks that are not simply one of tiles/, their arguments before them."""
    forms = _FORMS
    if kernel.of(core.Template)[0].function in core.OF_ROWS:
        forms = _FORMS | _FORMS_OF_ROWS
    for slot, (parameters, said) in forms.items():
        if not kernel.at(slot) or library(kernel, slot):
            continue
        if slot == "collect" and is_by_tables(kernel):
            continue  # stands in the kernel: it is not of tiles
        fields = "\n".join(f"    {name}: Any" for name in used(kernel, slot))
        title = slot.title()
        yield f'class {title}(NamedTuple):\n    """Arguments of `_{slot}`."""\n\n{fields}'
        is_value = slot == "combine" or (slot == "collect" and kernel.at("result"))
        body = [*body_of(kernel, slot), *(["return value"] if is_value else [])]
        parameters = parameters.replace("EXTENTS", "tile_m: tl.constexpr, tile_n: tl.constexpr")
        parameters = f"{parameters}, args" if parameters else "args"
        yield "\n".join([
            "@triton.jit", f"def _{slot}({parameters}):",
            f'    """{said} args: {title}"""', *fitting(f"    {line}" for line in body),
        ])  # fmt: skip


def body_of(kernel: core.Kernel, slot: str) -> tuple[str, ...]:
    """What is done at one place, in order; neighbours for the same tiles share a branch."""
    given = [*(kernel.at("value") if slot == "emit" else ()), *kernel.at(slot)]
    pieces = [rendering.render(one, kernel) for one in given]
    if len(given) > len(kernel.at(slot)):
        pieces.insert(0, rendering.LOADED)
    lines: list[str] = []
    last = ""
    for piece in pieces:
        if not piece.lines:
            continue
        if not piece.guard:
            lines += piece.lines
        elif piece.guard == last:
            depth = "        " if last in (rendering.FEEDING, rendering.LAST) else "    "
            lines += indent("\n".join(piece.lines), depth).splitlines()
        elif piece.guard in (rendering.FEEDING, rendering.LAST):
            if piece.guard == rendering.FEEDING:
                lines += [one.replace("TOKENS", _mapping(kernel)) for one in _FEEDING]
            else:
                lines += _last_of_chunk(kernel)
            lines += indent("\n".join(piece.lines), "        ").splitlines()
        else:
            lines.append("else:" if last else f"if {_guard(kernel, piece.guard)}:")
            lines += indent("\n".join(piece.lines), "    ").splitlines()
        last = piece.guard
    return tuple(lines)


_FEEDING = (
    "if args.program < args.TOKENS.lanes:",
    "    for hop in range(args.world.num_ranks):",
    "        to = (args.rank + hop) % args.world.num_ranks",
)


def _last_of_chunk(kernel: core.Kernel) -> tuple[str, str]:
    """Is a chunk complete with this part of a tile?"""
    (count,) = [one for one in kernel.of(core.Hook) if one.function == "count"]
    counters, parts = (f"args.{name}" for name in count.args)
    return (
        f"if {_guard(kernel, rendering.OTHER)}:",
        f"    if hooks.partition.is_last_of_chunk({counters}, at, part, {parts}):",
    )


def _mapping(kernel: core.Kernel) -> str:
    return kernel.of(core.Mapping)[0].name


def is_by_tables(kernel: core.Kernel) -> bool:
    """Are tiles cut by what the device knows alone?"""
    return kernel.of(core.Mapping)[0].sort == "tables"


def is_by_node(kernel: core.Kernel) -> bool:
    """Do its tiles go node by node?"""
    orders = [one for one in kernel.of(core.Hook) if one.slot == "order"]
    return any(one.function.startswith(BY_NODE) for one in orders)


def _guard(kernel: core.Kernel, guard: str) -> str:
    if kernel.of(core.Mapping)[0].cuts == "whole":
        return "at.is_own" if guard == rendering.OWN else "not at.is_own"
    return f"at.owner {'==' if guard == rendering.OWN else '!='} args.rank"


def used(kernel: core.Kernel, slot: str) -> list[str]:
    """The names that a place's function uses of `args`: values, then tuples."""
    lines = body_of(kernel, slot)
    names = re.findall(r"\bargs\.(\w+)", "\n".join(lines))
    if any(re.search(r"\bargs\)", line) for line in lines):
        names += ["partials", "rank", "parts", "world"]  # of a scatter.Move
    names = sorted(dict.fromkeys(names))
    tuples = {"shape", *(one.name for one in kernel.of(core.Mapping))}
    tuples |= {one.name for one in kernel.of(core.Param) if one.sort in ("slot", "world", "tables")}
    tuples |= {f"{name}_peers" for name in peers_of(kernel)}
    return sorted(names, key=lambda name: (name in tuples, name == "world"))


def peers_of(kernel: core.Kernel) -> list[str]:
    """The arrays that tiles are sent to by TMA: on Hopper there is a descriptor for each peer."""
    given = [one.args[0] for one in kernel.of(core.Hook) if one.function.startswith("send")]
    return [one.name for one in kernel.of(core.Param) if one.name in given]


def by_index(kernel: core.Kernel) -> list[str]:
    """The array whose rows are loaded by index, if there is one."""
    return [one.args[0] for one in kernel.of(core.Hook) if one.function == "rows_by_token"]


def stored(kernel: core.Kernel) -> list[str]:
    """The array in which `emit` stores tiles, itself or on other ranks."""
    return [one.args[0] for one in kernel.of(core.Hook) if one.slot == "emit"]


def library(kernel: core.Kernel, slot: str) -> tuple[str, str] | None:
    """(function, arguments) where a place holds one hook that is a function of tiles/."""
    given = kernel.at(slot)
    if len(given) != 1 or not isinstance(given[0], core.Hook):
        return None
    turns = "hooks.table.Turns({0}.tiles, {0}.turns, {1}.room, {1}.group_m)"
    if slot == "emit" and kernel.at("value"):
        return None
    found = {
        "grouped": ("swizzle.grouped", "(group_m,)"),
        "in_rows": ("row_packets.in_rows", "{0}"),
        "scatter": ("hooks.order.scattered", "hooks.order.Scatter(rank, {0})"),
        "part_by_part": ("hooks.order.part_by_part", "hooks.order.Scatter(rank, {0})"),
        "hierarchical_scatter": ("hierarchy.scattered", "order_args"),
        "rows_of": ("gemm.ready_always", "gemm.Always({0}, shape.m)"),
        "read_owned": ("hooks.gather.read_owned", "hooks.gather.Operand({0}, {1})"),
        "store": ("gemm.emit_store", "gemm.Stored({0}, shape)"),
        "store_slots": ("hooks.table.emit_slots", "gemm.Stored({0}, shape)"),
        "in_turn": ("hooks.table.in_turn", turns),
        "in_turn_backwards": ("hooks.table.in_turn_backwards", turns),
        "rows_by_slot": ("hooks.table.read_slots", "hooks.table.Slots({0})"),
    }.get(given[0].function)
    if found is None:
        return None
    return found[0], found[1].format(*given[0].args)
