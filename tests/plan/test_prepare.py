"""What is compiled for calls of many sizes: how many kernels, and that none is left for later."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

import weft
from weft.base.errors import CompileError, UsageError
from weft.base.target import TARGETS
from weft.language import triton_api
from weft.language.triton_api import specialising
from weft.ops import card
from weft.plan import prepare
from weft.plan.described import DescribedWorld

HOPPER = TARGETS["cuda:90"]
# Of a decode step, a prompt, a batch of prompts: where a logarithm lies, and how far around.
MODES = ((2.5, 1.2), (6.5, 0.8), (8.3, 0.6))
MOST_KERNELS = 12
KEYS = Path(__file__).parent / "scripts" / "keys_of_binaries.py"
MLP = {"n": 7168, "k": 4096}
QUICK = {
    "ag_gemm": MLP, "gemm_rs": {"n": 4096, "k": 3584}, "gemm_ar": {"n": 4096, "k": 3584},
    "all_gather": {"n": 4096}, "all_reduce": {"n": 4096}, "reduce_scatter": {"n": 4096},
}  # fmt: skip
LARGE = {
    "ag_gemm": {"n": 14336, "k": 8192}, "gemm_rs": {"n": 8192, "k": 7168},
    "gemm_ar": {"n": 8192, "k": 7168}, "all_gather": {"n": 8192}, "all_reduce": {"n": 8192},
    "reduce_scatter": {"n": 8192}, "all_to_all": {"n": 8192}, "all_reduce_rms_norm": {"n": 8192},
    "ag_wgrad": MLP, "ag_rms_gemm": MLP,
    "ag_attention": {"q_heads": 32, "kv_heads": 8, "d": 128},
    "flash_decode": {"n": 4096, "k": 128, "heads": 32, "kv_heads": 8},
    "moe_route": {"n": 128, "top_k": 8},
    "ag_moe": {"n": 768, "k": 2048, "experts": 128, "top_k": 8},
    "moe_rs": {"n": 2048, "k": 768, "experts": 128, "top_k": 8},
    "moe_ar": {"n": 2048, "k": 768, "experts": 128, "top_k": 8},
    "ep_dispatch": {"n": 2048, "experts": 128, "top_k": 8},
    "ep_combine": {"n": 2048, "experts": 128, "top_k": 8},
}  # fmt: skip


def sizes_of_a_server(count: int = 200) -> list[int]:
    rng = random.Random(1)
    drawn = (math.exp(rng.gauss(*rng.choice(MODES))) for _ in range(count))
    return [max(1, min(16384, round(m))) for m in drawn]


def keys_of_calls(name: str, shape: dict, num_ranks: int) -> dict[tuple, list[int]]:
    """By kernel the m whose calls launch it; weights as [n, k], nothing on the heap."""
    op, found = card(name), {}
    for m in sizes_of_a_server():
        problem = op.make_problem(num_ranks, {**op.default_shape, **shape, "m": m}, "bfloat16")
        if hasattr(problem, "b_is_nk"):
            problem = replace(problem, b_is_nk=True)
        world = DescribedWorld(num_ranks, HOPPER)
        for one in op.kernels.launches(problem, world, op.kernels.inputs(problem)):
            found.setdefault(prepare.key_of(one), []).append(m)
    return found


@pytest.mark.few(2)
@pytest.mark.parametrize("name", QUICK)
def test_a_dozen_kernels_serve_every_m(name):
    found = keys_of_calls(name, QUICK[name], 4)
    assert 1 <= len(found) <= MOST_KERNELS, [(key[1], ms) for key, ms in found.items()]


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 8])
@pytest.mark.parametrize("name", LARGE)
def test_a_dozen_kernels_of_every_operator_serve_every_m(name, num_ranks):
    found = keys_of_calls(name, LARGE[name], num_ranks)
    assert 1 <= len(found) <= MOST_KERNELS, [(key[1], ms) for key, ms in found.items()]


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_what_is_prepared_for_all_m_is_all_that_calls_launch(name):
    prepared = prepare.launches_of(card(name), {"m": range(1, 16385), **LARGE[name]}, 4, HOPPER)
    missing = {key: ms for key, ms in keys_of_calls(name, LARGE[name], 4).items()
               if key not in prepared}  # fmt: skip
    assert not missing, [(key[1], ms) for key, ms in missing.items()]


def test_the_last_rank_has_fewer_tokens():
    """One of three on the second rank of two."""
    op, sizes = card("ep_dispatch"), {"m": 3, "n": 32, "k": 16, "experts": 4, "top_k": 2}
    sizes = {name: size for name, size in sizes.items() if name in op.default_shape}
    problem = op.make_problem(2, {**op.default_shape, **sizes}, "float32")
    world = DescribedWorld(2, TARGETS["emu"])
    world.rank = 1
    launched = op.kernels.launches(problem, world, op.kernels.inputs(problem, 1))
    prepared = prepare.launches_of(op, sizes, 2, TARGETS["emu"], dtype="float32")
    assert {*map(prepare.key_of, launched)} <= {*prepared}


def test_a_kernel_knows_what_n_and_k_divide_by_and_nothing_of_m():
    op = card("gemm_rs")
    found = []
    for m in (2048, 2041):
        problem = op.make_problem(4, {"m": m, **QUICK["gemm_rs"]}, "bfloat16")
        world = DescribedWorld(4, HOPPER)
        (left,) = op.kernels.launches(problem, world, op.kernels.inputs(problem))
        found.append(left.record())
    aligned = found[0].divisible_by_16
    assert found[0].divisible_by_16 == found[1].divisible_by_16
    assert {"shape.n", "shape.k", "shape.stride_a", "mapping.n"} <= {*aligned}
    assert not {"shape.m", "mapping.m", "mapping.rows", "mapping.tiles_m"} & {*aligned}


def test_what_was_compiled_is_found_again(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    sizes = {"m": range(2000, 2010), "n": 96}
    first = weft.prepare("reduce_scatter", sizes, num_ranks=2, processes=2)
    again = weft.prepare(weft.ops.reduce_scatter, sizes, num_ranks=2, processes=1)
    assert first.kernels == first.compiled == again.kernels > 0
    assert again.compiled == 0
    assert list(tmp_path.glob("*/push_packets.cubin"))


@pytest.mark.slow
def test_another_process_asks_for_what_was_prepared():
    """Whatever else was prepared with it: Triton's keys of functions are of what these call."""
    asked = [
        subprocess.Popen([sys.executable, KEYS, m], stdout=subprocess.PIPE)
        for m in ("1..8192", "64")
    ]
    prepared, *called = (json.loads(one.communicate()[0]) for one in asked)
    assert all(one and one.items() <= prepared.items() for one in called)


