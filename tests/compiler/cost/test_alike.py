"""Of ranks that do alike one is played: with the end of playing all."""

from __future__ import annotations

from pathlib import Path

import pytest

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


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.plan")), ids=lambda path: path.stem)
def test_one_of_each_class_ends_when_all_do(path):
    plan = device.parse(path.read_text())
    for nodes in NODES:
        for m in (8 * 512, 8 * 509 + 3):
            all_of_them = predict(plan, {"m": m}, 8, H200X4, nodes)
            some = predict(plan, {"m": m}, 8, H200X4, nodes, alike=True)
            count = classes(PlanAt(plan, {"m": m}, 8, nodes))
            assert {span.rank for span in some.spans} == set(range(count))
            assert some.end_us == pytest.approx(all_of_them.end_us, rel=1e-9), (nodes, m)


def test_which_ranks_are_alike():
    plan = device.parse((GOLDEN / "gemm_rs.plan").read_text())
    found = [classes(PlanAt(plan, {"m": 4096}, 8, nodes)) for nodes in NODES]
    assert found == [1, 4, 2, 8]
    assert classes(PlanAt(plan, {"m": 4095}, 8)) == 8, "the last rank has a row less"


def test_thousands_cost_what_one_does():
    plan = device.parse((GOLDEN / "mlp.plan").read_text())
    found = predict(plan, {"m": 1 << 22}, 4096, H200X4, (8,) * 512, alike=True)
    assert {span.rank for span in found.spans} == set(range(8)) and found.end_us > 0


def test_causal_attention_is_no_rank_as_another():
    kind = Tensor("float32", ("m", 64), Shard(0))

    def attend(q, k, v):
        return attention(q, all_gather(k), all_gather(v), head=32, causal=True)

    made = program(mesh="tp", q=kind, k=kind, v=kind)(attend)
    plan = made.overlapped(Facts({"m": 64}, 4, TARGETS["cuda:90"])).plan
    assert classes(PlanAt(plan, {"m": 64}, 4)) == 4


def test_machines_of_public_figures():
    base, faster = find_machine("h200x8"), find_machine("b200x8")
    assert base.program_tflops == pytest.approx(H200X4.program_tflops)
    assert base.gather == H200X4.gather and base.num_sms == 132
    whole = [one.program_tflops * one.num_sms for one in (base, faster)]
    assert whole[1] / whole[0] == pytest.approx(2250 / 989)
    assert faster.gather[0] == base.gather[0] and faster.gather[-1][1] < 0.6 * base.gather[-1][1]
    assert set(KNOWN) == {"h100x8", "h200x8", "b200x8", "mi300x8", "h200x4"}
