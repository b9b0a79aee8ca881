"""When each part of a plan runs, by the cost model: spans per rank, engine and chunk.

Every rank's streams follow the plan. A kernel's tiles are drawn in one span for each owner of their
rows, and end when the rounds of tiles end by which the kernel was chosen (`products.py`).
"""

from __future__ import annotations

from collections.abc import Generator, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product as pairs
from math import ceil, prod
from typing import Any, NamedTuple

from weft.base.counts import counted
from weft.base.errors import UsageError
from weft.base.fabric import Fabric
from weft.base.hardware import Hardware
from weft.base.parts import full_part
from weft.base.schedule import LINKS, PROGRAMS, Schedule, Signal, Span
from weft.compiler.cost import exchanges, libraries, pieces, relays
from weft.compiler.cost.alike import CALL, STEP, Arrivals, classes
from weft.compiler.cost.plan_at import PlanAt, brings_rows, product_of
from weft.compiler.cost.products import (
    Product,
    grouped_us,
    leaving_us,
    multiply_us,
    reread_us,
    row_us,
    staged_gbps,
    tile_us,
)
from weft.ir.device import (
    After,
    Call,
    Channel,
    Copy,
    Launch,
    Part,
    Plan,
    Step,
    Take,
    Wait,
    adds_up,
    is_relay,
)
from weft.ir.kinds import GATHERED
from weft.ir.schedule import PUSHERS

# Rows of tiles that share columns of B; rows of the tiles that stage the edges of a rank's part.
GROUP_M, EDGE_ROWS = 8, 128
ENGINE = "copy engine 0"
ATTENTION = ("attention", "ag_attention")
EVEN = Fabric()
# It yields the keys that must be there before it goes on; its value is the time at its end.
Steps = Generator[Sequence[Hashable], None, float]


def predict(
    plan: Plan, sizes: Mapping[str, int], num_ranks: int, machine: Hardware,
    nodes: Sequence[int] = (), *, alike: bool = False, fabric: Fabric = EVEN,
) -> Schedule:  # fmt: skip
    """What `plan` does when. `sizes` are those that a call knows, `nodes` the domains' ranks,
    which `fabric` joins. Of ranks that do alike one is played, if `alike` says so: the schedule has
    no others.

    Raises  UsageError: a size that is not given, a step whose cost is not known
    """
    times = _Times(plan, sizes, num_ranks, machine, nodes, fabric)
    streams, count = dict.fromkeys(step.stream for step in plan.steps), num_ranks
    if alike:
        count = classes(times, fabric)
        times.arrived = Arrivals(count, num_ranks)
    times.run([times.stream(rank, one) for rank in range(count) for one in streams])
    return Schedule(times.spans, times.signals)


class _Arrival(NamedTuple):
    """When something was there, and who had sent it when; when its first part was made."""

    at_us: float
    rank: int
    lane: str
    sent_us: float
    first_us: float = 0.0


