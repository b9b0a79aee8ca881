"""The smallest kernel that shows whether compiling and emulating work here."""

from __future__ import annotations

import triton
import triton.language as tl

from weft.base.records import KernelRecord
from weft.base.target import Target


@triton.jit
def _double(x, size, tile: tl.constexpr):
    at = tl.program_id(0) * tile + tl.arange(0, tile)
    tl.store(x + at, 2 * tl.load(x + at, mask=at < size), mask=at < size)


RECORD = KernelRecord("_double", {"x": "*fp32", "size": "i32", "tile": "constexpr"}, {"tile": 128})


def compile_one_kernel(target: Target) -> None:
    from weft.language.triton_api import compile_kernel

    compile_kernel(_double, RECORD, target)


def emulate_one_kernel() -> None:
    import torch

    import weft

    def main() -> bool:
        world = weft.init()
        x = world.zeros(200, torch.float32)
        x += world.rank + 1
        _double[(2,)](x, 200, 128)
        return bool((x == 2 * (world.rank + 1)).all())

    with weft.emulated(ranks=2) as session:
        answers = session.run(main)
    if answers != [True, True]:
        raise RuntimeError(f"an emulated kernel gave a wrong answer on ranks {answers}")
