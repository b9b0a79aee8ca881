"""Configurations that were measured to be best: the files in which `weft tune` keeps them.

    ag_gemm-NVIDIA_H200x4-weft0.1.0-torch2.11.0-triton3.6.0.json

One file for each operator, machine, number of ranks and versions; in it a record for each key of
`compiler.buckets.key_of`. When a world begins rank 0 reads those of its machine, and all ranks get
what it read: files that differ between hosts decide nothing.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from weft.base.errors import UsageError
from weft.base.hardware import Hardware
from weft.base.settings import Settings
from weft.base.target import Target
from weft.base.versions import version_of

OFF = "off"
# Times that differ by less are the same.
ALIKE = 0.02
EMULATED = "emulated"
# The file of what a probe has read (weft.tune.machine), and the key of its one record.
MACHINE, HARDWARE = "machine", "hardware"
# By operator and key, what was chosen.
Choices = Mapping[str, Mapping[str, Mapping[str, Any]]]


def machine_of(target: Target) -> str:
    """What files call the machine here; "" where there is none of the target."""
    import torch

    if target.backend == "emu":
        return EMULATED
    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def folder_of(settings: Settings, machine: str) -> Path | None:
    """Where choices are kept; None: nowhere. What emulated ranks count says nothing of a GPU, so it
    is only where a folder is named."""
    if settings.choices == OFF or not machine or (machine == EMULATED and not settings.choices):
        return None
    if settings.choices:
        return Path(settings.choices)
    cache = os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache"
    return Path(cache).parent / "weft_choices"


def file_name(op: str, machine: str, num_ranks: int) -> str:
    """Of one operator; `op` "*" is a pattern for all."""
    versions = "-".join(f"{name}{version_of(name)}" for name in ("weft", "torch", "triton"))
    op, machine = (re.sub(r"[^\w*]+", "_", words) for words in (op, machine))
    return f"{op}-{machine}x{num_ranks}-{versions}.json"


def read(settings: Settings, target: Target, num_ranks: int) -> Choices | str:
    """What was measured on this machine with so many ranks, or what is wrong with a file: `checked`
    raises it, on all ranks."""
    found, machine = {}, machine_of(target)
    folder = folder_of(settings, machine)
    try:
        for path in sorted(folder.glob(file_name("*", machine, num_ranks))) if folder else ():
            op, records = records_of(path)
            found[op] = records
    except UsageError as error:
        return error.message
    return found


def records_of(path: Path) -> tuple[str, dict[str, dict[str, Any]]]:
    """A file's operator, and its records by their keys.

    Raises  UsageError: it is no such file
    """
    try:
        document = json.loads(path.read_text())
        records = {one["key"]: {**one, "file": str(path)} for one in document["choices"]}
        return document["op"], records
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path} holds no choices of weft tune ({type(error).__name__}: {error}): remove it, "
            f"or set WEFT_CHOICES={OFF}"
        ) from error


def probed(target: Target, found: Choices) -> Target:
    """The target with what was probed of the machine, if it was.

    Raises  UsageError: a record of other fields
    """
    record = found.get(MACHINE, {}).get(HARDWARE)
    if record is None:
        return target
    values = {name: tuple(map(tuple, value)) if isinstance(value, list) else value
              for name, value in record["fields"].items()}  # fmt: skip
    try:
        return replace(target, machine=Hardware(**values))
    except TypeError as error:
        raise UsageError(f"{record['file']}: {error}; probe again: weft machine") from error


def checked(found: Choices | str) -> Choices:
    """Raises  UsageError: what `read` found is wrong"""
    if isinstance(found, str):
        raise UsageError(found)
    return found
