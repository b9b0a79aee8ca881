"""Core IR -> what is launched: the kernel of its template, with its hooks as a constant argument.

    wait(combine, partials_ready, others, parts)
    hook(combine, add_partials, (partials, parts))
    ->  combine   signals.sum_of_own()
                    own:
                      signals.wait_others(partials_ready, parts)
                      reduce.add_partials(partials, parts)

Every statement is a function of tiles/, which is given what the statement names (`Call`); nothing
is written here. `HOOKS` says which function, `_guarded` which tiles it is for: neighbours for the
same tiles share a branch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from weft.base.vocabulary import Order, Scope
from weft.compiler.passes.swizzle import BY_NODE
from weft.ir import core
from weft.ir.kinds import ELEMENTWISE, OF_ONE_WIDTH
from weft.ir.shapes import ACTIVATIONS, GATED
from weft.tiles import hierarchy, own_rows, row_packets, rows, swizzle
from weft.tiles.composition import (
    MOMENTS,
    MOMENTS_OF_OWN_ROWS,
    MOMENTS_OF_ROWS,
    Call,
    Chain,
    Hooks,
    Operand,
)
from weft.tiles.hooks import (
    epilogue,
    feed,
    order,
    partition,
    reduce,
    relayed,
    scales,
    scatter,
    signals,
    slices,
    split_k,
    table,
    whole,
)

# Whose tiles a statement is for: this rank's; other ranks'; those with which a chunk is complete.
# Or, in `begin`, for each rank in turn, of the first programs.
OWN, OTHER, LAST, FEEDING, PUSHED = "own", "other", "last", "fed", "pushed"

# Order -> what is made once, and the function of each tile.
ORDERS = {
    "grouped": (whole.arrange_grouped, swizzle.grouped),
    "gather": (whole.arrange, whole.rotated),
    "hierarchical_gather": (whole.arrange_by_node, whole.by_node),
    "scatter": (order.arrange, order.scattered),
    "part_by_part": (order.arrange, order.part_by_part),
    "other_parts": (order.arrange_others, order.other_parts),
    "own_part": (order.arrange, order.own_part),
    "exchange": (order.arrange, order.exchanged),
    "hierarchical_scatter": (hierarchy.to_scatter, hierarchy.scattered),
    "split_k": (split_k.arrange, split_k.tiles_of_split),
    "in_rows": (order.arrange, row_packets.in_rows),
    "in_turn": (table.arrange, table.in_turn),
    "by_expert": (table.arrange, table.by_expert),
}
# Where tiles are cut within each rank's part: of those with fewer than all.
COUNTS_OF_PARTS = {"other_parts": partition.count_others, "own_part": partition.count_own}
COUNTS = {"whole": whole.count, "part": partition.count, "slices": whole.count,
          "experts": table.num_tiles}  # fmt: skip

# Function of Core IR -> that of tiles/, its arguments where they are not those of the statement
# ({0}, {1}, ..: these), and whose tiles it is for.
HOOKS: dict[str, tuple[Any, tuple[str, ...] | None, str]] = {
    "push_own": (feed.push_own, None, ""),
    "scale_rows": (scales.scales, None, ""),
    "scale_blocks": (scales.scales, None, ""),
    "scale_owned_rows": (scales.scales_owned, None, ""),
    "scale_owned_blocks": (scales.scales_owned, None, ""),
    "channels": (split_k.channels, None, ""),
    "slices": (slices.slices, None, ""),
    "slice_or_own": (slices.slice_or_own, None, ""),
    "left_channel": (split_k.left_channel, None, ""),
    "right_channel": (split_k.right_channel, None, ""),
    "rows_of": (whole.rows_of, ("{0}", "shape.m"), ""),
    "rows_or_own": (whole.rows_or_own, None, ""),
    "read_owned": (partition.read_owned, None, ""),
    "read_for_owner": (partition.read_for_owner, None, ""),
    "rows_by_token": (table.rows_by_token, ("{0}", "{1}.token_of"), ""),
    "rows_by_slot": (table.read_slots, None, ""),
    "choices": (table.choices, ("{0}", "{1}.slot_of", "{1}.weight_of", "{2}", "{3}"), ""),
    "add_partials": (reduce.add_partials, None, OWN),
    "add_staged": (reduce.add_staged, None, OWN),
    "add_relayed": (relayed.add_relayed, None, OWN),
    **{kind: (getattr(epilogue, kind), ("{dtype}",), "") for kind in (*ACTIVATIONS, *GATED)},
    **{
        kind: (getattr(epilogue, kind), ("{0}", "shape.m", "{columns}"), "")
        for kind in ELEMENTWISE
        if kind not in (*ACTIVATIONS, *GATED)
    },
    "store": (scatter.store, None, ""),
    "store_value": (epilogue.store, ("{1}", "shape.m", "{columns}"), ""),
    "store_slots": (table.store_slots, ("{0}", "{columns}"), ""),
    "store_own": (scatter.store_own, None, OWN),
    "stage": (scatter.stage, None, OTHER),
    "stage_piece": (scatter.stage, None, ""),
    "push": (scatter.push, None, OTHER),
    "push_near": (relayed.push_near, None, OTHER),
    "push_partner": (relayed.push_partner, None, OTHER),
    "send": (scatter.send, ("{0}", "{1}", "{0}_peers"), OTHER),
    "spread": (scatter.spread, None, OWN),
    "send_to_all": (scatter.send_to_all, ("{0}", "{1}", "{0}_peers"), OWN),
    "unpack": (scatter.unpack, None, ""),
    "unpack_from": (scatter.unpack_from, None, ""),
    "load_rows": (rows.load, None, ""),
    "store_rows": (rows.store, None, ""),
    "store_own_rows": (rows.store_own, None, ""),
    "load_view": (own_rows.load, None, ""),
    "load_pairs": (own_rows.load_pairs, None, ""),
    "add_view": (own_rows.add, None, ""),
    "mul_view": (own_rows.mul, None, ""),
    "turn": (own_rows.turn, ("{0}.begin", "{1}", "{2}", "{3}"), ""),
    "turn_by_table": (own_rows.turn_by_table, ("{0}.begin", "{1}", "{2}", "{3}"), ""),
    "store_tile": (epilogue.store, ("{0}", "shape.m", "shape.n"), ""),
    **{f"{kind}_rows": (getattr(rows, kind), None, "") for kind in OF_ONE_WIDTH},
    "rms_norm": (rows.rms_norm, ("{0}", "{1}", "{2}.n"), ""),
    "rounded": (rows.rounded, None, ""),
    "ahead": (rows.load, None, ""),
    "add_ahead": (rows.add_loaded, ("{0}_ahead",), ""),
    "mul_ahead": (rows.mul_loaded, ("{0}_ahead",), ""),
    "send_packets": (row_packets.send, None, ""),
    "add_packets": (row_packets.add_shares, None, ""),
    "push_packets": (row_packets.push, None, OTHER),
    "spread_packets": (row_packets.send, None, OWN),
    "take_packets": (row_packets.take, None, ""),
}

_Guarded = tuple[Call, str]


def names_of(kernel: core.Kernel) -> dict[str, tuple[str, int | None]]:
    """Where a kernel finds what its statements name: a field of its Launch, and the place there."""
    found: dict[str, tuple[str, int | None]] = {}
    apart = operands_apart(kernel)
    for one in params_of(kernel):
        field = "operands" if one.name in apart else "arrays"
        found[one.name] = field, sum(place == field for place, _ in found.values())
    found |= {one.name: ("mapping", None) for one in kernel.of(core.Mapping)}
    found |= {f"{name}_peers": ("described", i) for i, name in enumerate(peers_of(kernel))}
    return found


def params_of(kernel: core.Kernel) -> list[core.Param]:
    """Those that a launch gives values; slot and world are each kernel's."""
    return [one for one in kernel.of(core.Param) if one.sort not in ("slot", "world")]


