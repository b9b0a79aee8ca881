"""Latencies and bandwidths of the machine, as the cost model and docs/hardware.md want them.

    PYTHONPATH=src python benchmarks/hardware.py [--ranks 4] [--only signals,put,...]

Writes results/hardware_<gpus>.json. Times are microseconds, medians over rounds unless a name says
otherwise; bandwidths GB/s (1e9). Every section runs on all ranks and only rank 0 reports, so that
links are as busy as in a collective.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

import weft
import weft.language as wl
from weft.tune import processes
from weft.tune.figures import Times, percentile
from weft.tune.provenance import provenance, save

RESULTS = Path(__file__).parent / "results"
# Spins give up after this long: a probe that waits for the wrong thing must end by itself.
SPIN_NS = tl.constexpr(2_000_000_000)
TRAFFIC_BYTES = 128 << 20
CYCLES_PER_US = 1900


# ---------------------------------------------------------------------------------------------
# Kernels, in plain Triton: they measure the machine, not the language


@triton.jit
def ping_pong(mine, theirs, first, rounds, start):
    """Two programs answer each other `rounds` times through one word each."""
    for i in range(start + 1, start + rounds + 1):
        if first == 1:
            tl.atomic_xchg(theirs, i, sem="release", scope="sys")
        began = globaltimer()
        while (tl.atomic_add(mine, 0, sem="acquire", scope="sys") < i) & (
            globaltimer() - began < SPIN_NS
        ):
            pass
        if first == 0:
            tl.atomic_xchg(theirs, i, sem="release", scope="sys")


@triton.jit
def ping_pong_volatile(mine, theirs, first, rounds, start):
    """As `ping_pong`, polling with a volatile load and one acquire at the end."""
    for i in range(start + 1, start + rounds + 1):
        if first == 1:
            tl.atomic_xchg(theirs, i, sem="release", scope="sys")
        began = globaltimer()
        while (tl.load(mine, volatile=True) < i) & (globaltimer() - began < SPIN_NS):
            pass
        tl.atomic_add(mine, 0, sem="acquire", scope="sys")
        if first == 0:
            tl.atomic_xchg(theirs, i, sem="release", scope="sys")


@triton.jit
def ping_pong_local(words, rounds, start, SCOPE: tl.constexpr):
    """Two programs of one grid answer each other."""
    me = tl.program_id(0)
    for i in range(start + 1, start + rounds + 1):
        if me == 0:
            tl.atomic_xchg(words + 64, i, sem="release", scope=SCOPE)
        began = globaltimer()
        while (tl.atomic_add(words + me * 64, 0, sem="acquire", scope=SCOPE) < i) & (
            globaltimer() - began < SPIN_NS
        ):
            pass
        if me == 1:
            tl.atomic_xchg(words, i, sem="release", scope=SCOPE)


@triton.jit
def move(dst, src, n, BLOCK: tl.constexpr):
    """Copy n elements by all programs of the grid."""
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < n
        tl.store(dst + at, tl.load(src + at, mask=inside), mask=inside)


@triton.jit
def nothing(a, b, c, d, e, f, n, k):
    """An empty kernel with an operator's worth of arguments."""


@triton.jit
def nothing_with_world(world, a, b, c, d, e, f, n, k):
    """The same with the world in front."""


