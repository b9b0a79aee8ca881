"""Messages on the host: memory for them, and the calls of the two ranks that take part.

    mailbox(1 << 24, world=world)   on all ranks, once: boxes for messages of up to so many bytes
    Send(..)(x), Receive(..)(out)   as often as they come, each on one rank

Symmetric memory is allocated by all ranks together, and a message is the business of two. So the
memory comes first, by a call of its own, and never grows: then a message asks nothing of anybody
else, and no rank has to know what others send. A world of two ranks for each pair would need no
such call; it would cost each a heap, a watchdog and a meeting of the two hosts at the first
message, where ranks that send around in a ring all wait for the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch.autograd.graph import increment_version

from weft.base.card import Op
from weft.base.dtypes import DTYPES
from weft.base.errors import ConfigError, PeerError, ShapeError, UsageError
from weft.base.providers import provider
from weft.base.target import Target
from weft.base.whole_numbers import whole_number
from weft.compiler import dtensors, layouts
from weft.plan import described, exchanges, operations
from weft.plan.call_cache import by_layout, check_out, find_call
from weft.plan.choices import config_of
from weft.plan.exchanges import Config, Launches, Transport
from weft.plan.memory import like
from weft.plan.problems import nodes_of
from weft.plan.vectors import VECTOR_BYTES, as_words, power_of_two, width_of, words_in_vector
from weft.runtime import compilations
from weft.tiles import messages, move

MOST_PIECES = messages.MOST_PIECES.value
HEADER_WORDS = messages.HEADER_WORDS.value
MOST_CAME, MOST_ROOM = messages.MOST_CAME.value, messages.MOST_ROOM.value
LINE_BYTES = move.LINE_BYTES.value
# A program's pieces, an engine's pieces: at most so many, of at least so many blocks.
PIECES, PIECE_BLOCKS = 16, 2
ENGINE_PIECES, ENGINE_BLOCKS = 16, 128
# A rank may have to compile the kernels of messages.
LOAD_TIMEOUT_S = 180.0
# Of a card's mailboxes.
LEAST_BYTES = 1 << 12


# ---------------------------------------------------------------------------------------------
# Memory


class Mailbox:
    """One rank's boxes for messages of up to `max_bytes` over these hops, and all their words.

    Rank r sends to r + hop, so each rank has as many lines to others as from others, and what
    belongs to a line lies at the same place on both ends.
    """

    def __init__(self, world: Any, name: str, max_bytes: int, hops: tuple[int, ...]) -> None:
        self.name, self.max_bytes, self.hops = name, max_bytes, hops
        self.boxes = boxes = whole_number("WEFT_SLOTS", world.settings.slots, 1, UsageError)
        self.box_bytes = _rounded(max(max_bytes, 1), LINE_BYTES)
        # All begins at 16 bytes: kernels are compiled for what does.
        self._strides = strides = {
            "sent": 2, "used": _rounded(boxes, 2), "received": 2, "tickets": 4,
            "heads": _rounded(boxes, 2), "headers": boxes * HEADER_WORDS,
            "arrived": boxes * MOST_PIECES, "taken": 2,
        }  # fmt: skip
        lines = len(hops)
        words = {
            one: (lines * stride, torch.int32 if one == "tickets" else torch.int64)
            for one, stride in strides.items()
        }
        count, dtype = words.pop("headers")
        buffers = {
            "boxes": ((lines * boxes * self.box_bytes,), torch.uint8), "headers": ((count,), dtype),
        }  # fmt: skip
        axes = {
            one: (("line", lines), (place, stride)) for one, place, stride in (
                ("heads", "header", strides["heads"]), ("taken", "word", 2),
            )
        }  # fmt: skip
        axes["arrived"] = (("line", lines), ("box", boxes), ("piece", MOST_PIECES))
        self.slot = world.workspace(f"mailbox {name}".rstrip(), buffers, words, num_slots=1,
                                    axes=axes)  # fmt: skip
        self._turns = [0] * lines
        self._orders: dict[tuple[str, int], Any] = {}
        self._errors: dict[int, torch.Tensor] = {}

    def line(self, at: int) -> messages.Line:
        """The words of the line of hop `at`."""

        def part(name: str) -> torch.Tensor:
            stride = self._strides[name]
            return getattr(self.slot, name)[at * stride : (at + 1) * stride]

        return messages.Line(*map(part, messages.Line._fields))

    def boxes_of(self, at: int) -> torch.Tensor:
        """All boxes of a line, one behind the other."""
        size = self.boxes * self.box_bytes
        return self.slot.boxes[at * size : (at + 1) * size]

    def box(self, at: int, index: int) -> torch.Tensor:
        return self.boxes_of(at)[index * self.box_bytes :][: self.box_bytes]

    def next_box(self, at: int) -> int:
        """Which box is the next message's: in turns, so that one may be taken meanwhile."""
        self._turns[at] = turn = (self._turns[at] + 1) % self.boxes
        return turn

    def order(self, world: Any, what: str, at: int) -> Any:
        """The order of this rank's calls of one kind on one line, on whichever streams; calls of
        other lines, and the other way, are not held up by them."""
        found = self._orders.get((what, at))
        if found is None:
            found = self._orders[what, at] = world.stream_order()
        return found

    def errors(self, world: Any, at: int, src: int) -> torch.Tensor:
        """Where the kernel says that a message of rank `src` has another length than its room."""
        if at not in self._errors:
            self._errors[at] = world.error_word(partial(_explain, src, world.rank))
        return self._errors[at]


