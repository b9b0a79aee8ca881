"""Lower each launch of a Device plan to Core IR: which hooks of its template its channels become.

    launch(gemm_rs_multiply, .., pushes=(partials,), awaits=(partials_ready,),
           announces=(partials_ready,), order=scatter, takes=True, gives=True)
    ->  credit(begin, slot)
        hook(order, scatter, (parts,))
        hook(ready, read_owned, (a, parts))
        wait(combine, partials_ready, others, parts)
        hook(combine, add_partials, (partials, parts))
        hook(emit, push, (partials, parts))
        hook(emit, store_own, (scattered, parts))
        notify(announce, partials_ready, owner, parts)
        finish(end, slot)

What waits is who reads; what is announced is what is pushed; where a result goes follows from the
launch's body. Nothing is chosen here: the plan has chosen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from weft.base.errors import UnsupportedError
from weft.compiler.lower import params, row_kernels, table_kernels
from weft.compiler.passes.swizzle import BY_NODE
from weft.ir import core, core_in_plan, core_rules
from weft.ir.device import Channel, Copy, Do, Launch, Plan, announced, is_relay, scales_of
from weft.ir.kinds import ELEMENTWISE, GATHERED


def lower(plan: Plan) -> dict[str, core.Kernel]:
    """The kernels of a plan's products, and of rows that it sums, by name; the others move rows.

    Kept with the plan, as its moments are: calls of all sizes of a class run one plan, and a new
    size asks for its kernels again.

    Raises  UnsupportedError: a launch that no hooks are known for, at the user's line
    """
    kept = vars(plan)
    if "kernels" not in kept:
        launches = [one for one in plan.of(Launch) if one.template in ("gemm", "rows", "grouped")]
        kept["kernels"] = {one.kernel: lower_launch(plan, one) for one in launches}
    return kept["kernels"]


def lower_launch(plan: Plan, launch: Launch) -> core.Kernel:
    """One kernel. Raises  UnsupportedError: no hooks are known for what it does"""
    if launch.template == "rows":
        return _legal(plan, launch, row_kernels.statements(plan, launch, formula(launch)))
    if launch.template == "grouped":
        return _legal(plan, launch, table_kernels.statements(plan, launch, formula(launch)))
    is_fed = launch.body[0].kind == "all_gather"
    product, *rest = launch.body[is_fed:]
    if product.kind not in GATHERED:
        raise _unknown(launch, f"it begins with {product.kind}")
    is_simple = all(_is_in_registers(launch, i) for i in range(1 + is_fed, len(launch.body)))
    form = launch.order.removeprefix(BY_NODE)
    is_gather = form in ("gather", "split_k")
    if is_gather and is_simple and _gathered(plan, launch) is not None:
        statements = _gather(plan, launch, product)
    elif form == "scatter" and [one.kind for one in rest] == ["reduce_scatter"]:
        relayed = len(launch.pushes) > 1
        statements = (_relayed if relayed else _scatter)(plan, launch, product)
    elif form == "part_by_part" and [one.kind for one in rest] == ["stage", "reduce_scatter"]:
        statements = _carry(plan, launch, product)
    elif form == "other_parts" and [one.kind for one in rest] == ["stage"] and not product.scaling:
        statements = _in_pieces(plan, launch, product)
    elif form == "own_part" and [one.kind for one in rest] == ["reduce_scatter"]:
        statements = _own_part(plan, launch, product)
    elif form == "scatter" and [one.kind for one in rest] == ["all_reduce"]:
        statements = _sum_everywhere(plan, launch, product)
    elif form == "exchange" and [one.kind for one in rest] == ["all_to_all"]:
        statements = _exchanged(plan, launch, product)
    elif form == "grouped" and is_simple and not product.scaling:
        statements = _sliced(plan, launch, product)
    elif launch.order == "rows" and is_simple and not (launch.awaits or launch.announces):
        statements = _alone(plan, launch, product)
    else:
        message = " then ".join(one.kind for one in launch.body)
        raise _unknown(launch, f"{message}, in order={launch.order}, awaits {launch.awaits}")
    return _legal(plan, launch, statements)


def refusal(plan: Plan, launch: Launch) -> UnsupportedError | None:
    """What speaks against a launch, at the user's line; None where a kernel is made of it."""
    if launch.template in ("move", "small"):  # their kernels are written
        return None
    try:
        lower_launch(plan, launch)
    except UnsupportedError as error:
        return error
    return None


