"""What libraries take, one after the other: cuBLAS by its rates, collectives as they were read."""

from __future__ import annotations

from itertools import pairwise

from weft.base.hardware import Curve, Hardware
from weft.compiler.cost.products import Product

# Calls of a plan in which ranks exchange something.
COLLECTIVES = (
    "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "moe_route", "ep_route",
    "ep_dispatch", "ep_combine",
)  # fmt: skip


def unfused_us(product: Product, machine: Hardware, kind: str) -> float:
    """A product, and the collective of its rows: those of A, or of what it gives."""
    columns = product.k if kind == "all_gather" else product.n
    row_bytes = columns * product.itemsize
    return product_us(product, machine) + collective_us(
        kind, product.rows * row_bytes, product.m * row_bytes, product.num_ranks,
        product.num_nodes, machine,
    )  # fmt: skip


def product_us(product: Product, machine: Hardware) -> float:
    """cuBLAS."""
    flops = 2 * product.m * product.n * product.k / machine.library_tflops
    memory = product.n * product.k * product.itemsize * 1e3 / machine.library_gbps
    return max(flops, memory) / 1e6 + machine.library_us


def call_us(
    function: str, num_bytes: float, num_ranks: int, num_nodes: int, machine: Hardware
) -> float:
    """A call of a plan; of sums of all rows `num_bytes` are those of all, else a rank's part."""
    kind, parts = function, (num_bytes, num_bytes * num_ranks)
    if function == "all_to_all":  # of what a rank has, a part goes to each
        parts = num_bytes / num_ranks, num_bytes
    elif function not in ("all_gather", "reduce_scatter"):
        kind, parts = "all_reduce", (num_bytes / num_ranks, num_bytes)
    return collective_us(kind, *parts, num_ranks, num_nodes, machine)


def collective_us(
    kind: str, part_bytes: float, all_bytes: float, num_ranks: int, num_nodes: int,
    machine: Hardware,
) -> float:  # fmt: skip
    """The best library's collective, where each rank has, or gets, `part_bytes` of `all_bytes`.

    Over several nodes it is a ring through all ranks: what each of them is sent passes from node to
    node too, by the ports of all of a node's ranks together.
    """
    if num_ranks == 1:
        return 0.0
    # Of the shards that came where it was read.
    shards = (num_ranks - 1) / (machine.library_ranks - 1)
    if kind == "all_gather":
        near_us = on_curve(machine.gather, shards * part_bytes)
    elif kind in ("reduce_scatter", "all_to_all"):
        near_us = on_curve(machine.scatter, shards * part_bytes)
    else:
        near_us = on_curve(machine.reduce, all_bytes)
    if num_nodes == 1:
        return near_us
    times = 2 if kind == "all_reduce" else 1
    ring_bytes = times * part_bytes * (num_ranks - 1)
    # Of the smaller nodes, where they differ.
    ports = max(1, num_ranks // num_nodes)
    far_us = ring_bytes / (ports * machine.far_gbps) / 1e3
    return max(near_us, far_us) + times * (num_nodes - 1) * machine.far_us


def packed_us(num_bytes: float, num_ranks: int, machine: Hardware) -> float:
    """All-to-all of matrices sends and gets each rank's part in one piece: what copies a rank's own
    `num_bytes` so, and what puts together those that it has got."""
    if num_ranks == 1:
        return 0.0
    return 2 * (machine.library_us + 2e-3 * num_bytes / machine.memory_gbps)


def attention_us(rows: int, keys: float, columns: int, machine: Hardware) -> float:
    """Both products of queries with the keys that each sees."""
    return 4e-6 * rows * keys * columns / machine.library_tflops + machine.library_us


def on_curve(curve: Curve, num_bytes: float) -> float:
    """Microseconds of `num_bytes`; beyond the last point at its rate."""
    for (low, low_us), (high, high_us) in pairwise(curve):
        if low <= num_bytes < high:
            return low_us + (high_us - low_us) * (num_bytes - low) / (high - low)
    last, last_us = curve[-1]
    return last_us * num_bytes / last
