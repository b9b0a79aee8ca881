"""A pass over torch's graphs: functional collectives beside products become weft's operators.

    fuse = weft.inductor_pass(world)
    options = {"joint_custom_post_pass": fuse, "post_grad_custom_post_pass": fuse}
    step = torch.compile(model, options=options)
    print(fuse)                      what was fused, what was not, and why

What tensor-parallel models leave in a graph, whether DTensor or they themselves placed it:

    mm(all_gather(x), w), of one or several w       ag_gemm; one program that gathers once
    mm(all_gather(x).t(), y), mm(x.t(), all_gather(y))      ag_wgrad
    reduce_scatter(mm(x, w))                        gemm_rs
    all_reduce(mm(x, w))                            gemm_ar, or with a norm all_reduce_rms_norm

Sums of several products are one product's, and rows that all ranks have are split between them
where that pays: `weft.layers.split_rows`, `weft.layers.fused_norms`.

Activations may have any number of dimensions, and be split along each but the last; where batches
are before that one, rows are put in the order of the ranks and back, which is a copy.

A gradient reads what its forward pass gathered. The joint pass sees both, and gathers again; the
other one is for graphs without gradients, in which it would be too late to see them.

Source  torch's own pass for its symmetric memory, `micro_pipeline_tp`, for the patterns
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import logging
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.fx import Graph

from weft.base.errors import UsageError, WeftError
from weft.compiler import Tensor, frontend
from weft.ir.tensor import Shard
from weft.layers.fused_norms import Norm, is_faster, norm_of, replace_norm
from weft.layers.graphs import (
    VIEWS,
    LeftError,
    Node,
    Writer,
    aten,
    c10d,
    group_of,
    is_transposed,
    is_view,
    read_once,
    summands,
    value_of,
    waits,
)
from weft.layers.split_rows import merge_sums, split_rows
from weft.plan.operations import without_autocast
from weft.runtime.start import world as world_called
from weft.runtime.start import world_over
from weft.runtime.world import World

CUTS = (aten.split.Tensor, aten.slice.Tensor)
# What a gather is made of.
SHARED = {
    c10d.all_gather_into_tensor.default, c10d.wait_tensor.default, aten.cat.default,
    operator.getitem, *CUTS, *VIEWS,
}  # fmt: skip
log = logging.getLogger("weft")
NAMES = ("fused_norms", "graphs", "inductor_pass", "split_rows")
SOURCES = [Path(__file__).with_name(f"{name}.py") for name in NAMES]


class Decision(NamedTuple):
    """What became of a collective of a graph, and why; `operator` is None where it stays."""

    collective: str
    shape: tuple
    operator: str | None
    reason: str = ""

    def __str__(self) -> str:
        what = f"{self.collective} of {self.shape}"
        if self.operator is None:
            return f"{what}: left as it is, since {self.reason}"
        return f"{what}: {self.operator}" + (f" ({self.reason})" if self.reason else "")


class InductorPass(CustomGraphPass):
    """See `inductor_pass`. `decisions` are of all graphs so far, in order."""

    def __init__(self, worlds: Sequence[World], split_from: float | None) -> None:
        self.worlds = {one.backend.seats.global_ranks: one.name for one in worlds}
        self.split_from = split_from
        self.decisions: list[Decision] = []

    def __call__(self, graph: Graph) -> None:
        _share(graph)
        merge_sums(graph)
        self._split_rows(graph)
        for collectives, fuse in (
            ((c10d.all_gather_into_tensor.default,), _fuse_gather),
            ((c10d.reduce_scatter_tensor.default, c10d.all_reduce.default), _fuse_sum),
        ):
            for wait in list(waits(graph, *collectives)):
                self._try(graph, wait, fuse)
        stable_topological_sort(graph)
        graph.lint()

    def _split_rows(self, graph: Graph) -> None:
        worlds, self.alike = {}, {}
        for wait in waits(graph, c10d.all_reduce.default):
            with suppress(LeftError):
                if wait.args[0].args[1] == "sum":
                    worlds[wait] = world_called(self._world_of(wait.args[0]))
        for wait, shape, reason, is_split in split_rows(graph, worlds, self.split_from):
            if is_split:
                self._note(Decision("all_reduce", shape, "rows split from here", reason))
            else:
                self.alike[wait] = f"rows alike: {reason}"

    def _note(self, found: Decision) -> None:
        self.decisions.append(found)
        log.info("inductor_pass: %s", found)

    def _try(self, graph: Graph, wait: Node, fuse: Callable[[Writer, Node], str]) -> None:
        collective: Any = wait.args[0]
        name, shape = collective.target.overloadpacket.__name__, value_of(collective.args[0]).shape
        to = Writer(graph, wait)
        try:
            to.world = self._world_of(collective)
            found = Decision(name, tuple(shape), fuse(to, wait), self.alike.get(wait, ""))
        except (LeftError, WeftError) as error:
            found = Decision(name, tuple(shape), None, str(error))
            for node in reversed(to.made):
                graph.erase_node(node)
        self._note(found)

    def _world_of(self, collective: Node) -> str:
        ranks = tuple(dist.get_process_group_ranks(group_of(collective)))
        if ranks not in self.worlds:
            known = ", ".join(str(list(one)) for one in self.worlds)
            raise LeftError(f"its group is of ranks {list(ranks)}, and worlds are of {known}")
        return self.worlds[ranks]

    def uuid(self) -> Any:
        """By what inductor keeps graphs that went through this pass."""
        text = " ".join(
            [*(path.read_text() for path in SOURCES), f"{self.worlds} {self.split_from}"]
        )
        return hashlib.sha256(text.encode()).hexdigest()

    def __str__(self) -> str:
        counts = Counter(map(str, self.decisions))
        told = (f"{text} ({count} times)" if count > 1 else text for text, count in counts.items())
        return "\n".join(told) or "no collective has been seen"


def inductor_pass(*worlds: Any, split_from: float | None = None) -> InductorPass:
    """A pass for inductor's options: collectives over the ranks of `worlds`, fused with products.

        fuse = weft.inductor_pass(world)
        torch.compile(model, options={"joint_custom_post_pass": fuse,
                                      "post_grad_custom_post_pass": fuse})

    worlds: each a world, or a device mesh of one axis or a process group, over whose ranks one is
    found or made. What the pass did is logged (logger "weft", level INFO), and shown by
    `print(fuse)`. A call of an operator that is predicted to be slower than the library's is done
    by the library.

    Units   split_from: rows from which those that all ranks have are split between them where
            all-reduces give them; by default from where that is predicted to be faster
    Raises  UsageError: no world, or one that is none
    """
    if not worlds:
        raise UsageError("inductor_pass: it takes worlds; pass what weft.init() returned")
    return InductorPass([world_over(one, "inductor_pass") for one in worlds], split_from)


# ---------------------------------------------------------------------------------------------
# Several products of one gather


@functools.lru_cache
def _products(dtype: torch.dtype, k: int, columns: tuple[int, ...]) -> Any:
    """A program: all rows, times each of so many matrices."""
    names = [f"b{i}" for i in range(len(columns))]

    def products(a: Any, *rest: Any, **named: Any) -> Any:
        gathered = frontend.all_gather(a)
        return tuple(gathered @ one for one in (*rest, *named.values()))

    parameters = [inspect.Parameter(one, inspect.Parameter.POSITIONAL_OR_KEYWORD)
                  for one in ("a", *names)]  # fmt: skip
    products.__signature__ = inspect.Signature(parameters)
    declared: dict[str, Any] = {"a": Tensor(dtype, ("m", k), Shard(0))}
    declared |= {name: Tensor(dtype, (k, n), Shard(1)) for name, n in zip(names, columns)}
    return frontend.program(mesh="tp", **declared)(products)


def _multiply(a: torch.Tensor, bs: Sequence[torch.Tensor], world: str) -> list[torch.Tensor]:
    here = world_called(world)
    columns = tuple(one.shape[1] * here.num_ranks for one in bs)
    with torch.no_grad(), without_autocast():
        return list(
            _products(str(a.dtype).removeprefix("torch."), a.shape[1], columns)(a, *bs, world=here)
        )


gathered_products = torch.library.custom_op(
    "weft::gathered_products", _multiply, mutates_args=(),
    schema="(Tensor a, Tensor[] bs, str world) -> Tensor[]",
)  # fmt: skip


@gathered_products.register_fake
def _(a: torch.Tensor, bs: Sequence[torch.Tensor], world: str) -> list[torch.Tensor]:
    m = a.shape[0] * world_called(world).num_ranks
    return [a.new_empty((m, one.shape[1])) for one in bs]


# ---------------------------------------------------------------------------------------------
# Graphs


def _share(graph: Graph) -> None:
    """One gather of what several products gather each, as those of DTensors do."""
    seen: dict[Any, Node] = {}
    for node in list(graph.nodes):
        if node.target in SHARED and not node.kwargs:
            key = (node.target, str(node.args))
            if seen.setdefault(key, node) is not node:
                node.replace_all_uses_with(seen[key])
                graph.erase_node(node)


# ---- gathers


class Readers(NamedTuple):
    """Products that read gathered rows, each with its node of them: as they are, as the transposed
    left operand, as the right one."""

    plain: list[Node]
    left: list[Node]
    right: list[Node]

    def collect(self, rows: Node) -> None:
        for one in rows.users:
            if is_view(one):
                self.collect(one)
            elif is_transposed(one):
                for product in one.users:
                    if product.target is not aten.mm.default or product.args[0] is not one:
                        raise LeftError(f"{product} reads what it gathers, transposed")
                    self.left.append(product)
            elif one.target is aten.mm.default:
                (self.plain if one.args[0] is rows else self.right).append(one)
            elif one.target is aten.addmm.default and one.args[1] is rows and not one.kwargs:
                self.plain.append(one)
            elif one.op == "output":
                raise LeftError(
                    "what it gathers is a result, or is kept for the gradient: see "
                    "joint_custom_post_pass"
                )
            else:
                raise LeftError(f"{one} reads what it gathers")


def _fuse_gather(to: Writer, wait: Node) -> str:
    shard, ranks, _ = wait.args[0].args
    whole, dim = _gathered(wait, ranks)
    shape = value_of(whole).shape
    if dim == len(shape) - 1:
        raise LeftError("it gathers columns")
    found = Readers([], [], [])
    found.collect(whole)
    if not any(found):
        raise LeftError("nothing reads it")
    replaced = list(_in_place_of_products(to, shard, dim, shape, found.plain))
    for product in (*found.left, *found.right):
        to.place = product
        left, right = product.args
        is_left = product in found.left
        if not is_left and not is_transposed(left):
            raise LeftError(f"{product} reads what it gathers as its right operand")
        other = right if is_left else left.args[0]
        other = to.rows(other, dim, [*shape[:-1], value_of(other).shape[-1]])
        x, y = (to.rows(shard, dim), other) if is_left else (other, to.rows(shard, dim))
        gradient = to.operator("ag_wgrad", x, y, gathered="x" if is_left else "y")
        replaced.append((product, gradient, "ag_wgrad"))
    for old, new, _ in replaced:
        to.replace(old, new)
    return ", ".join(name for *_, name in replaced if name)


def _gathered(wait: Node, ranks: int) -> tuple[Node, int]:
    """The node that has what all ranks gave, side by side, and along which dimension: functional
    collectives gather along the first one, and other dimensions are put together again."""
    if not any(one.target in CUTS for one in wait.users):
        return wait, 0
    parts, dim = _parts(wait)
    whole = read_once(parts[0])
    if dim != 0 or whole.target is not aten.cat.default or whole.args[0] != parts:
        raise LeftError(f"{parts[0]} cuts what it gathers")
    if len(parts) != ranks or any(len(one.users) != 1 for one in parts):
        raise LeftError(f"{whole} takes other parts than the ranks'")
    return whole, whole.args[1] if len(whole.args) > 1 else 0


def _parts(whole: Node) -> tuple[list[Node], int]:
    """The equal parts that all who read a node take, in order, and the dimension it is cut along.

    Raises  LeftError: it is read otherwise
    """
    cut, *others = whole.users
    dim = int(cut.args[2] if cut.target is aten.split.Tensor and len(cut.args) > 2 else 0)
    if cut.target is aten.split.Tensor and not others:
        return list(cut.users), dim
    if cut.target is not aten.slice.Tensor:
        raise LeftError(f"{cut} reads {whole}")
    dim = int(cut.args[1])
    size, at = value_of(cut).shape[dim], 0
    for one in whole.users:
        end = value_of(whole).shape[dim]
        if one.target is not aten.slice.Tensor or one.args[1] != dim or one.args[2] != at:
            raise LeftError(f"{one} reads {whole}")
        if one.args[3] != at + size and at + size != end or len(one.args) > 4:
            raise LeftError(f"{one} reads {whole}")
        at += size
    return list(whole.users), dim


def _in_place_of_products(
    to: Writer, shard: Node, dim: int, shape: Sequence[Any], products: Sequence[Node]
) -> Iterator[tuple[Node, Node, str]]:
    """Each product with the node that takes its place, and the operator."""
    if not products:
        return
    weights = [one.args[-1] for one in products]
    if len(products) > 1 and any(_is_made_of(one, products) for one in weights):
        raise LeftError("one product's weight is made of another product")
    to.place = products[0]
    rows = to.rows(shard, dim)
    if len(products) == 1:
        made, name = [to.operator("ag_gemm", rows, weights[0])], "ag_gemm"
    else:
        together = to.call(torch.ops.weft.gathered_products.default, rows, weights, to.world)
        made = [to.call(operator.getitem, together, i) for i in range(len(weights))]
        name = f"{len(weights)} products of one gather"
    for i, (product, one) in enumerate(zip(products, made, strict=True)):
        one = to.rows(to.back(one, dim, [*shape[:-1], value_of(one).shape[-1]]), 0)
        if product.target is aten.addmm.default:
            one = to.call(aten.add.Tensor, one, product.args[0])
        yield product, one, name if i == 0 else ""


def _is_made_of(node: Any, products: Sequence[Node]) -> bool:
    """Does it depend on one of these?"""
    seen, left = set(), [node]
    while left:
        one = left.pop()
        if one in products:
            return True
        if one not in seen:
            seen.add(one)
            left += one.all_input_nodes
    return False


# ---- sums


def _fuse_sum(to: Writer, wait: Node) -> str:
    collective = wait.args[0]
    summed, kind, *_ = collective.args
    is_scattered = collective.target is c10d.reduce_scatter_tensor.default
    if kind not in ("sum", "avg"):
        raise LeftError(f"it is a reduction by {kind}")
    source, dim = _scattered(summed) if is_scattered else (summed, 0)
    shape = value_of(source).shape
    if not is_scattered:
        read_once(source)
    if not (found := summands(source)):
        raise LeftError(f"it sums {source}, which is no product, or is read elsewhere")
    # Several products are one of what they read, side by side.
    rows, weight = (
        operands[0] if len(found) == 1 else to.call(aten.cat.default, list(operands), 1 - i)
        for i, operands in enumerate(zip(*(one.args for one in found)))
    )
    if is_scattered:
        if dim == len(shape) - 1:
            raise LeftError("it scatters columns")
        rows = to.rows(rows, dim, [*shape[:-1], value_of(rows).shape[-1]])
    if not is_scattered and kind == "sum" and len(found) == 1:
        norm = norm_of(wait)
        if norm is not None and _has_one_dtype(found[0], norm):
            faster, predicted = is_faster(world_called(to.world), found[0])
            if faster:
                replace_norm(to, found[0], norm)
                return f"all_reduce_rms_norm ({predicted})"
    name = "gemm_rs" if is_scattered else "gemm_ar"
    result = to.operator(name, rows, weight)
    result = to.back(result, dim, value_of(wait).shape)
    if kind == "avg":
        result = to.call(aten.div.Scalar, result, group_of(collective).size())
    to.replace(wait, result)
    return name if len(found) == 1 else f"{name} of {len(found)} products"


def _has_one_dtype(product: Node, norm: Norm) -> bool:
    """And lie as all_reduce_rms_norm takes them?"""
    given = [value_of(one) for one in (product, norm.residual, norm.weight)]
    dtypes = {one.dtype for one in (*given, value_of(norm.normed))}
    return len(dtypes) == 1 and all(one.is_contiguous() for one in given)


def _scattered(summed: Any) -> tuple[Node, int]:
    """What is scattered, and along which dimension: along others than the first it was cut, and
    its parts were put one behind the other."""
    read_once(summed)
    if summed.target is not aten.cat.default or len(summed.args) > 1 and summed.args[1] != 0:
        return summed, 0
    first = summed.args[0][0]
    whole = first.args[0].args[0] if first.target is operator.getitem else first.args[0]
    parts, dim = _parts(whole)
    if parts != summed.args[0]:
        raise LeftError(f"it scatters {summed}")
    return whole, dim
