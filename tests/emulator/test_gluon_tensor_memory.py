"""Gluon for sm_100: tensor memory, what tensor cores do there, and what goes wrong with them."""

import sys

import pytest
import torch
from gluon_kernels import _barriers, descriptor, line_in, load_tile, register_layout, sides
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import blackwell
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    fence_async_shared,
    mbarrier,
    tcgen05_commit,
    tcgen05_copy,
    tcgen05_mma,
    tcgen05_mma_scaled,
)

import weft

TensorMemoryScalesLayout = blackwell.TensorMemoryScalesLayout


def line(name):
    return line_in(sys.modules[__name__], name)


def emulate(main, seed=0):
    """The findings of `main` on one rank, and its result."""
    with weft.emulated(ranks=1, seed=seed, collect=True, arch=100) as ranks:
        (result,) = ranks.run(main)
    return ranks.report.findings, result


@gluon.jit
def _at(rows: gl.constexpr, columns: gl.constexpr, layout: gl.constexpr):
    at = gl.arange(0, rows, gl.SliceLayout(1, layout))[:, None] * columns
    return at + gl.arange(0, columns, gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def copied(x, out, rows: gl.constexpr, columns: gl.constexpr, block: gl.constexpr,
           part: gl.constexpr):  # fmt: skip
    """x goes through tensor memory; of its last `part` columns out gets what is there twice."""
    memory_layout: gl.constexpr = TensorMemoryLayout(block, col_stride=1)
    kind: gl.constexpr = x.dtype.element_ty
    layout: gl.constexpr = register_layout(kind, (rows, columns), memory_layout, num_warps=4)
    at = _at(rows, columns, layout)
    memory = allocate_tensor_memory(kind, [2, rows, columns], memory_layout)
    memory.index(1).store(gl.load(x + at))
    values = memory.index(1).load(layout)
    memory.index(1).store(gl.zeros([rows, columns], kind, layout))
    gl.store(out + at, values)
    memory.index(1).store(values)
    last = memory.index(1).slice(columns - part, part)
    last_layout: gl.constexpr = register_layout(kind, (rows, part), last.layout, num_warps=4)
    # the last columns
    values = last.load(last_layout)
    gl.store(out + rows * columns + _at(rows, part, last_layout), values)


@pytest.mark.few(6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["f32", "f16"])
@pytest.mark.parametrize(
    "rows, columns, block, part",
    [(128, 32, (128, 32), 16), (256, 32, (128, 32), 16), (64, 32, (64, 32), 16),
     (128, 64, (64, 32), 32), (64, 64, (64, 16), 32)],
)  # fmt: skip
def test_tensor_memory_gives_what_was_put_there(rows, columns, block, part, dtype):
    def main():
        x = torch.randn(rows, columns).to(dtype)
        out = torch.empty(rows * (columns + part), dtype=dtype)
        copied[(1,)](x, out, rows, columns, block, part)
        return torch.equal(out, torch.cat([x.flatten(), x[:, columns - part :].flatten()]))

    findings, is_right = emulate(main)
    assert not findings and is_right


@gluon.jit
def products(a, b, out, fault: gl.constexpr):
    """out[64, 16] = 2 * a[64, 32] @ b[32, 16], in two products; c is in tensor memory."""
    blocked: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [4, 1], [1, 0])
    a_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 32], gl.float16)
    b_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([32, 16], gl.float16)
    c_layout: gl.constexpr = TensorMemoryLayout((64, 16), col_stride=1)
    layout: gl.constexpr = register_layout(gl.float32, (64, 16), c_layout, num_warps=4)
    left = gl.allocate_shared_memory(gl.float16, [64, 32], a_layout)
    right = gl.allocate_shared_memory(gl.float16, [32, 16], b_layout)
    left.store(gl.load(a + _at(64, 32, blocked)))
    # products: writes b
    right.store(gl.load(b + _at(32, 16, blocked)))
    done = _barriers(1, 1)
    sums = allocate_tensor_memory(gl.float32, [64, 16], c_layout)
    if fault != "fence":
        fence_async_shared()
    # products: first
    tcgen05_mma(left, right, sums, use_acc=fault == "unwritten")
    # products: second
    tcgen05_mma(left, right, sums)
    if fault != "commit":
        tcgen05_commit(done.index(0))
    if fault == "operand":
        # products: overwrites
        right.store(gl.zeros([32, 16], gl.float16, blocked))
    if fault != "wait":
        # products: waits
        mbarrier.wait(done.index(0), 0)
    # products: loads
    values = sums.load(layout)
    gl.store(out + _at(64, 16, layout), values)
    right._keep_alive()
    if fault == "wait":
        mbarrier.wait(done.index(0), 0)


