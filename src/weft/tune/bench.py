"""A benchmark: on the ranks, point by point; and from outside, so that what hangs is left out.

The parent starts the ranks once for all points, hears what rank 0 says, and where nothing comes any
more, or a process dies, starts them again without the variant that was running.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from weft.base.card import Op
from weft.tune import protocol, variants
from weft.tune.case import Case
from weft.tune.device import GpuDevice
from weft.tune.figures import Parts, Times
from weft.tune.peers import peers_of
from weft.tune.presets import Point
from weft.tune.processes import RanksStopped, messages_from_gpus
from weft.tune.protocol import FatalError
from weft.tune.provenance import clocks, provenance
from weft.tune.variants import Variant

# Compiling a rival's kernels, and one large point's inputs, are the longest silences there are.
SILENCE_S = 60.0
# Of a GPU's memory, for weft's symmetric heap: the largest point's slots, and what they outgrew.
HEAP_SHARE = 4
# Reading them takes a while, and they drift slowly.
CLOCKS_EVERY_S = 20.0
# Fifty calls are needed to read the host's time of one; it hides behind what is longer than this.
HOST_MATTERS_US = 1000.0
# A variant that hung or crashed at so many points is not tried at the others.
PATIENCE = 2


@dataclass(frozen=True)
class Plan:
    """What to measure. `wanted`: variants as --variants names them, () is all; `left_out`: by
    point ("" is all) and variant, with the reason.

    `until`: no point is begun after this time (time.time()); `done`: (point, mode) that are.
    """

    points: tuple[Point, ...]
    num_ranks: int
    wanted: tuple[str, ...] = ()
    peers: str = ""
    rounds: int = protocol.ROUNDS
    until: float = float("inf")
    left_out: Mapping[tuple[str, str], str] = field(default_factory=dict)
    done: frozenset[tuple[str, str]] = frozenset()

    def leaves_out(self, point: Point, name: str) -> bool:
        return (point.name, name) in self.left_out or ("", name) in self.left_out

    def wants(self, name: str) -> bool:
        """Parts of the unfused way are always wanted: there are no figures without them."""
        return not self.wanted or name in self.wanted or name in variants.PARTS


# What rank 0 says, as (word, values).
Message = tuple[str, dict[str, Any]]


# ---------------------------------------------------------------------------------------------
# On the ranks


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

    def told(name: str) -> None:
        send(("at", {"point": point.name, "variant": name}))

    def failed(failure: protocol.Failure) -> None:
        send(("failed", _failure_row(point, failure.variant, failure.mode, failure.error)))

    modes = [mode for mode in point.modes if (point.name, mode) not in plan.done]
    problem = replace(
        card.make_problem(world.num_ranks, dict(point.shape), point.dtype), **dict(point.fields)
    )
    case, error = protocol.attempt(device, lambda: Case(world, card, problem, device.l2_bytes))
    if error is not None:
        failed(protocol.Failure("", None, f"its inputs could not be made: {error}"))
        return
    checked: dict[str, float] = {}
    able: list[Variant] = []
    for name, make in makers(card, case, point, plan):
        told(name)
        made, error = protocol.attempt(device, make)
        for variant in made or ():
            if plan.leaves_out(point, variant.name):
                continue
            told(variant.name)
            worst, error = protocol.check(device, case, variant)
            if error is None and worst is not None:
                checked[variant.name] = worst
                able.append(variant)
            else:
                failed(protocol.Failure(variant.name, None, error or ""))
        if made is None:
            failed(protocol.Failure(name, None, error or ""))
    for mode in modes:
        times, failures = protocol.measure(device, case, able, mode, rounds=plan.rounds, told=told)
        for failure in failures:
            failed(failure)
        hosts = host_times(device, able, times, told) if mode == "eager" else {}
        for row in rows(point, world.num_ranks, mode, able, times, checked, hosts):
            send(("row", row))
        send(("measured", {"point": point.name, "mode": mode}))


def makers(
    card: Op, case: Case, point: Point, plan: Plan
) -> Iterator[tuple[str, Callable[[], list[Variant]]]]:
    """What makes each variant, by name: baselines first, then peers, then weft's own."""

    def named(name: str, make: Callable[[Case], Variant]) -> Callable[[], list[Variant]]:
        return lambda: [replace(make(case), name=name)]

    for name, make in {**card.baselines, **peers_of(card.name, plan.peers)}.items():
        if plan.wants(name) and not plan.leaves_out(point, name):
            yield name, named(name, make)
    own = [words for words in plan.wanted if words.split("/")[0] == "weft"]
    for words in own if plan.wanted else ["weft"]:
        if not plan.leaves_out(point, words):
            yield words, lambda w=words: list(variants.of_weft(case, w))


