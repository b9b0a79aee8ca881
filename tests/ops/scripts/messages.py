"""Messages between two ranks by every transport, in sizes that nothing divides and large ones.

    torchrun --nproc-per-node 2 tests/ops/scripts/messages.py

Each rank sends to the one behind it and receives from the one before: eager, replayed, one side
replayed and the other not, on two streams, in turns of sizes; then lengths that differ. All bit by
bit. Each rank says `rank R of N: C cases`, or raises with all that went wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

import weft
from weft.ops import recv, send
from weft.ops.send import Problem, candidates
from weft.tune.answers import poison
from weft.tune.compiling import compile_together

MOST = 48 << 20
SIZES = {
    "bfloat16": ((1, 1), (24, 33), (4096, 4096)), "float32": ((7, 40), (1000, 4099)),
    "int8": ((3, 5), (129, 128)),
}  # fmt: skip
TURNS = 5


class Case:
    """One message's size and dtype, on the way around all ranks by one transport."""

    def __init__(self, world: Any, shape: tuple[int, int], dtype: str, config: Any) -> None:
        self.world, self.config = world, config
        self.name = f"{config.transport} {dtype} {shape[0]}x{shape[1]}"
        self.dst = (world.rank + 1) % world.num_ranks
        self.src = (world.rank - 1) % world.num_ranks
        kind = getattr(torch, dtype)
        self.x = self.numbers(shape, kind, world.rank, 0)
        self.out = torch.empty_like(self.x)

    def numbers(self, shape: tuple[int, ...], kind: Any, rank: int, turn: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * turn + rank)
        drawn = torch.randint(-100, 100, shape, generator=generator, dtype=torch.int32)
        return drawn.to(kind).to(self.world.device)

    def set(self, turn: int) -> None:
        self.x.copy_(self.numbers(self.x.shape, self.x.dtype, self.world.rank, turn))
        poison(self.out)

    def is_right(self, turn: int) -> bool:
        want = self.numbers(self.x.shape, self.x.dtype, self.src, turn)
        return torch.equal(self.out, want)

    def sends(self) -> None:
        send(self.x, self.dst, world=self.world, config=self.config)

    def receives(self) -> None:
        recv(self.out, self.src, world=self.world, config=self.config, out=self.out)

    def call(self) -> None:
        self.sends()
        self.receives()

    def beside(self) -> None:
        """Both at once."""
        main, side = self.world.current_stream(), self.world.stream("receives")
        side.wait(main)
        self.sends()
        with side:
            self.receives()
        main.wait(side)

    def failures(self) -> Iterator[str]:
        # Loaded before anything waits.
        self.call()
        self.world.synchronize()
        ways = {"eager": self.call, "on two streams": self.beside}
        for name, call in ways.items():
            yield from self._tried(name, call)
        for name, call in ways.items():
            yield from self._tried(f"{name}, replayed", self._recorded(call))
        sends, receives = self._recorded(self.sends), self._recorded(self.receives)
        is_odd = self.world.rank % 2

        def mixed() -> None:
            (self.sends if is_odd else sends)()
            (receives if is_odd else self.receives)()

        yield from self._tried("one side replayed", mixed)

    def _recorded(self, call: Callable[[], None]) -> Callable[[], None]:
        with self.world.record() as recording:
            call()
        return recording.replay

    def _tried(self, name: str, call: Callable[[], None]) -> Iterator[str]:
        for turn in range(TURNS):
            self.set(turn)
            call()
            if not self.is_right(turn):
                yield f"{self.name}: {name}, turn {turn}"


def cases(world: Any) -> Iterator[Case]:
    for dtype, shapes in SIZES.items():
        for shape in shapes:
            if world.device.type == "cpu":  # emulated ranks take their time
                shape = tuple(min(one, 70) for one in shape)
            problem = Problem(shape[0] * world.num_ranks, shape[1], world.num_ranks, dtype)
            for config in candidates(problem, world.target):
                yield Case(world, shape, dtype, replace(config, channels=min(6, config.channels)))


def wrong_lengths(world: Any) -> Iterator[str]:
    """Of three messages the second is shorter than its room: an error, and the third comes."""
    dst, src = (world.rank + 1) % world.num_ranks, (world.rank - 1) % world.num_ranks
    x = torch.arange(80.0, device=world.device).view(10, 8)
    for rows in (10, 9):
        send(x[:rows], dst, world=world)
        got = recv(x, src, world=world)
    try:
        world.synchronize()
        yield "a message of another length: no error"
    except weft.ShapeError as error:
        if f"rank {src} sent 288 bytes" not in str(error):
            yield f"a message of another length: {error}"
    send(x, dst, world=world)
    got = recv(x, src, world=world)
    if not torch.equal(got, x):
        yield "behind a message of another length: wrong"


def main() -> None:
    world = weft.init(heap_bytes=512 << 20)
    weft.mailbox(MOST, world=world, hops=(1,))
    some, found, count = list(cases(world)), [], 0
    compile_together(world, lambda: [one.call() for one in some])
    for one in some:
        found += one.failures()
        count += 1
    # All of them at once, of all sizes in turns.
    for turn in range(2):
        for one in some:
            one.set(turn)
        for one in some:
            one.call()
        found += [f"{one.name}: in turns" for one in some if not one.is_right(turn)]
    found += wrong_lengths(world)
    world.synchronize()
    assert not found, "\n".join(found)
    print(f"rank {world.rank} of {world.num_ranks}: {count} cases", flush=True)
    world.close()


if __name__ == "__main__":
    main()
