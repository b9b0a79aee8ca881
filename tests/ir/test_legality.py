"""The tables of what is legal, each rule on a program that breaks it; breaches name the line."""

from __future__ import annotations

import ir_programs as programs
import pytest
from ir_reader import read

from weft.base.errors import IllegalError
from weft.ir import core, core_rules, device, device_rules, task, task_rules

WAIT = "wait(ready, rows_ready, tile, rows, unless=own)  # ag.py:9 in mlp via b.py:3\n"
READ = "hook(ready, rows_or_own, (gathered, own, rows))\n"
COPIED = "after(copy, main)\ntake(stream=copy)\ncopy(a, gathered, push, rows_ready)\n"
LAUNCHED = programs.PUSHED.partition(COPIED)[2].partition("after")[0]

# (level, what is replaced in its text, by what, the rule that finds it, part of what it says)
BREACHES = [
    (task, "matmul(g, w,", "matmul(g, v,", "names", "h uses v, which no task before it makes"),
    (task, "matmul(g, w,", "matmul(g,", "names", "matmul takes 2 operands, h has 1"),
    (task, "all_gather(x, dim", "all_gather(y, dim", "names", "a cycle, g needs y needs h needs g"),
    (task, "results=(y,)", "results=(z,)", "names", "mlp returns z"),
    (task, "\nw: bfloat16[64", "\nx: bfloat16[64", "names", "x is made twice"),
    (task, "(x, dim=0", "(x", "attributes", "all_gather g has dim=None; it takes 0 or 1"),
    (task, "silu_mul(h,", "silu_mul(h, dim=1,", "attributes", "y has dim=1; it takes none"),
    (task, "silu_mul(h,", "silu_mul(h, eps=0.5,", "attributes", "y has eps=0.5; it takes none"),
    (task, "w: bfloat16[64, 96] @ Shard(1)", "w: bfloat16[64, 96]", "typed", "w has no placement"),
    (task, "w: bfloat16[64", "w: bfloat16[63", "sizes", "g has 64 columns but w has 63 rows"),
    (task, "w: bfloat16[64", "w: float16[64", "sizes", "w is float16; operands have one dtype"),
    (task, "y: bfloat16[m, 48]", "y: bfloat16[m, 49]", "sizes", "silu_mul gives bfloat16[m, 48]"),
    (task, "w: bfloat16[64, 96] @ Shard(1)", "w: bfloat16[64, 96] @ Shard(0)", "placements",
     "matmul of Replicate(), Shard(0) does not give h @ Shard(1)"),
    (task, "tile=(32, 32), needs=(Need(h", "tile=(32, 0), needs=(Need(h", "tiled", "y has tile"),
    (task, "Along(1, times=2)", "Along(1)", "tiled", "silu_mul reads (Need(h, (Along(0), Along(1"),
    (task, "stage=tiled", "stage=baked", "stage", "mlp is at stage baked"),
    (device, "c = buffer", "a = buffer", "names", "a is declared twice"),
    (device, "(a, gathered, b)", "(a, gathered, v)", "names", "launch uses v, which is no buffer"),
    (device, "awaits=(rows_ready,)", "awaits=(rows,)", "names", "which is no channel"),
    (device, "chunks=2", "chunks=0", "fields", "chunks=0; it is 1 or more"),
    (device, "role=symmetric", "role=mine", "fields", "gathered has role=mine"),
    (device, "a, gathered, push", "a, gathered, shove", "fields", "side=shove; it is push or ow"),
    (device, "programs=resident", "programs=some", "fields", "programs=some; it is tiles or res"),
    (device, "tile=(128, 256, 64)", "tile=(128, 0, 64)", "fields", "has tile=(128, 0, 64)"),
    (device, "own=a", "own=d", "names", "channel rows_ready names d, which is no buffer"),
    (device, "Do(matmul, (gathered, b), c)", "Do(matmul, (gathered, d), c)", "bodies",
     "ag_gemm_multiply does c = matmul of d, which it neither reads nor makes"),
    (device, "Do(matmul, (gathered, b), c)", "Do(matmul, (gathered, b), d)", "bodies",
     "ag_gemm_multiply writes c, which nothing in its body makes"),
    (device, "role=symmetric", "role=local", "reach", "other ranks' parts of gathered are reached"),
    (device, "copy(a, gathered, push, rows_ready)\n", "", "paired",
     "rows_ready is waited for and nobody announces"),
    (device, ", awaits=(rows_ready,)", "", "paired", "is announced and nobody waits for it"),
    (device, COPIED + LAUNCHED, LAUNCHED + COPIED, "cycles",
     "launch waits for rows_ready, whose announcement waits for it"),
    # Rows are copied before whoever calls has made them.
    (device, "after(copy, main)\n", "", "ordered",
     "the writing by the caller and the reading by copy of a are not ordered: a stream"),
    (device, "writes=(c,)", "writes=()", "written", "ag_gemm returns c, which nothing writes"),
    (device, "gives=True)  # ag.py:7\nafter(main, copy)", "gives=True)", "joined",
     "copy on stream copy may run when the caller goes on"),
    (device, "take(stream=copy)\n", "", "credits", "copy writes the slot before credits are taken"),
    (device, ", gives=True", "", "credits", "gives its slot back 0 times; once is right"),
    (device, ", spare=1", "", "entered", "ag_gemm_multiply may hold all SMs and wait for rows_rea"),
    (device, "program(ag_gemm, mesh=tp,", "program(ag_gemm, mesh=tp, stage=baked,", "stage",
     "ag_gemm is at stage baked"),
    (device, "(m, 96))", "(m, 96), shares=gathered)", "shared", "c is local and shares the memory"),
    (core, "rows = mapping(static, (gathered,))", "rows = mapping(static, (k,))", "names",
     "k is used and is no parameter"),
    (core, "b = param(operand)", "own = param(operand)", "names", "own is declared twice"),
    (core, "hook(emit, store, (c,))", "hook(emit, store, (rows,))", "names",
     "rows is of sort mapping; here it must be of sort operand"),
    (core, "b = param(operand)", "b = param(figure)", "words", "b is of sort figure"),
    (core, "mapping(static, (gathered,))", "mapping(tables, (gathered,))", "words",
     "rows is of sort tables and cuts whole, which is of sort static"),
    (core, "template(gemm, (", "template(rows, (3, ", "template", "a power of two of rows"),
    (core, "hook(emit, store", "hook(store, store", "words", "hook store: there are begin, order"),
    (core, "hook(emit, store", "hook(emit, hum", "words", "hook emit has hum: there are"),
    (core, "hook(emit, store, (c,))", "hook(emit, store, ())", "words", "store takes 1 arguments"),
    (core, "unless=own)", "order=release)", "words", "wait has order release: there are acquire"),
    (core, "template(gemm,", "template(attention,", "template", "of template attention"),
    (core, "(128, 256, 64)", "(128, 250, 64)", "template", "each a power of two"),
    (core, "hook(order, gather, (rows,))\n", "", "template", "gemm needs the hooks order"),
    (core, "hook(order, gather, (rows,))\n", "hook(order, gather, (rows,))\n" * 2, "template",
     "hook order is given 2 times"),
    (core, "hook(emit, store", "hook(ready, store", "places", "store is given as ready; it is for"),
    # A signal in emit would be given before its tile's stores are complete.
    (core, "hook(emit, store", "notify(emit, rows_ready, all, rows)\nhook(emit, store", "places",
     "notify at hook emit"),
    (core, "finish(done, slot)", "finish(emit, slot)", "places", "finish at hook emit"),
    (core, "hook(emit, store, (c,))",
     "hook(emit, store, (c,))\nnotify(announce, rows_ready, engine, rows)", "chunks",
     "notify is for a whole chunk, but no count of its tiles is before it"),
    (core, "slot = param(slot, by=take, to=kernel)", "slot = param(world)", "names",
     "finish: slot is of sort world; here it must be of sort slot"),
    (core, "world = param(world)", "world = param(world)\nspare = param(slot)", "parties",
     "ag_gemm_multiply has 2 slots; it must have one"),
    (core, "by=engine, to=kernel, ann", "to=kernel, ann", "parties",
     "rows_ready is notified by nobody and waited for by ag_gemm_multiply on the other ranks"),
    (core, "announces=(gathered,)", "announces=(slot,)", "parties",
     "rows_ready announces slot, which is no array of the kernel"),
    (core, WAIT + READ, READ + WAIT, "reads",
     "rows_or_own at hook ready reads gathered, which a copy engine writes, and does not wait for "
     "rows_ready: put wait(ready, rows_ready, tile, rows) before it"),
    (core, "(ready, rows_ready, tile", "(ready, rows_ready, others", "reads", "reads gathered"),
    (core, ", announces=(gathered,)", "", "reads",
     "reads gathered, which others write, and no signals with to=kernel announce it"),
    (core, "unless=own)", "unless=own, by=last)", "reads", "reads gathered"),
    (core, "unless=own)", "unless=own, order=relaxed)", "orders",
     "wait of rows_ready at hook ready is relaxed, so gathered may be read as the last call left"),
    (core, "unless=own)", "unless=own, scope=device)", "orders",
     "wait of rows_ready at hook ready has scope=device, which does not reach a copy engine"),
    (core, "wait(done, rows_ready, all, rows, by=last)\n", "", "engines",
     "an engine may write flags of rows_ready when the call is over"),
    (core, "wait(done, rows_ready, all, rows, by=last)\nfinish(done, slot)",
     "finish(done, slot)\nwait(done, rows_ready, all, rows, by=last)", "engines",
     "an engine may write flags of rows_ready when the call is over"),
    (core, "by=engine, to=kernel", "by=kernel, to=kernel", "paired",
     "ag_gemm_multiply on the other ranks waits for rows_ready for ever, which nothing in "
     "ag_gemm_multiply notifies"),
    (core, "finish(done, slot)", "", "finished",
     "nothing in ag_gemm_multiply ends the call on slot, to=kernel: every rank waits for ever"),
    (core, "finish(done, slot)", "finish(done, slot)\n" * 2, "finished",
     "ends the call on slot 2 times"),
    (core, "by=take, to=kernel", "by=take, to=reduce", "finished",
     "ag_gemm_multiply ends the call on slot, which reduce ends: say to=kernel"),
    (core, "by=take, to=kernel", "by=kernel, to=kernel", "credits",
     "nothing in ag_gemm_multiply waits for credits of slot, by=kernel"),
    (core, "hook(order", "credit(begin, slot)\nhook(order", "credits",
     "ag_gemm_multiply waits for credits of slot, for which take waits: say by=kernel"),
]  # fmt: skip

