"""A compiled program: called like the function it was, and looked at step by step."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch

from weft.base.errors import UsageError
from weft.base.providers import provider
from weft.compiler import dtensors, leading, pipeline
from weft.compiler.binding import bind
from weft.compiler.facts import Facts, Settings
from weft.compiler.lower.kernels import refusal
from weft.compiler.passes.tile import tile
from weft.ir import task_rules
from weft.ir.device import Launch, Plan
from weft.ir.task import TRAVELLING, Program, arrives, takes_tokens

LOWERINGS = ("overlapped", "unfused", "persistent")
# Shapes that a rank remembers calls of.
MOST_CALLS = 256


@dataclass(frozen=True)
class Call:
    """Of calls with tensors of the same shapes: the sizes by name, how they are run, and what
    overlaps, if so."""

    sizes: dict[str, int]
    lowering: str | Persistent
    stages: pipeline.Stages | None


class Persistent(Protocol):
    """What runs all tasks of a program in one kernel; as weft.megakernel.Persistent does."""

    @property
    def run_persistent(self) -> Callable[..., Any]: ...


# What a call took before programs had options.
MOVED = {
    "lowering": "is an option of the program: {name}.options(lowering={value!r})",
    "collectives": "is asked for no more: operators are found by their names",
}


class Compiled:
    """What `weft.program` makes of a function."""

    def __init__(
        self, program: Program, settings: Settings | None = None,
        lowering: str | Persistent | None = None,
    ) -> None:  # fmt: skip
        self.stages = pipeline.compile_program(program)
        self.lowering = self._known(lowering or LOWERINGS[0])
        # Has nobody said how it is run? What was measured says it then.
        self.is_free = lowering is None and settings is None
        self._inputs = [one.name for one in program.tasks if one.kind == "input"]
        self._rows = leading.rows_of(program)
        self._settle(settings or Settings())

    def _settle(self, settings: Settings) -> None:
        self.settings = settings
        self._overlapped: dict[tuple, pipeline.Stages] = {}
        self._tiled: list[Program] = []
        self._calls: WeakKeyDictionary[Any, dict[tuple, Call]] = WeakKeyDictionary()

    def _known(self, lowering: str | Persistent) -> str | Persistent:
        if lowering in LOWERINGS or hasattr(lowering, "run_persistent"):
            return lowering
        message = f"lowering={lowering!r}; it is {', '.join(LOWERINGS[:-1])} or {LOWERINGS[-1]}"
        raise UsageError(f"{self.stages.program.name}: {message}", place=self.stages.program.place)

    def options(
        self, *, lowering: str | Persistent | None = None, settings: Settings | None = None
    ) -> Compiled:
        """The same program, run in another way; what is left out stays as it is.

            plain = mlp.options(lowering="unfused")
            pushed = mlp.options(settings=Settings(engines={"gathered": "sm_push"}))

        "overlapped" runs the kernels that are generated for sizes of this class, and leaves to
        libraries what is predicted to be slower; "unfused" calls libraries, one after the other;
        "persistent" runs all tasks in one kernel, as does a weft.megakernel.Persistent, which says
        how. `settings` are what the compiler shall not choose.

        What calls have found is shared where settings are the same.

        Raises  UsageError: no such lowering
        """
        other = copy.copy(self)
        other.is_free = self.is_free and lowering is None and settings is None
        if lowering is not None:
            other.lowering = self._known(lowering)
        if settings is not None:
            other._settle(settings)
        return other

    def __call__(self, *tensors: Any, world: Any, **named: Any) -> Any:
        """Run it on this rank's parts. Collective.

            y = mlp(x, w1, w2, world=world, m=997)
            y = mlp(x, w2=w2, w1=w1, world=world)

        `named` are parameters of the function, and sizes. How it is run: see `options`.

        Shapes  each tensor is what its placement leaves to this rank; activations may have more
                dimensions before the last, which are rows and come back with results; a size that
                the declaration names may be given by that name, and must be where shards differ.
                Strides: see `layouts`
        Sync    stream-ordered on the current stream
        Raises  ShapeError, DtypeError, UsageError: with the values and the declaration's line

        Where a tensor requires a gradient, results have one: see `weft.plan.gradients`.
        """
        tensors, sizes = self._in_order(tensors, named) if named else (tensors, named)
        if not all(isinstance(one, torch.Tensor) for one in tensors):
            self._refuse(tensors)
        if any(map(dtensors.is_dtensor, tensors)):
            tensors, sizes = self._local_parts(tensors, sizes, world)
        dims: leading.Leading = {}
        if any(tensors[i].dim() > 2 for i in self._rows if i < len(tensors)):
            tensors, dims = leading.flattened(self.stages.program, tensors, self._rows)
        call = self._call_of(tensors, sizes, world)
        given = dict(zip(self._inputs, tensors))

        def run() -> tuple[Any, ...]:
            return self._run(call, given, world)

        with _without_autocast():
            if any(one.requires_grad for one in tensors) and _may_differentiate():
                results = provider("executor").run_differentiated(
                    self.stages.tasks["place"], self.plan, given, call.sizes, world=world,
                    otherwise=None if call.lowering == "unfused" else run,
                )  # fmt: skip
            else:
                results = run()
        if dims:
            results = leading.restored(self.stages.program, results, dims)
        return results if len(results) != 1 else results[0]

    def _refuse(self, tensors: tuple) -> None:
        """Raises  UsageError: what is given as a tensor is none"""
        program = self.stages.program
        for name, one in zip(self._inputs, tensors):
            if not isinstance(one, torch.Tensor):
                message = f"{program.name}: {name} is of type {type(one).__name__}"
                raise UsageError(f"{message}; pass a torch tensor", place=program.place)

    def _local_parts(
        self, tensors: tuple, sizes: dict[str, int], world: Any
    ) -> tuple[tuple, dict[str, int]]:
        """Tensors with this rank's parts in the place of DTensors, and the sizes that these say."""
        types = {one.name: one.type for one in self.stages.program.tasks if one.type is not None}
        parts = list(tensors)
        for i, (name, one) in enumerate(zip(self._inputs, tensors)):
            if dtensors.is_dtensor(one):
                program, declared = self.stages.program.name, types[name]
                named = zip(declared.sizes, one.shape)
                sizes = {size: n for size, n in named if isinstance(size, str)} | sizes
                parts[i] = dtensors.local_part(program, world, name, one, declared.placement)
        return tuple(parts), sizes

    def _run(self, call: Call, given: Mapping[str, Any], world: Any) -> tuple[Any, ...]:
        if call.stages is not None:
            return provider("executor").run_plan(call.stages, given, call.sizes, world=world)
        if call.lowering == "unfused":
            return provider("executor").run_calls(self.plan, given, call.sizes, world=world)
        run_in_one: Any = call.lowering
        if call.lowering == "persistent":
            run_in_one = provider("persistent")
        settled = tuple(self.settings.tiles)
        return run_in_one.run_persistent(
            self.tiled, given, call.sizes, world=world, settled=settled
        )

    @property
    def tiled(self) -> Program:
        """Every task in tiles: those of the settings, or as the pass `tile` cuts them."""
        if not self._tiled:
            cut = tile(self.stages.tasks["place"], self.settings.tiles)
            self._tiled.append(task_rules.require(cut))
        return self._tiled[0]

    def _call_of(self, tensors: tuple, sizes: dict[str, int], world: Any) -> Call:
        """What calls with tensors like these share on this rank: found once, kept."""
        is_deterministic = _is_deterministic()
        shapes = tuple((one.shape, one.dtype) for one in tensors)
        choices = self.is_free and id(world.choices)
        key = (self.lowering, shapes, tuple(sizes.items()), is_deterministic, choices)
        calls = self._calls.setdefault(world, {})
        if key not in calls:
            bound = self._bound(tensors, sizes, world)
            facts, lowering = _facts(bound, world), self.lowering
            if self.is_free and not is_deterministic:
                found = provider("choices").lowering_of(world, self.stages.program, facts)
                lowering = found or lowering
            stages = self.overlapped(facts) if lowering == "overlapped" else None
            if len(calls) >= MOST_CALLS:
                calls.clear()
            calls[key] = Call(bound, lowering, stages)
        return calls[key]

    def _in_order(self, tensors: tuple, named: dict[str, Any]) -> tuple[tuple, dict[str, int]]:
        """The tensors of a call in the order of its parameters, and its sizes.

        Raises  UsageError: a parameter that is given twice, or not at all
        """
        title, place = self.stages.program.name, self.stages.program.place
        for word, message in MOVED.items():
            if word in named:
                moved = message.format(name=title, value=named[word])
                raise UsageError(f"{title}: {word}= {moved}", place=place)
        by_name = {name: one for name, one in named.items()
                   if name in self._inputs and not isinstance(one, int)}  # fmt: skip
        if not by_name:
            return tensors, named
        takes = f"{title} takes {', '.join(self._inputs)}"
        if twice := [name for name in self._inputs[: len(tensors)] if name in by_name]:
            message = f"{', '.join(twice)} both by place and by name"
            raise UsageError(f"{takes}; given is {message}", place=place)
        rest = self._inputs[len(tensors) :]
        if missing := [name for name in rest if name not in by_name]:
            raise UsageError(f"{takes}; {', '.join(missing)} is missing", place=place)
        sizes = {name: size for name, size in named.items() if name not in by_name}
        return (*tensors, *(by_name[name] for name in rest)), sizes

    def _bound(self, tensors: tuple, sizes: dict[str, int], world: Any) -> dict[str, int]:
        """Every size that the program calls by name."""
        given = dict(zip(self._inputs, tensors, strict=False))
        if len(tensors) > len(self._inputs):
            given |= {f"argument {i}": None for i in range(len(self._inputs), len(tensors))}
        return bind(self.stages.program, given, sizes, world.rank, world.num_ranks)

    @property
    def plan(self) -> Plan:
        """What each rank does, unfused."""
        return self.stages.plan

    def overlapped(self, facts: Facts) -> pipeline.Stages:
        """What is done when it is called with these: found once for each class of sizes, kept.

        The plan asks nothing of sizes but by name: all calls of a class run the same one.

        A kernel that cannot be generated is left to the libraries.

        Raises  ConfigError: settings that do not fit, at the user's line; UnsupportedError: an
                engine that is asked for, and no kernel is generated with it
        """
        placed = self.stages.tasks["place"]
        key = facts.key()
        if key not in self._overlapped:
            representative = facts.representative()
            stages = _that_runs(placed, representative, self.settings)
            carried = [one.name for one in stages.program.tasks if takes_tokens(one)]
            # What is asked for is had, or refused where it cannot be.
            if carried and not {*carried} & {*self.settings.engines}:
                chunks = {n: count for n, count in self.settings.chunks.items() if n not in carried}
                stages = replace(stages, recorded=_that_runs(
                    placed, replace(representative, is_recorded=True),
                    replace(self.settings, chunks=chunks),
                ))  # fmt: skip
            self._overlapped[key] = stages
        return self._overlapped[key]


