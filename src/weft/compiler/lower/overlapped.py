"""Lower a planned program to what moves and what runs: transfers, kernels, calls of libraries.

    gathered = all_gather(a, dim=0, kernel=p_gather, engine=sm_push)    ->    launch(p_push, ...)
    product = matmul(gathered, b, kernel=p_multiply)                       launch(p_multiply, ...)

Nothing is ordered yet but by the stream: `insert_signals` says who waits for whom, `allocate` where
buffers lie. Values that stay in a kernel's registers have no buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from weft.base.errors import ConfigError
from weft.compiler.lower.channels import (
    SumBuffers,
    channels_of,
    made_for_others,
    sum_buffers,
)
from weft.compiler.lower.unfused import call, local_sizes, role_of
from weft.compiler.passes.tile import number
from weft.ir.device import (
    NUM_RANKS,
    PIECES,
    RELAY,
    Buffer,
    Call,
    Copy,
    Do,
    Launch,
    Part,
    Plan,
    Statement,
    Step,
    Tiles,
    is_relay,
    scales_of,
)
from weft.ir.kinds import GATHERED
from weft.ir.shapes import ROUTERS
from weft.ir.task import INSIDE, LL, TRAVELLING, Program, Task, arrives, takes_tokens
from weft.ir.tensor import Type
from weft.tiles.gemm import BLOCK_K

# What a gather's kernel is called by what carries the rows; engines are fed by staging.
VERBS = {"ce_push": "edges", "sm_push": "push", "sm_put": "push", "relay": "relay"}
# The stream of what engines carry from tiles: gathers' copies must not stand behind its waits.
SENDS = "send"
# That of kernels that relay rows while a product runs, on SMs that it leaves to them.
RELAYS = "relay"


def draw(program: Program) -> Plan:
    """The plan of each rank, at stage drawn: buffers and what announces their rows, then steps in
    an order that they can run."""
    drawn = [_drawn(program, unit) for unit in units(program)]
    buffers = [one for unit in drawn for one in unit.buffers]
    steps = relays_late([step for unit in drawn for step in unit.steps])
    inputs = [_buffer(task, "input") for task in program.tasks if task.kind == "input"]
    statements: list[Statement] = [*program.choices, *inputs, *buffers]
    return Plan(
        program.name, program.mesh, (*statements, *channels_of(program), *steps), program.results,
        "drawn", program.place,
    )  # fmt: skip


def relays_late(steps: Sequence[Step]) -> list[Step]:
    """Each relay right before the first step that reads what it brings, which leaves SMs to it."""
    found = list(steps)
    for relay in filter(is_relay, steps):
        assert isinstance(relay, Launch)
        found.remove(relay)
        reads = [i for i, one in enumerate(found) if isinstance(one, Launch | Call)
                 and {*relay.pushes} & {*one.reads}]  # fmt: skip
        found.insert(reads[0], relay)
    return found


@dataclass(frozen=True)
class Unit:
    """What a kernel or a library's call comes to."""

    buffers: tuple[Buffer, ...]
    steps: tuple[Step, ...]


def units(program: Program) -> list[tuple[Task, ...]]:
    """Kernels' tasks, and tasks without a kernel, each behind what it needs."""
    waiting = [
        program.of_kernel(task.kernel) if task.kernel else (task,)
        for task in program.tasks
        if task.kind != "input" and (not task.kernel or program.of_kernel(task.kernel)[-1] is task)
    ]
    there = {task.name for task in program.tasks if task.kind == "input"}
    found: list[tuple[Task, ...]] = []
    while waiting:
        # The legality of kernels says that there is one: they form no cycle.
        unit = next(one for one in waiting if _outside(one) <= there)
        waiting.remove(unit)
        found.append(unit)
        there |= {task.name for task in unit}
    return found


def _outside(unit: Sequence[Task]) -> set[str]:
    """What a unit reads that it does not make."""
    return {name for task in unit for name in task.operands} - {task.name for task in unit}


def _buffer(task: Task, role: str = "local") -> Buffer:
    kind = _type(task)
    return Buffer(task.name, kind.dtype, local_sizes(kind), role, place=task.place)


def _drawn(program: Program, unit: tuple[Task, ...]) -> Unit:
    first = unit[0]
    if not first.kernel:
        made = replace(call(first), tile_rows=_height(program, first))
        return Unit((_buffer(first, role_of(_type(first))),), (made,))
    if first.engine == "feed":  # by the kernel that multiplies
        return Unit((_buffer(first, "symmetric"),), ())
    if first.engine == "one_shot_ll" and first.kind == "all_gather":  # likewise
        return Unit((_buffer(first, "packets"),), ())
    if program.chief(first.kernel).kind == "grouped_matmul":
        return _by_tables(program, unit)
    if first.kind == "all_gather":
        return _gather(program, first)
    if arrives(first):
        return _exchange(first)
    return _kernel(program, unit)