def _rounded(count: int, to: int) -> int:
    return (count + to - 1) // to * to


def mailbox(
    max_bytes: int, *, world: Any, name: str = "", hops: Sequence[int] | None = None
) -> None:
    """Memory for messages between ranks: boxes at each, for weft.ops.send and recv. Collective.

        weft.mailbox(x.nbytes, world=world)                    any rank to any other
        weft.mailbox(x.nbytes, world=world, hops=(1, -1))      rank r to r + 1 and r - 1, around

    It is for all messages between these ranks that name it, whatever they are, up to its size, and
    loads their kernels. Again it does nothing; it never grows, for a message may be on its way:
    larger messages take a mailbox of another name. Messages of several mailboxes do not wait for
    each other.

    Units   max_bytes: of one message. A rank's memory: len(hops) * WEFT_SLOTS (2) * max_bytes
    Raises  UsageError: there is a smaller one of this name, or one over other hops;
            OutOfMemoryError; AllocationOrderError: ranks that differ
    """
    number = whole_number("mailbox: max_bytes", max_bytes, 0, UsageError)
    if not hasattr(world, "mailboxes"):
        raise UsageError(f"mailbox: world={world!r}; pass what weft.init() returned")
    n = world.num_ranks
    asked = range(1, n) if hops is None else hops
    wanted = tuple(sorted({whole_number("mailbox: a hop", hop, -n, UsageError) % n
                           for hop in asked}))  # fmt: skip
    if 0 in wanted and n > 1:
        raise UsageError(
            f"mailbox: hops={tuple(asked)} has one that is 0 or {n} ranks far, back to the sender; "
            "a rank sends to others"
        )
    wanted = tuple(hop for hop in wanted if hop)
    found = world.mailboxes.get(name)
    if found is None:
        world.mailboxes[name] = made = Mailbox(world, name, number, wanted)
        with compilations.preparing():
            _load_kernels(world, made)
        # A rank that compiles for longer holds up no message that waits by then.
        world.backend.exchange("mailbox", LOAD_TIMEOUT_S)
    elif found.max_bytes < number or not {*wanted} <= {*found.hops}:
        raise UsageError(
            f"mailbox: there is one called {name!r} for messages of up to {found.max_bytes} bytes "
            f"over hops {found.hops}; {number} bytes over {wanted} need one of another name, or "
            "ask for the most at first"
        )


