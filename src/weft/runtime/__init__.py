"""Worlds on real or emulated machines: symmetric memory, signals, slots, streams, launches."""

from weft.runtime.start import init, world
from weft.runtime.world import World

__all__ = ["World", "init", "world"]
