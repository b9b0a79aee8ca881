"""Gluon in a straight line: tiles with layouts, reductions, shared memory, copies by threads."""

import pytest
import torch
from gluon_kernels import emulate
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import blackwell
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

import weft
from weft.base.errors import UnsupportedError

# Triton 3.9 has another name for it.
copy_tile = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@gluon.jit
def scaled_rows(x, out, sums, m, n, tile: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 2], [4, 8], [4, 1], [1, 0])
    turned: gl.constexpr = gl.BlockedLayout([2, 1], [8, 4], [1, 4], [0, 1])
    rows = gl.program_id(0) * tile + gl.arange(0, tile, gl.SliceLayout(1, layout))
    columns = gl.arange(0, 32, gl.SliceLayout(0, layout))
    at = rows[:, None] * n + columns[None, :]
    inside = (rows[:, None] < m) & (columns[None, :] < n)
    values = gl.load(x + at, inside, other=0.0)
    total = gl.sum(values, 1)
    gl.store(sums + rows, total, rows < m)
    largest = gl.max(gl.convert_layout(values, turned), 1)
    scaled = gl.convert_layout(values, turned) / (1 + gl.exp(largest))[:, None]
    gl.store(out + at, gl.convert_layout(scaled, layout), inside)


def test_tiles_with_layouts():
    def main():
        x, out = torch.randn(21, 27), torch.zeros(21, 27)
        sums = torch.zeros(21)
        scaled_rows[(3,)](x, out, sums, 21, 27, 8)
        largest = torch.nn.functional.pad(x, (0, 5)).amax(1, keepdim=True)
        return x, sums, out, x / (1 + largest.exp())

    findings, (x, sums, out, expected) = emulate(main)
    assert not findings
    torch.testing.assert_close(sums, x.sum(1))
    torch.testing.assert_close(out, expected)


@gluon.jit
def views(x, out, first: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [4, 1], [1, 0])
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    rows = gl.arange(0, 16, gl.SliceLayout(1, layout))[:, None]
    columns = gl.arange(0, 8, gl.SliceLayout(0, layout))[None, :]
    memory = gl.allocate_shared_memory(gl.float32, [2, 16, 8], shared)
    for i in gl.static_range(first, 2):
        memory.index(i).store(gl.load(x + i * 128 + rows * 8 + columns))
    turned = memory.index(1).permute((1, 0)).load(layout)
    gl.store(out + gl.arange(0, 8, gl.SliceLayout(1, layout))[:, None] * 16
             + gl.arange(0, 16, gl.SliceLayout(0, layout))[None, :], turned)  # fmt: skip
    part = memory.index(0).slice(8, 8, 0).load(layout)  # reads a part
    at = gl.arange(0, 8, gl.SliceLayout(1, layout))[:, None] * 8 + columns
    gl.store(out + 128 + at, part)


def run_views(first):
    def main():
        x, out = torch.randn(2, 16, 8), torch.zeros(192)
        views[(1,)](x, out, first)
        return x, out

    findings, (x, out) = emulate(main)
    return findings, x, out


def test_views_of_shared_memory():
    findings, x, out = run_views(0)
    assert not findings
    assert torch.equal(out, torch.cat([x[1].T.flatten(), x[0, 8:].flatten()]))


def test_a_slot_that_nothing_has_written():
    findings, _, out = run_views(1)
    assert [finding.kind for finding in findings] == ["uninitialised"]
    assert findings[0].first.line == line_of("reads a part")
    assert "memory@rank0[0, 8, 0]" in findings[0].message
    assert out[128:].isnan().all()


def line_of(mark):
    with open(__file__) as file:
        (found,) = [i for i, text in enumerate(file, 1) if text.endswith(f"# {mark}\n")]
    return found


@gluon.jit
def copy_by_threads(x, out, n, tiles, by_barrier: gl.constexpr, pending: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    shared: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 1, [1, 0])
    memory = gl.allocate_shared_memory(gl.float32, [2, 16, 32], shared)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=128)
    rows = gl.arange(0, 16, gl.SliceLayout(1, layout))[:, None]
    columns = gl.arange(0, 32, gl.SliceLayout(0, layout))[None, :]
    at = x + rows * n + columns
    copy_tile(memory.index(0), at, mask=columns < n)
    async_copy.commit_group()
    for i in range(tiles):
        if not by_barrier:
            following = at + (i + 1) * 16 * n
            mask = (columns < n) & (rows >= (i + 1 == tiles) * 16)
            copy_tile(memory.index((i + 1) % 2), following, mask=mask)
            async_copy.commit_group()
            async_copy.wait_group(pending)
        else:
            async_copy.mbarrier_arrive(full, increment_count=False)
            mbarrier.wait(full, i & 1)
        values = memory.index(i % 2).load(layout)  # reads a copy
        gl.store(out + (i * 16 + rows) * n + columns, values, mask=columns < n)


