"""What kernels must be once they are compiled, without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from weft.base.records import KernelRecord
from weft.base.target import Target
from weft.language import triton_api
from weft.tools import binaries
from weft.verify import compiled


def check_code(kernels: Iterable[tuple[Any, Any]], target: Target, most_bytes: int = 0) -> None:
    """They pass the check after compilation, and a thread spills no more than that."""
    for fn, record in kernels:
        binary = triton_api.compile_kernel(fn, record, target)
        report = compiled(binary, target)
        assert report.ok, "\n".join(map(str, report.findings))
        code, assembly = (binary.asm[name] for name in binaries.FORMATS[target.backend])
        assert (binaries.stack_bytes(target, code, assembly) or 0) <= most_bytes, record.name


def launched_by(call: Callable[[], Any]) -> list[tuple[Any, KernelRecord]]:
    """What a call launches, as it is."""
    with triton_api.described_launches() as found:
        call()
    return [(one.fn, one.record()) for one in found]
