"""The rows of a benchmark's JSON: what was measured of one point in one mode, and what failed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from weft.tune.figures import Parts, Times
from weft.tune.presets import Point
from weft.tune.variants import PIECES, Variant


def rows(
    point: Point, num_ranks: int, mode: str, able: Sequence[Variant], times: Mapping[str, Times],
    checked: Mapping[str, float], hosts: Mapping[str, float],
) -> Iterator[dict[str, Any]]:  # fmt: skip
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
    for variant in (one for one in able if one.name in times):
        spread = times[variant.name]
        is_piece = has_gemm and variant.name in PIECES
        is_compared = variant.answers and serial_checked and not is_piece
        ratio = parts.ratio(spread.median) if is_compared else None
        efficiency = parts.overlap_efficiency(spread.median) if is_compared else None
        row: dict[str, Any] = {
            "op": point.op, "label": point.label, "shape": dict(point.shape), "ranks": num_ranks,
            "dtype": point.dtype, "mode": mode, "variant": variant.name,
            "config": variant.about_in(mode), "median_us": _round(spread.median),
            "p10_us": _round(spread.p10), "p90_us": _round(spread.p90),
            "rounds": len(spread.rounds), "t_gemm_us": _round(parts.gemm),
            "t_comm_us": _round(parts.comm), "t_serial_us": _round(parts.serial),
            "ratio_to_serial": _round(ratio, 3), "ceiling": _round(parts.ceiling, 3),
            "overlap_efficiency": _round(efficiency, 3),
            "rel_err": checked.get(variant.name) if variant.answers else None,
            "checked": variant.answers,
        }  # fmt: skip
        if point.bytes_per_rank is not None:
            row["bytes_per_rank"] = point.bytes_per_rank
        if variant.config is not None:
            row["fields"] = dict(vars(variant.config))
        if variant.name in hosts:
            row["host_us"] = _round(hosts[variant.name])
        yield row


def _round(value: float | None, digits: int = 1) -> float | None:
    return None if value is None else round(value, digits)


def failure_row(point: Point, variant: str, mode: str | None, error: str) -> dict[str, Any]:
    return {
        "op": point.op, "label": point.label, "shape": dict(point.shape), "dtype": point.dtype,
        "mode": mode, "variant": variant, "error": error,
    }  # fmt: skip
