"""Which configuration calls of some sizes take: measured, agreed by all ranks, kept in a file.

    weft.tune(weft.ops.ag_gemm, {"m": range(1, 8193), "n": 7168, "k": 4096}, world=world)

Candidates are variants of a benchmark: checked first, then measured in turns, recorded and eager,
on inputs that L2 does not hold. A time is the slowest rank's, which all ranks get; so all choose
alike from the medians of it. What fails on one rank is left out on all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from weft.base import topology
from weft.base.card import Op
from weft.base.providers import provider
from weft.base.settings import Settings
from weft.compiler.buckets import key_of
from weft.runtime import choices
from weft.runtime.start import init
from weft.tune import protocol
from weft.tune.bench import HEAP_SHARE, Message, Plan, bench_point
from weft.tune.device import EmulatedDevice, GpuDevice
from weft.tune.presets import Point
from weft.tune.processes import RanksStopped
from weft.tune.provenance import write_json
from weft.tune.supervision import supervised
from weft.tune.variants import CANDIDATES

# How calls are called in a file, and how a benchmark calls the mode.
MODES = {"eager": "eager", "recorded": "graph"}


@dataclass
class Choice:
    """What was found for one bucket: of `eager` and of `recorded` calls the configuration's fields,
    its time, and that of the fastest; `left_out` says why candidates are. No `eager`: none is left.

    Units  us; emulated ranks' are steps of the scheduler
    """

    key: str
    shape: Mapping[str, int]
    eager: Mapping[str, Any] = field(default_factory=dict)
    recorded: Mapping[str, Any] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)


def tune(
    what: str | Callable[..., Any] | Op,
    sizes: Mapping[str, int | Iterable[int]],
    *,
    world: Any,
    dtype: str = "bfloat16",
    rounds: int = protocol.MIN_ROUNDS,
) -> list[Choice]:
    """Measure how calls of an operator are best done at these sizes, one bucket of m after the
    other, and have this world and later ones do them so. Collective.

        weft.tune("gemm_rs", {"m": [512, 4096], "n": 4096, "k": 3584}, world=world)

    Shapes  sizes: as of weft.prepare
    Dtypes  dtype: of operands, by torch's name
    Sync    the host waits; measured in a world of its own, since a candidate may break it
    Raises  UsageError: no such operator; sizes that are missing or unknown
    """
    card = provider("preparing").card_of(what)
    found = _points(card, sizes, world, dtype)
    plan = Plan(tuple(found.values()), world.num_ranks, (CANDIDATES,), rounds)
    chosen = decided(card, found, supervised(plan, lambda plan: _measure(plan, card, world)))
    machine, path = choices.machine_of(world.target), None
    if world.rank == 0:
        path = keep(card.problem.op, machine, world.num_ranks, chosen, world.settings)
    # From here on in this world too, on all ranks.
    path = world.backend.exchange(path and str(path), world.meeting_timeout_s)[0]
    new = {one.key: {**vars(one), "file": path} for one in chosen if one.eager}
    op = card.problem.op
    world.choices = {**world.choices, op: {**world.choices.get(op, {}), **new}}
    world.calls.forget_all()
    return chosen


def points_of(
    card: Op, sizes: Mapping[str, Any], num_ranks: int, nodes: tuple[int, ...], dtype: str
) -> dict[str, Point]:
    """What is measured, by the key of its choice."""
    found = {}
    for problem in provider("preparing").problems_of(card, sizes, num_ranks, nodes, dtype):
        # Weights as layers keep them.
        layout = {"b_is_nk": True} if hasattr(problem, "b_is_nk") else {}
        named = vars(problem)
        named = dict(named["sizes"]) if "sizes" in named else named  # of a program
        shape = {name: named[name] for name in card.default_shape}
        found[key_of(problem)] = Point(card.name, "", shape, tuple(MODES.values()), dtype, layout)
    return found


def _points(card: Op, sizes: Mapping[str, Any], world: Any, dtype: str) -> dict[str, Point]:
    nodes = topology.sizes_of(world.backend.seats.nodes)
    return points_of(card, sizes, world.num_ranks, nodes, dtype)


def _measure(plan: Plan, card: Op, world: Any) -> Iterator[Message]:
    """What a benchmark on all ranks says, here: in a world that is given up where it breaks."""
    own, kind = world, EmulatedDevice
    if world.target.backend != "emu":
        memory_bytes = torch.cuda.get_device_properties(world.device).total_memory
        own = init(
            world.backend.group, name="weft-tune",
            heap_bytes=max(world.heap_bytes, memory_bytes // (2 * HEAP_SHARE)),
            nodes=topology.sizes_of(world.backend.seats.nodes),
        )  # fmt: skip
        kind = GpuDevice
    device = kind(own)
    said: list[Message] = []
    try:
        for point in plan.points:
            said.append(("at", {"point": point.name, "variant": ""}))
            bench_point(own, device, card, point, plan, said.append)
            yield from said
            said.clear()
        yield ("finished", {})
    except protocol.FatalError as error:
        if own is not world:
            own.backend.abort()  # then closing it waits for no rank
        yield from (*said, ("fatal", {"error": error.message}))
        raise RanksStopped(error.message) from error
    finally:
        if own is not world:
            own.close()


# ---------------------------------------------------------------------------------------------
# Of what was measured


def decided(card: Op, points: Mapping[str, Point], said: Iterable[Message]) -> list[Choice]:
    """One choice for each point, of a benchmark's rows; the same wherever these are."""
    rows: dict[str, list[Mapping[str, Any]]] = {}
    failed: dict[str, dict[str, str]] = {}
    for word, values in said:
        if word in ("row", "failed"):
            name = Point(values["op"], values["label"], values["shape"], ()).name
            if word == "row":
                rows.setdefault(name, []).append(values)
            else:
                said_of = f"{values['variant']} {values['mode'] or ''}".strip()
                failed.setdefault(name, {})[said_of] = values["error"]
    return [
        Choice(key, dict(point.shape), **best_of(card, rows.get(point.name, ())),
               left_out=failed.get(point.name, {}))
        for key, point in points.items()
    ]  # fmt: skip


