"""Runs Triton kernels of many ranks on the CPU and checks them; nothing in a kernel changes.

    with weft.emulated(ranks=4, seed=0) as ranks:
        results = ranks.run(main)        main() runs on each rank, and calls weft.init() there

A race, a deadlock or another mistake is raised as an error that names both lines; with
`collect=True` findings go to `ranks.report` instead. `weft emulate SCRIPT.py` does the same for a
script. What is emulated and checked: docs/emulator.md.
"""

from __future__ import annotations

from weft.emulator.script import run_script
from weft.emulator.session import Session, active, emulated

__all__ = ["Session", "active", "emulated", "run_script"]
