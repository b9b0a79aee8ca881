"""Programs as one persistent kernel: right on every world, and bit for bit what overlaps."""

from __future__ import annotations

import pytest
import torch
from persistent_programs import mlp
from random_programs import of_rank

import weft
import weft.megakernel
import weft.ops
from weft.base.dtypes import tolerance
from weft.base.errors import ConfigError, ShapeError, UsageError
from weft.compiler import (
    Partial,
    Replicate,
    Settings,
    Shard,
    Tensor,
    all_gather,
    all_reduce,
    libraries,
    program,
    reduce_scatter,
    rms_norm,
    silu,
)
from weft.megakernel import Persistent

K, N = 16, 24
PRODUCTS = {"product": (16, 32, 16), "product_2": (16, 16, 16)}
SMALL = {"gathered": (16, 16), "gated": (16, 16), "scattered": (16, 16), **PRODUCTS}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cache"))


def layer(x, w, residual, weight, w2):
    """Every kind that computes, and a sum that all ranks need."""
    total = all_reduce(silu(x) @ w) + residual
    normed = rms_norm(total, weight)
    return normed * all_gather(normed @ w2, dim=1), total


def gathers(x, w):
    gathered = all_gather(x)
    return gathered, gathered @ w


def sums(x, w):
    return all_reduce(x @ w)


def of(dtype: str, **parameters) -> dict[str, Tensor]:
    return {name: Tensor(dtype, one[:-1], one[-1]) for name, one in parameters.items()}


def compiled(function, parameters, tiles=None, engines=None):
    settings = Settings(tiles=tiles or {}, engines=engines or {})
    return program(mesh="tp", settings=settings, **parameters)(function)


def mlp_of(dtype: str = "float32", tiles=None):
    parameters = of(
        dtype, x=("m", K, Shard(0)), w1=(K, 2 * N, Shard(1)), w2=(N, K, Shard(0))
    )  # fmt: skip
    return compiled(mlp, parameters, tiles or SMALL, {"gathered": "sm_push"})


LAYER = of(
    "float32", x=("m", K, Shard(1)), w=(K, N, Shard(0)), residual=("m", N, Replicate()),
    weight=(1, N, Replicate()), w2=(N, N, Shard(1)),
)  # fmt: skip
LAYER_TILES = {
    **dict.fromkeys(("activated", "reduced", "total", "normed", "gathered", "scaled"), (16, 16)),
    **PRODUCTS,
}


class Calls:
    """Calls of a program on one rank, each compared with its meaning."""

    def __init__(self, made, world, how: Persistent, num_ranks: int) -> None:
        self.made, self.world, self.how, self.num_ranks = made, world, how, num_ranks
        self.placed = made.stages.tasks["place"]

    def given(self, m: int, seed: int, transpose: str = ""):
        """Whole tensors, and this rank's parts."""
        whole, mine = {}, {}
        generator = torch.Generator().manual_seed(seed)
        for task in self.placed.tasks:
            if task.kind == "input":
                shape = [m if size == "m" else size for size in task.type.sizes]
                whole[task.name] = torch.randn(*shape, generator=generator)
                part = of_rank(
                    task.type, whole[task.name], {"m": m}, self.world.rank, self.num_ranks
                )
                if task.name in transpose.split():
                    part = part.t().contiguous().t()
                mine[task.name] = part.to(getattr(torch, task.type.dtype))
        return whole, mine

    def __call__(self, mine, m: int, lowering: str = "persistent"):
        made = self.made.options(lowering=self.how if lowering == "persistent" else lowering)
        found = made(*mine.values(), world=self.world, m=m)
        return found if isinstance(found, tuple) else (found,)

    def check(self, results, whole, m: int) -> None:
        wanted = libraries.reference(self.placed, whole)
        for name, result, one in zip(self.placed.results, results, wanted):
            part = of_rank(
                self.placed.task(name).type, one, {"m": m}, self.world.rank, self.num_ranks
            )
            assert result.shape == part.shape
            assert (result.float() - part).norm() <= 4 * tolerance("float32", 64) * one.norm()


