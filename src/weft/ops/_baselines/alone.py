"""weft's own product without its collective: an operator when nothing is waited for.

Beside it, an operator's loss falls into two: what its template costs against cuBLAS, and what of
the communication shows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from weft.ops._baselines.nccl import GatherThenMultiply
from weft.runtime.start import init
from weft.tune.case import Case
from weft.tune.variants import Variant

_worlds: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def own_world(case: Case) -> Any:
    """A world of this rank alone. Collective when first called: all ranks make all groups."""
    if case.world not in _worlds:
        groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
        heap_bytes = case.world.settings.heap_bytes // 8
        _worlds[case.world] = init(groups[dist.get_rank()], heap_bytes=heap_bytes)
    return _worlds[case.world]


def ag_gemm(case: Case) -> Variant:
    """All rows are this rank's own: nothing is gathered, nobody is waited for.

    In the operator's own tiles, and as a push to nobody: a pull would stage all rows first.
    """
    world = own_world(case)
    problem = replace(case.problem, num_ranks=1, nodes=())
    # Of few rows the template is another, which is not without its packets.
    found = case.card.candidates(case.problem, case.world.target)
    chosen = next(one for one in found if one.transport != "ll")
    config = replace(chosen, transport="sm_push", pushers=1, first_wave=1)
    calls = []
    for inputs in case.sets:
        way = GatherThenMultiply(case, inputs)
        way.move()
        whole = {"a": way.gathered[: problem.m], "b": inputs["b"]}
        if way.scales is not None:
            whole |= {"scale_a": way.scales[: problem.m], "scale_b": inputs["scale_b"]}
        calls.append(lambda whole=whole: case.card.run(world, problem, whole, config))
    return Variant("weft_alone", calls, about=str(config))


def product(case: Case) -> Variant:
    """All rows are this rank's own, so no share of them travels."""
    world = own_world(case)
    problem = replace(case.problem, num_ranks=1, nodes=())
    fused = (c for c in case.card.candidates(case.problem, case.world.target) if c.is_fused)
    config = next(fused)
    if config.transport == "ce_push":  # nobody is there to whom they would carry tiles
        config = replace(config, transport="sm_push", chunks=1)
    calls = [
        lambda inputs=inputs: case.card.run(world, problem, inputs, config) for inputs in case.sets
    ]
    return Variant("weft_alone", calls, answers=False, about=str(config))
