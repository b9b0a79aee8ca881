"""A decode step of two layers as one kernel, beside torch's steps, each in one CUDA graph.

    PYTHONPATH=src python benchmarks/decode_step.py [--ranks 4] [--models llama3-8b] [--batch 1,16]

Each row of the batch is a sequence of --context tokens, the new one counted; heads and columns are
split over the ranks. Answers are checked against torch's before anything is timed. All ways are
recorded; replays in turns; the slowest rank's median over rounds. `weights_us` is how long reading
the weights and caches of a rank takes at the rate in its GPU's data sheet. Writes
results/decode_step_<gpus>.json.

"torch, .." are the step operation by operation; "fused torch, .." as a good user of torch writes
it: one product for queries, keys and values, pointwise functions by torch.compile, torch's one-shot
all-reduce on symmetric memory. To it and to the persistent kernel weights lie as [n, k], as
torch.nn.Linear has them. --split-k 1,0,2,4 adds the persistent kernel with products in so many
parts along k: 1 leaves them whole, 0 is as it is without the option.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
import torch.nn.functional as F

import weft
import weft.megakernel
import weft.ops
from weft.base.machines import MEASURED, PUBLIC
from weft.compiler import (
    Replicate,
    Shard,
    Tensor,
    Times,
    all_reduce,
    decode_attention,
    kv_append,
    program,
    rms_norm,
    rope,
    silu_mul,
)
from weft.compiler.decoding import rope as turn
from weft.tools.schedule import chart, traced
from weft.tune import processes, tile_times
from weft.tune.clocks import offsets
from weft.tune.compiling import compile_together
from weft.tune.provenance import provenance, save

RESULTS = Path(__file__).parent / "results"
LAYERS, EPS, DTYPE = 2, 1e-6, "bfloat16"


class Model(NamedTuple):
    """Of all ranks; `head` is the columns of one of the heads."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head: int = 128


MODELS = {
    "llama3-8b": Model(4096, 14336, 32, 8),
    "qwen3-32b": Model(5120, 25600, 64, 8),
    "llama3-70b": Model(8192, 28672, 64, 8),
}
PRODUCTS = ("wq", "wk", "wv", "wo", "up", "down")
WEIGHTS = ("gain", "wq", "wk", "wv", "keys", "values", "wo", "gain_2", "up", "down")


def types_of(model: Model, context: int) -> dict[str, Tensor]:
    """The parameters of the step, layer by layer."""
    columns, kv = model.heads * model.head, model.kv_heads * model.head

    def of(rows: Any, width: int, placement: Any, dtype: str = DTYPE) -> Tensor:
        return Tensor(dtype, (rows, width), placement)

    found = {
        "x": of("b", model.hidden, Replicate()),
        "lengths": Tensor("int32", (1, "b"), Replicate()),
    }
    for i in range(LAYERS):
        layer = (
            of(1, model.hidden, Replicate()), of(model.hidden, columns, Shard(1)),
            of(model.hidden, kv, Shard(1)), of(model.hidden, kv, Shard(1)),
            of(Times("b", context), kv, Shard(1)), of(Times("b", context), kv, Shard(1)),
            of(columns, model.hidden, Shard(0)), of(1, model.hidden, Replicate()),
            of(model.hidden, 2 * model.inner, Shard(1)), of(model.inner, model.hidden, Shard(0)),
        )  # fmt: skip
        found |= {f"{name}_{i}": one for name, one in zip(WEIGHTS, layer, strict=True)}
    return found


def step_of(model: Model, context: int) -> Any:
    """The step as a program."""

    def layer(x, lengths, gain, wq, wk, wv, keys, values, wo, gain_2, up, down):
        h = rms_norm(x, gain, eps=EPS)
        keys = kv_append(keys, rope(h @ wk, lengths, head=model.head), lengths)
        values = kv_append(values, h @ wv, lengths)
        queries = rope(h @ wq, lengths, head=model.head)
        attended = decode_attention(queries, keys, values, lengths, head=model.head)
        x = all_reduce(attended @ wo) + x
        return all_reduce(silu_mul(rms_norm(x, gain_2, eps=EPS) @ up) @ down) + x, keys, values

    types = types_of(model, context)

    def step(given: dict[str, Any]) -> tuple:
        x, caches = given["x"], []
        for i in range(LAYERS):
            weights = (given[f"{name}_{i}"] for name in WEIGHTS)
            x, *written = layer(x, given["lengths"], *weights)
            caches += written
        return (x, *caches)

    scope: dict[str, Any] = {"step": step}
    exec(f"def decode({', '.join(types)}):\n    return step(locals())", scope)
    return program(mesh="tp", **types)(scope["decode"])


