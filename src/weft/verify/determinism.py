"""Results that differ between schedules: the finding, and its cause where the emulator saw one."""

from __future__ import annotations

from weft.base.report import Finding, Report, Side

REMEDY = (
    "let every party write its part to a place of its own and add up in a fixed order, and give no"
    " slot out by arrival; or do not claim that results are the same under every schedule"
)


def nondeterministic(report: Report) -> Finding:
    """The finding for a run that returned other bytes than another one with the same inputs."""
    message = (
        f"{report.op} returns other bytes under this schedule than under another one, with the"
        " same inputs"
    )
    if not report.arrivals:
        return Finding(
            "nondeterministic result", message, Side(note="returns another result"), remedy=REMEDY
        )
    first, second = report.arrivals[0]
    message += "; it adds floats in order of arrival"
    return Finding("nondeterministic result", message, first, second, REMEDY)
