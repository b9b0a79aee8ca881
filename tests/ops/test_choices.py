"""What products choose: near what was read, no worse than any other way, in no time at any size."""

from __future__ import annotations

import importlib
import json
import re
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest

from weft.base.target import TARGETS
from weft.compiler import gather_schedules, schedules
from weft.compiler.cost import products
from weft.compiler.gather_schedules import unfused_us, with_transport
from weft.ops.ag_gemm import Config, Problem
from weft.plan.choices import predicted
from weft.tiles import gemm_sm90
from weft.tune.presets import LAYERS as ALL_LAYERS

TARGET = TARGETS["cuda:90"]
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
NAME = re.compile(
    r"(?P<transport>put|push|pull)(?P<tile_n>\d+)g(?P<group_m>\d+)c(?P<chunks>\d+)"
    r"(e(?P<first_wave>\d+)f(?P<feeders>\d+))?( all rows alike)?"
)
NEW_NAMES = {"put": "ce_push", "push": "sm_push"}
LAYERS = {
    "llama3-8b mlp": (7168, 4096),
    "llama3-70b attention": (2560, 8192),
    "llama3-70b mlp": (14336, 8192),
    "qwen3-32b mlp": (12800, 5120),
}


def end_us(m: int, n: int, k: int, blocking=gemm_sm90.WIDE, num_ranks=4, **changes) -> float:
    config = Config(template="sm90", **(asdict(blocking) | {"chunks": 1, "group_m": 8} | changes))
    return gather_schedules.end_us(config, Problem(m, n, k, num_ranks, "bfloat16"), TARGET)


