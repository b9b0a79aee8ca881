"""Worlds on emulated ranks: heaps, peers, nodes, slots with epochs, groups, bad input."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl

import weft
import weft.language as wl
from weft.emulator.context import current
from weft.language.slots import slot_epoch, slot_finish, slot_wait_free

HEAP = 1 << 20


@triton.jit
def gather_kernel(world, slot, gathered, rows_ready, x, out, n, BLOCK: tl.constexpr):
    """Push the own row to every peer, wait for all rows, sum them."""
    e = slot_epoch(slot)
    slot_wait_free(world, slot, e)
    me = wl.rank(world)
    i = tl.arange(0, BLOCK)
    mask = i < n
    mine = tl.load(x + i, mask=mask)
    for peer in range(world.num_ranks):
        tl.store(wl.at(world, gathered + me * n + i, peer), mine, mask=mask)
        wl.notify(world, rows_ready + me, e, to=peer, op="set")
    total = tl.zeros((BLOCK,), tl.float32)
    for source in range(world.num_ranks):
        wl.wait(rows_ready + source, at_least=e, world=world)
        total += tl.load(gathered + source * n + i, mask=mask, other=0.0)
    tl.store(out + i, total, mask=mask)
    slot_finish(world, slot, e, 1)


@triton.jit
def read_peer(world, x, out, PEER: tl.constexpr):
    tl.store(out, tl.load(wl.at(world, x, PEER)))


@triton.jit
def read_address(addresses, out, PEER: tl.constexpr):
    x = tl.load(addresses + PEER).to(tl.pointer_type(tl.float32))
    tl.store(out, tl.load(x))


@triton.jit
def put_far(world, x, flag, n: tl.constexpr):
    peer = (wl.rank(world) + 2) % world.num_ranks
    i = tl.arange(0, n)
    wl.put(world, x + i, tl.full((n,), 3.0, tl.float32), to=peer)
    wl.notify(world, flag, to=peer)
    wl.wait(flag, at_least=1, world=world)


def all_reduce(world, x, out):
    n = x.numel()
    slot = world.workspace(
        "all_reduce",
        buffers={"gathered": ((world.num_ranks, n), torch.float32)},
        signals={"rows_ready": (world.num_ranks, torch.int64)},
    )
    gather_kernel[(1,)](
        world.arg, slot.arg, slot.gathered, slot.rows_ready, x, out, n,
        BLOCK=triton.next_power_of_2(n),
    )  # fmt: skip


@pytest.mark.few(2)
@pytest.mark.parametrize("ranks, seed", [(1, 0), (2, 1), (3, 2), (4, 3)])
def test_a_slot_is_right_eager_replayed_with_another_shape_and_eager_again(ranks, seed):
    def main(rank):
        with weft.init(heap_bytes=HEAP) as world:
            x, out = torch.zeros(37), torch.zeros(37)

            def check(factor):
                expected = sum(factor * (r + 1) for r in range(ranks))
                assert out.tolist() == [expected] * 37

            for factor in (1.0, 2.0, 3.0):
                x.fill_(factor * (rank + 1))
                all_reduce(world, x, out)
                check(factor)
            with world.record() as recording:
                all_reduce(world, x, out)
            for factor in (4.0, 5.0, 6.0):
                x.fill_(factor * (rank + 1))
                recording.replay()
                check(factor)
            larger, larger_out = torch.ones(300), torch.zeros(300)
            all_reduce(world, larger, larger_out)
            assert larger_out.tolist() == [float(ranks)] * 300
            recording.replay()
            check(6.0)
            all_reduce(world, x, out)
            check(6.0)

    with weft.emulated(ranks=ranks, seed=seed) as session:
        session.run(main)


def test_symmetric_tensors_and_peers():
    def main(rank):
        world = weft.init(heap_bytes=HEAP)
        assert (world.rank, world.num_ranks, str(world.device)) == (rank, 3, "cpu")
        x = world.empty((4, 5), torch.bfloat16)
        assert x.isnan().all()
        x.fill_(rank)
        flags = world.signals(3, torch.int64)
        assert flags.tolist() == [0, 0, 0]
        world.barrier()
        world.synchronize()
        peers = [world.peer(x, r) for r in range(3)]
        assert [peer[2, 3].item() for peer in peers] == [0, 1, 2]
        assert world.pointers(x).tolist() == [peer.data_ptr() for peer in peers]
        assert world.peer(x[1:, ::2], 2).shape == (3, 3)
        assert weft.world("world") is world
        world.barrier()
        world.close()
        with pytest.raises(weft.UsageError, match="none is open"):
            weft.world("world")

    with weft.emulated(ranks=3, collect=True) as session:
        session.run(main)
        # Looking at fresh memory is what this test does first.
        assert {finding.kind for finding in session.report} <= {"uninitialised"}


def test_fresh_memory_below_signals_stands_out_too():
    """Signals are zeros at the heap's top."""

    def main():
        world = weft.init(heap_bytes=HEAP)
        flags = world.signals(4)
        x = world.empty((1000,), torch.float32)
        numbers = world.empty((3,), torch.int32)
        return flags.tolist(), x.isnan().all().item(), numbers.tolist()

    with weft.emulated(ranks=1, collect=True) as session:
        ((flags, is_nan, numbers),) = session.run(main)
    assert flags == [0] * 4 and is_nan
    assert numbers == [int.from_bytes(b"\xa5" * 4, "little", signed=True)] * 3


