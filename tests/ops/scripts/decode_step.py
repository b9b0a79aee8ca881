"""A decode step as one kernel a rank: example 16, on GPUs.

torchrun --nproc-per-node 2 tests/ops/scripts/decode_step.py
"""

from __future__ import annotations

import os
import runpy
from pathlib import Path

EXAMPLE = Path(__file__).parents[3] / "examples" / "16_megakernel.py"

if __name__ == "__main__":
    runpy.run_path(str(EXAMPLE))["main"]()
    print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}: 2 steps", flush=True)
