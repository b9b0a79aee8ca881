"""Programs with x^T @ y, the sum over the rows of both, of which one is gathered."""

from __future__ import annotations

import pytest
import torch

import weft
from weft.base.errors import ShapeError
from weft.base.hardware import H200X4
from weft.base.parts import part_of
from weft.base.target import TARGETS
from weft.compiler import Facts, Settings, Shard, Tensor, all_gather, matmul_tn, program
from weft.compiler.cost.plans import predict
from weft.ir.device import Launch


@pytest.mark.few(2)
@pytest.mark.parametrize("engine", ["pushers", "ce_push", "sm_push", "relay"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_sums_over_rows_take_them_as_they_arrive(ranks, engine, side):
    """Of three ranks the last has fewer rows; the gathered operand may be either of the two. What
    is relayed comes from another node."""

    def gradient(x, y):
        return matmul_tn(all_gather(x), y) if side == "left" else matmul_tn(y, all_gather(x))

    def main():
        with weft.init() as world:
            wide = Tensor("float32", ("m", 40 * world.num_ranks), Shard(1))
            types = {"x": Tensor("float32", ("m", 24), Shard(0)), "y": wide}
            made = program(mesh="tp", **types, settings=Settings(engines={"gathered": engine},
                           tiles={"product": (16, 16, 16)}))(gradient)  # fmt: skip
            x, y = _drawn(41, 24, 1), _drawn(41, 40, 2 + world.rank)
            first, end = part_of(41, world.rank, world.num_ranks)
            out = made(x[first:end].contiguous(), y, world=world, m=41)
            wanted = x.t() @ y if side == "left" else y.t() @ x
            torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-4)

    ranks(main, 3, nodes=(2, 1) if engine == "relay" else 1)


def _drawn(rows: int, columns: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def gradient(x, y):
    return matmul_tn(all_gather(x), y)


def of_types(m="m", rows_of_y="m"):
    types = {"x": Tensor("bfloat16", (m, 4096), Shard(0)),
             "y": Tensor("bfloat16", (rows_of_y, 8192), Shard(1))}  # fmt: skip
    return program(mesh="tp", **types)(gradient)


def test_rows_must_be_as_many():
    with pytest.raises(ShapeError, match="matmul_tn: gathered has 64, y has 32 rows"):
        of_types(64, 32)


@pytest.mark.parametrize(("m", "engine"), [(512, "sm_push"), (16384, "ce_push")])
def test_it_is_fused_where_that_is_predicted_to_end_first(m, engine):
    """And the plan's times are those of its chunks: no earlier than the last has come."""
    stages = of_types().overlapped(Facts({"m": m}, 4, TARGETS["cuda:90"]))
    found = [one for one in stages.program.choices if one.what == "engine"]
    assert [one.taken for one in found] == [engine]
    (launch,) = [one for one in stages.plan.of(Launch) if one.template == "gemm"]
    assert (launch.order, len(launch.tile)) == ("split_k", 3)
    spans = predict(stages.plan, {"m": m}, 4, H200X4).spans
    begun = [one.start_us for one in spans if "rows of rank 3" in one.name]
    arrived = [one.end_us for one in spans if one.kind in ("copy", "transfer")]
    assert begun and max(begun) >= max(arrived) / 2
