"""When a call of ag_gemm would end: what the model must get right to choose by."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from weft.ops._ag_gemm_config import Config, shards_of
from weft.ops._arrival import Plan, unfused_us
from weft.ops.ag_gemm import Problem
from weft.tiles import gemm_sm90

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
NAME = re.compile(
    r"(?P<transport>put|push|pull)(?P<tile_n>\d+)g(?P<group_m>\d+)c(?P<chunks>\d+)"
    r"(e(?P<early_parts>\d+)f(?P<feeders>\d+))?( all rows alike)?"
)
LAYERS = {
    "llama3-8b mlp": (7168, 4096),
    "llama3-70b attention": (2560, 8192),
    "llama3-70b mlp": (14336, 8192),
    "qwen3-32b mlp": (12800, 5120),
}


def plan(m: int, n: int, k: int, blocking=gemm_sm90.WIDE, **changes) -> Plan:
    config = Config(template="sm90", **(asdict(blocking) | {"chunks": 1, "group_m": 8} | changes))
    shards = shards_of(Problem(m, n, k, 4, "bfloat16"), config)
    return Plan(m, n, k, 4, config.transport, shards, blocking, 131, config.early_parts)


def readings():
    """(what, Plan, us) of the variants that were timed one by one."""
    document = json.loads((RESULTS / "ag_gemm_variants_h200x4.json").read_text())
    for run in document["runs"][-3:]:
        timed = ((row, *one) for row in run["rows"] for one in row["us"].items())
        for row, name, us in timed:
            fields = NAME.fullmatch(name)
            if not fields or (fields["transport"] == "push" and not fields["early_parts"]):
                continue  # a push was a launch before the product once
            said = fields.groupdict("1").items()
            found = {key: int(text) for key, text in said if text.isdigit()}
            blocking = gemm_sm90.WIDE if found.pop("tile_n") == 256 else gemm_sm90.TURNS
            found |= {"pieces": max(1, found["feeders"] // 3), "own_first": "alike" not in name}
            shape = (row["m"], *LAYERS[row["shape"]])
            yield name, plan(*shape, blocking, transport=fields["transport"], **found), us


def test_it_is_near_what_was_read():
    off = [one.end_us() / us - 1 for _, one, us in readings()]
    assert len(off) >= 80
    assert sum(map(abs, off)) / len(off) < 0.06 and max(map(abs, off)) < 0.2


def test_more_rows_take_longer_and_nothing_ends_before_its_rows_arrive():
    ends = [plan(m, 2560, 8192).end_us() for m in (512, 1024, 2048, 4096, 8192)]
    assert ends == sorted(ends)
    for m, end in zip((512, 8192), (ends[0], ends[-1]), strict=True):
        assert end > m * 3 // 4 * 8192 * 2 / 390e3


@pytest.mark.parametrize("m", [1, 100, 997, 3988, 5000])
@pytest.mark.parametrize("transport", ["push", "pull"])
def test_sizes_that_nothing_divides(m, transport):
    assert plan(m, 2504, 4104, transport=transport, chunks=2).end_us() > 0


def test_launches_of_two_libraries_show_unless_they_are_recorded():
    assert unfused_us(1, 7168, 4096, 4, False) > 2 * unfused_us(1, 7168, 4096, 4, True)
    large = [unfused_us(8192, 7168, 4096, 4, recorded) for recorded in (False, True)]
    assert large[0] == large[1]
