"""Run a compiled program's plan on one rank: memory, streams, copies, and the kernels made of it.

    results = run_plan(stages, {"x": x, "w1": w1, "w2": w2}, {"m": 997}, world=world)

Not an operator: what `weft.program` calls where its lowering overlaps. Symmetric buffers and the
words of all channels are one workspace's slot, laid out as the allocate pass says; results are
fresh at each call, what is between stays with the runner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import Any

import torch

from weft.base.errors import CallOrderError, UnsupportedError
from weft.compiler import layouts, libraries
from weft.compiler.lower import kernels
from weft.compiler.passes import allocate
from weft.ir import device
from weft.ir.device import After, Buffer, Call, Channel, Copy, Launch, Notify, Plan, Take, Wait
from weft.ir.task import PRODUCTS
from weft.language import mapping
from weft.language.mapping import StaticMapping
from weft.ops import _lanes, _plan_kernels
from weft.ops._plan_experts import GroupedProduct
from weft.ops._plan_launch import Product
from weft.ops._plan_rows import SummedRows
from weft.ops._plan_sizes import SizedPlan
from weft.ops._product_launch import Start
from weft.ops._product_puts import (
    Beside,
    Carried,
    carry,
    carry_beside,
    recordings,
    refuse_recording,
)

# Elements that a program moves at once, and rows' bytes that a program stages at least.
BLOCK, STAGE_BYTES = 8192, 1 << 18
WARPS = 8

rows_of_rank = mapping.as_python(mapping.rows_of_rank)


def run_plan(
    stages: Any, tensors: Mapping[str, Any], sizes: Mapping[str, int], *, world: Any,
    collectives: Any, orders: Mapping[str, Any] | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """One rank's results of a plan that overlaps; its calls are `collectives`'. Collective.

    Where a stream of it waits for tiles, calls that the user records run `stages.recorded`, of
    which all that it needs is there from the first call on. Where torch is asked for deterministic
    algorithms, all calls run it.

    Sync    stream-ordered on the current stream; can be recorded, if there are such stages where
            they are needed
    Raises  UnsupportedError: a step that no kernel is known for, at the user's line
            UsageError: a plan that cannot be recorded
    """
    runner, is_new = _runner(stages, tensors, sizes, world, orders, collectives)
    recorded = getattr(stages, "recorded", None) if runner.carriers else None
    if recorded and (is_new or _lanes.is_as_recorded(world)):
        # Kept as long as the other one is, though it may not be called for long.
        instead = (
            runner.alongside or _runner(recorded, tensors, sizes, world, orders, collectives)[0]
        )
        if _lanes.is_as_recorded(world):
            return instead.run(tensors)
        runner.alongside, instead.alongside = instead, runner
        # Tensors may lie otherwise on other ranks, for which these sizes are then not new.
        key = ("prepared", id(stages), *sorted(sizes.items()))
        instead.prepare(tensors, is_first=world.calls.is_first(key, stages))
    return runner.run(tensors)


def _runner(
    stages: Any, tensors: Mapping[str, Any], sizes: Mapping[str, int], world: Any,
    orders: Mapping[str, Any] | None, collectives: Any,
) -> tuple[PlanRunner, bool]:  # fmt: skip
    """What runs the stages' plan for tensors like these, and whether nothing has before."""
    lying = tuple(_layout(one) for one in tensors.values())
    key = ("program", id(stages), tuple(sorted(sizes.items())), lying)
    found = world.calls.get(key)
    if is_new := found is None:
        # The stages are kept: their number is then theirs alone.
        found = stages, PlanRunner(world, stages.plan, tensors, sizes, orders, collectives)
        world.calls[key] = found
    return found[1], is_new


