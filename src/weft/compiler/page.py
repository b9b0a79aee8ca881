"""The page that follows one program through the compiler, written by running it.

python -m weft.compiler.page > docs/compiler.md
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields

from weft.base.errors import PlacementError
from weft.compiler import Shard, Tensor, all_gather, pipeline, reduce_scatter, silu_mul
from weft.compiler.facts import Facts, Settings
from weft.compiler.frontend import trace
from weft.compiler.passes import allocate
from weft.compiler.passes import map as mapping
from weft.compiler.passes.place import place
from weft.compiler.passes.tile import dependencies
from weft.ir import device, task
from weft.ir.task import Program

PARAMETERS = {
    "x": Tensor("bfloat16", ("m", 4096), Shard(0)),
    "w1": Tensor("bfloat16", (4096, 24576), Shard(1)),
    "w2": Tensor("bfloat16", (12288, 4096), Shard(0)),
}
# The call by which tiles are shown: rows that divide by neither ranks nor tiles.
SIZES, RANKS = {"m": 997}, 3


def mlp(x, w1, w2):
    return reduce_scatter(silu_mul(all_gather(x) @ w1) @ w2)


def two_layers(x, w1, w2, v1, v2):
    return mlp(mlp(x, w1, w2), v1, v2)


PARAMETERS_OF_TWO = PARAMETERS | {"v1": PARAMETERS["w1"], "v2": PARAMETERS["w2"]}


def forgetful(x, w1, w2):
    return reduce_scatter(silu_mul(x @ w1) @ w2)


# The call for which the plan is made, on four H200s.
CALL = Facts({"m": 8192}, 4)


def page() -> str:
    """docs/compiler.md."""
    from weft.compiler import kernel_page, packets_page, tables_page

    stages = pipeline.compile_program(trace(mlp, "tp", PARAMETERS))
    shown = {name: task.show(program, places=False) for name, program in stages.tasks.items()}
    called = pipeline.overlap(stages.tasks["place"], CALL)
    parts = [
        INTRODUCTION, _program(), TRACED, _code(shown["trace"]),
        PLACED, _code(shown["place"]), MISSING, _code(_refusal()),
        TILED, _code(shown["tile"]), NEEDED.format(m=SIZES["m"], ranks=RANKS),
        _code(_needs(stages)),
        MAPPED, _code(device.text.show(stages.channels, places=False)),
        FITTED.format(m=SIZES["m"], ranks=RANKS), _code(_spans(stages)),
        LOWERED, _code(device.show(stages.plan, places=False)), CALLED,
        *_overlapped(called), *kernel_page.section(called.plan), *packets_page.section(CALL),
        *tables_page.section(CALL), ORDER, _passes(pipeline.at_declaration()), THEN,
        _passes(pipeline.at_call(CALL, Settings())), LEGAL,
        _rules("Task", task.RULES), _rules("Device", device.RULES), LEFT,
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def _overlapped(stages: pipeline.Stages) -> Iterator[str]:
    """What each pass towards the plan has done: the tasks that it changed, and its choices."""
    yield OVERLAPPED.format(m=CALL.sizes["m"], ranks=CALL.num_ranks)
    before = stages.tasks["place"]
    for name, told in (("fuse", FUSED), ("engines", ENGINES), ("tile", CUT), ("swizzle", SWIZZLED),
                       ("chunk", CHUNKED), ("partition", PARTITIONED)):  # fmt: skip
        after = stages.tasks[name]
        yield told
        yield _code(_changed(before, after))
        before = after
    drawn, signalled, allocated = stages.plans.values()
    yield from (DRAWN, _code(_steps(drawn)), SIGNALLED, _code(_steps(signalled)))
    yield from (ALLOCATED, f"```\n{allocate.dump(allocated, CALL.sizes, CALL.num_ranks)}\n```")
    longer = pipeline.overlap(
        place(trace(two_layers, "tp", PARAMETERS_OF_TWO)), CALL
    ).plan  # fmt: skip
    yield from (TWO, f"```\n{allocate.dump(longer, CALL.sizes, CALL.num_ranks)}\n```")


def _changed(before: Program, after: Program) -> str:
    """The tasks that are not as they were, without what every pass leaves alone; new choices."""
    lines = []
    for old, new in zip(before.tasks, after.tasks):
        if new != old:
            given = {f.name: getattr(new, f.name) for f in fields(new)
                     if f.name not in ("needs", "place") and getattr(new, f.name) != getattr(
                         old, f.name)}  # fmt: skip
            told = ", ".join(f"{name}={task.text.value(value)}" for name, value in given.items())
            if not told:
                continue
            lines.append(f"{new.name} = {new.kind}(..., {told})")
    choices = after.choices[len(before.choices) :]
    lines += task.text.show(choices, places=False).splitlines()
    return "\n".join(lines)


def _steps(plan: device.Plan) -> str:
    """Buffers, channels and steps of a plan."""
    return device.show(plan.bare, places=False)


def _code(text: str) -> str:
    return f"```python\n{text.rstrip()}\n```"


def _program() -> str:
    declared = "".join(
        f"    {name}=Tensor({kind.dtype!r}, {kind.sizes!r}, {task.text.value(kind.placement)}),\n"
        for name, kind in PARAMETERS.items()
    ).replace("'", '"')
    source = inspect.getsource(mlp)
    return _code(f'@weft.program(\n    mesh="tp",\n{declared})\n{source}')


def _refusal() -> str:
    """What the compiler says where the program does not gather."""
    try:
        pipeline.compile_program(trace(forgetful, "tp", PARAMETERS))
    except PlacementError as error:
        frame = error.place.frames[0]
        return f"{type(error).__name__}: {error.message}\n  at  {frame.source()}"
    raise AssertionError("a program without its all_gather is placed")


def _needs(stages: pipeline.Stages) -> str:
    """Some tiles and what they need, the longest lists cut."""
    lines = []
    needs = dependencies(stages.program, SIZES, RANKS)
    for one in needs:
        if one[1:] != (1, 1, 1):
            continue
        told = [f"{other.task}[{other.i_m}, {other.i_n}]@{other.rank}" for other in needs[one]]
        shown = ", ".join(told[:4]) + (f", ... {len(told)} in all" if len(told) > 4 else "")
        lines.append(
            f"{one.task}[{one.i_m}, {one.i_n}]@{one.rank}".ljust(20) + f"<- {shown or '-'}"
        )
    return "\n".join(lines)


def _spans(stages: pipeline.Stages) -> str:
    channel = stages.channels[0]
    mapping.check(channel, SIZES, RANKS)
    lines = []
    for side, spans in zip(("producer", "consumer"), mapping.views(channel, SIZES, RANKS)):
        for i, one in enumerate(spans):
            words = ", ".join(map(str, range(one.word, one.word + one.count)))
            lines.append(f"{side} {i:2}: rows {one.first:3} to {one.end - 1:3}   words {words}")
    return "\n".join(lines)


def _passes(passes: Sequence[pipeline.Pass]) -> str:
    rows = [f"| `{one.name}` | {one.why} |" for one in passes]
    return "\n".join(["| pass | why here |", "|---|---|", *rows])


def _rules(level: str, rules: tuple) -> str:
    rows = [f"| {rule.name} | {rule.why} | {rule.since or 'always'} |" for rule in rules]
    return "\n".join([f"| {level} rule | why | checked from |", "|---|---|---|", *rows])


INTRODUCTION = """\
# One program through the compiler

