"""`--target manycore`: an operator or a tensor program as C for a many-core machine, run here.

weft run mlp.py --target manycore --ranks 2
weft explain mlp.py:mlp --target manycore:sw26010 --shape m=512
weft compile mlp.py:mlp --target manycore -o build
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.base.card import Op
from weft.base.counts import counted
from weft.base.errors import UnsupportedError, UsageError
from weft.tools import console
from weft.tools.check import Work, rel_err
from weft.tools.programs import card_of, find_op
from weft.tools.words import is_file, op_dtype, parse_shape, shape_text

DEFAULT_RANKS = 2


@dataclass(frozen=True)
class Subject:
    """A call of a program, and its plan for a machine."""

    work: Work
    plan: Any

    def inputs(self, seed: int) -> list[dict[str, Any]]:
        """Each rank's, by the names of the program's inputs; a row is one of [1, columns]."""
        found = []
        for rank in range(self.work.num_ranks):
            given = [*self.work.inputs(rank, seed).values()]
            wanted = self.plan.inputs
            if len(given) != len(wanted) or any(one.dim() > 2 for one in given):
                name = self.work.op.name
                raise UnsupportedError(
                    f"{name} is called with other tensors than its program {', '.join(wanted)}: "
                    "write the program out in a file, and run that"
                )
            found.append({
                name: one[None] if one.dim() == 1 else one for name, one in zip(wanted, given)
            })  # fmt: skip
        return found


def subject_of(
    op: str, ranks: int | None, nodes: str, shape: str, dtype: str, target: str
) -> Subject:  # fmt: skip
    """Raises  UsageError: several nodes, or no such machine; UnsupportedError: what this target
    has no kernel for"""
    from weft.compiler.passes.place import place
    from weft.manycore.lower import lower
    from weft.manycore.record import parse_machine

    if nodes != "1":
        raise UsageError(f"--nodes {nodes}: ranks of the many-core target are one scale-up domain")
    card = card_of(op) if is_file(op) else find_op(op)
    sizes = parse_shape(shape, card.default_shape)
    num_ranks = DEFAULT_RANKS if ranks is None else ranks
    if num_ranks < 1:
        raise UsageError(f"--ranks {ranks}: at least one rank is needed")
    work = Work(card, num_ranks, sizes, op_dtype(card, dtype).name)
    machine = parse_machine(target)
    program = _program_of(card, work)
    if program.stage == "traced":
        program = place(program)
    return Subject(work, lower(program, sizes, work.num_ranks, machine))


def _program_of(card: Op, work: Work) -> Any:
    """A program's own, or an operator's; collectives are programs of one word."""
    from weft.compiler import frontend
    from weft.ir.tensor import Partial, Shard, Type

    if card.program is not None:
        return card.program(work.problem())
    placed = {"all_gather": Shard(0), "reduce_scatter": Partial(), "all_reduce": Partial()}
    if card.name not in placed:
        raise UnsupportedError(
            f"{card.name} is written by hand and no program of the compiler's, which is what the "
            "many-core target takes: use --target emu, or write it as a weft.program"
        )
    word = getattr(frontend, card.name)

    def traced(x: Any) -> Any:
        return word(x)

    traced.__name__ = card.name
    kind = Type(work.dtype, ("m", work.shape["n"]), placed[card.name])
    return frontend.trace(traced, "tp", {"x": kind})


def run(
    op: str, ranks: int | None, nodes: str, target: str, shape: str, dtype: str, seed: int,
    json: bool,
) -> int:  # fmt: skip
    """Compile it with the host's C compiler, run it, and compare it with its reference."""
    from weft.manycore.run import execute

    subject = subject_of(op, ranks, nodes, shape, dtype, target)
    work, plan = subject.work, subject.plan
    work.check_memory()
    start = time.perf_counter()
    done = execute(plan, subject.inputs(seed))
    seconds = round(time.perf_counter() - start, 3)
    error = worst(done.results, work.reference(seed))
    moved = done.traffic
    values = {
        "op": op, "target": target, "machine": plan.machine.name, "ranks": work.num_ranks,
        "shape": dict(work.shape), "dtype": work.dtype, "ok": error <= work.tolerance(),
        "rel_err": error, "tolerance": work.tolerance(), "seconds": seconds,
        "us": done.ns / 1000, "predicted_us": plan.ns() / 1000, "transfers": moved.transfers,
        "bytes": moved.bytes, "sends": moved.sends, "send_bytes": moved.send_bytes,
    }  # fmt: skip
    console.print_json(values) if json else show(values, done, plan)
    return console.FINE if values["ok"] else console.PROBLEM


