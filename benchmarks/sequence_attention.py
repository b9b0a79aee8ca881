"""Causal attention of one long sequence over the ranks: by gathered keys, ring and Ulysses.

    PYTHONPATH=src python benchmarks/sequence_attention.py [--ranks 2] [--tokens 16384,32768,65536]
        [--modes forward,both] [--heads 32,8,128]

--tokens are of all ranks, each of which has its own and ends with their attention; in mode `both`
with their gradients too. Answers are checked before anything is timed, against torch's attention of
all tokens. Calls are queued behind a sleep, ways in turns; the slowest rank's median over rounds,
the least and the most. Writes results/sequence_attention_<gpus>.json, with the bytes that a way
allocates at once, beside its inputs; weft's heap, whose slots stay, is not in them.

"weft, ..": ag_attention, ring_attention and ulysses_attention as they are called.
"NCCL, gather, ..": keys and values by one all-gather, then the library's kernel for each rank's,
zigzag, merged by one kernel of weft's; back one reduce-scatter of gradients, in bf16.
"NCCL, Ulysses, ..": all_to_all_single there and back, and the library's kernel between.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import weft
from weft.layers import ring_attention, ulysses_attention
from weft.ops import ag_attention
from weft.plan import attention_by_library as by_library
from weft.plan.sequence_shards import Shards, shards_of
from weft.tune import processes
from weft.tune.compiling import compile_together
from weft.tune.provenance import provenance, save

RESULTS = Path(__file__).parent / "results"
HEAP_BYTES = 6 << 30
WORST = 0.02
MODES = ("forward", "both")
SDPA = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FlashAttention-2": SDPBackend.FLASH_ATTENTION}
LIBRARIES = {"cuDNN": by_library.CuDNN, "FlashAttention-2": by_library.Flash}

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Way(NamedTuple):
    """`attend` makes own tokens' attention of their q, k and v, which lie `zigzag` or in order."""

    name: str
    zigzag: bool
    attend: Attend


class Subject(NamedTuple):
    """All tokens' q, k, v and gradient of the result; (out, dq, dk, dv) of all."""

    given: list[torch.Tensor]
    wanted: list[torch.Tensor]


def subject_of(tokens: int, heads: tuple[int, int, int], device: Any, dtype: Any) -> Subject:
    """Alike on all ranks."""
    q_heads, kv_heads, d = heads
    drawn = torch.Generator(device).manual_seed(tokens)
    given = [
        torch.randn(tokens, n, d, generator=drawn, device=device, dtype=dtype)
        for n in (q_heads, kv_heads, kv_heads, q_heads)
    ]
    leaves = [one.clone().requires_grad_() for one in given[:3]]
    out = functional.scaled_dot_product_attention(
        *(one.transpose(0, 1)[None] for one in leaves), is_causal=True, enable_gqa=True
    )
    out = out[0].transpose(0, 1)
    out.backward(given[3])
    return Subject(given, [out.detach(), *(one.grad for one in leaves)])  # pyright: ignore


# ---------------------------------------------------------------------------------------------
# By NCCL


class _Gathered(torch.autograd.Function):
    """Keys and values of all ranks, then a kernel of `library` for each rank's."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, shards: Shards, library: Any) -> torch.Tensor:
        ctx.shards, ctx.library = shards, library
        n, rank = dist.get_world_size(), dist.get_rank()
        own = torch.stack((k, v))
        whole = own.new_empty(n, *own.shape)
        dist.all_gather_into_tensor(whole.flatten(0, 1), own)
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
        mean, blocks = torch.empty_like(q, dtype=torch.float32), _blocks(q, k, shards, library)
        for step in range(n):
            source = (rank - step) % n
            blocks.see(source)
            is_first, is_last = step == 0, step == n - 1
            blocks.attend(*whole[source], mean, lse, out, is_first=is_first, is_last=is_last)
        ctx.save_for_backward(q, whole, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple:  # pyright: ignore
        q, whole, out, lse = ctx.saved_tensors
        n, rank = dist.get_world_size(), dist.get_rank()
        blocks = _blocks(q, whole[0, 0], ctx.shards, ctx.library)
        dq = torch.empty_like(q, dtype=torch.float32)
        found = torch.zeros_like(whole, dtype=torch.float32)
        for step in range(n):
            source = (rank - step) % n
            blocks.see(source)
            given = blocks.given(*whole[source], out, dout.contiguous(), lse)
            blocks.queries(given, dq, adds=step > 0)
            blocks.keys(given, *found[source], adds=False)
        own = torch.empty_like(whole[0])
        dist.reduce_scatter_tensor(own, found.to(whole.dtype).flatten(0, 1))
        return dq.to(q.dtype), *own, None, None


def _blocks(q: torch.Tensor, k: torch.Tensor, shards: Shards, library: Any) -> Any:
    blocks = by_library.LibraryAttention(
        q, k.shape[1], shards, rank=dist.get_rank(), causal=True, scale=None, target=None
    )
    if q.is_cuda:
        blocks.library = library
    return blocks


class _Exchanged(torch.autograd.Function):
    """Part d of x to rank d; back the same way."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        got = torch.empty_like(x)
        dist.all_to_all_single(got, x)
        return got

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # pyright: ignore
        return _Exchanged.apply(gradient)


