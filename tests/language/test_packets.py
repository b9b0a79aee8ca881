"""Packets: right under all schedules, wrong uses found, and what they become on each target."""

from __future__ import annotations

import re

import language_kernels as kernels
import packet_kernels
import pytest
import torch
import triton
import triton.language as tl
from effort import slow_but
from language_kernels import CUDA, GPUS, HIP, machine_text

import weft
import weft.language as wl
from weft.base.errors import DtypeError, FindingError, ShapeError, SignalError
from weft.verify import compiled

SIZE, CALLS = 32, 4


def sums(calls=CALLS, slots=2, step=1, wait=True, zeroed=True):
    def main():
        world = weft.init()
        make = world.zeros if zeroed else world.empty
        inbox = make((slots, world.num_ranks, SIZE), torch.int64, name="inbox")
        torch.manual_seed(world.rank)
        values = torch.randn(calls, SIZE)
        out = torch.zeros(calls, SIZE)
        packet_kernels.sum_of_all[(1,)](
            world.arg, values, inbox, out, calls, SIZE=SIZE, SLOTS=slots, STEP=step, WAIT=wait
        )
        world.synchronize()
        return values, out

    return main


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_everyone_sums_what_everyone_sent(ranks, num_ranks, seed):
    results = ranks(sums(), num_ranks, seed=seed)
    expected = sum((values for values, _ in results[1:]), results[0][0])
    for _, out in results:
        assert torch.equal(out, expected)


@pytest.mark.parametrize("seed", range(3))
def test_two_halves_suffice_also_from_launch_to_launch(ranks, seed):
    def main():
        world = weft.init()
        inbox = world.zeros((2, world.num_ranks, SIZE), torch.int64, name="inbox")
        outs = torch.zeros(CALLS, SIZE)
        for e in range(1, CALLS + 1):
            values = torch.full((SIZE,), float(e + world.rank))
            packet_kernels.one_call[(1,)](world.arg, values, inbox, outs[e - 1], e, SIZE=SIZE)
        world.synchronize()
        return outs[:, 0].tolist()

    assert ranks(main, 3, seed=seed) == [[3.0 * e + 3 for e in range(1, CALLS + 1)]] * 3


@pytest.mark.parametrize(
    "change, kinds",
    [
        ({"slots": 1}, {"race", "deadlock"}),  # a fast rank overwrites what a slow one reads
        ({"step": 0}, {"stale flag"}),  # the flag does not change from call to call
        ({"wait": False}, {"race"}),  # plain loads look at no flag
        ({"zeroed": False}, {"uninitialised"}),  # what memory held may look like a packet
    ],
    ids=["one half", "one flag", "no wait", "not zeroed"],
)
@pytest.mark.parametrize("seed", range(3))
def test_every_mutant_is_found(ranks, change, kinds, seed):
    report = ranks(sums(**change), 2, collect=True, seed=seed)
    assert kinds & {finding.kind for finding in report.findings}, str(report)


@pytest.mark.parametrize("signal", [True, False])
def test_packets_order_nothing_else(ranks, signal):
    def main():
        world = weft.init()
        data = world.zeros((1,), torch.float32, name="data")
        inbox = world.zeros((2,), torch.int64, name="inbox")
        packet_kernels.pass_on[(1,)](world.arg, data, inbox, torch.zeros(1), SIGNAL=signal)
        world.synchronize()

    report = ranks(main, 2, collect=True)
    assert {finding.kind for finding in report.findings} == (set() if signal else {"race"})
    assert "data@rank1" in str(report) or signal


def test_a_packet_that_never_comes_is_a_deadlock(ranks):
    def main():
        world = weft.init()
        inbox = world.zeros((4,), torch.int64, name="inbox")
        with_flag_2 = torch.ones(4)
        packet_kernels.unbounded[(1,)](torch.cat([inbox] * 64), with_flag_2.repeat(64))
        world.synchronize()

    with pytest.raises(FindingError, match="for a packet of flag 5"):
        ranks(main, 1)


