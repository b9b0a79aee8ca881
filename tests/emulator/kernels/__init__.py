"""Kernels of the kinds that Triton's users write, each with its host function; no word of weft."""
