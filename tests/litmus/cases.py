"""The litmus programs: each goes through the enumerator, the emulator and the hardware.

Names say shape, then what each access is: rlx, acq, rel, ar (acq_rel), na (plain); then scope
where it is not the system. The suffix +across spreads the threads over ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

from axiomatic import Access, Litmus, Thread, placements

from weft.base.vocabulary import Order, Scope

RLX, ACQ, REL, AR = Order.RELAXED, Order.ACQUIRE, Order.RELEASE, Order.ACQ_REL
GPU, SYS = Scope.DEVICE, Scope.SYSTEM
SHORT = {None: "na", RLX: "rlx", ACQ: "acq", REL: "rel", AR: "ar"}


def load(location: str, register: str, order: Order | None = RLX, scope: Scope = SYS) -> Access:
    return Access("load", location, 0, register, order, scope)


def wait(location: str, order: Order = ACQ, scope: Scope = SYS) -> Access:
    return Access("wait", location, 1, "", order, scope)


def store(location: str, value: int = 1, order: Order | None = RLX, scope: Scope = SYS) -> Access:
    return Access("store", location, value, "", order, scope)


def notify(location: str, order: Order = REL, scope: Scope = SYS) -> Access:
    return Access("exchange", location, 1, "", order, scope)


def exchange(location: str, register: str, order: Order = AR, scope: Scope = SYS) -> Access:
    return Access("exchange", location, 1, register, order, scope)


def add(location: str, value: int, register: str, order: Order = AR, scope: Scope = SYS) -> Access:
    return Access("add", location, value, register, order, scope)


def litmus(name, threads, homes=None, **weak: int) -> Litmus:
    """Threads as lists of accesses; `homes` are thread numbers, rank 0 in the one-device form."""
    made = tuple(Thread(0, tuple(steps)) for steps in threads)
    return Litmus(name, made, homes or {}, weak)


def suffix(*orders: Order | None, scope: Scope = SYS) -> str:
    words = [SHORT[order] for order in orders]
    return "+".join(words + (["gpu"] if scope is GPU else []))


def message_passing() -> Iterator[Litmus]:
    """Data, then a flag; the reader waits for the flag. `pull`: the data lives at the writer."""
    variants = [(REL, ACQ, SYS), (REL, ACQ, GPU), (RLX, ACQ, SYS), (REL, RLX, SYS), (RLX, RLX, SYS)]
    for out, into, scope in variants:
        for data in (None, RLX):
            for where, home in (("push", 1), ("pull", 0)):
                if where == "pull" and (data is RLX or scope is GPU):
                    continue
                yield litmus(
                    f"mp-{where}-{SHORT[data]}+{suffix(out, into, scope=scope)}",
                    [
                        [store("x", 1, data), notify("y", out, scope)],
                        [wait("y", into, scope), load("x", "r0", data)],
                    ],
                    {"x": home, "y": 1},
                    r0=0,
                )


def store_buffering() -> Iterator[Litmus]:
    """Both write, then read the other's: nothing the language has forbids two zeros."""
    for out, into in ((RLX, RLX), (REL, ACQ)):
        yield litmus(
            f"sb-{suffix(out, into)}",
            [
                [store("x", 1, out), load("y", "r0", into)],
                [store("y", 1, out), load("x", "r1", into)],
            ],
            {"x": 0, "y": 1},
            r0=0,
            r1=0,
        )
    yield litmus(
        "sb-exchange-ar",
        [
            [exchange("x", "r2"), add("y", 0, "r0")],
            [exchange("y", "r3"), add("x", 0, "r1")],
        ],
        {"x": 0, "y": 1},
        r0=0,
        r1=0,
    )


def load_buffering() -> Iterator[Litmus]:
    """Both read, then write what the other reads."""
    for into, out in ((RLX, RLX), (ACQ, REL), (RLX, REL)):
        yield litmus(
            f"lb-{suffix(into, out)}",
            [
                [load("x", "r0", into), store("y", 1, out)],
                [load("y", "r1", into), store("x", 1, out)],
            ],
            {"x": 0, "y": 1},
            r0=1,
            r1=1,
        )


def write_to_read_causality() -> Iterator[Litmus]:
    """A third program hears of a write from the second, which has only read it."""
    for middle, out, into in ((ACQ, REL, ACQ), (RLX, REL, ACQ), (RLX, RLX, ACQ), (RLX, RLX, RLX)):
        yield litmus(
            f"wrc-{suffix(middle, out, into)}",
            [
                [store("x", 1, RLX)],
                [load("x", "r0", middle), notify("y", out)],
                [wait("y", into), load("x", "r1", RLX)],
            ],
            {"x": 0, "y": 2},
            r0=1,
            r1=0,
        )


def transitivity() -> Iterator[Litmus]:
    """A chain of two messages; the first program's data must arrive with the second."""
    for data in (None, RLX):
        yield litmus(
            f"isa2-{SHORT[data]}+rel+acq",
            [
                [store("x", 1, data), notify("y")],
                [wait("y"), notify("z")],
                [wait("z"), load("x", "r0", data)],
            ],
            {"x": 2, "y": 1, "z": 2},
            r0=0,
        )


def coherence() -> Iterator[Litmus]:
    """One location: no reader goes back, and all readers agree."""
    yield litmus(
        "corr-rlx",
        [[store("x", 1), store("x", 2)], [load("x", "r0"), load("x", "r1")]],
        {"x": 0},
        r0=2,
        r1=1,
    )
    yield litmus(
        "corr2-rlx",
        [
            [store("x", 1)],
            [store("x", 2)],
            [load("x", "r0"), load("x", "r1")],
            [load("x", "r2"), load("x", "r3")],
        ],
        {"x": 1},
        r0=1,
        r1=2,
        r2=2,
        r3=1,
    )
    yield litmus(
        "cowr-rlx",
        [[store("x", 1), load("x", "r0")], [store("x", 2), load("x", "r1")]],
        {"x": 1},
        r0=2,
        r1=1,
    )
    yield litmus(
        "add-add",
        [[add("x", 1, "r0", RLX)], [add("x", 1, "r1", RLX)]],
        {"x": 1},
        r0=0,
        r1=0,
    )


def independent_reads() -> Iterator[Litmus]:
    """Two readers see two writes in opposite orders: PTX allows it without a sequential fence."""
    for into in (RLX, ACQ):
        yield litmus(
            f"iriw-{SHORT[into]}",
            [
                [store("x", 1, REL if into is ACQ else RLX)],
                [store("y", 1, REL if into is ACQ else RLX)],
                [load("x", "r0", into), load("y", "r1", into)],
                [load("y", "r2", into), load("x", "r3", into)],
            ],
            {"x": 0, "y": 1},
            r0=1,
            r1=0,
            r2=1,
            r3=0,
        )


SHAPES = (
    message_passing,
    store_buffering,
    load_buffering,
    write_to_read_causality,
    transitivity,
    coherence,
    independent_reads,
)


def cases(num_ranks: int = 4) -> list[Litmus]:
    """Every program on one device, and spread over up to `num_ranks` ranks."""
    return [
        placed for shape in SHAPES for test in shape() for placed in one_and_many(test, num_ranks)
    ]


def one_and_many(test: Litmus, num_ranks: int) -> Iterator[Litmus]:
    one, many = placements(test, num_ranks)
    yield Litmus(one.name, one.threads, dict.fromkeys(one.homes, 0), one.weak)
    if num_ranks > 1:
        yield many