def operands_apart(kernel: core.Kernel) -> list[str]:
    """The operands that may be descriptors, which a kernel takes one by one."""
    if kernel.of(core.Template)[0].function in core.OF_ROWS:
        return []
    return [one.name for one in kernel.of(core.Param) if one.sort == "operand"]


def peers_of(kernel: core.Kernel) -> list[str]:
    """The arrays that tiles are sent to by TMA: on Hopper there is a descriptor for each peer."""
    given = [one.args[0] for one in kernel.of(core.Hook) if one.function.startswith("send")]
    return [one.name for one in kernel.of(core.Param)
            if one.name in given and one.sort != "packets"]  # fmt: skip


def is_by_tables(kernel: core.Kernel) -> bool:
    """Are tiles cut by what the device knows alone?"""
    return kernel.of(core.Mapping)[0].sort == "tables"


def is_summed_over_rows(kernel: core.Kernel) -> bool:
    """Does the product sum over the rows of both operands, segment by segment?"""
    return any(one.function == "channels" for one in kernel.of(core.Hook))


def summed_block(kernel: core.Kernel, name: str, tile: Sequence[int]) -> tuple[int, int]:
    """Rows and columns that such a product reads at once of one of its operands."""
    (ready,) = [one for one in kernel.at("ready") if isinstance(one, core.Hook)]
    is_left = (name == ready.args[2]) != (ready.function == "left_channel")
    return tile[2], tile[not is_left]


