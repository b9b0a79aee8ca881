"""A compiled program: called like the function it was, and looked at step by step."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from weft.base.errors import UsageError
from weft.base.parts import full_part
from weft.base.providers import provider
from weft.compiler import dtensors, pipeline
from weft.compiler.binding import bind
from weft.compiler.facts import Facts, Settings
from weft.compiler.lower.supported import refusal
from weft.compiler.passes import map as mapping
from weft.compiler.passes.swizzle import name_of
from weft.compiler.passes.tile import number, tile
from weft.ir import device, task
from weft.ir.device import Channel, Launch, Plan
from weft.ir.task import Program, is_carried

LOWERINGS = ("overlapped", "unfused", "persistent")
# In place, tiles read rows of one rank alone: parts are whole tiles.
TILE_ROWS = 128


# Shapes that a rank remembers calls of.
MOST_CALLS = 256


@dataclass(frozen=True)
class Call:
    """Of calls with tensors of the same shapes: the sizes by name, and what overlaps, if so."""

    sizes: dict[str, int]
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
        lowering: str | Persistent = LOWERINGS[0],
    ) -> None:  # fmt: skip
        self.stages = pipeline.compile_program(program)
        self.lowering = self._known(lowering)
        self._inputs = [one.name for one in program.tasks if one.kind == "input"]
        # Those whose place on the heap matters.
        first = [one.operands[0] for one in program.tasks if one.kind == "all_gather"]
        self._gathered = [i for i, name in enumerate(self._inputs) if name in first]
        self._settle(settings or Settings())

    def _settle(self, settings: Settings) -> None:
        self.settings = settings
        self._orders = {name_of(order): order for order in settings.orders.values()}
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

        Shapes  each tensor is what its placement leaves to this rank; a size that the declaration
                names may be given by that name, and must be where shards differ. Strides: see
                `layouts`
        Sync    stream-ordered on the current stream
        Raises  ShapeError, DtypeError, UsageError: with the values and the declaration's line

        Where a tensor requires a gradient, results have one: see `weft.plan.gradients`.
        """
        tensors, sizes = self._in_order(tensors, named) if named else (tensors, named)
        if any(map(dtensors.is_dtensor, tensors)):
            tensors, sizes = self._local_parts(tensors, sizes, world)
        call = self._call_of(tensors, sizes, world)
        given = dict(zip(self._inputs, tensors))

        def run() -> tuple[Any, ...]:
            return self._run(call, given, world)

        with _without_autocast():
            if any(one.requires_grad for one in tensors) and _may_differentiate():
                results = provider("executor").run_differentiated(
                    self.stages.tasks["place"], self.plan, given, call.sizes, world=world,
                    otherwise=None if self.lowering == "unfused" else run,
                )  # fmt: skip
            else:
                results = run()
        return results if len(results) != 1 else results[0]

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
            return provider("executor").run_plan(
                call.stages, given, call.sizes, world=world, orders=self._orders
            )
        if self.lowering == "unfused":
            return provider("executor").run_calls(self.plan, given, call.sizes, world=world)
        run_in_one: Any = self.lowering
        if self.lowering == "persistent":
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
            self._tiled.append(task.require(cut))
        return self._tiled[0]

    def _call_of(self, tensors: tuple, sizes: dict[str, int], world: Any) -> Call:
        """What calls with tensors like these share on this rank: found once, kept."""
        is_overlapped = self.lowering == "overlapped"
        # Where a tensor lies on the heap is the same on all ranks, or their calls differ by name.
        # Peers read rows there that lie one behind the other.
        on_heap = tuple(
            i for i in self._gathered if i < len(tensors) and tensors[i].is_contiguous()
            and world.offset(tensors[i]) is not None
        ) if is_overlapped else ()  # fmt: skip
        shapes = tuple((one.shape, one.dtype) for one in tensors)
        key = (is_overlapped, shapes, tuple(sizes.items()), on_heap)
        calls = self._calls.setdefault(world, {})
        if key not in calls:
            bound = self._bound(tensors, sizes, world)
            stages = None
            if is_overlapped:
                in_place = frozenset(self._inputs[i] for i in on_heap)
                stages = self.overlapped(_facts(bound, in_place, world))
            if len(calls) >= MOST_CALLS:
                calls.clear()
            calls[key] = Call(bound, stages)
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
        if not _lie_evenly(placed, facts):
            facts = replace(facts, on_heap=frozenset())
        key = facts.key()
        if key not in self._overlapped:
            representative = facts.representative()
            stages = _that_runs(placed, representative, self.settings)
            carried = [one.name for one in stages.program.tasks if is_carried(one)]
            # What is asked for is had, or refused where it cannot be.
            if carried and not {*carried} & {*self.settings.engines}:
                chunks = {n: count for n, count in self.settings.chunks.items() if n not in carried}
                stages = replace(stages, recorded=_that_runs(
                    placed, replace(representative, is_recorded=True),
                    replace(self.settings, chunks=chunks),
                ))  # fmt: skip
            self._overlapped[key] = stages
        return self._overlapped[key]

    def check(self, num_ranks: int, routed: Mapping[str, Any] | None = None, **sizes: int) -> None:
        """Show that every mapping fits at these sizes, of libraries' collectives and of kernels'.

        Of what a router decides, for tables by the name of their task: `routed` are moe_route's.

        Raises  ConfigError: with the tiles
        """
        routed = routed or {}
        channels = list(self.stages.channels)
        if all(sizes.get(name) for name in sizes):
            channels += self.overlapped(Facts(sizes, num_ranks)).plan.of(Channel)
        for channel in channels:
            mapping.check(channel, sizes, num_ranks)
            if channel.table in routed:
                tables = routed[channel.table].tables
                tiles = tables.tiles.t()[: int(tables.num_tiles)].tolist()
                each = full_part(tables.slot_of.shape[0], num_ranks)
                ranks_of = (tables.token_of // max(each, 1)).tolist()
                mapping.check_tables(channel, tiles, ranks_of, num_ranks)

    def texts(self) -> dict[str, str]:
        """The IR after each step, as text."""
        found = {
            name: task.show(program, places=False) for name, program in self.stages.tasks.items()
        }
        found["map"] = device.text.show(self.stages.channels, places=False)
        found["unfused"] = device.show(self.plan, places=False)
        return found


def _may_differentiate() -> bool:
    import torch

    return torch.is_grad_enabled()


def _without_autocast() -> Any:
    """What is declared says the dtypes: nothing is cast, of the ways in which a program runs."""
    import torch

    return torch._C._DisableAutocast()


def _facts(bound: Mapping[str, int], on_heap: frozenset[str], world: Any) -> Facts:
    counts = Counter(world.backend.seats.nodes)
    nodes = tuple(counts[node] for node in sorted(counts)) if len(counts) > 1 else ()
    return Facts(bound, world.num_ranks, world.target, nodes, on_heap)


def _lie_evenly(program: Program, facts: Facts) -> bool:
    """Are all ranks' rows of what is gathered whole tiles, so that none straddles two ranks?"""
    for one in program.tasks:
        if one.kind == "all_gather" and one.type is not None and one.dim == 0:
            if number(one.type.sizes[0], facts.sizes) % (facts.num_ranks * TILE_ROWS):
                return False
    return True


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
    for one in program.of_kernel(launch.kernel):
        if one.kind in ("reduce_scatter", "all_reduce"):
            return one.name
        if one.kind in ("matmul", "gather_rows") and program.task(one.operands[0]).engine:
            return one.operands[0]
    raise AssertionError(f"{launch.kernel} hides no collective")
