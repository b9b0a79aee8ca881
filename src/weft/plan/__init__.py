"""The executor: Device IR on one rank. It knows no operator.

    run_plan(stages, tensors, sizes, world=world)     a plan of kernels, copies and library calls
    run_calls(plan, tensors, sizes, world=world)      a plan of library calls alone
    run_differentiated(..)                            the same, with gradients

`weft.program`'s objects call these. Memory and slots are in memory.py, what each step launches in
starts.py, copy-engine transfers in transfers.py, what runs beside a recording in streams.py.
"""

from weft.plan.calls import run_calls
from weft.plan.gradients import run_differentiated
from weft.plan.runner import run_plan

__all__ = ["run_calls", "run_differentiated", "run_plan"]
