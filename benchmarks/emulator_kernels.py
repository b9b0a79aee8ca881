"""Kernels of many kinds on one rank: the emulator, all checks on, against Triton's interpreter.

    python benchmarks/emulator_kernels.py [--numpy FOLDER] [-o FILE.json]

Both sides run the same kernels (`tests/emulator/kernels`) on the same inputs, and their results
are compared before anything is timed. A time is the median of five warm calls of the host function
(for the emulator: of a run of one emulated rank that calls it), both with all cores to themselves.
The interpreter runs in a process of its own; that of Triton 3.6 crashes on numpy 2.4 and later,
so `--numpy` names a folder with an older one (`pip install --target FOLDER "numpy<2.4"`) for
that process alone. Where the interpreter cannot run a kernel, the emulator's time stands alone, its
result checked by torch: an autotuned kernel asks a GPU's driver, and programs that wait for a later
one never end where one runs after the other.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import triton

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "emulator"))

ROUNDS = 5
TARGET = 5.0


def cases() -> dict[str, tuple[Callable, tuple, dict]]:
    """Name -> host function, its arguments, its options. Inputs come from one fixed seed."""
    from kernels import (
        attention,
        descriptor_matmul,
        dropout,
        grouped_gemm,
        layer_norm,
        matmul,
        quantised,
        softmax,
        stream_k,
        top_k,
    )

    torch.manual_seed(0)
    normal = torch.randn
    x, weight, bias, d_out = normal(64, 200), normal(200), normal(200), normal(64, 200)
    mean = x.mean(1)
    scale = 1 / torch.sqrt(x.var(1, unbiased=False) + 1e-5)
    q, k, v = (normal(2, 128, 64).half() for _ in range(3))
    future = torch.ones(128, 128, dtype=torch.bool).triu(1)
    scores = (q.float() @ k.float().transpose(1, 2) / 8).masked_fill(future, -math.inf)
    log_sum = torch.logsumexp(scores, dim=-1) / math.log(2)
    attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    d_attended = normal(2, 128, 64).half()
    a, b = normal(128, 128).half(), normal(128, 128).half()
    packed = torch.randint(-128, 128, (64, 128), dtype=torch.int8)
    bytes_a, bytes_b = (torch.randint(-128, 128, (128, 128), dtype=torch.int8) for _ in range(2))
    pairs = [
        (normal(m, 64).half(), normal(64, n).half()) for m, n in ((64, 32), (48, 80), (16, 64))
    ]
    return {
        "softmax": (softmax.softmax, (x,), {}),
        "layer_norm_forward": (layer_norm.forward, (x, weight, bias), {}),
        "layer_norm_backward": (layer_norm.backward, (x, weight, d_out, mean, scale), {}),
        "dropout": (dropout.dropout, (normal(20_000), 0.5, 3), {"block": 1024}),
        "matmul_int8": (
            quantised.int8_matmul, (bytes_a, bytes_b, torch.rand(128), torch.rand(128)), {}
        ),
        "matmul_int4": (quantised.int4_matmul, (a, packed, torch.rand(4, 128), 32), {}),
        "matmul_activation": (matmul.matmul, (a, b), {"activation": "leaky_relu"}),
        "attention_forward": (attention.forward, (q, k, v), {}),
        "attention_backward": (
            attention.backward, (q, k, v, attended, log_sum, d_attended), {}
        ),
        "grouped_gemm": (grouped_gemm.grouped_gemm, (pairs,), {}),
        "descriptor_matmul": (descriptor_matmul.matmul, (a, b, False), {}),
        "split_k": (matmul.split_k, (a.float(), b.float()), {"split": 2}),
        "stream_k": (stream_k.stream_k, (a.float(), b.float()), {"tile": 32}),
        "top_k": (top_k.top_k, (normal(8, 128), 8), {}),
    }  # fmt: skip


# What the interpreter cannot run, and what its result is.
ALONE: dict[str, Callable] = {
    "matmul_activation": lambda a, b: torch.nn.functional.leaky_relu(a.float() @ b.float(), 0.01),
    "stream_k": lambda a, b: a @ b,
}


def flat(result: object) -> list[np.ndarray]:
    tensors = result if isinstance(result, (tuple, list)) else [result]
    return [tensor.float().numpy() for tensor in tensors]


def median_s(call: Callable[[], object]) -> float:
    seconds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def interpret(path: str) -> None:
    """In the other process: run every case, save its results and its time."""
    found = {"numpy": np.array(np.__version__)}
    for name, (function, args, options) in cases().items():
        if name in ALONE:
            continue
        results = flat(function(*args, **options))
        for index, result in enumerate(results):
            found[f"{name}.{index}"] = result
        found[f"{name}.s"] = np.array(median_s(lambda: function(*args, **options)))
    np.savez(path, **found)


def interpreted(numpy_folder: str | None) -> dict[str, np.ndarray]:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "results.npz")
        paths = [numpy_folder, str(ROOT / "src"), os.environ.get("PYTHONPATH")]
        environment = {
            **os.environ,
            "TRITON_INTERPRET": "1",
            "PYTHONPATH": os.pathsep.join(p for p in paths if p),
        }
        subprocess.run([sys.executable, __file__, "--interpret", path], env=environment, check=True)
        with np.load(path) as data:
            return dict(data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--numpy", help="a folder with a numpy that Triton's interpreter takes")
    parser.add_argument("--interpret", metavar="FILE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.interpret:
        interpret(options.interpret)
        return
    import weft

    theirs = interpreted(options.numpy)
    rows = []
    with weft.emulated(ranks=1) as session:
        for name, (function, args, more) in cases().items():
            call = lambda: session.run(lambda: function(*args, **more))[0]  # noqa: E731
            error = 0.0
            alone = flat(ALONE[name](*args)) if name in ALONE else None
            for index, result in enumerate(flat(call())):
                expected = alone[index] if alone else theirs[f"{name}.{index}"]
                norm = max(float(np.linalg.norm(expected)), 1e-30)
                error = max(error, float(np.linalg.norm(result - expected)) / norm)
            assert error < 2e-3, f"{name}: the two sides differ by {error:.1e}"
            own = median_s(call)
            other = None if alone else float(theirs[f"{name}.s"])
            assert session.report.ok, str(session.report)
            rows.append({
                "kernel": name, "emulator_s": own, "interpreter_s": other,
                "speed_up": other / own if other else None, "relative_difference": error,
            })  # fmt: skip
            beside = f"{other:8.4f} s {other / own:6.1f} x" if other else "   cannot"
            print(f"{name:22} {own:8.4f} s {beside}", file=sys.stderr)
    ratios = [row["speed_up"] for row in rows if row["speed_up"]]
    mean = math.exp(statistics.fmean(map(math.log, ratios)))
    print(f"geometric mean {mean:.2f} x (target {TARGET} x)", file=sys.stderr)
    found = {
        "what": "one emulated rank, all checks, against Triton's interpreter; medians of 5, warm",
        "geometric_mean_speed_up": mean, "target": TARGET, "rows": rows,
        "triton": triton.__version__, "torch": torch.__version__, "numpy": np.__version__,
        "interpreter_numpy": str(theirs["numpy"]), "python": platform.python_version(),
        "machine": platform.machine(), "cpus": os.cpu_count(),
        "load_average": os.getloadavg()[0],
    }  # fmt: skip
    text = json.dumps(found, indent=2)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(text + "\n")
    else:
        print(text)


if __name__ == "__main__":
    main()
