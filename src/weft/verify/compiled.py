"""The post-compile check: did the compiler keep what makes a kernel correct between ranks?

`compiled(kernel, target, record)` reads the stages of one compiled kernel, TTIR to PTX, and
follows each wait, guarded load, store and release by its source place:

1. no wait is lost on the way;
2. no load that comes after a wait is issued before it;
3. before each release stands a block barrier, and bulk (TMA) stores are complete;
4. orders and scopes arrive as written.

What it reads is what was emitted, so it holds for any Triton kernel, with weft's primitives, raw
`tl.atomic_*` or inline assembly. `docs/post_compile_check.md` has the rules and their limits.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from weft.base.errors import UsageError
from weft.base.records import KernelRecord
from weft.base.target import Target, parse_target
from weft.verify import check_assembly, check_triton
from weft.verify.findings import CompiledReport
from weft.verify.stages import Stages

_KERNEL_FILE = re.compile(r'^#loc = loc\("([^"]*)":', re.MULTILINE)


def compiled(
    kernel: Any, target: Target | str | None = None, record: KernelRecord | None = None
) -> CompiledReport:
    """Check one kernel for one target; no device is needed.

    `kernel` is a `@triton.jit` function with its `record`, the pair (function, record) that a
    card's `kernels` yields, a kernel that Triton has compiled, or a mapping of stage texts.

    Raises  UsageError: a jit function without a record; CompileError: it does not compile
    Cost    reading takes some hundredths of a second
    """
    if isinstance(kernel, tuple) and len(kernel) == 2:
        kernel, record = kernel
    if isinstance(target, str):
        target = parse_target(target)
    texts: Mapping[str, Any]
    function = None
    if isinstance(kernel, Mapping):
        texts = kernel
    elif asm := getattr(kernel, "asm", None):
        texts = asm
        target = target or _target_of(kernel)
    else:
        texts, function = _compile(kernel, target, record), kernel
    stages = Stages({stage: text for stage, text in texts.items() if isinstance(text, str)})
    name = target.name if target is not None else stages.written
    files = stages.files if function is None else _files_of(function, stages)
    report = CompiledReport(stages.source.kernel.name, name, files=files)
    check_triton.check(stages, report)
    check_assembly.check(stages, report)
    return report


def _compile(kernel: Any, target: Target | None, record: KernelRecord | None) -> Mapping[str, Any]:
    if record is None or target is None:
        raise UsageError(
            f"verify.compiled({getattr(kernel, '__name__', repr(kernel))}) needs a target and a "
            "KernelRecord that says how the kernel is specialised, or a kernel that is compiled "
            "already"
        )
    from weft.language import triton_api

    return triton_api.compile_kernel(kernel, record, target).asm


def _files_of(function: Any, stages: Stages) -> dict[str, str]:
    """Files by their names and paths in the stages: the function's own where Triton's cache has the
    same text from another file; what lay beside that one is looked for beside this."""
    from weft.language import triton_api

    found = _KERNEL_FILE.search(stages.texts[stages.written])
    now = triton_api.file_of(function)
    if found is None or found[1] == now:
        return stages.files
    before, files = found[1], dict(stages.files)
    for path in {*stages.files.values(), before}:
        name, beside = os.path.basename(path), os.path.dirname(path) == os.path.dirname(before)
        copied = os.path.join(os.path.dirname(now), name)
        if path == before:
            files |= {path: now, name: now}
        elif beside and os.path.exists(copied):
            files |= {path: copied, name: copied}
    return files


def _target_of(kernel: Any) -> Target:
    gpu = kernel.metadata.target
    return parse_target(f"{gpu.backend}:{gpu.arch}")
