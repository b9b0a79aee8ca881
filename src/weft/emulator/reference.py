"""The page on what the emulator runs, written from its table of operations.

python -m weft.emulator.reference > docs/emulator.md
"""

from __future__ import annotations

import sys

from weft.emulator.operations import operations_table

INTRODUCTION = """\
# What the emulator runs

This page is generated from the table in `src/weft/emulator/operations`; do not edit it:
`python -m weft.emulator.reference > docs/emulator.md`.

Triton's own front end lowers a kernel to TTIR, and each TTIR operation becomes a line of Python on
numpy. So promotion, `constexpr`, `tl`'s library and aggregates are Triton's own, on every version
from 3.6 on. To read what a kernel became:
`weft.emulator.codegen.compile_ttir(ttir_text).source`; variables and lines are the kernel's.

An operation that is not listed raises `UnsupportedError` with the kernel's line, before anything
runs. Inline assembly is one of these; Gluon kernels have no TTIR and are not taken.

## Numbers

* Integers are two's complement and wrap. Signed division truncates toward zero. Shifting by all the
  bits or more leaves 0, or the sign.
* An index in 32 bits that has wrapped by the time it becomes an address or a bound is reported as
  `OutOfBoundsError` at its line.
* fp16 and bf16 arithmetic is done in fp32 and rounded once, to nearest even, per operation.
* `tl.dot` takes tiles of k 16 at least (32 for 8-bit types), as on NVIDIA GPUs. It adds up products
  of fp16, bf16, fp8 and fp32 in fp64, rounded to fp32: a result does not depend on where its row
  lies in a tile. fp32 operands are rounded to tf32 first where `input_precision` is `"tf32"`,
  which is Triton's default, as on NVIDIA's GPUs; with `"ieee"`, `"tf32x3"` and the others they are
  not. int8 adds up in int32, exactly.
* `tl.device_assert` is always checked, `debug=True` or not.
* A loop that touches no memory for 10 million turns (`WEFT_ENDLESS_TURNS`) is reported as endless.
* The order of a sum is numpy's, or neighbours first: not a GPU's. Compare with a tolerance.
* Conversions to fp8 saturate; floats to integers saturate, NaN gives 0.
* A value that nobody defined (`ub.poison`) is 0.

## The machine

`weft emulate SCRIPT --ranks 4 --nodes 2`, or `weft.emulated(ranks=4, nodes=2)`:

* **Nodes** are scale-up domains. A number splits the ranks evenly, the first nodes larger by one
  where it does not divide; sizes split them as they say: `--nodes 3+1`, `nodes=(3, 1)`. Ranks see
  in their environment what a launcher would have told them. A rank of another node is reached by
  `wl.put`, `wl.get`, `wl.put_signal` and `wl.notify` alone; its address is 0 in the world's
  table, and a kernel that dereferences one all the same is a finding ("far pointer").
* **Worlds** stand beside each other, each with its own heap and its own signals: one of all
  ranks, others over `torch.distributed.new_group` of any of them (`weft.init(group=...,
  name=...)`) or over one axis of a device mesh (`weft.init(group=mesh["tp"])`). The first
  `weft.init` starts torch's default process group where the script has not, as on GPUs.
* **Calls that come again** are replayed, as on CUDA: what an operator launches is recorded at the
  third call with the same tensors on the same slot, and from then on queued with the arguments
  frozen. So an operator whose recordings go by too little gives a wrong answer or a finding here
  too. Findings of a replay name the lines of its own call. Not in simulated time.
* **torch's operations** belong to the rank's current stream and are checked as kernels are, also
  those of compiled functions ([torch.compile](training.md#torchcompile)), of functional
  collectives, DTensor and FSDP2. Machine code of a C++ extension runs after what was queued before
  it, but what it reads and writes is not seen, and a recording does not repeat it.
* **Residency**: `--num-sms`, `num_sms=` programs are on a rank at a time. A cooperative launch of
  more is refused; a grid whose programs wait for one that does not fit is a finding
  ("residency").

## Simulated time

`weft emulate SCRIPT --timeline FILE.json` writes a trace for https://ui.perfetto.dev
(`FILE.html`: [a page](timeline.md)) and says for each rank how long it would take, and how
much of its transfers' time would also be computation's.
In a test: `with weft.emulated(hardware="h200x4") as ranks:`, then `ranks.timeline`, a list of
`(rank, lane, name, start_us, end_us, kind, about)` with a `summary()`, and its `signals`. Off by
default, and free when it is off.

Every program, stream and host has a time of its own. Work adds to it; whoever is ordered behind
somebody, by stream, event, signal, packet, barrier or host, goes on at the later of the two
times.

* A program, between two synchronising operations, takes the slowest of its loads and stores, its
  products (`tl.dot`) and its transfers: they overlap.
* A kernel takes a launch and its programs, `num_sms` at a time; at least the time for what it
  touches to pass through the memory once.
* A copy takes its start, then its bytes at the link's rate: one transfer at a time for each
  engine, and for each rank's link in each direction.
* A signal takes a latency from rank to rank; a wait ends when enough have arrived, in the order
  of their arrival. A stream that takes a token goes on a latency after it was set.
* A torch operation takes a launch, then its bytes through the memory or the flops of a product.
* To another node there is a slower link of its own, and a longer latency.

The numbers are a `Hardware` record (`weft.base.hardware`), by default those measured on 4 x H200,
with what was not measured marked in the file.

What it does not know: it follows the schedule of the run and never changes it, so where time
itself would decide (tickets, spin locks, tiles given out by arrival) it shows one legal order,
not the likely one; other seeds show others. Vector arithmetic and the cost of host code are
nothing; caches, clocks and power are not modelled; a transfer has its link to itself while it
lasts; `torch.distributed` collectives are counted as local memory traffic. Use it to compare plans;
it does not predict a GPU's times.

## Operations
"""


def reference() -> str:
    """The text of docs/emulator.md."""
    return f"{INTRODUCTION}\n{operations_table()}"


if __name__ == "__main__":
    sys.stdout.write(reference())
