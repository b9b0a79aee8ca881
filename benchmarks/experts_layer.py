"""A mixture of experts, routed, in and out of own tokens, by every strategy, beside torch and NCCL.

    PYTHONPATH=src python benchmarks/experts_layer.py [--ranks 2] [--models qwen3-30b-a3b]
        [--tokens 128,4096] [--routing even,zipf,one]

Each rank has --tokens of its own, and ends with what their experts make of them. All ways are
recorded, with their routing; replays in turns; the slowest rank's median over rounds. Answers are
compared with the first way's. Writes results/experts_layer_<gpus>.json.

"torch, columns": of every expert a part of its inner columns; all tokens to all ranks, torch's
grouped products, the weighted sums as one kernel, reduce-scatter. "torch, gather": the same of
whole experts, own ones' rows first. "torch, all_to_all": a row for each choice to its expert's
rank and back; splits and places are known beforehand, which no model has, and not charged.
"weft, ..": the strategies of weft.layers.ParallelMoE.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from decode_step import measure
from torch.nn import functional

import weft
from weft.base.parts import part_of
from weft.layers.moe import STRATEGIES, ParallelMoE
from weft.tune import processes
from weft.tune.presets import MIXTURES
from weft.tune.provenance import provenance, save

RESULTS = Path(__file__).parent / "results"
ROUTINGS = ("even", "zipf", "one")
HEAP_BYTES = 4 << 30


class Mixture(NamedTuple):
    """Of all ranks; `inner` columns of each expert's gate, and of its value."""

    hidden: int
    experts: int
    top_k: int
    inner: int


class Weights(NamedTuple):
    """What a rank has: [experts, 2 * inner, hidden], gate over value, and [experts, hidden,
    inner]."""

    up: torch.Tensor
    down: torch.Tensor


def weights_of(
    mixture: Mixture, rank: int, num_ranks: int, device: Any, dtype: Any
) -> tuple[Weights, Weights]:
    """The same mixture cut along inner columns, and whole experts of it."""
    hidden, experts, _, inner = mixture
    columns, mine = (slice(*part_of(size, rank, num_ranks)) for size in (inner, experts))
    cut: tuple[list, list] = ([], [])
    whole: tuple[list, list] = ([], [])
    for e in range(experts):
        made = torch.Generator(device).manual_seed(e)

        def drawn(*shape: int, made: Any = made) -> torch.Tensor:
            one = torch.randn(shape, generator=made, device=device)
            return (one * shape[-1] ** -0.5).to(dtype)

        up, down = drawn(2, inner, hidden), drawn(hidden, inner)
        cut[0].append(up[:, columns].flatten(0, 1))
        cut[1].append(down[:, columns])
        if mine.start <= e < mine.stop:
            whole[0].append(up.flatten(0, 1))
            whole[1].append(down)
    return Weights(*map(torch.stack, cut)), Weights(*map(torch.stack, whole))