TEXTS = {task: programs.TASKS, device: programs.PUSHED, core: programs.KERNEL}


@pytest.mark.parametrize(
    ("level", "old", "new", "rule", "told"),
    [
        pytest.param(*row, id=f"{row[0].__name__[8:]}-{i}-{row[3]}")
        for i, row in enumerate(BREACHES)
    ],
)
def test_each_rule_finds_its_breach(level, old: str, new: str, rule: str, told: str):
    text = TEXTS[level]
    assert old in text
    program = read(level, text.replace(old, new))
    found = programs.rules_of(level).check(program)
    assert rule in {one.rule for one in found}, found
    assert any(told in one.message for one in found if one.rule == rule), found


def test_every_rule_has_a_breach():
    for level in TEXTS:
        rules = {rule.name for rule in programs.rules_of(level).RULES}
        # These are tested on programs of their own, below.
        assert rules <= {
            "inside",
            "kernels",
            "packets",
            "pieces",
            "planned",
            "resident",
            "sends",
            "tokens",
            *(row[3] for row in BREACHES if row[0] is level),
        }


@pytest.mark.parametrize(
    ("old", "new", "rule", "told"),
    [
        ("notify(announce, ready, owner, parts)\n", "", "sends",
         "push at hook emit writes partials for other ranks, and no notify behind it sets ready "
         "there: multiply on the other ranks waits for ever; put notify(announce, ready, owner, "
         "parts)"),
        ("announce, ready, owner", "announce, ready, all", "sends", "no notify behind it sets"),
        ("ready = param(signals, by=kernel, to=kernel, announces=(partials,))",
         "ready = param(signals, by=kernel, to=kernel)", "sends",
         "push at hook emit writes partials for other ranks, and no signals by=kernel announce it"),
        ("credit(begin, slot)\n", "", "credits",
         "push writes partials on other ranks before a credit of slot has come: they may still "
         "read there what the call before left; put credit(begin, slot) before it"),
        ("credit(begin, slot)\n", "credit(announce, slot)\n", "chunks", "is for a whole chunk"),
        ("finish(end, slot)", "advance(end, slot)", "finished", "advance tells no rank that"),
        ("finish(end, slot)", "finish(done, slot)", "finished", "add_partials comes behind that"),
    ],
)  # fmt: skip
def test_what_leaves_for_other_ranks(old: str, new: str, rule: str, told: str):
    """Each message names the line of the program."""
    assert core_rules.check(read(core, programs.PUSHING)) == []
    assert old in programs.PUSHING
    found = core_rules.check(read(core, programs.PUSHING.replace(old, new)))
    assert any(one.rule == rule and told in one.message for one in found), found
    if rule in ("sends", "credits"):
        assert "at rs.py:7" in "\n".join(map(str, found))