def _legal(plan: Plan, launch: Launch, statements: Iterable[core.Statement]) -> core.Kernel:
    kernel = core.Kernel(launch.kernel, tuple(_placed(statements, launch)), launch.place)
    return core_in_plan.require(plan, launch, core_rules.require(kernel))


def _is_in_registers(launch: Launch, index: int) -> bool:
    """Is it done to the tile that is there, with nothing but what memory holds?"""
    one, there = launch.body[index], launch.body[index - 1].result
    others = [name for name in one.operands if name != there]
    return (one.kind in ELEMENTWISE and len(one.operands) - len(others) == 1
            and all(name in launch.reads for name in others))  # fmt: skip


def sending(kernel: core.Kernel) -> core.Kernel:
    """The same where, on Hopper, tiles leave by TMA and are announced behind the next product."""
    instead = {"push": "send", "spread": "send_to_all"}

    def changed(one: core.Statement) -> core.Statement:
        if isinstance(one, core.Hook):
            return replace(one, function=instead.get(one.function, one.function))
        return replace(one, late=True) if isinstance(one, core.Notify) else one

    return replace(kernel, statements=tuple(map(changed, kernel.statements)))


def formula(launch: Launch) -> str:
    """What a launch computes, in one line: c = reduce_scatter(a @ b)."""
    texts: dict[str, str] = {}
    for do in launch.body:
        written = set(launch.writes) & set(texts)
        operands = [name if name in written else texts.get(name, name) for name in do.operands]
        texts[do.result] = f"{do.kind}({', '.join(operands)})"
        if do.kind in GATHERED:
            texts[do.result] = ("^T" * (do.kind == "matmul_tn") + " @ ").join(operands)
    staged = {do.result for do in launch.body[:-1] if do.kind == "stage"}
    return "; ".join(f"{name} = {texts[name]}" for name in launch.writes if name not in staged)


def _unknown(launch: Launch, message: str) -> UnsupportedError:
    return UnsupportedError(
        f"{launch.kernel}: no hooks are known for {message}; lower the program unfused",
        place=launch.place,
    )


def _placed(statements: Iterable[core.Statement], launch: Launch) -> Iterator[core.Statement]:
    """Statements at the launch's line, but for those that have one."""
    for one in statements:
        yield one if one.place.frames else replace(one, place=launch.place)


# ---------------------------------------------------------------------------------------------
# Rows that arrive while others are multiplied


def _gather(plan: Plan, launch: Launch, product: Do) -> Iterator[core.Statement]:
    """Of all ranks, each rank's rows by themselves; or, where they are what the product sums over,
    one channel of them after the other."""
    channel = _gathered(plan, launch)
    assert channel is not None
    rows, own = channel.buffer, channel.own or channel.buffer
    if product.kind != "matmul_tn":
        ready = core.Hook("ready", "rows_or_own", (rows, own, "split"))
        return _arriving(plan, launch, product, channel, "tile", ready)
    side = "left" if rows == product.operands[0] else "right"
    (right,) = (name for name in product.operands if name != rows)
    ready = core.Hook("ready", f"{side}_channel", (rows, own, right, "split"))
    segments = core.Hook("segments", "channels", ("split",))
    return _arriving(plan, launch, product, channel, "segment", ready, segments)


def _sliced(plan: Plan, launch: Launch, product: Do) -> Iterator[core.Statement]:
    """Own rows, of which each rank has some columns: the product sums over those of one rank after
    the other as they arrive, its own first."""
    rows = product.operands[0]
    (channel,) = [one for one in plan.of(Channel) if one.buffer == rows]
    ready = core.Hook("ready", "slice_or_own", (rows, channel.own, "split"))
    segments = core.Hook("segments", "slices", ())
    return _arriving(plan, launch, product, channel, "slice", ready, segments, cuts="slices")


