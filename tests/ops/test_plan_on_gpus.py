"""On GPUs: programs whose plans overlap, with generated kernels, by engines and by pushes."""

from __future__ import annotations

from launching import check_under_torchrun
from torchrun import on_two_and_four_gpus


@on_two_and_four_gpus
def test_programs_that_overlap(ranks):
    check_under_torchrun("overlapping_programs.py", ranks, counted="programs")


@on_two_and_four_gpus
def test_tiles_that_go_node_by_node(ranks, monkeypatch):
    """GPUs that are declared two nodes."""
    monkeypatch.setenv("WEFT_NODES", "2")
    check_under_torchrun("overlapping_programs.py", ranks, counted="programs")
