"""Ranks that a kernel names and that may not exist; barriers that not all ranks come to."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from weft.verify.lint.launches import passed
from weft.verify.lint.problem import ERROR, WARNING
from weft.verify.lint.registry import Hit, Kernel, at, rule, text_of
from weft.verify.lint.values import DATA, NUM_RANKS, OFFSET_RANK, RANK, TICKET, UNCHECKED, Frame, Op


@rule(
    "peer-unmasked",
    ERROR,
    "A rank's neighbour that is not brought back into 0 .. num_ranks - 1.",
    remedy="take it modulo wl.num_ranks(world), or guard the access by a comparison",
)
def peer_unmasked(kernel: Kernel) -> Iterator[Hit]:
    for op in kernel.ops:
        if op.to is None or _is_guarded(op):
            continue
        if op.to.has(OFFSET_RANK):
            yield at(op, f"{_peer_text(op)} is the rank plus or minus something, and on the "
                         "first or last rank there is no such peer")  # fmt: skip
        elif op.to.form == NUM_RANKS:
            yield at(op, f"{_peer_text(op)} is the number of ranks; the last rank is one less")


def _is_guarded(op: Op) -> bool:
    """Does a branch around it, or a return before it, ask about ranks?"""
    return any(
        frame.test.has(RANK) or frame.test.has(OFFSET_RANK) or frame.test.has(NUM_RANKS)
        for frame in op.branches()
    )


def _peer_text(op: Op) -> str:
    if isinstance(op.node, ast.Call):
        for word in op.node.keywords:
            if word.arg in ("to", "peer", "source"):
                return f"{word.arg}={text_of(word.value)}"
        if op.name == "wl.at" and len(op.node.args) > 2:
            return f"peer {text_of(op.node.args[2])}"
    return "the index of the table of addresses"


@rule(
    "peer-from-data",
    WARNING,
    "A peer read from memory and used as it is.",
    remedy="guard the access by a comparison with wl.num_ranks(world), or take it modulo that",
)
def peer_from_data(kernel: Kernel) -> Iterator[Hit]:
    for op in kernel.of("put", "get", "notify", "address"):
        if op.to is None or not op.to.has(UNCHECKED) or op.to.has(TICKET):
            continue
        if not any(frame.test.has(DATA) for frame in op.branches()):
            yield at(op, f"{_peer_text(op)} is what memory holds, and nothing here says that "
                         "it is a rank")  # fmt: skip


@rule(
    "divergent-barrier",
    ERROR,
    "A barrier of the world in a branch that not every rank takes.",
    remedy="call it outside the branch, or on both sides of it",
)
def divergent_barrier(kernel: Kernel) -> Iterator[Hit]:
    barriers = [op for op in kernel.of("barrier") if op.name == "wl.barrier"]
    for op in barriers:
        for frame in op.branches():
            if not (frame.test.has(RANK) or frame.test.has(OFFSET_RANK)):
                continue
            if not any(_on_other_side(one, frame) for one in barriers):
                line = frame.node.lineno  # type: ignore[attr-defined]
                yield at(op, f"only ranks for which the condition in line {line} decides so "
                             "come here, and a barrier waits for every rank")  # fmt: skip
                break


@rule(
    "rank-as-constexpr",
    WARNING,
    "The rank as a compile-time constant: one binary for each rank.",
    remedy="take it from wl.rank(world), or drop the tl.constexpr",
)
def rank_as_constexpr(kernel: Kernel) -> Iterator[Hit]:
    for launch in kernel.launches:
        for name, argument in launch.arguments.items():
            if passed(launch, name).form == RANK and kernel.device.is_constexpr(name):
                message = f"{name} of {kernel.name} is a constexpr, so every rank compiles "
                yield Hit(argument, message + "a kernel of its own")


def _on_other_side(op: Op, frame: Frame) -> bool:
    return any(one.node is frame.node and one.kind != frame.kind for one in op.branches())
