"""When each part of a plan would run, before anything does: Device IR played through in time.

Every rank's streams follow the plan; a product's programs take their tiles in the kernel's order,
each when its rows have arrived. What a copy, a tile or a signal costs are the constants of the
compiler's model (`Hardware`), so what is compared are plans with each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

from weft.base.counts import counted
from weft.base.errors import UsageError
from weft.base.hardware import Hardware
from weft.base.schedule import Signal, Span
from weft.compiler.cost.products import leave_us, on_curve, tile_cost
from weft.ir.device import (
    After,
    Call,
    Channel,
    Copy,
    Launch,
    Notify,
    Part,
    Plan,
    Take,
    Wait,
)
from weft.tools.schedule import by_tables
from weft.tools.schedule.cut import Cut, Tile, Unit
from weft.tools.schedule.events import Events, News

# Rows of the tiles that stage the edges of a rank's part.
EDGE_ROWS = 128
COLLECTIVES = (
    "all_gather", "reduce_scatter", "all_reduce", "moe_route", "ep_dispatch", "ep_combine",
)  # fmt: skip
ATTENTION = ("attention", "ag_attention")
LINKS, PROGRAMS = "transfers of SMs", "programs"
# A part of a process: what it yields and is sent is the process's, it gives the time of its end.
Steps = Generator[Any, Any, float]


@dataclass(frozen=True)
class Schedule:
    """What a plan does when; `end_us` is when the last rank is done."""

    spans: Sequence[Span]
    signals: Sequence[Signal]

    @property
    def end_us(self) -> float:
        return max((span.end_us for span in self.spans), default=0.0)


def predict(
    plan: Plan, sizes: Mapping[str, int], num_ranks: int, machine: Hardware,
    nodes: Sequence[int] = (),
) -> Schedule:  # fmt: skip
    """Play `plan` through. `sizes` are those that a call knows, `nodes` the domains' ranks.

    Raises  UsageError: a size that is not given, a step whose cost is not known
    """
    played = Played(plan, sizes, num_ranks, machine, nodes)
    for rank in range(num_ranks):
        for stream in dict.fromkeys(step.stream for step in plan.steps):
            played.events.start(0.0, played.stream(rank, stream))
    played.events.run()
    return Schedule(played.spans, played.signals)


class Played(Cut):
    """All ranks at once; `predict` runs it."""

    def __init__(
        self, plan: Plan, sizes: Mapping[str, int], num_ranks: int, machine: Hardware,
        nodes: Sequence[int] = (),
    ) -> None:  # fmt: skip
        super().__init__(plan, sizes, num_ranks, machine, nodes)
        self.events = Events()
        self.spans: list[Span] = []
        self.signals: list[Signal] = []
        self.parts: dict[tuple[int, int], dict[tuple[int, int], list[int]]] = {}
        # Of chunks that engines carry, how many tiles are still to be stored, by kernel and rank.
        self.to_store: dict[tuple[str, int], Counter[tuple[int, int]]] = {}
        # When a rank's link to its domain is free, and the one to others.
        self.link_free = [[0.0, 0.0] for _ in range(num_ranks)]
        self.engine_free = [0.0] * num_ranks

    # ---- streams

    def stream(self, rank: int, stream: str) -> Iterator[Any]:
        """One rank's stream, from its first step to its last."""
        lane, now = f"stream {stream}", 0.0
        for index, step in enumerate(self.plan.steps):
            if step.stream != stream:
                continue
            if isinstance(step, After):
                before = [
                    i for i, s in enumerate(self.plan.steps[:index]) if s.stream == step.other
                ]
                if before:
                    keys = (("step", rank, before[-1]),)
                    now = yield from self.wait(rank, lane, now, keys, step.other)
            elif isinstance(step, Notify):
                now = yield from self.notify(rank, lane, now, step, index)
            elif isinstance(step, Wait):
                keys = tuple((step.channel, rank, peer) for peer in self.peers(rank))
                now = yield from self.wait(rank, lane, now, keys, step.channel)
            elif isinstance(step, Take):
                now = yield from self.take(rank, lane, now)
            elif isinstance(step, Copy) and step.awaits:
                now = yield from self.carry(rank, lane, now, step)
            elif isinstance(step, Copy):
                now = yield from self.copies(rank, now, step)
            elif isinstance(step, Call):
                now = yield from self.call(rank, lane, now, step, index)
            elif isinstance(step, Launch):
                now = yield from self.launch(rank, lane, now, step, index)
            else:
                raise UsageError(f"{self.plan.name}: what {type(step).__name__} costs is not known")
            self.events.tell(("step", rank, index), now, (rank, lane, now))

    def span(
        self, rank: int, lane: str, name: str, start: float, end: float, kind: str, about: int = -1
    ) -> None:
        if end > start:
            self.spans.append(Span(rank, lane, name, start, end, kind, about))

    def wait(self, rank: int, lane: str, now: float, keys: tuple[Any, ...], what: str) -> Steps:
        """Until all of `keys` are there; the last of them ends the wait."""
        if not keys:
            return now
        then, news = yield keys
        if isinstance(news, News):
            self.span(rank, lane, f"wait {what}", now, then, "wait")
            if news.sender[:2] != (rank, lane):
                self.signals.append(Signal(what, *news.sender, rank, lane, news.at_us))
        return then

    def notify(self, rank: int, lane: str, now: float, step: Notify, index: int) -> Steps:
        """A kernel of one program; the first one on a stream of copies is their gate, too."""
        is_gate = not any(isinstance(one, Copy) for one in self.plan.steps[:index])
        took = self.machine.push_us
        if is_gate and step.stream != "main":
            took = max(took, self.machine.gate_us - self.machine.signal_us)
        end = now + took
        self.span(rank, lane, f"announce {step.channel}", now, end, "kernel")
        for peer in self.peers(rank):
            arrived = end + self.machine.signal_us
            self.events.tell((step.channel, peer, rank), arrived, (rank, lane, end))
        then, _ = yield end
        return then

    def take(self, rank: int, lane: str, now: float) -> Steps:
        """Credits of an earlier call are there; a kernel of one program looks, copies come next."""
        end = now + self.machine.put_gate_us
        self.span(rank, lane, "take the slot", now, end, "kernel")
        then, _ = yield end
        return then

    def copies(self, rank: int, now: float, step: Copy) -> Steps:
        """Chunk by chunk, one after the other; each tells of itself on the rank that has it now."""
        channel, machine, lane = self.channels[step.announces], self.machine, "copy engine 0"
        chunks = self.number(channel.chunks)
        row_bytes = self.row_bytes(step.source)
        peers = self.peers(rank) if step.side == "pull" else self.peers(rank)[::-1]
        for peer in peers:
            source, to = (peer, rank) if step.side == "pull" else (rank, peer)
            rows = self.rows_of(channel, source)
            chunk_rows = max(1, ceil(self.rows_of(channel, 0) / chunks))
            for chunk in range(chunks):
                height = max(0, min(chunk_rows, rows - chunk * chunk_rows))
                start = max(now, self.engine_free[rank])
                end = start + machine.word_us
                if height:
                    end += machine.copy_us + us(height * row_bytes, machine.copy_gbps)
                    part = f", chunk {chunk}" if chunk else ""
                    name = f"rank {source}: {counted(height, 'row')}{part}"
                    self.span(rank, lane, name, start, end - machine.word_us, "copy", source)
                self.span(
                    rank, lane, f"signal {channel.name}", end - machine.word_us, end, "signal"
                )
                self.engine_free[rank] = end
                self.events.tell((channel.name, to, source, chunk), end, (rank, lane, end))
                now, _ = yield end
        return now

    def carry(self, rank: int, lane: str, now: float, step: Copy) -> Steps:
        """Each owner's part, chunk by chunk of columns, when its token is set."""
        channel, machine, engine = self.channels[step.announces], self.machine, "copy engine 0"
        chunks = self.column_chunks(channel)
        row_bytes = self.row_bytes(step.source) / chunks
        for peer in self.peers(rank):
            rows = self.rows_of(channel, peer)
            for chunk in range(chunks):
                # A part without rows has no tiles here that could set it.
                keys = ((step.awaits, rank, peer, chunk),) if rows else ()
                now = yield from self.wait(rank, lane, now, keys, step.awaits)
                start = max(now, self.engine_free[rank]) + machine.token_us
                end = start
                if rows:
                    end += machine.copy_us + us(rows * row_bytes, machine.copy_gbps)
                    part = f", chunk {chunk}" if chunk else ""
                    name = f"for rank {peer}: {counted(rows, 'row')}{part}"
                    self.span(rank, engine, name, start, end, "copy", peer)
                told = end + machine.word_us
                self.span(rank, engine, f"signal {channel.name}", end, told, "signal")
                self.engine_free[rank] = told
                self.events.tell((channel.name, peer, rank, chunk), told, (rank, engine, told))
                now, _ = yield told
        return now

    def call(self, rank: int, lane: str, now: float, step: Call, index: int) -> Steps:
        """A library's: a collective begins when the last rank comes to it."""
        machine, out = self.machine, step.writes[0]
        moved = sum(prod(self.extents(name, 0)) * self.itemsize(name)
                    for name in (*step.reads, out))  # fmt: skip
        if step.function in COLLECTIVES:
            self.events.tell(("call", index, rank), now, (rank, lane, now))
            keys = tuple(("call", index, peer) for peer in self.peers(rank))
            now = yield from self.wait(rank, lane, now, keys, "for all ranks")
            shard = step.writes if step.function == "reduce_scatter" else step.reads
            curve = {"all_gather": machine.gather, "reduce_scatter": machine.scatter}.get(
                step.function, machine.reduce
            )
            nbytes = prod(self.extents(shard[0], 0)) * self.itemsize(shard[0])
            took = on_curve(curve, nbytes) if self.num_ranks > 1 else 0.0
            kind = "transfer"
        elif step.function == "matmul":
            m, n = self.extents(out, rank)
            k = self.extents(step.reads[0], rank)[-1]
            took = max(2e-6 * m * n * k / machine.library_tflops, us(moved, machine.library_gbps))
            took, kind = took + machine.library_us, "torch"
        elif step.function in ATTENTION:
            took, kind = self.attention_us(rank, step) + machine.library_us, "torch"
        else:
            took, kind = machine.library_us + us(moved, machine.memory_gbps), "torch"
        self.span(rank, lane, step.function, now, now + took, kind)
        then, _ = yield now + took
        return then

    def attention_us(self, rank: int, step: Call) -> float:
        """Both products of own queries with the keys that they see, at a library's rate; no less
        than those that are gathered meanwhile take to come."""
        own, columns = self.extents(step.writes[0], rank)
        parts = [self.extents(step.reads[0], r)[0] for r in range(self.num_ranks)]
        is_split = isinstance(self.buffers[step.reads[0]].sizes[0], Part)
        first = sum(parts[:rank]) if is_split else 0
        keys = first + own / 2 if step.causal else sum(parts) if is_split else own
        took = 4e-6 * own * keys * columns / self.machine.library_tflops
        if step.function == "ag_attention" and self.num_ranks > 1:
            kinds = step.reads[1:]
            nbytes = sum(prod(self.extents(name, 0)) * self.itemsize(name) for name in kinds)
            took = max(took, on_curve(self.machine.gather, nbytes))
        return took

    # ---- kernels

    def launch(self, rank: int, lane: str, now: float, step: Launch, index: int) -> Steps:
        start, end = now + self.machine.push_us, 0.0
        if step.template == "move":
            end = self.move(rank, start, step)
            then, _ = yield end
        elif step.template in ("gemm", "rows"):
            then = yield from self.programs(rank, start, step, index)
        elif step.template == "grouped":
            then = yield from self.grouped(rank, start, step)
        else:
            raise UsageError(
                f"{self.plan.name}: what {step.kernel} costs is not known: its launch says no "
                "template"
            )
        self.span(rank, lane, step.kernel, start, then, "kernel")
        return then

    def grouped(self, rank: int, now: float, step: Launch) -> Steps:
        """A product by tables: a rank's tokens after the other's."""
        (channel,) = step.announces
        is_fed = any(do.kind == "all_gather" for do in step.body)
        each = by_tables.product_us(self, rank, step) / self.num_ranks
        if is_fed:
            nbytes = prod(self.extents(step.reads[0], rank)) * self.itemsize(step.reads[0])
            for peer in reversed(self.peers(rank)):
                end = self.push(rank, peer, nbytes, now)
                self.tell_word((channel, peer, rank), end, rank, LINKS)
        order = [rank, *self.peers(rank)] if is_fed else [*self.peers(rank), rank]
        for other in order:
            if is_fed and other != rank:
                now = yield from self.wait(rank, PROGRAMS, now, ((channel, rank, other),), channel)
            name = f"products of rank {other}'s tokens"
            self.span(rank, PROGRAMS, name, now, now + each, "work", other)
            now, _ = yield now + each
            if not is_fed and other != rank:
                left = self.push(rank, other, by_tables.share_bytes(self, step), now)
                self.tell_word((channel, other, rank), left, rank, PROGRAMS)
        if not is_fed:
            keys = tuple((channel, rank, peer) for peer in self.peers(rank))
            now = yield from self.wait(rank, PROGRAMS, now, keys, channel)
            nbytes = by_tables.share_bytes(self, step) * self.num_ranks
            end = now + nbytes / (self.machine.memory_gbps * 1e3)
            self.span(rank, PROGRAMS, "sums of own tokens", now, end, "work", rank)
            now, _ = yield end
        return now + self.machine.end_us

    def move(self, rank: int, start: float, step: Launch) -> float:
        """Own rows to the own slot, or to every peer's, those first whose turn comes first."""
        rows = self.extents(step.reads[0], rank)[0]
        if any(do.kind == "edges" for do in step.body):  # of tiles that straddle ranks, alone
            rows = min(rows, 2 * EDGE_ROWS) if rows % EDGE_ROWS else 0
        nbytes = rows * self.row_bytes(step.reads[0])
        if not step.pushes:
            end = start + self.machine.stage_us + us(nbytes, self.machine.stage_gbps)
            self.span(rank, LINKS, f"{nbytes} bytes to own slot", start, end, "transfer", rank)
            return end
        end = start
        for peer in self.receivers(rank, step):
            end = self.push(rank, peer, nbytes, start)
            for name in step.announces:
                for chunk in range(self.number(self.channels[name].chunks)):
                    self.tell_word((name, peer, rank, chunk), end, rank, LINKS)
        return end

    def push(self, rank: int, peer: int, nbytes: float, at: float) -> float:
        """Stores to a peer, behind what its link carries already: when they have left."""
        is_far = self.node_of[rank] != self.node_of[peer]
        start = max(at, self.link_free[rank][is_far])
        gbps = self.machine.far_gbps if is_far else self.machine.push_gbps
        end = self.link_free[rank][is_far] = start + us(nbytes, gbps)
        self.span(rank, LINKS, f"{nbytes:.0f} bytes to rank {peer}", start, end, "transfer", rank)
        return end

    def tell_word(self, key: tuple[Any, ...], sent: float, rank: int, lane: str) -> None:
        """`key` is (channel, the rank that waits, ...)."""
        is_far = self.node_of[rank] != self.node_of[key[1]]
        way = self.machine.far_us if is_far else self.machine.signal_us
        self.events.tell(key, sent + way, (rank, lane, sent))

    def programs(self, rank: int, start: float, step: Launch, index: int) -> Steps:
        """All programs of one launch; it ends when the last one does."""
        dealt = self.dealt(rank, step)
        for p, units in enumerate(dealt):
            self.events.start(start, self.program(rank, p, start, step, index, units))
        then, _ = yield tuple(("program", rank, index, p) for p in range(len(dealt)))
        return then + self.machine.end_us

    def program(
        self, rank: int, p: int, now: float, step: Launch, index: int, units: list[Unit]
    ) -> Iterator[Any]:
        """One program: its tiles in turn, then what comes back from others."""
        lane, begun = f"sm {p}", now
        back = []
        for tile, first, end, whole in units:
            keys = tuple((name, rank, *word) for name in step.awaits for word in tile.words)
            now = yield from self.wait(rank, lane, now, keys, ", ".join(step.awaits))
            took = self.tile_us(rank, step, tile) * (end - first) / whole
            is_shared = end - first < whole
            took += self.machine.share_us if is_shared else 0.0
            name = f"part of {tile.name}" if is_shared else tile.name
            self.span(rank, lane, name, now, now + took, "work", tile.owner)
            now, _ = yield now + took
            if is_shared:
                self.events.tell(("part", rank, index, tile[2:4], end), now, (rank, lane, now))
                if end < whole:
                    continue
                # Whoever has the last part makes the sum; the parts end where the others' begin.
                ends = self.ends_of(rank, step, index)[tile[2:4]]
                keys = tuple(("part", rank, index, tile[2:4], one) for one in ends if one < whole)
                now = yield from self.wait(rank, lane, now, keys, "parts of the sum")
            now = yield from self.emit(rank, lane, now, step, tile)
            if len(step.pushes) > 1 and tile.owner == rank:
                back.append(tile)
        now = yield from self.collect(rank, p, lane, now, step, index)
        self.span(rank, lane, f"{step.kernel}[{p}]", begun, now, "program")
        self.events.tell(("program", rank, index, p), now, (rank, lane, now))

    def ends_of(self, rank: int, step: Launch, index: int) -> dict[tuple[int, int], list[int]]:
        """Where the parts of each tile end, of its steps over k."""
        found = self.parts.get((rank, index))
        if found is None:
            found = self.parts[rank, index] = {}
            for unit in [one for units in self.dealt(rank, step) for one in units]:
                found.setdefault((unit.tile.i_m, unit.tile.i_n), []).append(unit.end)
        return found

    def tile_us(self, rank: int, step: Launch, tile: Tile) -> float:
        rows, columns = tile.rows, step.tile[1]
        if step.template == "rows":
            moved = sum(self.row_bytes(name) for name in (*step.reads[:2], *step.writes))
            return us(moved * rows, self.machine.memory_gbps / self.machine.num_sms)
        k = self.k_of(rank, step)
        slower = tile_cost(rows, columns, self.machine)
        took = 2e-6 * rows * columns * k / self.machine.program_tflops * slower
        # Stores to peers hold up the next product.
        return took + (leave_us(rows, columns, self.machine) if step.pushes else 0.0)

    def emit(self, rank: int, lane: str, now: float, step: Launch, tile: Tile) -> Steps:
        """What becomes of a tile: stored, sent to its owner, or summed with the others' of it."""
        if tokens := self.tokens_of(step):
            return (yield from self.keep(rank, lane, now, step, tile, tokens))
        if not step.pushes:
            return now
        sums = self.channels[step.announces[0]]
        nbytes = tile.rows * step.tile[1] * self.itemsize(step.pushes[0])
        is_for_all = sums.cuts == "each"
        for peer in self.peers(rank) if is_for_all else [tile.owner]:
            if peer != rank:
                left = self.push(rank, peer, nbytes * (2 if sums.by == "packet" else 1), now)
                self.tell_word((sums.name, peer, rank, *tile[2:4]), left, rank, lane)
        if not is_for_all and tile.owner != rank:
            return now
        keys = tuple((sums.name, rank, peer, *tile[2:4]) for peer in self.peers(rank))
        now = yield from self.wait(rank, lane, now, keys, sums.name)
        end = now + us(nbytes * (self.num_ranks - 1), self.machine.combine_gbps)
        self.span(rank, lane, f"sum of {tile.name}", now, end, "work", rank)
        now, _ = yield end
        for name in step.announces[1:]:  # the sum goes to all
            for peer in self.peers(rank):
                together = 1 + len(self.channels[name].along)
                left = self.push(rank, peer, nbytes * together, now)
                self.tell_word((name, peer, rank, *tile[2:4]), left, rank, lane)
        return now

    def keep(
        self, rank: int, lane: str, now: float, step: Launch, tile: Tile, tokens: Channel
    ) -> Steps:
        """Another rank's tile stays here, the last one of a chunk sets its token; own ones wait for
        the same chunk of the others."""
        each = self.tiles_of_chunk(step, tokens)
        chunk = tile.i_n // each
        if tile.owner != rank:
            if (left := self.to_store.get((step.kernel, rank))) is None:
                left = Counter((one.owner, one.i_n // each) for one in self.tiles(rank, step))
                self.to_store[step.kernel, rank] = left
            left[tile.owner, chunk] -= 1
            if not left[tile.owner, chunk]:
                key = (tokens.name, rank, tile.owner, chunk)
                self.events.tell(key, now + self.machine.gate_us, (rank, lane, now))
            return now
        (sums,) = step.awaits
        keys = tuple((sums, rank, peer, chunk) for peer in self.peers(rank))
        now = yield from self.wait(rank, lane, now, keys, sums)
        machine = self.machine
        gbps = machine.wide_sums_gbps if step.tile[1] > 128 else machine.sums_gbps
        nbytes = tile.rows * step.tile[1] * self.itemsize(step.writes[0]) * (self.num_ranks - 1)
        self.span(rank, lane, f"sum of {tile.name}", now, now + us(nbytes, gbps), "work", rank)
        now, _ = yield now + us(nbytes, gbps)
        return now

    def collect(self, rank: int, p: int, lane: str, now: float, step: Launch, index: int) -> Steps:
        """Where sums go to all: other owners' come back, and each program takes its share."""
        for name in step.announces[1:]:
            foreign = [tile for tile in self.tiles(rank, step) if tile.owner != rank]
            there = max(1, self.machine.num_sms - step.spare)
            for tile in foreign[p::there]:
                key = (name, rank, tile.owner, *tile[2:4])
                now = yield from self.wait(rank, lane, now, (key,), name)
                nbytes = tile.rows * step.tile[1] * self.itemsize(step.writes[0])
                end = now + us(nbytes, self.machine.combine_gbps)
                self.span(rank, lane, f"{tile.name} comes back", now, end, "work", tile.owner)
                now, _ = yield end
        return now


def us(nbytes: float, gbps: float) -> float:
    return nbytes / (gbps * 1e3)
