"""Ring attention: as attention in one process, forward and backward, in memory that is bounded."""

from __future__ import annotations

from functools import partial
from weakref import finalize

import pytest
import torch
import torch.distributed as dist
from parallel import drawn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import weft
from weft.base.dtypes import tolerance
from weft.layers import ring_attention, zigzag_join, zigzag_split
from weft.plan.attention_blocks import BlockAttention
from weft.plan.sequence_shards import shards_of

D = 16


def alone(q, k, v, starts, causal, scale):
    """All tokens, in fp32, sequence by sequence; tokens of none get nothing."""
    out, group = torch.zeros_like(q), q.shape[1] // k.shape[1]
    rows = []
    for first, end in zip(starts, starts[1:], strict=False):
        one = slice(first, end)
        keys, values = (x[one].repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q[one], keys) * scale
        if causal:
            scores = scores + torch.full(scores.shape[1:], -torch.inf).triu(1)
        rows.append(torch.einsum("hij,jhd->ihd", scores.softmax(-1), values))
    made = torch.cat([out[: starts[0]], *rows, out[starts[-1] :]])
    assert made.shape == q.shape
    return made


def check(got, whole, place, what):
    """Own tokens of what one process has. Operands of second products are rounded once more."""
    assert got.shape == whole[place].shape, what
    error = (got.double() - whole[place].double()).norm()
    most = 2 * tolerance(str(got.dtype), len(whole)) * whole.double().norm()
    assert error <= most, (what, error, most)


def as_one_process(
    ranks, num_ranks, m, heads, starts, causal, zigzag, dtype=torch.float32, seed=0,
    local="template", **options,
):  # fmt: skip
    q_heads, kv_heads = heads
    starts_of = [0, m] if starts is None else starts
    lengths = None if starts is None else torch.tensor(starts, dtype=torch.int32)
    sizes = (q_heads, kv_heads, kv_heads)
    whole = [drawn(m, n, D, seed=i).to(dtype) for i, n in enumerate(sizes)]
    slope = drawn(m, q_heads, D, seed=9).to(dtype)
    leaves = [one.float().clone().requires_grad_() for one in whole]
    wanted = alone(*leaves, starts_of, causal, 0.3)
    (wanted * slope.float()).sum().backward()

    def main():
        with weft.init() as world:
            shards = shards_of(m, world.num_ranks, zigzag, lengths, world.device)
            place, _ = shards.positions(world.rank)
            mine = [one[place].requires_grad_() for one in whole]
            got = ring_attention(
                *mine, world=world, causal=causal, zigzag=zigzag, cu_seqlens=lengths, scale=0.3,
                m=m, local=local,
            )  # fmt: skip
            check(got, wanted.detach(), place, "out")
            (got * slope[place]).sum().backward()
            for name, one, leaf in zip("qkv", mine, leaves, strict=True):
                assert one.grad.dtype == dtype
                check(one.grad, leaf.grad, place, name)
            return got.detach(), *(one.grad for one in mine)

    return ranks(main, num_ranks, seed=seed, **options)


CASES = [
    (1, 21, (2, 1), None, True, False),
    (2, 40, (2, 1), None, True, True),
    (2, 40, (4, 4), [0, 9, 9, 31, 37], True, True),
    (3, 31, (4, 2), None, True, True),  # shards differ
    (3, 30, (2, 1), None, False, False),
    (4, 33, (2, 1), [2, 3, 3, 30], True, False),  # the last rank has fewer
    (4, 37, (4, 1), [0, 1, 20, 37], True, True),  # fewer heads of keys than ranks
    (4, 5, (2, 2), None, True, False),  # the last rank has none
    (2, 24, (2, 1), [0, 11, 24], False, True),
    (4, 3, (2, 1), [0, 3], True, True),
]


@pytest.mark.few(1)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_as_one_process(ranks, case):
    as_one_process(ranks, *case)


