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
from weft.ops._baselines.nccl import even, padded, rms_norm, takes_rows
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


def _each(case: Case, make: Callable[[torch.Tensor], Callable[[], Any]], name: str) -> Variant:
    """A variant whose call on each set is what `make` makes of its x in symmetric memory."""
    return Variant(name, [make(symmetric_copy(case, inputs["x"])) for inputs in case.sets])


# ---------------------------------------------------------------------------------------------
# All-reduce


def one_shot_all_reduce(case: Case) -> Variant:
    operation, group = _find("one_shot_all_reduce_out"), case.group.group_name

    def make(x: torch.Tensor) -> Callable[[], Any]:
        out = torch.empty_like(x, device=x.device)
        return lambda: operation(x, "sum", group, out)

    return _each(case, make, "torch_one_shot")


def two_shot_all_reduce(case: Case) -> Variant:
    """In place: what it overwrites is restored, untimed, before each call."""
    operation, group = _find("two_shot_all_reduce_"), case.group.group_name
    buffers = [symmetric_copy(case, inputs["x"]) for inputs in case.sets]

    def restore(index: int) -> None:
        buffers[index].copy_(case.sets[index]["x"])

    calls = [lambda x=x: operation(x, "sum", group) for x in buffers]
    return Variant("torch_two_shot", calls, before=restore)


def one_shot_rms_norm(case: Case) -> Variant:
    operation = _find("one_shot_all_reduce_out")
    return _reduce_then_norm(case, operation, "torch_one_shot_rms_norm")


def two_shot_rms_norm(case: Case) -> Variant:
    operation = _find("two_shot_all_reduce_out")
    return _reduce_then_norm(case, operation, "torch_two_shot_rms_norm")


def _reduce_then_norm(case: Case, operation: Any, name: str) -> Variant:
    """The sum of what lies in symmetric memory, then torch's addition and fused norm. What two-shot
    overwrites there is restored, untimed, before each call."""
    group = case.group.group_name
    buffers = [symmetric_copy(case, inputs["x"]) for inputs in case.sets]

    def call(inputs: Any, x: torch.Tensor) -> Callable[[], Any]:
        total = torch.empty_like(x)

        def both() -> Any:
            operation(x, "sum", group, total)
            return rms_norm(inputs, total)

        return both

    def restore(index: int) -> None:
        buffers[index].copy_(case.sets[index]["x"])

    return Variant(name, list(map(call, case.sets, buffers)), before=restore)


# ---------------------------------------------------------------------------------------------
# All-gather and reduce-scatter


def low_contention_all_gather(case: Case) -> Variant:
    even(case, "_low_contention_all_gather")
    operation, group = _find("_low_contention_all_gather"), case.group.group_name
    wait = torch.ops._c10d_functional.wait_tensor
    return _each(case, lambda x: lambda: wait(operation(x, group)), "torch_low_contention")


def low_contention_reduce_scatter(case: Case) -> Variant:
    even(case, "_low_contention_reduce_scatter")
    operation, group = _find("_low_contention_reduce_scatter"), case.group.group_name
    wait = torch.ops._c10d_functional.wait_tensor
    return _each(case, lambda x: lambda: wait(operation(x, "sum", group)), "torch_low_contention")


def reduce_scatter_out(case: Case) -> Variant:
    even(case, "reduce_scatter_out")
    operation, group = _find("reduce_scatter_out"), case.group.group_name

    def make(x: torch.Tensor) -> Callable[[], Any]:
        flat = x.view(-1)
        out = torch.empty(flat.numel() // case.problem.num_ranks, dtype=x.dtype, device=x.device)
        shaped = out.view(case.problem.rows, *x.shape[1:])

        def call() -> torch.Tensor:
            operation(flat, group, False, out)
            return shaped

        return call

    return _each(case, make, "torch_reduce_scatter_out")


def copy_engine_all_gather(case: Case) -> Variant:
    """Pulls by a copy engine on one stream between two barriers: what the links carry at best."""
    even(case, "copy-engine pulls")
    rank, num_ranks = case.world.rank, case.problem.num_ranks

    def make(x: torch.Tensor) -> Callable[[], Any]:
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

    return _each(case, make, "copy_engine_pulls")


# ---------------------------------------------------------------------------------------------
# With a product behind


def async_tp_ag_gemm(case: Case) -> Variant:
    """torch's async tensor parallelism, as `fused_all_gather_matmul` decomposes it."""
    if case.problem.scaling:
        return _async_tp_scaled(case)
    operation, group = _find("fused_all_gather_matmul"), case.group.group_name

    def call(inputs: Any) -> Callable[[], Any]:
        a, b = padded(case, inputs["a"]), inputs["b"]
        return lambda: operation(a, [b], 0, group)[1][0][: case.problem.m]

    return Variant("torch_async_tp", [call(inputs) for inputs in case.sets])


def _async_tp_scaled(case: Case) -> Variant:
    """The same of fp8, scales of rows sharded as rows are: `fused_all_gather_scaled_matmul`."""
    takes_rows(case, "fused_all_gather_scaled_matmul")
    operation, group = _find("fused_all_gather_scaled_matmul"), case.group.group_name
    out_dtype = getattr(torch, case.problem.out_dtype)

    def call(inputs: Any) -> Callable[[], Any]:
        a, scale_a = padded(case, inputs["a"]), padded(case, inputs["scale_a"])
        b, scale_b = [inputs["b"]], [inputs["scale_b"]]
        given = (0, group, [None], [None], [out_dtype], [False])
        return lambda: operation(a, b, scale_a, scale_b, *given)[1][0][: case.problem.m]

    return Variant("torch_async_tp", [call(inputs) for inputs in case.sets])


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

    def call(inputs: Any) -> Callable[[], Any]:
        a, b = padded(case, inputs["a"]), inputs["b"]
        return lambda: native(a, b, case.group.group_name)[1][: case.problem.m]

    calls = [call(inputs) for inputs in case.sets]
    # Its stream-written flags are not made for recording.
    return Variant("torch_async_tp_native", calls, modes=("queued", "eager"))


def async_tp_gemm_rs(case: Case) -> Variant:
    """torch's async tensor parallelism, as `fused_matmul_reduce_scatter` decomposes it."""
    even(case, "fused_matmul_reduce_scatter")
    operation, group = _find("fused_matmul_reduce_scatter"), case.group.group_name

    def call(inputs: Any) -> Callable[[], Any]:
        return lambda: operation(inputs["a"], inputs["b"], "sum", 0, group)

    return Variant("torch_async_tp", [call(inputs) for inputs in case.sets])


def _mm_then(case: Case, reduce: Callable[[torch.Tensor], Any], name: str) -> Variant:
    """A product into symmetric memory, and torch's all-reduce of it."""
    problem = case.problem
    shape = (problem.m, problem.n)

    def call(inputs: Any) -> Callable[[], Any]:
        empty = torch.empty(shape, dtype=problem.torch_dtype, device=case.world.device)
        there = symmetric_copy(case, empty)

        def both() -> Any:
            torch.mm(inputs["a"], inputs["b"], out=there)
            return reduce(there)

        return both

    return Variant(name, [call(inputs) for inputs in case.sets])


def mm_one_shot(case: Case) -> Variant:
    operation, group = _find("one_shot_all_reduce"), case.group.group_name
    return _mm_then(case, lambda x: operation(x, "sum", group), "mm_one_shot")


def mm_two_shot(case: Case) -> Variant:
    operation, group = _find("two_shot_all_reduce_"), case.group.group_name
    return _mm_then(case, lambda x: operation(x, "sum", group), "mm_two_shot")
