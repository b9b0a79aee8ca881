"""`weft trace OP -o FILE.json`: what happened on the emulator, for Perfetto."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from weft.tools import console, options

Output = Annotated[
    str, typer.Option("-o", "--output", metavar="FILE.json", help="the trace to write")
]


def trace(
    op: options.OpWord,
    output: Output,
    ranks: options.Ranks = None,
    nodes: options.Nodes = "1",
    shape: options.Shape = "",
    dtype: options.Dtype = "bf16",
    transport: options.Transport = "",
    hw: options.Machine = "h200x4",
    seed: options.Seed = 0,
    num_sms: options.NumSms = 132,
    json: options.AsJson = False,
) -> int:
    """Run an operator on the emulator and write a trace of it, in simulated time, for Perfetto."""
    from weft.base.hardware import find_hardware
    from weft.tools.schedule import writing
    from weft.tools.schedule.runs import config_for, timed_call

    writing.check_path(output, "-o", writing.TRACES)
    find_hardware(hw)
    work = options.work_of(op, ranks, nodes, shape, dtype)
    found = timed_call(work, config_for(work, transport), hw, seed=seed, num_sms=num_sms)
    found.write(output)
    summary = found.summary()
    if json:
        lines = [asdict(line) for line in summary]
        console.print_json({**options.words_of(work), "file": output, "timeline": lines})
    else:
        for line in summary:
            console.results().print(str(line), markup=False)
    console.notes().print(f"[dim]trace in {output}: open it at https://ui.perfetto.dev[/]")
    return console.FINE
