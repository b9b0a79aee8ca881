"""Send: a tensor to one other rank, which gets it by recv. Only these two ranks call.

    recv(like x, src=s, ..) on rank d   <-   send(x, dst=d, ..) on rank s

Messages of one rank to another are received in the order in which they were sent. Between two ranks
there are two boxes for messages on their way, so a send ends when its message is in a box: the
receiver may be two messages behind. The boxes are a mailbox, had by all ranks together before:
`weft.mailbox(max_bytes, world=world)`. See weft.plan.messages for why that is a call of its own.

Plan (weft.tiles.messages)
    sm_push  one kernel: until the box is free; header; pieces of x, dealt to programs, -> the box
    ce_push  one program: until the box is free; header. Then a copy engine: each piece -> the box,
             and behind it its word
The receiver learns from the header how a message lies there, not how it came.

Signals (SET to e, the message's number on its way from this rank to that one)
    heads[e % boxes]            its header may be read. By the sender
    arrived[box * 512 + i]      piece i is in the box. By the sender, or the copy engine
    taken                       it is out of the box. By the receiver
Each is waited for by the other one of the two. Numbers are kept on the device: sends and receives
may be eager, recorded and replayed, on each side in its own way.

Limits  x is contiguous; a message is no larger than the mailbox says; ce_push needs both ranks on
        one node; no gradient: send the gradient the other way. Messages are not in the log of calls
        that ranks compare: one that nobody sends, or receives, is a wait that reaches its deadline
Source  the design's section 4; MPI's eager protocol
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from weft.base.providers import provider
from weft.ops import _baselines
from weft.plan import messages
from weft.plan.exchanges import Config, fake
from weft.plan.messages import candidates
from weft.runtime.world import World

__all__ = ["Config", "Problem", "candidates", "fake", "op", "send"]


reference = messages.around


@dataclass(frozen=True)
class Problem(messages.Problem):
    """A message; as the card has it, each rank's shard to the rank behind it."""

    op, hop = "send", 1


def send(
    x: torch.Tensor,
    dst: int,
    *,
    world: World,
    mailbox: str = "",
    config: Config | None = None,
) -> None:
    """Send x to rank `dst` of the world, which calls recv. Only these two ranks call.

    Shapes  x: [m, ...], contiguous
    Dtypes  any; moved bit by bit
    Sync    stream-ordered on the current stream, which goes on when x is in a box of `dst`, be it
            received or not; waits in the stream until that box is free. Can be recorded. Sends to
            one rank follow each other; those to others do not wait for them
    Raises  PeerError: no such rank, this rank itself; UsageError: no such mailbox, a gradient;
            ShapeError, DtypeError, ConfigError: with the values
    """
    messages.send(Problem, x, dst, world, mailbox, config)


def run(
    world: World, problem: Problem, inputs: Mapping[str, Any], config: Config | None = None
) -> torch.Tensor:
    """Send, then receive."""
    x = inputs["x"]
    if world.num_ranks == 1:
        return x.clone()
    dst, src, mailbox, wanted = messages.neighbours(world, problem, x)
    options = {"world": world, "mailbox": mailbox, "config": config}
    send(x, dst, **options)
    return provider("collectives").recv(wanted, src, **options)


op = messages.card(
    Problem,
    run,
    summary="out = x of the rank before",
    baselines=_baselines.SEND,
)
