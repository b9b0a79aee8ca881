"""The GEMM template for Hopper beside cuBLAS, shape by shape; and what its hooks cost.

    PYTHONPATH=src python benchmarks/gemm.py [--m 2048,4096] [--variants wide8+turns16] [--rounds 9]
        [--dtype float8_e4m3fn]

Writes results/gemm_template_<gpu>.json. One process for each GPU, each with its share of the rows;
variants take turns, calls are queued, inputs rotate beyond L2, answers are checked before they are
timed. B lies as [n, k]. Of fp8, rows and columns have scales, and cuBLAS is torch._scaled_mm: it
adds up in full width as the template does, `cublas_fast` in 14 bits. Times are medians over rounds,
microseconds of a call.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import weft.language as wl
from weft.base.dtypes import tolerance
from weft.tiles import descriptors_sm90, gemm, gemm_sm90, swizzle, tile_scheduler
from weft.tiles.blocking import Blocking
from weft.tune.figures import percentile
from weft.tune.provenance import clocks, provenance, save

RESULTS = Path(__file__).parent / "results"
# n, k of one rank at TP4: what follows a gather, then what a scatter follows.
LAYERS = {
    "llama3-8b mlp": (7168, 4096),
    "llama3-70b attention": (2560, 8192),
    "llama3-70b mlp": (14336, 8192),
    "qwen3-32b mlp": (12800, 5120),
    "llama3-405b mlp": (26624, 16384),
    "llama3-8b mlp, down": (4096, 3584),
    "llama3-70b attention, out": (8192, 2048),
    "llama3-70b mlp, down": (8192, 7168),
    "qwen3-32b mlp, down": (5120, 6400),
    "llama3-405b mlp, down": (16384, 13312),
}
SIZES = (2048, 4096, 8192, 16384)
# Inputs rotate through so many bytes, several times the L2.
ROTATED_BYTES = 400e6
# Calls of one reading, at least two and for about so long.
READING_US = 3000.0


class Variant(NamedTuple):
    """How the template multiplies; `chunk_n`: columns of a chunk, where not the template's own;
    `waits`: `ready` waits for a word that is there; `head`: so many rows of tiles are a round of
    their own, which programs share."""

    blocking: Blocking
    group_m: int
    chunk_n: int | None = None
    waits: bool = False
    per_block: bool = False
    head: int = 0

    @property
    def chunk(self) -> int:
        return self.chunk_n or gemm_sm90.chunk_columns(self.blocking.tile_n)


TALL = Blocking(256, 128, 64, gemm_sm90.NUM_WARPS, 4)
VARIANTS = {
    "wide8": Variant(gemm_sm90.WIDE, 8),
    "wide16": Variant(gemm_sm90.WIDE, 16),
    "wider8": Variant(gemm_sm90.WIDER, 8),
    "wider16": Variant(gemm_sm90.WIDER, 16),
    "160": Variant(gemm_sm90.MIDDLE, 8),
    "192": Variant(Blocking(128, 192, 64, gemm_sm90.NUM_WARPS, 4), 8),
    "384": Variant(Blocking(128, 384, 64, gemm_sm90.NUM_WARPS, 3), 8),
    "turns8": Variant(gemm_sm90.TURNS, 8),
    "turns16": Variant(gemm_sm90.TURNS, 16),
    "turns32": Variant(gemm_sm90.TURNS, 32),
    "turns16 in chunks of 32": Variant(
        Blocking(128, 128, 64, gemm_sm90.NUM_WARPS, 6), 16, chunk_n=32
    ),
    "tall8 in chunks of 32": Variant(TALL, 8, chunk_n=32),
    "wide8, waits": Variant(gemm_sm90.WIDE, 8, waits=True),
    "turns16, waits": Variant(gemm_sm90.TURNS, 16, waits=True),
    "wide8, one row early": Variant(gemm_sm90.WIDE, 8, head=1),
    "turns8, one row early": Variant(gemm_sm90.TURNS, 8, head=1),
    "turns8, two rows early": Variant(gemm_sm90.TURNS, 8, head=2),
}
FP8_VARIANTS = {
    "rows8": Variant(gemm_sm90.PROMOTED, 8),
    "rows16": Variant(gemm_sm90.PROMOTED, 16),
    "blocks16": Variant(gemm_sm90.PROMOTED, 16, per_block=True),
}


class Awaited(NamedTuple):
    """Arguments of `ready_after_a_word`."""

    word: Any
    e: Any
    a: Any
    m: Any


@gluon.jit
def ready_after_a_word(at, segment, tile, args):
    """A wait as operators have it, for what is there already. args: Awaited"""
    wl.wait(args.word, args.e)
    return gemm.Rows(source=args.a, first=at.i_m * tile.m, end=args.m)


@gluon.jit(do_not_specialize=["e"])
def multiply(a, b, c, scale_a, scale_b, partials, summed, e, shape, early, first_wave,
             tile_m: gl.constexpr, tile_n: gl.constexpr, tile_k: gl.constexpr, stages: gl.constexpr,
             chunk_n: gl.constexpr, group_m: gl.constexpr, waits: gl.constexpr,
             is_scaled: gl.constexpr, per_block: gl.constexpr):  # fmt: skip
    order: gl.constexpr = swizzle.grouped
    ready: gl.constexpr = ready_after_a_word if waits else gemm.ready_always
    emit: gl.constexpr = gemm_sm90.emit_store
    scales: gl.constexpr = gemm.scales_of if is_scaled else None
    if waits:
        ready_args = Awaited(summed + 4 * gl.num_programs(0), e, a, shape.m)
    else:
        ready_args = gemm.Always(a, shape.m)
    # Scales of rows lie one behind the other, those of blocks as torch wants them.
    block: gl.constexpr = gemm.BLOCK_K if per_block else 1
    num_k = shape.k // gemm.BLOCK_K
    scales_args = gemm.Scaled(
        scale_a, scale_b, shape, 1, shape.m, num_k if per_block else 1, 1, block
    )
    gemm_sm90.gemm(
        a, b, c, shape, gl.cdiv(shape.m, tile_m), gl.program_id(0), gl.num_programs(0),
        gemm_sm90.Shared(partials, summed, e, None),
        tile_m, tile_n, tile_k, stages, chunk_n, True,
        order, (group_m,), ready, ready_args, emit, gemm_sm90.Stored(c),
        scales=scales, scales_args=scales_args, per_block=per_block, early=early,
        first_wave=first_wave,
    )  # fmt: skip


class Bench:
    """All variants of one shape on this process's GPU."""

    def __init__(self, m: int, n: int, k: int, dtype: torch.dtype) -> None:
        self.m, self.n, self.k, self.dtype = m, n, k, dtype
        self.is_fp8 = dtype.itemsize == 1
        self.out_dtype = torch.bfloat16 if self.is_fp8 else dtype
        # One for each row and column; as many serve as those of blocks.
        self.scale_a = torch.rand(m * max(1, k // 128), device="cuda") + 0.5
        self.scale_b = torch.rand(n * max(1, k // 128), device="cuda") + 0.5
        self.programs = torch.cuda.get_device_properties(0).multi_processor_count
        one = (m * k + n * k + m * n) * dtype.itemsize
        self.sets = [self._inputs() for _ in range(max(2, min(8, int(ROTATED_BYTES / one) + 1)))]
        shares = (self.programs, tile_scheduler.MAX_PARTS.value)
        elements = tile_scheduler.partial_elements(128, 384, *shares)
        self.partials = torch.empty(elements, device="cuda")
        words = tile_scheduler.partial_flags(*shares)
        self.summed = torch.zeros(words + 1, device="cuda", dtype=torch.int64)
        self.summed[-1] = 1 << 40
        self.e = 0

    def _inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        a = torch.randn(self.m, self.k, device="cuda").to(self.dtype)
        b = torch.randn(self.n, self.k, device="cuda").to(self.dtype)
        return a, b, torch.empty(self.m, self.n, device="cuda", dtype=self.out_dtype)

    def cublas(self) -> Callable[[int], None]:
        def call(i: int) -> None:
            a, b, c = self.sets[i % len(self.sets)]
            torch.matmul(a, b.t(), out=c)

        return call

    def scaled_mm(self, is_fast: bool) -> Callable[[int], None]:
        scale_a, scale_b = self.scale_a[: self.m, None], self.scale_b[None, : self.n]

        def call(i: int) -> None:
            a, b, c = self.sets[i % len(self.sets)]
            torch._scaled_mm(
                a, b.t(), scale_a, scale_b, out_dtype=c.dtype, use_fast_accum=is_fast, out=c
            )

        return call

    def template(self, variant: Variant) -> Callable[[int], None]:
        cut = variant.blocking
        rows = gemm_sm90.chunk_rows(cut.tile_m, cut.tile_n, self.dtype.itemsize)
        chunk = (rows, variant.chunk)
        descriptors = [
            (
                descriptors_sm90.descriptor(a, (cut.tile_m, cut.tile_k)),
                descriptors_sm90.descriptor(b, (gemm_sm90.block_columns(cut.tile_n), cut.tile_k)),
                descriptors_sm90.descriptor(c, chunk),
            )
            for a, b, c in self.sets
        ]
        shape = gemm.Shape(self.m, self.n, self.k, self.k, self.k, self.n)
        early = variant.head * -(-self.n // cut.tile_n)
        num_k = -(-self.k // cut.tile_k)
        parts = tile_scheduler.first_wave_of(early, num_k, self.programs)

        def call(i: int) -> None:
            self.e += 1
            multiply[(self.programs,)](
                *descriptors[i % len(self.sets)], self.scale_a, self.scale_b, self.partials,
                self.summed, self.e, shape, early, parts, cut.tile_m, cut.tile_n, cut.tile_k,
                cut.num_stages, variant.chunk, variant.group_m, variant.waits, self.is_fp8,
                variant.per_block, num_warps=cut.num_warps,
            )  # fmt: skip

        return call

    def error(self, call: Callable[[int], None], per_block: bool = False) -> float:
        """Of some rows of the result, against a product in fp32."""
        a, b, c = self.sets[0]
        c.fill_(float("nan"))
        call(0)
        rows = torch.arange(0, self.m, max(1, self.m // 256), device="cuda")
        left, right = a[rows].float(), b.float()
        if self.is_fp8 and per_block:
            blocks = self.k // 128
            of_a = self.scale_a.view(blocks, self.m)[:, rows].t().repeat_interleave(128, 1)
            of_b = self.scale_b.view(-1, blocks)[: -(-self.n // 128)].repeat_interleave(128, 0)
            left, right = left * of_a, right * of_b[: self.n].repeat_interleave(128, 1)
        elif self.is_fp8:
            left, right = left * self.scale_a[rows, None], right * self.scale_b[: self.n, None]
        expected = left @ right.t()
        return ((c[rows].float() - expected).norm() / expected.norm()).item()

    def read(self, names: list[str], rounds: int) -> dict[str, list[float]]:
        """Times of each variant in each round, in turns; only of those with right answers."""
        calls = {"cublas": self.scaled_mm(False) if self.is_fp8 else self.cublas()}
        if self.is_fp8:
            calls["cublas_fast"] = self.scaled_mm(True)
        for name in names:
            variant = (FP8_VARIANTS if self.is_fp8 else VARIANTS)[name]
            call = self.template(variant)
            error = self.error(call, variant.per_block)
            if error <= tolerance(str(self.out_dtype), self.k):
                calls[name] = call
            else:
                print(f"WRONG {name} {self.m, self.n, self.k}: error {error:.2e}", flush=True)
        times: dict[str, list[float]] = {name: [] for name in calls}
        guess_us = 2 * self.m * self.n * self.k / 7e8
        repeats = max(2, min(8, int(READING_US / guess_us)))
        for turn in range(rounds + 1):
            for name, call in calls.items():
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda._sleep(1_000_000)
                begin.record()
                for i in range(repeats):
                    call(i)
                end.record()
                end.synchronize()
                if turn:
                    times[name].append(begin.elapsed_time(end) / repeats * 1e3)
        return times


def rows(sizes: list[int], names: list[str], rounds: int, dtype: str) -> Iterator[dict[str, Any]]:
    """This process's share of the rows: longest first, dealt out to the GPUs."""
    me, of = int(os.environ.get("GEMM_SHARE", "0")), int(os.environ.get("GEMM_SHARES", "1"))
    everything = [(m, layer) for m in sizes for layer in LAYERS]
    everything.sort(key=lambda one: -one[0] * math.prod(LAYERS[one[1]]))
    for m, layer in everything[me::of]:
        torch.manual_seed(0)
        n, k = LAYERS[layer]
        times = Bench(m, n, k, getattr(torch, dtype)).read(names, rounds)
        median = {name: percentile(found, 0.5) for name, found in times.items()}
        yield {
            "m": m, "layer": layer, "n": n, "k": k, "dtype": dtype,
            "tflops": round(2 * m * n * k / median["cublas"] / 1e6, 1),
            "us": {name: round(us, 2) for name, us in median.items()},
            "p10": {name: round(percentile(found, 0.1), 2) for name, found in times.items()},
            "p90": {name: round(percentile(found, 0.9), 2) for name, found in times.items()},
            "clocks": clocks()[:1],
        }  # fmt: skip


def share_out(arguments: list[str], gpus: int) -> list[dict[str, Any]]:
    """Run this script once on each GPU; all their rows."""
    found, running = [], []
    for share in range(gpus):
        out = tempfile.NamedTemporaryFile("w+", suffix=".jsonl", delete=False)
        variables = {"CUDA_VISIBLE_DEVICES": str(share), "GEMM_SHARE": str(share),
                     "GEMM_SHARES": str(gpus), "GEMM_ROWS": out.name}  # fmt: skip
        command = [sys.executable, __file__, *arguments]
        running.append((subprocess.Popen(command, env=os.environ | variables), out))
    for process, out in running:
        process.wait()
        found += [json.loads(line) for line in out.read().splitlines()]
    return sorted(found, key=lambda row: (row["dtype"], row["m"], list(LAYERS).index(row["layer"])))


def summary(found: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """cuBLAS's time over each variant's: geometric mean and worst; `best` takes each row's best."""
    ratios: dict[str, list[float]] = {}
    for row in found:
        us = dict(row["us"])
        cublas = us.pop("cublas")
        for name, time in us.items():
            ratios.setdefault(name, []).append(cublas / time)
        plain = [us[name] for name in us if "waits" not in name and "cublas" not in name]
        ratios.setdefault("best", []).append(cublas / min(plain))
    return {
        name: {
            "geomean": round(math.exp(sum(map(math.log, one)) / len(one)), 4),
            "worst": round(min(one), 4),
        }
        for name, one in ratios.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--m", default=",".join(map(str, SIZES)))
    parser.add_argument("--variants", default="all")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dtype", default="bfloat16")
    chosen = parser.parse_args()
    known = FP8_VARIANTS if "float8" in chosen.dtype else VARIANTS
    names = list(known) if chosen.variants == "all" else chosen.variants.split("+")
    if path := os.environ.get("GEMM_ROWS"):
        sizes = [int(m) for m in chosen.m.split(",")]
        for row in rows(sizes, names, chosen.rounds, chosen.dtype):
            us = row["us"]
            told = " ".join(f"{name} {us['cublas'] / us[name]:.3f}" for name in us)
            print(row["m"], row["layer"], f"{us['cublas']:.0f} us:", told, flush=True)
            with open(path, "a") as file:
                file.write(json.dumps(row) + "\n")
        return
    gpus = torch.cuda.device_count()
    found = share_out(sys.argv[1:], gpus)
    document = {"what": __doc__.splitlines()[0], **provenance(), "rows": found}
    document["summary"] = summary(found)
    for name, figures in document["summary"].items():
        print(f"{name}: {figures}")
    print(save("gemm_template", document, 1, RESULTS))


if __name__ == "__main__":
    main()
