"""How each statement of Core IR is rendered as Triton source: lines of the function of its hook.

    wait(ready, rows_ready, tile, split, unless=own)  # ag.py:9
    ->  if not at.is_own:
            word = _word_of(at.first, args.split)
            count = _word_of(at.end - 1, args.split) - word + 1
            wl.wait(args.rows_ready + word, args.e, count, world=args.world)  # ag.py:9

Lines name what they use as `args.NAME`; the generator makes the hook's tuple of arguments from
that. What moves a tile is called in tiles/; what orders ranks is written out, where it is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from weft.base.place import Place
from weft.ir import core

OWN, OTHER = "own", "other"  # tiles of this rank's rows; tiles of other ranks' rows
LAST = "last"  # tiles of other ranks' rows with which a chunk is complete
FEEDING = "feeding"  # of the first programs, for each rank in turn


@dataclass(frozen=True)
class Piece:
    """What one statement comes to: lines, and the tiles that they are for; "" is all of them."""

    lines: tuple[str, ...]
    guard: str = ""


# Of a fragment, where something is done to its value.
LOADED = Piece(("value = hooks.epilogue.load(fragment)",))


def render(one: core.Fused, kernel: core.Kernel) -> Piece:
    """The lines of one statement."""
    if isinstance(one, core.Hook) and one.function in _ROWS:
        # Up to what is sent they are own ones; results are made of all.
        names = {f"{{{i}}}": f"args.{name}" for i, name in enumerate(one.args)}
        names["{ahead}"] = f"{one.args[0]}_ahead" if one.args else ""
        by_owner = kernel.of(core.Template)[0].function == "rows"
        guard = {"push_packets": OTHER, "spread_packets": OWN}.get(one.function, "")
        if one.slot == "combine" and by_owner:
            guard = OWN
        return Piece((_filled(_ROWS[one.function], names),), guard)
    if isinstance(one, core.Hook):
        lines, guard = _HOOKS[one.function]
        names = {f"{{{i}}}": f"args.{name}" for i, name in enumerate(one.args)}
        names |= _known(one, kernel)
        return Piece(tuple(_filled(line, names) for line in lines), guard)
    if isinstance(one, core.Wait):
        return _wait(one, kernel)
    if isinstance(one, core.Notify):
        return _notify(one, kernel)
    called = "slot_wait_free(args.world, args.{slot}, args.e)"
    guard = LAST if one.slot == "announce" else ""
    if isinstance(one, core.Finish):
        called = "slot_finish(args.world, args.{slot}, args.e, args.num_programs)"
    if isinstance(one, core.Advance):
        called = "slot_advance(args.{slot}, args.e, args.num_programs)"
    lines = (*_harmless(one, kernel), _said(f"slots.{called}", one, slot=one.workspace))
    return Piece(lines, guard)


def sentence(one: core.Fused) -> str:
    """What a statement does, for the reader of the kernel."""
    place = f"  ({line_of(one.place)})" if one.place.frames else ""
    if isinstance(one, core.Wait):
        words = {"tile": "of a tile's rows", "all": "all of them", "others": "of other ranks",
                 "chunk": "of other ranks for the tile's chunk",
                 "sources": "of the ranks whose rows a tile has"}  # fmt: skip
        when = {"ready": "before rows are read", "combine": "before partial sums are added"}
        who = "the last program" if one.by else "each program"
        guard = ", unless the rows are own" if one.unless else ""
        return f"{who} waits, {words[one.words]}, {when.get(one.slot, 'at its end')}{guard}{place}"
    if isinstance(one, core.Notify) and one.slot == "begin":
        return f"set on each rank when a feeder's share of own rows is there{place}"
    if isinstance(one, core.Notify) and one.to in core.OF_CHUNKS:
        return f"{_OF_CHUNKS[one.to]}{place}"
    if isinstance(one, core.Notify):
        return f"set on {_WHOM[one.to]} when a tile's stores are complete{place}"
    if isinstance(one, core.Credit):
        by = " by its engine" if one.slot == "announce" else ""
        return f"waited for before anything is written to a peer{by}{place}"
    if isinstance(one, core.Finish):
        return f"given to every rank by the last program{place}"
    if isinstance(one, core.Advance):
        return f"moved on by the last program{place}; calls use halves of the boxes in turns"
    return one.function


# What is said of packets, and of what else is no signal by itself, by the hook.
SAID = {
    "count": "counts the tiles of a chunk that are stored, here alone",
    "send_packets": "packets, each with the call's epoch as its flag: this rank's share of each "
    "row, to every other rank",
    "add_packets": "each program waits, for those of the other ranks, in their order",
    "push_packets": "packets, each with the call's epoch as its flag: this rank's share of a row, "
    "to who owns it",
    "spread_packets": "packets as well: sums of own rows, to every other rank",
    "take_packets": "each program waits at its end, for those of the rows' owners",
}
_WHOM = {"owner": "the rank that owns the rows", "all": "every rank", "each": "every rank"}
_OF_CHUNKS = {
    "here": "set here when the last tile of a chunk is stored: what the engine copies to its owner",
    "engine": "a token: set here behind that, taken by the copy engine's stream",
}


def line_of(place: Place) -> str:
    """The user's line, short: the innermost frame of theirs is the outermost of all."""
    frame = place.outermost
    return f"{Path(frame.file).name}:{frame.line}" if frame else ""


