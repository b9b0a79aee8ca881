"""Each signal of a kernel of Core IR is asked for: without it, or weaker, the kernel is refused.

The kernels are those of all operators and of random programs, with each engine that carries their
collectives. What a mutant would break is shown by running it (test_core_mutants.py); here the
rules say it of every kernel, before anything runs.
"""

from __future__ import annotations

import importlib
import itertools
import pkgutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import operators
import pytest
from random_programs import random_experts, random_layers
from test_overlapped_runs import drawn

import weft.ops
from weft.base.errors import ConfigError, UnsupportedError
from weft.base.target import TARGETS
from weft.compiler import Compiled, Facts, Settings, schedules
from weft.compiler.lower import kernels
from weft.compiler.passes.engines import pairs
from weft.compiler.passes.fuse import fuse
from weft.compiler.pipeline import overlap
from weft.ir import core, core_in_plan, core_rules
from weft.ir.device import Launch, Plan
from weft.verify.mutants.core_ir import mutations

ENGINES = {
    "all_gather": ("ce_push", "sm_push", "sm_put", "relay", "pushers"),
    "reduce_scatter": ("sm_push", "ce_push", "sm_put", "relay"),
    "all_reduce": ("sm_push", "one_shot_ll", "two_shot_ll", "sm_put", "relay"),
    "all_to_all": ("sm_push", "ce_push"),
}
# How many ranks, and how many on each node; () is one node.
RANKS = ((2, ()), (4, ()), (4, (2, 2)))

Lowered = tuple[Plan, dict[str, core.Kernel]]


def weaker(kernel: core.Kernel) -> Iterator[tuple[str, core.Kernel]]:
    """The kernel without each statement that orders ranks, with each of them relaxed, narrowed,
    doubled or moved; and what was done."""
    for mutant, changed in mutations(kernel):
        if changed != kernel:  # nothing stands where it was moved to
            yield f"{mutant.kind} {mutant.site.primitive.split()[0]}", changed
    for i, one in enumerate(kernel.statements):
        if getattr(one, "order", "") == "relaxed":  # of these no mutant is made
            narrow = replace(one, scope="device")
            statements = (*kernel.statements[:i], narrow, *kernel.statements[i + 1 :])
            yield "narrow relaxed", replace(kernel, statements=statements)


def all_refused(kernel: core.Kernel) -> Counter[str]:
    """How often what was done to a legal kernel; each time it is refused, where the user has a line
    with that."""
    assert core_rules.check(kernel) == []
    found: Counter[str] = Counter()
    for done, changed in weaker(kernel):
        breaches = core_rules.check(changed)
        assert breaches, f"{done}:\n{core.show(changed, places=False)}"
        if kernel.place.frames:
            assert any(one.place.frames for one in breaches), breaches
        found[done] += 1
    return found


def otherwise(kernel: core.Kernel) -> Iterator[core.Kernel]:
    """The kernel where one parameter says of signals or of the slot what is not so; also where it
    says less, and what it no longer asks for is gone."""
    for i, one in enumerate(kernel.statements):
        if not isinstance(one, core.Param) or one.sort not in ("signals", "slot"):
            continue
        others = [replace(one, **{end: party}) for end in ("by", "to") if getattr(one, end)
                  for party in ("", "another")]  # fmt: skip
        others += [replace(one, announces=())] if one.announces else []
        for other in others:
            yield _with(kernel, kernel.statements[:i], other, kernel.statements[i + 1 :])
        for end, words in (("by", (core.Notify, core.Credit)), ("to", (core.Wait, core.Finish))):
            if getattr(one, end) == core.KERNEL:
                left = [
                    each for each in kernel.statements[i + 1 :]
                    if not (isinstance(each, words) and one.name in _of(each))
                ]  # fmt: skip
                other = replace(one, **{end: "another"})
                yield _with(kernel, kernel.statements[:i], other, tuple(left))


def _with(kernel: core.Kernel, before: tuple, one: core.Param, after: tuple) -> core.Kernel:
    return replace(kernel, statements=(*before, one, *after))


def _of(one: core.Statement) -> tuple[str, str]:
    return getattr(one, "signals", ""), getattr(one, "workspace", "")


def fits_alone(plan: Plan, made: dict[str, core.Kernel]) -> int:
    """How many kernels that say otherwise than their plan were refused; all are."""
    launches = {one.kernel: one for one in plan.of(Launch)}
    refused = 0
    for name, kernel in made.items():
        assert core_in_plan.check(plan, launches[name], kernel) == []
        for other in otherwise(kernel):
            found = core_rules.check(other) or core_in_plan.check(plan, launches[name], other)
            assert found, core.show(other, places=False)
            refused += 1
    return refused


