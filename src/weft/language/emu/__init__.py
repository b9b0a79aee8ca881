"""Primitives for the emulator: opaque operations that it gives a meaning."""
