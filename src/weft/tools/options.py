"""Options that several verbs take, each said once."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from weft.tools.check import Work
from weft.tools.words import find_op, op_dtype, parse_shape, parse_topology

OpWord = Annotated[str, typer.Argument(metavar="OP", help="an operator, e.g. ag_gemm")]
Ranks = Annotated[
    int | None, typer.Option(help="how many; 4, or what --nodes holds", show_default=False)
]
Nodes = Annotated[str, typer.Option(help="scale-up domains: 2, or their sizes, 3+1")]
Shape = Annotated[str, typer.Option(help="m=..,n=..,k=..: m global, n and k per rank")]
Dtype = Annotated[str, typer.Option(help="torch's names, or fp16, bf16, fp32")]
Transport = Annotated[str, typer.Option(help="by which, where the operator has several")]
Machine = Annotated[str, typer.Option(help="the machine that times are of")]
Seed = Annotated[int, typer.Option(min=0, help="of the inputs and of the schedule")]
NumSms = Annotated[int, typer.Option(min=1, help="programs resident on one rank")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]


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
