"""Gradients of programs: those of what a program means, on global tensors."""

from __future__ import annotations

import pytest
import torch
from random_programs import global_inputs, of_rank, random_experts, random_layers, random_program

import weft
from weft.base.errors import UnsupportedError
from weft.compiler import (
    Compiled,
    Partial,
    Replicate,
    Shard,
    Tensor,
    Times,
    all_gather,
    all_reduce,
    kv_append,
    libraries,
    reduce_scatter,
    rms_norm,
    silu_mul,
)
from weft.compiler import program as compiled_for


def wanted(compiled: Compiled, sizes: dict[str, int], seed: int):
    """Inputs, what results are multiplied by, results and gradients: global ones."""
    program = compiled.stages.program
    inputs = {
        name: one.requires_grad_(one.is_floating_point())
        for name, one in global_inputs(program, sizes, seed).items()
    }
    results = libraries.reference(program, inputs)
    generator = torch.Generator().manual_seed(seed + 1)
    given = [torch.randn(one.shape, generator=generator) for one in results]
    loss = sum((one * other).sum() for one, other in zip(results, given, strict=True))
    leaves = {name: one for name, one in inputs.items() if one.requires_grad}
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return inputs, given, results, dict.fromkeys(inputs) | dict(zip(leaves, found, strict=True))


def check(world, compiled: Compiled, sizes: dict[str, int], seed: int, lowering="unfused") -> None:
    """One rank's gradients are its parts of the global ones; of what all have they are alike."""
    program, rank, num_ranks = compiled.stages.program, world.rank, world.num_ranks
    inputs, given, results, expected = wanted(compiled, sizes, seed)
    kinds = {one.name: one.type for one in program.tasks}

    def part(name, tensor):
        # Of a sum's summand the gradient is that of the sum.
        if kinds[name].placement == Partial():
            return tensor
        return of_rank(kinds[name], tensor, sizes, rank, num_ranks)

    own = [
        of_rank(kinds[name], one.detach(), sizes, rank, num_ranks).requires_grad_(one.requires_grad)
        for name, one in inputs.items()
    ]
    made = compiled.options(lowering=lowering)(*own, world=world, **sizes)
    made = made if isinstance(made, tuple) else (made,)
    loss = sum(
        (one * part(name, other)).sum()
        for name, one, other in zip(program.results, made, given, strict=True)
    )
    if loss.requires_grad:
        loss.backward()
    for name, leaf in zip(inputs, own, strict=True):
        if expected[name] is None:
            assert leaf.grad is None or not leaf.grad.any()
            continue
        want = part(name, expected[name])
        # Of what is 0, as with a choice of one expert, only fp32's noise is left.
        scale = max(float(expected[name].double().norm()), 1e-2)
        got = torch.zeros_like(want) if leaf.grad is None else leaf.grad
        assert float((got - want).double().norm()) <= 1e-4 * scale, (name, got, want)


def on_ranks(ranks, num_ranks, cases):
    def main():
        with weft.init() as world:
            for compiled, sizes, seed, lowering in cases:
                check(world, compiled, sizes, seed, lowering)

    ranks(main, num_ranks)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_random_programs(ranks, num_ranks):
    """Whatever is split, summed, gathered and used again, of any placement."""
    cases = [
        (random_program(10 * num_ranks + i, num_ranks), {"m": i % 5 + 1}, i, "unfused")
        for i in range(6)
    ]
    on_ranks(ranks, num_ranks, cases)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_many_random_programs(ranks, num_ranks):
    cases = [
        (random_program(1000 + 100 * num_ranks + i, num_ranks), {"m": i % 7 + 1}, i, "unfused")
        for i in range(40)
    ]
    on_ranks(ranks, num_ranks, cases)


def layer() -> Compiled:
    @compiled_for(
        mesh="tp",
        x=Tensor("float32", ("m", 16), Shard(0)),
        norm=Tensor("float32", (1, 16), Replicate()),
        w1=Tensor("float32", (16, 64), Shard(1)),
        w2=Tensor("float32", (32, 16), Shard(0)),
    )
    def layer(x, norm, w1, w2):
        return reduce_scatter(silu_mul(all_gather(rms_norm(x, norm)) @ w1) @ w2) + x

    return layer


def test_the_overlapped_lowering_has_the_unfused_ones_gradients(ranks):
    """Forward by its own kernels, backward by the operators."""
    on_ranks(ranks, 2, [(layer(), {"m": m}, m, "overlapped") for m in (8, 5)])


def test_without_sequence_parallelism(ranks):
    """What is alike on all ranks goes into columns of a weight: shares are summed there."""

    @compiled_for(
        mesh="tp",
        x=Tensor("float32", ("m", 16), Replicate()),
        w1=Tensor("float32", (16, 32), Shard(1)),
        w2=Tensor("float32", (32, 16), Shard(0)),
    )
    def twice(x, w1, w2):
        y = all_reduce((x @ w1) @ w2)
        return all_reduce((y @ w1) @ w2) + x

    on_ranks(ranks, 3, [(twice, {"m": 5}, 1, "unfused")])


@pytest.mark.slow
def test_experts(ranks):
    """Split along columns, or given to ranks, to which tokens are sent or not; routed within,
    tokens read twice, residuals."""
    seeds = (0, 1, 2, 3, 7, 12)
    cases = [(random_experts(seed, 2), {"m": 5 + seed}, seed, "unfused") for seed in seeds]
    on_ranks(ranks, 2, cases)


def test_deeper_layers(ranks):
    on_ranks(ranks, 2, [(random_layers(seed, 2), {"m": 6}, seed, "unfused") for seed in (1, 2)])


def test_what_is_written_in_place_has_none(ranks):
    @compiled_for(
        mesh="tp",
        cache=Tensor("float32", (Times("b", 4), 16), Shard(1)),
        rows=Tensor("float32", ("b", 16), Shard(1)),
        lengths=Tensor("int32", (1, "b"), Replicate()),
    )
    def append(cache, rows, lengths):
        return kv_append(cache, rows, lengths)

    def main():
        with weft.init() as world:
            given = [torch.zeros(8, 16), torch.ones(2, 16), torch.ones(1, 2, dtype=torch.int32)]
            given[1].requires_grad_()
            with pytest.raises(UnsupportedError, match="kv_append writes its operand in place"):
                append(*given, world=world)

    ranks(main, 1)


def test_no_gradient_is_asked_for(ranks, monkeypatch):
    monkeypatch.setattr("weft.plan.run_differentiated", None)
    one = layer()

    def main():
        with weft.init() as world, torch.no_grad():
            parts = [torch.ones(4, 16), torch.ones(1, 16), torch.ones(16, 64), torch.ones(32, 16)]
            given = [part.requires_grad_() for part in parts]
            assert not one(*given, world=world).requires_grad

    ranks(main, 1)
