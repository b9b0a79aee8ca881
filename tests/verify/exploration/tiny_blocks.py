"""Blocks of a few operations at mbarriers, on a machine alone: what the explorer is tried on.

A block is a list of partitions, each a list of operations (name, barrier, value):

    arrive, expect   so many arrivals; one arrival, with so many bytes to come
    bring            a TMA load of BYTES to the barrier's tile
    wait             for the phase of this parity
    load, store      of the barrier's tile, by threads
    copies           what threads have copied so far arrives once; with 1 as one that the phase has
    signal, await    of a word of global memory, of the barrier's number: add 1; at least so much
"""

from __future__ import annotations

import math
import random

import numpy as np
from tiny_programs import F32, I64, WORDS, FakeKernel, do

from weft.emulator.machine import Machine
from weft.emulator.plain_access import Descriptor
from weft.emulator.works import KernelWork
from weft.verify.exploration.search import Bounds, Ran, Search, search

BARRIERS, CELLS = 2, 4
BYTES = 4 * CELLS
OPERATIONS = ("arrive", "arrive", "expect", "bring", "wait", "wait", "load", "store", "copies")
BETWEEN = ("arrive", "arrive", "wait", "wait", "signal", "await", "await")


def _do(rt, operation, source, tiles, barriers, words, seen, loc):
    name, which, value = operation
    barrier, tile = barriers.part(which), tiles.part(which)
    if name == "arrive":
        rt.arrive_barrier(barrier, value, True, loc)
    elif name == "expect":
        rt.barrier_expect(barrier, value, True, loc)
    elif name == "bring":
        block = Descriptor(source, (CELLS,), (1,), (CELLS,), F32)
        rt.tma_load(block, (np.int32(0),), tile, barrier, True, loc)
    elif name == "wait":
        rt.wait_barrier(barrier, value, True, loc)
        seen.append(barrier.memory.barriers[barrier.cell].ended)
    elif name == "load":
        rt.local_load(tile, loc)
    elif name == "store":
        rt.local_store(tile, np.full(CELLS, value, F32), loc)
    elif name == "copies":
        rt.copies_arrive(barrier, 1, bool(value), loc)
    elif name in ("signal", "await"):
        name = {"signal": "add", "await": "wait"}[name]
        do(rt, (name, which, value), words, 0, seen, loc)
    else:
        raise ValueError(name)


def subject_of(partitions, *, count=1, record=None):
    """One program of these partitions, its barriers for `count` arrivals.

    The outcome is how many phases had ended at each wait, and at the end.
    """

    def subject(execution) -> Ran:
        machine = Machine(1, chooser=execution, name="tiny")
        data = np.zeros(CELLS, F32)
        source = int(data.ctypes.data)
        machine.memory.register(source, data.nbytes, 4, 0, "data")
        signals = np.zeros(WORDS, I64)
        words = int(signals.ctypes.data)
        machine.memory.register(words, signals.nbytes, 8, 0, "words")
        seen = [[] for _ in partitions]
        made = []

        def part(number):
            def run(rt, tiles, barriers):
                for place, operation in enumerate(partitions[number]):
                    loc = 10 * (number + 1) + place
                    _do(rt, operation, source, tiles, barriers, words, seen[number], loc)

            return run

        def kernel(rt):
            tiles = rt.allocate_shared("tiles", (BARRIERS, CELLS), F32, None, 0)
            barriers = rt.allocate_shared("barriers", (BARRIERS, 1), I64, None, 0)
            for which in range(BARRIERS):
                rt.local_store(tiles.part(which), np.zeros(CELLS, F32), 0)
                rt.init_barrier(barriers.part(which), count, 0)
            rt.fence_async_shared(0)
            made.append(barriers.memory)
            rt.specialize([part(number) for number in range(len(partitions))], (tiles, barriers))
            rt.join_partitions()

        def main():
            work = KernelWork(FakeKernel("tiny", kernel), (1, 1, 1), ())
            machine.device.stream(0, "stream").enqueue(work)

        machine.hosts.add(0, main)
        report = machine.run()
        ends = tuple(barrier.ended for barrier in made[0].barriers.values())
        outcome = (tuple(map(tuple, seen)), ends, report.deadlocks != [])
        if record is not None:
            record.append((outcome, report, execution))
        machine.close()
        return Ran(report, repr(outcome).encode())

    return subject


def explore(partitions, *, reduce=True, **options) -> tuple[Search, set, set]:
    """(the search, the outcomes of all executions, the kinds and lines of findings)."""
    record: list = []
    bounds = Bounds(executions=50_000, seconds=math.inf)
    result = search(subject_of(partitions, record=record, **options), bounds, reduce=reduce)
    outcomes = {outcome for outcome, _, _ in record}
    findings = {finding.key() for _, report, _ in record for finding in report}
    return result, outcomes, findings


def random_block(seed: int, *, parties: int, length: int, operations=OPERATIONS):
    draw = random.Random(seed)

    def some():
        name = draw.choice(operations)
        value = {"expect": BYTES, "wait": draw.randrange(2), "copies": draw.randrange(2)}
        return name, draw.randrange(BARRIERS) if draw.random() < 0.3 else 0, value.get(name, 1)

    return [[some() for _ in range(draw.randint(1, length))] for _ in range(parties)]
