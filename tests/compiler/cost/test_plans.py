"""Plans played through in time: nothing before what it needs, everything once, near the model."""

from __future__ import annotations

import importlib
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from math import ceil
from pathlib import Path

import pytest
from ir_reader import read

from weft.base.errors import UsageError
from weft.base.hardware import H200X4
from weft.base.schedule import LINKS
from weft.base.target import parse_target
from weft.compiler import (
    Facts,
    Shard,
    Tensor,
    all_gather,
    attention,
    gather_schedules,
    program,
    reduce_scatter,
    silu_mul,
)
from weft.compiler.cost.plan_at import PlanAt
from weft.compiler.cost.plans import predict
from weft.compiler.cost.products import (
    Product,
    few_rows_us,
    gathered_us,
    reduced_us,
    scattered_us,
)
from weft.ir import device, schedule
from weft.plan import gathered

GOLDEN = Path(__file__).parents[1] / "golden"


def golden(name: str) -> device.Plan:
    return read(device, (GOLDEN / f"{name}.plan").read_text())


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.plan")), ids=lambda path: path.stem)
@pytest.mark.parametrize("m, num_ranks", [(512, 4), (7, 3)])
def test_every_plan_ends_on_all_ranks(path, m, num_ranks):
    plan = golden(path.stem)
    found = predict(plan, {"m": m}, num_ranks, H200X4)
    assert {span.rank for span in found.spans} == set(range(num_ranks)) and found.end_us < 1e4
    # Where parts are whole tiles there are no edges to copy; on one node no sums are relayed.
    launches = {
        one.kernel
        for one in plan.of(device.Launch)
        if [do.kind for do in one.body] != ["edges"] and not device.adds_up(one)
    }
    for rank in range(num_ranks):
        assert launches <= {span.name for span in of_kind(found, rank, "kernel")}
        assert all(span.start_us <= span.end_us for span in found.spans)


def of_kind(schedule, rank: int, kind: str):
    return [span for span in schedule.spans if (span.rank, span.kind) == (rank, kind)]


@pytest.mark.parametrize("m, num_ranks", [(4096, 4), (997, 3), (130, 8), (3, 4), (1, 1), (0, 2)])
@pytest.mark.parametrize(
    "name",
    ["ag_gemm_put", "ag_gemm_push", "ag_gemm_pushers", "ag_gemm_scaled"],
)
def test_a_gathering_product_does_each_tile_once_and_none_before_its_rows(name, m, num_ranks):
    found = predict(golden(name), {"m": m}, num_ranks, H200X4)
    columns = ceil(28672 / num_ranks)
    for rank in range(num_ranks):
        parts = of_kind(found, rank, "work")
        tiles = sum(int(part.name.split(" tile")[0]) for part in parts)
        # Rows that share a tile with others' are multiplied with those: they have no span.
        assert tiles <= ceil(m / 128) * ceil(columns / 256)
        if m % (num_ranks * 128) == 0:
            assert tiles == ceil(m / 128) * ceil(columns / 256)
        arrived = {s.source_rank: s.arrived_us for s in found.signals
                   if s.rank == rank and s.name.endswith("_ready")}  # fmt: skip
        for part in parts:
            if part.about in arrived:
                assert part.start_us >= arrived[part.about], part
        assert all(one.end_us <= two.start_us for one, two in pairwise(parts))
        if m:
            kernel = next(s for s in of_kind(found, rank, "kernel") if s.name.endswith("multiply"))
            assert all(kernel.start_us <= s.start_us <= s.end_us <= kernel.end_us for s in parts)


def test_own_tiles_begin_at_once_and_others_as_their_rows_come():
    found = predict(golden("ag_gemm_put"), {"m": 4096}, 4, H200X4)
    for rank in range(4):
        first = {}
        for tile in of_kind(found, rank, "work"):
            first[tile.about] = min(tile.start_us, first.get(tile.about, tile.start_us))
        hops = [(rank + hop) % 4 for hop in range(4)]
        assert sorted(first, key=first.get) == hops
        copies = of_kind(found, rank, "copy")
        assert [copy.about for copy in copies] == [rank] * 3
        assert first[rank] < copies[0].start_us


