"""`weft explain OP` or `weft explain FILE.py:PROGRAM`: the plan at its levels, and why this one."""

from __future__ import annotations

import importlib
import textwrap
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from weft.base.counts import counted
from weft.base.errors import UsageError
from weft.base.settings import Settings
from weft.base.target import Target
from weft.manycore.record import NAME as MANYCORE
from weft.manycore.record import is_manycore
from weft.tools import console, options
from weft.tools.files import find_program
from weft.tools.words import (
    find_target,
    is_file,
    parse_shape,
    parse_some,
    parse_topology,
    shape_text,
)

if TYPE_CHECKING:
    from weft.base.card import Op
    from weft.runtime.choices import Choices
    from weft.tools.check import Work
    from weft.tools.explanation import Part, Subject

PARTS = ("choices", "task", "device", "mapping", "times", "core", "launch")
DEFAULT_SIZE = 4096

MODES = ("eager", "recorded")
Mode = Annotated[
    str, options.option("MODE", f"how an operator is called, one of {', '.join(MODES)}", "--mode")
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
        str,
        options.option(
            "TARGET", "what it is compiled for, e.g. hip:gfx942, or manycore", "--target"
        ),
    ] = "cuda:90",
    hw: options.Machine = "h200x4",
    mode: Mode = "eager",
    show: Show = "",
    json: options.AsJson = False,
) -> int:
    """Show how a call is planned: the choices with predicted times, each level, the launches."""
    if is_manycore(target):
        from weft.tools import many_cores

        return many_cores.explain(subject, ranks, nodes, shape, "", target, json)
    find_target(target, [MANYCORE])
    wanted = parse_some("--show", show, PARTS) or PARTS
    if mode not in MODES:
        raise UsageError(f"--mode {mode}: it is one of {', '.join(MODES)}")
    if is_file(subject):
        parts, values = of_program(subject, ranks, nodes, shape, target, hw, wanted)
    else:
        work = options.work_of(subject, ranks, nodes, shape, dtype, as_in_models=True)
        parts, values = of_operator(work, target, hw, wanted, mode)
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


def of_operator(
    work: Work, target: str, hw: str, wanted: Collection[str] = PARTS, mode: str = "eager"
) -> tuple[list[Part], dict]:
    """What an operator's call does: the plan that it runs, found by making the call where nothing
    is launched."""
    from weft.plan.described import is_by_others
    from weft.runtime import choices
    from weft.tools.explanation import Part, parts_of

    where = find_target(target)
    problem, card = work.problem(), work.op
    module = importlib.import_module(card.run.__module__)
    settings = Settings.from_environment()
    found = choices.checked(choices.read(settings, where, work.num_ranks))
    where = choices.probed(where, found)
    subject = subject_of(work, target, hw, mode == "recorded", found)
    source = choice_of(work, where, found, mode == "recorded")
    chosen = source.pop("config")
    if subject is not None and subject.called and subject.called.schedules:
        (chosen,) = subject.called.schedules.values()
    fields = dict(vars(chosen))
    message = ", ".join(f"{name}={value}" for name, value in fields.items()) or "one way only"
    ranks = counted(work.num_ranks, "rank")
    call = f"{card.summary}\n{shape_text(work.shape)}, {work.dtype}, {ranks}, {where}"
    call += "\n" + textwrap.fill(f"a call takes ({mode}): {message}", 100, subsequent_indent="    ")
    values = {**options.words_of(work), "target": where.name, "hw": hw, "config": fields,
              "mode": mode}  # fmt: skip
    call += f"\n{source['text']}"
    values["choice"] = source
    reason = reason_of(card, problem, where)
    if reason and source["from"] != "measured":
        call += f"\n{reason}"
        values["reason"] = reason
    parts = [Part("call", card.name, call)]
    is_planned = subject is None or _by_tables(problem) or subject.called is not None
    if is_by_others(chosen) or not is_planned:
        what = "launches nothing" if problem.is_empty else "calls libraries: nothing is fused"
        parts[0] = Part("call", card.name, f"{call}\n\nIt {what}.")
        return parts, values
    if subject is None:
        parts[0] = Part(
            "call", card.name,
            f"{call}\n\nIt is one kernel, written by hand, and no program of the compiler's: see "
            f"{Path(module.__file__ or card.name).name}",
        )  # fmt: skip
        return parts, values
    return [*parts, *parts_of(subject, wanted)], values


def subject_of(
    work: Work, target: str, hw: str, is_recorded: bool = False,
    measured: Choices | None = None,
) -> Subject | None:  # fmt: skip
    """An operator as a program, with the stages of this call's plan; None where it is not one."""
    from weft.base.machines import find_machine
    from weft.compiler.facts import Facts
    from weft.plan import described
    from weft.runtime import choices
    from weft.tools.explanation import Subject

    machine = find_machine(hw)
    if work.op.program is None:
        return None
    nodes = tuple(work.nodes) if len(work.nodes) > 1 else ()
    where = choices.probed(find_target(target), measured or {})
    facts = Facts({"m": work.shape["m"]}, work.num_ranks, where, nodes)
    problem, op = work.problem(), work.op
    if _by_tables(problem):
        return Subject(op.program(problem), facts, machine)
    called = described.stages_called(op.kernels, problem, facts.target, is_recorded, measured or {})
    return Subject(op.program(problem), facts, machine, called=called)


