"""Mutants of a kernel: a module of TTIR -> every way to weaken its communication, each an edit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from weft.emulator.accesses import RELEASE_COMPLETES_STORES
from weft.ir.ttir import Block, Module, Op, Value
from weft.ir.ttir_parser import parse_statements
from weft.language import world_layout
from weft.language.symbols import Symbol
from weft.verify.mutants.edits import (
    Changes,
    constant_for,
    edited,
    operations,
    with_operand,
)
from weft.verify.mutants.primitives import (
    ASYNCHRONOUS,
    POLLS,
    order_of,
    primitive_of,
    releases,
    symbol_of,
    with_word,
    words_of,
    writes_data,
)
from weft.verify.mutants.records import Mutant, Site, lines_of

NARROWER = {"sys": "gpu", "gpu": "cta"}
WITHOUT = {
    "relax-acquire": {"acquire": "relaxed", "acq_rel": "release"},
    "relax-release": {"release": "relaxed", "acq_rel": "acquire"},
}
SIGNAL_AT = "signal_at"
# What waits for asynchronous stores alone.
COMPLETIONS = ("weft.complete_stores", "ttng.async_tma_store_wait")
ONE_FLAG = 1 << 32  # a packet's flag is its upper half


def sites(module: Module) -> dict[Op, Site]:
    """Every operation that communicates, in the order of the text."""
    found: dict[Op, Site] = {}
    counts: Counter[Site] = Counter()
    everything = list(operations(module))
    signals = {op.operands[0] for op in everything if symbol_of(op) == "weft.notify"}
    for op in everything:
        primitive = primitive_of(op)
        if primitive is None:
            continue
        # A put_signal has two addresses: of its data, and of its signal.
        is_signals = primitive.peer is not None and op.result in signals
        name = SIGNAL_AT if is_signals else primitive.name
        site = Site(module.kernel.name, name, lines_of(op.place))
        found[op] = site._replace(ordinal=counts[site])
        counts[site] += 1
    return found


def mutations(module: Module) -> dict[Mutant, Changes]:
    """Every mutant of `module` and the edit that makes it."""
    found: dict[Mutant, Changes] = {}
    surroundings = _Surroundings(module)
    for op, site in sites(module).items():
        primitive = primitive_of(op)
        assert primitive is not None
        for kind, changes in _changes(op, primitive, surroundings):
            found[Mutant(site, kind)] = changes
    return found


def mutate(module: Module, mutant: Mutant) -> Module | None:
    """`module` with `mutant` in it; None where there is no such site in it."""
    changes = mutations(module).get(mutant)
    return None if changes is None else edited(module, changes)


class _Surroundings:
    """What a change of one operation must know of those around it."""

    def __init__(self, module: Module) -> None:
        self.block: dict[Op, Block] = {}
        self.parent: dict[Block, Op | None] = {}
        self.spin: dict[Op, Op] = {}  # of a poll, the loop that does nothing else
        for function in module.functions.values():
            for block in function.body.blocks:
                self._enter(block, None)
        everything = list(operations(module))
        self.has_asynchronous = any(op.name in ASYNCHRONOUS for op in everything)
        for op in everything:
            if op.name == "scf.while" and all(map(_harmless, op.inside())):
                self.spin.update((poll, op) for poll in op.inside() if symbol_of(poll) in POLLS)

    def _enter(self, block: Block, parent: Op | None) -> None:
        self.parent[block] = parent
        for op in block.ops:
            self.block[op] = block
            for region in op.regions:
                for inner in region.blocks:
                    self._enter(inner, op)


def _harmless(op: Op) -> bool:
    """May it stand in a spin?"""
    return not op.regions and not writes_data(op) and symbol_of(op) not in ("tt.call",)


def _changes(op: Op, primitive: Symbol, around: _Surroundings) -> Iterator[tuple[str, Changes]]:
    yield from _drop(op, primitive, around)
    for kind, weaker in WITHOUT.items():
        if (word := weaker.get(order_of(op))) is not None:
            assert primitive.order is not None
            yield kind, {op: [with_word(op, primitive.order, word)]}
    if primitive.scope is not None:
        if (word := NARROWER.get(words_of(op)[primitive.scope])) is not None:
            yield "narrow", {op: [with_word(op, primitive.scope, word)]}
    for index in primitive.values:
        # What a spin adds is nothing, so that it only looks.
        if op.operands[index].type.element.startswith("i") and op not in around.spin:
            yield "value+1", {op: _off_by(op, index, 1)}
            yield "value-1", {op: _off_by(op, index, -1)}
    if op.name == "ttng.wait_barrier":
        yield "parity", {op: _off_by(op, 1, 1)}
    if primitive.packets is not None:
        yield "value+1", {op: _off_by(op, primitive.packets, ONE_FLAG)}
        yield "value-1", {op: _off_by(op, primitive.packets, -ONE_FLAG)}
    if primitive.count is not None:
        yield "count+1", {op: _off_by(op, primitive.count, 1)}
        yield "count-1", {op: _off_by(op, primitive.count, -1)}
    if primitive.peer is not None:
        yield "peer+1", {op: _next_peer(op, primitive.peer)}
    if releases(op):
        if (changes := _before_the_store(op, around)) is not None:
            yield "swap", changes
        if around.has_asynchronous and (plain := _incomplete(op)) is not None:
            yield "incomplete", {op: [plain]}


# ---------------------------------------------------------------------------------------------


def _drop(op: Op, primitive: Symbol, around: _Surroundings) -> Iterator[tuple[str, Changes]]:
    name = symbol_of(op)
    if (loop := around.spin.get(op)) is not None:
        # What a spin waits for is its condition: the loop looks once and goes on.
        condition = next(one for one in loop.regions[0].walk() if one.name == "scf.condition")
        (false,) = parse_statements("%no = arith.constant false", {}, op.place)
        yield "drop", {condition: with_operand(condition, 0, [false], false.result)}
    elif name == "weft.wait_packets":
        yield "drop", {op: [_plain_load(op)]}
    elif name in COMPLETIONS and not around.has_asynchronous:
        return
    elif primitive.can_drop:
        word = "true" if name == "weft.test" else "0"
        yield "drop", {op: constant_for(op, word)}


def _plain_load(op: Op) -> Op:
    """A packet's words as they are, whether they have come or not."""
    words, _, *mask = op.operands
    values, text = {"words": words}, "%x = tt.load %words"
    if mask:
        values["mask"], text = mask[0], text + ", %mask"
    (load,) = parse_statements(f"{text} : {words.type}", values, op.place)
    return replace(load, results=op.results)


