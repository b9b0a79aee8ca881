"""What the signals of plans are called, in findings."""

from __future__ import annotations

import re

import pytest
import torch

import weft
import weft.ops
from weft.base.errors import UsageError
from weft.ops import card


def missed(ranks, op: str, **fields) -> str:
    """What is found where rank 1 makes the first call alone."""
    config = card(op).config(**fields)

    def main():
        world = weft.init()
        a, b = torch.ones(16, 32), torch.ones(32, 32)
        for _ in range(2 if world.rank != 1 else 1):
            getattr(weft.ops, op)(a, b, world=world, config=config)

    return str(ranks(main, collect=True))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "op, fields, name, element",
    [
        ("ag_gemm", {"transport": "sm_push", "chunks": 2},
         "gathered_ready", r"chunk \d from rank 1"),
        ("ag_gemm", {"transport": "ce_push", "chunks": 1}, "gathered_ready", r"from rank 1"),
        ("gemm_rs", {"transport": "sm_push", "tile_m": 16, "tile_n": 16, "tile_k": 16},
         "partials_ready", r"tile column \d from rank 1"),
    ],
)  # fmt: skip
def test_findings_name_signals_by_channel_and_meaning(
    ranks, op: str, fields: dict, name: str, element: str
):
    text = missed(ranks, op, **fields)
    found = rf"waits for {op}\[\d\]\.{name}@rank\d\[{element}\] >= 1, which is 0"
    assert re.search(found, text), text


def test_a_configuration_that_is_first_recorded_is_named(ranks):
    """Calls of another one with the same sizes have not had its memory."""
    config = card("gemm_rs").config(transport="sm_push", tile_m=16, tile_n=16, tile_k=16)

    def main():
        world = weft.init()
        a, b = torch.ones(64, 32), torch.ones(32, 32)
        with pytest.raises(UsageError) as found, world.record():
            weft.ops.gemm_rs(a, b, world=world, config=config)
        weft.ops.gemm_rs(a, b, world=world, config=config)
        with world.record():
            weft.ops.gemm_rs(a, b, world=world, config=config)
        return str(found.value)

    for text in ranks(main, 2):
        assert "gemm_rs of m=64, config=" in text and "transport='sm_push'" in text
        assert "make this call once, with this config and these sizes" in text