def multiplied(fault, seed=0):
    def main():
        a, b, out = torch.randn(64, 32).half(), torch.randn(32, 16).half(), torch.empty(64, 16)
        products[(1,)](a, b, out, fault)
        return torch.allclose(out, 2 * (a.float() @ b.float()), atol=1e-4, rtol=1e-4)

    return emulate(main, seed)


@pytest.mark.parametrize("seed", range(3))
def test_products_are_done_in_order(seed):
    findings, is_right = multiplied("", seed)
    assert not findings and is_right


@pytest.mark.parametrize(
    "fault, places",
    [("fence", ("writes b", "first")), ("wait", ("second", "loads")),
     ("operand", ("second", "overwrites"))],
)  # fmt: skip
def test_what_a_product_is_not_ordered_with(fault, places):
    findings, _ = multiplied(fault)
    races = [sides(finding) for finding in findings if finding.kind == "race"]
    assert {line(f"products: {place}") for place in places} in races
    assert len(races) == len(findings)


def test_a_product_of_sums_that_nothing_has_written():
    findings, _ = multiplied("unwritten")
    assert [finding.kind for finding in findings] == ["uninitialised"]
    assert sides(findings[0]) == {line("products: first")}
    assert "sums@rank0[0, 0]" in findings[0].message


def test_products_that_nobody_commits():
    findings, _ = multiplied("commit")
    assert findings[0].kind == "deadlock"
    assert sides(findings[0]) == {line("products: waits")}
    assert "0 of 1 arrival" in findings[0].message