This page is generated by running `src/weft/compiler/page.py`; do not edit it:
`python -m weft.compiler.page > docs/compiler.md`.

A program is a Python function over global tensors with placements on a mesh of ranks:
`Shard(dim)`, `Replicate()`, `Partial()`, with the meaning that they have in torch's DTensor. A
size that is a name, `m` here, is known at the call only."""

TRACED = """\
## Traced

`weft.program` calls the function once with values that write down what is done with them. The
IR's text is Python's grammar; it is read back exactly as it is printed. Here it is printed
without the source lines that each statement carries in a comment."""

PLACED = """\
## `place`: what each rank has

Sizes are global and never change by a collective: what changes is where a tensor lies. The
product of columns of `gated` with rows of `w2` is a summand on each rank, which `reduce_scatter`
sums. Gate and value of `silu_mul` are neighbouring columns, so that both are on one rank and in
one tile.

A checkpoint has them side by side, all of gate and then all of up. Such a weight is declared
`w1=Tensor("bf16", (4096, 24576), Halves(1))`: each rank passes its part of gate, and behind it its
part of up. `silu_mul(all_gather(x) @ w1, side_by_side=True)` takes it in every lowering, with
gradients, and no weight is permuted. It is then a step behind the product, which reads `product`
once more; in neighbouring columns the product's kernel does it in registers."""

