"""Graphs of inductor's: what their nodes are, and new ones put among them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch.distributed import distributed_c10d
from torch.fx import Graph
from torch.fx.node import map_arg

from weft.ops import ag_gemm, ag_wgrad, all_reduce_rms_norm, gemm_ar, gemm_rs
from weft.plan.operations import operation

# torch.fx's: what the arguments of one are its operation says, and no type.
Node = Any
aten, c10d = torch.ops.aten, torch.ops._c10d_functional
VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
# torch.ops.weft has them once they are imported.
OPERATORS = (ag_gemm, ag_wgrad, all_reduce_rms_norm, gemm_ar, gemm_rs)


class LeftError(Exception):
    """This collective stays, and why."""


def value_of(node: Any) -> torch.Tensor:
    """The tensor without elements that stands for a node."""
    return node.meta["val"]


class Writer:
    """Puts nodes into a graph before `place`, each with the value that stands for it."""

    def __init__(self, graph: Graph, place: Node, world: str = "") -> None:
        self.graph, self.place, self.world = graph, place, world
        mode = detect_fake_mode(value_of(place))
        assert mode is not None, "graphs of inductor's have values that are fake"
        self.mode = mode
        self.made: list[Node] = []

    def call(self, target: Any, *args: Any, **named: Any) -> Node:
        with self.mode:
            value = target(*map_arg(args, value_of), **map_arg(named, value_of))
        with self.graph.inserting_before(self.place):
            node = self.graph.call_function(target, args, named)
        node.meta["val"] = value
        self.made.append(node)
        return node

    def operator(self, name: str, *tensors: Node, **named: Any) -> Node:
        """A call of torch.ops.weft.NAME, one of OPERATORS; what is not named is left out."""
        target = operation(name)
        given, named = iter(tensors), {"world": self.world, "config": "", **named}
        return self.call(target, *[
            next(given) if str(one.type) == "Tensor" else named.get(one.name)
            for one in target._schema.arguments
        ])  # fmt: skip

    def collective(self, target: Any, *args: Any) -> Node:
        """What it gives, waited for."""
        return self.call(c10d.wait_tensor.default, self.call(target, *args))

    def reshape(self, node: Node, shape: Sequence[Any]) -> Node:
        """In this shape, of which one size may be open."""
        if list(value_of(node).shape) == list(shape):
            return node
        sizes = [one if isinstance(one, int) else -1 for one in shape]
        if sizes.count(-1) > 1:
            raise LeftError(f"more than one size of {tuple(shape)} is open")
        return self.call(aten.reshape.default, node, sizes)

    def rows(self, node: Node, dim: int, shape: Sequence[Any] | None = None) -> Node:
        """The rows of a tensor of this shape, its own if not given, those of the first ranks along
        `dim` first."""
        shape = value_of(node).shape if shape is None else shape
        if prod(shape[:dim]) != 1:
            others = [i for i in range(len(shape)) if i != dim]
            node = self.call(aten.permute.default, self.reshape(node, shape), [dim, *others])
        return self.reshape(node, [-1, shape[-1]])

    def back(self, node: Node, dim: int, shape: Sequence[Any]) -> Node:
        """Rows that lie as `rows` puts them, in this shape."""
        if prod(shape[:dim]) != 1:
            order = [dim, *(i for i in range(len(shape)) if i != dim)]
            node = self.reshape(node, [shape[i] for i in order])
            node = self.call(
                aten.permute.default, node, [order.index(i) for i in range(len(shape))]
            )
        return self.reshape(node, shape)

    def replace(self, old: Node, new: Node) -> None:
        """`new` is read wherever `old` was; what is then read by nobody goes."""
        old.replace_all_uses_with(new)
        erase(self.graph, old)


def erase(graph: Graph, node: Node) -> None:
    if node.users or node.op != "call_function":
        return
    inputs = node.all_input_nodes
    graph.erase_node(node)
    for one in inputs:
        erase(graph, one)


def waits(graph: Graph, *collectives: Any) -> Iterator[Node]:
    for node in graph.find_nodes(op="call_function", target=c10d.wait_tensor.default):
        if getattr(node.args[0], "target", None) in collectives:
            yield node


def is_view(node: Node) -> bool:
    """The same rows, cut otherwise?"""
    return node.target in VIEWS and value_of(node).shape[-1] == value_of(node.args[0]).shape[-1]


def is_transposed(node: Node) -> bool:
    if node.target is aten.permute.default:
        return node.args[1] == [1, 0]
    return node.target is aten.t.default


def read_once(node: Node) -> Node:
    if len(node.users) != 1:
        raise LeftError(f"{', '.join(sorted(map(str, node.users)))} read {node}")
    return next(iter(node.users))


def group_of(collective: Node) -> Any:
    return distributed_c10d._resolve_process_group(collective.args[-1])  # pyright: ignore


def summands(summed: Node) -> list[Node]:
    """The products that a node is the sum of, or one that it is, seen through views; none where it
    is made of something else too, or where others read what it is made of."""
    if summed.target is aten.mm.default:
        return [summed]
    parts = summed.args[:1] if is_view(summed) else summed.args
    if not is_view(summed) and (summed.target is not aten.add.Tensor or summed.kwargs):
        return []
    found = [summands(one) if _adds_alone(one, summed) else [] for one in parts]
    return [one for part in found for one in part] if all(found) else []


def _adds_alone(one: Any, summed: Node) -> bool:
    """A summand that nothing else reads, and that is not repeated for several rows?"""
    is_node = isinstance(one, fx.Node) and len(one.users) == 1
    return is_node and value_of(one).numel() == value_of(summed).numel()
