"""Stages on ranks: losses and gradients of one process, bit by bit; the order of passes."""

from __future__ import annotations

import pytest
import torch
from parallel import drawn, seeded
from torch import nn
from torch.nn import functional

import weft
from weft.layers.pipeline import BACKWARD, FORWARD, Pipeline, bubble, turns

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


@pytest.mark.parametrize(
    ("num_stages", "microbatches"),
    [(2, 1), (2, 3), (3, 4), (4, 2), pytest.param(4, 6, marks=pytest.mark.slow), (1, 2)],
)
def test_losses_and_gradients_of_one_process(ranks, num_stages, microbatches):
    wanted, (inputs, targets) = stages_of(num_stages), batch(microbatches)
    totals = [alone(wanted, inputs, targets) for _ in range(2)]

    def main():
        with weft.init() as world:
            mine = stages_of(num_stages)[world.rank]
            pipeline = Pipeline(
                mine, world, shape=(ROWS, HIDDEN), microbatches=microbatches,
                loss=functional.mse_loss, heap_bytes=1 << 20,
            )  # fmt: skip
            for total in totals:  # gradients are added up
                got = pipeline.step(inputs, targets)
                if world.rank == num_stages - 1:
                    assert torch.equal(got, total)
            for one, other in zip(mine.parameters(), wanted[world.rank].parameters(), strict=True):
                assert torch.equal(one.grad, other.grad)
            pipeline.close()

    for seed in range(2):
        ranks(main, num_stages, seed=seed)


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("microbatches", [1, 2, 4, 9])
def test_the_order_of_passes(stages, microbatches):
    for stage in range(stages):
        order = list(turns(stage, stages, microbatches))
        for what in (FORWARD, BACKWARD):
            done = [one.microbatch for one in order if one.what == what]
            assert done == list(range(microbatches)), "in the order of microbatches"
        kept = most = 0
        for one in order:
            kept += 1 if one.what == FORWARD else -1
            most = max(most, kept)
        assert most == min(stages - stage, microbatches), "as many as there are stages to go"
    assert bubble(stages, microbatches) == (stages - 1) / (microbatches + stages - 1)


def test_mistakes(ranks):
    def main():
        with weft.init() as world:
            stage = nn.Linear(HIDDEN, HIDDEN + world.rank)
            pipeline = Pipeline(
                stage, world, shape=(ROWS, HIDDEN), microbatches=2, loss=functional.mse_loss,
                heap_bytes=1 << 20,
            )  # fmt: skip
            inputs, targets = batch(3)
            name = "targets" if world.rank else "inputs"
            with pytest.raises(weft.UsageError, match=f"3 {name} for 2 microbatches"):
                pipeline.step(inputs, targets)
            pipeline.close()

    ranks(main, 2)


def test_a_result_of_another_shape(ranks):
    def main():
        with weft.init() as world:
            stage = nn.Linear(HIDDEN, HIDDEN + 1)
            pipeline = Pipeline(
                stage, world, shape=(ROWS, HIDDEN), microbatches=1, loss=functional.mse_loss,
                heap_bytes=1 << 20,
            )  # fmt: skip
            pipeline.step(*batch(1))

    with pytest.raises(
        weft.ShapeError, match=r"hands over \(3, 5\) of torch.float32, but was made"
    ):
        ranks(main, 2)
