"""Of tokens that cross from node to node: rows once to each node that has experts of theirs, and
one sum back; of products that are summed over ranks one sum of each node. Counted in the emulator.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from test_between_nodes import NODES, crossing, pairs
from test_ep_dispatch import check

import weft
from weft.base.errors import ConfigError
from weft.base.target import TARGETS
from weft.base.topology import Topology, text_of
from weft.language import triton_api
from weft.ops import card
from weft.ops.ep_dispatch import TABLES
from weft.plan import starts
from weft.plan.expert_parallel import Config, candidates, predict
from weft.plan.routing import tables_of
from weft.verify import compiled

EMU = TARGETS["emu"]
DISPATCH, COMBINE = card("ep_dispatch"), card("ep_combine")
ROWS, TOP_K, COLUMNS = 5, 3, 20
WAYS = {way: Config(channels=2, block=32, tokens=2, batch=4, transport=way)
        for way in ("sm_push", "relay")}  # fmt: skip
ROUTINGS = ("uniform", "skewed", "one hot", "some have none", "empty")
QUICK = (((2, 2), "skewed"), ((2, 2), "some have none"), ((3, 1), "one hot"), ((3, 2), "uniform"))
CASES = [
    pytest.param(*case, id=f"{text_of(case[0])} {case[1]}",
                 marks=() if case in QUICK else pytest.mark.slow)
    for case in product(NODES, ROUTINGS)
]  # fmt: skip


def problem_of(op, nodes, dtype="float32", **more):
    """Two experts to a rank."""
    num_ranks = sum(nodes)
    sizes = {"experts": 2 * num_ranks, "top_k": TOP_K, "tile_m": 4, **more}
    return op.problem(ROWS * num_ranks, COLUMNS, num_ranks, dtype, nodes, **sizes)


def choices(routing, nodes):
    """Of each rank's tokens, whose experts are drawn as `routing` says."""
    generator, found = torch.Generator().manual_seed(len(routing)), []
    experts = 2 * sum(nodes)
    for rank in range(sum(nodes)):
        share = torch.rand(ROWS, experts, generator=generator)
        if routing == "skewed":
            share[:, -2:] += 1
        ids = share.topk(TOP_K).indices
        if routing == "one hot":
            ids = torch.tensor([0, -1, -1]).repeat(ROWS, 1)
        elif routing == "some have none":
            ids[torch.rand(ids.shape, generator=generator) < 0.6] = -1
            ids = ids[: ROWS - rank % 3]
        elif routing == "empty":
            ids = ids[:0]
        found.append(ids.int())
    return found


def rows_between(ids, nodes, is_relayed):
    """From node i to node j: of tokens of i, how many rows go to j; to one rank, or to each."""
    topology, found = Topology(nodes), dict.fromkeys(pairs(nodes), 0)
    for rank, one in enumerate(ids):
        here = topology.seat(rank).node
        for token in one.tolist():
            ranks = {choice // 2 for choice in token if choice >= 0}
            there = [topology.seat(to).node for to in ranks]
            for node in set(there) if is_relayed else there:
                if node != here:
                    found[here, node] += 1
    return found


def inputs_of(problem, ids):
    generator = torch.Generator().manual_seed(7)
    return [
        {"x": torch.randn(len(one), COLUMNS, generator=generator),
         "ids": one, "weights": torch.rand(one.shape, generator=generator)}
        for one in ids
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "routing"), CASES)
def test_rows_cross_once_to_each_node(nodes, routing):
    ids = choices(routing, nodes)
    problem = problem_of(DISPATCH, nodes)
    inputs = inputs_of(problem, ids)
    for way, config in WAYS.items():

        def main(again):
            one = replace(problem, again=again)
            world = weft.init()
            got = DISPATCH.run(world, one, inputs[world.rank], config)
            check(got, one, world.rank, inputs)

        # What choices and tables need crosses in the first call alone.
        once, twice = (crossing(nodes, lambda again=again: main(again)) for again in (0, 1))
        rows = rows_between(ids, nodes, way == "relay")
        # Choices go ahead of rows, for whoever passes these on.
        ahead = 4 * TOP_K * ROWS * (way == "relay")
        assert {pair: twice.get(pair, 0) - once.get(pair, 0) for pair in rows} == {
            (i, j): 4 * COLUMNS * count + ahead * nodes[i] for (i, j), count in rows.items()
        }


