"""Of ranks that do alike one is played: with the end of playing all."""

from __future__ import annotations

from pathlib import Path

import pytest
from ir_reader import read

from weft.base.errors import UsageError
from weft.base.fabric import Fabric
from weft.base.hardware import H200X4
from weft.base.machines import KNOWN, find_machine
from weft.base.target import TARGETS
from weft.compiler import Facts, Shard, Tensor, all_gather, attention, program
from weft.compiler.cost.alike import classes
from weft.compiler.cost.plan_at import PlanAt
from weft.compiler.cost.plans import predict
from weft.ir import device

GOLDEN = Path(__file__).parents[1] / "golden"
NODES = [(), (4, 4), (2, 2, 2, 2), (6, 2)]


@pytest.mark.few(13)
@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.plan")), ids=lambda path: path.stem)
def test_one_of_each_class_ends_when_all_do(path):
    plan = read(device, path.read_text())
    for nodes in NODES:
        for m in (8 * 512, 8 * 509 + 3):
            all_of_them = predict(plan, {"m": m}, 8, H200X4, nodes)
            some = predict(plan, {"m": m}, 8, H200X4, nodes, alike=True)
            count = classes(PlanAt(plan, {"m": m}, 8, nodes), Fabric())
            assert {span.rank for span in some.spans} == set(range(count))
            assert some.end_us == pytest.approx(all_of_them.end_us, rel=1e-9), (nodes, m)


def test_which_ranks_are_alike():
    plan = read(device, (GOLDEN / "gemm_rs.plan").read_text())
    found = [classes(PlanAt(plan, {"m": 4096}, 8, nodes), Fabric()) for nodes in NODES]
    assert found == [1, 4, 2, 8]
    assert classes(PlanAt(plan, {"m": 4095}, 8), Fabric()) == 8, "the last rank has a row less"
    fabrics = [Fabric(leaf=2), Fabric(leaf=4), Fabric(leaf=3), Fabric(slow=1.5)]
    four = PlanAt(plan, {"m": 4096}, 8, (2,) * 4)
    assert [classes(four, one) for one in fabrics] == [4, 2, 8, 2]
    assert classes(PlanAt(plan, {"m": 4096}, 8), Fabric(slow=1.5)) == 8


UP = Fabric(leaf=2, oversubscription=4)
# Between ranks of one seat, which a switch joins; of others, which the second level does.
RAILS = Fabric(leaf=4, oversubscription=4)
FABRICS = [
    ("ag_gemm_relay", UP, True), ("gemm_rs_relay", UP, True), ("ag_gemm_relay", RAILS, False),
    ("moe_rs_relay", UP, True), ("ag_gemm_nodes", RAILS, True), ("gemm_rs", RAILS, True),
    ("ag_gemm_relay", Fabric(slow=1.5), True), ("gemm_rs_relay", Fabric(slow=1.5), True),
]  # fmt: skip


@pytest.mark.parametrize("name, fabric, costs", FABRICS)
def test_a_fabric_costs_what_it_costs_all(name, fabric, costs):
    """Of ranks that do alike one is played there too."""
    path = GOLDEN / f"{name}.plan"
    plan, nodes, sizes = read(device, path.read_text()), (2,) * 4, {"m": 8 * 512}
    all_of_them = predict(plan, sizes, 8, H200X4, nodes, fabric=fabric).end_us
    some = predict(plan, sizes, 8, H200X4, nodes, alike=True, fabric=fabric).end_us
    assert some == pytest.approx(all_of_them, rel=1e-9)
    assert (some > predict(plan, sizes, 8, H200X4, nodes).end_us) == costs


@pytest.mark.parametrize(
    "fields",
    [{"leaf": -1}, {"oversubscription": 0.5}, {"slow": 0.0}, {"slow": float("nan")}],
)
def test_a_fabric_that_cannot_be(fields):
    (name,) = fields
    with pytest.raises(UsageError, match=f"fabric: {name}="):
        Fabric(**fields)


def test_thousands_cost_what_one_does():
    plan = read(device, (GOLDEN / "mlp.plan").read_text())
    found = predict(plan, {"m": 1 << 22}, 4096, H200X4, (8,) * 512, alike=True)
    assert {span.rank for span in found.spans} == set(range(8)) and found.end_us > 0


def test_causal_attention_is_no_rank_as_another():
    kind = Tensor("float32", ("m", 64), Shard(0))

    def attend(q, k, v):
        return attention(q, all_gather(k), all_gather(v), head=32, causal=True)

    made = program(mesh="tp", q=kind, k=kind, v=kind)(attend)
    plan = made.overlapped(Facts({"m": 64}, 4, TARGETS["cuda:90"])).plan
    assert classes(PlanAt(plan, {"m": 64}, 4), Fabric()) == 4


def test_machines_of_public_figures():
    base, faster = find_machine("h200x8"), find_machine("b200x8")
    assert base.program_tflops == pytest.approx(H200X4.program_tflops)
    assert base.gather == H200X4.gather and base.num_sms == 132
    whole = [one.program_tflops * one.num_sms for one in (base, faster)]
    assert whole[1] / whole[0] == pytest.approx(2250 / 989)
    assert faster.gather[0] == base.gather[0] and faster.gather[-1][1] < 0.6 * base.gather[-1][1]
    assert set(KNOWN) == {"h100x8", "h200x8", "h800x8", "b200x8", "mi300x8", "h200x4"}
