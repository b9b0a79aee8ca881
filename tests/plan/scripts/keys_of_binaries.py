"""By kernel what Triton's cache asks by, of ag_gemm with so many rows: a number, or a range.

python tests/plan/scripts/keys_of_binaries.py 1..8192
"""

import json
import sys

from weft.base.target import TARGETS
from weft.ops import card
from weft.plan.prepare import launches_of
from weft.tools.prepare import sizes_of

op, found = card("ag_gemm"), {}
sizes = sizes_of(f"m={sys.argv[1]},n=3072,k=4096", op.default_shape)
for key, (one, *_) in launches_of(op, sizes, 2, TARGETS["cuda:90"]).items():
    hooks = [x.cache_key for x in one.arguments if hasattr(x, "cache_key")]
    found[repr(key)] = [one.fn.cache_key, *hooks]
json.dump(found, sys.stdout)
