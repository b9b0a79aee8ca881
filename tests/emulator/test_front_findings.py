"""What goes wrong inside one kernel is a finding with rank, kernel and line, never a crash."""

import inspect

import pytest
import torch
import triton
import triton.language as tl

import weft


@triton.jit
def reads_misaligned(x, out, n):
    moved = (x.to(tl.pointer_type(tl.int8)) + 2).to(tl.pointer_type(tl.float32))
    at = tl.arange(0, 8)
    tl.store(out + at, tl.load(moved + at))  # HERE


@triton.jit
def overflows(x, out, n):
    at = tl.program_id(0) + tl.arange(0, 8)
    tl.store(out + at, tl.load(x + at * n, mask=at < 4))  # HERE


@triton.jit
def turns_for_ever(x, out, n):
    at = n
    while at != 0:  # HERE
        at = tl.where(at % 2 == 0, at + 1, at + 3)
    tl.store(out, at.to(tl.float32))


@triton.jit
def picks_outside(x, out, n):
    at = tl.arange(0, 8)
    tl.store(out + at, tl.gather(tl.load(x + at), at + 1, 0))  # HERE


@triton.jit
def asserts(x, out, n):
    at = tl.arange(0, 8)
    tl.device_assert(tl.load(x + at) > 1e9, "never so large")  # HERE


EXPECTED = [
    (reads_misaligned, 1, "misaligned"),
    (overflows, 2**30, "out of bounds"),
    (turns_for_ever, 5, "endless loop"),
    (picks_outside, 1, "out of bounds"),
    (asserts, 1, "assertion"),
]


@pytest.mark.parametrize("kernel, n, kind", EXPECTED, ids=lambda value: str(value))
def test_finding_has_rank_kernel_and_line(kernel, n, kind, monkeypatch):
    monkeypatch.setenv("WEFT_ENDLESS_TURNS", "100000")

    def main(rank):
        if rank == 1:
            kernel[(1,)](torch.zeros(16), torch.zeros(16), n)

    with weft.emulated(ranks=2, collect=True) as session:
        session.run(main)
    (found,) = session.report.findings
    lines, first = inspect.getsourcelines(kernel.fn)
    line = first + next(i for i, text in enumerate(lines) if "# HERE" in text)
    side = found.first
    assert (found.kind, side.rank, side.kernel) == (kind, 1, kernel.__name__)
    assert (side.file, side.line) == (__file__, line)


@triton.jit
def count_down(out, n):
    left = n
    while left > 0:
        left -= 1
    tl.store(out, left)


def test_long_loops_may_end(monkeypatch):
    monkeypatch.setenv("WEFT_ENDLESS_TURNS", "200000")
    out = torch.ones(1, dtype=torch.int32)
    with weft.emulated(ranks=1) as session:
        session.run(lambda: count_down[(1,)](out, 150_000))
    assert out.item() == 0


@triton.jit
def later(a, b):
    if a > b:
        return a
    return b


@triton.jit
def largest_by_returns(x, out, running, N: tl.constexpr):
    at = tl.arange(0, N)
    value = tl.load(x + at)
    tl.store(out, tl.reduce(value, 0, later))
    tl.store(running + at, tl.associative_scan(value, 0, later))


def test_early_returns_in_combining_functions():
    x, out, running = torch.randn(16), torch.zeros(1), torch.zeros(16)
    with weft.emulated(ranks=1) as session:
        session.run(lambda: largest_by_returns[(1,)](x, out, running, N=16))
    assert out[0] == x.max() and torch.equal(running, x.cummax(0).values)


@triton.jit
def blocks(x, out, highest):
    source = tl.make_tensor_descriptor(x, [16, 16], [16, 1], [8, 16])
    target = tl.make_tensor_descriptor(out, [16, 16], [16, 1], [8, 16])
    top = tl.make_tensor_descriptor(highest, [5, 16], [16, 1], [8, 16])
    target.atomic_add([0, 0], source.load([4, 0]))
    target.atomic_add([0, 0], source.load([4, 0]))
    top.atomic_max([0, 0], source.load([0, 0]).to(tl.int32))


