"""Each signal of a plan, dropped, is found: by the rules, and by the emulator where it shows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
from random_programs import global_inputs, of_rank

import weft
import weft.ops
from weft.base.dtypes import tolerance
from weft.base.errors import FindingError, IllegalError, UnsupportedError
from weft.base.target import TARGETS
from weft.compiler import (
    Facts,
    Replicate,
    Settings,
    Shard,
    Tensor,
    Times,
    all_gather,
    all_to_all,
    grouped_matmul,
    libraries,
    moe_route,
    reduce_scatter,
    scatter_rows,
)
from weft.compiler.frontend import trace
from weft.compiler.passes.place import place
from weft.compiler.pipeline import overlap
from weft.ir import device, device_rules
from weft.ir.device import After, Copy, Launch, Plan, Take, Wait
from weft.ir.kinds import PRODUCTS
from weft.plan import run_plan

K, N, M = 16, 16, 48


def ag_gemm(a, b):
    return all_gather(a) @ b


def gemm_rs(a, b):
    return reduce_scatter(a @ b)


def moe_rs(x, logits, b):
    routing = moe_route(logits, top_k=2)
    return reduce_scatter(scatter_rows(grouped_matmul(x, b, routing), routing))


def gemm_a2a(x, w):
    return all_to_all(x @ w)


def a2a_gemm(y, w):
    return all_to_all(y, dim=0) @ w


PARAMETERS = {
    ag_gemm: {"a": Tensor("float32", ("m", K), Shard(0)), "b": Tensor("float32", (K, N), Shard(1))},
    gemm_rs: {"a": Tensor("float32", ("m", K), Shard(1)), "b": Tensor("float32", (K, N), Shard(0))},
    moe_rs: {
        "x": Tensor("float32", (Times("m", 2), K), Shard(1)),
        "logits": Tensor("float32", ("m", 4), Shard(0)),
        "b": Tensor("float32", (4, K, N), Shard(1)),
    },
    **{
        function: {
            one: Tensor("float32", ("m", 40), Shard(dim)),
            "w": Tensor("float32", (40, 40), Replicate()),
        }
        for function, one, dim in ((gemm_a2a, "x", 0), (a2a_gemm, "y", 1))
    },
}
PROGRAMS = {
    "push": (ag_gemm, {"gathered": "sm_push"}),
    "pushers": (ag_gemm, {"gathered": "pushers"}),
    "put": (ag_gemm, {"gathered": "ce_push"}),
    "relay": (ag_gemm, {"gathered": "relay"}),
    "gemm_rs": (gemm_rs, {"scattered": "sm_push"}),
    "carried": (gemm_rs, {"scattered": "ce_push"}),
    "relayed": (gemm_rs, {"scattered": "relay"}),
    "relayed tokens": (moe_rs, {"scattered": "relay"}),
    "to owners": (gemm_a2a, {"exchanged": "sm_push"}),
    "slices": (a2a_gemm, {"exchanged": "sm_push"}),
    "slices by engines": (a2a_gemm, {"exchanged": "ce_push"}),
}


# Ranks by nodes.
NODES = dict.fromkeys(("relay", "relayed", "relayed tokens"), (2, 1))


def compiled(name: str, nodes: tuple[int, ...]):
    function, engines = PROGRAMS[name]
    placed = place(trace(function, "tp", PARAMETERS[function]))
    tiles = {one.name: (16, 16, 16) for one in placed.tasks if one.kind in PRODUCTS}
    settings = Settings(tiles, engines)
    facts = Facts({"m": M}, sum(nodes), TARGETS["emu"], nodes if len(nodes) > 1 else ())
    return placed, overlap(placed, facts, settings).plan


def mutants(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """The plan without one of its signals, and what is gone."""

    def instead(at: int, *other) -> Plan:
        return replace(plan, statements=(*plan.statements[:at], *other, *plan.statements[at + 1 :]))

    for i, one in enumerate(plan.statements):
        if isinstance(one, After | Wait | Take):
            yield device.text.show([one], places=False).strip(), instead(i)
        if isinstance(one, Launch) and one.takes:
            yield f"takes of {one.kernel}", instead(i, replace(one, takes=False))
        if isinstance(one, Copy) and one.awaits:
            yield f"awaits of the copy of {one.source}", instead(i, replace(one, awaits=""))
        if isinstance(one, Launch):
            for field in ("awaits", "announces"):
                if getattr(one, field):
                    yield f"{field} of {one.kernel}", instead(i, replace(one, **{field: ()}))
            if one.gives:
                yield f"gives of {one.kernel}", instead(i, replace(one, gives=False))


def run(placed, plan: Plan, nodes: tuple[int, ...]) -> None:
    """Some calls with data that changes, each against its meaning."""
    num_ranks = sum(nodes)
    stages = SimpleNamespace(plan=plan, schedules={}, recorded=None)

    def main():
        world, results = weft.init(), []
        for seed in range(3):
            whole = global_inputs(placed, {"m": M}, seed)
            mine = {
                name: of_rank(placed.task(name).type, one, {"m": M}, world.rank, num_ranks)
                for name, one in whole.items()
            }
            results.append((whole, *run_plan(stages, mine, {"m": M}, world=world)))
        for whole, got in results:  # when all have been queued
            (want,) = libraries.reference(placed, whole)
            want = of_rank(placed.tasks[-1].type, want, {"m": M}, world.rank, num_ranks)
            assert (got - want).norm() <= tolerance("float32", 64) * want.norm()
        world.close()

    with weft.emulated(ranks=num_ranks, nodes=nodes) as session:
        session.run(main)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name",
    [
        "push",
        "pushers",
        "put",
        "relay",
        "carried",
        "relayed",
        "to owners",
        "slices",
        "slices by engines",
        pytest.param("gemm_rs", marks=pytest.mark.slow),
        pytest.param("relayed tokens", marks=pytest.mark.slow),
    ],
)
def test_every_dropped_signal_is_found(name: str, monkeypatch):
    monkeypatch.setenv("WEFT_SLOTS", "1")  # only credits keep a call from the one before it
    nodes = NODES.get(name, (2,))
    placed, plan = compiled(name, nodes)
    run(placed, plan, nodes)
    survivors, found = [], 0
    for told, mutant in mutants(plan):
        assert device_rules.check(mutant), told
        try:
            run(placed, mutant, nodes)
        except (FindingError, IllegalError):  # shown by a run, or refused with its kernels
            found += 1
        except (UnsupportedError, ValueError):
            continue  # nothing runs such a plan
        else:
            survivors.append(told)
    assert found >= 2 and survivors == list(EXPECTED[name])


# What a run does not show, and why; the rules find each of these too.
RECORDINGS = "a call's last product waits for all that streams bring: recordings need the join"
EXPECTED = {
    "push": {},
    "pushers": {},
    "put": {
        "takes of ag_gemm_edges": "only this rank reads what lies across two ranks' rows",
        "after(main, copy)": RECORDINGS,
    },
    "relay": {"after(main, relay)": RECORDINGS},
    "carried": {},
    "relayed": {"after(main, relay)": RECORDINGS},
    "relayed tokens": {"after(main, relay)": RECORDINGS},
    "gemm_rs": {},
    "to owners": {},
    "slices": {},
    "slices by engines": {
        "after(main, copy)": "who writes y next needs the join, or a recording: here is neither"
    },
}
