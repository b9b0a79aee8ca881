"""torch operations of emulated ranks: order with kernels, fresh memory, accesses to the checker."""

from __future__ import annotations

import ctypes
import inspect

import pytest
import torch
import triton
import triton.language as tl

import weft


@triton.jit
def fill(x_ptr, value, BLOCK: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, BLOCK), value)


@triton.jit
def double(x_ptr, out_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.load(x_ptr + i) * 2)


@triton.jit
def double_at(addresses, out_ptr, BLOCK: tl.constexpr):
    x_ptr = tl.load(addresses).to(tl.pointer_type(tl.float32))
    i = tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.load(x_ptr + i) * 2)


def on_one_rank(main, **options):
    with weft.emulated(ranks=1, **options) as ranks:
        (result,) = ranks.run(main)
        return result, ranks.report


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(), lambda x: sum(x.tolist()), lambda x: x.numpy().sum(),
        lambda x: (x + 1).sum().item() - 8, lambda x: x.clone().sum().item(),
        lambda x: float(repr(x).count("3.")) * 3,
        lambda x: 24.0 if torch.equal(x, torch.full((8,), 3.0)) else 0.0,
    ],
)  # fmt: skip
def test_reading_a_tensor_waits_for_its_kernel(read):
    def main():
        x = torch.zeros(8)
        fill[(1,)](x, 3.0, BLOCK=8)
        return read(x)

    assert on_one_rank(main)[0] == 24.0


ROWS = torch.tensor([0, 3])
CHOICES = {
    "index_put": lambda x: x.index_put_((ROWS,), torch.ones(2, 4)),
    "setitem": lambda x: x.__setitem__((ROWS, slice(1, 3)), 5.0) or x,
    "index_copy": lambda x: x.index_copy_(0, ROWS, torch.ones(2, 4)),
    "index_fill": lambda x: x.index_fill_(1, ROWS, 2.0),
    "scatter": lambda x: x.scatter_(0, torch.zeros(1, 4, dtype=torch.int64), torch.ones(1, 4)),
    "scatter of a number": lambda x: x.scatter_(0, torch.zeros(1, 4, dtype=torch.int64), 3.0),
    "masked_fill": lambda x: x.masked_fill_(torch.arange(4) > 2, 1.0),
    "masked_scatter": lambda x: x.masked_scatter_(torch.arange(4) > 2, torch.ones(4)),
    "put": lambda x: x.put_(ROWS, torch.ones(2)),
}


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("is_transposed", [False, True])
def test_what_is_written_at_chosen_places_alone_is_written(choice, is_transposed):
    """Nothing else is read by it, and nothing else is written afterwards."""

    def fresh():
        return torch.empty(4, 4).t() if is_transposed else torch.empty(4, 4)

    def main():
        written = CHOICES[choice](torch.full((4, 4), -1.0)) != -1.0
        x = CHOICES[choice](fresh())
        for row, column in written.nonzero().tolist():
            assert x[row, column].item() > 0
        assert written.any() and not written.all()
        row, column = (~written).nonzero()[0].tolist()
        return x[row, column].item()

    with weft.emulated(ranks=1, collect=True) as ranks:
        ranks.run(main)
        assert [one.kind for one in ranks.report.findings] == ["uninitialised"]
        assert "x[row, column].item()" in str(ranks.report.findings[0])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bool, torch.int64, torch.complex64])
def test_places_of_any_dtype(dtype):
    def main():
        x = torch.empty(4, 4, dtype=dtype)
        x[ROWS] = torch.ones(2, 4).to(dtype)
        x[1:3] = torch.ones(2, 4).to(dtype)
        return x.to(torch.complex64).sum().item()

    assert on_one_rank(main)[0] == 16


def test_what_is_added_at_chosen_places_reads_them():
    def main():
        return torch.empty(4).index_put_((ROWS,), torch.ones(2), accumulate=True)

    with pytest.raises(weft.base.errors.UninitializedError):
        on_one_rank(main)


@triton.jit
def sum_of(pair, by, out_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.load(pair[0] + i) + tl.load(pair[1] + i) + by)


