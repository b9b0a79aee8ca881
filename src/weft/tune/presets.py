"""Which points a benchmark measures: shapes of real models, and collectives from 8 KB to 128 MB.

m is global; n and k are per rank, of tensor parallelism over four.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.base.card import Op
from weft.base.errors import UsageError
from weft.base.expert_tiles import tile_rows

GATHERED_LAYERS = {
    "llama3-8b mlp": (7168, 4096),
    "llama3-70b attention": (2560, 8192),
    "llama3-70b mlp": (14336, 8192),
    "qwen3-32b mlp": (12800, 5120),
    "llama3-405b mlp": (26624, 16384),
}
# Those whose products are summed over ranks: the other projection of the same layers.
SUMMED_LAYERS = {
    "llama3-8b mlp": (4096, 3584),
    "llama3-70b attention": (8192, 2048),
    "llama3-70b mlp": (8192, 7168),
    "qwen3-32b mlp": (5120, 6400),
    "llama3-405b mlp": (16384, 13312),
}
LAYERS = {
    "ag_gemm": GATHERED_LAYERS,
    "ag_wgrad": GATHERED_LAYERS,  # gradients of their weights
    "ag_rms_gemm": GATHERED_LAYERS,
    "gemm_rs": SUMMED_LAYERS,
    "gemm_ar": SUMMED_LAYERS,
}
# Their problems are a program's sizes alone.
PROGRAMS = ("ag_rms_gemm",)
# Sums over ranks between two layers, with a residual and a norm: how wide they are.
NORMED_LAYERS = {label: n for label, (n, _) in SUMMED_LAYERS.items() if "mlp" in label}
# Mixtures of experts: hidden size, experts, how many of them a token has, one's inner size.
MIXTURES = {
    "qwen3-30b-a3b": (2048, 128, 8, 768),
    "mixtral-8x7b": (4096, 8, 2, 14336),
    "deepseek-v3": (7168, 256, 8, 2048),
}
TOKENS_PER_RANK = (128, 4096, 8192)
TENSOR_PARALLEL = 4
# Heads of queries and of keys, and elements of each.
HEADS, KV_HEADS, HEAD = 32, 8, 128
KB, MB = 1 << 10, 1 << 20
TOKENS = (16 * KB, 32 * KB, 64 * KB, 128 * KB)
# Sequences that are decoded, and keys of each over all ranks.
CACHES = ((1, 64 * KB), (1, 256 * KB), (1, MB), (8, 64 * KB), (8, 256 * KB), (32, 64 * KB))
RAGGED_M = 997 * 4
ALL_M = (1, 16, 64, 256, 512, 1024, 2048, RAGGED_M, 4096, 8192, 16384)
QUICK_M = (64, 512, 2048, 8192)

ROW = 4096
ALL_BYTES = tuple(8 * KB << step for step in range(15))
QUICK_BYTES = (64 * KB, 1 * MB, 16 * MB)

# Graphs below, where a launch would be most of the time; queued calls from there on.
GRAPH_M = 512
GRAPH_BYTES = 4 * MB


@dataclass(frozen=True)
class Point:
    """One thing to measure: an operator's shape, what else its problem says, and in which modes."""

    op: str
    label: str
    shape: Mapping[str, int]
    modes: tuple[str, ...]
    dtype: str = "bfloat16"
    fields: Mapping[str, Any] = field(default_factory=dict)
    bytes_per_rank: int | None = None

    @property
    def name(self) -> str:
        sizes = ",".join(f"{name}={size}" for name, size in self.shape.items())
        return f"{self.op} {self.label} {sizes}"


def layer_points(op: str, ms: Sequence[int]) -> list[Point]:
    """Every layer at every m; where a problem says how weights lie, as layers keep them, [n, k]."""
    fields = {} if op in PROGRAMS else {"b_is_nk": True}
    return [
        Point(op, label, {"m": m, "n": n, "k": k}, _modes(m), fields=fields)
        for m in ms
        for label, (n, k) in LAYERS[op].items()
    ]


def row_points(op: str, ms: Sequence[int]) -> list[Point]:
    """Rows of every model's width, of every m."""
    return [
        Point(op, label, {"m": m, "n": n}, _modes(m))
        for m in ms
        for label, n in NORMED_LAYERS.items()
    ]


def _modes(m: int) -> tuple[str, str]:
    return ("graph" if m < GRAPH_M else "queued", "eager")


