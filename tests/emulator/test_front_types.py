"""Element types, aggregates, scaled products and what else tl offers, through whole launches."""

import pytest
import torch
import triton
import triton.language as tl

import weft
import weft.language as wl
from weft.base.errors import UnsupportedError
from weft.language.triton_api import TRITON_VERSION


def run(main, **options):
    with weft.emulated(ranks=1, **options) as session:
        result = session.run(main)[0]
    assert session.report.ok
    return result


@triton.jit
def cast(x, outs, N: tl.constexpr):
    at = tl.arange(0, N)
    value = tl.load(x + at)
    for i in tl.static_range(len(outs)):
        tl.store(outs[i] + at, value.to(outs[i].dtype.element_ty))


INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("source", INTEGERS + FLOATS + FP8, ids=str)
def test_casts_agree_with_torch(source):
    # Triton converts fp8 to and from floats only.
    targets = FLOATS + (FP8 if source not in INTEGERS else [])
    targets += INTEGERS if source not in FP8 else []
    x = torch.randn(64, generator=torch.Generator().manual_seed(0)) * 20
    x = x.abs().clamp(-100, 100).to(source)
    outs = tuple(torch.empty(64, dtype=target) for target in targets)
    run(lambda: cast[(1,)](x, outs, N=64))
    for target, out in zip(targets, outs, strict=True):
        assert torch.equal(out.double(), x.to(target).double()), target


@triton.jit
def multiply(a, b, c, N: tl.constexpr):
    at = tl.arange(0, N)
    tile = at[:, None] * N + at[None, :]
    acc = tl.zeros((N, N), c.dtype.element_ty)
    acc = tl.dot(
        tl.load(a + tile), tl.load(b + tile), acc, input_precision="ieee",
        out_dtype=c.dtype.element_ty,
    )  # fmt: skip
    tl.store(c + tile, acc)


@pytest.mark.parametrize("dtype, out", [
    (torch.float8_e4m3fn, torch.float32), (torch.float8_e5m2, torch.float32),
    (torch.bfloat16, torch.float32), (torch.float16, torch.float16),
    (torch.float64, torch.float64), (torch.int8, torch.int32),
], ids=str)  # fmt: skip
def test_products_of_each_type(dtype, out):
    a, b = ((torch.randn(32, 32) * 8).to(dtype) for _ in range(2))
    c = torch.empty(32, 32, dtype=out)
    run(lambda: multiply[(1,)](a, b, c, N=32))
    expected = a.double() @ b.double()
    tolerance = {torch.float16: 1e-3, torch.int32: 0, torch.float64: 1e-12}.get(out, 1e-5)
    assert (c.double() - expected).norm() <= tolerance * expected.norm()


if hasattr(tl.core, "_aggregate"):

    @tl.core._aggregate
    class Range:
        first: tl.tensor
        count: tl.constexpr

        @triton.constexpr_function
        def __init__(self, first, count):
            self.first = first
            self.count = tl.constexpr(count)

        @triton.jit
        def indices(self):
            return self.first + tl.arange(0, self.count)

    @triton.jit
    def double_range(x, out, COUNT: tl.constexpr):
        part = Range(tl.program_id(0) * COUNT, COUNT)
        tl.store(out + part.indices(), tl.load(x + part.indices()) * 2)

    def test_aggregates():
        x, out = torch.randn(32), torch.empty(32)
        run(lambda: double_range[(4,)](x, out, COUNT=8))
        assert torch.equal(out, x * 2)


@triton.jit
def collatz(n):
    steps = 0
    while n != 1:
        n = tl.where(n % 2 == 0, n // 2, 3 * n + 1)
        steps += 1
    return steps


@triton.jit
def count_steps(out):
    tl.store(out + tl.program_id(0), collatz(tl.program_id(0) + 1))


def test_functions_with_loops():
    out = torch.zeros(8, dtype=torch.int32)
    run(lambda: count_steps[(8,)](out))
    assert out.tolist() == [0, 1, 7, 2, 5, 8, 16, 3]


@triton.jit
def says(x, N: tl.constexpr):
    tl.device_print("value", tl.load(x + tl.arange(0, N)))


def test_device_print_says_who(capfd):
    run(lambda: says[(1,)](torch.tensor([3, 5]), N=2))
    said = capfd.readouterr().out
    assert "rank 0 says(0, 0, 0)" in said and "[3 5]" in said


@triton.jit
def assembles(out):
    seven = tl.inline_asm_elementwise("mov.v4.u32 $0, 7;", "=r", [], tl.int32, True, 1)  # HERE
    tl.store(out, seven)


def test_inline_assembly_is_refused_with_its_line():
    import inspect

    lines, first = inspect.getsourcelines(assembles.fn)
    line = first + next(i for i, text in enumerate(lines) if "# HERE" in text)
    with pytest.raises(UnsupportedError, match="inline assembly") as caught:
        run(lambda: assembles[(1,)](torch.empty(1, dtype=torch.int32)))
    assert caught.value.place.outermost.line == line


def test_versions_are_known():
    assert TRITON_VERSION >= (3, 6)


@triton.jit
def raise_signal(world, told, SCOPE: tl.constexpr):
    wl.notify(world, told, to=0, scope=SCOPE)
    if wl.rank(world) == 0:
        wl.wait(told, at_least=wl.num_ranks(world))


def test_a_member_of_an_enum_by_keyword():
    """Triton writes down what a launch was given by keyword, as JSON."""

    def main():
        world = weft.init()
        told = world.signals(1)
        raise_signal[(1,)](world.arg, told, SCOPE=wl.Scope.SYSTEM)
        world.close()

    with weft.emulated(ranks=2) as ranks:
        ranks.run(main)
