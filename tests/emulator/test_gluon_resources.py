"""What a block has, and Gluon kernels that ask for more."""

import pytest
import torch
from gluon_kernels import register_layout
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
)

import weft


def launched(arch, kernel, *args, **options):
    """The error of a launch on one rank; None where it runs."""
    with weft.emulated(ranks=1, arch=arch) as ranks:
        try:
            ranks.run(lambda: kernel[(1,)](*args, **options))
        except weft.OutOfResourcesError as error:
            return error
    return None


@gluon.jit
def tiles_at_a_time(x, out, count: gl.constexpr, together: gl.constexpr):
    """`count` tiles of 16 KiB, and as many again: all together, or one half behind the other."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    at = gl.arange(0, 128, gl.SliceLayout(1, layout))[:, None] * 64
    at += gl.arange(0, 64, gl.SliceLayout(0, layout))[None, :]
    first = gl.allocate_shared_memory(gl.float16, [count, 128, 64], shared)
    first.index(0).store(gl.load(x + at))
    value = first.index(0).load(layout)
    second = gl.allocate_shared_memory(gl.float16, [count, 128, 64], shared)
    second.index(0).store(value)
    if together:
        value += first.index(0).load(layout)
    gl.store(out + at, value + second.index(0).load(layout))


@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize(
    "count, together, needed", [(7, True, 0), (8, True, 262144), (8, False, 0)]
)
def test_shared_memory_that_does_not_fit(arch, count, together, needed):
    x, out = torch.ones(128, 64).half(), torch.empty(128, 64).half()
    error = launched(arch, tiles_at_a_time, x, out, count, together)
    if not needed:
        assert error is None and (out == 2 + together).all()
        return
    assert "needs 262144 bytes of shared memory at a time, and a block has 232448" in str(error)
    assert error.place.outermost.function == "tiles_at_a_time"


@gluon.jit
def columns_at_a_time(out, count: gl.constexpr):
    sums_layout: gl.constexpr = TensorMemoryLayout((128, 128), col_stride=1)
    layout: gl.constexpr = gl.BlockedLayout([1, 128], [32, 1], [4, 1], [1, 0])
    zeros = gl.zeros([128, 128], gl.float32, layout)
    sums = allocate_tensor_memory(gl.float32, [count, 128, 128], sums_layout)
    registers: gl.constexpr = register_layout(gl.float32, (128, 128), sums_layout, num_warps=4)
    for i in gl.static_range(count):
        sums.index(i).store(gl.convert_layout(zeros, registers))
    value = sums.index(0).load(registers)
    at = gl.arange(0, 128, gl.SliceLayout(1, registers))[:, None] * 128
    gl.store(out + at + gl.arange(0, 128, gl.SliceLayout(0, registers))[None, :], value)


@pytest.mark.parametrize("count", [4, 5])
def test_tensor_memory_that_does_not_fit(count):
    error = launched(100, columns_at_a_time, torch.empty(128, 128), count)
    if count == 4:
        assert error is None
    else:
        assert "needs 640 columns of tensor memory at a time, and a block has 512" in str(error)


@gluon.jit
def _store(out, layout: gl.constexpr):
    gl.store(out + gl.arange(0, 32, layout), gl.zeros([32], gl.float32, layout))


@gluon.jit
def in_partitions(out, own: gl.constexpr, warps: gl.constexpr, registers: gl.constexpr):
    first: gl.constexpr = gl.BlockedLayout([1], [32], [own], [0])
    second: gl.constexpr = gl.BlockedLayout([1], [32], [warps], [0])
    third: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    gl.warp_specialize(
        [(_store, (out, first)), (_store, (out + 32, second)), (_store, (out + 64, third))],
        [warps, 4],
        [registers, registers],
    )


@pytest.mark.parametrize(
    "num_warps, warps, registers, words",
    [
        (4, 4, 152, None),
        (4, 4, 240, None),
        (4, 4, 248, "leaves 8 for each thread of the program's own 4 warps, which need 24"),
        (4, 4, 512, "a thread has 256 at most"),
        (8, 16, 64, None),
        (16, 16, 32, "has 36, in groups of four; GPUs take 32"),
    ],
)
def test_registers_and_warps_beyond_what_a_block_has(num_warps, warps, registers, words):
    error = launched(
        90, in_partitions, torch.zeros(96), num_warps, warps, registers, num_warps=num_warps
    )
    if words is None:
        assert error is None
        return
    assert words in str(error)
