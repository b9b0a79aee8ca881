"""Core IR: a kernel is a template, the hooks fused into it, and the mappings that these need.

    program(ag_gemm_multiply)
    own = param(operand)
    gathered = param(operand)
    ...
    rows_ready = param(signals, by=engine, to=kernel, announces=(gathered,))
    rows = mapping(static, (gathered,))
    template(gemm, (128, 256, 64))
    hook(order, gather, (rows,))
    wait(ready, rows_ready, tile, rows, unless=own)
    hook(ready, rows_or_own, (gathered, own, rows))
    hook(emit, store, (c,))
    finish(done, slot)

The places where statements are fused in are the hooks of docs/decisions/009-hooks.md. Those at one
hook run in the order of the text: `hook` computes and moves data, `wait`,
`notify`, `credit`, `finish` and `advance` are all that has to do with signals; but for packets,
which say themselves that they have come, nothing else orders ranks.

What is legal is said in `core_rules.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.base.hashed_once import HashedOnce
from weft.base.place import UNKNOWN, Place
from weft.ir import text
from weft.ir.by_kind import ByKind
from weft.ir.kinds import ELEMENTWISE, KINDS, OF_ONE_WIDTH

# operand: a TMA descriptor or a pointer, as the tile says.
# number: a float, or several, which `by` gives. tables: several pointers, to what a router made.
# count: how many choices a token has, by the table `by`.
# packets: words on the heap of which each holds data and the flag that says that it has come.
# view: rows, which may be some columns of wider ones, of the array `by`.
SORTS = (
    "operand", "pointer", "signals", "slot", "world", "number", "count", "tables", "packets",
    "view",
)  # fmt: skip
# Static: affine, of rows of these params. Tables: filled on the device.
MAPPINGS = ("static", "tables")
# What a tile is cut from: all rows; each rank's part of them; all rows, which each rank has; what
# this rank has, whatever others have; its own rows, of each of which every rank sends some
# columns; of grouped products each expert's slots.
CUTS = {"whole": "static", "part": "static", "each": "static", "own": "static",
        "slices": "static", "experts": "tables"}  # fmt: skip

# What each hook may hold beside computing, and why no more.
HOOKS = {
    "begin": ("credit", "notify"),  # of own rows that some of its programs give to all
    "order": (),  # every role of a template asks it: it must be the same each time
    "segments": (),
    "ready": ("wait",),
    "scales": (),  # of fp8 rows and columns: behind `ready`, by which rows come with theirs
    "combine": ("wait",),  # of other ranks' sums, when this tile's own are there
    "value": (),
    "emit": (),  # data alone: its stores may still be under way when it returns
    "announce": ("credit", "notify"),  # a credit where what is told writes to other ranks
    "collect": ("wait",),  # another rank's tile, behind the last one that is multiplied
    "result": (),  # of rows, own ones and collected ones: what every rank makes of them; or of own
    # ones alone
    "done": ("wait", "notify", "finish"),  # this program has read all operands
    "end": ("wait", "notify", "finish", "advance"),  # all that is fused into it is over too
}

# What `hook` can name: the place where it goes, and the sorts of what it takes.
FUNCTIONS = {
    "grouped": ("order", ()),
    "gather": ("order", ("mapping",)),
    "scatter": ("order", ("mapping",)),
    "part_by_part": ("order", ("mapping",)),
    "other_parts": ("order", ("mapping",)),  # of these other ranks' tiles
    "own_part": ("order", ("mapping",)),
    "exchange": ("order", ("mapping",)),  # own rows, of which each rank owns some columns
    "split_k": ("order", ()),  # all tiles, with one split of what they sum over at a time
    # The same node by node, where ranks lie on several.
    "hierarchical_gather": ("order", ("mapping",)),
    "hierarchical_scatter": ("order", ("mapping",)),
    "in_rows": ("order", ("mapping",)),
    "in_turn": ("order", ("tables", "mapping")),
    "by_expert": ("order", ("tables", "mapping")),
    "feed": ("begin", ("pointer", "pointer", "mapping")),
    # By communication CTAs, which count the pieces of a chunk.
    "push_own": ("begin", ("pointer", "pointer", "signals", "mapping")),
    "scale_rows": ("scales", ("pointer", "pointer", "number")),
    "scale_blocks": ("scales", ("pointer", "pointer", "number")),
    # The same where each rank has all rows, which are cut within their owners' parts.
    "scale_owned_rows": ("scales", ("pointer", "pointer", "number", "mapping")),
    "scale_owned_blocks": ("scales", ("pointer", "pointer", "number", "mapping")),
    "rows_by_token": ("ready", ("pointer", "tables")),
    "rows_by_slot": ("ready", ("operand",)),
    "choices": ("ready", ("operand", "tables", "count", "mapping")),
    # Of the rows of all ranks those of one channel at a time, own ones first.
    "channels": ("segments", ("mapping",)),
    # Of own rows the columns that one rank has, own ones first; and the next of them.
    "slices": ("segments", ()),
    "slice_or_own": ("ready", ("operand", "operand", "mapping")),
    # The next channel, of the left or of the right operand, and as many of the other one.
    "left_channel": ("ready", ("operand", "operand", "operand", "mapping")),
    "right_channel": ("ready", ("operand", "operand", "operand", "mapping")),
    "rows_of": ("ready", ("operand",)),
    "rows_or_own": ("ready", ("operand", "operand", "mapping")),
    "read_owned": ("ready", ("operand", "mapping")),
    "read_for_owner": ("ready", ("operand", "mapping")),  # own rows, by an owner's columns
    "add_partials": ("combine", ("pointer", "mapping")),
    "add_relayed": ("combine", ("pointer", "mapping")),  # near shares, other nodes' sums
    "add_staged": ("combine", ("pointer", "mapping")),  # as they lie that engines have carried
    # Behind those of GATED a tile is half as wide.
    # At `result` of rows that this rank has alone.
    **{
        kind: (("value", "result"), ("pointer",) * (KINDS[kind].num_operands - 1))
        for kind in ELEMENTWISE
    },
    "store": ("emit", ("operand",)),
    "store_value": ("emit", ("operand", "pointer")),  # the same place; what `value` has made
    "store_own": ("emit", ("operand", "mapping")),
    "store_slots": ("emit", ("pointer",)),
    "stage": ("emit", ("operand", "mapping")),  # another rank's tile, where an engine fetches it
    "stage_piece": ("emit", ("operand", "mapping")),  # where it does so when the launch is over
    "push": ("emit", ("pointer", "mapping")),
    "push_near": ("emit", ("pointer", "mapping")),  # to owners on this node
    "push_partner": ("emit", ("pointer", "mapping", "number")),  # to who adds up for others
    "spread": ("emit", ("pointer", "mapping")),
    "send": ("emit", ("pointer", "mapping")),  # as push, by TMA where there is one
    "send_to_all": ("emit", ("pointer", "mapping")),  # as spread
    "count": ("announce", ("signals", "mapping")),  # the tiles of a chunk that are stored
    "unpack": ("collect", ("pointer", "pointer", "mapping")),
    "unpack_from": ("collect", ("pointer", "pointer", "mapping")),  # another rank's own rows
    # Of whole rows: before they are sent, by who sums them; behind that by every rank.
    **{
        f"{kind}_rows": (
            ("combine", "result"),
            ("pointer", "mapping") * (KINDS[kind].num_operands - 1),
        )
        for kind in OF_ONE_WIDTH
    },
    "rms_norm": (("combine", "result"), ("pointer", "number", "mapping")),
    # As they are sent: so all ranks have the same bits; or as if they had been stored.
    "rounded": (("combine", "result"), ("pointer",)),
    # The same, of what is loaded `ahead` of the packets that are waited for.
    "ahead": ("combine", ("pointer", "mapping")),
    "add_ahead": ("combine", ("pointer",)),
    "mul_ahead": ("combine", ("pointer",)),
    # Of this rank's share, as the operand holds it; and all ranks', which are waited for.
    "send_packets": ("emit", ("packets", "operand", "mapping")),
    "add_packets": ("combine", ("packets", "operand", "mapping")),
    # To who owns the rows; what it has summed to all, which take it.
    "push_packets": ("emit", ("packets", "operand", "mapping")),
    "spread_packets": ("emit", ("packets", "operand", "mapping")),
    "take_packets": ("collect", ("packets", "operand", "mapping")),
    "load_rows": ("collect", ("pointer", "mapping")),
    "store_rows": ("result", ("pointer", "mapping")),
    "store_own_rows": ("result", ("pointer", "mapping")),
    # Of rows that this rank has alone: a tile of them, or the pairs of which a gate makes one.
    "load_view": ("ready", ("view", "mapping")),
    "load_pairs": ("ready", ("view", "mapping")),
    "add_view": ("result", ("view", "mapping")),
    "mul_view": ("result", ("view", "mapping")),
    "turn": ("result", ("view", "pointer", "number", "mapping")),  # heads, by positions
    "turn_by_table": ("result", ("view", "pointer", "pointer", "mapping")),
    "store_tile": ("result", ("pointer",)),
}

# Scales that a product is multiplied by at each block of k, not behind its sums.
PER_BLOCK = ("scale_blocks", "scale_owned_blocks")

# Function -> which of its arguments other ranks or copy engines write while the kernel runs, and
# the flags of the wait before it reads them.
ARRIVALS = {
    "rows_or_own": (0, "tile"),
    "left_channel": (0, "segment"),
    "right_channel": (0, "segment"),
    "slice_or_own": (0, "slice"),
    "scale_rows": (0, "tile"),
    "scale_blocks": (0, "tile"),
    "rows_by_token": (0, "sources"),
    "add_partials": (0, "others"),
    "add_relayed": (0, "relayed"),
    "add_staged": (0, "chunk"),
    "unpack": (0, "tile"),
    "unpack_from": (0, "tile"),
    "load_rows": (0, "tile"),
}
# Function -> which of its arguments it writes for others, and whom the notify behind it reaches.
DEPARTURES = {
    "feed": (1, "each"),
    "push_own": (1, "each"),
    "push": (0, "owner"),
    "push_near": (0, "owner"),
    "push_partner": (0, "partner"),
    "send": (0, "owner"),
    "spread": (0, "all"),
    "send_to_all": (0, "all"),
    "stage": (0, "engine"),
}
# Of these, what is stored within the node, where a relay takes it from.
IN_NODE = ("push_near", "push_partner")
# What reaches other ranks.
FAR = (*(name for name in DEPARTURES if name != "stage"), "send_packets", "push_packets",
       "spread_packets")  # fmt: skip

OWN_ROWS = "own_rows"
# Template -> how many extents a tile has, and the hooks that it cannot do without.
TEMPLATES = {
    "gemm": (3, ("order", "ready", "emit")),
    # A tile's rows, and how many columns there are.
    "rows": (2, ("order", "ready", "combine", "emit", "result")),
    # The same where each rank sums all rows, whose shares come as packets.
    "every_row": (2, ("order", "ready", "emit", "combine", "result")),
    # Of rows that this rank has alone, in one pass.
    OWN_ROWS: (2, ("ready", "result")),
}
# Those of rows.
OF_ROWS = ("rows", "every_row", OWN_ROWS)


def wrong_tile(function: str, tile: Sequence[int], *, is_static: bool) -> str:
    """Which extents a template takes, if it does not take these; "" if it does.

    `is_static`: no tables say the tiles. Then the sm90 variant of gemm may take columns in two
    products, a power of two and a half or a quarter as many (160 = 128 + 32). The generic variant
    takes the next power of two, and so cannot stand in for it where ranks signal tiles to each
    other, cut from each rank's part.
    """
    extents, _ = TEMPLATES[function]
    if function in OF_ROWS:
        is_right = len(tile) == extents and min(tile) >= 1 and _is_power(tile[0])
        return "" if is_right else "it takes a power of two of rows, and their columns"
    is_right = len(tile) == extents and min(tile) >= 16
    if is_right:
        rows, columns, depth = tile
        rest = columns - (wide := 1 << (columns.bit_length() - 1))
        is_right = rest in ((0, wide // 2, wide // 4) if is_static else (0,))
        is_right = is_right and _is_power(rows) and _is_power(depth)
    message = f"it takes {extents} extents, each a power of two from 16 on"
    if is_static:
        message += "; columns may also be one and a half or a quarter more, as 160 = 128 + 32"
    return "" if is_right else message


def _is_power(extent: int) -> bool:
    return not extent & extent - 1


# Which flags of a channel: those of the tile's rows; that of the rows which it sums over next;
# those of its rows of the next slice; all;
# the tile's, of every other rank, or its chunk's. By tables: those of the ranks whose rows the tile
# has.
# "relayed": of near ranks and of who adds up for this one on other nodes.
FLAGS = ("tile", "segment", "slice", "all", "others", "relayed", "chunk", "sources")
# Whom a signal reaches: whose rows the tile has; every rank; each rank, when it has own rows. When
# the last tile of a chunk is stored, which is counted: this rank alone; its copy engine's stream,
# by a token that this takes.
# "partner": who adds up on this node what a far owner gets.
TO = ("owner", "partner", "all", "each", "here", "engine")
OF_CHUNKS = ("here", "engine")
ORDERS = {"wait": ("acquire", "relaxed"), "notify": ("release", "relaxed")}
SCOPES = ("system", "device")
# Who is at the other end of signals and of the slot, beside the other steps of the plan, which are
# named: this kernel, on every rank; copy engines; kernels that relay rows.
KERNEL, ENGINE, RELAY = "kernel", "engine", "relay"
# Those who go on beside this kernel, when its tiles need them no more.
BESIDE = (ENGINE, RELAY)


@dataclass(frozen=True)
class Param:
    """An argument of the kernel, of one of SORTS; `by` says who writes it.

    Signals are notified by `by` and waited for by `to`; `announces` are the arrays whose data they
    announce. The slot's credits are waited for by `by`, and the call on it is finished by `to`.
    Each is KERNEL, ENGINE, RELAY or another step of the plan, by its name; "" is nobody.
    """

    name: str
    sort: str
    by: str = ""
    to: str = ""
    announces: tuple[str, ...] = ()
    place: Place = UNKNOWN


@dataclass(frozen=True)
class Mapping:
    """Which rows, on which rank, announced by which word: of these params, cut as `cuts` says."""

    name: str
    sort: str
    of: tuple[str, ...]
    cuts: str = "whole"
    place: Place = UNKNOWN


@dataclass(frozen=True)
class Template:
    """What is computed, and the extents of a tile; `formula` is for the reader."""

    function: str
    tile: tuple[int, ...]
    formula: str = ""
    place: Place = UNKNOWN


@dataclass(frozen=True)
class Hook:
    """What is computed or moved at one place of the template; `function` is of FUNCTIONS."""

    slot: str
    function: str
    args: tuple[str, ...]
    place: Place = UNKNOWN


@dataclass(frozen=True)
class Wait:
    """Wait until `flags` of `signals` have reached the call's epoch.

    `unless` leaves it out for own rows; `by=last` is for the last program alone.
    """

    slot: str
    signals: str
    flags: str
    mapping: str
    unless: str = ""
    by: str = ""
    order: str = "acquire"
    scope: str = "system"
    place: Place = UNKNOWN


@dataclass(frozen=True)
class Notify:
    """Set the tile's word of `signals` to the call's epoch, on the rank or ranks `to`.

    `late`: where a template has several tiles under way, behind the next one's product; its stores
    are then on their way beneath that.
    """

    slot: str
    signals: str
    to: str
    mapping: str
    order: str = "release"
    scope: str = "system"
    late: bool = False
    place: Place = UNKNOWN


@dataclass(frozen=True)
class Credit:
    """Wait until every rank is done with the call before on `workspace`."""

    slot: str
    workspace: str
    place: Place = UNKNOWN


@dataclass(frozen=True)
class Finish:
    """Count this program as done; the last one gives `workspace` back to every rank."""

    slot: str
    workspace: str
    place: Place = UNKNOWN


@dataclass(frozen=True)
class Advance:
    """Count this program as done; the last one moves `workspace` on to the next call, which other
    ranks need not hear of: packets of the next call say that their sender has ended this one."""

    slot: str
    workspace: str
    place: Place = UNKNOWN


Fused = Hook | Wait | Notify | Credit | Finish | Advance
Statement = Param | Mapping | Template | Fused


@dataclass(frozen=True)
class Kernel(HashedOnce, ByKind):
    """A kernel of one template."""

    name: str
    statements: tuple[Statement, ...]
    place: Place = UNKNOWN

    __hash__ = HashedOnce.__hash__

    def at(self, slot: str) -> list[Fused]:
        """The statements fused in at one place, in order."""
        return [one for one in self.of(FUSED) if one.slot == slot]


SIGNALS = (Wait, Notify, Credit, Finish, Advance)
FUSED = (Hook, *SIGNALS)


def uses(one: Mapping | Fused) -> list[tuple[str, str]]:
    """(name, the sort that it must have) of what a statement uses; "" is any operand."""
    if isinstance(one, Mapping):
        return [(name, "") for name in one.of]
    if isinstance(one, Hook):
        _, sorts = FUNCTIONS.get(one.function, ("", ()))
        return list(zip(one.args, sorts))
    if isinstance(one, Wait | Notify):
        return [(one.signals, "signals"), (one.mapping, "mapping")]
    return [(one.workspace, "slot")]


def homes(function: str) -> tuple[str, ...]:
    """The places where one of FUNCTIONS may stand."""
    slots = FUNCTIONS[function][0]
    return (slots,) if isinstance(slots, str) else slots


def show(kernel: Kernel, *, places: bool = True) -> str:
    """The kernel as text."""
    header = text.Header(kernel.name, place=kernel.place)
    return text.show([header, *kernel.statements], places=places)
