"""Mutants of TTIR: which there are, that each is another program, and that nothing else changes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from mutated_programs import SIZE, copying, exchanging, module_of, run_of, spinning

import weft
import weft.language as wl
from weft.emulator.accesses import RELEASE_COMPLETES_STORES
from weft.emulator.codegen import write_kernel
from weft.verify.mutants import kernels
from weft.verify.mutants.edits import operations
from weft.verify.mutants.primitives import symbol_of, words_of
from weft.verify.mutants.rewrites import OneMutant
from weft.verify.mutants.search import shows


def kinds(module) -> set[str]:
    return {f"{mutant.kind} {mutant.site.primitive}" for mutant in kernels.mutations(module)}


def source(module) -> str:
    return write_kernel(module).source


def mutants_of(module, kind: str, primitive: str):
    return [
        mutant
        for mutant in kernels.mutations(module)
        if (mutant.kind, mutant.site.primitive) == (kind, primitive)
    ]


def the(module, kind: str, primitive: str):
    (mutant,) = mutants_of(module, kind, primitive)
    return mutant


ALWAYS = ("drop", "narrow", "value+1", "value-1")
EXCHANGE = {
    *(f"{kind} notify" for kind in (*ALWAYS, "relax-release", "swap")),
    *(f"{kind} wait" for kind in (*ALWAYS, "relax-acquire", "count+1", "count-1")),
    "peer+1 at", "peer+1 signal_at",
}  # fmt: skip


def test_every_way_to_weaken_a_kernel_is_there_once():
    module = module_of(exchanging(), "exchange")
    assert kinds(module) == EXCHANGE
    assert len(kernels.mutations(module)) == len(EXCHANGE)


def test_each_mutant_is_another_program_and_the_module_stays_as_it_is():
    module = module_of(exchanging(), "exchange")
    before = source(module)
    written = {source(kernels.mutate(module, mutant)) for mutant in kernels.mutations(module)}
    assert len(written) == len(EXCHANGE) and before not in written
    assert source(module) == before


def test_a_mutant_says_what_was_changed_and_where():
    module = module_of(exchanging(), "exchange")
    text = str(the(module, "drop", "wait"))
    assert text.startswith("drop of wait in exchange at mutated_programs.py:") and "\n" not in text
    assert kernels.mutate(module_of(copying, "take"), the(module, "drop", "wait")) is None


def test_swap_brings_a_notify_before_the_put():
    module = module_of(exchanging(), "exchange")

    def order(one):
        names = [symbol_of(op) for op in operations(one)]
        return names.index("tt.store") < names.index("weft.notify")

    assert order(module)
    assert not order(kernels.mutate(module, the(module, "swap", "notify")))


@triton.jit
def last_of_all(counter, data, size: tl.constexpr):
    i = tl.arange(0, size)
    tl.store(data + tl.program_id(0) * size + i, i)
    done = wl.atomic_add(counter, 1, order="acq_rel", scope="gpu")
    if done == tl.num_programs(0) - 1:
        tl.store(data + i, i)


def counting():
    weft.init()
    data = torch.zeros(2 * SIZE, dtype=torch.int32)
    last_of_all[(2,)](torch.zeros(1, dtype=torch.int32), data, SIZE)


def test_each_half_of_an_order_is_lost_in_turn_and_scopes_become_narrower():
    module = module_of(counting, "last_of_all", 1)
    words = {}
    for kind in ("relax-acquire", "relax-release", "narrow"):
        changed = kernels.mutate(module, the(module, kind, "atomic"))
        (atomic,) = (op for op in operations(changed) if op.name == "tt.atomic_rmw")
        words[kind] = words_of(atomic)[1:3]
    assert words == {
        "relax-acquire": ["release", "gpu"],
        "relax-release": ["acquire", "gpu"],
        "narrow": ["acq_rel", "cta"],
    }


def test_a_spin_that_is_dropped_looks_once_and_goes_on():
    module = module_of(spinning, "spin")
    assert {"drop atomic", "relax-acquire atomic", "peer+1 at"} <= kinds(module)
    dropped = mutants_of(module, "drop", "atomic")
    shown = {shows(run_of(spinning), 0, OneMutant(mutant)) for mutant in dropped}
    # The one that signals and the one that waits; a run ends with the first that it shows.
    assert shown == {"deadlock", "uninitialised"}


@triton.jit
def store_and_tell(world, out, ready, size: tl.constexpr):
    i = tl.arange(0, size)
    block = tl.make_tensor_descriptor(out, [size], [1], [size])
    block.store([0], i)
    wl.notify(world, ready, to=wl.rank(world))


def storing():
    world = weft.init()
    triton.set_allocator(lambda nbytes, _, __: torch.empty(nbytes, dtype=torch.int8))
    store_and_tell[(1,)](world.arg, torch.zeros(SIZE, dtype=torch.int32), world.signals(1), SIZE)


def test_asynchronous_stores_may_not_be_complete():
    found = kinds(module_of(storing, "store_and_tell", 1))
    assert ("incomplete notify" in found) == (not RELEASE_COMPLETES_STORES)
    assert "swap notify" in found and "incomplete notify" not in kinds(
        module_of(exchanging(), "exchange")
    )


@triton.jit
def packets(world, x, inbox, out, flag, size: tl.constexpr):
    i = tl.arange(0, size)
    right = (wl.rank(world) + 1) % wl.num_ranks(world)
    wl.put_packets(world, inbox + i, tl.load(x + i), flag, to=right)
    tl.store(out + i, wl.wait_packets(inbox + i, flag, dtype=tl.float32, world=world))


def sending_packets():
    world = weft.init()
    inbox, out = world.zeros((SIZE,), torch.int64), torch.zeros(SIZE)
    packets[(1,)](world.arg, torch.arange(SIZE) + 10.0 * world.rank, inbox, out, 3, SIZE)
    left = (world.rank - 1) % world.num_ranks
    assert torch.equal(out, torch.arange(SIZE) + 10.0 * left)


def test_packets_lose_their_flags():
    module = module_of(sending_packets, "packets")
    assert kinds(module) == {
        *(f"{kind} put_packets" for kind in ("drop", "value+1", "value-1")),
        *(f"{kind} wait_packets" for kind in ("drop", "value+1", "value-1")),
        "peer+1 at",
    }
    run = run_of(sending_packets)
    assert all(shows(run, 0, OneMutant(mutant)) for mutant in kernels.mutations(module)
               if mutant.kind != "peer+1")  # fmt: skip
