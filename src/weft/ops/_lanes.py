"""What the operators that move rows by lanes share on the host; see weft.tiles.move for lanes.

Not an operator: the shape of the work, the configuration, the checks of tensors, and a call, which
is found once for its arguments and then launched often.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch._subclasses import FakeTensor

from weft.base import topology
from weft.base.dtypes import DTYPES, FLOATS, parse_dtype
from weft.base.errors import ConfigError, DtypeError, ShapeError
from weft.base.parts import full_part, part_of
from weft.base.target import Target
from weft.compiler import layouts
from weft.language import triton_api
from weft.ops import _by_library, _measured, _misuse, _records
from weft.ops._measured import Row
from weft.plan.launches import REGISTERS_OF_THREAD, THREADS_OF_SM
from weft.runtime.calls import Calls
from weft.tiles import postbox
from weft.tiles.move import Shards

VECTOR_BYTES = 16
PACKET_BYTES = postbox.PACKET_BYTES.value


@dataclass(frozen=True)
class Rows:
    """m rows of n elements, cut as torch.chunk cuts them: ceil(m / num_ranks) to a rank.

    `nodes` counts the ranks of each scale-up domain; () is one domain. `in_place`: x lies in
    symmetric memory, at one offset on all ranks, so that peers may read it there.
    """

    m: int
    n: int
    num_ranks: int
    dtype: str = "bfloat16"
    nodes: tuple[int, ...] = ()
    in_place: bool = field(default=False, kw_only=True)

    op: ClassVar[str]
    dtypes: ClassVar[tuple[str, ...]] = FLOATS

    def __post_init__(self) -> None:
        dtype = parse_dtype(self.dtype).name
        if dtype not in self.dtypes:
            raise DtypeError(f"{self.op}: dtype {dtype}; it takes {', '.join(self.dtypes)}")
        object.__setattr__(self, "dtype", dtype)
        for name in ("m", "n"):
            if getattr(self, name) < 0:
                raise ShapeError(f"{self.op}: {name}={getattr(self, name)} is negative")
        if self.num_ranks < 1:
            raise ShapeError(f"{self.op}: num_ranks={self.num_ranks}; at least one is needed")
        object.__setattr__(self, "nodes", self.nodes or (self.num_ranks,))
        if sum(self.nodes) != self.num_ranks or min(self.nodes) < 1:
            raise ShapeError(
                f"{self.op}: nodes={self.nodes} hold {sum(self.nodes)} ranks, not {self.num_ranks}"
            )

    @property
    def rows(self) -> int:
        """Rows of a full shard."""
        return full_part(self.m, self.num_ranks)

    def shard(self, rank: int) -> tuple[int, int]:
        """The rows first .. end - 1 that `rank` holds."""
        return part_of(self.m, rank, self.num_ranks)

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize

    @property
    def row_bytes(self) -> int:
        return self.n * self.itemsize

    @property
    def shard_bytes(self) -> int:
        return self.rows * self.row_bytes

    @property
    def is_even(self) -> bool:
        """Have all ranks the same number of rows?"""
        return self.m % self.num_ranks == 0

    @property
    def is_empty(self) -> bool:
        return 0 in (self.m, self.n)


@dataclass(frozen=True)
class Lanes:
    """How rows are moved; every field is the same on all ranks.

    Units   lanes: programs of each kernel; block: elements that one moves at a time
    """

    transport: str
    lanes: int = 16
    block: int = 4096
    num_warps: int = 8

    # Which there are, and whether each reaches ranks of other nodes.
    reaches_far: ClassVar[Mapping[str, bool]]

    @property
    def by_library(self) -> bool:
        """By torch.distributed: see weft.ops._by_library. No other field says anything then."""
        return self.transport == _by_library.TRANSPORT

    @property
    def by_packets(self) -> bool:
        """Then `block` counts packets."""
        return self.transport.endswith("packets")

    @property
    def reads_in_place(self) -> bool:
        """Do peers read x where it lies, if that is in symmetric memory?"""
        return self.transport in ("pull", "copy_engine")

    def most_lanes(self, target: Target) -> int:
        """Programs that are resident together, beside one of another kernel: one on each SM, or as
        many as have THREADS_OF_SM together, which then may not use more registers each."""
        of_sm = THREADS_OF_SM // (32 * self.num_warps) if target.backend == "cuda" else 1
        return (target.num_sms - 1) * max(1, of_sm)

    def check(self, problem: Any, target: Target) -> None:
        """Raises  ConfigError: a field that does not fit the problem or the target"""
        op, known = problem.op, self.reaches_far
        if self.by_library:
            self._check_library(problem, target)
            return
        if self.transport not in known:
            raise ConfigError(
                f"{op}: transport={self.transport!r}; it must be one of {', '.join(known)}"
            )
        if len(problem.nodes) > 1 and not known[self.transport]:
            far = ", ".join(name for name, reaches in known.items() if reaches)
            raise ConfigError(
                f"{op}: transport={self.transport!r} reaches into peers' memory, but the world "
                f"has {len(problem.nodes)} nodes; take one of {far}"
            )
        if not 1 <= self.lanes <= self.most_lanes(target):
            raise ConfigError(
                f"{op}: lanes={self.lanes}; programs that wait for peers must all be resident, "
                f"beside one of another kernel: {target} takes 1 to {self.most_lanes(target)} of "
                f"{self.num_warps} warps"
            )
        if self.block < 16 or self.block & (self.block - 1):
            raise ConfigError(f"{op}: block={self.block}; it must be a power of two from 16 on")
        if self.num_warps not in (1, 2, 4, 8, 16):
            raise ConfigError(f"{op}: num_warps={self.num_warps}; it must be 1, 2, 4, 8 or 16")

    def can(self, problem: Any, target: Target) -> bool:
        """Is this transport one that the operator has, for this problem, on this target?"""
        if self.by_library:
            return target.backend == "cuda" and problem.is_even
        is_for_nobody = self.transport == "pull" and problem.num_ranks == 1
        if self.transport not in self.reaches_far or is_for_nobody:
            return False
        return len(problem.nodes) == 1 or self.reaches_far[self.transport]

    def options(self, target: Target) -> dict[str, int]:
        """What kernels are launched with. Lanes that share an SM share its registers."""
        options = {"num_warps": self.num_warps}
        if target.backend == "cuda" and self.lanes >= target.num_sms:
            options["maxnreg"] = REGISTERS_OF_THREAD
        return options

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
    def of(cls, row: Row, itemsize: int, target: Target) -> Lanes:
        """What a measured row says; the emulator has few lanes, of small tiles."""
        if target.backend == "emu":
            return cls(row.transport, lanes=2, block=1024, num_warps=4)
        if row.transport == _by_library.TRANSPORT:
            return cls(row.transport)
        # So many threads on any target: AMD's warps are of 64.
        threads = row.num_warps * 32
        word = PACKET_BYTES if row.transport.endswith("packets") else itemsize
        one = cls(
            row.transport, row.lanes, threads * row.thread_bytes // word,
            threads // target.warp_size,
        )  # fmt: skip
        return replace(one, lanes=min(row.lanes, one.most_lanes(target)))


def candidates(
    config: type[Lanes], problem: Any, target: Target, num_bytes: int, itemsize: int
) -> Iterator[Any]:
    """One configuration for each transport that can be had, the best measured one first."""
    moved_bytes = problem.moved_bytes if problem.in_place else None
    rows = _measured.rows_for(problem.op, num_bytes, moved_bytes, problem.num_ranks)
    if len(problem.nodes) > 1:
        # Each sum, or shard, crosses between two nodes once.
        rows = (Row(_measured.ANY, "relay"), *rows)
    done = set()
    for row in (*rows, *_others(config, rows)):
        one = config.of(row, itemsize, target)
        if one.transport not in done and one.can(problem, target):
            done.add(one.transport)
            yield one


def _others(config: type[Lanes], rows: Sequence[Row]) -> Iterator[Row]:
    """Rows for every transport, as the measured ones of its kind are."""
    boxed = next(row for row in reversed(rows) if row.transport != _by_library.TRANSPORT)
    for name in (*config.reaches_far, _by_library.TRANSPORT):
        if name.endswith("packets"):
            yield Row(_measured.ANY, name, 128, 4, 16)
        else:
            yield Row(_measured.ANY, name, boxed.lanes, 8, 64)


# ---------------------------------------------------------------------------------------------
# Tensors


def nodes_of(world: Any) -> tuple[int, ...]:
    """Ranks on each node of the world."""
    return topology.sizes_of(world.backend.seats.nodes)


def is_on_heap(world: Any, x: torch.Tensor) -> bool:
    """May others read x where it lies? It must then lie there on all ranks, at one offset."""
    if isinstance(x, FakeTensor):
        return False
    return world.offset(x) is not None and len(set(world.backend.seats.nodes)) == 1


def name_of(world: Any, problem: Any, config: Lanes, *tensors: torch.Tensor | None) -> str:
    """What all ranks must call alike: also where tensors lie that peers use in place."""
    places = [None if one is None else world.offset(one) for one in tensors]
    if not config.reads_in_place or places == [None] * len(places):
        return f"{problem.op} m={problem.m},n={problem.n} {problem.dtype} {config}"
    at = ",".join(map(str, places))
    return f"{problem.op} m={problem.m},n={problem.n} {problem.dtype} at {at} {config}"


def described(names: Iterable[str], tensors: Iterable[torch.Tensor | None], world: Any) -> str:
    """What ranks may have unlike of a call's tensors: shown where their calls differ. `world` tells
    where they lie; None where that is no matter of the call's."""
    return ", ".join(f"{name} {_described(one, world)}" for name, one in zip(names, tensors))


