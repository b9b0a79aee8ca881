"""What a torch operation costs in simulated time: bytes of its tensors, and flops of products."""

from __future__ import annotations

from typing import Any

from weft.emulator.device import Work
from weft.emulator.spans import tensors_in


def charge(work: Work, func: Any, args: tuple, kwargs: dict, result: Any) -> None:
    """Note on `work` what `func` has read, written and multiplied."""
    from torch.utils.flop_counter import flop_registry

    packet = func.overloadpacket
    work.kind = str(packet).removeprefix("aten.")
    tensors = list(tensors_in((*args, *kwargs.values(), result)))
    # A tensor that is both an argument and the result is written only.
    known = {(t.data_ptr(), t.numel()): t.numel() * t.element_size() for t in tensors}
    work.nbytes = sum(known.values())
    if packet in flop_registry:
        work.flops = flop_registry[packet](*args, **kwargs, out_val=result)
        work.operand_bytes = tensors[0].element_size()