def _height(program: Program, task: Task) -> int:
    """Of the tiles of a table: that of the kernels that work by it, 0 where none does.

    Raises  ConfigError: kernels whose tiles differ
    """
    if task.kind not in ROUTERS:
        return 0
    chiefs = {program.chief(one.kernel).name for one in program.users(task.name)
              if one.kernel and one.kind != "scatter_rows"}  # fmt: skip
    heights = {name: program.task(name).tile[0] for name in sorted(chiefs)}
    if len({*heights.values()}) > 1:
        message = ", ".join(f"{name} {height}" for name, height in heights.items())
        raise ConfigError(
            f"{program.name}: {task.name} is cut for tiles of one height; rows of tiles are of "
            f"{message}", place=task.place,
        )  # fmt: skip
    return next(iter(heights.values()), 0)


def _by_tables(program: Program, unit: tuple[Task, ...]) -> Unit:
    """A product by tables, with the gather of its tokens where its rows are gathered."""
    chief = program.chief(unit[0].kernel)
    gather = next((one for one in unit if one.kind == "gather_rows"), None)
    source = program.task(gather.operands[0]) if gather else None
    fed = (source,) if source and source.engine == "feed" else ()
    names = tuple(one.name for one in fed)
    inside = {one.name for one in (*fed, *unit)}
    reads = dict.fromkeys(x for one in (*fed, *unit) for x in one.operands if x not in inside)
    launch = Launch(
        chief.kernel, (*reads, *names), made_for_others(program, unit), names, template="grouped",
        body=tuple(map(_do, (*fed, *unit))),
        tile=chief.tile, order=chief.order, programs=chief.programs, spare=chief.spare,
        place=chief.place,
    )  # fmt: skip
    return Unit(tuple(_buffer(program.task(name)) for name in launch.writes), (launch,))


def _gather(program: Program, task: Task) -> Unit:
    """Rows on their way: by copy engines, from where they lie, or by a kernel."""
    (source,) = task.operands
    buffer = _buffer(task, "symmetric")
    scales, steps = _scales(program, task)
    if task.engine == "pushers":  # by the kernel that multiplies
        return Unit((buffer, *scales), steps)
    name = task.kernel.replace("_gather", f"_{VERBS[task.engine]}")
    kernel = Launch(name, (source,), template="move", programs="pieces", place=task.place)
    if task.engine == "sm_put" and any(_is_by_node(one) for one in program.users(task.name)):
        # To whom rows go first is who asks for them first.
        kernel = replace(kernel, order="hierarchical_gather")
    if task.engine == "relay":
        body = (Do(RELAY, (source,), task.name),)
        relay = replace(
            kernel, reads=(source, task.name), pushes=(task.name,), stream=RELAYS, body=body,
            programs=task.programs, spare=task.spare,
        )  # fmt: skip
        return Unit((buffer,), (relay,))
    if task.engine == "ce_push":
        copy = Copy(source, task.name, "push", f"{task.name}_ready", place=task.place)
        if program.users(task.name)[0].kind == "gather_rows":
            # Tiles by tables read own rows with others'; the copies' words are set behind them.
            body = (Do("stage", (source,), task.name),)
            name = task.kernel.replace("_gather", "_stage")
            stage = replace(kernel, kernel=name, writes=(task.name,), body=body)
            return Unit((buffer,), (stage, copy))
        if program.users(task.name)[0].kind == "matmul_tn":  # which reads each rank's rows apart
            return Unit((buffer,), (copy,))
        # Others read own rows where they arrive; here tiles that lie across two ranks' rows do.
        body = (Do("edges", (source,), task.name),)
        edges = replace(kernel, writes=(task.name,), body=body)
        return Unit((buffer, *scales), (*steps, copy, edges))
    body = (Do("all_gather", (source,), task.name),)
    return Unit((buffer,), (replace(kernel, pushes=(task.name,), body=body),))


def _exchange(task: Task) -> Unit:
    """Of own columns each rank's rows on their way to it: by copy engines, or by a kernel."""
    (source,), buffer = task.operands, _buffer(task, "symmetric")
    if task.engine == "ce_push":
        copy = Copy(source, task.name, "parts", f"{task.name}_ready", place=task.place)
        return Unit((buffer,), (copy,))
    push = Launch(
        task.kernel, (source,), pushes=(task.name,), template="move", programs="pieces",
        body=(Do(task.kind, (source,), task.name),), place=task.place,
    )  # fmt: skip
    return Unit((buffer,), (push,))


