"""Run a compiled program's plan on one rank.

    results = run_plan(stages, {"x": x, "w1": w1, "w2": w2}, {"m": 997}, world=world)

A plan at given sizes has one runner, which is found at each call. Results are fresh; what lies
between the steps stays with the runner.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from operator import methodcaller
from typing import Any

import torch

from weft.base.errors import CallOrderError, UnsupportedError
from weft.compiler import layouts
from weft.compiler.lower import kernels
from weft.ir import device
from weft.ir.device import After, Buffer, Call, Copy, Launch, Notify, Plan, Take, Wait
from weft.ir.schedule import Schedule
from weft.ir.task import PRODUCTS
from weft.ir.tensor import TABLE
from weft.language import triton_api
from weft.plan.calls import Here, run_call
from weft.plan.launches import KernelLaunch, Start
from weft.plan.memory import Memory
from weft.plan.product_launches import Product
from weft.plan.row_launches import SummedRows
from weft.plan.sizes import SizedPlan
from weft.plan.small_launches import GatheredProduct, SmallProduct
from weft.plan.starts import Starts
from weft.plan.streams import Beside, recordings, refuse_recording, run_beside
from weft.plan.table_launches import GroupedProduct
from weft.plan.transfers import Transfers
from weft.tiles.hooks.table import Tables

_ADDRESS_OF = methodcaller("data_ptr")


def run_plan(
    stages: Any, tensors: Mapping[str, Any], sizes: Mapping[str, int], *, world: Any,
    orders: Mapping[str, Any] | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """One rank's results of a plan that overlaps. Collective.

    Where a stream of it waits for tiles, calls that the user records run `stages.recorded`, of
    which all that it needs is there from the first call on. Where torch is asked for deterministic
    algorithms, all calls run it.

    Sync    stream-ordered on the current stream; can be recorded, if there are such stages where
            they are needed
    Raises  UnsupportedError: a step that no kernel is known for, at the user's line
            UsageError: a plan that cannot be recorded
    """
    lying = tuple(_layout(one) for one in tensors.values())
    key = ("program", id(stages), tuple(sorted(sizes.items())), lying)
    found = world.calls.get(key)
    if found is None:
        # The stages are kept: their number is then theirs alone.
        found = world.calls[key] = stages, new_runner(world, stages, tensors, sizes, orders)
    _, runner = found
    if runner.alongside and torch.are_deterministic_algorithms_enabled():
        runner = runner.alongside
    return runner.run(tensors)


def is_as_recorded(world: Any) -> bool:
    """Is a call that names no configuration done as a recorded one is? Where torch is asked for
    deterministic algorithms all are, so that recorded and eager calls have the same bits."""
    return world.is_recording() or torch.are_deterministic_algorithms_enabled()


def new_runner(
    world: Any, stages: Any, tensors: Mapping[str, Any], sizes: Mapping[str, int],
    orders: Mapping[str, Any] | None = None,
) -> PlanRunner:  # fmt: skip
    """What runs the stages' plan for tensors like these, and `stages.recorded` where a call is
    recorded and needs it. Keep it: it is found once."""
    runner = PlanRunner(world, stages, tensors, sizes, orders)
    if runner.carriers and stages.recorded:
        runner.goes_with(PlanRunner(world, stages.recorded, tensors, sizes, orders))
    return runner


def _layout(tensor: torch.Tensor) -> tuple:
    return tensor.shape, tensor.stride(), tensor.dtype


def _reads(plan: Plan) -> layouts.Reads:
    """How a plan's launches and copies read its inputs."""
    tasks = [do for launch in plan.of(Launch) for do in launch.body]
    right = {do.operands[1] for do in tasks if do.kind in PRODUCTS}
    rows = {name for do in tasks for i, name in enumerate(do.operands)
            if i != 1 or do.kind not in PRODUCTS}  # fmt: skip
    rows |= {one.source for one in plan.of(Copy)}
    shared = {one.name for one in plan.of(Buffer) if one.role == "shared"}
    return layouts.Reads(rows, right - rows, shared, padded=True)