def best_of(card: Op, rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """How eager and how recorded calls are done: alike, unless the operator can tell them apart.
    The least product of both times; of the same, what comes first."""
    us: dict[str, dict[str, float]] = {name: {} for name in MODES}
    configs: dict[str, Any] = {}
    for row in rows:
        (mode,) = (name for name, of_bench in MODES.items() if of_bench == row["mode"])
        us[mode][row["variant"]] = row["median_us"]
        configs.setdefault(row["variant"], card.config(**row["fields"]))
    eager, recorded = us["eager"], us["recorded"]
    if not recorded:  # nothing of it can be recorded
        recorded = eager
    pairs = [
        (one, other) for one in eager for other in recorded
        if card.records_as(configs[one], configs[other])
    ]  # fmt: skip
    if not pairs:
        return {}
    best = min(pairs, key=lambda pair: eager[pair[0]] * recorded[pair[1]])
    return {
        mode: {
            "config": dict(vars(configs[name])),
            "us": times[name],
            "best_us": min(times.values()),
        }
        for mode, name, times in zip(MODES, best, (eager, recorded), strict=True)
    }


def keep(
    op: str, machine: str, num_ranks: int, found: Sequence[Choice], settings: Settings
) -> Path | None:
    """Put choices in their file, beside those of other sizes; where that is, if anywhere."""
    folder = choices.folder_of(settings, machine)
    if folder is None:
        return None
    path = folder / choices.file_name(op, machine, num_ranks)
    known = choices.records_of(path)[1] if path.exists() else {}
    known |= {one.key: {**vars(one), "file": str(path)} for one in found if one.eager}
    unit = "steps of the emulator" if machine == choices.EMULATED else "us"
    about = {"op": op, "machine": machine, "ranks": num_ranks, "unit": unit}
    write_json(path, {**about, "choices": [*known.values()]})
    return path
