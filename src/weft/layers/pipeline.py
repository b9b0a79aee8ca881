"""A model in stages, one on each rank: microbatches pass through them, one behind another.

    stage s    forward of microbatch i  ->  its result to stage s + 1
               backward of microbatch i  <-  its gradient from stage s + 1

Each stage does at first as many forwards as there are stages behind it, then one forward and one
backward in turns (1F1B), then the backwards that are left: so a stage keeps the activations of no
more microbatches than there are stages, and gradients are added in the order of microbatches.

Neighbours share a world of two, in which each hand-over is one all-to-all: what one of them sends
waits in a slot of the other, of which there are two in turn, and both ways go at once. The order of
hand-overs is the same on both sides, so no stage waits for one that waits for it.

Source  PipeDream-flush (Narayanan et al. 2021, 2006.09503), 1F1B as in Megatron-LM (2104.04473)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from weft.base.errors import ShapeError, UsageError
from weft.base.whole_numbers import whole_number
from weft.ops import all_to_all
from weft.runtime.start import init
from weft.runtime.world import World

FORWARD, BACKWARD = "forward", "backward"


class Turn(NamedTuple):
    """One thing that a stage does: a pass of one microbatch."""

    what: str
    microbatch: int


def turns(stage: int, stages: int, microbatches: int) -> Iterator[Turn]:
    """What a stage does, in order: 1F1B."""
    first = min(stages - 1 - stage, microbatches)
    for i in range(first):
        yield Turn(FORWARD, i)
    for i in range(microbatches - first):
        yield Turn(FORWARD, first + i)
        yield Turn(BACKWARD, i)
    for i in range(microbatches - first, microbatches):
        yield Turn(BACKWARD, i)


def bubble(stages: int, microbatches: int) -> float:
    """Which part of a step a stage waits, where all passes take the same time on all stages."""
    return (stages - 1) / (microbatches + stages - 1)


class _Neighbour:
    """Hand-overs to and from a stage beside this one, rows of `shape` and `dtype`."""

    def __init__(self, world: World, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.world, self.shape = world, tuple(shape)
        other, rows = 1 - world.rank, shape[0]
        counts = torch.zeros(2, 2, dtype=torch.int64)
        counts[1, other] = rows
        self._nothing, self._all = counts.to(world.device)
        self._empty = torch.zeros(self.shape, dtype=dtype, device=world.device)

    def swap(self, sent: Tensor | None) -> Tensor:
        """Send a tensor, or nothing; what the other one has sent meanwhile."""
        splits = self._nothing if sent is None else self._all
        x = self._empty if sent is None else sent.detach().contiguous()
        if x.shape != self.shape or x.dtype != self._empty.dtype:
            raise ShapeError(
                f"Pipeline: a stage hands over {tuple(x.shape)} of {x.dtype}, but was made for "
                f"{self.shape} of {self._empty.dtype}"
            )
        got, _ = all_to_all(x, splits=splits, capacity=self.shape[0], world=self.world)
        return got


class Pipeline:
    """This rank's stage of a model whose stages are spread over the ranks, in their order.

        pipeline = Pipeline(stage, world, shape=(4, 512, 4096), microbatches=8, loss=loss)
        total = pipeline.step(inputs, targets)      # gradients lie in the stage's parameters

    `stage` takes what the one before it gives; `loss(result, target)` is the last one's. Each
    microbatch counts 1 / microbatches.

    Shapes  shape, dtype: of what a stage hands to the next, of one microbatch, alike between all
    Raises  UsageError: a world that is not of all ranks of its process group; ShapeError
    """

    def __init__(
        self, stage: nn.Module, world: World, *, shape: Sequence[int], microbatches: int,
        loss: Callable[[Tensor, Any], Tensor], dtype: torch.dtype = torch.float32,
        heap_bytes: int | None = None,
    ) -> None:  # fmt: skip
        self.stage, self.loss = stage, loss
        self.microbatches = whole_number("Pipeline: microbatches", microbatches, 1)
        self.index, self.stages = world.rank, world.num_ranks
        self._worlds = _worlds(world, heap_bytes)
        made = [one and _Neighbour(one, shape, dtype) for one in self._worlds]
        self._before, self._behind = made
        # With which the next backward begins.
        self._gradient: Tensor | None = None

    @property
    def turns(self) -> list[Turn]:
        """What this stage does in a step, in order."""
        return list(turns(self.index, self.stages, self.microbatches))

    def step(self, inputs: Sequence[Tensor], targets: Sequence[Any]) -> Tensor:
        """All passes of one batch; the mean loss on the last stage, 0 on others. Collective.

        `inputs` are looked at by the first stage, `targets` by the last: one for each microbatch.
        Gradients are added to what is there.

        Sync    stream-ordered on the current stream; the host waits for nothing
        """
        self._check(inputs, targets)
        taken: dict[int, tuple[Tensor, Tensor]] = {}
        total = torch.zeros((), device=self._device)
        order = self.turns
        x = self._received(inputs, order[0], None)
        for turn, following in zip(order, [*order[1:], None], strict=True):
            i = turn.microbatch
            if turn.what == FORWARD:
                assert x is not None
                y = self.stage(x)
                if self._behind is None:
                    y = self.loss(y, targets[i]) / self.microbatches
                    total = total + y.detach()
                taken[i] = x, y
                x = self._hand_on(inputs, i, y, following)
            else:
                x = self._hand_back(inputs, *taken.pop(i), following)
        return total

    # A forward and the backward behind it are handed over in one exchange where a stage does them
    # in turns: the stage behind is given a result and gives the gradient of an earlier one.

    def _hand_on(
        self, inputs: Sequence[Tensor], i: int, y: Tensor, following: Turn | None
    ) -> Tensor | None:
        """Result i to the stage behind; what the next forward begins with."""
        assert following is not None, "a forward is followed by something"
        behind, is_in_turns = self._behind, i >= self.stages - 1 - self.index
        if following.what == FORWARD:
            if behind is not None:
                behind.swap(y)
            return self._received(inputs, following, None)
        self._gradient = None
        if behind is not None:
            got = behind.swap(y)
            self._gradient = got if is_in_turns else behind.swap(None)
        return None

    def _hand_back(
        self, inputs: Sequence[Tensor], x: Tensor, y: Tensor, following: Turn | None
    ) -> Tensor | None:
        """One backward, and its gradient to the stage before."""
        torch.autograd.backward(y, self._gradient)
        if following is None or following.what == BACKWARD:
            if self._before is not None:
                self._before.swap(x.grad)
            if following is not None and self._behind is not None:
                self._gradient = self._behind.swap(None)
            return None
        return self._received(inputs, following, x.grad)

    def _received(self, inputs: Sequence[Tensor], turn: Turn, gradient: Tensor | None) -> Tensor:
        """What a forward begins with; the stage before gets a gradient, if one is due."""
        if self._before is None:
            return inputs[turn.microbatch]
        return self._before.swap(gradient).requires_grad_()

    def _check(self, inputs: Sequence[Tensor], targets: Sequence[Any]) -> None:
        for name, given, counts in (
            ("inputs", inputs, self._before is None), ("targets", targets, self._behind is None),
        ):  # fmt: skip
            if counts and len(given) != self.microbatches:
                raise UsageError(
                    f"Pipeline: {len(given)} {name} for {self.microbatches} microbatches; pass one "
                    "for each"
                )

    @property
    def _device(self) -> torch.device:
        return next(self.stage.parameters()).device

    def close(self) -> None:
        """Give back the worlds of neighbours. Collective."""
        for world in self._worlds:
            if world is not None:
                world.close()


def _worlds(world: World, heap_bytes: int | None) -> tuple[World | None, World | None]:
    """Of this rank and the one before it, and of this one and the one behind it."""
    import torch.distributed as dist

    if dist.get_world_size() != world.num_ranks:
        raise UsageError(
            f"Pipeline: {world.num_ranks} ranks of {dist.get_world_size()}; its world must be of "
            "all ranks, each a stage"
        )
    found: list[World | None] = [None, None]
    for first in range(world.num_ranks - 1):
        group = dist.new_group([first, first + 1])  # all ranks make all groups
        if world.rank in (first, first + 1):
            name = f"stages {first} and {first + 1}"
            found[world.rank == first] = init(group, name=name, heap_bytes=heap_bytes)
    return found[0], found[1]