def _may_differentiate() -> bool:
    import torch

    return torch.is_grad_enabled()


def _is_deterministic() -> bool:
    import torch

    return torch.are_deterministic_algorithms_enabled()


def _without_autocast() -> Any:
    """What is declared says the dtypes: nothing is cast, of the ways in which a program runs."""
    import torch

    return torch._C._DisableAutocast()


def _facts(bound: Mapping[str, int], world: Any) -> Facts:
    counts = Counter(world.backend.seats.nodes)
    nodes = tuple(counts[node] for node in sorted(counts)) if len(counts) > 1 else ()
    target = replace(world.target, machine=None) if _is_deterministic() else world.target
    return Facts(bound, world.num_ranks, target, nodes)


def _that_runs(program: Program, facts: Facts, settings: Settings) -> pipeline.Stages:
    """The plan with those kernels that can be generated."""
    while True:
        stages = pipeline.overlap(program, facts, settings)
        refused = [(one, refusal(stages.plan, one)) for one in stages.plan.of(Launch)]
        first = next(((one, error) for one, error in refused if error), None)
        if first is None:
            return stages
        collective = _hidden_by(stages.program, first[0])
        if collective in settings.engines:
            raise first[1]
        settings = replace(settings, engines={**settings.engines, collective: "library"})


def _hidden_by(program: Program, launch: Launch) -> str:
    """The collective for whose sake a kernel is fused."""
    for one in program.of_kernel(launch.fused):
        if one.kind in TRAVELLING:
            return one.name
        for source in map(program.task, one.operands):
            if arrives(source) and source.engine:
                return source.name
    raise AssertionError(f"{launch.kernel} hides no collective")
