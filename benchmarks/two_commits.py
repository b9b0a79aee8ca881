"""Operators of two commits in turns, on the same GPUs: is the newer one as fast?

    git archive OLD src | tar x -C /tmp/old
    PYTHONPATH=src python benchmarks/two_commits.py /tmp/old/src [--ops ag_gemm,gemm_rs]

Each commit has a process for each GPU, and all of them stay until the end. Both commits prepare a
point (an operator and a shape, `weft.tune.presets`) at once: inputs, compilation, an answer that is
checked, recordings. Then they measure in turns, old, new, old, new: a commit waits on the host
until the other one's round is over, so nothing else runs on the GPUs meanwhile. Modes are those of
`weft bench`: `graph` replays recordings, `queued` hides the host's time, `eager` does not; `host`
is the host's time of an eager call. Writes results/two_commits_<gpus>.json as it goes: medians of
the slowest rank, and old / new, above 1 where the new commit is faster.

With more --ranks than GPUs ranks share them, each with its part of the SMs where NVIDIA's MPS runs
(CUDA_MPS_PIPE_DIRECTORY is set): kernels of two ranks then run side by side, so what SMs do (stores
to a peer, waits, sums) compares; copies between ranks take SMs there, so what copy engines carry
does not. With --ranks 1 it is the product alone.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PRODUCTS = ("ag_gemm", "gemm_rs", "gemm_ar", "ag_moe", "moe_rs", "moe_ar")
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_reduce_rms_norm")
COMMITS = ("old", "new")
ROUNDS, WARM_UP, BURST = 9, 2, 10
HEAP_BYTES = 8 << 30
# torch's own setting, by which ranks on one GPU map each other's memory.
OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
# Compilation of a point, and a round of the other commit, end within these.
PREPARE_S, ROUND_S = 240.0, 60.0


class Turns:
    """Whose turn it is: keys in a store that the processes of both commits reach."""

    def __init__(self, port: int, commit: str, rank: int, num_ranks: int) -> None:
        self.store = dist.TCPStore("127.0.0.1", port, is_master=False)
        self.commit, self.rank, self.num_ranks = commit, rank, num_ranks
        self.other = COMMITS[commit == COMMITS[0]]

    def say(self, what: str, value: str = "") -> None:
        self.store.set(f"{self.commit}/{self.rank}/{what}", value)

    def of_other(self, what: str, seconds: float) -> list[str]:
        """What the other commit's ranks have said of it, once all have."""
        keys = [f"{self.other}/{rank}/{what}" for rank in range(self.num_ranks)]
        self.store.wait(keys, timedelta(seconds=seconds))
        return [self.store.get(key).decode() for key in keys]

    def rounds(self, name: str, count: int) -> Iterator[int]:
        """Each round in its turn: the old commit's, then the new one's."""
        for number in range(count):
            if self.commit == COMMITS[1]:
                self.of_other(f"{name}/{number}", ROUND_S)
            elif number:
                self.of_other(f"{name}/{number - 1}", ROUND_S)
            yield number
            self.say(f"{name}/{number}")
        if self.commit == COMMITS[0] and count:
            self.of_other(f"{name}/{count - 1}", ROUND_S)


def times_of(device: Any, case: Any, calls: list[Any], mode: str, turns: Turns, name: str):
    """This commit's rounds of one mode: microseconds a call, of the slowest rank."""
    timed, host_us = [], 0.0
    for index, call in enumerate(calls):
        replay, answer = device.record(call) if mode == "graph" else (call, None)
        host_us = max(host_us, device.warm_us(replay))
        if answer is not None and not case.error(index, answer) <= case.tolerance:
            raise ValueError(f"{name}: a replay's answer is off by {case.error(index, answer):.2e}")
        timed.append(replay)
    device.settle()
    took: list[float] = []
    for number in turns.rounds(f"{name}/{mode}", WARM_UP + ROUNDS):
        if case.is_swept:
            device.sweep()
        if mode == "host":
            mine = device.host_us(timed)
        elif mode == "eager":
            mine = device.burst_us(timed, BURST)
        else:
            mine = device.held_us(timed[number % len(timed)], host_us)
        ((slowest,),) = device.slowest([[mine]])
        if number >= WARM_UP and slowest == slowest:
            took.append(slowest)
        device.settle()
    return took