@triton.jit
def fill_by_name(x_ptr, value, BLOCK: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, BLOCK), value)


def test_a_launch_by_keyword_reads_nothing():
    """Triton's record of a compiled launch held what its tensors print: reads by the host."""

    def main():
        x, y, out = torch.empty(8), torch.empty(8), torch.empty(8)
        fill_by_name[(1,)](x_ptr=x, value=3.0, BLOCK=8)
        fill_by_name[(1,)](x_ptr=y, value=1.0, BLOCK=8)
        sum_of[(1,)](pair=(x, y), by=2, out_ptr=out, BLOCK=8)
        return out.tolist()

    assert on_one_rank(main)[0] == [6.0] * 8


def test_a_kernel_follows_the_operations_before_it():
    def main():
        x, out = torch.zeros(8), torch.zeros(8)
        for i in range(3):
            x.add_(1)
            double[(1,)](x, out, BLOCK=8)
            assert out.tolist() == [2.0 * (i + 1)] * 8
        view = x.view(2, 4)[:, ::2]
        view.mul_(10)
        double[(1,)](x, out, BLOCK=8)
        return out.tolist()

    assert on_one_rank(main)[0] == [60.0, 6.0] * 4


def test_fresh_memory_is_no_number():
    def main():
        assert torch.empty(4).isnan().all()
        assert torch.empty_like(torch.zeros(4, dtype=torch.bfloat16)).isnan().all()
        assert torch.zeros(4).new_empty(2, 2).isnan().all()
        assert (torch.empty(4, dtype=torch.int32) < -1_000_000).all()
        assert torch.zeros(4).tolist() == [0.0] * 4

    with weft.emulated(ranks=1, collect=True) as ranks:
        ranks.run(main)
        assert ranks.report.ok or {f.kind for f in ranks.report.findings} == {"uninitialised"}


def test_a_kernel_that_reads_fresh_memory():
    def main():
        x, out = torch.empty(8), torch.empty(8)
        x[:4].fill_(1.0)
        double[(1,)](x, out, BLOCK=8)

    with pytest.raises(weft.UninitializedError, match=r"x_ptr.*\[4\]"):
        on_one_rank(main)


def test_an_operation_that_reads_what_a_kernel_left_unwritten():
    def main():
        out = torch.empty(16)
        fill[(1,)](out, 1.0, BLOCK=8)
        copied = out.clone()  # moving is not looking
        out[:8].sum()
        out.sum()
        return copied

    _, start = inspect.getsourcelines(test_an_operation_that_reads_what_a_kernel_left_unwritten)
    with pytest.raises(weft.UninitializedError, match=r"x_ptr.*\[8\]") as caught:
        on_one_rank(main)
    assert caught.value.finding.first.file == __file__
    assert caught.value.finding.first.line == start + 6


def test_filled_memory_is_forgotten_and_recycled_memory_is_not_mixed_up():
    def main():
        for i in range(50):
            x = torch.empty(64)
            x.fill_(i)
            out = torch.empty(8)
            double[(1,)](x, out, BLOCK=8)
            assert out[0].item() == 2 * i
            del x, out

    assert on_one_rank(main)[1].ok


def test_a_tensor_that_a_kernel_reaches_by_its_address():
    def main():
        x, out = torch.full((8,), 4.0), torch.zeros(8)
        addresses = torch.tensor([x.data_ptr()], dtype=torch.int64)
        double_at[(1,)](addresses, out, BLOCK=8)
        return out.tolist()

    assert on_one_rank(main)[0] == [8.0] * 8


def test_a_view_and_then_its_whole():
    def main():
        x, out = torch.full((16,), 4.0), torch.zeros(16)
        double[(1,)](x[:8], out[4:], BLOCK=8)
        double[(1,)](x, out, BLOCK=16)
        return out.tolist()

    assert on_one_rank(main)[0] == [8.0] * 16


def test_a_tensor_lives_until_its_kernel_has_run():
    def main():
        out = torch.zeros(8)
        x = torch.full((8,), 4.0)
        double[(1,)](x, out, BLOCK=8)
        del x
        junk = [torch.full((8,), -1.0) for _ in range(10)]
        assert out.tolist() == [8.0] * 8
        return len(junk)

    on_one_rank(main)