def test_all_breaches_are_told_with_their_lines():
    text = programs.TASKS.replace("matmul(g, w,", "matmul(g, v,").replace("(y,)", "(z,)")
    with pytest.raises(IllegalError, match="breaches of the rules: 2") as caught:
        task_rules.require(read(task, text))
    assert "at mlp.py:12 in mlp" in str(caught.value)
    assert [one.rule for one in caught.value.violations] == ["names", "names"]


MOE_BREACHES = [
    ("logits, top_k=2", "logits", "attributes", "routing has top_k=None; it takes 1 or more"),
    ("(x, routing)", "(x, logits)", "sizes", "logits is bfloat16[m, 8] @ Shard(0); it must be the "
     "tables that moe_route gives"),
    ("(rows, w, routing)", "(x, w, routing)", "sizes", "x has m rows, but of m tokens each has "
     "top_k=2 choices: it takes Times(m, 2) rows"),
    ("w: bfloat16[8,", "w: bfloat16[6,", "sizes", "w has 6 experts, but tokens were routed to 8"),
    ("w: bfloat16[8, 64,", "w: bfloat16[8, 32,", "sizes", "each expert of w has 32 rows"),
    ("w: bfloat16[8, 64, 96]", "w: bfloat16[64, 96]", "sizes", "it must have three dimensions"),
    ("x: bfloat16[m, 64]", "x: bfloat16[n, 64]", "sizes", "x has n rows, but m tokens were routed"),
    ("results=(sums,)", "results=(routing,)", "typed", "moe returns routing, which is table[m, 2"),
    ("w: bfloat16[8, 64, 96] @ Shard(2)", "w: bfloat16[8, 64, 96] @ Shard(1)", "placements",
     "grouped_matmul of Replicate(), Shard(1), Replicate() does not give products @ Shard(1)"),
    ("bfloat16[m, 8] @ Shard(0)", "bfloat16[m, 1] @ Shard(0)", "sizes", "it needs 2"),
]  # fmt: skip


