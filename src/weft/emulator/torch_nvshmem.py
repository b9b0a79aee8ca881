"""torch's device functions of NVSHMEM, for kernels of emulated ranks.

torch's module defines them where it finds a GPU, and links kernels that say `requires_nvshmem` with
NVSHMEM's library. Here it is read as if there was one, and nothing is linked: the functions'
symbols are known (nvshmem.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any

import torch.distributed._symmetric_memory as torch_module
import torch.utils._triton as torch_triton

MODULE = f"{torch_module.__name__}._nvshmem_triton"


class _Finder:
    """Asked by sys.meta_path for modules that are not there yet."""

    @staticmethod
    def find_spec(name: str, path: Any, target: Any = None) -> Any:
        spec = PathFinder.find_spec(name, path) if name == MODULE else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                asked, torch_triton.has_triton = torch_triton.has_triton, lambda: True
                try:
                    execute(module)
                finally:
                    torch_triton.has_triton = asked
                module.requires_nvshmem = lambda kernel: kernel  # type: ignore[attr-defined]
                module.enable_triton = lambda *where: {}  # type: ignore[attr-defined]

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def intercept_nvshmem() -> Callable[[], None]:
    """Let torch's NVSHMEM be there, for kernels and for hosts that ask; returns the undo."""
    finder: Any = _Finder()
    before = _take_out()
    available, torch_module.is_nvshmem_available = torch_module.is_nvshmem_available, lambda: True
    sys.meta_path.insert(0, finder)

    def restore() -> None:
        sys.meta_path.remove(finder)
        torch_module.is_nvshmem_available = available
        _take_out()
        if before is not None:
            sys.modules[MODULE] = before
            torch_module._nvshmem_triton = before  # type: ignore[attr-defined]

    return restore


def _take_out() -> ModuleType | None:
    if hasattr(torch_module, "_nvshmem_triton"):
        delattr(torch_module, "_nvshmem_triton")
    return sys.modules.pop(MODULE, None)
