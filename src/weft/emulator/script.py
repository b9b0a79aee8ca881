"""Runs a user's SPMD script, unchanged, on every emulated rank."""

from __future__ import annotations


def run_script(path, args=(), **options):
    raise NotImplementedError
