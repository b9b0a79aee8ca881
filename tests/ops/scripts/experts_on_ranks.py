"""ep_dispatch and ep_combine on GPUs, under torchrun: rows of many widths and dtypes, skewed
choices, ragged tokens, too little room, and a layer's way there and back.

Called again and again, and recorded once and replayed with other tokens.
"""

from __future__ import annotations

from typing import Any

import torch

import weft
from weft.base.dtypes import tolerance
from weft.base.errors import CapacityError, UsageError
from weft.ops import card, ep_combine, ep_dispatch
from weft.tune.answers import rel_err
from weft.tune.case import drawn_on

# Tokens of all ranks, elements, experts, choices, dtype; scales of each row.
CASES = [
    (4096, 7168, 256, 8, "bfloat16", 0),
    (4096, 7168, 256, 8, "float8_e4m3fn", 56),
    (997, 2048, 60, 4, "float16", 0),
    (64, 512, 7, 7, "float32", 0),
    (3, 24, 2, 1, "bfloat16", 0),
    (130, 7, 9, 3, "float32", 3),
]
CALLS = 4
# Slots that were outgrown keep their memory until the world closes, and here every size and
# transport comes in turn: 1.25 GiB on 4 ranks, more than the 1 GiB that a world has by default.
HEAP_BYTES = 2 << 30


def check(out: Any, expected: Any, allowed: float, what: Any) -> None:
    error = rel_err(out, expected)
    assert error <= allowed, (what, error)


def every_size(world: Any) -> int:
    """Every operator by every transport."""
    cases = 0
    for m, n, experts, top_k, dtype, scales in CASES:
        shape = {
            "m": m,
            "n": n,
            "experts": experts,
            "top_k": top_k,
            "tile_m": 64,
            "scale_bytes": 4 * scales,
        }
        for name, allowed in (("ep_dispatch", 0.0), ("ep_combine", tolerance(dtype, top_k))):
            op = card(name)
            if dtype not in op.dtypes:
                continue
            problem = op.make_problem(world.num_ranks, shape, dtype)
            for seed in range(2):
                everyone = [
                    drawn_on(world.device, op.make_inputs, problem, rank, seed)
                    for rank in range(world.num_ranks)
                ]
                expected = drawn_on(world.device, op.reference, problem, everyone)[world.rank]
                if name == "ep_combine":
                    expected = (expected,)
                mine = everyone[world.rank]
                for config in op.candidates(problem, world.target):
                    for _ in range(CALLS):
                        out = op.run(world, problem, mine, config)
                        out = out if isinstance(out, tuple) else (out,)
                        check(out, expected, allowed, (name, shape, dtype, config))
                    cases += 1
    return cases


def recorded(world: Any) -> int:
    """Other tokens and choices in the same tensors; there and back is a sum of weights."""
    rows, n, experts, top_k = 300, 1024, 16, 4
    x = torch.randn(rows, n, device=world.device)
    ids = torch.zeros(rows, top_k, dtype=torch.int32, device=world.device)
    weights = torch.ones(rows, top_k, device=world.device)

    def both() -> torch.Tensor:
        there, handle = ep_dispatch(x, ids, weights, experts, world=world)
        return ep_combine(there, handle, world=world)

    ids.copy_(torch.arange(top_k))
    both()
    with world.record() as recording:
        out = both()
    for seed in range(20):
        generator = torch.Generator().manual_seed(100 * seed + world.rank)
        chosen = torch.rand(rows, experts, generator=generator)
        if seed % 3 == 0:  # all to one rank, or nearly
            chosen[:, : experts // world.num_ranks] += 1
        ids.copy_(chosen.topk(top_k).indices)
        weights.copy_(torch.rand(rows, top_k, generator=generator))
        x.copy_(torch.randn(rows, n, generator=generator))
        out.fill_(torch.nan)
        recording.replay()
        wanted = x * weights.sum(1, keepdim=True)
        assert rel_err(out, wanted) <= 1e-5, seed
    return 20


def said(world: Any) -> int:
    """Too little room, and a choice that comes twice: every rank raises, and the world goes on."""
    rows = 40 + 3 * world.rank
    most = 40 + 3 * (world.num_ranks - 1)
    x = torch.ones(rows, 64, device=world.device)
    ids = torch.arange(2, dtype=torch.int32, device=world.device).repeat(rows, 1)
    weights = torch.full((rows, 2), 0.5, device=world.device)
    sizes = {"world": world, "max_tokens": most}
    ep_dispatch(x, ids, weights, 2 * world.num_ranks, capacity=50, **sizes)
    try:
        world.synchronize()
    except CapacityError as error:
        assert "rank 0 gets" in str(error) and "capacity=50" in str(error)
    else:
        raise AssertionError("no word of what did not fit")
    ids[5, 1] = ids[5, 0]
    ep_dispatch(x, ids, weights, 2 * world.num_ranks, **sizes)
    try:
        world.synchronize()
    except UsageError as error:
        assert "choice 1 of token 5 of rank 0 is an expert that the token has" in str(error)
    else:
        raise AssertionError("no word of what came twice")
    there, handle = ep_dispatch(x, ids[:, :1].contiguous(), weights[:, :1].contiguous(), 2, **sizes)
    back = ep_combine(there, handle, world=world)
    assert rel_err(back, 0.5 * x) == 0.0
    world.synchronize()
    return 3


def main() -> None:
    world = weft.init(heap_bytes=HEAP_BYTES)
    cases = every_size(world) + recorded(world) + said(world)
    rank, num_ranks = world.rank, world.num_ranks
    world.close()
    print(f"rank {rank} of {num_ranks}: {cases} cases", flush=True)


main()
