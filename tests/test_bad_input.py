"""Bad input through the public interface: each has its error class, with values and a remedy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

import weft
import weft.language as wl
from weft.base.errors import (
    AllocationOrderError,
    CallOrderError,
    CompileError,
    ConfigError,
    DtypeError,
    FarPointerError,
    NotSymmetricError,
    PeerError,
    ResidencyError,
    ShapeError,
    UnsupportedError,
    UsageError,
)
from weft.base.records import KernelRecord


def line_of(text: str) -> int:
    """The number of the one line of this file that holds `text`, a comment of that kernel."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = (n for n, line in enumerate(lines, 1) if line.rstrip().endswith(f"# {text}"))
    return number


def says(error: BaseException, *words: object) -> None:
    for word in words:
        assert str(word) in str(error), f"{word!r} is not in: {error}"


# ---------------------------------------------------------------------------------------------
# Pointers and peers


@triton.jit
def load_from(world, x, out, peer):
    tl.store(out, tl.load(wl.at(world, x, peer)))  # the access


@triton.jit
def load_from_constant(world, x, out, peer: tl.constexpr):
    tl.store(out, tl.load(wl.at(world, x, peer)))  # the constant access


@triton.jit
def put_to(world, x, peer):
    wl.put(world, x, 1.0, to=peer)


def test_a_pointer_that_is_not_symmetric(ranks):
    def main():
        world = weft.init()
        private = torch.zeros(1)
        load_from[(1,)](world.arg, private, torch.zeros(1), 0)
        world.synchronize()

    with pytest.raises(NotSymmetricError) as caught:
        ranks(main, 2)
    says(caught.value, "load_from", Path(__file__).name, line_of("the access"))


def test_a_tensor_that_is_not_symmetric(ranks):
    def main():
        world = weft.init()
        world.peer(torch.zeros(3), 0)

    with pytest.raises(NotSymmetricError, match="heap"):
        ranks(main, 2)


@pytest.mark.few(1)
@pytest.mark.parametrize("peer", [2, -1])
@pytest.mark.parametrize("kernel", [load_from, load_from_constant], ids=["value", "constexpr"])
def test_a_peer_out_of_range(ranks, kernel, peer: int):
    def main():
        world = weft.init()
        x = world.zeros(1, torch.float32)
        kernel[(1,)](world.arg, x, torch.zeros(1), peer)
        world.synchronize()

    with pytest.raises((PeerError, CompileError)) as caught:
        ranks(main, 2)
    line = line_of("the access" if kernel is load_from else "the constant access")
    says(caught.value, peer, Path(__file__).name, line)


def test_a_peer_out_of_range_on_the_host(ranks):
    def main():
        world = weft.init()
        world.peer(world.zeros(1, torch.float32), 7)

    with pytest.raises(PeerError, match="rank 7 is outside 0 .. 1"):
        ranks(main, 2)


def test_direct_access_to_a_far_peer(ranks):
    def main():
        world = weft.init()
        x = world.zeros(1, torch.float32)
        load_from[(1,)](world.arg, x, torch.zeros(1), (world.rank + 1) % 2)
        world.synchronize()

    with pytest.raises(FarPointerError) as caught:
        ranks(main, 2, nodes=2)
    says(caught.value, "put", Path(__file__).name, line_of("the access"))


def test_a_far_peers_tensor_on_the_host(ranks):
    def main():
        world = weft.init()
        world.peer(world.zeros(1, torch.float32), 1 - world.rank)

    with pytest.raises(FarPointerError, match="use put, get or put_signal"):
        ranks(main, 2, nodes=2)


def test_a_put_to_a_far_peer_is_no_error(ranks):
    def main():
        world = weft.init()
        x = world.zeros(1, torch.float32)
        put_to[(1,)](world.arg, x, 1 - world.rank)
        world.barrier()
        return x.item()

    assert ranks(main, 2, nodes=2) == [1.0, 1.0]


# ---------------------------------------------------------------------------------------------
# Ranks that do different things


