"""How wide stores are: what was emitted, and what the source's pointers allow.

Stub.
"""

from __future__ import annotations


def emitted(program):
    return {}


def expected(function, module):
    return []
