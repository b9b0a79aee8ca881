"""Does a kernel's tile fit a target's shared memory and registers? If not, by how much."""

from __future__ import annotations

from weft.base.errors import ConfigError
from weft.base.target import Target
from weft.ir.task import Task
from weft.tiles.blocking import Blocking

# What a program runs with, at the least: two warp groups, and two stages of operands.
NUM_WARPS, NUM_STAGES = 8, 2
# Registers of a thread, and those that addresses, loops and signals take of them.
REGISTERS, OTHER_REGISTERS = 255, 40
TILE_K = 64


def check_fit(task: Task, dtype: str, target: Target) -> None:
    """Raises  ConfigError: a product's tile, of operands of a dtype, that the target cannot hold,
    with what is missing"""
    if target.backend == "emu":
        return
    assert task.type is not None
    tile_m, tile_n, tile_k = (*task.tile, TILE_K)[:3]
    message = f"{task.name}: a tile of {tile_m} x {tile_n} x {tile_k} in {dtype}"
    cut = Blocking(tile_m, tile_n, tile_k, NUM_WARPS, NUM_STAGES)
    # The result goes out through memory of its own, or where the operands lay.
    needed = cut.shared_bytes(dtype, task.type.dtype, False, target)
    if needed > target.shared_bytes:
        raise ConfigError(
            f"{message} needs {needed} bytes of shared memory for {NUM_STAGES} stages, "
            f"{needed - target.shared_bytes} more than {target} has; take a smaller tile",
            place=task.place,
        )
    threads = NUM_WARPS * target.warp_size
    registers = -(-tile_m * tile_n // threads) + OTHER_REGISTERS
    if registers > REGISTERS:
        raise ConfigError(
            f"{message} needs {registers} registers of each of {threads} threads, "
            f"{registers - REGISTERS} more than there are; take a smaller tile",
            place=task.place,
        )
