"""The primitives at work on one GPU that plays four ranks: one heap, one table, one stream each."""

from __future__ import annotations

import time

import pytest
import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.language import wait_report, world_layout

pytestmark = pytest.mark.gpu(n=1)

NUM_RANKS = 4
HEAP_BYTES = 1 << 22
RANKS = range(NUM_RANKS)


class Ranks:
    """Tables and heaps of ranks that share a device; what lies at one offset is one object.

    Launches that wait for each other must find their binaries loaded: `launch` of one rank loads
    them for all.
    """

    def __init__(self, timeout_s: float = 5.0) -> None:
        self.memory = torch.zeros(NUM_RANKS * HEAP_BYTES, dtype=torch.uint8, device="cuda")
        self.heaps = self.memory.view(NUM_RANKS, HEAP_BYTES)
        self.used = 0
        self.streams = [torch.cuda.Stream() for _ in RANKS]
        words = world_layout.REPORT_WORDS * world_layout.NUM_REPORTS
        self.reports = torch.zeros(words, dtype=torch.int64).pin_memory()
        self.abort = torch.zeros(1, dtype=torch.int32, device="cuda")
        arrivals = self.empty((world_layout.NUM_CHANNELS,), torch.int32)
        self.generations = torch.zeros(NUM_RANKS, world_layout.NUM_CHANNELS, dtype=torch.int32)
        self.generations = self.generations.cuda()
        self.args = []
        for rank in RANKS:
            table = torch.zeros(world_layout.table_words(NUM_RANKS), dtype=torch.int64)
            table[world_layout.RANK] = rank
            table[world_layout.NUM_RANKS] = NUM_RANKS
            table[world_layout.ABORT_PTR] = self.abort.data_ptr()
            table[world_layout.TIMEOUT_NS] = int(timeout_s * 1e9)
            table[world_layout.REPORT_PTR] = self.reports.data_ptr()
            table[world_layout.HEAP_BASE] = self.heaps[rank].data_ptr()
            table[world_layout.BARRIER_ARRIVALS] = arrivals[rank].data_ptr()
            table[world_layout.BARRIER_GENERATIONS] = self.generations[rank].data_ptr()
            for peer in RANKS:
                table[world_layout.peer_base(peer)] = self.heaps[peer].data_ptr()
            version = tl.constexpr(wl.language_version())
            self.args.append(wl.WorldArg(table.cuda(), tl.constexpr(NUM_RANKS), version))
        torch.cuda.synchronize()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        start = self.used
        self.used += (nbytes + 255) // 256 * 256
        return [heap[start : start + nbytes].view(dtype).view(shape) for heap in self.heaps]

    def launch(self, kernel, grid, *parts, **options) -> None:
        """On every rank's own stream: lists are per rank, the rest is for all."""
        for rank in RANKS:
            mine = [part[rank] if isinstance(part, list) else part for part in parts]
            with torch.cuda.stream(self.streams[rank]):
                kernel[grid](self.args[rank], *mine, **options)


