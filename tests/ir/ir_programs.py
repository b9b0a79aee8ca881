"""Programs of the three levels as text, and random ones; what the tests of the IR start from."""

from __future__ import annotations

import keyword
from types import ModuleType

from hypothesis import strategies as st

from weft.base.place import UNKNOWN, Frame, Place
from weft.ir import core, core_rules, device, device_rules, kinds, task, task_rules, tensor

TASKS = """\
program(mlp, mesh=tp, stage=tiled, results=(y,))
x: bfloat16[m, 64] @ Shard(0) = input()
w: bfloat16[64, 96] @ Shard(1) = input()
g: bfloat16[m, 64] @ Replicate() = all_gather(x, dim=0, tile=(32, 32), \
needs=(Need(x, (Along(0), Along(1))),))
h: bfloat16[m, 96] @ Shard(1) = matmul(g, w, tile=(32, 32), \
needs=(Need(g, (Along(0), All())), Need(w, (All(), Along(1)))))  # mlp.py:12 in mlp
y: bfloat16[m, 48] @ Shard(1) = silu_mul(h, tile=(32, 32), \
needs=(Need(h, (Along(0), Along(1, times=2))),))
"""

# A kernel that gathers, and one that multiplies.
PLANNED = """\
program(mlp, mesh=tp, stage=planned, results=(y,))
x: bfloat16[m, 64] @ Shard(0) = input()
w: bfloat16[64, 96] @ Shard(1) = input()
g: bfloat16[m, 64] @ Replicate() = all_gather(x, dim=0, tile=(32, 64), \
needs=(Need(x, (Along(0), Along(1))),), kernel=mlp_gather, engine=sm_push, chunks=1)
h: bfloat16[m, 96] @ Shard(1) = matmul(g, w, tile=(32, 32, 64), \
needs=(Need(g, (Along(0), All())), Need(w, (All(), Along(1)))), kernel=mlp_multiply, \
order=gather, programs=resident)
y: bfloat16[m, 96] @ Shard(1) = silu(h, tile=(32, 32), needs=(Need(h, (Along(0), Along(1))),), \
kernel=mlp_multiply)
choice(g, engine, push, 'push 30 us, copy_engine 60 us')
"""

# A decode step's attention: a cache of 32 rows for each of b sequences, heads of 8 columns.
DECODE = """\
program(decode, mesh=tp, stage=placed, results=(attended, cached))
q: float32[b, 32] @ Shard(1) = input()
k: float32[b, 16] @ Shard(1) = input()
cache: float32[Times(b, 32), 16] @ Shard(1) = input()
values: float32[Times(b, 32), 16] @ Shard(1) = input()
lengths: int32[1, b] @ Replicate() = input()
turned: float32[b, 32] @ Shard(1) = rope(q, lengths, head=8, base=10000.0)
cached: float32[Times(b, 32), 16] @ Shard(1) = kv_append(cache, k, lengths)
attended: float32[b, 32] @ Shard(1) = decode_attention(turned, cached, values, lengths, head=8)
"""

# Own tokens attend over all.
ATTEND = """\
program(attend, mesh=sp, stage=placed, results=(attended,))
q: float32[m, 32] @ Shard(0) = input()
k: float32[m, 16] @ Replicate() = input()
v: float32[m, 16] @ Replicate() = input()
attended: float32[m, 32] @ Shard(0) = attention(q, k, v, head=8, causal=True)
"""

# The plan of ag_gemm where copy engines carry the data, from where the caller has it.
PUSHED = """\
program(ag_gemm, mesh=tp, results=(c,))
a = buffer(bfloat16, (Part(m), 64), role=input)
b = buffer(bfloat16, (64, 96), role=input)
gathered = buffer(bfloat16, (m, 64), role=symmetric)
c = buffer(bfloat16, (m, 96))
rows_ready = channel(gathered, m, chunks=2, push_rows=32, tile_rows=128, own=a)
choice(gathered, engine, ce_push, 'so that all SMs multiply')
after(copy, main)
take(stream=copy)
copy(a, gathered, push, rows_ready)
launch(ag_gemm_multiply, (a, gathered, b), writes=(c,), awaits=(rows_ready,), template=gemm, \
body=(Do(matmul, (gathered, b), c),), tile=(128, 256, 64), order=gather, programs=resident, \
spare=1, gives=True)  # ag.py:7
after(main, copy)
"""

