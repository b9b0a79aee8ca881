"""A benchmark on the ranks: every point of a plan, with all its variants, in all its modes.

Rank 0 tells whoever started it (`supervision`) what runs, what was measured and what failed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from weft.base import topology
from weft.base.card import Op
from weft.tune import protocol, variants
from weft.tune.case import Case
from weft.tune.device import GpuDevice
from weft.tune.figures import Times
from weft.tune.presets import Point
from weft.tune.protocol import FatalError
from weft.tune.provenance import clocks, provenance
from weft.tune.rows import failure_row, rows
from weft.tune.variants import Variant

# Of a GPU's memory, for weft's symmetric heap: the largest point's slots, and what they outgrew.
HEAP_SHARE = 4
# Reading them takes a while, and they drift slowly.
CLOCKS_EVERY_S = 20.0
# Fifty calls are needed to read the host's time of one; it hides behind what is longer than this.
HOST_MATTERS_US = 1000.0


@dataclass(frozen=True)
class Plan:
    """What to measure. `wanted`: variants as --variants names them, () is all; `left_out`: by
    point ("" is all) and variant, with the reason.

    `until`: no point is begun after this time (time.time()); `done`: (point, mode) that are.
    """

    points: tuple[Point, ...]
    num_ranks: int
    wanted: tuple[str, ...] = ()
    rounds: int = protocol.ROUNDS
    until: float = float("inf")
    left_out: Mapping[tuple[str, str], str] = field(default_factory=dict)
    done: frozenset[tuple[str, str]] = frozenset()

    def leaves_out(self, point: Point, name: str) -> bool:
        return (point.name, name) in self.left_out or ("", name) in self.left_out

    def wants(self, name: str) -> bool:
        """Parts of the unfused way are wanted by all but choices: no figures without them."""
        is_part = name in variants.PARTS and self.wanted != (variants.CANDIDATES,)
        return not self.wanted or name in self.wanted or is_part


# What rank 0 says, as (word, values).
Message = tuple[str, dict[str, Any]]


def bench_rank(
    rank: int, send: Callable[[Message], None], card_of: Callable[[str], Op], plan: Plan
) -> None:
    """One rank's process: every point that is left."""
    import torch

    from weft.runtime.start import init

    memory_bytes = torch.cuda.get_device_properties(rank).total_memory
    world = init(heap_bytes=memory_bytes // HEAP_SHARE)
    torch.backends.cuda.matmul.allow_tf32 = False
    device = GpuDevice(world)
    bare, clocks_read = device.bare_launch_us(), float("-inf")
    about = {**provenance(), "bare_launch_us": round(bare, 2)} if rank == 0 else {}
    send(("started", {"device": torch.cuda.get_device_name(), **about}))
    for point in plan.points:
        if device.agree(time.time() > plan.until)[0]:
            send(("skipped", {"point": point.name}))
            continue
        send(("at", {"point": point.name, "variant": ""}))
        try:
            bench_point(world, device, card_of(point.op), point, plan, send)
        except FatalError as error:
            send(("fatal", {"error": error.message}))
            raise
        torch.cuda.empty_cache()
        if rank == 0 and time.monotonic() - clocks_read > CLOCKS_EVERY_S:
            clocks_read = time.monotonic()
            send(("clocks", {"after": point.name, "gpus": clocks()}))
    send(("finished", {}))


def bench_point(
    world: Any,
    device: Any,
    card: Op,
    point: Point,
    plan: Plan,
    send: Callable[[Message], None],
) -> None:
    """One point in all its modes: variants are made, checked, measured; rows go to `send`."""

    def on_variant(name: str) -> None:
        send(("at", {"point": point.name, "variant": name}))

    def failed(failure: protocol.Failure) -> None:
        send(("failed", failure_row(point, failure.variant, failure.mode, failure.error)))

    modes = [mode for mode in point.modes if (point.name, mode) not in plan.done]
    nodes = topology.sizes_of(world.backend.seats.nodes)
    more = {"nodes": nodes} if card.takes_nodes and len(nodes) > 1 else {}
    problem = replace(
        card.make_problem(world.num_ranks, dict(point.shape), point.dtype, **more),
        **dict(point.fields),
    )
    case, error = protocol.attempt(device, lambda: Case(world, card, problem, device.l2_bytes))
    if error is not None:
        failed(protocol.Failure("", None, f"its inputs could not be made: {error}"))
        return
    checked: dict[str, float] = {}
    able: list[Variant] = []
    for name, make in makers(card, case, point, plan):
        on_variant(name)
        made, error = protocol.attempt(device, make)
        for variant in made or ():
            if plan.leaves_out(point, variant.name):
                continue
            on_variant(variant.name)
            worst, error = protocol.check(device, case, variant)
            if error is None and worst is not None:
                checked[variant.name] = worst
                able.append(variant)
            else:
                failed(protocol.Failure(variant.name, None, error or ""))
        if made is None:
            failed(protocol.Failure(name, None, error or ""))
    for mode in modes:
        times, failures = protocol.measure(
            device, case, able, mode, rounds=plan.rounds, on_variant=on_variant
        )
        for failure in failures:
            failed(failure)
        hosts = host_times(device, able, times, on_variant) if mode == "eager" else {}
        for row in rows(point, world.num_ranks, mode, able, times, checked, hosts):
            send(("row", row))
        send(("measured", {"point": point.name, "mode": mode}))


def makers(
    card: Op, case: Case, point: Point, plan: Plan
) -> Iterator[tuple[str, Callable[[], list[Variant]]]]:
    """What makes each variant, by name: baselines first, then weft's own."""

    def named(name: str, make: Callable[[Case], Variant]) -> Callable[[], list[Variant]]:
        return lambda: [replace(make(case), name=name)]

    for name, make in card.baselines.items():
        if plan.wants(name) and not plan.leaves_out(point, name):
            yield name, named(name, make)
    own = [words for words in plan.wanted if words.split("/")[0] == "weft"]
    for words in own if plan.wanted else ["weft"]:
        if not plan.leaves_out(point, words):
            yield words, lambda w=words: list(variants.of_weft(case, w))


def host_times(
    device: Any, able: Sequence[Variant], times: Mapping[str, Times], on_variant: protocol.OnVariant
) -> dict[str, float]:
    """Host time of a call, of the slowest rank, where calls are short enough for it to matter."""

    def read(variant: Variant) -> float:
        took = device.host_us(variant.calls)
        for index in range(len(variant.calls)):
            if variant.before:
                variant.before(index)
        return took

    found = {}
    for variant in able:
        if variant.name in times and times[variant.name].median < HOST_MATTERS_US:
            on_variant(variant.name)
            mine, error = protocol.attempt(device, lambda v=variant: read(v))
            if error is None:
                found[variant.name] = max(device.agree(mine))
    return found
