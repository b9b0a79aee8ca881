"""By kernel what Triton's cache asks by, of calls of so many rows: a number, or a range to prepare.

python tests/plan/scripts/keys_of_binaries.py ag_gemm,gemm_rs 1..8192
"""

import json
import sys

from weft.base.target import TARGETS
from weft.ops import card
from weft.plan.prepare import launches_of
from weft.tools.prepare import sizes_of

NARROW = "n=3072,k=4096"


def main(names: str, m: str) -> None:
    found = {}
    for name in names.split(","):
        op = card(name)
        shape = f"m={m},{NARROW}" if "k" in op.default_shape else f"m={m},n=3072"
        launches = launches_of(op, sizes_of(shape, op.default_shape), 2, TARGETS["cuda:90"])
        for key, (one, *_) in launches.items():
            hooks = [x.cache_key for x in one.arguments if hasattr(x, "cache_key")]
            found[repr((name, key))] = [one.fn.cache_key, *hooks]
    json.dump(found, sys.stdout)


main(*sys.argv[1:])
