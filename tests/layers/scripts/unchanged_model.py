"""An unchanged model of torch's DTensors, compiled with the pass and without, under torchrun or
emulated: the same answers and gradients. On GPUs, with times beside layers placed by hand."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from whole_model import TOLERANCE, far, ordinary

import weft
from weft.layers import ParallelAttention, ParallelMLP, ParallelNorm, rotary
from weft.layers.transformers_plans import enters, leaves

LAYERS, CALLS = 2, 30
COLUMNS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
)
ROWS = ("self_attn.o_proj", "mlp.down_proj")
PLACED = {
    "layers.*.self_attn": ParallelAttention, "layers.*.mlp": ParallelMLP, "*norm": ParallelNorm,
    "layers": (enters, leaves),
}  # fmt: skip


class Blocks(nn.Module):
    """Of Llama; no line of them speaks of ranks."""

    def __init__(self) -> None:
        super().__init__()
        inner = {"inner": ordinary.INNER, "hidden": ordinary.HIDDEN}
        self.layers = nn.Sequential(*(Block(ordinary.MLP(**inner), i) for i in range(LAYERS)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Block(ordinary.Decoder):
    def __init__(self, mlp: nn.Module, layer_idx: int) -> None:
        super().__init__(mlp, layer_idx)
        self.self_attn = ordinary.Attention(*ordinary.HEADS, layer_idx=layer_idx)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # pyright: ignore
        h = self.input_layernorm(x)
        turns = rotary(torch.arange(x.shape[1], device=x.device)[None], ordinary.HEAD)
        x = x + self.self_attn(h, turns)
        return x + self.mlp(self.post_attention_layernorm(x))


def time_us(call: Callable[[], Any]) -> float:
    """The median; all ranks call alike."""
    found = []
    for _ in range(CALLS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(found[CALLS // 3 :])


def compiled(model: nn.Module, fuse: Any) -> Any:
    """`fuse`: the pass, if any."""
    names = ("joint_custom_post_pass", "post_grad_custom_post_pass")
    options = dict.fromkeys(names, fuse) if fuse else {}
    return torch.compile(lambda x: model(x), options=options, dynamic=False)


def check(world: Any, shape: tuple[int, int], dtype: torch.dtype) -> int:
    torch.manual_seed(0)
    plain = Blocks()
    for one in plain.parameters():
        one.data = torch.randn(one.shape) * one.shape[-1] ** -0.5
    plain = plain.to(world.device, dtype)
    x = torch.randn(*shape, ordinary.HIDDEN).to(world.device, dtype).requires_grad_()
    want = plain(x)
    given = torch.randn(want.shape).to(want)
    (wanted,) = torch.autograd.grad((want * given).sum(), x)

    plan: dict[str, Any] = {f"layers.*.{one}": ColwiseParallel() for one in COLUMNS}
    plan |= {f"layers.*.{one}": RowwiseParallel() for one in ROWS}
    mesh = init_device_mesh(world.device.type, (world.num_ranks,))
    model = parallelize_module(copy.deepcopy(plain), mesh, plan)
    placed = weft.parallelize(copy.deepcopy(plain), world, PLACED)
    fuses = {"alike": float("inf"), "split": 0.0, "as predicted": None}
    ways: dict[str, Any] = {"torch's": compiled(model, None), "by hand": compiled(placed, None)}
    passes = {name: weft.inductor_pass(mesh, split_from=one) for name, one in fuses.items()}
    ways |= {name: compiled(model, one) for name, one in passes.items()}
    times = {}
    for name, call in ways.items():
        torch._dynamo.reset()
        y = call(x)
        assert far(y, want) < TOLERANCE, (name, far(y, want))
        (gradient,) = torch.autograd.grad((y * given).sum(), x)
        assert far(gradient, wanted) < TOLERANCE, (name, far(gradient, wanted))
        with torch.no_grad():
            assert far(call(x), want) < TOLERANCE, name
            if world.device.type == "cuda":
                times[name] = time_us(lambda call=call: call(x))
    operators = {name: {one.operator for one in fuse.decisions} for name, fuse in passes.items()}
    assert "gemm_ar" in operators["alike"], str(passes["alike"])
    assert "gemm_rs" in operators["split"], str(passes["split"])
    if times and world.rank == 0:
        print(f"{shape}: " + ", ".join(f"{name} {us:.0f} us" for name, us in times.items()))
        print(passes["as predicted"])
    return len(ways)


def main() -> None:
    world = weft.init()
    is_gpu = world.device.type == "cuda"
    dtype, shape = (torch.bfloat16, (2, 2048)) if is_gpu else (torch.float32, (2, 6))
    ordinary.HEADS, ordinary.INNER = (8, 4), 24
    if is_gpu:
        ordinary.HEADS, ordinary.HIDDEN, ordinary.HEAD, ordinary.INNER = (32, 8), 4096, 128, 14336
    print(f"rank {world.rank} of {world.num_ranks}: {check(world, shape, dtype)} cases")
    world.close()


if __name__ == "__main__":
    main()
