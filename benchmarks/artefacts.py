"""Calls that were compiled ahead of time, on GPUs, in processes that cannot import Triton.

    python artefacts.py build DIR cuda:90              compiles into DIR; needs Triton, and no GPU
    torchrun --nproc-per-node 2 artefacts.py answer DIR     the same calls compiled where they run
    torchrun --nproc-per-node 2 artefacts.py run DIR        by the artefacts: no Triton

Operators, a program and a decode step of two layers of Llama-3 8B at several sizes: eager, eager in
the other slot, recorded, replayed with other inputs. `answer` makes inputs, checks its results in
fp32, and keeps both in DIR; `run` has the same inputs, and its results must be the same numbers
within rounding (the same bits where the call is the same). Both time the first call of a process,
the host's time of a later one, and a replay. `run` prints a line for each call, fails where one is
wrong, and writes results/artefacts_<gpus>.json.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

VERB, DIR = sys.argv[1], Path(sys.argv[2])
if VERB == "run":
    sys.modules["triton"] = None  # type: ignore[assignment]  # to import it fails from here on

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

RESULTS = Path(__file__).parent / "results"
RANKS = int(os.environ.get("WORLD_SIZE", 2))
ROWS = (1, 2, 64, 997, 1000, 2048, 8192)
HIDDEN, INNER = 2048, 4096
MODEL, CONTEXT = "llama3-8b", 1024
SIZES = {
    "ag_gemm": {"m": ROWS, "n": HIDDEN, "k": INNER},
    "gemm_rs": {"m": ROWS, "n": INNER, "k": HIDDEN},
    "all_reduce": {"m": ROWS, "n": 1024},
    "mlp": {"m": ROWS},
    "persistent_mlp": {"m": (2, 64)},
    "decode_step": {"b": (1, 3, 16)},
}
# Of the largest right number. A sum in another order rounds otherwise; two layers do so often.
TOLERANCE, OF_LAYERS = 0.02, 0.05
CALLS, REPLAYS = 50, 20


def made() -> dict[str, Any]:
    """What is called, by name; of what is not here, the operator of that name."""
    import decode_step

    from weft.compiler import Shard, Tensor, all_gather, program, reduce_scatter, silu_mul

    @program(
        x=Tensor("bfloat16", ("m", HIDDEN), Shard(0)),
        w1=Tensor("bfloat16", (HIDDEN, 2 * INNER), Shard(1)),
        w2=Tensor("bfloat16", (INNER, HIDDEN), Shard(0)), mesh="tp",
    )  # fmt: skip
    def mlp(x, w1, w2):
        return reduce_scatter(silu_mul(all_gather(x) @ w1) @ w2)

    step = decode_step.step_of(decode_step.MODELS[MODEL], CONTEXT)
    return {
        "mlp": mlp, "persistent_mlp": mlp.options(lowering="persistent"),
        "decode_step": step.options(lowering="persistent"),
    }  # fmt: skip


def build() -> None:
    from weft.plan.artefact import build as compile_ahead

    programs = made()
    for name, sizes in SIZES.items():
        begun = time.perf_counter()
        built = compile_ahead(
            programs.get(name, name), sizes, num_ranks=RANKS, targets=sys.argv[3:]
        )
        built.write(DIR / name)
        size, took = sum(map(len, built.files.values())), time.perf_counter() - begun
        print(f"{name}: {built.calls} calls, {len(built.kernels)} kernels, {size >> 10} KB, "
              f"{took:.1f} s", flush=True)  # fmt: skip


# ---------------------------------------------------------------------------------------------
# Inputs and right answers


def drawn(generator: torch.Generator, *shape: int) -> torch.Tensor:
    scale = shape[0] ** -0.5 if shape[0] in (HIDDEN, INNER, INNER // RANKS) else 1.0
    return (torch.randn(*shape, generator=generator, device="cuda") * scale).bfloat16()


def part(x: torch.Tensor, rank: int) -> torch.Tensor:
    rows = -(-len(x) // RANKS)
    return x[rank * rows : (rank + 1) * rows]


def problem(op: str, m: int, seed: int) -> tuple[list[tuple], list[torch.Tensor]]:
    """By rank its tensors, and by rank its answer in fp32: alike on each rank."""
    g = torch.Generator(device="cuda").manual_seed(seed)
    if op == "ag_gemm":
        a, bs = drawn(g, m, INNER), [drawn(g, INNER, HIDDEN) for _ in range(RANKS)]
        return [(part(a, r), bs[r]) for r in range(RANKS)], [a.float() @ b.float() for b in bs]
    if op == "gemm_rs":
        each = [(drawn(g, m, HIDDEN), drawn(g, HIDDEN, INNER)) for _ in range(RANKS)]
        whole = torch.stack([a.float() @ b.float() for a, b in each]).sum(0)
        return each, [part(whole, r) for r in range(RANKS)]
    if op == "all_reduce":
        rows = [drawn(g, m, 1024) for _ in range(RANKS)]
        return [(x,) for x in rows], [torch.stack([x.float() for x in rows]).sum(0)] * RANKS
    x, columns = drawn(g, m, HIDDEN), 2 * INNER // RANKS
    each = [(drawn(g, HIDDEN, columns), drawn(g, INNER // RANKS, HIDDEN)) for _ in range(RANKS)]
    whole = torch.zeros(m, HIDDEN, device="cuda")
    for w1, w2 in each:
        h = x.float() @ w1.float()  # columns in pairs: gate, up
        gated = torch.nn.functional.silu(h[:, ::2]) * h[:, 1::2]
        whole += gated.bfloat16().float() @ w2.float()
    return [(part(x, r), *each[r]) for r in range(RANKS)], [part(whole, r) for r in range(RANKS)]


def inputs(op: str, size: int, rank: int) -> dict[str, list]:
    """This rank's tensors and others like them, and right answers of both."""
    found: dict[str, list] = {"own": [], "others": [], "right": []}
    if op != "decode_step":
        for which, seed in ("own", 2 * size), ("others", 2 * size + 1):
            tensors, right = problem(op, size, seed)
            found[which] = [one.clone() for one in tensors[rank]]
            found["right"].append(right[rank])
        return found
    import decode_step

    def summed(x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        return x

    model = decode_step.MODELS[MODEL]
    given = decode_step.inputs(model, CONTEXT, size, rank, RANKS, torch.device("cuda"))
    linear = decode_step.as_linear(given)  # weights as [n, k]
    for which, x in ("own", given["x"]), ("others", given["x"].flip(-1).contiguous()):
        found[which] = [x, *linear[1:]]
        kept = {name: one.clone() if "keys" in name or "values" in name else one
                for name, one in given.items()}  # fmt: skip
        found["right"].append(decode_step.by_torch(model, CONTEXT, kept | {"x": x}, summed))
    return found


def error(found: torch.Tensor, right: torch.Tensor) -> float:
    """Of the largest right number; one that is not a number is an error without bound."""
    if not right.numel():
        return 0.0
    if not torch.isfinite(found).all():
        return float("inf")
    return float((found.float() - right.float()).abs().max() / right.abs().max().clamp(min=1e-6))


def calls_of(sizes: dict[str, Any]) -> list[tuple[int, dict[str, int]]]:
    """The size that differs, and what a call is told of it."""
    name = next(iter(sizes))
    return [(one, {name: one}) for one in sizes[name]]


# ---------------------------------------------------------------------------------------------
# Both ways


def timed(world: Any, call: Callable[[], Any], recording: Any) -> dict[str, float]:
    """Units   eager_host_us: until a call has queued its work; replay_us: of the device, the rank's
    median over rounds"""
    host, replays = [], []
    for _ in range(7):
        world.synchronize()
        dist.barrier()  # the world's own is a kernel of Triton's
        begun = time.perf_counter()
        for _ in range(CALLS):
            call()
        host.append((time.perf_counter() - begun) / CALLS * 1e6)
        world.synchronize()
        dist.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(2_000_000)
        begin.record()
        for _ in range(REPLAYS):
            recording.replay()
        end.record()
        end.synchronize()
        replays.append(begin.elapsed_time(end) / REPLAYS * 1e3)
    return {"eager_host_us": round(statistics.median(host), 1),
            "replay_us": round(statistics.median(replays), 1)}  # fmt: skip


def first_of(out: Any) -> torch.Tensor:
    """A decode step's other results are its caches."""
    return out if isinstance(out, torch.Tensor) else out[0]


def called(world: Any, call: Callable[[], Any], own: list, others: list) -> tuple[dict, dict]:
    """Results of one call in each way, and its times."""
    found = {}
    begun = time.perf_counter()
    found["eager"] = first_of(call()).clone()
    world.synchronize()
    first_ms = (time.perf_counter() - begun) * 1e3
    found["again"] = first_of(call()).clone()
    with world.record() as recording:
        out = call()
    recording.replay()
    found["replayed"] = first_of(out).clone()
    times = {"first_call_ms": round(first_ms, 2), **timed(world, call, recording)}
    for one, other in zip(own, others, strict=True):
        if one.data_ptr() != other.data_ptr():
            one.copy_(other)
    recording.replay()
    found["others, replayed"] = first_of(out).clone()
    found["others, eager"] = first_of(call()).clone()
    world.synchronize()
    return found, times


def wrong_of(op: str, errors: dict[str, float]) -> dict[str, float]:
    bound = OF_LAYERS if op == "decode_step" else TOLERANCE
    return {way: round(one, 4) for way, one in errors.items() if one > bound}


def answer() -> None:
    import weft
    import weft.ops
    from weft.tune.provenance import provenance

    world, programs, failed = weft.init(heap_bytes=1 << 30), made(), []
    kept: dict[str, Any] = {"provenance": json.dumps(provenance())}
    for op, sizes in SIZES.items():
        function = programs.get(op) or getattr(weft.ops, op)
        for size, named in calls_of(sizes):
            given = inputs(op, size, world.rank)
            own, others = given["own"], given["others"]
            told = {} if op in ("all_reduce", "gemm_rs") else named
            # Those of a decode step `run` cannot make: its program needs the compiler.
            before = {"own": [own[0].clone(), *own[1:]], "others": others}
            found, times = called(world, lambda: function(*own, world=world, **told), own, others)
            kept[f"{op} {size}"] = {"found": found, "times": times} | (
                before if op == "decode_step" else {}
            )
            wrong = wrong_of(op, {
                way: error(one, given["right"]["others" in way]) for way, one in found.items()
            })  # fmt: skip
            failed += [f"{op} {named} {wrong}"] if wrong else []
            print(f"rank {world.rank}: {op} {named}: {wrong or 'ok'} {times}", flush=True)
    torch.save(kept, DIR / f"answers_{world.rank}.pt")
    world.close()
    print(f"rank {world.rank}: {'; '.join(failed) or 'all right'}")
    sys.exit(bool(failed))


def run() -> None:
    import weft.runtime

    world = weft.runtime.init(heap_bytes=1 << 30)
    rank, failed, rows = world.rank, [], list[dict[str, Any]]()
    answers = torch.load(DIR / f"answers_{rank}.pt", map_location=world.device, weights_only=True)
    for op, sizes in SIZES.items():
        begun = time.perf_counter()
        compiled = weft.runtime.load(DIR / op)
        loaded = time.perf_counter()
        compiled.prepare(world)
        of_op = {"op": op, "load_ms": round((loaded - begun) * 1e3, 2),
                 "prepare_ms": round((time.perf_counter() - loaded) * 1e3, 2)}  # fmt: skip
        for size, named in calls_of(sizes):
            there = answers[f"{op} {size}"]
            given = there if "own" in there else inputs(op, size, rank)
            own, told = given["own"], {} if op == "all_reduce" else named
            found, times = called(
                world, lambda: compiled(*own, world=world, **told), own, given["others"]
            )
            errors = {way: error(one, there["found"][way]) for way, one in found.items()}
            same = all(torch.equal(one, there["found"][way]) for way, one in found.items())
            wrong = wrong_of(op, errors)
            failed += [f"{op} {named} {wrong}"] if wrong else []
            print(f"rank {rank}: {op} {named}: {wrong or 'ok'}, same bits: {same}, {times}",
                  flush=True)  # fmt: skip
            rows.append({
                **of_op, **named, "checks": len(errors), "same_bits": same,
                "largest_error": round(max(errors.values()), 5), **times,
                "compiled_in_process": there["times"],
            })  # fmt: skip
    loaded_modules = sorted(name for name in sys.modules if name.split(".")[0] == "triton")
    assert loaded_modules == ["triton"] and sys.modules["triton"] is None, loaded_modules
    if rank == 0:
        from weft.tune.provenance import save

        document = {"what": __doc__.splitlines()[0], "num_ranks": RANKS, "rows": rows}
        save("artefacts", json.loads(answers["provenance"]) | document, RANKS, RESULTS)
    checks = sum(one["checks"] for one in rows)
    world.close()
    print(f"rank {rank}: {checks} checks; {'; '.join(failed) or 'all right'}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    {"build": build, "answer": answer, "run": run}[VERB]()
