"""What a primitive's arguments may be, for type checkers and completion; nothing checks by it.

While a kernel is traced, `arguments.py` checks them and names the value and the line.
"""

from __future__ import annotations

import triton.language as tl

# A scalar or a block of integers: a rank, a count, an epoch. A constant counts as one.
Number = tl.tensor | tl.constexpr | int
# What is stored: a block of values, or one value for all elements.
Values = tl.tensor | tl.constexpr | int | float
