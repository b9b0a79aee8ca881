"""DTensors in the place of the parts that ranks have: taken where they lie as is needed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from weft.base.errors import PlacementError
from weft.ir import text
from weft.ir.tensor import Partial, Placement, Replicate, Shard


def is_dtensor(value: Any) -> bool:
    # Whoever has one has loaded its module, which takes a second.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def placement_of(given: Any) -> Placement | None:
    """What torch's placement, or weft's own, is called here; None for anything else."""
    if isinstance(given, Placement):
        return given
    module = sys.modules.get("torch.distributed.tensor")
    if module is None or not isinstance(given, module.Placement):
        return None
    if type(given) is module.Shard:
        return Shard(given.dim)
    return Replicate() if given.is_replicate() else Partial() if given.is_partial() else None


def local_part(asker: str, world: Any, name: str, tensor: Any, wanted: Placement | None) -> Any:
    """This rank's part of a DTensor, if it lies as `wanted` over the world's ranks; its gradient
    comes back to the DTensor.

    Raises  PlacementError: it does not
    """
    from torch.distributed import tensor as torchs

    mesh, placements = tensor.device_mesh, tuple(tensor.placements)
    if isinstance(wanted, Shard):
        needed: Any = torchs.Shard(wanted.dim)
    else:
        kinds = {Replicate: torchs.Replicate, Partial: torchs.Partial}
        needed = kinds.get(type(wanted), lambda: None)()
    if placements != (needed,):
        where = text.value(wanted)
        raise PlacementError(
            f"{asker}: {name} is a DTensor placed as {_as_text(placements)} on a mesh of shape "
            f"{tuple(mesh.shape)}; {asker} takes {name} as {where} over the ranks of its world: "
            f"pass {name}.redistribute(placements=[{where}]), or a plain tensor, {name}.to_local()"
        )
    ranks = world.backend.seats.global_ranks
    if not _is_compiling() and tuple(mesh.mesh.tolist()) != ranks:
        raise PlacementError(
            f"{asker}: {name} is a DTensor on a mesh of the ranks {mesh.mesh.tolist()}, but the "
            f"world {world.name!r} is of the ranks {list(ranks)}; they must be the same, in the "
            "same order: weft.init(group=mesh.get_group())"
        )
    # A sum's gradient is the same on all ranks that have a share of it.
    gradient = [torchs.Replicate()] if isinstance(wanted, Partial) else None
    return tensor.to_local(grad_placements=gradient)


def refuse(asker: str, name: str, value: Any) -> None:
    """Raises  PlacementError: a DTensor, which is not taken here"""
    if is_dtensor(value):
        raise PlacementError(
            f"{asker}: {name} is a DTensor placed as {_as_text(value.placements)}; pass a plain "
            f"tensor, {name}.to_local()"
        )


def _is_compiling() -> bool:
    import torch

    return torch.compiler.is_dynamo_compiling()


def _as_text(placements: Sequence[Any]) -> str:
    return "[" + ", ".join(map(repr, placements)) + "]"
