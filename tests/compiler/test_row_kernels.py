"""Rows that are summed over ranks and worked on: what is done where, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft.base.errors import UnsupportedError
from weft.compiler import Partial, Replicate, Shard, Tensor, all_reduce, rms_norm, silu
from weft.compiler.facts import Facts, Settings
from weft.compiler.frontend import trace
from weft.compiler.lower import kernels
from weft.compiler.lower.kernels import refusal
from weft.compiler.passes.place import place
from weft.compiler.pipeline import overlap
from weft.ir import core
from weft.ir.device import Launch


def launch_of(function, columns: int = 64, m: int = 100, engine: str = "sm_push"):
    """(plan, its launch on rows) for h, Partial, and the replicated r and w."""
    types = {
        "h": Tensor("bfloat16", ("m", columns), Partial()),
        "r": Tensor("bfloat16", ("m", columns), Replicate()),
        "w": Tensor("bfloat16", (1, columns), Replicate()),
    }
    placed = place(trace(function, "tp", types))
    total = next(one.name for one in placed.tasks if one.kind == "all_reduce")
    settings = Settings(engines={total: engine} if engine else {})
    plan = overlap(placed, Facts({"m": m}), settings).plan
    found = [one for one in plan.of(Launch) if one.template == "rows"]
    return plan, found[0] if found else None


def hooks_of(kernel: core.Kernel, slot: str) -> list[str]:
    return [one.function for one in kernel.at(slot) if isinstance(one, core.Hook)]


def twice(h, r, w):
    """Two norms of a value that is no result: it travels."""
    total = silu(all_reduce(h)) * r
    normed = rms_norm(total, w, eps=1e-5)
    return rms_norm(normed, w, eps=1e-3), normed


def test_what_is_before_the_value_that_travels_is_done_once():
    plan, launch = launch_of(twice)
    kernel = kernels.lower_launch(plan, launch)
    before = ["add_partials", "silu_rows", "mul_rows", "rms_norm", "rounded"]
    assert hooks_of(kernel, "combine") == before
    assert hooks_of(kernel, "result") == ["store_rows", "rms_norm", "store_rows"]
    numbers = {one.name: one.by for one in kernel.of(core.Param) if one.sort == "number"}
    assert sorted(numbers.values()) == ["0.001", "1e-05"] and "eps" in numbers


def test_by_packets_every_rank_does_all_of_it():
    """What is added or multiplied right behind the sum is loaded before packets are waited for."""
    plan, launch = launch_of(twice, m=8, engine="one_shot_ll")
    kernel = kernels.lower_launch(plan, launch)
    assert hooks_of(kernel, "combine") == ["add_packets", "silu_rows", "mul_rows", "rms_norm",
                                           "rounded"]  # fmt: skip
    assert hooks_of(kernel, "result") == ["store_rows", "rms_norm", "store_rows"]
    assert hooks_of(kernel, "emit") == ["send_packets"] and not kernel.of((core.Wait, core.Notify))

    plan, launch = launch_of(twice, m=8, engine="two_shot_ll")
    kernel = kernels.lower_launch(plan, launch)
    assert hooks_of(kernel, "emit") == ["spread_packets", "push_packets"]
    assert hooks_of(kernel, "collect") == ["take_packets"]
    assert not kernel.of((core.Wait, core.Notify)) and len(kernel.at("end")) == 1

    plan, launch = launch_of(
        lambda h, r, w: rms_norm((all_reduce(h) + r) * r, w), 64, 8, "one_shot_ll"
    )
    first = ["ahead", "add_packets", "add_ahead", "mul_ahead", "rms_norm", "rounded"]
    assert hooks_of(kernels.lower_launch(plan, launch), "combine") == first


def test_few_rows_go_by_packets_where_all_ranks_are_near():
    def engine_of(m: int, **facts) -> str:
        placed = place(trace(twice, "tp", {
            "h": Tensor("bfloat16", ("m", 8192), Partial()),
            "r": Tensor("bfloat16", ("m", 8192), Replicate()),
            "w": Tensor("bfloat16", (1, 8192), Replicate()),
        }))  # fmt: skip
        tasks = overlap(placed, Facts({"m": m}, **facts)).program.tasks
        (total,) = [one for one in tasks if one.kind == "all_reduce"]
        return total.engine

    assert [engine_of(m) for m in (1, 4, 16, 32)] == ["one_shot_ll"] * 2 + ["two_shot_ll"] * 2
    assert [engine_of(m) for m in (64, 1025)] == ["sm_push"] * 2
    assert engine_of(1, num_ranks=1) == "sm_push" and engine_of(1, nodes=(2, 2)) == "sm_put"


def test_among_others_credits_are_given_and_packets_take_none():
    """Whoever takes credits waits for those of every call: so every call gives them."""
    types = {
        "h": Tensor("bfloat16", ("m", 64), Partial()),
        "w": Tensor("bfloat16", (64, 64), Shard(1)),
        "v": Tensor("bfloat16", (64, 64), Shard(0)),
    }

    def layer(h, w, v):
        first = silu(all_reduce(h))
        return silu(all_reduce(silu(first @ w) @ v))

    placed = place(trace(layer, "tp", types))
    engines = {"reduced": "one_shot_ll", "reduced_2": "sm_push"}
    plan = overlap(placed, Facts({"m": 8}), Settings(engines=engines)).plan
    few, product = (one for one in plan.of(Launch) if one.pushes)
    assert (few.template, few.takes, few.gives) == ("rows", False, False)
    assert (product.template, product.takes, product.gives) == ("gemm", True, True)
    first = replace(few, takes=True, gives=True)
    statements = tuple(first if one is few else one for one in plan.statements)
    taking = kernels.lower_launch(replace(plan, statements=statements), first)
    assert [type(one) for one in taking.of(core.SIGNALS)] == [core.Credit, core.Finish]


def apart(h, r, w):
    total = all_reduce(h)
    return silu(total) * total


def test_what_is_no_chain_is_refused_at_the_users_line():
    plan, launch = launch_of(apart)
    error = refusal(plan, launch)
    assert isinstance(error, UnsupportedError) and "behind" in str(error)
    assert error.place.frames[0].file.endswith("test_row_kernels.py")


def test_rows_that_fit_no_tile_are_refused():
    plan, launch = launch_of(twice, columns=1 << 16, engine="")
    assert "65536 columns; a row is one tile, of up to 32768" in str(refusal(plan, launch))
    with pytest.raises(UnsupportedError):
        kernels.lower_launch(plan, launch)