def _arriving(
    plan: Plan, launch: Launch, product: Do, channel: Channel, flags: str, ready: core.Hook,
    segments: core.Hook | None = None, cuts: str = "whole",
) -> Iterator[core.Statement]:  # fmt: skip
    """`flags` of the channel are waited for and `ready` reads its rows; own ones may lie elsewhere,
    in place."""
    rows, own = channel.buffer, channel.own or channel.buffer
    (right,) = (name for name in product.operands if name != rows)
    for name in dict.fromkeys((own, rows, right, launch.writes[0])):
        # Where this kernel does not wait for its rows, another one before it has.
        is_announced = name == rows and not launch.awaits
        by = core_in_plan.awaited_by(plan, launch, channel) if is_announced else ""
        yield core.Param(name, "operand", by)
    yield from _addressed(launch, product)
    pushed = {rows: f"{rows}_ptr"} if rows in launch.pushes else {}
    for name, address in {own: f"{own}_ptr", **pushed}.items() if pushed else ():
        yield core.Param(address, "pointer", f"the same as {name}")
    yield from _given_scales(product)
    if launch.awaits:
        along = [name for name in channel.along if name in launch.reads]
        arrays = (rows, *pushed.values(), *along)
        yield params.signals(plan, launch, channel, *arrays)
    if pushed:
        yield core.Param(f"{rows}_fed", "signals")
    mapping = core.Mapping("split", "static", (rows,), cuts=cuts)
    yield from params.begun(plan, launch, mapping, formula(launch))
    if pushed:
        given = (f"{own}_ptr", pushed[rows], f"{rows}_fed", "split")
        yield core.Hook("begin", "push_own", given)
        yield core.Notify("begin", channel.name, "each", "split", place=channel.place)
    yield core.Hook("order", launch.order, () if segments else ("split",))
    if segments:
        yield segments
    if launch.awaits:
        yield core.Wait("ready", channel.name, flags, "split", unless="own", place=channel.place)
    yield ready
    yield from _scaled(product)
    yield from _stored(launch, product)
    # Scales are read behind the operands.
    over = "end" if product.scaling else "done"
    if launch.awaits and _is_beside(plan, channel):
        # Also words of chunks without rows: an engine must not write one after the call, and who
        # passes rows on reads them until their word.
        yield core.Wait(over, channel.name, "all", "split", by="last", place=channel.place)
    yield from params.ended(launch, over)


def _is_beside(plan: Plan, channel: Channel) -> bool:
    """Does an engine or a relay bring what a channel announces, beside the kernel that waits?"""
    return any((isinstance(one, Copy) or is_relay(one)) and channel.name in announced(one)
               for one in plan.steps)  # fmt: skip


def _gathered(plan: Plan, launch: Launch) -> Channel | None:
    """The channel of the rows that a launch multiplies; another launch may have waited for it."""
    product = next(one for one in launch.body if one.kind in GATHERED)
    rows = [product.operands[place] for place in GATHERED[product.kind]]
    found = [one for one in plan.of(Channel) if one.buffer in rows]
    awaited = [one for one in found if one.name in launch.awaits]
    if len(awaited) != len(launch.awaits):
        return None
    return next(iter(awaited or [one for one in found if one.own]), None)


def _alone(plan: Plan, launch: Launch, product: Do) -> Iterator[core.Statement]:
    """A product that nobody waits for and that waits for nobody."""
    left, right = product.operands
    yield from _operands(left, right, launch.writes[0])
    yield from _addressed(launch, product)
    mapping = core.Mapping("split", "static", (left,))
    yield from params.begun(plan, launch, mapping, formula(launch))
    yield core.Hook("order", "grouped", ())
    yield core.Hook("ready", "rows_of", (left,))
    yield from _stored(launch, product)
    yield from params.ended(launch, "done")


def _behind(launch: Launch, product: Do) -> tuple[Do, ...]:
    """What is done to the product's tiles."""
    return launch.body[launch.body.index(product) + 1 :]


def _addressed(launch: Launch, product: Do) -> Iterator[core.Statement]:
    """Where a result lies that is no tile of the product any more, and what it is made with."""
    if behind := _behind(launch, product):
        made = {one.result for one in launch.body}
        others = [name for one in behind for name in one.operands if name not in made]
        for name in dict.fromkeys((*launch.writes, *others)):
            yield core.Param(f"{name}_ptr", "pointer", f"the same as {name}")


def _stored(launch: Launch, product: Do) -> Iterator[core.Statement]:
    (result,) = launch.writes
    made = {one.result for one in launch.body}
    for one in (behind := _behind(launch, product)):
        others = tuple(f"{name}_ptr" for name in one.operands if name not in made)
        yield core.Hook("value", one.kind, others)
    if behind:
        yield core.Hook("emit", "store_value", (result, f"{result}_ptr"))
    else:
        yield core.Hook("emit", "store", (result,))


# ---------------------------------------------------------------------------------------------
# Tiles that are cut within the ranks' parts


