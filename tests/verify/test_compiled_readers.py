"""The readers under the post-compile check, each on a few lines of text; and the flow graph."""

from __future__ import annotations

import pytest
import triton
import triton.language as tl
from compiled_kernels import build

from weft.base.records import KernelRecord
from weft.base.target import TARGETS
from weft.ir.ttir import Op
from weft.language import triton_api
from weft.verify import compiled, flow, ptx, ttgir
from weft.verify.places import AssemblyLines, key_of, place_of
from weft.verify.waits import find_waits

TTIR = """
#loc = loc("/src/k.py":10:0)
#loc7 = loc("p"(#loc))
module {
  tt.func public @k(%p: !tt.ptr<i32> {tt.divisibility = 16 : i32} loc("p"(#loc)), %n: i32 loc("n"(#loc))) attributes {noinline = false} {
    %c0_i32 = arith.constant 0 : i32 loc(#loc1)
    %true = arith.constant true loc(#loc1)
    scf.while : () -> () {
      %1 = tt.atomic_rmw add, acquire, sys, %p, %c0_i32, %true : (!tt.ptr<i32>, i32, i1) -> i32 loc(#loc4)
      %2 = arith.cmpi slt, %1, %n : i32 loc(#loc4)
      scf.condition(%2) loc(#loc4)
    } do {
      scf.yield loc(#loc4)
    } loc(#loc4)
    %x:2 = scf.for %i = %c0_i32 to %n step %n iter_args(%q = %p, %s = %c0_i32) -> (!tt.ptr<i32>, i32)  : i32 {
      %1 = tt.addptr %q, %i : !tt.ptr<i32>, i32 loc(#loc2)
      %3 = tt.load %1 : !tt.ptr<i32> loc(#loc3)
      scf.yield %1, %3 : !tt.ptr<i32>, i32 loc(#loc2)
    } loc(#loc2)
    %y = scf.if %true -> (i32) {
      scf.yield %x#1 : i32 loc(#loc2)
    } else {
      scf.yield %n : i32 loc(#loc2)
    } loc(#loc2)
    tt.store %x#0, %y : !tt.ptr<i32> loc(#loc5)
    tt.return loc(#loc)
  } loc(#loc)
} loc(#loc)
#loc1 = loc(unknown)
#loc2 = loc("/src/k.py":12:3)
#loc3 = loc("x"(callsite(#loc2 at #loc6)))
#loc4 = loc("/src/k.py":11:4)
#loc5 = loc(fused[#loc1, #loc2])
#loc6 = loc("/src/user.py":40:1)
"""  # noqa: E501


def operations(text: str, name: str) -> list[Op]:
    return [one for one in ttgir.parse(text).kernel.walk() if one.name == name]


def test_places_with_columns_the_innermost_first():
    (load,) = operations(TTIR, "tt.load")
    assert load.chain == (("/src/k.py", 12, 3), ("/src/user.py", 40, 1))
    (store,) = operations(TTIR, "tt.store")
    assert store.chain == (("/src/k.py", 12, 3),)
    place = place_of(load.chain)
    assert (place.outermost.file, place.outermost.line) == ("/src/user.py", 40)
    assert key_of(store.chain) == (("k.py", 12, 3),)


def test_places_in_assembly_comments():
    lines = AssemblyLines("", {"k.py": "/src/k.py"})
    (loc,) = lines.read(".loc 1 12 3 // k.py:12:3 @[ user.py:40:1 @[ main.py:7 ] ]")
    assert loc == (("/src/k.py", 12, 3), ("user.py", 40, 1), ("main.py", 7, 0))


def test_places_in_assembly_that_says_inlined_at():
    text = """
    .loc 2 40 1 // user.py:40:1
    .loc 1 20 5, function_name $L__info_string0, inlined_at 2 40 1 // k.py:20:5
    .loc 1 12 3, function_name $L__info_string0, inlined_at 1 20 5 // k.py:12:3
    .loc 1 20 5, function_name $L__info_string0, inlined_at 2 50 1 // k.py:20:5
    .loc 2 50 1 // user.py:50:1
    .file 1 "/src" "k.py"
    .file 2 "/src/user.py"
    """
    inner = (("k.py", 12, 3), ("k.py", 20, 5))
    known = {(*inner, ("user.py", line, 1)) for line in (40, 50, 60)}
    lines = AssemblyLines(text, {"k.py": "/src/k.py"}, known)
    rows = text.splitlines()
    chains = [
        (("/src/k.py", 12, 3), ("/src/k.py", 20, 5), ("user.py", line, 1)) for line in (40, 50)
    ]
    for line in rows[1:3]:
        lines.read(line)
    assert list(lines.read(rows[3])) == chains
    lines.read(rows[4])
    assert list(lines.read(rows[3])) == chains[::-1]  # the one told last comes first
    # A place that no stage before had: as it was told last.
    assert lines.read(rows[4]) == (chains[1][1:],)
    assert lines.read(rows[1]) == ((("user.py", 40, 1),),)


