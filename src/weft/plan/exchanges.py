"""Collectives on the host: how data moves, what kernels are launched with, and their mailboxes.

    call = call_cache.find_call(world, op, (x, out), (config,), make)    for tensors like these
    call(x, out)                                                         as often as they come

An operator (weft.ops.all_gather and its like) gives a `Problem` with its transports; everything
else is here, alike for all of them: the choice among transports, the call, the card. A kernel's
arguments are bound by the names of its parameters.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch.autograd.graph import increment_version

from weft.base import fields
from weft.base.card import Op, Trial, trials
from weft.base.errors import ConfigError
from weft.base.target import Target
from weft.compiler import layouts
from weft.language import triton_api
from weft.plan import described, nccl, tuning_table
from weft.plan.call_cache import check_out, is_on_heap
from weft.plan.choices import config_of, given_or_chosen
from weft.plan.launches import REGISTERS_OF_THREAD, THREADS_OF_SM
from weft.plan.memory import like
from weft.plan.problems import Rows, nodes_of, random_rows
from weft.plan.tuning_table import Row
from weft.plan.vectors import (
    PACKET_BYTES,
    VECTOR_BYTES,
    as_words,
    elements_in_vector,
    power_of_two,
    width_of,
    words_in_vector,
)
from weft.runtime.calls import Calls
from weft.tiles import mailboxes
from weft.tiles.move import Shards

# ---------------------------------------------------------------------------------------------
# What is moved, and how


@dataclass(frozen=True)
class Transport:
    """One way to move an operator's data: the programs that are launched, and their constants.

    One program is launched as `Call` does it; `start(call)` returns a function of x and out that
    does something else. `boxes` of a mailbox are filled for each rank in a step.
    """

    programs: tuple[Any, ...] = ()
    reaches_far: bool = False
    constants: Mapping[str, Any] = field(default_factory=dict)
    boxes: int = 1
    start: Callable[[Call], Callable[..., None]] | None = None


@dataclass(frozen=True)
class Problem(Rows):
    """m rows of n elements that ranks exchange: moved as words, or summed in fp32 (`sums`)."""

    transports: ClassVar[Mapping[str, Transport]]
    sums: ClassVar[bool] = False

    def in_rows(self, rank: int) -> int:
        """How many rows `rank` passes."""
        return self.m

    def out_rows(self, rank: int) -> int:
        """How many rows `rank` gets."""
        return self.m

    @property
    def total_bytes(self) -> int:
        return self.m * self.row_bytes

    @property
    def moved_bytes(self) -> int:
        """What one rank sends, or receives, when all shards are full."""
        return (self.m - min(self.rows, self.m)) * self.row_bytes

    @property
    def tuned_bytes(self) -> int:
        """By how many bytes the tuning table has transports."""
        return self.shard_bytes

    @property
    def align_bytes(self) -> int:
        """All shards begin at multiples of this."""
        return self.row_bytes

    @property
    def word_bytes(self) -> int:
        """What is moved at least: an element of sums, else words as large as rows allow."""
        return self.itemsize if self.sums else min(8, width_of(self.row_bytes))

    def part_bytes(self, transport: str) -> int:
        """What the programs of a kernel share between them, of each rank's."""
        return self.shard_bytes

    def staged_bytes(self, shares_out: bool) -> int:
        """Symmetric memory of a kernel that reads peers' memory, beside x and out."""
        return 0 if self.in_place else self.total_bytes

    def extents(self, rank: int, word: int) -> dict[str, Any]:
        """Tuples of integers that kernels take, in words of so many bytes."""
        return {"shards": Shards(self.total_bytes // word, self.shard_bytes // word),
                "incoming": None}  # fmt: skip

    def workspace(self, config: Config) -> tuple[dict[str, Any], dict[str, Any]]:
        """Buffers and signals of a kernel that takes a slot at each call."""
        raise NotImplementedError

    def comes_last(self, transport: str) -> bool:
        """Is the transport worse for this problem than the tuning table knows?"""
        return False


def is_by_packets(transport: str) -> bool:
    return transport in ("ll", "one_shot_ll", "two_shot_ll")


class Resident:
    """Of a configuration: programs that wait for peers must all be resident together, beside one of
    another kernel."""

    channels: int
    num_warps: int

    def most_channels(self, target: Target) -> int:
        """One on each SM, or as many as have THREADS_OF_SM together, which then may not use more
        registers each."""
        of_sm = THREADS_OF_SM // (32 * self.num_warps) if target.backend == "cuda" else 1
        return (target.num_sms - 1) * max(1, of_sm)

    def resident_channels(self, target: Target) -> int:
        """Its channels, or as many of them as are resident; one where there is no room for any."""
        return max(1, min(self.channels, self.most_channels(target)))

    def check_channels(self, op: str, target: Target) -> None:
        """Raises  ConfigError: more channels than are resident, an odd number of warps"""
        fields.check_one_of(op, self, "num_warps", (1, 2, 4, 8, 16))
        most = self.most_channels(target)
        if not 1 <= self.channels <= most:
            room = (
                f"{target} takes 1 to {most} of {self.num_warps} warps"
                if most
                else f"{target} has {target.num_sms} SM: take two, or another operator"
            )
            raise ConfigError(
                f"{op}: channels={self.channels}; programs that wait for peers must all be "
                f"resident, beside one of another kernel: {room}"
            )

    def options(self, target: Target) -> dict[str, int]:
        """What kernels are launched with. Programs that share an SM share its registers."""
        options = {"num_warps": self.num_warps}
        if target.backend == "cuda" and self.channels >= target.num_sms:
            options["maxnreg"] = REGISTERS_OF_THREAD
        return options


@dataclass(frozen=True)
class Config(Resident):
    """How rows are moved; every field is the same on all ranks.

    Units   channels: programs of each kernel; block: elements that one moves at a time
    """

    transport: str
    channels: int = 16
    block: int = 4096
    num_warps: int = 8

    @property
    def by_library(self) -> bool:
        """By torch.distributed: see weft.plan.nccl. No other field says anything then."""
        return self.transport == nccl.TRANSPORT

    @property
    def by_packets(self) -> bool:
        """Then `block` counts packets."""
        return is_by_packets(self.transport)

    @property
    def reads_in_place(self) -> bool:
        """Do peers read x where it lies, if that is in symmetric memory?"""
        return self.transport in ("sm_pull", "ce_pull")

    def check(self, problem: Any, target: Target) -> None:
        """Raises  ConfigError: a field that does not fit the problem or the target"""
        op, known = problem.op, problem.transports
        if self.by_library:
            self._check_library(problem, target)
            return
        if self.transport not in known:
            raise ConfigError(
                f"{op}: transport={self.transport!r}; it must be one of {', '.join(known)}"
            )
        if len(problem.nodes) > 1 and not known[self.transport].reaches_far:
            far = ", ".join(name for name, one in known.items() if one.reaches_far)
            raise ConfigError(
                f"{op}: transport={self.transport!r} reaches into peers' memory, but the world "
                f"has {len(problem.nodes)} nodes; take one of {far}"
            )
        self.check_channels(op, target)
        fields.check_powers_of_two(op, self, "block")

    def can(self, problem: Any, target: Target) -> bool:
        """Is this transport one that the operator has, for this problem, on this target?"""
        if self.by_library:
            return target.backend == "cuda" and problem.is_even
        one = problem.transports.get(self.transport)
        if one is None or (self.transport == "sm_pull" and problem.num_ranks == 1):
            return False
        return len(problem.nodes) == 1 or one.reaches_far

    def _check_library(self, problem: Any, target: Target) -> None:
        op = problem.op
        if target.backend != "cuda":
            raise ConfigError(f"{op}: transport='nccl' needs NVIDIA GPUs; this is {target}")
        if not problem.is_even:
            raise ConfigError(
                f"{op}: transport='nccl' takes shards of one size only; m={problem.m} does not "
                f"divide by {problem.num_ranks} ranks, or there are splits"
            )

    @classmethod
    def of(cls, row: Row, word_bytes: int, target: Target) -> Config:
        """What a row of the tuning table says; the emulator has few programs, of small tiles."""
        if row.transport == nccl.TRANSPORT:
            return cls(row.transport)
        one = cls(row.transport, channels=2, block=1024, num_warps=4)
        if target.backend != "emu":
            # So many threads on any target: AMD's warps are of 64.
            threads = row.num_warps * 32
            word = PACKET_BYTES if is_by_packets(row.transport) else word_bytes
            block, num_warps = threads * row.thread_bytes // word, threads // target.warp_size
            one = cls(row.transport, row.channels, block, num_warps)
        return replace(one, channels=one.resident_channels(target))


def candidates(problem: Any, target: Target) -> Iterator[Config]:
    """A configuration for each transport that can be had, the one to take unmeasured first."""
    moved_bytes = problem.moved_bytes if problem.in_place else None
    ranks = problem.num_ranks
    rows = tuning_table.rows_for(problem.op, problem.tuned_bytes, moved_bytes, num_ranks=ranks)
    if len(problem.nodes) > 1:
        # Each sum, or shard, crosses between two nodes once.
        rows = (Row(tuning_table.ANY, "relay"), *rows)
    found: set[str] = set()
    last: list[Config] = []
    for row in itertools.chain(rows, _others(problem, rows)):
        if row.transport in found:
            continue
        one = Config.of(row, problem.word_bytes, target)
        if one.can(problem, target):
            found.add(one.transport)
            if problem.comes_last(one.transport):
                last.append(one)
            else:
                yield one
    yield from last


def _others(problem: Any, rows: Sequence[Row]) -> Iterator[Row]:
    """Rows for every transport, as the measured ones of its kind are."""
    for name in (*problem.transports, nccl.TRANSPORT):
        if is_by_packets(name):
            yield Row(tuning_table.ANY, name, 128, 4, 16)
        else:
            yield Row(tuning_table.ANY, name, rows[-1].channels, 8, 64)


# ---------------------------------------------------------------------------------------------
# Mailboxes


def mailbox_of(world: Any, channels: int, block_bytes: int, boxes_of_step: int) -> Any:
    """The world's mailbox for tiles of so many bytes; one for all operators that move such tiles.

    Collective. Programs beyond a power of two have another mailbox, with steps of its own.
    """
    size = channels * mailboxes.DEPTH.value * boxes_of_step * block_bytes
    name = f"mailbox.{channels}x{boxes_of_step}x{block_bytes}"
    return _with_steps(world, name, channels, {"boxes": ((size,), torch.uint8)})


def staging_of(world: Any, channels: int, num_bytes: int) -> Any:
    """As `mailbox_of`, for programs that read each other's memory: so many bytes of it."""
    size = max(num_bytes, VECTOR_BYTES)
    name = f"{'staged' if num_bytes else 'meeting'}.{channels}"
    return _with_steps(world, name, channels, {"staged": ((size,), torch.uint8)})


def packet_boxes_of(world: Any, channels: int, block: int) -> Any:
    """As `mailbox_of`, for tiles of `block` packets; words that hold nothing else, ever."""
    words = channels * mailboxes.PACKET_DEPTH.value * world.num_ranks * block
    signals = {"words": (words, torch.int64), "steps": (channels, torch.int64)}
    return world.workspace(f"packets.{channels}x{block}", {}, signals, num_slots=1)


def _with_steps(world: Any, name: str, channels: int, buffers: dict[str, Any]) -> Any:
    arrived = (channels * world.num_ranks, torch.int64)
    signals = {"arrived": arrived, "steps": (channels, torch.int64)}
    return world.workspace(name, buffers, signals, num_slots=1)


# ---------------------------------------------------------------------------------------------
# A call


class Call:
    """What calls with tensors like these share on one rank.

    `tensors` describe them, for `world.operator_call`.
    """

    tensors = ""

    def __init__(
        self, world: Any, problem: Any, config: Config | None, x: Any, out: Any = None
    ) -> None:
        shape = (problem.out_rows(world.rank), *x.shape[1:])
        if out is not None:
            check_out(problem.op, out, shape, x.dtype, world)
        config = given_or_chosen(world, problem, config)
        self.world, self.problem, self.config = world, problem, config
        self._operator_call = world.operator_call
        self._like = like(shape, x.dtype, x.device)
        self.transport = problem.transports.get(config.transport, Transport())
        takes_out = any("shares_out" in one.arg_names for one in self.transport.programs)
        self.shares_out = takes_out and out is not None and is_on_heap(world, out)
        self.name = self._name(x, out)
        self.is_empty = problem.is_empty
        self._start: Any = None

    def _name(self, x: Any, out: Any) -> str:
        """What all ranks must call alike: also where tensors lie that peers use in place."""
        problem, at = self.problem, ""
        if self.config.reads_in_place and (problem.in_place or self.shares_out):
            there = ((x, problem.in_place), (out, self.shares_out))
            at = f" at {','.join(str(self.world.offset(one)) for one, is_in in there if is_in)}"
            at += " and out" if self.shares_out else ""
        return f"{problem.op} m={problem.m},n={problem.n} {problem.dtype}{at} {self.config}"

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Queue the call; its result. Collective."""
        if out is None:
            out = torch.empty_like(self._like)
        else:
            increment_version((out,))
        if self.is_empty:
            return out
        self._operator_call(self.name, self.tensors)
        if self._start is None:  # behind operator_call: it takes memory, which is collective
            # Of a copy: a call that its own launches hold would keep its mailbox when forgotten.
            self._start = copy(self)._prepare()
        self._start(x, out)
        return out

    def _prepare(self) -> Callable[..., None]:
        if self.config.by_library:
            return partial(nccl.BY_NAME[self.problem.op], self.world)
        if self.transport.start is not None:
            return self.transport.start(self)
        (program,) = self.transport.programs
        if "slot" in program.arg_names:
            return partial(self._launch_with_slot, program)
        return self._launches(program)

    def acquire_slot(self) -> Any:
        """A slot for this call; each transport has one of its own shape."""
        key = f"{self.problem.op}.{self.config.transport}"
        buffers, signals = self.problem.workspace(self.config)
        return self.world.workspace(key, signals=signals, shared=buffers)

    def launch(
        self, program: Any, config: Config, slot: Any, x: Any, out: Any, **more: Any
    ) -> None:
        """Launch a program that takes a slot; `more` are arguments that it has beside."""
        buffers, signals = self.problem.workspace(self.config)
        arrays = {name: getattr(slot, name) for name in (*buffers, *signals)}
        given = self.arguments(program, x, out, arrays, slot=slot.arg, **more)
        program[(config.channels,)](*given, **config.options(self.world.target))

    def _launch_with_slot(self, program: Any, x: Any, out: Any) -> None:
        self.launch(program, self.config, self.acquire_slot(), x, out)

    def _launches(self, program: Any) -> Launches:
        """Launches of a program with a mailbox, one program for each tile that there is."""
        world, problem, config = self.world, self.problem, self.config
        channels, block_bytes = _cut(problem, config, program)
        counted = power_of_two(channels)
        if "words" in program.arg_names:
            take = partial(packet_boxes_of, world, counted, config.block)
        elif "staged" in program.arg_names:
            take = partial(staging_of, world, counted, problem.staged_bytes(self.shares_out))
        else:
            boxes = self.transport.boxes * world.num_ranks
            take = partial(mailbox_of, world, counted, block_bytes, boxes)

        def arguments(mail: Any, x: torch.Tensor, out: torch.Tensor) -> tuple:
            names = ("boxes", "staged", "arrived", "steps", "words")
            arrays = {name: getattr(mail, name) for name in names if name in program.arg_names}
            return self.arguments(program, x, out, arrays)

        options = replace(config, channels=channels).options(world.target)
        return Launches(program, channels, options, take, arguments, world.calls)

    def arguments(
        self, program: Any, x: Any, out: Any, arrays: Mapping[str, Any], **more: Any
    ) -> tuple:
        """What `program` is launched with, in the order of its parameters. Arrays of bytes become
        arrays of what is moved."""
        problem, world, block = self.problem, self.world, self.config.block
        width = width_of(problem.align_bytes, x, out)
        if "words" in arrays:
            width = min(PACKET_BYTES, width)
        vec, word = _vector_of(problem, width)
        if problem.sums:
            parts = {name: one.view(problem.torch_dtype) for name, one in _bytes_of(arrays)}
        else:
            parts = {name: as_words(width, one)[0] for name, one in _bytes_of(arrays)}
            x, out = as_words(width, x, out)
        if "words" in arrays:
            word = 1
        elif "slot" not in more:
            # Ranks whose words differ agree on tiles.
            block = block * problem.word_bytes // word
        given = {
            **arrays, **parts, "x": x, "out": out, "world": world.arg, "block": block, "vec": vec,
            "width": width, "sources": power_of_two(world.num_ranks),
            "in_place": problem.in_place, "shares_out": self.shares_out,
            **problem.extents(world.rank, word), **self.transport.constants, **more,
        }  # fmt: skip
        return tuple(given[name] for name in program.arg_names)


def _cut(problem: Any, config: Config, program: Any) -> tuple[int, int]:
    """Programs of a kernel with a mailbox, one for each tile that there is; a tile's bytes."""
    by_packets = "words" in program.arg_names
    block_bytes = config.block * (PACKET_BYTES if by_packets else problem.word_bytes)
    tiles = math.ceil(problem.part_bytes(config.transport) / block_bytes)
    return min(config.channels, max(1, tiles)), block_bytes


def _divides(num_bytes: int) -> int:
    """What of a number of bytes tells apart kernels, which count them in words of up to 8: what
    power of two divides it, up to 16 of these; a few of them are told apart one by one."""
    return num_bytes if num_bytes < 128 else min(num_bytes & -num_bytes, 128)


def needs_of(world: Any, problem: Any) -> tuple[Any, ...]:
    """What calls of this problem need to be there, kernels and memory, where they name no
    configuration: of problems alike but for m that have the same needs, those of the largest m are
    all of them."""
    config = config_of(world, problem)
    needs = config, problem.in_place, *map(_divides, (problem.total_bytes, problem.shard_bytes))
    transport = problem.transports.get(config.transport, Transport())
    if len(transport.programs) != 1 or "slot" in transport.programs[0].arg_names:
        return needs
    channels, _ = _cut(problem, config, transport.programs[0])
    is_on_all = channels >= world.target.num_sms  # kernels with few registers
    return (*needs, power_of_two(channels), is_on_all)


def _bytes_of(arrays: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((name, one) for name, one in arrays.items() if one.dtype == torch.uint8)


def _vector_of(problem: Any, width: int) -> tuple[int, int]:
    """How many words a vector has, and how many bytes a word."""
    if problem.sums:
        return elements_in_vector(width, problem.itemsize), problem.itemsize
    return words_in_vector(width), min(width, 8)


def problem_of(kind: Any, world: Any, x: Any, *fields: Any, **named: Any) -> Any:
    """The problem of calls with this rank's x, whose rows are all m.

    Raises  ShapeError, DtypeError: a tensor that does not fit the world
    """
    layouts.check_tensor(kind.op, "x", x, world)
    named.setdefault("in_place", is_on_heap(world, x))
    m, n = named.pop("m", x.shape[0]), math.prod(x.shape[1:])
    return kind(m, n, world.num_ranks, str(x.dtype), nodes_of(world), *fields, **named)


def make_call(kind: Any, world: Any, x: Any, out: Any, config: Config | None) -> Call:
    """The call of an operator whose problem is told by x alone."""
    return Call(world, problem_of(kind, world, x), config, x, out)


class Launches:
    """Launches of one kernel whose arguments are the same but for the two tensors that come first.

    After the first with addresses of a kind, a launch costs what the driver's call costs. `take`
    gives the mailbox. Ranks may keep calls of their own, so each launch goes by the mailbox that is
    there now: one that was outgrown is looked at by no other rank. What the user records takes it
    too, which then stays as it is.
    """

    def __init__(
        self,
        fn: Any,
        channels: int,
        options: dict,
        take: Callable[[], Any],
        arguments: Callable[[Any, Any, Any], tuple],
        calls: Calls,
    ) -> None:
        self.fn, self.grid, self.arguments = fn, (channels, 1, 1), arguments
        self.options, self.take, self.calls = options, take, calls
        self._mail: Any = None
        self._num_recorded = 0
        self._again: dict[int, Any] = {}

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> None:
        num_recorded = self.calls.num_recorded
        if self._mail is None or self._mail.is_outgrown or num_recorded != self._num_recorded:
            self._num_recorded = num_recorded
            self._mail, before = self.take(), self._mail
            if before is not self._mail:
                self._again.clear()
        x_ptr, out_ptr = x.data_ptr(), out.data_ptr()
        # All that Triton specialises, and all that the width of accesses depends on.
        kind = x_ptr % VECTOR_BYTES * VECTOR_BYTES + out_ptr % VECTOR_BYTES
        again = self._again.get(kind)
        if again is not None:
            again(x_ptr, out_ptr)
            return
        arguments = self.arguments(self._mail, x, out)
        kernel = self.fn[self.grid](*arguments, **self.options)
        if kernel is None:  # described, not launched
            return
        again = triton_api.relauncher(kernel, self.grid, arguments[2:])
        if again is not None:
            self._again[kind] = again


# ---------------------------------------------------------------------------------------------
# The card


def make_inputs(problem: Any, rank: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """One rank's x on the CPU: the same for one seed on every machine."""
    return {"x": random_rows(problem, rank, problem.in_rows(rank), seed)}


def fake(problem: Any, inputs: Mapping[str, Any], rank: int = 0) -> Any:
    """A rank's result: its shape and dtype, without its values."""
    shape = (problem.out_rows(rank), *inputs["x"].shape[1:])
    return torch.empty(shape, dtype=problem.torch_dtype, device="meta")


def card(kind: Any, reference: Any, run: Any, *, on_heap: Sequence[str] = (), **more: Any) -> Op:
    """An exchange's card; `on_heap` are transports that are also tried with x in symmetric memory.
    `more` is what is peculiar to the operator."""
    shape = {"m": 8, "n": 40}
    given: dict[str, Any] = {
        "make_inputs": make_inputs, "fake": fake,
        "kernels": described.KernelsOf(run, more.get("make_inputs", make_inputs), candidates),
        "dtypes": kind.dtypes,
        "default_shape": {"m": 256, "n": 256}, "smallest_config": {"block": 16},
        "trials": (
            *trials(shape), *(Trial((3,), {**shape, "m": 6}, one, on_heap=True) for one in on_heap),
        ),
        "awkward_shapes": (
            (4, {"m": 388, "n": 96}), (3, {"m": 291, "n": 7}), (2, {"m": 2, "n": 64}),
            (1, {"m": 40, "n": 48}), (8, {"m": 9, "n": 5}), (4, {"m": 1, "n": 1}),
            (4, {"m": 0, "n": 16}),
        ),
    }  # fmt: skip
    return Op(
        name=kind.op, problem=kind, config=Config, reference=reference, run=run, takes_nodes=True,
        **{"candidates": candidates, **given, **more},
    )  # fmt: skip
