"""torch.compile's default backend on emulated ranks: right, seen by the checker, never silent."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import silu

import weft
from weft.base.errors import UninitializedError, UnsupportedError

RANKS = 2


@pytest.fixture(autouse=True)
def _nothing_compiled():
    """What ranks compile of this file's functions is theirs."""
    yield
    torch._dynamo.reset()


def parts(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.slow
def test_what_is_made_of_an_operators_result_waits_for_it():
    """inductor's own kernels read the product before any of it was there."""

    def main(rank):
        with weft.init() as world:
            x, w = parts(rank, 8, 16), parts(9, 16, 12)

            def layer(x, w):
                return silu(weft.ops.ag_gemm(x, w, world=world)) * 2 + 1

            compiled = torch.compile(layer, fullgraph=True)
            return compiled(x, w), compiled(x, w), layer(x, w)

    for seed in range(2):
        with weft.emulated(ranks=RANKS, seed=seed) as ranks:
            for first, again, wanted in ranks.run(main):
                assert torch.equal(first, wanted) and torch.equal(again, wanted)
            assert not ranks.report.findings


@pytest.mark.slow
def test_a_compiled_layer_learns_as_an_uncompiled_one():
    def main(rank):
        with weft.init() as world:
            x, target = parts(rank, 8, 8), parts(20 + rank, 8, 8)

            def layer(x, up, down):
                hidden = silu(weft.ops.ag_gemm(x, up, world=world))
                return weft.ops.gemm_rs(hidden, down, world=world)

            def learned(forward):
                weights = [parts(2, 8, 12).requires_grad_(), parts(3, 12, 8).requires_grad_()]
                step = torch.optim.SGD(weights, lr=1e-3)
                for _ in range(3):
                    (forward(x, *weights) - target).square().sum().backward()
                    step.step()
                    step.zero_grad()
                return [weight.detach() for weight in weights]

            return learned(torch.compile(layer, fullgraph=True)), learned(layer)

    with weft.emulated(ranks=RANKS) as ranks:
        for compiled, wanted in ranks.run(main):
            for one, other in zip(compiled, wanted, strict=True):
                assert torch.isfinite(one).all()
                torch.testing.assert_close(one, other)
        assert not ranks.report.findings


def test_what_a_compiled_function_reads_is_checked():
    def main():
        return torch.compile(lambda x: x * 2)(torch.empty(8)).tolist()

    with weft.emulated(ranks=1) as ranks, pytest.raises(UninitializedError):
        ranks.run(main)


def test_a_backend_of_ones_own_that_ends_in_inductor():
    from torch._inductor import compile_fx

    def backend(graph, example_inputs):
        return compile_fx.compile_fx(graph, example_inputs)

    def main():
        x = torch.arange(8.0)
        with weft.init(heap_bytes=1 << 16):
            return torch.compile(lambda x: doubled(x) + 1, backend=backend)(x).tolist()

    with weft.emulated(ranks=1) as ranks:
        assert ranks.run(main)[0] == [2.0 * i + 1 for i in range(8)]


@triton.jit
def _double(x, out, n: tl.constexpr):
    i = tl.arange(0, n)
    tl.store(out + i, tl.load(x + i) * 2)


def doubled(x):
    out = torch.empty_like(x)
    _double[(1,)](x, out, n=8)
    return out


@pytest.mark.few(1)
@pytest.mark.filterwarnings("error:Dynamo does not know")
@pytest.mark.parametrize("backend", ["inductor", "aot_eager", "eager"])
def test_a_function_that_launches_a_kernel_is_compiled_around_it(backend):
    """Without a GPU torch followed the launch into Triton, up to a RecursionError."""

    def main():
        compiled = torch.compile(lambda x: doubled(x + 1) - 1, backend=backend)
        return compiled(torch.arange(8.0)).tolist()

    with weft.emulated(ranks=1) as ranks:
        assert ranks.run(main)[0] == [2.0 * i + 1 for i in range(8)]


@pytest.mark.slow
def test_machine_code_from_before_the_ranks_began_is_refused():
    compiled = torch.compile(lambda x: x * 2)
    assert compiled(torch.ones(4)).tolist() == [2.0] * 4

    with weft.emulated(ranks=1) as ranks:
        with pytest.raises(UnsupportedError, match=r"torch\._dynamo\.reset\(\).*aot_eager"):
            ranks.run(lambda: compiled(torch.ones(4)))
    assert compiled(torch.ones(4)).tolist() == [2.0] * 4


def test_code_that_is_compiled_ahead_of_time_is_refused():
    class Double(torch.nn.Module):
        def forward(self, x):
            return x * 2

    def main():
        made = torch.export.export(Double(), (torch.ones(4),))
        torch._inductor.aoti_compile_and_package(made)

    with weft.emulated(ranks=1) as ranks, pytest.raises(UnsupportedError, match="aot_eager"):
        ranks.run(main)


def test_a_rank_may_follow_a_function_on_fake_tensors():
    """Fresh memory that torch only imagines was written to, at address 0."""

    def main():
        made = make_fx(lambda x: torch.zeros(2, 3) + x)(torch.ones(3))
        return made(torch.ones(3)).tolist()

    with weft.emulated(ranks=1) as ranks:
        assert ranks.run(main)[0] == [[1.0] * 3] * 2
