"""The order of a kernel's operations: what can come between, and what excludes what."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from weft.verify.lint.values import Op

Is = Callable[[Op], bool]


def exclusive(one: Op, other: Op) -> bool:
    """Do they stand on the two sides of one branch, so that no program does both?

    Within a loop both may happen, in different turns; lint does not follow that.
    """
    sides = {id(frame.node): frame.kind for frame in one.path if frame.kind in ("if", "else")}
    return any(
        frame.kind in ("if", "else") and sides.get(id(frame.node), frame.kind) != frame.kind
        for frame in other.path
    )


def before_without(ops: Sequence[Op], first: Is, then: Is, between: Is) -> Iterator[tuple[Op, Op]]:
    """(one, other) such that `one` comes before `other` and nothing of `between` must come between.

    What `between` says counts where it stands on the way of both; so a barrier in a branch clears
    what comes after it, which errs on the quiet side.
    """
    for index, other in enumerate(ops):
        if not then(other):
            continue
        blockers = []
        for one in reversed(ops[:index]):
            if exclusive(one, other):
                continue
            if between(one):
                blockers.append(one)
            elif first(one) and not any(not exclusive(one, blocker) for blocker in blockers):
                yield one, other
                break


def after_without(ops: Sequence[Op], first: Is, then: Is, between: Is) -> Iterator[tuple[Op, Op]]:
    """As `before_without`, for each `first` the next `then` that nothing comes before."""
    for other, one in before_without(ops[::-1], then, first, between):
        yield one, other
