"""Rows that a graph of inductor's has on all ranks, split between them where that pays.

    h = x + all_reduce(a @ w)              own = own_rows(x) + reduce_scatter(a @ w)
    y = norm(h) @ v                        y = all_gather(norm(own)) @ v
    d_weight = sum over rows of d * h      all_reduce(sum over own rows of d * own)

A *part* of a graph is what follows all-reduces by functions that treat each row by itself: the
residual stream of a model, its norms, and back in a joint graph their gradients. In a part that is
split, each rank has its own rows, as torch.chunk splits them; what others read of it is gathered.

Rows that come from outside must be alike on all ranks: that is what the graph cannot say. The first
call of `own_rows` asks the other ranks, and is refused where they differ.

Source  Megatron-LM's sequence parallelism; `weft.layers.activations`, for when it pays
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.fx import Graph
from torch.fx.node import map_arg

from weft.base.errors import UsageError
from weft.base.hardware import Hardware, hardware_of
from weft.base.parts import part_of
from weft.compiler.cost import libraries, products
from weft.layers.activations import UNMEASURED_ROWS, product_of, with_collective_us
from weft.layers.graphs import (
    VIEWS,
    Node,
    Writer,
    aten,
    c10d,
    is_transposed,
    summands,
    value_of,
)
from weft.plan.problems import nodes_of
from weft.runtime.start import world as world_called
from weft.runtime.world import World

KEPT = (aten.detach.default, aten.alias.default)  # the same elements
ROWWISE = (*KEPT, aten._to_copy.default, aten.expand.default)
OF_COLUMNS = (aten.mean.dim, aten.sum.dim_IntList, aten.amax.default, aten.amin.default)
PRODUCTS = (aten.mm.default, aten.addmm.default)


# ---------------------------------------------------------------------------------------------
# Rows from outside

_asked: WeakKeyDictionary[World, set[str]] = WeakKeyDictionary()


def _own_rows(
    x: torch.Tensor, alike: Sequence[torch.Tensor], world: str, group: str, site: str
) -> torch.Tensor:
    here = world_called(world)
    asked = _asked.setdefault(here, set())
    if site not in asked:
        for one in (x, *alike):
            _check_alike(one, group, site)
        asked.add(site)
    rows = x.reshape(-1, x.shape[-1])
    own = rows[slice(*part_of(rows.shape[0], here.rank, here.num_ranks))]
    return own.reshape(_own_shape(x.shape, here.num_ranks)).clone()


# How far what is alike may be apart, in roundings of the largest element: each rank's inductor
# picks its kernels by their time, and another one adds in another order.
ROUNDINGS = 8


def _check_alike(x: torch.Tensor, group: str, site: str) -> None:
    """Raises  UsageError: on all ranks, where elements differ between them by more than rounding"""
    low = x.detach().double().nan_to_num()
    high, over = low.clone(), distributed_c10d._resolve_process_group(group)  # pyright: ignore
    dist.all_reduce(low, dist.ReduceOp.MIN, group=over)
    dist.all_reduce(high, dist.ReduceOp.MAX, group=over)
    if not x.numel():
        return
    apart = (high - low).max().item()
    eps = torch.finfo(x.dtype).eps if x.is_floating_point() else 0.0
    largest = max(high.max().item(), -low.min().item())
    if apart > ROUNDINGS * eps * largest:
        raise UsageError(
            f"inductor_pass: rows of a {list(x.shape)} tensor were to be split between ranks, but "
            f"it differs between them by {apart:.3g} (at {site}); it meets "
            "what all ranks have alike: make it so, or pass split_from=inf to weft.inductor_pass"
        )


own_rows = torch.library.custom_op(
    "weft::own_rows", _own_rows, mutates_args=(),
    schema="(Tensor x, Tensor[] alike, str world, str group, str site) -> Tensor",
)  # fmt: skip


@own_rows.register_fake
def _(x: torch.Tensor, alike: Any, world: str, group: str, site: str) -> torch.Tensor:
    return x.new_empty(_own_shape(x.shape, world_called(world).num_ranks))


def _own_shape(shape: Sequence[Any], num_ranks: int) -> list[Any]:
    """With as many dimensions."""
    return [*[1] * (len(shape) - 2), prod(shape[:-1]) // num_ranks, shape[-1]]


# ---------------------------------------------------------------------------------------------
# Parts of a graph


@dataclass(eq=False)
class Part:
    """Nodes with the same m rows, in the graph's order; `seeds` are the all-reduces' waits."""

    world: World
    group: Any
    m: int
    seeds: list[Node] = field(default_factory=list)
    nodes: dict[Node, None] = field(default_factory=dict)

    def readers(self) -> Iterator[tuple[Node, Node]]:
        """(node of the part, what reads it outside)."""
        for node in self.nodes:
            yield from ((node, one) for one in list(node.users) if one not in self.nodes)

    def origin(self, node: Node) -> Node:
        """The node that this one is a view of."""
        while node.target in (*VIEWS, *KEPT) and node.args[0] in self.nodes:
            node = node.args[0]
        return node


def merge_sums(graph: Graph) -> None:
    """all_reduce(a) + all_reduce(b) become all_reduce(a + b): gradients of what several products
    read, of which DTensors sum each."""
    for node in list(graph.find_nodes(op="call_function", target=aten.add.Tensor)):
        both = node.args
        if node.kwargs or not all(_is_sum(one) and len(one.users) == 1 for one in both):
            continue
        first, second = (one.args[0] for one in both)
        is_same = first.args[1:] == second.args[1:] and first.args[1] == "sum"
        if is_same and value_of(both[0]).shape == value_of(both[1]).shape and first is not second:
            to = Writer(graph, node)
            total = to.call(aten.add.Tensor, first.args[0], second.args[0])
            node.replace_all_uses_with(to.collective(first.target, total, *first.args[1:]))
            for one in (node, *both, first, second):
                graph.erase_node(one)


def _is_sum(node: Any) -> bool:
    """Is it an all-reduce's result, which nothing else reads?"""
    if getattr(node, "target", None) is not c10d.wait_tensor.default:
        return False
    summed = node.args[0]
    return summed.target is c10d.all_reduce.default and len(summed.users) == 1


