"""How a program's inputs lie in memory, and what is done about those that kernels cannot read so.

Kernels read rows whose elements are neighbours and that lie one behind the other. A weight, the
right operand of a product, they also read as the transposed of such rows ([n, k], as a Linear keeps
it). An input that lies otherwise is copied at each call, but not a weight: that would cost as much
as the product. Library calls take all layouts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from weft.base.errors import DtypeError, ShapeError
from weft.base.place import UNKNOWN, Place
from weft.compiler import dtensors

NO_DTYPES: Mapping[str, Any] = {}


class Reads(NamedTuple):
    """Which inputs kernels read: `rows` as they are declared, `weights` as right operands alone.

    `in_place`: those that kernels write, or peers read, where they lie. `padded`: rows of a weight
    may lie further apart than they are long.
    """

    rows: Collection[str]
    weights: Collection[str]
    in_place: Collection[str] = ()
    padded: bool = False


class Rows(NamedTuple):
    """How a matrix [k, n] lies: its rows `stride` elements apart, or, `is_nk`, its columns."""

    is_nk: bool
    stride: int


def rows_of(matrix: Any) -> Rows | None:
    """None where neither rows nor columns have their elements side by side."""
    for is_nk, one in ((False, matrix), (True, matrix.t())):
        lines, length = one.shape
        if one.is_contiguous():
            return Rows(is_nk, length)
        stride = one.stride(0) if lines > 1 else length
        if (length == 1 or one.stride(1) == 1) and stride >= length:
            return Rows(is_nk, stride)
    return None


def is_nk(matrices: Any) -> bool:
    """Do matrices [.., k, n] lie as [.., n, k]?"""
    return not matrices.is_contiguous() and matrices.mT.is_contiguous()


def check_tensor(op: str, name: str, tensor: Any, world: Any) -> None:
    """Raises  ShapeError: not contiguous rows on the world's device; PlacementError: a DTensor"""
    dtensors.refuse(op, name, tensor)
    if tensor.dim() < 1:
        raise ShapeError(f"{op}: {name} is a scalar; it must have rows: pass {name}.reshape(1)")
    if not tensor.is_contiguous():
        raise ShapeError(
            f"{op}: {name} of shape {tuple(tensor.shape)} has strides {tensor.stride()}; it must "
            f"be contiguous: pass {name}.contiguous()"
        )
    if tensor.device != world.device:
        raise ShapeError(
            f"{op}: {name} is on {tensor.device} but the world on {world.device}; move it there "
            "with .to(world.device)"
        )


def bind_sizes(
    op: str, world: Any, tensors: Mapping[str, Any], forms: Mapping[str, str],
    dtypes: Mapping[str, Any] = NO_DTYPES,
) -> dict[str, int]:  # fmt: skip
    """The sizes of a call's tensors, by the names that their forms give them.

        bind_sizes("ag_attention", world, {"q": q, "k": k}, {"q": "tokens q_heads d",
                   "k": "tokens kv_heads d"})       ->  {"tokens": 4096, "q_heads": 32, ...}

    Tensors that are None are left out. All have the dtype of the first, but for those in `dtypes`.

    Raises  ShapeError: other dimensions, a size that differs from that of the same name, strides,
            device; DtypeError
    """
    sizes: dict[str, int] = {}
    given = {name: one for name, one in tensors.items() if one is not None}
    first, like = next(iter(given.items()))
    for name, tensor in given.items():
        names, shape = forms[name].split(), tuple(tensor.shape)
        form = f"[{', '.join(names)}]"
        if len(shape) != len(names):
            raise ShapeError(f"{op}: {name} has shape {shape}; it must be {form}")
        check_tensor(op, name, tensor, world)
        wanted = dtypes.get(name, like.dtype)
        if tensor.dtype != wanted:
            remedy = f"pass {name}.to({wanted})" if name in dtypes else "convert one of them"
            raise DtypeError(f"{op}: {first} is {like.dtype} and {name} {tensor.dtype}; {remedy}")
        for size, found in zip(names, shape, strict=True):
            if sizes.setdefault(size, found) != found:
                raise ShapeError(
                    f"{op}: {name} has shape {shape}; it must be {form}, with {size}="
                    f"{sizes[size]} as in {_first_with(size, forms)}"
                )
    return sizes


def _first_with(size: str, forms: Mapping[str, str]) -> str:
    return next(name for name, form in forms.items() if size in form.split())


def to_copy(
    title: str, tensors: Mapping[str, Any], reads: Reads, places: Mapping[str, Place]
) -> tuple[str, ...]:
    """The inputs of a call that are copied before kernels read them.

    Raises  ShapeError: a weight that would be copied at each call, or what must stay where it lies
    """
    found = []
    for name, tensor in tensors.items():
        if tensor.is_contiguous():
            continue
        message = f"{title}: {name} of shape {tuple(tensor.shape)} has strides {tensor.stride()}"
        if name in reads.in_place:
            raise ShapeError(
                f"{message}; it is used where it lies, by rows that lie one behind the other: "
                "allocate it so",
                place=places.get(name, UNKNOWN),
            )
        if name in reads.rows:
            found.append(name)
        elif name in reads.weights and not _is_read_in_place(tensor, reads.padded):
            raise ShapeError(
                f"{message}; a weight is read in place, by rows or by columns whose elements are "
                f"neighbours{'' if reads.padded else ' and that lie one behind the other'}, and "
                f"would be copied at each call: pass {name}.contiguous(), made once",
                place=places.get(name, UNKNOWN),
            )
    return tuple(found)


def _is_read_in_place(weight: Any, padded: bool) -> bool:
    if weight.mT.is_contiguous():
        return True
    return padded and weight.dim() == 2 and rows_of(weight) is not None
