"""Stages on ranks: losses and gradients of one process, bit by bit; the order of passes."""

from __future__ import annotations

import weakref

import pytest
import torch
import triton
import triton.language as tl
from effort import slow_but
from parallel import drawn, seeded
from torch import nn
from torch.nn import functional

import weft
from weft.layers import pipeline
from weft.layers.pipeline import Pipeline
from weft.layers.stages import BACKWARD, FORWARD, Stages, Times, bubble

ROWS, HIDDEN = 3, 4


def stages_of(count):
    return [seeded(lambda: nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh()), i)
            for i in range(count)]  # fmt: skip


def batch(microbatches):
    return ([drawn(ROWS, HIDDEN, seed=i) for i in range(microbatches)],
            [drawn(ROWS, HIDDEN, seed=50 + i) for i in range(microbatches)])  # fmt: skip


def alone(stages, inputs, targets):
    """One process, one microbatch after the other."""
    total = torch.zeros(())
    for x, target in zip(inputs, targets, strict=True):
        loss = functional.mse_loss(nn.Sequential(*stages)(x), target) / len(inputs)
        loss.backward()
        total = total + loss.detach()
    return total


def pipeline_of(world, stages, microbatches, loss=functional.mse_loss):
    return Pipeline(stages, world, shape=(ROWS, HIDDEN), microbatches=microbatches, loss=loss)


def same_gradients(mine, wanted):
    for one, other in zip(mine.parameters(), wanted.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("num_ranks", "chunks", "microbatches"),
    slow_but(
        [(2, 1, 1), (2, 1, 3), (3, 1, 4), (4, 1, 2), (1, 1, 2), (1, 3, 2), (2, 2, 2), (2, 3, 4),
         (3, 2, 3), (4, 2, 4)],
        [(4, 1, 6), (3, 3, 6), (4, 2, 8), (4, 3, 4)],
    ),
)  # fmt: skip
@pytest.mark.parametrize("slots", ["1", "2"])
def test_losses_and_gradients_of_one_process(
    ranks, num_ranks, chunks, microbatches, slots, monkeypatch
):
    """With one box between two ranks too."""
    monkeypatch.setenv("WEFT_SLOTS", slots)
    wanted, (inputs, targets) = stages_of(num_ranks * chunks), batch(microbatches)
    totals = [alone(wanted, inputs, targets) for _ in range(2)]

    def main():
        with weft.init(heap_bytes=1 << 20) as world:
            mine = stages_of(num_ranks * chunks)[world.rank :: num_ranks]
            pipeline = pipeline_of(world, mine if chunks > 1 else mine[0], microbatches)
            for total in totals:  # gradients are added up
                got = pipeline.step(inputs, targets)
                if world.rank == num_ranks - 1:
                    assert torch.equal(got, total)
            for own, other in zip(mine, wanted[world.rank :: num_ranks], strict=True):
                same_gradients(own, other)

    for seed in range(2):
        ranks(main, num_ranks, seed=seed)


def test_stages_of_a_part_of_all_ranks(ranks):
    """A world that is not of all; beside it, the other ranks have one of their own."""
    wanted, (inputs, targets) = stages_of(2), batch(2)
    total = alone(wanted, inputs, targets)

    def main():
        torch.distributed.init_process_group()
        rank = torch.distributed.get_rank()
        groups = [torch.distributed.new_group(one) for one in ([0, 2], [1, 3])]
        with weft.init(groups[rank % 2], heap_bytes=1 << 20) as world:
            mine = stages_of(2)[world.rank]
            got = pipeline_of(world, mine, 2).step(inputs, targets)
            assert world.rank == 0 or torch.equal(got, total)
            same_gradients(mine, wanted[world.rank])

    ranks(main, 4)


def test_a_step_is_recorded_and_replayed(ranks):
    """Inputs lie where they lay; gradients are added up in place."""
    wanted, microbatches = stages_of(4), 2
    batches = [batch(microbatches), batch(2 * microbatches)]
    batches[1] = tuple(one[microbatches:] for one in batches[1])
    totals = [alone(wanted, *one) for one in (batches[0], batches[0], batches[1])]

    def main():
        with weft.init(heap_bytes=1 << 20) as world:
            mine = stages_of(4)[world.rank :: 2]
            pipeline = pipeline_of(world, mine, microbatches)
            given = [[one.clone() for one in part] for part in batches[0]]
            got = [pipeline.step(*given).clone()]
            with world.record() as recording:
                total = pipeline.step(*given)
            for new in (batches[0], batches[1]):
                for old, one in zip((*given[0], *given[1]), (*new[0], *new[1]), strict=True):
                    old.copy_(one)
                recording.replay()
                got.append(total.clone())
            if world.rank == 1:
                assert all(map(torch.equal, got, totals))
            for own, other in zip(mine, wanted[world.rank :: 2], strict=True):
                same_gradients(own, other)

    ranks(main, 2)


