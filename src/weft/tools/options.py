"""Options that several verbs take, each said once."""

from __future__ import annotations

import glob
import os
from typing import Annotated, Any

import typer

from weft.base.target import TARGETS
from weft.ops import names
from weft.tools.check import Work
from weft.tools.programs import find_op
from weft.tools.words import op_dtype, parse_shape, parse_topology

SUBJECT_HELP = "an operator, e.g. ag_gemm, or a weft.program in a file"


def complete_op(incomplete: str) -> list[str]:
    """Operators that begin so, for the shell."""
    return [name for name in names() if name.startswith(incomplete)]


def complete_file(incomplete: str) -> list[str]:
    """Python files and folders that begin so."""
    paths = sorted(glob.glob(glob.escape(incomplete) + "*"))
    folders = [f"{path}/" for path in paths if os.path.isdir(path)]
    return [path for path in paths if path.endswith(".py")] + folders


def complete_subject(incomplete: str) -> list[str]:
    """What is an operator or a file."""
    return complete_op(incomplete) + complete_file(incomplete)


def complete_target(incomplete: str) -> list[str]:
    """Targets, the last of those that commas join."""
    before, comma, last = incomplete.rpartition(",")
    return [before + comma + name for name in TARGETS if name.startswith(last)]


OpWord = Annotated[
    str,
    typer.Argument(metavar="OP", help="an operator, e.g. ag_gemm", autocompletion=complete_op),
]
ProgramWord = Annotated[
    str,
    typer.Argument(
        metavar="OP|FILE.py:PROGRAM", help=SUBJECT_HELP, autocompletion=complete_subject
    ),
]
Targets = Annotated[
    str,
    typer.Option(
        "--target", metavar="TARGETS", autocompletion=complete_target,
        help="some of cuda:80,cuda:90,cuda:100,hip:gfx942,hip:gfx950",
    ),
]  # fmt: skip
Ranks = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        show_default=False,
        help="number of ranks (default: 4, or the sum of the sizes in --nodes)",
    ),
]
Nodes = Annotated[
    str,
    typer.Option(
        metavar="N|A+B",
        help="scale-up domains (an NVLink domain, a host): how many, or their sizes, e.g. 3+1",
    ),
]
Shape = Annotated[
    str,
    typer.Option(
        metavar="m=..,n=..",
        help="the operator's sizes: m is global, n and k are per rank; those left out keep their"
        " defaults",
    ),
]
Dtype = Annotated[
    # Named, since typer 0.27.0 makes a name of a metavar that is the parameter's in capitals.
    str,
    typer.Option("--dtype", metavar="DTYPE", help="bf16, fp16, fp32, or a dtype's name in torch"),
]
Transport = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="how data is moved, for operators that have several ways",
        show_default=False,
    ),
]
Machine = Annotated[
    str, typer.Option(metavar="NAME", help="the machine whose constants times are predicted with")
]
Seed = Annotated[
    int, typer.Option(metavar="N", min=0, help="seed of the inputs and of the schedule")
]
NumSms = Annotated[
    int,
    typer.Option(
        metavar="N", min=1, help="how many programs one rank can hold at once: a GPU's SMs"
    ),
]
Html = Annotated[
    str,
    typer.Option(
        metavar="FILE.html",
        help="also write the picture of what was found, or of a clean run, as an HTML page",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="print the result as JSON")]


def work_of(op: str, ranks: int | None, nodes: str, shape: str, dtype: str) -> Work:
    """What these words ask for. Raises  UsageError, ShapeError, DtypeError"""
    topology, card = parse_topology(ranks, nodes), find_op(op)
    sizes = parse_shape(shape, card.default_shape)
    return Work(card, topology.num_ranks, sizes, op_dtype(card, dtype).name, topology.sizes)


def words_of(work: Work) -> dict[str, Any]:
    """The same as the JSON of every verb has it."""
    return {
        "op": work.op.name, "ranks": work.num_ranks, "shape": dict(work.shape),
        "dtype": work.dtype,
    }  # fmt: skip
