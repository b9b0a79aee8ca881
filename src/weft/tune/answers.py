"""Is an answer right: compared where it lies, on the CPU or a GPU."""

from __future__ import annotations

from typing import Any

import torch


def rel_err(out: Any, expected: Any, dtype: torch.dtype = torch.float32) -> float:
    """||out - expected|| / ||expected||, the worst of a tuple, where `expected` lies; norms are
    taken in `dtype`. Infinite where shapes differ or a NaN is."""
    if isinstance(expected, (tuple, list)):
        return max(rel_err(o, e, dtype) for o, e in zip(out, expected, strict=True))
    if out.shape != expected.shape:
        return float("inf")
    if out.numel() == 0:
        return 0.0
    out, expected = out.detach().to(expected.device, dtype), expected.to(dtype)
    norm = expected.norm().item()
    error = (out - expected).norm().item() / (norm if norm else 1.0)
    return error if error == error else float("inf")


def poison(value: Any) -> None:
    """What a call does not write must not pass for its answer."""
    if isinstance(value, (tuple, list)):
        for one in value:
            poison(one)
    elif isinstance(value, torch.Tensor):
        value.fill_(float("nan") if value.is_floating_point() else 77)