def split_rows(
    graph: Graph, worlds: Mapping[Any, World], split_from: float | None
) -> Iterator[tuple[Node, tuple[int, ...], str, bool]]:
    """Split the rows of each part where it pays.

    worlds: by the waits of the all-reduces that a part may begin with. Gives for each of them its
    shape, what was predicted or stands against it, and whether its part is split now
    """
    for part in _parts(graph, worlds):
        shapes = [tuple(value_of(one).shape) for one in part.seeds]
        is_split, reason = _choose(part, split_from)
        if is_split:
            _rewrite(graph, part)
        yield from ((one, shape, reason, is_split) for one, shape in zip(part.seeds, shapes))


def _parts(graph: Graph, worlds: Mapping[Any, World]) -> list[Part]:
    part_of_node: dict[Node, Part] = {}
    for node in graph.nodes:
        if node in worlds:
            shape = value_of(node).shape
            found = Part(worlds[node], node.args[0].args[-1], prod(shape[:-1]), [node])
        else:
            sources = [part_of_node[one] for one in node.all_input_nodes if one in part_of_node]
            if not sources or not _is_rowwise(node, sources[0].m):
                continue
            found = sources[0]
            if any((one.m, one.world) != (found.m, found.world) for one in sources):
                continue
            for other in {id(one): one for one in sources if one is not found}.values():
                found.seeds += other.seeds
                found.nodes |= other.nodes
                part_of_node |= dict.fromkeys(other.nodes, found)
        part_of_node[node] = found
        found.nodes[node] = None
    order = {node: i for i, node in enumerate(graph.nodes)}
    parts = list({id(one): one for one in part_of_node.values()}.values())
    for one in parts:
        one.nodes = dict.fromkeys(sorted(one.nodes, key=order.__getitem__))
    return parts