DECODE_BREACHES = [
    ("lengths: int32", "lengths: float32", "sizes", "lengths is float32[1, b] @ Replicate(); it "
     "must be int32"),
    ("int32[1, b]", "int32[b, 1]", "sizes", "lengths is (b, 1); of b sequences it must be (1, b)"),
    ("cache: float32[Times(b, 32)", "cache: float32[b2", "sizes", "cache has b2 rows for b seq"),
    ("k: float32[b, 16]", "k: float32[b, 32]", "sizes", "k has 32 columns, cache 16"),
    ("lengths, head=8)", "lengths, head=6)", "sizes", "turned has 32 columns; heads have head=6"),
    ("values: float32[Times(b, 32)", "values: float32[Times(b, 16)", "sizes", "caches are alike"),
    ("lengths, head=8)", "lengths)", "attributes", "attended has head=None; it takes an even"),
    ("head=8, base=10000.0", "head=8", "attributes", "turned has base=None; it takes a number"),
    ("q: float32[b, 32] @ Shard(1)", "q: float32[b, 32] @ Replicate()", "placements",
     "rope of Replicate(), Replicate() does not give turned @ Shard(1)"),
]  # fmt: skip


ATTEND_BREACHES = [
    ("v: float32[m, 16]", "v: float32[m, 24]", "sizes", "v is (m, 24); rows are alike in all"),
    ("k: float32[m, 16]", "k: float32[n, 16]", "sizes", "k is (n, 16)"),
    ("head=8", "head=6", "sizes", "q has 32 columns; heads have head=6"),
    ("q: float32[m, 32]", "q: float32[m, 24]", "sizes", "q has their heads or a multiple"),
    (", causal=True", "", "attributes", "attended has causal=None; it takes True or False"),
    ("k: float32[m, 16] @ Replicate()", "k: float32[m, 16] @ Shard(0)", "placements",
     "attention of Shard(0), Shard(0), Replicate() does not give attended @ Shard(0)"),
]  # fmt: skip