def _by_tables(problem: Any) -> bool:
    """Has it a router's tables, which cannot be drawn without memory? Its program has one plan."""
    return hasattr(problem, "top_k")


def choice_of(
    work: Work, target: Target, found: Choices, is_recorded: bool = False
) -> dict[str, Any]:
    """The configuration that a call takes, and where it comes from; of eager and recorded calls
    that take unlike times, how far these are apart."""
    from weft.plan.choices import chosen, measured, record_of
    from weft.plan.described import DescribedWorld
    from weft.runtime import choices

    problem, op = work.problem(), work.op
    world = DescribedWorld(work.num_ranks, target, choices=found)
    both = [chosen(world, op, problem, one) for one in (False, True)]
    source: dict[str, Any] = {"config": both[is_recorded], "from": "measured"}
    if measured(world, op, problem, is_recorded) is not None:
        record = record_of(world, op, problem)
        us = [record[one]["us"] for one in MODES]
        source["file"] = record["file"]
        source["text"] = f"measured on {choices.machine_of(target)}: {record['file']}"
    else:
        us = [op.predict(problem, target, one) if op.predict else None for one in both]
        source["from"] = "rules" if us[is_recorded] is None else "predicted"
        how = {"rules": "by the operator's rules", "predicted": "predicted to end first"}
        if target.machine:
            how["predicted"] += " by what weft machine has read here"
        source["text"] = f"{how[source['from']]}; not measured here (weft tune)"
    source["us"] = dict(zip(MODES, us, strict=True))
    eager, recorded = us
    if eager and recorded and abs(eager - recorded) > choices.ALIKE * min(eager, recorded):
        apart = abs(eager - recorded) / min(eager, recorded)
        unit = "steps" if target.backend == "emu" else "us"
        times = f"eager calls take {eager:.1f} {unit}, recorded ones {recorded:.1f}"
        source["text"] += f"\n{times}: {apart:.0%} apart"
    return source


def reason_of(card: Op, problem: Any, target: Target) -> str:
    """Why an operator that is no plan takes its transport: times of all, where they are predicted;
    the row of measurements that holds for a collective's bytes."""
    from weft.plan import tuning_table

    name, us = card.name, {}
    if card.predict and not card.choose:
        found = card.candidates(problem, target)
        us = {one.transport: card.predict(problem, target, one) for one in found}
    if len(us) > 1 and None not in us.values():
        each = ", ".join(f"{transport} {time:.1f} us" for transport, time in us.items())
        return f"over {len(problem.nodes)} nodes, if all experts are chosen alike often: {each}"
    if name not in tuning_table.MEASURED:
        return ""
    nbytes = problem.tuned_bytes
    row = tuning_table.rows_for(name, nbytes, num_ranks=problem.num_ranks)[0]
    machine = "2 H100s" if problem.num_ranks <= 2 and name in tuning_table.OF_TWO else "4 H200s"
    limit = "more than that" if row.up_to == tuning_table.ANY else f"up to {_bytes(row.up_to)}"
    whose = "in all" if name == "all_reduce" else "a rank"
    best = f"{row.transport} was fastest on {machine} for {limit}"
    return f"this call has {_bytes(nbytes)} {whose}; {best}"


def _bytes(count: int) -> str:
    for unit, size in (("MB", 1 << 20), ("KB", 1 << 10)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count} bytes"


# ---------------------------------------------------------------------------------------------
# A user's own


def of_program(
    words: str, ranks: int | None, nodes: str, shape: str, target: str, hw: str,
    wanted: Collection[str] = PARTS,
) -> tuple[list[Part], dict]:  # fmt: skip
    """A program of a user's file, `weft explain model.py:mlp --shape m=4096`."""
    from weft.tools.explanation import Part, parts_of

    subject = subject_in_file(words, ranks, nodes, shape, target, hw)
    facts, name = subject.facts, subject.program.name
    call = f"{shape_text(facts.sizes)}, {counted(facts.num_ranks, 'rank')}, {facts.target}"
    values = {"program": name, "ranks": facts.num_ranks, "shape": dict(facts.sizes),
              "target": facts.target.name, "hw": hw}  # fmt: skip
    return [Part("call", name, call), *parts_of(subject, wanted)], values


def subject_in_file(
    words: str, ranks: int | None, nodes: str, shape: str, target: str, hw: str
) -> Subject:
    """A user's program with this call; sizes that it leaves open are DEFAULT_SIZE unless given."""
    from weft.base.machines import find_machine
    from weft.compiler.facts import Facts
    from weft.tools.explanation import Subject

    machine, compiled = find_machine(hw), find_program(words)
    program = compiled.stages.tasks["trace"]
    topology = parse_topology(ranks, nodes)
    named = {
        size for one in program.tasks if one.type for size in one.type.sizes
        if isinstance(size, str)
    }  # fmt: skip
    sizes = parse_shape(shape, dict.fromkeys(sorted(named), DEFAULT_SIZE))
    domains = topology.sizes if topology.num_nodes > 1 else ()
    facts = Facts(sizes, topology.num_ranks, find_target(target), domains)
    return Subject(program, facts, machine, compiled)
