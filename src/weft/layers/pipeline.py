"""A model in stages, some on each rank: microbatches pass through them, one behind another.

Which passes a rank does in which order, and why no rank waits for one that waits for it, is in
weft.layers.stages. Here passes are done, and what they make travels by weft.ops.send and recv, in
any world: results by one mailbox from each rank to the one behind, gradients by another from each
to the one before. So these are two orders that do not hold each other up.

Messages travel beside the passes, on two streams more: what the next pass begins with is received
while this one runs, and what this one has made is sent while the next one runs. A tensor that is
sent is kept until it is away. All is stream-ordered; the host waits for nothing. It queues a
receive behind the pass and the send that run meanwhile: a kernel that is loaded while another waits
for a message may have to wait for it too.

Limits  sends and receives take some programs of SMs, at most 16 each, while they wait too: where a
        stage's kernels need all SMs at once, beside no other, there must be room for these

Source  PipeDream-flush (Narayanan et al. 2021, 2006.09503), Megatron-LM (2104.04473)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import zip_longest
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from weft.base.errors import ShapeError, UsageError
from weft.base.whole_numbers import extents_of
from weft.layers.stages import BACKWARD, FORWARD, RECEIVES, SENDS, Stages, Turn
from weft.ops import recv, send
from weft.plan.messages import mailbox
from weft.runtime.world import World


class _HandOvers:
    """What a rank gets from others and gives to others, all of one shape and dtype."""

    def __init__(self, world: World, stages: Stages, shape: Sequence[int], dtype: torch.dtype):
        self.world, self.stages = world, stages
        self.shape, self.dtype = extents_of("Pipeline: shape", shape), dtype
        nbytes = prod(self.shape) * dtype.itemsize
        self._mailboxes = {what: f"pipeline {what} {nbytes}" for what in (FORWARD, BACKWARD)}
        self._own: dict[str, deque[Tensor]] = {FORWARD: deque(), BACKWARD: deque()}
        if world.num_ranks > 1:
            for what, hop in ((FORWARD, 1), (BACKWARD, -1)):
                mailbox(nbytes, world=world, name=self._mailboxes[what], hops=(hop,))
        self._sends, self._receives = (world.stream(one) for one in (SENDS, RECEIVES))
        # What comes to this rank next, and has come; what is on its way to others.
        self._room: Tensor | None = None
        self._coming: Tensor | None = None
        self._going: Tensor | None = None

    def make_room(self, turn: Turn | None) -> None:
        """What this turn begins with may be written from here on, in stream order."""
        src = None if turn is None else self.stages.source(self.world.rank, turn)
        if src is not None and src != self.world.rank:
            # Of the stream that will free it.
            self._room = torch.empty(self.shape, dtype=self.dtype, device=self.world.device)
            self._receives.wait(self.world.current_stream())

    def expect(self, turn: Turn | None) -> None:
        """What this turn begins with is received as soon as it comes, where there is room for it.

        So all that streams are given in a step they give back: a recording may hold it.
        """
        out, self._room = self._room, None
        if turn is None or out is None:
            return
        src, mailbox = self.stages.source(self.world.rank, turn), self._mailboxes[turn.what]
        assert src is not None, f"{turn} begins with a message"
        with self._receives:
            self._coming = recv(out, src, world=self.world, mailbox=mailbox, out=out)

    def take(self, turn: Turn) -> Tensor | None:
        """What this turn begins with; None where no stage makes it."""
        src = self.stages.source(self.world.rank, turn)
        if src is None:
            return None
        if src == self.world.rank:
            return self._own[turn.what].popleft()
        self.world.current_stream().wait(self._receives)
        coming, self._coming = self._coming, None
        return coming

    def give(self, turn: Turn, made: Tensor) -> None:
        """What this turn has made, to the stage that needs it, if one does."""
        dst = self.stages.target(self.world.rank, turn)
        if dst is None:
            return
        x = made.detach().contiguous()
        if tuple(x.shape) != self.shape or x.dtype != self.dtype:
            raise ShapeError(
                f"Pipeline: a stage hands over {tuple(x.shape)} of {x.dtype}, but was made for "
                f"{self.shape} of {self.dtype}"
            )
        if dst == self.world.rank:
            self._own[turn.what].append(x)
            return
        self.end()
        self._sends.wait(self.world.current_stream())
        with self._sends:
            send(x, dst, world=self.world, mailbox=self._mailboxes[turn.what])
        self._going = x

    def end(self) -> None:
        """What was sent last is away, in stream order, and may be freed."""
        if self._going is not None:
            self.world.current_stream().wait(self._sends)
            self._going = None


class Pipeline:
    """This rank's stages of a model whose stages are spread over the ranks, in their order.

        pipeline = Pipeline(stage, world, shape=(4, 512, 4096), microbatches=8, loss=loss)
        pipeline = Pipeline([first, second], world, ...)    # interleaved: rank and num_ranks + rank
        total = pipeline.step(inputs, targets)              # gradients lie in the parameters

    A stage takes what the one before it gives; `loss(result, target)` is the last one's. Each
    microbatch counts 1 / microbatches. With `chunks` stages to a rank, each a part as large, a rank
    waits (num_ranks - 1) / (chunks * microbatches + num_ranks - 1) of a step, and sends as many
    times the messages. Every rank has as many; microbatches are then a multiple of num_ranks.

    Shapes  shape, dtype: of what a stage hands to the next, of one microbatch, alike between all
    Raises  UsageError: microbatches that interleaved stages do not take; ShapeError
    """

    def __init__(
        self, stage: nn.Module | Sequence[nn.Module], world: World, *, shape: Sequence[int],
        microbatches: int, loss: Callable[[Tensor, Any], Tensor],
        dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        several = isinstance(stage, (list, tuple, nn.ModuleList))
        self.chunks: list[nn.Module] = list(stage) if several else [stage]  # type: ignore[arg-type]
        self.stages = Stages(world.num_ranks, microbatches, len(self.chunks))
        self.rank, self.loss = world.rank, loss
        self._hand_overs = _HandOvers(world, self.stages, shape, dtype)

    @property
    def turns(self) -> list[Turn]:
        """What this rank does in a step, in order."""
        return list(self.stages.turns(self.rank))

    def step(self, inputs: Sequence[Tensor], targets: Sequence[Any]) -> Tensor:
        """All passes of one batch; the mean loss on the last stage's rank, 0 on others. Collective.

        `inputs` are looked at by the first stage, `targets` by the last: one for each microbatch.
        Gradients are added to what is there.

        Sync    stream-ordered on the current stream; the host waits for nothing
        """
        self._check(inputs, targets)
        kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        total = torch.zeros((), device=self._hand_overs.world.device)
        order, hand_overs = self.turns, self._hand_overs
        hand_overs.make_room(order[0])
        hand_overs.expect(order[0])
        for turn, following in zip_longest(order, order[1:]):
            given = hand_overs.take(turn)
            hand_overs.make_room(following)
            _, i, chunk = turn
            if turn.what == FORWARD:
                x = inputs[i] if given is None else given.requires_grad_()
                y = self.chunks[chunk](x)
                if self.stages.target(self.rank, turn) is None:
                    y = self.loss(y, targets[i]) / self.stages.microbatches
                    total = total + y.detach()
                kept[chunk, i] = x, y
                hand_overs.give(turn, y)
            else:
                x, y = kept.pop((chunk, i))
                torch.autograd.backward(y, given)
                if self.stages.target(self.rank, turn) is not None:
                    hand_overs.give(turn, self._gradient(x, turn))
            hand_overs.expect(following)
        hand_overs.end()
        return total

    def _gradient(self, x: Tensor, turn: Turn) -> Tensor:
        if x.grad is None:
            raise UsageError(
                f"Pipeline: the result of chunk {turn.chunk} on rank {self.rank} does not depend "
                "on what the stage was given, so the stages before it would learn nothing"
            )
        return x.grad

    def _check(self, inputs: Sequence[Tensor], targets: Sequence[Any]) -> None:
        is_first, is_last = self.rank == 0, self.rank == self.stages.num_ranks - 1
        for name, given, counts in (("inputs", inputs, is_first), ("targets", targets, is_last)):
            if counts and len(given) != self.stages.microbatches:
                raise UsageError(
                    f"Pipeline: {len(given)} {name} for {self.stages.microbatches} microbatches; "
                    "pass one for each"
                )