OF_KINDS = [
    *((programs.MOE, *row) for row in MOE_BREACHES),
    *((programs.DECODE, *row) for row in DECODE_BREACHES),
    *((programs.ATTEND, *row) for row in ATTEND_BREACHES),
]


@pytest.mark.parametrize(("text", "old", "new", "rule", "told"), OF_KINDS)
def test_tables_caches_and_attention(text: str, old: str, new: str, rule: str, told: str):
    """Of programs that are legal, each with one thing changed."""
    assert task_rules.check(read(task, text)) == []
    assert old in text
    found = task_rules.check(read(task, text.replace(old, new)))
    assert any(one.rule == rule and told in one.message for one in found), found


def test_a_cache_has_as_many_rows_for_each_sequence():
    text = programs.DECODE.replace("[b, ", "[3, ").replace("[1, b]", "[1, 3]")
    even, odd = (text.replace("Times(b, 32)", str(rows)) for rows in (96, 97))
    assert task_rules.check(read(task, even)) == []
    assert any("rows for 3 seq" in one.message for one in task_rules.check(read(task, odd)))


def test_all_experts_may_be_chosen():
    text = programs.MOE
    few = text.replace("8] @ Shard(0)", "2] @ Shard(0)").replace("[8, 64", "[2, 64")
    few = few.replace("table[m, 2, 8]", "table[m, 2, 2]")
    assert few != text and task_rules.check(read(task, few)) == []


@pytest.mark.parametrize(
    ("old", "new", "rule", "told"),
    [
        (
            "engine=sm_push",
            "engine=copy",
            "planned",
            "all_gather may have ce_push or sm_push",
        ),
        (
            "engine=sm_push, chunks=1",
            "engine=sm_push, chunks=-1",
            "planned",
            "it is 1 or more, or tiles",
        ),
        ("order=gather, ", "", "planned", "mlp_multiply has order=, programs=resident"),
        ("(32, 32, 64)", "(32, 32, 64, 2)", "tiled", "it is (rows, columns)"),
        # The product needs what needs the product.
        ("kernel=mlp_gather", "kernel=mlp_multiply", "kernels", ""),
    ],
)
def test_planned_programs(old: str, new: str, rule: str, told: str):
    assert task_rules.check(read(task, programs.PLANNED)) == []
    text = programs.PLANNED.replace(old, new)
    if rule == "kernels":
        text = text.replace("kernel=mlp_multiply, order", "kernel=other, order")
    found = [one.message for one in task_rules.check(read(task, text)) if one.rule == rule]
    assert found and told in found[0]