def has_sm90(kernel: core.Kernel) -> bool:
    """Is there a variant of it for Hopper?"""
    # Kernels in Gluon put nothing to other nodes: they wait for what is relayed, and give a relay
    # what goes there. Sums over rows take several segments.
    far = {*core.FAR} - {*core.IN_NODE}
    puts = any(one.function in far for one in kernel.of(core.Hook))
    return (kernel.of(core.Template)[0].function == "gemm"
            and not (puts and _is_by_node(kernel)) and not is_summed_over_rows(kernel))  # fmt: skip


def _is_by_node(kernel: core.Kernel) -> bool:
    """Do its tiles come node by node?"""
    return any(one.function.startswith(BY_NODE) for one in kernel.of(core.Hook))


def compose(kernel: core.Kernel) -> Hooks:
    """The hooks of a kernel, which need not be legal: mutants are launched too."""
    where = names_of(kernel)
    template = kernel.of(core.Template)[0].function
    is_rows = template in core.OF_ROWS
    moments = MOMENTS_OF_ROWS if is_rows else MOMENTS
    if template == core.OWN_ROWS:
        moments = MOMENTS_OF_OWN_ROWS
    chains = {name: Chain(name, moments[name], calls, where)
              for name, calls in calls_of(kernel).items()}  # fmt: skip
    called = {f"operand_{i}" if field == "operands" else f"{field}.{i}": name
              for name, (field, i) in where.items() if i is not None}  # fmt: skip
    if is_rows:
        return Hooks(kernel.name, chains, called=called)
    operands = operands_apart(kernel)
    indexed = [one.args[0] for one in kernel.of(core.Hook) if one.function == "rows_by_token"]
    if is_by_tables(kernel):
        stored = [one.args[0] for one in kernel.at("emit") if isinstance(one, core.Hook)]
        operands = [*(indexed or operands), *operands, *stored]
    given = [Operand(*where[name]) for name in (operands[0], *operands[-2:])]
    late = any(one.late for one in kernel.of(core.Notify))
    per_block = any(one.function in core.PER_BLOCK for one in kernel.of(core.Hook))
    return Hooks(kernel.name, chains, given, late=late, by_index=bool(indexed),
                 per_block=per_block, called=called)  # fmt: skip


def calls_of(kernel: core.Kernel) -> dict[str, tuple[Call, ...]]:
    """The calls of each moment."""
    (mapping,) = kernel.of(core.Mapping)
    found = {name: _calls(kernel, name) for name in ("begin", "end")}
    functions = [one.function for one in kernel.of(core.Hook)]
    if "push_own" in functions:
        found["begin"] = (Call(feed.if_pusher, then={"pusher": found["begin"]}),)
    for name in (
        "segments",
        "ready",
        "scales",
        "combine",
        "emit",
        "announce",
        "collect",
        "result",
        "done",
    ):
        if kernel.at(name):
            found[name] = _calls(kernel, name)
    for ordered in (one for one in kernel.at("order") if isinstance(one, core.Hook)):
        arrange, function = ORDERS[ordered.function]
        found["arrange"] = (Call(arrange, ordered.args),)
        found["order"] = (Call(function),)
    if kernel.of(core.Template)[0].function == "gemm":
        of = {"whole": (), "slices": (), "part": (mapping.name,)}.get(
            mapping.cuts, (*mapping.of, mapping.name)
        )
        counts = [COUNTS_OF_PARTS[name] for name in functions if name in COUNTS_OF_PARTS]
        found["count"] = (Call((*counts, COUNTS[mapping.cuts])[0], of),)
        first = Call(order.own_place)
        if "feed" in functions:
            first = Call(feed.first_of, (mapping.name,))
        found["first"] = (first,)
    if is_summed_over_rows(kernel):
        found["count"] = (Call(split_k.count),)
        found["combine"] = (Call(split_k.add_splits),)
        found["emit"] = (Call(split_k.store_or_keep, then={"last": found["emit"]}),)
        found["announce"] = (Call(split_k.announce_split),)
    return found


