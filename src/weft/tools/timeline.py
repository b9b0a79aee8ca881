"""`weft timeline OP -o FILE.html`: the schedule of all ranks and engines, as a picture."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from weft.tools import console, options, pictures

if TYPE_CHECKING:
    from weft.tools.check import Work
    from weft.tools.schedule import Chart

RAN = (
    "What happened on the emulator under schedule {seed}, in simulated time of {hw}: it compares"
    " plans, and predicts no microseconds."
)

Output = Annotated[
    str, typer.Option("-o", "--output", metavar="FILE.html", help="the page to write")
]


def timeline(
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
    """Draw who does what when: kernels, copies, SMs and the signals between them."""
    from weft.base.hardware import find_hardware
    from weft.tools.schedule import page
    from weft.verify.picture.document import save

    pictures.check_path(output, "-o")
    find_hardware(hw)
    work = options.work_of(op, ranks, nodes, shape, dtype)
    chart, notes = ran(work, transport, hw, seed, num_sms)
    save(output, page(chart, f"{op} on {work.num_ranks} ranks", notes))
    if json:
        totals = [asdict(one) for one in chart.totals]
        words = options.words_of(work)
        console.print_json({**words, "file": output, "end_us": chart.end_us, "totals": totals})
    else:
        console.print_table(*totals_table(chart))
    console.notes().print(f"[dim]schedule in {output}: open it in a browser[/]")
    return console.FINE


def ran(work: Work, transport: str, hw: str, seed: int, num_sms: int) -> tuple[Chart, list[str]]:
    """The schedule of a call on the emulator, and what to say of it."""
    from weft.tools.schedule import chart_of
    from weft.tools.schedule.runs import config_for, timed_call, told

    config = config_for(work, transport)
    found = timed_call(work, config, hw, seed=seed, num_sms=num_sms)
    return chart_of(found, found.signals), [*told(work, config), RAN.format(hw=hw, seed=seed)]


def totals_table(chart: Chart) -> tuple[list[tuple[str, ...]], ...]:
    """Each rank's totals as words."""
    from weft.tools.schedule.page import HEAD, cells

    return ([cells(one) for one in chart.totals], *HEAD)