def tokens_of(
    mixture: Mixture, tokens: int, routing: str, rank: int, device: Any, dtype: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Own tokens, and the router's weight: experts even, by Zipf's law, or one that all take."""
    made = torch.Generator(device).manual_seed(1000 + rank)
    x = torch.randn(tokens, mixture.hidden, generator=made, device=device)
    made.manual_seed(999)
    gate = torch.randn(mixture.experts, mixture.hidden, generator=made, device=device)
    gate *= mixture.hidden**-0.5
    x[:, 0] = 1  # by which logits have what follows
    gate[:, 0] = 0
    if routing == "zipf":
        gate[:, 0] = -torch.arange(1, mixture.experts + 1, device=device).log()
    elif routing == "one":
        gate[0, 0] = 100
    return x.to(dtype), gate.to(dtype)


# ---------------------------------------------------------------------------------------------
# By torch


def _gate(h: torch.Tensor) -> torch.Tensor:
    gate, value = h.chunk(2, dim=1)
    return (functional.silu(gate.float()) * value.float()).to(h.dtype)


def _route(logits: torch.Tensor, top_k: int, first: int) -> tuple[torch.Tensor, ...]:
    """(the choices' weights, of slots their token, of choices their slot, ends of experts), sorted
    by expert from `first` on."""
    experts = logits.shape[1]
    value, ids = logits.float().topk(top_k)
    key = ((ids - first) % experts).flatten()
    order = key.sort(stable=True).indices
    slot_of = torch.empty_like(order).scatter_(
        0, order, torch.arange(len(order), device=order.device)
    )
    counts = torch.zeros(experts, dtype=torch.int32, device=key.device)
    counts.scatter_add_(0, key, torch.ones_like(key, dtype=torch.int32))
    ends = counts.cumsum(0, dtype=torch.int32)
    return value.softmax(1), order // top_k, slot_of.view(ids.shape), ends


def _sums(y: torch.Tensor, weight: torch.Tensor, slot_of: torch.Tensor, own: Any) -> torch.Tensor:
    """Of slots before `own`, those of others being no numbers."""
    is_own = slot_of < own
    rows = y[torch.where(is_own, slot_of, 0)].float() * weight[..., None]
    return torch.where(is_own[..., None], rows, 0.0).sum(1).to(y.dtype)


@cache
def as_one_kernel(function: Callable) -> Callable:
    return torch.compile(function, dynamic=False, fullgraph=True)


def by_gather(
    mixture: Mixture, weights: Weights, x: torch.Tensor, gate: torch.Tensor, first: int
) -> torch.Tensor:
    """All tokens to all ranks; those experts that a rank has are the first from `first` on."""
    own, n, logits = len(weights.up), dist.get_world_size(), functional.linear(x, gate)
    whole, every = (one.new_empty(len(one) * n, one.shape[1]) for one in (x, logits))
    dist.all_gather_into_tensor(whole, x)
    dist.all_gather_into_tensor(every, logits)
    weight, token_of, slot_of, ends = _route(every, mixture.top_k, first)
    h = functional.grouped_mm(whole[token_of], weights.up.mT, offs=ends[:own])
    y = functional.grouped_mm(as_one_kernel(_gate)(h), weights.down.mT, offs=ends[:own])
    sums = as_one_kernel(_sums)(y, weight, slot_of, ends[own - 1])
    out = torch.empty_like(x)
    dist.reduce_scatter_tensor(out, sums)
    return out


def by_all_to_all(
    mixture: Mixture, weights: Weights, x: torch.Tensor, gate: torch.Tensor
) -> Callable[[], torch.Tensor]:
    """What sends rows: which go where is known before."""
    own, n, logits = len(weights.up), dist.get_world_size(), functional.linear(x, gate)
    weight, token_of, slot_of, ends = _route(logits, mixture.top_k, 0)
    counts = ends.diff(prepend=ends.new_zeros(1)).view(n, own)  # to each rank's experts
    come = torch.empty_like(counts)
    dist.all_to_all_single(come, counts)
    gives, gets = counts.sum(1).tolist(), come.sum(1).tolist()
    expert = torch.arange(own, device=x.device).repeat(n).repeat_interleave(come.flatten())
    sorted_by = expert.sort(stable=True).indices
    back = sorted_by.argsort()
    offs = come.sum(0).cumsum(0, dtype=torch.int32)

    def call() -> torch.Tensor:
        got, returned = (x.new_empty(sum(some), x.shape[1]) for some in (gets, gives))
        dist.all_to_all_single(got, x[token_of], gets, gives)
        h = functional.grouped_mm(got[sorted_by], weights.up.mT, offs=offs)
        y = functional.grouped_mm(as_one_kernel(_gate)(h), weights.down.mT, offs=offs)
        dist.all_to_all_single(returned, y[back], gives, gets)
        return as_one_kernel(_sums)(returned, weight, slot_of, len(returned))

    return call


# ---------------------------------------------------------------------------------------------
# By weft


class Layer(ParallelMoE):
    """Of own rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._routed(x, len(x) * self.world.num_ranks)


def by_weft(
    world: Any, mixture: Mixture, weights: Weights, gate: torch.Tensor, strategy: str
) -> Layer:
    hidden, experts, top_k, inner = mixture
    options = {"device": "meta", "dtype": gate.dtype}
    layer = Layer(hidden, inner, experts, top_k, world, strategy=strategy, **options)
    kept = {"gate_up_proj": weights.up, "down_proj": weights.down}
    for name, one in kept.items():
        layer.experts[name] = torch.nn.Parameter(one, requires_grad=False)
    layer.gate["weight"] = torch.nn.Parameter(gate, requires_grad=False)
    return layer


def ways_of(
    world: Any, mixture: Mixture, weights: tuple[Weights, Weights], x: Any, gate: Any
) -> dict[str, Callable[[], torch.Tensor]]:
    cut, whole = weights
    first = part_of(mixture.experts, world.rank, world.num_ranks)[0]
    ways = {
        "torch, columns": partial(by_gather, mixture, cut, x, gate, 0),
        "torch, gather": partial(by_gather, mixture, whole, x, gate, first),
        "torch, all_to_all": by_all_to_all(mixture, whole, x, gate),
    }
    for strategy in STRATEGIES:
        given = cut if strategy == STRATEGIES[0] else whole
        ways[f"weft, {strategy}"] = partial(by_weft(world, mixture, given, gate, strategy), x)
    return ways


@torch.no_grad()
def main(rank: int, options: argparse.Namespace) -> None:
    world = weft.init(heap_bytes=HEAP_BYTES)
    torch._dynamo.config.recompile_limit = 1 << 10  # one of each shape
    n, device, dtype = world.num_ranks, world.device, torch.bfloat16
    results: dict[str, Any] = provenance() if rank == 0 else {}
    results |= {"what": __doc__.splitlines()[0], "num_ranks": n, "rows": []}
    for name in options.models.split(","):
        mixture = Mixture(*MIXTURES[name])
        weights = weights_of(mixture, rank, n, device, dtype)
        for tokens in map(int, options.tokens.split(",")):
            for routing in options.routing.split(","):
                x, gate = tokens_of(mixture, tokens, routing, rank, device, dtype)
                ways = ways_of(world, mixture, weights, x, gate)
                row = {"model": name, "tokens": tokens, "routing": routing,
                       "us": measure(world, ways, options.rounds)}  # fmt: skip
                if rank == 0:
                    results["rows"].append(row)
                    save("experts_layer", results, n, RESULTS)
                    print(row, flush=True)
        del weights, ways
        torch.cuda.empty_cache()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--models", default=",".join(MIXTURES))
    parser.add_argument("--tokens", default="128,4096", help="of each rank")
    parser.add_argument("--routing", default="even,zipf", help=f"some of {', '.join(ROUTINGS)}")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--timeout", type=float, default=400.0)
    options = parser.parse_args()
    processes.run_on_gpus(main, options.ranks, options, timeout_s=options.timeout)
