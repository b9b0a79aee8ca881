"""What a task of the persistent kernel takes."""

from __future__ import annotations

from math import ceil

from weft.base.hardware import Hardware


def product_us(tile: tuple[int, int], k: int, rows: int, itemsize: int, machine: Hardware) -> float:
    """A tile of a product of so many rows. Rows of tiles share what they read of its right operand
    from memory, but each tile loads both, of the left one rows that there are."""
    height, width = tile
    flops, right = 2 * height * width * k, k * width * itemsize
    of_memory_us = right / ceil(rows / height) / machine.few_gbps / 1e3
    loaded_us = (right + k * min(rows, height) * itemsize) / machine.task_gbps / 1e3
    read_us = max(machine.num_sms * of_memory_us, loaded_us)
    return machine.task_us + max(flops / machine.program_tflops / 1e6, read_us)


def move_us(num_bytes: float, machine: Hardware) -> float:
    """A tile that is read, worked on a little, and stored."""
    return machine.task_us + num_bytes / machine.combine_gbps / 1e3


def rounds_us(each_us: float, tiles: int, num_workers: int, machine: Hardware) -> float:
    """When all tiles are done, if each takes so long; all are told of, one after the other where
    one task counts them."""
    return ceil(tiles / num_workers) * each_us + tiles * machine.tasks_us
