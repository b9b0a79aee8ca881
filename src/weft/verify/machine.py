"""What a kernel's PTX does that matters to other ranks, as a flow graph.

Instructions are tied to the source's operations by their places: `Sources` says which places
belong to which wait, load, store and atomic of the earlier stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from weft.verify import flow
from weft.verify.places import Key
from weft.verify.ptx import Instruction, Program


@dataclass
class Sources:
    """Places of the source's operations.

    `polls` maps the place of a poll to its wait's groups; those in `looks` are the ones that a
    wait is recognised by: its ordered polls, not its looks at an abort word. `scalars` are stores
    and atomics that one thread makes for the block; `releases` are atomics that publish;
    `assembly` is what the user wrote as such.
    """

    polls: dict[Key, frozenset[int]] = field(default_factory=dict)
    looks: set[Key] = field(default_factory=set)
    scalars: set[Key] = field(default_factory=set)
    releases: set[Key] = field(default_factory=set)
    assembly: set[Key] = field(default_factory=set)
    num_warps: int = 0


def groups_of(one: Instruction, sources: Sources) -> frozenset[int]:
    """The waits of which this instruction may be a poll."""
    groups: frozenset[int] = frozenset()
    for key in one.keys:
        groups |= sources.polls.get(key, groups)
    return groups


def is_poll(one: Instruction, sources: Sources) -> bool:
    """Is this instruction the read of a wait?"""
    is_read = one.is_global and one.base in ("ld", "atom", "multimem")
    return is_read and bool(groups_of(one, sources))


def is_load(one: Instruction) -> bool:
    """Does this instruction read memory that other ranks may write, without an order?"""
    if one.copies == "in":
        return True
    return one.base in ("ld", "ldu", "multimem") and one.is_global and "st" not in one.parts


def kind_of(one: Instruction, sources: Sources) -> str:
    """Which kind of event this instruction is."""
    if one.is_barrier or (one.is_warp_barrier and sources.num_warps == 1):
        return flow.BARRIER
    if one.completes_bulk:
        return flow.COMPLETE
    if is_poll(one, sources):
        return flow.JOINT
    if one.copies == "out":
        return flow.STORE
    if one.base in ("atom", "red", "st") and one.is_global:
        if one.order in ("release", "acq_rel", "sc") and one.scope in ("gpu", "sys", "cluster"):
            # A tile of releases with Triton's default order and scope adds up partial sums.
            is_signal = bool(one.keys & (sources.releases | sources.assembly))
            return flow.RELEASE if is_signal else flow.STORE
        return flow.JOINT if one.keys & sources.scalars else flow.STORE
    if one.base == "multimem" and ("st" in one.parts or "red" in one.parts):
        return flow.STORE
    return flow.LOAD if is_load(one) else flow.JOINT


def _published_by_fence(instructions: Sequence[Instruction], sources: Sources) -> set[int]:
    """Writes of a user's assembly that a fence in it turns into releases."""
    found: set[int] = set()
    fenced = 0
    for index, one in enumerate(instructions):
        if not one.asm_block or not one.keys & sources.assembly:
            continue
        if one.base in ("fence", "membar") and "proxy" not in one.parts:
            if one.scope in ("gpu", "sys"):
                fenced = one.asm_block
        elif one.is_barrier:
            fenced = 0
        elif one.asm_block == fenced and one.base in ("st", "red", "atom") and one.is_global:
            found.add(index)
    return found


