"""The table of placements is the truth: ranks that do each for itself have, together, the whole."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from random_programs import PLACEMENTS, of_rank

from weft.compiler import libraries
from weft.ir.kinds import GATED_PRODUCTS, KINDS
from weft.ir.shapes import DTYPES_OF, DYNAMIC, GATED, ROWS
from weft.ir.task import Task, placements_of
from weft.ir.tensor import Halves, Partial, Replicate, Type

RANKS, SIZES = 2, {"m": 4}
# Right for some sizes by chance: pairs that lie within a part of a half.
OF_NO_HALVES = GATED
# Those with tables, lengths or heads have numbers of their own: test_experts.py, test_decoding.py,
# test_attending.py.
LOCAL = [
    kind for kind, row in KINDS.items()
    if row.num_operands and not row.is_collective and "head" not in row.attributes
    and kind not in (*DYNAMIC, *DTYPES_OF)
]  # fmt: skip


FIELDS = {"rms_norm": (1e-3,), "columns": ((1, 5),)}


def shapes_of(kind: str) -> list[tuple[int, int]]:
    """Sizes that differ, so that what is split wrongly seldom fits."""
    if kind in ("rms_norm", *ROWS.values()):
        return [(4, 8), (1, 8)]
    if kind in ("matmul", *GATED_PRODUCTS):
        return [(4, 8), (8, 12)]
    return [(4, 8)] * KINDS[kind].num_operands


def parts_of(placement, tensor: torch.Tensor) -> list[torch.Tensor]:
    """What each rank has; summands are no part of it, but anything that sums up to it."""
    if placement == Partial():
        summand = torch.randn_like(tensor)
        return [summand, tensor - summand]
    kind = Type("float32", tuple(tensor.shape), placement)
    return [of_rank(kind, tensor, {}, rank, RANKS) for rank in range(RANKS)]


def together(placement, parts: list[torch.Tensor]) -> torch.Tensor | None:
    """The whole, of which ranks have these parts; None where they contradict each other."""
    if placement == Replicate():
        return parts[0] if torch.equal(*parts) else None
    if placement == Partial():
        return sum(parts)
    if isinstance(placement, Halves):
        halves = [part.tensor_split(2, placement.dim) for part in parts]
        return torch.cat([part[i] for i in (0, 1) for part in halves], placement.dim)
    return torch.cat(parts, placement.dim)


def is_right(kind: str, given: tuple, result) -> bool:
    whole = [torch.randn(shape) for shape in shapes_of(kind)]
    local, fields = libraries.LOCAL[kind], FIELDS.get(kind, ())
    operands = [parts_of(*one) for one in zip(given, whole)]
    try:
        parts = [local(*mine, *fields) for mine in zip(*operands)]
    except (RuntimeError, IndexError):  # what the ranks have does not fit together
        return False
    wanted, found = local(*whole, *fields), together(result, parts)
    return (
        found is not None
        and found.shape == wanted.shape
        and torch.allclose(found, wanted, atol=1e-4)
    )


@pytest.mark.parametrize("kind", LOCAL)
def test_every_row_is_right_and_no_row_is_missing(kind: str):
    """All placements of operands and result, tried with numbers."""
    rows = placements_of(Task("y", kind))
    placements = PLACEMENTS if kind in OF_NO_HALVES else (*PLACEMENTS, Halves(1))
    for given in product(placements, repeat=KINDS[kind].num_operands):
        for result in placements:
            assert is_right(kind, given, result) == ((given, result) in rows), (given, result)


def test_a_norm_by_numbers():
    x, weight = torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 2.0]])
    scale = (12.5 + 0.5) ** -0.5
    wanted = torch.tensor([[3 * scale, 8 * scale]])
    assert torch.allclose(libraries.rms_norm(x, weight, 0.5), wanted)


def test_gate_and_value_are_neighbours():
    h = torch.tensor([[1.0, 10.0, -2.0, 3.0]])
    gates = torch.tensor([1 / (1 + torch.exp(torch.tensor(-1.0))), -2 / (1 + torch.e**2.0)])
    assert torch.allclose(
        libraries.LOCAL["silu_mul"](h), torch.stack([10 * gates[0], 3 * gates[1]])
    )
