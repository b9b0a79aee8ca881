"""Control flow, calls, places and what a kernel asks of its runtime."""

import inspect
import re

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from front_runtime import Runtime, launch, ttir

from weft.base.errors import CompileError, UnsupportedError
from weft.emulator.codegen import compile_ttir
from weft.ir import ttir as text_of
from weft.ir import ttir_locations
from weft.language import triton_api


@triton.jit
def loops_kernel(out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int32)
    a, b = 0, 1
    for j in range(0, n, 3):
        a, b = b, a + b
        for k in tl.range(j):
            total += i * k
    while a < 1000:
        a, b = b, a + b
        total += 1
    tl.store(out + i, total)
    tl.store(out + BLOCK, a)
    tl.store(out + BLOCK + 1, b)


def test_loops_with_carried_values():
    out = torch.zeros(18, dtype=torch.int32)
    launch(loops_kernel, out, 20, BLOCK=16)
    a, b, total = 0, 1, torch.zeros(16, dtype=torch.int32)
    for j in range(0, 20, 3):
        a, b = b, a + b
        total += torch.arange(16, dtype=torch.int32) * sum(range(j))
    while a < 1000:
        a, b = b, a + b
        total += 1
    assert out.tolist() == [*total.tolist(), a, b]


@triton.jit
def branches_kernel(x, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    v = tl.load(x + i)
    if n > 3:
        if n > 5:
            scale = v * 2
            shift = n
        else:
            scale = v + 1
            shift = 100
    else:
        scale = tl.full((BLOCK,), 7, tl.int32)
        shift = -n
    if n == 4:
        tl.store(out + BLOCK, n)
    for j in range(n):
        if j % 2 == 0:
            scale += j
        else:
            shift += j
    tl.store(out + i, scale + shift)


@pytest.mark.parametrize("n", [2, 4, 6])
def test_nested_branches_with_results(n):
    x = torch.arange(16, dtype=torch.int32) * 3
    out = torch.full((17,), -1, dtype=torch.int32)
    launch(branches_kernel, x, out, n, BLOCK=16)
    scale, shift = (x * 2, n) if n > 5 else (x + 1, 100) if n > 3 else (torch.full((16,), 7), -n)
    scale = scale + sum(range(0, n, 2))
    shift += sum(range(1, n, 2))
    assert torch.equal(out[:16], (scale + shift).int())
    assert out[16] == (4 if n == 4 else -1)


@triton.jit
def early_return_kernel(out, n):
    pid = tl.program_id(0)
    if pid >= n:
        return
    tl.store(out + pid, pid + 1)
    if pid == 1:
        return
    tl.store(out + pid, pid * 10)


def test_early_return():
    out = torch.zeros(4, dtype=torch.int32)
    launch(early_return_kernel, out, 3, grid=(4,))
    assert out.tolist() == [0, 2, 20, 0]


@triton.jit(noinline=True)
def both(x, y):
    return x + y, x - y


@triton.jit
def call_kernel(x, out, BLOCK: tl.constexpr):
    v = tl.load(x + tl.arange(0, BLOCK))
    a, b = both(tl.sum(v), tl.max(v))
    c, d = both(a, b)
    tl.store(out, c * d)


def test_functions_that_were_not_inlined():
    x, out = torch.randn(16), torch.zeros(1)
    kernel = launch(call_kernel, x, out, BLOCK=16)
    a, b = x.sum() + x.max(), x.sum() - x.max()
    torch.testing.assert_close(out[0], (a + b) * (a - b))
    assert "def both(rt, x, y):" in kernel.source


@triton.jit
def library_kernel(x, out, index, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    v = tl.load(x + i)
    tl.store(out + i, tl.sort(v))
    tl.store(out + BLOCK + i, tl.cumsum(v))
    tl.store(out + 2 * BLOCK + i, tl.softmax(v))
    tl.store(out + 3 * BLOCK + i, tl.sigmoid(v))
    tl.store(out + 4 * BLOCK + i, tl.flip(v, 0))
    tl.store(index, tl.argmax(v, 0))
    tl.store(index + 1, tl.argmin(v, 0))
    tl.store(index + 2, tl.cdiv(n, 3))
    tl.store(index + 3, -n // 3)
    tl.store(index + 4, -n % 3)
    tl.store(index + 5, tl.sum((v > 0).to(tl.int32)))


def test_the_tl_library():
    x = torch.randn(32)
    out, index = torch.zeros(5, 32), torch.zeros(6, dtype=torch.int32)
    launch(library_kernel, x, out, index, 10, BLOCK=32)
    expected = [
        x.sort().values, x.cumsum(0), torch.softmax(x, 0), torch.sigmoid(x), x.flip(0),
    ]  # fmt: skip
    torch.testing.assert_close(out, torch.stack(expected))
    assert index.tolist() == [int(x.argmax()), int(x.argmin()), 4, -3, -1, int((x > 0).sum())]


@triton.jit
def first_larger(a, b):
    if a > b:
        r = a
    else:
        r = b
    return r


@triton.jit
def custom_reduce_kernel(x, out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    v = tl.load(x + i[:, None] * BLOCK + i[None, :])
    tl.store(out + i, tl.reduce(v, 1, first_larger))
    tl.store(out + BLOCK + i, tl.reduce(v, 0, first_larger))


def test_a_reduction_with_branches_in_it():
    x, out = torch.randn(16, 16), torch.zeros(2, 16)
    launch(custom_reduce_kernel, x, out, BLOCK=16)
    torch.testing.assert_close(out, torch.stack([x.amax(1), x.amax(0)]))


@triton.jit
def random_kernel(out, seed, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.rand(seed, i))


def test_random_numbers_are_tritons():
    out = torch.zeros(64)
    launch(random_kernel, out, 123, BLOCK=64)
    # Philox by Python integers.
    expected = [philox_uniform(123, offset) for offset in range(64)]
    np.testing.assert_array_equal(out.numpy(), np.array(expected, np.float32))


def philox_uniform(seed, offset):
    mask = (1 << 32) - 1
    c, k = [offset, 0, 0, 0], [seed & mask, seed >> 32]
    for _ in range(10):
        p, q = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(q >> 32) ^ c[1] ^ k[0], q & mask, (p >> 32) ^ c[3] ^ k[1], p & mask]
        k = [(k[0] + 0x9E3779B9) & mask, (k[1] + 0xBB67AE85) & mask]
    value = c[0] - (1 << 32) if c[0] >> 31 else c[0]
    value = -value - 1 if value < 0 else value
    return np.float32(value) * np.float32(4.6566127342e-10)


# ---------------------------------------------------------------------------------------------
# What the runtime is asked


class Recorder(Runtime):
    """Notes every call with its place."""

    calls: list = []

    def load(self, ptr, mask, other, dtype, shape, loc, volatile=False):
        self.calls.append(("load", loc, mask, volatile))
        return super().load(ptr, mask, other, dtype, shape, loc)

    def atomic_rmw(self, op, sem, scope, ptr, value, mask, dtype, shape, loc):
        self.calls.append(("atomic", op, sem, scope, mask))
        return super().atomic_rmw(op, sem, scope, ptr, value, mask, dtype, shape, loc)

    def atomic_red(self, sem, scope, ptr, value, mask, dtype, shape, loc):
        self.calls.append(("red", sem, scope))
        super().atomic_rmw("add", sem, scope, ptr, value, mask, dtype, shape, loc)

    def atomic_cas(self, sem, scope, ptr, compare, value, dtype, shape, loc):
        self.calls.append(("cas", sem, scope))
        return super().atomic_cas(sem, scope, ptr, compare, value, dtype, shape, loc)

    def extern(self, symbol, args, dtype, shape, loc):
        self.calls.append((symbol, [np.asarray(arg).tolist() for arg in args], dtype, shape))
        return args[0] if symbol == "weft.at" else dtype.type(1)

    def print_(self, prefix, values, loc):
        self.calls.append((prefix, [np.asarray(value).tolist() for value in values]))


@pytest.fixture
def recorder():
    Recorder.calls = []
    return Recorder


@triton.jit
def atomics_kernel(x, f, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.atomic_add(x + i, 2, mask=i < n, sem="relaxed", scope="gpu"))
    tl.atomic_xchg(x, 9, sem="release", scope="sys")
    tl.atomic_add(f, 1.5)
    tl.atomic_cas(x + 1, 2, 50, sem="acquire", scope="cta")
    tl.atomic_max(x + 2, -5)
    tl.atomic_add(x + 7, 1, sem="release", scope="gpu")  # nobody gets what it held
    while tl.atomic_add(x, 0, sem="acquire", scope="sys") < 9:
        pass


def test_atomics(recorder):
    x, f = torch.zeros(8, dtype=torch.int32), torch.zeros(1)
    out = torch.zeros(8, dtype=torch.int32)
    launch(atomics_kernel, x, f, out, 4, runtime=recorder, BLOCK=8)
    assert x.tolist() == [9, 50, 2, 2, 0, 0, 0, 1] and f.item() == 1.5
    kinds = [call[:4] for call in recorder.calls if call[0] != "load"]
    assert kinds == [
        ("atomic", "add", "relaxed", "gpu"), ("atomic", "exch", "release", "sys"),
        ("atomic", "fadd", "acq_rel", "gpu"), ("cas", "acquire", "cta"),
        ("atomic", "max", "acq_rel", "gpu"), ("red", "release", "gpu"),
        ("atomic", "add", "acquire", "sys"),
    ]  # fmt: skip
    # A mask that is always on is no mask.
    masks = [call[4] for call in recorder.calls if call[:2] == ("atomic", "exch")]
    assert masks == [None]


@triton_api.builtin
def weft_at(ptr, peer, _semantic=None):
    return triton_api.extern(
        _semantic,
        "weft.at",
        [ptr, ptr, peer],
        ptr.type.scalar,
        ptr.type.shape if ptr.type.is_block() else (),
    )


@triton_api.builtin
def weft_wait(ptr, at_least, _semantic=None):
    return triton_api.extern(_semantic, "weft.wait:acquire.sys", [ptr, at_least, 1], tl.int32)


@triton.jit
def extern_kernel(x, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    token = weft_wait(x, 3)
    v = tl.load(weft_at(x, n) + i + token, volatile=True)
    tl.store(weft_at(out + i, n), v)
    tl.device_print("seen", n)


def test_externs_keep_their_order_and_types(recorder):
    x, out = torch.arange(9, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    launch(extern_kernel, x, out, 2, runtime=recorder, BLOCK=8)
    assert out.tolist() == list(range(1, 9))
    names = [call[0] for call in recorder.calls]
    assert names == ["weft.wait:acquire.sys", "weft.at", "load", "weft.at", " seen: "]
    assert recorder.calls[0][1] == [x.data_ptr(), 3, 1]
    assert recorder.calls[1][2:] == (np.dtype(np.int64), ())
    assert recorder.calls[2][3] is True  # volatile
    assert recorder.calls[3][3] == (8,)


# ---------------------------------------------------------------------------------------------
# Places


@triton.jit
def inner(p):
    return tl.load(p) + 1  # inner's line


@triton.jit
def outer(p):
    return inner(p) * 2  # outer's line


@triton.jit
def places_kernel(x, out):
    value = outer(x)  # the kernel's line
    tl.store(out, value)


def line_of(fn, text):
    lines, start = inspect.getsourcelines(fn.fn)
    return next(start + i for i, line in enumerate(lines) if text in line)


def test_a_place_is_the_call_chain_the_users_line_first(recorder):
    x, out = torch.zeros(1), torch.zeros(1)
    kernel = launch(places_kernel, x, out, runtime=recorder)
    place = kernel.locations[recorder.calls[0][1]]
    assert [(frame.line, frame.function) for frame in place.frames] == [
        (line_of(places_kernel, "kernel's line"), "places_kernel"),
        (line_of(outer, "outer's line"), "outer"),
        (line_of(inner, "inner's line"), "inner"),
    ]
    assert all(frame.file == __file__ for frame in place.frames)


def test_generated_source_keeps_the_users_names_and_lines():
    kernel = compile_ttir(ttir(places_kernel, [torch.zeros(1), torch.zeros(1)]))
    assert "def places_kernel(rt, x, out):" in kernel.source
    assert "# test_front_control.py:" in kernel.source and "# inner's line" in kernel.source
    assert re.search(r"rt\.store\(out, value\w*, None, f32", kernel.source)
    assert [(p.name, p.type) for p in kernel.parameters] == [
        ("x", "!tt.ptr<f32>"), ("out", "!tt.ptr<f32>"),
    ]  # fmt: skip


@triton.jit
def assembly_kernel(x):
    v = tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [tl.load(x)], tl.int32, True, 1)
    tl.store(x, v)


def test_what_is_unknown_is_refused_with_the_users_line():
    with pytest.raises(UnsupportedError) as caught:
        launch(assembly_kernel, torch.zeros(1, dtype=torch.int32))
    assert caught.value.place.outermost.line == line_of(assembly_kernel, "inline_asm")


def test_one_text_is_compiled_once():
    text = ttir(places_kernel, [torch.zeros(1), torch.zeros(1)])
    assert compile_ttir(text) is compile_ttir(text)


def test_text_that_is_not_ttir():
    with pytest.raises(CompileError, match="without a public"):
        compile_ttir("hello")


@pytest.mark.parametrize("text, shape, element, pointee", [
    ("i32", (), "i32", ""),
    ("!tt.ptr<bf16>", (), "ptr", "bf16"),
    ("!tt.ptr<f32, 3>", (), "ptr", "f32"),
    ("tensor<2x4x!tt.ptr<f16>>", (2, 4), "ptr", "f16"),
    ("tensor<8xf8E4M3FN>", (8,), "f8E4M3FN", ""),
    ("!tt.tensordesc<tensor<16x8xbf16>>", (16, 8), "tensordesc", "bf16"),
    ("!tt.tensordesc<16x8xbf16>", (16, 8), "tensordesc", "bf16"),
    ("!tt.tensordesc<tensor<16x8xbf16, #shared>>", (16, 8), "tensordesc", "bf16"),
])  # fmt: skip
def test_types(text, shape, element, pointee):
    kind = text_of.parse_type(text)
    assert (kind.shape, kind.element, kind.pointee) == (shape, element, pointee)


def test_locations_of_all_forms():
    locations = ttir_locations.Locations({
        "#loc": '"k.py":3:1', "#loc1": "callsite(#loc2 at #loc3)", "#loc2": '"v"(#loc4)',
        "#loc3": '"w"("k.py":9:2)', "#loc4": '"h.py":5:1', "#loc5": "fused[unknown, #loc1]",
        "#loc6": "unknown",
    })  # fmt: skip
    lines = lambda text: [(f.file, f.line) for f in locations.place(text).frames]  # noqa: E731
    assert lines("#loc") == [("k.py", 3)]
    assert lines("#loc1") == [("k.py", 9), ("h.py", 5)]
    assert lines("#loc5") == [("k.py", 9), ("h.py", 5)]
    assert lines("callsite(#loc1 at #loc)") == [("k.py", 3), ("k.py", 9), ("h.py", 5)]
    assert lines("#loc6") == []