def of_operators() -> Iterator[core.Kernel]:
    """The kernels that operators have as Core IR of their own, and those of products that are
    summed, as they are planned; each also as it sends tiles by TMA."""
    for name in ("gemm_rs", "gemm_ar"):
        op, target = weft.ops.cards()[name], TARGETS["emu"]
        problem = op.make_problem(4, {"m": 256, "n": 128, "k": 64}, "bfloat16")
        for config in op.candidates(problem, target):
            if config.is_fused and not config.is_by_packets:
                plan = schedules.planned(problem.traced(), config, problem, target).plan
                for one in kernels.lower(plan).values():
                    yield from (one, kernels.sending(one))
    for module in pkgutil.iter_modules(weft.ops.__path__):
        for one in vars(importlib.import_module(f"weft.ops.{module.name}")).values():
            if isinstance(one, core.Kernel):
                yield from (one, kernels.sending(one))


def of_programs() -> Iterator[Lowered]:
    """The plans of all operators' programs with their kernels, by every engine that takes them."""
    for function, (num_ranks, nodes) in itertools.product(operators.PARAMETERS, RANKS):
        placed = operators.placed(function)
        found = [collective for collective, _ in pairs(fuse(placed))]
        for engines in itertools.product(*(ENGINES.get(one.kind, ("sm_push",)) for one in found)):
            facts = Facts({"m": 64}, num_ranks, TARGETS["emu"], nodes)
            settings = Settings(engines=dict(zip((one.name for one in found), engines)))
            try:
                plan = overlap(placed, facts, settings).plan
                yield plan, kernels.lower(plan)
            except (ConfigError, UnsupportedError):
                continue


def of_random(compiled: Compiled, num_ranks: int, nodes: tuple[int, ...] = ()) -> Lowered:
    plan = compiled.overlapped(Facts({"m": 48}, num_ranks, TARGETS["emu"], nodes)).plan
    return plan, kernels.lower(plan)


def layers(seeds: range) -> Iterator[Lowered]:
    """Of 2 and 4 ranks by random engines, and of 4 on two nodes."""
    for seed in seeds:
        for num_ranks in (2, 4):
            yield of_random(drawn(seed, num_ranks), num_ranks)
        yield of_random(random_layers(seed, 4), 4, (2, 2))


def experts(seeds: range) -> Iterator[Lowered]:
    for seed in seeds:
        for num_ranks, nodes in RANKS:
            yield of_random(random_experts(seed, num_ranks), num_ranks, nodes)


def searched(lowered: Iterator[Lowered]) -> tuple[int, Counter[str]]:
    """How many kernels there are that differ, and what was done to them."""
    seen: set[str] = set()
    found: Counter[str] = Counter()
    for plan, made in lowered:
        differ = {}
        for name, kernel in made.items():
            if (text := core.show(kernel, places=False)) not in seen:
                seen.add(text)
                differ[name] = kernel
                found += all_refused(kernel)
        found["otherwise"] += fits_alone(plan, differ)
    return len(seen), found


def test_operators_kernels_are_refused_without_one_of_their_signals():
    found: Counter[str] = Counter()
    for kernel in {core.show(one): one for one in of_operators()}.values():
        found += all_refused(kernel)
    assert {f"drop {word}" for word in ("wait", "notify", "credit", "finish")} <= {*found}
    assert found["narrow relaxed"]


def test_programs_kernels_are_refused_without_one_of_their_signals():
    count, found = searched(of_programs())
    assert count > 20 and found["drop wait"] > 20 and found["drop advance"]


@pytest.mark.parametrize("made", [layers, experts])
def test_random_programs_are_refused_without_one_of_their_signals(made):
    count, found = searched(made(range(5)))
    assert count > 5 and found["drop wait"] and found["drop credit"] and found["otherwise"] > 50


@pytest.mark.slow
@pytest.mark.parametrize("made", [layers, experts])
def test_many_random_programs_are_refused_without_one_of_their_signals(made):
    count, _ = searched(made(range(5, 60)))
    assert count > 50


@pytest.mark.slow
def test_rows_that_another_kernel_has_waited_for():
    """Two products of the same rows: the second one names the first, and must not forget it."""
    lowered = layers(range(40))
    plan, made = next(one for one in lowered if any(_is_behind(each) for each in one[1].values()))
    (kernel,) = [one for one in made.values() if _is_behind(one)][:1]
    launch = next(one for one in plan.of(Launch) if one.kernel == kernel.name)
    (rows,) = [one for one in kernel.of(core.Param) if one.sort == "operand" and one.by]
    assert rows.by in made
    at = kernel.statements.index(rows)
    for by in ("", "another"):
        other = replace(rows, by=by)
        changed = _with(kernel, kernel.statements[:at], other, kernel.statements[at + 1 :])
        found = core_rules.check(changed) or core_in_plan.check(plan, launch, changed)
        assert any(rows.name in one.message for one in found), found


def _is_behind(kernel: core.Kernel) -> bool:
    hooks = {one.function for one in kernel.of(core.Hook)}
    return "rows_or_own" in hooks and not kernel.of(core.Wait)
