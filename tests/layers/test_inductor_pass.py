"""torch.compile with the pass: the graphs of functional collectives and of DTensor modules, on
emulated ranks, against the same functions as they are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import weft
from weft.base.errors import UsageError
from weft.layers import RowParallelLinear

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
K, N = 16, 12


@pytest.fixture(autouse=True)
def nothing_is_compiled():
    """What a test compiles differs by what its functions close over: torch gives up after eight."""
    torch._dynamo.reset()


def options(fuse: Any) -> dict[str, Any]:
    return {"joint_custom_post_pass": fuse, "post_grad_custom_post_pass": fuse}


def gate_and_up(dim: int) -> Callable[..., torch.Tensor]:
    def layer(x, w1, w3, w2):
        h = funcol.all_gather_tensor(x, dim, dist.group.WORLD)
        h = nn.functional.silu(h @ w1) * (h @ w3)
        return funcol.reduce_scatter_tensor(h @ w2, "sum", dim, dist.group.WORLD)

    return layer


def one_weight_each(x, w1, w3, w2):
    h = funcol.all_gather_tensor(x, 0, dist.group.WORLD)
    h = nn.functional.linear(h, w1.T, w3[0])
    return funcol.reduce_scatter_tensor(h @ w2, "avg", 0, dist.group.WORLD)


def summed(x, w1, w3, w2):
    return funcol.all_reduce((x @ w1) @ w2, "sum", dist.group.WORLD)


FORWARD_AND_BACK = {
    "all_gather_into_tensor": ["2 products of one gather, ag_wgrad, ag_wgrad", "ag_gemm, ag_wgrad"],
    "reduce_scatter_tensor": ["gemm_rs", "gemm_rs of 2 products"],
}
ONE_EACH = {"all_gather_into_tensor": ["ag_gemm"], "reduce_scatter_tensor": ["gemm_rs"]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "shape", "differentiated", "expected"),
    [
        pytest.param(lambda: gate_and_up(0), (5, K), True, FORWARD_AND_BACK, id="rows"),
        pytest.param(
            lambda: gate_and_up(1),
            (2, 3, K),
            True,
            FORWARD_AND_BACK,
            id="batches",
            marks=pytest.mark.slow,
        ),
        pytest.param(lambda: gate_and_up(1), (1, 3, K), True, FORWARD_AND_BACK, id="one-batch"),
        pytest.param(lambda: one_weight_each, (4, K), False, ONE_EACH, id="bias"),
        pytest.param(lambda: summed, (2, 3, K), False, {"all_reduce": ["gemm_ar"]}, id="sums"),
    ],
)
def test_collectives_beside_products_become_operators(make, shape, differentiated, expected):
    def main():
        world = weft.init()
        torch.manual_seed(world.rank)
        given = [torch.randn(*shape), *(torch.randn(*one) for one in ((K, N), (K, N), (N, K)))]
        for one in given:
            one.requires_grad_(differentiated)

        def run(function: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
            y = function(*given)
            if not differentiated:
                return [y]
            return [y, *torch.autograd.grad((y * y).sum(), given)]

        fuse, plain, layer = weft.inductor_pass(world), make(), make()
        compiled = torch.compile(lambda *tensors: layer(*tensors), options=options(fuse))
        for found, right in zip(run(compiled), run(plain), strict=True):
            torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)
        operators: dict[str, list[str]] = {}
        for one in fuse.decisions:
            if one.operator:
                operators.setdefault(one.collective, []).append(one.operator)
        assert operators == expected, str(fuse)
        world.close()

    with weft.emulated(ranks=2) as ranks:
        ranks.run(main)


class Block(nn.Module):
    """As models have them that torch's own plans make parallel."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(K)
        self.w1, self.w3 = nn.Linear(K, 24, bias=False), nn.Linear(K, 24, bias=False)
        self.w2 = nn.Linear(24, K, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.w2(nn.functional.silu(self.w1(h)) * self.w3(h))


@pytest.mark.slow
def test_a_module_of_dtensors_is_fused_as_it_is():
    def main():
        world = weft.init()
        mesh = init_device_mesh("cpu", (world.num_ranks,))
        torch.manual_seed(0)
        plain = Block()
        rows = {"input_layouts": Shard(1)}
        module = parallelize_module(copy.deepcopy(plain), mesh, {
            "norm": SequenceParallel(), "w1": ColwiseParallel(**rows),
            "w3": ColwiseParallel(**rows), "w2": RowwiseParallel(output_layouts=Shard(1)),
        })  # fmt: skip
        x = torch.randn(2, 8, K)
        fuse = weft.inductor_pass(world)
        y = torch.compile(module, options=options(fuse))(x.chunk(world.num_ranks, 1)[world.rank])
        torch.testing.assert_close(y, plain(x).chunk(world.num_ranks, 1)[world.rank])
        y.sum().backward()
        plain(x).sum().backward()
        for name in ("w1", "w3", "w2"):
            found = module.get_submodule(name).weight.grad.full_tensor()
            torch.testing.assert_close(found, plain.get_submodule(name).weight.grad)
        assert all(one.operator for one in fuse.decisions), str(fuse)
        assert "2 products of one gather" in str(fuse), "DTensors gather once for each module"
        world.close()

    with weft.emulated(ranks=2) as ranks:
        ranks.run(main)


@pytest.mark.slow
def test_what_is_left_says_why():
    def main():
        world = weft.init()
        everyone = dist.group.WORLD
        mine = [dist.new_group([rank]) for rank in range(world.num_ranks)][world.rank]

        def layer(x, w):
            h = funcol.all_gather_tensor(x, 0, everyone)
            columns = funcol.all_gather_tensor(-x, 1, everyone) @ torch.cat([w, w])
            alone = funcol.all_reduce(x @ w, "sum", mine)
            most = funcol.all_reduce(x @ w, "max", everyone)
            twice = x @ w
            return (
                h @ w,
                h + 1,
                columns,
                alone,
                most,
                funcol.all_reduce(twice, "sum", everyone),
                twice,
                funcol.all_reduce(x @ w + x[:1] @ w, "sum", everyone),
            )

        fuse = weft.inductor_pass(world)
        x, w = torch.ones(4, K), torch.ones(K, K)
        found = torch.compile(lambda *given: layer(*given), options=options(fuse))(x, w)
        for one, right in zip(found, layer(x, w), strict=True):
            assert torch.equal(one, right)
        assert not any(one.operator for one in fuse.decisions), str(fuse)
        for reason in (
            "reads what it gathers", "it gathers columns", f"its group is of ranks [{world.rank}]",
            "it is a reduction by max", "read mm", "which is no product",
        ):  # fmt: skip
            assert reason in str(fuse), (reason, str(fuse))
        world.close()

    with weft.emulated(ranks=2) as ranks:
        ranks.run(main)


def test_it_takes_worlds():
    with pytest.raises(UsageError, match=r"not 'tp'; pass what weft.init\(\) returned, or a dev"):
        weft.inductor_pass("tp")
    with pytest.raises(UsageError, match=r"it takes worlds; pass what weft.init\(\) returned"):
        weft.inductor_pass()


def test_it_takes_a_mesh_for_its_world():
    def main():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        with pytest.raises(UsageError, match=r"pass one axis of it, e.g. mesh\['tp'\]"):
            weft.inductor_pass(mesh)
        fuse = weft.inductor_pass(mesh["tp"])  # the world that parallelize takes then
        (name,) = fuse.worlds.values()
        made = weft.parallelize(Block(), mesh["tp"], {"w2": RowParallelLinear})
        world = made.w2.world
        assert (world.name, world.num_ranks) == (name, 2)
        assert weft.inductor_pass(mesh.get_group("tp")).worlds == fuse.worlds
        world.close()

    with weft.emulated(ranks=4) as ranks:
        ranks.run(main)