def _scales(program: Program, task: Task) -> tuple[tuple[Buffer, ...], tuple[Step, ...]]:
    """Scales of gathered rows and of what they are multiplied by, and what stores own ones on every
    rank, before the rows travel that announce them.

    Raises  ConfigError: what carries the rows carries no scales
    """
    products = [one for one in program.users(task.name) if one.scaling]
    if not products:
        return (), ()
    if task.engine not in ("pushers", "ce_push"):
        message = f"{task.name} has scales and engine={task.engine}; take pushers or ce_push"
        raise ConfigError(f"{program.name}: {message}", place=task.place)
    (product,), rows = products, _type(task).sizes[0]
    (own,), right = task.operands, _scales_of_right(program, product)
    mine, theirs, kb = scales_of(own), scales_of(task.name), right.sizes[0]
    buffers = (
        Buffer(mine, "float32", (Part(rows), kb), "input", place=task.place),
        right,
        Buffer(theirs, "float32", (rows, kb), "symmetric", place=task.place),
    )
    launch = Launch(
        task.kernel.replace("_gather", "_scales"), (mine,), pushes=(theirs,), template="move",
        body=(Do("push_scales", (mine,), theirs),), programs="pieces", place=task.place,
    )  # fmt: skip
    return buffers, (launch,)


