"""Of what crosses from node to node: rows once to each node, counted in the emulator."""

from __future__ import annotations

import pytest
import torch
from multiplying import EMU, check

import weft
from weft.base.topology import Topology, text_of
from weft.ops import cards

NODES = [(2, 2), (4, 4), (3, 1), (3, 2)]
N, K = 24, 16


def crossing(nodes: tuple[int, ...], main) -> dict[tuple[int, int], int]:
    """Bytes from node to node while all ranks run `main`."""
    with weft.emulated(nodes=nodes) as session:
        session.run(main)
        return dict(session.traffic.between_nodes(session.topology))


def rows_of(nodes: tuple[int, ...], m: int) -> list[int]:
    """Of each node, as torch.chunk splits them over ranks."""
    topology, found = Topology(nodes), [0] * len(nodes)
    for rank, part in enumerate(torch.arange(m).chunk(sum(nodes))):
        found[topology.seat(rank).node] += len(part)
    return found


def pairs(nodes: tuple[int, ...]) -> list[tuple[int, int]]:
    return [(i, j) for i in range(len(nodes)) for j in range(len(nodes)) if i != j]


@pytest.mark.parametrize("m", [160, 61])
@pytest.mark.parametrize("nodes", NODES, ids=text_of)
def test_gathered_rows_cross_once(nodes, m):
    op, num_ranks = cards()["ag_gemm"], sum(nodes)
    problem = op.problem(m=m, n=N, k=K, num_ranks=num_ranks, dtype="float32", nodes=nodes)
    config = op.choose(problem, EMU)

    def main():
        world = weft.init()
        check(op, op.run(world, problem, op.make_inputs(problem, world.rank), config), problem,
              world.rank)  # fmt: skip

    rows = rows_of(nodes, m)
    assert config.transport == "relay"
    assert crossing(nodes, main) == {(i, j): rows[i] * K * 4 for i, j in pairs(nodes)}
