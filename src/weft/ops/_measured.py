"""Names of weft.plan.tuning_table that operators still know by this one."""

from weft.plan.tuning_table import rows_for

__all__ = ["rows_for"]
