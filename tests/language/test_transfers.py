"""Transfers that do not block: what fence and quiet are for."""

from __future__ import annotations

import re

import language_kernels as kernels
import pytest
import torch
import transfer_kernels
from language_kernels import CUDA, GPUS, HIP, machine_text

import weft
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
    expected = {"race"} if "fence" in how else {"race", "unfinished transfer"}
    assert {finding.kind for finding in report.findings} == expected
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


# ---------------------------------------------------------------------------------------------
# By warps


def pushing_by_warps(arrivals=0, calls=3):
    def main():
        world = weft.init()
        source = torch.arange(calls * SIZE) + 100.0 * world.rank
        inbox = world.empty((SIZE,), torch.float32, name="inbox")
        out = torch.zeros(calls * SIZE)
        transfer_kernels.push_by_warps[(1,)](
            *(world.arg, source, inbox, world.signals(2), out, calls),
            ARRIVALS=arrivals, SIZE=SIZE, num_warps=4,
        )  # fmt: skip
        world.synchronize()
        return out

    return main


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_all_warps_arrivals_stand_for_the_program(ranks, nodes, seed):
    results = ranks(pushing_by_warps(), 4, nodes=nodes, seed=seed)
    for rank, out in enumerate(results):
        assert torch.equal(out, torch.arange(3 * SIZE) + 100.0 * ((rank - 1) % 4))


@pytest.mark.parametrize("arrivals", [1, 3])
def test_fewer_arrivals_order_nothing(ranks, arrivals):
    """Found in each schedule in which the receiver goes on before the last has come."""
    main = pushing_by_warps(arrivals, calls=1)
    reports = [ranks(main, 2, collect=True, seed=seed) for seed in range(8)]
    assert {f.kind for report in reports for f in report.findings} == {"race"}
    assert any("tl.load(inbox + at)" in str(report) for report in reports)


@pytest.mark.parametrize("num_warps", [1, 4, 8])
@pytest.mark.parametrize("target", GPUS)
def test_by_warps_it_compiles_and_the_check_finds_nothing(target, num_warps):
    compiled_kernel = kernels.compiled(transfer_kernels.by_warps, target, num_warps=num_warps)
    report = compiled(compiled_kernel)
    assert report.ok, str(report)


@pytest.mark.parametrize("target", CUDA)
def test_each_warp_stores_meets_and_signals_without_a_block_barrier(target):
    code = machine_text(transfer_kernels.by_warps, target)
    stores = [m.start() for m in re.finditer(r"st\.global", code)]
    meets = [m.start() for m in re.finditer(r"bar\.warp\.sync", code)]
    signals = [m.start() for m in re.finditer(r"red\.release\.(sys|gpu)\.global\.add", code)]
    # 1024 values by 128 threads: two stores of 16 bytes each.
    assert len(stores) == 4 and len(meets) == len(signals) == 2
    assert stores[1] < meets[0] < signals[0] < stores[2] < stores[3] < meets[1] < signals[1]
    assert not re.search(r"\bbar\.sync|barrier\.sync", code)
    assert "red.release.sys.global.add.u32" in code and "red.release.gpu.global.add.u64" in code


@pytest.mark.parametrize("target", CUDA)
def test_the_order_holds_in_machine_code(target):
    """What ptxas made of it: stores, the fence of the release, its atomic; twice."""
    sass = kernels.compiled(transfer_kernels.by_warps, target).asm["sass"]
    events = re.findall(r"\b(STG|MEMBAR|RED|ATOM|BAR\.SYNC|BAR\.RED)G?\b", sass)
    assert " ".join(events) == " ".join(["STG STG MEMBAR RED"] * 2)


@pytest.mark.parametrize("target", ["cuda:90", "cuda:100"])
def test_a_warp_signals_when_its_bulk_stores_are_written(target):
    kernel = kernels.compiled(transfer_kernels.by_warps_tma, target)
    assert compiled(kernel).ok
    code = machine_text(transfer_kernels.by_warps_tma, target)
    complete = code.index("cp.async.bulk.wait_group 0")
    assert code.index("cp.async.bulk.tensor") < complete < code.index("red.release.sys")


@pytest.mark.parametrize("gone", ["bar.warp.sync 0xffffffff;", "mov.u32 lane, %laneid;"])
def test_the_check_knows_what_a_warp_needs(gone):
    texts = dict(kernels.compiled(transfer_kernels.by_warps, "cuda:90").asm)
    assert gone in texts["ptx"]
    report = compiled({**texts, "ptx": texts["ptx"].replace(gone, "")}, "cuda:90")
    found = report.of("release without barrier")
    assert len({finding.first.line for finding in found}) == 2, str(report)


@pytest.mark.parametrize("target", HIP)
def test_each_wave_signals_behind_its_stores_on_amd(target):
    code = machine_text(transfer_kernels.by_warps, target)
    stores = [m.start() for m in re.finditer(r"global_store_dwordx4", code)]
    releases = [
        m.start()
        for m in re.finditer(
            r"s_waitcnt vmcnt\(0\)\s+buffer_wbl2 sc0 sc1\s+s_waitcnt vmcnt\(0\)\s+"
            r"s_mov_b64 (s\[\d+:\d+\]), exec\s+s_mov_b64 exec, 1\s+"
            r"global_atomic_add(_x2)? v\[\d+:\d+\], v\S+, off sc1\s+s_mov_b64 exec, \1",
            code,
        )
    ]
    assert len(releases) == 2 and "s_barrier" not in code
    assert stores[0] < releases[0] < stores[-1] < releases[1]