def _is_rowwise(node: Node, m: int) -> bool:
    """Does it make each of its m rows of the same rows of its inputs?"""
    value, target = node.meta.get("val"), node.target
    if not isinstance(value, torch.Tensor) or value.dim() < 2 or prod(value.shape[:-1]) != m:
        return False
    lead, source = value.shape[:-1], node.all_input_nodes[0].meta.get("val")
    if not isinstance(source, torch.Tensor) or source.dim() < 1:
        return False
    if target in VIEWS:
        return source.shape[-1] == value.shape[-1] and prod(source.shape[:-1]) == m
    if target in OF_COLUMNS:
        dims = node.args[1] if len(node.args) > 1 else []
        is_kept = len(node.args) > 2 and node.args[2]
        return bool(is_kept) and list(dims) in ([-1], [len(lead)]) and source.shape[:-1] == lead
    if target not in ROWWISE:
        tags = getattr(target, "tags", ())
        if torch.Tag.pointwise not in tags or any(one in tags for one in NOT_OF_ROWS):
            return False
    return all(_has_rows(one, lead) is not None for one in node.all_input_nodes)


# What functions are that are no pointwise ones of rows; torch 2.11 has no first of them.
NOT_OF_ROWS = [
    getattr(torch.Tag, name) for name in ("inplace", "nondeterministic_seeded")
    if hasattr(torch.Tag, name)
]  # fmt: skip