class _Times(PlanAt):
    """All ranks at once; `predict` runs it."""

    def __init__(
        self, plan: Plan, sizes: Mapping[str, int], num_ranks: int, machine: Hardware,
        nodes: Sequence[int], fabric: Fabric,
    ) -> None:  # fmt: skip
        super().__init__(plan, sizes, num_ranks, nodes)
        self.machine, self.fabric = machine, fabric
        # What the products of each node's first rank are reckoned with.
        self._slow = replace(
            machine, program_tflops=machine.program_tflops / fabric.slow,
            library_tflops=machine.library_tflops / fabric.slow,
        )  # fmt: skip
        self.spans: list[Span] = []
        self.signals: list[Signal] = []
        self.arrived: dict[Hashable, _Arrival] = {}
        # When a rank's link to its domain is free, and the one to others.
        self.link_free = [[0.0, 0.0] for _ in range(num_ranks)]
        self.engine_free = [0.0] * num_ranks

    def run(self, streams: Sequence[Steps]) -> None:
        """Each as far as what is known allows, until all have ended."""
        blocked: list[tuple[Steps, Sequence[Hashable]]] = [(one, ()) for one in streams]
        while blocked:
            known, waiting = len(self.arrived), []
            for stream, keys in blocked:
                try:
                    while all(key in self.arrived for key in keys):
                        keys = next(stream)
                    waiting.append((stream, keys))
                except StopIteration:
                    pass
            if len(waiting) == len(blocked) and len(self.arrived) == known:
                missing = sorted({str(key) for _, keys in waiting for key in keys})[:3]
                message = f"the plan never ends: somebody waits for {', '.join(missing)}"
                raise UsageError(message)
            blocked = waiting

    def span(
        self, rank: int, lane: str, name: str, start: float, end: float, kind: str, about: int = -1
    ) -> float:
        if end > start:
            self.spans.append(Span(rank, lane, name, start, end, kind, about))
        return end

    def work(self, rank: int, name: str, now: float, took: float, about: int) -> float:
        return self.span(rank, PROGRAMS, name, now, now + took, "work", about)

    def wait(self, rank: int, lane: str, now: float, keys: Sequence[Hashable], what: str) -> Steps:
        """Until all of `keys` are there; the last of them ends the wait."""
        if not keys:
            return now
        yield keys
        last = max((self.arrived[key] for key in keys), key=lambda one: one.at_us)
        if (last.rank, last.lane) != (rank, lane):
            sender = (last.rank, last.lane, last.sent_us)
            self.signals.append(Signal(what, *sender, rank, lane, last.at_us))
        return self.span(rank, lane, f"wait {what}", now, max(now, last.at_us), "wait")

    def notify(
        self, key: tuple[Any, ...], sent: float, rank: int, lane: str, first: float = 0.0
    ) -> None:
        """Signal `key`: (channel, the rank that waits, ...)."""
        is_far = self.node_of[rank] != self.node_of[key[1]]
        way = self.machine.far_us if is_far else self.machine.signal_us
        way += self.fabric.hop_us * self.is_up(rank, key[1])
        self.arrived[key] = _Arrival(sent + way, rank, lane, sent, first)

    def push(self, rank: int, peer: int, nbytes: float, at: float) -> float:
        """Stores to a peer, behind what its link carries already: when they have left."""
        is_far = self.node_of[rank] != self.node_of[peer]
        start = max(at, self.link_free[rank][is_far])
        gbps = self.machine.far_gbps if is_far else self.machine.push_gbps
        if self.is_up(rank, peer):
            gbps /= self.fabric.oversubscription
        end = self.link_free[rank][is_far] = start + us(nbytes, gbps)
        name = f"{nbytes:.0f} bytes to rank {peer}"
        return self.span(rank, LINKS, name, start, end, "transfer", rank)

    def is_up(self, rank: int, peer: int) -> bool:
        """Does what goes from one to the other pass the second level of switches?"""
        one, other, leaf = self.node_of[rank], self.node_of[peer], self.fabric.leaf
        if not leaf or one == other:
            return False
        return one // leaf != other // leaf or self.seat(rank) != self.seat(peer)

    def multiplies(self, rank: int) -> Hardware:
        """What the products of a rank are reckoned with."""
        return self.machine if self.fabric.slow == 1 or self.seat(rank) else self._slow

    def send(
        self, rank: int, peer: int, nbytes: float, begun: float, made: float, name: str
    ) -> None:
        """Tiles leave while they are made, behind what the link carries; then their signal."""
        left = max(made, self.push(rank, peer, nbytes, begun))
        self.notify((name, peer, rank), left, rank, PROGRAMS)

    # ---- streams

    def stream(self, rank: int, stream: str) -> Steps:
        """One rank's stream, from its first step to its last."""
        lane, now = f"stream {stream}", 0.0
        for index, step in enumerate(self.plan.steps):
            if step.stream == stream:
                now = yield from self.step(rank, lane, now, step, index)
                self.arrived[STEP, rank, index] = _Arrival(now, rank, lane, now)
        return now

    def step(self, rank: int, lane: str, now: float, step: Step, index: int) -> Steps:
        if isinstance(step, After):
            before = [i for i, s in enumerate(self.plan.steps[:index]) if s.stream == step.other]
            keys = [(STEP, rank, i) for i in before[-1:]]
            return (yield from self.wait(rank, lane, now, keys, step.other))
        if isinstance(step, Wait):
            keys = [(step.channel, rank, peer) for peer in self.peers(rank)]
            return (yield from self.wait(rank, lane, now, keys, step.channel))
        if isinstance(step, Copy):
            return (yield from self.copies(rank, lane, now, step))
        if isinstance(step, Call):
            return (yield from self.call(rank, lane, now, step, index))
        if isinstance(step, Launch):
            return (yield from self.launch(rank, lane, now, step))
        assert isinstance(step, Take)
        # Credits of an earlier call are there; a kernel of one program looks.
        end = now + self.machine.put_gate_us
        return self.span(rank, lane, "take the slot", now, end, "kernel")

    def copies(self, rank: int, lane: str, now: float, step: Copy) -> Steps:
        """Chunk by chunk; each has its signal on the rank that has it now, and waits for its token
        where a kernel makes what is copied."""
        channel, machine = self.channels[step.announces], self.machine
        chunks, row_bytes = self.chunks_of(channel), self.row_bytes(step.source)
        is_by_columns = bool(step.awaits or step.piece)
        peers = self.peers(rank) if is_by_columns else self.peers(rank)[::-1]
        turns = list(pairs(peers, step.piece[:1] or range(chunks)))
        if step.side == "parts":  # a chunk to all before the next
            turns.sort(key=lambda one: one[1])
        for peer, chunk in turns:
            owner, start = rank if step.side == "push" else peer, now
            rows, nbytes = self.rows_of(channel, owner), row_bytes
            if step.awaits:
                # A part without rows has no tiles here that could set its token.
                keys = [(step.awaits, rank, peer, chunk)] if rows else []
                start = yield from self.wait(rank, lane, now, keys, step.awaits)
            if is_by_columns:
                nbytes = row_bytes / chunks
            else:
                each = max(1, ceil(self.rows_of(channel, 0) / chunks))
                rows = max(0, min(each, rows - chunk * each))
            # Behind a launch its last tiles' way to the engine, once; behind tiles that of each.
            late = step.awaits or (step.piece and peer == peers[0])
            start = max(start, self.engine_free[rank]) + machine.token_us * bool(late)
            end = start
            if rows:
                end += machine.copy_us + us(rows * nbytes, machine.copy_gbps)
                part = f", chunk {chunk}" if chunk else ""
                name = f"{'for ' * (step.side != 'push')}rank {owner}: {counted(rows, 'row')}{part}"
                self.span(rank, ENGINE, name, start, end, "copy", owner)
            now = self.engine_free[rank] = end + machine.word_us
            self.span(rank, ENGINE, f"signal {channel.name}", end, now, "signal")
            self.arrived[channel.name, peer, rank, chunk] = _Arrival(now, rank, ENGINE, now)
        return now

    def call(self, rank: int, lane: str, now: float, step: Call, index: int) -> Steps:
        """A library's: a collective begins when the last rank comes to it."""
        machine, out, kind = self.machine, step.writes[0], "torch"
        if step.function in libraries.COLLECTIVES:
            self.arrived[CALL, index, rank] = _Arrival(now, rank, lane, now)
            keys = [(CALL, index, peer) for peer in self.peers(rank)]
            now = yield from self.wait(rank, lane, now, keys, "for all ranks")
            shard = step.writes if step.function == "reduce_scatter" else step.reads
            took = self.collective_us(step.function, self.num_bytes(shard[0], 0))
            kind = "transfer"
        elif step.function in GATHERED:
            m, n = self.extents(out, rank)
            k = self.extents(step.reads[0], rank)[-1 if step.function == "matmul" else 0]
            product = Product(m, n, k, 1, (1, 1, 1), self.itemsize(out))
            took = libraries.product_us(product, self.multiplies(rank))
        elif step.function in ATTENTION:
            took = self.attention_us(rank, step)
        else:
            moved = sum(self.num_bytes(name, 0) for name in (*step.reads, out))
            took = machine.library_us + us(moved, machine.memory_gbps)
        return self.span(rank, lane, step.function, now, now + took, kind)

    def attention_us(self, rank: int, step: Call) -> float:
        """Both products of own queries with the keys that they see, at a library's rate; no less
        than those that are gathered meanwhile take to come."""
        own, columns = self.extents(step.writes[0], rank)
        keys = self.keys_seen(rank, step)
        took = libraries.attention_us(own, keys, columns, self.multiplies(rank))
        if step.function == "ag_attention" and self.num_ranks > 1:
            nbytes = sum(self.num_bytes(name, 0) for name in step.reads[1:])
            took = max(took, self.collective_us("all_gather", nbytes) + self.machine.library_us)
        return took

    def collective_us(self, function: str, nbytes: float) -> float:
        num_nodes = len(set(self.node_of))
        return libraries.call_us(function, nbytes, self.num_ranks, num_nodes, self.machine)

    # ---- kernels

    def launch(self, rank: int, lane: str, now: float, step: Launch) -> Steps:
        start = now + self.machine.push_us
        if is_relay(step):
            by = relays.relay_sums if adds_up(step) else relays.relay
            end = yield from by(self, rank, lane, start, step)
        elif step.template == "move":
            end = self.move(rank, start, step)
        elif step.template == "grouped":
            end = yield from self.grouped(rank, start, step)
        elif step.template not in ("gemm", "small", "rows"):
            raise UsageError(
                f"{self.plan.name}: what {step.kernel} costs is not known: its launch says no "
                "template"
            )
        elif gathered := self.gathered_by(step):
            is_summed = product_of(step).kind == "matmul_tn"
            by = self.contract if is_summed else self.gather
            if gathered.to == "owner":
                by = partial(exchanges.slices, self)
            end = yield from by(rank, start, step, gathered)
        elif step.piece:
            end = pieces.others(self, rank, start, step)
        elif step.order == "own_part":
            end = yield from pieces.own(self, rank, start, step, self.parts_of(step)[0])
        elif brings_rows(step):
            end = yield from self.gather_packets(rank, start, step)
        elif self.parts_of(step):
            by = self.scatter
            if step.order == "exchange":
                by = partial(exchanges.exchange, self)
            end = yield from by(rank, start, step, self.parts_of(step)[0])
        else:
            end = yield from self.multiply(rank, start, step)
        end += self.machine.end_us * (step.template != "move")
        return self.span(rank, lane, step.kernel, start, end, "kernel")

    def move(self, rank: int, start: float, step: Launch) -> float:
        """Own rows to the own slot, or to every peer's, those first whose turn comes first."""
        rows = self.extents(step.reads[0], rank)[0]
        if any(do.kind == "edges" for do in step.body):  # of tiles that straddle ranks, alone
            rows = min(rows, 2 * EDGE_ROWS) if rows % EDGE_ROWS else 0
        nbytes = rows * self.row_bytes(step.reads[0])
        if not step.pushes:
            end = start + us(2 * nbytes, self.machine.memory_gbps)
            name = f"{nbytes} bytes to own slot"
            return self.span(rank, LINKS, name, start, end, "transfer", rank)
        end = start
        for peer in self.receivers(rank, step):
            if step.body[0].kind == "all_to_all":  # the peer's rows alone
                of_peer = self.rows_of(self.channels[step.announces[0]], peer)
                nbytes = of_peer * self.row_bytes(step.reads[0])
            end = self.push(rank, peer, nbytes, start)
            for name in step.announces:
                for chunk in range(self.chunks_of(self.channels[name])):
                    self.notify((name, peer, rank, chunk), end, rank, LINKS)
        return end

    def grouped(self, rank: int, now: float, step: Launch) -> Steps:
        """A grouped product: a rank's tokens after the other's, as if all had equally many."""
        is_fed = any(do.kind == "all_gather" for do in step.body)
        product = next(do for do in step.body if do.kind == "grouped_matmul")
        _, weights, table = product.operands
        m, top_k, all_experts = self.extents(table, rank)
        experts, k, n = self.extents(weights, rank)
        slots = m * top_k * experts // max(1, all_experts)
        sizes = (slots, n, k, experts, self.itemsize(weights))
        each = grouped_us(*sizes, self.multiplies(rank)) / self.num_ranks
        if is_fed:
            (channel,) = step.announces
            for peer in reversed(self.peers(rank)):
                end = self.push(rank, peer, self.num_bytes(step.reads[0], rank), now)
                self.notify((channel, peer, rank), end, rank, LINKS)
        for other in (rank, *self.peers(rank)):
            if step.awaits and other != rank:
                (channel,) = step.awaits
                keys = [(channel, rank, other)]
                if not is_fed:
                    chunks = range(self.chunks_of(self.channels[channel]))
                    keys = [(*keys[0], chunk) for chunk in chunks]
                now = yield from self.wait(rank, PROGRAMS, now, keys, channel)
            now = self.work(rank, f"products of rank {other}'s tokens", now, each, other)
        return now

    def product(self, rank: int, step: Launch) -> Product:
        m, n = self.extents_of(rank, step)
        left, rows = product_of(step).operands[0], full_part(m, self.num_ranks)
        group_m = max(1, min(GROUP_M, rows // step.tile[0]))
        tile, itemsize = (step.tile[0], step.tile[1], step.tile[2]), self.itemsize(step.writes[0])
        return Product(m, n, self.extents(left, rank)[-1], self.num_ranks, tile, itemsize, group_m)

    def programs_of(self, step: Launch, product: Product) -> int:
        """How many run at once."""
        there = max(1, self.machine.num_sms - step.spare)
        tiles = prod(product.tiles) if step.programs == "tiles" else there
        return 1 if step.programs == "one" else max(1, min(tiles, there))

    def alone_us(self, rank: int, step: Launch) -> float:
        """All tiles, if nobody waits for anything."""
        m, n = self.extents_of(rank, step)
        if not m or not n:
            return 0.0
        if step.template == "rows":
            if step.body[0].kind == "scatter_rows":  # a row for each of a token's choices
                moved = self.num_bytes(step.reads[0], rank) + m * self.row_bytes(step.writes[0])
            elif not step.pushes:
                moved = self.own_bytes(rank, step)
            else:
                names = (*step.reads[:2], *step.writes)
                moved = m * sum(self.row_bytes(name) for name in names)
            return us(moved, self.machine.memory_gbps)
        product = self.product(rank, step)
        programs = self.programs_of(step, product)
        if step.split_k <= 1:
            return multiply_us(product, self.multiplies(rank), programs)
        units = prod(product.tiles) * step.split_k
        return ceil(units / programs) * tile_us(product, self.multiplies(rank)) / step.split_k

    def own_bytes(self, rank: int, step: Launch) -> float:
        """What a kernel on own rows reads and writes: of some operands a few columns."""
        parts = {do.operands[0]: 0.0 for do in step.body if do.kind == "columns"}
        for do in step.body:
            if do.between is not None:
                wide = self.buffers[do.operands[0]].sizes[1]
                wide = wide.size if isinstance(wide, Part) else wide
                share = (do.between[1] - do.between[0]) / self.size(wide, rank)
                parts[do.operands[0]] += share * self.num_bytes(do.operands[0], rank)
            if do.kind == "rope_by_table":  # a row of it for each row
                m, table = self.extents(step.writes[0], rank)[0], do.operands[2]
                parts[table] = m * self.row_bytes(table)
        whole = [name for name in (*step.reads, *step.writes) if name not in parts]
        return sum(parts.values()) + sum(self.num_bytes(name, rank) for name in whole)

    def multiply(self, rank: int, start: float, step: Launch) -> Steps:
        """All tiles at once; where they are summed over ranks, each rank is sent all of them."""
        m, n = self.extents_of(rank, step)
        now = self.work(rank, counted(m, "row"), start, self.alone_us(rank, step), rank)
        if not step.pushes:
            return now
        nbytes = m * n * self.itemsize(step.pushes[0])
        sums = self.channels[step.announces[0]]
        for peer in self.peers(rank):
            self.send(rank, peer, nbytes * (2 if sums.by == "packet" else 1), start, now, sums.name)
        gbps = self.machine.combine_gbps
        return (yield from self.add_up(rank, now, sums.name, nbytes, gbps, self.peers(rank)))

    def gather(self, rank: int, start: float, step: Launch, channel: Channel) -> Steps:
        """Own rows first, which need not arrive; those of each other rank when they have."""
        product = self.product(rank, step)
        if not product.m:
            return start
        machine = self.multiplies(rank)
        programs, each_us = self.programs_of(step, product), tile_us(product, machine)
        # Communication CTAs have no tiles before they have stored own rows on the other ranks.
        late, fed = 0, start
        if brings_rows(step):
            late, fed = min(PUSHERS, programs), self.feed(rank, start, step)
        parts = self.arriving(rank, step, channel)
        ends = [*[row // step.tile[0] for _, _, row in parts[1:]], product.tiles[0]]
        arrivals, now = [], start
        for i, ((source, chunk, row), end_row) in enumerate(zip(parts, ends)):
            arrived = start
            if source != rank:
                keys = [(name, rank, source, chunk) for name in step.awaits]
                now = yield from self.wait(rank, PROGRAMS, now, keys, ", ".join(step.awaits))
                arrived = max(start, *(self.arrived[key].at_us for key in keys))
            first = row // step.tile[0]
            arrivals.append((arrived, first))
            tiles = (end_row - first) * product.tiles[1]
            took = tiles * each_us / programs
            if i + 1 == len(parts):
                end = multiply_us(product, machine, programs, arrivals, late, fed)
                took = max(took, end + reread_us(product, machine) - now)
            now = self.work(rank, f"{counted(tiles, 'tile')} of rank {source}'s rows", now, took,
                            source)  # fmt: skip
        return now

    def contract(self, rank: int, start: float, step: Launch, channel: Channel) -> Steps:
        """A sum over rows: those of one chunk after the other, own ones first."""
        (m, n), rows = self.extents_of(rank, step), self.size(channel.rows, rank)
        there = max(1, self.machine.num_sms - step.spare)
        each_us = row_us(m, n, step.tile, there, self.multiplies(rank))
        now = self.feed(rank, start, step) if brings_rows(step) else start
        parts = self.arriving(rank, step, channel)
        for (source, chunk, first), (*_, end) in zip(parts, [*parts[1:], (rank, 0, rows)]):
            if source != rank:
                keys = [(name, rank, source, chunk) for name in step.awaits]
                now = yield from self.wait(rank, PROGRAMS, now, keys, ", ".join(step.awaits))
            what = f"{counted(end - first, 'row')} of rank {source}'s"
            now = self.work(rank, what, now, (end - first) * each_us, source)
        return now

    def feed(self, rank: int, start: float, step: Launch) -> float:
        """Own rows to all peers at once, by the kernel that multiplies: when they have left, to the
        ranks of this node and, by its port, to others."""
        (own,), ends = step.body[0].operands, {}
        receivers = [(peer, self.node_of[peer]) for peer in self.receivers(rank, step)]
        here = self.node_of[rank]
        for peer, node in receivers:
            ends[node == here] = self.push(rank, peer, self.num_bytes(own, rank), start)
        for name, (peer, node) in pairs(step.announces, receivers):
            for chunk in range(self.chunks_of(self.channels[name])):
                self.notify((name, peer, rank, chunk), ends[node == here], rank, LINKS)
        return max(ends.values(), default=start)

    def gather_packets(self, rank: int, start: float, step: Launch) -> Steps:
        """Own rows to every peer, in packets that carry their flags; all tiles once theirs came."""
        (own,), (name,), m = step.body[0].operands, step.announces, self.extents_of(rank, step)[0]
        for peer in self.receivers(rank, step):
            self.send(rank, peer, 2 * self.num_bytes(own, rank), start, start, name)
        keys = [(name, rank, peer) for peer in self.peers(rank)]
        now = yield from self.wait(rank, PROGRAMS, start, keys, name)
        return self.work(rank, counted(m, "row"), now, self.alone_us(rank, step), rank)

    def arriving(self, rank: int, step: Launch, channel: Channel) -> list[tuple[int, int, int]]:
        """(source, chunk, first row in the kernel's order), own rows first."""
        found, row, chunks = [], 0, self.chunks_of(channel)
        chunk_rows = max(1, ceil(self.rows_of(channel, 0) / chunks))
        for source in self.owners(rank, step):
            rows = self.rows_of(channel, source)
            for chunk in range(chunks if source != rank else 1):
                if chunk * chunk_rows < rows:
                    found.append((source, chunk, row + chunk * chunk_rows))
            row += rows
        return found

    def scatter(self, rank: int, start: float, step: Launch, channel: Channel) -> Steps:
        """Other ranks' parts first, which leave as they are made; the own one last, to which is
        added what has come of it, and which then goes where others need it."""
        machine, tokens = self.machine, self.tokens_of(step)
        m, n = self.extents_of(rank, step)
        chunks = self.chunks_of(channel) if tokens else 1
        row_us = self.alone_us(rank, step) / max(1, m)
        leave_row_us = 0.0
        if step.pushes and step.template == "gemm":
            leave_row_us = leaving_us(self.product(rank, step), machine)
            leave_row_us /= max(1, m - self.rows_of(channel, rank))
        row_bytes, now = n * self.itemsize(step.writes[0]) / chunks, start
        sums = self.channels[(step.awaits if tokens else step.announces)[0]]
        relayed = next((name for name in step.announces if self.channels[name].to == "partner"), "")
        back = [name for name in step.announces[1:] if name != relayed]
        sums_gbps = machine.combine_gbps
        if tokens:
            sums_gbps = staged_gbps(step.tile[1], machine)
        for owner, chunk in pairs(self.owners(rank, step), range(chunks)):
            rows = self.rows_of(channel, owner)
            is_away, nbytes = owner != rank, rows * row_bytes
            took = rows * (row_us / chunks + leave_row_us * is_away)
            part = f", chunk {chunk}" if chunks > 1 else ""
            name, begun = f"{counted(rows, 'row')} of rank {owner}'s part{part}", now
            now = self.work(rank, name, now, took, owner)
            if is_away and tokens:
                set_us = now + machine.gate_us
                self.arrived[tokens.name, rank, owner, chunk] = _Arrival(
                    set_us, rank, PROGRAMS, now
                )
            elif is_away and relayed and owner not in self.near(rank):
                to, left = self.partner_here(rank, owner), now
                if to != rank:
                    left = max(now, self.push(rank, to, nbytes, begun))
                self.notify((relayed, to, rank, owner), left, rank, PROGRAMS, begun)
            elif is_away:
                times = 2 if sums.by == "packet" else 1
                self.send(rank, owner, nbytes * times, begun, now, sums.name)
            elif rows:
                which = (chunk,) if tokens else ()
                sources = [*self.near(rank), *self.partners(rank)] if relayed else self.peers(rank)
                now = yield from self.add_up(
                    rank, now, sums.name, nbytes, sums_gbps, sources, *which
                )
                for name, peer in pairs(back, self.peers(rank)):
                    together = 1 + len(self.channels[name].along)
                    self.send(rank, peer, nbytes * together, begun, now, name)
        for name, peer in pairs(back, self.peers(rank)):
            if rows := self.rows_of(channel, peer):
                now = yield from self.wait(rank, PROGRAMS, now, [(name, rank, peer)], name)
                nbytes = rows * self.row_bytes(step.writes[0])
                took = us(nbytes, machine.combine_gbps * machine.num_sms)
                title = f"{counted(rows, 'row')} of rank {peer} come back"
                now = self.work(rank, title, now, took, peer)
        return now

    def add_up(
        self, rank: int, now: float, name: str, nbytes: float, gbps: float,
        sources: Sequence[int], *chunk: int,
    ) -> Steps:  # fmt: skip
        """Wait for what other ranks have sent, and add it."""
        keys = [(name, rank, peer, *chunk) for peer in sources]
        now = yield from self.wait(rank, PROGRAMS, now, keys, name)
        took = us(nbytes * len(sources), gbps * self.machine.num_sms)
        return self.work(rank, "sums of own rows", now, took, rank)


def us(nbytes: float, gbps: float) -> float:
    return nbytes / (gbps * 1e3)