def host_times(
    device: Any, able: Sequence[Variant], times: Mapping[str, Times], told: protocol.Told
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
            told(variant.name)
            mine, error = protocol.attempt(device, lambda v=variant: read(v))
            if error is None:
                found[variant.name] = max(device.agree(mine))
    return found


def rows(
    point: Point,
    num_ranks: int,
    mode: str,
    able: Sequence[Variant],
    times: Mapping[str, Times],
    checked: Mapping[str, float],
    hosts: Mapping[str, float],
) -> Iterator[dict[str, Any]]:
    """The rows of one point in one mode, as the JSON holds them.

    A ratio is between two answers that were checked: without that it is None.
    """
    medians = {v.part: times[v.name].median for v in able if v.part and v.name in times}
    parts = Parts(**medians)
    has_gemm = parts.gemm is not None
    if not has_gemm:  # a collective: the vendor's is the unfused way
        parts = replace(parts, serial=parts.comm)
    unfused = "serial" if has_gemm else "comm"
    serial_checked = any(v.answers for v in able if v.part == unfused)
    for variant in able:
        if variant.name not in times:
            continue
        spread = times[variant.name]
        is_piece = has_gemm and variant.name in variants.PIECES
        is_compared = variant.answers and serial_checked and not is_piece
        row: dict[str, Any] = {
            "op": point.op,
            "label": point.label,
            "shape": dict(point.shape),
            "ranks": num_ranks,
            "dtype": point.dtype,
            "mode": mode,
            "variant": variant.name,
            "config": variant.about,
            "median_us": _round(spread.median),
            "p10_us": _round(spread.p10),
            "p90_us": _round(spread.p90),
            "rounds": len(spread.rounds),
            "t_gemm_us": _round(parts.gemm),
            "t_comm_us": _round(parts.comm),
            "t_serial_us": _round(parts.serial),
            "ratio_to_serial": _round(parts.ratio(spread.median), 3) if is_compared else None,
            "ceiling": _round(parts.ceiling, 3),
            "overlap_efficiency": (
                _round(parts.overlap_efficiency(spread.median), 3) if is_compared else None
            ),
            "rel_err": checked.get(variant.name) if variant.answers else None,
            "checked": variant.answers,
        }
        if point.bytes_per_rank is not None:
            row["bytes_per_rank"] = point.bytes_per_rank
        if variant.name in hosts:
            row["host_us"] = _round(hosts[variant.name])
        yield row


def _round(value: float | None, digits: int = 1) -> float | None:
    return None if value is None else round(value, digits)


def _failure_row(point: Point, variant: str, mode: str | None, error: str) -> dict[str, Any]:
    return {
        "op": point.op, "label": point.label, "shape": dict(point.shape), "dtype": point.dtype,
        "mode": mode, "variant": variant, "error": error,
    }  # fmt: skip


# ---------------------------------------------------------------------------------------------
# From outside

Start = Callable[[Plan], Iterator[Message]]


def start_on_gpus(card_of: Callable[[str], Op]) -> Start:
    """What starts the ranks of a plan and yields what they say."""

    def start(plan: Plan) -> Iterator[Message]:
        return messages_from_gpus(
            bench_rank, plan.num_ranks, card_of, plan, silence_s=SILENCE_S
        )  # fmt: skip

    return start


def bench(plan: Plan, start: Start) -> Iterator[Message]:
    """Everything of a plan; yields "started", "at", "row", "failed", "measured", "clocks",
    "skipped".

    What hangs or kills its process becomes a "failed", and the rest goes on in new processes.
    """
    left_out: dict[tuple[str, str], str] = dict(plan.left_out)
    done: set[tuple[str, str]] = set(plan.done)
    points = {point.name: point for point in plan.points}
    ended: set[str] = set()
    stumbles: dict[str, int] = {}
    while True:
        remaining = tuple(point for name, point in points.items() if name not in ended)
        if not remaining:
            return
        current = replace(plan, points=remaining, left_out=left_out, done=frozenset(done))
        at, why = {"point": "", "variant": ""}, ""
        try:
            for word, values in start(current):
                if word == "at":
                    if at["point"] and values["point"] != at["point"]:
                        ended.add(at["point"])
                    at = values
                elif word == "measured":
                    done.add((values["point"], values["mode"]))
                elif word == "skipped":
                    ended.add(values["point"])
                elif word == "fatal":
                    why = values["error"]
                    continue
                elif word == "finished":
                    ended.update(points)
                    continue
                yield word, values
            return
        except RanksStopped as stopped:
            point, name = points.get(at["point"]), at["variant"]
            why = why or stopped.message
            if point is None:  # they did not even start: nor would they again
                raise
            if not name or (point.name, name) in left_out:
                ended.add(point.name)
            left_out[point.name, name] = why
            stumbles[name] = stumbles.get(name, 0) + 1
            if name and stumbles[name] >= PATIENCE:
                left_out["", name] = why
            yield "failed", _failure_row(point, name, None, why)
