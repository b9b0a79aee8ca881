"""One process per GPU, run by a parent that hears from them and ends those that are stuck."""

from __future__ import annotations

import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from weft.base.errors import WeftError
from weft.base.settings import Settings

POLL_S = 0.05
# When one process fails the others wait for it: so long they may still say something.
LAST_WORDS_S = 5.0
# So long rank 0 waits for the others' end.
TOGETHER_S = 3.0


class RanksStopped(WeftError):
    """A process failed, or all were silent for too long; all of them are ended."""


def run_on_gpus(
    main: Callable, num_ranks: int, *args: Any, timeout_s: float = 300.0, tolerate: bool = False
) -> list[int | None]:
    """Run `main(rank, *args)` in `num_ranks` processes; returns their exit codes.

    What has not ended after `timeout_s` is killed and its exit code is None.

    Raises  RanksStopped: a process failed, unless `tolerate` is set
    """
    children = _start(main, num_ranks, args)
    try:
        deadline = time.monotonic() + timeout_s
        while any(child.is_alive() for child in children) and time.monotonic() < deadline:
            time.sleep(POLL_S)
            if not tolerate and _has_failed(children):
                deadline = min(deadline, time.monotonic() + LAST_WORDS_S)
        codes = [child.exitcode for child in children]
    finally:
        end(children)
    if not tolerate and any(code != 0 for code in codes):
        raise RanksStopped(f"the processes of {main.__name__} ended with {codes}")
    return codes


def messages_from_gpus(
    main: Callable, num_ranks: int, *args: Any, silence_s: float
) -> Iterator[Any]:
    """Run `main(rank, send, *args)` in `num_ranks` processes; yields what rank 0 sends.

    Raises  RanksStopped: nothing was heard for `silence_s`, or a process failed
    """
    import multiprocessing

    ours, theirs = multiprocessing.get_context("spawn").Pipe(duplex=False)
    children = _start(_Speaking(main), num_ranks, (theirs, *args))
    theirs.close()
    try:
        yield from _listen(ours, children, silence_s)
        codes = [child.exitcode for child in children]
    finally:
        end(children)
        ours.close()
    if any(code != 0 for code in codes):
        raise RanksStopped(f"a process died: exit codes by rank {codes}")


def _listen(pipe: Any, children: list[Any], silence_s: float) -> Iterator[Any]:
    """What comes through the pipe until all have ended, or have had time to after one failed."""
    heard, deadline, is_open = time.monotonic(), math.inf, True
    while time.monotonic() < deadline:
        if is_open and pipe.poll(POLL_S):
            try:
                yield pipe.recv()
                heard = time.monotonic()
            except EOFError:
                is_open = False
            continue
        if not any(child.is_alive() for child in children):
            return
        if _has_failed(children):
            deadline = min(deadline, time.monotonic() + LAST_WORDS_S)
        if time.monotonic() - heard > silence_s:
            raise RanksStopped(f"silent for {silence_s:g} s: it hangs")
        if not is_open:
            time.sleep(POLL_S)


class _Speaking:
    """`main` with a way to send, which only rank 0's uses."""

    def __init__(self, main: Callable) -> None:
        self.main = main

    def __call__(self, rank: int, pipe: Any, *args: Any) -> None:
        self.main(rank, pipe.send if rank == 0 else _send_nowhere, *args)


def _send_nowhere(message: Any) -> None:
    pass


@contextmanager
def beside(
    main: Callable, num_ranks: int, *args: Any, grace_s: float, failed: Callable[[Exception], None]
) -> Iterator[None]:
    """In the brackets the calling thread is rank 0, and `main(rank, *args)` runs as the others.

    When one of these fails, rank 0 has `grace_s` to find out by itself; then `failed` is called, on
    a thread of its own, and all of them are ended.

    Raises  RanksStopped: one of them failed, which rank 0 has not noticed
    """
    port = _free_port()
    children = _start(main, num_ranks, args, port, first=1)
    over = threading.Event()

    def watch() -> None:
        while not over.wait(POLL_S):
            if _has_failed(children):
                if not over.wait(grace_s):
                    failed(_stopped(children))
                    end(children)
                return
            if not any(child.is_alive() for child in children):
                return

    watching = threading.Thread(target=watch, name="weft-ranks", daemon=True)
    watching.start()
    try:
        _become(0, num_ranks, port)
        yield
        # One thread at a time asks how they are: of two, one is told that there is no such process.
        watching.join(LAST_WORDS_S)
        over.set()
        watching.join()
        if _has_failed(children):
            raise _stopped(children)
    finally:
        over.set()
        watching.join()
        end(children)


def _stopped(children: list[Any]) -> RanksStopped:
    codes = [child.exitcode for child in children]
    return RanksStopped(f"the processes of ranks 1 and up ended with {codes}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _start(
    main: Callable, num_ranks: int, args: tuple, port: int | None = None, *, first: int = 0
) -> list[Any]:
    import torch.multiprocessing as multiprocessing

    port = port or _free_port()
    context = multiprocessing.get_context("spawn")
    children = [
        context.Process(
            target=_child, args=(rank, main, num_ranks, port, args),
            daemon=first > 0,  # its parent ends before it waits for anybody
        )
        for rank in range(first, num_ranks)
    ]  # fmt: skip
    for child in children:
        child.start()
    return children


def _child(rank: int, main: Callable, num_ranks: int, port: int, args: tuple) -> None:
    _become(rank, num_ranks, port)
    main(rank, *args)
    sys.stdout.flush()
    sys.stderr.flush()
    _end_together(rank, num_ranks)
    # Leave without teardown: a benchmark's answer must not hang in a library's destructor.
    os._exit(0)


def _become(rank: int, num_ranks: int, port: int) -> None:
    """What a launcher would have told this process, and its GPU."""
    import torch

    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank),
        WORLD_SIZE=str(num_ranks), LOCAL_WORLD_SIZE=str(num_ranks),
    )  # fmt: skip
    # Multicast is not used, and a program that maps it can take a host's GPUs out of service.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    if torch.cuda.is_available():
        is_shared = Settings.from_environment().share_gpus
        torch.cuda.set_device(rank % torch.cuda.device_count() if is_shared else rank)


def _end_together(rank: int, num_ranks: int) -> None:
    """Rank 0 keeps the store over which the others may still agree: it is the last one to go."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return
    store = dist.distributed_c10d._get_default_store()
    store.set(f"weft/ended/{rank}", "")
    if rank == 0:
        with suppress(RuntimeError):  # one that has failed does not come
            ended = [f"weft/ended/{other}" for other in range(num_ranks)]
            store.wait(ended, timedelta(seconds=TOGETHER_S))


def _has_failed(children: list[Any]) -> bool:
    return any(child.exitcode not in (None, 0) for child in children)


def end(children: list[Any]) -> None:
    """All are killed before any is waited for: who is interrupted again while one takes its time
    leaves none that waits for the others, which Python would wait for at its end."""
    for child in children:
        if child.exitcode is None:
            child.kill()
    for child in children:
        child.join()
