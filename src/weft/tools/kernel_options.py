"""Options of the verbs that look at compiled kernels, and the kernels that they ask for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from weft.base.errors import UsageError
from weft.tools import kernels
from weft.tools.explain import is_program as is_file
from weft.tools.kernels import Kernels
from weft.tools.options import complete_subject, work_of
from weft.tools.words import parse_topology

DEFAULT_DTYPE = "bf16"

SubjectWord = Annotated[
    str,
    typer.Argument(
        metavar="OP|FILE.py[:NAME]",
        autocompletion=complete_subject,
        help="an operator, a script that launches kernels, a kernel or a weft.program of a file",
    ),
]
Signature = Annotated[
    str,
    typer.Option(
        metavar="TYPES", show_default=False,
        help="the types of a kernel's arguments, as Triton's compiler ahead of time has them:"
        " '*fp32:16, i32, world'; nothing is run then",
    ),
]  # fmt: skip
Constants = Annotated[
    list[str] | None,
    typer.Option(
        "--constexpr", metavar="NAME=VALUE", show_default=False,
        help="the value of a tl.constexpr argument, with --signature; may be given again",
    ),
]  # fmt: skip
NumWarps = Annotated[
    int | None,
    typer.Option(metavar="N", help="warps of a program, with --signature", show_default=False),
]
NumStages = Annotated[
    int | None,
    typer.Option(metavar="N", help="stages of loops, with --signature", show_default=False),
]


def find_kernels(
    context: typer.Context, subject: str, ranks: int | None, nodes: str, shape: str, dtype: str,
    signature: str, constants: Sequence[str] | None, options: Mapping[str, int | None],
    seed: int = 0, num_sms: int = 132,
) -> Kernels:  # fmt: skip
    """The kernels that these words ask for.

    Raises  UsageError: there are none; options that say nothing to such a subject
    """
    script_args = context.meta.get("script_args", [])
    given = {name: value for name, value in options.items() if value is not None}
    declares = signature or constants or given
    if not is_file(subject):
        _refuse(subject, "operators have their own", signature=signature, constexpr=constants,
                **given)  # fmt: skip
        work = work_of(subject, ranks, nodes, shape, dtype)
        return kernels.of_operator(work.op, work.problem())
    file, name = kernels.parts_of(subject)
    _, programs = kernels.defined_in(file)
    topology = parse_topology(ranks, nodes)
    if name in programs:
        _refuse(subject, "a program's kernels have their own", signature=signature,
                constexpr=constants, **given)  # fmt: skip
        return kernels.of_program(subject, ranks, nodes, shape, "h200x4")
    _refuse(subject, "a kernel of a file takes no sizes", shape=shape,
            dtype=dtype if dtype != DEFAULT_DTYPE else "")  # fmt: skip
    if declares:
        if not name:
            raise UsageError(f"{subject}: name the kernel that is meant, {subject}:KERNEL")
        return kernels.declared(
            subject, signature, constants or (), given, topology.num_ranks
        )  # fmt: skip
    return kernels.of_run(subject, script_args, topology, seed, num_sms)


def _refuse(subject: str, why: str, **options: Any) -> None:
    for name, value in options.items():
        if value:
            message = " ".join(value) if isinstance(value, list) else value
            raise UsageError(f"--{name.replace('_', '-')} {message}: {subject} takes none; {why}")