def prepared(world: Any, device: Any, card: Any, point: Any) -> tuple[Any, Any]:
    """A point's inputs with their right answers, and weft's calls of it, which answer rightly."""
    from dataclasses import replace

    from weft.tune import protocol, variants
    from weft.tune.case import Case

    problem = card.make_problem(world.num_ranks, dict(point.shape), point.dtype)
    case = Case(world, card, replace(problem, **dict(point.fields)), device.l2_bytes)
    (variant,) = variants.of_weft(case, "weft")
    _, wrong = protocol.check(device, case, variant)
    if wrong is not None:
        raise ValueError(wrong)
    return case, variant


def work(commit: str, rank: int, options: argparse.Namespace) -> None:
    """One rank of one commit: every point; rows go to the store."""
    import weft
    from weft.ops import cards
    from weft.tune.device import GpuDevice
    from weft.tune.presets import points_of

    torch.cuda.set_device(rank % torch.cuda.device_count())
    if "WEFT_SHARE_GPUS" in os.environ:  # NCCL takes one rank of a GPU
        dist.init_process_group("gloo")
    turns = Turns(options.store, commit, rank, options.ranks)
    world = weft.init(heap_bytes=HEAP_BYTES)
    torch.backends.cuda.matmul.allow_tf32 = False
    device = GpuDevice(world)
    for op in options.ops.split(","):
        for point in points_of(op, options.preset, world.num_ranks):
            label = f"{op}/{point.label}/{json.dumps(point.shape)}"
            is_late = time.time() > options.until
            rows: dict[str, Any] = {}
            try:
                case, variant = prepared(world, device, cards()[op], point)
                error = ""
            except Exception as raised:  # the other points go on, and the row says why
                case, variant, error = None, None, f"{type(raised).__name__}: {raised}"[:400]
            said = "late" if is_late else error
            turns.say(label, said)
            theirs, errors = turns.of_other(label, PREPARE_S), device.agree(said)
            if any((*theirs, *errors)):
                rows["error"] = next(filter(None, errors), "")
            else:
                for mode in (*point.modes, "host"):
                    rows[mode] = times_of(device, case, list(variant.calls), mode, turns, label)
                    rows[f"{mode} about"] = variant.about_in(mode)
            if rank == 0:
                turns.say(f"rows/{label}", json.dumps(rows))
            del case, variant
            torch.cuda.empty_cache()
    world.close()


