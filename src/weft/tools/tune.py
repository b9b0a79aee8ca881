"""`weft tune OP`: how calls of some sizes are best done, measured and kept for later worlds."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from weft.base.card import Op
from weft.base.errors import UsageError
from weft.base.settings import Settings
from weft.tools import console, options
from weft.tools.bench import find_gpus, line_of
from weft.tools.prepare import sizes_of
from weft.tools.programs import find_op
from weft.tools.words import op_dtype, shape_text

if TYPE_CHECKING:
    from weft.tune.choosing import Choice


def tune(
    op: options.ProgramWord,
    shape: options.Ranges = "",
    dtype: options.Dtype = "",
    ranks: options.Gpus = None,
    emulated: Annotated[
        int | None,
        options.option("N", "on so many emulated ranks: steps are counted, no time is taken"),
    ] = None,
    rounds: Annotated[int, options.option("N", "interleaved rounds, at least 7")] = 7,
    json: options.AsJson = False,
) -> int:
    """Measure how calls of these sizes are best done, and have later worlds do them so.

    Every candidate is checked and measured, recorded and eager, for each bucket of m. Choices are
    kept for this machine, number of ranks and versions in the folder WEFT_CHOICES.
    """
    from weft.tune import choosing
    from weft.tune.protocol import MIN_ROUNDS

    if rounds < MIN_ROUNDS:
        raise UsageError(f"--rounds {rounds}: a median takes at least {MIN_ROUNDS}")
    if emulated is not None and ranks is not None:
        raise UsageError(
            f"--ranks {ranks} and --emulated {emulated}: give one; --emulated says how many ranks"
            " are emulated, --ranks how many GPUs are measured"
        )
    card = find_op(op)
    sizes, name = sizes_of(shape, card.default_shape), op_dtype(card, dtype).name
    notes = console.notes()
    if emulated is not None:
        chosen = _emulated(card, sizes, name, emulated, rounds)
        machine = choosing.choices.EMULATED
        ranks = emulated
    elif "RANK" in os.environ:  # under torchrun: one of its processes
        return _as_rank(card, sizes, name, rounds, json)
    else:
        from weft.tune.bench import Plan
        from weft.tune.supervision import start_on_gpus, supervised

        ranks, machine = find_gpus(ranks), ""
        points = choosing.points_of(card, sizes, ranks, (), name)
        plan = Plan(tuple(points.values()), ranks, (choosing.CANDIDATES,), rounds)
        said = []
        for word, values in supervised(plan, start_on_gpus(find_op)):
            said.append((word, values))
            machine = values["device"] if word == "started" else machine
            if word in ("row", "failed"):
                notes.print(line_of(word, values), markup=False)
        chosen = choosing.decided(card, points, said)
        choosing.keep(card.problem.op, machine, ranks, chosen, Settings.from_environment())
    return _show(card, machine, ranks, chosen, json)


def _emulated(
    card: Op, sizes: Mapping[str, Any], dtype: str, num_ranks: int, rounds: int
) -> Sequence[Choice]:
    from weft.emulator import emulated

    with emulated(ranks=num_ranks, seed=0) as session:
        return session.run(partial(_rank, card, sizes, dtype, rounds))[0]


def _rank(card: Op, sizes: Mapping[str, Any], dtype: str, rounds: int) -> Sequence[Choice]:
    from weft.runtime.start import init
    from weft.tune import choosing

    with init() as world:
        return choosing.tune(card, sizes, world=world, dtype=dtype, rounds=rounds)


def _as_rank(card: Op, sizes: Mapping[str, Any], dtype: str, rounds: int, json: bool) -> int:
    import torch

    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    chosen = _rank(card, sizes, dtype, rounds)
    if os.environ["RANK"] != "0":
        return console.FINE
    machine, ranks = torch.cuda.get_device_name(), int(os.environ["WORLD_SIZE"])
    return _show(card, machine, ranks, chosen, json)


def _show(card: Op, machine: str, ranks: int, chosen: Sequence[Choice], json: bool) -> int:
    """What was chosen, why candidates were left out, and where it is kept."""
    from weft.runtime import choices

    folder = choices.folder_of(Settings.from_environment(), machine)
    path = folder and str(folder / choices.file_name(card.problem.op, machine, ranks))
    unit = "steps" if machine == choices.EMULATED else "us"
    if json:
        found = [vars(one) for one in chosen]
        console.print_json({"op": card.name, "machine": machine, "ranks": ranks, "unit": unit,
                            "file": path, "choices": found})  # fmt: skip
    else:
        out = console.results()
        for one in chosen:
            for mode, taken in (("eager", one.eager), ("recorded", one.recorded)):
                what = f"{card.name} {shape_text(one.shape)} {mode}"
                if not taken:
                    out.print(f"{what}: no candidate is left", markup=False)
                    continue
                config = card.config(**taken["config"])
                behind = taken["us"] / max(taken["best_us"], 1e-9) - 1
                more = f", the best {taken['best_us']:.1f}" if behind > choices.ALIKE else ""
                out.print(f"{what}: {taken['us']:.1f} {unit}{more}: {config}", markup=False)
            for name, why in one.left_out.items():
                out.print(f"  left out: {name}: {why}", markup=False)
        out.print(f"kept: {path}" if path else "kept nowhere: WEFT_CHOICES names no folder",
                  markup=False)  # fmt: skip
    return console.FINE if all(one.eager for one in chosen) else console.PROBLEM