def _larger(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Of two requests the larger part of each name."""
    return {
        name: max((x[name] for x in (one, other) if name in x), key=lambda part: part[0])
        for name in {**one, **other}
    }


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


@dataclass(frozen=True)
class Words:
    """Where words lie in one of the slot's arrays: where a call's epochs are set, or one that holds
    zeros between calls, whatever else a slot is used for."""

    first: int
    count: int
    array: str = "words"


class PlanRunner(SizedPlan):
    """A plan at given sizes on one rank: found once, run at each call."""

    def __init__(
        self, world: Any, plan: Plan, tensors: Mapping[str, Any], sizes: Mapping[str, int],
        orders: Mapping[str, Any] | None = None, collectives: Any = None,
    ) -> None:  # fmt: skip
        super().__init__(world, plan, sizes)
        self.collectives = collectives
        places = {one.name: one.place for one in self.buffers.values()}
        self._copied = layouts.to_copy(plan.name, tensors, _reads(plan), places)
        tensors = self._laid_out(tensors)
        # The launches of its products, and on rows that it sums, by name.
        lowered = kernels.lower(plan)
        self.products: dict[str, Product | SummedRows | GroupedProduct] = {}
        for launch in plan.of(Launch):
            if (kernel := lowered.get(launch.kernel)) is None:
                continue
            if launch.template == "rows":
                self.products[launch.kernel] = SummedRows(self, launch, kernel)
            elif launch.template == "grouped":
                self.products[launch.kernel] = GroupedProduct(self, launch, kernel, tensors)
            else:
                self.products[launch.kernel] = Product(self, launch, kernel, tensors, orders)
        self.words: dict[str, Words] = {}
        for channel in self.channels.values():
            if channel.by != "packet":
                self._place_words(channel)
        self._regions = allocate.layout(plan, sizes, world.num_ranks)
        kept = [one for one in self._of_role("local") if one.buffer not in plan.results]
        ends = (max(1, one.offset + one.num_bytes) for one in kept)
        self._local_bytes = max(ends, default=0)
        # For which inputs that begin at 16 bytes, and which that do not: kernels differ by that.
        self._loaded: set[tuple[bool, ...]] = set()
        # The streams that wait for tiles; what is recorded as one, and beside it.
        self.carriers = tuple(dict.fromkeys(one.stream for one in plan.of(Copy) if one.awaits))
        self.recordings = recordings(plan.steps, self.carriers)
        # What runs the same calls where the user records them, or where not.
        self.alongside: PlanRunner | None = None
        self._is_credited = any(getattr(step, "takes", False) for step in plan.steps)
        self._kept: dict[str, Any] = {}  # what library calls leave for each other
        self._replays = world.replays()

    # ---- memory

    def _place_words(self, channel: Channel) -> None:
        """Give the channel its words; beside tokens there are as many others of two kinds."""
        count, named = self._count_words(channel), {channel.name: "words"}
        if channel.to == "engine":
            stored, told = kernels.beside_tokens(channel)
            named = {channel.name: "tokens", stored: "stored", told: "words"}
        for name, array in named.items():
            there = [one for one in self.words.values() if one.array == array]
            # Each begins at 16 bytes: Triton specialises kernels by that.
            first = sum(one.count + one.count % 2 for one in there)
            self.words[name] = Words(first, count, array)

    def _count_words(self, channel: Channel) -> int:
        if isinstance(channel.chunks, int):
            return self.world.num_ranks * channel.chunks * self.chunks_of(channel)
        makers = [one for one in self.products.values() if channel.name in one.launch.announces]
        if not makers:
            raise UnsupportedError(
                f"{self.plan.name}: no kernel is known that announces {channel.name}",
                place=channel.place,
            )
        return makers[0].num_words

    def _slot(self, take: Callable[..., Any] | None = None) -> Any:
        """The next one, which holds what either way of calling needs: so it never grows. `take`
        without a turn: the world's `reserve`."""
        take = take or self.world.workspace
        buffers, signals = self._request()
        if self.alongside:
            others, theirs = self.alongside._request()
            buffers, signals = _larger(buffers, others), _larger(signals, theirs)
        if self._is_credited or not self._packets():
            return take(f"program {self.plan.name}", buffers, signals)
        # Halves of boxes take turns; and whoever waits for credits waits for those of every call.
        name = f"program {self.plan.name} without credits"
        return take(name, buffers, signals, num_slots=1)

    def _request(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Buffers and signals of a slot by name, each in one dimension, with its dtype."""
        ends = [one.offset + one.num_bytes for one in self._of_role("symmetric")]
        buffers: dict[str, Any] = {}
        if ends:
            buffers["memory"] = ((max(ends),), torch.uint8)
        signals = {"words": (1, torch.int64)}
        for one in self.words.values():
            num_words = max(one.first + one.count, signals.get(one.array, (1,))[0])
            signals[one.array] = (num_words, torch.int64)
        for name, product in self.products.items():
            if isinstance(product, Product) and product.is_sm90:
                buffers[f"{name}_sums"] = ((product.num_sums,), torch.float32)
                signals[f"{name}_summed"] = (product.num_sum_words, torch.int64)
        if packets := self._packets():
            signals |= {name: (count, torch.int64) for name, count in packets.values()}
        return buffers, signals

    def _packets(self) -> dict[str, tuple[str, int]]:
        """By the buffer that packets are of, what a slot calls them, and how many there are."""
        rows = [one for one in self.products.values() if isinstance(one, SummedRows)]
        return {name: told for one in rows for name, told in one.packets.items()}

    def _of_role(self, role: str) -> list[allocate.Region]:
        return [one for one in self._regions.values() if one.role == role]

    def _local(self) -> torch.Tensor | None:
        """What lies between the steps of a call, in memory that calls of all sizes share."""
        if not self._local_bytes:
            return None
        return self.world.scratch(f"program {self.plan.name}", self._local_bytes)

    def _bind(self, tensors: Mapping[str, Any], slot: Any) -> dict[str, torch.Tensor]:
        """Every buffer as a tensor."""
        local = self._local()
        found = dict(tensors)
        found |= {name: getattr(slot, one) for name, (one, _) in self._packets().items()}
        for name, buffer in self.buffers.items():
            if name in found or buffer.role == "tables":
                continue
            shape, dtype = self.shape(name), getattr(torch, buffer.dtype)
            if name in self.plan.results:
                found[name] = torch.empty(shape, dtype=dtype, device=self.world.device)
                continue
            region = self._regions[name]
            memory = slot.memory if buffer.role == "symmetric" else local
            assert memory is not None
            part = memory[region.offset : region.offset + region.num_bytes].view(dtype)
            if buffer.role == "symmetric":
                # As large as the fullest: peers find it by one stride.
                found[name] = part.view(self.shape(name, rank=0))
            else:
                found[name] = part[: prod(shape)].view(shape)
        return found

    # ---- steps

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
        slot = self._slot()
        bound = self._bind(tensors, slot)
        if 0 in self.sizes.values():
            return tuple(bound[name].zero_() for name in self.plan.results)
        self._load(tensors, bound, slot)
        self._kept.clear()
        # Libraries allocate.
        if self.plan.of(Call) or self.recordings is None:
            self._queue_all(self.plan.steps, bound, slot)
            return tuple(bound[name] for name in self.plan.results)
        given = (*tensors, *self.plan.results)
        local = self._local()
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
            lambda: carry_beside(self.world, self._replays, beside, self.world.current_stream()),
        )  # fmt: skip
        return tuple(bound[name] for name in self.plan.results)

    def prepare(self, tensors: Mapping[str, Any], is_first: bool) -> None:
        """Have all that a call needs before one is recorded. Collective where it `is_first`."""
        if self.plan.of(Call):
            if is_first:  # what libraries need is had by calling them
                self.run(tensors)
        elif 0 not in self.sizes.values():
            slot, tensors = self._slot(self.world.reserve), self._laid_out(tensors)
            self._load(tensors, self._bind(tensors, slot), slot)

    def _laid_out(self, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        """The inputs as kernels read them."""
        return {**tensors, **{name: tensors[name].contiguous() for name in self._copied}}

    def _name(self, tensors: Mapping[str, Any]) -> str:
        """What all ranks must call alike; what is read in place lies at one offset."""
        told = [f"{name}={size}" for name, size in sorted(self.sizes.items())]
        for name, tensor in tensors.items():
            if self.buffers[name].role == "shared":
                told.append(f"{name} at {self.world.offset(tensor)}")
        return f"program {self.plan.name} with {', '.join(told)}"

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
            if isinstance(step, Launch | Notify | Take) and not self._is_empty(step):
                for start in (self._start(step, bound, slot, met), *self._hearing(step, slot)):
                    self.world.load(start.function, *start.arguments, **start.options)

    def _queue(
        self, step: device.Step, bound: dict[str, torch.Tensor], slot: Any, met: dict[str, str]
    ) -> None:
        if self._is_empty(step):
            return
        if isinstance(step, Launch | Notify | Take):
            for start in (self._start(step, bound, slot, met), *self._hearing(step, slot)):
                start.function[start.grid](*start.arguments, **start.options)
        elif isinstance(step, Copy):
            if step.side == "push":
                self._put(step, bound, slot)
            elif step.side == "owner":
                self._carry(step, bound, slot)
            else:
                self._copy(step, bound, slot, met[step.stream])
        elif isinstance(step, Call):
            self._call(step, bound)
        elif isinstance(step, Wait) and met.get(step.stream) != step.channel:
            raise UnsupportedError(
                f"{self.plan.name}: a stream waits for {step.channel}, which it has not announced",
                place=step.place,
            )

    def _words_of(self, slot: Any, name: str) -> torch.Tensor:
        words = self.words[name]
        return getattr(slot, words.array)[words.first : words.first + words.count]

    def _start(
        self, step: Launch | Notify | Take, bound: Mapping[str, torch.Tensor], slot: Any,
        met: dict[str, str],
    ) -> Start:  # fmt: skip
        if isinstance(step, Notify):
            return self._meeting(step, slot, met)
        if isinstance(step, Take):
            own, num_own = self._own_words(step, slot)
            given = (own, num_own, slot.arg, self.world.arg)
            return Start(_plan_kernels.take, (1, 1, 1), given, {"num_warps": 1})
        if step.kernel in self.products:
            named = [name for name in (*step.awaits, *step.announces) if name in self.words]
            for name in [name for name in named if self.channels[name].to == "engine"]:
                named += kernels.beside_tokens(self.channels[name])
            words = {name: self._words_of(slot, name) for name in named}
            split = [
                self.split(one)
                for one in self.channels.values()
                if one.name in step.awaits or (one.own and one.buffer in step.reads)
            ]
            return self.products[step.kernel].start(bound, words, slot, split[0] if split else ())
        return self._moving(step, bound, slot)

    def _hearing(self, step: Launch | Notify | Take, slot: Any) -> Iterator[Start]:
        """What waits behind a launch for ranks that none of its tiles waits for.

        Whoever has awaited a channel has heard of all ranks: by that rule steps behind it wait no
        more. But a rank without rows is in nobody's tiles, and one without columns has no tile.
        Behind the slot's last use nothing goes by the rule.
        """
        if not isinstance(step, Launch) or step.gives:
            return
        columns = getattr(self.products.get(step.kernel), "n", 1)
        for name in step.awaits:
            # Of sums each tile waits for all, be they of no rows.
            is_for_all = self.channels[name].to == "all"
            if name in self.words and is_for_all and isinstance(self.channels[name].chunks, int):
                split, words = self.split(self.channels[name]), self._words_of(slot, name)
                if not columns or split.rank_rows * (self.world.num_ranks - 1) >= split.rows:
                    given = (words, words.numel(), slot.arg, self.world.arg)
                    yield Start(_plan_kernels.hear_all, (1, 1, 1), given, {"num_warps": 1})

    def _meeting(self, step: Notify, slot: Any, met: dict[str, str]) -> Start:
        """The one program by which streams of all ranks meet."""
        before = met.get(step.stream)
        met[step.stream] = step.channel
        words, one = self._words_of(slot, step.channel), (1, 1, 1)
        own, num_own = self._own_words(step, slot)
        if before is not None:
            given = (self._words_of(slot, before), words, own, num_own, self.world.arg)
            return Start(_plan_kernels.meet_again, one, given, {"num_warps": 1})
        given = (words, own, num_own, slot.arg, step.takes, self.world.arg)
        return Start(_plan_kernels.meet, one, given, {"num_warps": 1})

    def _own_words(self, step: Notify | Take, slot: Any) -> tuple[torch.Tensor, int]:
        """The words of what the stream copies next, and how many a rank has of them."""
        if (copy := self._copied_behind(step)) is None:
            return slot.words, 0
        words = self._words_of(slot, copy.announces)
        return words, words.numel() // self.world.num_ranks

    def _copied_behind(self, step: Notify | Take) -> Copy | None:
        """What the step's stream copies before it meets the others again."""
        steps = [one for one in self.plan.steps if one.stream == step.stream]
        behind = steps[next(i for i, one in enumerate(steps) if one is step) + 1 :]
        for one in behind:
            if isinstance(one, Copy):
                return one
            if isinstance(one, Notify | Take):
                return None
        return None

    def _moving(self, step: Launch, bound: Mapping[str, torch.Tensor], slot: Any) -> Start:
        """Own rows, to the own slot or to every rank's."""
        kind = step.body[0].kind if step.body else ""
        if step.template != "move" or kind not in ("stage", "edges", "all_gather"):
            raise UnsupportedError(
                f"{step.kernel}: no kernel is known for {kind} with template={step.template}; run "
                "the program with lowering='unfused'",
                place=step.place,
            )
        (name,) = step.reads
        (target,) = step.pushes or step.writes
        columns = self.shape(name)[1]
        split = StaticMapping.of(
            self.shape(target)[0], self.world.num_ranks, chunks=1, push_rows=1, tile_rows=1
        )
        given: tuple = (bound[name], bound[target])
        num_bytes = self.shape(name, rank=0)[0] * columns * bound[name].element_size()
        function, programs = _plan_kernels.stage, max(1, ceil(num_bytes / STAGE_BYTES))
        if kind == "all_gather":
            (channel,) = step.announces
            split = self.split(self.channels[channel])
            function, programs = _plan_kernels.push, self.world.num_ranks * split.chunks
            given = (*given, self._words_of(slot, channel))
        given = (*given, slot.arg, split, columns, step.takes, self.world.arg)
        if kind == "edges":
            function, given = _plan_kernels.edges, (*given, self._tile_rows(target))
        if kind == "all_gather":
            given = (*given, step.order == "hierarchical_gather")
        return Start(function, (programs, 1, 1), (*given, BLOCK), {"num_warps": WARPS})

    def _tile_rows(self, gathered: str) -> int:
        """The height of the tiles in which gathered rows are read; where products differ, more than
        there are rows: then each row may lie in a tile with others'."""
        heights = {one.launch.tile[0] for one in self.products.values()
                   if gathered in one.launch.reads}  # fmt: skip
        return heights.pop() if len(heights) == 1 else 1 << 30

    def _is_empty(self, step: device.Step) -> bool:
        """Has a launch nothing to move, since no tile lies across two ranks' rows?"""
        if not isinstance(step, Launch) or [do.kind for do in step.body] != ["edges"]:
            return False
        (target,) = step.writes
        rows, ranks = self.shape(target)[0], self.world.num_ranks
        return rows % (ranks * self._tile_rows(target)) == 0

    def _put(self, step: Copy, bound: Mapping[str, torch.Tensor], slot: Any) -> None:
        """Own rows to rank - 1, - 2, ... by a copy engine; behind each chunk its word, which holds
        e here since the slot was taken."""
        split = self.split(self.channels[step.announces])
        rows, words = bound[step.source], self._words_of(slot, step.announces)
        rank, num_ranks = self.world.rank, self.world.num_ranks
        begin, end = rows_of_rank(rank, split)
        for hop in range(1, num_ranks):
            peer = (rank - hop) % num_ranks
            theirs = self.world.peer(bound[step.target], peer)
            their_words = self.world.peer(words, peer)
            for chunk in range(split.chunks):
                first = min(begin + chunk * split.chunk_rows, end)
                last = min(first + split.chunk_rows, end)
                if last > first:
                    self.world.copy(theirs[first:last], rows[first - begin : last - begin])
                word = slice(rank * split.chunks + chunk, rank * split.chunks + chunk + 1)
                self.world.copy_word(their_words[word], words[word])

    def _carry(self, step: Copy, bound: Mapping[str, torch.Tensor], slot: Any) -> None:
        """Of what tiles leave here each rank's part to that rank, chunk by chunk."""
        if not step.awaits:
            told = f"{self.plan.name}: a copy of {step.source} to owners takes no tokens"
            raise UnsupportedError(told, place=step.place)
        tokens, split = self.channels[step.awaits], self.split(self.channels[step.announces])
        ranks, chunks = self.world.num_ranks, self.chunks_of(tokens)
        kept, partials = bound[step.source], bound[step.target]
        _, rows, columns = partials.shape
        _, told = kernels.beside_tokens(tokens)
        words = (self._words_of(slot, name) for name in (step.announces, told, step.awaits))
        carried = Carried(
            kept.view(ranks * chunks, kept.shape[1], columns // chunks),
            partials.view(ranks, chunks, rows, columns // chunks), *words,
        )  # fmt: skip

        carry(self.world, carried, lambda owner: rows_of_rank(owner, split))

    def _copy(self, step: Copy, bound: Mapping[str, torch.Tensor], slot: Any, met: str) -> None:
        """Rows of rank + 1, + 2, ... by a copy engine; behind each chunk its word.

        The word is the source's own announcement, which holds e until this rank's credit lets the
        source go on.
        """
        split = self.split(self.channels[step.announces])
        rows, words = bound[step.source], self._words_of(slot, step.announces)
        is_part = self.buffers[step.source].role == "shared"
        for hop in range(1, self.world.num_ranks):
            peer = (self.world.rank + hop) % self.world.num_ranks
            theirs = self.world.peer(rows, peer)
            announced = self.world.peer(self._words_of(slot, met), peer)[peer : peer + 1]
            begin, end = rows_of_rank(peer, split)
            for chunk in range(split.chunks):
                first = min(begin + chunk * split.chunk_rows, end)
                last = min(first + split.chunk_rows, end)
                if last > first:
                    there = slice(first - begin, last - begin) if is_part else slice(first, last)
                    self.world.copy(bound[step.target][first:last], theirs[there])
                word = peer * split.chunks + chunk
                self.world.copy_word(words[word : word + 1], announced)

    def _call(self, step: Call, bound: dict[str, torch.Tensor]) -> None:
        """One library's call."""
        alone = replace(self.plan, statements=(*self.buffers.values(), step), results=step.writes)
        given = {name: bound[name] for name in step.reads}
        results = libraries.run(
            alone, given, self.sizes, world=self.world, collectives=self.collectives,
            kept=self._kept,
        )  # fmt: skip
        bound.update(zip(step.writes, results))