def test_recycled_memory_keeps_its_old_words():
    def main():
        world = weft.init(heap_bytes=HEAP)
        x = world.empty((16,), torch.float32)
        x.fill_(42.0)
        world.free(x)
        y = world.empty((16,), torch.float32)
        assert y.data_ptr() == x.data_ptr()
        return y.clone().tolist()

    with weft.emulated(ranks=1) as session:
        assert session.run(main) == [[42.0] * 16]


def test_nodes_are_out_of_each_others_reach():
    def main(rank):
        world = weft.init(heap_bytes=HEAP)
        assert (world.node, world.local_rank) == (rank // 2, rank % 2)
        x = world.zeros((4,), torch.float32)
        near = rank ^ 1
        world.peer(x, near)
        far = (rank + 2) % 4
        assert world.pointers(x)[far].item() == 0
        with pytest.raises(weft.FarPointerError, match="node"):
            world.peer(x, far)
        read_peer[(1,)](world.arg, x, torch.zeros(1), PEER=(rank + 2) % 4)
        world.synchronize()

    with weft.emulated(ranks=4, nodes=2) as session, pytest.raises(weft.FarPointerError) as caught:
        session.run(main)
    assert caught.value.finding.first.file == __file__


def test_a_far_address_from_elsewhere_is_a_fault():
    def main(rank):
        dist.init_process_group()
        world = weft.init(heap_bytes=HEAP)
        x = world.zeros((4,), torch.float32)
        addresses = [None] * 4
        dist.all_gather_object(addresses, x.data_ptr())
        read_address[(1,)](torch.tensor(addresses), torch.zeros(1), PEER=rank ^ reach)
        world.synchronize()

    reach = 1
    with weft.emulated(ranks=4, nodes=2) as session:
        session.run(main)
    reach = 2
    with weft.emulated(ranks=4, nodes=2) as session, pytest.raises(weft.FarPointerError):
        session.run(main)


def test_one_sided_primitives_reach_other_nodes():
    def main(rank):
        world = weft.init(heap_bytes=HEAP)
        x, flag = world.zeros((4,), torch.float32), world.signals(1)
        put_far[(1,)](world.arg, x, flag, 4)
        return x.tolist()

    with weft.emulated(ranks=4, nodes=2) as session:
        assert session.run(main) == [[3.0] * 4] * 4


@triton.jit
def take_ticket(world, counter, out):
    at_zero = wl.at(world, counter, 0)
    tl.store(out, tl.atomic_add(at_zero, 1, sem="relaxed", scope="sys"))


def test_a_seed_is_a_schedule():
    def main():
        world = weft.init(heap_bytes=HEAP)
        counter, out = world.signals(1), torch.zeros(3, dtype=torch.int32)
        for i in range(3):
            take_ticket[(1,)](world.arg, counter, out[i:])
        return out.tolist()

    def run(seed):
        with weft.emulated(ranks=3, seed=seed) as session:
            return tuple(map(tuple, session.run(main)))

    schedules = [run(seed) for seed in range(8)]
    assert schedules == [run(seed) for seed in range(8)]
    assert len(set(schedules)) > 1


def test_two_worlds_and_a_sub_group():
    def main(rank):
        dist.init_process_group()
        whole = weft.init(heap_bytes=HEAP)
        pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        pair = weft.init(pairs[rank % 2], heap_bytes=HEAP)
        assert (pair.rank, pair.num_ranks) == (rank // 2, 2)
        assert pair.name == f"world-{rank % 2}-{rank % 2 + 2}"
        for world in (pair, whole, pair):
            x, out = torch.full((8,), float(rank)), torch.zeros(8)
            all_reduce(world, x, out)
            members = range(rank % 2, 4, 2) if world is pair else range(4)
            assert out.tolist() == [float(sum(members))] * 8
        pair.close()
        whole.close()

    with weft.emulated(ranks=4) as session:
        session.run(main)


def test_a_session_leaves_no_world_behind():
    def main():
        weft.init(heap_bytes=HEAP)

    from weft.runtime import registry

    with weft.emulated(ranks=2) as session:
        session.run(main)
    assert not registry._worlds


def test_ranks_that_allocate_differently():
    def main(rank):
        world = weft.init(heap_bytes=HEAP)
        world.empty((4,) if rank else (5,), torch.float32)

    with weft.emulated(ranks=2) as session, pytest.raises(weft.AllocationOrderError, match="rank"):
        session.run(main)


def test_a_rank_that_allocates_less_is_a_deadlock_that_names_it():
    def main(rank):
        world = weft.init(heap_bytes=HEAP)
        if rank != 1:
            world.empty((4,), torch.float32)

    with weft.emulated(ranks=3) as session, pytest.raises(weft.DeadlockError, match="rank 1 did"):
        session.run(main)


def test_ranks_that_call_operators_in_different_order():
    def main(rank):
        world = weft.init(heap_bytes=HEAP)
        for name in ("first", "second") if rank else ("second", "first"):
            world.operator_call(name)
        world.barrier()

    with weft.emulated(ranks=2) as session, pytest.raises(weft.CallOrderError, match="call 0"):
        session.run(main)


def test_a_world_that_is_left_by_an_exception_reports_that_one():
    def main(rank):
        with weft.init(heap_bytes=HEAP) as world:
            x, out = torch.zeros(8), torch.zeros(8)
            if rank == 1:
                raise ValueError("gone")
            all_reduce(world, x, out)
            world.synchronize()

    with weft.emulated(ranks=2) as session, pytest.raises(ValueError, match="gone"):
        session.run(main)


def test_what_an_exception_leaves_queued_hides_it_behind_no_finding():
    def main():
        with weft.init(heap_bytes=HEAP) as world:
            x, out = torch.zeros(8), torch.zeros(8)
            for _ in range(3):
                all_reduce(world, x, out)
            raise ValueError("gone")

    with weft.emulated(ranks=1) as session, pytest.raises(ValueError, match="gone"):
        session.run(main)


def test_bad_input():
    def not_symmetric(world):
        read_peer[(1,)](world.arg, torch.zeros(4), torch.zeros(1), PEER=0)
        world.synchronize()

    def no_such_peer(world):
        x = world.zeros((4,), torch.float32)
        read_peer[(1,)](world.arg, x, torch.zeros(1), PEER=2)
        world.synchronize()

    def out_of_memory(world):
        world.empty((HEAP,), torch.float32)

    def other_dtype(world):
        world.copy(torch.zeros(4), torch.zeros(4, dtype=torch.float16))

    def other_shape(world):
        world.copy(torch.zeros(4), torch.zeros(5))

    for wrong, error in (
        (not_symmetric, weft.NotSymmetricError),
        (no_such_peer, weft.PeerError),
        (out_of_memory, weft.OutOfMemoryError),
        (other_dtype, weft.DtypeError),
        (other_shape, weft.ShapeError),
    ):
        with weft.emulated(ranks=2) as session, pytest.raises(error):
            session.run(lambda wrong=wrong: wrong(weft.init(heap_bytes=HEAP)))


@pytest.mark.slow
def test_memory_that_was_a_heap_is_torchs_when_the_world_is_gone():
    """A tensor that comes to lie there is looked after as any other."""

    def main():
        world = weft.init(heap_bytes=HEAP)
        address = world.empty(64, torch.int64).data_ptr()
        device = current().device
        held = device.on_heap(address)
        world.close()
        return device, address, held

    with weft.emulated(ranks=2) as ranks:
        results = ranks.run(main)
        # Asked once every rank's world is gone: another's heap may come to lie where one was.
        gc.collect()
        assert [held for *_, held in results] == [True, True]
        assert not any(device.on_heap(address) for device, address, _ in results)
