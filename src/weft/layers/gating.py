"""act(gate) * value of rows that hold both, side by side.

One pass over memory where torch takes two, and where nobody differentiates or traces it: then it is
torch's own functions, which inductor makes one pass of.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import Any

import torch
import triton
from torch import Tensor, nn
from torch.nn import functional

from weft.language import triton_api
from weft.plan import operations
from weft.plan.launches import Start
from weft.runtime import compilations
from weft.runtime.world import World
from weft.tiles import activations, gates

# Columns of a program, 16 bytes of both to a thread.
BLOCK, NUM_WARPS = 1024, 4
ALIGNMENT = 16


class Gating:
    """act(gate) * value for layers. Its kernel is compiled and loaded here, so that no call does.

    Shapes  columns: of the gate; of h twice as many, the gate's before the value's
    """

    def __init__(
        self, act: Callable[[Tensor], Tensor], columns: int, dtype: torch.dtype, world: World
    ) -> None:
        self.act, self.columns, self.dtype, activation = act, columns, dtype, _of_triton(act)
        self._has_kernel, self._kernel = activation is not None and columns > 0, None
        if self._has_kernel:
            self._rest = (columns, activation, min(BLOCK, triton.next_power_of_2(columns)))
            h = torch.empty(1, 2 * columns, dtype=dtype, device=world.device)
            start = self._start(h, h.new_empty(1, columns))
            with compilations.preparing():
                self._kernel = world.load(start.function, *start.arguments, **start.options)

    def __call__(self, h: Tensor) -> Tensor:
        """Shapes  h: [.., 2 * columns]; the result: [.., columns]"""
        is_plain = self._has_kernel and not operations.is_asked(h) and h.dtype == self.dtype
        if not (is_plain and h.numel() and h.is_contiguous() and not h.data_ptr() % ALIGNMENT):
            gate, value = h.chunk(2, dim=-1)
            return self.act(gate) * value
        out = h.new_empty(*h.shape[:-1], self.columns)
        start = self._start(h, out)
        if self._kernel is None:  # nothing is loaded on the emulator
            start.run()
        else:
            triton_api.relaunch(self._kernel, start.grid, *start.arguments)
        return out

    def _start(self, h: Tensor, out: Tensor) -> Start:
        grid = (h.numel() // (2 * self.columns), ceil(self.columns / self._rest[-1]), 1)
        return Start(gates.gate_rows, grid, (h, out, *self._rest), {"num_warps": NUM_WARPS})


def _of_triton(act: Callable[[Tensor], Tensor]) -> Any:
    """The function of our own for one of torch's; None where there is none."""
    if act is functional.silu or type(act) is nn.SiLU:
        return activations.silu
    if act is functional.gelu:
        return activations.gelu
    if type(act) is nn.GELU:
        return activations.gelu if act.approximate == "none" else activations.gelu_tanh
    return None