def test_different_allocations(ranks):
    def main():
        world = weft.init()
        world.empty((4 + world.rank,), torch.float32, name="rows")

    with pytest.raises(AllocationOrderError) as caught:
        ranks(main, 2)
    says(caught.value, "rows", "[4]", "[5]", "same order")


def test_different_order_of_allocations(ranks):
    def main():
        world = weft.init()
        if world.rank == 0:
            world.signals(4), world.empty((4,), torch.int32)
        else:
            world.empty((4,), torch.int32), world.signals(4)

    with pytest.raises(AllocationOrderError, match="signals"):
        ranks(main, 2)


def test_different_order_of_calls(ranks):
    def main():
        world = weft.init()
        for name in ("ag_gemm", "gemm_rs") if world.rank else ("gemm_rs", "ag_gemm"):
            world.operator_call(name)
            world.barrier()
        world.synchronize()

    with pytest.raises(CallOrderError) as caught:
        ranks(main, 2)
    says(caught.value, "ag_gemm", "gemm_rs", "call 0")


def test_more_memory_than_the_heap_has(ranks):
    def main():
        weft.init(heap_bytes=1 << 16).empty((1 << 20,), torch.float32, name="too_much")

    with pytest.raises(weft.OutOfMemoryError) as caught:
        ranks(main, 2)
    says(caught.value, "too_much", 4 << 20)


# ---------------------------------------------------------------------------------------------
# Shapes and dtypes


def ag_gemm(a_shape, b_shape, a_dtype=torch.float32, b_dtype=torch.float32):
    def main():
        world = weft.init()
        a, b = torch.ones(a_shape, dtype=a_dtype), torch.ones(b_shape, dtype=b_dtype)
        return weft.ops.ag_gemm(a, b, world=world)

    return main


def test_shapes_that_do_not_multiply(ranks):
    with pytest.raises(ShapeError) as caught:
        ranks(ag_gemm((4, 8), (16, 3)), 2)
    says(caught.value, "ag_gemm", 8, 16)


def test_a_vector_is_no_matrix(ranks):
    with pytest.raises(ShapeError, match="ag_gemm"):
        ranks(ag_gemm((8,), (8, 3)), 2)


def test_dtypes_that_differ(ranks):
    with pytest.raises(DtypeError) as caught:
        ranks(ag_gemm((4, 8), (8, 3), torch.float16, torch.bfloat16), 2)
    says(caught.value, "float16", "bfloat16")


def test_what_is_no_tensor(ranks):
    def main():
        weft.ops.all_reduce([1.0, 2.0], world=weft.init())

    with pytest.raises(UsageError, match="operators take torch tensors, not list"):
        ranks(main, 1)


@pytest.mark.parametrize("op", ["all_gather", "all_reduce", "ag_gemm", "gemm_rs"])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_what_is_no_world_and_what_is_no_configuration(ranks, op, requires_grad):
    def main():
        world = weft.init()
        shapes = [(16, 16)] * (2 if "gemm" in op else 1)
        tensors = [torch.ones(shape, requires_grad=requires_grad) for shape in shapes]
        call = getattr(weft.ops, op)
        for other in (None, "cuda"):
            with pytest.raises(UsageError, match=rf"{op}: world={other!r} .* weft.init\(\)"):
                call(*tensors, world=other)
        for other in ({"transport": "sm_push"}, "sm_push"):
            with pytest.raises(
                ConfigError, match=f"{op}: config={other!r} .* weft.ops.{op} import"
            ):
                call(*tensors, world=world, config=other)

    ranks(main, 1)


def test_a_dtype_that_is_not_supported(ranks):
    with pytest.raises(DtypeError, match="int32"):
        ranks(ag_gemm((4, 8), (8, 3), torch.int32, torch.int32), 2)


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda x, w: weft.ops.all_to_all(x, world=w, splits=[4]), UsageError, "splits is .* list"),
        (lambda x, w: weft.ops.ag_gemm(x, x, world=w, out=[1]), UsageError, "out is of type list"),
        (lambda x, w: weft.ops.ag_gemm(x, x, world=w, m=4.0), ShapeError, "m=4.0 is not a whole"),
        (lambda x, w: weft.ops.all_gather(x, world=w, m="4"), ShapeError, "m='4' is not a whole"),
    ],
)
def test_arguments_of_another_type(ranks, call, error, words):
    with pytest.raises(error, match=words):
        ranks(lambda: call(torch.ones(4, 4), weft.init()), 1)


