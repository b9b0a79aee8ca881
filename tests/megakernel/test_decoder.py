"""A decode step as one kernel a rank: two layers, caches written in place, step after step."""

from __future__ import annotations

import decoder
import pytest
from test_run import of_rank

import weft
from weft.base.dtypes import tolerance
from weft.compiler import libraries
from weft.megakernel import Persistent


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cache"))


def main(made, how: Persistent, num_ranks: int, b: int) -> None:
    """Steps with caches that stay, the last of them replayed."""
    world = weft.init()
    placed = made.stages.tasks["place"]

    def mine(whole):
        return {
            name: of_rank(placed.task(name).type, one, {"b": b}, world.rank, num_ranks).clone()
            for name, one in whole.items()
        }

    def check(results, wanted):
        for name, result, want in zip(placed.results, results, wanted):
            part = of_rank(placed.task(name).type, want, {"b": b}, world.rank, num_ranks)
            assert result.shape == part.shape
            assert (result - part).norm() <= 8 * tolerance("float32", 64) * want.norm(), name

    made = made.options(lowering=how)
    whole = decoder.inputs(made, b, 0)
    kept = mine(whole)
    for step in range(2):
        now = decoder.inputs(made, b, step)
        for name in ("x", "lengths"):
            whole[name] = now[name] + step if name == "x" else now[name]
            kept[name].copy_(whole[name])
        if step == 0:
            results = made(*kept.values(), world=world, b=b)
            with world.record() as recording:
                recorded = made(*kept.values(), world=world, b=b)
        else:
            recording.replay()
            results = recorded
        wanted = libraries.reference(placed, whole)
        check(results, wanted)
        for name, want in zip(("keys_1", "values_1", "keys_2", "values_2"), wanted[1:]):
            whole[name] = want
    world.close()


@pytest.mark.parametrize(
    ("num_ranks", "b", "how"),
    [
        (2, 3, Persistent("balanced", num_workers=4)),
        pytest.param(1, 17, Persistent("dynamic", num_workers=3), marks=pytest.mark.slow),
        pytest.param(2, 1, Persistent("dynamic", sums="one_shot"), marks=pytest.mark.slow),
        pytest.param(3, 2, Persistent("round_robin", num_workers=2), marks=pytest.mark.slow),
        pytest.param(4, 5, Persistent("balanced", num_workers=2), marks=pytest.mark.slow),
    ],
    ids=["2-balanced", "1-dynamic", "2-one_shot", "3-round_robin", "4-balanced"],
)
def test_two_layers(ranks, monkeypatch, num_ranks, b, how):
    if num_ranks > 2:
        monkeypatch.setattr(decoder, "KV_HEADS", num_ranks)
        monkeypatch.setattr(decoder, "HEADS", 2 * num_ranks)
    made = decoder.compiled()
    ranks(lambda: main(made, how, num_ranks, b), num_ranks)
