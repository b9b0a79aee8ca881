"""How a call is done that names no configuration: as was measured, or else as is predicted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from weft.base.card import Op
from weft.base.errors import ConfigError
from weft.base.providers import provider
from weft.compiler.buckets import key_of, program_key
from weft.compiler.facts import Facts
from weft.ir.task import Program

# What files of choices call all tensor programs.
PROGRAMS = "programs"


def config_of(world: Any, problem: Any, is_recorded: bool = False) -> Any:
    """The configuration of a call that names none, the same on all ranks.

    Where torch is asked for deterministic algorithms nothing that was measured decides: bits are
    those of what is predicted, which is a function of sizes and target.
    """
    return chosen(world, provider("collectives").card(problem.op), problem, is_recorded)


def given_or_chosen(world: Any, problem: Any, config: Any, is_recorded: bool = False) -> Any:
    """The caller's configuration, or what `config_of` says, which fits the problem.

    Raises  ConfigError: the caller's does not
    """
    if config is None:
        return config_of(world, problem, is_recorded)
    config.check(problem, world.target)
    return config


def lowering_of(world: Any, program: Program, facts: Facts) -> str | None:
    """How calls of a tensor program were measured to be best run; None where they were not."""
    key = program_key(program, facts.sizes, facts.num_ranks)
    found = world.choices.get(PROGRAMS, {}).get(key)
    return found and found["eager"]["config"]["transport"]


def chosen(world: Any, card: Op, problem: Any, is_recorded: bool = False) -> Any:
    """The same, of an operator by its card."""
    found = measured(world, card, problem, is_recorded)
    return found or predicted(card, problem, world.target, is_recorded)


def predicted(card: Op, problem: Any, target: Any, is_recorded: bool = False) -> Any:
    """The configuration to take where nothing was measured."""
    if torch.are_deterministic_algorithms_enabled():
        target = replace(target, machine=None)
    if card.choose:
        return card.choose(problem, target, is_recorded)
    return next(iter(card.candidates(problem, target)))


def measured(world: Any, card: Op, problem: Any, is_recorded: bool = False) -> Any:
    """What was measured to be best for the problem's bucket; None where that is not to be taken."""
    if not world.choices or torch.are_deterministic_algorithms_enabled():
        return None
    found = record_of(world, card, problem)
    if found is None:
        return None
    try:
        config = card.config(**found["recorded" if is_recorded else "eager"]["config"])
        config.check(problem, world.target)
    except (ConfigError, TypeError):  # of the bucket's largest m alone; of other fields
        return None
    return config


def record_of(world: Any, card: Op, problem: Any) -> Any:
    """What is kept of the problem's bucket: a record of weft.tune.choosing."""
    return world.choices.get(card.problem.op, {}).get(key_of(problem))