@triton.jit
def all_to_all(world, x, inbox, out, arrived, e, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    rank = wl.rank(world)
    for peer in range(world.num_ranks):
        wl.put(world, inbox + rank * SIZE + i, tl.load(x + i) + peer, to=peer)
        wl.notify(world, arrived + rank, e, to=peer, op=wl.SignalOp.SET)
    wl.wait(arrived, at_least=e, count=world.num_ranks)
    for peer in range(world.num_ranks):
        tl.store(out + peer * SIZE + i, tl.load(inbox + peer * SIZE + i))
    wl.barrier(world)


@pytest.mark.parametrize("word", [torch.int32, torch.int64])
def test_what_was_put_before_a_notify_is_seen_after_the_wait(word):
    ranks, size = Ranks(), 4096
    inbox = ranks.empty((NUM_RANKS, size), torch.float32)
    arrived = ranks.empty((NUM_RANKS,), word)
    x = [torch.randn(size, device="cuda") for _ in RANKS]
    out = [torch.zeros(NUM_RANKS, size, device="cuda") for _ in RANKS]
    torch.cuda.synchronize()
    for e in range(1, 51):
        for each in x:
            each.add_(1)
        torch.cuda.synchronize()
        ranks.launch(all_to_all, (1,), x, inbox, out, arrived, e, SIZE=size)
        torch.cuda.synchronize()
        for rank in RANKS:
            assert torch.equal(out[rank], torch.stack([x[peer] + rank for peer in RANKS]))
    assert ranks.abort.item() == 0


@triton.jit
def count_up(world, counter, visited, values, rounds):
    """Between two barriers every program adds; after each all must see all additions."""
    n = tl.num_programs(0)
    for r in range(rounds):
        tl.atomic_add(visited, 1, sem="relaxed", scope="gpu")
        tl.store(values + tl.program_id(0), r + 1)
        wl.barrier_grid(counter)
        if wl.load(visited, scope=wl.Scope.DEVICE) < (r + 1) * n:
            tl.store(values + n, 1)
        other = tl.load(values + (tl.program_id(0) + 1) % n)
        if other != r + 1:
            tl.store(values + n, 1)
        wl.barrier_grid(counter)


@pytest.mark.parametrize("programs", [1, 2, 132])
def test_the_grid_barrier_is_ready_again_at_once(programs):
    ranks = Ranks()
    counter = torch.zeros(1, dtype=torch.int32, device="cuda")
    for _ in range(3):
        visited = torch.zeros(1, dtype=torch.int32, device="cuda")
        values = torch.zeros(programs + 1, dtype=torch.int32, device="cuda")
        count_up[(programs,)](
            ranks.args[0], counter, visited, values, 25, launch_cooperative_grid=True
        )
        assert values.tolist() == [25] * programs + [0]
    assert ranks.abort.item() == 0


@triton.jit
def rendezvous(world, marks, ok, rounds):
    """Ranks write a mark, meet, and look at everyone's."""
    for r in range(rounds):
        rank = wl.rank(world)
        for peer in range(world.num_ranks):
            tl.store(wl.at(world, marks + rank, peer), r + 1)
        wl.barrier(world, 5)
        for peer in range(world.num_ranks):
            if tl.load(marks + peer) != r + 1:
                tl.store(ok, 0)
        wl.barrier(world, 5)


def test_the_world_barrier_over_many_rounds():
    ranks = Ranks()
    marks = ranks.empty((NUM_RANKS,), torch.int32)
    ok = [torch.ones(1, dtype=torch.int32, device="cuda") for _ in RANKS]
    torch.cuda.synchronize()
    for generation in ranks.generations:
        generation.fill_(2**31 // NUM_RANKS - 30)  # the counters wrap on the way
    for heap in ranks.heaps:
        heap[: 4 * world_layout.NUM_CHANNELS].view(torch.int32).fill_(2**31 - 30 * NUM_RANKS - 1)
        heap[: 4 * world_layout.NUM_CHANNELS].view(torch.int32).add_(1)
    torch.cuda.synchronize()
    ranks.launch(rendezvous, (1,), marks, ok, 200)
    torch.cuda.synchronize()
    assert [each.item() for each in ok] == [1] * NUM_RANKS
    assert ranks.abort.item() == 0


@triton.jit
def exchange_through_a_slot(world, slot, x, inbox, out, rows_ready, SIZE: tl.constexpr):
    """Each program moves its own part to the next rank, all by the slot's epoch."""
    e = wl.slot_epoch(slot)
    part = tl.program_id(0)
    i = part * SIZE + tl.arange(0, SIZE)
    after = (wl.rank(world) + 1) % world.num_ranks
    wl.slot_wait_free(world, slot, e)
    wl.put_signal(world, inbox + i, x + i, rows_ready + part, e, to=after)
    wl.wait(rows_ready + part, at_least=e)
    tl.store(out + i, tl.load(inbox + i))
    wl.slot_finish(world, slot, e, tl.num_programs(0))


def test_a_slot_guards_its_buffers_over_back_to_back_calls():
    ranks, size, programs, calls = Ranks(), 1024, 8, 40
    inbox = ranks.empty((programs * size,), torch.float32)
    rows_ready = ranks.empty((programs,), torch.int64)
    slot_free = ranks.empty((NUM_RANKS,), torch.int64)
    # Aligned alike on every rank: else Triton compiles one binary per rank, and the driver will
    # not load the second while a kernel of the first waits for it.
    epoch = ranks.empty((1,), torch.int64)
    ticket = ranks.empty((1,), torch.int32)
    slots = [wl.SlotArg(epoch[rank], ticket[rank], slot_free[rank]) for rank in RANKS]
    x = [torch.randn(calls, programs * size, device="cuda") for _ in RANKS]
    out = [torch.zeros(calls, programs * size, device="cuda") for _ in RANKS]
    torch.cuda.synchronize()
    for call in range(calls):
        ranks.launch(
            exchange_through_a_slot, (programs,), slots, [each[call] for each in x], inbox,
            [each[call] for each in out], rows_ready, SIZE=size,
        )  # fmt: skip
    torch.cuda.synchronize()
    assert ranks.abort.item() == 0
    for rank in RANKS:
        assert torch.equal(out[rank], x[(rank - 1) % NUM_RANKS])
        assert (epoch[rank].item(), ticket[rank].item()) == (calls, 0)


@triton.jit
def wait_for_nobody(world, signal, expected):
    if wl.rank(world) == 2:
        wl.wait(signal, at_least=expected)  # in vain


@triton.jit
def follow(world, signal):
    wl.wait(signal + 1, at_least=1)


@pytest.mark.parametrize("word", [torch.int32, torch.int64])
def test_a_wait_in_vain_ends_and_says_so(word):
    ranks = Ranks(timeout_s=0.5)
    signal = ranks.empty((2,), word)
    for each in signal:
        each.fill_(3)
        each[1] = 0
    torch.cuda.synchronize()
    start = time.perf_counter()
    ranks.launch(wait_for_nobody, (3,), signal, 5)
    torch.cuda.synchronize()
    assert 0.4 < time.perf_counter() - start < 10  # the first launch compiles
    assert ranks.abort.item() == 1
    reports = wait_report.read_reports(ranks.reports.tolist())
    assert {report.program for report in reports} == {(0, 0, 0), (1, 0, 0), (2, 0, 0)}
    assert any(report.expired for report in reports)
    for report in reports:
        assert (report.rank, report.function) == (2, "wait_for_nobody")
        assert (report.expected, report.seen) == (5, 3)
        assert report.signal_address == signal[2].data_ptr()
        assert "# in vain" in open(__file__).read().splitlines()[report.line - 1]

    ranks.reports.zero_()
    ranks.launch(follow, (1,), signal)  # at once: the world has been given up
    torch.cuda.synchronize()
    reports = wait_report.read_reports(ranks.reports.tolist())
    assert reports and not any(report.expired for report in reports)


@triton.jit
def everyone_announces(world, ready, seen):
    wl.notify_all(world, ready + wl.rank(world), 7, op=wl.SignalOp.SET)
    wl.notify_all(world, ready + world.num_ranks)
    wl.wait(ready, at_least=7, count=world.num_ranks)
    wl.wait(ready + world.num_ranks, at_least=world.num_ranks)
    tl.store(seen, wl.load(ready + world.num_ranks))


def test_notify_all_reaches_every_rank():
    ranks = Ranks()
    ready = ranks.empty((NUM_RANKS + 1,), torch.int32)
    seen = [torch.zeros(1, dtype=torch.int32, device="cuda") for _ in RANKS]
    torch.cuda.synchronize()
    ranks.launch(everyone_announces, (1,), ready, seen)
    torch.cuda.synchronize()
    assert [each.tolist() for each in ready] == [[7] * NUM_RANKS + [NUM_RANKS]] * NUM_RANKS
    assert [each.item() for each in seen] == [NUM_RANKS] * NUM_RANKS


@triton.jit
def read_and_write_words(x32, x64, f32, seen):
    tl.store(seen, wl.atomic_add(x32, 5))
    tl.store(seen + 1, wl.atomic_exchange(x64, -7, order=wl.Order.RELAXED))
    tl.store(seen + 2, wl.atomic_cas(x32, 15, 1 << 20))
    tl.store(seen + 3, wl.load(x32, order=wl.Order.ACQUIRE))
    wl.store(f32, wl.load(f32) * 2, order=wl.Order.RELEASE)
    tl.store(seen + 4, wl.test(x64, -8).to(tl.int64))
    tl.store(seen + 5, wl.test(x64, -6).to(tl.int64))


def test_ordered_access():
    x32 = torch.full((1,), 10, dtype=torch.int32, device="cuda")
    x64 = torch.full((1,), 1 << 40, dtype=torch.int64, device="cuda")
    f32 = torch.full((1,), 1.25, device="cuda")
    seen = torch.zeros(6, dtype=torch.int64, device="cuda")
    read_and_write_words[(1,)](x32, x64, f32, seen)
    assert seen.tolist() == [10, 1 << 40, 15, 1 << 20, 1, 0]
    assert (x64.item(), f32.item()) == (-7, 2.5)