def readings():
    """(predicted, read) of the variants that were timed one by one."""
    document = json.loads((RESULTS / "ag_gemm_variants_h200x4.json").read_text())
    for run in document["runs"][-3:]:
        timed = ((row, *one) for row in run["rows"] for one in row["us"].items())
        for row, name, us in timed:
            fields = NAME.fullmatch(name)
            if not fields or fields["transport"] == "pull":
                continue  # nothing is fetched any more
            if fields["transport"] == "push" and not fields["first_wave"]:
                continue  # a push was a launch before the product once
            said = fields.groupdict("1").items()
            found = {key: int(text) for key, text in said if text.isdigit()}
            blocking = gemm_sm90.WIDE if found.pop("tile_n") == 256 else gemm_sm90.TURNS
            pushers = max(1, found.pop("feeders") // 3) * 3
            found |= {"pushers": pushers, "own_first": "alike" not in name}
            found["first_wave"] = found.pop("first_wave")
            shape = (row["m"], *LAYERS[row["shape"]])
            yield end_us(*shape, blocking, transport=NEW_NAMES[fields["transport"]], **found), us


def test_it_is_near_what_was_read():
    off = [predicted / us - 1 for predicted, us in readings()]
    assert len(off) >= 60
    assert sum(map(abs, off)) / len(off) < 0.06 and max(map(abs, off)) < 0.2


def test_more_rows_take_longer_and_nothing_ends_before_its_rows_arrive():
    ends = [end_us(m, 2560, 8192) for m in (512, 1024, 2048, 4096, 8192)]
    assert ends == sorted(ends)
    for m, end in zip((512, 8192), (ends[0], ends[-1]), strict=True):
        assert end > m * 3 // 4 * 8192 * 2 / 390e3


@pytest.mark.parametrize("m", [1, 100, 997, 3988, 5000])
@pytest.mark.parametrize("transport", ["sm_push", "ce_push"])
def test_sizes_that_nothing_divides(m, transport):
    assert end_us(m, 2504, 4104, transport=transport, chunks=2) > 0


def test_launches_of_two_libraries_show_unless_they_are_recorded():
    target = TARGETS["cuda:90"]
    few, many = (Problem(m, 7168, 4096, 4, "bfloat16") for m in (1, 8192))
    us = [unfused_us(one, target, "all_gather") for one in (few, many)]
    assert us[0] < 40 and us[1] > 400
    for one, ends_us, pays in ((few, 55, True), (many, us[1] + 10, False)):
        assert schedules.pays(ends_us, one, target, "all_gather", is_recorded=False) == pays
        assert not schedules.pays(ends_us, one, target, "all_gather", is_recorded=True)


def every_way(problem: Problem):
    """All that the template for Hopper can do, however little it promises."""
    for transport in ("sm_push", "ce_push"):
        for cut in (gemm_sm90.WIDE, gemm_sm90.TURNS, gemm_sm90.MIDDLE):
            plain = Config(transport=transport, template="sm90", **asdict(cut))
            base = with_transport(plain, problem, TARGET)
            some = {base, replace(base, group_m=8), replace(base, group_m=8, own_first=False)}
            if transport != "sm_push":
                some |= {replace(base, chunks=chunks) for chunks in (1, min(2, problem.rows))}
            for one in some:
                yield one
                if one.own_first and problem.num_ranks > 1:
                    parts = (replace(one, first_wave=parts) for parts in (2, 3, 4))
                    yield from (one for one in parts if can_be(one, problem))


def can_be(config: Config, problem: Problem) -> bool:
    early = gather_schedules.own_tiles(problem, config) * config.first_wave
    return early <= TARGET.num_sms - 1 and not gather_schedules.straddles(problem, config)


@pytest.mark.parametrize("layer", ALL_LAYERS["ag_gemm"].values(), ids=str)
def test_no_way_that_is_left_out_would_end_much_sooner(layer):
    """Candidates are few: rules leave out what is predicted to be first nowhere."""
    for m in (128, 512, 997, 1024, 2048, 3988, 8192, 32768):
        for num_ranks in (2, 4, 8):
            problem = Problem(m, *layer, num_ranks, "bfloat16")
            every = gather_schedules.candidates(problem, TARGET)
            found = [one for one in every if one.template == "sm90"]
            assert 0 < len(found) <= gather_schedules.MOST_ON_HOPPER
            us = partial(gather_schedules.end_us, problem=problem, target=TARGET)
            best = min(map(us, every_way(problem)))
            assert us(found[0]) <= 1.03 * best, (m, num_ranks)


OPS = ("ag_gemm", "gemm_rs", "gemm_ar")


@pytest.mark.parametrize("op", OPS)
def test_a_call_takes_what_is_chosen_for_its_bucket(op):
    module = importlib.import_module(f"weft.ops.{op}")
    problem = module.op.make_problem(4, {"m": 1000, "n": 4096, "k": 3584}, "bfloat16")
    at_the_end = predicted(module.op, replace(problem, m=1020), TARGET)
    assert predicted(module.op, problem, TARGET) is at_the_end, "made once, and kept"


@pytest.mark.parametrize("op", OPS)
def test_a_choice_takes_no_time_and_as_long_at_any_size(op, monkeypatch):
    """A prediction is arithmetic over rounds, and few are made."""
    module, layer = importlib.import_module(f"weft.ops.{op}"), ALL_LAYERS[op]["llama3-70b mlp"]
    made = []
    for name in ("gathered_us", "scattered_us", "staged_us"):
        real = getattr(products, name)
        monkeypatch.setattr(
            products, name, lambda *a, real=real, **k: made.append(1) or real(*a, **k)
        )
    for m in (512, 2048, 32768, 1 << 20):
        for num_ranks in (2, 8):
            problem = module.op.make_problem(
                num_ranks, dict(zip("mnk", (m, *layer))), "bfloat16", (num_ranks,)
            )
            made.clear()
            took = []
            for _ in range(5):
                begin = time.perf_counter()
                module.choose(problem, TARGET)
                took.append(time.perf_counter() - begin)
            assert len(made) <= 5 * 60 and min(took) < 5e-3, (m, num_ranks)