def _described(tensor: torch.Tensor | None, world: Any) -> str:
    if tensor is None:
        return "not given"
    lies = "" if tensor.is_contiguous() else f" of strides {tensor.stride()}"
    dtype = str(tensor.dtype).removeprefix("torch.")
    place = "" if world is None else f" {place_at(world.offset(tensor))}"
    return f"{dtype}{tuple(tensor.shape)}{lies}{place}"


def place_at(offset: int | None) -> str:
    """Where on the heap something lies, in words."""
    return "on no heap" if offset is None else f"at {offset} of the heap"


def check_out(op: str, out: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, world: Any):
    """Raises  ShapeError, DtypeError: `out` cannot hold the result"""
    layouts.check_tensor(op, "out", out, world)
    if tuple(out.shape) != tuple(shape):
        raise ShapeError(f"{op}: out has shape {tuple(out.shape)}; the result is {tuple(shape)}")
    if out.dtype != dtype:
        raise DtypeError(f"{op}: out is {out.dtype}, the result {dtype}; nothing is converted")


def out_dtype_of(op: str, out: torch.Tensor | None) -> str:
    """What the result is rounded to: "" where `out` does not say.

    Raises  DtypeError: no product is stored in it
    """
    if out is None:
        return ""
    dtype = str(out.dtype).removeprefix("torch.")
    if dtype not in FLOATS:
        raise DtypeError(f"{op}: out is {out.dtype}; it may be {', '.join(FLOATS)}")
    return dtype


