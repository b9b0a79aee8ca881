"""Random small programs that can be placed, traced like a user's; and the tensors for them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import torch

from weft.base.parts import part_of
from weft.compiler import (
    Compiled,
    Partial,
    Replicate,
    Shard,
    Tensor,
    all_gather,
    all_reduce,
    ep_combine,
    ep_dispatch,
    gather_rows,
    grouped_matmul,
    moe_route,
    program,
    reduce_scatter,
    rms_norm,
    scatter_rows,
    silu,
    silu_mul,
)
from weft.compiler.binding import check_pairs
from weft.compiler.passes.tile import number
from weft.ir.task import Program
from weft.plan.program_cards import rank_part

PLACEMENTS = (Shard(0), Shard(1), Replicate(), Partial())
STEPS = {
    "matmul": lambda a, b: a @ b,
    "mul": lambda a, b: a * b,
    "add": lambda a, b: a + b,
    "rms_norm": rms_norm,
    "silu": silu,
    "silu_mul": silu_mul,
    "all_gather": lambda a, dim: all_gather(a, dim=dim),
    "reduce_scatter": lambda a, dim: reduce_scatter(a, dim=dim),
    "all_reduce": all_reduce,
}


def random_program(seed: int, num_ranks: int) -> Compiled:
    """Up to six operations that the passes take; what they refuse is drawn again."""
    chooser = random.Random(seed)
    widths = [chooser.choice([1, 3, 2 * num_ranks, 4 * num_ranks]) for _ in range(2)]
    sizes = ["m", *widths]
    inputs = {
        f"x{i}": Tensor(
            "float32",
            (chooser.choice(sizes) if i else "m", chooser.choice(widths)),
            chooser.choice(PLACEMENTS),
        )
        for i in range(3)
    }
    if chooser.random() < 0.5:  # else norms would be rare
        inputs["x2"] = Tensor("float32", (1, inputs["x0"].sizes[1]), Replicate())
    steps: list[tuple[str, tuple[int, ...], dict[str, int]]] = []
    compiled = _compile(inputs, steps)
    for _ in range(60):
        if len(steps) == 6:
            break
        kind = chooser.choice(list(STEPS))
        num_operands = 2 if kind in ("matmul", "mul", "add", "rms_norm") else 1
        operands = tuple(chooser.randrange(3 + len(steps)) for _ in range(num_operands))
        fields = {"dim": chooser.randrange(2)} if kind in ("all_gather", "reduce_scatter") else {}
        try:
            drawn = _compile(inputs, [*steps, (kind, operands, fields)])
            check_pairs(drawn.stages.program, {"m": 1}, num_ranks)
        except (ValueError, TypeError):
            continue
        compiled = drawn
        steps.append((kind, operands, fields))
    return compiled


def _compile(inputs: Mapping[str, Tensor], steps: list) -> Compiled:
    def function(x0, x1, x2):
        values = [x0, x1, x2]
        for kind, operands, fields in steps:
            values.append(STEPS[kind](*(values[i] for i in operands), **fields))
        return tuple(values[3:]) or x0

    return program(mesh="tp", **inputs)(function)


def global_inputs(
    compiled: Program, sizes: Mapping[str, int], seed: int
) -> dict[str, torch.Tensor]:
    """A tensor for each input, all of it; small, so that products of products stay finite."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for task in compiled.tasks:
        if task.kind == "input":
            shape = [number(size, sizes) for size in task.type.sizes]
            drawn = torch.randn(shape, generator=generator) / 2
            if task.type.dtype == "int32":
                drawn = drawn.abs() * 4
            found[task.name] = drawn.to(getattr(torch, task.type.dtype))
    return found


def of_rank(
    kind: Any, tensor: torch.Tensor, sizes: Mapping[str, int], rank: int, num_ranks: int
) -> torch.Tensor:
    """What `rank` has of a global tensor; of a Partial one, a summand that differs by rank."""
    if kind.placement == Partial():
        # Rows are dealt out, so that the summands are exact.
        first, end = part_of(tensor.shape[0], rank, num_ranks)
        mine = torch.zeros_like(tensor)
        mine[first:end] = tensor[first:end]
        return mine
    return rank_part(kind.placement, tensor, rank, num_ranks).contiguous()


