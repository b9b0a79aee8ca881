"""`weft explain OP` or `weft explain FILE.py:PROGRAM`: the plan at its levels, and why this one."""

from __future__ import annotations

import importlib
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from weft.base.counts import counted
from weft.base.errors import UsageError
from weft.base.target import Target, parse_target
from weft.tools import console, options
from weft.tools.files import find_program
from weft.tools.words import is_file, parse_shape, parse_topology, shape_text

if TYPE_CHECKING:
    from weft.tools.check import Work
    from weft.tools.explanation import Part, Subject

PARTS = ("choices", "task", "device", "mapping", "times", "core", "launch")
DEFAULT_SIZE = 4096

OnHeap = Annotated[
    str,
    options.option(
        "NAMES", "inputs that lie on the symmetric heap, where peers can read them, e.g. a"
    ),
]
Show = Annotated[
    str, options.option("PARTS", f"which parts to print, of {','.join(PARTS)} (default: all)")
]


def explain(
    subject: options.ProgramWord,
    ranks: options.Ranks = None,
    nodes: options.Nodes = "1",
    shape: options.Shape = "",
    dtype: options.Dtype = "bf16",
    target: Annotated[
        str, options.option("TARGET", "what it is compiled for, e.g. hip:gfx942", "--target")
    ] = "cuda:90",
    hw: options.Machine = "h200x4",
    on_heap: OnHeap = "",
    show: Show = "",
    json: options.AsJson = False,
) -> int:
    """Show how a call is planned: the choices with predicted times, each level, the launches."""
    wanted = _parts(show)
    if is_file(subject):
        parts, values = of_program(subject, ranks, nodes, shape, target, hw, on_heap, wanted)
    else:
        work = options.work_of(subject, ranks, nodes, shape, dtype)
        parts, values = of_operator(work, target, hw, on_heap, wanted)
    if json:
        from weft.tools.explanation import as_json

        console.print_json({**values, **as_json(parts)})
        return console.FINE
    out = console.results()
    for part in parts:
        out.print(f"[bold]{part.title}[/]")
        indented = "\n".join(f"  {line}".rstrip() for line in part.text.splitlines())
        out.print(indented + "\n", markup=False)
    return console.FINE


def _parts(words: str) -> tuple[str, ...]:
    wanted = tuple(word for word in words.replace(" ", "").split(",") if word)
    if unknown := [word for word in wanted if word not in PARTS]:
        raise UsageError(f"--show {words}: {unknown[0]!r} is none of {', '.join(PARTS)}")
    return wanted or PARTS


def of_operator(
    work: Work, target: str, hw: str, on_heap: str, wanted: Collection[str] = PARTS
) -> tuple[list[Part], dict]:
    """What an operator's call would do, as it is written and as the compiler would have it."""
    from weft.tools.explanation import Part, parts_of

    where = parse_target(target)
    problem, card = work.problem(), work.op
    module = importlib.import_module(card.run.__module__)
    chosen = choice_of(work, where)
    fields = dict(vars(chosen))
    message = ", ".join(f"{name}={value}" for name, value in fields.items()) or "one way only"
    ranks = counted(work.num_ranks, "rank")
    call = f"{card.summary}\n{shape_text(work.shape)}, {work.dtype}, {ranks}, {where}"
    call += f"\na call takes, where nothing was measured: {message}"
    values = {**options.words_of(work), "target": where.name, "hw": hw, "config": fields}
    if reason := reason_of(card.name, problem):
        call += f"\n{reason}"
        values["reason"] = reason
    parts = [Part("call", card.name, call)]
    subject = subject_of(work, target, hw, on_heap)
    if subject is None:
        parts[0] = Part(
            "call", card.name,
            f"{call}\n\nIt is one kernel, written by hand, and no program of the compiler's: see "
            f"{Path(module.__file__ or card.name).name}",
        )  # fmt: skip
        return parts, values
    return [*parts, *parts_of(subject, wanted)], values


def subject_of(work: Work, target: str, hw: str, on_heap: str = "") -> Subject | None:
    """An operator as a program, with this call; None where it is not one."""
    from weft.base.hardware import find_hardware
    from weft.compiler.facts import Facts
    from weft.tools.explanation import Subject

    machine = find_hardware(hw)
    if work.op.program is None:
        return None
    nodes = tuple(work.nodes) if len(work.nodes) > 1 else ()
    sizes, heap = {"m": work.shape["m"]}, frozenset(filter(None, on_heap.split(",")))
    facts = Facts(sizes, work.num_ranks, parse_target(target), nodes, heap)
    return Subject(work.op.program(work.problem()), facts, machine)


def choice_of(work: Work, target: Target) -> Any:
    """The configuration that a call takes unmeasured."""
    problem, op = work.problem(), work.op
    if op.choose:
        return op.choose(problem, target, False)
    return next(iter(op.candidates(problem, target)))


def reason_of(name: str, problem: Any) -> str:
    """Why a collective takes its transport: the row of measurements that holds for its bytes."""
    from weft.plan import tuning_table

    if name not in tuning_table.MEASURED:
        return ""
    nbytes = problem.tuned_bytes
    row = tuning_table.rows_for(name, nbytes)[0]
    limit = "more than that" if row.up_to == tuning_table.ANY else f"up to {_bytes(row.up_to)}"
    whose = "in all" if name == "all_reduce" else "a rank"
    best = f"{row.transport} was fastest on 4 H200s for {limit}"
    return f"this call has {_bytes(nbytes)} {whose}; {best}"


def _bytes(count: int) -> str:
    for unit, size in (("MB", 1 << 20), ("KB", 1 << 10)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count} bytes"


# ---------------------------------------------------------------------------------------------
# A user's own


def of_program(
    words: str, ranks: int | None, nodes: str, shape: str, target: str, hw: str, on_heap: str,
    wanted: Collection[str] = PARTS,
) -> tuple[list[Part], dict]:  # fmt: skip
    """A program of a user's file, `weft explain model.py:mlp --shape m=4096`."""
    from weft.tools.explanation import Part, parts_of

    subject = subject_in_file(words, ranks, nodes, shape, target, hw, on_heap)
    facts, name = subject.facts, subject.program.name
    call = f"{shape_text(facts.sizes)}, {counted(facts.num_ranks, 'rank')}, {facts.target}"
    values = {"program": name, "ranks": facts.num_ranks, "shape": dict(facts.sizes),
              "target": facts.target.name, "hw": hw}  # fmt: skip
    return [Part("call", name, call), *parts_of(subject, wanted)], values


def subject_in_file(
    words: str, ranks: int | None, nodes: str, shape: str, target: str, hw: str, on_heap: str = ""
) -> Subject:
    """A user's program with this call; sizes that it leaves open are DEFAULT_SIZE unless given."""
    from weft.base.hardware import find_hardware
    from weft.compiler.facts import Facts
    from weft.tools.explanation import Subject

    machine, compiled = find_hardware(hw), find_program(words)
    program = compiled.stages.tasks["trace"]
    topology = parse_topology(ranks, nodes)
    named = {
        size for one in program.tasks if one.type for size in one.type.sizes
        if isinstance(size, str)
    }  # fmt: skip
    sizes = parse_shape(shape, dict.fromkeys(sorted(named), DEFAULT_SIZE))
    domains = topology.sizes if topology.num_nodes > 1 else ()
    heap = frozenset(filter(None, on_heap.split(",")))
    facts = Facts(sizes, topology.num_ranks, parse_target(target), domains, heap)
    return Subject(program, facts, machine, compiled)