def _said(text: str, one: core.Fused, **names: str) -> str:
    """A line with the user's line in a comment, so that reports show it."""
    for name, value in names.items():
        text = text.replace(f"{{{name}}}", value)
    return f"{text}  # {line_of(one.place)}" if one.place.frames else text


def _filled(line: str, names: dict[str, str]) -> str:
    for name, value in names.items():
        line = line.replace(name, value)
    return line


def _how(one: core.Wait | core.Notify) -> str:
    """Order and scope where they are not the usual ones."""
    usual = core.ORDERS[core.text.word(type(one))][0]
    order = "" if one.order == usual else f", order=wl.Order.{one.order.upper()}"
    return order + ("" if one.scope == "system" else f", scope=wl.Scope.{one.scope.upper()}")


def _mapping_of(one: core.Wait | core.Notify, kernel: core.Kernel) -> core.Mapping:
    """By which the words of a signal are numbered."""
    return next(mapping for mapping in kernel.of(core.Mapping) if mapping.name == one.mapping)


def _wait(one: core.Wait, kernel: core.Kernel) -> Piece:
    signals, by = f"args.{one.signals}", f"args.{one.mapping}"
    how = f"{_how(one)}, world=args.world)"
    if one.words == "tile" and one.slot == "collect":
        lines = (
            f"for part in range({by}.words):",
            "    word = hooks.partition.word_of("
            f"{signals}, at, part, at.owner, args.world.num_ranks, {by})",
            _said(f"    wl.wait(word, args.e{how}", one),
        )
        return Piece(lines)
    if one.words == "tile":
        lines = (
            f"word = _word_of(at.first, {by})",
            f"count = _word_of(at.end - 1, {by}) - word + 1",
            _said(f"wl.wait({signals} + word, args.e, count{how}", one),
        )
        return Piece(lines, OTHER if one.unless == "own" else "")
    if one.words == "sources":
        lines = (
            f"word = {signals} + at.lo * {by}.lanes",
            "count = hooks.table.num_sources(at, args.world.num_ranks)",
            _said(f"wl.wait(word, args.e, count * {by}.lanes{how}", one),
        )
        return Piece(lines)
    cut = _mapping_of(one, kernel)
    if one.words == "all" and cut.sort == "tables":
        lines = (
            f"tiles = hooks.table.num_tiles(args.{cut.of[0]}, {by})",
            f"words = args.world.num_ranks * {by}.columns * tiles",
            _said(f"wl.wait({signals}, args.e, words{how}", one),
        )
        return Piece(lines)
    if one.words == "all":
        lines = (_said(f"wl.wait({signals}, args.e, {by}.chunks * args.world.num_ranks{how}", one),)
        if one.by == "last":
            lines = ("if args.program == args.num_programs - 1:", *_inside(lines))
        return Piece(lines)
    word = f"hooks.partition.word_of({signals}, at, part, source, args.world.num_ranks, {by})"
    if one.words == "chunk":
        word = f"{signals} + hooks.partition.chunk_of(at, source, {by})"
    lines: tuple[str, ...] = (
        "for hop in range(1, args.world.num_ranks):",
        "    source = (args.rank + hop) % args.world.num_ranks",
        f"    word = {word}",
        _said(f"    wl.wait(word, args.e{how}", one),
    )
    if one.words == "others":
        lines = (
            f"first, end = hooks.partition.words_of_rows(cells, value, {by})",
            "for part in range(first, end):",
            *_inside(lines),
        )
    return Piece(("if cells.starts:", *_inside(lines)), OWN)


