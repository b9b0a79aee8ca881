"""The litmus programs on GPUs: what was seen, against what the memory model allows.

    PYTHONPATH=src python benchmarks/litmus.py [--ranks 4] [--launches 32] [--part words,engine]

`words`: the programs of tests/litmus/cases.py. `blocks`: message passing of blocks by vectors and
by TMA. `engine`: by copy engines. Writes results/litmus_<gpus>.json; the exit code is 1 if a
forbidden outcome was seen, or a block arrived stale in a form that the model promises.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "litmus"))

import data_kernels
from cases import cases
from harness import Bench, Effort
from kernel_source import kernel_of

import weft
from weft.tune import processes
from weft.tune.provenance import provenance, save

RESULTS = Path(__file__).parent / "results"


COLS, ROWS = data_kernels.COLS.value, data_kernels.ROWS.value
BLOCK = ROWS * COLS
LANES = 48

# How the block is written, read, announced and awaited; whether the model promises it arrives.
BLOCK_CASES = [
    # name, WRITE, READ, NOTIFY, WAIT, AT_WRITER, promised
    ("vector_push-vector", "vector", "vector", "full", "full", False, True),
    ("vector_push-tma", "vector", "tma", "full", "full", False, True),
    ("vector_at_writer-vector", "vector", "vector", "full", "full", True, True),
    ("tma_push-vector", "tma", "vector", "full", "full", False, True),
    ("tma_push-tma", "tma", "tma", "full", "full", False, True),
    ("vector_push-tma, no proxy fence", "vector", "tma", "full", "bare", False, False),
    ("tma_push-vector, not completed", "tma", "vector", "bare", "full", False, False),
    ("tma_push-tma, not completed", "tma", "tma", "bare", "full", False, False),
    ("tma_push-tma, no proxy fence", "tma", "tma", "full", "bare", False, False),
    ("vector_push-vector, relaxed notify", "vector", "vector", "relaxed", "full", False, False),
    ("vector_push-vector, relaxed wait", "vector", "vector", "full", "relaxed", False, False),
    ("vector_at_writer-vector, relaxed wait", "vector", "vector", "full", "relaxed", True, False),
    ("vector_push-tma, relaxed wait", "vector", "tma", "full", "relaxed", False, False),
]

ENGINE_CASES = [
    # name, direction, READ, WAIT, bytes, promised
    ("engine_push-vector", "push", "vector", "full", True),
    ("engine_push-tma", "push", "tma", "full", True),
    ("engine_push-tma, no proxy fence", "push", "tma", "bare", False),
    ("engine_push-vector, relaxed wait", "push", "vector", "relaxed", False),
    ("engine_pull-vector", "pull", "vector", "full", True),
    ("engine_pull-tma", "pull", "tma", "full", True),
    ("engine_pull-tma, no proxy fence", "pull", "tma", "bare", False),
    ("engine_pull-vector, relaxed wait", "pull", "vector", "relaxed", False),
]


def meet() -> None:
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()


def words(world: weft.World, effort: Effort) -> list[dict[str, Any]]:
    """The programs of words."""
    bench = Bench(world, effort)
    programs = cases(world.num_ranks)
    began = time.monotonic()
    # Each rank compiles its share; afterwards all find everything in the cache.
    for index, test in enumerate(programs):
        if index % world.num_ranks == world.rank:
            roles = torch.zeros((2, 16), dtype=torch.int32, device=world.device)
            kernel_of(test).warmup(
                world.arg, bench.cells, bench.gates, bench.out, roles, bench.noise,
                effort.iterations, 12345, effort.max_delay, 0, grid=(1,), num_warps=1,
            )  # fmt: skip
    meet()
    compiled_s = time.monotonic() - began
    rows = []
    for test in programs:
        began = time.monotonic()
        verdict = bench.run(test, meet)
        if verdict is not None:
            row = verdict.to_json() | {"seconds": round(time.monotonic() - began, 2)}
            rows.append(row)
            mark = "FORBIDDEN SEEN" if row["forbidden_seen"] else ""
            allowed = "allowed" if row["weak_allowed"] else "forbidden"
            print(
                f"{row['name']:38} weak {allowed:9} seen {row['weak_seen']:8} of "
                f"{row['instances']} {row['seconds']:5.2f} s {mark}",
                flush=True,
            )
    if world.rank == 0:
        print(f"words: compiled in {compiled_s:.1f} s", flush=True)
    return rows


def blocks(
    world: weft.World, rounds: int, within: bool, tall: int = ROWS, lanes: int = LANES
) -> list[dict[str, Any]]:
    """Blocks of `tall` rows between pairs of ranks, or of programs of one rank."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    tag = f"{'within' if within else 'across'}, {tall * COLS * 4 >> 10} KB"
    data = world.zeros((lanes * tall, COLS), torch.int32, name=f"blocks_{tag}")
    flags = world.signals(lanes * 32, torch.int32, name=f"block_flags_{tag}")
    acks = world.signals(lanes * 32, torch.int32, name=f"block_acks_{tag}")
    errors = torch.zeros(1, dtype=torch.int32, device=world.device)
    peer = world.rank if within else world.rank ^ 1
    rows = []
    for name, write, read, announce, wait, at_writer, promised in BLOCK_CASES:
        if (within and at_writer) or (tall > ROWS and "tma" not in (write, read)):
            continue
        for x in (data, flags, acks, errors):
            x.zero_()
        meet()
        began = time.monotonic()
        here = TensorDescriptor.from_tensor(data, [tall, COLS])
        there = TensorDescriptor.from_tensor(world.peer(data, peer), [tall, COLS])
        data_kernels.exchange_blocks[(lanes * (2 if within else 1),)](
            world.arg, data, here, there, flags, acks, errors, int(world.rank % 2 == 0), peer,
            rounds, WRITE=write, READ=read, NOTIFY=announce, WAIT=wait, AT_WRITER=at_writer,
            WITHIN=within, TALL=tall, num_warps=4 if tall <= ROWS else 8,
        )  # fmt: skip
        meet()
        rows.append(_block_row(world, f"{name} ({tag})", errors, rounds * lanes, promised, began))
        if world.rank == 0:
            print(rows[-1], flush=True)
    return rows


