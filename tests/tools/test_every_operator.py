"""Every operator by the command line: on 1, 2, 3, 4 and 8 ranks, on one node and on two."""

from __future__ import annotations

import json

import pytest

from weft.ops import names
from weft.tools.main import main
from weft.tools.programs import find_op

NODES = ["1", "1+1", "2", "2+1", "3", "2+2", "4", "4+4", "8"]
AWKWARD = {"m": 37, "n": 24, "k": 40, "variable": 1}
# Its rows are sequences, each with keys of its own.
FEWER = {"flash_decode": {"m": 5}}


def shape_of(op: str) -> str:
    sizes = {**find_op(op).default_shape, **AWKWARD, **FEWER.get(op, {})}
    return ",".join(f"{name}={sizes[name]}" for name in find_op(op).default_shape)


@pytest.mark.slow
@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("op", names())
def test_it_runs_and_is_verified(op, nodes, capsys):
    sizes = nodes.split("+")
    where = ["--nodes", nodes] if len(sizes) > 1 else ["--ranks", nodes]
    for verb in (["run", op, "--target", "emu"], ["verify", op, "--schedules", "3"]):
        assert main([*verb, *where, "--shape", shape_of(op), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["ok"] and found["ranks"] == sum(map(int, sizes))


@pytest.mark.slow
@pytest.mark.parametrize("op", names())
def test_it_compiles_for_every_architecture(op, capsys):
    targets = ["cuda:80", "cuda:90", "cuda:100", "hip:gfx942", "hip:gfx950"]
    assert main(["compile", op, "--target", ",".join(targets), "--json"]) == 0
    kernels = json.loads(capsys.readouterr().out)["kernels"]
    assert {kernel["target"] for kernel in kernels} == set(targets)
