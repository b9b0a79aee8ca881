"""The operations that Task IR has: a row for each.

A row says how many operands a kind takes, which region of each a tile of its result needs, which
placements go in and which comes out, and what else it is run with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from weft.ir.shapes import ACTIVATIONS, GATED, ROWS
from weft.ir.tensor import ByExpert, Halves, Partial, Placement, Replicate, Shard


@dataclass(frozen=True)
class Along:
    """A tile needs, of this dimension, what lies along its own dimension `dim`, `times` as wide."""

    dim: int
    times: int = 1


@dataclass(frozen=True)
class All:
    """A tile needs all of this dimension."""


@dataclass(frozen=True)
class ByTable:
    """A tile needs what the table says that the task is given: known on the device alone."""


@dataclass(frozen=True)
class Need:
    """The region of `operand` that a tile needs, dimension by dimension."""

    operand: str
    region: tuple[Along | All | ByTable, ...]


@dataclass(frozen=True)
class Kind:
    """An operation's row: operands, the dimensions that they need, placements in -> out.

    `region[i]` is what a tile of the result needs of operand i. `attributes` are the fields of a
    task that this kind is run with, of ATTRIBUTES.
    """

    num_operands: int
    region: tuple[tuple[Along | All | ByTable, ...], ...]
    placements: tuple[tuple[tuple[Placement, ...], Placement], ...] = ()
    is_collective: bool = False
    attributes: tuple[str, ...] = ()


# What a field of a task may be where its kind has it, and how that is told.
ATTRIBUTES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "dim": (lambda dim: dim in (0, 1), "0 or 1"),
    "eps": (lambda eps: isinstance(eps, float), "a number"),
    "top_k": (lambda top_k: isinstance(top_k, int) and top_k >= 1, "1 or more"),
    "head": (lambda head: isinstance(head, int) and head >= 2 and head % 2 == 0, "an even number"),
    "base": (lambda base: isinstance(base, float) and base > 0, "a number above 0"),
    "causal": (lambda causal: isinstance(causal, bool), "True or False"),
    "between": (
        lambda between: isinstance(between, tuple) and 0 <= between[0] < between[1],
        "(first, end) with 0 <= first < end",
    ),
    "splits": (lambda splits: isinstance(splits, int) and splits >= 1, "1 or more"),
}

ROW, COLUMN, WHOLE = Along(0), Along(1), Replicate()
_SAME = (ROW, COLUMN)
# One row, which is the same for all rows of the result.
_SAME_ROW = (All(), COLUMN)


def _kept_alone(*placements: Placement) -> tuple[tuple[tuple[Placement, ...], Placement], ...]:
    """Placements of one operand, which its result has too."""
    return tuple(((one,), one) for one in placements)


_ALIKE = _kept_alone(WHOLE, Shard(0), Shard(1), ByExpert())
_BOTH = tuple(((p, p), p) for p in (WHOLE, Shard(0), Shard(1), Halves(1), ByExpert()))
# A row lies as the columns that it is for.
_WITH_ROW = tuple(((p, WHOLE if p in (Shard(0), ByExpert()) else p), p) for (p, _), _ in _BOTH)
_TABLE = (All(), All(), All())


def _kept(
    placements: tuple[Placement, ...],
) -> tuple[tuple[tuple[Placement, ...], Placement], ...]:
    """Placements that stay as they are, by tables that all ranks have."""
    return tuple(((one, WHOLE), one) for one in placements)


# A product is linear in each of its operands: a summand times a whole is a summand.
_LINEAR = (((Partial(), WHOLE), Partial()), ((WHOLE, Partial()), Partial()))

KINDS = {
    "input": Kind(0, ()),
    "matmul": Kind(2, ((ROW, All()), (All(), COLUMN)), (
        ((WHOLE, WHOLE), WHOLE),
        ((Shard(0), WHOLE), Shard(0)),
        ((WHOLE, Shard(1)), Shard(1)),
        ((WHOLE, Halves(1)), Halves(1)),
        ((Shard(1), Shard(0)), Partial()),
        *_LINEAR,
    )),
    # The same, then a gate: silu_mul(x @ w), of columns in pairs.
    **{f"matmul_{kind}": Kind(2, ((ROW, All()), (All(), Along(1, times=2))), (
        ((WHOLE, WHOLE), WHOLE),
        ((Shard(0), WHOLE), Shard(0)),
        ((WHOLE, Shard(1)), Shard(1)),
    )) for kind in GATED},
    # Sums over the rows of both: x^T @ y, the gradient of a weight.
    "matmul_tn": Kind(2, ((All(), ROW), (All(), COLUMN)), (
        ((WHOLE, WHOLE), WHOLE),
        ((Shard(1), WHOLE), Shard(0)),
        ((WHOLE, Shard(1)), Shard(1)),
        ((WHOLE, Halves(1)), Halves(1)),
        ((Shard(0), Shard(0)), Partial()),
        *_LINEAR,
    )),
    **{kind: Kind(1, (_SAME,), (*_ALIKE, ((Halves(1),), Halves(1)))) for kind in ACTIVATIONS},
    # Columns in pairs, gate and value: silu(h[:, 0::2]) * h[:, 1::2].
    **{kind: Kind(1, ((ROW, Along(1, times=2)),), _ALIKE) for kind in GATED},
    # All columns of gate, then those of value: silu(h[:, :n]) * h[:, n:].
    **{f"{kind}_halves": Kind(1, ((ROW, All()),), (
        *_kept_alone(WHOLE, Shard(0), ByExpert()), ((Halves(1),), Shard(1)),
    )) for kind in GATED},
    "mul": Kind(2, (_SAME, _SAME), (*_BOTH, *_LINEAR)),
    "add": Kind(2, (_SAME, _SAME), (*_BOTH, ((Partial(), Partial()), Partial()))),
    # The same with one row for all rows; a * b and a + b become these where b has but one.
    "mul_row": Kind(2, (_SAME, _SAME_ROW), (*_WITH_ROW, *_LINEAR)),
    "add_row": Kind(2, (_SAME, _SAME_ROW), (*_WITH_ROW, ((Partial(), Partial()), Partial()))),
    # Some of the columns: a view. Of Pieces(1, ..) it takes one piece, which is then @ Shard(1).
    "columns": Kind(1, ((ROW, All()),), _kept_alone(WHOLE, Shard(0), Partial(), ByExpert()),
                    attributes=("between",)),
    # Over whole rows, times one weight per column, which lies as [1, columns].
    "rms_norm": Kind(2, ((ROW, All()), _SAME_ROW), (
        ((WHOLE, WHOLE), WHOLE),
        ((Shard(0), WHOLE), Shard(0)),
        ((WHOLE, Partial()), Partial()),
    ), attributes=("eps",)),
    # Row ids[0, i] of a table. Where the table's rows are split each rank has a summand: its own
    # rows, and zeros for the others'.
    "embedding": Kind(2, ((All(), COLUMN), (All(), ROW)), (
        *_kept((WHOLE, Shard(1), Partial())),
        ((WHOLE, Shard(1)), Shard(0)),
        ((Shard(0), WHOLE), Partial()),
    )),
    # Over the columns of each head, times one weight per column of a head.
    "head_norm": Kind(2, ((ROW, All()), (All(), All())), (
        *_kept((WHOLE, Shard(0), Shard(1), ByExpert())), ((WHOLE, Partial()), Partial()),
    ), attributes=("eps", "head")),
    # Tables of where every token's rows are, sorted by expert: on all ranks, of all tokens.
    "moe_route": Kind(1, ((All(), All()),), (((Shard(0),), WHOLE), ((WHOLE,), WHOLE)),
                      is_collective=True, attributes=("top_k",)),
    # The same; each rank's are of its own experts.
    "ep_route": Kind(1, ((All(), All()),), (((Shard(0),), ByExpert()), ((WHOLE,), ByExpert())),
                     is_collective=True, attributes=("top_k",)),
    # A row for each choice of a token; and back, weighted and summed. By tables of own experts a
    # rank has the rows of these, and back there is its summand.
    "gather_rows": Kind(2, ((ByTable(), COLUMN), _TABLE), (
        *_kept((WHOLE, Shard(1))), ((WHOLE, ByExpert()), ByExpert()),
    )),
    "scatter_rows": Kind(2, ((ByTable(), COLUMN), _TABLE), (
        *_kept((WHOLE, Shard(1), Partial())), ((ByExpert(), ByExpert()), Partial()),
    )),
    # Each row times its expert's matrix.
    "grouped_matmul": Kind(3, ((ROW, All()), (ByTable(), All(), COLUMN), _TABLE), (
        ((WHOLE, WHOLE, WHOLE), WHOLE),
        ((WHOLE, Shard(2), WHOLE), Shard(1)),
        ((WHOLE, Halves(2), WHOLE), Halves(1)),
        ((Shard(1), Shard(1), WHOLE), Partial()),
        *(((ByExpert(), Shard(0), table), ByExpert()) for table in (WHOLE, ByExpert())),
        ((Partial(), WHOLE, WHOLE), Partial()),
        ((WHOLE, Partial(), WHOLE), Partial()),
    )),
    # As gather_rows of all ranks' tokens, to where their experts are; and back, as scatter_rows.
    **{kind: Kind(2, ((ByTable(), COLUMN), _TABLE), tuple(
        ((rows, table), made) for table in (WHOLE, ByExpert())
    ), is_collective=True) for kind, rows, made in (
        ("ep_dispatch", Shard(0), ByExpert()), ("ep_combine", ByExpert(), Shard(0)),
    )},
    # A decode step: heads are split over ranks, lengths are known to all.
    "rope": Kind(2, ((ROW, All()), (All(), ROW)),
                 (*_kept((WHOLE, Shard(1))), ((Shard(0), Shard(1)), Shard(0))),
                 attributes=("head", "base")),
    # By positions, of a table of cosines and sines.
    "rope_by_table": Kind(3, ((ROW, All()), (All(), ROW), (All(), All())), (
        ((WHOLE, WHOLE, WHOLE), WHOLE),
        ((Shard(0), Shard(1), WHOLE), Shard(0)),
        ((Shard(1), WHOLE, WHOLE), Shard(1)),
    ), attributes=("head",)),
    "kv_append": Kind(3, (_SAME, (All(), COLUMN), (All(), All())), (
        ((WHOLE, WHOLE, WHOLE), WHOLE),
        ((Shard(1), Shard(1), WHOLE), Shard(1)),
    )),
    "decode_attention": Kind(4, (_SAME, *(((All(), All()),) * 3)), (
        ((WHOLE, WHOLE, WHOLE, WHOLE), WHOLE),
        ((Shard(1), Shard(1), Shard(1), WHOLE), Shard(1)),
    ), attributes=("head",)),
    # The same in two steps: row i * splits + s is of split s of sequence i's keys, and of each head
    # its mean, then as many columns of which the first is its lse.
    "attention_parts": Kind(4, (((All(), All()),) * 4), (
        ((WHOLE, WHOLE, WHOLE, WHOLE), WHOLE),
        ((Shard(1), Shard(1), Shard(1), WHOLE), Shard(1)),
    ), attributes=("head", "splits")),
    "merge_parts": Kind(1, ((All(), Along(1, times=2)),), _kept_alone(WHOLE, Shard(1)),
                        attributes=("head", "splits")),
    # Of tokens, one a row: their heads are split over ranks, or they themselves.
    "attention": Kind(3, (_SAME, (All(), All()), (All(), All())), (
        ((WHOLE, WHOLE, WHOLE), WHOLE),
        ((Shard(0), WHOLE, WHOLE), Shard(0)),
        ((Shard(1), Shard(1), Shard(1)), Shard(1)),
    ), attributes=("head", "causal")),
    # The same, of keys and values that are gathered meanwhile.
    "ag_attention": Kind(3, (_SAME, (All(), All()), (All(), All())), (
        ((Shard(0), Shard(0), Shard(0)), Shard(0)),
    ), is_collective=True, attributes=("head", "causal")),
    # With dim: Shard(dim) -> Replicate, Partial -> Shard(dim), Shard(1 - dim) -> Shard(dim).
    "all_gather": Kind(1, (_SAME,), is_collective=True, attributes=("dim",)),
    "reduce_scatter": Kind(1, (_SAME,), is_collective=True, attributes=("dim",)),
    "all_to_all": Kind(1, (_SAME,), is_collective=True, attributes=("dim",)),
    "all_reduce": Kind(1, (_SAME,), (((Partial(),), WHOLE),), is_collective=True),
    # The same, then the sum with what all ranks have.
    "all_reduce_add": Kind(2, (_SAME, _SAME), (((Partial(), WHOLE), WHOLE),), is_collective=True),
}  # fmt: skip


# Kinds that are done to a tile with the same columns of other operands: in registers, behind a
# product. Those of OF_ONE_WIDTH leave as many columns as there were.
OF_ONE_WIDTH = (*ACTIVATIONS, *ROWS, *ROWS.values())
ELEMENTWISE = (*OF_ONE_WIDTH, *GATED)
# Kinds whose tiles have a third extent, along k.
GATED_PRODUCTS = tuple(f"matmul_{kind}" for kind in GATED)
PRODUCTS = ("matmul", "matmul_tn", "grouped_matmul", *GATED_PRODUCTS)
# Whose second operand is a weight, which may lie transposed.
WEIGHTED = ("matmul", "grouped_matmul", *GATED_PRODUCTS)
# Which operands may be rows that arrive while a product runs.
GATHERED = {"matmul": (0,), "matmul_tn": (0, 1)}
