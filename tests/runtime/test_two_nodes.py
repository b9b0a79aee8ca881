"""Worlds over two nodes: every way to reach far peers, and every collective that does.

The same script runs emulated, where all accesses are checked, and on GPUs that are declared two
nodes, where a far peer has no address and NVSHMEM moves what crosses.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from torchrun import environment, on_two_and_four_gpus, once, torchrun

import weft
from weft.runtime.backends import cuda, nvshmem

SCRIPT = Path(__file__).parent / "scripts" / "two_nodes.py"
SAID = r"rank (\d) on node (\d): .*int64, .*all_gather relay.*reduce_scatter relay.*all_to_all.*"


def seats(*nodes: int) -> list[tuple[str, str]]:
    return [(str(rank), str(node)) for rank, node in enumerate(nodes)]


@pytest.mark.slow
@pytest.mark.parametrize("nodes, expected", [("2+2", seats(0, 0, 1, 1)), ("2+1", seats(0, 0, 1))])
def test_emulated(nodes, expected):
    command = [sys.executable, "-m", "weft", "emulate", str(SCRIPT), "--nodes", nodes]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert sorted(re.findall(f"^{SAID}$", done.stdout, re.MULTILINE)) == expected


@on_two_and_four_gpus
def test_on_gpus_declared_two_nodes(ranks):
    said = once(torchrun(SCRIPT, ranks, timeout_s=600), SAID)
    assert said == seats(*(2 * rank // ranks for rank in range(ranks)))


@pytest.mark.gpu(n=2)
def test_a_far_rank_has_no_address():
    """What crosses cannot have been loaded or stored: that faults."""
    first, second = torchrun(SCRIPT.with_name("far_pointer.py"), 2)
    assert once([first], "rank (0) was read: near") == ["0"]
    assert once([first], "rank (1) faulted: CUDA error: an illegal.*") == ["1"]
    assert not re.search(r"^rank \d", second, re.MULTILINE)  # it looks at nobody


def test_nodes_are_hosts_or_as_declared():
    assert cuda.numbered_nodes(["a", "a", "b", "b"], None) == (0, 0, 1, 1)
    assert cuda.numbered_nodes(["a", "b", "a"], None) == (0, 1, 0)
    assert cuda.numbered_nodes(["a"] * 4, 2) == (0, 0, 1, 1)
    assert cuda.numbered_nodes(["a"] * 4, (3, 1)) == (0, 0, 0, 1)
    assert cuda.numbered_nodes(["a", "a", "b", "b"], (1, 1, 2)) == (0, 1, 2, 2)
    with pytest.raises(weft.UsageError, match="different hosts"):
        cuda.numbered_nodes(["a", "a", "b", "b"], 1)
    with pytest.raises(weft.UsageError, match="add up"):
        cuda.numbered_nodes(["a"] * 4, (3, 2))


def test_without_nvshmem_the_reason_is_told(monkeypatch):
    import torch

    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(weft.UnsupportedError, match="several nodes need NVSHMEM: .* not built for"):
        nvshmem.choose(None)


def test_a_world_of_a_part_of_all_ranks_is_refused(monkeypatch):
    class Group:
        def size(self):
            return 2

    monkeypatch.setattr(nvshmem.dist, "get_world_size", lambda: 4)
    with pytest.raises(weft.UsageError, match="2 of 4 ranks .* allocates on all ranks"):
        nvshmem.check_group(Group())
