"""How each statement of Core IR is spelled as Triton source: lines of the function of its hook.

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


# Of a chunk, where something is done to its value.
LOADED = Piece(("value = epilogues.load_chunk(chunk)",))


def spell(one: core.Woven, kernel: core.Kernel, twin: str) -> Piece:
    """The lines of one statement in a kernel's `plain` or `sm90` twin."""
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
        lines, guard = _HOOKS.get((one.function, twin)) or _HOOKS[one.function, "both"]
        names = {f"{{{i}}}": f"args.{name}" for i, name in enumerate(one.args)}
        names |= _known(one, kernel)
        return Piece(tuple(_filled(line, names) for line in lines), guard)
    if isinstance(one, core.Wait):
        return _wait(one, kernel, twin)
    if isinstance(one, core.Notify):
        return _notify(one, kernel, twin)
    called = "slot_wait_free(args.world, args.{slot}, args.e)"
    guard = LAST if one.slot == "announce" else ""
    if isinstance(one, core.Finish):
        called = "slot_finish(args.world, args.{slot}, args.e, args.num_programs)"
    if isinstance(one, core.Advance):
        called = "slot_advance(args.{slot}, args.e, args.num_programs)"
    lines = (*_harmless(one, kernel), _said(f"slots.{called}", one, slot=one.workspace))
    return Piece(lines, guard)


def sentence(one: core.Woven) -> str:
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


def _said(text: str, one: core.Woven, **names: str) -> str:
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


def _wait(one: core.Wait, kernel: core.Kernel, twin: str) -> Piece:
    signals, by = f"args.{one.signals}", f"args.{one.mapping}"
    how = f"{_how(one)}, world=args.world)"
    if one.words == "tile" and one.slot == "collect":
        lines = (
            f"for part in range({by}.words):",
            f"    word = weave.word_of({signals}, at, part, at.owner, args.world.num_ranks, {by})",
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
            "count = grouped.num_sources(at, args.world.num_ranks)",
            _said(f"wl.wait(word, args.e, count * {by}.lanes{how}", one),
        )
        return Piece(lines)
    cut = _mapping_of(one, kernel)
    if one.words == "all" and cut.sort == "tables":
        lines = (
            f"tiles = grouped.num_tiles(args.{cut.of[0]}, {by})",
            f"words = args.world.num_ranks * {by}.columns * tiles",
            _said(f"wl.wait({signals}, args.e, words{how}", one),
        )
        return Piece(lines)
    if one.words == "all":
        lines = (_said(f"wl.wait({signals}, args.e, {by}.chunks * args.world.num_ranks{how}", one),)
        if one.by == "last":
            lines = ("if args.program == args.num_programs - 1:", *_inside(lines))
        return Piece(lines)
    word = f"weave.word_of({signals}, at, part, source, args.world.num_ranks, {by})"
    part = (f"    part = (row - at.i_m * {by}.tile_m) // value.shape[0]",)
    if one.words == "chunk":
        word, part = f"{signals} + weave.chunk_of(at, source, {by})", ()
    lines: tuple[str, ...] = (
        "for hop in range(1, args.world.num_ranks):",
        "    source = (args.rank + hop) % args.world.num_ranks",
        f"    word = {word}",
        _said(f"    wl.wait(word, args.e{how}", one),
    )
    if twin == "sm90":
        first = "# Once for what one warp group has of a tile: before its first chunk."
        lines = (first, f"if column == at.i_n * {by}.tile_n:", *part, *_inside(lines))
    elif one.words == "others":
        lines = (f"for part in range({by}.words):", *_inside(lines))
    return Piece(lines, OWN)


def _notify(one: core.Notify, kernel: core.Kernel, twin: str) -> Piece:
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
            f"word = {signals} + weave.chunk_of(at, at.owner, {by})",
            *(quiet if one.order == "relaxed" else ()),
            _said(f"wl.notify(args.world, word, {value}, to=args.rank, "
                  f"op=wl.SignalOp.SET{_how(one)})", one),
        )  # fmt: skip
        return Piece(lines, LAST)
    call, guard = ("notify_all(args.world, word, args.e, ", OWN)
    if one.to == "owner":
        call, guard = ("notify(args.world, word, args.e, to=at.owner, ", OTHER)
    part = "each" if twin == "plain" else "part"
    lines: tuple[str, ...] = (
        f"word = weave.word_of({signals}, at, {part}, args.rank, args.world.num_ranks, {by})",
        _said(f"wl.{call}op=wl.SignalOp.SET{_how(one)})", one),
    )
    if twin == "plain":
        # A tile is stored in one here, but its owner may wait for it in parts.
        lines = (f"for each in range({by}.words):", *_inside(lines))
    return Piece(lines, guard)


def _inside(lines: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"    {line}" for line in lines)


def _harmless(one: core.Woven, kernel: core.Kernel) -> tuple[str, ...]:
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

