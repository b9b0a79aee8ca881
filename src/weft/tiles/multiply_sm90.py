"""A consumer's products in the GEMM template for Hopper: wgmma over the stages of shared memory.

The producer of tiles/gemm_sm90.py fills stages, and `full` says so; a stage that is read is given
back by `empty`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from weft.tiles.epilogue_sm90 import layout_of, scales_of_rows


def wide_columns(tile_n: int) -> int:
    """A tile's columns in its first product: the largest power of two. The second has the rest."""
    return 1 << (tile_n.bit_length() - 1)


wide_of = gluon.constexpr_function(wide_columns)


@gluon.jit
def multiply(
    operands_a, operands_b, empty, full, steps, used, own_row: gl.constexpr, rows: gl.constexpr,
    tile_n: gl.constexpr, stages: gl.constexpr, b_is_nk: gl.constexpr, by_index: gl.constexpr,
):  # fmt: skip
    """Sums over `steps` stages, the last products still under way, and the number of stages used.

    A stage's products are under way while the next stage is waited for.
    """
    rest_n: gl.constexpr = tile_n - wide_of(tile_n)
    wide = _no_sums(rows, wide_of(tile_n))
    # A number where there is none: no function of a kernel returns None.
    rest = 0
    if rest_n:
        rest = _no_sums(rows, rest_n)
    for j in range(steps):
        stage = used % stages
        mbarrier.wait(full.index(stage), used // stages & 1)
        if by_index:
            # Threads have copied A, and tensor cores read by another way than they.
            fence_async_shared()
        left = operands_a.index(stage)
        if rows != left.shape[0]:
            left = left.slice(own_row, rows, 0)
        wide = _add_product(left, operands_b.wide.index(stage), wide, b_is_nk)
        # The products of the stage before are over, and their stage with them.
        if rest_n:
            rest = _add_product(left, operands_b.rest.index(stage), rest, b_is_nk)
            wide, rest = warpgroup_mma_wait(2, deps=(wide, rest))
            rest = warpgroup_mma_init(rest)
        else:
            wide = warpgroup_mma_wait(1, deps=(wide,))
        wide = warpgroup_mma_init(wide)
        mbarrier.arrive(empty.index((used + stages - 1) % stages), count=1, pred=(j > 0))
        used += 1
    return wide, rest, used


@gluon.jit
def _no_sums(rows: gl.constexpr, columns: gl.constexpr):
    return warpgroup_mma_init(gl.zeros((rows, columns), gl.float32, layout_of(columns)))


@gluon.jit
def _add_product(left, right, value, b_is_nk: gl.constexpr):
    """left @ right is on its way into `value`."""
    if b_is_nk:
        right = right.permute((1, 0))
    return warpgroup_mma(left, right, value, is_async=True)


@gluon.jit
def multiply_promoted(
    operands_a, operands_b, empty, full, begin, end, used, own_row: gl.constexpr,
    rows: gl.constexpr, tile_n: gl.constexpr, stages: gl.constexpr, scaled,
    per_block: gl.constexpr,
):  # fmt: skip
    """As `multiply`, of fp8, nothing under way at the end: a step's products are added up by this
    consumer while its next one's are multiplied, and the other consumer's.

    Scales of A are applied here: they may lie where the rows do, which are given back when the last
    stage is empty. `per_block` those of B too.
    """
    layout: gl.constexpr = layout_of(tile_n, 1)
    value = gl.zeros((rows, tile_n), gl.float32, layout)
    # In pairs, since sums in flight cannot change names from one round of a loop to the next.
    for j in range(begin, end - 1, 2):
        first, first_scale = _begin_promoted(operands_a, operands_b, full, j, used, own_row, value,
                                             rows, tile_n, stages, scaled, per_block)  # fmt: skip
        second, second_scale = _begin_promoted(operands_a, operands_b, full, j + 1, used + 1,
                                               own_row, value, rows, tile_n, stages, scaled,
                                               per_block)  # fmt: skip
        first, second = warpgroup_mma_wait(1, deps=(first, second))
        mbarrier.arrive(empty.index(used % stages), count=1)
        value += first * first_scale[:, None] if per_block else first
        second = warpgroup_mma_wait(0, deps=(second,))
        mbarrier.arrive(empty.index((used + 1) % stages), count=1, pred=(j + 2 < end))
        value += second * second_scale[:, None] if per_block else second
        used += 2
    if (end - begin) % 2:
        last, last_scale = _begin_promoted(operands_a, operands_b, full, end - 1, used, own_row,
                                           value, rows, tile_n, stages, scaled,
                                           per_block)  # fmt: skip
        last = warpgroup_mma_wait(0, deps=(last,))
        value += last * last_scale[:, None] if per_block else last
        used += 1
    if scaled is not None:
        if not per_block:
            value = value * scales_of_rows(scaled, 0, value)[:, None]
    mbarrier.arrive(empty.index((used + stages - 1) % stages), count=1)
    return value, used


@gluon.jit
def _begin_promoted(
    operands_a, operands_b, full, j, used, own_row: gl.constexpr, value, rows: gl.constexpr,
    tile_n: gl.constexpr, stages: gl.constexpr, scaled, per_block: gl.constexpr,
):  # fmt: skip
    """One step's products are on their way; with the scales that are `per_block`, or a number."""
    stage = used % stages
    mbarrier.wait(full.index(stage), used // stages & 1)
    left = operands_a.index(stage)
    if rows != left.shape[0]:
        left = left.slice(own_row, rows, 0)
    right = operands_b.index(stage).permute((1, 0))
    none = warpgroup_mma_init(gl.zeros((rows, tile_n), gl.float32, layout_of(tile_n, 1)))
    product = warpgroup_mma(left, right, none, use_acc=False, is_async=True)
    scale = 0
    if per_block:
        # Where `full` says that rows have arrived, their scales have.
        scale = scales_of_rows(scaled, j, value) * gl.load(scaled.b + j * scaled.b_k)
    return product, scale