def _block_row(world, name, errors, instances, promised, began) -> dict[str, Any]:
    total = errors.clone()
    dist.all_reduce(total)
    return {
        "name": name,
        "instances": instances * (world.num_ranks // 2),
        "stale_elements": int(total.item()),
        "promised": promised,
        "seconds": round(time.monotonic() - began, 2),
    }


def engine(world: weft.World, nbytes: int, rounds: int) -> list[dict[str, Any]]:
    """Blocks by copy engine; the word comes behind them on the same stream."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    n, readers, per_graph = nbytes // 4, 16, 20
    # Whole recordings: a reader of one more would wait in vain.
    replays = max(1, rounds // per_graph)
    rounds = replays * per_graph
    data = world.zeros((n // COLS, COLS), torch.int32, name=f"engine_data_{nbytes}")
    source = world.zeros((n // COLS, COLS), torch.int32, name=f"engine_source_{nbytes}")
    flag = world.signals(1, torch.int64, name=f"engine_flag_{nbytes}")
    announce = world.signals(1, torch.int64, name=f"engine_announce_{nbytes}")
    acks = world.signals(readers * 32, torch.int64, name=f"engine_acks_{nbytes}")
    counter = world.signals(8, torch.int64, name=f"engine_counter_{nbytes}")
    errors = torch.zeros(1, dtype=torch.int32, device=world.device)
    peer, is_writer = world.rank ^ 1, world.rank % 2 == 0
    side = world.stream("engine")
    rows = []
    for name, direction, read, wait, promised in ENGINE_CASES:
        for x in (data, source, flag, announce, acks, counter, errors):
            x.zero_()
        meet()
        pulls = direction == "pull"
        desc = TensorDescriptor.from_tensor(data, [ROWS, COLS])

        def step(pulls: bool = pulls) -> None:
            if is_writer:
                data_kernels.fill_round[(32,)](
                    world.arg, source, counter, acks, announce, peer, n,
                    READERS=readers, BLOCK=4096, TELL=pulls, num_warps=8,
                )  # fmt: skip
                if not pulls:
                    world.copy(world.peer(data, peer), source)
                    world.copy_word(world.peer(flag, peer), counter[:1])
            elif pulls:
                data_kernels.await_round[(1,)](world.arg, counter, announce, num_warps=1)
                world.copy(data, world.peer(source, peer))
                world.copy_word(flag, world.peer(counter, peer)[:1])

        def reader(count: int, read: str = read, wait: str = wait, desc: Any = desc) -> None:
            if not is_writer:
                data_kernels.read_rounds[(readers,)](
                    world.arg, data, desc, flag, acks, errors, peer, count, n,
                    READ=read, WAIT=wait, num_warps=4,
                )  # fmt: skip

        # Once by hand, so that everything is compiled before it is recorded.
        with side:
            step()
        reader(1)
        meet()
        for x in (data, source, flag, announce, acks, counter, errors):
            x.zero_()
        meet()
        if is_writer or pulls:
            with world.record() as recording:
                for _ in range(per_graph):
                    step()
        meet()
        began = time.monotonic()
        reader(rounds)
        with side:
            if is_writer or pulls:
                for _ in range(replays):
                    recording.replay()
        meet()
        rows.append(
            _block_row(world, f"{name} ({nbytes >> 10} KB)", errors, rounds, promised, began)
        )
        if world.rank == 0:
            print(rows[-1], flush=True)
    return rows


def main(rank: int, options: argparse.Namespace) -> None:
    world = weft.init(heap_bytes=1 << 30)
    results: dict[str, Any] = provenance() if rank == 0 else {}
    results["num_ranks"] = world.num_ranks

    def keep(name: str, rows: list) -> None:
        results[name] = rows
        if rank == 0:
            save("litmus", results, world.num_ranks, RESULTS)

    if "engine" in options.part:
        keep("engine", engine(world, 256 << 10, options.engine_rounds))
        keep("engine_large", engine(world, 4 << 20, options.engine_rounds // 4))
        world.check()
    if "words" in options.part:
        keep("words", words(world, Effort(launches=options.launches)))
        world.check()
    if "blocks" in options.part:
        keep(
            "blocks",
            blocks(world, options.rounds, False)
            + blocks(world, options.rounds // 5, False, tall=256, lanes=120)
            + blocks(world, options.rounds, True)
            + blocks(world, options.rounds // 5, True, tall=256, lanes=60),
        )
        world.check()
    if rank == 0:
        found = [row["name"] for row in results.get("words", []) if row["forbidden_seen"]]
        for part in ("blocks", "engine", "engine_large"):
            rows = results.get(part, [])
            found += [r["name"] for r in rows if r["promised"] and r["stale_elements"]]
        print(f"forbidden or broken promises: {found or 'none'}", flush=True)
        if found:
            raise SystemExit(1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--launches", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=20000)
    parser.add_argument("--engine-rounds", type=int, default=8000)
    parser.add_argument("--part", default="blocks,engine,words")
    parser.add_argument("--timeout", type=float, default=240.0)
    options = parser.parse_args()
    processes.run_on_gpus(main, options.ranks, options, timeout_s=options.timeout)