@triton.jit
def fill_machine(flag, out, at_least):
    """A persistent grid: every program holds its place until the flag comes, or time is up."""
    began = globaltimer()
    now = began
    seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    while (seen < at_least) & (now - began < SPIN_NS // 8):
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        now = globaltimer()
    tl.store(out + tl.program_id(0) * 2, (now - began).to(tl.int64))
    tl.store(out + tl.program_id(0) * 2 + 1, seen.to(tl.int64))


@triton.jit
def spin(ns, out):
    """One program that waits for nothing but the clock."""
    began = globaltimer()
    now = began
    while now - began < ns:
        now = globaltimer()
    tl.store(out, (now - began).to(tl.int64))


@triton.jit
def never_loaded(x, VARIANT: tl.constexpr):
    tl.store(x, VARIANT)


@triton.jit
def set_word(flag, value):
    tl.atomic_xchg(flag, value, sem="release", scope="sys")


@triton.jit
def echo_host_word(address, first, rounds):
    """Two GPUs answer each other through one word of host memory."""
    word = address.to(tl.pointer_type(tl.int32))
    for i in range(1, rounds + 1):
        if first == 1:
            tl.atomic_xchg(word, 2 * i, sem="release", scope="sys")
        began = globaltimer()
        while (tl.load(word, volatile=True) < 2 * i + first) & (globaltimer() - began < SPIN_NS):
            pass
        if first == 0:
            tl.atomic_xchg(word, 2 * i + 1, sem="release", scope="sys")


@triton.jit(do_not_specialize=["start", "first", "peer"])
def crowd_volley(world, words, data, first, peer, start, rounds, ORDER: tl.constexpr,
                 DATA: tl.constexpr):  # fmt: skip
    """As many pairs of programs as the grid has, each through its own word; with 8 KB or none."""
    lane = tl.program_id(0)
    word = words + lane * 32
    at = data + lane * 2048 + tl.arange(0, 2048)
    for i in range(start + 1, start + rounds + 1):
        if first == 1:
            if DATA:
                wl.put(world, at, tl.full((2048,), 1, tl.int32), to=peer)
            wl.notify(world, word, i, to=peer, op=wl.SignalOp.SET, order=ORDER)
        wl.wait(word, i, world=world)
        if first == 0:
            if DATA:
                wl.put(world, at, tl.full((2048,), 1, tl.int32), to=peer)
            wl.notify(world, word, i, to=peer, op=wl.SignalOp.SET, order=ORDER)


# ---------------------------------------------------------------------------------------------
# Timing


def median(values: list[float]) -> float:
    return percentile(values, 0.5)


def spread(values: list[float]) -> dict[str, float]:
    times = Times(tuple(values))
    return {
        "median_us": round(times.median, 3),
        "p10_us": round(times.p10, 3),
        "p90_us": round(times.p90, 3),
    }


def events_us(call: Callable[[], Any], repeats: int = 1, held_us: float = 400) -> float:
    """Device time of a call; the stream is held first, so that the host's time does not show."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(int(held_us * CYCLES_PER_US))
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / repeats


def together() -> None:
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()


def rounds_us(call: Callable[[], Any], rounds: int = 9, held_us: float = 400) -> list[float]:
    call()
    together()
    return [events_us(call, held_us=held_us) for _ in range(rounds)]


def graph_of(call: Callable[[], Any], repeats: int) -> torch.cuda.CUDAGraph:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(repeats):
            call()
    return graph


# ---------------------------------------------------------------------------------------------
# Sections


def signals(world: weft.World) -> dict[str, Any]:
    """Round trips of one word: two notifies and two waits."""
    results = {}
    words = world.signals(1024, torch.int32, name="ping")
    started = 0
    rounds = 2000
    if world.num_ranks > 1:
        for name, kernel, warps in (
            ("peer_1_warp", ping_pong, 1),
            ("peer_4_warps", ping_pong, 4),
            ("peer_volatile_poll_1_warp", ping_pong_volatile, 1),
        ):
            samples = []
            for attempt in range(6):
                together()
                if world.rank < 2:
                    mine, theirs = words[:1], world.peer(words, 1 - world.rank)[:1]
                    used = events_us(
                        lambda k=kernel, w=warps, m=mine, t=theirs: k[(1,)](
                            m, t, int(world.rank == 0), rounds, started, num_warps=w
                        )
                    )
                    if attempt:
                        samples.append(used / rounds)
                started += rounds
            results[name] = spread(samples) if samples else None
    if world.num_ranks > 1:
        samples = []
        for _ in range(4):
            world.backend._shared[48:52] = bytes(4)
            together()
            if world.rank < 2:
                used = events_us(
                    lambda: echo_host_word[(1,)](
                        world.backend.abort_address + 48, int(world.rank == 0), 200, num_warps=1
                    )
                )
                samples.append(used / 200)
            together()
        results["through_host_memory"] = spread(samples[1:]) if samples else None
    for scope in ("gpu", "sys"):
        words[512:].zero_()
        samples = []
        for attempt in range(4):
            torch.cuda.synchronize()
            used = events_us(
                lambda s=scope, a=attempt: ping_pong_local[(2,)](
                    words[512:], rounds, a * rounds, SCOPE=s, num_warps=1
                )
            )
            if attempt:
                samples.append(used / rounds)
        results[f"local_{scope}"] = spread(samples)
    return results


def crowd(world: weft.World) -> list[dict[str, Any]]:
    """Round trips of many pairs of programs at once: what notifies of many SMs cost each other."""
    words = world.signals(132 * 32, torch.int32, name="crowd")
    data = world.empty(132 * 2048, torch.int32, name="crowd_data")
    rows, started, rounds = [], 0, 300
    for warps, order, with_data in (
        (1, "release", False),
        (4, "release", False),
        (4, "relaxed", False),
        (4, "release", True),
    ):
        for pairs in (1, 8, 32, 64, 128):
            samples = []
            for attempt in range(3):
                together()
                used = events_us(
                    lambda w=warps, o=order, d=with_data, p=pairs, s=started: crowd_volley[(p,)](
                        world.arg,
                        words,
                        data,
                        (world.rank + 1) % 2,
                        world.rank ^ 1,
                        s,
                        rounds,
                        ORDER=o,
                        DATA=d,
                        num_warps=w,
                    )  # fmt: skip
                )
                started += rounds
                if attempt:
                    samples.append(used / rounds)
            rows.append(
                {
                    "pairs": pairs,
                    "warps": warps,
                    "order": order,
                    "bytes": 8192 * with_data,
                    "round_trip_us": round(median(samples), 2),
                }
            )
    return rows


def put(world: weft.World) -> list[dict[str, Any]]:
    """Stores to, and loads from, the next rank: size by number of programs."""
    rows = []
    there = world.empty(TRAFFIC_BYTES // 4, torch.int32, name="put_there")
    here = torch.randint(0, 1 << 30, (TRAFFIC_BYTES // 4,), dtype=torch.int32, device=world.device)
    peer = world.peer(there, (world.rank + 1) % world.num_ranks)
    sizes = [1 << 10, 16 << 10, 128 << 10, 1 << 20, 8 << 20, 32 << 20, 128 << 20]
    for nbytes in sizes:
        for programs in (1, 4, 16, 32, 64, 132):
            if nbytes // programs > 16 << 20 or programs > max(1, nbytes >> 10):
                continue
            row: dict[str, Any] = {"bytes": nbytes, "programs": programs}
            share = max(256, min(8192, nbytes // 4 // programs))
            block = 1 << (share.bit_length() - 1)
            repeats = 20 if nbytes <= 1 << 20 else 2
            for name, dst, src in (("push", peer, here), ("pull", here, peer)):
                graph = graph_of(
                    lambda d=dst, s=src, b=block, p=programs, n=nbytes: move[(p,)](
                        d, s, n // 4, BLOCK=b, num_warps=16 if b >= 4096 else 4
                    ),
                    repeats,
                )
                times = [t / repeats for t in rounds_us(graph.replay, rounds=5)]
                row[f"{name}_us"] = round(median(times), 2)
                row[f"{name}_gbps"] = round(nbytes / median(times) / 1e3, 1)
            rows.append(row)
    return rows


def copy_engine(world: weft.World) -> dict[str, Any]:
    """One copy per size alone and in a queue of twenty, and the ways to set a word."""
    there = world.empty(TRAFFIC_BYTES, torch.uint8, name="copy_there")
    here = torch.randint(0, 255, (TRAFFIC_BYTES,), dtype=torch.uint8, device=world.device)
    peer = world.peer(there, (world.rank + 1) % world.num_ranks)
    other = torch.empty_like(here)
    rows = []
    for nbytes in (
        8,
        1 << 10,
        16 << 10,
        128 << 10,
        1 << 20,
        4 << 20,
        16 << 20,
        64 << 20,
        128 << 20,
    ):
        row: dict[str, Any] = {"bytes": nbytes}
        for name, dst, src in (
            ("pull", here, peer),
            ("push", peer, here),
            ("same_device", other, here),
        ):
            repeats = 20 if nbytes <= 1 << 20 else 3
            call = lambda d=dst, s=src, n=nbytes: world.copy(d[:n], s[:n])  # noqa: E731
            alone = median(rounds_us(call))
            graph = graph_of(call, repeats)
            queued = median(rounds_us(graph.replay, rounds=5)) / repeats
            row[name] = {
                "alone_us": round(alone, 2),
                "queued_in_graph_us": round(queued, 2),
                "gbps": round(nbytes / queued / 1e3, 1),
            }
        rows.append(row)
    return {
        "copies": rows,
        "words": _word_costs(world),
        "words_behind_copies": _words_behind_copies(world, here, peer),
        "strided": _strided(world),
    }


def _words_behind_copies(
    world: weft.World, here: torch.Tensor, peer: torch.Tensor
) -> dict[str, float]:
    """A pull of 1 MB, then a word, twenty times on one stream: what the word adds."""
    words = world.signals(64, torch.int64, name="words_behind")
    theirs = world.peer(words, (world.rank + 1) % world.num_ranks)
    pinned = torch.zeros(8, dtype=torch.int64).pin_memory()
    driver = world.backend._driver
    ways: dict[str, Callable[[], Any] | None] = {
        "copies_only": None,
        "word_pulled": lambda: world.copy_word(words[:1], theirs[1:2]),
        "word_same_device": lambda: world.copy(words[2:3], words[3:4]),
        "word_through_host": lambda: through_host(
            driver, words[4:].data_ptr(), words[5:].data_ptr(), pinned.data_ptr()
        ),
        "write_value": lambda: driver.write_word(
            torch.cuda.current_stream().cuda_stream, words[6:].data_ptr(), 1, 0
        ),
    }
    results = {}
    for nbytes in (1 << 20, 8 << 20):
        for name, way in ways.items():

            def pair(way: Callable[[], Any] | None = way, nbytes: int = nbytes) -> None:
                world.copy(here[:nbytes], peer[:nbytes])
                if way is not None:
                    way()

            graph = graph_of(pair, 20)
            times = rounds_us(graph.replay, rounds=5)
            results[f"{name}_{nbytes >> 20}_mb_us"] = round(median(times) / 20, 2)
    return results


def _strided(world: weft.World) -> dict[str, float]:
    """Rows of a quarter of a matrix, as a column-parallel gather moves them."""
    matrix = world.empty((4096, 8192), torch.bfloat16, name="strided")
    local = torch.empty(4096, 2048, dtype=torch.bfloat16, device=world.device)
    peer = world.peer(matrix, (world.rank + 1) % world.num_ranks)
    used = median(rounds_us(lambda: world.copy(local, peer[:, :2048])))
    return {
        "bytes": local.nbytes,
        "us": round(used, 2),
        "gbps": round(local.nbytes / used / 1e3, 1),
    }


def through_host(driver: Any, dst: int, src: int, bounce: int) -> None:
    """Two copies between device and host: both by copy engines, unlike one on the device."""
    queue = torch.cuda.current_stream().cuda_stream
    driver.copy(bounce, src, 8, queue)
    driver.copy(dst, bounce, 8, queue)


def _word_costs(world: weft.World) -> dict[str, Any]:
    """What one more operation of each kind adds to a chain of kernels on one stream."""
    words = world.signals(64, torch.int64, name="word_costs")
    local = torch.zeros(64, dtype=torch.int64, device=world.device)
    pinned = torch.zeros(64, dtype=torch.int64).pin_memory()
    bounce = pinned[8:].data_ptr()
    peer = world.peer(words, (world.rank + 1) % world.num_ranks)
    driver = world.backend._driver
    ways: dict[str, Callable[[], Any] | None] = {
        "kernel_only": None,
        "copy_word_pull": lambda: world.copy_word(local[:1], peer[:1]),
        "copy_word_push": lambda: world.copy_word(peer[1:2], local[1:2]),
        "copy_word_same_device": lambda: world.copy(local[2:3], local[1:2]),
        "copy_word_through_host": lambda: through_host(
            driver, local[7:].data_ptr(), local[1:].data_ptr(), bounce
        ),
        "copy_word_from_host": lambda: driver.copy(
            local[3:].data_ptr(), pinned.data_ptr(), 8, torch.cuda.current_stream().cuda_stream
        ),
        "write_value": lambda: driver.write_word(
            torch.cuda.current_stream().cuda_stream, local[4:].data_ptr(), 1, 0
        ),
        "write_value_peer": lambda: driver.write_word(
            torch.cuda.current_stream().cuda_stream, peer[4:].data_ptr(), 1, 0
        ),
        "set_word_kernel": lambda: set_word[(1,)](local[5:], 1, num_warps=1),
    }

    def chain(way: Callable[[], Any] | None) -> Callable[[], None]:
        def run() -> None:
            for _ in range(20):
                set_word[(1,)](local[6:], 1, num_warps=1)
                if way is not None:
                    way()

        return run

    results: dict[str, Any] = {}
    for mode in ("eager", "graph"):
        results[mode] = {}
        for name, way in ways.items():
            try:
                call = chain(way)
                if mode == "graph":
                    call = graph_of(call, 1).replay
                held_us = 3000 if mode == "eager" else 400
                times = rounds_us(call, rounds=7, held_us=held_us)
                results[mode][name] = round(median(times) / 20, 2)
            except Exception as error:
                results[mode][name] = repr(error)[:120]
    return results


def starve(world: weft.World) -> dict[str, Any]:
    """Which ways of setting a word get through while a grid holds every SM?"""
    flag = world.signals(8, torch.int64, name="starve_flag")
    remote = world.signals(8, torch.int64, name="starve_source")
    one = torch.ones(8, dtype=torch.int64, device=world.device)
    remote.fill_(1)
    together()
    num = world.target.num_sms * 2
    out = torch.zeros(num * 2, dtype=torch.int64, device=world.device)
    driver = world.backend._driver
    pinned = torch.ones(8, dtype=torch.int64).pin_memory()
    peer_one = world.peer(remote, (world.rank + 1) % world.num_ranks)
    side = world.stream("starve")

    def queue() -> int:
        return torch.cuda.current_stream().cuda_stream

    ways = {
        "copy_word_same_device": lambda: world.copy(flag[:1], one[:1]),
        "torch_copy_same_device": lambda: flag[:1].copy_(one[:1]),
        "copy_word_pull": lambda: world.copy_word(flag[:1], peer_one[:1]),
        "copy_word_through_host": lambda: through_host(
            driver, flag.data_ptr(), one.data_ptr(), pinned[4:].data_ptr()
        ),
        "copy_from_host": lambda: driver.copy(flag.data_ptr(), pinned.data_ptr(), 8, queue()),
        "write_value": lambda: driver.write_word(queue(), flag.data_ptr(), 1, 0),
        "kernel": lambda: set_word[(1,)](flag[:1], 1, num_warps=1),
    }
    results: dict[str, Any] = {}
    for mode in ("eager", "graph"):
        for name, way in ways.items():
            try:
                with side:
                    call = graph_of(way, 1).replay if mode == "graph" else way
                    call()
                samples, came = [], True
                for _ in range(3):
                    flag.zero_()
                    torch.cuda.synchronize()
                    fill_machine[(num,)](flag, out, 1, num_warps=32)
                    time.sleep(0.002)  # the grid is resident long before the word is sent
                    sent = time.perf_counter()
                    with side:
                        call()
                    torch.cuda.current_stream().synchronize()
                    samples.append((time.perf_counter() - sent) * 1e6)
                    seen = out.view(-1, 2)[:, 1].min().item()
                    came = came and seen >= 1
                    torch.cuda.synchronize()
                results[f"{name}_{mode}"] = {
                    "came_through": bool(came),
                    "host_to_grid_end_us": round(median(samples), 1),
                }
            except Exception as error:
                results[f"{name}_{mode}"] = repr(error)[:160]
    return results


def launch(world: weft.World) -> dict[str, Any]:
    """Host time of a launch, and device time of a kernel in a graph."""
    x = torch.zeros(16, device=world.device)
    results: dict[str, Any] = {}

    def host_us(call: Callable[[], Any], count: int = 300) -> float:
        call()
        torch.cuda.synchronize()
        samples = []
        for _ in range(5):
            began = time.perf_counter()
            for _ in range(count):
                call()
            samples.append((time.perf_counter() - began) / count * 1e6)
            torch.cuda.synchronize()
        return round(median(samples), 2)

    def bare() -> None:
        nothing[(1,)](x, x, x, x, x, x, 128, 256, num_warps=4)

    def with_world() -> None:
        nothing_with_world[(1,)](world.arg, x, x, x, x, x, x, 128, 256, num_warps=4)

    def cooperative() -> None:
        nothing[(1,)](x, x, x, x, x, x, 128, 256, num_warps=4, launch_cooperative_grid=True)

    for name, call in (("bare", bare), ("world", with_world), ("cooperative", cooperative)):
        results[f"{name}_host_us"] = host_us(call)
        graph = graph_of(call, 100)
        results[f"{name}_in_graph_device_us"] = round(
            median(rounds_us(graph.replay, rounds=7)) / 100, 3
        )
    results["graph_replay_host_us"] = host_us(graph_of(bare, 1).replay, 100)
    y = torch.zeros(16, device=world.device)
    results["torch_add_host_us"] = host_us(lambda: torch.add(x, x, out=y))
    results["world_copy_host_us"] = host_us(lambda: world.copy(y, x))
    results["torch_copy_host_us"] = host_us(lambda: y.copy_(x))
    results["operator_call_host_us"] = host_us(lambda: world.operator_call("probe"))
    request = {"gathered": ((64, 64), torch.bfloat16)}, {"ready": (4, torch.int64)}
    results["workspace_host_us"] = host_us(lambda: world.workspace("probe", *request))
    side = world.stream("launch")
    main = world.current_stream()

    def fork_join() -> None:
        side.wait(main)
        main.wait(side)

    results["fork_join_host_us"] = host_us(fork_join)
    return results


def loading(world: weft.World) -> dict[str, Any]:
    """What the host cannot do while a kernel runs: each is timed beside one of 60 ms."""
    out = torch.zeros(8, dtype=torch.int64, device=world.device)
    x = torch.zeros(64, device=world.device)
    y = torch.zeros(64, device=world.device)
    compiled = [never_loaded.warmup(x, VARIANT=i, grid=(1,)) for i in range(3)]
    assert compiled
    spin[(1,)](1000, out, num_warps=1)
    set_word[(1,)](out[4:], 1, num_warps=1)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    kept: list[Any] = []
    acts: dict[str, Callable[[], Any]] = {
        "launch_of_a_loaded_kernel": lambda: set_word[(1,)](out[4:], 1, num_warps=1),
        "first_launch_of_a_kernel": lambda: never_loaded[(1,)](x, VARIANT=1),
        "second_launch_of_that_kernel": lambda: never_loaded[(1,)](x, VARIANT=1),
        "first_copy_of_40_bytes_on_device": lambda: y[:10].copy_(x[:10]),
        "first_use_of_a_torch_kernel": lambda: torch.erfinv(x),
        "second_use_of_that_torch_kernel": lambda: torch.erfinv(x),
        "allocate_1_gb_on_device": lambda: kept.append(
            torch.empty(1 << 30, dtype=torch.uint8, device=world.device)
        ),
        "allocate_4_mb_pinned": lambda: kept.append(torch.empty(1 << 20).pin_memory()),
        "new_stream_and_event": lambda: kept.append((torch.cuda.Stream(), torch.cuda.Event())),
        "empty_cache": torch.cuda.empty_cache,
    }
    results = {}
    for name, act in acts.items():
        together()
        spin[(1,)](60_000_000, out, num_warps=1)
        began = time.perf_counter()
        with torch.cuda.stream(side):
            act()
        results[f"{name}_us"] = round((time.perf_counter() - began) * 1e6, 1)
        torch.cuda.synchronize()
    return results


def interference(world: weft.World) -> dict[str, Any]:
    """A GEMM beside copies of a gather's size: how much slower does each become?"""
    m, n, k = 8192, 7168, 4096
    a = torch.randn(m, k, device=world.device).bfloat16()
    b = torch.randn(n, k, device=world.device).bfloat16()
    c = torch.empty(m, n, device=world.device, dtype=torch.bfloat16)
    nbytes = 64 << 20
    source = world.empty(nbytes // 2, torch.bfloat16, name="interference")
    source.normal_()
    sink = torch.empty_like(source)
    together()
    side, main = world.stream("interference"), world.current_stream()
    peers = [world.peer(source, (world.rank + i) % world.num_ranks) for i in range(world.num_ranks)]

    def gemm() -> None:
        torch.matmul(a, b.t(), out=c)

    def pull() -> None:
        for peer in peers[1:]:
            world.copy(sink, peer)

    def push_by_sms(programs: int) -> None:
        for peer in peers[1:]:
            move[(programs,)](peer, sink, nbytes // 2, BLOCK=8192, num_warps=16)

    def beside(copies: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            side.wait(main)
            with side:
                copies()
            gemm()
            main.wait(side)

        return run

    variants = {
        "gemm": gemm,
        "copy_engine_pulls": pull,
        "sm16_pushes": lambda: push_by_sms(16),
        "gemm_beside_copy_engine": beside(pull),
        "gemm_beside_sm16": beside(lambda: push_by_sms(16)),
    }
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for call in variants.values():
        call()
    for _ in range(11):
        for name, call in variants.items():
            together()
            samples[name].append(events_us(call))
    return {"shape": [m, n, k], "copied_bytes": nbytes * (world.num_ranks - 1)} | {
        name: spread(times) for name, times in samples.items()
    }


SECTIONS = {
    section.__name__: section
    for section in (signals, crowd, loading, launch, copy_engine, starve, put, interference)
}


def main(rank: int, names: list[str]) -> None:
    world = weft.init(heap_bytes=1 << 30)
    results: dict[str, Any] = provenance() if rank == 0 else {}
    results["num_ranks"] = world.num_ranks
    for name in names:
        began = time.monotonic()
        results[name] = SECTIONS[name](world)
        together()
        if rank == 0:
            print(f"{name}: {time.monotonic() - began:.1f} s\n  {results[name]}", flush=True)
            save("hardware", results, world.num_ranks, RESULTS)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--only", default=",".join(SECTIONS))
    parser.add_argument("--timeout", type=float, default=240.0)
    options = parser.parse_args()
    processes.run_on_gpus(main, options.ranks, options.only.split(","), timeout_s=options.timeout)
