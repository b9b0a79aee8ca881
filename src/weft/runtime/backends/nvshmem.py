"""NVSHMEM, through torch's symmetric memory: how kernels reach GPUs that they cannot address.

A world whose ranks sit on several nodes allocates from torch's NVSHMEM backend, and its kernels are
linked with NVSHMEM's device code (weft.language.cuda.nvshmem). Worlds of one node need neither.
Torch has one such backend for a process, chosen before its
first symmetric tensor; and NVSHMEM allocates on all ranks at once, so its worlds are of all ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from weft.base.errors import UnsupportedError, UsageError
from weft.language import world_layout as layout
from weft.language.cuda import nvshmem_library
from weft.language.world_arg import far_version
from weft.runtime.backend import Far

NAME = "NVSHMEM"
# What NVSHMEM calls its state in a kernel's binary: constant memory that it must fill.
STATE = b"nvshmemi_device_state_d"
REMEDY = "make a world of one node, or install torch for CUDA on Linux, which brings NVSHMEM"


def why_not() -> str:
    """Why far peers cannot be reached here; "" where they can."""
    if torch.version.cuda is None or not dist.is_available():
        return f"torch {torch.__version__} is not built for CUDA and torch.distributed"
    import torch.distributed._symmetric_memory as symmetric

    available = getattr(symmetric, "is_nvshmem_available", None)
    if available is None or not hasattr(symmetric, "set_backend"):
        return f"torch {torch.__version__} has no NVSHMEM backend; it came with 2.9"
    if not available():
        return f"torch {torch.__version__} finds no NVSHMEM; it is in nvidia-nvshmem-cu13"
    if _module_init() is None:
        return f"torch {torch.__version__} does not initialise kernels for NVSHMEM"
    try:
        nvshmem_library.find()
    except UnsupportedError as error:
        return error.message
    return ""


def choose(group: dist.ProcessGroup) -> None:
    """From now on torch's symmetric memory is NVSHMEM's, and kernels that use it are initialised.

    Raises  UnsupportedError: there is no NVSHMEM here
            UsageError: torch's symmetric memory is in use already; a group of a part of all ranks
    """
    if reason := why_not():
        raise UnsupportedError(f"ranks on several nodes need NVSHMEM: {reason}; {REMEDY}")
    check_group(group)
    import torch.distributed._symmetric_memory as symmetric

    device = torch.device("cuda", torch.cuda.current_device())
    if symmetric.get_backend(device) != NAME:
        try:
            symmetric.set_backend(NAME)
        except RuntimeError as error:
            raise UsageError(
                "a world over several nodes must be made before any other world, and before "
                f"torch's symmetric memory is used: {str(error).splitlines()[0]}"
            ) from error
    _initialise_kernels()


def is_chosen() -> bool:
    """Does torch's symmetric memory of this process come from NVSHMEM?"""
    import torch.distributed._symmetric_memory as symmetric

    get_backend = getattr(symmetric, "get_backend", None)
    return get_backend is not None and get_backend(torch.device("cuda")) == NAME


def check_group(group: dist.ProcessGroup) -> None:
    """Raises  UsageError: not all ranks are in the group, so its heap cannot be NVSHMEM's"""
    if group.size() != dist.get_world_size():
        raise UsageError(
            f"a world of {group.size()} of {dist.get_world_size()} ranks cannot be made where "
            "ranks are on several nodes: NVSHMEM allocates on all ranks at once. Make the world "
            "of all ranks, or this one in processes without a world over several nodes"
        )


def open_stage(device: torch.device) -> Far:
    """Where data lies on its way to far peers: one stage serves all worlds. Collective."""
    if not _stage:
        import torch.distributed._symmetric_memory as symmetric

        nbytes = layout.STAGE_BYTES + layout.STAGE_SPARE_BYTES
        _stage.append(symmetric.empty(nbytes, dtype=torch.uint8, device=device))
        symmetric.rendezvous(_stage[0], dist.group.WORLD.group_name)
        _stage.append(torch.zeros(layout.STAGE_SLOTS, dtype=torch.int32, device=device))
        torch.cuda.current_stream().synchronize()
    stage, locks = _stage
    return Far(far_version(nvshmem_library.checksum()), stage.data_ptr(), locks.data_ptr())


# The stage and its locks, as long as the process lives.
_stage: list[torch.Tensor] = []


def _module_init() -> Any:
    from torch._C import _distributed_c10d

    return getattr(_distributed_c10d, "_nvshmemx_cumodule_init", None)


_initialising: list[Any] = []


def _initialise_kernels() -> None:
    """NVSHMEM fills its state in each kernel that is linked with it, once that is loaded."""
    if not _initialising:
        _initialising.append(_module_init())
        from weft.language import triton_api

        triton_api.when_loaded(STATE, _initialising[0])