def _load_kernels(world: Any, made: Mailbox) -> None:
    """Those for messages of whole vectors, while nothing waits: the first launch of a kernel may
    have to wait until no other runs, and then for a message that is sent behind it."""
    rows = made.max_bytes // VECTOR_BYTES
    if not (rows and made.hops):
        return
    hop, n = made.hops[0], world.num_ranks
    x = made.box(0, 0)[: rows * VECTOR_BYTES].view(rows, VECTOR_BYTES)
    kinds = [provider("collectives").card(op).problem for op in ("send", "recv")]
    there = [(world.rank + way * hop) % n for way in (1, -1)]
    for config in candidates(_problem_of(kinds[0], world, x, there[0]), world.target):
        Send(kinds[0], world, x, there[0], made.name, config).load(x)
        Receive(kinds[1], world, x, None, there[1], made.name, config).load(x)


# ---------------------------------------------------------------------------------------------
# How a message is sent


@dataclass(frozen=True)
class Problem(exchanges.Problem):
    """m rows of n elements over all ranks, of which each sends its shard to the rank that is `hop`
    behind. A call's rows are those of one rank of as many each."""

    hop: ClassVar[int]

    dtypes = tuple(DTYPES)
    transports = {
        "sm_push": Transport((messages.push, messages.take), True),
        "ce_push": Transport((messages.begin, messages.take)),
    }

    def in_rows(self, rank: int) -> int:
        first, end = self.shard(rank)
        return end - first

    def out_rows(self, rank: int) -> int:
        return self.in_rows((rank - self.hop) % self.num_ranks)


def candidates(problem: Any, target: Target) -> Iterator[Config]:
    """Configurations to try, the one to take unmeasured first: no library does it."""
    found = exchanges.candidates(problem, target)
    return (one for one in found if not one.by_library)


