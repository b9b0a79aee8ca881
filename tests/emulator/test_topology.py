"""Emulated machines of several nodes: seats, far peers, sub-groups, several worlds, residency."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl

import weft
import weft.language as wl

HEAP = 1 << 20


@triton.jit
def greet(world, inbox, arrived, value, n: tl.constexpr):
    """Put `value` into every rank's inbox, near or far, with the signal behind it."""
    i = tl.arange(0, n)
    me = wl.rank(world)
    for peer in range(world.num_ranks):
        wl.put_signal(
            world, inbox + me * n + i, tl.full((n,), value, tl.float32), arrived + me, 1, to=peer
        )
    wl.wait(arrived, at_least=1, count=world.num_ranks, world=world)


@triton.jit
def fetch(world, source, out, peer, n: tl.constexpr):
    i = tl.arange(0, n)
    wl.get(world, out + i, source + i, source=peer)


@triton.jit
def reach(world, x, out, peer):
    if wl.is_near(world, peer):
        tl.store(out, tl.load(wl.at(world, x, peer)))


@triton.jit
def dereference(world, x, out, peer):
    tl.store(out, tl.load(wl.at(world, x, peer)))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "ranks, nodes, sizes",
    [(5, 2, (3, 2)), (None, (3, 1), (3, 1)), (4, (1, 3), (1, 3)), (None, (1, 2, 1), (1, 2, 1)),
     (3, 3, (1, 1, 1))],
)  # fmt: skip
def test_everybody_knows_where_they_sit_and_reaches_all(ranks, nodes, sizes):
    seats = [(node, local) for node, size in enumerate(sizes) for local in range(size)]

    def main(rank):
        world = weft.init(heap_bytes=HEAP)
        assert (world.node, world.local_rank) == seats[rank]
        inbox = world.zeros((world.num_ranks, 4), torch.float32)
        arrived = world.signals(world.num_ranks)
        world.barrier()
        greet[(1,)](world.arg, inbox, arrived, float(world.rank), 4)
        world.barrier()
        near, out = torch.full((1,), -1.0), torch.zeros(4)
        for peer in range(world.num_ranks):
            near.fill_(-1.0)
            reach[(1,)](world.arg, inbox[peer], near, peer)
            assert near.item() == (peer if seats[peer][0] == world.node else -1.0)
            fetch[(1,)](world.arg, inbox[peer], out, peer, 4)
            assert out.tolist() == [float(peer)] * 4
        world.barrier()
        return inbox[:, 0].tolist()

    with weft.emulated(ranks=ranks, nodes=nodes, seed=1) as session:
        assert session.num_ranks == sum(sizes)
        results = session.run(main)
    assert results == [list(map(float, range(sum(sizes))))] * sum(sizes)


def test_a_launcher_would_say_the_same():
    import os

    def main(rank):
        return {
            name: int(os.environ[name])
            for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
        }

    with weft.emulated(nodes=(3, 1)) as session:
        last = session.run(main)[3]
    assert list(last.values()) == [3, 0, 1, 1, 2]


def test_a_far_pointer_in_an_uneven_machine_is_found():
    def main(rank):
        world = weft.init(heap_bytes=HEAP)
        x = world.zeros((4,), torch.float32)
        world.barrier()
        if rank == 0:
            dereference[(1,)](world.arg, x, torch.zeros(1), peer)
        world.synchronize()

    peer = 2
    with weft.emulated(nodes=(3, 1)) as session:
        session.run(main)
    peer = 3
    with weft.emulated(nodes=(3, 1), collect=True) as session:
        session.run(main)
    assert {finding.kind for finding in session.report} == {"far pointer"}


@pytest.mark.parametrize(
    "ranks, nodes", [(4, 5), (0, 1), (4, 0), (4, (3, 2)), (None, (2, 0)), (None, ())]
)
def test_nodes_that_cannot_be(ranks, nodes):
    with pytest.raises(weft.UsageError, match="nodes|ranks"), weft.emulated(ranks, nodes):
        pass


@pytest.mark.parametrize("seed", range(3))
def test_sub_groups_of_ranks_that_are_no_neighbours(seed):
    """Worlds over new_group(...), beside the world of all, each with its own heap and signals."""
    members = ([0, 3, 4], [1, 2])

    def main(rank):
        dist.init_process_group()
        groups = [dist.new_group(list(ranks)) for ranks in members]
        mine = 0 if rank in members[0] else 1
        everybody = weft.init(heap_bytes=HEAP)
        half = weft.init(group=groups[mine], name="half", heap_bytes=HEAP)
        assert (half.rank, half.num_ranks) == (members[mine].index(rank), len(members[mine]))
        assert weft.world("half") is half and weft.world("world") is everybody
        assert (half.node, everybody.node) == (rank // 3, rank // 3)
        rows = []
        for world, value in ((half, 10.0 + rank), (everybody, float(rank))):
            inbox = world.zeros((world.num_ranks, 4), torch.float32)
            arrived = world.signals(world.num_ranks)
            world.barrier()
            greet[(1,)](world.arg, inbox, arrived, value, 4)
            rows.append(inbox[:, 0].tolist())
        half.close()
        everybody.close()
        return mine, rows

    with weft.emulated(ranks=5, nodes=(3, 2), seed=seed) as session:
        for mine, (of_half, of_all) in session.run(main):
            assert of_half == [10.0 + rank for rank in members[mine]]
            assert of_all == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_a_far_member_of_a_sub_group_has_no_address():
    def main(rank):
        dist.init_process_group()
        group = dist.new_group([0, 2])
        if rank == 1:
            return
        world = weft.init(group=group, name="ends", heap_bytes=HEAP)
        x = world.zeros((4,), torch.float32)
        assert world.pointers(x)[1 - world.rank].item() == 0
        with pytest.raises(weft.FarPointerError, match="node"):
            world.peer(x, 1 - world.rank)

    with weft.emulated(nodes=(2, 1)) as session:
        session.run(main)


@triton.jit
def handshake(flags, num_programs: tl.constexpr):
    """Every program waits for the last one of the grid."""
    if tl.program_id(0) == num_programs - 1:
        tl.atomic_add(flags, 1, sem="release", scope="gpu")
    else:
        while tl.atomic_add(flags, 0, sem="acquire", scope="gpu") < 1:
            pass


@pytest.mark.parametrize("num_sms, ends", [(4, True), (3, False)])
def test_more_programs_than_fit_wait_for_ever(num_sms, ends):
    def main():
        flags = torch.zeros(1, dtype=torch.int32)
        handshake[(4,)](flags, 4)
        return flags.item()

    with weft.emulated(ranks=1, num_sms=num_sms, collect=True) as session:
        session.run(main)
    assert session.report.ok is ends
    if not ends:
        assert {finding.kind for finding in session.report} == {"residency"}
