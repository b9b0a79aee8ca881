"""Ranks whose tensors lie otherwise: the right result on all, or an error that says what differs.

Never a deadlock. What a rank finds out about its tensors alone picks no plan; and what is kept of
calls is found by each rank for itself, at calls of its own.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from effort import slow_but

import weft
from weft.base.dtypes import tolerance
from weft.base.errors import CallOrderError
from weft.base.target import TARGETS
from weft.compiler.experts import Routing
from weft.plan.call_cache import described
from weft.plan.choices import predicted

RANKS = 3
PRODUCT, ROWS = {"m": 24, "n": 24, "k": 16}, {"m": 24, "n": 40}
EXPERTS = {"m": 20, "n": 24, "k": 16, "experts": 4, "top_k": 2}
SHAPES = {
    "ag_gemm": PRODUCT, "gemm_rs": PRODUCT, "gemm_ar": PRODUCT, "all_gather": ROWS,
    "reduce_scatter": ROWS, "all_reduce": ROWS, "ag_moe": EXPERTS, "moe_rs": EXPERTS,
    "moe_ar": EXPERTS,
}  # fmt: skip
# Calls by their m, and which rank's tensors lie otherwise in each: what is kept of the small ones
# is looked at again when larger ones have come, by ranks that have seen them at other times.
CALLS = [({}, 1), ({"m": 96}, None), ({}, 0), ({}, None), ({"m": 96}, 2), ({}, 1)]


def unaligned(tensor: torch.Tensor) -> torch.Tensor:
    memory = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
    return memory[1:].view(tensor.shape).copy_(tensor)


class Rank:
    """One rank's calls of an operator, some with tensors that lie otherwise in one `way`."""

    def __init__(self, name: str, way: str, transport: str | None, dtype: str) -> None:
        self.module = importlib.import_module(f"weft.ops.{name}")
        self.name, self.way, self.transport, self.dtype = name, way, transport, dtype
        self.there: dict[Any, torch.Tensor] = {}

    def calls(self) -> None:
        self.world = weft.init()
        for seed, (sizes, odd) in enumerate(CALLS):
            self.call(sizes, odd, seed)
        self.world.close()

    def call(self, sizes: dict, odd: int | None, seed: int) -> None:
        op, world = self.module.op, self.world
        shape = SHAPES[self.name] | sizes
        problem = op.make_problem(RANKS, shape, self.dtype)
        everyone = [op.make_inputs(problem, rank, seed) for rank in range(RANKS)]
        mine, right = dict(everyone[world.rank]), op.reference(problem, everyone)[world.rank]
        out = self.lie_otherwise(problem, everyone, mine, world.rank == odd)
        config = None
        if self.transport:
            found = op.candidates(problem, world.target)
            config = next(one for one in found if one.transport == self.transport)
        rest: dict[str, Any] = {"world": world, "config": config, "out": out}
        if self.name in ("ag_gemm", "all_gather"):
            rest["m"] = problem.m
        given = [mine[name] for name in ("a", "x", "b") if name in mine]
        if "top_k" in shape:
            given.append(Routing.of(mine, problem.tile_m))
        got = getattr(self.module, self.name)(*given, **rest)
        world.synchronize()
        error = (got.double() - right.double()).norm() / right.double().norm()
        assert error <= tolerance(self.dtype, RANKS * shape.get("k", 1))

    def lie_otherwise(self, problem: Any, everyone: Any, mine: dict, is_odd: bool) -> Any:
        """Have `mine` otherwise where this rank is the odd one; the `out` to pass."""
        rank, first = self.world.rank, "a" if "a" in mine else "x"
        fakes = [self.module.op.fake(problem, one, i) for i, one in enumerate(everyone)]
        shape, dtype = fakes[rank].shape, fakes[rank].dtype
        if self.way == "heap":  # of all ranks, though one uses it
            x = self.symmetric(first, [one[first] for one in everyone])[: len(mine[first])]
            if is_odd:
                mine[first] = x.copy_(mine[first])
        elif self.way == "heap_out":
            there = self.symmetric("out", fakes)
            return there[: shape[0]] if is_odd else None
        elif is_odd and self.way == "layout":
            mine["b"] = mine["b"].transpose(-1, -2).contiguous().transpose(-1, -2)
        elif is_odd and self.way == "alignment":
            mine |= {name: unaligned(mine[name]) for name in (first, "b") if name in mine}
        elif is_odd and self.way == "out":
            return torch.empty(shape, dtype=dtype)
        return None

    def symmetric(self, name: str, parts: list[torch.Tensor]) -> torch.Tensor:
        shape = (max(map(len, parts)), *parts[0].shape[1:])
        if (name, shape) not in self.there:
            self.there[name, shape] = self.world.empty(shape, parts[0].dtype, name)
        return self.there[name, shape]


def transports(name: str) -> list[str]:
    op = importlib.import_module(f"weft.ops.{name}").op
    problem = op.make_problem(RANKS, SHAPES[name], "float32")
    found = op.candidates(problem, TARGETS["emu"])
    return list(dict.fromkeys(one.transport for one in found))


