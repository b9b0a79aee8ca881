"""Mutants of an operator: each notify, wait and atomic weakened in turn, on the emulator.

A place is one primitive with the chain of lines that leads to it. A mutant is a place and what is
done to it: `drop` leaves it out, `relax` takes its order, `narrow` its scope. It is caught when
the emulator reports something, or when the answer is wrong, under one of a few schedules.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

import weft
from weft.base.errors import WeftError
from weft.emulator import programs
from weft.emulator.programs import Program

HOWS = ("drop", "relax", "narrow")
SIGNALS = ("weft.notify", "weft.wait", "weft.wait_bounded")


class Place(NamedTuple):
    """A primitive, and the functions' files and lines that lead to it, outermost first."""

    primitive: str
    kernel: str
    lines: tuple[str, ...]


class Mutant(NamedTuple):
    place: Place
    how: str

    def __str__(self) -> str:
        return f"{self.how} {self.place.primitive} in {self.place.kernel}: " + " > ".join(
            self.place.lines
        )


@contextlib.contextmanager
def emulating(mutant: Mutant | None, seen: set[Place]) -> Iterator[None]:
    """Programs run with `mutant` in them; the places that they come by are added to `seen`."""
    original = Program.atomic_rmw

    def place_of(program: Program, primitive: str, loc: int) -> Place:
        frames = program.locations[loc].frames
        lines = tuple(f"{frame.file.rsplit('/', 1)[-1]}:{frame.line}" for frame in frames)
        place = Place(primitive, program.work.kernel.name.split("(")[0], lines)
        seen.add(place)
        return place

    def mutated(name: str) -> Callable[..., Any]:
        genuine = programs._EXTERNS[name]

        def run(program, args, static, dtype, shape, loc):
            place = place_of(program, name, loc)
            if mutant and mutant.place == place:
                if mutant.how == "drop":
                    return np.int32(0)
                if mutant.how == "relax":
                    static = ["relaxed" if s in ("release", "acquire") else s for s in static]
                else:
                    static = ["gpu" if s == "sys" else s for s in static]
            return genuine(program, args, static, dtype, shape, loc)

        return run

    def atomic_rmw(program, op, sem, scope, ptr, value, mask, dtype, shape, loc):
        place = place_of(program, "atomic", loc)
        if mutant and mutant.place == place:
            if mutant.how == "drop":
                return dtype.type(0)
            sem, scope = ("relaxed", scope) if mutant.how == "relax" else (sem, "cta")
        return original(program, op, sem, scope, ptr, value, mask, dtype, shape, loc)

    with (
        mock.patch.dict(programs._EXTERNS, {name: mutated(name) for name in SIGNALS}),
        mock.patch.object(Program, "atomic_rmw", atomic_rmw),
    ):
        yield


def fails(main: Callable[[], None], nodes: tuple[int, ...], seed: int) -> str:
    """What one run of `main` on every rank shows; "" if nothing."""
    with weft.emulated(ranks=sum(nodes), nodes=nodes, seed=seed, collect=True) as session:
        try:
            session.run(main)
        except (WeftError, AssertionError) as error:
            return type(error).__name__
        return ", ".join(sorted({finding.kind for finding in session.report}))


def survivors(
    main: Callable[[], None], nodes: tuple[int, ...], seeds: range = range(4)
) -> tuple[int, list[Mutant]]:
    """How many mutants there are of what `main` runs, and those that nothing catches."""
    places: set[Place] = set()
    with emulating(None, places):
        for seed in seeds:
            assert not fails(main, nodes, seed)
    mutants = [Mutant(place, how) for place in sorted(places) for how in HOWS]
    alive = []
    for mutant in mutants:
        with emulating(mutant, set()):
            if not any(fails(main, nodes, seed) for seed in seeds):
                alive.append(mutant)
    return len(mutants), alive