@gluon.jit
def _load(a, b, left, right, full, empty, tiles, steps):
    tile_m: gl.constexpr = a.block_type.shape[0]
    tile_k: gl.constexpr = a.block_type.shape[1]
    for i in range(tiles * steps):
        stage = i % 2
        k = i % steps * tile_k
        mbarrier.wait(empty.index(stage), (i // 2 & 1) ^ 1)
        mbarrier.expect(full.index(stage), a.block_type.nbytes + b.block_type.nbytes)
        # gemm: loads
        load_tile(a, [i // steps * tile_m, k], full.index(stage), left.index(stage))
        load_tile(b, [k, 0], full.index(stage), right.index(stage))


@gluon.jit
def _multiply(left, right, sums, full, empty, ready, free, tiles, steps, fault: gl.constexpr):
    for tile in range(tiles):
        mbarrier.wait(free.index(tile % 2), (tile // 2 & 1) ^ 1)
        for step in range(steps):
            i = tile * steps + step
            stage = i % 2
            mbarrier.wait(full.index(stage), i // 2 & 1)
            # gemm: multiplies
            tcgen05_mma(left.index(stage), right.index(stage), sums.index(tile % 2),
                        use_acc=step > 0, mbarriers=[empty.index(stage)])  # fmt: skip
        if fault == "arrive":
            mbarrier.arrive(ready.index(tile % 2), count=1)
        else:
            tcgen05_commit(ready.index(tile % 2))


@gluon.jit
def _store(out, sums, ready, free, tiles, fault: gl.constexpr):
    rows: gl.constexpr = sums.shape[1]
    columns: gl.constexpr = sums.shape[2]
    layout: gl.constexpr = register_layout(gl.float32, (rows, columns), sums.layout, num_warps=4)
    for tile in range(tiles):
        mbarrier.wait(ready.index(tile % 2), tile // 2 & 1)
        if fault == "credit":
            mbarrier.arrive(free.index(tile % 2), count=1)
        # gemm: reads
        values = sums.index(tile % 2).load(layout)
        if fault != "credit":
            mbarrier.arrive(free.index(tile % 2), count=1)
        gl.store(out + tile * rows * columns + _at(rows, columns, layout), values)


@gluon.jit
def specialised_gemm(a, b, out, tiles, steps, fault: gl.constexpr):
    """Tiles of out = a @ b by three partitions: one loads, one multiplies, four warps store."""
    tile_m: gl.constexpr = a.block_type.shape[0]
    tile_k: gl.constexpr = a.block_type.shape[1]
    tile_n: gl.constexpr = b.block_type.shape[1]
    c_layout: gl.constexpr = TensorMemoryLayout((tile_m, tile_n), col_stride=1)
    left = gl.allocate_shared_memory(a.dtype, [2, tile_m, tile_k], a.layout)
    right = gl.allocate_shared_memory(b.dtype, [2, tile_k, tile_n], b.layout)
    sums = allocate_tensor_memory(gl.float32, [2, tile_m, tile_n], c_layout)
    full = _barriers(2, 1)
    empty = _barriers(2, 1)
    ready = _barriers(2, 1)
    free = _barriers(2, 1)
    gl.warp_specialize(
        [
            (_store, (out, sums, ready, free, tiles, fault)),
            (_multiply, (left, right, sums, full, empty, ready, free, tiles, steps, fault)),
            (_load, (a, b, left, right, full, empty, tiles, steps)),
        ],
        [1, 1],
        [24, 24],
    )


def specialised(fault, seed=0, tiles=4, k=40):
    def main():
        a, b = torch.randn(tiles * 64, k).half(), torch.randn(k, 16).half()
        out = torch.empty(tiles * 64, 16)
        specialised_gemm[(1,)](
            descriptor(a, (64, 16)), descriptor(b, (16, 16)), out, tiles, -(-k // 16), fault
        )
        return torch.allclose(out, a.float() @ b.float(), atol=1e-3, rtol=1e-3)

    return emulate(main, seed)


@pytest.mark.parametrize("seed, tiles, k", [(0, 4, 40), (1, 3, 16), (2, 1, 72)])
def test_a_product_by_partitions(seed, tiles, k):
    findings, is_right = specialised("", seed, tiles, k)
    assert not findings and is_right


@pytest.mark.parametrize(
    "fault, places", [("arrive", ("multiplies", "reads")), ("credit", ("multiplies", "reads"))]
)
def test_sums_that_are_read_while_others_write_them(fault, places):
    findings, _ = specialised(fault)
    races = [sides(finding) for finding in findings if finding.kind == "race"]
    assert {line(f"gemm: {place}") for place in places} in races


@gluon.jit
def _as_scales(chunks, k: gl.constexpr):
    return chunks.reshape((1, k // 128, 32, 4, 4)).permute((0, 3, 2, 1, 4)).reshape((128, k // 32))


@gluon.jit
def scaled_product(a, b, a_scales, b_scales, out, kind: gl.constexpr, k: gl.constexpr,
                   by_copy: gl.constexpr):  # fmt: skip
    """out[128, 128] = a @ b.T of narrow floats; 32 columns have a scale, a power of two."""
    blocked: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [4, 1], [1, 0])
    width: gl.constexpr = a.dtype.element_ty
    bytes_k: gl.constexpr = k // 2 if kind == "e2m1" else k
    shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([128, bytes_k], width)
    c_layout: gl.constexpr = TensorMemoryLayout((128, 128), col_stride=1)
    layout: gl.constexpr = register_layout(gl.float32, (128, 128), c_layout, num_warps=4)
    scales_layout: gl.constexpr = TensorMemoryScalesLayout()
    at = _at(128, bytes_k, blocked)
    left = gl.allocate_shared_memory(width, [128, bytes_k], shared, gl.load(a + at))
    right = gl.allocate_shared_memory(width, [128, bytes_k], shared, gl.load(b + at))
    sums = allocate_tensor_memory(gl.float32, [128, 128], c_layout)
    left_scales = allocate_tensor_memory(gl.uint8, [128, k // 32], scales_layout)
    right_scales = allocate_tensor_memory(gl.uint8, [128, k // 32], scales_layout)
    done = _barriers(1, 1)
    if by_copy:
        plain: gl.constexpr = gl.NVMMASharedLayout(0, 8, rank=2)
        at_chunks = _at(1, 4 * k, blocked)
        chunks = gl.load(a_scales + at_chunks)
        a_chunks = gl.allocate_shared_memory(gl.uint8, [1, 4 * k], plain, chunks)
        chunks = gl.load(b_scales + at_chunks)
        b_chunks = gl.allocate_shared_memory(gl.uint8, [1, 4 * k], plain, chunks)
        fence_async_shared()
        tcgen05_copy(_as_scales(a_chunks, k), left_scales)
        tcgen05_copy(_as_scales(b_chunks, k), right_scales)
    else:
        registers: gl.constexpr = register_layout(
            gl.uint8, (128, k // 32), scales_layout, num_warps=4
        )
        at_scales = _at(128, k // 32, registers)
        left_scales.store(gl.load(a_scales + at_scales))
        right_scales.store(gl.load(b_scales + at_scales))
        fence_async_shared()
    tcgen05_mma_scaled(
        left, right.permute((1, 0)), sums, left_scales, right_scales, kind, kind, use_acc=False
    )
    tcgen05_commit(done.index(0))
    mbarrier.wait(done.index(0), 0)
    gl.store(out + _at(128, 128, layout), sums.load(layout))


FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


@pytest.mark.parametrize("kind, by_copy", [("e2m1", False), ("e4m3", True), ("e5m2", False)])
def test_a_product_of_scaled_floats(kind, by_copy, k=128):
    def operand():
        scales = torch.randint(120, 134, (128, k // 32), dtype=torch.uint8)
        if kind == "e2m1":
            bits = torch.randint(0, 256, (128, k // 2), dtype=torch.uint8)
            values = FP4[torch.stack([bits & 15, bits >> 4], -1).long()].reshape(128, k)
        else:
            dtype = torch.float8_e4m3fn if kind == "e4m3" else torch.float8_e5m2
            bits = torch.randn(128, k).to(dtype)
            values = bits.float()
        factors = torch.exp2(scales.float() - 127).repeat_interleave(32, 1)
        # In chunks a row's four scales lie beside those 32 rows below.
        chunks = scales.reshape(4, 32, 4).transpose(0, 1).contiguous() if by_copy else scales
        return bits, chunks, values * factors

    def main():
        (a, a_scales, left), (b, b_scales, right) = operand(), operand()
        out = torch.empty(128, 128)
        scaled_product[(1,)](a, b, a_scales, b_scales, out, kind, k, by_copy)
        return torch.allclose(out, left @ right.T, atol=1e-3, rtol=1e-4)

    findings, is_right = emulate(main)
    assert not findings and is_right


def test_scripts_are_told_that_they_run_on_blackwell():
    with weft.emulated(ranks=1, arch=100) as ranks:
        (capability,) = ranks.run(lambda: torch.cuda.get_device_capability())
    assert capability == (10, 0)
    with pytest.raises(weft.UsageError, match="90 or 100"):
        with weft.emulated(ranks=1, arch=80):
            pass