ANY_PLACE = {
    "layout": lambda name: "k" in SHAPES[name],
    "out": lambda name: True,
    "alignment": lambda name: True,
}
# What is there between operators, and prepared for calls to come.
KEPT = ("sm_pull", "ce_push", "reduce_scatter", "all_reduce")


def _is_quick(name: str, transport: str | None, way: str) -> bool:
    if "top_k" in SHAPES[name]:  # products by tables take their tensors as other products do
        return transport is None and way == "alignment"
    return transport is None or (way == "out" and transport in KEPT)


def cases(ways: dict[str, Callable[[str], bool]]) -> list[Any]:
    return [
        pytest.param(
            name, way, transport, id=f"{name}-{transport or 'chosen'}-{way}",
            marks=() if _is_quick(name, transport, way) else pytest.mark.slow,
        )
        for name in SHAPES
        for transport in (None, *transports(name))
        for way, is_for in ways.items()
        if is_for(name)
    ]  # fmt: skip


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "way", "transport"), cases(ANY_PLACE))
def test_how_one_rank_has_its_tensors_is_its_own_matter(ranks, name, way, transport):
    dtype = "float16" if way == "alignment" else "float32"
    ranks(lambda: Rank(name, way, transport, dtype).calls(), RANKS)


# What peers read or write where it lies, if it lies on the heap.
IN_PLACE = [
    ("all_gather", "sm_pull", "heap", "x"), ("all_gather", "ce_pull", "heap", "x"),
    ("reduce_scatter", "sm_pull", "heap", "x"),
    ("all_reduce", "sm_pull", "heap", "x"), ("all_reduce", "sm_pull", "heap_out", "out"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "transport", "way", "tensor"), IN_PLACE)
def test_what_peers_reach_lies_on_the_heap_of_all_ranks(ranks, name, transport, way, tensor):
    with pytest.raises(CallOrderError) as caught:
        ranks(lambda: Rank(name, way, transport, "float32").calls(), RANKS)
    text = str(caught.value)
    like = r"(float32\(\d+, \d+\) )?"
    assert re.search(rf"\b{tensor} {like}at \d+ of the heap", text), text
    assert re.search(rf"\b{tensor} ({like}on no heap|not given)", text), text
    assert re.search(r"ranks? [\d, ]+ calls? .*, but ranks? [\d, ]+ calls? ", text), text


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name",), slow_but([("ag_gemm",), ("all_reduce",), ("moe_rs",)], zip(SHAPES))
)
def test_what_no_peer_reaches_lies_anywhere(ranks, name):
    for way in ("heap", "heap_out"):
        ranks(lambda way=way: Rank(name, way, None, "float32").calls(), RANKS)


def test_what_is_prepared_for_one_ranks_tensors_takes_no_turn(ranks, monkeypatch):
    """A call that engines carry prepares the one that is recorded instead; what is new to a rank,
    such as an `out` of its own, is not to the others."""
    module = importlib.import_module("weft.ops.gemm_rs")
    ways = {False: "ce_push", True: "sm_push"}

    def chosen(world, problem, config, is_recorded=False):
        return module.Config(transport=ways[is_recorded], tile_m=16, tile_n=16)

    monkeypatch.setattr(module, "given_or_chosen", chosen)
    ranks(lambda: Rank("gemm_rs", "out", None, "float32").calls(), RANKS)


TARGETS_OF_CHOICES = ("cuda:90", "cuda:100", "hip:gfx942", "emu")
SIZES = [(m, n, k) for m in (16, 100, 4096) for n in (20, 1028, 4096) for k in (64, 1028, 4096)]


@pytest.mark.parametrize("name", [name for name in SHAPES if "k" in SHAPES[name]])
@pytest.mark.parametrize("nodes", [(4,), (2, 2)])
def test_a_choice_does_not_go_by_how_one_rank_has_b(name, nodes):
    """Of fp8 it does: the template for Hopper reads it as [n, k] alone, and calls' names differ."""
    module = importlib.import_module(f"weft.ops.{name}")
    for target in map(TARGETS.__getitem__, TARGETS_OF_CHOICES):
        for (m, n, k), dtype in product(SIZES, ("bfloat16", "float32")):
            shape = {"m": m, "n": n, "k": k, "experts": 8, "top_k": 2, "tile_m": 128}
            one = module.op.make_problem(4, shape, dtype, nodes)
            dtypes = [{}, {"out_dtype": "float32"}] if name == "ag_gemm" else [{}]
            for rest in dtypes:
                problems = [replace(one, b_is_nk=is_nk, **rest) for is_nk in (False, True)]
                chosen = {predicted(module.op, problem, target) for problem in problems}
                assert len(chosen) == 1, (str(target), shape, dtype, rest, chosen)


def test_b_of_fp8_that_lies_otherwise_is_named():
    module = importlib.import_module("weft.ops.ag_gemm")
    problem = module.op.make_problem(4, {"m": 512, "n": 1024, "k": 1024}, "float8_e4m3fn", (4,))
    chosen = {
        module.choose(replace(problem, b_is_nk=is_nk), TARGETS["cuda:90"]).template
        for is_nk in (False, True)
    }
    assert chosen == {"plain", "sm90"}, "else the test above may take fp8"
    b = torch.empty(1024, 512).t()
    assert "b float32(512, 1024) of strides (1, 512)" in described("b", [b], None)
