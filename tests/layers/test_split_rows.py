"""Graphs whose rows all ranks have: split between the ranks where that pays, and where not, why."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.fx.experimental.proxy_tensor import make_fx

import weft

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
HIDDEN, HEADS, INNER = 16, 4, 24
INF = float("inf")


@pytest.fixture(autouse=True)
def nothing_is_compiled():
    torch._dynamo.reset()


class Attention(nn.Module):
    """As torchtitan's Llama has it."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(3))
        self.wo = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = (
            one(x).unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2)
            for one in (self.wq, self.wk, self.wv)
        )
        y = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.wo(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(HIDDEN, INNER, bias=False) for _ in range(2))
        self.w2 = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.attention_norm, self.ffn_norm = (nn.RMSNorm(HIDDEN, eps=1e-6) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x + self.attention(self.attention_norm(x))
        return h + self.feed_forward(self.ffn_norm(h))


# Without sequence parallelism: rows are alike on all ranks between products.
PLAN = {
    **{f"attention.{name}": ColwiseParallel for name in ("wq", "wk", "wv")},
    **{f"feed_forward.{name}": ColwiseParallel for name in ("w1", "w3")},
    "attention.wo": RowwiseParallel, "feed_forward.w2": RowwiseParallel,
}  # fmt: skip


def compiled(function: Callable[..., Any], fuse: Any) -> Any:
    options = {"joint_custom_post_pass": fuse, "post_grad_custom_post_pass": fuse}
    return torch.compile(lambda *given: function(*given), options=options, dynamic=False)


def emulate(main: Callable[[Any], None]) -> None:
    def begun() -> None:
        with weft.init() as world:
            torch.manual_seed(0)
            main(world)

    with weft.emulated(ranks=2) as ranks:
        ranks.run(begun)


def norm(h: torch.Tensor) -> torch.Tensor:
    return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)


def total(x: torch.Tensor) -> torch.Tensor:
    return funcol.all_reduce(x, "sum", dist.group.WORLD)


SPLIT = (
    "2 products of one gather, ag_wgrad, ag_wgrad", "3 products of one gather, ag_wgrad,",
    "gemm_rs of 3 products", "gemm_rs of 2 products", "rows split from here (24 rows, and split",
)  # fmt: skip
ALIKE = ("gemm_ar of 3 products", "gemm_ar of 2 products", "gemm_ar (rows alike: 24 rows, and")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("blocks", "split_from", "expected"),
    [pytest.param(2, 0, SPLIT, marks=pytest.mark.slow), (1, INF, ALIKE)],
)
def test_a_llama_of_dtensors(blocks, split_from, expected):
    """Forward, backward and without gradients; the norms' weights learn, too."""

    def main(world):
        mesh = init_device_mesh("cpu", (world.num_ranks,))
        plain = nn.Sequential(*(Block() for _ in range(blocks)))
        plan = {f"{i}.{name}": style() for i in range(blocks) for name, style in PLAN.items()}
        module = parallelize_module(copy.deepcopy(plain), mesh, plan)
        x = torch.randn(3, 8, HIDDEN)
        mine, alone = x.clone().requires_grad_(), x.clone().requires_grad_()
        fuse = weft.inductor_pass(mesh, split_from=split_from)
        y, want = compiled(module, fuse)(mine), plain(alone)
        torch.testing.assert_close(y, want)
        (y * y).sum().backward()
        (want * want).sum().backward()
        torch.testing.assert_close(mine.grad, alone.grad, rtol=1e-4, atol=1e-4)
        for name, one in module.named_parameters():
            got = one.grad.full_tensor() if hasattr(one.grad, "full_tensor") else one.grad
            torch.testing.assert_close(
                got, plain.get_parameter(name).grad, rtol=1e-4, atol=1e-4, msg=name
            )
        assert all(one in str(fuse) for one in expected), str(fuse)
        with torch.no_grad():
            alone_fuse = weft.inductor_pass(world, split_from=split_from)
            torch.testing.assert_close(compiled(module, alone_fuse)(x), want)
        found = {one.operator for one in alone_fuse.decisions}
        assert ("3 products of one gather" in found) == (split_from == 0), str(alone_fuse)

    emulate(main)


def read_elsewhere(x, a, w, v):
    """Tokens are mixed in what one reader makes of the rows: it gathers them."""
    h = x + total(a @ w)
    return norm(h) @ v, h.cumsum(0)