MISSING = """\
No collective is put in behind the user's back. Where operands do not lie as an operation needs
them the error says which, and what would fix it. Without the `all_gather`:"""

TILED = """\
## `tile`: which tile needs what

Each task gets the extents of its tiles, and which region of each operand a tile needs: `Along(0)`
follows the tile's own rows, `All()` is the whole dimension, `Along(1, times=2)` is twice as
wide."""

NEEDED = """\
With numbers, the dependencies follow by intersection, in global coordinates; ranks and ragged
parts are no special case. Of m = {m} on {ranks} ranks, tile [1, 1] of each task on rank 1 needs
(`task[i_m, i_n]@rank`):"""

MAPPED = """\
## `map`: who announces what

Each collective over rows gets a channel of the Device level: an affine map from tiles to rows,
ranks and signal words. Producer and consumer each have their own tiles."""

FITTED = """\
`Compiled.check` shows for given sizes that the two views fit: all rows once, a consumer's tile
waits for a word of each tile that it reads, and a word is full after as many tiles as announce
it. For `gathered_ready`, m = {m} on {ranks} ranks; producer's tiles lie within a rank's rows, the
consumer's may not:"""

LOWERED = """\
## `unfused`: a plan of library calls

The honest baseline inside the system: nothing overlaps. `Part(m)` is the rank's own part of m."""

OVERLAPPED = """\
## What overlaps

The other lowering starts from the placed program again, when it is called: engines and tiles depend
on sizes. The plan itself knows sizes by name only, so calls of one class, two to each doubling of a
size, run the same one. Below, m = {m} on {ranks} ranks of H200s. Each pass adds to tasks; what it
has chosen, and why, travels with the program, for `weft explain`."""

FUSED = """\
## `fuse`: which tasks are one kernel

A product whose rows are gathered, a product whose sums are scattered or summed, a sum over ranks
with what is done to its rows; what follows a product element by element is done in registers. All
else stays a call of a library."""

ENGINES = """\
## `engines`: what carries the data

Predicted by a model of the machine (`src/weft/compiler/cost/`), whose constants were read from
benchmarks, together with the tiles that suit each engine; the libraries one after the other are one
of the ways. `Settings(engines={"gathered": "push"})` settles it instead.

Sums may be carried by copy engines, as `gemm_rs` with `transport="put"` does it: SMs store tiles of
other ranks' rows at home, and an engine's stream takes them to their owners as soon as tokens say
that they are there ([024](decisions/024-engines-take-tokens.md)). It is predicted to end first from
2048 rows on. No call that the user records can have it, since no graph says which of its branches
begins first; there SMs push sums."""

CUT = """\
## `tile` again

Within a kernel the tiles are those of its product."""

SWIZZLED = """\
## `swizzle`: the order of tiles

Over several nodes the order is `hierarchical_gather` or `hierarchical_scatter`
(`tiles/hierarchy.py`): own rows, those of the own node, then node by node, and rows are put in the
order in which they are asked for; or, where sums leave, the other nodes' tiles first
([022](decisions/022-nodes-in-turn.md)).

A user's order of gathered rows is a function like those of `tiles/swizzle.py`, of which it may be
made. It is checked for the sizes of the call and every rank: each tile must come once; where two
numbers give one tile, both are named."""

CHUNKED = """\
## `chunk`: how finely rows are announced

Of sums that engines carry it is columns: all rows of a part share B's columns meanwhile, and a
chunk lies in one piece. Several chunks are alike and of whole tiles."""

PARTITIONED = """\
## `partition`: programs and SMs

Here a tile that needs more registers or shared memory than the target has is refused, with how much
is missing."""

DRAWN = """\
## `map`, `draw`: what moves and what runs

The mapping of the kernels' collectives becomes channels; transfers, kernels and calls become steps.
`body` is all that a kernel computes: names in it are buffers, or values in its registers.
`partials` holds other ranks' shares of own rows, with a word for each chunk of columns; `kept` what
the engine fetches, in whole tiles of every rank's part, and `side=owner` says that each part goes
to its owner. Where SMs push sums there is neither `kept` nor that copy, `partials` is among the
launch's `pushes`, and has a word for each tile."""