def check_shard(
    op: str, name: str, rows: int, problem: Any, world: Any, out: torch.Tensor | None = None
) -> None:
    """Are `rows`, of tensor `name`, what this rank holds of m? `out` is given where m is its.

    Raises  ShapeError
    """
    first, end = problem.shard(world.rank)
    if rows == end - first:
        return
    passes = f"rank {world.rank} of {world.num_ranks} passes {name} with {rows} rows"
    holds = f"of m={problem.m} it holds {end - first} (rows {first} to {end} of torch.chunk)"
    if out is not None:
        shape = tuple(out.shape)
        raise ShapeError(
            f"{op}: out has shape {shape}, the rows of all ranks, but {passes}; {holds}"
        )
    raise ShapeError(f"{op}: {passes}, but {holds}; pass m= where shards differ")


def width_of(row_bytes: int, *tensors: torch.Tensor) -> int:
    """The largest power of two, up to VECTOR_BYTES, at which all rows and all tensors begin."""
    begins = [row_bytes, VECTOR_BYTES]
    for tensor in tensors:
        begins += (tensor.data_ptr(), tensor.storage_offset() * tensor.element_size())
    return math.gcd(*begins)


WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def word_bytes(problem: Any) -> int:
    """How large words are where tensors begin at 16 bytes."""
    return min(8, width_of(problem.row_bytes))


