"""The size of an operator's work: rows of all ranks, how they are cut, random inputs of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from weft.base import topology
from weft.base.dtypes import DTYPES, FLOATS, parse_dtype
from weft.base.errors import DtypeError, ShapeError
from weft.base.parts import full_part, part_of
from weft.base.target import Target
from weft.compiler import Tensor, layouts, schedules
from weft.plan import launches


def check_sizes(op: str, num_ranks: int, **sizes: int) -> None:
    """Raises  ShapeError: a size that is no whole number or below 0, or no rank"""
    for name, size in sizes.items():
        if not hasattr(size, "__index__"):  # sizes of traced tensors are no ints
            raise ShapeError(f"{op}: {name}={size!r} is not a whole number; use // or int()")
        if size < 0:
            raise ShapeError(f"{op}: {name}={size} is negative")
    if num_ranks < 1:
        raise ShapeError(f"{op}: num_ranks={num_ranks}; at least one is needed")


class Split:
    """What follows of a problem from m, num_ranks and dtype: rows are split as torch.chunk does."""

    m: int
    num_ranks: int
    dtype: str

    @property
    def rows(self) -> int:
        """Rows of a full shard."""
        return full_part(self.m, self.num_ranks)

    def shard(self, rank: int) -> tuple[int, int]:
        """The rows first .. end - 1 that `rank` holds."""
        return part_of(self.m, rank, self.num_ranks)

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize

    @property
    def is_even(self) -> bool:
        """Have all ranks the same number of rows?"""
        return self.m % self.num_ranks == 0


@dataclass(frozen=True)
class Rows(Split):
    """m rows of n elements, cut as torch.chunk cuts them: ceil(m / num_ranks) to a rank.

    `nodes` counts the ranks of each scale-up domain; () is one domain. `in_place`: x lies in
    symmetric memory, at one offset on all ranks, so that peers may read it there.
    """

    m: int
    n: int
    num_ranks: int
    dtype: str = "bfloat16"
    nodes: tuple[int, ...] = ()
    in_place: bool = field(default=False, kw_only=True)

    op: ClassVar[str]
    dtypes: ClassVar[tuple[str, ...]] = FLOATS

    def __post_init__(self) -> None:
        dtype = parse_dtype(self.dtype).name
        if dtype not in self.dtypes:
            raise DtypeError(f"{self.op}: dtype {dtype}; it takes {', '.join(self.dtypes)}")
        object.__setattr__(self, "dtype", dtype)
        check_sizes(self.op, self.num_ranks, m=self.m, n=self.n)
        object.__setattr__(self, "nodes", self.nodes or (self.num_ranks,))
        if sum(self.nodes) != self.num_ranks or min(self.nodes) < 1:
            raise ShapeError(
                f"{self.op}: nodes={self.nodes} hold {sum(self.nodes)} ranks, not {self.num_ranks}"
            )

    @property
    def row_bytes(self) -> int:
        return self.n * self.itemsize

    @property
    def shard_bytes(self) -> int:
        return self.rows * self.row_bytes

    @property
    def is_empty(self) -> bool:
        return 0 in (self.m, self.n)


class OfProduct(Split):
    """What follows of a product's problem from its sizes; m rows in all, n and k of a rank."""

    op: ClassVar[str]
    sizes: ClassVar[tuple[str, ...]] = ("m", "n", "k")
    transports: ClassVar[tuple[str, ...]]
    templates: ClassVar[tuple[str, ...]] = schedules.TEMPLATES
    # Does the kernel that multiplies send its tiles itself, or wait for others' rows?
    sends_tiles: ClassVar[bool] = True
    # What the template for Hopper and the library take, for messages.
    of_sm90: ClassVar[tuple[str, str]] = "", "16-bit operands"
    of_library: ClassVar[str] = ""
    n: int
    k: int
    nodes: tuple[int, ...]
    b_is_nk: bool

    @property
    def is_empty(self) -> bool:
        return 0 in (self.m, self.n, self.k)

    def result_of(self, rank: int) -> tuple[int, int]:
        """Rows and columns of what a rank ends with."""
        raise NotImplementedError

    @property
    def result_dtype(self) -> str:
        """What results, and shares of them that travel, are rounded to."""
        return self.dtype

    def types(self) -> dict[str, Tensor]:
        """Of the program's parameters, with m open."""
        raise NotImplementedError

    @property
    def options(self) -> dict[str, str]:
        """What the traced function takes beside its tensors."""
        return {}

    @property
    def can_relay(self) -> bool:
        """Is what reaches other nodes' ranks relayed?"""
        return schedules.can_relay(self)

    def can_use_tma(self, target: Target) -> bool:
        return launches.can_use_tma(self, self.itemsize, target)

    def can_use_sm90(self, target: Target) -> bool:
        """Does the template for Hopper take this problem there?"""
        # What is relayed stays within the node.
        is_near = self.can_relay or not self.sends_tiles
        nodes = () if is_near else self.nodes
        is_asked = launches.is_for_hopper(self.itemsize, nodes, target, self.b_is_nk)
        return is_asked and self.can_use_tma(target)


def product_of(op: str, a: Any, b: Any, world: Any) -> tuple[int, int, int, bool]:
    """m, n and k of a rank's product a @ b, and whether b lies as [n, k].

    Raises  ShapeError, DtypeError: matrices that do not fit together, or the world; PlacementError
    """
    for name, tensor in (("a", a), ("b", b)):
        if tensor.dim() != 2:
            shape = tuple(tensor.shape)
            raise ShapeError(f"{op}: {name} has shape {shape}; it must have two dimensions")
    (m, k), (k_b, n) = a.shape, b.shape
    if k != k_b:
        raise ShapeError(f"{op}: a has k={k} but b has k={k_b}; pass b as [k, n], not [n, k]")
    if a.dtype != b.dtype:
        raise DtypeError(f"{op}: a is {a.dtype} but b is {b.dtype}; convert one of them")
    layouts.check_tensor(op, "a", a, world)
    is_t = not b.is_contiguous() and b.t().is_contiguous()
    layouts.check_tensor(op, "b.t()" if is_t else "b", b.t() if is_t else b, world)
    return m, n, k, is_t


def nodes_of(world: Any) -> tuple[int, ...]:
    """Ranks on each node of the world."""
    return topology.sizes_of(world.backend.seats.nodes)


def random_rows(problem: Any, rank: int, rows: int, seed: int) -> torch.Tensor:
    """Normal random numbers, or small integers, of the problem's dtype."""
    generator = torch.Generator().manual_seed(seed * problem.num_ranks + rank)
    size = (rows, problem.n)
    if DTYPES[problem.dtype].is_float:
        return torch.randn(size, generator=generator).to(problem.torch_dtype)
    return torch.randint(0, 100, size, generator=generator).to(problem.torch_dtype)


def sum_over_ranks(inputs: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    """All ranks' x, added in fp32 in the order of ranks; not rounded."""
    total = inputs[0]["x"].float()
    for one in inputs[1:]:
        total = total + one["x"].float()
    return total
