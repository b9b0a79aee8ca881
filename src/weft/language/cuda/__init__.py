"""Primitives for NVIDIA GPUs; with hip/, the only home of inline assembly."""
