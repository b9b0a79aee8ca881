"""Each signal of sums that are relayed is needed: of the product's and of the relay's kernel."""

from __future__ import annotations

import pytest
import torch

import weft
from weft.base.dtypes import tolerance
from weft.compiler import Settings, Shard, Tensor, reduce_scatter
from weft.tools.mutants import searched
from weft.verify.laggards import chooser_of
from weft.verify.mutants import Bounds, Run, WrongAnswer

M, N, K = 56, 24, 12
TILES = {"product": (16, 16, 16)}


@weft.program(
    mesh="tp", a=Tensor("float32", ("m", K), Shard(1)), b=Tensor("float32", (K, N), Shard(0))
)
def gemm_rs(a, b):
    product = a @ b
    return reduce_scatter(product)


def run_on(nodes: tuple[int, ...]) -> Run:
    """Calls of several sizes behind each other on one slot, other numbers each."""
    num_ranks, sums = sum(nodes), gemm_rs.stages.program.results[0]
    program = gemm_rs.options(settings=Settings(tiles=TILES, engines={sums: "relay"}))
    whole = [(torch.randn(m, K), torch.randn(K, N)) for m in (M, M, 1, M, 25, M)]

    def main():
        world, results = weft.init(), []
        for a, b in whole:
            own = a.chunk(num_ranks, 1)[world.rank].clone(), b.chunk(num_ranks)[world.rank].clone()
            results.append(program(*own, world=world, m=len(a)))
        for (a, b), got in zip(whole, results, strict=True):
            each = -(-len(a) // num_ranks)
            wanted = (a @ b)[each * world.rank :][:each]
            if not (got - wanted).norm() <= tolerance("float32", K) * wanted.norm():
                raise WrongAnswer
        world.close()

    def run(seed, rewrite, observers=()):
        with weft.emulated(
            nodes=nodes, seed=seed, collect=True, rewrite=rewrite, chooser=chooser_of(seed),
            observers=observers,
        ) as session:  # fmt: skip
            session.run(main)
        return session.report

    return Run("x".join(map(str, nodes)), run)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("nodes", [(2, 1), (1, 2), (2, 2)], ids=str)
def test_every_signal_is_needed(nodes, monkeypatch):
    monkeypatch.setenv("WEFT_SLOTS", "1")
    bounds = Bounds(schedules=16, argued=2, jobs=1)
    report = searched([run_on(nodes)], bounds, "gemm_rs", sum(nodes), None)
    assert len(report.verdicts) > 40 and report.ok, str(report)
