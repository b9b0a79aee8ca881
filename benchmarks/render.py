"""Writes tables and plots from the JSON under benchmarks/results: numbers have one source.

python benchmarks/render.py            # README.md and docs/results.md between their markers; plots
python benchmarks/render.py --no-plots # where there is no matplotlib
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from weft.ops import names
from weft.tune import variants

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PICTURES = ROOT / "docs" / "pictures"
PAGES = (
    "README.md", "docs/results.md", "docs/scaling.md",
    *(f"docs/ops/{path.name}" for path in sorted((ROOT / "docs" / "ops").glob("*.md"))),
)  # fmt: skip
MARKERS = re.compile(r"(<!-- (\w+) -->\n).*?(<!-- end -->)", re.S)

# The parts of the unfused way and weft's product alone, with their titles.
PARTS = {"cublas": "cuBLAS", "nccl": "NCCL", "cublas_nccl": "serial", "weft_alone": "alone"}
PRODUCTS = ("ag_gemm", "gemm_rs", "gemm_ar")
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
# As weft.tune.presets has them: small points are shown as graphs.
GRAPH_M, GRAPH_BYTES = 512, 4 << 20
# Operators with tables of their own.
SHOWN = (*PRODUCTS, *COLLECTIVES)
FAMILIES = {
    "AG+GEMM": ("ag_gemm",),
    "GEMM+RS": ("gemm_rs",),
    "GEMM+AR": ("gemm_ar",),
    "all-gather, reduce-scatter, all-reduce, all-to-all": COLLECTIVES,
    "experts: routing, AG + grouped GEMM, grouped GEMM + RS or AR, dispatch, combine": (
        "moe_route", "ag_moe", "moe_rs", "moe_ar", "ep_dispatch", "ep_combine",
    ),
    "attention over sharded tokens, decode over sharded keys": ("ag_attention", "flash_decode"),
}  # fmt: skip
MEASURED_ON = [
    (op, num_gpus) for ops in FAMILIES.values() for op in ops for num_gpus in (4, 2)
]  # fmt: skip
SHOWN_SIZES = ("8 KB", "64 KB", "512 KB", "4 MB", "16 MB", "128 MB")

BF16 = "bfloat16"

Row = dict[str, Any]

# What was measured before transports were called as they are now.
OLD_NAMES = {
    "put": "ce_push", "push": "sm_push", "pull": "sm_pull", "copy_engine": "ce_pull",
    "packets": "ll", "one_shot_packets": "one_shot_ll", "two_shot_packets": "two_shot_ll",
}  # fmt: skip


def load(op: str, num_gpus: int = 4) -> dict[str, Any]:
    """The one current document of an operator, of H200s or else of H100s; empty where nothing was
    measured yet."""
    paths = [RESULTS / f"{op}_{kind}x{num_gpus}.json" for kind in ("h200", "h100")]
    document = next((json.loads(one.read_text()) for one in paths if one.exists()), {})
    for row in (*document.get("rows", []), *document.get("failed", [])):
        ours, _, transport = row["variant"].partition(" ")
        row["variant"] = f"{ours} {OLD_NAMES.get(transport, transport)}".strip()
    return document


def is_ours(row: Row) -> bool:
    return row["variant"].split()[0] == "weft"


def fastest(rows: list[Row]) -> Row | None:
    return min(rows, key=lambda row: row["median_us"], default=None)


def points(document: dict[str, Any], device_time: bool) -> Iterator[tuple[str, Row, list[Row]]]:
    """Of each point: label, weft's default row, and all rows of its mode. `device_time`: small
    points as graphs and the others queued, where measured so; otherwise eager calls."""
    for label, by_mode in modes(document):
        some = next(iter(by_mode.values()))[0]
        nbytes = some.get("bytes_per_rank")
        is_small = some["shape"]["m"] < GRAPH_M if nbytes is None else nbytes <= GRAPH_BYTES
        wanted = ("eager",)
        if device_time:
            wanted = ("graph", "queued") if is_small else ("queued", "graph")
        rows = next((by_mode[mode] for mode in wanted if mode in by_mode), [])
        for row in rows:
            if row["variant"] == "weft":
                yield label, row, rows


def modes(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, list[Row]]]]:
    """Of each point: label, and its rows by mode."""
    found: dict[tuple, dict[str, list[Row]]] = {}
    for row in document.get("rows", []):
        key = (row["label"], *row["shape"].values())
        found.setdefault(key, {}).setdefault(row["mode"], []).append(row)
    for (label, *_), by_mode in found.items():
        yield label, by_mode


def ways(rows: list[Row]) -> Row | None:
    """The fastest of what is not weft's and not a part."""
    others = (row for row in rows if not row["variant"].startswith("weft"))
    return fastest([row for row in others if row["variant"] not in PARTS])


