"""The kernels that a word of the command line names: an operator's, a program's, a user's own.

ag_gemm               what the operator launches
FILE.py               what a run of the script launches, on emulated ranks
FILE.py:KERNEL        the same of one kernel; or, without a run, as --signature says
FILE.py:PROGRAM       what the compiler generates for a tensor program
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from weft.base.card import Op
from weft.base.counts import counted
from weft.base.dtypes import DTYPES
from weft.base.errors import UsageError
from weft.base.records import KernelRecord
from weft.base.report import Report
from weft.base.target import Target
from weft.base.topology import Topology
from weft.tools import options
from weft.tools.files import load_file
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
Signature = Annotated[
    str,
    options.option(
        "TYPES",
        "the types of a kernel's arguments, as Triton's compiler ahead of time has them:"
        " '*fp32:16, i32, world'; nothing is run then",
    ),
]
Constants = Annotated[
    list[str] | None,
    options.option(
        "NAME=VALUE",
        "the value of a tl.constexpr argument, with --signature; may be given again",
        "--constexpr",
    ),
]
NumWarps = Annotated[int | None, options.option("N", "warps of a program, with --signature")]
NumStages = Annotated[int | None, options.option("N", "stages of loops, with --signature")]

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


def find_kernels(
    context: typer.Context, subject: str, ranks: int | None, nodes: str, shape: str, dtype: str,
    signature: str, constants: Sequence[str] | None, of_launch: Mapping[str, int | None],
    seed: int = 0, num_sms: int = 132,
) -> Kernels:  # fmt: skip
    """The kernels that these words ask for.

    Raises  UsageError: there are none; options that say nothing to such a subject
    """
    script_args = context.meta.get("script_args", [])
    given = {name: value for name, value in of_launch.items() if value is not None}
    declares = signature or constants or given
    if not is_file(subject):
        _refuse(subject, "operators have their own", signature=signature, constexpr=constants,
                **given)  # fmt: skip
        work = options.work_of(subject, ranks, nodes, shape, dtype)
        return of_operator(work.op, work.problem())
    file, name = parts_of(subject)
    _, programs = defined_in(file)
    topology = parse_topology(ranks, nodes)
    if name in programs:
        _refuse(subject, "a program's kernels have their own", signature=signature,
                constexpr=constants, **given)  # fmt: skip
        return of_program(subject, ranks, nodes, shape, "h200x4")
    _refuse(subject, "a kernel of a file takes no sizes", shape=shape,
            dtype=dtype if dtype != DEFAULT_DTYPE else "")  # fmt: skip
    if declares:
        if not name:
            raise UsageError(f"{subject}: name the kernel that is meant, {subject}:KERNEL")
        return declared(
            subject, signature, constants or (), given, topology.num_ranks
        )  # fmt: skip
    return of_run(subject, script_args, topology, seed, num_sms)


def _refuse(subject: str, why: str, **given: Any) -> None:
    for name, value in given.items():
        if value:
            message = " ".join(value) if isinstance(value, list) else value
            raise UsageError(f"--{name.replace('_', '-')} {message}: {subject} takes none; {why}")


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
            raise UsageError(f"{card.name} has no configuration for {target} at {problem}")
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
    others = [f"{file}:{one}" for one in ([name] if name else kernels)]
    hint = f"name a kernel and its arguments, {' or '.join(others)} with --signature"
    if programs:
        hint += f"; or a program, {', '.join(f'{file}:{one}' for one in programs)}"
    return f"{words}: {ran} launches {there}; {hint}"


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
            is_program = "program(" in ast.unparse(node.value.func) + "("
            programs += [ast.unparse(one) for one in node.targets] if is_program else []
    return kernels, programs


# ---------------------------------------------------------------------------------------------
# A user's own, as the command line says


def declared(
    words: str, signature: str, constants: Sequence[str], of_launch: Mapping[str, int],
    num_ranks: int,
) -> Kernels:  # fmt: skip
    """A kernel of a file specialised as the options say; the file is imported, nothing is launched.

    Raises  UsageError: no such kernel, or arguments that are not its own
    """
    from weft.language.triton_api import jit_function

    file, name = parts_of(words)
    there = {
        key: fn for key, value in vars(load_file(file, name)).items() if (fn := jit_function(value))
    }
    if name not in there:
        known = ", ".join(key for key, fn in there.items() if is_own(fn)) or "none"
        raise UsageError(f"{words}: name a kernel of {file}, as FILE.py:KERNEL; it has {known}")
    record = declared_record(there[name], signature, constants, of_launch, num_ranks)
    return Kernels(words, lambda target: [(there[name], record)])


def declared_record(
    fn: Any, signature: str, constants: Sequence[str], of_launch: Mapping[str, int], num_ranks: int
) -> KernelRecord:
    """The record that `--signature "*fp32:16, i32" --constexpr size=64` asks for."""
    from weft.language.triton_api import defaults, parameters

    known = parameters(fn)
    named = dict(_named_constants(fn, constants, known))
    words = [word.strip() for word in _split(signature)]
    left = [name for name in known if name not in named]
    if len(words) != len(left):
        left = [name for name in left if not known[name]]
    if len(words) != len(left):
        raise UsageError(
            f'--signature "{signature}" has {counted(len(words), "word")}, but {fn.__name__} takes '
            f"{', '.join(left) or 'none'}: a word for each, such as *bf16:16, i32 or world; those "
            "that are tl.constexpr by --constexpr NAME=VALUE"
        )
    kinds: dict[str, object] = {}
    aligned: list[str] = []
    for name, word in zip(left, words, strict=True):
        kind, value, is_aligned = _argument(fn, name, word, num_ranks, known[name])
        kinds[name] = kind
        if value is not None:
            named[name] = value
        aligned += [name] if is_aligned else []
    given = {**defaults(fn), **named}
    for name in known:
        if name not in kinds and name not in given:
            raise UsageError(f"{fn.__name__}: {name} is missing; add --constexpr {name}=VALUE")
    signature_of = {name: kinds.get(name, "constexpr") for name in known}
    used = {name: value for name, value in given.items() if name in named or name not in kinds}
    return KernelRecord(fn.__name__, signature_of, used, dict(of_launch), tuple(aligned))


def _argument(
    fn: Any, name: str, word: str, num_ranks: int, is_constant: bool
) -> tuple[object, Any, bool]:
    """Triton's type of one argument, the value that is compiled in, and whether 16 divides it."""
    from weft.language.world_arg import SlotArg, WorldArg, language_version

    if word == "world":
        arg = WorldArg(None, num_ranks, language_version())
        return ["*i64", "constexpr", "constexpr"], arg, False
    if word == "slot":
        return ["*i64", "*i32", "*i64"], SlotArg(None, None, None), False
    kind, _, hint = (word, "", "") if "<" in word else word.partition(":")
    if not is_constant and _is_type(kind):
        if hint not in ("", "1", "16"):
            raise UsageError(f"--signature: {name} {word}: after the colon stands 16, or 1")
        return ("constexpr", 1, False) if hint == "1" else (kind, None, hint == "16")
    value = _value(fn, name, word)
    if isinstance(value, str) and not is_constant:
        raise UsageError(
            f"--signature: {name} {word!r} is no type of Triton's; write for example *bf16, i32,"
            " *fp32:16 (an address that 16 divides), world, or a number that is compiled in"
        )
    return "constexpr", value, False


