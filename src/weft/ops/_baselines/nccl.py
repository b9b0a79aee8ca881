"""The vendor's collectives, and products before or behind them: the unfused way.

Each function takes a benchmark's case and returns a Variant. Where m does not divide, ranks pass
shards that were padded beforehand: that copy is not charged to the baseline. A `Way` has the two
parts of an unfused operator for one set of inputs, of which three variants are made: the product
alone, the collective alone, and one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from weft.base.errors import UnsupportedError
from weft.compiler import experts
from weft.compiler.experts import Routing
from weft.tune.case import Case
from weft.tune.variants import Variant


def padded(case: Case, x: torch.Tensor) -> torch.Tensor:
    """This rank's shard with as many rows as the largest; rows of all ranks are then alike.

    Rows are split as torch.chunk splits them, so the first m of the gathered rows are the result.
    """
    rows = case.problem.rows
    if x.shape[0] >= rows:
        return x
    full = torch.zeros((rows, *x.shape[1:]), dtype=x.dtype, device=x.device)
    full[: x.shape[0]] = x
    return full


def even(case: Case, who: str) -> None:
    """Raises  UnsupportedError: rows that do not divide by ranks"""
    if case.problem.m % case.problem.num_ranks:
        raise UnsupportedError(f"{who} takes even splits only, not m={case.problem.m}")


def takes_rows(case: Case, who: str) -> None:
    """Raises  UnsupportedError: fp8 operands as torch's scaled product does not take them"""
    if case.problem.scaling != "rows" or not case.problem.b_is_nk:
        raise UnsupportedError(
            f"{who} takes scales of rows and b as [n, k], not scaling={case.problem.scaling!r}, "
            f"b_is_nk={case.problem.b_is_nk}"
        )


def multiplied(
    a: torch.Tensor, b: torch.Tensor, scales: tuple[Any, Any] | None, out: torch.Tensor
) -> torch.Tensor:
    """torch's product in `out`; of fp8 its scaled one, in full width."""
    if scales is None:
        return torch.matmul(a, b, out=out)
    return torch._scaled_mm(a, b, *scales, out_dtype=out.dtype, use_fast_accum=False, out=out)


def scales_of(case: Case, inputs: Any) -> tuple[Any, Any] | None:
    """Of a rank's own operands.

    Raises  UnsupportedError: fp8 operands as torch's scaled product does not take them
    """
    if not case.problem.scaling:
        return None
    takes_rows(case, "torch._scaled_mm")
    return inputs["scale_a"], inputs["scale_b"]


def each(case: Case, name: str, make: Callable[[Any], Callable[[], Any]], **more: Any) -> Variant:
    """A variant whose call on each set is what `make` makes of its inputs."""
    return Variant(name, [make(inputs) for inputs in case.sets], **more)


def restored(case: Case, buffers: Sequence[torch.Tensor]) -> Callable[[int], None]:
    """What gives buffers the inputs again that calls overwrite: untimed, before each."""
    return lambda index: buffers[index].copy_(case.sets[index]["x"])


