"""`weft machine`: probe what this machine can do, and have later worlds reckon with it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from weft.base.settings import Settings
from weft.tools import console, options
from weft.tools.bench import find_gpus

if TYPE_CHECKING:
    from weft.base.hardware import Hardware

# A probe that says nothing for so long hangs: it takes some seconds, kernels are compiled first.
SILENCE_S = 120.0


def machine(
    ranks: options.Gpus = None,
    json: options.AsJson = False,
) -> int:
    """Measure what copies, stores, signals, memory and products reach here, in some seconds.

    Choices that were not measured by `weft tune` are then predicted for this machine and number of
    GPUs. Kept in the folder WEFT_CHOICES.
    """
    from weft.runtime import choices

    if "RANK" in os.environ:  # under torchrun: one of its processes
        import torch

        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        found, where = probed(), torch.cuda.get_device_name()
        if os.environ["RANK"] != "0":
            return console.FINE
    else:
        from weft.tune import processes

        count = find_gpus(ranks)
        ((found, where),) = processes.messages_from_gpus(on_gpu, count, silence_s=SILENCE_S)
    folder = choices.folder_of(Settings.from_environment(), where)
    path = folder and str(folder / choices.file_name(choices.MACHINE, where, _ranks_of(found)))
    if json:
        console.print_json({"machine": where, "file": path, "record": vars(found)})
        return console.FINE
    show(found)
    kept = f"kept: {path}" if path else "kept nowhere: WEFT_CHOICES names no folder"
    console.results().print(kept, markup=False)
    return console.FINE


def _ranks_of(found: Hardware) -> int:
    return int(found.name.rpartition("x")[2])


def probed() -> Hardware:
    """One rank's part. Collective."""
    from weft.runtime.start import init
    from weft.tune.machine import probe

    with init() as world:
        return probe(world)


def on_gpu(rank: int, send: Callable[[Any], None]) -> None:
    import torch

    send((probed(), torch.cuda.get_device_name()))


def show(found: Hardware) -> None:
    """What was read, beside what is known of the machine that was read by hand."""
    from weft.base.hardware import H200X4
    from weft.tune.machine import PROBES

    known = H200X4
    rows = [("", found.name, known.name)]
    for one in PROBES.values():
        rows += [(name, f"{getattr(found, name):.3g}", f"{getattr(known, name):.3g}")
                 for name in (one.rate, one.start) if name]  # fmt: skip
    console.print_table(rows)