@pytest.mark.parametrize("depth", [1, 9])
def test_places_of_a_function_that_calls_itself(depth):
    """However deep: the assembly says of each call no more than where it was inlined."""
    inside, outside = ("k.py", 20, 5), ("user.py", 40, 1)
    text = """
    .file 1 "k.py"
    .file 2 "user.py"
    .loc 2 40 1
    .loc 1 20 5, function_name $L__info_string0, inlined_at 2 40 1
    .loc 1 20 5, function_name $L__info_string0, inlined_at 1 20 5
    .loc 1 12 3, function_name $L__info_string0, inlined_at 1 20 5
    """
    chain = (("k.py", 12, 3), *[inside] * depth, outside)
    lines = AssemblyLines(text, {}, {chain})
    assert [lines.read(line) for line in text.splitlines()][6] == (chain,)


def test_where_values_and_addresses_come_from():
    function = ttgir.parse(TTIR).kernel
    assert function.name == "k" and [one.name for one in function.arguments] == ["p", "n"]
    (loop,) = (one for one in function.walk() if one.name == "scf.for")
    assert [one.name for one in loop.operands] == ["c0_i32", "n", "n", "p", "c0_i32"]
    assert [one.name for one in loop.results] == ["x#0", "x#1"]
    assert [one.name for one in loop.regions[0].args] == ["i", "q", "s"]
    (load,) = (one for one in function.walk() if one.name == "tt.load")
    assert list(function.ancestors(load)) == [loop] and function.bases(load.operands[0]) == {0}
    (store,) = (one for one in function.walk() if one.name == "tt.store")
    assert function.bases(store.operands[0]) == {0}
    assert function.slice(store.operands[1]) >= set(function.arguments)


def test_names_that_sibling_regions_share_are_told_apart():
    (add,) = operations(TTIR, "tt.addptr")
    (atomic,) = operations(TTIR, "tt.atomic_rmw")
    assert add.result.name == atomic.result.name == "1" and add.result is not atomic.result


def test_regions_of_warps_are_those_of_their_operation():
    text = """
  tt.func public @k(%p: !tt.ptr<i32>) {
    ttg.warp_specialize(%p)
    default {
      ttg.warp_yield loc(#loc)
    }
    partition0(%q: !tt.ptr<i32>) num_warps(4) {
      %1 = tt.load %q : !tt.ptr<i32> loc(#loc)
      ttg.warp_return loc(#loc)
    } : (!tt.ptr<i32>) -> () loc("k.py":3:1)
    tt.return
  }
"""
    function = ttgir.parse(text).kernel
    (load,) = (one for one in function.walk() if one.name == "tt.load")
    (split,) = function.ancestors(load)
    assert function.bases(load.operands[0]) == {0}
    assert len(split.regions) == 2 and split.chain == (("k.py", 3, 1),)


def test_a_spin_is_a_wait_and_a_loop_over_data_is_none():
    (wait,) = find_waits(ttgir.parse(TTIR).kernel)
    assert wait.ordered and wait.at.name == "scf.condition"
    assert wait.keys == {(("k.py", 11, 4),)}
    counting = TTIR.replace("%p, %c0_i32, %true", "%p, %n, %true")  # adds n: a work counter
    assert not find_waits(ttgir.parse(counting).kernel)


PTX = """
.visible .entry k(
  .param .u64 k_param_0,
  .param .u64 k_param_1
)
.reqntid 128
{
  .reg .pred %p<9>;
  ld.param.b64 %rd1, [k_param_0];
  ld.param.b64 %rd2, [k_param_1];
  .loc 1 5 3 // k.py:5:3
$L__BB0_1:
  // begin inline asm
  {
  .reg .pred done;
  spin: ld.acquire.sys.global.b32 %r1, [%rd1]; setp.ge.s32 done, %r1, 1; @!done bra spin;
  }
  // end inline asm
  // begin inline asm
  { spin: mbarrier.try_wait.shared.b64 %p1, [%r2], 0; @!%p1 bra.uni spin; }
  // end inline asm
  .loc 1 6 3 // k.py:6:3
  add.s64 %rd3, %rd2, 16;
  @%p2 ld.global.v4.b32 {%r3, %r4, %r5, %r6}, [%rd3+0];
  cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd4, {%r1, %r2}], [%r3];
  cp.async.bulk.wait_group.read 0;
  cp.async.bulk.wait_group 0;
  bar.sync 0;
  @%p3 bra $L__BB0_1;
  st.global.b16 [%rd3], %rs1;
  ret;
}
"""