@pytest.mark.parametrize("by_barrier, tiles", [(False, 3), (True, 1)])
def test_copies_by_threads(by_barrier, tiles):
    def main():
        x, out = torch.randn(16 * tiles, 20), torch.zeros(16 * tiles, 20)
        copy_by_threads[(1,)](x, out, 20, tiles, by_barrier, 1)
        return torch.equal(x, out)

    findings, is_right = emulate(main)
    assert not findings and is_right


def test_a_copy_that_is_not_waited_for():
    def main():
        x, out = torch.randn(32, 20), torch.zeros(32, 20)
        copy_by_threads[(1,)](x, out, 20, 2, False, 2)
        return torch.equal(x, out)

    findings, is_right = emulate(main)
    assert findings[0].kind == "race" and not is_right
    assert findings[0].first.line == line_of("reads a copy")


@gluon.jit
def without_init(out):
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.wait(full, 0)  # no barrier


def test_a_barrier_that_was_not_initialised():
    findings, _ = emulate(lambda: without_init[(1,)](torch.zeros(1)))
    assert [finding.kind for finding in findings] == ["uninitialised"]
    assert findings[0].first.line == line_of("no barrier")


@gluon.jit
def begun_anew(out, fault: gl.constexpr):
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=2)
    mbarrier.arrive(full, count=1 if fault else 2)
    if not fault:
        mbarrier.wait(full, 0)
        mbarrier.invalidate(full)
    mbarrier.init(full, count=1)  # begins anew
    mbarrier.arrive(full, count=1)
    mbarrier.wait(full, 0)


@pytest.mark.parametrize("fault", [False, True])
def test_a_barrier_that_begins_anew_while_it_is_in_use(fault):
    findings, _ = emulate(lambda: begun_anew[(1,)](torch.zeros(1), fault))
    assert [finding.kind for finding in findings] == ["lost signal"] * fault
    if fault:
        assert findings[0].first.line == line_of("begins anew")
        assert "in the middle of phase 0, which has 1 of 2 arrivals" in findings[0].message


@gluon.jit
def beyond_its_slots(out, i):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    memory = gl.allocate_shared_memory(gl.float32, [2, 16], shared)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(full.index(0), count=1)
    mbarrier.arrive(full.index(i), count=1, pred=i < 2)  # a name for it harms nobody
    memory.index(i).store(gl.zeros([16], gl.float32, layout))  # beyond


def test_a_slot_that_is_not_there():
    findings, _ = emulate(lambda: beyond_its_slots[(1,)](torch.zeros(1), 2))
    assert [finding.kind for finding in findings] == ["out of bounds"]
    assert findings[0].first.line == line_of("beyond")
    assert "slot 2 of memory@rank0, which has 2" in findings[0].message


@gluon.jit
def seen_as_other_elements(x, out, before: gl.constexpr, after: gl.constexpr, how: gl.constexpr):
    """A piece of f32 as twice as many halves, which are written first where x has some."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [4, 1], [1, 0])
    at = gl.arange(0, 16, gl.SliceLayout(1, layout))[:, None] * 16
    at += gl.arange(0, 16, gl.SliceLayout(0, layout))[None, :]
    memory = gl.allocate_shared_memory(gl.float32, [2, 8, 16], before)
    memory.index(1).store(gl.full([8, 16], 1.0, gl.float32, layout))
    if how == "new":
        other = memory.index(1).reinterpret(gl.float16, [16, 16], after)
    else:
        other = memory.index(1)._reinterpret(gl.float16, [16, 16], after)
    other_values = gl.load(x + at)
    if x.dtype.element_ty == gl.float16:
        other.store(other_values)
    gl.store(out + at, other.load(layout))  # reads other elements


def read_as_halves(x, swizzled):
    before = gl.SwizzledSharedLayout(1, 1, 8 if swizzled else 1, [1, 0])
    after = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    out = torch.zeros(16, 16).half()

    def main():
        how = "old" if hasattr(gl.shared_memory_descriptor, "_reinterpret") else "new"
        seen_as_other_elements[(1,)](x, out, before, after, how)

    with weft.emulated(ranks=1) as ranks:
        ranks.run(main)
    return out


def test_shared_memory_seen_as_other_elements():
    halves = read_as_halves(torch.zeros(16, 16), swizzled=False)
    assert torch.equal(halves.view(torch.float32), torch.ones(16, 8))
    x = torch.randn(16, 16).half()
    assert torch.equal(read_as_halves(x, swizzled=True), x)


def test_swizzled_elements_are_not_read_as_others():
    with pytest.raises(UnsupportedError, match="another layout or type") as error:
        read_as_halves(torch.zeros(16, 16), swizzled=True)
    assert error.value.place.outermost.line == line_of("reads other elements")


@gluon.jit
def picked(x, indices, out, axis: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [4, 1], [1, 0])
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    at = gl.arange(0, 16, gl.SliceLayout(1, layout))[:, None] * 16
    at += gl.arange(0, 16, gl.SliceLayout(0, layout))[None, :]
    memory = gl.allocate_shared_memory(gl.float32, [16, 16], shared, gl.load(x + at))
    chosen = gl.load(indices + at)
    values = memory.gather(chosen, axis)  # gathers
    memory.scatter(values * 2, chosen, axis)
    gl.store(out + at, memory.load(layout))


@pytest.mark.skipif(
    not hasattr(gl.shared_memory_descriptor, "gather"), reason="came with Triton 3.7"
)
@pytest.mark.parametrize("axis", [0, 1])
def test_elements_of_shared_memory_by_indices(axis):
    def main(beyond=0):
        x, out = torch.randn(16, 16), torch.empty(16, 16)
        indices = torch.argsort(torch.randn(16, 16), axis).int()
        indices[3, 5] += beyond
        picked[(1,)](x, indices, out, axis)
        return not beyond and torch.equal(out, 2 * x)

    findings, is_right = emulate(main)
    assert not findings and is_right
    findings, _ = emulate(lambda: main(100))
    assert [finding.kind for finding in findings] == ["out of bounds"]
    assert findings[0].first.line == line_of("gathers")


@gluon.jit
def _clipped(x, limit):
    return gl.where(x > limit, limit, x)


@gluon.jit
def in_pairs(x, y, out):
    """Floats two in a register, as sm_100 computes with them; and a function of each element."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    at = gl.arange(0, 64, layout)
    a, b = gl.load(x + at), gl.load(y + at)
    pairs = gl.inline_asm_elementwise(
        "mov.b64 $0, { $1, $2 };", "=l,r,r", [a, b], dtype=gl.int64, is_pure=True, pack=1
    )
    squares = gl.inline_asm_elementwise(
        "fma.rn.f32x2 $0, $1, $2, $3;", "=l,l,l,l", [pairs, pairs, pairs], dtype=gl.int64,
        is_pure=True, pack=1,
    )  # fmt: skip
    a, b = gl.inline_asm_elementwise(
        "mov.b64 { $0, $1 }, $2;", "=r,=r,l", [squares], dtype=[gl.float32, gl.float32],
        is_pure=True, pack=1,
    )  # fmt: skip
    gl.store(out + at, gl.map_elementwise(_clipped, a, b))
    gl.store(out + 64 + at, b)


