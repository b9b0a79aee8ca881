"""Tiles of pointers and masks kept as integers: the same answers, and what memory is handed."""

import inspect

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from front_runtime import Runtime, launch

from weft.base.errors import OutOfBoundsError
from weft.emulator.affine import AffinePointers, affine_tile, box_tile, find_window, fits_i32
from weft.emulator.memory import Memory


class Watcher(Runtime):
    """Notes what kind of pointers and masks it is handed."""

    seen: list = []

    def load(self, ptr, mask, other, dtype, shape, loc, volatile=False):
        if shape:
            self.seen.append(("load", type(ptr), type(mask)))
        return super().load(ptr, mask, other, dtype, shape, loc)

    def store(self, ptr, value, mask, dtype, shape, loc):
        if shape:
            self.seen.append(("store", type(ptr), type(mask)))
        super().store(ptr, value, mask, dtype, shape, loc)


@pytest.fixture
def watcher():
    Watcher.seen = []
    return Watcher


REGULAR = {("load", AffinePointers, tuple), ("store", AffinePointers, tuple)}


@triton.jit
def carried_kernel(x, out, m, n, stride, TM: tl.constexpr, TN: tl.constexpr):
    i, j = tl.program_id(0) * TM + tl.arange(0, TM), tl.arange(0, TN)
    source = x + i[:, None] * stride + j[None, :]
    target = out + (i[:, None] * n + j[None, :])
    for start in range(0, n, TN):
        mask = (i < m)[:, None] & (j < n - start)[None, :]
        tl.store(target, tl.load(source, mask=mask, other=0) * 2, mask=mask)
        source += TN
        target += TN


def test_carried_pointers(watcher):
    x = torch.arange(10 * 24, dtype=torch.int32).reshape(10, 24)
    out = torch.zeros(10, 21, dtype=torch.int32)
    launch(
        carried_kernel, x, out, 10, 21, 24, grid=(3,), runtime=watcher, TM=4, TN=8,
    )  # fmt: skip
    assert torch.equal(out, x[:, :21] * 2)
    assert set(watcher.seen) == REGULAR


@triton.jit
def turned_kernel(x, out, n, B: tl.constexpr, ONE: tl.constexpr):
    i = tl.arange(0, B)
    back = (n - 1) - i
    tl.store(out + i, tl.load(x + back, mask=(back >= 0) & (i < n)), mask=n > i)
    row = tl.arange(0, ONE)
    tile = out + B + row[:, None] * 100 + i[None, :] * 2
    tl.store(tile, tl.load(x + i[None, :] + tl.zeros((ONE, 1), tl.int32)))
    block = x + (i.to(tl.int64) * 4)[:, None] + tl.arange(0, 4)[None, :]
    tl.store(out + 4 * B + i[None, :] + tl.arange(0, 4)[:, None] * B, tl.trans(tl.load(block)))


def test_backward_strided_and_turned_tiles():
    x = torch.arange(64, dtype=torch.int32)
    out = torch.full((128,), -1, dtype=torch.int32)
    launch(turned_kernel, x, out, 11, B=16, ONE=1)
    expected = torch.full((128,), -1, dtype=torch.int32)
    expected[:11] = torch.arange(10, -1, -1)
    expected[16:48:2] = torch.arange(16)
    expected[64:128] = x.reshape(16, 4).T.reshape(-1)
    assert torch.equal(out, expected)


@triton.jit
def mixed_kernel(x, index, out, n, B: tl.constexpr):
    i = tl.arange(0, B)
    picked = tl.load(index + i, mask=i < n, other=0)
    v = tl.load(x + picked, mask=(i < n) & (picked > 2), other=-1)
    v = tl.where(i < n, v + i, 7)
    tl.store(out + i, v, mask=(i >= 1) & (i <= n))


def test_irregular_tiles_stay_tiles(watcher):
    x, index = torch.arange(100, 116, dtype=torch.int32), torch.arange(15, -1, -1)
    out = torch.zeros(16, dtype=torch.int32)
    launch(mixed_kernel, x, index.int(), out, 9, runtime=watcher, B=16)
    expected = torch.where(index > 2, x[index], -1) + torch.arange(16)
    expected[9:] = 7
    expected[0], expected[10:] = 0, 0
    assert torch.equal(out, expected.int())
    assert watcher.seen == [
        ("load", AffinePointers, tuple), ("load", np.ndarray, np.ndarray),
        ("store", AffinePointers, tuple),
    ]  # fmt: skip


@triton.jit
def hash_kernel(out, seed, B: tl.constexpr):
    i = tl.arange(0, B)
    h = (i + seed) * 0x3504F333
    tl.store(out + i, h ^ (h >> 7))


