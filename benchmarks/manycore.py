"""What the many-core target does to six workloads, and what each of its choices is worth.

    python benchmarks/manycore.py [-o benchmarks/results/manycore.json]

The machine is simulated by its record, so that times are the same wherever this runs; predicted
ones come of formulas before anything is compiled. docs/manycore.md has the table.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from weft.manycore import SW26010
from weft.manycore.workloads import WORKLOADS, measure

MACHINE = SW26010


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", default="benchmarks/results/manycore.json")
    rows = [asdict(row) for name in WORKLOADS for row in measure(name, MACHINE)]
    document = {"machine": asdict(MACHINE), "rows": rows}
    Path(parser.parse_args().output).write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
