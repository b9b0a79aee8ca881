"""Operators over several nodes on GPUs: the kernels that they choose compile for such a world."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from weft.base.target import TARGETS
from weft.compiler import Facts, Settings, Shard, Tensor, reduce_scatter
from weft.compiler.frontend import trace
from weft.compiler.passes.place import place
from weft.compiler.pipeline import overlap
from weft.language import triton_api
from weft.language.cuda import nvshmem_library
from weft.language.world_arg import WorldArg, far_version
from weft.ops import card
from weft.plan import run_plan
from weft.plan.described import DescribedWorld

CUDA = TARGETS["cuda:90"]
SHAPE = {"m": 4096, "n": 1024, "k": 1024, "experts": 64, "top_k": 8}
DECODED = {"m": 64, "n": 4096, "k": 128, "heads": 64, "kv_heads": 8, "variable": 1}


def in_a_far_world(record):
    version = far_version(nvshmem_library.checksum())
    constants = {
        name: WorldArg(None, value.num_ranks, version) if isinstance(value, WorldArg) else value
        for name, value in record.constants.items()
    }
    return replace(record, constants=constants)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "transport"),
    [
        ("all_gather", "relay"), ("reduce_scatter", "relay"), ("all_reduce", "relay"),
        ("all_reduce", "two_shot"), ("all_to_all", "sm_push"),
        pytest.param("gemm_rs", "sm_push", marks=pytest.mark.slow),
        pytest.param("flash_decode", "sm_push", marks=pytest.mark.slow),
        pytest.param("ep_dispatch", "sm_push", marks=pytest.mark.slow),
        pytest.param("ep_combine", "sm_push", marks=pytest.mark.slow),
        pytest.param("ep_dispatch", "relay", marks=pytest.mark.slow),
        pytest.param("ep_combine", "relay", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_what_crosses_goes_through_the_library(nvshmem_stand_in, name, transport):
    op = card(name)
    known = DECODED if name == "flash_decode" else SHAPE
    shape = {key: known.get(key, 0) for key in op.default_shape}
    problem = op.make_problem(4, shape, "bfloat16", (2, 2))
    found = [c for c in op.candidates(problem, CUDA) if c.transport == transport]
    kernels = list(op.kernels(problem, found[0], CUDA))
    assert kernels
    for fn, record in kernels:
        text = triton_api.compile_kernel(fn, in_a_far_world(record), CUDA).asm["ptx"]
        assert "// nvshmemx_putmem_block" in text and "// nvshmem_quiet" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "relay"),
    [
        ("gemm_rs", "relay_tiles"),
        pytest.param("ag_gemm", "relay_chunks", marks=pytest.mark.slow),
        pytest.param("ag_moe", "relay_chunks", marks=pytest.mark.slow),
        pytest.param("moe_rs", "relay_tiles", marks=pytest.mark.slow),
    ],
)
def test_a_product_puts_nothing_that_a_relay_carries(nvshmem_stand_in, name, relay):
    """So it runs in the template for Hopper, whose kernels in Gluon only signal far ranks."""
    op = card(name)
    shape = {"m": 8192, "n": 4096, "k": 4096}
    is_by_tables = name in ("ag_moe", "moe_rs")
    if is_by_tables:
        shape = {key: value for key, value in SHAPE.items() if key in op.default_shape}
    problem = op.make_problem(4, shape, "bfloat16", (2, 2))
    if is_by_tables:
        problem = replace(problem, tile_m=128)
        config = next(op.candidates(problem, CUDA))
    else:
        config = op.choose(problem, CUDA)
    assert (config.transport, config.template) == ("relay", "sm90")
    puts = {}
    for fn, record in op.kernels(problem, config, CUDA):
        text = triton_api.compile_kernel(fn, in_a_far_world(record), CUDA).asm["ptx"]
        puts[fn.__name__] = "// nvshmemx_putmem_block" in text
        if name == "moe_rs" and "multiply" in fn.__name__:  # it stores here alone
            continue
        assert "// nvshmem_quiet" in text and "// nvshmemx_signal_op" in text
    near = {f"{name}_multiply_sm90", *(["moe_rs_reduce"] if name == "moe_rs" else [])}
    assert puts == {relay: True, **dict.fromkeys(near, False)}


@pytest.mark.slow
def test_kernels_of_sums_that_are_relayed(nvshmem_stand_in):
    """The product gives all its tiles to near ranks, the relay a node's sums to far ones."""
    types = {"a": Tensor("bfloat16", ("m", 4096), Shard(1)),
             "b": Tensor("bfloat16", (4096, 1024), Shard(0))}  # fmt: skip
    program = place(trace(lambda a, b: reduce_scatter(a @ b), "tp", types))
    sums = program.results[0]
    facts = Facts({"m": 4096}, 4, CUDA, (2, 2))
    stages = overlap(program, facts, Settings(engines={sums: "relay"}))
    tensors = {"a": torch.empty(4096, 1024, dtype=torch.bfloat16, device="meta"),
               "b": torch.empty(1024, 1024, dtype=torch.bfloat16, device="meta")}  # fmt: skip
    with triton_api.described_launches() as found:
        run_plan(stages, tensors, {"m": 4096}, world=DescribedWorld(4, CUDA, (2, 2)))
    names = []
    for left in found:
        text = triton_api.compile_kernel(left.fn, in_a_far_world(left.record()), CUDA).asm["ptx"]
        assert "// nvshmem_quiet" in text
        names.append(left.fn.__name__)
        if names[-1] == "relay_tiles":
            assert "// nvshmemx_putmem_block" in text
    assert len(names) == 2 and "relay_tiles" in names