def collective_points(op: str, sizes: Sequence[int], num_ranks: int) -> list[Point]:
    """Sizes as their tables count them: what a rank gives to all_gather, all_to_all and send, what
    it gets from reduce_scatter and recv, the whole of all_reduce."""
    points = []
    for nbytes in sizes:
        of_rank = nbytes * (num_ranks if op in OF_SHARDS else 1)
        n = min(ROW, nbytes // 2 // num_ranks)
        mode = "graph" if nbytes <= GRAPH_BYTES else "queued"
        label = f"{nbytes // MB} MB" if nbytes >= MB else f"{nbytes // KB} KB"
        shape = {"m": of_rank // 2 // n, "n": n}
        points.append(Point(op, label, shape, (mode, "eager"), bytes_per_rank=nbytes))
    return points


def mixture_points(op: str, tokens: Sequence[int], num_ranks: int) -> list[Point]:
    """Every mixture at so many tokens a rank; products are those of one of four ranks."""
    points = []
    for each in tokens:
        for label, (hidden, experts, top_k, inner) in MIXTURES.items():
            m = each * num_ranks
            shape = {"m": m, "n": hidden, "experts": experts, "top_k": top_k}
            if op == "moe_route":
                shape = {"m": m, "n": experts, "top_k": top_k}
            elif op == "ag_moe":  # gate and value
                shape |= {"n": 2 * inner // TENSOR_PARALLEL, "k": hidden}
            elif op in ("moe_rs", "moe_ar"):
                shape |= {"k": inner // TENSOR_PARALLEL}
            else:  # whole experts on each rank, with room for a quarter more rows than they get
                shape["capacity"] = each * top_k * 5 // 4
            shape["tile_m"] = tile_rows(m * top_k, experts)
            points.append(Point(op, label, shape, _modes(m)))
    return points


def attention_points(tokens: Sequence[int]) -> list[Point]:
    """One long sequence, and sixteen of any lengths."""
    heads = {"q_heads": HEADS, "kv_heads": KV_HEADS, "d": HEAD, "causal": 1}
    return [
        Point("ag_attention", label, {"m": m, **heads, "sequences": sequences}, _modes(m))
        for m in tokens
        for label, sequences in (("one sequence", 0), ("16 sequences", 16))
    ]


def decode_points(caches: Sequence[tuple[int, int]], num_ranks: int) -> list[Point]:
    """Caches of so many keys over all ranks, full and of any lengths."""
    heads = {"k": HEAD, "heads": HEADS, "kv_heads": KV_HEADS}
    return [
        Point("flash_decode", f"{keys // KB}k keys, {label}",
              {"m": batch, "n": keys // num_ranks, **heads, "variable": variable}, _modes(batch))
        for batch, keys in caches
        for variable, label in enumerate(("all", "any"))
    ]  # fmt: skip


LAYER_PRESETS = {label.replace(" ", "-"): label for label in (*GATHERED_LAYERS, *MIXTURES)}
PRESETS = ("quick", "full", *LAYER_PRESETS)
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send", "recv")
# Of these, whose sizes are a shard's.
OF_SHARDS = ("all_gather", "reduce_scatter", "send", "recv")
BY_EXPERTS = ("moe_route", "ag_moe", "moe_rs", "moe_ar", "ep_dispatch", "ep_combine")


def points_of(op: str, preset: str, num_ranks: int, ms: Sequence[int] = ()) -> list[Point]:
    """The points that a preset means for an operator; of layers with other rows, where `ms` names
    some.

    Raises  UsageError: no such preset, or none for this operator; rows of what has no layers
    """
    if preset not in PRESETS:
        raise UsageError(f"--preset {preset!r}: one of {', '.join(PRESETS)}")
    if ms and op not in (*LAYERS, "all_reduce_rms_norm"):
        raise UsageError(f"--m: {op} has no layers; pass --shape")
    if op in COLLECTIVES:
        if preset in LAYER_PRESETS:
            raise UsageError(f"--preset {preset!r} is a layer's; {op} takes quick or full")
        return collective_points(op, ALL_BYTES if preset == "full" else QUICK_BYTES, num_ranks)
    ms = ms or (QUICK_M if preset == "quick" else ALL_M)
    is_quick = preset == "quick"
    if op == "all_reduce_rms_norm":
        points = row_points(op, ms)
    elif op in BY_EXPERTS:
        points = mixture_points(op, TOKENS_PER_RANK[:2] if is_quick else TOKENS_PER_RANK, num_ranks)
    elif op == "ag_attention":
        points = attention_points(TOKENS[:2] if is_quick else TOKENS)
    elif op == "flash_decode":
        points = decode_points(CACHES[1::3] if is_quick else CACHES, num_ranks)
    elif op in LAYERS:
        points = layer_points(op, ms)
    else:
        raise UsageError(f"no preset for {op}: pass --shape")
    if preset in LAYER_PRESETS:
        points = [point for point in points if point.label == LAYER_PRESETS[preset]]
        if not points:
            raise UsageError(f"--preset {preset!r} is no layer of {op}; it takes quick or full")
    return points


def shape_in_models(card: Op, num_ranks: int) -> dict[str, int]:
    """The sizes of a call as the first of an operator's models makes it; none where it has none."""
    try:
        points = points_of(card.name, "quick", num_ranks)
    except UsageError:
        return {}
    shape = [one.shape for one in points if one.label == points[0].label][-1]
    return {name: size for name, size in shape.items() if name in card.default_shape}