def test_descriptors_reduce():
    x, out = torch.randn(16, 16), torch.zeros(16, 16)
    highest = torch.zeros(8, 16, dtype=torch.int32)
    with weft.emulated(ranks=1) as session:
        session.run(lambda: blocks[(1,)](x * 10, out, highest))
    torch.testing.assert_close(out[:8], x[4:12] * 20)
    expected = (x[:8] * 10).int().clamp_min(0)
    expected[5:] = 0  # outside
    assert torch.equal(highest, expected)


@triton.jit
def leaves_while_reducing(sums, ready, x):
    block = tl.make_tensor_descriptor(sums, [8, 16], [16, 1], [8, 16])
    if tl.program_id(0) == 0:
        block.atomic_add([0, 0], tl.full((8, 16), 1.0, tl.float32))
        tl.atomic_xchg(ready, 1, sem="release")
    else:
        while tl.atomic_add(ready, 0, sem="acquire") != 1:
            pass
        tl.store(x, tl.load(sums))


def test_a_reduction_is_asynchronous():
    """On Triton before 3.8 a release does not wait for it."""
    from weft.emulator.accesses import RELEASE_COMPLETES_STORES

    args = torch.zeros(8, 16), torch.zeros(1, dtype=torch.int32), torch.zeros(1)
    with weft.emulated(ranks=1, collect=True) as session:
        session.run(lambda: leaves_while_reducing[(2,)](*args))
    assert bool(session.report.races) == (not RELEASE_COMPLETES_STORES)


@triton.jit
def add_tiles(sums, ready, old, SEM: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, N)
    before = tl.atomic_add(sums + at, tl.program_id(0) + 1, mask=at < N - 3, sem=SEM)
    tl.store(old + tl.program_id(0) * N + at, before)
    if tl.program_id(0) == 0:
        while tl.atomic_add(sums + N // 2, 0, sem="acquire") != 6:
            pass


@pytest.mark.parametrize("sem", ["relaxed", "acq_rel"])
@pytest.mark.parametrize("size", [16, 256])
def test_tiles_of_atomics(sem, size):
    """Different words are updated at once; whoever spins on one of them is woken."""
    for seed in range(4):
        sums, old = torch.zeros(size, dtype=torch.int32), torch.empty(3, size, dtype=torch.int32)
        ready = torch.zeros(1, dtype=torch.int32)
        with weft.emulated(ranks=1, seed=seed) as session:
            session.run(lambda: add_tiles[(3,)](sums, ready, old, SEM=sem, N=size))
        assert torch.equal(sums, torch.tensor([6] * (size - 3) + [0] * 3, dtype=torch.int32))
        assert sorted(old[:, 0].tolist())[0] == 0 and not old[:, -3:].any()


@triton.jit
def count_values(values, counts, N: tl.constexpr):
    tl.atomic_add(counts + tl.load(values + tl.arange(0, N)), 1)


def test_atomics_on_one_word_by_many_lanes():
    values, counts = torch.randint(0, 5, (64,)), torch.zeros(5, dtype=torch.int64)
    with weft.emulated(ranks=1) as session:
        session.run(lambda: count_values[(1,)](values, counts, N=64))
    assert torch.equal(counts, values.bincount(minlength=5))


@triton.jit
def publish_by_tile(data, flags, out, N: tl.constexpr, SEM: tl.constexpr):
    at = tl.arange(0, N)
    if tl.program_id(0) == 0:
        tl.store(data + at, at)
        tl.atomic_add(flags + at, 1, sem=SEM)
    else:
        while tl.atomic_add(flags + 3, 0, sem="acquire") == 0:
            pass
        tl.store(out + at, tl.load(data + at))


@pytest.mark.parametrize("sem, races", [("release", False), ("acq_rel", False), ("relaxed", True)])
def test_a_tile_of_atomics_releases_at_each_word(sem, races):
    args = (torch.zeros(128, dtype=torch.int32) for _ in range(3))
    data, flags, out = args
    with weft.emulated(ranks=1, collect=True) as session:
        session.run(lambda: publish_by_tile[(2,)](data, flags, out, N=128, SEM=sem))
    assert bool(session.report.races) == races