def _off_by(op: Op, index: int, change: int) -> list[Op]:
    """`op` with an operand that is `change` larger."""
    operand = op.operands[index]
    number = f"dense<{change}>" if operand.type.is_tensor else str(change)
    before = parse_statements(
        f"""%change = arith.constant {number} : {operand.type}
        %changed = arith.addi %operand, %change : {operand.type}""",
        {"operand": operand}, op.place,
    )  # fmt: skip
    return with_operand(op, index, before, before[-1].result)


def _next_peer(op: Op, index: int) -> list[Op]:
    """`op` for the rank after its peer, modulo the number of ranks in the world's table."""
    peer, table = op.operands[index], op.operands[index - 1]
    kind = peer.type
    as_kind = "" if kind.element == "i64" else f"%num = arith.trunci %wide : i64 to {kind}"
    before = parse_statements(
        f"""%one = arith.constant 1 : {kind}
        %next = arith.addi %peer, %one : {kind}
        %offset = arith.constant {world_layout.NUM_RANKS} : i64
        %word = tt.addptr %table, %offset : {table.type}, i64
        %{"wide" if as_kind else "num"} = tt.load %word : {table.type}
        {as_kind}
        %changed = arith.remsi %next, %num : {kind}""",
        {"peer": peer, "table": table}, op.place,
    )  # fmt: skip
    return with_operand(op, index, before, before[-1].result)


def _incomplete(op: Op) -> Op | None:
    """A notify as the bare release that Triton's atomics are before 3.8."""
    if symbol_of(op) != "weft.notify" or RELEASE_COMPLETES_STORES:
        return None
    how, order, scope = words_of(op)
    pointer, value = op.operands
    if how == "set":
        symbol = f"weft.store:{order}.{scope}"
        return replace(op, attributes={**op.attributes, "symbol": symbol})
    (atomic,) = parse_statements(
        f"%x = tt.atomic_rmw add, {order}, {scope}, %p, %v : ({pointer.type}, {value.type})"
        f" -> {value.type}",
        {"p": pointer, "v": value}, op.place,
    )  # fmt: skip
    return atomic


# ---------------------------------------------------------------------------------------------
# Before the store that comes before


def _before_the_store(op: Op, around: _Surroundings) -> Changes | None:
    """`op` moved before the last store before it, or the loop that stores; None: there is none.

    Where its own block has none, the loop or branch that `op` alone communicates in moves.
    """
    moved: Op | None = op
    while moved is not None:
        block = around.block[moved]
        place = block.ops.index(moved)
        earlier = [i for i in range(place) if _stores(block.ops[i])]
        if earlier:
            return _moved(block.ops, place, earlier[-1])
        moved = around.parent[block]
        if moved is not None and any(_effect(one) for one in moved.inside() if one is not op):
            return None
    return None


def _stores(op: Op) -> bool:
    return writes_data(op) or any(map(writes_data, op.inside()))


def _effect(op: Op) -> bool:
    name = primitive_of(op)
    return writes_data(op) or (name is not None and name.name != "at")


def _moved(ops: Sequence[Op], place: int, to: int) -> Changes | None:
    """ops[place], with what it needs of the operations between, before ops[to]."""
    definer: dict[Value, int] = {
        result: i for i in range(to, place) for result in ops[i].results
    }  # fmt: skip
    needed, queue = {place}, [place]
    while queue:
        op = ops[queue.pop()]
        for one in (op, *op.inside()):
            for value in one.operands:
                i = definer.get(value)
                if i is not None and i not in needed:
                    if i == to or ops[i].regions or _effect(ops[i]):
                        return None
                    needed.add(i)
                    queue.append(i)
    front = [ops[i] for i in sorted(needed)]
    changes: dict[Op, Sequence[Op]] = {ops[i]: [] for i in needed}
    changes[ops[to]] = [*front, ops[to]]
    return changes
