"""Run a compiled program's plan on one rank.

    results = run_plan(stages, {"x": x, "w1": w1, "w2": w2}, {"m": 997}, world=world)

A plan at given sizes has one runner, which is found at each call. Results are fresh; what lies
between the steps stays with the runner.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial, reduce
from operator import or_
from typing import Any, NoReturn
from weakref import WeakValueDictionary

import torch

from weft.base.errors import CallOrderError, OutOfMemoryError, UnsupportedError, UsageError
from weft.base.fields import copied
from weft.compiler import layouts
from weft.compiler.lower import kernels, unfused
from weft.compiler.lower.row_kernels import is_alone
from weft.ir import device
from weft.ir.device import After, Call, Copy, Launch, Plan, Take, Wait
from weft.ir.tensor import TABLE
from weft.language import triton_api
from weft.plan.call_cache import by_layout
from weft.plan.calls import Here, doing, is_of_calls, run_calls
from weft.plan.command_list import CommandList, address_of, extent_bytes, places_of
from weft.plan.launches import KernelLaunch, Start
from weft.plan.memory import Memory
from weft.plan.mixed_list import MixedList
from weft.plan.plan_facts import PlanFacts, copies_late
from weft.plan.product_launches import Product
from weft.plan.row_launches import OwnRows, SummedRows
from weft.plan.sizes import SizedPlan
from weft.plan.small_launches import GatheredProduct, SmallProduct
from weft.plan.starts import Starts
from weft.plan.streams import Beside, refuse_recording, run_beside
from weft.plan.summed_over_rows import SummedOverRows
from weft.plan.table_launches import GroupedProduct
from weft.plan.transfers import Transfers
from weft.tiles.hooks.table import Tables

# Slots and local memory of which the parts are kept.
MOST_WITHIN = 8
# Is torch asked for deterministic algorithms? Without a function of torch's around it.
is_deterministic: Callable[[], bool] = torch._C._get_deterministic_algorithms


def run_plan(
    stages: Any, tensors: Mapping[str, Any], sizes: Mapping[str, int], *, world: Any
) -> tuple[Any, ...]:
    """One rank's results of a plan that overlaps. Collective.

    Where a stream of it waits for tiles, calls that the user records run `stages.recorded`, of
    which all that it needs is there from the first call on. Where torch is asked for deterministic
    algorithms, all calls run it.

    Sync    stream-ordered on the current stream; can be recorded, if there are such stages where
            they are needed
    Raises  UnsupportedError: a step that no kernel is known for, at the user's line
            UsageError: a plan that cannot be recorded
    """
    if is_of_calls(stages.plan):
        return run_calls(stages.plan, tensors, sizes, world=world)
    key = by_layout(world, tensors.values(), ("program", id(stages), *sizes.items()))
    found = world.calls.get(key)
    if found is None:
        # The stages are kept: their number is then theirs alone.
        found = world.calls[key] = stages, new_runner(world, stages, tensors, sizes)
        found[1].fall_back()
    _, runner = found
    if is_deterministic():
        runner = runner.as_recorded(tensors) or runner
    return runner.run(tensors)


def is_as_recorded(world: Any) -> bool:
    """Is a call that names no configuration done as a recorded one is? Where torch is asked for
    deterministic algorithms all are, so that recorded and eager calls have the same bits."""
    try:
        return world.is_recording() or is_deterministic()
    except AttributeError:  # no world: it is refused where the call is looked for
        return False


def new_runner(
    world: Any, stages: Any, tensors: Mapping[str, Any], sizes: Mapping[str, int]
) -> PlanRunner:
    """What runs the stages' plan for tensors like these, and `stages.recorded` where a call is
    recorded and needs it. Keep it: it is found once."""
    runner = _runner_of(world, stages, tensors, sizes)
    # What it needs is there once it was there for larger sizes.
    is_covered = world.calls.is_covered(("recorded", id(stages.recorded)), sizes)
    if not is_covered and (other := runner.as_recorded(tensors)):
        runner.memory.goes_with(other.memory)
        other.memory.goes_with(runner.memory)
    return runner


def _runner_of(
    world: Any, stages: Any, tensors: Mapping[str, Any], sizes: Mapping[str, int]
) -> PlanRunner:
    """Of sizes that are new, by what one of other rows knows, if there is one: of the same plan,
    and of tensors that lie alike."""
    plan = stages.plan
    of_plan = id(world), id(plan), id(stages.schedules), id(stages.recorded)
    key = (*of_plan, *[sizes[name] for name in PlanFacts.of(plan).sizes_of_columns])
    for one in tensors.values():
        if not isinstance(one, torch.Tensor):  # tables
            return PlanRunner(world, stages, tensors, sizes)
        key += (one.dtype, one.shape[1:], one.stride(), one.is_contiguous())
    like = _runners.get(key)
    found = like.at(tensors, sizes) if like else PlanRunner(world, stages, tensors, sizes)
    _runners[key] = found
    return found


# Of each plan the one that was made last: what its key has the numbers of lives as long.
_runners: WeakValueDictionary[tuple, PlanRunner] = WeakValueDictionary()


class PlanRunner:
    """A plan at given sizes on one rank: found once, run at each call."""

    def __init__(
        self, world: Any, stages: Any, tensors: Mapping[str, Any], sizes: Mapping[str, int]
    ) -> None:
        self.world, self.stages, self.plan = world, stages, (plan := stages.plan)
        self.facts = facts = PlanFacts.of(plan)
        # Inputs that are tables, of which each is several tensors.
        self._tables = [name for name in tensors if facts.buffers[name].dtype == TABLE]
        rows = {name: one for name, one in tensors.items() if name not in self._tables}
        self._copied = layouts.to_copy(plan.name, rows, facts.reads, facts.places)
        self.copy_streams, self.recordings = facts.copy_streams, facts.recordings
        # Is all of it recorded as one?
        self._is_one_recording = bool(self.recordings) and not self.copy_streams
        # Views that kernels read, by rows that lie one behind the other.
        self._packed: set[str] = set()
        self._is_recording = world.is_recording
        self._set_sizes(tensors, sizes, None)
        self._needs_aligned = any(one.needs_aligned for one in self._launches.values())
        if facts.columns:
            packed = {name: one.packed for name, one in self._launches.items()}
            read = {name for one in plan.of(Launch) for name in packed.get(one.kernel, one.reads)}
            self._packed |= facts.columns & (read | facts.copied)

    def at(self, tensors: Mapping[str, Any], sizes: Mapping[str, int]) -> PlanRunner:
        """The same plan at other sizes, for tensors that lie as this one's."""
        found = copied(self)
        found._set_sizes(tensors, sizes, self)
        return found

    def _set_sizes(
        self, tensors: Mapping[str, Any], sizes: Mapping[str, int], like: PlanRunner | None
    ) -> None:
        """All that follows from sizes; what does not is as that of a runner `like` it."""
        world, plan = self.world, self.plan
        self.sized = sized = SizedPlan(world, plan, sizes)
        self._name = ""  # found by the first call of a program; operators have names of their own
        self._launches = self._find_launches(self._laid_out(tensors), like)
        self.memory = Memory(sized, self._launches)
        self.starts = Starts(sized, self.memory, self._launches)
        self.transfers = Transfers(sized, self.memory)
        # The launches that were loaded, and kernels that were launched, by where operands begin: at
        # 16 bytes or not, since kernels differ by that.
        self._loaded: set[tuple[bool, ...]] = set()
        self._launched: dict[tuple, Any] = {}
        # What runs the same calls where the user records them, and whether all that it needs is
        # there.
        self.alongside: PlanRunner | None = None
        self._is_prepared = self._falls_back = False
        self._is_empty = 0 in sized.sizes.values()
        self._here = Here(world, sized.sizes, sized.buffers)  # of library calls
        self._replays = world.replays()
        # What calls queue, once one has been made; not where work is no matter of addresses.
        self._listed: CommandList | None = None
        self._like = like._listed or like._like if like else None
        can_list = world.backend.by_address is not None
        self._can_list = can_list and self.recordings is not None
        # The same of a plan that calls libraries too; and by slot and local memory what calls have
        # in them.
        self._mixed: MixedList | None = None
        if can_list and self.facts.has_calls:
            self._mixed = MixedList(
                world, copies_late(plan.steps), self._packed, plan.results, self._fill,
                self._queue_all,
            )  # fmt: skip
        self._within: dict[tuple[int, int], tuple[Any, dict[str, Any]]] = {}

    def _find_launches(
        self, tensors: Mapping[str, Any], like: PlanRunner | None
    ) -> dict[str, KernelLaunch]:
        """The plan's launches of generated kernels, by the kernel's name."""
        found = {}
        for launch in self.plan.of(Launch):
            if launch.kernel in found:  # of another piece
                continue
            known = like and like._launches.get(launch.kernel)
            one = known.at(self.sized) if known else None
            one = one or _launch_of(self.sized, launch, tensors, self.stages)
            if one is not None:
                found[launch.kernel] = one
        return found

    @cached_property
    def _by_libraries(self) -> Plan:
        """The same, unfused."""
        return unfused.lower(self.stages.tasks["place"])

    def as_recorded(self, tensors: Mapping[str, Any]) -> PlanRunner | None:
        """What runs the same calls where the user records them; None where this does."""
        if self.alongside is None and self.copy_streams and (stages := self.stages.recorded):
            self.alongside = _runner_of(self.world, stages, tensors, self.sized.sizes)
            self.alongside._falls_back = self._falls_back
        return self.alongside

    def fall_back(self) -> None:
        """Where the heap has no room, libraries do it, one step after the other."""
        self._falls_back = True
        if self.alongside is not None:
            self.alongside.fall_back()

    def run(self, tensors: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
        """Queue the call; its results.

        Raises  CallOrderError: ranks that differ; UsageError: a plan that cannot be recorded
        """
        tensors = self._laid_out(tensors)
        if not self._name:  # what all ranks must call alike
            named = ", ".join([f"{one}={n}" for one, n in sorted(self.sized.sizes.items())])
            self._name = f"program {self.plan.name} (plan {self.facts.digest}) with {named}"
        try:
            self.world.operator_call(self._name)
        except CallOrderError as error:
            raise CallOrderError(error.message, place=self.plan.place) from error
        return self.queue(tensors, self.memory.results())

    def queue(
        self, tensors: Mapping[str, torch.Tensor], results: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        """Queue the call, of which all ranks have been told, into `results`, which it returns: or
        what libraries gave instead of them.

        Raises  UsageError: a plan that cannot be recorded; OutOfMemoryError: the heap has no room
                for its slots, and it does not fall back
        """
        # Every microsecond from here to the replay is one of a call's ten.
        is_recording = self._is_recording()
        if self.copy_streams and is_recording:
            alongside = self.as_recorded(tensors) or self._refuse_recording()
            return alongside.queue(alongside._laid_out(tensors), results)
        if self._is_empty:
            return tuple(one.zero_() for one in results)
        places = [*map(address_of, self._read(tensors, results))]
        if self._needs_aligned and reduce(or_, places) % 16:
            return self._queue_copies(tensors, results)
        try:
            slot = self.memory.slots.take(is_recording)
        except OutOfMemoryError:  # before anything is queued, on all ranks
            if not self._falls_back:
                raise
            made = run_calls(self._by_libraries, tensors, self.sized.sizes, world=self.world)
            return tuple(one.copy_(result) for one, result in zip(results, made, strict=True))
        except UsageError as error:
            if not is_recording:
                raise
            raise self._recorded_too_early() from error
        local = self.memory.local()
        own = (slot.number, 0 if local is None else local.data_ptr())
        key = (own, *places)
        if self._is_one_recording and not is_recording and self._replays.replay(key):
            return results
        at_once = False
        if self._can_list and not is_recording and not reduce(or_, places) % 16:
            at_once = self._replays.is_due(key)
            if not at_once and self._run_listed(tensors, results, slot, local, places):
                return results
        # Behind a first call: it has loaded all that a call launches.
        if self._mixed is not None and self._loaded and not is_recording:
            if not reduce(or_, places) % 16:
                return self._run_mixed(self._mixed, tensors, results, slot, local, places)
        return self._queue_launches(key, tensors, results, slot, at_once)

    def _run_mixed(
        self, mixed: MixedList, tensors: Mapping[str, torch.Tensor],
        results: tuple[torch.Tensor, ...], slot: Any, local: torch.Tensor | None,
        places: Sequence[int],
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        """Queue the call by lists of what its steps between libraries' calls queue."""
        there, sizes = places_of(self.world, slot)
        begins, nbytes = (0, 0) if local is None else (local.data_ptr(), local.nbytes)

        def extents() -> list[int]:
            return [0, nbytes, *map(extent_bytes, self._read(tensors, results)), *sizes]

        given = {**tensors, **dict(zip(self.plan.results, results, strict=True))}
        key = (slot.number, begins)
        if self._within.get(key, (None,))[0] is not slot:
            if len(self._within) > MOST_WITHIN:
                self._within.clear()
            bound = self.memory.bind(tensors, results, slot)
            rest = {name: one for name, one in bound.items() if name not in given}
            self._within[key] = slot, rest
        bound = {**self._within[key][1], **given}
        if mixed.is_new:  # all at once, as where nothing is kept
            self._load(tensors, results, bound, slot)
        self._here.kept.clear()
        mixed.queue([0, begins, *places, *there], extents, bound, slot, self._here)
        self._prepare_recorded(tensors)
        return tuple(bound[name] for name in self.plan.results)

    def _run_listed(
        self, tensors: Mapping[str, torch.Tensor], results: tuple[torch.Tensor, ...], slot: Any,
        local: torch.Tensor | None, places: Sequence[int],
    ) -> bool:  # fmt: skip
        """Queue the call by the list of what calls queue; False where there can be none."""
        given = [0, 0 if local is None else local.data_ptr(), *places]
        if self._listed is None:
            # As good for all slots; for one and the same, a list is like those of other sizes.
            slot_of_lists = self.memory.slots.first
            there, sizes = places_of(self.world, slot_of_lists)
            spans = map(extent_bytes, self._read(tensors, results))
            sizes = [0, 0 if local is None else local.nbytes, *spans, *sizes]
            listed = CommandList(self.world, [*given, *there], sizes, there, self._like)
            if not listed.is_clear:  # tensors that overlap, this time
                return False
            bound = self.memory.bind(tensors, results, slot_of_lists)
            self._can_list = self._list(listed, bound, slot_of_lists)
            if not self._can_list:
                return False
            self._listed, self._like = listed, None
        there, _ = places_of(self.world, slot)
        self._listed.run([*given, *there])
        self._prepare_recorded(tensors)
        return True

    def _list(self, listed: CommandList, bound: dict[str, torch.Tensor], slot: Any) -> bool:
        """Add what a call queues, and load it; False where something cannot be kept."""
        facts, is_apart = self.facts, self.world.num_ranks > 1
        if not self._fill(listed, facts.together, bound, slot):
            return False
        if is_apart and not self._fill(listed, facts.apart, bound, slot):
            return False
        for stream in reversed(facts.copy_streams if is_apart else ()):
            listed.wait("main", stream)
        return True

    def _fill(
        self, listed: CommandList, steps: Sequence[device.Step], bound: dict[str, torch.Tensor],
        slot: Any,
    ) -> bool:  # fmt: skip
        for step in steps:
            if isinstance(step, After):
                listed.wait(step.stream, step.other)
            elif isinstance(step, Copy):
                for dst, src, is_word in self.transfers.moves(step, bound, slot):
                    if not listed.move(step.stream, dst, src, is_word):
                        return False
            else:
                assert isinstance(step, Launch | Take)
                for start in self.starts.of(step, bound, slot):
                    if not listed.launch(step.stream, start):
                        return False
        return True

    def _queue_launches(
        self, key: tuple, tensors: Mapping[str, torch.Tensor], results: tuple[torch.Tensor, ...],
        slot: Any, at_once: bool = False,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        """Launch by launch, or what is recorded of them and what streams do beside it; `at_once`:
        it is recorded now."""
        if self.recordings is None:
            self._here.kept.clear()
            bound = self._queue_steps(self.plan.steps, tensors, results, slot)
            self._prepare_recorded(tensors)
            return tuple(bound[name] for name in self.plan.results)
        together, apart = self.recordings
        beside = self._beside(apart, tensors, results, slot, key[0]) if apart else []
        self._replays.run(
            key,
            lambda: self._queue_steps(together, tensors, results, slot),
            lambda: run_beside(
                self.world, self._replays, beside, self.world.current_stream(), at_once=at_once
            ),
            at_once=at_once,
        )
        self._prepare_recorded(tensors)
        return results

    def _recorded_too_early(self) -> UsageError:
        schedules = "".join(f", config={one}" for one in self.stages.schedules.values())
        sizes = ", ".join(f"{name}={size}" for name, size in self.sized.sizes.items())
        return UsageError(
            f"{self.plan.name} of {sizes}{schedules} is recorded before it was called: its memory "
            "cannot be had in a recording; make this call once, with this config and these sizes, "
            "then record it",
            place=self.plan.place,
        )

    def _queue_steps(
        self, steps: Sequence[device.Step], tensors: Mapping[str, torch.Tensor],
        results: tuple[torch.Tensor, ...], slot: Any,
    ) -> dict[str, torch.Tensor]:  # fmt: skip
        """Every buffer, bound where launches are not replayed."""
        bound = self.memory.bind(tensors, results, slot)
        self._load(tensors, results, bound, slot)
        self._queue_all(steps, bound, slot)
        return bound

    def _beside(
        self, apart: Mapping[str, Sequence[device.Step]], tensors: Mapping[str, torch.Tensor],
        results: Sequence[torch.Tensor], slot: Any, own: tuple[int, int],
    ) -> list[Beside]:  # fmt: skip
        """What streams do beside the recording: copies."""
        if self.world.num_ranks == 1:  # an empty recording would be warned of
            return []

        def queue(steps: Sequence[device.Step]) -> None:
            bound = self.memory.bind(tensors, results, slot)
            for step in steps:
                assert isinstance(step, Copy)
                self.transfers.queue(step, bound, slot)

        return [Beside(name, (own, name), partial(queue, steps)) for name, steps in apart.items()]

    def _prepare_recorded(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Get ready what calls need that the user records, behind one that is not: while a call is
        recorded, neither memory is had nor are binaries loaded."""
        if self.alongside is None or self._is_prepared:
            return
        self._is_prepared = True
        # Tensors may lie otherwise on other ranks, for which these sizes are then not new.
        plan = self.alongside.plan
        key = ("prepared", id(plan), *sorted(self.sized.sizes.items()))
        # Remembered for ever, so only where it decides something.
        is_first = bool(plan.of(Call)) and self.world.calls.is_first(key, plan)
        self.alongside.prepare(tensors, is_first=is_first)
        if not plan.of(Call):  # what libraries have is of these sizes alone
            recorded = self.stages.recorded
            self.world.calls.cover(("recorded", id(recorded)), self.sized.sizes, recorded)

    def _refuse_recording(self) -> NoReturn:
        what, remedy = "engine='ce_push' of sums", "leave the engine to the compiler, or "
        if self.stages.schedules:
            (one,) = self.stages.schedules.values()
            what, remedy = f"transport={one.transport!r}", "leave config= away, or "
        raise refuse_recording(
            f"{self.plan.name}: {what}",
            f"{remedy}ask for 'sm_push'",
            next(one.place for one in self.plan.of(Copy) if one.awaits),
        )

    def _queue_copies(
        self, tensors: Mapping[str, torch.Tensor], results: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """The call on copies that begin at 16 bytes: of tiles that ranks signal to each other there
        is no generic variant."""
        copies = {
            name: torch.empty_strided(
                one.shape, one.stride(), dtype=one.dtype, device=one.device
            ).copy_(one)
            for name, one in tensors.items()
        }
        made = self.queue(copies, tuple(torch.empty_like(one) for one in results))
        return tuple(one.copy_(copy) for one, copy in zip(results, made, strict=True))

    def prepare(self, tensors: Mapping[str, Any], is_first: bool) -> None:
        """Have all that a call needs before one is recorded. Collective where it `is_first`."""
        if self.plan.of(Call):
            if is_first:  # what libraries need is had by calling them
                self.run(tensors)
        elif not self._is_empty:
            slot, tensors = self.memory.slots.reserve(), self._laid_out(tensors)
            results = self.memory.results()
            self._load(tensors, results, self.memory.bind(tensors, results, slot), slot)

    def _laid_out(self, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        """The inputs as kernels read them."""
        if not self._copied:
            return tensors
        return {**tensors, **{name: tensors[name].contiguous() for name in self._copied}}

    def _read(
        self, tensors: Mapping[str, Any], results: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """What launches are given: of tables, those that kernels ask."""
        if not self._tables:
            return (*tensors.values(), *results)
        rows = [one for name, one in tensors.items() if name not in self._tables]
        tables = [one for name in self._tables for one in Tables.of(tensors[name])]
        return (*rows, *results, *tables)

    # ---- steps

    def _queue_all(
        self, steps: Sequence[device.Step], bound: dict[str, torch.Tensor], slot: Any
    ) -> None:
        main = self.world.current_stream()

        def stream(name: str) -> Any:
            return main if name == "main" else self.world.stream(name)

        for step in copies_late(steps):
            if isinstance(step, After) and step.other in self.facts.of_sums:
                # weft: equivalent-mutant drop, swap of wait, record: a relay of sums reads the slot
                # alone, which is free when what it sends has come; recordings need the join
                stream(step.stream).wait(stream(step.other))
            elif isinstance(step, After) and step.stream in self.facts.late_sums:
                # weft: equivalent-mutant swap of record: the launch before it is of this call, and
                # writes nothing that a relay of sums reads; it is waited for to leave it its SMs
                stream(step.stream).wait(stream(step.other))
            elif isinstance(step, After):
                stream(step.stream).wait(stream(step.other))
            elif step.stream == "main":
                self._queue_step(step, bound, slot)
            else:
                with stream(step.stream):
                    self._queue_step(step, bound, slot)

    def _load(
        self, tensors: Mapping[str, Any], results: Sequence[torch.Tensor],
        bound: dict[str, torch.Tensor], slot: Any,
    ) -> None:  # fmt: skip
        """What waits for each other is loaded before any of it is launched."""
        read = self._read(tensors, results)
        self._aligned = tuple(one.data_ptr() % 16 == 0 for one in read)
        if self._aligned in self._loaded:
            return
        self._loaded.add(self._aligned)
        for step in self.plan.steps:
            if isinstance(step, Launch | Take):
                for start in self.starts.of(step, bound, slot):
                    self.world.load(start.function, *start.arguments, **start.options)

    def _queue_step(self, step: device.Step, bound: dict[str, torch.Tensor], slot: Any) -> None:
        if isinstance(step, Launch | Take):
            for i, start in enumerate(self.starts.of(step, bound, slot)):
                self._start(start, (id(step), i, self._aligned))
        elif isinstance(step, Copy):
            self.transfers.queue(step, bound, slot)
        elif isinstance(step, Call):
            (result,) = step.writes
            out = bound[result] if result in self.plan.results else None
            made = doing(step)([bound[name] for name in step.reads], self._here, out)
            bound[result] = made.contiguous() if result in self._packed else made
        elif isinstance(step, Wait):
            raise UnsupportedError(
                f"{self.plan.name}: a stream waits for {step.channel}, and kernels alone do",
                place=step.place,
            )

    def _start(self, start: Start, key: tuple) -> None:
        """Launch it; again by the kernel that is kept, which spares a look at every argument."""
        if (kernel := self._launched.get(key)) is not None:
            triton_api.relaunch(kernel, start.grid, *start.arguments)
        else:
            self._launched[key] = start.run()


def _launch_of(
    sized: SizedPlan, launch: Launch, tensors: Mapping[str, Any], stages: Any
) -> KernelLaunch | None:
    """A launch of a generated kernel; None of another one."""
    schedule = stages.schedules.get(launch.fused)
    if launch.template == "small":
        kind = GatheredProduct if launch.body[0].kind == "all_gather" else SmallProduct
        return kind(sized, launch, tensors, schedule)
    if (kernel := kernels.lower(sized.plan).get(launch.kernel)) is None:
        return None
    if launch.template == "rows":
        return (OwnRows if is_alone(launch) else SummedRows)(sized, launch, kernel)
    if any(one.kind == "matmul_tn" for one in launch.body):
        return SummedOverRows(sized, launch, kernel, schedule)
    kind = GroupedProduct if launch.template == "grouped" else Product
    return kind(sized, launch, kernel, tensors, schedule)