def by_ulysses(kernel: Any, q: Any, k: Any, v: Any) -> torch.Tensor:
    n, (tokens, heads, d) = dist.get_world_size(), q.shape
    parts = [one.unflatten(1, (n, -1)).transpose(0, 1) for one in (q, k, v)]
    got = _Exchanged.apply(torch.cat(parts, 2)).flatten(0, 1)  # [all tokens, own heads, d]
    counts = [one.shape[1] // n for one in (q, k, v)]
    own = [one.transpose(0, 1)[None] for one in got.split(counts, 1)]
    with sdpa_kernel([kernel]):
        made = functional.scaled_dot_product_attention(*own, is_causal=True, enable_gqa=True)
    made = made[0].transpose(0, 1).unflatten(0, (n, tokens))
    back = _Exchanged.apply(made.contiguous())
    return back.transpose(0, 1).reshape(tokens, heads, d)


def ways_of(world: Any, tokens: int, with_kernels: bool = True) -> list[Way]:
    zigzag = shards_of(tokens, world.num_ranks, True, None, world.device)
    ring = partial(ring_attention, world=world, m=tokens)
    gather = partial(ag_attention, world=world, m=tokens)
    ways = [
        Way("weft, ag_attention in order", False, gather),
        Way("weft, ag_attention zigzag", True, partial(gather, zigzag=True)),
        Way("weft, ring in order", False, ring),
        Way("weft, ring zigzag", True, partial(ring, zigzag=True)),
        Way("weft, ring zigzag, library", True, partial(ring, zigzag=True, local="library")),
        Way("weft, Ulysses", False, partial(ulysses_attention, world=world, causal=True)),
    ]
    for name, library in LIBRARIES.items():

        def attend(q: Any, k: Any, v: Any, library: Any = library) -> torch.Tensor:
            return _Gathered.apply(q, k, v, zigzag, library)

        kernel = SDPA[name] if with_kernels else SDPBackend.MATH
        ways += [Way(f"NCCL, gather, {name}", True, attend),
                 Way(f"NCCL, Ulysses, {name}", False, partial(by_ulysses, kernel))]  # fmt: skip
    return ways


# ---------------------------------------------------------------------------------------------
# Measured


def call_of(way: Way, mode: str, own: list[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
    *leaves, slope = own

    def forward() -> list[torch.Tensor]:
        with torch.no_grad():
            return [way.attend(*leaves)]

    def both() -> list[torch.Tensor]:
        taken = [one.detach().requires_grad_() for one in leaves]
        out = way.attend(*taken)
        return [out.detach(), *torch.autograd.grad(out, taken, slope)]

    return forward if mode == "forward" else both


def worst_of(world: Any, got: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """The relative error of the rank and the tensor that has the largest."""
    mine = max(
        ((one.float() - other.float()).norm() / other.float().norm()).item()
        for one, other in zip(got, wanted, strict=False)
    )
    everyone: list[Any] = [None] * world.num_ranks
    dist.all_gather_object(everyone, mine)
    return max(float("inf") if one != one else one for one in everyone)


def timed(call: Callable[[], Any], count: int) -> float:
    """us of one of `count` calls that the host queues while the device sleeps."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    dist.barrier()
    torch.cuda._sleep(20_000_000)
    begin.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / count


def checked(
    world: Any, ways: list[Way], mode: str, subject: Subject
) -> tuple[dict[str, Callable], dict[str, str], dict[str, float]]:
    """(calls whose answers are right, what is wrong with others, MB that calls hold at once)"""
    calls, failed, peak = {}, {}, {}
    is_cuda, tokens, n = world.device.type == "cuda", len(subject.given[0]), world.num_ranks
    lie = [shards_of(tokens, n, zigzag, None, world.device) for zigzag in (False, True)]
    places = [one.positions(world.rank)[0] for one in lie]
    made = [call_of(one, mode, [x[places[one.zigzag]] for x in subject.given]) for one in ways]
    ours = [call for one, call in zip(ways, made, strict=True) if one.name.startswith("weft")]
    compile_together(world, lambda: [call() for call in ours])
    for way, call in zip(ways, made, strict=True):
        place = places[way.zigzag]
        try:
            call()
            world.synchronize()
            if is_cuda:
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
            got = call()
            world.synchronize()
            if is_cuda:
                peak[way.name] = round((torch.cuda.max_memory_allocated() - before) / 1e6, 1)
            worst = worst_of(world, got, [one[place] for one in subject.wanted])
            if not worst < WORST:
                raise AssertionError(f"answers are wrong by {worst:.3f}")
            calls[way.name] = call
        except Exception as error:  # torch's and weft's have no base in common
            failed[way.name] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return calls, failed, peak


def measure(world: Any, calls: dict[str, Callable], rounds: int, least_us: float) -> dict[str, Any]:
    """us: the slowest rank's median, least and most."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    counts = dict.fromkeys(calls, 1)
    for turn in range(rounds + 1):
        for name, call in calls.items():
            us = timed(call, counts[name])
            if turn:
                times[name].append(us)
            else:
                everyone: list[Any] = [None] * world.num_ranks
                dist.all_gather_object(everyone, us)
                counts[name] = max(1, min(20, round(least_us / max(everyone))))
    everyone = [None] * world.num_ranks
    dist.all_gather_object(everyone, times)
    found = {}
    for name in times:
        slowest = sorted(max(of) for of in zip(*(one[name] for one in everyone), strict=True))
        found[name] = [round(x, 1) for x in (statistics.median(slowest), slowest[0], slowest[-1])]
    return found


def main(rank: int, options: argparse.Namespace) -> None:
    world = weft.init(heap_bytes=HEAP_BYTES)
    n, heads = world.num_ranks, tuple(map(int, options.heads.split(",")))
    results: dict[str, Any] = provenance() if rank == 0 else {}
    results |= {"what": __doc__.splitlines()[0], "num_ranks": n, "heads": heads, "rows": []}
    for tokens in map(int, options.tokens.split(",")):
        subject = subject_of(tokens, heads, world.device, torch.bfloat16)  # pyright: ignore
        ways = ways_of(world, tokens)
        for mode in options.modes.split(","):
            begin = time.perf_counter()
            calls, failed, peak = checked(world, ways, mode, subject)
            us = measure(world, calls, options.rounds, options.least_us)
            row = {"tokens": tokens, "mode": mode, "us": us, "peak_mb": peak, "failed": failed}
            if rank == 0:
                results["rows"].append(row)
                save("sequence_attention", results, n, RESULTS)
                print(f"{tokens} tokens, {mode}: {time.perf_counter() - begin:.0f} s", flush=True)
                for name, one in sorted(us.items(), key=lambda one: one[1]):
                    held = f"{peak.get(name, 0):9.1f} MB"
                    print(f"   {one[0]:10.1f} [{one[1]:.1f}, {one[2]:.1f}] {held}  {name}")
                for name, why in failed.items():
                    print(f"   {name}: {why}", flush=True)
        del subject, ways, calls
        torch.cuda.empty_cache()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--tokens", default="16384,32768,65536", help="of all ranks")
    parser.add_argument("--modes", default=",".join(MODES), help="forward, both with backward")
    parser.add_argument("--heads", default="32,8,128", help="of queries, of keys, their length")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--least-us", type=float, default=20000.0, help="of calls timed together")
    parser.add_argument("--timeout", type=float, default=540.0)
    options = parser.parse_args()
    processes.run_on_gpus(main, options.ranks, options, timeout_s=options.timeout)
