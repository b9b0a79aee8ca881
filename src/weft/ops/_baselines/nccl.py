"""The vendor's collectives, and its product after them: the unfused way that all is measured by.

Each function takes a benchmark's case and returns a Variant. Where m does not divide, ranks pass
shards that were padded beforehand: that copy is not charged to the baseline.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from weft.base.errors import UnsupportedError
from weft.tune.case import Case
from weft.tune.variants import Variant


def padded(case: Case, x: torch.Tensor) -> torch.Tensor:
    """This rank's shard with as many rows as the largest; rows of all ranks are then alike.

    Rows are split as torch.chunk splits them, so the first m of the gathered rows are the result.
    """
    rows = case.problem.rows
    if x.shape[0] == rows:
        return x
    full = torch.zeros((rows, *x.shape[1:]), dtype=x.dtype, device=x.device)
    full[: x.shape[0]] = x
    return full


def even(case: Case, who: str) -> None:
    """Raises  UnsupportedError: rows that do not divide by ranks"""
    if case.problem.m % case.problem.num_ranks:
        raise UnsupportedError(f"{who} takes even splits only, not m={case.problem.m}")


def all_gather(case: Case) -> Variant:
    def call(inputs: Any) -> Any:
        x = padded(case, inputs["x"])
        out = torch.empty((x.shape[0] * case.problem.num_ranks, *x.shape[1:]), dtype=x.dtype,
                          device=x.device)  # fmt: skip

        def gather() -> torch.Tensor:
            dist.all_gather_into_tensor(out, x, group=case.group)
            return out[: case.problem.m]

        return gather

    return Variant("nccl", [call(inputs) for inputs in case.sets])


def reduce_scatter(case: Case) -> Variant:
    even(case, "reduce_scatter_tensor")

    def call(inputs: Any) -> Any:
        x = inputs["x"]
        out = torch.empty((case.problem.rows, *x.shape[1:]), dtype=x.dtype, device=x.device)

        def scatter() -> torch.Tensor:
            dist.reduce_scatter_tensor(out, x, group=case.group)
            return out

        return scatter

    return Variant("nccl", [call(inputs) for inputs in case.sets])


def all_reduce(case: Case) -> Variant:
    """In place, as torch has it: what it overwrites is restored, untimed, before each call."""
    buffers = [inputs["x"].clone() for inputs in case.sets]

    def call(x: torch.Tensor) -> Any:
        def reduce() -> torch.Tensor:
            dist.all_reduce(x, group=case.group)
            return x

        return reduce

    def restore(index: int) -> None:
        buffers[index].copy_(case.sets[index]["x"])

    return Variant("nccl", [call(x) for x in buffers], before=restore)


def all_reduce_rms_norm(case: Case) -> Variant:
    """The library's sum, then torch's addition and fused norm."""
    sums = [torch.empty_like(inputs["x"]) for inputs in case.sets]

    def call(inputs: Any, total: torch.Tensor) -> Any:
        def both() -> Any:
            # Out of place, as weft is: x is left as it was.
            total.copy_(inputs["x"])
            dist.all_reduce(total, group=case.group)
            return rms_norm(inputs, total)

        return both

    return Variant("nccl_rms_norm", list(map(call, case.sets, sums)))


def rms_norm(inputs: Any, summed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(normed, total) of a sum over ranks, by two kernels of torch's."""
    from weft.ops.all_reduce_rms_norm import EPS

    total = summed.add_(inputs["residual"])
    weight = inputs["weight"]
    return torch.nn.functional.rms_norm(total, weight.shape, weight, EPS), total


def all_to_all(case: Case) -> Variant:
    even(case, "all_to_all_single")
    if case.problem.variable:
        raise UnsupportedError("all_to_all_single takes splits from the host; ours are on devices")

    def call(inputs: Any) -> Any:
        x, out = inputs["x"], torch.empty_like(inputs["x"])

        def exchange() -> torch.Tensor:
            dist.all_to_all_single(out, x, group=case.group)
            return out

        return exchange

    return Variant("nccl", [call(inputs) for inputs in case.sets])


# ---------------------------------------------------------------------------------------------
# With a product behind


class GatherThenMultiply:
    """Buffers of the unfused all-gather and product, one of each for every set of inputs.

    Of fp8, scales of rows are gathered too, and torch._scaled_mm multiplies, in full width.
    """

    def __init__(self, case: Case) -> None:
        problem, world = case.problem, case.world
        dtype, out_dtype = (getattr(torch, x) for x in (problem.dtype, problem.out_dtype))
        rows = problem.rows * problem.num_ranks
        self.case = case
        rows_of, whole_of = self.operands()
        self.a = [padded(case, inputs[rows_of]) for inputs in case.sets]
        self.b = [inputs[whole_of] for inputs in case.sets]
        self.gathered = [
            torch.empty(rows, problem.k, dtype=dtype, device=world.device) for _ in case.sets
        ]
        self.out = torch.empty(problem.result, dtype=out_dtype, device=world.device)
        self.scale_a, self.scales = [], []
        if problem.scaling:
            takes_rows(case, "torch._scaled_mm")
            self.scale_a = [padded(case, inputs["scale_a"]) for inputs in case.sets]
            self.scales = [torch.empty(rows, 1, device=world.device) for _ in case.sets]

    def operands(self) -> tuple[str, str]:
        """What is gathered, and what is whole."""
        return "a", "b"

    def gather(self, i: int) -> None:
        group = self.case.group
        if not self.scales:
            dist.all_gather_into_tensor(self.gathered[i], self.a[i], group=group)
            return
        whole, own = (x.view(torch.uint8) for x in (self.gathered[i], self.a[i]))
        dist.all_gather_into_tensor(whole, own, group=group)
        dist.all_gather_into_tensor(self.scales[i], self.scale_a[i], group=group)

    def multiply(self, i: int) -> torch.Tensor:
        m = self.case.problem.m
        if not self.scales:
            return torch.matmul(self.gathered[i][:m], self.b[i], out=self.out)
        scale_b = self.case.sets[i]["scale_b"]
        return torch._scaled_mm(
            self.gathered[i][:m], self.b[i], self.scales[i][:m], scale_b,
            out_dtype=self.out.dtype, use_fast_accum=False, out=self.out,
        )  # fmt: skip

    def serial(self, i: int) -> torch.Tensor:
        self.gather(i)
        return self.multiply(i)

    def calls(self, function: Any) -> list[Any]:
        return [lambda i=i: function(i) for i in range(len(self.case.sets))]