def test_shards_that_do_not_add_up(ranks):
    """Rank 2 holds one row less, and nobody said how many there are."""

    def main():
        world = weft.init()
        a, b = torch.ones(2 if world.rank < 2 else 1, 8), torch.ones(8, 3)
        weft.ops.ag_gemm(a, b, world=world)
        world.synchronize()

    with pytest.raises(CallOrderError) as caught:
        ranks(main, 3)
    says(caught.value, "m=6", "m=3")


def test_a_copy_that_does_not_fit(ranks):
    def main():
        world = weft.init()
        world.copy(world.zeros(4, torch.float32), torch.zeros(5))

    with pytest.raises(ShapeError) as caught:
        ranks(main, 2)
    says(caught.value, "(4,)", "(5,)")


# ---------------------------------------------------------------------------------------------
# Kernels that Triton, or a target, does not take


@triton.jit
def adds_misfits(x, size: tl.constexpr):
    i = tl.arange(0, size)
    j = tl.arange(0, 2 * size)
    tl.store(x + i, i + j)  # does not compile


@triton.jit
def names_nothing(x):
    tl.store(x, no_such_name)  # noqa: F821  # names nothing


@triton.jit
def orders_seldom(world, signal):
    wl.notify(world, signal, to=0, order="seldom")  # no such order


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "launch, comment, reason",
    [
        (lambda: adds_misfits[(1,)](torch.zeros(8), 8), "does not compile", "compatible"),
        (lambda: names_nothing[(1,)](torch.zeros(1)), "names nothing", "no_such_name"),
    ],
    ids=["shapes", "name"],
)
def test_a_kernel_that_does_not_compile(ranks, launch, comment: str, reason: str):
    with pytest.raises(CompileError) as caught:
        ranks(launch, 1)
    says(caught.value, reason, Path(__file__).name, f":{line_of(comment)}")


@pytest.mark.slow
def test_an_order_that_there_is_not(ranks):
    def main():
        world = weft.init()
        orders_seldom[(1,)](world.arg, world.signals(1))

    with pytest.raises(UsageError) as caught:
        ranks(main, 1)
    says(caught.value, "seldom", "wl.Order.RELEASE", f":{line_of('no such order')}")


@triton.jit
def stops_to_be_looked_at(x):
    tl.inline_asm_elementwise("brkpt;", "=r", [], tl.int32, False, 1)  # asm
    tl.store(x, 1)


def test_an_operation_that_the_emulator_does_not_know(ranks):
    def main():
        weft.init()
        stops_to_be_looked_at[(1,)](torch.zeros(1))

    with pytest.raises(UnsupportedError) as caught:
        ranks(main, 1)
    says(caught.value, "inline", Path(__file__).name, line_of("asm"))


@triton.jit
def compares(word):
    wl.atomic_cas(word, 0, 1)  # no such primitive on AMD


def test_a_primitive_that_a_target_has_not():
    record = KernelRecord("compares", {"word": "*i32"})
    with pytest.raises(UnsupportedError) as caught:
        weft.verify.compiled(compares, "hip:gfx942", record)
    says(caught.value, "wl.atomic_cas", "hip", f":{line_of('no such primitive on AMD')}")


