"""The kernels that a word of the command line names: an operator's, a program's, a user's own.

ag_gemm               what the operator launches
FILE.py               what a run of the script launches, on emulated ranks
FILE.py:KERNEL        the same of one kernel
FILE.py:PROGRAM       what the compiler generates for a tensor program
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from weft.base.card import Op
from weft.base.counts import counted
from weft.base.errors import UsageError
from weft.base.records import KernelRecord
from weft.base.report import Report
from weft.base.target import Target
from weft.base.topology import Topology
from weft.tools import options
from weft.tools.words import find_script, is_file, parse_topology

DEFAULT_DTYPE = "bf16"

SubjectWord = Annotated[
    str,
    typer.Argument(
        metavar="OP|FILE.py[:NAME]",
        autocompletion=options.complete_subject,
        help="an operator, a script that launches kernels, a kernel or a weft.program of a file",
    ),
]
# A kernel with one specialisation of it.
Specialised = tuple[Any, KernelRecord]


@dataclass
class Kernels:
    """What `name` stands for: `of(target)` are its kernels there.

    `report` is the run's that launched them, where there was one; `notes` what was left out.
    """

    name: str
    of: Callable[[Target], list[Specialised]]
    report: Report | None = None
    notes: list[str] = field(default_factory=list)


def parts_of(words: str) -> tuple[str, str]:
    """FILE.py and NAME of `FILE.py:NAME`; the name may be missing."""
    file, _, name = words.partition(":")
    find_script(file)
    return file, name


def is_called(subject: str) -> bool:
    """Is it an operator or a program, whose calls are weft's to make? Other words are scripts and
    kernels."""
    if not is_file(subject):
        return True
    file, name = parts_of(subject)
    return name in defined_in(file)[1]


def find_kernels(
    context: typer.Context, subject: str, ranks: int | None, nodes: str, shape: str, dtype: str,
    seed: int = 0, num_sms: int = 132,
) -> Kernels:  # fmt: skip
    """The kernels that these words ask for.

    Raises  UsageError: there are none; options that say nothing to such a subject
    """
    if not is_file(subject):
        work = options.work_of(subject, ranks, nodes, shape, dtype)
        return of_operator(work.op, work.problem())
    file, name = parts_of(subject)
    _, programs = defined_in(file)
    if name in programs:
        return of_program(subject, ranks, nodes, shape, "h200x4")
    for option, words in {"shape": shape, "dtype": dtype if dtype != DEFAULT_DTYPE else ""}.items():
        if words:
            raise UsageError(f"--{option} {words}: {subject} takes none; a script has its own")
    script_args = context.meta.get("script_args", [])
    return of_run(subject, script_args, parse_topology(ranks, nodes), seed, num_sms)


# ---------------------------------------------------------------------------------------------
# An operator's, a program's


def of_operator(card: Op, problem: object) -> Kernels:
    def kernels(target: Target) -> list[Specialised]:
        # The best that has kernels: where libraries alone are faster, there is nothing to compile.
        built = (
            list(card.kernels(problem, one, target)) for one in card.candidates(problem, target)
        )
        found = next(filter(None, built), None)
        if found is None:
            raise UsageError(f"{card.name} launches no kernel on {target} at {problem}")
        return found

    return Kernels(card.name, kernels)


def of_program(words: str, ranks: int | None, nodes: str, shape: str, hw: str) -> Kernels:
    """The generated kernels of a user's program; what others carry is compiled with operators."""
    from weft.tools.explain import subject_in_file
    from weft.tools.programs import generated

    found = Kernels(words, lambda target: [])

    def kernels(target: Target) -> list[Specialised]:
        subject = subject_in_file(words, ranks, nodes, shape, target.name, hw)
        made = list(generated(subject, target, found.notes))
        if not made:
            raise UsageError(
                f"{words}: no kernel is generated for {target}; see weft explain {words}"
            )
        return made

    found.of = kernels
    return found


# ---------------------------------------------------------------------------------------------
# A user's own, as a run launches them


def of_run(words: str, args: Sequence[str], topology: Topology, seed: int, num_sms: int) -> Kernels:
    """The kernels that a run of the script launches, each specialisation once.

    Raises  UsageError: it launches none, or none of that name
    """
    from weft.language.triton_api import recorded_launches
    from weft.tools.emulate import run_script_once

    file, name = parts_of(words)
    found: dict[str, Specialised] = {}

    def take(fn: Any, record_of: Callable[[], KernelRecord]) -> None:
        if is_own(fn):
            record = record_of()
            found.setdefault(f"{place_of(fn)} {record}{record.divisible_by_16}", (fn, record))

    with recorded_launches(take):
        report = run_script_once(file, list(args), topology, seed, sys.stderr, num_sms)
    taken = [one for one in found.values() if name in ("", one[0].__name__)]
    if not taken:
        raise UsageError(_nothing(words, report, [fn.__name__ for fn, _ in found.values()]))
    return Kernels(words, lambda target: taken, report)


def _nothing(words: str, report: Report, launched: Sequence[str]) -> str:
    """Why there is no kernel to look at, and what to do."""
    file, name = parts_of(words)
    kernels, programs = defined_in(file)
    ran = f"on {counted(report.ranks, 'rank')} the run of {file}"
    if not report.ok:
        ran += f" ended early ({report.findings[0].kind}: {report.findings[0].message}) and"
    there = ", ".join(dict.fromkeys(launched)) or "no kernel of its own"
    others = " or ".join([name] if name else kernels)
    hints = [f"let the script launch {others}, or hand it to weft.verify.compiled with its types"]
    if programs:
        hints.append(f"name its program, {' or '.join(f'{file}:{one}' for one in programs)}")
    if not others:  # it defines no kernel that it could launch
        hints = hints[1:] or ["name a script that launches a kernel, or an operator"]
    return f"{words}: {ran} launches {there}; {'; or '.join(hints)}"


def is_own(fn: Any) -> bool:
    """Is a kernel the user's, neither weft's, nor generated, nor an installed package's?"""
    from weft.base.user_place import is_users
    from weft.language.triton_api import file_of

    return not fn.__module__.startswith("weft_generated") and is_users(file_of(fn)) is True


def place_of(fn: Any) -> str:
    """FILE:LINE of a kernel's `def`."""
    from weft.language.triton_api import file_of, first_line

    return f"{file_of(fn)}:{first_line(fn)}"


def defined_in(file: str) -> tuple[list[str], list[str]]:
    """The names of the kernels and of the tensor programs that a file defines, unread else."""
    kernels, programs = [], []
    try:
        tree = ast.parse(Path(file).read_text())
    except SyntaxError as error:
        raise UsageError(f"{file}:{error.lineno} is not Python: {error.msg}") from None
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            by = " ".join(ast.unparse(one).split("(")[0] for one in node.decorator_list)
            kernels += [node.name] if "jit" in by else []
            programs += [node.name] if by.endswith("program") else []
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            of = ast.unparse(node.value.func)
            # Also one that is defined above, with options of its own.
            is_program = "program(" in f"{of}(" or of.removesuffix(".options") in programs
            programs += [ast.unparse(one) for one in node.targets] if is_program else []
    return kernels, programs