def piece_bytes_of(num_bytes: int, config: Config, word_bytes: int) -> int:
    """How long pieces are: as many for each program, but for engines large ones."""
    block_bytes = config.block * word_bytes
    if config.transport == "ce_push":
        programs, most, least = 1, ENGINE_PIECES, ENGINE_BLOCKS * block_bytes
    else:
        programs, most, least = config.channels, PIECES, PIECE_BLOCKS * block_bytes
    pieces = programs * min(max(num_bytes // (programs * least), 1), most)
    return _rounded(max(math.ceil(num_bytes / min(pieces, MOST_PIECES)), 1), LINE_BYTES)


class _Way(NamedTuple):
    """Between this rank and `peer`, by hop `at` of a mailbox."""

    mailbox: Mailbox
    at: int
    peer: int


def _way(op: str, world: Any, peer: Any, name: str, is_to: bool) -> _Way:
    """Raises  UsageError, PeerError: no mailbox, no such rank, or one that it does not reach"""
    world.check()
    word, rank, n = "dst" if is_to else "src", world.rank, world.num_ranks
    whole_number(f"{op}: {word}", peer, -1, PeerError)
    if peer not in range(n):
        raise PeerError(f"{op}: {word}={peer} is outside 0 .. {n - 1}, the ranks of {world!r}")
    if peer == rank:
        raise PeerError(
            f"{op}: {word}={peer} is this rank itself; a message is for another one: use x.clone()"
        )
    found = world.mailboxes.get(name)
    if found is None:
        others = f"; it has {', '.join(map(repr, world.mailboxes))}" if world.mailboxes else ""
        raise UsageError(
            f"{op}: {world!r} has no mailbox {name!r}{others}: memory is allocated by all ranks "
            f"together, so let each call weft.mailbox(max_bytes, world=world{_named(name)}) once"
        )
    hop = (peer - rank if is_to else rank - peer) % n
    if hop not in found.hops:
        raise PeerError(
            f"{op}: {word}={peer} of rank {rank} is a hop of {hop} from sender to receiver, and "
            f"mailbox {name!r} is for hops {found.hops}; let all ranks make one that has it: "
            f"weft.mailbox(.., hops=({hop}, ..))"
        )
    return _Way(found, found.hops.index(hop), int(peer))


def _named(name: str) -> str:
    return f", name={name!r}" if name else ""


def _problem_of(kind: Any, world: Any, x: Any, peer: int) -> Any:
    """Raises  DtypeError"""
    nodes = nodes_of(world)
    seats = world.backend.seats.nodes
    is_near = seats[peer] == seats[world.rank]
    m = x.shape[0] * world.num_ranks
    return kind(m, math.prod(x.shape[1:]), world.num_ranks, str(x.dtype), () if is_near else nodes)


def _config_of(op: str, world: Any, problem: Any, config: Config | None) -> Config:
    config = config or config_of(world, problem)
    if config.by_library:
        raise ConfigError(
            f"{op}: transport={config.transport!r}; it must be one of "
            f"{', '.join(problem.transports)}"
        )
    config.check(problem, world.target)
    return config


# ---------------------------------------------------------------------------------------------
# Calls


class _Call:
    """What calls with tensors like these share on one rank."""

    tensors = ""

    def __init__(self, op: str, world: Any, problem: Any, config: Config, way: _Way) -> None:
        self.world, self.problem, self.config, self.way = world, problem, config, way
        self.num_bytes = problem.shard_bytes
        if self.num_bytes > way.mailbox.max_bytes:
            raise ShapeError(
                f"{op}: a message of {self.num_bytes} bytes, and mailbox {way.mailbox.name!r} is "
                f"for up to {way.mailbox.max_bytes}; let all ranks call weft.mailbox("
                f"{self.num_bytes}, world=world, name=..) and name it"
            )
        self.name = f"{op} m={problem.m},n={problem.n} {problem.dtype} {config}"
        self.line = way.mailbox.line(way.at)
        self._begin_call, self._order = world.begin_call, way.mailbox.order(world, op, way.at)

    def begin(self) -> None:
        self._begin_call(self.name)
        self._order.take()

    def launches(self, program: Any, pieces: int, arguments: Callable[..., dict]) -> Launches:
        """Of a kernel whose first arguments are a rank's tensor and boxes."""
        config, world = self.config, self.world
        channels = min(config.channels, max(1, pieces))

        def bound(_: Any, x: torch.Tensor, boxes: torch.Tensor) -> tuple:
            width = width_of(max(self.problem.row_bytes, 1), x, boxes)
            words, in_boxes = as_words(width, x, boxes)
            block = config.block * self.problem.word_bytes // min(width, 8)
            given = {
                **arguments(words, in_boxes), "line": self.line, "peer": self.way.peer,
                "boxes": self.way.mailbox.boxes, "world": world.arg, "block": block,
                "vec": words_in_vector(width),
            }  # fmt: skip
            return tuple(given[name] for name in program.arg_names)

        options = replace(config, channels=channels).options(world.target)
        slot = self.way.mailbox.slot
        return Launches(program, channels, options, lambda: slot, bound, world.calls)

    def _load(self, launches: Launches, x: torch.Tensor, boxes: torch.Tensor) -> None:
        """Compile a kernel and load it; launch nothing."""
        self.world.load(launches.fn, *launches.arguments(None, x, boxes), **launches.options)


class Send(_Call):
    """Calls that send tensors like x."""

    def __init__(
        self, kind: Any, world: Any, x: Any, dst: int, name: str, config: Config | None
    ) -> None:
        op = kind.op
        layouts.check_tensor(op, "x", x, world)
        way = _way(op, world, dst, name, is_to=True)
        problem = _problem_of(kind, world, x, dst)
        super().__init__(op, world, problem, _config_of(op, world, problem, config), way)
        self.piece_bytes = piece_bytes_of(self.num_bytes, self.config, problem.word_bytes)
        self.pieces = math.ceil(self.num_bytes / self.piece_bytes)
        boxes = range(way.mailbox.boxes)
        self._boxes = [way.mailbox.box(way.at, index) for index in boxes]
        self._is_by_engine = self.config.transport == "ce_push"
        if self._is_by_engine:
            self._options = replace(self.config, channels=1, num_warps=1).options(world.target)
            self._there = [world.peer(box, dst) for box in self._boxes]
            self._arrived = world.peer(self.line.arrived, dst)
        else:
            self._pushes = [self._push_to(index) for index in boxes]

    def __call__(self, x: torch.Tensor) -> None:
        """Queue the call."""
        self.begin()
        index = self.way.mailbox.next_box(self.way.at)
        if self._is_by_engine:
            self._queue(index, x)
        else:
            self._pushes[index](x, self._boxes[index])

    def load(self, x: torch.Tensor) -> None:
        if self._is_by_engine:
            self.world.load(messages.begin, *self._begin_arguments(0), **self._options)
        else:
            self._load(self._pushes[0], x, self._boxes[0])

    def _header(self, index: int) -> dict[str, int]:
        return {"box_index": index, "num_bytes": self.num_bytes, "piece_bytes": self.piece_bytes}

    def _push_to(self, index: int) -> Launches:
        def arguments(x: torch.Tensor, box: torch.Tensor) -> dict:
            return {"x": x, "box": box, **self._header(index)}

        return self.launches(messages.push, self.pieces, arguments)

    def _begin_arguments(self, index: int) -> list[Any]:
        given = {
            **self._header(index), "line": self.line, "peer": self.way.peer,
            "boxes": self.way.mailbox.boxes, "world": self.world.arg,
        }  # fmt: skip
        return [given[name] for name in messages.begin.arg_names]

    def _queue(self, index: int, x: torch.Tensor) -> None:
        """The box is free and the header there; then each piece, and behind it the word that says
        so, which is the number that `begin` has left in `sent`.

        It is not recorded by itself, as other calls of copy engines are: to make a recording the
        device may have to come to rest, and what runs may wait for a message to come.
        """
        world, there, number = self.world, self._there[index], self.line.sent[:1]
        messages.begin[(1,)](*self._begin_arguments(index), **self._options)
        rows = x.reshape(-1).view(torch.uint8)
        for piece in range(self.pieces):
            first = piece * self.piece_bytes
            last = min(first + self.piece_bytes, self.num_bytes)
            word = index * MOST_PIECES + piece
            world.copy(there[first:last], rows[first:last])
            world.copy_word(self._arrived[word : word + 1], number)


class Receive(_Call):
    """Calls that receive tensors like one of this shape and dtype."""

    def __init__(
        self, kind: Any, world: Any, wanted: Any, out: Any, src: int, name: str,
        config: Config | None,
    ) -> None:  # fmt: skip
        op = kind.op
        dtensors.refuse(op, "like", wanted)
        if wanted.dim() < 1:
            raise ShapeError(f"{op}: `like` is a scalar; it must have rows: pass like.reshape(1)")
        if out is not None:
            check_out(op, out, wanted.shape, wanted.dtype, world)
        way = _way(op, world, src, name, is_to=False)
        # Nothing is read from another rank, however the message comes.
        problem = _problem_of(kind, world, wanted, world.rank)
        super().__init__(op, world, problem, _config_of(op, world, problem, config), way)
        self._like = like(tuple(wanted.shape), wanted.dtype, world.device)
        errors = way.mailbox.errors(world, way.at, src)
        self._boxes = way.mailbox.boxes_of(way.at)

        def arguments(out: torch.Tensor, in_boxes: torch.Tensor) -> dict:
            return {
                "out": out, "in_boxes": in_boxes, "errors": errors, "room_bytes": self.num_bytes,
                "box_bytes": way.mailbox.box_bytes,
            }  # fmt: skip

        # One for each block: how a message is cut is not known here.
        blocks = math.ceil(self.num_bytes / (self.config.block * problem.word_bytes))
        self._take = self.launches(messages.take, blocks, arguments)

    def load(self, x: torch.Tensor) -> None:
        self._load(self._take, x, self._boxes)

    def __call__(self, out: torch.Tensor | None) -> torch.Tensor:
        """Queue the call; its result."""
        if out is None:
            out = torch.empty_like(self._like)
        else:
            increment_version((out,))
        self.begin()
        self._take(out, self._boxes)
        return out


def send(kind: Any, x: Any, dst: int, world: Any, name: str, config: Config | None) -> None:
    """See weft.ops.send."""
    queue = _send_between_graphs if operations.is_asked(x) else _send
    queue(kind, x, dst, world, name, config)


def _send(kind: Any, x: Any, dst: int, world: Any, name: str, config: Config | None) -> None:
    find_call(world, kind.op, (x,), (dst, name, config), partial(Send, kind), by_layout)(x)


@torch.compiler.disable
def _send_between_graphs(kind: Any, x: Any, *rest: Any) -> None:
    """What torch.compile meets runs between its graphs: another rank waits for it, which no graph
    shows. Raises  UsageError: a gradient"""
    if operations.is_differentiated(x):
        raise UsageError(
            f"{kind.op}: x requires a gradient, and none comes back by itself; pass x.detach(), "
            "and let the receiver send the gradient the other way"
        )
    _send(kind, operations.without_class(x), *rest)


def receive(
    kind: Any, wanted: Any, src: int, world: Any, name: str, config: Config | None, out: Any
) -> torch.Tensor:
    """See weft.ops.recv."""
    queue = _receive_between_graphs if operations.is_asked(wanted) else _receive
    return queue(kind, wanted, src, world, name, config, out)


def _receive(
    kind: Any, wanted: Any, src: int, world: Any, name: str, config: Config | None, out: Any
) -> torch.Tensor:
    tensors, rest = (wanted, out), (src, name, config)
    return find_call(world, kind.op, tensors, rest, partial(Receive, kind), by_layout)(out)


_receive_between_graphs = torch.compiler.disable(_receive)


# ---------------------------------------------------------------------------------------------
# Cards


def around(problem: Any, inputs: Sequence[Mapping[str, Any]]) -> list[torch.Tensor]:
    """What each rank gets where all send to the rank that is `hop` behind."""
    num_ranks = problem.num_ranks
    return [inputs[(rank - problem.hop) % num_ranks]["x"].clone() for rank in range(num_ranks)]


class Neighbours(NamedTuple):
    """The ranks that a rank sends to and receives from, the mailbox, and one like the result."""

    dst: int
    src: int
    mailbox: str
    wanted: torch.Tensor


def neighbours(world: Any, problem: Any, x: torch.Tensor) -> Neighbours:
    """On one rank. Collective: the mailbox is made if need be, one for messages of about a size."""
    rank, num_ranks, hop = world.rank, world.num_ranks, problem.hop
    size = power_of_two(max(problem.shard_bytes, LEAST_BYTES))
    mailbox(size, world=world, name=(name := f"of {size} bytes"), hops=(1, -1))
    wanted = like((problem.out_rows(rank), *x.shape[1:]), x.dtype, x.device)
    return Neighbours((rank + hop) % num_ranks, (rank - hop) % num_ranks, name, wanted)


def card(kind: Any, run: Any, *, summary: str, baselines: Mapping[str, Any]) -> Op:
    """Of what ranks pass around."""
    return exchanges.card(
        kind, around, run, candidates=candidates, summary=summary, baselines=baselines,
        kernels=described.KernelsOf(run, exchanges.make_inputs, candidates),
        smallest={"m": 2, "n": 64},
    )  # fmt: skip


def _explain(src: int, rank: int, word: int) -> ShapeError:
    """The error that the receiver's kernel has said in a word."""
    came, room = word >> 32, word & MOST_ROOM
    more = " or more" if came == MOST_CAME else ""
    return ShapeError(
        f"recv: rank {src} sent {came}{more} bytes, and rank {rank} has asked for {room}; the "
        "message is lost and its result undefined. Pass recv the shape and dtype that were sent, "
        "and receive in the order of sending"
    )
