"""A small model made parallel, under torchrun or emulated: eager, recorded, compiled, trained.

Held to the ordinary module on every rank's device, with dense layers and with experts.
"""

from __future__ import annotations

import copy
import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch

import weft
from weft.layers import Cache, ParallelAttention, alone, rotary

# A copy of its own, whose sizes it changes.
FILE = Path(__file__).parent.parent / "ordinary.py"
SPEC = importlib.util.spec_from_file_location("ordinary_of_script", FILE)
assert SPEC is not None and SPEC.loader is not None
ordinary = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = ordinary  # where torch.compile looks for it
SPEC.loader.exec_module(ordinary)

TOLERANCE = 4e-2  # of bfloat16 models of two layers


def far(got: torch.Tensor, want: torch.Tensor) -> float:
    got, want = got.detach().float(), want.detach().float()
    return float((got - want).norm() / (want.norm() + 1e-6))


def check_model(world: Any, experts: bool, split_from: float, dtype: torch.dtype) -> int:
    torch.manual_seed(0)
    model = ordinary.Llama(experts, vocabulary=50)
    for one in model.parameters():
        one.data = torch.randn(one.shape) * one.shape[-1] ** -0.5
    model = model.to(world.device, dtype)
    ids = torch.randint(0, 50, (2, 33)).to(world.device)
    made = weft.parallelize(copy.deepcopy(model), world, split_from=split_from)
    want = model(ids)
    for _ in range(4):  # later calls are replayed
        y = made(ids)
        assert far(y, want) < TOLERANCE, far(y, want)
    given = torch.randn(want.shape).to(want)
    (want * given).sum().backward()
    (y * given).sum().backward()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        whole, own = (one.get_parameter(name).grad for one in (model, made))
        part = whole.chunk(world.num_ranks)[world.rank]
        assert far(own, part) < TOLERANCE, (name, far(own, part))
    for name in ("model.norm.weight", "model.layers.0.self_attn.q_norm.weight"):
        whole, own = (one.get_parameter(name).grad for one in (model, made))
        assert far(own, whole) < TOLERANCE, (name, far(own, whole))
    with torch.no_grad():
        made(ids)  # what a call without gradients needs is there before it is captured
        with world.record() as recording:
            y = made(ids)
        recording.replay()
        world.synchronize()
        assert far(y, want) < TOLERANCE
        if not experts:
            compiled = torch.compile(lambda x: made(x), fullgraph=True)
            assert far(compiled(ids), want) < TOLERANCE
    return 4


def check_decode(world: Any, dtype: torch.dtype) -> int:
    torch.manual_seed(1)
    module = ordinary.Attention(*ordinary.HEADS).to(world.device, dtype)
    layer = ParallelAttention.from_module(module, world)
    x = torch.randn(2, 8, ordinary.HIDDEN).to(world.device, dtype)
    own = alone(world)
    cache = Cache(1, 2, 16, layer.kv_heads, ordinary.HEAD, device=x.device, dtype=dtype, alone=own)

    def step(token: torch.Tensor) -> torch.Tensor:
        turns = rotary(cache.positions(token.shape[1]), ordinary.HEAD)
        y = layer(token, turns, cache=cache)
        cache.advance(token.shape[1])
        return y

    with torch.no_grad():
        turns = rotary(torch.arange(8, device=x.device).expand(2, -1), ordinary.HEAD)
        want = module(x, turns)
        assert far(step(x[:, :4].contiguous()), want[:, :4]) < TOLERANCE
        token = x[:, 4:5].contiguous()
        assert far(step(token), want[:, 4:5]) < TOLERANCE
        token.copy_(x[:, 5:6])
        with world.record() as recording:
            y = step(token)
        for at in (5, 6, 7):
            token.copy_(x[:, at : at + 1])
            recording.replay()
            world.synchronize()
            assert far(y, want[:, at : at + 1]) < TOLERANCE, at
    if own is not world:
        own.close()
    return 3


def main() -> None:
    world = weft.init()
    is_gpu = world.device.type == "cuda"
    dtype = torch.bfloat16 if is_gpu else torch.float32
    ordinary.HEADS, ordinary.INNER, ordinary.OF_EXPERT = (8, 4), 24, 8
    if is_gpu:
        ordinary.HIDDEN, ordinary.HEAD, ordinary.INNER, ordinary.OF_EXPERT = 512, 64, 1024, 256
    cases = check_decode(world, dtype)
    for experts in (False, True):
        for split_from in (0, float("inf")):
            cases += check_model(world, experts, split_from, dtype)
    print(f"rank {world.rank} of {world.num_ranks}: {cases} cases")
    world.close()


if __name__ == "__main__":
    main()