# The plan of gemm_rs where copy engines carry what tiles leave at home, as soon as they say so.
STAGED = """\
program(gemm_rs, mesh=tp, results=(c,))
a = buffer(bfloat16, (m, Part(64)), role=input)
b = buffer(bfloat16, (Part(64), 96), role=input)
partials = buffer(bfloat16, (num_ranks, Part(m), 96), role=symmetric)
staged = buffer(bfloat16, (num_ranks, Tiles(m, 32), 96))
c = buffer(bfloat16, (Part(m), 96))
staged_ready = channel(staged, m, push_rows=32, tile_rows=32, cuts=part, columns=48, to=engine)
partials_ready = channel(partials, m, tile_rows=32, cuts=part, columns=48, to=owner)
launch(multiply, (a, b, partials), writes=(c, staged), awaits=(partials_ready,), \
announces=(staged_ready,), template=gemm, body=(Do(matmul, (a, b), product), \
Do(stage, (product,), staged), Do(reduce_scatter, (product,), c)), tile=(32, 48, 64), \
order=part_by_part, programs=resident, takes=True, gives=True)
copy(staged, partials, owner, partials_ready, stream=send, awaits=staged_ready)
after(main, send)
"""

# The same before that.
STAGED_TASKS = """\
program(gemm_rs, mesh=tp, stage=planned, results=(c,))
a: bfloat16[m, 64] @ Shard(1) = input()
b: bfloat16[64, 96] @ Shard(0) = input()
product: bfloat16[m, 96] @ Partial() = matmul(a, b, tile=(32, 48, 64), \
needs=(Need(a, (Along(0), All())), Need(b, (All(), Along(1)))), kernel=multiply, \
order=part_by_part, programs=resident)
c: bfloat16[m, 96] @ Shard(0) = reduce_scatter(product, dim=0, tile=(32, 48), \
needs=(Need(product, (Along(0), Along(1))),), kernel=multiply, engine=ce_push, chunks=2)
"""

KERNEL = """\
program(ag_gemm_multiply)
own = param(operand)
gathered = param(operand)
b = param(operand)
c = param(operand)
rows_ready = param(signals, by=engine, to=kernel, announces=(gathered,))
slot = param(slot, by=take, to=kernel)
world = param(world)
rows = mapping(static, (gathered,))
template(gemm, (128, 256, 64))
hook(order, gather, (rows,))
wait(ready, rows_ready, tile, rows, unless=own)  # ag.py:9 in mlp via b.py:3
hook(ready, rows_or_own, (gathered, own, rows))
hook(emit, store, (c,))
wait(done, rows_ready, all, rows, by=last)
finish(done, slot)
"""

# Tiles of other ranks' rows are sent to them; theirs are added to own ones.
PUSHING = """\
program(multiply)
a = param(operand)
b = param(operand)
c = param(operand)
partials = param(pointer)
ready = param(signals, by=kernel, to=kernel, announces=(partials,))
slot = param(slot, by=kernel, to=kernel)
world = param(world)
parts = mapping(static, (a,), cuts=part)
template(gemm, (128, 128, 64))
credit(begin, slot)
hook(order, scatter, (parts,))
hook(ready, read_owned, (a, parts))
wait(combine, ready, others, parts)
hook(combine, add_partials, (partials, parts))
hook(emit, store_own, (c, parts))
hook(emit, push, (partials, parts))  # rs.py:7
notify(announce, ready, owner, parts)
finish(end, slot)
"""

# A layer of experts: rows by tables that are made on the device.
MOE = """\
program(moe, mesh=tp, stage=placed, results=(sums,))
x: bfloat16[m, 64] @ Replicate() = input()
logits: bfloat16[m, 8] @ Shard(0) = input()
w: bfloat16[8, 64, 96] @ Shard(2) = input()
routing: table[m, 2, 8] @ Replicate() = moe_route(logits, top_k=2)  # moe.py:5 in moe
rows: bfloat16[Times(m, 2), 64] @ Replicate() = gather_rows(x, routing)
products: bfloat16[Times(m, 2), 96] @ Shard(1) = grouped_matmul(rows, w, routing)
sums: bfloat16[m, 96] @ Shard(1) = scatter_rows(products, routing)
"""

names = st.text("abcxyz_01", min_size=1, max_size=5).filter(
    lambda text: text.isidentifier() and not keyword.iskeyword(text)
)
sizes = st.integers(0, 10**6) | names
_file_names = st.text(min_size=1, max_size=8).filter(lambda text: "\0" not in text)
places = st.just(UNKNOWN) | st.lists(
    st.builds(Frame, _file_names, st.integers(1, 9999), st.just("") | _file_names),
    min_size=1, max_size=3,
).map(lambda frames: Place(tuple(frames)))  # fmt: skip


def several(one: st.SearchStrategy, most: int = 3) -> st.SearchStrategy:
    return st.lists(one, max_size=most).map(tuple)