def _calls(kernel: core.Kernel, moment: str) -> tuple[Call, ...]:
    """What is done at one moment, in order; neighbours for the same tiles in one branch."""
    given = [*(kernel.at("value") if moment == "emit" else ()), *kernel.at(moment)]
    made = [each for one in given for each in _guarded(one, kernel)]
    if len(given) > len(kernel.at(moment)):
        made.insert(0, (Call(epilogue.load), ""))
    calls: list[Call] = []
    while made:
        guard = made[0][1]
        alike = [call for call, _ in _while(made, guard)]
        made = made[len(alike) :]
        if not guard:
            calls += alike
        elif guard in (LAST, FEEDING, PUSHED):
            # What leads is a call itself, which makes those behind it.
            calls[-1] = calls[-1]._replace(then={guard: tuple(alike)})
        elif moment == "combine":
            calls.append(Call(signals.sum_of_own, then={OWN: tuple(alike)}))
        else:
            others = [call for call, _ in _while(made, OWN if guard == OTHER else OTHER)]
            made = made[len(others) :]
            then = {guard: tuple(alike)}
            if others:
                then[OWN if guard == OTHER else OTHER] = tuple(others)
            calls.append(Call(_BRANCHES[tuple(then)], then=then))
    return tuple(calls)


_BRANCHES = {
    (OWN,): signals.if_own, (OTHER,): signals.if_other,
    (OWN, OTHER): signals.own_or_other, (OTHER, OWN): signals.other_or_own,
}  # fmt: skip


def _while(made: Sequence[_Guarded], guard: str) -> Iterator[_Guarded]:
    for one in made:
        if one[1] != guard:
            return
        yield one


def _guarded(one: core.Fused, kernel: core.Kernel) -> Iterator[_Guarded]:
    """The calls of one statement, and whose tiles each is for."""
    place = one.place.outermost
    at = (place.file, place.line) if place else ("", 0)
    if isinstance(one, core.Hook):
        made = _of_hook(one, kernel)
    elif isinstance(one, core.Wait):
        made = [_of_wait(one, kernel)]
    elif isinstance(one, core.Notify):
        made = [_of_notify(one, kernel)]
    else:
        made = [(Call(_of_slot(one, kernel)), LAST if one.slot == "announce" else "")]
    yield from ((call._replace(place=at), guard) for call, guard in made)


def _of_hook(one: core.Hook, kernel: core.Kernel) -> list[_Guarded]:
    if one.function == "count":
        return [(Call(signals.if_last, one.args, then={LAST: ()}), "")]
    if one.function == "feed":
        return [(Call(feed.feed_all, one.args, then={FEEDING: ()}), "")]
    function, args, guard = HOOKS[one.function]
    if one.function == "store_slots" and kernel.at("value"):  # what was made of a tile
        function = table.store_value
    if one.function == "push_own":  # to whom first is who asks for them first
        return [(Call(function, (*one.args, _is_by_node(kernel))), guard)]
    if one.slot == "combine" and kernel.of(core.Template)[0].function == "rows":
        guard = OWN  # up to what is sent they are own ones; results are made of all
    if args is None:
        args = one.args
    else:
        names = {f"{{{i}}}": name for i, name in enumerate(one.args)} | _known(one, kernel)
        args = tuple(_filled(each, names) for each in args)
    gives = f"{one.args[0]}_ahead" if one.function == "ahead" else "value"
    made = [(Call(function, args, gives), guard)]
    if one.function in GATED and one.slot == "value":
        made.append((Call(epilogue.halved, gives="cells"), ""))
        made.append((Call(epilogue.half, (_known(one, kernel)["{columns}"],), "columns"), ""))
    return made