def breaches(text: str, rule: str) -> list[str]:
    """What `rule` says of a plan."""
    return [one.message for one in device_rules.check(read(device, text)) if one.rule == rule]


INSIDE = """\
program(gemm_rs, mesh=tp, results=(y,))
a = buffer(bfloat16, (m, 64), role=input)
partials = buffer(bfloat16, (num_ranks, Part(m), 64), role=symmetric)
y = buffer(bfloat16, (Part(m), 64))
ready = channel(partials, m, chunks=tiles, push_rows=32, tile_rows=32, cuts=part, to=owner)
launch(multiply, (a, partials), writes=(y,), pushes=(partials,), awaits=(ready,), \
announces=(ready,), programs=resident, takes=True, gives=True)
"""


def test_what_a_launch_pushes_and_reads_itself_has_a_channel():
    """Programs that wait for each other are all resident."""
    assert device_rules.check(read(device, INSIDE)) == []
    other = INSIDE.replace("channel(partials", "channel(y")
    (told,) = breaches(other, "inside")
    assert "multiply reads partials, which its launch on other ranks pushes" in told
    (told,) = breaches(INSIDE.replace("programs=resident, ", ""), "inside")
    assert "programs=tiles must be resident" in told


def test_a_slot_is_given_back_behind_all_that_uses_it():
    text = INSIDE.replace(", gives=True", "") + "z = buffer(bfloat16, (Part(m), 64))\n"
    behind = "launch(reduce, (partials,), writes=(z,), gives=True)\n"
    assert device_rules.check(read(device, text + behind)) == []
    late = INSIDE + "z = buffer(bfloat16, (Part(m), 64))\n" + behind.replace(", gives=True", "")
    (told,) = breaches(late, "credits")
    assert "launch uses partials and is not before what gives it back" in told


APART = """\
program(p, mesh=tp, results=(y,))
x = buffer(bfloat16, (m, 64), role=input)
h = buffer(bfloat16, (m, 64))
g = buffer(bfloat16, (m, 64))
y = buffer(bfloat16, (m, 64), shares=h)
call(silu, (x,), (h,))
call(silu, (h,), (g,))
call(silu, (g,), (y,))
"""


def test_buffers_share_memory_that_nobody_needs_any_more():
    assert device_rules.check(read(device, APART)) == []
    (told,) = breaches(APART.replace("call(silu, (g,)", "call(silu, (h,)"), "shared")
    assert "h and y share memory and are in use at once" in told
    (told,) = breaches(APART.replace("results=(y,)", "results=(h, y)"), "shared")


PUSH = """\
program(gemm_rs, results=(y,))
h = buffer(bfloat16, (m, 64), role=input)
parts = buffer(bfloat16, (m, 64), role=symmetric)
y = buffer(bfloat16, (Part(m), 64))
parts_ready = channel(parts, m, push_rows=32, tile_rows=32)
launch(multiply, (h,), pushes=(parts,), announces=(parts_ready,), takes=True)
launch(reduce, (parts,), writes=(y,), awaits=(parts_ready,), gives=True)
"""


def test_what_is_pushed_is_read_behind_its_channel():
    """A stream's order says nothing of what other ranks have written here."""
    assert device_rules.check(read(device, PUSH)) == []
    wrong = PUSH.replace(
        "launch(reduce, (parts,), writes=(y,), awaits=(parts_ready,), gives=True)",
        "launch(reduce, (parts,), writes=(y,), gives=True)\nwait(parts_ready)",
    )
    (found,) = device_rules.check(read(device, wrong))
    assert found.rule == "ordered" and "the reading by launch of parts" in found.message