def test_torch_operations_race_like_kernels_do():
    def main():
        world = weft.init(heap_bytes=1 << 16)
        x = world.zeros((8,), torch.float32)
        out = world.zeros((8,), torch.float32)
        side = world.stream("side")
        with side:
            fill[(1,)](x, 1.0, BLOCK=8)
        out.copy_(x)  # nothing orders this stream after the other
        world.synchronize()

    with pytest.raises(weft.RaceError, match="x@rank0") as caught:
        on_one_rank(main)
    lines = {side.line for side in caught.value.finding.sides}
    assert len(lines) == 2


def test_streams_that_wait_do_not_race():
    def main():
        world = weft.init(heap_bytes=1 << 16)
        x = world.zeros((8,), torch.float32)
        out = world.zeros((8,), torch.float32)
        side = world.stream("side")
        side.wait(world.current_stream())
        with side:
            fill[(1,)](x, 1.0, BLOCK=8)
        world.current_stream().wait(side)
        out.copy_(x)
        return out.tolist()

    assert on_one_rank(main)[0] == [1.0] * 8


def test_the_host_that_synchronised_knows():
    def main():
        world = weft.init(heap_bytes=1 << 16)
        x = world.zeros((8,), torch.float32)
        out = world.zeros((8,), torch.float32)
        with world.stream("side"):
            fill[(1,)](x, 1.0, BLOCK=8)
        world.synchronize()
        out.copy_(x)
        return out.tolist()

    assert on_one_rank(main)[0] == [1.0] * 8


def test_a_read_of_a_peers_memory_needs_a_signal():
    def main(rank, barrier):
        world = weft.init(heap_bytes=1 << 16)
        x = world.zeros((8,), torch.float32)
        x.fill_(rank)
        if barrier:
            world.barrier()
        return world.peer(x, 1 - rank).tolist()

    with weft.emulated(ranks=2) as ranks:
        assert ranks.run(main, True) == [[1.0] * 8, [0.0] * 8]
    with weft.emulated(ranks=2) as ranks, pytest.raises(weft.RaceError, match="x@rank"):
        ranks.run(main, False)


def test_autograd_through_tracked_memory():
    def main():
        x = torch.ones(8)
        fill[(1,)](x, 2.0, BLOCK=8)
        weight = torch.ones(8, requires_grad=True)
        (weight * x).sum().backward()
        return weight.grad.tolist()

    assert on_one_rank(main)[0] == [2.0] * 8


@triton.jit
def wait_for(flag_ptr, x_ptr, BLOCK: tl.constexpr):
    while tl.atomic_add(flag_ptr, 0, sem="acquire", scope="gpu") < 1:
        pass
    tl.store(x_ptr + tl.arange(0, BLOCK), 5.0)


@triton.jit
def signal(flag_ptr):
    tl.atomic_add(flag_ptr, 1, sem="release", scope="gpu")


@pytest.mark.parametrize("seed", range(3))
def test_the_host_goes_on_where_a_gpus_would(seed):
    """Operations behind a kernel that waits for what the host launches only later."""

    def main():
        world = weft.init(heap_bytes=1 << 16)
        flag, x = world.signals(1), world.zeros((8,), torch.float32)
        wait_for[(1,)](flag, x, BLOCK=8)
        y = x * 2
        x.add_(y)
        low, high = (x + 1).chunk(2)
        total = torch.cat([low, high]).sum()
        with world.stream("other"):
            signal[(1,)](flag)
        assert total.item() == 8 * 16.0
        return y.tolist()

    assert on_one_rank(main, seed=seed)[0] == [10.0] * 8


def test_the_host_does_not_go_on_where_it_needs_the_value():
    def main():
        world = weft.init(heap_bytes=1 << 16)
        flag, x = world.signals(1), world.zeros((8,), torch.float32)
        wait_for[(1,)](flag, x, BLOCK=8)
        y = x * 2
        total = y.sum().item()
        with world.stream("other"):
            signal[(1,)](flag)
        return total

    with pytest.raises(weft.DeadlockError, match=r"flag@rank0\[0\]"):
        on_one_rank(main)