def _scales_of_right(program: Program, product: Task) -> Buffer:
    """Of B: for each block of k, or for all of it. Where ranks have parts of k that are no whole
    blocks, the caller's tensors have more."""
    _, right = product.operands
    kind = _type(program.task(right))
    (k, _), (own_k, n) = kind.sizes, local_sizes(kind)
    blocks = 1 if product.scaling == "rows" else -(-number(k, {}) // BLOCK_K.value)
    kb = Part(blocks) if product.scaling == "blocks" and isinstance(own_k, Part) else blocks
    return Buffer(scales_of(right), "float32", (kb, n), "input", place=product.place)


def _scales_there(program: Program, product: Task) -> tuple[Buffer, ...]:
    """Scales of a product whose rows each rank has; those of gathered ones come with the gather."""
    if not product.scaling or program.gathers(product):
        return ()
    right, left = _scales_of_right(program, product), product.operands[0]
    sizes = _type(program.task(left)).sizes[0], right.sizes[0]
    mine = Buffer(scales_of(left), "float32", sizes, "input", place=product.place)
    return mine, right


def _is_by_node(task: Task) -> bool:
    return task.order == "hierarchical_gather"


def _kernel(program: Program, unit: tuple[Task, ...]) -> Unit:
    """A product with what is done to its tiles, or rows that are summed and worked on."""
    first = unit[0]
    made = made_for_others(program, unit)
    buffers = sum_buffers(program, first.kernel)
    on_heap = _symmetric_of(program, unit, buffers)
    scales = _scales_there(program, first)
    if buffers.staged:
        return _staged(program, unit, buffers, (*scales, *on_heap))
    fed = tuple(one for one in program.gathers(first) if one.engine in INSIDE)
    names = [one.name for one in (*fed, *on_heap)]
    read = [name for name in names if name != buffers.relayed]
    launch = Launch(
        first.kernel, tuple(dict.fromkeys((*_reads(program, unit), *read))), made, tuple(names),
        template="small" if any(one.engine in LL for one in fed) else _template(unit),
        body=tuple(map(_do, (*fed, *unit))),
        tile=first.tile, order=first.order, programs=first.programs, spare=first.spare,
        split_k=first.split_k, place=first.place,
    )  # fmt: skip
    results = tuple(_buffer(program.task(name)) for name in made)
    steps: tuple[Step, ...] = (launch,)
    if buffers.relayed:  # queued first, since it goes on beside the product
        name = first.kernel.replace("_multiply", "_relay_sums").replace("_reduce", "_relay_rows")
        relay = Launch(
            name, (buffers.relayed,),
            pushes=(buffers.partials,), stream=RELAYS, template="move",
            body=(Do(RELAY, (buffers.relayed,), buffers.partials),), programs="resident",
            spare=unit[-1].spare, place=unit[-1].place,
        )  # fmt: skip
        steps = (relay, launch)
    return Unit((*scales, *on_heap, *results), steps)


def _template(unit: Sequence[Task]) -> str:
    if unit[0].kind not in GATHERED:
        return "rows"
    is_small = unit[-1].engine in LL and len(unit) == 2
    return "small" if is_small else "gemm"


def _staged(
    program: Program, unit: tuple[Task, ...], buffers: SumBuffers, on_heap: Sequence[Buffer]
) -> Unit:
    """A product whose other ranks' tiles stay here until an engine carries them to their owners.

    The copies are queued behind the kernel that they wait for, on a stream of their own.
    """
    first, total = unit[0], unit[-1]
    if not takes_tokens(total):
        return _in_pieces(program, unit, buffers, on_heap)
    kind = _type(total)
    sizes = (NUM_RANKS, Tiles(kind.sizes[0], first.tile[0]), kind.sizes[1])
    staged = Buffer(buffers.staged, kind.dtype, sizes, place=total.place)
    *inside, last = map(_do, unit)
    launch = Launch(
        first.kernel, (*_reads(program, unit), buffers.partials), (total.name, staged.name),
        template="gemm", body=(*inside, Do("stage", last.operands, staged.name), last),
        tile=first.tile, order=first.order, programs=first.programs, spare=first.spare,
        split_k=first.split_k, place=first.place,
    )  # fmt: skip
    return Unit((*on_heap, staged, _buffer(total)), (launch, _to_owners(buffers, total)))


def _to_owners(buffers: SumBuffers, total: Task, *piece: int) -> Copy:
    return Copy(
        buffers.staged, buffers.partials, "owner", f"{buffers.partials}_ready", SENDS, piece=piece,
        place=total.place,
    )  # fmt: skip


def _in_pieces(
    program: Program, unit: tuple[Task, ...], buffers: SumBuffers, on_heap: Sequence[Buffer]
) -> Unit:
    """The same, by a launch for each chunk of columns, behind which it is copied; then one of own
    rows, to which is added what has been copied here."""
    first, total = unit[0], unit[-1]
    kind, chunks = _type(total), total.chunks
    assert isinstance(chunks, int)
    sizes = (NUM_RANKS, Tiles(kind.sizes[0], first.tile[0]), kind.sizes[1])
    staged = Buffer(buffers.staged, kind.dtype, sizes, place=total.place)
    *inside, last = map(_do, unit)
    reads = _reads(program, unit)
    own = Launch(
        first.kernel, (*reads, buffers.partials), (total.name,), template="gemm",
        body=(*inside, last), tile=first.tile, order="own_part", programs=first.programs,
        spare=first.spare, place=first.place,
    )  # fmt: skip
    name, stage = first.kernel + PIECES, Do("stage", last.operands, staged.name)
    steps: list[Step] = []
    for chunk in range(chunks):
        pieces = replace(
            own, kernel=name, reads=reads, writes=(staged.name,), body=(*inside, stage),
            order="other_parts", piece=(chunk, chunks),
        )  # fmt: skip
        steps += [pieces, _to_owners(buffers, total, chunk, chunks)]
    return Unit((*on_heap, staged, _buffer(total)), (*steps, own))


def _reads(program: Program, unit: Sequence[Task]) -> tuple[str, ...]:
    """What a kernel is given, each once; of gathered rows also where its own lie."""
    names: list[str] = []
    inside = {task.name for task in unit}
    for name in (name for task in unit for name in task.operands if name not in inside):
        source = program.task(name)
        is_gathered = arrives(source) and source.kernel
        names += [source.operands[0], name] if is_gathered else [name]
    names += [scales_of(name) for one in unit if one.scaling for name in one.operands]
    return tuple(dict.fromkeys(names))


def _symmetric_of(program: Program, unit: Sequence[Task], buffers: SumBuffers) -> list[Buffer]:
    """The buffers by which tiles travel; a rank's part of them, from each rank."""
    total = next((one for one in unit if one.kind in TRAVELLING), None)
    if total is None:
        return []
    kind = _type(total)
    rows = kind.sizes[0] if total.engine == "one_shot_ll" else Part(kind.sizes[0])
    role = "packets" if total.engine in LL else "symmetric"
    columns = Part(kind.sizes[1]) if total.kind == "all_to_all" else kind.sizes[1]
    sizes = (NUM_RANKS, rows, columns)
    found = [Buffer(buffers.partials, kind.dtype, sizes, role, place=total.place)]
    if buffers.relayed:
        sizes = (total.relayed, *sizes[1:])
        found.append(Buffer(buffers.relayed, kind.dtype, sizes, role, place=total.place))
    for value, name in buffers.gathered.items():
        of = _type(program.task(value))
        found.append(Buffer(name, of.dtype, of.sizes, role, place=total.place))
    return found


def _do(task: Task) -> Do:
    """A task as what a kernel does."""
    return Do(task.kind, task.operands, task.name, task.eps, task.scaling, task.between, task.head,
              task.base)  # fmt: skip


def _type(task: Task) -> Type:
    assert task.type is not None
    return task.type