def test_a_process_that_fails_says_why(monkeypatch):
    def broken(launch):
        raise ValueError("no such instruction")

    monkeypatch.setattr(triton_api, "compile_launch", broken)
    with pytest.raises(CompileError, match="push_packets does not compile: no such instruction"):
        weft.prepare("reduce_scatter", {"m": 2000, "n": 96}, num_ranks=2)


def test_sizes_that_are_missing_or_unknown():
    with pytest.raises(UsageError, match="ag_gemm needs k, n; its sizes are m, n, k"):
        weft.prepare("ag_gemm", {"m": 4}, num_ranks=2)
    with pytest.raises(UsageError, match="ag_gemm has no rows; its sizes are m, n, k"):
        weft.prepare("ag_gemm", {"m": 4, "n": 8, "k": 8, "rows": 3}, num_ranks=2)
    with pytest.raises(UsageError, match="m='1..3'; pass a whole number, or several: range"):
        weft.prepare("ag_gemm", {"m": "1..3", "n": 8, "k": 8}, num_ranks=2)
    with pytest.raises(UsageError, match="for how many ranks"):
        weft.prepare("ag_gemm", {"m": 4, "n": 8, "k": 8})
    with pytest.raises(UsageError, match="'gemm' is no operator and no weft.program"):
        weft.prepare("gemm", {"m": 4}, num_ranks=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", ["10", *(pytest.param(one, marks=pytest.mark.slow) for one in ("4 others", "100"))]
)  # fmt: skip
def test_nothing_is_compiled_behind_prepare_and_before_it_nothing_runs(tmp_path, words):
    script = Path(__file__).with_name("prepared_calls.py")
    done = subprocess.run(
        [sys.executable, str(script), *words.split()], capture_output=True, text=True, timeout=300,
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *_, error, compiled = done.stdout.splitlines()
    assert compiled == "[0, 0]"
    assert re.match(r"ag_gemm m=13,n=48,k=32 float32 on rank \d of 2 would compile ag_gemm", error)
    assert 'weft.prepare(ag_gemm, {"m": 13, "n": 48, "k": 32}, world=world)' in error
    assert "`weft prepare ag_gemm --shape m=13,n=48,k=32 --ranks 2 --target emu`" in error


@pytest.mark.parametrize("name", ["ag_gemm", "gemm_rs", "gemm_ar", "ag_moe", "all_reduce_rms_norm"])
def test_kernels_that_are_found_again_by_kinds_of_arguments_are_the_ones(name):
    """Loaded kernels are found by `kinds_of`, in a part of the time of Triton's own look: arguments
    of the same kinds never ask for two kernels."""
    op, kernels, kept = card(name), {}, []
    for m in (1, 2, 16, 17, 48, 63, 64, 100, 256, 300, 512, 1000, 1024, 4000, 4096, 4104, 8192):
        problem = op.make_problem(2, {**op.default_shape, **LARGE[name], "m": m}, "bfloat16")
        inputs = op.kernels.inputs(problem)
        for is_recorded in (False, True):
            world = DescribedWorld(2, HOPPER, is_recorded=is_recorded)
            for one in op.kernels.launches(problem, world, inputs):
                kinds = triton_api.kinds_of(one.fn, one.arguments, kept)
                key = (id(one.fn), kinds, *one.options.items())
                kept.append(one)
                kernels.setdefault(key, set()).add(prepare.key_of(one))
    assert kernels and all(len(found) == 1 for found in kernels.values())
    # Of a few kernels there are not many more kinds.
    assert len(kernels) <= 4 * len(set().union(*kernels.values()))


def test_what_libraries_multiply_is_called_before_calls_are_made():
    """cuBLAS loads its kernels at the first product of some sizes."""
    products: set[tuple] = set()
    prepare.launches_of(
        card("gemm_rs"), {"m": (32, 8192), **QUICK["gemm_rs"]}, 2, HOPPER, products=products
    )
    assert {(m, k, n) for m, k, _, _, n, *_ in products} == {(32, 3584, 4096)}
    prepare._multiply([(3, 4, (4, 1), 4, 5, (1, 4), torch.float32)], torch.device("cpu"))


@triton.jit
def of_anybody(x, n, rows, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK) * n, rows)