class GatherThenContract(GatherThenMultiply):
    """The same with a product that sums over the gathered rows."""

    def operands(self) -> tuple[str, str]:
        return ("y", "x") if self.case.problem.gathers_y else ("x", "y")

    def multiply(self, i: int) -> torch.Tensor:
        gathered, whole = self.gathered[i][: self.case.problem.m], self.b[i]
        if self.case.problem.gathers_y:
            return self._product(whole, gathered)
        return self._product(gathered, whole)

    def _product(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if x.dtype == self.out.dtype:
            return torch.mm(x.t(), y, out=self.out)
        return self.out.copy_(x.t() @ y)


def takes_rows(case: Case, who: str) -> None:
    """Raises  UnsupportedError: fp8 operands as torch's scaled product does not take them"""
    if case.problem.scaling != "rows" or not case.problem.b_is_nk:
        raise UnsupportedError(
            f"{who} takes scales of rows and b as [n, k], not scaling={case.problem.scaling!r}, "
            f"b_is_nk={case.problem.b_is_nk}"
        )


def ag_gemm_product(case: Case) -> Variant:
    """cuBLAS alone, on rows that are gathered already."""
    way = GatherThenMultiply(case)
    for i in range(len(case.sets)):
        way.gather(i)
    return Variant("cublas", way.calls(way.multiply))


def ag_gemm_gather(case: Case) -> Variant:
    """NCCL alone; it makes no product, so there is no answer to check."""
    way = GatherThenMultiply(case)
    return Variant("nccl", way.calls(way.gather), answers=False)


def ag_gemm_serial(case: Case) -> Variant:
    way = GatherThenMultiply(case)
    return Variant("cublas_nccl", way.calls(way.serial))


def ag_wgrad_product(case: Case) -> Variant:
    """cuBLAS alone, on rows that are gathered already."""
    way = GatherThenContract(case)
    for i in range(len(case.sets)):
        way.gather(i)
    return Variant("cublas", way.calls(way.multiply))


def ag_wgrad_gather(case: Case) -> Variant:
    """NCCL alone; it makes no product, so there is no answer to check."""
    way = GatherThenContract(case)
    return Variant("nccl", way.calls(way.gather), answers=False)


def ag_wgrad_serial(case: Case) -> Variant:
    way = GatherThenContract(case)
    return Variant("cublas_nccl", way.calls(way.serial))


class Multiply:
    """A product on every rank, of all m rows, and one buffer of it for every set of inputs."""

    def __init__(self, case: Case, rows: int = 0) -> None:
        problem, device = case.problem, case.world.device
        self.case = case
        self.whole = [
            torch.empty(problem.m, problem.n, dtype=problem.torch_dtype, device=device)
            for _ in case.sets
        ]
        self.out = torch.empty(rows, problem.n, dtype=problem.torch_dtype, device=device)

    def multiply(self, i: int) -> torch.Tensor:
        inputs = self.case.sets[i]
        return torch.matmul(inputs["a"], inputs["b"], out=self.whole[i])

    def scatter(self, i: int) -> torch.Tensor:
        dist.reduce_scatter_tensor(self.out, self.whole[i], group=self.case.group)
        return self.out

    def reduce(self, i: int) -> torch.Tensor:
        dist.all_reduce(self.whole[i], group=self.case.group)
        return self.whole[i]

    def then(self, collective: Any) -> list[Any]:
        """The product, and what sums it over ranks."""
        return self.calls(lambda i: (self.multiply(i), collective(i))[1])

    def calls(self, function: Any) -> list[Any]:
        return [lambda i=i: function(i) for i in range(len(self.case.sets))]


def _alone(way: Multiply) -> Variant:
    """cuBLAS alone: a rank's product is no rank's answer."""
    return Variant("cublas", way.calls(way.multiply), answers=False)


def gemm_rs_product(case: Case) -> Variant:
    return _alone(Multiply(case))


def _scattering(case: Case) -> Multiply:
    even(case, "reduce_scatter_tensor")
    return Multiply(case, case.problem.rows)


def gemm_rs_scatter(case: Case) -> Variant:
    way = _scattering(case)
    return Variant("nccl", way.calls(way.scatter), answers=False)


def gemm_rs_serial(case: Case) -> Variant:
    way = _scattering(case)
    return Variant("cublas_nccl", way.then(way.scatter))


def gemm_ar_product(case: Case) -> Variant:
    return _alone(Multiply(case))


def gemm_ar_reduce(case: Case) -> Variant:
    """In place, on what is there: only its time is asked for."""
    way = Multiply(case)
    for buffer in way.whole:
        buffer.zero_()
    return Variant("nccl", way.calls(way.reduce), answers=False)


def gemm_ar_serial(case: Case) -> Variant:
    way = Multiply(case)
    return Variant("cublas_nccl", way.then(way.reduce))