@pytest.mark.few(3)
@pytest.mark.parametrize("case", [one for one in CASES if one[3] is None], ids=str)
def test_by_the_library(ranks, case):
    """Blocks that kernels of a whole or causal product do, and their merge."""
    as_one_process(ranks, *case, local="library")


@pytest.mark.parametrize("local", ["template", "library"])
def test_by_whom_in_half_precision(ranks, local):
    as_one_process(ranks, 2, 44, (4, 2), None, True, True, torch.bfloat16, local=local)


@pytest.mark.parametrize("zigzag", [False, True])
def test_half_precision(ranks, zigzag):
    as_one_process(ranks, 3, 50, (4, 2), [0, 20, 50], True, zigzag, torch.bfloat16)


def test_on_two_nodes(ranks):
    """Blocks of far ranks are pushed."""
    as_one_process(ranks, 3, 31, (2, 1), [0, 12, 31], True, True, nodes=(2, 1))


def test_blocks_are_attended_while_keys_pass(ranks, monkeypatch):
    """Rank 1 does not begin before rank 0 has attended to its own keys: else they wait for ever."""
    attend, has_memory = BlockAttention.attend, []

    def and_meet(self, k, v, mean, lse, out, *, is_first, is_last):
        attend(self, k, v, mean, lse, out, is_first=is_first, is_last=is_last)
        if is_first and self.rank == 0 and has_memory:
            assert lse.isfinite().all()
            dist.barrier()

    monkeypatch.setattr(BlockAttention, "attend", and_meet)

    def main():
        dist.init_process_group()
        with weft.init() as world:
            call = partial(ring_attention, *(drawn(6, n, D) for n in (2, 1, 1)), world=world)
            call()  # which ranks take memory for together
            call()
            dist.barrier()
            has_memory.append(world.rank)
            if world.rank == 1:
                dist.barrier()
            call()

    ranks(main, 2)


@pytest.mark.few(1)
@pytest.mark.parametrize("zigzag", [False, True])
def test_the_same_bits_in_every_schedule(ranks, zigzag):
    case = (3, 25, (2, 1), [0, 7, 25], True, zigzag)
    first, *others = (as_one_process(ranks, *case, seed=seed) for seed in range(3))
    for other in others:
        for mine, same in zip(first, other, strict=True):
            assert all(map(torch.equal, mine, same))


@pytest.mark.slow
def test_recorded_and_replayed_with_other_lengths(ranks):
    m, heads = 24, (2, 1, 1)

    def main():
        with weft.init() as world:
            own = m // world.num_ranks
            lengths = torch.tensor([0, 5, m], dtype=torch.int32)
            mine = [torch.zeros(own, n, D, requires_grad=True) for n in heads]
            slope = drawn(own, 2, D, seed=world.rank)

            def call():
                out = ring_attention(*mine, world=world, zigzag=True, cu_seqlens=lengths)
                return out.detach(), *torch.autograd.grad(out, mine, slope)

            call()
            with world.record() as recording:
                found = call()
            for end in (0, 17, 24, 5):
                with torch.no_grad():
                    for i, one in enumerate(mine):
                        one.copy_(drawn(own, heads[i], D, seed=end + 9 * world.rank + i))
                lengths[1] = end
                for one in found:
                    one.fill_(torch.nan)
                recording.replay()
                replayed = [one.clone() for one in found]
                assert all(map(torch.equal, replayed, call()))

    ranks(main, 3)