def table(header: list[str], lines: list[list[str]]) -> list[str]:
    texts = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    return texts + [f"| {' | '.join(line)} |" for line in lines]


def mark(row: Row) -> str:
    """An asterisk where the row is of another commit than its document."""
    return "*" if "commit" in row else ""


def origin(document: dict[str, Any], how: str) -> str:
    versions = document["versions"]
    older = sorted({row["commit"] for row in document["rows"] if "commit" in row})
    also = f" (* {', '.join(older)})" if older else ""
    return (
        f"{document['hardware']}, bfloat16, {how}, commit {document['commit']}{also}, torch "
        f"{versions['torch']}, Triton {versions['triton']}."
    )


# ---------------------------------------------------------------------------------------------
# Products


def product_grid(op: str, cell: Callable[[Row, list[Row]], str], what: str) -> list[str]:
    """A cell for each m and layer, in device time."""
    found = {
        (row["shape"]["m"], label): cell(row, rows)
        for label, row, rows in points(load(op), device_time=True)
    }
    labels = list(dict.fromkeys(label for _, label in found))
    lines = [
        [f"m {m}", *(found.get((m, label), "") for label in labels)]
        for m in sorted({m for m, _ in found})
    ]
    return table([what, *labels], lines)


def efficiency(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def product_table(op: str) -> str:
    """Serial and weft's default choice, per layer and m: microseconds and overlap efficiency."""

    def cell(row: Row, rows: list[Row]) -> str:
        serial = "-" if row["t_serial_us"] is None else f"{row['t_serial_us']:.0f}"
        rival = ways(rows)
        other = f"{rival['median_us']:.0f}" if rival else "-"
        ours = f"{row['median_us']:.0f} ({efficiency(row['overlap_efficiency'])})"
        return f"{serial} / {other} / {ours}{mark(row)}"

    lines = product_grid(op, cell, "us, serial / best rival / weft (E)")
    how = "graphs below m = 512 and queued calls from there on"
    return "\n".join([*lines, "", origin(load(op), how), ""])


def product_full(op: str, device_time: bool) -> str:
    """Every variant at every point."""
    document = load(op)
    there = {row["variant"] for row in document["rows"]}
    shown = {name: title for name, title in PARTS.items() if name in there}
    lines = []
    for label, ours, rows in sorted(
        points(document, device_time), key=lambda point: (point[0], point[1]["shape"]["m"])
    ):
        names = {row["variant"]: row for row in rows}
        rivals = [
            f"{name.removeprefix('torch_')} {row['median_us']:.0f}"
            f" ({efficiency(row['overlap_efficiency'])})"
            for name, row in names.items()
            if name not in PARTS and name != "weft"
        ]
        parts = [f"{names[p]['median_us']:.0f}" if p in names else "-" for p in shown]
        ceiling = "-" if ours["ceiling"] is None else f"{ours['ceiling']:.2f}"
        weft = f"{ours['median_us']:.0f} ({efficiency(ours['overlap_efficiency'])})"
        spread = f"{ours['p10_us']:.0f} .. {ours['p90_us']:.0f}"
        lines.append(
            [label, f"{ours['shape']['m']}{mark(ours)}", ours["mode"], *parts, ceiling, weft,
             spread, ", ".join(rivals)]
        )  # fmt: skip
    header = ["layer", "m", "mode", *shown.values(), "ceiling", "weft (E)", "p10 .. p90",
              "others (E)"]  # fmt: skip
    how = "host time hidden" if device_time else "eager calls"
    return "\n".join([*table(header, lines), "", origin(document, how), ""])


# ---------------------------------------------------------------------------------------------
# Collectives


def collectives_table() -> str:
    """NCCL, the fastest of torch's, and weft's, in microseconds, for some sizes."""
    lines, document = [], {}
    for op in COLLECTIVES:
        cells = {}
        for label, ours, rows in points(load(op), device_time=True):
            document = load(op)
            cells[label] = triple(ours, rows)
        if cells:
            lines.append([op, *(cells.get(size, "") for size in SHOWN_SIZES)])
    if not lines:
        return ""
    how = "graphs up to 4 MB, queued calls above"
    texts = table(["us, NCCL / torch / weft, its best transport", *SHOWN_SIZES], lines)
    return "\n".join([*texts, "", origin(document, how), ""])


def collective_table(op: str) -> str:
    """One collective out of plain tensors: weft's choice, NCCL and the fastest of torch's."""
    document, lines = load(op), []
    for label, ours, rows in points(document, device_time=True):
        transport = re.search(r"transport='(\w+)'", ours["config"] or "")
        cells = [label, f"{ours['median_us']:.1f} (`{transport[1] if transport else ''}`)"]
        for name in ("nccl", "torch"):
            other = fastest([row for row in rows if row["variant"].startswith(name)])
            times = other["median_us"] / ours["median_us"] if other else 0.0
            shown = f"{times:.2f}" if times >= 1 else f"**{times:.2f}**"
            cells += [f"{other['median_us']:.1f}", shown] if other else ["-", "-"]
        lines.append(cells)
    header = ["", "weft", "NCCL", "times as fast", "torch", "times as fast"]
    how = "us, graphs up to 4 MB, queued calls above"
    return "\n".join([*table(header, lines), "", origin(document, how), ""])


def triple(ours: Row, rows: list[Row]) -> str:
    """NCCL / the fastest of torch's / weft's choice, and the transport that was faster if one was;
    in bold where weft's is the fastest or within 2 %."""
    nccl = next((row for row in rows if row["variant"] == "nccl"), None)
    torch = fastest([row for row in rows if row["variant"].startswith("torch")])
    others = [row["median_us"] for row in (nccl, torch) if row]
    best = fastest([row for row in rows if is_ours(row)]) or ours
    texts = [f"{ours['median_us']:.1f}"]
    if best["median_us"] < 0.98 * ours["median_us"]:
        texts.append(f"{best['variant'].removeprefix('weft ')} {best['median_us']:.1f}")
    if others and best["median_us"] <= 1.02 * min(others):
        texts[-1] = f"**{texts[-1]}**"
    firsts = [f"{row['median_us']:.1f}" if row else "-" for row in (nccl, torch)]
    return " / ".join([*firsts, ", ".join(texts)])


def collectives_full(device_time: bool) -> str:
    """Every variant of every collective at every size."""
    texts = []
    for op in COLLECTIVES:
        lines, names = [], []
        for label, _, rows in points(load(op), device_time):
            names = names or [row["variant"] for row in rows]
            by_name = {row["variant"]: row for row in rows}
            best = fastest(rows)
            cells = [label, rows[0]["mode"]]
            for name in names:
                text = f"{by_name[name]['median_us']:.1f}" if name in by_name else "-"
                cells.append(f"**{text}**" if best and best["variant"] == name else text)
            lines.append(cells)
        if lines:
            texts += [f"**{op}**", "", *table(["size", "mode", *names], lines), ""]
    return "\n".join(texts)


def host_table() -> str:
    """The host's time of one call, in eager calls enqueued one after the other."""
    found: dict[tuple[str, str], list[float]] = {}
    bare = None
    for op in (*PRODUCTS, *COLLECTIVES):
        document = load(op)
        bare = document.get("bare_launch_us", bare)
        for row in document.get("rows", []):
            if "host_us" in row:
                found.setdefault((op, row["variant"]), []).append(row["host_us"])
    if not found:
        return ""
    lines = [
        [op, name, f"{min(times):.1f} .. {max(times):.1f}"] for (op, name), times in found.items()
    ]
    texts = table(["operator", "variant", "us, over all points"], lines)
    return "\n".join([*texts, "", f"A bare Triton launch, read alike: {bare} us.", ""])


def failed_table() -> str:
    """What could not be measured, once for each reason."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for op in (*PRODUCTS, *COLLECTIVES):
        for failure in load(op).get("failed", []):
            reason = re.sub(r"m=\d+", "m=..", failure["error"])[:200].replace("|", "/")
            reason = re.sub(r"\b\d+ rows", ".. rows", reason)
            where = f"{failure['label']} m {failure['shape']['m']}"
            found.setdefault((op, failure["variant"], reason), []).append(where)
    lines = [
        [op, name, str(len(where)), where[0], reason] for (op, name, reason), where in found.items()
    ]
    if not lines:
        return "Everything could be measured.\n"
    texts = table(["operator", "variant", "points", "first", "why"], lines)
    return "\n".join([*texts, ""])


# ---------------------------------------------------------------------------------------------
# All operators alike


def whole_points(op: str, num_gpus: int) -> Iterator[tuple[str, Row, Row | None]]:
    """Of each point of an operator: label, weft's row, and the fastest whole way of others."""
    for label, ours, rows in points(load(op, num_gpus), device_time=True):
        yield label, ours, fastest_way(rows)


def fastest_way(rows: list[Row]) -> Row | None:
    """Of others, for all of the work."""
    # NCCL alone is a piece where something is computed besides.
    has_product = any(variants.PARTS.get(row["variant"]) == "serial" for row in rows)
    pieces = {*variants.PIECES} - (set() if has_product else {"nccl"})
    others = [row for row in rows if not row["variant"].startswith("weft")]
    return fastest([row for row in others if row["variant"] not in pieces])


def speeds(op: str, num_gpus: int) -> Iterator[tuple[str, str, Row, float]]:
    """Of each point in each mode: label, mode, weft's row, and how many times as fast it is as the
    fastest whole way of others. Rows of older commits are left out."""
    for label, by_mode in modes(load(op, num_gpus)):
        for mode, rows in by_mode.items():
            ours = next((row for row in rows if row["variant"] == "weft"), None)
            if ours and not mark(ours) and (rival := fastest_way(rows)):
                yield label, mode, ours, rival["median_us"] / ours["median_us"]


def never_slower_table() -> str:
    """Of each operator and mode: at how many points weft is slower than the fastest whole way."""
    lines = []
    for op, num_gpus in MEASURED_ON:
        found: dict[str, list[float]] = {}
        for _, mode, _, times in speeds(op, num_gpus):
            found.setdefault(mode, []).append(times)
        for mode, times in found.items():
            counts = [sum(one >= limit for one in times) for limit in (1, 0.98, 0.95)]
            lines.append([f"`{op}`", str(num_gpus), mode, str(len(times)), *map(str, counts),
                          f"{min(times):.2f}"])  # fmt: skip
    header = ["operator", "GPUs", "mode", "points", ">= 1", ">= 0.98", ">= 0.95", "worst"]
    return "\n".join([*table(header, lines), ""])


def summary_table() -> str:
    """A line for each family of operators: at how many points weft is ahead, and by how much."""

    def cell(ops: Sequence[str], num_gpus: int) -> str:
        found = [
            rival["median_us"] / ours["median_us"]
            for op in ops
            for _, ours, rival in whole_points(op, num_gpus)
            if rival and not mark(ours)
        ]
        if not found:
            return "-"
        ahead = sum(times > 1 for times in found)
        spread = f"{min(found):.2f} .. {max(found):.2f}"
        return f"{ahead} of {len(found)}; {geometric_mean(found):.2f} ({spread})"

    lines = [[title, cell(ops, 4), cell(ops, 2)] for title, ops in FAMILIES.items()]
    return "\n".join([*table(["", "4 GPUs", "2 GPUs"], lines), ""])


def whole_ways_table(ops: Sequence[str], num_gpus: int) -> str:
    """What was timed on so many GPUs beside the fastest whole way of others."""
    lines, commits, machines = [], set(), {}
    for op in ops:
        document = load(op, num_gpus)
        if document:
            machines.setdefault(document["hardware"], []).append(f"`{op}`")
        for label, ours, rival in whole_points(op, num_gpus):
            commits.add(ours.get("commit", document["commit"]))
            us, sizes = ours["median_us"], [f"{name}={n}" for name, n in ours["shape"].items()]
            what = ", ".join([label] * bool(label) + [ours["dtype"]] * (ours["dtype"] != BF16))
            other = times = "-"
            if rival:
                other = f"{rival['median_us']:.0f} ({rival['variant'].removeprefix('torch_')})"
                times = f"{rival['median_us'] / us:.2f}"
                times = f"**{times}**" if rival["median_us"] > us else times
            hidden = efficiency(ours["overlap_efficiency"])
            lines.append([f"`{op}`", what, ", ".join(sizes), other, f"{us:.0f}", times, hidden])
    header = ["operator", "of", "sizes", "others' fastest, us", "weft, us", "times as fast", "E"]
    first, *others = sorted(machines.items(), key=lambda one: -len(one[1]))
    told = "; ".join([first[0], *(f"{', '.join(names)} on {one}" for one, names in others)])
    told = f"{told}; bfloat16, commits {', '.join(sorted(commits))}."
    return "\n".join([*table(header, lines), "", told, ""])


def experts_layer_table(gpus: str) -> str:
    """A mixture of experts, routed, by each strategy; the fastest of a row in bold."""
    document = json.loads((RESULTS / f"experts_layer_{gpus}.json").read_text())
    ways, lines = list(document["rows"][0]["us"]), []
    for row in document["rows"]:
        times = [row["us"][way] for way in ways]
        cells = [f"**{us:.0f}**" if us == min(times) else f"{us:.0f}" for us in times]
        lines.append([row["model"] + mark(row), f"{row['tokens']}, {row['routing']}", *cells])
    header = ["model", "tokens of a rank, routing", *ways]
    return "\n".join([*table(header, lines), "", f"{gpus_of(document)}.", ""])


def decode_table(gpus: str, what: str = "step") -> str:
    """A decode step of two layers, each way of doing it."""
    document = json.loads((RESULTS / f"decode_{what}_{gpus}.json").read_text())
    ways = list(document["rows"][0]["us"])
    lines = [
        [row["model"] + mark(row), f"{row['batch']}, {row['context']}", f"{row['weights_us']:.0f}",
         *(f"{row['us'][way]:.0f}" for way in ways)]
        for row in document["rows"]
    ]  # fmt: skip
    header = ["model", "batch, context", "reading weights and caches alone, us", *ways]
    return "\n".join([*table(header, lines), "", f"{gpus_of(document)}.", ""])


# Of new sizes, by rows of all ranks: a decode step, a prompt, a batch of prompts.
RANGES = ((1, 64), (65, 1000), (1001, 16384))


def changing_sizes_table() -> str:
    """Calls of sizes that are new: the first of each, the worst of the next eleven, the steady."""
    document = json.loads((RESULTS / "changing_sizes_h200x2.json").read_text())
    of_each = {row["m"]: row for row in reversed(document["readings"])}
    lines = []
    for least, most in RANGES:
        rows = [row for m, row in of_each.items() if least <= m <= most]
        cells = [
            f"{statistics.median(row[whose][what] for row in rows):.2f}"
            for what in ("first", "worst", "steady") for whose in ("torch", "weft")
        ]  # fmt: skip
        ratios = [row["weft"]["steady"] / row["torch"]["steady"] for row in rows]
        times = f"{statistics.geometric_mean(ratios):.2f}"
        lines.append([f"{least} to {most}", str(len(rows)), *cells, times])
    header = ["m", "sizes", *(f"{what}, {whose}" for what in ("first call", "worst of 2 to 12",
              "steady") for whose in ("torch", "weft")), "steady, weft / torch"]  # fmt: skip
    seconds, kernels, compiled = (
        sum(one[what] for one in document["prepared"])
        for what in ("seconds", "kernels", "compiled")
    )
    told = (
        f"Milliseconds, medians. {gpus_of(document)}; `prepare` of both products took "
        f"{seconds:.0f} s, of {kernels} kernels {compiled} were not in the cache, and behind it "
        f"{document['readings'][-1]['compiled']} were compiled."
    )
    return "\n".join([*table(header, lines), "", told, ""])


def layers_table(gpus: str) -> str:
    """Four layers of a model, us per layer, and how much of their communication is hidden."""
    document = json.loads((RESULTS / f"layers_{gpus}.json").read_text())
    ways, lines = ("nccl", "async_tp", "weft", "no_comm"), []
    for row in document["rows"]:
        for mode, us in sorted(row["us_per_layer"].items(), reverse=True):
            hidden = (us["nccl"] - us["weft"]) / (us["nccl"] - us["no_comm"])
            cells = [f"{us[way]:.0f}" for way in ways]
            lines.append([row["model"], str(row["M"]), mode, *cells, f"{hidden:.2f}"])
    header = ["model", "m", "mode", "torch, NCCL", "async-TP", "weft", "no communication", "L"]
    return "\n".join([*table(header, lines), "", f"{gpus_of(document)}.", ""])


def predictions() -> dict[str, Any]:
    return json.loads((RESULTS / "predictions.json").read_text())


def off(row: dict[str, Any]) -> float:
    return row["predicted_us"] / row["read_us"] - 1


def shares_off(rows: Sequence[dict[str, Any]]) -> str:
    """How far predictions of these are off."""
    sizes = [abs(off(row)) for row in rows]
    within = sum(size <= 0.1 for size in sizes)
    worst = max(map(off, rows), key=abs)
    return (
        f"{within} of {len(rows)} within 10 %, {statistics.mean(sizes):.1%} off on average, "
        f"{worst:+.0%} at worst"
    )


def predicted_layers_table() -> str:
    rows = predictions()["layers"]
    lines = [
        [row["gpus"], row["model"], str(row["m"]), f"{row['read_us']:.0f}",
         f"{row['predicted_us']:.0f}", f"{off(row):+.0%}"]
        for row in rows
    ]  # fmt: skip
    header = ["GPUs", "model", "m", "read, us", "predicted, us", "off"]
    return "\n".join([*table(header, lines), "", f"{shares_off(rows)}.", ""])


def predicted_products_table() -> str:
    lines = []
    for op in ("ag_gemm", "gemm_rs"):
        rows = [row for row in predictions()["products"] if row["op"] == op]
        sizes = sorted({row["m"] for row in rows})
        lines.append([op, f"{sizes[0]} to {sizes[-1]}", shares_off(rows)])
    return "\n".join([*table(["operator", "m", "how far off"], lines), ""])


def published_table() -> str:
    lines = [
        [row["op"], f"{row['mean']:.2f} ({min(row['ratios'].values()):.2f} to "
         f"{max(row['ratios'].values()):.2f})", f"{row['published']:.2f} ({row['least']:.2f} to "
         f"{row['most']:.2f})", f"{row['flux']:.2f}"]
        for row in predictions()["published"]
    ]  # fmt: skip
    header = ["operator", "predicted of weft", "published of Triton-distributed", "of FLUX there"]
    return "\n".join([*table(header, lines), ""])


def scaling_table() -> str:
    """us by the number of ranks, and the efficiency, in strong scaling."""
    rows = [row for row in predictions()["curves"] if not row["grow"] and not row["what"]]
    counts = sorted({row["ranks"] for row in rows})[::3]
    by = {(row["hw"], row["ranks"]): row for row in rows}
    lines = [
        [hw, *(f"{by[hw, n]['us']:,.0f} ({by[hw, n]['efficiency']:.0%})" for n in counts)]
        for hw in dict.fromkeys(row["hw"] for row in rows)
    ]
    return "\n".join([*table(["machine", *(f"{n} ranks" for n in counts)], lines), ""])


def plot_scaling(path: Path) -> None:
    """Efficiency over ranks by machine, and what switches and slow ranks cost."""
    import matplotlib.pyplot as plt

    rows, series = predictions()["curves"], {}
    for row in rows:
        series.setdefault((row["grow"], row["hw"], row["what"]), []).append(row)
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True, layout="constrained")
    for (grow, hw, what), found in series.items():
        axis, style = axes[int(bool(grow))], "x--" if what else "o-"
        label = f"{hw}, {what}" if what else hw
        ranks = [row["ranks"] for row in found]
        us = [100 * row["efficiency"] for row in found]
        if what:  # against the first row of an even cluster
            first = series[grow, hw, ""][0]["us"] / found[0]["us"]
            us = [first * one for one in us]
        axis.semilogx(ranks, us, style, base=2, markersize=3, label=label)
    axes[0].set(xlabel="ranks", ylabel="efficiency, %", ylim=(0, 110), title="m 65536")
    axes[1].set(xlabel="ranks", title="m 1024 a rank")
    axes[0].legend(fontsize=6)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def gpus_of(document: dict[str, Any]) -> str:
    """With what rows of other commits are marked by."""
    names = document["gpus"]
    others = ", ".join(sorted({row["commit"] for row in document.get("rows", ()) if mark(row)}))
    also = f" (* {others})" if others else ""
    return f"{len(names)} x {names[0]}, commit {document['commit']}{also}"