def test_flag_0_in_zeroed_memory_is_found(ranks):
    def main():
        world = weft.init()
        inbox = world.zeros((2, 1, SIZE), torch.int64, name="inbox")
        values, out = torch.ones(SIZE), torch.zeros(SIZE)
        packet_kernels.one_call[(1,)](world.arg, values, inbox, out, 0, SIZE=SIZE)
        world.synchronize()

    with pytest.raises(SignalError, match="holds a packet of flag 0 already"):
        ranks(main, 1)


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.float8_e4m3fn, torch.float16, torch.bfloat16, torch.float32]
)
def test_narrow_values_share_packets(ranks, dtype):
    """Values, pointers under a mask, one scalar for all places, and a scalar packet."""
    share = 4 // dtype.itemsize

    def main():
        world = weft.init()
        inbox = world.zeros((3, SIZE), torch.int64)
        one = world.zeros((1,), torch.int64)
        values = ((torch.arange(SIZE * share) + world.rank) % 100).to(dtype)
        out = torch.zeros(3 * SIZE * share + 1).to(dtype)
        packet_kernels.narrow[(1,)](world.arg, values, inbox, one, out, 5, SIZE=SIZE, SHARE=share)
        world.synchronize()
        return values, out

    size = SIZE * share
    for rank, (_, out) in enumerate(results := ranks(main, 2)):
        sent = results[1 - rank][0].float()
        out = out.float()
        assert torch.equal(out[:size], sent)
        kept = torch.where(torch.arange(size) < 5 * share, sent, 0.0)
        assert torch.equal(out[size : 2 * size], kept)
        assert torch.equal(out[2 * size :], sent[1].expand(size + 1))


@pytest.mark.parametrize("n", [0, 5, 32])
def test_masks_and_scalars(ranks, n):
    def main():
        world = weft.init()
        inbox = world.zeros((SIZE + 1,), torch.int64)
        values = torch.arange(SIZE) + 1.0
        out = torch.full((SIZE + 1,), -1.0)
        packet_kernels.tail[(1,)](world.arg, values, inbox, out, n, SIZE=SIZE)
        world.synchronize()
        return out

    for out in ranks(main, 2):
        expected = torch.where(torch.arange(SIZE) < n, torch.arange(SIZE) + 1.0, 0.0)
        assert torch.equal(out, torch.cat([expected, torch.tensor([float(n)])]))


# ---------------------------------------------------------------------------------------------
# Emitted code


KERNELS = (
    packet_kernels.packets, packet_kernels.half_packets, packet_kernels.byte_packets,
    packet_kernels.unbounded,
)  # fmt: skip


@pytest.mark.few(1)
@pytest.mark.parametrize(("kernel", "target"), slow_but(
    [*((kernel, "cuda:90") for kernel in KERNELS), (packet_kernels.packets, "hip:gfx942")],
    ((kernel, target) for kernel in KERNELS for target in GPUS),
))  # fmt: skip
def test_it_compiles_and_the_check_finds_nothing(kernel, target):
    report = compiled(kernels.compiled(kernel, target))
    assert report.ok, str(report)


@pytest.mark.slow
@pytest.mark.parametrize(("target",), slow_but([CUDA[:1]], zip(CUDA)))
def test_a_packet_is_one_relaxed_access_of_eight_bytes(target):
    code = machine_text(packet_kernels.packets, target)
    stores = re.findall(r"st\.relaxed\.sys\.global\.b64", code)
    loads = re.findall(r"ld\.relaxed\.sys\.global\.b64", code)
    # Four waits, each with a first look, a loop, and a last look for replicas.
    assert stores and len(loads) >= 12
    assert kernels.compiled(packet_kernels.packets, target).asm["cubin"]
    assert not re.search(r"(ld|st)\.(volatile|global)\.(v\d\.)?b?u?64 .*flags64", code)


@pytest.mark.parametrize(("target",), slow_but([HIP[:1]], zip(HIP)))
def test_packets_are_system_wide_atomics_on_amd(target):
    code = machine_text(packet_kernels.packets, target)
    assert re.search(r"(global|flat)_atomic_swap_x2", code)
    for line in re.findall(r"(?:global|flat)_atomic_(?:swap|add)_x2.*", code):
        assert "sc1" in line


# ---------------------------------------------------------------------------------------------
# Bad input


@triton.jit
def of_double_words(world, x, flags64):
    wl.put_packets(world, flags64, tl.load(x).to(tl.float64), 1, to=0)


@triton.jit
def of_one_half_word(world, x, flags64):
    one = tl.arange(0, 1)
    wl.put_packets(world, flags64 + one, tl.load(x + one).to(tl.float16), 1, to=0)


@triton.jit
def into_words(world, x, flags):
    wl.put_packets(world, flags, 1, 1, to=0)


@triton.jit
def as_booleans(world, flags64):
    wl.wait_packets(flags64, 1, dtype=tl.int1)


@triton.jit
def flag_too_large(world, flags64):
    wl.wait_packets(flags64, 1 << 32)


@pytest.mark.parametrize(
    "kernel, message",
    [
        (of_double_words, "src is a scalar fp64; a packet carries values of 8, 16 or 32 bits"),
        (of_one_half_word, "2 neighbours of it share a packet"),
        (into_words, "packets are words of int64"),
        (as_booleans, "a packet carries values of 8, 16 or 32 bits"),
        (flag_too_large, "does not fit the word's 32 bits"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_packets_cannot_be(kernel, message):
    with pytest.raises((DtypeError, ShapeError), match=message):
        kernels.compiled(kernel, "cuda:90")
