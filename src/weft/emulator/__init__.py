"""Runs Triton kernels of many ranks on the CPU, with every check; see `session.emulated`."""

from __future__ import annotations

from weft.emulator.script import run_script
from weft.emulator.session import Session, active, emulated

__all__ = ["Session", "active", "emulated", "run_script"]