def test_pairs_of_floats_and_functions_of_elements():
    def main():
        x, y, out = torch.randn(64), torch.randn(64), torch.empty(128)
        in_pairs[(1,)](x, y, out)
        left, right = x * x + x, y * y + y
        return torch.allclose(out, torch.cat([torch.minimum(left, right), right]))

    findings, is_right = emulate(main)
    assert not findings and is_right


@gluon.jit
def four_bits(x, out):
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [4, 1], [1, 0])
    wide: gl.constexpr = gl.BlockedLayout([1, 2], [4, 8], [4, 1], [1, 0])
    rows = gl.arange(0, 8, gl.SliceLayout(1, layout))[:, None]
    packed = gl.load(x + rows * 16 + gl.arange(0, 16, gl.SliceLayout(0, layout))[None, :])
    values = gl.convert_layout(gl.fp4_to_fp(packed, gl.float16, 1), wide)
    rows = gl.arange(0, 8, gl.SliceLayout(1, wide))[:, None]
    gl.store(out + rows * 32 + gl.arange(0, 32, gl.SliceLayout(0, wide))[None, :], values)


def test_floats_of_four_bits():
    def main():
        x, out = torch.arange(128).reshape(8, 16).byte() * 2 + 1, torch.empty(8, 32).half()
        four_bits[(1,)](x, out)
        sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        bits = torch.stack([x & 15, x >> 4], -1).reshape(8, 32).long()
        return torch.equal(out.float(), sizes[bits & 7] * torch.where(bits > 7, -1.0, 1.0))

    findings, is_right = emulate(main)
    assert not findings and is_right


@gluon.jit
def packed(x, y, out):
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    at = gl.arange(0, 256, layout)
    a, b = gl.load(x + at), gl.load(y + at)
    gl.store(out + at, blackwell.fma2(a, b, blackwell.sub2(a, blackwell.mul2(b, b))))


@pytest.mark.skipif(not hasattr(blackwell, "fma2"), reason="came with Triton 3.9")
def test_packed_arithmetic():
    def main():
        x, y, out = torch.randn(256), torch.randn(256), torch.empty(256)
        packed[(1,)](x, y, out)
        return torch.allclose(out, x * y + (x - y * y))

    with weft.emulated(ranks=1, arch=100) as ranks:
        assert ranks.run(main) == [True]


@gluon.jit
def _added_in_lanes(a, b):
    """a + b by way of a tile of the two."""
    parent: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [1, 4], [1, 0])
    pair = gl.where(gl.arange(0, 2, gl.SliceLayout(0, parent)) == 0, a, b)
    left, right = gl.split(pair)
    return left + right


@gluon.jit
def reduced_in_lanes(x, out):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    gl.store(out, gl.reduce(gl.load(x + gl.arange(0, 64, layout)), 0, _added_in_lanes))


def test_a_reduction_whose_function_makes_tiles():
    def main():
        x, out = torch.randn(64), torch.empty(1)
        reduced_in_lanes[(1,)](x, out)
        return torch.allclose(out, x.sum(), atol=1e-5)

    findings, is_right = emulate(main)
    assert not findings and is_right