def graph_of(program: Program, sources: Sources) -> flow.Graph:
    """The flow graph of a program: one node per event, one per join of control flow.

    A wait in inline assembly is placed where the assembly begins: some of its threads may
    branch around the poll, to meet the others behind it.
    """
    instructions = program.instructions
    graph = flow.Graph()
    leaders = {0}
    for index, targets in enumerate(program.successors):
        if targets != [index + 1]:
            leaders.update(targets)
            leaders.add(index + 1)
    waits = _wait_positions(program, sources)
    published = _published_by_fence(instructions, sources)
    last: dict[int, int] = {}  # the latest node at or before each instruction
    heads: dict[int, int] = {}
    current = -1
    graph.add(flow.Node(flow.JOINT))
    for index, one in enumerate(instructions):
        if index in leaders or current < 0:
            current = graph.add(flow.Node(flow.JOINT))
            heads[index] = current
            if index > 0 and index in program.successors[index - 1]:
                graph.connect(last[index - 1], current)
        for group in sorted(waits.get(index, ())):
            current = _append(graph, current, flow.Node(flow.WAIT, group, one))
        kind = flow.RELEASE if index in published else kind_of(one, sources)
        if kind != flow.JOINT:
            current = _append(graph, current, flow.Node(kind, one.keys, one))
        last[index] = current
    for index, targets in enumerate(program.successors):
        for target in targets:
            if target != index + 1:
                graph.connect(last[index], heads[target])
    if heads:
        graph.connect(0, heads[0])
    return graph


def _append(graph: flow.Graph, current: int, node: flow.Node) -> int:
    index = graph.add(node)
    graph.connect(current, index)
    return index


def _wait_positions(program: Program, sources: Sources) -> dict[int, frozenset[int]]:
    """Instruction index -> groups, for each poll or the assembly around it."""
    found: dict[int, frozenset[int]] = {}
    blocks: dict[int, int] = {}
    for index, one in enumerate(program.instructions):
        if one.asm_block and one.asm_block not in blocks:
            blocks[one.asm_block] = index
        if one.keys & sources.looks and is_poll(one, sources):
            found[blocks.get(one.asm_block, index)] = groups_of(one, sources)
    return found


def spins(program: Program, sources: Sources) -> dict[int, int]:
    """For each wait's group, how many of its polls are in a loop that does nothing else.

    A poll that was moved out of its loop, or whose loop is gone, is not among them.
    """
    instructions = program.instructions
    found: dict[int, int] = {}
    for index, one in enumerate(instructions):
        is_look = bool(one.keys & sources.looks) and is_poll(one, sources)
        if is_look and _comes_back(program, index, sources):
            for group in groups_of(one, sources):
                found[group] = found.get(group, 0) + 1
    return found


def _comes_back(program: Program, start: int, sources: Sources) -> bool:
    """Can control return to `start` without a load, store or wait of another kind between?"""
    groups = groups_of(program.instructions[start], sources)

    def following(index: int) -> list[int]:
        one = program.instructions[index]
        other = kind_of(one, sources) in (flow.LOAD, flow.STORE, flow.RELEASE)
        if other or (is_poll(one, sources) and not groups_of(one, sources) & groups):
            return []
        return program.successors[index]

    return start in flow.reached(program.successors[start], following)


# ---------------------------------------------------------------------------------------------
# Releases


@dataclass(frozen=True)
class Exposed:
    """A release that a store reaches without what it needs: a block barrier, or the completion of
    a bulk store."""

    release: Instruction
    store: Instruction
    lacks: str


NO_BARRIER, NOT_COMPLETE = "barrier", "completion"


def exposed_releases(graph: flow.Graph) -> list[Exposed]:
    """Every pair of a release and a store that reaches it uncovered."""

    def step(node: flow.Node, state: frozenset) -> frozenset:
        one = node.origin
        if node.kind == flow.STORE:
            lacks = NOT_COMPLETE if one.copies == "out" else NO_BARRIER
            return _drop(state, one, lacks) | {(one, lacks)}
        if node.kind == flow.BARRIER:
            return frozenset(item for item in state if item[1] != NO_BARRIER)
        if node.kind == flow.COMPLETE:
            # Written, but known to the thread that issued it alone.
            return frozenset((store, NO_BARRIER) for store, _ in state)
        return state

    states = flow.reaching(graph, step)
    return [
        Exposed(node.origin, store, lacks)
        for node, state in zip(graph.nodes, states, strict=True)
        if node.kind == flow.RELEASE and state
        for store, lacks in sorted(state, key=lambda item: item[0].line)
    ]


def _drop(state: frozenset, one: Instruction, lacks: str) -> frozenset:
    """Keep one store per place and lack: the rest says the same."""
    return frozenset(item for item in state if not (item[0].keys == one.keys and item[1] == lacks))