def random_layers(seed: int, num_ranks: int, dtype: str = "float32") -> Compiled:
    """Layers as models have them, whose collectives can be hidden: what kernels are made for.

    A few are drawn one after the other; each takes rows that are split and gives rows that are, or
    whole ones and gives whole ones, with something between and behind that may fit in its kernel.
    """
    chooser = random.Random(seed)
    width = chooser.choice([4, 6, 8]) * num_ranks
    hidden = chooser.choice([2, 6]) * num_ranks
    replicated = chooser.random() < 0.4
    inputs = {"x": Tensor(dtype, ("m", width), Replicate() if replicated else Shard(0))}
    inputs["residual"] = inputs["x"]
    inputs["weight"] = Tensor(dtype, (1, width), Replicate())
    between, behind = [], []
    for i in range(chooser.choice([1, 1, 2])):
        between.append(chooser.choice(["none", "silu", "silu_mul", "gate", "twice", "bias"]))
        behind.append(chooser.choice(["none", "residual", "norm", "both", "bias"]))
        wide = 2 * hidden if between[-1] == "silu_mul" else hidden
        inputs[f"up{i}"] = Tensor(dtype, (width, wide), Shard(1))
        inputs[f"down{i}"] = Tensor(dtype, (hidden, width), Shard(0))
        inputs[f"bias{i}"] = Tensor(dtype, (1, wide), Shard(1))
    is_open = chooser.random() < 0.3  # the last layer ends before its sums
    is_sum = replicated and chooser.random() < 0.5  # rows are summed and worked on before all else
    if is_sum:
        inputs["summand"] = Tensor(dtype, ("m", width), Partial())

    def function(**given):
        x, residual, weight = given["x"], given["residual"], given["weight"]
        if is_sum:
            x = rms_norm(all_reduce(given["summand"]) + x, weight)
        for i, (inner, outer) in enumerate(zip(between, behind)):
            whole = x if replicated else all_gather(x)
            h = whole @ given[f"up{i}"]
            if inner == "gate":
                h = silu(h) * h
            elif inner == "twice":  # a second product of the same rows
                h = silu(h) * (whole @ given[f"up{i}"])
            elif inner == "bias":
                h = silu(h + given[f"bias{i}"])
            elif inner != "none":
                h = STEPS[inner](h)
            if is_open and i == len(between) - 1:
                return h
            x = h @ given[f"down{i}"]
            x = all_reduce(x) if replicated else reduce_scatter(x)
            if outer in ("residual", "both"):
                x = x + residual
            if outer == "bias":
                x = rms_norm(x + weight, weight)
            if outer in ("norm", "both"):
                x = rms_norm(x, weight)
        return x

    return _declared("layers", inputs, function)


def _declared(name: str, inputs: Mapping[str, Tensor], function: Any) -> Compiled:
    """The program of a function of keywords: its parameters are those of a function's own."""
    scope: dict[str, Any] = {"function": function}
    exec(f"def {name}({', '.join(inputs)}):\n    return function(**locals())", scope)
    return program(mesh="tp", **inputs)(scope[name])


def random_experts(seed: int, num_ranks: int, dtype: str = "float32") -> Compiled:
    """One or two layers of experts, split along columns or given to ranks, to which tokens are
    sent or which get all of them; some with a router within, a residual behind, or a reader of the
    tokens that keeps them from being fed."""
    chooser = random.Random(seed)
    width, hidden = 4 * chooser.choice([2, 3]), 2 * num_ranks * chooser.choice([1, 2, 3])
    inputs = {"x": Tensor(dtype, ("m", width), Shard(0))}
    layers = []
    for i in range(chooser.choice([1, 1, 2])):
        number, between = chooser.choice([1, 3, 5]), chooser.choice(["none", "silu", "silu_mul"])
        top_k = chooser.randint(1, min(number, 3))
        is_split, is_routed = chooser.random() < 0.75, chooser.random() < 0.5
        behind = chooser.choice(["", "residual", "read"])
        # Of whole experts: do tokens go to all ranks?
        is_gathered = is_split or seed % 2 == 0
        layers.append((top_k, between, is_split, is_gathered, is_routed, behind))
        wide = 2 * hidden if between == "silu_mul" else hidden
        where = (Shard(2), Shard(1)) if is_split else (Shard(0), Shard(0))
        inputs[f"up{i}"] = Tensor(dtype, (number, width, wide), where[0])
        inputs[f"down{i}"] = Tensor(dtype, (number, hidden, width), where[1])
        inputs[f"router{i}"] = (
            Tensor(dtype, (width, number)) if is_routed else Tensor(dtype, ("m", number), Shard(0))
        )

    def function(**given):
        x = given["x"]
        for i, (top_k, between, is_split, is_gathered, is_routed, behind) in enumerate(layers):
            router, up, down = given[f"router{i}"], given[f"up{i}"], given[f"down{i}"]
            routing = moe_route(
                x @ router if is_routed else router, top_k=top_k,
                split_experts=not is_split and (is_gathered or i == 0),
            )  # fmt: skip
            tokens = all_gather(x) if is_gathered else x
            rows = gather_rows(tokens, routing) if is_gathered else ep_dispatch(x, routing)
            h = grouped_matmul(rows, up, routing)
            h = STEPS[between](h) if between != "none" else h
            y = grouped_matmul(h, down, routing)
            out = (
                reduce_scatter(scatter_rows(y, routing)) if is_gathered else ep_combine(y, routing)
            )
            if behind == "read" and is_gathered:
                out = out + reduce_scatter(
                    scatter_rows(
                        grouped_matmul(
                            grouped_matmul(gather_rows(tokens, routing), up, routing)
                            if between != "silu_mul"
                            else h,
                            down,
                            routing,
                        ),
                        routing,
                    )
                )
            x = out + x if behind == "residual" else out
        return x

    return _declared("experts", inputs, function)