def main(made, how: Persistent, num_ranks: int, m: int, other_m: int = 0, transpose: str = ""):
    """Eager, recorded, other rows, replayed: each right."""
    world = weft.init()
    calls = Calls(made, world, how, num_ranks)
    whole, mine = calls.given(m, 0, transpose)
    calls.check(calls(mine, m), whole, m)
    with world.record() as recording:
        results = calls(mine, m)
    if other_m:
        others, theirs = calls.given(other_m, 1, transpose)
        calls.check(calls(theirs, other_m), others, other_m)
    for seed in (2, 3):
        again, new = calls.given(m, seed, transpose)
        for name, tensor in new.items():
            mine[name].copy_(tensor)
        recording.replay()
        calls.check(results, again, m)
    world.close()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("num_ranks", "m", "how"),
    [
        (1, 9, Persistent(num_workers=2)),
        (2, 37, Persistent(num_workers=3)),
        (3, 20, Persistent(num_workers=1)),
        (4, 5, Persistent(num_workers=3)),
        (4, 1, Persistent()),
    ],
    ids=lambda one: getattr(one, "num_workers", None),
)
def test_the_mlp(ranks, num_ranks, m, how):
    made = mlp_of()
    ranks(lambda: main(made, how, num_ranks, m, m // 2 + 3), num_ranks)


def test_ranks_of_two_nodes(ranks):
    """Tiles are put and told of; nobody dereferences a far pointer."""
    made = mlp_of()
    ranks(lambda: main(made, Persistent(num_workers=2), 2, 9), 2, nodes=2)


@pytest.mark.few(1)
@pytest.mark.parametrize("num_ranks, m", [(2, 18), (3, 7)])
def test_every_kind(ranks, num_ranks, m):
    made = compiled(layer, LAYER, LAYER_TILES)
    ranks(lambda: main(made, Persistent(num_workers=3), num_ranks, m, 21), num_ranks)


def test_what_is_gathered_may_be_a_result(ranks):
    parameters = of("float32", x=("m", K, Shard(0)), w=(K, N, Shard(1)))
    made = compiled(gathers, parameters, {"gathered": (16, 16), "product": (16, 16, 16)})
    ranks(lambda: main(made, Persistent(num_workers=2), 3, 20, 4), 3)


def test_weights_may_lie_as_columns(ranks):
    made = mlp_of()
    ranks(lambda: main(made, Persistent(num_workers=2), 2, 20, transpose="w1 w2"), 2)


@pytest.mark.few(1)
@pytest.mark.parametrize("name, dtype", [("mlp", "bfloat16"), ("sums", "float32")])
def test_it_has_the_bits_of_what_overlaps(ranks, name, dtype):
    """With tiles alike: sums over k in the same steps, over ranks in the same order."""
    made = mlp_of(dtype)
    if name == "sums":
        parameters = of(dtype, x=("m", K, Shard(1)), w=(K, N, Shard(0)))
        made = compiled(sums, parameters, {"product": (16, 16, 16), "reduced": (16, 16)})

    def both():
        world = weft.init()
        calls = Calls(made, world, Persistent(num_workers=3), 3)
        for m in (37, 8):
            _, mine = calls.given(m, m)
            (ours,), (theirs,) = calls(mine, m), calls(mine, m, "overlapped")
            assert torch.equal(ours, theirs)
        world.close()

    ranks(both, 3)


def test_all_ranks_have_the_same_bits_with_any_number_of_workers(ranks):
    parameters = of("bfloat16", x=("m", K, Shard(1)), w=(K, N, Shard(0)))
    made = compiled(sums, parameters, {"product": (16, 16, 16), "reduced": (16, 16)})

    def several():
        world = weft.init()
        found = []
        for num_workers in (1, 2, 8):
            calls = Calls(made, world, Persistent(num_workers), 3)
            found += calls(calls.given(20, 0)[1], 20)
        world.close()
        return found

    first, *others = [one for results in ranks(several, 3) for one in results]
    assert all(torch.equal(first, one) for one in others)


def test_without_rows_there_is_nothing_to_do(ranks):
    made = mlp_of()

    def nothing():
        world = weft.init()
        calls = Calls(made, world, Persistent(), 2)
        _, mine = calls.given(0, 0)
        (result,) = calls(mine, 0)
        assert result.shape == (0, K)
        world.close()

    ranks(nothing, 2)


def strided(calls):
    _, mine = calls.given(16, 0)
    wide = torch.cat([mine["w1"], mine["w1"]], 1)
    mine["w1"] = wide[:, : mine["w1"].shape[1]]
    return calls(mine, 16)


def recorded_first(calls):
    _, mine = calls.given(16, 0)
    with calls.world.record():
        return calls(mine, 16)


@pytest.mark.parametrize(
    ("wrong", "error", "told"),
    [
        (strided, ShapeError, r"w1 of shape \(16, 24\) has strides .* pass w1.contiguous"),
        (recorded_first, UsageError, "call the program once with these sizes before recording"),
    ],
    ids=["strided", "recorded"],
)
def test_what_it_cannot_take_is_told(ranks, wrong, error, told):
    made = mlp_of()

    def refused():
        world = weft.init()
        with pytest.raises(error, match=told):
            wrong(Calls(made, world, Persistent(), 2))
        world.close()

    ranks(refused, 2)


def test_tiles_are_powers_of_two(ranks):
    made = mlp_of(tiles={**SMALL, "gated": (16, 24)})

    def refused():
        world = weft.init()
        calls = Calls(made, world, Persistent(), 1)
        with pytest.raises(
            ConfigError, match=r"gated has tile=\(16, 24\); .* powers of two"
        ) as told:
            calls(calls.given(16, 0)[1], 16)
        assert told.value.place.frames[0].file.endswith("programs.py")
        world.close()

    ranks(refused, 1)


def test_fewer_workers_than_none():
    with pytest.raises(UsageError, match="num_workers is -1; it must be 0 or more"):
        Persistent(-1)


def partial_input(x):
    return reduce_scatter(x)


def test_summands_may_be_given(ranks):
    parameters = of("float32", x=("m", K, Partial()))
    made = compiled(partial_input, parameters, {"scattered": (16, 16)})
    ranks(lambda: main(made, Persistent(num_workers=2), 2, 20, 9), 2)