def by_nodes(problem, inputs):
    """ep_combine's reference where sums of far nodes are relayed: each is rounded once more."""
    topology, outs = Topology(problem.nodes), []
    shares = []
    for one in inputs:
        share, first = torch.zeros(problem.num_tokens, problem.n), 0
        for size in one["counts"].sum(0).tolist():
            rows = slice(first, first + size)
            weight = one["weight_of"][rows, None]
            share[one["token_of"][rows].long()] += one["y"][rows].float() * weight
            first += size
        shares.append(share.to(problem.torch_dtype).float())
    for rank, one in enumerate(inputs):
        own = slice(rank * problem.rows, rank * problem.rows + len(one["ids"]))
        seat, total = topology.seat(rank), torch.zeros(len(one["ids"]), problem.n)
        for other in range(problem.num_ranks):
            there = topology.seat(other)
            if there.node == seat.node:
                total += shares[other][own]
            elif there.local_rank == seat.local_rank % there.local_size:
                first = other - there.local_rank
                node = sum(shares[first : first + there.local_size][1:], shares[first])
                total += node[own].to(problem.torch_dtype).float()
        outs.append(total.to(problem.torch_dtype))
    return outs


@pytest.mark.few(1)
@pytest.mark.parametrize(("nodes", "routing"), CASES)
def test_one_sum_of_each_node_crosses(nodes, routing):
    """The same bits in every run: a node's shares added up in the order of its ranks."""
    ids = choices(routing, nodes)
    dtype = "float32" if routing == "skewed" else "bfloat16"
    sent, problem = problem_of(DISPATCH, nodes), problem_of(COMBINE, nodes, dtype)
    made, width = inputs_of(sent, ids), problem.itemsize * COLUMNS
    filled = [{"y": torch.randn(problem.capacity, COLUMNS).to(problem.torch_dtype), **one}
              for one in (dict(zip(TABLES, of_rank[1:], strict=True))
                          for of_rank in DISPATCH.reference(sent, made))]  # fmt: skip
    for of_rank, given in zip(filled, made, strict=True):
        of_rank["weights"] = given["weights"]
    wanted = {"sm_push": COMBINE.reference(problem, filled), "relay": by_nodes(problem, filled)}
    for way, config in WAYS.items():

        def main():
            world = weft.init()
            out = COMBINE.run(world, problem, filled[world.rank], config)
            world.synchronize()
            assert torch.equal(out, wanted[way][world.rank])

        rows = rows_between(ids, nodes, way == "relay")
        counted = crossing(nodes, main)
        assert {pair: counted.get(pair, 0) for pair in rows} == {
            (j, i): width * count for (i, j), count in rows.items()
        }


def test_what_is_taken_is_what_carries_less():
    """Where nodes are alike each port has fewer rows to carry; of uneven ones a few ports have all,
    and rows of choices are no sums."""
    sizes = {"experts": 256, "top_k": 8}
    for op in (DISPATCH, COMBINE):
        problem = op.problem(8 * 4096, 7168, 8, "bfloat16", (4, 4), **sizes)
        first, other = candidates(problem, EMU)
        assert (first.transport, other.transport) == ("relay", "sm_push")
        assert predict(problem, EMU, first) < 0.6 * predict(problem, EMU, other)
        alone = replace(problem, num_ranks=2, nodes=(1, 1), capacity=-1)
        assert next(iter(candidates(alone, EMU))).transport == "sm_push"
        assert predict(replace(problem, nodes=(8,)), EMU, other) is None
        with pytest.raises(ConfigError, match="transport='relay'"):
            first.check(replace(problem, nodes=(8,)), EMU)
    by_choice = replace(problem, by_choice=True)
    assert [one.transport for one in candidates(by_choice, EMU)] == ["sm_push"]