def _filled(text: str, names: dict[str, str]) -> str:
    for name, value in names.items():
        text = text.replace(name, value)
    return text


def _known(one: core.Hook, kernel: core.Kernel) -> dict[str, str]:
    """What arguments of epilogues name beside their own."""
    chain = kernel.at("value")
    if one.slot == "result":  # of rows that lie as the first ones that are loaded
        (loaded,) = [each for each in kernel.at("ready") if isinstance(each, core.Hook)]
        return {"{dtype}": f"{loaded.args[0]}.begin.dtype.element_ty", "{columns}": "shape.n"}
    if not chain:
        return {"{columns}": "shape.n"}
    (stored,) = kernel.at("emit")
    assert isinstance(stored, core.Hook)
    before = chain[: next((i for i, each in enumerate(chain) if each is one), len(chain))]
    is_half = any(getattr(each, "function", "") in GATED for each in before)
    return {"{dtype}": f"{stored.args[-1]}.dtype.element_ty",
            "{columns}": "columns" if is_half else "shape.n"}  # fmt: skip


def _mapping_of(one: core.Wait | core.Notify, kernel: core.Kernel) -> core.Mapping:
    """By which the words of a signal are numbered."""
    return next(mapping for mapping in kernel.of(core.Mapping) if mapping.name == one.mapping)


def _of_wait(one: core.Wait, kernel: core.Kernel) -> _Guarded:
    how = Order[one.order.upper()], Scope[one.scope.upper()]
    given = (one.signals, one.mapping)
    if one.flags == "tile" and one.slot == "collect":
        return Call(signals.wait_tile, (*given, *how)), ""
    if one.flags == "tile":
        return Call(signals.wait_rows, (*given, one.unless == "own", *how)), ""
    if one.flags == "segment":
        return Call(signals.wait_segment, (*given, one.unless == "own", *how)), ""
    if one.flags == "slice":
        return Call(slices.wait_slice, (*given, one.unless == "own", *how)), ""
    if one.flags == "sources":
        return Call(signals.wait_sources, (*given, *how)), ""
    if one.flags == "all":
        return Call(signals.wait_all, (*given, one.by == "last", *how)), ""
    function = {"chunk": signals.wait_chunk, "relayed": relayed.wait_relayed}.get(
        one.flags, signals.wait_others
    )
    return Call(function, (*given, *how)), OWN


def _of_notify(one: core.Notify, kernel: core.Kernel) -> _Guarded:
    given = (one.signals, one.mapping, Order[one.order.upper()], Scope[one.scope.upper()])
    if one.to == "each" and _mapping_of(one, kernel).sort == "tables":
        return Call(signals.notify_fed, given), FEEDING
    if one.to == "each":
        return Call(signals.notify_pushed, given), PUSHED
    hooks = {hook.function: hook for hook in kernel.of(core.Hook)}
    if one.to == "partner":
        (*_, groups) = hooks["push_partner"].args
        given = (*given[:2], groups, *given[2:])
        return Call(relayed.notify_partner, given), OTHER
    if one.to == "owner" and "push_near" in hooks:
        return Call(relayed.notify_near, given), OTHER
    function, guard = {
        "here": (signals.notify_chunk, LAST), "engine": (signals.notify_engine, LAST),
        "owner": (signals.notify_owner, OTHER), "all": (signals.notify_all, OWN),
    }[one.to]  # fmt: skip
    return Call(function, given), guard


def _of_slot(one: core.Credit | core.Finish | core.Advance, kernel: core.Kernel) -> Any:
    if isinstance(one, core.Advance):
        return signals.advance
    if isinstance(one, core.Credit):
        return signals.credit
    # What communication CTAs push is complete when they announce it.
    pushes = any(hook.function in core.FAR and hook.function != "push_own"
                 for hook in kernel.of(core.Hook))  # fmt: skip
    return signals.finish if pushes else signals.finish_alone
