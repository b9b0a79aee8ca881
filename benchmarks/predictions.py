"""What the cost model predicts beside what was read, here and by others, and on up to 4,096 ranks.

    PYTHONPATH=src python benchmarks/predictions.py

Needs no GPU. Readings are those of results/layers_*.json and results/<operator>_h100x2.json, of
which no prediction knows: constants are of four H200s, other machines are scaled by public figures.
Writes results/predictions.json, which benchmarks/render.py draws and puts into docs/scaling.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import weft
from weft.base.fabric import Fabric
from weft.base.machines import find_machine
from weft.base.target import TARGETS
from weft.compiler import (
    Facts,
    Replicate,
    Settings,
    Shard,
    Tensor,
    all_gather,
    attention,
    reduce_scatter,
    rms_norm,
    silu_mul,
)
from weft.compiler.cost import libraries
from weft.compiler.cost.plans import predict
from weft.compiler.cost.products import Product
from weft.ops import card
from weft.tools.check import Work
from weft.tools.simulate import rows
from weft.tune.presets import LAYERS
from weft.tune.provenance import provenance, write_json

RESULTS = Path(__file__).parent / "results"
# As shared benchmarks of layers have them: hidden and inner columns, heads of queries and of keys.
MODELS = {"8b": (4096, 14336, 32, 8), "70b": (8192, 28672, 64, 8)}
HEAD = 128
MACHINES = {"h200x2": "h200x4", "h100x2": "h100x8", "h100x4": "h100x8"}
PRODUCTS = ("ag_gemm", "gemm_rs")
# Of eight H800, m 8192, times as fast as cuBLAS and NCCL: geometric mean, least and most over
# models (Triton-distributed, arXiv 2504.19442); of FLUX (arXiv 2406.06858) as it was read there.
PUBLISHED = {"ag_gemm": (1.43, 1.31, 1.66, 1.31), "gemm_rs": (1.27, 1.06, 1.58, 0.98)}
COUNTS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
MLP = str(Path(__file__).parents[1] / "examples" / "llama_mlp.py") + ":mlp"
BF16 = "bfloat16"


def layer_of(hidden: int, inner: int, heads: int, kv_heads: int) -> Any:
    """A layer of Llama, whose rows are split over the ranks."""
    gain = Tensor(BF16, (1, hidden), Replicate())
    columns, kv = heads * HEAD, kv_heads * HEAD

    @weft.program(
        mesh="tp", x=Tensor(BF16, ("m", hidden), Shard(0)), n1=gain, n2=gain,
        wq=Tensor(BF16, (hidden, columns), Shard(1)), wk=Tensor(BF16, (hidden, kv), Shard(1)),
        wv=Tensor(BF16, (hidden, kv), Shard(1)), wo=Tensor(BF16, (columns, hidden), Shard(0)),
        up=Tensor(BF16, (hidden, 2 * inner), Shard(1)),
        down=Tensor(BF16, (inner, hidden), Shard(0)),
    )  # fmt: skip
    def layer(x, n1, n2, wq, wk, wv, wo, up, down):
        rows = all_gather(rms_norm(x, n1))
        q, k, v = (rows @ one for one in (wq, wk, wv))
        x = reduce_scatter(attention(q, k, v, head=HEAD) @ wo) + x
        return reduce_scatter(silu_mul(all_gather(rms_norm(x, n2)) @ up) @ down) + x

    return layer


def as_read(layer: Any, facts: Facts) -> Any:
    """The plan without launches in parts, which came behind these readings: SMs push there."""
    stages = layer.overlapped(facts)
    parts = {one.name: "sm_push" for one in stages.program.tasks if one.engine == "ce_parts"}
    return layer.options(settings=Settings(engines=parts)).overlapped(facts).plan


def layers() -> Iterator[dict[str, Any]]:
    """Whole layers as CUDA graphs, us: predicted beside read."""
    for gpus, name in MACHINES.items():
        document = json.loads((RESULTS / f"layers_{gpus}.json").read_text())
        machine = find_machine(name)
        target = replace(TARGETS["cuda:90"], machine=machine)
        for row in document["rows"]:
            facts = Facts({"m": row["M"]}, row["ranks"], target, is_recorded=True)
            plan = as_read(layer_of(*MODELS[row["model"]]), facts)
            found = predict(plan, facts.sizes, row["ranks"], machine, facts.nodes)
            yield {
                "gpus": gpus, "commit": document["commit"], "model": row["model"], "m": row["M"],
                "predicted_us": found.end_us, "read_us": row["us_per_layer"]["graph"]["weft"],
            }  # fmt: skip


def products() -> Iterator[dict[str, Any]]:
    """Fused products on 2 x H100, us, by the configuration that was read."""
    target = replace(TARGETS["cuda:90"], machine=find_machine("h100x8"))
    for name in PRODUCTS:
        op, document = card(name), json.loads((RESULTS / f"{name}_h100x2.json").read_text())
        for row in document["rows"]:
            if (row["variant"], row["mode"]) != ("weft", "queued"):
                continue
            words = row["config"].removeprefix("Config(").removesuffix(")")
            config = op.config(**eval(f"dict({words})", {}))
            problem = Work(op, 2, row["shape"], row["dtype"], (2,)).problem()
            us = op.predict(problem, target, config) if config.is_fused else None
            if us is not None:
                yield {
                    "op": name, "commit": document["commit"], "label": row["label"],
                    "m": row["shape"]["m"], "predicted_us": us, "read_us": row["median_us"],
                }  # fmt: skip


def published() -> Iterator[dict[str, Any]]:
    """Times as fast as cuBLAS and NCCL on eight H800, m 8192: predicted of weft, published of
    others."""
    machine = find_machine("h800x8")
    target = replace(TARGETS["cuda:90"], machine=machine)
    for name in PRODUCTS:
        op, ratios = card(name), {}
        gathers = name == "ag_gemm"
        for label, (n, k) in LAYERS[name].items():
            # Sizes are those of a rank of four.
            n, k = (n // 2, k) if gathers else (n, k // 2)
            problem = Work(op, 8, {"m": 8192, "n": n, "k": k}, BF16, (8,)).problem()
            fused = next(one for one in op.candidates(problem, target) if one.is_fused)
            product = Product(8192, n, k, 8, (1, 1, 1), 2)
            kind = "all_gather" if gathers else "reduce_scatter"
            unfused = libraries.unfused_us(product, machine, kind)
            ratios[label] = unfused / op.predict(problem, target, fused)
        mean, least, most, flux = PUBLISHED[name]
        yield {
            "op": name, "ratios": ratios, "mean": geometric_mean(ratios.values()),
            "published": mean, "least": least, "most": most, "flux": flux,
        }  # fmt: skip


def curves() -> Iterator[dict[str, Any]]:
    """The feed-forward part of Llama-3 70B on 8 to 4,096 ranks, in nodes of eight."""
    even, uneven = Fabric(), Fabric(leaf=2, oversubscription=2.0)
    scenes = [
        *((hw, even, "") for hw in ("h100x8", "h200x8", "b200x8", "mi300x8")),
        ("h200x8", uneven, "oversubscribed twice"), ("h200x8", Fabric(slow=1.2), "slow ranks"),
    ]  # fmt: skip
    for hw, fabric, what in scenes:
        for grow in ("", "m"):
            shape = f"m={8192 if grow else 65536}"
            counts = [one for one in COUNTS if not what or one <= 512]
            for row in rows(MLP, counts, 8, shape, grow, "cuda:90", hw, fabric):
                yield {
                    "hw": hw, "what": what, "grow": grow, "ranks": row.ranks, "us": row.us,
                    "by": row.by, "efficiency": row.efficiency,
                }  # fmt: skip


if __name__ == "__main__":
    document = provenance() | {
        "what": "predicted by the cost model beside what was read; nothing was run",
        "layers": list(layers()), "products": list(products()), "published": list(published()),
        "curves": list(curves()),
    }  # fmt: skip
    write_json(RESULTS / "predictions.json", document)
