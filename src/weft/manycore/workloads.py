"""Six programs with which the target is measured, and what leaving out each of its choices costs.

    rows = measure("mlp", SW26010)      simulated and predicted, whole and without each choice

A convolution comes as patches, one row of taps and channels for each pixel, as im2col makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch

from weft.compiler.compiled import Compiled
from weft.compiler.frontend import (
    all_gather,
    attention,
    program,
    reduce_scatter,
    rms_norm,
    silu,
    silu_mul,
    split,
)
from weft.ir.tensor import Pieces, Replicate, Shard, Type
from weft.manycore.lower import Plan, lower
from weft.manycore.nest import Choices
from weft.manycore.record import Machine
from weft.manycore.run import Run, execute

FP32 = "float32"
PIXELS, CHANNELS, TAPS = 28 * 28, 64, 9

# Each choice by itself left out.
ABLATIONS: Mapping[str, Choices] = {
    "all": Choices(),
    "no coalescing": Choices(coalesce=False),
    "no double buffer": Choices(double_buffer=False),
    "loops as written": Choices(choose_order=False),
}


def _tensor(*sizes: int | str, placement: Any = Replicate()) -> Type:
    return Type(FP32, sizes, placement)


@program(mesh="tp", x=_tensor("m", 512), w=_tensor(512, 512))
def matmul(x, w):
    return x @ w


@program(
    mesh="tp", x=_tensor("m", 256, placement=Shard(0)), gain=_tensor(1, 256),
    w1=_tensor(256, 1024, placement=Shard(1)), w2=_tensor(512, 256, placement=Shard(0)),
)  # fmt: skip
def mlp(x, gain, w1, w2):
    return reduce_scatter(silu_mul(all_gather(rms_norm(x, gain)) @ w1) @ w2) + x


@program(
    mesh="tp", x=_tensor("m", 256, placement=Shard(0)), gain=_tensor(1, 256),
    qkv=_tensor(256, 512, placement=Pieces(1, (256, 128, 128))),
    o=_tensor(256, 256, placement=Shard(0)),
)  # fmt: skip
def attention_block(x, gain, qkv, o):
    q, k, v = split(all_gather(rms_norm(x, gain)) @ qkv, (256, 128, 128))
    return reduce_scatter(attention(q, k, v, head=32) @ o) + x


@program(
    mesh="tp", patches=_tensor("m", TAPS * 32), w=_tensor(TAPS * 32, CHANNELS),
    bias=_tensor(1, CHANNELS),
)  # fmt: skip
def convolution(patches, w, bias):
    return silu(patches @ w + bias)


@program(
    mesh="tp", patches=_tensor("m", TAPS * CHANNELS), bias=_tensor(1, CHANNELS),
    w0=_tensor(1, CHANNELS), w1=_tensor(1, CHANNELS), w2=_tensor(1, CHANNELS),
    w3=_tensor(1, CHANNELS), w4=_tensor(1, CHANNELS), w5=_tensor(1, CHANNELS),
    w6=_tensor(1, CHANNELS), w7=_tensor(1, CHANNELS), w8=_tensor(1, CHANNELS),
)  # fmt: skip
def depthwise(patches, bias, w0, w1, w2, w3, w4, w5, w6, w7, w8):
    taps = split(patches, (CHANNELS,) * TAPS)
    weights = w0, w1, w2, w3, w4, w5, w6, w7, w8
    return silu(reduce(lambda a, b: a + b, (x * w for x, w in zip(taps, weights))) + bias)


@program(
    mesh="tp", patches=_tensor("m", TAPS * 32), shortcut=_tensor("m", 32),
    w1=_tensor(TAPS * 32, CHANNELS), b1=_tensor(1, CHANNELS), w2=_tensor(CHANNELS, 32),
    b2=_tensor(1, 32),
)  # fmt: skip
def cnn_block(patches, shortcut, w1, b1, w2, b2):
    """A convolution of 3 x 3, one of 1 x 1, and the way around both."""
    return silu(silu(patches @ w1 + b1) @ w2 + b2 + shortcut)


@dataclass(frozen=True)
class Workload:
    program: Compiled
    rows: int
    num_ranks: int = 1

    @property
    def sizes(self) -> dict[str, int]:
        return {"m": self.rows}


WORKLOADS: Mapping[str, Workload] = {
    "matmul": Workload(matmul, 500),
    "mlp": Workload(mlp, 500, num_ranks=2),
    "attention_block": Workload(attention_block, 250, num_ranks=2),
    "convolution": Workload(convolution, PIXELS),
    "depthwise": Workload(depthwise, PIXELS),
    "cnn_block": Workload(cnn_block, PIXELS),
}


@dataclass(frozen=True)
class Measured:
    """Of one workload without some choice: what was predicted and what the machine took.

    Units   us; transfers and bytes of all ranks
    """

    workload: str
    left_out: str
    us: float
    predicted_us: float
    transfers: int
    predicted_transfers: int
    bytes: int
    predicted_bytes: int


def plan_of(name: str, machine: Machine, choices: Choices = Choices()) -> Plan:
    """Without some choices, with the tiles that are best with all of them."""
    one = WORKLOADS[name]
    placed = one.program.stages.tasks["place"]
    like = lower(placed, one.sizes, one.num_ranks, machine)
    return lower(placed, one.sizes, one.num_ranks, machine, choices, like)


def inputs_of(plan: Plan) -> list[dict[str, torch.Tensor]]:
    """Any numbers: times are the same for all."""
    generator = torch.Generator().manual_seed(0)
    return [
        {name: 0.1 * torch.randn(value.rows.on(rank), value.columns.on(rank), generator=generator)
         for name, value in plan.inputs.items()}
        for rank in range(plan.num_ranks)
    ]  # fmt: skip


def measure(
    name: str, machine: Machine, run: Callable[[Plan], Run] | None = None
) -> list[Measured]:  # fmt: skip
    """A row for each of ABLATIONS."""
    found = []
    for left_out, choices in ABLATIONS.items():
        plan = plan_of(name, machine, choices)
        done = run(plan) if run else execute(plan, inputs_of(plan))
        ranks = range(plan.num_ranks)
        predicted = [kernel.traffic(rank) for kernel in plan.kernels for rank in ranks]
        found.append(
            Measured(
                name, left_out, done.ns / 1000, plan.ns() / 1000, done.traffic.transfers,
                sum(one.transfers for one in predicted), done.traffic.bytes,
                sum(one.bytes for one in predicted),
            )
        )  # fmt: skip
    return found