def _by_parts(
    plan: Plan, launch: Launch, product: Do, ready: str = "read_owned", *, is_credited: bool = True
) -> Iterator[core.Statement]:
    """What all of these have behind what they are given and before what becomes of a tile."""
    left = product.operands[0]
    mapping = core.Mapping("parts", "static", (left,), cuts="part")
    yield from params.begun(plan, launch, mapping, formula(launch), is_credited=is_credited)
    yield core.Hook("order", launch.order, ("parts",))
    yield core.Hook("ready", ready, (left, "parts"))
    yield from _scaled(product, "parts")


def _scatter(plan: Plan, launch: Launch, product: Do) -> Iterator[core.Statement]:
    """Other ranks' tiles first, which are sent; then own ones, to which theirs are added."""
    (channel,) = params.announced(plan, launch)
    (partials,), (result,) = launch.pushes, launch.writes
    yield from _operands(*product.operands, result)
    yield core.Param(partials, "pointer")
    yield from _given_scales(product)
    yield params.signals(plan, launch, channel)
    yield from _by_parts(plan, launch, product)
    yield from _summed(channel, "others", "add_partials", result)
    yield core.Hook("emit", "push", (partials, "parts"))
    yield _notify(channel, "owner")
    # Not when operands have been read: partial sums of peers are read behind them.
    yield from params.ended(launch, "end")


def _relayed(plan: Plan, launch: Launch, product: Do) -> Iterator[core.Statement]:
    """The same where a far rank's tiles go to a partner on this node, which sends it one sum."""
    shares, for_others = params.announced(plan, launch)
    (partials, relayed), (result,) = launch.pushes, launch.writes
    yield from _operands(*product.operands, result)
    for name in (partials, relayed):
        yield core.Param(name, "pointer")
    for channel in (shares, for_others):
        yield params.signals(plan, launch, channel)
    yield core.Param("groups", "number", "where a relay finds parts")
    yield from _given_scales(product)
    yield from _by_parts(plan, launch, product)
    yield from _summed(shares, "relayed", "add_relayed", result)
    yield core.Hook("emit", "push_near", (partials, "parts"))
    yield core.Hook("emit", "push_partner", (relayed, "parts", "groups"))
    yield _notify(shares, "owner")
    yield _notify(for_others, "partner")
    yield from params.ended(launch, "end")


def _sum_everywhere(plan: Plan, launch: Launch, product: Do) -> Iterator[core.Statement]:
    """As `_scatter`; what an owner has summed it hands to all, and takes theirs at the end."""
    by_buffer = {one.buffer: one for one in params.announced(plan, launch)}
    (partials, gathered), (result,) = launch.pushes, launch.writes
    by_owner, by_all = by_buffer[partials], by_buffer[gathered]
    own = f"own_{result}"
    yield from _given(launch, product, own)
    yield from _given_scales(product)
    for channel in (by_owner, by_all):
        yield params.signals(plan, launch, channel)
    yield from _by_parts(plan, launch, product)
    yield from _summed(by_owner, "others", "add_partials", own)
    yield core.Hook("emit", "spread", (gathered, "parts"))
    yield core.Hook("emit", "push", (partials, "parts"))
    yield _notify(by_all, "all")
    yield _notify(by_owner, "owner")
    yield core.Wait("collect", by_all.name, "tile", "parts", place=by_all.place)
    yield core.Hook("collect", "unpack", (gathered, result, "parts"))
    yield from params.ended(launch, "end")


def _exchanged(plan: Plan, launch: Launch, product: Do) -> Iterator[core.Statement]:
    """Tiles of own rows go to the rank that owns their columns, own ones last; then what the other
    ranks have sent is stored among them, since the slot is the next call's."""
    if product.scaling:
        raise _unknown(launch, f"a product with scaling={product.scaling} before all_to_all")
    (channel,) = params.announced(plan, launch)
    (received,), (result,) = launch.pushes, launch.writes
    own = f"own_{result}"
    yield from _given(launch, product, own)
    yield params.signals(plan, launch, channel)
    yield from _by_parts(plan, launch, product, "read_for_owner")
    yield core.Hook("emit", "store_own", (own, "parts"))
    yield core.Hook("emit", "push", (received, "parts"))
    yield _notify(channel, "owner")
    yield core.Wait("collect", channel.name, "tile", "parts", place=channel.place)
    yield core.Hook("collect", "unpack_from", (received, result, "parts"))
    yield from params.ended(launch, "end")


