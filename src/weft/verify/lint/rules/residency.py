"""Programs of one launch that wait for each other, in launches that promise nothing about it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from weft.verify.lint.host import Launch
from weft.verify.lint.problem import ERROR
from weft.verify.lint.registry import Hit, Kernel, Program, at, pointer_text, rule, text_of
from weft.verify.lint.values import NUM_PROGRAMS, PROGRAM, Op

# How programs spell the number of SMs.
SM_COUNTS = ("num_sm", "sm_count", "n_sms", "multi_processor", "multiprocessor")


@rule(
    "grid-residency",
    ERROR,
    "Programs that wait for all programs of their launch, launched without saying so.",
    remedy="launch with launch_cooperative_grid=True, which fails where they do not all fit",
)
def grid_residency(program: Program) -> Iterator[Hit]:
    for launch in program.host.launches:
        kernel = program.kernel(launch.device.name) if launch.device else None
        if kernel is None or launch.option("launch_cooperative_grid") is True:
            continue
        if "launch_cooperative_grid" in launch.options or _is_one(program, launch):
            continue
        is_bounded = _asks_for_sms(launch.grid, launch)
        for op in kernel.ops:
            if op.name == "wl.barrier_grid":
                yield at(op, f"this waits for every program of the launch, and the launch of "
                             f"{kernel.name} with grid {text_of(launch.grid)} is not "
                             "cooperative")  # fmt: skip
            elif op.waits and not is_bounded and _waits_for_all(op, kernel, launch):
                yield at(op, f"this waits until all programs of grid {text_of(launch.grid)} have "
                             f"raised {pointer_text(op)}; those that find no room on the device "
                             "start only when others end")  # fmt: skip


def _is_one(program: Program, launch: Launch) -> bool:
    return program.source.constant(launch.grid or ast.Constant(0), program.source.constants) == (1,)


def _asks_for_sms(grid: ast.AST | None, launch: Launch, depth: int = 0) -> bool:
    """Does the grid's size come from the number of SMs, as far as names say?"""
    if grid is None or depth > 4:
        return False
    for node in ast.walk(grid):
        name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
        text = node.value if isinstance(node, ast.Constant) else name
        if isinstance(text, str) and any(word in text.lower() for word in SM_COUNTS):
            return True
        bound = launch.scope.get(name) if isinstance(node, ast.Name) else None
        if bound is not None and _asks_for_sms(bound, launch, depth + 1):
            return True
    return False


def _waits_for_all(op: Op, kernel: Kernel, launch: Launch) -> bool:
    """Does every program add to this local word, and wait for as many as there are programs?"""
    if op.pointer.remote or _depends(op) or not _expects_all(op, launch):
        return False
    return any(
        one.pointer.roots & op.pointer.roots and not one.waits and not _depends(one)
        for one in kernel.of("atomic", "notify")
        if not one.pointer.remote and one.value.number != 0
    )


def _depends(op: Op) -> bool:
    """Is the word, or whether it is touched at all, another one in each program?"""
    in_branch = any(frame.test.has(PROGRAM) for frame in op.branches())
    return in_branch or (op.pointer.offset is not None and op.pointer.offset.has(PROGRAM))


def _expects_all(op: Op, launch: Launch) -> bool:
    if op.expected.has(NUM_PROGRAMS):
        return True
    grid = launch.grid
    sizes = {ast.unparse(one) for one in (grid.elts if isinstance(grid, ast.Tuple) else [grid])
             if one is not None}  # fmt: skip
    given = {name: ast.unparse(value) for name, value in launch.arguments.items()}
    return any(given.get(name) in sizes for name in op.expected.params)