def _has_rows(node: Node, lead: Sequence[Any]) -> bool | None:
    """Has it rows of these sizes, or the same for all rows? None: neither."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dim() > len(lead) + 1:
        return None
    own = value.shape[:-1]
    if all(one == 1 for one in own):
        return False
    return (
        True
        if tuple(own) == tuple(lead)[len(lead) - len(own) :] and prod(own) == prod(lead)
        else None
    )


def _sums_rows(reader: Node, node: Node) -> bool:
    """Does it sum all rows of a node, whatever it does with columns?"""
    if reader.target is aten.sum.default:
        return True
    count = value_of(node).dim()
    return reader.target is aten.sum.dim_IntList and set(range(count - 1)) <= {
        one % count for one in reader.args[1]
    }


# ---------------------------------------------------------------------------------------------
# Where it pays


def _choose(part: Part, split_from: float | None) -> tuple[bool, str]:
    n, m = part.world.num_ranks, part.m
    if not isinstance(m, int):
        return False, "how many rows there are is open"
    rows = f"{m} rows"
    if n == 1:
        return False, "there is one rank"
    if m % n:
        return False, f"{rows} do not divide by {n} ranks"
    gathers = _gathers(part)
    if not any(len(one[0]) + len(one[1]) for one in gathers.values()):
        return False, "no product reads its rows"
    if split_from is not None:
        return m >= split_from, f"{rows}, and split_from={split_from}"
    machine = hardware_of(part.world.target)
    if machine is None:
        least = UNMEASURED_ROWS * n
        return m >= least, f"{rows}, and {least} fill tiles"
    alike_us, split_us = _predict(part, gathers, machine)
    told = f"{rows}, for which {split_us:.0f} us are predicted split and {alike_us:.0f} not"
    return split_us < alike_us, told


# Columns of products that read rows as they are, and of gradients of weights that sum over them.
Readers = tuple[list[int], list[int]]


def _gathers(part: Part) -> dict[Node, Readers]:
    """What reads each node that must be gathered."""
    found: dict[Node, Readers] = {}
    for node, reader in part.readers():
        if _sums_rows(reader, node):
            continue
        plain, summed = found.setdefault(part.origin(node), ([], []))
        if reader.target in PRODUCTS and reader.args[-2] is node:
            plain.append(value_of(reader).shape[1])
        elif reader.target in PRODUCTS:
            summed.append(value_of(reader).shape[0])
        elif is_transposed(reader):
            summed += [value_of(one).shape[1] for one in reader.users if one.target in PRODUCTS]
    return found


def _predict(part: Part, gathers: Mapping[Node, Readers], machine: Hardware) -> tuple[float, float]:
    """Microseconds of the part, and of its collectives with their products: alike, and split."""
    m, world = part.m, part.world
    n = world.num_ranks
    # What functions of rows read and write, where they are fused: what each sum gives is read and
    # written, what is gathered written.
    moved = sum(value_of(one).nbytes for one in (*part.seeds, *part.seeds, *gathers))
    alike = moved / machine.library_gbps / 1e3
    split = alike / n

    def collective_us(kind: str, of: Node) -> float:
        whole = value_of(of).nbytes
        return libraries.collective_us(kind, whole / n, whole, n, len(nodes_of(world)), machine)

    for seed in part.seeds:
        value, found = value_of(seed), summands(seed.args[0].args[0])
        if found:
            k = sum(value_of(one.args[0]).shape[1] for one in found)
            product = product_of(world, m, value.shape[-1], k, value.dtype)
            alike += with_collective_us(product, machine, "all_reduce")
            split += with_collective_us(product, machine, "reduce_scatter")
        else:
            alike += collective_us("all_reduce", seed)
            split += collective_us("reduce_scatter", seed)
    for origin, (plain, summed) in gathers.items():
        columns, dtype = value_of(origin).shape[-1], value_of(origin).dtype
        gather_us = collective_us("all_gather", origin)
        if plain:
            product = product_of(world, m, sum(plain), columns, dtype)
            alike += libraries.product_us(product, machine)
            split += with_collective_us(product, machine, "all_gather")
        for one in summed:
            product = product_of(world, m, one, columns, dtype)
            product_us = libraries.product_us(product, machine)
            fused_us = products.contracted_us(product, machine, "ce_push")
            alike += product_us
            split += min(product_us + gather_us, fused_us)
        if not plain and not summed:
            split += gather_us
    for node, reader in part.readers():
        if _sums_rows(reader, node):
            split += collective_us("all_reduce", reader)
    return alike, split


# ---------------------------------------------------------------------------------------------
# Rewriting


def _rewrite(graph: Graph, part: Part) -> None:
    site = hashlib.sha256(str(graph).encode()).hexdigest()[:8]
    own: dict[Node, Node] = {}
    for node in part.nodes:
        to = Writer(graph, node, part.world.name)
        if node in part.seeds:
            own[node] = _scattered(to, part, node)
        else:
            own[node] = _on_own_rows(to, part, node, own, site)
    readers, gathered = list(part.readers()), {}
    for node, reader in readers:
        if _sums_rows(reader, node):
            to = Writer(graph, reader)
            total = to.call(reader.target, own[node], *reader.args[1:], **reader.kwargs)
            total = to.collective(c10d.all_reduce.default, total, "sum", part.group)
            reader.replace_all_uses_with(total)
            graph.erase_node(reader)
            continue
        origin, value = part.origin(node), value_of(node)
        if origin not in gathered:
            to = Writer(graph, origin)
            to.place = origin.next
            rows = to.reshape(own[origin], [part.m // part.world.num_ranks, value.shape[-1]])
            gathered[origin] = to.collective(
                c10d.all_gather_into_tensor.default, rows, part.world.num_ranks, part.group
            )
        to = Writer(graph, node)
        to.place = reader
        reader.replace_input_with(node, to.reshape(gathered[origin], list(value.shape)))
    sums = [one.args[0] for one in part.seeds]
    for node in (*reversed(part.nodes), *sums):
        graph.erase_node(node)


def _scattered(to: Writer, part: Part, seed: Node) -> Node:
    summed, kind, group = seed.args[0].args
    n, shape = part.world.num_ranks, value_of(seed).shape
    rows = to.reshape(summed, [part.m, shape[-1]])
    rows = to.collective(c10d.reduce_scatter_tensor.default, rows, kind, n, group)
    return to.reshape(rows, _own_shape(shape, n))


def _on_own_rows(
    to: Writer, part: Part, node: Node, own: dict[Node, Node], site: str
) -> Node:  # fmt: skip
    """The same of own rows."""
    shape = _own_shape(value_of(node).shape, part.world.num_ranks)
    if node.target in VIEWS:
        return to.reshape(own[node.args[0]], shape)
    lead = value_of(node).shape[:-1]

    def mine(one: Node) -> Node:
        if one not in own and _has_rows(one, lead):
            alike = [other for other in node.all_input_nodes if other.op == "placeholder"
                     and other is not one and not _has_rows(other, lead)]  # fmt: skip
            own[one] = to.call(
                torch.ops.weft.own_rows.default,
                one,
                alike,
                to.world,
                part.group,
                f"{one} of {site}",
            )
        return own.get(one, one)

    args, named = map_arg(node.args, mine), map_arg(node.kwargs, mine)
    if node.target is aten.expand.default:
        args = (args[0], shape)
    return to.call(node.target, *args, **named)
