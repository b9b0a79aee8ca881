"""The ranks of an engine: what each does, and how they are started here, emulated or on GPUs.

Emulated ranks are threads of this process. On GPUs this process has rank 0, and the others have
one each. Either way rank 0's part runs on a thread, beside whatever the main thread serves.
"""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from weft.base.errors import UsageError
from weft.base.settings import Settings
from weft.base.topology import Topology
from weft.runtime.start import init
from weft.runtime.world import World
from weft.serve.engine import Engine
from weft.serve.link import Link
from weft.serve.scheduler import Scheduler
from weft.serve.step import Step

# How many pages the emulator has, where nobody says.
EMULATED_PAGES = 1024


class Runs(Protocol):
    """A `runner.Runner`, or what takes its place in tests."""

    def run(self, step: Step) -> list[int | None]: ...

    def close(self) -> None: ...


# What a rank brings; of the schedulers rank 0's is used.
Make = Callable[[World, Link], tuple[Runs, Scheduler]]


@dataclass(frozen=True)
class Sizes:
    """Of a cache and of steps. Without `pages` the cache takes what `memory`, a share of the GPU's,
    leaves beside the model.

    Units   max_tokens: of a step
    """

    page_size: int = 16
    pages: int | None = None
    memory: float = 0.8
    max_tokens: int = 2048
    max_sequences: int = 64


def model_runner(folder: str, sizes: Sizes, world: World, link: Link) -> tuple[Runs, Scheduler]:
    """The model in `folder`, this rank's part, and its cache. Collective."""
    from weft.models import load
    from weft.serve.runner import Runner

    model = load(folder, world)
    num_pages = sizes.pages or link.fewest(_pages_beside(model, sizes, world))
    most = {"max_sequences": sizes.max_sequences, "max_tokens": sizes.max_tokens}
    runner = Runner(model, world, num_pages=num_pages, page_size=sizes.page_size, **most)
    runner.prepare()
    if world.device.type == "cuda":
        # What is there stays: to look through it for garbage takes Python 0.2 s, in some step.
        gc.collect()
        gc.freeze()
    return runner, Scheduler(num_pages, sizes.page_size, **most)


def _pages_beside(model: Any, sizes: Sizes, world: World) -> int:
    """How many pages the memory has room for that the model leaves."""
    if world.device.type == "cpu":
        return EMULATED_PAGES
    config = model.config
    head_dim = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    row_bytes = config.num_key_value_heads // world.num_ranks * head_dim * model.dtype.itemsize
    page_bytes = 2 * config.num_hidden_layers * sizes.page_size * row_bytes
    free, total = torch.cuda.mem_get_info()
    room = free - int((1 - sizes.memory) * total)
    if room < page_bytes:
        raise UsageError(
            f"rank {world.rank}: of {total >> 20} MiB {free >> 20} are free beside the model, and "
            f"--memory {sizes.memory:g} leaves {max(room, 0) >> 20} to the cache: raise it, or "
            "take more ranks"
        )
    return room // page_bytes


def run_rank(
    make: Make, opened: Callable[[Scheduler], Engine] | None, nodes: Sequence[int] | None = None
) -> None:
    """What every rank does; `opened` makes rank 0's engine, which others may then use."""
    with init(nodes=nodes) as world:
        link = Link(world)
        runner, scheduler = make(world, link)

        def run_step(step: Step) -> list[int | None]:
            tokens = runner.run(step)
            link.agree(tokens)
            return tokens

        if world.rank == 0 and opened is not None:
            opened(scheduler).run(run_step, link.send)
        else:
            while (step := link.receive()) is not None:
                if step.parts:
                    run_step(step)
        runner.close()


class Ranks:
    """An engine on ranks of its own. `engine` is there once all have what `make` gives them.

    `error` is what ended it; its text has the table of who waits for whom, where ranks do.
    """

    def __init__(
        self, make: Make, engine_of: Callable[[Scheduler], Engine], topology: Topology,
        where: str = "emu",
    ) -> None:  # fmt: skip
        self.make, self.engine_of, self.topology, self.where = make, engine_of, topology, where
        self.engine: Future[Engine] = Future()
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name="weft-engine", daemon=True)
        self.thread.start()

    @property
    def report(self) -> str:
        """What ended it, in words."""
        return "\n".join([str(self.error), *getattr(self.error, "__notes__", ())])

    def close(self, timeout_s: float | None = None) -> None:
        """End the engine after its step, and wait for all ranks."""
        if self.engine.done() and self.engine.exception() is None:
            self.engine.result().close()
        self.thread.join(timeout_s)

    def _run(self) -> None:
        try:
            (self._on_gpus if self.where == "cuda" else self._emulated)()
        except BaseException as error:  # whatever it is, clients must hear of it
            self._failed(error)

    def _failed(self, error: BaseException) -> None:
        self.error = self.error or error
        if self.engine.done():
            self.engine.result().end(self.report)
        else:
            self.engine.set_exception(error)

    def _opened(self, scheduler: Scheduler) -> Engine:
        engine = self.engine_of(scheduler)
        self.engine.set_result(engine)
        return engine

    def _emulated(self) -> None:
        from weft.emulator.session import emulated

        topology = self.topology
        with emulated(ranks=topology.num_ranks, nodes=topology.sizes) as session:
            session.run(partial(run_rank, self.make, self._opened))

    def _on_gpus(self) -> None:
        from weft.tune import processes

        ranks, nodes = self.topology.num_ranks, _declared(self.topology)
        grace_s = 2 * Settings.from_environment().timeout_s  # a wait's table comes before
        others = processes.beside(
            _other_rank, ranks, self.make, nodes, grace_s=grace_s, failed=self._failed
        )
        with others:
            run_rank(self.make, self._opened, nodes)


def _declared(topology: Topology) -> tuple[int, ...] | None:
    return topology.sizes if topology.num_nodes > 1 else None


def _other_rank(rank: int, make: Make, nodes: Sequence[int] | None) -> None:
    """A process of another rank; Ctrl-C is for rank 0's to hear."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    run_rank(make, None, nodes)
