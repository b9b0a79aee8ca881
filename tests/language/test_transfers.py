"""Transfers that do not block: what fence and quiet are for. Multicast: compiled, not run."""

from __future__ import annotations

import re

import language_kernels as kernels
import pytest
import torch
import transfer_kernels
from language_kernels import CUDA, GPUS, HIP, machine_text

import weft
from weft.base.errors import UnsupportedError
from weft.verify import compiled

SIZE = 64


def pushing(how):
    def main():
        world = weft.init()
        source = torch.arange(SIZE) + 100.0 * world.rank
        inbox = world.empty((SIZE,), torch.float32, name="inbox")
        out = torch.zeros(SIZE)
        transfer_kernels.push[(1,)](
            world.arg, source, inbox, world.signals(1), out, HOW=how, SIZE=SIZE
        )
        world.synchronize()
        return out

    return main


@pytest.mark.parametrize("how", ["fence", "fence, relaxed", "quiet, overwrite"])
@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("seed", range(2))
def test_what_was_fenced_is_seen(ranks, how, nodes, seed):
    """Far ranks too: one-sided transfers reach them."""
    results = ranks(pushing(how), 4, nodes=nodes, seed=seed)
    for rank, out in enumerate(results):
        assert torch.equal(out, torch.arange(SIZE) + 100.0 * ((rank - 1) % 4))


@pytest.mark.parametrize(
    "how, guilty",
    [
        ("nothing", "tl.load(inbox"),  # a notify does not cover what is under way
        ("relaxed", "tl.load(inbox"),
        ("fence, overwrite", "tl.store(source"),  # fence orders, only quiet completes
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_what_was_not_is_a_race(ranks, how, guilty, seed):
    report = ranks(pushing(how), 2, collect=True, seed=seed)
    assert {finding.kind for finding in report.findings} == {"race"}
    assert guilty in str(report)


@pytest.mark.parametrize("quiet", [True, False])
def test_a_get_is_there_after_quiet(ranks, quiet):
    def main():
        world = weft.init()
        source = world.empty((SIZE,), torch.float32, name="source")
        source.fill_(world.rank + 1.0)
        inbox, out = torch.zeros(SIZE), torch.zeros(SIZE)
        world.barrier()
        transfer_kernels.pull[(1,)](world.arg, source, inbox, out, QUIET=quiet, SIZE=SIZE)
        world.synchronize()

    report = ranks(main, 3, collect=True)
    assert report.ok == quiet, str(report)


@pytest.mark.parametrize("target", GPUS)
def test_it_compiles_and_the_check_finds_nothing(target):
    report = compiled(kernels.compiled(transfer_kernels.transfers, target))
    assert report.ok, str(report)


@pytest.mark.parametrize("target", CUDA)
def test_a_fence_comes_behind_the_barrier_and_before_the_signal(target):
    code = machine_text(transfer_kernels.transfers, target)
    fences = [m.start() for m in re.finditer(r"fence\.acq_rel\.sys", code)]
    barriers = [m.start() for m in re.finditer(r"bar\.sync|barrier\.sync", code)]
    signals = [m.start() for m in re.finditer(r"(atom|red)\.global\.sys\.relaxed", code)]
    stores = [m.start() for m in re.finditer(r"st\.global", code)]
    assert len(signals) == 2 and len(fences) == 2
    assert any(min(stores) < barrier < fences[0] for barrier in barriers)
    assert fences[0] < signals[0] < fences[1] < signals[1]
    assert "fence.sc.sys" in code[signals[0] : signals[1]]


@pytest.mark.parametrize("target", HIP)
def test_a_fence_writes_back_on_amd(target):
    code = machine_text(transfer_kernels.transfers, target)
    assert len(re.findall(r"buffer_wbl2 sc0 sc1", code)) >= 2


@pytest.mark.parametrize("kernel", [transfer_kernels.by_warp, transfer_kernels.which_warp])
@pytest.mark.parametrize("target", ["cuda:90", "hip:gfx942", "emu"])
def test_warps_have_no_name(kernel, target):
    with pytest.raises(UnsupportedError, match="num_warps=1"):
        kernels.compiled(kernel, target)


@pytest.mark.parametrize("target", ["cuda:90", "cuda:100"])
def test_multicast_is_compiled(target):
    code = machine_text(transfer_kernels.multicast, target)
    for instruction in (
        "multimem.ld_reduce.relaxed.sys.global.add.f32",
        "multimem.ld_reduce.relaxed.sys.global.add.s32",
        "multimem.red.relaxed.sys.global.add.f32",
        "multimem.red.relaxed.sys.global.add.s32",
        "multimem.st.relaxed.sys.global.b32",
    ):
        assert instruction in code
    assert kernels.compiled(transfer_kernels.multicast, target).asm["cubin"]


@pytest.mark.parametrize(
    "target, reason", [("cuda:80", "sm_80"), ("hip:gfx942", "no multicast"), ("emu", "no operator")]
)
def test_multicast_elsewhere_is_a_gap(target, reason):
    with pytest.raises(UnsupportedError, match=reason):
        kernels.compiled(transfer_kernels.multicast, target)
