"""Names of weft.plan.kernel_records that operators still know by this one."""

from weft.plan.kernel_records import aligned_sizes, operand, record

__all__ = ["aligned_sizes", "operand", "record"]
