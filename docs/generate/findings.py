"""The block of docs/findings.md: every kind that the emulator files."""

from __future__ import annotations

from weft.emulator.kinds import KINDS


def kinds() -> str:
    parts = []
    for kind in KINDS.values():
        raised = f"Raised as `{kind.error.__name__}`."
        if kind.example:
            raised += f" Example: `tests/verify/wrong/{kind.example}.py`."
        parts += [
            f"## {kind.name}", kind.means, f"*How it comes about.* {kind.how}",
            f"*Remedy.* {kind.remedy}", raised,
        ]  # fmt: skip
    return "\n\n".join(parts)
