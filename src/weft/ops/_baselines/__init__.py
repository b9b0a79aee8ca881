"""What operators are measured against, by operator: the tables that cards take as `baselines`.

`cublas`, `nccl` and `cublas_nccl` are the parts of the unfused way, `weft_alone` is weft's product
without its collective, `weft_program` the same work as the compiler weaves it, `weft_in_place` a
collective of symmetric inputs. Each entry is a function
of a weft.tune.case.Case that returns a Variant; its module is imported when it is first called,
since only benchmarks on GPUs need it. `unfused` is a program by library calls.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

Baselines = dict[str, Callable[[Any], Any]]


def _of(module: str, **functions: str) -> Baselines:
    """By name, functions of a module of this folder."""

    def lazy(name: str) -> Callable[[Any], Any]:
        def prepare(case: Any) -> Any:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)(case)

        prepare.__name__ = name
        return prepare

    return {name: lazy(function) for name, function in functions.items()}


def _parts(way: str, module: str = "nccl", names: str = "cublas nccl cublas_nccl") -> Baselines:
    """An operator's unfused way (nccl.Way): its product, its collective, one after the other."""

    def lazy(name: str) -> Callable[[Any], Any]:
        def prepare(case: Any) -> Any:
            kind = getattr(importlib.import_module(f"{__name__}.{module}"), way)
            return getattr(importlib.import_module(f"{__name__}.nccl"), name)(kind, case)

        prepare.__name__ = f"{way}.{name}"
        return prepare

    return dict(zip(names.split(), map(lazy, ("product", "collective", "serial"))))


_IN_PLACE = _of("in_place", weft_in_place="moved")
_PRODUCT = _of("programs", weft_program="product")

PROGRAM = _of("programs", unfused="unfused")
AG_GEMM = {
    **_parts("GatherThenMultiply"), **_of("alone", weft_alone="ag_gemm"), **_PRODUCT,
    **_of("symmetric_memory", torch_async_tp="async_tp_ag_gemm",
          torch_async_tp_native="native_async_tp_ag_gemm"),
}  # fmt: skip
AG_WGRAD = _parts("GatherThenContract")
GEMM_RS = {
    **_parts("MultiplyThenScatter"), **_of("alone", weft_alone="product"), **_PRODUCT,
    **_of("symmetric_memory", torch_async_tp="async_tp_gemm_rs"),
}  # fmt: skip
GEMM_AR = {
    **_parts("MultiplyThenReduce"), **_of("alone", weft_alone="product"), **_PRODUCT,
    **_of("symmetric_memory", mm_one_shot="mm_one_shot", mm_two_shot="mm_two_shot"),
}  # fmt: skip
ALL_GATHER = {
    **_of("nccl", nccl="all_gather"),
    **_of("symmetric_memory", torch_low_contention="low_contention_all_gather",
          copy_engine_pulls="copy_engine_all_gather"),
    **_IN_PLACE,
}  # fmt: skip
REDUCE_SCATTER = {
    **_of("nccl", nccl="reduce_scatter"),
    **_of("symmetric_memory", torch_reduce_scatter_out="reduce_scatter_out",
          torch_low_contention="low_contention_reduce_scatter"),
    **_IN_PLACE,
}  # fmt: skip
ALL_REDUCE = {
    **_of("nccl", nccl="all_reduce"),
    **_of("symmetric_memory", torch_one_shot="one_shot_all_reduce",
          torch_two_shot="two_shot_all_reduce"),
    **_of("in_place", weft_in_place="all_reduce"),
}  # fmt: skip
ALL_REDUCE_RMS_NORM = {
    **_of("nccl", nccl_rms_norm="all_reduce_rms_norm"),
    **_of("symmetric_memory", torch_one_shot_rms_norm="one_shot_rms_norm",
          torch_two_shot_rms_norm="two_shot_rms_norm"),
}  # fmt: skip
FLASH_DECODE = _of(
    "decode", attention_nccl_merge="gathered_parts", nccl_cache_attention="gathered_caches",
    attention_alone="alone",
)  # fmt: skip
AG_ATTENTION = _parts("GatherThenAttend", "attention", "attention_alone nccl_gather nccl_attention")
ALL_TO_ALL = {**_of("nccl", nccl="all_to_all"), **_IN_PLACE}
SEND = RECV = _of("nccl", nccl="around")
AG_MOE, MOE_RS = _parts("GatherThenExperts"), _parts("ExpertsThenScatter")
MOE_AR = _parts("ExpertsThenReduce")
EP_DISPATCH = _of(
    "expert_parallel", nccl="dispatch", nccl_by_counts="dispatch_by_counts",
    nccl_whole="dispatch_whole",
)  # fmt: skip
EP_COMBINE = _of("expert_parallel", nccl="combine", nccl_whole="combine_whole")
