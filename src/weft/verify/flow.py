"""Control flow with events, and what can be said about every path through it.

Each stage of a compiled kernel becomes one of these graphs; only waits, loads and stores are
nodes of interest, everything else is a joint. The questions are asked once, here:

* which waits has every path to a load passed (`waits_before`);
* which waits lie between two runs of the same load (`waits_between`);
* which stores lie between two different copies of one wait (`stores_between`);
* which stores reach a release without a barrier (`reaching`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

WAIT, LOAD, STORE, RELEASE, BARRIER, COMPLETE, JOINT = (
    "wait",
    "load",
    "store",
    "release",
    "barrier",
    "complete",
    "joint",
)

T = TypeVar("T", bound=Hashable)
Assumption = tuple[Hashable, bool]  # a condition, and its value
Valuation = frozenset[Assumption]


def reached(starts: Iterable[T], following: Callable[[T], Iterable[T]]) -> set[T]:
    """Where one comes from `starts`, these included, in steps to what is `following`."""
    found: set[T] = set()
    todo = list(starts)
    while todo:
        one = todo.pop()
        if one not in found:
            found.add(one)
            todo.extend(following(one))
    return found


@dataclass(eq=False)
class Node:
    """A point of the program. `key` groups the copies of one source operation; `origin` is the
    operation or instruction itself; a load is skipped where one of `guards` is false; at a
    joint, what was known of `forgets` is void."""

    kind: str
    key: Any = None
    origin: Any = None
    guards: frozenset = frozenset()
    forgets: frozenset = frozenset()


@dataclass
class Graph:
    """Nodes and edges; an edge may assume that a condition has a value. Node 0 is the entry."""

    nodes: list[Node] = field(default_factory=list)
    edges: list[list[tuple[int, Assumption | None]]] = field(default_factory=list)

    def add(self, node: Node) -> int:
        self.nodes.append(node)
        self.edges.append([])
        return len(self.nodes) - 1

    def connect(self, start: int, end: int, assumption: Assumption | None = None) -> None:
        self.edges[start].append((end, assumption))

    def solve(self, start, transfer: Callable, merge: Callable) -> list:
        """The fixpoint of a forward analysis: the state on entry of each node, None where
        no path leads. `transfer(node, state, assumption)` is the state along an edge, None
        where the path cannot be; `merge(old, new)` joins two."""
        states: list = [None] * len(self.nodes)
        states[0] = start
        todo = [0]
        queued = {0}
        while todo:
            index = todo.pop(0)
            queued.discard(index)
            for target, assumption in self.edges[index]:
                state = transfer(self.nodes[index], states[index], assumption)
                if state is None:
                    continue
                old = states[target]
                new = state if old is None else merge(old, state)
                if new != old:
                    states[target] = new
                    if target not in queued:
                        queued.add(target)
                        todo.append(target)
        return states


def _met(old: dict, new: dict) -> dict:
    """By key what both ways have passed, or the only one that has the key."""
    return {**old, **{key: old[key] & new[key] if key in old else new[key] for key in new}}


def waits_before(graph: Graph) -> dict[Any, frozenset]:
    """For each load, the waits that every path to each of its copies has passed.

    Conditions that guard waits are told apart, so that a load under the same condition as its
    wait counts as guarded.
    """

    def transfer(node: Node, state: dict, assumption):
        result: dict[Valuation, frozenset] = {}
        for valuation, passed in state.items():
            if node.kind == WAIT:
                passed = passed | {node.key}
            if node.forgets:
                valuation = frozenset(item for item in valuation if item[0] not in node.forgets)
            if assumption is not None:
                name, value = assumption
                if (name, not value) in valuation:
                    continue
                valuation = valuation | {assumption}
            known = result.get(valuation)
            result[valuation] = passed if known is None else known & passed
        return result or None

    def merge(old: dict, new: dict) -> dict:
        merged = _met(old, new)
        if len(merged) > 64:  # too many conditions to tell apart: join them all
            sets = list(merged.values())
            merged = {frozenset(): frozenset.intersection(*sets)}
        return merged

    states = graph.solve({frozenset(): frozenset()}, transfer, merge)
    found: dict[Any, frozenset] = {}
    for node, state in zip(graph.nodes, states, strict=True):
        if node.kind != LOAD or state is None:
            continue
        for valuation, passed in state.items():
            if any((guard, False) in valuation for guard in node.guards):
                continue
            known = found.get(node.key)
            found[node.key] = passed if known is None else known & passed
    return found


def waits_between(graph: Graph) -> dict[Any, frozenset]:
    """For each load that runs more than once, the waits on every path from run to run."""

    def transfer(node: Node, state: dict, assumption):
        if node.kind == WAIT:
            return {key: passed | {node.key} for key, passed in state.items()}
        if node.kind == LOAD:
            return {**state, node.key: frozenset()}
        return state

    states = graph.solve({}, transfer, _met)
    found: dict[Any, frozenset] = {}
    for node, state in zip(graph.nodes, states, strict=True):
        if node.kind == LOAD and state is not None and node.key in state:
            passed = state[node.key]
            found[node.key] = found[node.key] & passed if node.key in found else passed
    return found


def stores_between(graph: Graph) -> dict[Any, dict[tuple, frozenset]]:
    """For each wait, and each pair of its copies that run one after the other, the stores on
    every path between them. The pair (copy, same copy) is a loop's way round."""

    def transfer(node: Node, state: dict, assumption):
        if node.kind in (STORE, RELEASE):
            return {wait: passed | {node.key} for wait, passed in state.items()}
        if node.kind == WAIT:
            kept = {wait: passed for wait, passed in state.items() if wait[0] != node.key}
            return {**kept, (node.key, node.origin): frozenset()}
        return state

    states = graph.solve({}, transfer, _met)
    found: dict[Any, dict[tuple, frozenset]] = {}
    for node, state in zip(graph.nodes, states, strict=True):
        if node.kind != WAIT or state is None:
            continue
        pairs = found.setdefault(node.key, {})
        for (key, copy), passed in state.items():
            if key == node.key:
                pair = (copy, node.origin)
                pairs[pair] = pairs[pair] & passed if pair in pairs else passed
    return found


def reaching(graph: Graph, step: Callable[[Node, frozenset], frozenset]) -> list[frozenset | None]:
    """What may hold on entry of each node, when `step` says how a node changes it."""

    def transfer(node: Node, state: frozenset, assumption):
        return step(node, state)

    return graph.solve(frozenset(), transfer, lambda old, new: old | new)