def _is_type(kind: str) -> bool:
    element = kind.removeprefix("*").removeprefix("k") if kind.startswith("*") else kind
    known = {one.triton for one in DTYPES.values()} | {"fp8e4b8", "fp8e4b15", "fp8e5b16"}
    return element in known or kind.startswith("tensordesc<")


def _named_constants(
    fn: Any, constants: Sequence[str], known: Mapping[str, bool]
) -> Iterator[tuple[str, Any]]:
    for word in (one for text in constants for one in _split(text)):
        name, equals, value = word.partition("=")
        name = name.strip()
        if not equals:
            raise UsageError(f"--constexpr {word}: write NAME=VALUE")
        if name not in known:
            raise UsageError(f"--constexpr {word}: {fn.__name__} takes {', '.join(known)}")
        yield name, _value(fn, name, value.strip())


def _value(fn: Any, name: str, text: str) -> Any:
    """A constant: a literal, a name that the kernel's file knows such as tl.float32, or a word."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        pass
    first, *rest = text.split(".")
    value = fn.__globals__.get(first)
    try:
        for attribute in rest:
            value = getattr(value, attribute)
    except AttributeError:
        raise UsageError(f"{name}={text}: {fn.__name__}'s file has no such name") from None
    return text if value is None else value


def _split(text: str) -> Iterator[str]:
    """The words between commas that stand in no brackets."""
    word, depth = "", 0
    for letter in text:
        depth += (letter in "[(<{") - (letter in "])>}")
        if letter == "," and depth == 0:
            yield word
            word = ""
        else:
            word += letter
    if word.strip():
        yield word
