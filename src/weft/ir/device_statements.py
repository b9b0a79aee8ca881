"""What a plan of Device IR is made of: a frozen record for each statement, and the words in them.

What they mean together is said in `device.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.base.place import UNKNOWN, Place
from weft.ir.choice import Choice
from weft.ir.tensor import Size

# The caller's, on this rank alone; the caller's, on the heap; fresh; fresh, on the heap; tables,
# which whoever makes them brings along; boxes on the heap that hold packets alone, ever, in two
# halves that calls use in turns.
ROLES = ("input", "shared", "local", "symmetric", "tables", "packets")
GIVEN, ON_HEAP = ("input", "shared"), ("shared", "symmetric", "packets")
# What is not laid out with the others.
NO_MEMORY = (*GIVEN, "tables", "packets")
STAGES = ("drawn", "signalled", "allocated")
# What a kernel is made of: a product in tiles; rows on their way to peers; work row by row; a
# product in tiles that tables say; a product for small m, whose tiles travel as packets.
TEMPLATES = ("gemm", "move", "rows", "grouped", "small")
# How many programs: one for each tile; as many as are resident; as pieces of data; one.
PROGRAMS = ("tiles", "resident", "pieces", "one")
# What a kernel of template `move` does within this rank: all own rows, or those of tiles that lie
# across two ranks' rows, to where they are gathered.
OWN_ROWS = ("stage", "edges")
NUM_RANKS = "num_ranks"  # a size that each call knows


@dataclass(frozen=True)
class Part:
    """This rank's part of a size, split as torch.chunk splits it."""

    size: Size


@dataclass(frozen=True)
class Tiles:
    """The rows of a rank's full part of a size, up to whole tiles of `height`: on all ranks."""

    size: Size
    height: int


@dataclass(frozen=True)
class Buffer:
    """A tensor of each rank; its role says whose it is and whether peers reach it.

    `shares`: it lies where that buffer lies, which nobody needs any more when this one is written.
    """

    name: str
    dtype: str
    sizes: tuple[Size | Part | Tiles, ...]
    role: str = "local"
    shares: str = ""
    place: Place = UNKNOWN


@dataclass(frozen=True)
class Channel:
    """Signals that announce rows of `buffer`, which are `rows` in all: a static affine mapping.

    Each rank's part has `chunks` words, or one for each of the producer's `tiles`, which have
    `push_rows` rows and lie within a rank's part; with `columns` each word stands for so many of
    them only. The consumer's tiles have `tile_rows`: cuts=whole cuts all rows, so they may straddle
    two ranks' parts, cuts=part each rank's own; cuts=each: every rank announces all rows, on words
    of its own. A word is full when each of its producer's tiles has been announced `parts` times,
    num_ranks where every rank adds to it. cuts=experts: the consumer's tiles are those of `table`,
    each of one expert's rows, whose ranks are known on the device alone.

    to=all: every rank has words for all rows, from whom they are. to=owner: a rank has words for
    its own part, from each rank. to=engine: tokens of this rank alone, for each other rank's part;
    the last of the tiles that a word stands for sets it, and a copy takes it. `own`: this rank's
    own rows lie there from the start, and nothing announces them. by=packet: there are no words,
    the data itself says that it has come, and says nothing of other data. `along`: buffers of which
    the same words announce the same rows.
    """

    name: str
    buffer: str
    rows: Size
    chunks: int | str = 1
    push_rows: int = 1
    tile_rows: int = 1
    cuts: str = "whole"
    parts: int | str = 1
    columns: int = 0
    to: str = "all"
    own: str = ""
    by: str = "word"
    along: tuple[str, ...] = ()
    table: str = ""
    place: Place = UNKNOWN


@dataclass(frozen=True)
class Call:
    """A call of a library: `function` of what it reads, into what it writes; collective or not.

    `tile_rows`: the height of the tiles that a router cuts, where kernels work by its tables.
    """

    function: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    stream: str = "main"
    dim: int | None = None
    eps: float | None = None
    top_k: int | None = None
    head: int | None = None
    base: float | None = None
    tile_rows: int = 0
    causal: bool | None = None
    place: Place = UNKNOWN


@dataclass(frozen=True)
class Copy:
    """A copy engine moves each rank's rows, chunk by chunk, announcing each on `announces`.

    side=pull: from every peer's `source` into own `target`; side=push: from own to every peer's;
    side=owner: of own `source` each peer's part into that one's `target`, where it lies by source.
    Each chunk waits for its token of `awaits`, if there are any: the stream does, and no SM.
    """

    source: str
    target: str
    side: str
    announces: str
    stream: str = "copy"
    awaits: str = ""
    place: Place = UNKNOWN


def scales_of(name: str) -> str:
    """What the buffer of a buffer's scales is called."""
    return f"{name}_scales"


@dataclass(frozen=True)
class Do:
    """One operation inside a kernel: of buffers, or of values that it has in registers. `scaling`
    says that a product's operands have scales, in buffers of `scales_of` their names."""

    kind: str
    operands: tuple[str, ...]
    result: str
    eps: float | None = None
    scaling: str = ""


@dataclass(frozen=True)
class Launch:
    """A kernel of the Core level; which channels its hooks wait for and announce.

    `pushes` are the buffers that it writes on other ranks; `body` is what it computes, in order.
    `tile` is (rows, columns, k) of a product, else (rows, columns); `order` is a swizzle's name.
    `spare` SMs are left free of a resident grid; `split_k` programs share one tile's sum.
    """

    kernel: str
    reads: tuple[str, ...]
    writes: tuple[str, ...] = ()
    pushes: tuple[str, ...] = ()
    awaits: tuple[str, ...] = ()
    announces: tuple[str, ...] = ()
    stream: str = "main"
    template: str = ""
    body: tuple[Do, ...] = ()
    tile: tuple[int, ...] = ()
    order: str = "rows"
    programs: str = "tiles"
    spare: int = 0
    split_k: int = 1
    takes: bool = False
    gives: bool = False
    place: Place = UNKNOWN


@dataclass(frozen=True)
class Notify:
    """The stream announces all of this rank's words of `channel` to every rank."""

    channel: str
    stream: str = "main"
    takes: bool = False
    place: Place = UNKNOWN


@dataclass(frozen=True)
class Wait:
    """The stream goes on when all words of `channel` are full; bounded."""

    channel: str
    stream: str = "main"
    place: Place = UNKNOWN


@dataclass(frozen=True)
class Take:
    """The stream goes on when all ranks have given back what the slot held; bounded.

    The words that the next copy announces hold the call's epoch from then on, for it to take along.
    """

    stream: str = "main"
    place: Place = UNKNOWN

    @property
    def takes(self) -> bool:
        return True


@dataclass(frozen=True)
class After:
    """What comes next on `stream` waits for all that has been queued on `other`."""

    stream: str
    other: str
    place: Place = UNKNOWN


Step = Call | Copy | Launch | Notify | Wait | Take | After
Statement = Buffer | Channel | Choice | Step