@triton.jit
def double(x, out, n, block: tl.constexpr):
    i = tl.arange(0, block)
    tl.store(out + i, 2 * tl.load(x + i, mask=i < n), mask=i < n)


class Doubled(torch.autograd.Function):
    """By a kernel, which is queued where a product of torch's is there at once."""

    @staticmethod
    def forward(ctx, x):
        out = torch.empty_like(x)
        double[(1,)](x, out, x.numel(), 16)
        return out

    @staticmethod
    def backward(ctx, gradient):
        return Doubled.forward(ctx, gradient.contiguous())


class Twice(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.linear = linear

    def forward(self, x):
        return Doubled.apply(self.linear(Doubled.apply(x)))


def test_stages_whose_results_kernels_make(ranks):
    """What is sent was made by a kernel of another stream, and what comes is read by one."""
    inputs, targets = batch(4)
    wanted = [seeded(lambda: nn.Linear(HIDDEN, HIDDEN), i) for i in range(4)]
    total = torch.zeros(())
    for x, target in zip(inputs, targets, strict=True):
        for one in wanted:
            x = 2 * one(2 * x)
        loss = functional.mse_loss(x, target) / 4
        loss.backward()
        total = total + loss.detach()

    def main():
        with weft.init(heap_bytes=1 << 20) as world:
            linear = [seeded(lambda: nn.Linear(HIDDEN, HIDDEN), i) for i in range(4)]
            mine = linear[world.rank :: 2]
            got = pipeline_of(world, list(map(Twice, mine)), 4).step(inputs, targets)
            assert world.rank == 0 or torch.equal(got, total)
            for own, other in zip(mine, wanted[world.rank :: 2], strict=True):
                same_gradients(own, other)

    for seed in range(2):
        ranks(main, 2, seed=seed)


def test_what_is_sent_is_kept_until_it_is_away(ranks, monkeypatch):
    """The last message is still there while the pass behind it runs."""
    sent = {}

    def noted(x, dst, *, world, mailbox):
        sent[world.rank] = weakref.ref(x)
        weft.ops.send(x, dst, world=world, mailbox=mailbox)

    monkeypatch.setattr(pipeline, "send", noted)

    class Looks(nn.Module):
        def __init__(self, rank):
            super().__init__()
            self.linear, self.rank = nn.Linear(HIDDEN, HIDDEN), rank

        def forward(self, x):
            seen[self.rank] += self.rank in sent
            assert self.rank not in sent or sent[self.rank]() is not None
            return self.linear(x)

    seen = [0, 0]

    def main():
        with weft.init(heap_bytes=1 << 20) as world:
            stages = [Looks(world.rank), Looks(world.rank)]
            pipeline_of(world, stages, 4).step(*batch(4))

    ranks(main, 2)
    assert seen == [7, 7], "all but the first"


SIZES = [
    (num_ranks, chunks, microbatches)
    for num_ranks in (1, 2, 3, 4, 5, 8)
    for chunks in (1, 2, 3, 4)
    for microbatches in (*range(1, 13), 16, 24)
    if chunks == 1 or microbatches % num_ranks == 0
]


@pytest.mark.parametrize(("num_ranks", "chunks", "microbatches"), SIZES)
def test_the_order_of_passes(num_ranks, chunks, microbatches):
    stages = Stages(num_ranks, microbatches, chunks)
    sent, received = {}, {}
    for rank in range(num_ranks):
        order = list(stages.turns(rank))
        assert len(set(order)) == len(order) == 2 * chunks * microbatches
        for chunk in range(chunks):
            for what in (FORWARD, BACKWARD):
                done = [one.microbatch for one in order if one[0] == what and one.chunk == chunk]
                assert done == list(range(microbatches)), "in the order of microbatches"
        kept = most = 0
        for one in order:
            kept += 1 if one.what == FORWARD else -1
            most = max(most, kept)
            assert one.what == FORWARD or order.index(one._replace(what=FORWARD)) < order.index(one)
        behind = num_ranks - 1 - rank
        first = behind if chunks == 1 else 2 * behind + (chunks - 1) * num_ranks
        assert most == min(first + 1, chunks * microbatches), "activations that are kept"
        for turn in order:
            if (dst := stages.target(rank, turn)) is not None:
                step = 1 if turn.what == FORWARD else -1
                stage = turn.chunk * num_ranks + rank + step
                of_next = turn._replace(chunk=stage // num_ranks)
                sent.setdefault((turn.what, rank, dst), []).append(of_next)
            if (src := stages.source(rank, turn)) is not None:
                received.setdefault((turn.what, src, rank), []).append(turn)
    assert sent == received, "each line's messages come in the order in which they are needed"


@pytest.mark.parametrize(("num_ranks", "chunks", "microbatches"), SIZES)
def test_no_rank_waits_in_a_circle(num_ranks, chunks, microbatches):
    """Not with one box between two ranks; and no box more would make it faster, nor is there
    another wait than that of the formula, where messages take no time."""
    stages = Stages(num_ranks, microbatches, chunks)
    passes = chunks * microbatches
    for backward_us in (1.0, 2.0, 3.0):
        for boxes in (1, 2, 100):
            played = stages.played(Times(1.0, backward_us), boxes)
            assert stages.waits(played) == pytest.approx(stages.bubble, abs=1e-9)
    assert stages.bubble == bubble(num_ranks, microbatches, chunks)
    assert stages.bubble == (num_ranks - 1) / (passes + num_ranks - 1)
    # Any times at all: each message is beside a pass, and nothing stops.
    slow = stages.played(Times(1.0, 2.0, 0.7), 1)
    assert stages.played(Times(1.0, 2.0, 0.7), 2).end_us <= slow.end_us + 1e-9


def test_what_would_stop_is_found_out_and_refused():
    """Numbers of microbatches that num_ranks does not divide: interleaved, some would stop."""
    with pytest.raises(weft.UsageError, match="5 microbatches over 4 ranks of 3 stages each"):
        Stages(4, 5, 3)
    stages = Stages(4, 4, 3)
    object.__setattr__(stages, "microbatches", 5)
    with pytest.raises(weft.UsageError, match="wait for each other: rank 0, .* of chunk"):
        stages.played()
    with pytest.raises(weft.UsageError, match="wait for each other: .* waits for a box"):
        Stages(2, 2).played(boxes=0)


def test_interleaved_stages_wait_less():
    plain, interleaved = Stages(4, 8), Stages(4, 8, 4)
    times = Times(400.0, 800.0)
    part = Times(100.0, 200.0)
    assert plain.played(times).end_us == pytest.approx(11 * 1200)
    assert interleaved.played(part).end_us == pytest.approx((8 + 3 / 4) * 1200)


def test_mistakes(ranks):
    def main():
        with weft.init(heap_bytes=1 << 20) as world:
            pipeline = pipeline_of(world, nn.Linear(HIDDEN, HIDDEN + world.rank), 2)
            inputs, targets = batch(3)
            name = "targets" if world.rank else "inputs"
            with pytest.raises(weft.UsageError, match=f"3 {name} for 2 microbatches"):
                pipeline.step(inputs, targets)
            with pytest.raises(weft.UsageError, match="3 microbatches over 2 ranks"):
                pipeline_of(world, stages_of(2), 3)
            for wrong in (0, 1.5):
                with pytest.raises(weft.UsageError, match="microbatches is"):
                    pipeline_of(world, stages_of(1)[0], wrong)

    ranks(main, 2)


def test_a_result_of_another_shape(ranks):
    def main():
        with weft.init(heap_bytes=1 << 20) as world:
            stage = nn.Linear(HIDDEN, HIDDEN + 1)
            pipeline_of(world, stage, 1, lambda y, _: y.sum()).step(*batch(1))

    with pytest.raises(
        weft.ShapeError, match=r"hands over \(3, 5\) of torch.float32, but was made"
    ):
        ranks(main, 2)


def test_a_stage_that_does_not_look_at_what_it_is_given(ranks):
    class Deaf(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(ROWS, HIDDEN))

        def forward(self, x):
            return self.weight * 2

    def main():
        with weft.init(heap_bytes=1 << 20) as world:
            pipeline_of(world, Deaf(), 1).step(*batch(1))

    with pytest.raises(weft.UsageError, match="chunk 0 on rank 1 does not depend on what"):
        ranks(main, 2)
