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


def _lazy(module: str, name: str) -> Callable[[Any], Any]:
    def prepare(case: Any) -> Any:
        return getattr(importlib.import_module(f"{__name__}.{module}"), name)(case)

    prepare.__name__ = name
    return prepare


PROGRAM = {"unfused": _lazy("programs", "unfused")}
AG_GEMM = {
    "cublas": _lazy("nccl", "ag_gemm_product"),
    "nccl": _lazy("nccl", "ag_gemm_gather"),
    "cublas_nccl": _lazy("nccl", "ag_gemm_serial"),
    "weft_alone": _lazy("alone", "ag_gemm"),
    "weft_program": _lazy("programs", "product"),
    "torch_async_tp": _lazy("symmetric_memory", "async_tp_ag_gemm"),
    "torch_async_tp_native": _lazy("symmetric_memory", "native_async_tp_ag_gemm"),
}
AG_WGRAD = {
    "cublas": _lazy("nccl", "ag_wgrad_product"),
    "nccl": _lazy("nccl", "ag_wgrad_gather"),
    "cublas_nccl": _lazy("nccl", "ag_wgrad_serial"),
}
GEMM_RS = {
    "cublas": _lazy("nccl", "gemm_rs_product"),
    "nccl": _lazy("nccl", "gemm_rs_scatter"),
    "cublas_nccl": _lazy("nccl", "gemm_rs_serial"),
    "weft_alone": _lazy("alone", "gemm_rs"),
    "weft_program": _lazy("programs", "product"),
    "torch_async_tp": _lazy("symmetric_memory", "async_tp_gemm_rs"),
}
GEMM_AR = {
    "cublas": _lazy("nccl", "gemm_ar_product"),
    "nccl": _lazy("nccl", "gemm_ar_reduce"),
    "cublas_nccl": _lazy("nccl", "gemm_ar_serial"),
    "weft_alone": _lazy("alone", "gemm_ar"),
    "weft_program": _lazy("programs", "product"),
    "mm_one_shot": _lazy("symmetric_memory", "mm_one_shot"),
    "mm_two_shot": _lazy("symmetric_memory", "mm_two_shot"),
}
ALL_GATHER = {
    "nccl": _lazy("nccl", "all_gather"),
    "torch_low_contention": _lazy("symmetric_memory", "low_contention_all_gather"),
    "copy_engine_pulls": _lazy("symmetric_memory", "copy_engine_all_gather"),
    "weft_in_place": _lazy("in_place", "moved"),
}
REDUCE_SCATTER = {
    "nccl": _lazy("nccl", "reduce_scatter"),
    "torch_reduce_scatter_out": _lazy("symmetric_memory", "reduce_scatter_out"),
    "torch_low_contention": _lazy("symmetric_memory", "low_contention_reduce_scatter"),
    "weft_in_place": _lazy("in_place", "moved"),
}
ALL_REDUCE = {
    "nccl": _lazy("nccl", "all_reduce"),
    "torch_one_shot": _lazy("symmetric_memory", "one_shot_all_reduce"),
    "torch_two_shot": _lazy("symmetric_memory", "two_shot_all_reduce"),
    "weft_in_place": _lazy("in_place", "all_reduce"),
}
ALL_REDUCE_RMS_NORM = {
    "nccl_rms_norm": _lazy("nccl", "all_reduce_rms_norm"),
    "torch_one_shot_rms_norm": _lazy("symmetric_memory", "one_shot_rms_norm"),
    "torch_two_shot_rms_norm": _lazy("symmetric_memory", "two_shot_rms_norm"),
}
FLASH_DECODE = {
    "attention_nccl_merge": _lazy("decode", "gathered_parts"),
    "nccl_cache_attention": _lazy("decode", "gathered_caches"),
    "attention_alone": _lazy("decode", "alone"),
}
AG_ATTENTION = {
    "nccl_gather": _lazy("attention", "gathered"),
    "attention_alone": _lazy("attention", "alone"),
    "nccl_attention": _lazy("attention", "serial"),
}
ALL_TO_ALL = {"nccl": _lazy("nccl", "all_to_all"), "weft_in_place": _lazy("in_place", "moved")}
AG_MOE = {
    "cublas": _lazy("experts", "ag_moe_product"),
    "nccl": _lazy("experts", "ag_moe_gather"),
    "cublas_nccl": _lazy("experts", "ag_moe_serial"),
}
MOE_RS = {
    "cublas": _lazy("experts", "moe_rs_product"),
    "nccl": _lazy("experts", "moe_rs_scatter"),
    "cublas_nccl": _lazy("experts", "moe_rs_serial"),
}
EP_DISPATCH = {
    "nccl": _lazy("expert_parallel", "dispatch"),
    "nccl_by_counts": _lazy("expert_parallel", "dispatch_by_counts"),
    "nccl_whole": _lazy("expert_parallel", "dispatch_whole"),
}
EP_COMBINE = {
    "nccl": _lazy("expert_parallel", "combine"),
    "nccl_whole": _lazy("expert_parallel", "combine_whole"),
}
