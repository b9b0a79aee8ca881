"""Every way of an operator that multiplies, recorded, beside what the cost model predicts of it.

    PYTHONPATH=src python benchmarks/ways.py [--ranks 2] [--ops ag_gemm,gemm_rs] [--m 64,512]

Ways are the operator's candidates. A recording has as many calls as there are sets of weights,
which are several times the L2, and is replayed ten times in a row: times are what a call adds to
a model's recording, of the slowest rank, median over rounds in which ways take turns. Answers are
compared with the first way's. `mm` is cuBLAS's product alone. `chosen` is taken unmeasured, eager
and recorded. Ways that cannot be recorded are left out. Writes results/unfused_<gpus>.json.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from decode_step import measure

import weft
from weft.base.parts import part_of
from weft.tune import processes
from weft.tune.compiling import compile_together
from weft.tune.presets import LAYERS
from weft.tune.provenance import provenance, save

RESULTS = Path(__file__).parent / "results"
HEAP_BYTES = 6 << 30
# Weights rotate through so many bytes.
ROTATED_BYTES = 200e6


def name_of(config: Any) -> str:
    """A configuration's fields that tell candidates apart."""
    if not config.is_fused:
        return config.transport
    words = [config.transport, config.template, f"{config.tile_m}x{config.tile_n}"]
    words += [f"{name}={getattr(config, name)}" for name in ("chunks", "first_wave", "pushers")]
    return " ".join([*words, "by TMA"] if config.by_tma else words)


class Subject:
    """One operator at one size on one rank."""

    def __init__(self, world: Any, op: str, m: int, n: int, k: int) -> None:
        module = importlib.import_module(f"weft.ops.{op}")
        self.world, self.call, self.card = world, getattr(module, op), module.op
        # The operator's sizes, of which a gather cannot guess m where ranks differ in rows.
        gathers = op == "ag_gemm"
        first, end = part_of(m, world.rank, world.num_ranks) if gathers else (0, m)
        self.given = {"m": m} if gathers else {}
        sets = range(max(2, min(8, int(ROTATED_BYTES / (n * k * 2)) + 1)))

        def drawn(*shape: int) -> torch.Tensor:
            return (torch.randn(shape, device=world.device) * k**-0.5).bfloat16()

        self.a = [drawn(end - first, k) for _ in sets]
        self.b = [drawn(n, k).t() for _ in sets]
        self.whole = drawn(m, k) if gathers else None
        self.problem = module.problem_of(world, self.a[0], self.b[0], **self.given)

    def each(self, call: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable:
        """`call` on all sets; the last result."""

        def calls() -> torch.Tensor:
            for a, b in zip(self.a, self.b, strict=True):
                result = call(a, b)
            return result

        return calls

    def ways(self) -> dict[str, Any]:
        target, card = self.world.target, self.card
        recorded = [one for one in card.candidates(self.problem, target)
                    if card.name == "ag_gemm" or one.transport != "ce_push"]  # fmt: skip
        return {name_of(one): one for one in recorded}

    def read(self, rounds: int) -> dict[str, Any]:
        """us of a call by each way, and of the product alone."""
        ways = {
            name: self.each(
                lambda a, b, one=one: self.call(a, b, world=self.world, config=one, **self.given)
            )
            for name, one in self.ways().items()
        }
        compile_together(self.world, lambda: [call() for call in ways.values()])
        us = measure(self.world, ways, rounds)
        # Its answer is another: one rank's, or of other rows.
        alone = self.each(lambda a, b: torch.mm(a if self.whole is None else self.whole, b))
        us |= measure(self.world, {"mm": alone}, rounds)
        return {name: one if isinstance(one, str) else round(one / len(self.a), 2)
                for name, one in us.items()}  # fmt: skip

    def about(self) -> dict[str, Any]:
        card, target, problem = self.card, self.world.target, self.problem
        predict = card.predict or (lambda *_: None)
        return {
            "predicted": {name: predict(problem, target, one) for name, one in self.ways().items()},
            "chosen": [name_of(card.choose(problem, target, is_recorded))
                       for is_recorded in (False, True)],
        }  # fmt: skip


def main(rank: int, options: argparse.Namespace) -> None:
    world = weft.init(heap_bytes=HEAP_BYTES)
    results: dict[str, Any] = {"what": __doc__.splitlines()[0]}
    results |= {**(provenance() if rank == 0 else {}), "rows": []}
    layers = [one for one in options.layers.split(",") if one]
    for op in options.ops.split(","):
        for m in map(int, options.m.split(",")):
            for layer, (n, k) in LAYERS[op].items():
                if layers and not any(one in layer for one in layers):
                    continue
                torch.manual_seed(rank)
                subject = Subject(world, op, m, n, k)
                row = {"op": op, "m": m, "layer": layer, "n": n, "k": k,
                       "us": subject.read(options.rounds), **subject.about()}  # fmt: skip
                if rank == 0:
                    results["rows"].append(row)
                    save("unfused", results, world.num_ranks, RESULTS)
                    print(row, flush=True)
                del subject
                torch.cuda.empty_cache()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--ops", default="ag_gemm,gemm_rs,gemm_ar")
    parser.add_argument("--m", default="64,128,256,512,1024")
    parser.add_argument("--layers", default="8b,70b,32b", help="parts of their names")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--timeout", type=float, default=540.0)
    options = parser.parse_args()
    processes.run_on_gpus(main, options.ranks, options, timeout_s=options.timeout)
