"""Norms of sums over ranks in graphs of inductor's: all_reduce_rms_norm in their place.

    total = all_reduce(a @ w) + residual            normed, total = all_reduce_rms_norm(
    normed = total * rsqrt(mean(total^2) + eps) * weight        a @ w, residual, weight)

Where it is predicted to end earlier than gemm_ar with the norm behind it: of small m.

Source  vLLM's and TensorRT-LLM's fused all-reduce, for the pattern
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import fx

from weft.base.hardware import hardware_of
from weft.compiler.cost import libraries, products
from weft.layers.activations import product_of, with_collective_us
from weft.layers.graphs import Node, Writer, aten, is_view, value_of
from weft.runtime.world import World

CONVERTS = (torch.ops.prims.convert_element_type.default, aten._to_copy.default)
ADDS = (aten.add.Scalar, aten.add.Tensor)
ENGINES = ("one_shot_ll", "two_shot_ll", "sm_push")
# What one more kernel adds to a recording at small m.
KERNEL_US = 3.0


class Norm(NamedTuple):
    total: Node
    normed: Node
    residual: Node
    weight: Node
    eps: float


def norm_of(wait: Node) -> Norm | None:
    """What is made of a sum over ranks, if it is a residual's sum and its norm, and no gradient
    needs what is between."""
    total = _next(wait, aten.add.Tensor)
    if total is None or total.kwargs:
        return None
    first, second = total.args
    residual = second if _behind(first) is wait else first
    if not isinstance(residual, fx.Node) or value_of(residual).shape != value_of(total).shape:
        return None
    wide = [one for one in total.users if one.target in CONVERTS]
    for base in (total, *wide):
        for power in base.users:
            if power.target is aten.pow.Tensor_Scalar and power.args[1] == 2:
                if (found := _scaled(total, base, power)) is not None:
                    return Norm(total, found[0], residual, *found[1:])
    return None


def _scaled(total: Node, base: Node, power: Node) -> tuple[Node, Node, float] | None:
    """(the norm, its weight, eps) where `power` is the beginning of one."""
    columns = value_of(total).shape[-1]
    mean = _next(power, aten.mean.dim)
    if mean is None or list(mean.args[1]) not in ([-1], [value_of(total).dim() - 1]):
        return None
    plus = next((one for target in ADDS if (one := _next(mean, target)) is not None), None)
    if plus is None or not isinstance(plus.args[1], float) or plus.kwargs:
        return None
    scale = _next(plus, aten.rsqrt.default)
    unit = None if scale is None else _next(scale, aten.mul.Tensor)
    if unit is None or base not in unit.args:
        return None
    # Converted back before it is multiplied by the weight, or afterwards.
    back = _converted(unit)
    normed = _next(back, aten.mul.Tensor)
    if normed is None:
        return None
    weight = next((one for one in normed.args if _behind(one) is not back), None)
    if not isinstance(weight, fx.Node) or tuple(value_of(weight).shape) != (columns,):
        return None
    weight = weight.args[0] if weight.target in CONVERTS else weight
    return normed if back is not unit else _converted(normed), weight, plus.args[1]


def _converted(node: Node) -> Node:
    """What converts a node, if that alone reads it."""
    return next((one for target in CONVERTS if (one := _next(node, target)) is not None), node)


def _next(node: Node, target: Any) -> Node | None:
    """What alone reads a node, or views of it, if it is a call of `target`."""
    while len(node.users) == 1:
        (node,) = node.users
        if node.target is target:
            return node
        if not is_view(node):
            break
    return None


def _behind(node: Any) -> Any:
    """What a node is a view of."""
    while isinstance(node, fx.Node) and node.op == "call_function" and is_view(node):
        node = node.args[0]
    return node


def is_faster(world: World, product: Node) -> tuple[bool, str]:
    """Is a norm's sum predicted to end earlier in all_reduce_rms_norm than by gemm_ar?"""
    machine, value = hardware_of(world.target), value_of(product)
    m, n = value.shape
    if machine is None or not isinstance(m, int):
        return False, "nothing is predicted of its norm"
    k = value_of(product.args[0]).shape[1]
    of_ranks = product_of(world, m, n, k, value.dtype)
    summed = [
        products.summed_rows_us(value.nbytes, world.num_ranks, machine, one) for one in ENGINES
    ]
    fused = libraries.product_us(of_ranks, machine) + min(summed)
    apart = [products.reduced_us(of_ranks, machine, one) for one in ENGINES]
    # Of the norm what it moves: the sum and the residual in, the total and the norm out.
    norm_us = KERNEL_US + 4 * value.nbytes / machine.library_gbps / 1e3
    other = min(with_collective_us(of_ranks, machine, "all_reduce"), *apart) + norm_us
    return fused < other, f"{fused:.0f} us predicted with its norm, {other:.0f} as gemm_ar"


def replace_norm(to: Writer, product: Node, norm: Norm) -> None:
    """Put all_reduce_rms_norm in place of the sum of `product` and all that `norm` is of."""
    to.place = norm.total.next
    shape, flat = value_of(norm.total).shape, [-1, value_of(norm.total).shape[-1]]
    both = to.operator(
        "all_reduce_rms_norm", product, to.reshape(norm.residual, flat), norm.weight, eps=norm.eps
    )
    made = [to.reshape(to.call(operator.getitem, both, i), list(shape)) for i in range(2)]
    for old, new in zip((norm.normed, norm.total), made, strict=True):
        to.replace(old, new)
