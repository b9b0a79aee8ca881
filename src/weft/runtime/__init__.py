"""Worlds on real or emulated machines: symmetric memory, signals, slots, streams, launches."""

from weft.runtime.artefact import Artefact, load
from weft.runtime.start import init, world
from weft.runtime.world import World

__all__ = ["Artefact", "World", "init", "load", "world"]
