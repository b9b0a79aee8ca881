"""torch's collectives and fused operators over symmetric memory, and plain copy-engine pulls.

Each function takes a benchmark's case and returns a Variant. Inputs lie in symmetric memory from
the start where the operation reads them there: that copy is not charged to the baseline. Nothing
here uses multicast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed._symmetric_memory as symmetric

from weft.base.errors import UnsupportedError
from weft.ops._baselines.nccl import (
    each,
    even,
    multiplied,
    padded,
    restored,
    rms_norm,
    scales_of,
    takes_rows,
)
from weft.tune.case import Case
from weft.tune.variants import Variant


def symmetric_copy(case: Case, x: torch.Tensor) -> torch.Tensor:
    """`x` in symmetric memory, known to all ranks."""
    there = symmetric.empty(x.shape, dtype=x.dtype, device=x.device)
    symmetric.rendezvous(there, case.group.group_name)
    return there.copy_(x)


def _find(name: str) -> Any:
    """The operation torch.ops.symm_mem.`name`.

    Raises  UnsupportedError: this torch has none
    """
    if not hasattr(torch.ops.symm_mem, name):
        raise UnsupportedError(f"torch {torch.__version__} has no torch.ops.symm_mem.{name}")
    return getattr(torch.ops.symm_mem, name)


# ---------------------------------------------------------------------------------------------
# All-reduce


def one_shot_all_reduce(case: Case) -> Variant:
    operation, group = _find("one_shot_all_reduce_out"), case.group.group_name

    def make(inputs: Any) -> Callable[[], Any]:
        x = symmetric_copy(case, inputs["x"])
        out = torch.empty_like(x, device=x.device)
        return lambda: operation(x, "sum", group, out)

    return each(case, "torch_one_shot", make)


def two_shot_all_reduce(case: Case) -> Variant:
    """In place."""
    operation, group = _find("two_shot_all_reduce_"), case.group.group_name
    buffers = [symmetric_copy(case, inputs["x"]) for inputs in case.sets]
    calls = [lambda x=x: operation(x, "sum", group) for x in buffers]
    return Variant("torch_two_shot", calls, before=restored(case, buffers))


def _reduce_then_norm(case: Case, name: str) -> Variant:
    """The sum of what lies in symmetric memory, which two-shot overwrites, then torch's addition
    and fused norm."""
    operation, group = _find(f"{name}_all_reduce_out"), case.group.group_name
    buffers = [symmetric_copy(case, inputs["x"]) for inputs in case.sets]

    def call(inputs: Any, x: torch.Tensor) -> Callable[[], Any]:
        total = torch.empty_like(x)

        def both() -> Any:
            operation(x, "sum", group, total)
            return rms_norm(inputs, total)

        return both

    calls = list(map(call, case.sets, buffers))
    return Variant(f"torch_{name}_rms_norm", calls, before=restored(case, buffers))


def one_shot_rms_norm(case: Case) -> Variant:
    return _reduce_then_norm(case, "one_shot")


def two_shot_rms_norm(case: Case) -> Variant:
    return _reduce_then_norm(case, "two_shot")


# ---------------------------------------------------------------------------------------------
# All-gather and reduce-scatter


def _low_contention(case: Case, name: str, *more: str) -> Variant:
    even(case, name)
    operation, group = _find(name), case.group.group_name
    wait = torch.ops._c10d_functional.wait_tensor

    def make(inputs: Any) -> Callable[[], Any]:
        x = symmetric_copy(case, inputs["x"])
        return lambda: wait(operation(x, *more, group))

    return each(case, "torch_low_contention", make)


def low_contention_all_gather(case: Case) -> Variant:
    return _low_contention(case, "_low_contention_all_gather")


def low_contention_reduce_scatter(case: Case) -> Variant:
    return _low_contention(case, "_low_contention_reduce_scatter", "sum")


def reduce_scatter_out(case: Case) -> Variant:
    even(case, "reduce_scatter_out")
    operation, group = _find("reduce_scatter_out"), case.group.group_name

    def make(inputs: Any) -> Callable[[], Any]:
        x = symmetric_copy(case, inputs["x"])
        flat = x.view(-1)
        out = torch.empty(flat.numel() // case.problem.num_ranks, dtype=x.dtype, device=x.device)
        shaped = out.view(case.problem.rows, *x.shape[1:])

        def call() -> torch.Tensor:
            operation(flat, group, False, out)
            return shaped

        return call

    return each(case, "torch_reduce_scatter_out", make)


def copy_engine_all_gather(case: Case) -> Variant:
    """Pulls by a copy engine on one stream between two barriers: what the links carry at best."""
    even(case, "copy-engine pulls")
    rank, num_ranks = case.world.rank, case.problem.num_ranks

    def make(inputs: Any) -> Callable[[], Any]:
        x = symmetric_copy(case, inputs["x"])
        handle = symmetric.rendezvous(x, case.group.group_name)
        out = torch.empty((x.shape[0] * num_ranks, *x.shape[1:]), dtype=x.dtype, device=x.device)
        chunks = out.chunk(num_ranks)
        sources = [(rank + hop) % num_ranks for hop in range(num_ranks)]
        parts = {r: handle.get_buffer(r, tuple(x.shape), x.dtype) for r in sources}

        def call() -> torch.Tensor:
            handle.barrier(channel=0)
            for source in sources:
                chunks[source].copy_(parts[source], non_blocking=True)
            handle.barrier(channel=0)
            return out

        return call

    return each(case, "copy_engine_pulls", make)


# ---------------------------------------------------------------------------------------------
# With a product before or behind


def async_tp_ag_gemm(case: Case) -> Variant:
    """torch's async tensor parallelism, as `fused_all_gather_matmul` decomposes it; of fp8 scales
    of rows are sharded as rows are."""
    scaled, group, m = case.problem.scaling, case.group.group_name, case.problem.m
    name = "fused_all_gather_scaled_matmul" if scaled else "fused_all_gather_matmul"
    if scaled:
        takes_rows(case, name)
    operation = _find(name)

    def make(inputs: Any) -> Callable[[], Any]:
        a, b = padded(case, inputs["a"]), [inputs["b"]]
        if not scaled:
            return lambda: operation(a, b, 0, group)[1][0][:m]
        scale_a, scale_b = padded(case, inputs["scale_a"]), [inputs["scale_b"]]
        given = (0, group, [None], [None], [getattr(torch, case.problem.out_dtype)], [False])
        return lambda: operation(a, b, scale_a, scale_b, *given)[1][0][:m]

    return each(case, "torch_async_tp", make)


def native_async_tp_ag_gemm(case: Case) -> Variant:
    """Its single kernel with signals, which torch takes by itself for few m only."""
    if case.problem.scaling:
        raise UnsupportedError("_async_input_mm takes no scales")
    native = getattr(symmetric, "_fused_all_gather_matmul_native", None)
    if native is None:
        raise UnsupportedError(f"torch {torch.__version__} has no native async-TP product")
    if case.problem.rows % case.problem.num_ranks:
        raise UnsupportedError(
            f"_async_input_mm: {case.problem.rows} rows of a rank do not divide by ranks"
        )

    def make(inputs: Any) -> Callable[[], Any]:
        a, b = padded(case, inputs["a"]), inputs["b"]
        return lambda: native(a, b, case.group.group_name)[1][: case.problem.m]

    # Its stream-written flags are not made for recording.
    return each(case, "torch_async_tp_native", make, modes=("queued", "eager"))


def async_tp_gemm_rs(case: Case) -> Variant:
    """torch's async tensor parallelism, as `fused_matmul_reduce_scatter` decomposes it; of fp8 with
    scales of rows."""
    problem, group = case.problem, case.group.group_name
    name = (
        "fused_scaled_matmul_reduce_scatter" if problem.scaling else "fused_matmul_reduce_scatter"
    )
    even(case, name)
    operation = _find(name)

    def make(inputs: Any) -> Callable[[], Any]:
        a, b, scales = inputs["a"], inputs["b"], scales_of(case, inputs)
        if scales is None:
            return lambda: operation(a, b, "sum", 0, group)
        given = ("sum", 0, 0, group, [problem.m, problem.n], None, None)
        return lambda: operation(a, b, *scales, *given, getattr(torch, problem.out_dtype), False)

    return each(case, "torch_async_tp", make)


def _mm_then(case: Case, reduce: str, name: str) -> Variant:
    """A product into symmetric memory, and torch's all-reduce of it."""
    operation, group, problem = _find(reduce), case.group.group_name, case.problem

    def make(inputs: Any) -> Callable[[], Any]:
        shape, device = (problem.m, problem.n), case.world.device
        dtype, scales = getattr(torch, problem.result_dtype), scales_of(case, inputs)
        there = symmetric_copy(case, torch.empty(shape, dtype=dtype, device=device))

        def both() -> Any:
            multiplied(inputs["a"], inputs["b"], scales, there)
            return operation(there, "sum", group)

        return both

    return each(case, name, make)


def mm_one_shot(case: Case) -> Variant:
    return _mm_then(case, "one_shot_all_reduce", "mm_one_shot")


def mm_two_shot(case: Case) -> Variant:
    return _mm_then(case, "two_shot_all_reduce_", "mm_two_shot")
