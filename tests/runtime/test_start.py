"""`weft.init` as scripts call it: before and after torch's groups are made, on their meshes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import weft
from weft.ops import all_reduce

HEAP = 1 << 20


def sums_over(world):
    """The ranks of the default group that are in the world, as a sum over it sees them."""
    ones = torch.zeros(4)
    ones[dist.get_rank()] = 1.0
    return torch.nonzero(all_reduce(ones, world=world)).flatten().tolist()


def test_groups_are_made_after_init_as_on_gpus(ranks):
    def main(rank):
        whole = weft.init(heap_bytes=HEAP)
        assert dist.is_initialized() and dist.get_backend() == "nccl"
        groups = [dist.new_group(members) for members in ([0, 1], [2, 3])]
        part = weft.init(group=groups[rank // 2], name="tp", heap_bytes=HEAP)
        with pytest.raises(ValueError, match="twice"):
            dist.init_process_group()
        return sums_over(whole), sums_over(part)

    assert ranks(main) == [([0, 1, 2, 3], [rank // 2 * 2, rank // 2 * 2 + 1]) for rank in range(4)]


def test_a_group_of_the_script_is_used_and_kept(ranks):
    def main(rank):
        dist.init_process_group("gloo")
        pair = dist.new_group([1, 3])
        if rank % 2:
            assert sums_over(weft.init(group=pair, heap_bytes=HEAP)) == [1, 3]
        return weft.init(heap_bytes=HEAP).num_ranks, dist.get_backend()

    assert ranks(main) == [(4, "gloo")] * 4


def test_groups_of_one_name_that_share_a_rank(ranks):
    """Rank 0 has two worlds of that name and gives the second another one; the others do not."""

    def main(rank):
        dist.init_process_group()
        found = []
        for members in ([0, 1], [0, 2]):
            group = dist.new_group(members)
            if rank in members:
                world = weft.init(group=group, name="tp", heap_bytes=HEAP)
                found.append((world.name, sums_over(world)))
        return found

    assert ranks(main, 3) == [
        [("tp", [0, 1]), ("tp.2", [0, 2])], [("tp", [0, 1])], [("tp", [0, 2])],
    ]  # fmt: skip


def test_a_mesh_of_one_axis_is_its_group(ranks):
    def main(rank):
        line = init_device_mesh("cpu", (4,))
        square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        return [
            sums_over(weft.init(group=mesh, heap_bytes=HEAP))
            for mesh in (line, square["tp"], square["dp"])
        ]

    assert ranks(main) == [
        [[0, 1, 2, 3], [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]]
        for rank in range(4)
    ]


def test_what_is_no_group_of_this_rank_is_refused_with_the_remedy(ranks):
    def main(rank):
        square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        nameless = init_device_mesh("cpu", (2, 2))
        pair = dist.new_group([0, 1])
        for group, said in [
            (square, r"the mesh of shape \(2, 2\) has 2 \(\('dp', 'tp'\)\); .* mesh\['tp'\] or"),
            (nameless, r"has 2 \(without names\); .*mesh_dim_names, or mesh\.get_group\(1\)"),
            ([0, 1], r"group=\[0, 1\]\): pass a process group, e\.g\. .*new_group.*device mesh"),
            ("tp", "group='tp'.: pass a process group"),
        ]:
            with pytest.raises(weft.UsageError, match=said):
                weft.init(group=group)
        if rank > 1:
            with pytest.raises(weft.UsageError, match=f"rank {rank} is no member of this group"):
                weft.init(group=pair)

    ranks(main)


def test_how_long_it_waits_is_a_setting(monkeypatch):
    from weft.base.settings import Settings

    assert Settings.from_environment().init_timeout_s == 60
    monkeypatch.setenv("WEFT_INIT_TIMEOUT_S", "2.5")
    assert Settings.from_environment().init_timeout_s == 2.5
