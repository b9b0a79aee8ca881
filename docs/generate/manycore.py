"""What docs/manycore.md shows: a plan as a picture, one kernel's C, and the six workloads."""

from __future__ import annotations

import json
from pathlib import Path

from generate.blocks import code, table

import weft
from weft.compiler import Shard, Tensor, all_gather, reduce_scatter, silu_mul
from weft.manycore import SMALL, compile_program
from weft.manycore.emit import function
from weft.manycore.picture import picture as picture_of

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "manycore.json"


@weft.program(
    mesh="tp",
    x=Tensor("float32", ("m", 64), Shard(0)),
    w1=Tensor("float32", (64, 256), Shard(1)),
    w2=Tensor("float32", (128, 64), Shard(0)),
)
def mlp(x, w1, w2):
    return reduce_scatter(silu_mul(all_gather(x) @ w1) @ w2)


def _plan():
    return compile_program(mlp, {"m": 97}, num_ranks=2, machine=SMALL)


def picture() -> str:
    return code(picture_of(_plan()), "text")


def kernel() -> str:
    """The product whose rows are gathered meanwhile."""
    plan = _plan()
    number = next(i for i, one in enumerate(plan.kernels) if one.kind == "product")
    return code(function(plan, plan.kernels[number], number), "c")


def workloads() -> str:
    """Transfers and times of each, then what they are without each choice."""
    document = json.loads(RESULTS.read_text())
    rows = []
    by_name: dict[str, dict[str, dict]] = {}
    for row in document["rows"]:
        by_name.setdefault(row["workload"], {})[row["left_out"]] = row
    for name, found in by_name.items():
        whole = found["all"]
        rows.append((
            f"`{name}`", f"{whole['transfers']:,}", f"{whole['bytes'] / 1e6:.1f} MB",
            f"{whole['us']:.1f} us", f"{whole['predicted_us']:.1f} us",
            f"{found['no coalescing']['transfers'] / whole['transfers']:.0f} x",
            *(f"{found[one]['us'] / whole['us']:.2f}" for one in list(found)[1:]),
        ))  # fmt: skip
    head = ("workload", "transfers", "bytes", "time", "predicted", "transfers without coalescing",
            "time without it", "without double buffers", "loops as written")  # fmt: skip
    return table(head, rows)
