"""Implementations that are the same on every target, written in terms of other primitives."""
