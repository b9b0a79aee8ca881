"""Recv: the next message of one other rank, which sends it by send. Only these two ranks call.

    recv(like x, src=s, ..) on rank d   <-   send(x, dst=d, ..) on rank s

Plan (weft.tiles.messages)
    one kernel: until the header is there; pieces, as they arrive, from their box -> out, dealt to
    programs; then the box is free for the message after the next
It is the same whatever way the message comes, whose transport its sender chooses.

Signals and limits are those of send (weft/ops/send.py). What differs in bytes from what was sent
is an error of the receiver, after the fact: by a later call, world.check() or world.close(). Shapes
and dtypes of as many bytes are not told apart.

Source  the design's section 4; MPI's eager protocol
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from weft.ops import _baselines
from weft.ops.send import send
from weft.plan import messages
from weft.plan.exchanges import Config, fake
from weft.plan.messages import candidates
from weft.runtime.world import World

__all__ = ["Config", "Problem", "candidates", "fake", "op", "recv"]


reference = messages.around


@dataclass(frozen=True)
class Problem(messages.Problem):
    """A message; as the card has it, each rank's shard to the rank before it."""

    op, hop = "recv", -1


def recv(
    like: torch.Tensor,
    src: int,
    *,
    world: World,
    mailbox: str = "",
    config: Config | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The next message that rank `src` of the world sends to this one. Only these two ranks call.

    Shapes  like: of the message's shape and dtype, with values or without (on "meta"); out: of the
            same, contiguous
    Dtypes  any; moved bit by bit
    Sync    stream-ordered on the current stream, which waits until the message has come. Can be
            recorded. Receives from one rank follow each other; those from others do not wait.
            On GPUs what a message waits for must have been launched, by the hosts of all ranks,
            without a kernel that is loaded behind this call: see docs/ops/recv.md
    Raises  PeerError: no such rank, this rank itself; UsageError: no such mailbox; ShapeError,
            DtypeError, ConfigError: with the values
            by a later call, world.check() or world.close(): ShapeError: another number of bytes
            was sent
    """
    return messages.receive(Problem, like, src, world, mailbox, config, out)


def run(
    world: World, problem: Problem, inputs: Mapping[str, Any], config: Config | None = None
) -> torch.Tensor:
    """Send, and receive meanwhile on another stream."""
    x = inputs["x"]
    if world.num_ranks == 1:
        return x.clone()
    dst, src, mailbox, wanted = messages.neighbours(world, problem, x)
    options = {"world": world, "mailbox": mailbox, "config": config}
    main, side = world.current_stream(), world.stream("receives")
    # weft: equivalent-mutant drop of wait: what main still reads may be given as `out` again, which
    # the emulator never does; and what is recorded begins on main
    side.wait(main)
    send(x, dst, **options)
    with side:
        out = recv(wanted, src, **options)
    main.wait(side)
    return out


op = messages.card(
    Problem,
    run,
    summary="out = x of the rank behind",
    baselines=_baselines.RECV,
)