class PlanRunner:
    """A plan at given sizes on one rank: found once, run at each call."""

    def __init__(
        self, world: Any, stages: Any, tensors: Mapping[str, Any], sizes: Mapping[str, int],
        orders: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.world, self.plan, self._schedules = world, (plan := stages.plan), stages.schedules
        self.sized = SizedPlan(world, plan, sizes)
        places = {one.name: one.place for one in self.sized.buffers.values()}
        # Inputs that are tables, of which each is several tensors.
        self._tables = [name for name in tensors if self.sized.buffers[name].dtype == TABLE]
        rows = {name: one for name, one in tensors.items() if name not in self._tables}
        self._copied = layouts.to_copy(plan.name, rows, _reads(plan), places)
        launches = _launches(self.sized, self._laid_out(tensors), orders, stages.schedules)
        self.memory = Memory(self.sized, launches)
        self.starts = Starts(self.sized, self.memory, launches)
        self.transfers = Transfers(self.sized, self.memory)
        # The launches that were loaded, and kernels that were launched, by where operands begin: at
        # 16 bytes or not, since kernels differ by that.
        self._loaded: set[tuple[bool, ...]] = set()
        self._launched: dict[tuple, Any] = {}
        self._needs_aligned = any(one.needs_aligned for one in launches.values())
        # The streams that wait for tiles; what is recorded as one, and beside it.
        self.carriers = tuple(dict.fromkeys(one.stream for one in plan.of(Copy) if one.awaits))
        self.recordings = None if plan.of(Call) else recordings(plan.steps, self.carriers)
        # By stream: whose steps of those beside the recording it takes, in which turn of how many.
        beside = self.recordings[1] if self.recordings else {}
        counts = {name: self.transfers.turns(steps) for name, steps in beside.items()}
        self._turns = [(f"{name} {i}" if i else name, name, i, count)
                       for name, count in counts.items() for i in range(count)]  # fmt: skip
        # What runs the same calls where the user records them, and whether all that it needs is
        # there.
        self.alongside: PlanRunner | None = None
        self._is_prepared = False
        self._is_empty = 0 in self.sized.sizes.values()
        self._here = Here(world, self.sized.sizes, self.sized.buffers)  # of library calls
        self._replays = world.replays()

    def goes_with(self, recorded: PlanRunner) -> None:
        """Both run the same calls, `recorded` where the user records them."""
        self.alongside = recorded
        self.memory.goes_with(recorded.memory)
        recorded.memory.goes_with(self.memory)

    def run(self, tensors: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
        """Queue the call; its results.

        Raises  CallOrderError: ranks that differ; UsageError: a plan that cannot be recorded
        """
        tensors = self._laid_out(tensors)
        self._refuse_recording()
        try:
            self.world.operator_call(self._name(tensors))
        except CallOrderError as error:
            raise CallOrderError(error.message, place=self.plan.place) from error
        return self.queue(tensors, tuple(self.memory.results()))

    def queue(
        self, tensors: Mapping[str, torch.Tensor], results: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        """Queue the call, of which all ranks have been told, into `results`, which it returns: or
        what libraries gave instead of them.

        Raises  UsageError: a plan that cannot be recorded
        """
        if self.carriers and (alongside := self._as_recorded(tensors)) is not None:
            return alongside.queue(alongside._laid_out(tensors), results)
        if self._is_empty:
            return tuple(one.zero_() for one in results)
        # Every microsecond from here to the replay is one of a call's ten.
        places = [*map(_ADDRESS_OF, self._read(tensors, results))]
        if self._needs_aligned and any(place % 16 for place in places):
            return self._queue_copies(tensors, results)
        slot = self.memory.take_slot()
        local = self.memory.local()
        own = (slot.number, 0 if local is None else local.data_ptr())
        key = (own, *places)
        if self.recordings is None:
            self._here.kept.clear()
            bound = self._queue_steps(self.plan.steps, tensors, results, slot)
            return tuple(bound[name] for name in self.plan.results)
        together, apart = self.recordings
        if not apart:
            self._replays.run(key, lambda: self._queue_steps(together, tensors, results, slot))
            return results
        beside = self._beside(apart, tensors, results, slot, own)
        self._replays.run(
            key, lambda: self._queue_steps(together, tensors, results, slot),
            lambda: run_beside(self.world, self._replays, beside, self.world.current_stream()),
        )  # fmt: skip
        return results

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
        """What streams do beside the recording: each carrier's copies, in turns of its engines."""
        if self.world.num_ranks == 1:  # an empty recording would be warned of
            return []

        def queue(steps: Sequence[device.Step], turn: int, turns: int) -> None:
            bound = self.memory.bind(tensors, results, slot)
            for step in steps:
                assert isinstance(step, Copy)
                self.transfers.queue(step, bound, slot, None, turn, turns)

        return [
            Beside(stream, (own, stream), partial(queue, apart[name], turn, turns))
            for stream, name, turn, turns in self._turns
        ]

    def _as_recorded(self, tensors: Mapping[str, torch.Tensor]) -> PlanRunner | None:
        """What runs a call that the user records; of others it gets ready what that will need."""
        self._refuse_recording()
        if self.world.is_recording():
            return self.alongside
        if self.alongside and not self._is_prepared:
            self._is_prepared = True
            # While a call is recorded, neither memory is had nor are binaries loaded. Tensors may
            # lie otherwise on other ranks, for which these sizes are then not new.
            plan = self.alongside.plan
            key = ("prepared", id(plan), *sorted(self.sized.sizes.items()))
            self.alongside.prepare(tensors, is_first=self.world.calls.is_first(key, plan))
        return None

    def _refuse_recording(self) -> None:
        """Raises  UsageError: a call that the user records, of a plan that cannot be"""
        if self.carriers and self.alongside is None and self.world.is_recording():
            told, remedy = "engine='ce_push' of sums", "leave the engine to the compiler, or "
            if self._schedules:
                (one,) = self._schedules.values()
                told, remedy = f"transport={one.transport!r}", "leave config= away, or "
            raise refuse_recording(
                f"{self.plan.name}: {told}",
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
            slot, tensors = self.memory.take_slot(self.world.reserve), self._laid_out(tensors)
            results = self.memory.results()
            self._load(tensors, results, self.memory.bind(tensors, results, slot), slot)

    def _laid_out(self, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        """The inputs as kernels read them."""
        return {**tensors, **{name: tensors[name].contiguous() for name in self._copied}}

    def _read(
        self, tensors: Mapping[str, Any], results: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """What launches are given: of tables, those that kernels ask."""
        given = (*tensors.values(), *results)
        if self._tables:
            rows = [one for name, one in tensors.items() if name not in self._tables]
            given = (*rows, *results, *[
                one for name in self._tables for one in Tables.of(tensors[name])
            ])  # fmt: skip
        return given

    def _name(self, tensors: Mapping[str, Any]) -> str:
        """What all ranks must call alike; what is read in place lies at one offset."""
        told = [f"{name}={size}" for name, size in sorted(self.sized.sizes.items())]
        for name, tensor in tensors.items():
            if self.sized.buffers[name].role == "shared":
                told.append(f"{name} at {self.world.offset(tensor)}")
        return f"program {self.plan.name} with {', '.join(told)}"

    # ---- steps

    def _queue_all(
        self, steps: Sequence[device.Step], bound: dict[str, torch.Tensor], slot: Any
    ) -> None:
        main = self.world.current_stream()

        def stream(name: str) -> Any:
            return main if name == "main" else self.world.stream(name)

        met: dict[str, str] = {}  # by stream, the channel on which it met the others last
        for step in _copies_late(steps):
            if isinstance(step, After):
                stream(step.stream).wait(stream(step.other))
            elif step.stream == "main":
                self._queue(step, bound, slot, met)
            else:
                with stream(step.stream):
                    self._queue(step, bound, slot, met)

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
        met: dict[str, str] = {}
        for step in self.plan.steps:
            if isinstance(step, Launch | Notify | Take):
                for start in self.starts.of(step, bound, slot, met):
                    self.world.load(start.function, *start.arguments, **start.options)

    def _queue(
        self, step: device.Step, bound: dict[str, torch.Tensor], slot: Any, met: dict[str, str]
    ) -> None:
        if isinstance(step, Launch | Notify | Take):
            for i, start in enumerate(self.starts.of(step, bound, slot, met)):
                self._start(start, (id(step), i, self._aligned))
        elif isinstance(step, Copy):
            self.transfers.queue(step, bound, slot, met.get(step.stream))
        elif isinstance(step, Call):
            (result,) = step.writes
            bound[result] = run_call(step, [bound[name] for name in step.reads], self._here)
        elif isinstance(step, Wait) and met.get(step.stream) != step.channel:
            raise UnsupportedError(
                f"{self.plan.name}: a stream waits for {step.channel}, which it has not announced",
                place=step.place,
            )

    def _start(self, start: Start, key: tuple) -> None:
        """Launch it; again by the kernel that is kept, which spares a look at every argument."""
        if (kernel := self._launched.get(key)) is not None:
            triton_api.relaunch(kernel, start.grid, *start.arguments)
        else:
            self._launched[key] = start.run()


def _copies_late(steps: Sequence[device.Step]) -> Iterator[device.Step]:
    """Copies behind what other streams launch before they wait for them: queueing copies takes the
    host a while, in which own tiles are multiplied."""
    late: list[device.Step] = []
    for step in steps:
        streams = (step.stream, step.other) if isinstance(step, After) else (step.stream,)
        if any(one.stream in streams for one in late):
            yield from late
            late = []
        if isinstance(step, Copy):
            late.append(step)
        else:
            yield step
    yield from late


def _launches(
    sized: SizedPlan, tensors: Mapping[str, Any], orders: Mapping[str, Any] | None,
    schedules: Mapping[str, Schedule],
) -> dict[str, KernelLaunch]:  # fmt: skip
    """The plan's launches of generated kernels, by the kernel's name."""
    lowered, found = kernels.lower(sized.plan), {}
    for launch in sized.plan.of(Launch):
        if launch.template == "small":
            kind = GatheredProduct if launch.body[0].kind == "all_gather" else SmallProduct
            found[launch.kernel] = kind(sized, launch, tensors, schedules.get(launch.kernel))
        if (kernel := lowered.get(launch.kernel)) is None:
            continue
        if launch.template == "rows":
            found[launch.kernel] = SummedRows(sized, launch, kernel)
        elif launch.template == "grouped":
            found[launch.kernel] = GroupedProduct(
                sized, launch, kernel, tensors, schedules.get(launch.kernel)
            )
        else:
            found[launch.kernel] = Product(
                sized, launch, kernel, tensors, orders, schedules.get(launch.kernel)
            )
    return found
