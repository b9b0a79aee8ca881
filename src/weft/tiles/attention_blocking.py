"""How attention is cut into tiles on a target: the largest that spill no registers there.

Extents were found by compiling the kernels; the tests of the operators compile them again.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from weft.base.errors import ConfigError, ShapeError
from weft.base.target import Target
from weft.tiles.attention import padded_head

# Keys of a split of decode attention: with fewer, merging would cost what splitting saves.
FEWEST_KEYS = 256
# A number of splits may take so much longer than the best one, if it has fewer.
NEARLY = 1.05


# The longest head.
MOST_D = 256


def check_heads(op: str, q_heads: int, kv_heads: int, d: int) -> None:
    """Raises  ShapeError: heads that are too long, or whose number is no multiple of the keys'"""
    if not 1 <= d <= MOST_D:
        raise ShapeError(f"{op}: heads of d={d}; they have 1 to {MOST_D} elements")
    if kv_heads < 1 or q_heads < 1 or q_heads % kv_heads:
        text = f"q has {q_heads} heads, k and v have {kv_heads}"
        raise ShapeError(f"{op}: {text}; each head of k serves as many of q, one at least")


class Blocking(NamedTuple):
    """m rows of queries by n keys at a time, and how the kernel is compiled."""

    m: int
    n: int
    num_warps: int = 8
    num_stages: int = 2

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}

    def check(self, op: str, d: int, itemsize: int, target: Target) -> None:
        """Raises  ConfigError: queries, and stages of keys and of values, need too much memory"""
        rows = self.m + 2 * self.num_stages * self.n
        needed = rows * padded_head(d) * itemsize
        if needed > target.shared_bytes and target.backend != "emu":
            raise ConfigError(
                f"{op}: tile_m={self.m}, tile_n={self.n} with {self.num_stages} stages and d={d} "
                f"needs {needed} bytes of shared memory, {target} has {target.shared_bytes}; take "
                "fewer stages or a smaller tile"
            )


def forward(d: int, itemsize: int, target: Target) -> Blocking:
    """For weft.tiles.attention, of heads of d elements."""
    d = padded_head(d)
    if target.backend == "emu":
        return Blocking(16, 32, 4)
    if itemsize == 4:
        # Exact products, without tensor cores: a thread holds its rows of what is multiplied. Of
        # heads of 256 with several sequences 288 bytes are spilled on sm_90a.
        return Blocking(16, 16, 8, 1)
    if target.backend == "hip":
        return Blocking(128 if d <= 128 else 64, 32, 4, 1)
    if target.arch == 90:
        return Blocking(128, 64) if d <= 128 else Blocking(64, 32)
    if target.arch == 100 and d in (64, 256):
        return Blocking(128, 64) if d == 64 else Blocking(64, 32, num_stages=1)
    if target.arch == 80 and d == 256:
        return Blocking(64, 16)
    return Blocking(64, 32, 4 if target.arch == 80 and d < 64 else 8)


def backward(d: int, itemsize: int, target: Target, *, of_keys: bool) -> Blocking:
    """For weft.tiles.attention_backward: tiles of queries, or (`of_keys`) of keys."""
    if target.backend == "emu":
        return Blocking(16, 32, 4, 1)
    if itemsize == 4:
        return Blocking(16, 16, 8, 1)
    if target.backend == "hip":
        return Blocking(32, 32, 4, 1)
    if padded_head(d) > 128:
        return Blocking(32 if of_keys else 16, 32, 8, 1)
    # Triton 3.7 does not compile the pipelined loop over queries.
    return Blocking(64, 32, 8, 1) if of_keys else Blocking(64, 64, 8, 2)


def decode(d: int, group: int, itemsize: int, target: Target, *, by_packets: bool) -> Blocking:
    """For weft.tiles.attention_decode, where `group` query heads share a head of the cache."""
    if target.backend == "emu":
        return Blocking(16, 16, 4, 1)
    columns = padded_head(d)
    # Products of fp32 have whole rows in registers; packets have flags beside what they carry.
    is_small = itemsize == 4 or target.backend == "hip"
    most = 16 if is_small or columns > 128 else 32 if by_packets else 64
    m = min(padded_head(group), most)
    n = 64 if columns * itemsize <= 256 else 32
    if d * itemsize % 16 or itemsize == 4:
        n = 16
    return Blocking(m, n, 8 if m * columns > 16 * 128 else 4, 2 if m > 16 or n < 64 else 3)


def splits_of(tiles: int, programs: int, keys: int) -> int:
    """How many splits of each tile's keys: the fewest that are nearly as fast as any.

    A call takes as long as the program with the most (tile, split) units.
    """
    tiles, most = max(1, tiles), max(1, ceil(keys / FEWEST_KEYS))
    tried = range(1, min(most, 2 * ceil(programs / tiles) + 2) + 1)
    took = {splits: ceil(tiles * splits / programs) / splits for splits in tried}
    return next(splits for splits in tried if took[splits] <= NEARLY * min(took.values()))
