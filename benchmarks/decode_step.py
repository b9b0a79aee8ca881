"""A decode step of two layers as one kernel, beside torch's kernels and NCCL in one CUDA graph.

    PYTHONPATH=src python benchmarks/decode_step.py [--ranks 4] [--models llama3-8b] [--batch 1,16]

Each row of the batch is a sequence of --context tokens, the new one counted; heads and columns are
split over the ranks. Answers are checked against torch's before anything is timed. All ways are
recorded; replays in turns; the slowest rank's median over rounds. `weights_us` is how long reading
the weights and caches of a rank takes at 4.8 TB/s. Writes results/decode_step_<gpus>.json.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

import weft
import weft.megakernel
import weft.ops
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
from weft.megakernel import Persistent
from weft.tune import processes
from weft.tune.compiling import compile_together
from weft.tune.provenance import provenance, save

RESULTS = Path(__file__).parent / "results"
LAYERS, EPS, DTYPE = 2, 1e-6, "bfloat16"
HBM_GBPS = 4800.0
PERSISTENT = (
    ("balanced", "one_shot"), ("dynamic", "one_shot"), ("round_robin", "one_shot"),
    ("balanced", "two_shot"),
)  # fmt: skip


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


def ways_of(world: Any, model: Model, context: int, given: dict[str, torch.Tensor]) -> dict:
    """Each way of doing the step, as a call."""
    compiled, parts, batch = step_of(model, context), list(given.values()), len(given["x"])

    def call(lowering: Any) -> torch.Tensor:
        return compiled.options(lowering=lowering)(*parts, world=world, b=batch)[0]

    def sum_by_nccl(one: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(one)
        return one

    def sum_by_weft(one: torch.Tensor) -> torch.Tensor:
        return weft.ops.all_reduce(one, world=world)

    found = {
        "torch, nccl": lambda: by_torch(model, context, given, sum_by_nccl),
        "torch, weft all_reduce": lambda: by_torch(model, context, given, sum_by_weft),
        "overlapped": lambda: call("overlapped"),
    }
    for schedule, sums in PERSISTENT:
        how = Persistent(schedule=schedule, sums=sums)
        found[f"persistent {schedule} {sums}"] = lambda how=how: call(how)
    return found


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


def main(rank: int, options: argparse.Namespace) -> None:
    world = weft.init()
    n = world.num_ranks
    results: dict[str, Any] = provenance() if rank == 0 else {}
    results |= {"what": __doc__.splitlines()[0], "num_ranks": n, "layers": LAYERS, "rows": []}
    for name in options.models.split(","):
        for batch in map(int, options.batch.split(",")):
            given = inputs(MODELS[name], options.context, batch, rank, n, world.device)
            ways = ways_of(world, MODELS[name], options.context, given)
            read = sum(one.nbytes for one in given.values())
            row = {"model": name, "batch": batch, "context": options.context,
                   "weights_us": round(read / HBM_GBPS / 1e3, 1),
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
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--timeout", type=float, default=300.0)
    options = parser.parse_args()
    processes.run_on_gpus(main, options.ranks, options, timeout_s=options.timeout)
