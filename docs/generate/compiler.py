"""Blocks of docs/compiler.md: one program through every pass, on four H200s; then two others."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from dataclasses import fields, replace

from generate.blocks import code, table

from weft.base.errors import PlacementError
from weft.compiler import (
    Facts,
    Halves,
    Partial,
    Replicate,
    Shard,
    Tensor,
    all_gather,
    all_reduce,
    gather_rows,
    grouped_matmul,
    moe_route,
    pipeline,
    reduce_scatter,
    rms_norm,
    scatter_rows,
    silu_mul,
)
from weft.compiler.facts import Settings
from weft.compiler.frontend import trace
from weft.compiler.lower import kernels
from weft.compiler.passes.allocate import layout
from weft.compiler.passes.place import place
from weft.ir import core, device, task
from weft.ir import device_rules as of_plans
from weft.ir import task_rules as of_tasks
from weft.ir.choice import Choice
from weft.ir.device import Buffer, Channel, Launch
from weft.ir.task import Program

PARAMETERS = {
    "x": Tensor("bfloat16", ("m", 4096), Shard(0)),
    "w1": Tensor("bfloat16", (4096, 24576), Shard(1)),
    "w2": Tensor("bfloat16", (12288, 4096), Shard(0)),
}
# The call for which the plan is made.
CALL = Facts({"m": 8192}, 4)


def mlp(x, w1, w2):
    return reduce_scatter(silu_mul(all_gather(x) @ w1) @ w2)


def forgetful(x, w1, w2):
    return reduce_scatter(silu_mul(x @ w1) @ w2)


@functools.cache
def declared() -> pipeline.Stages:
    return pipeline.compile_program(trace(mlp, "tp", PARAMETERS))


@functools.cache
def called() -> pipeline.Stages:
    return pipeline.overlap(declared().tasks["place"], CALL)


def program() -> str:
    parameters = "".join(
        f"    {name}=Tensor({kind.dtype!r}, {kind.sizes!r}, {task.text.value(kind.placement)}),\n"
        for name, kind in PARAMETERS.items()
    ).replace("'", '"')
    return code(f'@weft.program(\n    mesh="tp",\n{parameters})\n{inspect.getsource(mlp)}')


def traced() -> str:
    return _tasks("trace")


def placed() -> str:
    return _tasks("place")


def _tasks(name: str) -> str:
    return code(task.show(declared().tasks[name], places=False))


def refused() -> str:
    """What the compiler says where the program does not gather."""
    try:
        pipeline.compile_program(trace(forgetful, "tp", PARAMETERS))
    except PlacementError as error:
        place = error.place.frames[0].source()
        return code(f"{type(error).__name__}: {error.message}\n  at  {place}", "text")
    raise AssertionError("a program without its all_gather is placed")


def unfused() -> str:
    return code(device.show(declared().plan, places=False))


# ---- the passes of a call: the tasks that each has changed, and its choices


def fused() -> str:
    return _changed("place", "fuse")


def engines() -> str:
    return _changed("fuse", "engines")


def tiled() -> str:
    return _changed("fuse_rows", "tile")


def swizzled() -> str:
    return _changed("tile", "swizzle")


def chunked() -> str:
    return _changed("swizzle", "chunk")


def partitioned() -> str:
    return _changed("chunk", "partition")


def _changed(name: str, behind: str, stages: pipeline.Stages | None = None) -> str:
    tasks = (stages or called()).tasks
    before, after = tasks[name], tasks[behind]
    lines = [text for old, new in zip(before.tasks, after.tasks) if (text := _difference(old, new))]
    choices = after.choices[len(before.choices) :]
    return code("\n".join([*lines, task.text.show(choices, places=False)]))


def _difference(old: task.Task, new: task.Task) -> str:
    """What a pass has given to a task, but for what every pass leaves alone."""
    given = {
        one.name: getattr(new, one.name)
        for one in fields(new)
        if one.name not in ("needs", "place") and getattr(new, one.name) != getattr(old, one.name)
    }
    told = ", ".join(f"{name}={task.text.value(value)}" for name, value in given.items())
    return f"{new.name} = {new.kind}(..., {told})" if told else ""


def drawn() -> str:
    return _plan(list(called().plans.values())[0])


def signalled() -> str:
    return _plan(list(called().plans.values())[1])


def _plan(plan: device.Plan) -> str:
    """Channels and steps; the buffers stay as they are drawn."""
    shown = [one for one in plan.bare.statements if not isinstance(one, Buffer)]
    return code(device.text.show(shown, places=False))


def buffers() -> str:
    shown = list(called().plans.values())[0].of(Buffer)
    return code(device.text.show(shown, places=False))


def allocated() -> str:
    plan = list(called().plans.values())[2]
    lines = [f"{'buffer':20} {'offset':>12} {'bytes':>12}  steps 1 to {len(plan.steps)}"]
    for one in layout(plan, CALL.sizes, CALL.num_ranks).values():
        life = range(one.first_step, one.last_step + 1)
        marks = "".join("#" if i in life else "." for i in range(1, len(plan.steps) + 1))
        where = f"{one.role} {one.offset}"
        lines.append(f"{one.buffer:20} {where:>12} {one.num_bytes:>12}  {marks}")
    return code("\n".join(lines), "text")


# ---- two other programs


def between(x, residual, weight):
    total = all_reduce(x) + residual
    return rms_norm(total, weight), total


BETWEEN = {
    "x": Tensor("bfloat16", ("m", 4096), Partial()),
    "residual": Tensor("bfloat16", ("m", 4096), Replicate()),
    "weight": Tensor("bfloat16", (1, 4096), Replicate()),
}
FEW = {"m": 8}


def moe(x, logits, up, down):
    routing = moe_route(logits, top_k=8)
    h = silu_mul(grouped_matmul(gather_rows(all_gather(x), routing), up, routing))
    return reduce_scatter(scatter_rows(grouped_matmul(h, down, routing), routing))


MOE = {
    "x": Tensor("bfloat16", ("m", 4096), Shard(0)),
    "logits": Tensor("bfloat16", ("m", 128), Shard(0)),
    "up": Tensor("bfloat16", (128, 4096, 3072), Shard(2)),
    "down": Tensor("bfloat16", (128, 1536, 4096), Shard(1)),
}


def layer(x, gain, up, down):
    h = all_gather(rms_norm(x, gain)) @ up
    return reduce_scatter(silu_mul(h, side_by_side=True) @ down) + x


LAYER = {
    "x": PARAMETERS["x"],
    "gain": Tensor("bfloat16", (1, 4096), Replicate()),
    "up": Tensor("bfloat16", (4096, 24576), Halves(1)),
    "down": PARAMETERS["w2"],
}


def layer_program() -> str:
    return code(inspect.getsource(layer))


@functools.cache
def _layer() -> pipeline.Stages:
    return pipeline.overlap(place(trace(layer, "tp", LAYER)), CALL)


def rows_fused() -> str:
    return _changed("engines", "fuse_rows", _layer())


def rows_kernel() -> str:
    """That of the gate."""
    made = kernels.lower(_layer().plan).values()
    gate = next(one for one in made if len(one.at("result")) > 2)
    shown = [
        one for one in gate.statements if not isinstance(one, core.Param) or one.sort == "view"
    ]
    return code(core.text.show(shown, places=False))


def between_program() -> str:
    return code(inspect.getsource(between))


def moe_program() -> str:
    return code(inspect.getsource(moe))


@functools.cache
def _few() -> device.Plan:
    placed = place(trace(between, "tp", BETWEEN))
    return pipeline.overlap(placed, replace(CALL, sizes=FEW)).plan


@functools.cache
def _routed() -> tuple[Program, device.Plan]:
    placed = place(trace(moe, "tp", MOE))
    return placed, pipeline.overlap(placed, CALL).plan


def few_drawn() -> str:
    shown = [
        one for one in _few().statements
        if isinstance(one, Channel | Launch)
        or (isinstance(one, Choice) and one.what == "engine")
        or (isinstance(one, Buffer) and one.role == "packets")
    ]  # fmt: skip
    return code(device.text.show(shown, places=False))


def few_kernel() -> str:
    return _kernel(_few())


def moe_placed() -> str:
    tasks = [one for one in _routed()[0].tasks if one.kind != "input"]
    return code(task.text.show(tasks, places=False))


def moe_drawn() -> str:
    kinds = Channel | Launch | device.Call
    shown = [one for one in _routed()[1].statements if isinstance(one, kinds)]
    return code(device.text.show(shown, places=False))


def moe_kernel() -> str:
    return _kernel(_routed()[1])


def _kernel(plan: device.Plan) -> str:
    """The first kernel's statements behind its parameters."""
    kernel = next(iter(kernels.lower(plan).values()))
    shown = [one for one in kernel.statements if not isinstance(one, core.Param)]
    return code(core.text.show(shown, places=False))


# ---- tables of the compiler


def passes_at_declaration() -> str:
    return _passes(pipeline.AT_DECLARATION)


def passes_at_call() -> str:
    return _passes(pipeline.at_call(CALL, Settings()))


def _passes(passes: Sequence[pipeline.Pass]) -> str:
    return table(("pass", "why here"), [(f"`{one.name}`", one.why) for one in passes])


def task_rules() -> str:
    return _rules("Task", of_tasks.RULES)


def device_rules() -> str:
    return _rules("Device", of_plans.RULES)


def _rules(level: str, rules: tuple) -> str:
    rows = [(one.name, one.why, one.since or "always") for one in rules]
    return table((f"{level} rule", "why", "checked from"), rows)
