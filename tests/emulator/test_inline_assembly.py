"""Inline assembly: what its PTX computes, which threads run it, and that its accesses are seen."""

import inspect

import pytest
import torch
import triton
import triton.language as tl

import weft
from weft.base.errors import (
    DeadlockError,
    EndlessLoopError,
    RaceError,
    SignalError,
    UnsupportedError,
)
from weft.emulator.inline_ptx import read_assembly


def run(main, ranks=1, **options):
    with weft.emulated(ranks=ranks, **options) as session:
        return session.run(main)


def line_of(kernel, words):
    lines, first = inspect.getsourcelines(kernel.fn)
    return first + next(i for i, text in enumerate(lines) if words in text)


@triton.jit
def computes(x, out, text: tl.constexpr):
    i = tl.arange(0, 8)
    value = tl.inline_asm_elementwise(text, "=r,r,r", [tl.load(x + i), i], tl.int32, True, 1)
    tl.store(out + i, value)


X = [7, -7, 0, 1, -1, 2**31 - 1, -(2**31), 100]


def wrapped(value):
    return (value + 2**31) % 2**32 - 2**31


@pytest.mark.parametrize("text, expected", [
    ("mov.b32 $0, $1;", lambda x, i: x),
    ("add.s32 $0, $1, $2;", lambda x, i: x + i),
    ("sub.u32 $0, $1, 0x10;", lambda x, i: x - 16),
    ("mul.lo.s32 $0, $1, $2;", lambda x, i: x * i),
    ("mul.hi.u32 $0, $1, $1;", lambda x, i: (x % 2**32) ** 2 >> 32),
    ("mad.lo.s32 $0, $1, $2, -3;", lambda x, i: x * i - 3),
    ("and.b32 $0, $1, $2;", lambda x, i: x & i),
    ("or.b32 $0, $1, $2;", lambda x, i: x | i),
    ("not.b32 $0, $1;", lambda x, i: ~x),
    ("shl.b32 $0, $1, $2;", lambda x, i: x << i),
    ("shr.s32 $0, $1, $2;", lambda x, i: x >> i),
    ("shr.u32 $0, $1, 40;", lambda x, i: 0),
    ("div.s32 $0, $1, 2;", lambda x, i: abs(x) // 2 * (1 if x >= 0 else -1)),
    ("min.u32 $0, $1, $2;", lambda x, i: min(x % 2**32, i)),
    ("{ .reg .pred p; setp.lt.s32 p, $1, $2; selp.b32 $0, 1, 2, p; }",
     lambda x, i: 1 if x < i else 2),
    ("{ .reg .pred %p<2>; setp.eq.s32 %p0, $1, 0; setp.gt.or.s32 %p1, $1, 9, %p0;\n"
     " mov.u32 $0, 0; @%p1 mov.u32 $0, 5; @!%p1 add.u32 $0, $0, 6; }",
     lambda x, i: 5 if x == 0 or x > 9 else 6),
    ("{ .reg .b64 a; cvt.s64.s32 a, $1; shr.s64 a, a, 4; cvt.u32.u64 $0, a; }",
     lambda x, i: x >> 4),
    ("{ .reg .s64 a; mul.wide.s32 a, $1, $1; shr.u64 a, a, 32; cvt.u32.u64 $0, a; }",
     lambda x, i: x * x >> 32),
    ("{ .reg .u32 n; .reg .pred p; mov.u32 n, 0; mov.u32 $0, $1;\n"
     "again: setp.lt.u32 p, n, $2; @!p bra done; // goes round i times\n"
     " add.u32 $0, $0, 10; add.u32 n, n, 1; bra.uni again; done: }",
     lambda x, i: x + 10 * i),
    ("{ .reg .b16 a, b; mov.b32 {a, b}, $1; mov.b32 $0, {b, a}; }",
     lambda x, i: (x >> 16 & 0xFFFF) | (x & 0xFFFF) << 16),
    ("{ .reg .v4 .b32 %v; mov.v4.b32 %v, $2; add.u32 %v.z, %v.z, $1; add.u32 $0, %v.z, %v.w; }",
     lambda x, i: x + 2 * i),
])  # fmt: skip
def test_what_it_computes(text, expected):
    def main():
        out = torch.empty(8, dtype=torch.int32)
        computes[(1,)](torch.tensor(X, dtype=torch.int32), out, text)
        return out.tolist()

    assert run(main)[0] == [wrapped(expected(x, i)) for i, x in enumerate(X)]


@triton.jit
def pairs_of_pairs(x, out):
    """Eight numbers of 16 bits, loaded by fours, added to themselves, stored by fours."""
    i = tl.arange(0, 2)
    tl.inline_asm_elementwise(
        """
        {
            .reg .v2 .b32 %a;
            ld.global.v2.b32 {%a.x, %a.y}, [$1];
            add.bf16x2 %a.x, %a.x, %a.x;
            add.bf16x2 %a.y, %a.y, %a.y;
            st.global.v2.b32 [$2], {%a.x, %a.y};
            mov.u32 $0, 0;
        }
        """,
        "=r,l,l", [x + 4 * i, out + 4 * i], tl.int32, False, 1,
    )  # fmt: skip


def test_vectors_are_loaded_added_and_stored():
    def main():
        x = torch.arange(8, dtype=torch.bfloat16) + 0.5
        out = torch.zeros(8, dtype=torch.bfloat16)
        pairs_of_pairs[(1,)](x, out)
        return out.tolist()

    assert run(main)[0] == [2 * n + 1.0 for n in range(8)]


@triton.jit
def computes_floats(x, y, out, TEXT: tl.constexpr):
    i = tl.arange(0, 8)
    a, b = tl.load(x + i), tl.load(y + i)
    tl.store(out + i, tl.inline_asm_elementwise(TEXT, "=f,f,f", [a, b], tl.float32, True, 1))


@pytest.mark.parametrize("text, expected", [
    ("add.f32 $0, $1, $2;", lambda a, b: a + b),
    ("sub.rn.ftz.f32 $0, $1, $2;", lambda a, b: a - b),
    ("fma.rn.f32 $0, $1, $2, $1;", lambda a, b: (a.double() * b.double() + a.double()).float()),
    ("max.f32 $0, $1, $2;", torch.maximum),
    ("{ .reg .f32 n; ex2.approx.ftz.f32 n, $1; rcp.approx.f32 $0, n; }", lambda a, b: 2.0**-a),
])  # fmt: skip
def test_what_it_computes_of_numbers(text, expected):
    x, y = torch.linspace(-3, 3, 8), torch.linspace(7, -2, 8)

    def main():
        out = torch.empty(8)
        computes_floats[(1,)](x, y, out, text)
        return out

    torch.testing.assert_close(run(main)[0], expected(x, y), rtol=1e-6, atol=0)


@pytest.mark.parametrize("text, why", [
    ("ex2.approx.f64 $0, $1;", "integers and some of f32"),
    ("multimem.red.relaxed.sys.global.add.u32 [$1], 1;", "not among the instructions"),
    ("add.u32 $0, $1, %r1;", "no register that .reg declares"),
    ("bra nowhere;", "no such label"),
    ("ld.shared.u32 $0, [$1];", "no .shared of ld"),
    ("ld.release.sys.u32 $0, [$1];", "no order .release"),
    ("ld.acquire.u32 $0, [$1];", "says its scope"),
    ("atom.add.sys.u32 $0, [$1];", "does not take 0 values"),
    ("fence.acq_rel.cluster;", "not cta, gpu or sys"),
    ("add.u32 $0, $1, 1", "semicolon"),
])  # fmt: skip
def test_what_is_refused_says_the_ptx_and_the_kernels_line(text, why):
    def main():
        zeros = torch.zeros(8, dtype=torch.int32)
        computes[(1,)](zeros, zeros, text)

    with pytest.raises(UnsupportedError, match="inline assembly") as caught:
        run(main)
    assert why in str(caught.value) and text.rstrip(";") in str(caught.value)
    assert caught.value.place.outermost.line == line_of(computes, "inline_asm")


def test_one_text_is_read_once():
    assert read_assembly("bar.sync 0;", "=r") is read_assembly("bar.sync 0;", "=r")


# ---------------------------------------------------------------------------------------------
# Threads


@triton.jit
def thread():
    return tl.inline_asm_elementwise("mov.u32 $0, %tid.x;", "=r", [], tl.int32, True, 1)


@triton.jit
def threads():
    return tl.inline_asm_elementwise("mov.u32 $0, %ntid.x;", "=r", [], tl.int32, True, 1)


@triton.jit
def increment(word):
    tl.inline_asm_elementwise(
        "red.release.gpu.global.add.u32 [$1], 1;", "=r,l", [word], tl.int32, False, 1
    )


@triton.jit
def by_threads(x, n: tl.constexpr, how: tl.constexpr):
    if how == "all":
        increment(x)
    elif how == "first":
        if thread() == 0:
            increment(x)
    elif how == "some":
        if thread() < n:
            increment(x + tl.arange(0, n))
    elif how == "too few":
        if thread() < n - 1:
            increment(x + tl.arange(0, n))
    elif how == "tile by all":
        increment(x + tl.arange(0, n))
    elif how == "each its own":
        if thread() < n:
            increment(x + thread())
    elif how == "each from a table":
        if thread() < n:
            increment(tl.load(x.to(tl.pointer_type(tl.uint64)) + thread()).to(x.dtype))
    elif how == "either way":
        value = 1
        if thread() < n:
            value = thread() + 2
        if value == n + 1:
            increment(x)
        elif value == 1:
            increment(x + 1)
    elif how == "in a loop":
        left = n - thread()
        while left > 0:
            increment(x + left)
            left -= 1
    tl.store(x + n + 1, threads())


@pytest.mark.parametrize("how, expected", [
    ("all", [64, 0, 0, 0, 0]),
    ("first", [1, 0, 0, 0, 0]),
    ("some", [1, 1, 1, 1, 0]),
    ("too few", [1, 1, 1, 0, 0]),
    ("tile by all", [16, 16, 16, 16, 0]),
    ("each its own", [1, 1, 1, 1, 0]),
    ("either way", [1, 60, 0, 0, 0]),
    ("in a loop", [0, 4, 3, 2, 1]),
])  # fmt: skip
def test_which_threads_run_it(how, expected):
    def main():
        x = torch.zeros(6, dtype=torch.int32)
        by_threads[(1,)](x, 4, how, num_warps=2)
        return x.tolist()

    assert run(main)[0] == [*expected, 64]


def test_each_thread_reads_its_own_address():
    def main():
        words = torch.zeros(4, dtype=torch.int32)
        table = torch.tensor([word.data_ptr() for word in words.split(1)])
        keep = torch.cat([table, torch.zeros(8, dtype=torch.int64)]).view(torch.int32)
        by_threads[(1,)](keep, 4, "each from a table")
        return words.tolist()

    assert run(main)[0] == [1, 1, 1, 1]


@triton.jit
def stores_by_thread(x):
    tl.store(x + thread(), 1)  # HERE


@triton.jit
def spreads_a_thread(x):
    i = tl.arange(0, 8)
    tl.store(x + i, i + thread())  # HERE


@pytest.mark.parametrize("kernel", [stores_by_thread, spreads_a_thread], ids=str)
def test_what_depends_on_the_thread_goes_no_further(kernel):
    with pytest.raises(UnsupportedError, match="each thread") as caught:
        run(lambda: kernel[(1,)](torch.zeros(8, dtype=torch.int32)))
    assert caught.value.place.outermost.line == line_of(kernel, "HERE")


@triton.jit
def turns_for_ever():
    tl.inline_asm_elementwise("again: bra again;", "=r", [], tl.int32, False, 1)


def test_a_loop_without_memory_is_endless(monkeypatch):
    monkeypatch.setenv("WEFT_ENDLESS_TURNS", "65536")
    with pytest.raises(EndlessLoopError):
        run(lambda: turns_for_ever[(1,)]())


# ---------------------------------------------------------------------------------------------
# Memory: ranks that meet by words


@triton.jit
def send(words, order: tl.constexpr):
    tl.inline_asm_elementwise(
        f"""
        {{
            .reg .u32 %seen<1>;
            .reg .pred %p<1>;
            send_signal:
                atom.global.{order}.sys.cas.b32 %seen0, [$1], 0, 1;
                setp.eq.u32 %p0, %seen0, 0;
                @!%p0 bra send_signal;
        }}
        """,
        "=r, l", [words], tl.int32, False, 1,
    )  # fmt: skip


@triton.jit
def await_one(words, order: tl.constexpr):
    tl.inline_asm_elementwise(
        f"""
        {{
            .reg .u32 %seen<1>;
            .reg .pred %p<1>;
            wait_signal:
                atom.global.sys.{order}.cas.b32 %seen0, [$1], 1, 0;
                setp.eq.u32 %p0, %seen0, 1;
                @!%p0 bra wait_signal;
        }}
        """,
        "=r, l", [words], tl.int32, False, 1,
    )  # fmt: skip


@triton.jit
def meets(data, pads, out, rank, ranks: tl.constexpr, fault: tl.constexpr):
    """Write to the next rank, meet all by compare-and-swap, read; twice."""
    i, peers = tl.arange(0, 8), tl.arange(0, ranks)
    pads = tl.load(pads + peers).to(tl.pointer_type(tl.int32))
    mine = tl.sum(tl.where(peers == rank, pads.to(tl.int64), 0)).to(tl.pointer_type(tl.int32))
    there = tl.load(data + (rank + 1) % ranks).to(tl.pointer_type(tl.int32))
    here = tl.load(data + rank).to(tl.pointer_type(tl.int32))
    for turn in range(2):
        tl.store(there + i, rank + turn + i)  # WRITE
        tl.debug_barrier()
        if thread() < ranks:
            if fault != "no signal":
                send(pads + rank, "relaxed" if fault == "relaxed" else "release")
            if fault != "no wait":
                await_one(mine + peers, "acquire")  # MEETS
        tl.debug_barrier()
        tl.store(out + turn * 8 + i, tl.load(here + i))  # READ
        if fault != "no second meeting":
            if thread() < ranks:
                send(pads + ranks + rank, "release")
                await_one(mine + ranks + peers, "acquire")


def meet(fault, ranks, seed=0):
    def main():
        world = weft.init()
        data, pad = world.empty((8,), torch.int32), world.signals(2 * ranks)
        data.zero_()
        world.barrier()
        out = torch.empty(2, 8, dtype=torch.int32)
        tables = world.pointers(data), world.pointers(pad)
        meets[(1,)](*tables, out, world.rank, ranks, fault)
        turns = torch.arange(2)[:, None] + torch.arange(8) + (world.rank - 1) % ranks
        assert torch.equal(out, turns.int())

    run(main, ranks, seed=seed)


@pytest.mark.parametrize("ranks, seed", [(2, 0), (4, 1), (4, 2), (8, 3)])
def test_a_barrier_by_compare_and_swap(ranks, seed):
    meet("", ranks, seed)


@pytest.mark.parametrize("fault, error, words", [
    ("no signal", DeadlockError, "MEETS"),
    ("no wait", RaceError, "READ"),
    ("relaxed", RaceError, "READ"),
    ("no second meeting", RaceError, "WRITE"),
])  # fmt: skip
def test_its_faults_are_found(fault, error, words):
    with pytest.raises(error) as caught:
        meet(fault, 2)
    assert f"test_inline_assembly.py:{line_of(meets, words)}" in str(caught.value)


@triton.jit
def fences(data, word, out, rank, fault: tl.constexpr):
    i = tl.arange(0, 8)
    if rank == 0:
        there = tl.load(data + 1).to(tl.pointer_type(tl.int32))
        tl.store(there + i, i)
        if fault != "sender":
            tl.inline_asm_elementwise("fence.acq_rel.sys;", "=r", [], tl.int32, False, 1)
        there = tl.load(word + 1).to(tl.pointer_type(tl.int32))
        tl.inline_asm_elementwise(
            "st.relaxed.sys.global.u32 [$1], 1;", "=r,l", [there], tl.int32, False, 1
        )
    else:
        here = tl.load(word + 1).to(tl.pointer_type(tl.int32))
        tl.inline_asm_elementwise(
            "{ .reg .pred p; spin: ld.volatile.global.u32 $0, [$1];"
            " setp.ne.u32 p, $0, 1; @p bra spin; }",
            "=r,l", [here], tl.int32, False, 1,
        )  # fmt: skip
        if fault == "narrow":
            tl.inline_asm_elementwise("membar.gl;", "=r", [], tl.int32, False, 1)
        elif fault != "receiver":
            tl.inline_asm_elementwise("membar.sys;", "=r", [], tl.int32, False, 1)
        here = tl.load(data + 1).to(tl.pointer_type(tl.int32))
        tl.store(out + i, tl.load(here + i))  # READ


def send_behind_a_fence(fault):
    def main():
        world = weft.init()
        data, word = world.empty((8,), torch.int32), world.signals(1)
        out = torch.zeros(8, dtype=torch.int32)
        fences[(1,)](world.pointers(data), world.pointers(word), out, world.rank, fault)
        assert world.rank == 0 or out.tolist() == list(range(8))

    run(main, 2)


def test_fences_order_relaxed_words():
    send_behind_a_fence("")


@pytest.mark.parametrize("fault", ["sender", "receiver", "narrow"])
def test_a_fence_that_is_missing_or_too_narrow(fault):
    with pytest.raises(RaceError, match="relaxed|scope") as caught:
        send_behind_a_fence(fault)
    assert f"test_inline_assembly.py:{line_of(fences, 'READ')}" in str(caught.value)


@triton.jit
def spins_plainly(x, n: tl.constexpr):
    tl.inline_asm_elementwise(
        "{ .reg .pred p; spin: ld.global.u32\t$0, [$1]; setp.eq.u32 p, $0, 0; @p bra spin; }",
        "=r,l", [x if n == 0 else x + tl.arange(0, n)], tl.int32, False, 1,
    )  # fmt: skip


@pytest.mark.parametrize("n", [0, 4])
def test_a_spin_on_plain_loads_is_found(n):
    with pytest.raises(SignalError, match="plain loads"):
        run(lambda: spins_plainly[(1,)](torch.zeros(4, dtype=torch.int32), n))