def test_hashes_wrap():
    out = torch.zeros(64, dtype=torch.int32)
    launch(hash_kernel, out, 12345, B=64)
    h = ((np.arange(64, dtype=np.int64) + 12345) * 0x3504F333).astype(np.int32)
    assert out.tolist() == (h ^ (h >> 7)).tolist()


@triton.jit
def overflow_kernel(x, out, stride, B: tl.constexpr):
    i = tl.arange(0, B)
    v = tl.load(x + i * stride)  # wraps
    tl.store(out + i, v)


def test_an_index_that_wraps_is_reported():
    x = torch.zeros(16)
    with pytest.raises(OutOfBoundsError, match="32 bits") as caught:
        launch(overflow_kernel, x, torch.zeros(16), 1 << 30, B=16)
    lines, start = inspect.getsourcelines(overflow_kernel.fn)
    wraps = next(start + i for i, line in enumerate(lines) if "# wraps" in line)
    assert caught.value.place.outermost.line == wraps


# ---------------------------------------------------------------------------------------------
# The pieces


def test_tiles_and_boxes_in_full():
    pointers = AffinePointers(100, (40, -4), (3, 5))
    full = 100 + np.arange(3)[:, None] * 40 - np.arange(5) * 4
    np.testing.assert_array_equal(np.asarray(pointers), full)
    assert pointers.bounds() == (full.min(), full.max())
    box = ((1, 3), (0, 2))
    assert box_tile(box, (3, 5)).sum() == 4 and box_tile(box, (3, 5))[1:3, :2].all()
    wrapped = affine_tile(2**31 - 2, (1,), (4,), np.dtype(np.int32))
    assert wrapped.tolist() == [2**31 - 2, 2**31 - 1, -(2**31), -(2**31) + 1]
    assert fits_i32(2**31 - 4, ((1, 4),)) and not fits_i32(2**31 - 3, ((1, 4),))
    assert not fits_i32(-(2**31), ((-1, 2),))


@pytest.fixture
def tensor_and_find():
    def find(low, high, loc):
        found = memory.find(low)
        return found if found is not None and high <= found.end else None

    x = torch.arange(8 * 16, dtype=torch.float32).reshape(8, 16)
    memory = Memory()
    memory.register(x.data_ptr(), x.numel() * 4, 4, 0, "x", owner=x)
    return x, find


def test_a_window_is_a_view(tensor_and_find):
    x, find = tensor_and_find
    pointers = AffinePointers(x[2:, 3:].data_ptr(), (64, 8), (4, 6))
    window = find_window(find, pointers, None, np.dtype(np.float32), 0)
    np.testing.assert_array_equal(window.data, x[2:6, 3:15:2].numpy())
    assert window.inside is None and window.shadow.shape == (4, 6)
    window.shadow[...] = 9
    cells = window.allocation.shadow.reshape(8, 16)
    assert (cells[2:6, 3:15:2] == 9).all() and (cells == 9).sum() == 24
    assert window.span() == ((2 * 16 + 3) * 4, (3 * 16 + 10 + 1) * 4)


def test_a_masked_window_need_not_lie_inside(tensor_and_find):
    x, find = tensor_and_find
    pointers = AffinePointers(x[6:].data_ptr(), (64, 4), (4, 16))
    kind = np.dtype(np.float32)
    assert find_window(find, pointers, None, kind, 0) is None
    window = find_window(find, pointers, ((0, 2), (0, 16)), kind, 0)
    np.testing.assert_array_equal(window.data, x[6:].numpy())
    assert window.inside == (slice(0, 2), slice(0, 16))
    assert find_window(find, pointers, ((0, 0), (0, 16)), kind, 0) is None


def test_narrow_and_wide_elements(tensor_and_find):
    x, find = tensor_and_find
    pairs = AffinePointers(x.data_ptr(), (64, 8), (8, 8))
    window = find_window(find, pairs, None, np.dtype(np.int64), 0)
    assert window.shadow.shape == (8, 8, 2)
    halves = AffinePointers(x.data_ptr(), (64, 2), (8, 32))
    window = find_window(find, halves, None, np.dtype(np.float16), 0)
    assert window.shadow.shape == (8, 32) and window.allocation.cell_bytes == 2
    odd = AffinePointers(x.data_ptr() + 2, (64, 4), (4, 4))
    assert find_window(find, odd, None, np.dtype(np.float32), 0) is None
    same = AffinePointers(x.data_ptr(), (0, 4), (4, 4))
    assert find_window(find, same, None, np.dtype(np.float32), 0) is None