def worst(results: Sequence[Mapping[str, Any]], references: Sequence[Any]) -> float:
    """The largest error of any rank's result."""
    errors = []
    for found, reference in zip(results, references, strict=True):
        wanted = reference if isinstance(reference, tuple) else (reference,)
        errors += [rel_err(one, right) for one, right in zip(found.values(), wanted, strict=True)]
    return max(errors)


def show(values: Mapping[str, Any], done: Any, plan: Any) -> None:
    out = console.results()
    out.print(
        f"{values['op']} on {counted(values['ranks'], 'rank')} of {values['machine']}, "
        f"{shape_text(values['shape'])}, {values['dtype']}: "
        + ("[bold green]ok[/]" if values["ok"] else "[bold red]wrong[/]")
        + f"  (off by {values['rel_err']:.1e}, {values['tolerance']:.1e} allowed; "
        f"{values['seconds']} s)"
    )
    out.print(
        f"simulated: {values['us']:.2f} us, predicted {values['predicted_us']:.2f} us", markup=False
    )
    rows = [
        (one.name, f"{one.traffic.transfers:,}", f"{one.traffic.blocks:,}",
         f"{one.traffic.bytes:,}", f"{one.traffic.sends:,}", f"{one.traffic.send_bytes:,}")
        for one in done.counted
    ]  # fmt: skip
    if rows:
        header = "kernel", "transfers", "blocks", "bytes", "sends", "bytes sent"
        console.print_table(rows, *header)


def explain(
    op: str, ranks: int | None, nodes: str, shape: str, dtype: str, target: str, json: bool
) -> int:  # fmt: skip
    """The plan as a picture, then its C."""
    from weft.manycore.emit import source
    from weft.manycore.picture import picture

    subject = subject_of(op, ranks, nodes, shape, dtype, target)
    plan = subject.plan
    if json:
        kernels = [
            {"name": one.name, "kind": one.kind, "text": one.text, "us": one.ns() / 1000,
             **vars(one.traffic(0))}
            for one in plan.kernels
        ]  # fmt: skip
        console.print_json({
            "op": op, "target": target, "machine": plan.machine.name, "ranks": plan.num_ranks,
            "shape": dict(subject.work.shape), "us": plan.ns() / 1000, "kernels": kernels,
            "source": source(plan),
        })  # fmt: skip
        return console.FINE
    out = console.results()
    ranks_of = f"{counted(plan.num_ranks, 'rank')} of {plan.machine.name}"
    out.print(f"[bold]{plan.name} on {ranks_of}[/], {shape_text(subject.work.shape)}, {plan.dtype}")
    out.print(f"predicted {plan.ns() / 1000:.2f} us\n", markup=False)
    out.print(picture(plan), markup=False)
    out.print(source(plan), markup=False)
    return console.FINE


def compile_to(
    op: str, ranks: int | None, nodes: str, shape: str, dtype: str, target: str, output: str,
    json: bool,
) -> int:  # fmt: skip
    """Compile the C, and keep it with its runtime and the binary in `output`."""
    import shutil

    from weft.manycore import build
    from weft.manycore.emit import source

    subject = subject_of(op, ranks, nodes, shape, dtype, target)
    plan = subject.plan
    text = source(plan)
    binary = build.compile_c(plan.name, text)
    files = []
    if output:
        path = build.write(Path(output), plan.name, text)
        shutil.copy2(binary, Path(output) / plan.name)
        files = [str(path), str(path.with_name(build.HEADER)), str(path.with_name(plan.name))]
    lines = text.count("\n")
    if json:
        console.print_json({"op": op, "target": target, "ok": True, "lines": lines, "files": files})
    else:
        where = f", written to {output}" if output else ""
        console.results().print(f"{op}: [bold green]ok[/], {lines} lines of C{where}")
    return console.FINE
