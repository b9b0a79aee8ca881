"""Waits in loops that Triton rearranges."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from weft.verify.lint.problem import ERROR, WARNING
from weft.verify.lint.registry import Hit, Kernel, at, pointer_text, rule
from weft.verify.lint.values import Frame, Op


def _waits(kernel: Kernel) -> Iterator[tuple[Op, list[Frame]]]:
    """Each wait, and the `for` loops around it, outermost first."""
    for op in kernel.ops:
        if op.waits:
            yield op, [frame for frame in op.loops() if frame.kind == "for"]


def _line(frame: Frame) -> int:
    assert isinstance(frame.node, ast.For)
    return frame.node.lineno


@rule(
    "wait-in-pipelined-loop",
    WARNING,
    "A wait in a loop whose loads Triton issues stages ahead.",
    remedy="wait once before the loop; or wait in an outer loop over tiles, around the K loop",
)
def wait_in_pipelined_loop(kernel: Kernel) -> Iterator[Hit]:
    for op, loops in _waits(kernel):
        if not loops:
            continue
        stages = _stages(kernel, loops[-1])
        inside = [one for one in kernel.ops if loops[-1].node in _loop_nodes(one)[-1:]]
        loads = [one for one in inside if one.kind in ("load", "descriptor load")]
        # What a loop asks for itself holds for any load, what a launch says for dots' operands.
        is_said = "num_stages" in loops[-1].options
        if stages > 1 and loads and (is_said or any(one.kind == "dot" for one in inside)):
            yield at(op, f"the loop in line {_line(loops[-1])} is pipelined in {stages} stages:"
                         f" a load may be issued before this wait for {pointer_text(op)}, or "
                         "the wait costs the pipelining")  # fmt: skip


def _loop_nodes(op: Op) -> list[ast.AST]:
    return [frame.node for frame in op.loops() if frame.kind == "for"]


def _stages(kernel: Kernel, loop: Frame) -> int:
    """What the loop says, else what a launch of the kernel says; 1 where nobody does."""
    written = loop.options.get("num_stages")
    if written is not None:
        return written.number if isinstance(written.number, int) else 1
    given = [launch.option("num_stages") for launch in kernel.launches]
    return max((n for n in given if isinstance(n, int)), default=1)


@rule(
    "flattened-wait",
    ERROR,
    "A wait in tl.range(flatten=True): the next tile's wait runs before this tile's store.",
    remedy="say flatten=False: the inner loop is pipelined all the same",
)
def flattened_wait(kernel: Kernel) -> Iterator[Hit]:
    for op, loop in _in_loops_with(kernel, "flatten"):
        yield at(op, f"the loop in line {_line(loop)} is flattened, so this wait for "
                     f"{pointer_text(op)} comes before the store of the tile before: a deadlock "
                     "where it depends on that store")  # fmt: skip


@rule(
    "specialised-wait",
    ERROR,
    "A wait in tl.range(warp_specialize=True): on sm_90 Triton drops it without a word.",
    remedy="leave warp_specialize out, or write the kernel in Gluon with the wait in its producer",
)
def specialised_wait(kernel: Kernel) -> Iterator[Hit]:
    for op, loop in _in_loops_with(kernel, "warp_specialize"):
        yield at(op, f"the loop in line {_line(loop)} is warp-specialised, and Triton 3.6 to 3.9 "
                     f"drop this wait for {pointer_text(op)} on sm_90")  # fmt: skip


def _in_loops_with(kernel: Kernel, option: str) -> Iterator[tuple[Op, Frame]]:
    for op, loops in _waits(kernel):
        for loop in loops:
            if option in loop.options and loop.options[option].number is True:
                yield op, loop
