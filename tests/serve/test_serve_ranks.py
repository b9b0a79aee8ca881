"""An engine on emulated ranks: all run the same steps, and one that fails ends all with a table."""

from __future__ import annotations

import queue
from functools import partial

import pytest
import torch
import torch.distributed as dist
from engines import LETTERS, PageRunner, continued

from weft.base.errors import CallOrderError
from weft.base.topology import Topology
from weft.serve.engine import Engine
from weft.serve.link import HEAD
from weft.serve.ranks import Ranks
from weft.serve.scheduler import Request, Scheduler

PAGES, PAGE = 1200, 4


class Together(PageRunner):
    """Each step is a collective call, to which all ranks bring the same."""

    def __init__(self, rank: int, fails_at: int, strays_at: int) -> None:
        super().__init__(PAGES, PAGE)
        self.rank, self.fails_at, self.strays_at = rank, fails_at, strays_at

    def run(self, step):
        found = super().run(step)
        if self.steps == self.fails_at and self.rank == 1:
            raise RuntimeError("rank 1 has had enough")
        mine = torch.tensor([len(step.parts), *(one or 0 for one in found)])
        total = mine.clone()
        dist.all_reduce(total)
        assert torch.equal(total, mine * dist.get_world_size())
        return [1] if self.steps == self.strays_at and self.rank == 1 else found

    def close(self) -> None:
        pass


def made(fails_at, strays_at, world, link):
    return Together(world.rank, fails_at, strays_at), Scheduler(PAGES, PAGE, 4, HEAD)


def on_ranks(num_ranks: int, fails_at: int = 0, strays_at: int = 0) -> Ranks:
    engine_of = partial(Engine, decode=LETTERS.decode)
    return Ranks(partial(made, fails_at, strays_at), engine_of, Topology.of(num_ranks))


def last_of(deltas: queue.Queue) -> tuple[str, object]:
    text = ""
    while True:
        delta = deltas.get(timeout=60)
        text += delta.text
        if delta.is_last:
            return text, delta


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_all_ranks_run_the_same_steps(num_ranks):
    ranks = on_ranks(num_ranks)
    engine = ranks.engine.result(60)
    prompts = [tuple(LETTERS.encode("once")), tuple(LETTERS.encode("ab" * HEAD))]
    asked = []
    for i, prompt in enumerate(prompts):
        asked.append(queue.Queue())
        engine.submit(Request(f"{i}", prompt, 6), asked[-1].put)
    for prompt, deltas in zip(prompts, asked):
        assert last_of(deltas)[0] == LETTERS.decode(continued(prompt, 6))
    ranks.close(60)
    assert ranks.error is None and not ranks.thread.is_alive()
    assert len(engine.scheduler.free) == PAGES


def test_a_rank_that_raises_ends_the_engine_with_the_table():
    ranks = on_ranks(2, fails_at=3)
    engine = ranks.engine.result(60)
    deltas = queue.Queue()
    engine.submit(Request("a", (1, 2, 3), 50), deltas.put)
    text, last = last_of(deltas)
    assert text == LETTERS.decode(continued((1, 2, 3), 2))
    ranks.thread.join(60)
    assert not ranks.thread.is_alive() and isinstance(ranks.error, RuntimeError)
    assert last.error == ranks.report == engine.ended
    assert "rank 1 has had enough\n(raised on emulated rank 1)\nmeanwhile" in last.error
    assert "the host of rank 0 waits for all_reduce(sum) on ranks [0, 1]" in last.error
    assert "rank 1 did not enter it" in last.error


def test_ranks_that_draw_different_tokens_find_out():
    ranks = on_ranks(2, strays_at=20)
    deltas = queue.Queue()
    ranks.engine.result(60).submit(Request("a", (1, 2, 3), 50), deltas.put)
    _, last = last_of(deltas)
    ranks.close(60)
    assert isinstance(ranks.error, CallOrderError)
    assert "drawn different tokens in steps 17 to 32" in last.error


def test_what_fails_before_there_is_an_engine_is_said():
    def broken(world, link):
        raise OSError(f"no weights on rank {world.rank}")

    ranks = Ranks(broken, partial(Engine, decode=LETTERS.decode), Topology.of(2))
    with pytest.raises(OSError, match="no weights on rank 0"):
        ranks.engine.result(60)
    ranks.close(60)