# ---------------------------------------------------------------------------------------------
# The emulator


def emulator_table() -> str:
    """The call that the emulator's speed is held to, by tile and transport."""
    document = json.loads((RESULTS / "emulator.json").read_text())
    seconds: dict[str, float] = {}
    for row in document["rows"]:
        size = (row["ranks"], row["m"], row["n"], row["k"])
        is_sm90 = row.get("template") == "sm90"
        is_shown = row["tile"] in (32, 64) or is_sm90
        if row.get("checks", True) and size == (4, 256, 256, 256) and is_shown:
            access = "descriptors" if row["tma"] else "pointers"
            access = "Gluon, as on Hopper" if is_sm90 else access
            name = row["transport"]
            what = f"{row['tile']}-tiles, {OLD_NAMES.get(name, name)}, {access}"
            seconds.setdefault(what, row["median_s"])
    lines = [[what, f"{median:.2f}"] for what, median in seconds.items()]
    header = ["ag_gemm on 4 emulated ranks, 256 x 256 x 256, all checks", "s"]
    return "\n".join([*table(header, lines), "", f"{document['hardware']}, median of five.", ""])


TABLES: dict[str, Callable[[], str]] = {
    "summary": summary_table,
    "never_slower": never_slower_table,
    "ag_gemm": lambda: product_table("ag_gemm"),
    "gemm_rs": lambda: product_table("gemm_rs"),
    "gemm_ar": lambda: product_table("gemm_ar"),
    "collectives": collectives_table,
    "emulator": emulator_table,
    "ag_gemm_device": lambda: product_full("ag_gemm", device_time=True),
    "ag_gemm_eager": lambda: product_full("ag_gemm", device_time=False),
    "gemm_rs_device": lambda: product_full("gemm_rs", device_time=True),
    "gemm_ar_device": lambda: product_full("gemm_ar", device_time=True),
    "collectives_device": lambda: collectives_full(device_time=True),
    "collectives_eager": lambda: collectives_full(device_time=False),
    **{op: partial(collective_table, op) for op in COLLECTIVES},
    **{op: partial(whole_ways_table, [op], 4) for op in ("ag_moe", "moe_rs", "moe_ar")},
    "host": host_table,
    "failed": failed_table,
    "pairs": lambda: whole_ways_table(names(), 2),
    "others": lambda: whole_ways_table([op for op in names() if op not in SHOWN], 4),
    "decode_step": lambda: decode_table("h100x4"),
    "decode_fused": lambda: decode_table("h200x2"),
    "decode_split": lambda: decode_table("h100x2", "split"),
    "experts_layer": lambda: experts_layer_table("h100x2"),
    "changing_sizes": changing_sizes_table,
    "layers": lambda: layers_table("h200x2"),
    "layers_of_four": lambda: layers_table("h100x4"),
    "predicted_layers": predicted_layers_table,
    "predicted_products": predicted_products_table,
    "published": published_table,
    "scaling": scaling_table,
}


