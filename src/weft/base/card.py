"""The card of an operator: the one record by which run, verify, compile, bench and docs find it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from weft.base.dtypes import FLOATS

# The transport of a call that libraries and other operators do, one after the other.
UNFUSED = "unfused"


@dataclass(frozen=True)
class Trial:
    """A world and calls in which a signal that is missing or too weak shows.

    `nodes` are the sizes of scale-up domains. `calls` are of these sizes (0), of about half of them
    (1), of one row (2); () is the usual turns. With `transport` it is for that one alone; with
    `on_heap` inputs lie where peers may read them in place. `configs` says what calls of a size
    change of the configuration: {2: {"chunks": 1}}.
    """

    nodes: tuple[int, ...]
    shape: Mapping[str, int]
    transport: str = ""
    on_heap: bool = False
    calls: tuple[int, ...] = ()
    configs: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)


# Three ranks: one more than the two that a signal has. Two nodes, two ranks, one.
TRIAL_NODES = ((3,), (2, 1), (2,), (1,))


def trials(*shapes: Mapping[str, int]) -> tuple[Trial, ...]:
    """Every shape in every world."""
    return tuple(Trial(nodes, shape) for nodes in TRIAL_NODES for shape in shapes)


def calling(function: Callable[..., Any], *named: str) -> Callable[..., Any]:
    """A card's `run`: the operator on its inputs by name, and on these fields of the problem."""

    def run(world: Any, problem: Any, inputs: Mapping[str, Any], config: Any = None) -> Any:
        fields = {name: getattr(problem, name) for name in named}
        return function(**inputs, **fields, world=world, config=config)

    # Where the operator is found.
    run.__module__ = getattr(function, "func", function).__module__
    return run


def sized(
    kind: Any, num_ranks: int, shape: Mapping[str, int], dtype: str, nodes: tuple[int, ...] = ()
) -> Any:
    """The problem of these sizes, which are named as its fields; `kind.usual` has what is usual."""
    sizes = {**getattr(kind, "usual", {}), **shape}
    known = [one for one in fields(kind) if one.name in sizes]
    given = {x.name: bool(sizes[x.name]) if x.type == "bool" else sizes[x.name] for x in known}
    return kind(num_ranks=num_ranks, dtype=dtype, nodes=nodes, **given)


@dataclass(frozen=True)
class Op:
    """An operator, with everything that tools need to know about it.

    `make_problem(num_ranks, shape, dtype)` builds the problem from the command line's words, by
    default as `sized` says;
    `make_inputs(problem, rank, seed)` makes one rank's plain tensors, the same on every machine;
    `reference(problem, inputs)` takes all ranks' inputs and returns all ranks' outputs;
    `run(world, problem, inputs, config)` calls the operator on one rank;
    `kernels(problem, config, target)` yields what `compile` builds and the post-compile check
    reads, as (jit function, KernelRecord).
    `program(problem)` is the operator as a traced tensor program, which `explain` follows.
    `choose(problem, target, is_recorded)` is the configuration of a call that names none, where
    nothing was measured; without it, that is always the first candidate. `predict(problem, target,
    config)` is when a call so configured would end, in us, None where nothing is predicted.
    `unfused` are configurations that are measured beside the candidates: libraries do all of it.
    `records_as(eager, recorded)`: may calls that are recorded be done as the second says, where
    others are as the first? A configuration that cannot be recorded is not recorded as itself.
    `smallest` are the sizes that give a rank two tiles, `m` counted for one rank, and
    `smallest_config` what of a configuration to change for as few programs as may be; `trials` are
    where `weft verify --mutants` looks, but not at `composed`: transports that only call other
    operators, where their signals are tried, and which make some of them unnecessary.
    `fake(problem, inputs, rank)` is that rank's result without values. `backward` names the
    operators that carry gradients back, none where nothing has to travel; without it there is no
    gradient. With `takes_nodes`, make_problem also takes the nodes' sizes, and calls reach ranks of
    all of them.
    """

    name: str
    summary: str
    problem: type
    config: type
    make_inputs: Callable[..., Mapping[str, Any]]
    reference: Callable[..., Sequence[Any]]
    run: Callable[..., Any]
    candidates: Callable[..., Iterable[Any]]
    kernels: Callable[..., Iterable[tuple[Any, Any]]]
    make_problem: Callable[..., Any] = sized
    program: Callable[..., Any] | None = None
    default_shape: Mapping[str, int] = field(default_factory=dict)
    awkward_shapes: tuple[tuple[int, Mapping[str, int]], ...] = ()
    choose: Callable[..., Any] | None = None
    predict: Callable[..., float | None] | None = None
    unfused: tuple[Any, ...] = ()
    records_as: Callable[[Any, Any], bool] = operator.eq
    dtypes: tuple[str, ...] = FLOATS
    baselines: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    fake: Callable[..., Any] | None = None
    backward: tuple[str, ...] | None = None
    takes_nodes: bool = False
    composed: tuple[str, ...] = ()
    smallest: Mapping[str, int] = field(default_factory=lambda: {"m": 2, "n": 16})
    smallest_config: Mapping[str, Any] = field(default_factory=dict)
    # The last rank's rows fill two channels.
    trials: tuple[Trial, ...] = field(default_factory=lambda: trials({"m": 8, "n": 40}))

    def __post_init__(self) -> None:
        if self.make_problem is sized:
            object.__setattr__(self, "make_problem", partial(sized, self.problem))