def test_kinds_tell_apart_what_is_compiled_apart():
    """Strides of 16 and of 1, wide integers, dtypes, alignment; of weft's own kernels not what
    follows from m."""
    kept, x = [], torch.zeros(64)

    def kinds(*args, own=True):
        of_anybody.fn.__module__ = "weft_generated" if own else "model"
        return triton_api.kinds_of(triton_api.renamed(of_anybody, f"f{own}"), args, kept)

    first = kinds(x, 64, 3, 16)
    assert first == kinds(torch.ones(8), 32, 1, 16) == kinds(x, 16, 160, 16)
    others = [(x, 63, 3, 16), (x, 1, 3, 16), (x, 1 << 36, 3, 16), (x, 64, 1 << 36, 16),
              (x, 64, 3, 32), (x[1:], 64, 3, 16), (x.half(), 64, 3, 16)]  # fmt: skip
    found = [kinds(*one) for one in others]
    assert len({first, *found}) == 1 + len(others)
    assert kinds(x, 64, 3, 16, own=False) != kinds(x, 64, 1, 16, own=False)
    for one in itertools.product([(x, 64, 3, 16), (x, 64, 5, 16), *others], repeat=2):
        assert not are_alike(*one) or kinds(*one[0]) == kinds(*one[1])
    assert are_alike((x, 64, 3, 16), (x[16:], 64, 5, 16))
    assert not any(are_alike((x, 64, 3, 16), one) for one in others)


def are_alike(one, other):
    """Are arguments known by those of another launch to be compiled as they are?"""
    fn = triton_api.renamed(of_anybody, "fTrue")
    names, run_time = specialising.run_time_names(fn)
    known = map(specialising.known_of, one)
    return all(map(specialising.is_alike, names, other, known, [run_time] * len(names)))
