"""Programs of a few synchronising operations, on a machine alone: what the explorer is tried on.

A program is a list of operations: (name, word, value). "store" and "load" are plain accesses of a
cell of data, of the same number as a word.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import numpy as np

from weft.base.place import Frame, Place
from weft.emulator.machine import Machine
from weft.emulator.works import CopyWork, KernelWork, TokenWork
from weft.verify.exploration.execution import Execution
from weft.verify.exploration.search import Bounds, Ran, Search, search

F32, I32, I64 = np.dtype(np.float32), np.dtype(np.int32), np.dtype(np.int64)
WORDS = 4


@dataclass(eq=False)
class FakeKernel:
    name: str
    function: object
    source: str = ""
    num_threads: int = 128
    parameters: tuple = ()
    locations: list = field(
        default_factory=lambda: [Place((Frame("tiny.py", line, "k"),)) for line in range(100)]
    )


def do(rt, operation, words, data, seen, loc):
    name, word, value = operation
    ptr, one = np.int64(words + 8 * word), np.int32(1)
    name, _, order = name.partition(".")
    if name in ("add", "set"):
        order = order or "release"
        rt.extern(f"weft.notify:{name}.{order}.sys", [ptr, np.int64(value)], I32, (), loc)
    elif name == "wait":
        symbol = f"weft.wait:{order or 'acquire'}.sys"
        rt.extern(symbol, [ptr, np.int64(value), one], I32, (), loc)
    elif name == "test":
        seen.append(
            bool(rt.extern("weft.test:acquire.sys", [ptr, np.int64(value), one], I32, (), loc))
        )
    elif name == "read":
        seen.append(int(rt.extern(f"weft.load:{order or 'acquire'}.sys", [ptr], I64, (), loc)))
    elif name == "ticket":
        sem = order or "acq_rel"
        seen.append(int(rt.atomic_rmw("add", sem, "sys", ptr, np.int64(value), None, I64, (), loc)))
    elif name == "red":
        sem = order or "release"
        rt.atomic_red(sem, "sys", ptr, np.int64(value), None, I64, (), loc)
    elif name == "store":
        rt.store(np.int64(data + 4 * word), np.float32(value), None, F32, (), loc)
    elif name == "load":
        rt.load(np.int64(data + 4 * word), None, None, F32, (), loc)  # what it gets may be a race's
    else:
        raise ValueError(name)


def subject_of(programs, *, num_sms=132, record=None, kernels=None, takes=()):
    """`programs` as those of one kernel on one rank, or of `kernels` of these sizes.

    Each kernel has a stream of its own. Another one `takes` these words as tokens, and then copies
    cell 0 of the data to cell 1.

    The outcome is what every program has seen, and the words at the end.
    """

    def subject(execution) -> Ran:
        machine = Machine(1, chooser=execution, num_sms=num_sms, name="tiny")
        memory = np.zeros(8 * WORDS + 4 * WORDS, np.uint8)
        words = int(memory.ctypes.data)
        data = words + 8 * WORDS
        machine.memory.register(words, 8 * WORDS, 8, 0, "words")
        machine.memory.register(data, 4 * WORDS, 4, 0, "data")
        seen = [[] for _ in programs]

        def kernel(rt, first):
            number = first + int(rt.pid[0])
            for place, operation in enumerate(programs[number]):
                do(rt, operation, words, data, seen[number], 10 * number + place)

        def main():
            first = 0
            for number, size in enumerate(kernels or [len(programs)]):
                work = KernelWork(FakeKernel("tiny", kernel), (size, 1, 1), (first,))
                machine.device.stream(0, f"stream {number}").enqueue(work)
                first += size
            for word in takes:
                machine.device.stream(0, "takes").enqueue(TokenWork(words + 8 * word))
            if takes:
                cells = [(data + 4 * i, (1,), (4,), F32) for i in (1, 0)]
                machine.device.stream(0, "takes").enqueue(CopyWork(*cells))

        machine.hosts.add(0, main)
        report = machine.run()
        ends = memory[: 8 * WORDS].view(np.int64).tolist()
        outcome = (tuple(map(tuple, seen)), tuple(ends), report.deadlocks != [])
        if record is not None:
            record.append((outcome, report, execution))
        return Ran(report, repr(outcome).encode())

    return subject


def explore(programs, *, reduce=True, bounds=None, **options) -> tuple[Search, set, set]:
    """(the search, the outcomes of all executions, the kinds and lines of findings)."""
    record: list = []
    bounds = bounds or Bounds(executions=50_000, seconds=math.inf)
    result = search(subject_of(programs, record=record, **options), bounds, reduce=reduce)
    outcomes = {outcome for outcome, _, _ in record}
    findings = {finding.key() for _, report, _ in record for finding in report}
    return result, outcomes, findings


OPERATIONS = ("add", "add", "set", "wait", "wait", "ticket", "read", "test", "store", "load")


def random_chain(seed: int):
    """One stores data, the last loads them, and signals in between may order that, or not."""
    draw = random.Random(seed)
    names = ("add", "add", "set", "wait", "wait", "wait.relaxed", "add.relaxed")

    def some():
        return [
            (draw.choice(names), draw.randrange(2), draw.choice((1, 1, 2)))
            for _ in range(draw.randint(1, 2))
        ]

    return [[("store", 0, 5), *some()], some(), [*some(), ("load", 0, 0)]]


def random_programs(seed: int, *, parties: int, length: int, words: int = 2):
    draw = random.Random(seed)
    return [
        [
            (draw.choice(OPERATIONS), draw.randrange(words), draw.choice((1, 1, 2)))
            for _ in range(draw.randint(1, length))
        ]
        for _ in range(parties)
    ]


__all__ = ["Bounds", "Execution", "explore", "random_programs", "subject_of"]
