"""What a kernel is compiled for, or run on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.base.errors import UsageError


@dataclass(frozen=True)
class Target:
    """A backend and an architecture, e.g. `cuda:90`, `hip:gfx942`, `emu`.

    `machine`: the Hardware that was probed where it runs; None: what is known of the target.

    Units   shared_bytes: what one program may use; num_sms: SMs, CUs, or emulated ones
    """

    backend: str
    arch: int | str
    warp_size: int = 32
    num_sms: int = 132
    shared_bytes: int = 232448
    has_tma: bool = False
    machine: Any = field(default=None, repr=False)

    @property
    def name(self) -> str:
        return self.backend if self.backend == "emu" else f"{self.backend}:{self.arch}"

    def __str__(self) -> str:
        return self.name


TARGETS = {
    target.name: target
    for target in (
        Target("emu", 0, num_sms=132, has_tma=True),
        Target("cuda", 80, num_sms=108, shared_bytes=166912),
        Target("cuda", 90, num_sms=132, shared_bytes=232448, has_tma=True),
        Target("cuda", 100, num_sms=148, shared_bytes=232448, has_tma=True),
        Target("hip", "gfx942", warp_size=64, num_sms=304, shared_bytes=65536),
        Target("hip", "gfx950", warp_size=64, num_sms=256, shared_bytes=163840),
    )
}


def parse_target(text: str, others: Sequence[str] = ()) -> Target:
    """The target named `text`: `emu`, `cuda:90`, `cuda:sm_90a`, `sm_90a`, `hip:gfx942`, `gfx942`.

    Raises  UsageError: a name outside the table, with those that there are and `others`, which the
            caller takes besides
    """
    name = text.strip().lower()
    name = ({"sm_": "cuda:", "gfx": "hip:"}.get(name[:3], "") + name).replace("sm_", "")
    if name.startswith("cuda:"):
        name = name.rstrip("a")
    if name not in TARGETS:
        raise UsageError(f"unknown target {text!r}; there are {', '.join([*TARGETS, *others])}")
    return TARGETS[name]
