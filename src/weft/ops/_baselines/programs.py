"""The operator's work as a tensor program, whose kernels and plan are the compiler's.

What the compiler chooses for the program and what the operator's card chooses may differ, in tiles
and engines; `about` says what the program took.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from weft.base.errors import UnsupportedError
from weft.compiler.compiled import Compiled
from weft.compiler.facts import Facts
from weft.plan.program_cards import UNFUSED, Config
from weft.tune.case import Case
from weft.tune.variants import Variant


def product(case: Case) -> Variant:
    """Of the operators that are one product: operands by the names that the operator has.

    Raises  UnsupportedError: operands with scales, which are no parameters of a program
    """
    problem, world = case.problem, case.world
    if problem.scaling:
        raise UnsupportedError(
            f"a program's call takes no scales, as {problem.dtype} operands have"
        )
    compiled = Compiled(case.card.program(problem))

    def call(inputs: Mapping[str, Any]) -> Callable[[], Any]:
        return lambda: compiled(inputs["a"], inputs["b"], world=world, m=problem.m)

    plan = compiled.overlapped(Facts({"m": problem.m}, world.num_ranks, world.target)).program
    about = ", ".join(f"{one.subject} {one.what}={one.taken}" for one in plan.choices)
    return Variant("weft_program", [call(inputs) for inputs in case.sets], about=about)


def unfused(case: Case) -> Variant:
    """Of an operator that is a program: the same by library calls, one after the other."""
    config = Config(UNFUSED)

    def call(inputs: Mapping[str, Any]) -> Callable[[], Any]:
        return lambda: case.card.run(case.world, case.problem, inputs, config)

    return Variant(UNFUSED, [call(inputs) for inputs in case.sets], about=str(config))