# (function, twin) -> lines with {0}, {1}, ... for its arguments, and the tiles that they are for.
_ROWS_OR_OWN = (
    "source = {0}",
    "row = at.first",
    "if at.is_own:",
    "    source = {1}",
    "    row = at.first - args.rank * {2}.rank_rows",
    "return gemm.Rows(source=source, first=row, end=row + at.end - at.first)",
)
_PLAIN = "{0}, at.i_m * tile.m, at.i_n * value.shape[1], value, args.shape.m, {columns}"
_SM90 = "{0}, row, {column}, value, args.shape.m, {columns}"
_HOOKS: dict[tuple[str, str], tuple[tuple[str, ...], str]] = {
    ("rows_or_own", "both"): (_ROWS_OR_OWN, ""),
    ("read_owned", "both"): (
        ("return weave.read_owned(at, segment, tile, weave.Operand({0}, {1}))",), ""),
    ("add_partials", "plain"): (("value = weave.add_partials(at, value, tile, {move})",), OWN),
    ("add_partials", "sm90"): (
        ("value = weave.add_partial_chunks(at, row, column, value, {move})",), OWN),
    ("add_carried", "plain"): (("value = weave.add_carried(at, value, tile, {move})",), OWN),
    ("add_carried", "sm90"): (
        ("value = weave.add_carried_chunks(at, row, column, value, {move})",), OWN),
    ("count", "both"): ((), ""),
    ("keep", "plain"): (("weave.keep({0}, at, value, tile, {1})",), OTHER),
    ("keep", "sm90"): (("weave.keep_chunk({0}, at, row, column, chunk, {1})",), OTHER),
    ("store_own", "plain"): (("weave.store_owned({0}, at, value, tile, {1})",), OWN),
    ("store_own", "sm90"): (
        ("if at.row < at.end:",
         "    own_row = at.row + row - at.i_m * {1}.tile_m",
         "    gemm_sm90.store_tile({0}, [own_row, column], chunk)"), OWN),
    ("feed", "plain"): (
        ("grouped.feed({0}, {1}, to, args.program, args.rank, args.shape.k, {2}, args.world)",),
        FEEDING),
    ("feed", "sm90"): (
        ("grouped_sm90.feed({0}, {1}, to, args.program, args.rank, args.shape.k, {2}, "
         "args.world)",), FEEDING),
    ("rows_by_token", "both"): (("return grouped.rows_by_token(at, {0}, {1}.token_of)",), ""),
    ("store_slots", "plain"): (("grouped.store_value({0}, at, value, {columns})",), ""),
    ("store_slots", "sm90"): (
        ("grouped_sm90.store_value({0}, at, row, {column}, value, {columns})",), ""),
    ("push_rows", "plain"): (
        ("grouped.push_rows({0}, at, value, tile, args.rank, args.shape.n, {1}, {2}, args.world)",),
        ""),
    ("sum_rows", "plain"): (
        ("grouped.sum_rows({1}, {0}, args.rank, args.shape.n, {2}, args.program, "
         "args.num_programs, args.world.num_ranks)",), ""),
    ("silu", "plain"): (("value = epilogues.silu(value, {dtype})",), ""),
    ("silu", "sm90"): (("value = epilogues.silu_chunk(value, {dtype})",), ""),
    ("silu_mul", "plain"): (("value = epilogues.silu_mul(value, {dtype})",), ""),
    ("silu_mul", "sm90"): (("value = epilogues.silu_mul_chunk(value, {dtype})",), ""),
    ("mul", "plain"): ((f"value = epilogues.mul({_PLAIN})",), ""),
    ("mul", "sm90"): ((f"value = epilogues.mul_chunk({_SM90})",), ""),
    ("add", "plain"): ((f"value = epilogues.add({_PLAIN})",), ""),
    ("add", "sm90"): ((f"value = epilogues.add_chunk({_SM90})",), ""),
    ("store_value", "plain"): ((f"epilogues.store_tile({_PLAIN.replace('{0}', '{1}')})",), ""),
    ("store_value", "sm90"): ((f"epilogues.store_chunk({_SM90.replace('{0}', '{1}')})",), ""),
    ("push", "plain"): (("weave.push(at, value, tile, {move})",), OTHER),
    ("push", "sm90"): (("weave.push_chunk(at, row, column, chunk, {move})",), OTHER),
    ("send", "plain"): (("weave.push(at, value, tile, {move})",), OTHER),
    ("send", "sm90"): (
        ("if args.world.num_ranks <= weave.MOST_PEERS + 1:",
         "    weave.send_chunk(at, row, column, chunk, {0}_peers, {move})",
         "else:",
         "    weave.push_chunk(at, row, column, chunk, {move})"), OTHER),
    ("spread", "plain"): (("weave.spread({0}, at, value, tile, {move})",), OWN),
    ("spread", "sm90"): (
        ("if at.row < at.end:",
         "    weave.spread_chunk({0}, at, row, column, chunk, {move})"), OWN),
    ("send_to_all", "plain"): (("weave.spread({0}, at, value, tile, {move})",), OWN),
    ("send_to_all", "sm90"): (
        ("if at.row < at.end:",
         "    if args.world.num_ranks <= weave.MOST_PEERS + 1:",
         "        weave.send_chunk_to_all(at, row, column, chunk, {0}_peers, {move})",
         "    else:",
         "        weave.spread_chunk({0}, at, row, column, chunk, {move})"), OWN),
    ("unpack", "plain"): (("weave.unpack({1}, {0}, at, tile, {2})",), ""),
    ("unpack", "sm90"): (
        ("for row in range(0, tile_m, weave.UNPACKED_ROWS):",
         "    weave.unpack_rows({1}, {0}, at, row, {2}, weave.UNPACKED_ROWS, tile_n)"), ""),
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
    "send_packets": f"row_packets.send(at, value, tile, {_BOXES})",
    "add_packets": f"value = row_packets.add_shares(at, value, tile, {_BOXES})",
    "push_packets": f"row_packets.push(at, value, tile, {_BOXES})",
    "spread_packets": f"row_packets.send(at, value, tile, {_BOXES})",
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
        names["{column}"] = "column // 2" if is_half else "column"
    return names


def _move(kernel: core.Kernel) -> str:
    """A weave.Move: the arguments themselves where they have its fields' names.

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
    return f"weave.Move(args.{partials}, args.rank, args.{parts}, args.world)"
