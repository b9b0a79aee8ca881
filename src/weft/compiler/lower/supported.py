"""Which launches of a plan kernels can be generated for; of the others why not."""

from __future__ import annotations

from weft.base.errors import UnsupportedError
from weft.compiler.lower import kernels
from weft.ir.device import Launch, Plan

# What carries a collective, by kind.
ENGINES = {
    "all_gather": ("ce_pull", "ce_push", "sm_push", "sm_put", "feed"),
    "reduce_scatter": ("ce_push", "sm_push", "sm_put"),
    "all_reduce": ("sm_push", "sm_put"),
}
# Orders that kernels can be told to take, beside the user's.
ORDERS = ("gather", "scatter", "rows", "hierarchical_gather", "hierarchical_scatter",
          "part_by_part")  # fmt: skip


def refusal(plan: Plan, launch: Launch) -> UnsupportedError | None:
    """What speaks against a launch, at the user's line; None where a kernel is generated for it."""
    if launch.template in ("move", "small"):  # kernels that are written, not generated
        return None
    try:
        kernels.lower_launch(plan, launch)
    except UnsupportedError as error:
        return error
    return None
