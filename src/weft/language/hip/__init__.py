"""Primitives for AMD GPUs; with cuda/, the only home of inline assembly."""