def rms_norm(inputs: Any, summed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(normed, total) of a sum over ranks, by two kernels of torch's."""
    from weft.ops.all_reduce_rms_norm import EPS

    total, weight = summed.add_(inputs["residual"]), inputs["weight"]
    return torch.nn.functional.rms_norm(total, weight.shape, weight, EPS), total


def as_one_kernel(function: Callable[..., Any], like: torch.Tensor) -> Callable[..., Any]:
    """What a user would do with many passes over rows: compiled, on GPUs."""
    if not like.is_cuda:
        return function
    # Once for each set of inputs of each point, all from the same lines.
    torch._dynamo.config.recompile_limit = 1000
    return torch.compile(function, fullgraph=True, dynamic=False)


# ---------------------------------------------------------------------------------------------
# Collectives


def _moved(case: Case, collective: Callable[..., Any], rows: int) -> Variant:
    """`collective` of x into a buffer of so many rows."""

    def make(inputs: Any) -> Callable[[], Any]:
        x = padded(case, inputs["x"])
        out = torch.empty((rows, *x.shape[1:]), dtype=x.dtype, device=x.device)

        def call() -> torch.Tensor:
            collective(out, x, group=case.group)
            return out[: case.problem.m]

        return call

    return each(case, "nccl", make)


def all_gather(case: Case) -> Variant:
    rows = case.problem.rows * case.problem.num_ranks
    return _moved(case, dist.all_gather_into_tensor, rows)


def reduce_scatter(case: Case) -> Variant:
    even(case, "reduce_scatter_tensor")
    return _moved(case, dist.reduce_scatter_tensor, case.problem.rows)


def all_to_all(case: Case) -> Variant:
    even(case, "all_to_all_single")
    if case.problem.variable:
        raise UnsupportedError("all_to_all_single takes splits from the host; ours are on devices")
    return _moved(case, dist.all_to_all_single, case.problem.m)


def around(case: Case) -> Variant:
    """Each rank sends to the one that is `hop` behind, and receives from the other side."""
    rank, num_ranks, hop = case.world.rank, case.problem.num_ranks, case.problem.hop
    if num_ranks == 1:
        raise UnsupportedError("a message is for another rank, and there is one alone")

    def make(inputs: Any) -> Callable[[], Any]:
        x = inputs["x"]
        out = x.new_empty((case.problem.out_rows(rank), *x.shape[1:]))

        def call() -> torch.Tensor:
            both = [
                dist.P2POp(dist.isend, x, group_peer=(rank + hop) % num_ranks, group=case.group),
                dist.P2POp(dist.irecv, out, group_peer=(rank - hop) % num_ranks, group=case.group),
            ]
            for work in dist.batch_isend_irecv(both):
                work.wait()
            return out

        return call

    return each(case, "nccl", make)


def all_reduce(case: Case) -> Variant:
    """In place, as torch has it."""
    buffers = [inputs["x"].clone() for inputs in case.sets]

    def call(x: torch.Tensor) -> Any:
        def reduce() -> torch.Tensor:
            dist.all_reduce(x, group=case.group)
            return x

        return reduce

    return Variant("nccl", [call(x) for x in buffers], before=restored(case, buffers))


def all_reduce_rms_norm(case: Case) -> Variant:
    """The library's sum, then torch's addition and fused norm."""

    def make(inputs: Any) -> Any:
        total = torch.empty_like(inputs["x"])

        def both() -> Any:
            # Out of place, as weft is: x is left as it was.
            total.copy_(inputs["x"])
            dist.all_reduce(total, group=case.group)
            return rms_norm(inputs, total)

        return both

    return each(case, "nccl_rms_norm", make)


# ---------------------------------------------------------------------------------------------
# With a product before or behind


class Way:
    """The collective and the product of one set of inputs; `other` is another set's, whose result's
    buffer is used again. `moves_first`: is the product that of what has been moved?"""

    moves_first = True
    names = ("cublas", "nccl", "cublas_nccl")

    def __init__(self, case: Case, inputs: Any, other: Any = None) -> None:
        self.case, self.problem, self.inputs = case, case.problem, inputs

    def rows(self, count: int, columns: int, dtype: str | None = None) -> torch.Tensor:
        kind = getattr(torch, dtype or self.problem.dtype)
        return torch.zeros(count, columns, dtype=kind, device=self.case.world.device)

    def check(self) -> None:
        """Raises  UnsupportedError: what the collective does not take"""

    def move(self) -> Any:
        raise NotImplementedError

    def multiply(self) -> Any:
        raise NotImplementedError

    def both(self) -> Any:
        first, last = self.move, self.multiply
        if not self.moves_first:
            first, last = last, first
        first()
        return last()


def _ways(kind: type[Way], case: Case) -> list[Any]:
    found: list[Any] = []
    for inputs in case.sets:
        found.append(kind(case, inputs, found[0] if found else None))
    return found


def product(kind: type[Way], case: Case) -> Variant:
    """The product alone, of what has been moved; what is summed afterwards is no rank's answer."""
    ways = _ways(kind, case)
    if kind.moves_first:
        for way in ways:
            way.move()
    return Variant(kind.names[0], [way.multiply for way in ways], answers=kind.moves_first)


def collective(kind: type[Way], case: Case) -> Variant:
    """The collective alone: it makes no product, so there is no answer to check."""
    ways = _ways(kind, case)
    ways[0].check()
    return Variant(kind.names[1], [way.move for way in ways], answers=False)


def serial(kind: type[Way], case: Case) -> Variant:
    ways = _ways(kind, case)
    ways[0].check()
    return Variant(kind.names[2], [way.both for way in ways])


class GatherThenMultiply(Way):
    """Of fp8, scales of rows are gathered too, and torch._scaled_mm multiplies, in full width."""

    operands = ("a", "b")  # what is gathered, and what is whole

    def __init__(self, case: Case, inputs: Any, other: Any = None) -> None:
        super().__init__(case, inputs)
        problem = self.problem
        rows = problem.rows * problem.num_ranks
        gathered, whole = self.operands
        self.a, self.b = padded(case, inputs[gathered]), inputs[whole]
        self.gathered = self.rows(rows, problem.k)
        self.out = other.out if other else self.rows(*problem.result, problem.out_dtype)
        self.scales = None
        if problem.scaling:
            takes_rows(case, "torch._scaled_mm")
            self.scale_a = padded(case, inputs["scale_a"])
            self.scales = self.rows(rows, 1, "float32")

    def move(self) -> None:
        whole, own, group = self.gathered, self.a, self.case.group
        if self.scales is not None:
            whole, own = whole.view(torch.uint8), own.view(torch.uint8)
            dist.all_gather_into_tensor(self.scales, self.scale_a, group=group)
        dist.all_gather_into_tensor(whole, own, group=group)

    def multiply(self) -> torch.Tensor:
        m, scales = self.problem.m, None
        if self.scales is not None:
            scales = self.scales[:m], self.inputs["scale_b"]
        return multiplied(self.gathered[:m], self.b, scales, self.out)


class GatherThenContract(GatherThenMultiply):
    """A product that sums over the gathered rows."""

    def __init__(self, case: Case, inputs: Any, other: Any = None) -> None:
        self.operands = ("y", "x") if case.problem.gathers_y else ("x", "y")
        super().__init__(case, inputs, other)

    def multiply(self) -> torch.Tensor:
        x, y = self.gathered[: self.problem.m], self.b
        if self.problem.gathers_y:
            x, y = y, x
        if x.dtype == self.out.dtype:
            return torch.mm(x.t(), y, out=self.out)
        return self.out.copy_(x.t() @ y)


class MultiplyThenReduce(Way):
    """The sum is in place, on what is there."""

    moves_first = False

    def __init__(self, case: Case, inputs: Any, other: Any = None) -> None:
        super().__init__(case, inputs)
        self.whole = self.rows(self.problem.m, self.problem.n, self.problem.result_dtype)
        self.scales = scales_of(case, inputs)

    def multiply(self) -> torch.Tensor:
        return multiplied(self.inputs["a"], self.inputs["b"], self.scales, self.whole)

    def move(self) -> torch.Tensor:
        dist.all_reduce(self.whole, group=self.case.group)
        return self.whole


class MultiplyThenScatter(MultiplyThenReduce):
    def __init__(self, case: Case, inputs: Any, other: Any = None) -> None:
        super().__init__(case, inputs)
        shape = self.problem.rows, self.problem.n
        self.out = other.out if other else self.rows(*shape, self.problem.result_dtype)

    def check(self) -> None:
        even(self.case, "reduce_scatter_tensor")

    def move(self) -> torch.Tensor:
        dist.reduce_scatter_tensor(self.out, self.whole, group=self.case.group)
        return self.out


class GatherThenExperts(Way):
    """Tokens of all ranks, then a row of each slot, then its expert's columns: torch's grouped
    product, by offsets that lie on the device."""

    def __init__(self, case: Case, inputs: Any, other: Any = None) -> None:
        super().__init__(case, inputs)
        self.routing = Routing.of(inputs, self.problem.tile_m, self.problem.split_experts)
        self.x = padded(case, inputs["x"])
        self.gathered = self.rows(self.problem.rows * self.problem.num_ranks, self.problem.k)

    def check(self) -> None:
        if self.problem.split_experts:
            raise UnsupportedError(
                "torch's grouped product leaves rows behind the last slot undefined: it has no "
                "answer to check with split_experts"
            )

    def move(self) -> None:
        dist.all_gather_into_tensor(self.gathered, self.x, group=self.case.group)

    def multiply(self) -> torch.Tensor:
        rows = experts.gather_rows(self.gathered, self.routing)
        return experts.grouped_matmul(rows, self.inputs["b"], self.routing)


class ExpertsThenReduce(MultiplyThenReduce):
    """Each slot's product, the weighted sum of a token's choices, then the sum over ranks."""

    def __init__(self, case: Case, inputs: Any, other: Any = None) -> None:
        super().__init__(case, inputs, other)
        self.routing = Routing.of(inputs, self.problem.tile_m, self.problem.split_experts)
        self.sums = other.sums if other else as_one_kernel(experts.scatter_rows, inputs["x"])

    def multiply(self) -> torch.Tensor:
        slots = experts.grouped_matmul(self.inputs["x"], self.inputs["b"], self.routing)
        self.whole = self.sums(slots, self.routing)
        return self.whole


class ExpertsThenScatter(ExpertsThenReduce, MultiplyThenScatter):
    """The same, of which each rank has its own tokens' part."""