@pytest.mark.slow
@pytest.mark.parametrize("target", ["cuda:90", "cuda:100", "hip:gfx942"])
@pytest.mark.parametrize("op", [DISPATCH, COMBINE], ids=["ep_dispatch", "ep_combine"])
def test_relaying_kernels_compile_and_keep_their_waits(op, target):
    problem = op.problem(4096, 7168, 8, "bfloat16", (4, 4), experts=256, top_k=8)
    config = next(iter(candidates(problem, TARGETS[target])))
    assert config.transport == "relay"
    *_, (fn, record) = op.kernels(problem, config, TARGETS[target])
    report = compiled(triton_api.compile_kernel(fn, record, TARGETS[target]), TARGETS[target])
    assert report.ok, "\n".join(map(str, report.findings))


def cases_of_sums():
    """moe_rs and moe_ar; of either, experts by their columns or whole ones, in turns."""
    quick = (("moe_rs", (2, 2), "skewed"), ("moe_ar", (3, 1), "some have none"))
    for i, case in enumerate(product(("moe_rs", "moe_ar"), NODES, ROUTINGS)):
        marks = () if case in quick else pytest.mark.slow
        text = f"{case[0]} {text_of(case[1])} {case[2]}"
        yield pytest.param(*case, i % 2 == 0, id=text, marks=marks)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "nodes", "routing", "split_experts"), list(cases_of_sums()))
def test_sums_over_experts_cross_once(name, nodes, routing, split_experts, monkeypatch):
    """A token's sum of each node to each other one, be it of no choices; all-reduced, the result
    goes back. By puts each rank's share does. A relay adds up a row in several blocks of columns.
    """
    monkeypatch.setattr(starts, "SUMMED", 16)
    ids, op, num_ranks = choices(routing, nodes), card(name), sum(nodes)
    problem = op.problem(
        ROWS * num_ranks, COLUMNS, num_ranks, "float32", nodes, k=16, experts=2 * num_ranks,
        top_k=TOP_K, tile_m=16, split_experts=split_experts,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(7)
    everyone = [{"ids": one, "weights": torch.rand(one.shape, generator=generator)} for one in ids]
    inputs = []
    for rank, one in enumerate(everyone):
        empty = torch.full((ROWS - len(one["ids"]), TOP_K), -1)
        everyone[rank] = {"ids": torch.cat([one["ids"], empty.int()]),
                          "weights": torch.cat([one["weights"], empty.float()])}  # fmt: skip
    for rank in range(num_ranks):
        made = tables_of(problem, rank, everyone)
        mine = op.make_inputs(problem, rank) | made._asdict()
        mine["x"] = mine["x"].nan_to_num(1.0).masked_fill(made.token_of[:, None] < 0, torch.nan)
        inputs.append(mine)
    expected = op.reference(problem, inputs)
    rows, is_back = [ROWS * size for size in nodes], name == "moe_ar"
    for transport in ("relay", "sm_push"):
        first = next(iter(op.candidates(problem, EMU)))
        config = replace(first, transport=transport)

        def main():
            world = weft.init()
            out = op.run(world, problem, inputs[world.rank], config)
            torch.testing.assert_close(out, expected[world.rank], rtol=1e-4, atol=1e-4)

        is_relayed = transport == "relay"
        times = {(i, j): (1, 1) if is_relayed else (nodes[i], nodes[j]) for i, j in pairs(nodes)}
        assert crossing(nodes, main) == {
            (i, j): 4 * COLUMNS * (out * rows[j] + is_back * back * rows[i])
            for (i, j), (out, back) in times.items()
        }