def test_streams_are_ordered_by_after_alone():
    text = PUSH.replace("awaits=(parts_ready,),", "awaits=(parts_ready,), stream=other,")
    text += "out = buffer(bfloat16, (Part(m), 64))\ncall(silu, (y,), (out,))\n"
    found = device_rules.check(read(device, text))
    assert {one.rule for one in found} == {"written", "ordered", "joined"}
    ordered = text.replace("call(silu", "after(main, other)\ncall(silu")
    assert device_rules.check(read(device, ordered)) == []


LAUNCH, COPY = programs.STAGED.splitlines()[-3:-1]
TOKENS = [
    # Nothing is written, read or announced before it is known to be there or free.
    (", awaits=staged_ready)", ")", "paired", "staged_ready is announced and nobody waits for it"),
    (", awaits=staged_ready)", ")", "tokens", "has side=owner, awaits=nothing"),
    ("awaits=(partials_ready,), ", "", "paired", "partials_ready is announced and nobody waits"),
    ("announces=(staged_ready,), ", "", "paired", "staged_ready is waited for and nobody announ"),
    (", takes=True", "", "credits", "copy writes the slot before credits are taken"),
    (", gives=True", "", "credits", "gives its slot back 0 times"),
    ("after(main, send)\n", "", "joined", "copy on stream send may run when the caller goes on"),
    # What was queued on a stream later is not joined.
    (f"{COPY}\nafter(main, send)", f"after(main, send)\n{COPY}", "joined", "copy on stream send "
     "may run when the caller goes on"),
    # Only the host's order says that the launch is there before a stream waits for it.
    (f"{LAUNCH}\n{COPY}", f"{COPY}\n{LAUNCH}", "tokens", "takes staged_ready, which a later launch "
     "sets: what waits on a stream is queued behind it"),
    ("stream=send", "stream=main", "cycles", "waits for staged_ready, whose announcement waits"),
    (COPY, f"after(send, main)\n{COPY}", "cycles", "whose announcement waits for it"),
    ("programs=resident, ", "", "resident", "multiply waits for partials_ready, which follows from "
     "what it announces: programs=tiles must be resident"),
    # A token is one kernel's, and one copy's.
    (COPY, f"{COPY}\n{COPY}", "tokens", "staged_ready is taken by 2 steps: a token is taken once"),
    (LAUNCH, f"{LAUNCH}\n{LAUNCH}", "tokens", "staged_ready is set by 2 steps"),
    ("after(main", "wait(staged_ready)\nafter(main", "tokens", "wait waits for staged_ready: "
     "copies take tokens"),
    ("awaits=staged_ready", "awaits=partials_ready", "tokens", "copy waits for partials_ready"),
    ("copy(staged, partials, owner", "copy(staged, partials, push", "tokens", "has side=push"),
    ("channel(staged, m", "channel(c, m", "tokens", "takes staged_ready, a token of c: it must"),
    (LAUNCH, f"{LAUNCH}\ncopy(a, partials, push, staged_ready)", "tokens",
     "staged_ready is set by copy"),
    ("to=engine", "to=owner", "tokens", "copy waits for staged_ready: copies take tokens"),
    ("to=engine", "to=stream", "fields", "to=stream; it is all or owner or partner"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "rule", "told"),
    [pytest.param(*row, id=f"{i}-{row[2]}") for i, row in enumerate(TOKENS)],
)
def test_a_copy_takes_tokens_of_the_kernel_that_it_is_queued_behind(old, new, rule, told):
    assert device_rules.check(read(device, programs.STAGED)) == []
    assert old in programs.STAGED
    found = breaches(programs.STAGED.replace(old, new), rule)
    assert any(told in one for one in found), found


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("chunks=2", "chunks=tiles", "c has chunks=tiles; engines carry 1 or more"),
        ("chunks=2", "chunks=0", "c has chunks=0; engines carry 1 or more"),
        ("chunks=2", "chunks=4", "c has chunks=4 of 96 columns in tiles of 48; several chunks"),
        ("order=part_by_part", "order=scatter", "behind matmul in order=scatter; they carry"),
    ],
)
def test_chunks_that_engines_carry_lie_in_one_piece(old, new, told):
    assert task_rules.check(read(task, programs.STAGED_TASKS)) == []
    text = programs.STAGED_TASKS.replace(old, new)
    found = [one.message for one in task_rules.check(read(task, text)) if one.rule == "planned"]
    assert any(told in one for one in found), found