@pytest.mark.parametrize("name, back", [("gemm_rs", 0), ("gemm_ar_two_shot", 1)])
@pytest.mark.parametrize("m, num_ranks", [(4096, 4), (997, 3), (3, 4)])
def test_sums_are_made_once_all_parts_are_there(name, back, m, num_ranks):
    found = predict(golden(name), {"m": m}, num_ranks, H200X4)
    rows = ceil(m / num_ranks)
    held = [max(0, min(rows, m - rank * rows)) for rank in range(num_ranks)]
    for rank in range(num_ranks):
        work = of_kind(found, rank, "work")
        sums = [s for s in work if s.name == "sums of own rows"]
        assert len(sums) == (held[rank] > 0)
        for one in sums:  # other ranks' parts were made, and have come
            sent = [s for s in found.signals if s.rank == rank and s.name == "partials_ready"]
            assert all(signal.arrived_us <= one.start_us for signal in sent)
        parts = Counter(s.about for s in work if "'s part" in s.name)
        assert parts == Counter(owner for owner in range(num_ranks) if held[owner])
        assert sum("come back" in s.name for s in work) == back * sum(
            held[other] > 0 for other in range(num_ranks) if other != rank
        )
    for signal in found.signals:
        assert signal.arrived_us >= signal.sent_us


def test_packets_and_rows_are_played_too():
    for name, m in (("gemm_ar_one_shot", 64), ("all_reduce_rms_norm", 512)):
        found = predict(golden(name), {"m": m}, 4, H200X4)
        assert {span.rank for span in found.spans} == {0, 1, 2, 3} and found.end_us < 200