# ---------------------------------------------------------------------------------------------
# Plots


def plot_ag_gemm(path: Path) -> None:
    """Overlap efficiency over m, one panel for each layer; the fastest rival beside weft."""
    import matplotlib.pyplot as plt

    series: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for label, ours, rows in points(load("ag_gemm"), device_time=True):
        panel = series.setdefault(label, {})
        for name, row in (("weft", ours), ("best of the others", ways(rows))):
            if row and row["overlap_efficiency"] is not None:
                panel.setdefault(name, []).append((row["shape"]["m"], row["overlap_efficiency"]))
    figure, axes = plt.subplots(1, len(series), figsize=(3.0 * len(series), 3.0), sharey=True)
    for axis, (label, panel) in zip(axes, series.items(), strict=True):
        for name, values in panel.items():
            axis.plot(*zip(*sorted(values), strict=True), "o-", markersize=3, label=name)
        axis.axhline(0, color="grey", linewidth=0.8)
        axis.set(title=label, xlabel="m", xscale="log", ylim=(-2, 1.2))
        axis.title.set_fontsize(9)
    axes[0].set_ylabel("overlap efficiency")
    axes[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def plot_collectives(path: Path) -> None:
    """Speed against NCCL over size, one panel for each collective."""
    import matplotlib.pyplot as plt

    ops = [op for op in COLLECTIVES if load(op)]
    figure, axes = plt.subplots(1, len(ops), figsize=(3.2 * len(ops), 3.0), squeeze=False)
    for axis, op in zip(axes[0], ops, strict=True):
        series: dict[str, list[tuple[int, float]]] = {}
        for _, ours, rows in points(load(op), device_time=True):
            torch = fastest([row for row in rows if row["variant"].startswith("torch")])
            best = fastest([row for row in rows if is_ours(row)])
            named = (("weft's choice", ours), ("best transport", best), ("best of torch", torch))
            for name, row in named:
                if row and row["ratio_to_serial"] is not None:
                    point = (row["bytes_per_rank"], row["ratio_to_serial"])
                    series.setdefault(name, []).append(point)
        for name, values in series.items():
            axis.plot(*zip(*sorted(values), strict=True), "o-", markersize=3, label=name)
        axis.axhline(1, color="grey", linewidth=0.8)
        axis.set(title=op, xlabel="bytes", xscale="log")
    axes[0][0].set_ylabel("times NCCL's speed")
    axes[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def plot_never_slower(path: Path) -> None:
    """A square for each point in each mode: its colour says how fast weft is beside the fastest
    whole way of others."""
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    lines: dict[str, list[tuple[int, float]]] = {}
    for op, num_gpus in MEASURED_ON:
        for label, mode, ours, times in speeds(op, num_gpus):
            # Of a product and of experts a row is a layer; a collective has one.
            name = "" if op in COLLECTIVES else f" {label}"
            size = ours.get("bytes_per_rank") or ours["shape"]["m"]
            line = lines.setdefault(f"{op}{name}, {num_gpus} GPUs, {mode}", [])
            line.append((size, times))
    ordered = [sorted(line) for line in lines.values()]
    width = max(map(len, ordered))
    figure, axis = plt.subplots(figsize=(3.4 + 0.62 * width, 0.8 + 0.19 * len(lines)))
    for y, line in enumerate(ordered):
        for x, (size, times) in enumerate(line):
            colour = next(colour for limit, colour, _ in LIMITS if times >= limit)
            axis.add_patch(plt.Rectangle((x, y), 0.96, 0.9, color=colour))
            text = f"{short(size)}: {times:.2f}"
            axis.text(x + 0.48, y + 0.48, text, ha="center", va="center", fontsize=5)
    axis.set(xlim=(0, width), ylim=(len(lines), 0), xticks=[])
    axis.set_yticks([y + 0.45 for y in range(len(lines))], list(lines), fontsize=6)
    axis.spines[:].set_visible(False)
    axis.tick_params(length=0)
    axis.set_title("m or bytes: how many times as fast as the fastest other way", fontsize=8)
    shown = [Patch(color=colour, label=text) for _, colour, text in LIMITS]
    axis.legend(handles=shown, fontsize=6, ncols=len(shown), loc="upper center",
                bbox_to_anchor=(0.4, 0), frameon=False)  # fmt: skip
    figure.tight_layout()
    figure.savefig(path, dpi=110)


# From how many times as fast on, in which colour; safe for readers who see no red and green.
LIMITS = (
    (1.0, "#92c5de", "as fast or faster"), (0.98, "#d9eef7", "0.98 and more"),
    (0.95, "#fddbc7", "0.95 and more"), (0.0, "#e08b6d", "slower"),
)  # fmt: skip


def short(size: int) -> str:
    """A size with the unit that keeps it short."""
    for unit, power in (("M", 20), ("k", 10)):
        if size >= 1 << power and size % (1 << power) == 0:
            return f"{size >> power}{unit}"
    return str(size)


def rendered(text: str) -> str:
    """`text` with every marked table made anew."""
    return MARKERS.sub(lambda m: f"{m[1]}{TABLES[m[2]]()}{m[3]}", text)


def main() -> None:
    for page in map(ROOT.joinpath, PAGES):
        page.write_text(rendered(page.read_text()))
    if "--no-plots" not in sys.argv:
        plot_ag_gemm(PICTURES / "ag_gemm_h200x4.png")
        plot_never_slower(PICTURES / "never_slower.png")
        plot_scaling(PICTURES / "scaling.png")
        if any(load(op) for op in COLLECTIVES):
            plot_collectives(PICTURES / "collectives_h200x4.png")


if __name__ == "__main__":
    main()