def _carry(plan: Plan, launch: Launch, product: Do) -> Iterator[core.Statement]:
    """Other ranks' tiles first, which are kept until an engine fetches them, chunk by chunk; then
    own ones, to which what engines have brought is added."""
    (tokens,) = params.announced(plan, launch)
    (arrived,) = [one for one in plan.of(Channel) if one.name in launch.awaits]
    (left, right), (result, staged) = product.operands, launch.writes
    count, flags = beside_tokens(tokens)
    yield core.Param(left, "operand")
    yield core.Param(staged, "operand", "tiles for the other ranks, which engines fetch")
    yield from _operands(right, result)
    yield core.Param(arrived.buffer, "pointer")
    yield from _given_scales(product)
    yield params.signals(plan, launch, arrived)
    yield core.Param(count, "signals")
    yield core.Param(flags, "signals", core.KERNEL, core.ENGINE)
    yield params.signals(plan, launch, tokens)
    yield from _by_parts(plan, launch, product, is_credited=False)
    yield from _summed(arrived, "chunk", "add_staged", result)
    yield core.Hook("emit", "stage", (staged, "parts"))
    yield core.Hook("announce", "count", (count, "parts"))
    # For the engine that writes to the chunk's owner behind this.
    yield from params.credited(launch, "announce")
    yield core.Notify("announce", flags, "here", "parts", order="relaxed", place=tokens.place)
    yield _notify(tokens, "engine")
    yield from params.ended(launch, "end")


def beside_tokens(tokens: Channel) -> tuple[str, str]:
    """What words beside a channel's tokens are called: how many tiles of a chunk are stored, and
    what the engine copies behind its rows."""
    return f"{tokens.buffer}_count", f"{tokens.buffer}_flags"


def _in_pieces(plan: Plan, launch: Launch, product: Do) -> Iterator[core.Statement]:
    """Other ranks' tiles of a chunk of columns, which stay here: an engine copies them when the
    launch is over."""
    (staged,) = launch.writes
    yield from _operands(*product.operands, staged)
    yield from _by_parts(plan, launch, product)
    yield core.Hook("emit", "stage_piece", (staged, "parts"))


def _own_part(plan: Plan, launch: Launch, product: Do) -> Iterator[core.Statement]:
    """Own tiles, to which is added what engines have brought."""
    (arrived,) = [one for one in plan.of(Channel) if one.name in launch.awaits]
    (result,) = launch.writes
    yield from _operands(*product.operands, result)
    yield core.Param(arrived.buffer, "pointer")
    yield params.signals(plan, launch, arrived)
    yield from _by_parts(plan, launch, product)
    yield from _summed(arrived, "chunk", "add_staged", result)
    yield from params.ended(launch, "end")


# ---------------------------------------------------------------------------------------------
# Statements of several forms


def _operands(*names: str) -> Iterator[core.Param]:
    for name in names:
        yield core.Param(name, "operand")


def _given(launch: Launch, product: Do, own: str) -> Iterator[core.Param]:
    """Of a kernel that stores own rows of its result, and at its end what others have sent: both
    operands, own rows, all of the result, and where tiles go on other ranks."""
    (result,) = launch.writes
    yield from _operands(*product.operands)
    yield core.Param(own, "operand", f"own rows of {result}")
    for name in (result, *launch.pushes):
        yield core.Param(name, "pointer")


def _given_scales(product: Do) -> Iterator[core.Statement]:
    """What a product of fp8 operands is given beside them."""
    if product.scaling:
        for name in product.operands:
            yield core.Param(scales_of(name), "pointer")
        yield core.Param("apart", "number", "how scales lie")


def _scaled(product: Do, *owned: str) -> Iterator[core.Statement]:
    """A tile's scales; `owned`: the mapping, where tiles are cut within owners' parts."""
    if product.scaling:
        which = f"owned_{product.scaling}" if owned else product.scaling
        given = (*map(scales_of, product.operands), "apart", *owned)
        yield core.Hook("scales", f"scale_{which}", given)


def _summed(channel: Channel, flags: str, add: str, result: str) -> Iterator[core.Fused]:
    """What others have sent is added to own tiles, which are stored."""
    yield core.Wait("combine", channel.name, flags, "parts", place=channel.place)
    yield core.Hook("combine", add, (channel.buffer, "parts"))
    yield core.Hook("emit", "store_own", (result, "parts"))


def _notify(channel: Channel, to: str) -> core.Notify:
    return core.Notify("announce", channel.name, to, "parts", place=channel.place)
