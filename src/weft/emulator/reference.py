"""The page on what the emulator runs, written from its table of operations.

python -m weft.emulator.reference > docs/emulator.md
"""

from __future__ import annotations

import sys

from weft.emulator.operations import operations_table

INTRODUCTION = """\
# What the emulator runs

This page is generated from the table in `src/weft/emulator/operations`; do not edit it:
`python -m weft.emulator.reference > docs/emulator.md`.

Triton's own front end lowers a kernel to TTIR, and each TTIR operation becomes a line of Python on
numpy. So promotion, `constexpr`, `tl`'s library and aggregates are Triton's own, on every version
from 3.6 on. To read what a kernel became:
`weft.emulator.codegen.compile_ttir(ttir_text).source`; variables and lines are the kernel's.

An operation that is not listed raises `UnsupportedError` with the kernel's line, before anything
runs. Inline assembly is one of these; Gluon kernels have no TTIR and are not taken.

## Numbers

* Integers are two's complement and wrap. Signed division truncates toward zero. Shifting by all the
  bits or more leaves 0, or the sign.
* An index in 32 bits that has wrapped by the time it becomes an address or a bound is reported as
  `OutOfBoundsError` at its line.
* fp16 and bf16 arithmetic is done in fp32 and rounded once, to nearest even, per operation.
* `tl.dot` multiplies fp16, bf16, fp8 and fp32 in fp32 and adds up in fp32. fp32 operands are
  rounded to tf32 first where `input_precision` is `"tf32"`, which is Triton's default, as on
  NVIDIA's GPUs; with `"ieee"`, `"tf32x3"` and the others they are not. int8 adds up in int32,
  exactly.
* `tl.device_assert` is always checked, `debug=True` or not.
* A loop that touches no memory for 10 million turns (`WEFT_ENDLESS_TURNS`) is reported as endless.
* The order of a sum is numpy's, or neighbours first: not a GPU's. Compare with a tolerance.
* Conversions to fp8 saturate; floats to integers saturate, NaN gives 0.
* A value that nobody defined (`ub.poison`) is 0.

## Operations
"""


def reference() -> str:
    """The text of docs/emulator.md."""
    return f"{INTRODUCTION}\n{operations_table()}"


if __name__ == "__main__":
    sys.stdout.write(reference())
