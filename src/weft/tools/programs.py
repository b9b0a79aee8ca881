"""Operators by name, and a user's tensor program as one: by its card run, verify and bench take it.

    weft run model.py:mlp --ranks 4 --shape m=200
    weft bench model.py:mlp --shape m=2048

Its inputs, reference and candidates follow from its types: see weft.plan.program_cards.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from weft.base.card import Op, trials
from weft.base.dtypes import DTYPES
from weft.base.errors import UnsupportedError, UsageError
from weft.base.target import Target
from weft.tools.files import find_program
from weft.tools.words import is_in_file

if TYPE_CHECKING:
    from weft.compiler import Compiled
    from weft.ir.task import Task

# Of sizes that are not given: no tile divides it, and the emulator is through with it in seconds.
DEFAULT_SIZE = 97


def find_op(name: str, has_values: bool = True) -> Op:
    """The operator's card, or that of the tensor program FILE.py:NAME, whose calls are made with
    values unless nobody `has_values`.

    Raises  UsageError: no such operator; the message names those there are, nearest first
    """
    from weft.ops import card, names

    if is_in_file(name):
        return card_of(name, has_values)
    known = names()
    if name in known:
        return card(name)  # of this one alone: some operators load much of torch
    if name.endswith(".py"):
        raise UsageError(
            f"{name} is a file: name a program of it, {name}:PROGRAM; weft emulate runs a script"
        )
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else "."
    raise UsageError(f"no operator is called {name!r}{hint} The operators are {', '.join(known)}")


@functools.cache
def card_of(words: str, has_values: bool = True) -> Op:
    """The card of the program FILE.py:NAME; the file is imported once.

    Raises  UsageError: no such file or program; one whose inputs or results cannot be made up
    """
    from weft.ops import _baselines
    from weft.plan import program_cards

    program = compiled_of(words).stages.program
    for task in program_cards.inputs_of(program) if has_values else ():
        _check_input(words, task)
    types = [program_cards.type_of(program.task(name)) for name in program.results]
    for name, kind in zip(program.results, types, strict=True):
        if type(kind.placement).__name__ == "Partial":
            message = f"its result {name} is a summand on each rank; return all_reduce({name})"
            raise UsageError(f"{words}: {message}, so that there is something to compare")
    named = dict.fromkeys(program_cards.named_sizes(program), DEFAULT_SIZE)
    return program_cards.card(
        words, lambda problem: compiled_of(words), summary=f"the tensor program {program.name}",
        default_shape=named, dtypes=(types[0].dtype,), baselines=_baselines.PROGRAM,
        smallest=dict.fromkeys(named, 2), trials=trials(dict.fromkeys(named, 8)),
    )  # fmt: skip


def _check_input(words: str, task: Task) -> None:
    kind = task.type
    assert kind is not None
    if not kind.dtype.startswith(("float", "bfloat")):
        raise UsageError(
            f"{words}: its input {task.name} is of {kind.dtype}, whose values nobody can make up: "
            "run it from a script of your own, with weft emulate or weft verify"
        )


@functools.cache
def compiled_of(words: str) -> Compiled:
    """A file's program, the same one at every call: it keeps its plans."""
    return find_program(words)


def generated(subject: Any, target: Target, notes: list[str]) -> Iterator[tuple[Any, Any]]:
    """The kernels of a program's plan; `notes` get those that have no record."""
    from weft.compiler.lower import kernels, signature, source
    from weft.ir.device import Buffer, Launch, puts_far
    from weft.plan import launches
    from weft.tiles import gemm_sm90, multiply_sm90

    plan, facts = subject.plan, subject.facts
    buffers = {one.name: one for one in plan.of(Buffer)}
    for launch in plan.of(Launch):
        try:
            if launch.template not in ("gemm", "grouped"):
                raise UnsupportedError(f"without -o DIR only products are, not {launch.template}")
            variants = source.load(kernel := kernels.lower_launch(plan, launch))
        except UnsupportedError as error:
            note = f"{launch.kernel} is not compiled ahead: {error.message}"
            notes += [note] if note not in notes else []
            continue
        dtype = DTYPES[buffers[launch.writes[0]].dtype]
        tile_m, tile_n, tile_k = launch.tile
        plain = (tile_m, multiply_sm90.wide_columns(tile_n), tile_k)
        given = signature.Specialised(dtype.name, plain, facts.num_ranks, num_stages=2)
        yield variants.plain, signature.record(kernel, "plain", given)
        nodes = facts.nodes if puts_far(plan, launch) else ()
        is_hopper = launches.is_for_hopper(dtype.itemsize, nodes, target)
        if variants.sm90 is not None and is_hopper and gemm_sm90.has_tile(launch.tile):
            stages = gemm_sm90.most_stages(*launch.tile, target)
            given = signature.Specialised(
                dtype.name, launch.tile, facts.num_ranks, num_stages=stages,
                num_warps=gemm_sm90.NUM_WARPS,
            )  # fmt: skip
            yield variants.sm90, signature.record(kernel, "sm90", given)
