"""Hosts written for CUDA, on emulated ranks: devices, streams, events, graphs, symmetric memory."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import triton
import triton.language as tl

import weft
from weft.base.errors import (
    DeadlockError,
    OutOfBoundsError,
    RaceError,
    UninitializedError,
    UsageError,
)


def run(main, ranks=1, **options):
    with weft.emulated(ranks=ranks, **options) as session:
        return session.run(main)


@triton.jit
def add_one(x, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, tl.load(x + at) + 1)


def test_devices_are_named_as_on_gpus():
    def main():
        made = [
            torch.zeros(2, device="cuda"), torch.arange(2, device="cuda:1"),
            torch.empty_like(torch.ones(2), device=torch.device("cuda")), torch.rand(2, device=0),
            torch.tensor([1, 2], device="cuda", pin_memory=False), torch.ones(2).cuda(),
            torch.ones(2).to("cuda:0"), torch.ones(2).to(0), torch.ones(2).to(device="cuda"),
            torch.ones(2).to("cuda", torch.float16), torch.ones(2).new_zeros(3, device="cuda"),
            torch.empty(2, pin_memory=True), torch.nn.Linear(2, 2, device="cuda").weight,
            torch.nn.Linear(2, 2).cuda().weight, torch.nn.Linear(2, 2).to("cuda").weight,
        ]  # fmt: skip
        with torch.autocast("cuda", dtype=torch.bfloat16):
            assert (made[0].view(1, 2) @ made[0].view(2, 1)).dtype is torch.bfloat16
        with torch.device("cuda"):
            made.append(torch.zeros(2))
        assert {one.device.type for one in made} == {"cpu"}
        assert made[9].dtype is torch.float16
        return torch.cuda.current_device(), torch.cuda.device_count(), torch.cuda.is_available()

    assert run(main, 4, nodes=2) == [(0, 2, True), (1, 2, True)] * 2
    assert torch.zeros.__module__ != "weft.emulator.torch_cuda"
    with pytest.raises(Exception, match="CUDA|device"):
        torch.zeros(1, device="cuda:63")


def test_torch_itself_goes_on_as_without_a_gpu():
    def main():
        names = {"asked": torch.cuda.is_available}
        code = compile("answer = asked()", torch.__file__, "exec")
        exec(code, names)
        return names["answer"]

    assert run(main) == [torch.cuda.is_available()]


def test_a_copy_on_the_host_keeps_its_values():
    def main():
        x = torch.zeros(4, device="cuda")
        before = x.cpu()
        add_one[(1,)](x, x, 4)
        return before.tolist(), x.cpu().tolist()

    assert run(main) == [([0.0] * 4, [1.0] * 4)]


def through_an_event(too_early, capture):
    def main():
        x, one, two = (torch.zeros(8, device="cuda") for _ in range(3))
        main_stream, side, done = torch.cuda.current_stream(), torch.cuda.Stream(), None

        def queue():
            nonlocal done
            stream = torch.cuda.current_stream()
            first = stream.record_event()
            add_one[(1,)](x, one, 8)
            second = stream.record_event()
            side.wait_event(first if too_early else second)
            with torch.cuda.stream(side):
                add_one[(1,)](one, two, 8)
                done = torch.cuda.Event()
                done.record()
            stream.wait_event(done)

        if capture:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                assert torch.cuda.is_current_stream_capturing()
                queue()
            assert not one.any()
            graph.replay()
        else:
            queue()
            done.synchronize()
            assert done.query() and done.elapsed_time(done) == 0
        main_stream.synchronize()
        return two.tolist()

    return run(main)


@pytest.mark.parametrize("capture", [False, True])
def test_an_event_is_a_point_in_its_stream(capture):
    assert through_an_event(False, capture) == [[2.0] * 8]
    with pytest.raises(RaceError):
        through_an_event(True, capture)


@pytest.mark.parametrize("how, value, passes, too_early", [
    ("GEQ", 3, True, False), ("GEQ", 5, True, False), ("GEQ", 6, False, False),
    ("EQ", 5, True, False), ("EQ", 4, False, False), ("AND", 4, True, False),
    ("AND", 2, False, False), ("EQ", 5, True, True),
])  # fmt: skip
def test_a_stream_waits_for_a_word(how, value, passes, too_early):
    def main():
        from cuda.bindings import driver

        word, side = torch.zeros(1, dtype=torch.int64, device="cuda"), torch.cuda.Stream()
        with torch.cuda.stream(side):
            side.wait_stream(torch.cuda.default_stream())
            flags = driver.CUstreamWaitValue_flags[f"CU_STREAM_WAIT_VALUE_{how}"]
            driver.cuStreamWaitValue64(side.cuda_stream, word.data_ptr(), value, flags)
            doubled = word * 2
        main_stream = torch.cuda.current_stream().cuda_stream
        assert driver.cuStreamWriteValue64(main_stream, word.data_ptr(), 5, 0)[0] == 0
        if too_early:
            doubled.cpu()
        side.synchronize()
        return doubled.cpu().item()

    if too_early:
        with pytest.raises(UninitializedError):
            run(main)
    elif passes:
        assert run(main) == [10]
    else:
        with pytest.raises(
            DeadlockError, match=rf"stream cuda 1.* waits for .* {value}, which is 5"
        ):
            run(main)


def test_what_is_no_stream_is_refused():
    def main():
        from cuda.bindings import driver

        driver.cuStreamWriteValue32(10_000, torch.zeros(1, device="cuda").data_ptr(), 1, 0)

    with pytest.raises(UsageError, match="no stream of this rank"):
        run(main)


def test_an_event_of_a_capture_is_no_event_outside():
    def main():
        graph, event = torch.cuda.CUDAGraph(), torch.cuda.Event()
        with torch.cuda.graph(graph):
            event.record()
        event.wait()

    with pytest.raises(UsageError, match="capture"):
        run(main)


def test_a_launch_by_keyword_reads_nothing_on_the_host():
    """It goes on where a look at its arguments would wait for what only comes behind it."""

    def main():
        x, out, word = torch.zeros(8), torch.zeros(8), torch.zeros(1, dtype=torch.int32)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        waits[(1,)](word=word, out=x)
        add_one[(1,)](x=x, out=out, N=8)
        with torch.cuda.stream(side):
            signals[(1,)](word=word)
        return out[0].item()

    assert run(main) == [8.0]


@triton.jit
def waits(word, out):
    while tl.atomic_add(word, 0, sem="acquire") != 1:
        pass
    tl.store(out, 7.0)


@triton.jit
def signals(word):
    tl.atomic_xchg(word, 1, sem="release")


# ---------------------------------------------------------------------------------------------
# Symmetric memory


def started(main):
    def start():
        dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
        return main(dist.get_rank())

    return start


def test_a_handle_is_one_for_an_allocation_and_a_group():
    def main(rank):
        x = symm_mem.empty((2, 8), dtype=torch.int32, device="cuda")
        handle = symm_mem.rendezvous(x, dist.group.WORLD)
        assert symm_mem.rendezvous(x, dist.group.WORLD.group_name) is handle
        assert symm_mem.rendezvous(torch.zeros(1), dist.group.WORLD) is None
        assert symm_mem.is_symm_mem_tensor(x) and not symm_mem.is_symm_mem_tensor(torch.ones(1))
        assert handle.get_buffer(rank, x.shape, x.dtype).data_ptr() == x.data_ptr()
        pad = handle.get_signal_pad(rank, (4,), torch.int32)
        assert pad.tolist() == [0] * 4 and pad.data_ptr() == handle.signal_pad_ptrs[rank]
        x.fill_(rank)
        handle.barrier()
        row = handle.get_buffer((rank + 1) % 4, (8,), torch.int32, storage_offset=8)
        pair = dist.new_group([rank // 2 * 2, rank // 2 * 2 + 1], use_local_synchronization=True)
        both = symm_mem.rendezvous(x, pair)
        assert (both.world_size, both.rank) == (2, rank % 2)
        assert both.buffer_ptrs == handle.buffer_ptrs[rank // 2 * 2 :][:2]
        with pytest.raises(OutOfBoundsError, match="64 bytes"):
            handle.get_buffer(0, (8,), torch.int32, storage_offset=9)
        return row.tolist()

    assert run(started(main), 4) == [[(rank + 1) % 4] * 8 for rank in range(4)]


def test_symmetric_tensors_have_one_size():
    def main(rank):
        symm_mem.rendezvous(symm_mem.empty(4 + rank, device="cuda"), dist.group.WORLD)

    with pytest.raises(UsageError, match=r"\[16, 20\] bytes"):
        run(started(main), 2)


def test_who_is_missing_at_a_barrier_is_named():
    def main(rank):
        handle = symm_mem.rendezvous(symm_mem.empty(4, device="cuda"), dist.group.WORLD)
        if rank == 0:
            handle.barrier(channel=3)
            torch.cuda.synchronize()

    with pytest.raises(DeadlockError, match=r"channel 3.*only ranks \[0\] of 2"):
        run(started(main), 2)


def test_a_signal_that_nobody_puts():
    def main(rank):
        handle = symm_mem.rendezvous(symm_mem.empty(4, device="cuda"), dist.group.WORLD)
        if rank == 0:
            handle.wait_signal(1)
            torch.cuda.synchronize()

    with pytest.raises(DeadlockError, match="wait_signal") as caught:
        run(started(main), 2)
    assert "test_host_cuda.py" in str(caught.value)


def test_a_graph_with_barriers_of_symmetric_memory():
    def main(rank):
        x = symm_mem.empty(8, device="cuda")
        handle = symm_mem.rendezvous(x, dist.group.WORLD)
        other, out = handle.get_buffer(1 - rank, (8,), torch.float32), torch.zeros(8, device="cuda")
        source = torch.zeros(8, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            x.copy_(source)
            handle.barrier()
            out.copy_(other)
            handle.barrier()
        found = []
        for turn in range(3):
            source.fill_(10 * turn + rank)
            graph.replay()
            found.append(out[0].item())
        return found

    assert run(started(main), 2) == [[1.0, 11.0, 21.0], [0.0, 10.0, 20.0]]


@triton.jit
def raises_a_flag(flags, peer, order: tl.constexpr):
    tl.atomic_xchg(tl.load(flags + peer).to(tl.pointer_type(tl.int32)), 1, sem=order, scope="sys")


@triton.jit
def awaits_a_flag(flag, order: tl.constexpr):
    while tl.atomic_add(flag, 0, sem=order, scope="sys") != 1:
        pass


@triton.jit
def stores_and_signals(buffers, flags, peer, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(tl.load(buffers + peer).to(tl.pointer_type(tl.float32)) + at, at + 1.0)
    tl.atomic_xchg(
        tl.load(flags + peer).to(tl.pointer_type(tl.int32)), 1, sem="relaxed", scope="sys"
    )


@pytest.mark.parametrize("one_kernel", [False, True])
def test_begin_and_end_of_a_kernel_are_fences_to_raw_atomics(one_kernel):
    """A relaxed signal behind the kernel that stored, a relaxed wait before the one that reads."""

    def main(rank):
        x, flag = (symm_mem.empty(8, dtype=d, device="cuda") for d in (torch.float32, torch.int32))
        handles = [symm_mem.rendezvous(each, dist.group.WORLD) for each in (x, flag)]
        buffers, flags = (torch.tensor(each.buffer_ptrs) for each in handles)
        x.zero_()
        flag.zero_()
        handles[0].barrier()
        other, out = handles[0].get_buffer(1 - rank, (8,), torch.float32), torch.zeros(8)
        if one_kernel:
            stores_and_signals[(1,)](buffers, flags, 1 - rank, 8)
        else:
            add_one[(1,)](out, other, 8)
            raises_a_flag[(1,)](flags, 1 - rank, "relaxed")
        awaits_a_flag[(1,)](flag, "relaxed")
        add_one[(1,)](x, out, 8)
        return out.tolist()

    if one_kernel:
        with pytest.raises(RaceError):
            run(started(main), 2)
    else:
        assert run(started(main), 2) == [[2.0] * 8] * 2