class Held(TorchDispatchMode):
    """Bytes of tensors that are made within and alive at once, at most."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        known = {one.untyped_storage().data_ptr() for one in tree_leaves((args, kwargs or {}))
                 if isinstance(one, torch.Tensor)}  # fmt: skip
        for one in tree_leaves(made):
            if isinstance(one, torch.Tensor):
                storage = one.untyped_storage()
                place, size = storage.data_ptr(), storage.nbytes()
                if size and place not in known and place not in self.seen:
                    self.seen.add(place)
                    self.now += size
                    self.most = max(self.most, self.now)
                    finalize(storage, self.free, place, size)
        return made

    def free(self, place, size):
        self.seen.discard(place)
        self.now -= size


@pytest.mark.slow
@pytest.mark.parametrize("backward", [False, True])
def test_memory_does_not_grow_with_the_ranks(ranks, backward):
    """Tokens of a rank being the same. Of symmetric memory too. Tables of who has what do, by some
    hundred bytes a rank."""
    own, heads = 96, (2, 1, 1)
    held = {}
    for num_ranks in (2, 3, 5):

        def main(num_ranks=num_ranks):
            with weft.init() as world:
                mine = [drawn(own, n, D, seed=i).requires_grad_() for i, n in enumerate(heads)]
                with Held() as counted:
                    out = ring_attention(*mine, world=world, zigzag=True)
                    if backward:
                        out.sum().backward()
                return counted.most, sum(one.nbytes for one in world.memory().held)

        held[num_ranks] = ranks(main, num_ranks)[0]
    block = 2 * own * D * 4
    for tensors, symmetric in held.values():
        assert 3 * block < tensors < held[2][0] + block / 4
        assert symmetric < held[2][1] + block / 4


def test_autocast_narrows_as_it_does_torchs_attention(ranks):
    def main():
        with weft.init() as world:
            mine = [drawn(8, n, D, seed=i).requires_grad_() for i, n in enumerate((2, 1, 1))]
            with torch.autocast("cpu", torch.bfloat16):
                out = ring_attention(*mine, world=world)
            assert out.dtype == torch.bfloat16
            wanted = ring_attention(*[one.bfloat16() for one in mine], world=world)
            assert torch.equal(out, wanted)
            out.float().sum().backward()
            assert all(one.grad.dtype == torch.float32 for one in mine)

    ranks(main, 2)


@pytest.mark.slow
def test_between_compiled_graphs(ranks):
    """torch.compile calls it as it is, zigzag_split and zigzag_join around it too."""
    whole = [drawn(12, n, D, seed=i) for i, n in enumerate((2, 1, 1))]

    def main():
        with weft.init() as world:

            def model(q, k, v):
                own = [zigzag_split(2 * one, world=world) for one in (q, k, v)]
                return zigzag_join(ring_attention(*own, world=world, zigzag=True), world=world) + 1

            def step(call):
                leaves = [one.clone().requires_grad_() for one in whole]
                out = call(*leaves)
                return out.detach(), *torch.autograd.grad(out.square().sum(), leaves)

            found = step(torch.compile(model, backend="eager"))
            for got, wanted in zip(found, step(model), strict=True):
                torch.testing.assert_close(got, wanted)

    ranks(main, 2)


def test_what_does_not_fit(ranks):
    def main():
        with weft.init() as world:
            q, k = torch.ones(4, 4, 8), torch.ones(4, 2, 8)
            with pytest.raises(weft.ShapeError, match="q has 4 heads, k and v have 3"):
                ring_attention(q, torch.ones(4, 3, 8), torch.ones(4, 3, 8), world=world)
            with pytest.raises(weft.ShapeError, match=r"v has shape \(3, 2, 8\)"):
                ring_attention(q, k, k[:3], world=world)
            with pytest.raises(weft.ShapeError, match="passes q with 4 tokens, but of m=11 it"):
                ring_attention(q, k, k, world=world, m=11)
            with pytest.raises(weft.DtypeError, match="q is torch.float32 and k torch.float16"):
                ring_attention(q, k.half(), k.half(), world=world)
            with pytest.raises(weft.DtypeError, match=r"pass cu_seqlens.to\(torch.int32\)"):
                ring_attention(q, k, k, world=world, cu_seqlens=torch.tensor([0, 8]))
            with pytest.raises(weft.UsageError, match="'library' takes one sequence"):
                lengths = torch.tensor([0, 8], dtype=torch.int32)
                ring_attention(q, k, k, world=world, cu_seqlens=lengths, local="library")

    ranks(main, 2)