def row_of(point: Any, old: dict[str, Any], new: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A row for each mode of a point that both commits have measured."""
    about = {"op": point.op, "label": point.label, **point.shape}
    errors = {f"{name}_error": one.get("error") for name, one in zip(COMMITS, (old, new))}
    if any(errors.values()):
        yield {**about, **errors}
        return
    for mode in (*point.modes, "host"):
        if not (old.get(mode) and new.get(mode)):
            continue
        before, after = (statistics.median(one[mode]) for one in (old, new))
        row = {
            **about, "mode": mode, "old_us": round(before, 2), "new_us": round(after, 2),
            "ratio": round(before / after, 4), "old_range": spread(old[mode]),
            "new_range": spread(new[mode]),
        }  # fmt: skip
        if old[f"{mode} about"] != new[f"{mode} about"]:
            row |= {"old_about": old[f"{mode} about"], "new_about": new[f"{mode} about"]}
        yield row


def spread(times: list[float]) -> list[float]:
    ordered = sorted(times)
    return [round(ordered[0], 2), round(ordered[-1], 2)]


def means(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The geometric mean of old / new, for each operator and mode."""
    kinds: dict[str, list[float]] = {}
    for row in rows:
        if "ratio" in row:
            kinds.setdefault(f"{row['op']} {row['mode']}", []).append(math.log(row["ratio"]))
    return {kind: round(math.exp(statistics.fmean(logs)), 4) for kind, logs in kinds.items()}


def start(commit: str, rank: int, port: int, store: int, options: argparse.Namespace, source: str):
    """A rank's process, which imports weft from `source`."""
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join([source, os.environ.get("PYTHONPATH", "")]),
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(options.ranks),
        "LOCAL_WORLD_SIZE": str(options.ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    if options.ranks > (gpus := torch.cuda.device_count()):
        environment["WEFT_SHARE_GPUS"] = environment[OVERLAPPING] = "1"
        environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(100 * gpus // options.ranks)
    command = [sys.executable, __file__, "--work", f"{commit}:{rank}", "--store", str(store)]
    command += ["--ops", options.ops, "--preset", options.preset, "--ranks", str(options.ranks)]
    command += ["--until", str(options.until), source]
    return subprocess.Popen(command, env=environment)


def free_port() -> int:
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def measure(options: argparse.Namespace, path: Path) -> dict[str, Any]:
    """Both commits' processes until their last point; the document of what they found."""
    from weft.tune.presets import points_of
    from weft.tune.provenance import provenance, write_json

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    sources = dict(zip(COMMITS, (options.old, str(ROOT / "src"))))
    running = []
    for commit, source in sources.items():
        port = free_port()
        for rank in range(options.ranks):
            running.append(start(commit, rank, port, store.port, options, source))
    document = {
        "what": "operators of two commits in turns; us of the slowest rank; ratio: old / new",
        **provenance(), "old_commit": options.old_name, "means": {}, "rows": [],
    }  # fmt: skip
    read: Callable[[str, str], Any] = lambda commit, label: json.loads(  # noqa: E731
        store.get(f"{commit}/0/rows/{label}")
    )
    try:
        for op in options.ops.split(","):
            for point in points_of(op, options.preset, options.ranks):
                label = f"{op}/{point.label}/{json.dumps(point.shape)}"
                keys = [f"{commit}/0/rows/{label}" for commit in COMMITS]
                while not store.check(keys):
                    if any(one.poll() for one in running):
                        raise RuntimeError(f"a process ended at {label}")
                    time.sleep(0.05)
                document["rows"] += row_of(point, *(read(commit, label) for commit in COMMITS))
                document["means"] = means(document["rows"])
                write_json(path, document)
    finally:
        deadline = time.time() + 20
        while any(one.poll() is None for one in running) and time.time() < deadline:
            time.sleep(0.1)
        for one in running:
            one.kill()
    return document


def main() -> None:
    parser = argparse.ArgumentParser(description="operators of two commits in turns")
    parser.add_argument("old", help="the folder src of the older commit")
    parser.add_argument("--old-name", default="", help="that commit, for the result")
    parser.add_argument("--ops", default=",".join((*PRODUCTS, *COLLECTIVES)))
    parser.add_argument("--preset", default="quick")
    parser.add_argument("--seconds", type=float, default=560.0, help="begin no point after these")
    parser.add_argument("--ranks", type=int, default=0, help="0: one for each GPU")
    for inner in ("--work", "--store", "--until"):
        parser.add_argument(inner, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        commit, _, rank = options.work.partition(":")
        options.store, options.until = int(options.store), float(options.until)
        work(commit, int(rank), options)
        return
    from weft.tune.provenance import results_name

    options.ranks = options.ranks or torch.cuda.device_count()
    if not torch.cuda.is_available():
        parser.error("it takes a GPU; none is here")
    options.until = time.time() + options.seconds
    is_shared = options.ranks > torch.cuda.device_count()
    what = "two_commits_sharing" if is_shared else "two_commits"
    name = results_name(what, torch.cuda.get_device_name(0), options.ranks)
    document = measure(options, Path(os.environ.get("OUT", RESULTS)) / name)
    for kind, mean in document["means"].items():
        print(f"{kind:36} {mean:.3f}")


if __name__ == "__main__":
    main()