SIGNALLED = """\
## `insert_signals`: who waits for whom

Every signal that could be needed is put in; then each is left out again for as long as the rules of
the level find no breach. All words are events: one writer stores the call's epoch, so nothing is
counted. `takes` waits until all ranks have given the slot back, `gives` ends the last kernel.

Tokens (`to=engine`) are this rank's alone: the kernel sets one to 1 when a chunk's last tile is
stored, and the copy that `awaits` it makes it 0 again. The stream itself waits, behind a launch of
another stream, and only the order in which the host queues them says so: a rule asks for that
order. A put says that it has written on other ranks and nothing of what it has read here, so only
`after` lets this rank write there again."""

ALLOCATED = """\
## `allocate`: where buffers lie

Buffers share memory where one is over, on every rank that reaches it, before the other begins. Here
none are: while one rank is in its first product another may be sending sums of its second, and
sums are taken from `kept` until the call ends."""

TWO = """\
Of two such layers, one behind the other, the second lies where the first lay: its rows are sent
when all ranks have told that they have the first one's sums. `kept` is there twice, since a rank
hears at the call's end that its own copies are over."""

CALLED = """\
It is run with the collectives that are passed, since the compiler stands below the operators:

```python
y = mlp(x, w1, w2, world=world, collectives=weft.ops, m=997)
```

Tensors may be passed by name, `mlp(x, w2=w2, w1=w1, ..)`, and dtypes declared as torch has them
(`torch.bfloat16`) or as the command line does (`"bf16"`). `m` may be left out where all ranks have
equally many rows. `tests/compiler/test_unfused.py` holds
this program at small sizes, and random ones, against `libraries.reference`: the same tasks on
global tensors in fp32, where collectives do nothing.

Inputs may lie as torch lays them out: transposed, sliced, padded, expanded. Every lowering gives
what it gives for the same numbers in rows. A weight, the right operand of a product, is read in
place as `[k, n]` or as the transposed of `[n, k]`, with padding between its rows; the persistent
kernel and products by tables take none. What else does not lie in rows one behind the other is
copied at each call, before kernels read it. A weight is not: a `ShapeError` names its strides, and
asks for a copy that is made once."""

ORDER = """\
## The order of passes

At the declaration:"""

THEN = """\
At the first call of a class of sizes, from the placed program:"""

LEGAL = """\
## What is legal

A level's rules are a table that is run before and after every pass. All breaches are reported,
with the user's lines."""

LEFT = """\
Rules on the order of a plan look at moments, not at steps: a kernel announces some tiles before it
has read all that it reads, and pushes some before it waits. What is behind an announcement is
ordered for what it announces alone (`src/weft/ir/order.py`).

## Errors

| what is wrong | found by |
|---|---|
| operands that do not lie as an operation needs them | `place`, with the remedy |
| sizes or dtypes that do not fit; ranks that differ | `place`, and the call |
| tasks, or kernels, that need each other | the rules `names` and `kernels`, with the cycle |
| a mapping that leaves rows out, or has them twice | `Compiled.check`, with the tiles |
| an order of tiles that is no bijection | `swizzle`, with both numbers of a tile |
| an engine that cannot be there | `engines`, with those that can |
| a tile of the user's that no template has | `tile`, with what the template takes |
| a tile that does not fit registers or shared memory | `partition`, with what is missing |

## What is not there

The mesh has one axis, and others are refused; tensors have two dimensions, experts' matrices three.
`all_to_all` is not in the frontend. Products by tables are launched as plain kernels, their ways
are not predicted, and tables are those of `moe_route`; tokens that go to their experts' ranks go by
operators' calls. Sums over columns, and rows that are gathered for anything but a product, stay
calls of libraries. Packets carry rows that are summed and worked on; for products whose rows are
gathered or whose sums travel by packets operators have kernels and the generator has none. SMs
never pull. Where nodes differ by more than one rank, tiles go rank by rank, and what `engines`
predicts knows no order by nodes. A product that is behind a gather and ends in a sum hides the
gather alone. Sums that engines carry go by one stream, where `gemm_rs` can have several in turn,
and each has memory of its own for what is fetched."""


if __name__ == "__main__":
    sys.stdout.write(page())