def mixed(x, a, w, v):
    """Only what mixes rows reads them: nothing to split."""
    h = x + total(a @ w)
    return norm(h.cumsum(0)) @ v, h


def returned(x, a, w, v):
    return total(a @ w), x @ v


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("function", "rows", "expected"),
    [(read_elsewhere, 8, "since cumsum reads what it gathers"),
     (mixed, 8, "gemm_ar (rows alike: no product reads its rows)"),
     (returned, 8, "gemm_ar (rows alike: no product reads its rows)"),
     (read_elsewhere, 7, "gemm_ar (rows alike: 7 rows do not divide by 2 ranks)")],
)  # fmt: skip
def test_what_mixes_rows_has_all_of_them(function, rows, expected):
    def main(world):
        x = torch.randn(rows, HIDDEN)
        torch.manual_seed(world.rank)
        given = x, torch.randn(rows, 5), torch.randn(5, HIDDEN), torch.randn(HIDDEN, 3)
        fuse = weft.inductor_pass(world, split_from=0)
        with torch.no_grad():
            for got, want in zip(compiled(function, fuse)(*given), function(*given), strict=True):
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        assert expected in str(fuse), str(fuse)
        is_split = any("rows split" in str(one) for one in fuse.decisions)
        assert is_split == ("cumsum" in expected), str(fuse)

    emulate(main)


def test_rows_that_ranks_have_of_their_own_are_refused():
    """They meet what is alike: each rank's rows of the sum would be its own alone."""

    def main(world):
        x = torch.full((8, HIDDEN), float(world.rank))
        given = x, torch.ones(8, 5), torch.ones(5, HIDDEN), torch.ones(HIDDEN, 3)
        right = read_elsewhere(*given)[0]
        for split_from in (0, INF):
            torch._dynamo.reset()
            function = compiled(read_elsewhere, weft.inductor_pass(world, split_from=split_from))
            if split_from == 0:
                with pytest.raises(weft.UsageError, match="differs between them by 1 .*pass split"):
                    function(*given)
            else:
                torch.testing.assert_close(function(*given)[0], right)

    emulate(main)


def test_rows_that_differ_by_a_rounding_are_alike():
    """Two ranks' inductors may have picked kernels that add in other orders."""

    def main(world):
        eps = torch.finfo(torch.float32).eps
        x = torch.full((8, HIDDEN), 1 + world.rank * eps)
        given = x, torch.ones(8, 5), torch.ones(5, HIDDEN), torch.ones(HIDDEN, 3)
        function = compiled(read_elsewhere, weft.inductor_pass(world, split_from=0))
        torch.testing.assert_close(function(*given)[0], read_elsewhere(*given)[0])

    emulate(main)


def layers(count: int) -> Callable[..., torch.Tensor]:
    def model(x, a, w, v):
        for _ in range(count):
            x = x + total(a @ w)
            a = norm(x) @ v
        return x

    return model


@pytest.mark.parametrize(("m", "is_split"), [(64, False), (16384, True)])
def test_where_it_pays_is_predicted(m, is_split):
    """Of sizes of Llama's, by the cost model that `split_from` asks; nothing runs."""

    def main(world):
        shapes = (m, 4096), (m, 7168), (7168, 4096), (4096, 7168)
        with FakeTensorMode():
            given = [torch.empty(*one, dtype=torch.bfloat16) for one in shapes]
        graph = make_fx(layers(4))(*given).graph
        fuse = weft.inductor_pass(world)
        fuse(graph)
        text = str(fuse)
        assert f"{m} rows, for which " in text and " us are predicted split and " in text
        assert ("rows split" in text, "gemm_ar" in text) == (is_split, not is_split), text

    emulate(main)


def test_sums_that_are_added_are_summed_once():
    """But for those that are also read by themselves."""

    def main(world):
        given = [torch.randn(4, 5), torch.randn(5, 3), torch.randn(5, 3)]

        def function(a, w, v):
            alone = total(a @ (w - v))
            return total(a @ w) + total(a @ v) + alone, alone.relu()

        fuse = weft.inductor_pass(world)
        with torch.no_grad():
            for got, want in zip(compiled(function, fuse)(*given), function(*given), strict=True):
                torch.testing.assert_close(got, want)
        found = sorted(one.operator for one in fuse.decisions)
        assert found == ["gemm_ar", "gemm_ar of 2 products"], str(fuse)

    emulate(main)