def inputs(model: Model, context: int, batch: int, rank: int, num_ranks: int, device: Any) -> dict:
    """What one rank has; what all ranks have is equal on all of them."""
    found = {}
    for i, (name, kind) in enumerate(types_of(model, context).items()):
        if name == "lengths":
            found[name] = torch.full((1, batch), context, dtype=torch.int32, device=device)
            continue
        rows, columns = (
            size.by * batch if isinstance(size, Times) else batch if size == "b" else size
            for size in kind.sizes
        )
        is_shared = kind.placement == Replicate()
        rows //= num_ranks if kind.placement == Shard(0) else 1
        columns //= num_ranks if kind.placement == Shard(1) else 1
        seed = 1000 * i + (0 if is_shared else rank + 1)
        generator = torch.Generator(device).manual_seed(seed)
        drawn = torch.randn(rows, columns, generator=generator, device=device)
        # Sums over rows of a weight stay about as large as what is summed.
        scale = 1.0 if name == "x" or "gain" in name else rows**-0.5
        found[name] = (drawn * (1.0 if "keys" in name or "values" in name else scale)).to(
            getattr(torch, DTYPE)
        )
    return found


def by_torch(model: Model, context: int, given: dict[str, torch.Tensor], sum_: Callable) -> Any:
    """The step by torch's kernels; `sum_` sums over ranks in place."""
    x, lengths = given["x"], given["lengths"]
    batch = len(x)
    last = torch.arange(batch, device=x.device) * context + context - 1

    def norm(one: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(one, one.shape[-1:], gain[0], EPS)

    for i in range(LAYERS):
        gain, wq, wk, wv, keys, values, wo, gain_2, up, down = (
            given[f"{name}_{i}"] for name in WEIGHTS
        )
        h = norm(x, gain)
        keys[last] = turn(h @ wk, lengths, model.head, 10000.0)
        values[last] = h @ wv
        queries = turn(h @ wq, lengths, model.head, 10000.0)
        q = queries.view(batch, -1, 1, model.head)
        k, v = (one.view(batch, context, -1, model.head).transpose(1, 2) for one in (keys, values))
        attended = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        x = sum_(attended.reshape(batch, -1) @ wo) + x
        h = norm(x, gain_2) @ up
        x = sum_((F.silu(h[:, ::2]) * h[:, 1::2]) @ down) + x
    return x


def _norm(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype) * gain


def _add_norm(x: torch.Tensor, more: torch.Tensor, gain: torch.Tensor) -> tuple:
    total = x + more
    return total, _norm(total, gain)


def _gated(h: torch.Tensor) -> torch.Tensor:
    return F.silu(h[:, ::2].float()).to(h.dtype) * h[:, 1::2]


def _turned_and_kept(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, keys: torch.Tensor,
    values: torch.Tensor, last: torch.Tensor, columns: int, head: int,
) -> torch.Tensor:  # fmt: skip
    """Queries, turned; keys, turned, and values go into the caches."""
    batch, kv = len(qkv), keys.shape[1]

    def turned(one: torch.Tensor) -> torch.Tensor:
        left, right = one.view(batch, -1, head).float().chunk(2, -1)
        both = torch.cat([left * cos - right * sin, right * cos + left * sin], -1)
        return both.to(one.dtype)

    keys[last] = turned(qkv[:, columns : columns + kv]).view(batch, kv)
    values[last] = qkv[:, columns + kv :]
    return turned(qkv[:, :columns])


class FusedTorch:
    """The step as a good user of torch writes it."""

    def __init__(self, model: Model, context: int, given: dict[str, torch.Tensor]) -> None:
        self.model, self.context, self.given = model, context, given
        x, head = given["x"], model.head
        compiled = partial(torch.compile, dynamic=False, fullgraph=True)
        self.norm, self.add_norm, self.gated, self.turned = map(
            compiled, (_norm, _add_norm, _gated, _turned_and_kept)
        )
        self.layers = []
        for i in range(LAYERS):
            one = {name: given[f"{name}_{i}"] for name in WEIGHTS}
            qkv = torch.cat([one["wq"], one["wk"], one["wv"]], 1)
            one |= {"qkv": qkv.t().contiguous()}
            one |= {name: one[name].t().contiguous() for name in ("wo", "up", "down")}
            self.layers.append(one)
        rates = 10000.0 ** -(torch.arange(0, head, 2, device=x.device).float() / head)
        angles = (context - 1) * rates
        self.cos, self.sin = torch.cos(angles)[None, None], torch.sin(angles)[None, None]
        self.last = torch.arange(len(x), device=x.device) * context + context - 1
        self.shared = symmetric.empty(x.shape, dtype=x.dtype, device=x.device)
        symmetric.rendezvous(self.shared, dist.group.WORLD)

    def one_shot(self) -> torch.Tensor:
        """Sums by torch's all-reduce of symmetric memory, where products leave their results."""
        group = dist.group.WORLD.group_name

        def multiplied(a: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            torch.mm(a, weight.t(), out=self.shared)
            return torch.ops.symm_mem.one_shot_all_reduce(self.shared, "sum", group)

        return self.step(multiplied)

    def by(self, sum_: Callable) -> torch.Tensor:
        return self.step(lambda a, weight: sum_(F.linear(a, weight)))

    def step(self, summed: Callable) -> torch.Tensor:
        """summed(a, weight): a @ weight^T, summed over ranks."""
        x, batch, head = self.given["x"], len(self.given["x"]), self.model.head
        h = self.norm(x, self.layers[0]["gain"][0])
        for i, one in enumerate(self.layers):
            qkv = F.linear(h, one["qkv"])
            columns, keys, values = one["wo"].shape[1], one["keys"], one["values"]
            queries = self.turned(
                qkv, self.cos, self.sin, keys, values, self.last, columns, head
            )  # fmt: skip
            k, v = (kept.view(batch, self.context, -1, head).transpose(1, 2)
                    for kept in (keys, values))  # fmt: skip
            found = F.scaled_dot_product_attention(queries[:, :, None], k, v, enable_gqa=True)
            x, h = self.add_norm(
                x, summed(found.reshape(batch, -1), one["wo"]), one["gain_2"][0]
            )  # fmt: skip
            behind = self.layers[min(i + 1, LAYERS - 1)]["gain"][0]
            x, h = self.add_norm(x, summed(self.gated(F.linear(h, one["up"])), one["down"]), behind)
        return x


def as_linear(given: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The same, weights of products in memory as [n, k]."""
    return [
        one.t().contiguous().t() if name.rpartition("_")[0] in PRODUCTS else one
        for name, one in given.items()
    ]


def ways_of(
    world: Any, model: Model, context: int, given: dict[str, torch.Tensor], splits_k: list[int]
) -> dict[str, Callable]:
    """Each way of doing the step, as a call; the persistent kernel also with products in so many
    parts along k, whose readers can add them up."""
    compiled, parts, batch = step_of(model, context), list(given.values()), len(given["x"])
    by_columns = as_linear(given)

    def call(lowering: Any, parts: list[torch.Tensor] = by_columns) -> torch.Tensor:
        return compiled.options(lowering=lowering)(*parts, world=world, b=batch)[0]

    def sum_by_nccl(one: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(one)
        return one

    def sum_by_weft(one: torch.Tensor) -> torch.Tensor:
        return weft.ops.all_reduce(one, world=world)

    fused = FusedTorch(model, context, given)
    found = {
        "torch, nccl": lambda: by_torch(model, context, given, sum_by_nccl),
        "torch, weft all_reduce": lambda: by_torch(model, context, given, sum_by_weft),
        "fused torch, one-shot": fused.one_shot,
        "fused torch, nccl": lambda: fused.by(sum_by_nccl),
        "fused torch, weft all_reduce": lambda: fused.by(sum_by_weft),
        "persistent": lambda: call("persistent"),
        "persistent, whole keys": lambda: call(weft.megakernel.Persistent(splits=1)),
        "persistent, weights as [k, n]": lambda: call("persistent", parts),
    }
    return found | {
        f"persistent, split_k={n}": partial(call, weft.megakernel.Persistent(split_k=n))
        for n in splits_k
    }


def error_of(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.float() - wanted.float()).norm() / wanted.float().norm())


def measure(world: Any, ways: dict[str, Callable], rounds: int) -> dict[str, Any]:
    """us of each way, or why there is none. Answers of all are compared with the first's."""
    wanted, recorded, found = None, {}, {}
    generated = [call for name, call in ways.items() if name.startswith("persistent")]
    compile_together(world, lambda: [call() for call in generated])
    for name, call in ways.items():
        try:
            got = call().clone()
            world.synchronize()
            wanted = got if wanted is None else wanted
            worst: list[Any] = [None] * world.num_ranks
            dist.all_gather_object(worst, error_of(got, wanted))
            if not max(worst) < 0.03:
                raise AssertionError(f"answers differ by {max(worst):.3f}")
            with world.record() as recording:
                call()
            recorded[name] = recording
        except Exception as error:  # Triton's and torch's have no base in common
            found[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    times: dict[str, list[float]] = {name: [] for name in recorded}
    for turn_ in range(rounds + 2):
        for name, recording in recorded.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            dist.barrier()
            torch.cuda._sleep(1_000_000)
            begin.record()
            for _ in range(10):
                recording.replay()
            end.record()
            end.synchronize()
            if turn_ >= 2:
                times[name].append(begin.elapsed_time(end) * 100)
    everyone: list[Any] = [None] * world.num_ranks
    dist.all_gather_object(everyone, times)
    for name in times:
        slowest = [max(of) for of in zip(*(one[name] for one in everyone), strict=True)]
        found[name] = round(statistics.median(slowest), 2)
    return found


def write_trace(
    world: Any, model: Model, context: int, batch: int, split_k: int, path: str
) -> None:
    """What tasks of the persistent kernel did when, for Perfetto, and a line for each value."""
    given = inputs(model, context, batch, world.rank, world.num_ranks, world.device)
    compiled, how = step_of(model, context), weft.megakernel.Persistent(split_k=split_k)
    parts = as_linear(given)

    def call() -> None:
        compiled.options(lowering=how)(*parts, world=world, b=batch)

    compile_together(world, call)
    for _ in range(3):
        call()
    clocks = offsets(world)
    world.trace.zero_()
    world.barrier()
    call()
    world.synchronize()
    names = how.task_names(compiled.tiled, {"b": batch}, world=world)
    everyone: list[Any] = [None] * world.num_ranks
    dist.all_gather_object(everyone, (world.trace.tolist()[: len(names)], names))
    if world.rank:
        return
    tiles = [
        one for rank, (records, names) in enumerate(everyone)
        for one in tile_times.read(records, rank, clocks[rank].ns, names)
    ]  # fmt: skip
    chart.write(path, chart.chart_of(traced.spans_of(tiles), ()), "a decode step", [])
    begin, values = min(one.start for one in tiles), dict[str, list[Any]]()
    for one in tiles:
        values.setdefault(one.what.split("[")[0], []).append(one)
    print(f"{'value':24}{'tasks':>6}{'first':>8}{'last':>8}{'wait':>8}{'work':>8}   us")
    for name, of in values.items():
        us = (
            min(one.start for one in of) - begin, max(one.end for one in of) - begin,
            statistics.median(one.waited for one in of),
            statistics.median(one.parts[0].summed - one.parts[0].begun for one in of),
        )  # fmt: skip
        print(f"{name:24}{len(of):6}" + "".join(f"{one / 1e3:8.1f}" for one in us), flush=True)


def memory_gbps(gpu: str) -> float:
    """By the data sheet; of a GPU that is not known the H200's."""
    found = (one for name, one in PUBLIC.items() if name.partition("x")[0] in gpu.lower())
    return next(found, MEASURED).memory_gbps


def main(rank: int, options: argparse.Namespace) -> None:
    world = weft.init(trace_tiles=1 << 14 if options.trace else 0)
    n, splits_k = world.num_ranks, [int(one) for one in options.split_k.split(",") if one]
    if options.trace:  # of the first model and batch; times with a trace are of nothing else
        model, batch = options.models.split(",")[0], int(options.batch.split(",")[0])
        write_trace(world, MODELS[model], options.context, batch, [*splits_k, 1][0], options.trace)
        return
    results: dict[str, Any] = provenance() if rank == 0 else {}
    results |= {"what": __doc__.splitlines()[0], "num_ranks": n, "layers": LAYERS, "rows": []}
    results["hbm_gbps"] = hbm_gbps = memory_gbps(torch.cuda.get_device_name())
    for name in options.models.split(","):
        for batch in map(int, options.batch.split(",")):
            given = inputs(MODELS[name], options.context, batch, rank, n, world.device)
            ways = ways_of(world, MODELS[name], options.context, given, splits_k)
            read = sum(one.nbytes for one in given.values())
            row = {"model": name, "batch": batch, "context": options.context,
                   "weights_us": round(read / hbm_gbps / 1e3, 1),
                   "us": measure(world, ways, options.rounds)}  # fmt: skip
            if rank == 0:
                results["rows"].append(row)
                save("decode_step", results, n, RESULTS)
                print(row, flush=True)
            del given, ways
            torch.cuda.empty_cache()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--models", default="llama3-8b,qwen3-32b,llama3-70b")
    parser.add_argument("--batch", default="1,16,64")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument(
        "--split-k", default="", help="also with products in so many parts, 1,2,4; a trace with one"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--timeout", type=float, default=300.0)
    parser.add_argument("--trace", metavar="FILE", help="write the persistent kernel's tasks there")
    options = parser.parse_args()
    processes.run_on_gpus(main, options.ranks, options, timeout_s=options.timeout)
