"""A kernel as a nest of loops over tiles, and where in it transfers are needed.

    for i_m: for i_n: for i_k:      x is got where i_k turns, w where i_k turns, y is put in i_n

An operand is got in the deepest loop that it depends on and that turns more than once: outside of
loops that leave its tile as it is, it stays in the scratchpad. Of two orders of the loops that one
is better whose transfers are fewer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Loops from the outermost, and how often each turns.
Counts = Mapping[str, int]


@dataclass(frozen=True)
class Choices:
    """What the compiler does of its own accord; each can be left out, to be compared with.

    `coalesce`: one transfer for a block of rows, and for neighbouring columns of one value, instead
    of one for each row of each. `double_buffer`: the next tiles are got while these are computed.
    `choose_order`: loops in the order of the fewest transfers, operands got outside of loops that
    leave them as they are, instead of the order as written and all that a step needs in each step.
    """

    coalesce: bool = True
    double_buffer: bool = True
    choose_order: bool = True


def times(loops: Sequence[str], depends_on: str, counts: Counts, is_hoisted: bool = True) -> int:
    """How often an operand's tile is got; `depends_on` has the letters of its loops."""
    deepest = len(loops)
    if is_hoisted:
        turning = [i for i, one in enumerate(loops) if one in depends_on and counts[one] > 1]
        deepest = max(turning, default=-1) + 1
    found = 1
    for one in loops[:deepest]:
        found *= counts[one]
    return found
