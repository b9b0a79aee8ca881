"""Run a compiled program's plan on one rank.

    results = run_plan(stages, {"x": x, "w1": w1, "w2": w2}, {"m": 997}, world=world)

A plan at given sizes has one runner, which is found at each call. Results are fresh; what lies
between the steps stays with the runner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from weft.base.errors import CallOrderError, UnsupportedError
from weft.compiler import layouts
from weft.compiler.lower import kernels
from weft.ir import device
from weft.ir.device import After, Buffer, Call, Copy, Launch, Notify, Plan, Take, Wait
from weft.ir.schedule import Schedule
from weft.ir.task import PRODUCTS
from weft.plan.calls import Here, run_call
from weft.plan.launches import KernelLaunch
from weft.plan.memory import Memory
from weft.plan.product_launches import Product
from weft.plan.row_launches import SummedRows
from weft.plan.sizes import SizedPlan
from weft.plan.starts import Starts
from weft.plan.streams import Beside, recordings, refuse_recording, run_beside
from weft.plan.table_launches import GroupedProduct
from weft.plan.transfers import Transfers


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
    runner, is_new = _runner(stages, tensors, sizes, world, orders)
    recorded = getattr(stages, "recorded", None) if runner.carriers else None
    if recorded and (is_new or is_as_recorded(world)):
        # Kept as long as the other one is, though it may not be called for long.
        instead = runner.alongside or _runner(recorded, tensors, sizes, world, orders)[0]
        if is_as_recorded(world):
            return instead.run(tensors)
        runner.goes_with(instead)
        # Tensors may lie otherwise on other ranks, for which these sizes are then not new.
        key = ("prepared", id(stages), *sorted(sizes.items()))
        instead.prepare(tensors, is_first=world.calls.is_first(key, stages))
    return runner.run(tensors)


def is_as_recorded(world: Any) -> bool:
    """Is a call that names no configuration done as a recorded one is? Where torch is asked for
    deterministic algorithms all are, so that recorded and eager calls have the same bits."""
    return world.is_recording() or torch.are_deterministic_algorithms_enabled()


def _runner(
    stages: Any, tensors: Mapping[str, Any], sizes: Mapping[str, int], world: Any,
    orders: Mapping[str, Any] | None,
) -> tuple[PlanRunner, bool]:  # fmt: skip
    """What runs the stages' plan for tensors like these, and whether nothing has before."""
    lying = tuple(_layout(one) for one in tensors.values())
    key = ("program", id(stages), tuple(sorted(sizes.items())), lying)
    found = world.calls.get(key)
    if is_new := found is None:
        # The stages are kept: their number is then theirs alone.
        found = stages, PlanRunner(world, stages, tensors, sizes, orders)
        world.calls[key] = found
    return found[1], is_new


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
        self.world, self.plan = world, (plan := stages.plan)
        self.sized = SizedPlan(world, plan, sizes)
        places = {one.name: one.place for one in self.sized.buffers.values()}
        self._copied = layouts.to_copy(plan.name, tensors, _reads(plan), places)
        launches = _launches(self.sized, self._laid_out(tensors), orders, stages.schedules)
        self.memory = Memory(self.sized, launches)
        self.starts = Starts(self.sized, self.memory, launches)
        self.transfers = Transfers(self.sized, self.memory)
        # For which inputs that begin at 16 bytes, and which that do not: kernels differ by that.
        self._loaded: set[tuple[bool, ...]] = set()
        # The streams that wait for tiles; what is recorded as one, and beside it.
        self.carriers = tuple(dict.fromkeys(one.stream for one in plan.of(Copy) if one.awaits))
        self.recordings = recordings(plan.steps, self.carriers)
        # What runs the same calls where the user records them, or where not.
        self.alongside: PlanRunner | None = None
        self._here = Here(world, self.sized.sizes, self.sized.buffers)  # of library calls
        self._replays = world.replays()

    def goes_with(self, other: PlanRunner) -> None:
        """Both run the same calls, one where the user records them."""
        self.alongside, other.alongside = other, self
        self.memory.alongside, other.memory.alongside = other.memory, self.memory

    def run(self, tensors: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
        """Queue the call; its results.

        Raises  CallOrderError: ranks that differ; UsageError: a plan that cannot be recorded
        """
        if self.carriers and self.world.is_recording():
            raise refuse_recording(
                f"{self.plan.name}: engine='copy_engine' of sums",
                "leave the engine to the compiler, or ask for 'push'",
                next(one.place for one in self.plan.of(Copy) if one.awaits),
            )
        tensors = self._laid_out(tensors)
        try:
            self.world.operator_call(self._name(tensors))
        except CallOrderError as error:
            raise CallOrderError(error.message, place=self.plan.place) from error
        slot = self.memory.take_slot()
        bound = self.memory.bind(tensors, slot)
        if 0 in self.sized.sizes.values():
            return tuple(bound[name].zero_() for name in self.plan.results)
        self._load(tensors, bound, slot)
        self._here.kept.clear()
        # Libraries allocate.
        if self.plan.of(Call) or self.recordings is None:
            self._queue_all(self.plan.steps, bound, slot)
            return tuple(bound[name] for name in self.plan.results)
        given = (*tensors, *self.plan.results)
        local = self.memory.local()
        places = (0 if local is None else local.data_ptr(), *(bound[x].data_ptr() for x in given))
        key = (slot.number, *places)
        together, apart = self.recordings
        beside = [
            Beside(
                name,
                (slot.number, name),
                lambda steps=steps: self._queue_beside(steps, bound, slot),
            )  # fmt: skip
            for name, steps in apart.items()
            if self.world.num_ranks > 1  # an empty recording would be warned of
        ]
        self._replays.run(
            key, lambda: self._queue_all(together, bound, slot),
            lambda: run_beside(self.world, self._replays, beside, self.world.current_stream()),
        )  # fmt: skip
        return tuple(bound[name] for name in self.plan.results)

    def prepare(self, tensors: Mapping[str, Any], is_first: bool) -> None:
        """Have all that a call needs before one is recorded. Collective where it `is_first`."""
        if self.plan.of(Call):
            if is_first:  # what libraries need is had by calling them
                self.run(tensors)
        elif 0 not in self.sized.sizes.values():
            slot, tensors = self.memory.take_slot(self.world.reserve), self._laid_out(tensors)
            self._load(tensors, self.memory.bind(tensors, slot), slot)

    def _laid_out(self, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        """The inputs as kernels read them."""
        return {**tensors, **{name: tensors[name].contiguous() for name in self._copied}}

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
        for step in steps:
            if isinstance(step, After):
                stream(step.stream).wait(stream(step.other))
            elif step.stream == "main":
                self._queue(step, bound, slot, met)
            else:
                with stream(step.stream):
                    self._queue(step, bound, slot, met)

    def _queue_beside(
        self, steps: Sequence[device.Step], bound: dict[str, torch.Tensor], slot: Any
    ) -> None:
        """What one stream does, on the current one: that is it, or what records it."""
        for step in steps:
            self._queue(step, bound, slot, {})

    def _load(
        self, tensors: Mapping[str, Any], bound: dict[str, torch.Tensor], slot: Any
    ) -> None:  # fmt: skip
        """What waits for each other is loaded before any of it is launched."""
        aligned = tuple(one.data_ptr() % 16 == 0 for one in tensors.values())
        if aligned in self._loaded:
            return
        self._loaded.add(aligned)
        met: dict[str, str] = {}
        for step in self.plan.steps:
            if isinstance(step, Launch | Notify | Take):
                for start in self.starts.of(step, bound, slot, met):
                    self.world.load(start.function, *start.arguments, **start.options)

    def _queue(
        self, step: device.Step, bound: dict[str, torch.Tensor], slot: Any, met: dict[str, str]
    ) -> None:
        if isinstance(step, Launch | Notify | Take):
            for start in self.starts.of(step, bound, slot, met):
                start.run()
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


def _launches(
    sized: SizedPlan, tensors: Mapping[str, Any], orders: Mapping[str, Any] | None,
    schedules: Mapping[str, Schedule],
) -> dict[str, KernelLaunch]:  # fmt: skip
    """The plan's launches of generated kernels, by the kernel's name."""
    lowered, found = kernels.lower(sized.plan), {}
    for launch in sized.plan.of(Launch):
        if (kernel := lowered.get(launch.kernel)) is None:
            continue
        if launch.template == "rows":
            found[launch.kernel] = SummedRows(sized, launch, kernel)
        elif launch.template == "grouped":
            found[launch.kernel] = GroupedProduct.of(sized, launch, kernel, tensors)
        else:
            found[launch.kernel] = Product(
                sized, launch, kernel, tensors, orders, schedules.get(launch.kernel)
            )
    return found
