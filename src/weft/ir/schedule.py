"""How the kernel of a product runs: the record in which a choice ends, one for all operators."""

from __future__ import annotations

from dataclasses import dataclass

from weft.base.target import Target

# Communication CTAs for which nobody says how many.
PUSHERS = 20
# Those that store tokens for products by tables.
FEEDERS = 8
# Those of a kernel beside the product that relays rows between nodes, each on an SM of its own:
# so many fill a port to other nodes (docs/nvshmem.md: 64 programs put 136 GB/s, a port has 50).
RELAYS, EMULATED_RELAYS = 16, 2


def relays_on(target: Target) -> int:
    """How many programs relay rows there, and so how many SMs a product leaves to them. Few where
    ranks are emulated, so that a program has several chunks."""
    most = EMULATED_RELAYS if target.backend == "emu" else RELAYS
    return max(1, min(most, target.num_sms // 4))


@dataclass(frozen=True)
class Schedule:
    """How one kernel that multiplies and communicates runs; every field is the same on all ranks.

    `transport` carries the rows or tiles: sm_push (SMs store to peers), ce_push (copy engines), ll
    (packets), or the name of what runs unfused. `template` is plain or sm90. `tma`: operands are
    read by TMA where the target has it. `by_tma`: on Hopper tiles leave by TMA, and are announced
    behind the next product; not by stores of threads, announced at once.

    Units   chunks: of what travels, each with a signal of its own; pushers: communication CTAs,
            which store rows to peers before they multiply; own_first: tiles of own rows are a group
            by themselves, which need not wait; first_wave: split-k programs for each of its tiles,
            in a wave of their own, or 1; last: turns of all programs that the order ends with, on
            own tiles alone (order.order_of); group_m: rows of tiles that share columns in L2;
            split_k: parts of what a product sums over rows, each of which its programs do for all
            tiles
    """

    transport: str = "sm_push"
    template: str = "plain"
    last: int = 3
    tile_m: int = 128
    tile_n: int = 128
    tile_k: int = 64
    group_m: int = 8
    num_warps: int = 8
    num_stages: int = 3
    tma: bool = True
    by_tma: bool = False
    chunks: int = 1
    pushers: int = 0
    own_first: bool = True
    first_wave: int = 1
    split_k: int = 1

    @property
    def tile(self) -> tuple[int, int, int]:
        return self.tile_m, self.tile_n, self.tile_k
