"""Calls that were compiled ahead of time, on GPUs, in processes that cannot import Triton.

    python artefact.py build DIR                        compiles into DIR; needs Triton, and no GPU
    torchrun --nproc-per-node 2 artefact.py run DIR     needs GPUs, and no Triton

Each operator and a program at several m: eager, eager in the other slot, recorded, replayed with
other inputs. Prints a line for each, and at the end one for each rank; fails where one is wrong.
"""

import sys
from pathlib import Path

VERB, DIR = sys.argv[1], Path(sys.argv[2])
if VERB == "run":
    sys.modules["triton"] = None  # to import it is an ImportError from here on

import torch  # noqa: E402

RANKS = 2
ROWS = (1, 2, 64, 997, 1000, 2048, 8192)
HIDDEN, INNER = 2048, 4096
SIZES = {
    "ag_gemm": {"m": ROWS, "n": HIDDEN, "k": INNER},
    "gemm_rs": {"m": ROWS, "n": INNER, "k": HIDDEN},
    "all_reduce": {"m": ROWS, "n": 1024},
    "mlp": {"m": ROWS},
    "persistent": {"m": (2, 64)},
}


def build():
    from weft.compiler import Shard, Tensor, all_gather, program, reduce_scatter, silu_mul
    from weft.plan.artefact import build as compile_ahead

    @program(
        x=Tensor("bfloat16", ("m", HIDDEN), Shard(0)),
        w1=Tensor("bfloat16", (HIDDEN, 2 * INNER), Shard(1)),
        w2=Tensor("bfloat16", (INNER, HIDDEN), Shard(0)), mesh="tp",
    )  # fmt: skip
    def mlp(x, w1, w2):
        return reduce_scatter(silu_mul(all_gather(x) @ w1) @ w2)

    made = {"mlp": mlp, "persistent": mlp.options(lowering="persistent")}
    for name, sizes in SIZES.items():
        built = compile_ahead(made.get(name, name), sizes, num_ranks=RANKS, targets=sys.argv[3:])
        built.write(DIR / name)
        print(f"{name}: {built.calls} calls, {len(built.kernels)} kernels", flush=True)


# ---------------------------------------------------------------------------------------------
# Inputs of all ranks, and right answers, in fp32: alike on each rank.


def part(x, rank):
    rows = -(-len(x) // RANKS)
    return x[rank * rows : (rank + 1) * rows]


def drawn(generator, *shape):
    scale = shape[0] ** -0.5 if shape[0] in (HIDDEN, INNER, HIDDEN // RANKS) else 1.0
    return (torch.randn(*shape, generator=generator, device="cuda") * scale).bfloat16()


def problem(op, m, seed):
    """By rank its tensors, and by rank its answer."""
    g = torch.Generator(device="cuda").manual_seed(seed)
    if op == "ag_gemm":
        a, bs = drawn(g, m, INNER), [drawn(g, INNER, HIDDEN) for _ in range(RANKS)]
        return [(part(a, r), bs[r]) for r in range(RANKS)], [a.float() @ b.float() for b in bs]
    if op == "gemm_rs":
        each = [(drawn(g, m, HIDDEN), drawn(g, HIDDEN, INNER)) for _ in range(RANKS)]
        whole = sum(a.float() @ b.float() for a, b in each)
        return each, [part(whole, r) for r in range(RANKS)]
    if op == "all_reduce":
        each = [(drawn(g, m, 1024),) for _ in range(RANKS)]
        return each, [sum(x.float() for (x,) in each)] * RANKS
    x = drawn(g, m, HIDDEN)
    each = [(drawn(g, HIDDEN, INNER), drawn(g, INNER // RANKS, HIDDEN)) for _ in range(RANKS)]
    whole = 0
    for w1, w2 in each:
        h = x.float() @ w1.float()  # columns in pairs: gate, up
        gated = torch.nn.functional.silu(h[:, ::2]) * h[:, 1::2]
        whole = whole + gated.bfloat16().float() @ w2.float()
    return [(part(x, r), *each[r]) for r in range(RANKS)], [part(whole, r) for r in range(RANKS)]


def error(found, right):
    """Of the largest right number; one that is not a number is an error without bound."""
    if not right.numel():
        return 0.0
    if not torch.isfinite(found).all():
        return float("inf")
    return float((found.float() - right).abs().max() / right.abs().max().clamp(min=1e-6))


def run():
    import weft.runtime

    world = weft.runtime.init(heap_bytes=1 << 30)
    rank, failed, checks = world.rank, [], 0
    for op, sizes in SIZES.items():
        compiled = weft.runtime.load(DIR / op)
        for m in sizes["m"]:
            named = {} if op == "all_reduce" else {"m": m}
            tensors, right = problem(op, m, seed=m)
            others, other_right = problem(op, m, seed=m + 1)
            own = [one.clone() for one in tensors[rank]]
            found = {}
            try:
                for way in ("eager", "again"):
                    found[way] = error(compiled(*own, world=world, **named), right[rank])
                with world.record() as recording:
                    out = compiled(*own, world=world, **named)
                recording.replay()
                found["replayed"] = error(out, right[rank])
                for one, other in zip(own, others[rank]):
                    one.copy_(other)
                recording.replay()
                found["replayed with others"] = error(out, other_right[rank])
                found["eager with others"] = error(
                    compiled(*own, world=world, **named), other_right[rank]
                )
                world.synchronize()
            except Exception as problem_met:
                failed.append(f"{op} m={m}: {type(problem_met).__name__}: {problem_met}")
                print(f"rank {rank}: FAILED {failed[-1]}", flush=True)
                raise
            wrong = {way: size for way, size in found.items() if size > 0.02}
            checks += len(found)
            verdict = f"WRONG {wrong}" if wrong else f"ok {max(found.values()):.4f}"
            print(f"rank {rank}: {op} m={m}: {verdict}", flush=True)
            failed += [f"{op} m={m} {way}: {size:.3g}" for way, size in wrong.items()]
    loaded = sorted(name for name in sys.modules if name.split(".")[0] == "triton")
    assert loaded == ["triton"] and sys.modules["triton"] is None, loaded
    world.close()
    print(f"rank {rank}: {checks} checks, {len(failed)} wrong: {'; '.join(failed) or 'all right'}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    {"build": build, "run": run}[VERB]()
