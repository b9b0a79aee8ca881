"""What a call of ag_gemm is asked for; how it is done is in _ag_gemm_config.py.

Not an operator: a part of ag_gemm.py, which see.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from weft.base.dtypes import DTYPES, FLOATS, parse_dtype
from weft.base.errors import DtypeError, ShapeError
from weft.base.parts import full_part, part_of

FP8 = ("float8_e4m3fn", "float8_e5m2")
# Scales: one for each row of A and column of B, perhaps the same; or for 1 x 128 of A and
# 128 x 128 of B.
ROWS, BLOCKS = "rows", "blocks"
SUPPORTED = (*FLOATS, *FP8)


@dataclass(frozen=True)
class Problem:
    """m rows over all ranks, n columns and k of each rank; dtypes by torch's names.

    `b_is_nk`: B lies in memory as [n, k], as weights usually do. Sums are in fp32. `nodes` counts
    the ranks of each scale-up domain; () is one domain. `scaling`, of fp8 alone, says what has a
    scale: "rows" (and columns of B) or "blocks"; results are then bfloat16 unless told otherwise.
    """

    m: int
    n: int
    k: int
    num_ranks: int
    dtype: str = "bfloat16"
    out_dtype: str = ""
    b_is_nk: bool = False
    nodes: tuple[int, ...] = ()
    scaling: str = ""

    op: ClassVar[str] = "ag_gemm"

    def __post_init__(self) -> None:
        scaled = parse_dtype(self.dtype).name in FP8
        usual = "bfloat16" if scaled else self.dtype
        for name, known in (("dtype", SUPPORTED), ("out_dtype", FLOATS)):
            dtype = parse_dtype(getattr(self, name) or usual).name
            if dtype not in known:
                raise DtypeError(f"{self.op}: {name} {dtype}; it takes {', '.join(known)}")
            object.__setattr__(self, name, dtype)
        if scaled and not self.scaling:
            object.__setattr__(self, "scaling", ROWS)
        kinds = (ROWS, BLOCKS) if scaled else ("",)
        if self.scaling not in kinds:
            raise DtypeError(f"{self.op}: scaling={self.scaling!r} of {self.dtype} operands")
        for name in ("m", "n", "k"):
            if getattr(self, name) < 0:
                raise ShapeError(f"{self.op}: {name}={getattr(self, name)} is negative")
        if self.num_ranks < 1:
            raise ShapeError(f"{self.op}: num_ranks={self.num_ranks}; at least one is needed")

    @property
    def result(self) -> tuple[int, int]:
        """Rows and columns of what a rank ends with."""
        return self.m, self.n

    @property
    def rows(self) -> int:
        """Rows of a full shard."""
        return full_part(self.m, self.num_ranks)

    def shard(self, rank: int) -> tuple[int, int]:
        """The rows first .. end - 1 that `rank` holds."""
        return part_of(self.m, rank, self.num_ranks)

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize

    @property
    def out_itemsize(self) -> int:
        return DTYPES[self.out_dtype].itemsize

    @property
    def shard_bytes(self) -> int:
        return self.rows * self.k * self.itemsize

    @property
    def flops(self) -> int:
        """Of one rank."""
        return 2 * self.m * self.n * self.k

    @property
    def gathered_bytes(self) -> int:
        """What one rank receives when all shards are full."""
        return (self.m - min(self.rows, self.m)) * self.k * self.itemsize

    @property
    def memory_bytes(self) -> int:
        """What one rank's GEMM must read and write at least."""
        operands = (self.m + self.n) * self.k * self.itemsize
        return operands + self.m * self.n * self.out_itemsize