_placements = st.sampled_from(
    [tensor.Shard(0), tensor.Shard(2), tensor.Replicate(), tensor.Partial(), tensor.ByExpert()]
)
_extents = sizes | st.builds(tensor.Times, names, st.integers(1, 8))
_types = st.none() | st.builds(
    tensor.Type,
    st.sampled_from(["bfloat16", "float32"]),
    st.tuples(_extents, _extents),
    _placements,
)
_floats = st.none() | st.floats(0, 1)
_regions = several(
    st.sampled_from([kinds.All(), kinds.ByTable()])
    | st.builds(kinds.Along, st.integers(0, 1), st.integers(1, 2))
)
tasks = st.builds(
    task.Program, names, names, several(st.builds(
        task.Task, names, st.sampled_from(list(kinds.KINDS)), several(names), _types,
        dim=st.none() | st.integers(0, 1), eps=_floats, top_k=st.none() | st.integers(1, 4),
        head=st.none() | st.sampled_from([2, 64]), base=_floats,
        causal=st.none() | st.booleans(),
        tile=several(st.integers(1, 256)), needs=several(st.builds(kinds.Need, names, _regions)),
        kernel=st.just("") | names, engine=st.just("") | names,
        chunks=st.integers(0, 4) | st.just("tiles"), order=st.just("") | names,
        programs=st.just("") | names, spare=st.integers(0, 2), split_k=st.integers(1, 4),
        place=places,
    ), 6), several(names), st.sampled_from(task.STAGES), places,
    several(st.builds(task.Choice, names, names, names, st.text(max_size=20), places)),
)  # fmt: skip

_parts = st.one_of(
    _extents, st.builds(device.Part, _extents), st.builds(device.Tiles, _extents, st.just(128))
)
_words = {
    device.Buffer: (
        names,
        st.just("float16"),
        several(_parts),
        st.sampled_from(device.ROLES),
        st.just("") | names,
    ),
    device.Channel: (
        names,
        names,
        sizes,
        st.integers(1, 4) | st.just("tiles"),
        st.integers(1, 64),
        st.integers(1, 64),
        st.sampled_from(["whole", "part", "each"]),
        st.integers(0, 256),
        st.sampled_from(["all", "owner", "engine"]),
        st.just("") | names,
        st.sampled_from(["word", "packet"]),
        several(names),
    ),
    device.Call: (
        names,
        several(names),
        several(names),
        names,
        st.none() | st.integers(0, 1),
        _floats,
        st.none() | st.integers(1, 4),
        st.none() | st.sampled_from([2, 64]),
        _floats,
        st.integers(0, 128),
        st.none() | st.booleans(),
    ),
    device.Copy: (
        names,
        names,
        st.sampled_from(["push", "owner"]),
        names,
        names,
        st.just("") | names,
    ),
    device.Launch: (
        names,
        *[several(names)] * 5,
        names,
        st.sampled_from(("", *device.TEMPLATES)),
        several(st.builds(device.Do, names, several(names), names, _floats)),
        several(st.integers(1, 256)),
        names,
        st.sampled_from(device.PROGRAMS),
        st.integers(0, 2),
        st.integers(1, 4),
        st.booleans(),
        st.booleans(),
    ),
    device.Choice: (names, names, names, st.text(max_size=20)),
    device.Wait: (names, names),
    device.Take: (names,),
    device.After: (names, names),
}
plans = st.builds(
    device.Plan, names, names,
    several(st.one_of([st.builds(k, *given, place=places) for k, given in _words.items()]), 6),
    several(names), st.sampled_from(("", *device.STAGES)), places,
)  # fmt: skip

_places = st.sampled_from(list(core.HOOKS))
kernels = st.builds(
    core.Kernel, names, several(st.one_of(
        st.builds(core.Param, names, st.sampled_from(core.SORTS), *[st.just("") | names] * 2,
                  several(names), places),
        st.builds(core.Mapping, names, st.sampled_from(core.MAPPINGS), several(names),
                  place=places),
        st.builds(core.Template, names, several(st.integers(1, 256)), place=places),
        st.builds(core.Hook, _places, names, several(names), places),
        st.builds(core.Wait, _places, names, st.sampled_from(core.FLAGS), names,
                  scope=st.sampled_from(core.SCOPES), place=places),
        st.builds(core.Notify, _places, names, st.sampled_from(core.TO), names, place=places),
        st.builds(core.Credit, _places, names, places),
        st.builds(core.Finish, _places, names, places),
    ), 6), places,
)  # fmt: skip


def rules_of(level: ModuleType) -> ModuleType:
    """Where the rules of a level of the IR are."""
    return {task: task_rules, core: core_rules, device: device_rules}[level]
