"""Writes the README's tables from the JSON under benchmarks/results: numbers have one source.

python benchmarks/render.py            # rewrites README.md between its markers
"""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MARKERS = re.compile(r"(<!-- (\w+) -->\n).*?(<!-- end -->)", re.S)


def ag_gemm_table() -> str:
    """Serial and weft's default choice, per shape and m: microseconds and overlap efficiency."""
    document = json.loads((RESULTS / "ag_gemm_h200x4.json").read_text())
    rows = [row for row in document["rows"] if row["variant"] == "weft"]
    labels = list(dict.fromkeys(row["label"] for row in rows))
    by_point = {(row["label"], row["shape"]["m"]): row for row in rows}
    lines = [f"| us, serial / weft (E) | {' | '.join(labels)} |", "|---|" + "---|" * len(labels)]
    for m in sorted({row["shape"]["m"] for row in rows}):
        cells = []
        for label in labels:
            row = by_point[label, m]
            cells.append(
                f"{row['t_serial_us']:.0f} / {row['median_us']:.0f}"
                f" ({row['overlap_efficiency']:.2f})"
            )
        lines.append(f"| m {m} | {' | '.join(cells)} |")
    versions = document["versions"]
    lines += [
        "",
        f"{document['hardware']}, {rows[0]['dtype']}, {rows[0]['mode']} calls, commit"
        f" {document['commit']}, torch {versions['torch']}, Triton {versions['triton']}.",
    ]
    return "\n".join(lines) + "\n"


def emulator_table() -> str:
    """The call that the emulator's speed is held to, by tile and transport."""
    document = json.loads((RESULTS / "emulator.json").read_text())
    seconds: dict[str, float] = {}
    for row in document["rows"]:
        size = (row["ranks"], row["m"], row["n"], row["k"])
        if row["checks"] and size == (4, 256, 256, 256) and row["tile"] in (32, 64):
            access = "descriptors" if row["tma"] else "pointers"
            what = f"{row['tile']}-tiles, {row['transport']}, {access}"
            seconds.setdefault(what, row["median_s"])
    lines = ["| ag_gemm on 4 emulated ranks, 256 x 256 x 256, all checks | s |", "|---|---|"]
    lines += [f"| {what} | {median:.2f} |" for what, median in seconds.items()]
    return "\n".join([*lines, "", f"{document['hardware']}, median of five.", ""])


TABLES = {"ag_gemm": ag_gemm_table, "emulator": emulator_table}


def rendered(text: str) -> str:
    """`text` with every marked table made anew."""
    return MARKERS.sub(lambda m: f"{m[1]}{TABLES[m[2]]()}{m[3]}", text)


def main() -> None:
    readme = ROOT / "README.md"
    readme.write_text(rendered(readme.read_text()))


if __name__ == "__main__":
    main()
