"""What a task of the persistent kernel takes."""

from __future__ import annotations

from math import ceil

from weft.base.hardware import Hardware


def product_us(
    rows: int, columns: int, k: int, itemsize: int, rows_of_tiles: int, machine: Hardware
) -> float:
    """A tile of a product. Rows of tiles share what they read of its right operand."""
    flops = 2 * rows * columns * k
    read_us = k * columns * itemsize / rows_of_tiles / (machine.few_gbps / machine.num_sms)
    return machine.task_us + max(flops / machine.program_tflops / 1e6, read_us / 1e3)


def move_us(num_bytes: float, machine: Hardware) -> float:
    """A tile that is read, worked on a little, and stored."""
    return machine.task_us + num_bytes / machine.combine_gbps / 1e3


def rounds_us(each_us: float, tiles: int, num_workers: int, machine: Hardware) -> float:
    """When all tiles are done, if each takes so long; all are told of, one after the other where
    one task counts them."""
    return ceil(tiles / num_workers) * each_us + tiles * machine.tasks_us