def test_any_number_of_columns_is_one_chunk():
    text = programs.STAGED_TASKS.replace("96]", "n]")
    assert "planned" in {one.rule for one in task_rules.check(read(task, text))}
    assert task_rules.check(read(task, text.replace("chunks=2", "chunks=1"))) == []


def test_shares_are_read_behind_the_words_of_who_carried_them():
    text = programs.STAGED.replace("awaits=(partials_ready,), ", "")
    found = device_rules.check(read(device, text + "wait(partials_ready)\n"))
    assert {one.rule for one in found} >= {"written", "ordered"}
    assert any("the writing by copy of partials are not ordered" in one.message for one in found)


RELAYED = """\
program(gemm_rs, mesh=tp, results=(c,))
a = buffer(bfloat16, (m, Part(64)), role=input)
b = buffer(bfloat16, (Part(64), 96), role=input)
partials = buffer(bfloat16, (num_ranks, Part(m), 96), role=symmetric)
relayed = buffer(bfloat16, (4, Part(m), 96), role=symmetric)
c = buffer(bfloat16, (Part(m), 96))
ready = channel(partials, m, chunks=tiles, push_rows=128, tile_rows=128, cuts=part, to=owner)
given = channel(relayed, m, chunks=tiles, push_rows=128, tile_rows=128, cuts=part, to=partner)
after(relay, main)
launch(add_up, (relayed,), pushes=(partials,), awaits=(given,), announces=(ready,), stream=relay, \
template=move, body=(Do(relay, (relayed,), partials),), programs=resident)
launch(multiply, (a, b, partials), writes=(c,), pushes=(partials, relayed), awaits=(ready,), \
announces=(ready, given), template=gemm, body=(Do(matmul, (a, b), p), Do(reduce_scatter, (p,), c)),\
 tile=(128, 128, 64), order=scatter, programs=resident, spare=16, takes=True, gives=True)
after(main, relay)
"""


@pytest.mark.parametrize(
    ("old", "new", "rule", "told"),
    [
        (
            "after(relay, main)\n",
            "",
            "credits",
            "a launch on stream relay may be ahead of the call",
        ),
        ("after(main, relay)\n", "", "joined", "launch on stream relay may run when the caller"),
        ("awaits=(given,), ", "", "paired", "given is announced and nobody waits for it"),
        (", given)", ",)", "paired", "given is waited for and nobody announces it"),
        # A share says that who gives it has credits.
        (", takes=True", "", "credits", "launch writes the slot before credits are taken"),
        (", spare=16", "", "resident", "multiply leaves no SM to add_up, which goes on beside it"),
        # The other way round says nothing of when it begins.
        ("after(relay, main)\n", "after(main, relay)\n", "credits", "may be ahead of the caller's"),
        ("cuts=part, to=partner", "cuts=part, to=relay", "fields", "has to=relay"),
    ],
)
def test_sums_are_relayed_beside_the_product_that_makes_them(old, new, rule, told):
    assert device_rules.check(read(device, RELAYED)) == []
    assert old in RELAYED
    found = breaches(RELAYED.replace(old, new), rule)
    assert any(told in one for one in found), found
