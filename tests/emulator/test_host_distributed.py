"""torch.distributed among emulated ranks."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import triton
import triton.language as tl
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import weft
from weft.emulator.session import open_session

RANKS = 4

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*deprecated.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*default timeout.*:UserWarning"),
]


def run(main, ranks=RANKS, **options):
    """`main(rank)` on every rank, between init and destroy of the default group."""

    def with_group(rank):
        dist.init_process_group()
        result = main(rank)
        dist.destroy_process_group()
        assert not dist.is_initialized()
        return result

    with weft.emulated(ranks=ranks, **options) as session:
        return session.run(with_group)


def filled(rank, *shape):
    return torch.full(shape, float(rank))


@pytest.mark.parametrize("backend", [None, "gloo", "nccl", "cpu:gloo,cuda:nccl"])
def test_any_backend_by_name(backend):
    def main(rank):
        dist.init_process_group(backend)
        assert (dist.get_rank(), dist.get_world_size()) == (rank, RANKS)
        assert dist.get_backend() == (backend or "gloo")
        total = filled(rank, 2)
        dist.all_reduce(total)
        return total.tolist()

    with weft.emulated(ranks=RANKS) as session:
        assert session.run(main) == [[6.0, 6.0]] * RANKS
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    "op, expected",
    [
        (dist.ReduceOp.SUM, 10), (dist.ReduceOp.PRODUCT, 24), (dist.ReduceOp.MAX, 4),
        (dist.ReduceOp.MIN, 1), (dist.ReduceOp.AVG, 2.5),
    ],
)  # fmt: skip
def test_reductions(op, expected):
    def main(rank):
        values = filled(rank + 1, 3)
        dist.all_reduce(values, op)
        assert values.tolist() == [expected] * 3
        at_two = filled(rank + 1, 3)
        dist.reduce(at_two, 2, op)
        assert at_two[0].item() == (expected if rank == 2 else rank + 1)

    run(main)


def test_gathers():
    def main(rank):
        parts = [torch.empty(2) for _ in range(RANKS)]
        dist.all_gather(parts, filled(rank, 2))
        assert [part[0].item() for part in parts] == [0, 1, 2, 3]
        whole = torch.empty(RANKS * 2, 3)
        dist.all_gather_into_tensor(whole, filled(rank, 2, 3))
        assert whole[:, 0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
        stacked = torch.empty(RANKS, 2)
        dist.all_gather_into_tensor(stacked, filled(rank, 2))
        assert stacked[:, 1].tolist() == [0, 1, 2, 3]
        at_three = [torch.empty(1) for _ in range(RANKS)] if rank == 3 else None
        dist.gather(filled(rank, 1), at_three, dst=3)
        if rank == 3:
            assert [part.item() for part in at_three] == [0, 1, 2, 3]

    run(main)


def test_scatters():
    def main(rank):
        mine = torch.empty(2)
        dist.reduce_scatter_tensor(mine, torch.arange(8.0))
        assert mine.tolist() == [8.0 * rank, 8.0 * rank + 4]
        dist.reduce_scatter(mine, [filled(i, 2) for i in range(RANKS)])
        assert mine.tolist() == [4.0 * rank] * 2
        source = [filled(10 + i, 2) for i in range(RANKS)] if rank == 1 else None
        dist.scatter(mine, source, src=1)
        assert mine.tolist() == [10.0 + rank] * 2

    run(main)


def test_all_to_all():
    def main(rank):
        out = torch.empty(RANKS)
        dist.all_to_all_single(out, torch.arange(RANKS) + 10.0 * rank)
        assert out.tolist() == [10.0 * i + rank for i in range(RANKS)]
        # Rank r sends r + i + 1 rows to rank i.
        sent = [rank + i + 1 for i in range(RANKS)]
        taken = [i + rank + 1 for i in range(RANKS)]
        rows = torch.empty(sum(taken), 2)
        dist.all_to_all_single(rows, filled(rank, sum(sent), 2), taken, sent)
        assert rows[:, 0].tolist() == [i for i in range(RANKS) for _ in range(taken[i])]
        outs = [torch.empty(1) for _ in range(RANKS)]
        dist.all_to_all(outs, [filled(10 * rank + i, 1) for i in range(RANKS)])
        assert [out.item() for out in outs] == [10.0 * i + rank for i in range(RANKS)]

    run(main)


def test_point_to_point():
    def main(rank):
        right, left = (rank + 1) % RANKS, (rank - 1) % RANKS
        got = torch.empty(3)
        if rank % 2 == 0:
            dist.send(filled(rank, 3), right)
            dist.recv(got, left)
        else:
            dist.recv(got, left)
            dist.send(filled(rank, 3), right)
        assert got.tolist() == [left] * 3
        ops = [
            dist.P2POp(dist.isend, filled(rank, 1), right, tag=5),
            dist.P2POp(dist.irecv, second := torch.empty(1), left, tag=5),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert second.item() == left
        if rank == 0:
            sources = {dist.recv(got) for _ in range(RANKS - 1)}
            assert sources == {1, 2, 3}
        else:
            dist.send(filled(rank, 3), 0)

    run(main)


def test_objects():
    def main(rank):
        everything = [None] * RANKS
        dist.all_gather_object(everything, {"rank": rank, "name": "x" * rank})
        assert [each["rank"] for each in everything] == [0, 1, 2, 3]
        words = ["from two"] if rank == 2 else [None]
        dist.broadcast_object_list(words, src=2)
        assert words == ["from two"]

    run(main)


def test_subgroups_and_meshes():
    def main(rank):
        halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        half = halves[rank // 2]
        total = filled(rank, 1)
        dist.all_reduce(total, group=half)
        assert total.item() == (1 if rank < 2 else 5)
        assert dist.get_rank(half) == rank % 2
        assert dist.get_process_group_ranks(half) == [[0, 1], [2, 3]][rank // 2]
        assert dist.get_rank(halves[1 - rank // 2]) == -1
        odd = dist.new_group([1, 3], use_local_synchronization=True) if rank % 2 else None
        if odd is not None:
            dist.broadcast(total, 3, group=odd)
            assert total.item() == 5
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "column"))
        assert mesh["column"].get_local_rank() == rank % 2
        assert functional.all_reduce(torch.ones(2), "sum", mesh["row"]).tolist() == [2, 2]
        dist.destroy_process_group(half)

    run(main)


def test_functional_collectives():
    def main(rank):
        world = dist.group.WORLD
        gathered = functional.all_gather_tensor(filled(rank, 2), 0, world)
        assert gathered.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
        part = functional.reduce_scatter_tensor(torch.ones(RANKS), "sum", 0, world)
        assert part.tolist() == [RANKS]

    run(main)


@triton.jit
def write(x_ptr, value, n: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, n), value)


@pytest.mark.few(1)
@pytest.mark.parametrize("maker", ["kernel", "operator"])
def test_functional_collectives_of_what_a_kernel_made(maker):
    """The host of each rank waited for its own stream, in which the collective was the last."""

    def main(rank):
        group, mesh = dist.group.WORLD, init_device_mesh("cpu", (RANKS,))
        with weft.init(heap_bytes=1 << 20) as world:

            def made():
                x = torch.zeros(RANKS)
                write[(1,)](x, rank + 1.0, n=RANKS)
                return x if maker == "kernel" else weft.ops.all_to_all(x, world=world)

            mine, sums = ([rank + 1.0] * RANKS, [10.0] * RANKS)
            every = [float(i + 1) for i in range(RANKS)]
            if maker == "operator":
                mine, every = every, every * RANKS
                sums = [4.0 * value for value in mine]
            else:
                every = [value for value in every for _ in range(RANKS)]
            assert functional.all_reduce(made(), "sum", group).tolist() == sums
            assert functional.all_gather_tensor(made(), 0, group).tolist() == every
            part = functional.reduce_scatter_tensor(made(), "sum", 0, group)
            assert part.tolist() == sums[rank : rank + 1]
            pair = functional.all_reduce_coalesced([made(), made()], "sum", group)
            assert [one.tolist() for one in pair] == [sums, sums]
            exchanged = functional.all_to_all_single(made(), None, None, group)
            assert exchanged.tolist() == every[rank::RANKS]
            rows = DTensor.from_local(made(), mesh, [Shard(0)])
            assert rows.redistribute(mesh, [Replicate()]).to_local().tolist() == every
            assert rows.full_tensor().tolist() == every
            shares = DTensor.from_local(made(), mesh, [Partial()])
            assert shares.redistribute(mesh, [Shard(0)]).to_local().tolist() == part.tolist()
            compiled = torch.compile(lambda x: functional.all_reduce(x, "sum", group) + 1)
            assert compiled(made()).tolist() == [value + 1 for value in sums]

    run(main)
    torch._dynamo.reset()


def test_asynchronous_collectives_overlap():
    def main(rank):
        first, second = filled(rank, 2), filled(rank, 2)
        works = [dist.all_reduce(first, async_op=True), dist.all_reduce(second, async_op=True)]
        for work in reversed(works):
            work.wait()
        assert first.tolist() == second.tolist() == [6.0, 6.0]

    run(main)


@pytest.mark.parametrize("late", range(RANKS))
def test_who_comes_last_is_waited_for(late):
    """It comes when another one, who is there already, has sent it something."""

    def main(rank):
        value, other = filled(rank, 2), (late + 1) % RANKS
        if rank == late:
            dist.recv(torch.empty(1), other)
        work = dist.all_reduce(value, async_op=True)
        if rank == other:
            dist.send(torch.ones(1), late)
        work.wait()
        assert value.tolist() == [6.0, 6.0]

    run(main)


@pytest.mark.parametrize("seed", range(3))
def test_random_sequences_of_collectives(seed):
    """Ranks that do the same calls in the same order always meet, whatever the schedule."""

    def main(rank):
        draw = random.Random(seed)
        for _ in range(20):
            kind = draw.choice(["reduce", "gather", "broadcast", "barrier"])
            if kind == "reduce":
                value = filled(rank, 2)
                dist.all_reduce(value)
                assert value[0].item() == 6
            elif kind == "gather":
                out = torch.empty(RANKS)
                dist.all_gather_into_tensor(out, filled(rank, 1))
                assert out.tolist() == [0, 1, 2, 3]
            elif kind == "broadcast":
                root = draw.randrange(RANKS)
                value = filled(rank, 1)
                dist.broadcast(value, root)
                assert value.item() == root
            else:
                dist.barrier()

    run(main, seed=seed)


def test_what_ranks_have_exchanged_is_not_kept():
    """A script of a million steps would else hold the values of all of them."""

    def main(rank):
        for _ in range(5):
            dist.all_reduce(filled(rank, 2))
            dist.barrier()
            if rank < 2:
                dist.send(filled(rank, 2), 1) if rank == 0 else dist.recv(torch.empty(2), 0)
        return len(open_session().meetings.open)

    # The last one to leave a meeting lets it go: of the last meeting some may see it still.
    left = run(main)
    assert min(left) == 0 and max(left) <= 1


def test_a_collective_that_a_rank_misses_is_a_deadlock_that_names_it():
    def main(rank):
        if rank != 2:
            dist.barrier()

    with pytest.raises(weft.DeadlockError, match=r"barrier on ranks .* rank 2 did not enter") as e:
        run(main)
    assert "remedy: make the same collective calls on every rank" in str(e.value)


def test_a_message_that_nobody_sends_is_a_deadlock():
    def main(rank):
        if rank == 1:
            dist.recv(torch.empty(1), 3)

    with pytest.raises(weft.DeadlockError, match="recv from rank 3"):
        run(main)


def test_ranks_that_call_different_collectives():
    def main(rank):
        value = torch.ones(RANKS)
        if rank == 3:
            dist.broadcast(value, 0)
        else:
            dist.all_reduce(value)

    with pytest.raises(weft.CallOrderError, match=r"all_reduce\(sum\).*|.*broadcast"):
        run(main)


def test_ranks_that_pass_different_sizes_and_dtypes():
    def sizes(rank):
        dist.all_reduce(torch.ones(3 if rank == 1 else 4))

    def dtypes(rank):
        dist.all_reduce(torch.ones(4, dtype=torch.float16 if rank == 1 else torch.float32))

    with pytest.raises(weft.ShapeError, match=r"rank 1 passes \(3,\)"):
        run(sizes)
    with pytest.raises(weft.DtypeError, match="rank 1 passes torch.float16"):
        run(dtypes)


def test_a_group_of_another_size_than_the_session():
    with pytest.raises(weft.UsageError, match="of 2 emulated ranks"), weft.emulated(2) as session:
        session.run(lambda rank: dist.init_process_group("gloo", rank=rank, world_size=8))


def test_dtensor_and_data_parallel_training():
    def main(rank):
        mesh = init_device_mesh("cpu", (RANKS,))
        torch.manual_seed(0)
        a, b = torch.randn(10, 8), torch.randn(8, 6)
        rows = distribute_tensor(a, mesh, [Shard(0)]) @ distribute_tensor(b, mesh, [Replicate()])
        torch.testing.assert_close(rows.full_tensor(), a @ b)
        inner = distribute_tensor(a, mesh, [Shard(1)]) @ distribute_tensor(b, mesh, [Shard(0)])
        torch.testing.assert_close(inner.full_tensor(), a @ b)
        layer = torch.nn.Linear(8, 4)
        model = torch.nn.parallel.DistributedDataParallel(layer)
        torch.manual_seed(rank)
        model(torch.randn(3, 8)).sum().backward()
        gradients = [torch.empty_like(layer.weight) for _ in range(RANKS)]
        dist.all_gather(gradients, layer.weight.grad)
        assert all(torch.equal(gradients[0], other) for other in gradients)

    run(main)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_fully_sharded_training(dtype):
    """FSDP2 packs its parameters into fresh memory by one operation on many tensors."""

    def layers():
        torch.manual_seed(0)
        return torch.nn.Sequential(
            torch.nn.Linear(8, 15), torch.nn.ReLU(), torch.nn.Linear(15, 5)
        )  # fmt: skip

    def rows(rank, step):
        return torch.randn(4, 8, generator=torch.Generator().manual_seed(rank * 10 + step))

    def main(rank):
        policy = {"mp_policy": MixedPrecisionPolicy(dtype, torch.float32)} if dtype else {}
        model, alone = layers(), layers()
        for part in (model[0], model):
            fully_shard(part, mesh=init_device_mesh("cpu", (RANKS,)), **policy)
        steps = [torch.optim.SGD(one.parameters(), lr=0.01) for one in (model, alone)]
        for step in range(2):
            model(rows(rank, step)).square().sum().backward()
            for other in range(RANKS):
                (alone(rows(other, step)).square().sum() / RANKS).backward()
            for one in steps:
                one.step()
                one.zero_grad()
        near = {"rtol": 0.1, "atol": 0.05} if dtype else {}
        for one, whole in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(one.full_tensor(), whole, **near)

    run(main)