@pytest.mark.parametrize("m", [512, 1024, 4096, 8192])
def test_a_plan_ends_when_the_model_says_that_chose_it(m):
    """One model: what is drawn is what was reckoned with, event by event."""
    wide = Product(m, 7168, 4096, 4, (128, 256, 64), group_m=min(8, m // 4 // 128))
    played = predict(golden("ag_gemm_put"), {"m": m}, 4, H200X4).end_us
    assert played == pytest.approx(gathered_us(wide, H200X4, "ce_push"), rel=0.02)
    played = predict(golden("ag_gemm_pushers"), {"m": m}, 4, H200X4).end_us
    model = gathered_us(
        wide, H200X4, "sm_push", num_programs=H200X4.num_sms - 1, pushers=schedule.PUSHERS
    )
    assert played == pytest.approx(model, rel=0.02)
    deep = Product(m, 4096, 3584, 4, (128, 256, 64))
    for name, model in (("gemm_rs", scattered_us), ("gemm_ar_two_shot", reduced_us)):
        played = predict(golden(name), {"m": m}, 4, H200X4).end_us
        assert played == pytest.approx(model(deep, H200X4), rel=0.06)


@pytest.mark.parametrize("m", [16, 64])
def test_packets_bring_few_rows_in_about_the_time_by_which_they_are_chosen(m):
    found = predict(golden("ag_gemm_packets"), {"m": m}, 4, H200X4)
    few = Product(m, 7168, 4096, 4, (64, 64, 128))
    assert found.end_us == pytest.approx(few_rows_us(few, H200X4, by_packets=True), rel=0.3)
    sent = [one for one in of_kind(found, 0, "transfer") if one.lane == LINKS]
    assert {one.name for one in sent} == {
        f"{2 * m // 4 * 4096 * 2} bytes to rank {peer}" for peer in (1, 2, 3)
    }


def test_it_takes_no_longer_the_more_rows_there_are():
    """Spans are of ranks' rows, not of tiles."""
    few, many = (predict(golden("gemm_rs"), {"m": m}, 4, H200X4) for m in (2048, 1 << 20))
    assert len(few.spans) == len(many.spans) < 100


def test_libraries_collectives_take_longer_between_nodes():
    plan = mlp_by_libraries()
    near, far = (predict(plan, {"m": 32768}, 4, H200X4, nodes) for nodes in ((), (2, 2)))
    for name in ("all_gather", "reduce_scatter"):
        took = [next(s for s in of_kind(one, 0, "transfer") if s.name == name)
                for one in (near, far)]  # fmt: skip
        assert took[1].end_us - took[1].start_us > 1.5 * (took[0].end_us - took[0].start_us)


def test_the_same_plan_gives_the_same_times():
    one, two = (predict(golden("gemm_rs"), {"m": 997}, 3, H200X4) for _ in range(2))
    assert one == two


def mlp_by_libraries() -> device.Plan:
    @program(
        mesh="tp", x=Tensor("bfloat16", ("m", 512), Shard(0)),
        w1=Tensor("bfloat16", (512, 2048), Shard(1)), w2=Tensor("bfloat16", (1024, 512), Shard(0)),
    )  # fmt: skip
    def mlp(x, w1, w2):
        return reduce_scatter(silu_mul(all_gather(x) @ w1) @ w2)

    return mlp.stages.plan


def test_calls_of_libraries_come_one_after_the_other():
    found = predict(mlp_by_libraries(), {"m": 2048}, 4, H200X4)
    names = [s.name for s in found.spans if s.rank == 2 and s.kind != "wait"]
    assert names == ["all_gather", "matmul", "silu_mul", "matmul", "reduce_scatter"]
    ends = [s.end_us for s in found.spans if s.rank == 2]
    assert ends == sorted(ends)


def test_what_is_missing_is_named():
    with pytest.raises(UsageError, match="size m is not given"):
        predict(golden("gemm_rs"), {}, 4, H200X4)
    lone = read(
        device,
        "program(p, mesh=tp)\nx = buffer(bfloat16, (m, 8), role=symmetric)\n"
        "ready = channel(x, m)\nwait(ready)\n",
    )
    with pytest.raises(UsageError, match="never ends.*ready"):
        predict(lone, {"m": 8}, 2, H200X4)


def test_tiles_are_of_the_product_not_of_what_becomes_of_it():
    """silu_mul leaves half of the columns; all are multiplied."""
    (launch,) = [one for one in golden("mlp").of(device.Launch) if one.kernel == "mlp_multiply"]
    assert [do.kind for do in launch.body] == ["matmul", "silu_mul"]
    found = predict(golden("mlp"), {"m": 4096}, 4, H200X4)
    first = [s for s in of_kind(found, 0, "kernel") if s.name == "mlp_multiply"][0]
    flops = 2 * 4096 * 4096 * 24576 / 4
    assert first.end_us - first.start_us > flops / 800e6


def test_rows_carry_all_their_bytes():
    m = 4096
    found = predict(golden("all_reduce_rms_norm"), {"m": m}, 4, H200X4)
    sent = of_kind(found, 0, "transfer")
    took = sum(span.end_us - span.start_us for span in sent)
    # A summand of each foreign row, and the total of own rows to three peers.
    nbytes = (3 * m / 4 + 3 * m / 4) * 4096 * 2
    assert took == pytest.approx(nbytes / H200X4.push_gbps / 1e3, rel=0.1)


@pytest.mark.parametrize(("name", "owners"), [
    ("ag_gemm_nodes", [1, 0, 3, 2]), ("gemm_ar_nodes", [2, 3, 0, 1]),
])  # fmt: skip
def test_tiles_come_node_by_node(name, owners):
    at = PlanAt(golden(name), {"m": 1024}, 4, (2, 2))
    assert at.owners(1, golden(name).of(device.Launch)[-1]) == owners


def test_another_node_is_farther():
    plan, sizes = golden("ag_gemm_push"), {"m": 4096}
    near = predict(plan, sizes, 4, H200X4)
    far = predict(plan, sizes, 4, H200X4, (2, 2))
    assert far.end_us > near.end_us
    for found, gbps in ((near, H200X4.push_gbps), (far, H200X4.far_gbps)):
        sent = [s for s in found.spans if s.rank == 0 and s.name.endswith("to rank 3")]
        took = sum(span.end_us - span.start_us for span in sent)
        assert took == pytest.approx(1024 * 4096 * 2 / gbps / 1e3)


@pytest.mark.parametrize("nodes", [(2, 2), (4, 4), (3, 2), (3, 1)])
def test_relayed_rows_cross_once_to_each_node(nodes):
    """By each rank's port its own rows; by its node's links these, and what it passes on."""
    plan, sizes, num_ranks = golden("ag_gemm_relay"), {"m": 4096 * sum(nodes)}, sum(nodes)
    found = predict(plan, sizes, num_ranks, H200X4, nodes)
    at = PlanAt(plan, sizes, num_ranks, nodes)
    moved = {False: 0, True: 0}
    for span in (one for rank in range(num_ranks) for one in of_kind(found, rank, "transfer")):
        num_bytes, peer = int(span.name.split()[0]), int(span.name.split()[-1])
        moved[at.node_of[span.rank] != at.node_of[peer]] += num_bytes
    part = 4096 * 4096 * 2
    assert moved[True] == part * num_ranks * (len(nodes) - 1)
    assert moved[False] == part * sum(size * (size - 1) + (num_ranks - size) * (size - 1)
                                      for size in nodes)  # fmt: skip
    by_puts = predict(golden("ag_gemm_nodes"), sizes, num_ranks, H200X4, nodes)
    assert found.end_us < by_puts.end_us


@pytest.mark.parametrize("name", ["gemm_rs_relay", "moe_rs_relay"])
@pytest.mark.parametrize("nodes", [(2, 2), (4, 4), (3, 2), (3, 1)])
def test_relayed_sums_cross_once_to_each_rank_of_another_node(name, nodes):
    num_ranks = sum(nodes)
    plan, sizes = golden(name), {"m": 1024 * num_ranks}
    found = predict(plan, sizes, num_ranks, H200X4, nodes)
    at, crossed = PlanAt(plan, sizes, num_ranks, nodes), 0
    for span in (one for rank in range(num_ranks) for one in of_kind(found, rank, "transfer")):
        if span.name == "moe_route":  # a library's
            continue
        if at.node_of[span.rank] != at.node_of[int(span.name.split()[-1])]:
            crossed += int(span.name.split()[0])
    assert crossed == 1024 * at.row_bytes("scattered") * num_ranks * (len(nodes) - 1)


@pytest.mark.parametrize("causal", [True, False])
def test_attention_takes_as_long_as_its_tokens_see_keys(causal):
    """Causal, the last of four ranks sees seven times as many pairs as the first."""
    kind = Tensor("bfloat16", ("m", 4096), Shard(0))

    @program(mesh="sp", q=kind, k=kind, v=kind)
    def attend(q, k, v):
        return attention(q, all_gather(k), all_gather(v), head=128, causal=causal)

    plan = attend.overlapped(Facts({"m": 65536}, 4)).plan
    spans = predict(plan, {"m": 65536}, 4, H200X4).spans
    took = [span.end_us - span.start_us - H200X4.library_us for span in spans]
    assert took[3] / took[0] == pytest.approx(7 if causal else 1, rel=0.01)
    pairs = 16384 * (3 * 16384 + 16384 / 2 if causal else 4 * 16384)
    assert took[3] == pytest.approx(4e-6 * pairs * 4096 / H200X4.library_tflops, rel=0.01)


@pytest.mark.parametrize("nodes", [(2, 2), (4, 4, 4, 4)])
def test_an_operators_rows_come_node_by_node(nodes):
    """Near ranks' rows are there long before the port has brought the others', for which tiles that
    are taken rank by rank would wait."""
    ag_gemm = importlib.import_module("weft.ops.ag_gemm")
    problem = gathered.Problem(1024, 7168, 8192, sum(nodes), nodes=nodes)
    config = next(ag_gemm.candidates(problem, parse_target("cuda:90")))
    made = gathered.traced(ag_gemm.program, problem)
    plan = gather_schedules.planned(made, config, problem, parse_target("cuda:90")).plan
    (multiply,) = [one for one in plan.of(device.Launch) if not device.is_relay(one)]
    assert multiply.order == "hierarchical_gather"
    in_turn = replace(multiply, order="gather")
    rank_by_rank = replace(plan, statements=tuple(
        in_turn if one is multiply else one for one in plan.statements
    ))  # fmt: skip
    by_node, by_rank = (
        predict(one, {"m": 1024}, sum(nodes), H200X4, nodes).end_us for one in (plan, rank_by_rank)
    )
    assert by_node < 0.95 * by_rank
