"""How a product is cut into tiles on a target: extents, warps, stages; what fits, what to try."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from triton.tools.tensor_descriptor import TensorDescriptor

from weft.base.dtypes import parse_dtype
from weft.base.errors import ConfigError
from weft.base.target import Target

# What TMA asks of the address and the length of a row.
TMA_BYTES = 16
# The largest extent of a tile that TMA moves.
TMA_EXTENT = 256


@dataclass(frozen=True)
class Blocking:
    """The tile of one program of the GEMM template, and what runs it."""

    tile_m: int
    tile_n: int
    tile_k: int
    num_warps: int
    num_stages: int

    def num_tiles(self, m: int, n: int) -> int:
        return ceil(m / self.tile_m) * ceil(n / self.tile_n)

    def shared_bytes(self, dtype: str, out_dtype: str, tma: bool, target: Target) -> int:
        """Shared memory of one program: stages of both operands, C's tile on its way out."""
        # AMD keeps one stage of the loop in registers.
        stages = max(1, self.num_stages - (target.backend == "hip"))
        operands = (self.tile_m + self.tile_n) * self.tile_k * parse_dtype(dtype).itemsize
        result = self.tile_m * self.tile_n * parse_dtype(out_dtype).itemsize if tma else 0
        return stages * operands + result

    def check(self, op: str, dtype: str, out_dtype: str, tma: bool, target: Target) -> None:
        """Raises  ConfigError: extents, stages or warps that `target` cannot run"""
        extents = {"tile_m": self.tile_m, "tile_n": self.tile_n, "tile_k": self.tile_k}
        for name, extent in extents.items():
            if extent < 16 or extent & (extent - 1):
                raise ConfigError(f"{op}: {name}={extent}; it must be a power of two from 16 on")
            if tma and extent > TMA_EXTENT and target.backend != "emu":
                raise ConfigError(f"{op}: {name}={extent}; TMA moves tiles up to {TMA_EXTENT}")
        if self.tile_k < (least := _least_k(dtype)):
            raise ConfigError(f"{op}: tile_k={self.tile_k}; of {dtype} it must be {least} at least")
        if self.num_warps not in (1, 2, 4, 8, 16):
            raise ConfigError(f"{op}: num_warps={self.num_warps}; it must be 1, 2, 4, 8 or 16")
        if not 1 <= self.num_stages <= 8:
            raise ConfigError(f"{op}: num_stages={self.num_stages}; it must be between 1 and 8")
        needed = self.shared_bytes(dtype, out_dtype, tma, target)
        if needed > target.shared_bytes and target.backend != "emu":
            raise ConfigError(
                f"{op}: tile {self.tile_m} x {self.tile_n} x {self.tile_k} with "
                f"{self.num_stages} stages needs {needed} bytes of shared memory, {target} has "
                f"{target.shared_bytes}; take fewer stages or a smaller tile"
            )


def candidates(m: int, n: int, k: int, dtype: str, target: Target) -> Iterator[Blocking]:
    """Blockings worth measuring for [m, k] @ [k, n], the best guess first."""
    if target.backend == "emu":
        # Few large tiles cost least there, but more than one along each side tests more.
        largest = 64 if min(m, n, k) >= 128 else 32
        tile_m, tile_n, tile_k = (min(largest, _power_of_two(extent)) for extent in (m, n, k))
        yield Blocking(tile_m, tile_n, max(_least_k(dtype), tile_k), 4, 2)
        return
    element = parse_dtype(dtype)
    if element.name == "float32":  # exact products: no tensor core, registers decide
        yield Blocking(64, 64, 16, 4, 2)
        yield Blocking(32, 64, 16, 4, 2)
        return
    small_m = min(64, _power_of_two(m))
    if any(extent * element.itemsize % TMA_BYTES for extent in (n, k)):
        # Loaded element by element, through registers.
        yield Blocking(small_m, 64, 32, 4, 2)
        return
    if target.backend == "hip":
        yield Blocking(128, 128, 64 if target.arch == "gfx950" else 32, 8, 2)
        yield Blocking(64, 64, 64, 4, 2)
        return
    if target.arch == 80:
        large, medium = Blocking(128, 128, 32, 8, 3), Blocking(64, 128, 32, 4, 4)
        small = Blocking(small_m, 64, 64, 4, 4)
    else:
        large, medium = Blocking(128, 256, 64, 8, 3), Blocking(128, 128, 64, 8, 4)
        small = Blocking(small_m, 64, 128, 4, 4)
    if m <= 64:
        yield small
    elif large.num_tiles(m, n) < target.num_sms:
        yield from (medium, small, large)
    else:
        yield from (large, medium, small)


def _least_k(dtype: str) -> int:
    """What tensor cores take of k at least: 32 of 8-bit elements."""
    return 32 if parse_dtype(dtype).itemsize == 1 else 16


def _power_of_two(extent: int) -> int:
    """The smallest power of two that holds `extent`, 16 at least: what a dot takes."""
    return max(16, 1 << max(extent - 1, 0).bit_length())


def are_aligned(*tensors: Any) -> bool:
    """Do they all begin where TMA can read them?"""
    return not any(one.data_ptr() % TMA_BYTES for one in tensors)


def can_use_tma(target: Target, row_bytes: Sequence[int]) -> bool:
    """Can rows of these lengths be moved by TMA there?"""
    return target.has_tma and all(size > 0 and size % TMA_BYTES == 0 for size in row_bytes)


def descriptor(tensor: Any, block: Sequence[int]) -> Any:
    """A TMA descriptor of a 2-D tensor for tiles of `block`; a kernel takes it as an argument."""
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), list(block))