# ---------------------------------------------------------------------------------------------
# Sizes at the edge: no error, the right answer


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "num_ranks, shape",
    [
        (4, (0, 8, 8)),
        (4, (2, 8, 8)),
        (3, (7, 1, 0)),
        (2, (3, 0, 8)),
        (4, (1, 5, 3)),
        (1, (9, 4, 4)),
    ],
    ids=str,
)
def test_zero_sized_shards_and_more_ranks_than_tiles(ranks, num_ranks: int, shape: tuple):
    m, n, k = shape
    whole = torch.arange(float(m * k)).reshape(m, k)
    rows = -(-m // num_ranks)
    b = torch.arange(float(k * n)).reshape(k, n)

    def main():
        world = weft.init()
        own = whole[world.rank * rows : (world.rank + 1) * rows]
        return weft.ops.ag_gemm(own, b, world=world, m=m).clone()

    for out in ranks(main, num_ranks):
        assert torch.equal(out, whole @ b)


# ---------------------------------------------------------------------------------------------
# Grids


@triton.jit
def all_meet(counter):
    wl.barrier_grid(counter)  # the meeting


def test_a_grid_that_cannot_be_resident(ranks):
    def main():
        world = weft.init()
        all_meet[(9,)](torch.zeros(1, dtype=torch.int32))
        world.synchronize()

    with pytest.raises(ResidencyError) as caught:
        ranks(main, 1, num_sms=4)
    says(caught.value, "all_meet", 9, 4)


# ---------------------------------------------------------------------------------------------
# Worlds


def test_a_world_that_is_not_there(ranks):
    def main():
        weft.init()
        weft.world("nobody")

    with pytest.raises(UsageError, match="no world is called 'nobody'"):
        ranks(main, 1)


def test_a_world_that_is_closed(ranks):
    def main():
        world = weft.init()
        world.close()
        world.barrier()

    with pytest.raises(UsageError, match="closed"):
        ranks(main, 1)


def test_signals_are_words(ranks):
    with pytest.raises(DtypeError, match="int32 or int64"):
        ranks(lambda: weft.init().signals(4, dtype=torch.float32), 1)


def test_a_launch_without_ranks():
    @triton.jit
    def nothing(x):
        tl.store(x, 1)

    with pytest.raises(Exception, match="(?i)emulat|driver|cuda|GPU"):
        nothing[(1,)](torch.zeros(1))


def test_init_without_a_launcher():
    if torch.cuda.is_available():
        pytest.skip("with GPUs a world of one rank is fine")
    with pytest.raises(weft.WeftError, match="weft emulate"):
        weft.init()


STRIDED = {
    "ag_gemm": ("a", "b", "out"), "gemm_rs": ("a", "b", "out"), "gemm_ar": ("a", "b", "out"),
    "ag_wgrad": ("a", "b", "out"), "all_gather": ("a", "out"), "reduce_scatter": ("a", "out"),
    "all_reduce": ("a", "out"), "all_to_all": ("a", "out"),
    "all_reduce_rms_norm": ("a", "residual", "weight"),
}  # fmt: skip


def padded(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, each row with room behind it."""
    return torch.cat([tensor, tensor], -1)[..., : tensor.shape[-1]]


@pytest.mark.parametrize("name", STRIDED)
def test_what_is_kept_of_a_call_does_not_take_other_strides(ranks, name):
    """A transposed weight, then a padded one, which is contiguous as little: the error that a first
    call raises, naming the tensor."""
    operator = getattr(weft.ops, name)

    def main():
        world = weft.init()
        rows = torch.randn(8, 16)
        square = torch.randn(16, 16)
        given = {
            "ag_gemm": (rows, square.t()), "gemm_rs": (rows, square.t()),
            "gemm_ar": (rows, square.t()), "ag_wgrad": (rows, torch.randn(16, 16)),
            "all_reduce_rms_norm": (rows, torch.randn(8, 16), torch.randn(16)),
        }.get(name, (rows,))  # fmt: skip
        result = operator(*given, world=world)
        names = STRIDED[name]
        for index, wrong in enumerate(names):
            tensors, rest = list(given), {}
            if wrong == "out":
                operator(*given, world=world, out=torch.empty_like(result))
                rest["out"] = padded(torch.empty_like(result))
            else:
                tensors[index] = (
                    padded(tensors[index])
                    if wrong != "weight"
                    else tensors[index].repeat_interleave(2)[::2]
                )
            with pytest.raises(ShapeError, match="contiguous"):
                operator(*tensors, world=world, **rest)
        world.close()

    ranks(main, 2)