def test_ptx_labels_live_in_their_braces():
    program = ptx.parse(PTX, {})
    ops = [one.opcode for one in program.instructions]
    poll, try_wait = (
        ops.index("ld.acquire.sys.global.b32"),
        ops.index("mbarrier.try_wait.shared.b64"),
    )
    first, second = (i for i, op in enumerate(ops) if op.startswith("bra") and i < try_wait + 2)
    assert poll in program.successors[first] and try_wait in program.successors[second]
    back = next(i for i in range(len(ops)) if program.instructions[i].target == "$L__BB0_1")
    assert set(program.successors[back]) == {poll, back + 1}
    assert program.successors[len(ops) - 1] == []


def test_ptx_instructions_know_what_they_do():
    program = ptx.parse(PTX, {})
    by_opcode = {one.opcode: one for one in program.instructions}
    poll = by_opcode["ld.acquire.sys.global.b32"]
    assert (poll.order, poll.scope, poll.is_global, poll.asm_block) == ("acquire", "sys", True, 1)
    load = by_opcode["ld.global.v4.b32"]
    assert load.predicate == "%p2" and program.parameters(load) == {1}
    bulk = by_opcode["cp.async.bulk.tensor.2d.global.shared::cta.bulk_group"]
    assert bulk.copies == "out" and not bulk.completes_bulk
    assert not by_opcode["cp.async.bulk.wait_group.read"].completes_bulk
    assert by_opcode["cp.async.bulk.wait_group"].completes_bulk
    assert by_opcode["bar.sync"].is_barrier
    assert load.key == (("k.py", 6, 3),)


def chain(*nodes: flow.Node) -> flow.Graph:
    graph = flow.Graph()
    for node in (flow.Node(flow.JOINT), *nodes):
        graph.add(node)
    for index in range(len(nodes)):
        graph.connect(index, index + 1)
    return graph


def test_a_way_around_the_wait_leaves_the_load_unguarded():
    graph = chain(flow.Node(flow.WAIT, 0), flow.Node(flow.LOAD, "x"))
    assert flow.waits_before(graph) == {"x": {0}}
    graph.connect(0, 2)
    assert flow.waits_before(graph) == {"x": frozenset()}


def test_wait_and_load_under_one_condition_belong_together():
    graph = flow.Graph()
    for node in (
        flow.Node(flow.JOINT),
        flow.Node(flow.WAIT, 0),
        flow.Node(flow.LOAD, "x", guards=frozenset({"c"})),
    ):
        graph.add(node)
    graph.connect(0, 1, ("c", True))
    graph.connect(0, 2, ("c", False))
    graph.connect(1, 2)
    assert flow.waits_before(graph) == {"x": {0}}


def test_what_lies_between_two_runs():
    wait, load, store = flow.Node(flow.WAIT, 0, "w"), flow.Node(flow.LOAD, "x"), flow.Node("store")
    graph = chain(wait, load, store)
    graph.connect(3, 1)
    assert flow.waits_between(graph) == {"x": {0}}
    assert flow.stores_between(graph) == {0: {("w", "w"): {None}}}
    graph.connect(2, 2)
    assert flow.waits_between(graph) == {"x": frozenset()}


@triton.jit
def loops(p, q, n):
    i = tl.arange(0, 128)
    seen = tl.atomic_add(p, 0, sem="acquire", scope="sys")
    while seen < n:
        seen = tl.atomic_add(p, 0, sem="acquire", scope="sys")
    turn = 0
    while tl.load(p + turn) > 0:
        turn += 1
    while tl.atomic_xchg(p + 1, 1, sem="acquire") == 1:
        pass
    tile = tl.atomic_add(p + 2, 1)
    while tile < n:
        tl.store(q + tile * 128 + i, turn)
        tile = tl.atomic_add(p + 2, 1)


def test_which_loops_are_waits():
    """A first look before the loop belongs to it; a lock is a wait; a search is none."""
    record = KernelRecord("loops", {"p": "*i32", "q": "*i32", "n": "i32"})
    asm = triton_api.compile_kernel(loops, record, TARGETS["cuda:90"]).asm
    first, lock = find_waits(ttgir.parse(asm["ttir"]).kernel)
    assert len(first.polls) == 2 and len(lock.polls) == 1
    assert compiled(dict(asm), "cuda:90").waits == {"ttir": 2, "ttgir": 2, "ptx": 2}


def test_every_operation_of_a_real_kernel_is_read():
    import compiled_kernels as kernels

    asm = build(kernels.fused, "cuda:90", BULK_LOAD=True, BULK_STORE=True).asm
    for stage in ("ttir", "ttgir"):
        function = ttgir.parse(asm[stage]).kernel
        known = {*function.arguments, *function.definitions, *function.sources}
        regions = [region for one in function.walk() for region in one.regions]
        known |= {arg for region in regions for block in region.blocks for arg in block.args}
        for operation in function.walk():
            assert operation.name.split(".")[0] in {
                "tt", "ttg", "ttng", "arith", "scf", "gpu", "math", "ub",
            }, operation.text  # fmt: skip
            assert set(operation.operands) <= known, operation.text
