"""AMD: lines of 128 bytes do not exist."""

from __future__ import annotations

from weft.language import lines as declared
from weft.language.registry import gap

for _primitive in (declared.put_lines, declared.wait_lines):
    gap(
        _primitive,
        "hip",
        "no AMD document says that the 128 bytes that eight lanes of a wave store by one "
        "instruction arrive together over xGMI; use put_packets and wait_packets",
    )
