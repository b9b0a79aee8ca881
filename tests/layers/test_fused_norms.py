"""Sums over ranks that are added to a residual and normed: one operator, where that is faster."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import weft
from weft.layers import inductor_pass as module

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
HIDDEN, EPS = 16, 1e-5


@pytest.fixture(autouse=True)
def nothing_is_compiled():
    torch._dynamo.reset()


def total(x, a, w):
    return x + funcol.all_reduce(a @ w, "sum", dist.group.WORLD)


def as_torch(x, a, w, g):
    h = total(x, a, w)
    return torch.nn.functional.rms_norm(h, (HIDDEN,), g, EPS), h


def as_transformers(x, a, w, g):
    """Llama's: it converts, and converts back."""
    h = total(x, a, w)
    wide = h.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return g * wide.to(h.dtype), h


def read_between(x, a, w, g):
    """What is between is a result, too."""
    h = total(x, a, w)
    scale = torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)
    return h * scale * g, scale


def not_of_rows(x, a, w, g):
    h = total(x, a, w)
    return h * torch.rsqrt(h.pow(2).mean(0, keepdim=True) + EPS) * g, h


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("function", "is_fused", "dtype"),
    [
        (as_torch, True, torch.float32),
        (as_torch, True, torch.bfloat16),
        (as_transformers, True, torch.bfloat16),
        (read_between, False, torch.float32),
        (not_of_rows, False, torch.float32),
    ],
)
def test_norms_of_sums(ranks, monkeypatch, function, is_fused, dtype):
    monkeypatch.setattr(module, "is_faster", lambda *_: (True, "asked for"))

    def main():
        with weft.init() as world:
            shared = torch.Generator().manual_seed(0)
            own = torch.Generator().manual_seed(1 + world.rank)
            x, a, w, g = (
                torch.randn(*shape, generator=one).to(dtype)
                for shape, one in (((2, 3, HIDDEN), shared), ((2, 3, 5), own), ((5, HIDDEN), own),
                                   ((HIDDEN,), shared))
            )  # fmt: skip
            fuse = weft.inductor_pass(world, split_from=float("inf"))
            options = {"post_grad_custom_post_pass": fuse}
            compiled = torch.compile(lambda *given: function(*given), options=options)
            with torch.no_grad():
                found, wanted = compiled(x, a, w, g), function(x, a, w, g)
            limit = 1e-4 if dtype == torch.float32 else 4e-2
            for got, want in zip(found, wanted, strict=True):
                torch.testing.assert_close(got, want, rtol=limit, atol=limit)
            assert ("all_reduce_rms_norm" in str(fuse)) == is_fused, str(fuse)
            assert ("gemm_ar" in str(fuse)) != is_fused, str(fuse)

    ranks(main, 2)


@pytest.mark.parametrize(("m", "expected"), [(16, "all_reduce_rms_norm ("), (8192, "gemm_ar (")])
def test_where_it_is_faster_is_predicted(ranks, m, expected):
    def main():
        with weft.init() as world:
            shapes = (m, 4096), (m, 7168), (7168, 4096), (4096,)
            with FakeTensorMode():
                given = [torch.empty(*one, dtype=torch.bfloat16) for one in shapes]

            def function(x, a, w, g):
                h = total(x, a, w)
                return h, h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS) * g

            graph = make_fx(function)(*given).graph
            fuse = weft.inductor_pass(world)
            fuse(graph)
            assert f": {expected}" in str(fuse), str(fuse)

    ranks(main, 2)