def _notify(one: core.Notify, kernel: core.Kernel) -> Piece:
    cut = _mapping_of(one, kernel)
    signals, by = f"args.{one.signals}", f"args.{one.mapping}"
    if one.to == "each":
        word = f"{signals} + args.rank * {by}.lanes + args.program"
        told = f"wl.notify(args.world, {word}, args.e, to=to, op=wl.SignalOp.SET{_how(one)})"
        return Piece((_said(told, one),), FEEDING)
    if cut.sort == "tables":
        lines = (
            f"word = (at.i_m * args.world.num_ranks + args.rank) * {by}.columns + at.i_n",
            _said(f"wl.notify_all(args.world, {signals} + word, args.e, "
                  f"op=wl.SignalOp.SET{_how(one)})", one),
        )  # fmt: skip
        return Piece(lines)
    if one.to in core.OF_CHUNKS:
        value = "1" if one.to == "engine" else "args.e"
        quiet = ("# weft: equivalent-mutant narrow of notify: it orders nothing itself",)
        lines = (
            f"word = {signals} + hooks.partition.chunk_of(at, at.owner, {by})",
            *(quiet if one.order == "relaxed" else ()),
            _said(f"wl.notify(args.world, word, {value}, to=args.rank, "
                  f"op=wl.SignalOp.SET{_how(one)})", one),
        )  # fmt: skip
        return Piece(lines, LAST)
    call, guard = ("notify_all(args.world, word, args.e, ", OWN)
    if one.to == "owner":
        call, guard = ("notify(args.world, word, args.e, to=at.owner, ", OTHER)
    return Piece(
        (
            f"first, end = hooks.partition.words_of(part, {by})",
            "for each in range(first, end):",
            "    word = hooks.partition.word_of("
            f"{signals}, at, each, args.rank, args.world.num_ranks, {by})",
            _said(f"    wl.{call}op=wl.SignalOp.SET{_how(one)})", one),
        ),
        guard,
    )


def _inside(lines: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"    {line}" for line in lines)


def _harmless(one: core.Fused, kernel: core.Kernel) -> tuple[str, ...]:
    """Notes of what mutants may do to a call's begin and end, for `weft verify --mutants`."""
    if isinstance(one, core.Advance):
        return _ADVANCED
    if core.implies_credits(kernel):
        return _IMPLIED_END if isinstance(one, core.Finish) else _IMPLIED
    pushes = any(hook.function in core.FAR for hook in kernel.of(core.Hook))
    return _ALONE if isinstance(one, core.Finish) and not pushes else ()


_ADVANCED = (
    "# weft: equivalent-mutant swap of atomic: behind the last one comes this rank's own next call",
)
_IMPLIED = (
    "# weft: equivalent-mutant drop, relax-acquire, value-1, count-1 of wait: whoever has all sums",
    "# of a call knows that their owners have read its shares; and who is given a share of the",
    "# next call, that its source has ended this one",
)
_IMPLIED_END = (
    "# weft: equivalent-mutant swap of atomic: credits are implied, as said above",
    "# weft: equivalent-mutant relax-release, value+1 of notify: as said above",
)
_ALONE = (
    "# weft: equivalent-mutant drop of complete_stores: only stores of the result are",
    "# asynchronous, which are complete when the kernel has ended, and no other rank reads",
    "# weft: equivalent-mutant incomplete of notify: only stores of the result, as above",
)