@triton.jit
def signal_peer(addresses, PEER: tl.constexpr):
    flag = tl.load(addresses + PEER).to(tl.pointer_type(tl.int32))
    tl.atomic_add(flag, 1, sem="release", scope="sys")


@pytest.mark.parametrize(
    "is_set", [lambda flag: flag.item() == 1, lambda flag: (flag == 1).all()]
)  # fmt: skip
def test_a_host_that_polls_lets_the_others_run(is_set):
    def main(rank):
        world = weft.init(heap_bytes=1 << 16)
        flag = world.signals(1)
        if rank == 0:
            while not is_set(flag):
                pass
        else:
            signal_peer[(1,)](world.pointers(flag), PEER=0)
        return flag.tolist()

    with weft.emulated(ranks=2, collect=True) as ranks:
        assert ranks.run(main)[0] == [1]


def test_a_host_that_polls_for_nothing_is_a_deadlock(monkeypatch):
    monkeypatch.setattr("weft.emulator.context.POLLS_IN_VAIN", 100)

    def main():
        world = weft.init(heap_bytes=1 << 16)
        flag = world.signals(1)
        while flag.item() == 0:
            pass

    with pytest.raises(weft.DeadlockError, match="a change of flag, which it polls"):
        on_one_rank(main)


def doubled_and_one(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    double[(1,)](x, out, BLOCK=8)
    return out + 1


@pytest.fixture
def operation():
    """An operation of a user's own: a kernel, and what torch makes of its result."""
    with torch.library._scoped_library("weft_tests", "DEF") as library:
        library.define("doubled_and_one(Tensor x) -> Tensor")
        library.impl("doubled_and_one", doubled_and_one, "CPU")
        library.impl("doubled_and_one", torch.empty_like, "Meta")
        yield torch.ops.weft_tests.doubled_and_one.default


@pytest.mark.parametrize("way", ["called", "compiled", "recorded"])
def test_what_an_own_operation_does_behind_its_kernel_waits_for_it(operation, way):
    """torch hides what an operation does from who handles its call, and so it read too early."""

    def main():
        call = operation
        if way == "compiled":
            call = torch.compile(lambda x: operation(x), backend="aot_eager", fullgraph=True)
        with weft.init(heap_bytes=1 << 16) as world:
            x = torch.full((8,), 3.0)
            if way != "recorded":
                return call(x).tolist()
            with world.record() as recording:
                out = call(x)
            x.fill_(5.0)
            recording.replay()
            return out.tolist()

    for seed in range(3):
        out, _ = on_one_rank(main, seed=seed)
        assert out == [11.0 if way == "recorded" else 7.0] * 8


def test_an_operation_in_machine_code_waits_for_what_it_reads():
    """One of C++ reads memory without a word to torch or to the checker."""

    def summed(x: torch.Tensor) -> torch.Tensor:
        address = torch._C.TensorBase.data_ptr(x)
        return torch.tensor(sum((ctypes.c_float * x.numel()).from_address(address)))

    with torch.library._scoped_library("weft_tests", "DEF") as library:
        library.define("summed(Tensor x) -> Tensor")
        library.impl("summed", summed, "CPU")

        def main():
            x = torch.zeros(8)
            fill[(1,)](x, 3.0, BLOCK=8)
            return torch.ops.weft_tests.summed(x).item()

        assert on_one_rank(main)[0] == 24.0


def test_an_own_operation_that_reads_unwritten_memory_is_found():
    """As without it: fresh memory is known for what it is, and read it is a finding."""

    def empty(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x) + 1

    def main():
        with torch.library._scoped_library("weft_tests", "DEF") as library:
            library.define("unwritten(Tensor x) -> Tensor")
            library.impl("unwritten", empty, "CPU")
            return torch.ops.weft_tests.unwritten.default(torch.zeros(8))

    with pytest.raises(weft.UninitializedError):
        on_one_rank(main)
