"""When each part of a plan would run, before anything does: Device IR played through in time.

Every rank's streams follow the plan; a product's programs take their tiles in the kernel's order,
each when its rows have arrived. What a copy, a tile or a signal costs are the constants of the
compiler's model (`Hardware`), so what is compared are plans with each other.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

from weft.base.counts import counted
from weft.base.errors import UsageError
from weft.base.hardware import Hardware
from weft.base.parts import full_part
from weft.base.schedule import Signal, Span
from weft.compiler.cost import libraries
from weft.compiler.cost.products import (
    Product,
    grouped_us,
    leave_us,
    multiply_us,
    reread_us,
    tile_us,
)
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
from weft.tools.schedule.chart import LINKS, PROGRAMS
from weft.tools.schedule.cut import GROUP_M, Cut
from weft.tools.schedule.events import Events, News

# Rows of the tiles that stage the edges of a rank's part.
EDGE_ROWS = 128
COLLECTIVES = (
    "all_gather", "reduce_scatter", "all_reduce", "moe_route", "ep_dispatch", "ep_combine",
)  # fmt: skip
ATTENTION = ("attention", "ag_attention")
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
                now = yield from self.launch(rank, lane, now, step)
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
        self.waited(rank, lane, now, then, news, what)
        return then

    def waited(self, rank: int, lane: str, now: float, then: float, news: Any, what: str) -> None:
        """Draw a wait that is over, and the signal that ended it."""
        if isinstance(news, News):
            self.span(rank, lane, f"wait {what}", now, then, "wait")
            if news.sender[:2] != (rank, lane):
                self.signals.append(Signal(what, *news.sender, rank, lane, news.at_us))

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
                set_us = end + machine.word_us
                self.span(rank, engine, f"signal {channel.name}", end, set_us, "signal")
                self.engine_free[rank] = set_us
                self.events.tell((channel.name, peer, rank, chunk), set_us, (rank, engine, set_us))
                now, _ = yield set_us
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
            nbytes = prod(self.extents(shard[0], 0)) * self.itemsize(shard[0])
            took, kind = self.collective_us(step.function, nbytes), "transfer"
        elif step.function == "matmul":
            m, n = self.extents(out, rank)
            k = self.extents(step.reads[0], rank)[-1]
            product = Product(m, n, k, 1, (1, 1, 1), self.itemsize(out))
            took, kind = libraries.product_us(product, machine), "torch"
        elif step.function in ATTENTION:
            took, kind = self.attention_us(rank, step), "torch"
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
        took = libraries.attention_us(own, keys, columns, self.machine)
        if step.function == "ag_attention" and self.num_ranks > 1:
            kinds = step.reads[1:]
            nbytes = sum(prod(self.extents(name, 0)) * self.itemsize(name) for name in kinds)
            took = max(took, self.collective_us("all_gather", nbytes) + self.machine.library_us)
        return took

    def collective_us(self, function: str, nbytes: float) -> float:
        """A library's; of sums of all rows `nbytes` are those of all, else a rank's part."""
        is_parted = function in ("all_gather", "reduce_scatter")
        parts = (nbytes, nbytes * self.num_ranks)
        if not is_parted:
            parts = (nbytes / self.num_ranks, nbytes)
        num_nodes = len(set(self.node_of))
        kind = function if is_parted else "all_reduce"
        return libraries.collective_us(kind, *parts, self.num_ranks, num_nodes, self.machine)

    # ---- kernels

    def launch(self, rank: int, lane: str, now: float, step: Launch) -> Steps:
        start, end = now + self.machine.push_us, 0.0
        if step.template == "move":
            end = self.move(rank, start, step)
            then, _ = yield end
        elif step.template in ("gemm", "small", "rows"):
            then = yield from self.programs(rank, start, step)
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
        """A grouped product: a rank's tokens after the other's."""
        (channel,) = step.announces
        is_fed = any(do.kind == "all_gather" for do in step.body)
        product = next(do for do in step.body if do.kind == "grouped_matmul")
        _, weights, table = product.operands
        m, top_k, _ = self.extents(table, rank)
        experts, k, n = self.extents(weights, rank)
        sizes = (m * top_k, n, k, experts, self.itemsize(weights))
        each = grouped_us(*sizes, self.machine) / self.num_ranks
        # What one rank sends another: a row for each choice of its tokens.
        share = step.pushes[0] if step.pushes else ""
        share_bytes = prod(self.extents(share, 0)[1:]) * self.itemsize(share) if share else 0
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
            now = yield from self.work(rank, name, now, each, other)
            if not is_fed and other != rank:
                self.send(rank, other, share_bytes, now, now, channel)
        if not is_fed:
            keys = tuple((channel, rank, peer) for peer in self.peers(rank))
            now = yield from self.wait(rank, PROGRAMS, now, keys, channel)
            took = us(share_bytes * self.num_ranks, self.machine.memory_gbps)
            now = yield from self.work(rank, "sums of own tokens", now, took, rank)
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

    def programs(self, rank: int, start: float, step: Launch) -> Steps:
        """All programs of one launch, part by part of its tiles; it ends when the last one does."""
        if gathered := self.gathered_by(step):
            end = yield from self.gather(rank, start, step, gathered)
        elif self.parts_of(step):
            end = yield from self.scatter(rank, start, step, self.parts_of(step)[0])
        else:
            end = yield from self.multiply(rank, start, step)
        return end + self.machine.end_us

    def programs_of(self, rank: int, step: Launch) -> int:
        """How many run at once."""
        there = max(1, self.machine.num_sms - step.spare)
        if step.programs == "one":
            return 1
        tiles = len(self.tiles(rank, step)) if step.programs == "tiles" else there
        return max(1, min(tiles, there))

    def product(self, rank: int, step: Launch) -> Product:
        """The launch's, as the cost model knows it."""
        m, n = self.extents_of(rank, step)
        k = self.k_of(rank, step)
        rows = max(1, full_part(m, self.num_ranks))
        return Product(
            m, n, k, self.num_ranks, (step.tile[0], step.tile[1], step.tile[2]),
            self.itemsize(step.writes[0]), max(1, min(GROUP_M, rows // step.tile[0])),
        )  # fmt: skip

    def alone_us(self, rank: int, step: Launch) -> float:
        """All tiles, if nobody waits for anything."""
        m, n = self.extents_of(rank, step)
        if not m or not n:
            return 0.0
        if step.template == "rows":
            moved = sum(self.row_bytes(name) for name in (*step.reads[:2], *step.writes))
            return us(m * moved, self.machine.memory_gbps)
        product, programs = self.product(rank, step), self.programs_of(rank, step)
        if step.split_k <= 1:
            return multiply_us(product, self.machine, programs)
        units = product.tiles[0] * product.tiles[1] * step.split_k
        return ceil(units / programs) * tile_us(product, self.machine) / step.split_k

    def multiply(self, rank: int, start: float, step: Launch) -> Steps:
        """All tiles at once; where they are summed over ranks, each rank is sent all of them."""
        m, n = self.extents_of(rank, step)
        name = counted(m, "row")
        now = yield from self.work(rank, name, start, self.alone_us(rank, step), rank)
        if not step.pushes:
            return now
        nbytes = m * n * self.itemsize(step.pushes[0])
        sums = self.channels[step.announces[0]]
        for peer in self.peers(rank):
            self.send(rank, peer, nbytes * (2 if sums.by == "packet" else 1), start, now, sums.name)
        return (yield from self.add_up(rank, now, sums.name, nbytes, self.machine.combine_gbps))

    def gather(self, rank: int, start: float, step: Launch, channel: Channel) -> Steps:
        """Own rows first, which need not arrive; those of each other rank when they have."""
        product, programs = self.product(rank, step), self.programs_of(rank, step)
        if not product.m:
            return start
        parts = self.arriving(rank, step, channel)
        ends = [*[row // step.tile[0] for _, _, row in parts[1:]], product.tiles[0]]
        arrivals, now = [], start
        for (source, chunk, row), end_row in zip(parts, ends):
            arrived = start
            if source != rank:
                keys = tuple((name, rank, source, chunk) for name in step.awaits)
                then, news = yield keys
                self.waited(rank, PROGRAMS, now, then, news, ", ".join(step.awaits))
                arrived, now = news.at_us, then
            first = row // step.tile[0]
            arrivals.append((max(start, arrived), first))
            tiles = (end_row - first) * product.tiles[1]
            name = f"{counted(tiles, 'tile')} of rank {source}'s rows"
            took = tiles * tile_us(product, self.machine) / programs
            if (source, chunk, row) == parts[-1]:
                end = multiply_us(product, self.machine, programs, arrivals)
                took = max(took, end + reread_us(product, self.machine) - now)
            now = yield from self.work(rank, name, now, took, source)
        return now

    def arriving(self, rank: int, step: Launch, channel: Channel) -> list[tuple[int, int, int]]:
        """(source, chunk, first row in the kernel's order), own rows first."""
        order = [rank, *self.peers(rank)]
        if step.order == "hierarchical_gather":
            order = [at.i_m for at in self.by_node(rank, step, self.num_ranks)]
        chunks, row = self.number(channel.chunks), 0
        chunk_rows = max(1, ceil(self.rows_of(channel, 0) / chunks))
        found = []
        for source in order:
            rows = self.rows_of(channel, source)
            for chunk in range(chunks if source != rank else 1):
                if chunk * chunk_rows < rows:
                    found.append((source, chunk, row + chunk * chunk_rows))
            row += rows
        return found

    def scatter(self, rank: int, start: float, step: Launch, channel: Channel) -> Steps:
        """Other ranks' parts first, which leave as they are made; the own one last, to which is
        added what has come of it."""
        owners = [*self.peers(rank), rank]
        if step.order == "hierarchical_scatter":
            owners = [at.i_m for at in self.by_node(rank, step, self.num_ranks)]
        machine, tokens = self.machine, self.tokens_of(step)
        m, n = self.extents_of(rank, step)
        chunks = self.column_chunks(channel) if tokens else 1
        row_us = self.alone_us(rank, step) / max(1, m)
        leave_row_us, first_us = 0.0, 0.0
        if step.pushes and step.template == "gemm":
            product = self.product(rank, step)
            held_us = leave_us(*step.tile[:2], machine) * product.tiles[1] / step.tile[0]
            leave_row_us, first_us = held_us / self.programs_of(rank, step), machine.sums_us
        row_bytes = n * self.itemsize(step.writes[0]) / chunks
        now = start
        for owner, chunk in itertools.product(owners, range(chunks)):
            rows = self.rows_of(channel, owner)
            is_away = owner != rank
            took = rows * (row_us / chunks + leave_row_us * is_away)
            if is_away and rows and first_us:
                took, first_us = took + first_us, 0.0
            part = f", chunk {chunk}" if chunks > 1 else ""
            name, begun = f"{counted(rows, 'row')} of rank {owner}'s part{part}", now
            now = yield from self.work(rank, name, now, took, owner)
            if is_away and tokens and rows:
                key = (tokens.name, rank, owner, chunk)
                self.events.tell(key, now + machine.gate_us, (rank, PROGRAMS, now))
            elif is_away and not tokens:
                sums = self.channels[step.announces[0]]
                nbytes = rows * row_bytes * (2 if sums.by == "packet" else 1)
                self.send(rank, owner, nbytes, begun, now, sums.name)
            elif not is_away and rows:
                now = yield from self.add_own(rank, begun, now, step, chunk, rows * row_bytes)
        return (yield from self.collect(rank, now, step))

    def add_own(
        self, rank: int, begun: float, now: float, step: Launch, chunk: int, nbytes: float
    ) -> Steps:
        """To own tiles what other ranks have of them; then the sums go where others need them."""
        machine = self.machine
        if self.tokens_of(step):
            gbps = machine.wide_sums_gbps if step.tile[1] > 128 else machine.sums_gbps
            return (yield from self.add_up(rank, now, step.awaits[0], nbytes, gbps, chunk))
        sums = step.announces[0]
        now = yield from self.add_up(rank, now, sums, nbytes, machine.combine_gbps)
        for name in step.announces[1:]:
            together = 1 + len(self.channels[name].along)
            for peer in self.peers(rank):
                self.send(rank, peer, nbytes * together, begun, now, name)
        return now

    def collect(self, rank: int, now: float, step: Launch) -> Steps:
        """Where sums go to all: those that other ranks have made come back."""
        for name in step.announces[1:]:
            for peer in self.peers(rank):
                rows = self.rows_of(self.parts_of(step)[0], peer)
                if rows:
                    now = yield from self.wait(rank, PROGRAMS, now, ((name, rank, peer),), name)
                    nbytes = rows * self.row_bytes(step.writes[0])
                    took = us(nbytes, self.machine.combine_gbps * self.machine.num_sms)
                    title = f"{counted(rows, 'row')} of rank {peer} come back"
                    now = yield from self.work(rank, title, now, took, peer)
        return now

    def add_up(
        self, rank: int, now: float, name: str, nbytes: float, gbps: float, *chunk: int
    ) -> Steps:
        """Wait for what all other ranks have sent, and add it."""
        keys = tuple((name, rank, peer, *chunk) for peer in self.peers(rank))
        now = yield from self.wait(rank, PROGRAMS, now, keys, name)
        took = us(nbytes * (self.num_ranks - 1), gbps * self.machine.num_sms)
        return (yield from self.work(rank, "sums of own rows", now, took, rank))

    def work(self, rank: int, name: str, now: float, took: float, about: int) -> Steps:
        self.span(rank, PROGRAMS, name, now, now + took, "work", about)
        then, _ = yield now + took
        return then

    def send(
        self, rank: int, peer: int, nbytes: float, begun: float, made: float, name: str
    ) -> None:
        """Tiles leave while they are made, behind what the link carries; then their word."""
        left = max(made, self.push(rank, peer, nbytes, begun))
        self.tell_word((name, peer, rank), left, rank, PROGRAMS)


def us(nbytes: float, gbps: float) -> float:
    return nbytes / (gbps * 1e3)
