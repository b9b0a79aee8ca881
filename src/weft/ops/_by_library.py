"""Names of weft.plan.nccl that operators still know by this one."""

from weft.plan.nccl import TRANSPORT, all_gather, all_reduce, reduce_scatter

__all__ = ["TRANSPORT", "all_gather", "all_reduce", "reduce_scatter"]