# Function -> lines with {0}, {1}, ... for its arguments, and the tiles that they are for.
_ROWS_OR_OWN = (
    "source = {0}",
    "row = at.first",
    "if at.is_own:",
    "    source = {1}",
    "    row = at.first - args.rank * {2}.rank_rows",
    "return gemm.Rows(source=source, first=row, end=row + at.end - at.first)",
)
_HOOKS: dict[str, tuple[tuple[str, ...], str]] = {
    "rows_or_own": (_ROWS_OR_OWN, ""),
    "read_owned": (
        ("return hooks.gather.read_owned(at, segment, tile, hooks.gather.Operand({0}, {1}))",), ""),
    "rows_by_token": (("return hooks.table.rows_by_token(at, {0}, {1}.token_of)",), ""),
    "add_partials": (("value = hooks.reduce.add_partials(at, cells, value, {move})",), OWN),
    "add_carried": (("value = hooks.reduce.add_carried(at, cells, value, {move})",), OWN),
    "count": ((), ""),
    "feed": (
        ("hooks.feed.feed({0}, {1}, to, args.program, args.rank, args.shape.k, {2}, args.world)",),
        FEEDING),
    "silu": (("value = hooks.epilogue.silu(value, {dtype})",), ""),
    "silu_mul": (
        ("value = hooks.epilogue.silu_mul(value, {dtype})",
         "cells = hooks.epilogue.halved(cells)"), ""),
    "mul": (("value = hooks.epilogue.mul({0}, cells, value, args.shape.m, {columns})",), ""),
    "add": (("value = hooks.epilogue.add({0}, cells, value, args.shape.m, {columns})",), ""),
    "store_value": (("hooks.epilogue.store({1}, cells, value, args.shape.m, {columns})",), ""),
    "store_slots": (("hooks.table.store_value({0}, at, cells, value, {columns})",), ""),
    "push_rows": (
        ("hooks.table.push_rows({0}, at, cells, fragment, args.rank, args.shape.n, {1}, {2}, "
         "args.world)",), ""),
    "sum_rows": (
        ("hooks.table.sum_rows({1}, {0}, args.rank, args.shape.n, {2}, args.program, "
         "args.num_programs, args.world.num_ranks)",), ""),
    "store_own": (("hooks.scatter.store_own({0}, at, cells, fragment, {1})",), OWN),
    "keep": (("hooks.scatter.keep({0}, at, cells, fragment, {1})",), OTHER),
    "push": (("hooks.scatter.push(at, cells, fragment, {move})",), OTHER),
    "send": (("hooks.scatter.send(at, cells, fragment, {0}_peers, {move})",), OTHER),
    "spread": (("hooks.scatter.spread({0}, at, cells, fragment, {move})",), OWN),
    "send_to_all": (
        ("hooks.scatter.send_to_all({0}, at, cells, fragment, {0}_peers, {move})",), OWN),
    "unpack": (("hooks.scatter.unpack({1}, {0}, at, {2}, tile_m, tile_n)",), ""),
}  # fmt: skip

# Written out each time: a variable would make numbers of the world's constants.
_BOXES = "{1}.dtype.element_ty, row_packets.Boxes({0}, args.e, args.rank, {2}, args.world)"
# Of whole rows.
_ROWS = {
    "add_rows": "value += rows.load({0}, at, tile, {1})",
    "mul_rows": "value *= rows.load({0}, at, tile, {1})",
    "silu_rows": "value *= tl.sigmoid(value)",
    "rms_norm": "value = rows.rms_norm(value, {0}, {1}, {2}.n)",
    "rounded": "value = rows.rounded(value, {0})",
    "ahead": "{ahead} = rows.load({0}, at, tile, {1})",
    "add_ahead": "value += {ahead}",
    "mul_ahead": "value *= {ahead}",
    "send_packets": f"row_packets.send(at, fragment, tile, {_BOXES})",
    "add_packets": f"value = row_packets.add_shares(at, value, tile, {_BOXES})",
    "push_packets": f"row_packets.push(at, fragment, tile, {_BOXES})",
    "spread_packets": f"row_packets.send(at, fragment, tile, {_BOXES})",
    "take_packets": f"value = row_packets.take(at.owner, at, tile, {_BOXES})",
    "load_rows": "value = rows.load({0}, at, tile, {1})",
    "store_rows": "rows.store({0}, at, value, tile, {1})",
}


def _known(one: core.Hook, kernel: core.Kernel) -> dict[str, str]:
    """What texts of hooks name beside their arguments."""
    names = {"{move}": _move(kernel)}
    if chain := kernel.at("value"):
        (stored,) = kernel.at("emit")
        assert isinstance(stored, core.Hook)
        names["{dtype}"] = f"args.{stored.args[-1]}.dtype.element_ty"
        # Behind silu_mul there are half as many columns.
        before = chain[: next((i for i, each in enumerate(chain) if each is one), len(chain))]
        is_half = any(getattr(each, "function", "") == "silu_mul" for each in before)
        names["{columns}"] = "args.shape.n // 2" if is_half else "args.shape.n"
    return names


def _move(kernel: core.Kernel) -> str:
    """A hooks.scatter.Move: the arguments themselves where they have its fields' names.

    Written out each time: a variable would make numbers of the world's constants.
    """
    pushed = [
        one for one in kernel.of(core.Hook)
        if one.function in ("push", "send", "add_partials", "add_carried")
    ]  # fmt: skip
    if not pushed:
        return ""
    partials, parts = pushed[0].args
    if (partials, parts) == ("partials", "parts"):
        return "args"
    return f"hooks.scatter.Move(args.{partials}, args.rank, args.{parts}, args.world)"
