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
from weft.tune import presets


def option(metavar: str, text: str, *names: str, **more: Any) -> Any:
    """An option that takes a word."""
    return typer.Option(*names, metavar=metavar, help=text, **more)


def flag(text: str, *names: str) -> Any:
    """An option that takes none: help shows no type beside it."""
    return typer.Option(*names, help=text, metavar="")


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
    str, typer.Argument(metavar="OP", help="an operator, e.g. ag_gemm", autocompletion=complete_op)
]
ProgramWord = Annotated[
    str,
    typer.Argument(
        metavar="OP|FILE.py:PROGRAM", help=SUBJECT_HELP, autocompletion=complete_subject
    ),
]
TARGET_HELP = "some of cuda:80,cuda:90,cuda:100,hip:gfx942,hip:gfx950; or emu"
Targets = Annotated[str, option("TARGETS", TARGET_HELP, "--target", autocompletion=complete_target)]
TargetsOrC = Annotated[
    str,
    option(
        "TARGETS", f"{TARGET_HELP}; or manycore alone", "--target", autocompletion=complete_target
    ),
]
Ranks = Annotated[
    int | None, option("N", "number of ranks (default: 4, or the sum of the sizes in --nodes)")
]
RanksAnywhere = Annotated[
    int | None,
    option("N", "number of ranks (default: one for each GPU; emulated 4, or as --nodes says)"),
]
Gpus = Annotated[int | None, option("N", "number of GPUs (default: all)")]
Where = Annotated[
    str,
    option(
        "auto|cuda|emu", "where to run; auto takes GPUs where there are enough, else the emulator"
    ),
]
Nodes = Annotated[
    str,
    option(
        "N|A+B", "scale-up domains (an NVLink domain, a host): how many, or their sizes, e.g. 3+1"
    ),
]
Shape = Annotated[
    str,
    option(
        "m=..,n=..",
        "the operator's sizes: m is global, n and k are per rank; those left out keep their"
        " defaults",
    ),
]
Ranges = Annotated[
    str,
    option(
        "m=A..B,n=..,k=..",
        "the sizes of calls: m is global, n and k are per rank; A..B is all from A to B",
        "--shape",
    ),
]
Dtype = Annotated[
    # Named, since typer 0.27.0 makes a name of a metavar that is the parameter's in capitals.
    str, option("DTYPE", "bf16, fp16, fp32, or a dtype's name in torch", "--dtype")
]
Transport = Annotated[
    str, option("NAME", "how data is moved, for operators that have several ways")
]
PlanTarget = Annotated[str, option("TARGET", "what the plan is for, e.g. hip:gfx942", "--target")]
ModelFolder = Annotated[str, option("DIR", "a folder with a model of transformers")]
Machine = Annotated[str, option("NAME", "the machine whose constants times are predicted with")]
Seed = Annotated[int, option("N", "seed of the inputs and of the schedule", min=0)]
NumSms = Annotated[
    int, option("N", "how many programs one rank can hold at once: a GPU's SMs", min=1)
]
Arch = Annotated[
    int,
    option("N", "90 or 100: a machine of Hopper's or Blackwell's, with their Gluon kernels"),
]
Html = Annotated[
    str,
    option(
        "FILE.html", "also write the picture of what was found, or of a clean run, as an HTML page"
    ),
]
AsJson = Annotated[bool, flag("print the result as JSON", "--json")]


def work_of(
    op: str, ranks: int | None, nodes: str, shape: str, dtype: str, as_in_models: bool = False
) -> Work:
    """What these words ask for; sizes left out are a model's, or small ones that run emulated.

    Raises  UsageError, ShapeError, DtypeError
    """
    topology, card = parse_topology(ranks, nodes), find_op(op)
    default = card.default_shape
    if as_in_models:
        default = {**default, **presets.shape_in_models(card, topology.num_ranks)}
    sizes = parse_shape(shape, default)
    return Work(card, topology.num_ranks, sizes, op_dtype(card, dtype).name, topology.sizes)


def words_of(work: Work) -> dict[str, Any]:
    """The same as the JSON of every verb has it."""
    return {
        "op": work.op.name, "ranks": work.num_ranks, "shape": dict(work.shape),
        "dtype": work.dtype,
    }  # fmt: skip