def as_words(width: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The same bytes as integers, so that any dtype is moved alike and bit by bit."""
    word = WORDS[min(width, 8)]
    # A single element is contiguous whatever its stride is; `view` asks for 1.
    flat = [tensor.as_strided((tensor.numel(),), (1,)) for tensor in tensors]
    return tuple(tensor.view(torch.uint8).view(word) for tensor in flat)


def words_in_vector(width: int) -> int:
    """How many words make 16 bytes, where everything begins at 16 bytes; else 1."""
    return width // min(width, 8)


def elements_in_vector(width: int, itemsize: int) -> int:
    """How many elements make 16 bytes, where everything begins at 16 bytes; else 1."""
    return VECTOR_BYTES // itemsize if width == VECTOR_BYTES else 1


def make_problem(
    kind: Any, num_ranks: int, shape: Mapping[str, int], dtype: str, nodes: tuple[int, ...] = ()
) -> Any:
    return kind(shape["m"], shape["n"], num_ranks, dtype, nodes)


def make_inputs(problem: Any, rank: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """One rank's x of all m rows on the CPU: the same for one seed on every machine."""
    return {"x": random_rows(problem, rank, problem.m, seed)}


def random_rows(problem: Any, rank: int, rows: int, seed: int) -> torch.Tensor:
    """Normal random numbers, or small integers, of the problem's dtype."""
    generator = torch.Generator().manual_seed(seed * problem.num_ranks + rank)
    size = (rows, problem.n)
    if DTYPES[problem.dtype].is_float:
        return torch.randn(size, generator=generator).to(problem.torch_dtype)
    return torch.randint(0, 100, size, generator=generator).to(problem.torch_dtype)


# ---------------------------------------------------------------------------------------------
# Mailboxes


def power_of_two(count: int) -> int:
    """The smallest that is not below `count`."""
    return 1 << max(0, count - 1).bit_length()


def mailbox_of(world: Any, lanes: int, block_bytes: int, boxes_of_step: int) -> Any:
    """The world's mailbox for tiles of so many bytes; one for all operators that move such tiles.

    Collective. Lanes beyond a power of two have another mailbox, with steps of its own.
    """
    lanes, counted = power_of_two(lanes), world.num_ranks
    depth = postbox.DEPTH.value
    size = lanes * depth * boxes_of_step * block_bytes
    return world.workspace(
        f"mailbox.{lanes}x{boxes_of_step}x{block_bytes}", {"boxes": ((size,), torch.uint8)},
        {"arrived": (lanes * counted, torch.int64), "steps": (lanes, torch.int64)}, num_slots=1,
    )  # fmt: skip


def packet_boxes_of(world: Any, lanes: int, block: int) -> Any:
    """As `mailbox_of`, for tiles of `block` packets; words that hold nothing else, ever."""
    lanes = power_of_two(lanes)
    words = lanes * postbox.PACKET_DEPTH.value * world.num_ranks * block
    return world.workspace(
        f"packets.{lanes}x{block}", {},
        {"words": (words, torch.int64), "steps": (lanes, torch.int64)}, num_slots=1,
    )  # fmt: skip


def meeting_of(world: Any, lanes: int, num_bytes: int) -> Any:
    """As `mailbox_of`, for lanes that meet to read each other's memory: so many bytes of it."""
    lanes = power_of_two(lanes)
    kind = "staged" if num_bytes else "meeting"
    return world.workspace(
        f"{kind}.{lanes}", {"boxes": ((max(num_bytes, VECTOR_BYTES),), torch.uint8)},
        {"arrived": (lanes * world.num_ranks, torch.int64), "steps": (lanes, torch.int64)},
        num_slots=1,
    )  # fmt: skip


@dataclass(frozen=True)
class Exchange:
    """What a kernel on the exchange templates is launched with.

    `shards` are (bytes in all, bytes of a shard) of what is cut; lanes move tiles of `part_bytes`.
    All rows begin at multiples of `align_bytes`. `dtype` is that of sums, None where bits are moved
    in words of `word_bytes`. `boxes` counts those that a step fills for each rank; a kernel on the
    fetch templates has `memory` bytes instead. `constants` are its last arguments.
    """

    fn: Any
    part_bytes: int
    align_bytes: int
    word_bytes: int
    shards: tuple[tuple[int, int] | None, ...]
    dtype: torch.dtype | None = None
    boxes: int = 1
    memory: int | None = None
    constants: tuple = ()

    def launches(self, world: Any, config: Lanes) -> Launches:
        """Collective: takes the mailbox."""
        word = PACKET_BYTES if config.by_packets else self.word_bytes
        lanes = min(config.lanes, max(1, math.ceil(self.part_bytes / (config.block * word))))
        make = self._with_packets if config.by_packets else self._with_boxes
        options = replace(config, lanes=lanes).options(world.target)
        mail = make(world, config, lanes)
        return Launches(self.fn, lanes, options, *mail, world.calls)

    def _with_packets(self, world: Any, config: Lanes, lanes: int) -> tuple[Callable, Callable]:
        sources = power_of_two(world.num_ranks)
        shards = [cut and Shards(*cut) for cut in self.shards]

        def arguments(mail: Any, x: torch.Tensor, out: torch.Tensor) -> tuple:
            width = min(PACKET_BYTES, width_of(self.align_bytes, x, out))
            if self.dtype is None:
                x, out = as_words(width, x, out)
            shared = (mail.words, mail.steps, *shards, world.arg)
            return x, out, *shared, config.block, width, sources, *self.constants

        return lambda: packet_boxes_of(world, lanes, config.block), arguments

    def _with_boxes(self, world: Any, config: Lanes, lanes: int) -> tuple[Callable, Callable]:
        block_bytes = config.block * self.word_bytes

        def take() -> Any:
            if self.memory is None:
                return mailbox_of(world, lanes, block_bytes, self.boxes * world.num_ranks)
            return meeting_of(world, lanes, self.memory)

        def arguments(mail: Any, x: torch.Tensor, out: torch.Tensor) -> tuple:
            width = width_of(self.align_bytes, x, out)
            if self.dtype is None:
                word, vec = min(width, 8), words_in_vector(width)
                x, out, boxes = as_words(width, x, out, mail.boxes)
            else:
                word, vec = self.word_bytes, elements_in_vector(width, self.word_bytes)
                boxes = mail.boxes.view(self.dtype)
            shards = [cut and Shards(*(size // word for size in cut)) for cut in self.shards]
            shared = (boxes, mail.arrived, mail.steps, *shards, world.arg)
            return x, out, *shared, block_bytes // word, vec, *self.constants

        return take, arguments


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
        lanes: int,
        options: dict,
        take: Callable[[], Any],
        arguments: Callable[[Any, Any, Any], tuple],
        calls: Calls,
    ) -> None:
        self.fn, self.grid, self.arguments = fn, (lanes, 1, 1), arguments
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
        again = triton_api.relauncher(kernel, self.grid, arguments[2:])
        if again is not None:
            self._again[kind] = again


# ---------------------------------------------------------------------------------------------
# Calls


def by_library(op: str, world: Any) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """What starts the operator by torch.distributed."""
    start = _by_library.BY_NAME[op]
    return lambda x, out: start(world, x, out)


def by_place(world: Any, tensors: Sequence[torch.Tensor | None], rest: tuple) -> tuple:
    """What tells calls apart whose tensors are read by peers where they lie.

    Their type does, since a DTensor has no memory of its own.
    """
    offset = world.offset
    for one in tensors:
        if one is None:
            rest += (None,)
        else:
            rest += (type(one), one.shape, one.dtype, one.stride(), one.get_device(), offset(one))
    return rest


def find_call(
    world: Any,
    op: str,
    tensors: Sequence[torch.Tensor | None],
    rest: tuple,
    make: Callable,
    tell: Callable[[Any, Sequence[torch.Tensor | None], tuple], tuple] = by_place,
) -> Any:
    """What `make(world, *tensors, *rest)` returned when it was last asked for tensors like these;
    its `tensors` describe them by the names of make's parameters, for `world.operator_call`.

    Shapes  rest: what else tells calls apart, the configuration last. tell(world, tensors, rest):
            what does, of both, as one tuple
    Raises  UsageError, ConfigError: the world or the configuration is none
    """
    # Every microsecond here is one of a call's ten.
    try:
        key = (op, tell(world, tensors, rest))
        call = world.calls.get(key)
    except (AttributeError, TypeError):
        _misuse.refuse(op, world, rest[-1])
        raise
    if call is None:
        _misuse.refuse(op, world, rest[-1])
        call = make(world, *tensors, *rest)
        _, *names = inspect.signature(make).parameters
        call.tensors = described(names, tensors, world if tell is by_place else None)
        world.calls[key] = call
    return call


def record(
    op: str, fn: Any, words: Mapping[str, str], problem: Any, config: Lanes, target: Target,
    **constants,
):  # fmt: skip
    """The kernel `fn` as `compile` builds it: `words` are the types of its pointers."""
    tuples = {name: value for name, value in constants.items() if isinstance(value, tuple)}
    types = {**words, **dict.fromkeys(("arrived", "steps", "words"), "*i64"), "lanes": "i32"}
    fixed = {name: value for name, value in constants.items() if name not in tuples}
    return _records.record(
        fn, f"{op}.{fn.__name__.lstrip('_')}", problem.num_ranks, types,
        tuples={"shards": Shards, **{name: type(value) for name, value in tuples.items()}},
        constants={"block": config.block, "sources": power_of_two(problem.num_ranks), **fixed},
        options=config.options(target),
    )  # fmt: skip
