"""The sizes and the dtype that an operation gives, from those of its operands.

    product: bfloat16[m, 96] = matmul(x: bfloat16[m, 64], w: bfloat16[64, 96])

A rule for each kind that does more than keep its operands' sizes; what does not fit is told with
the operands' names and sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from weft.ir import text
from weft.ir.tensor import TABLE, Size, Times, Type, times

# What is done to each element; and to a gate, which is then multiplied by its value.
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
GATED = tuple(f"{kind}_mul" for kind in ACTIVATIONS)
# What kinds become whose second operand has one row for all rows of the first.
ROWS = {"mul": "mul_row", "add": "add_row"}
# Kinds whose last operand is a table; and the one whose second is a matrix for each expert.
DYNAMIC = ("gather_rows", "grouped_matmul", "scatter_rows", "ep_dispatch", "ep_combine")
# What makes tables.
ROUTERS = ("moe_route", "ep_route")
OF_EXPERTS = {"grouped_matmul": 1}
# Operands that have a dtype of their own, whatever the others have: where sequences end, positions.
DTYPES_OF: Mapping[str, Mapping[int, str]] = {
    "rope": {1: "int32"},
    "rope_by_table": {1: "int32", 2: "float32"},
    "embedding": {1: "int32"},
    "kv_append": {2: "int32"},
    "decode_attention": {3: "int32"},
    "attention_parts": {3: "int32"},
}


def sizes_of(task: Any, operands: Sequence[Type]) -> tuple[Size, ...]:
    """The result's sizes. Raises  ValueError: operands that do not fit, with their sizes"""
    _check_sorts(task, operands)
    tensors = [
        (name, one.dtype)
        for i, (name, one) in enumerate(zip(task.operands, operands))
        if one.dtype != TABLE and i not in DTYPES_OF.get(task.kind, {})
    ]
    if len({dtype for _, dtype in tensors}) > 1:
        message = ", ".join(f"{name} is {dtype}" for name, dtype in tensors)
        raise ValueError(f"{task.kind}: {message}; operands have one dtype")
    return _RULES.get(task.kind, _alike)(task, [one.sizes for one in operands])


def dtype_of(task: Any, operands: Sequence[Type]) -> str:
    """The result's dtype: that of the operands unless the task has one, or of tables."""
    return TABLE if task.kind in ROUTERS else task.dtype or operands[0].dtype


def _check_sorts(task: Any, operands: Sequence[Type]) -> None:
    """Tables, matrices and experts' matrices, each where it belongs."""
    for i, (name, one) in enumerate(zip(task.operands, operands)):
        is_table = task.kind in DYNAMIC and i == len(operands) - 1
        if (one.dtype == TABLE) != is_table:
            wanted = "the tables that moe_route gives" if is_table else "a tensor"
            raise ValueError(f"{task.kind}: {name} is {one.as_text()}; it must be {wanted}")
        wanted = DTYPES_OF.get(task.kind, {}).get(i, one.dtype)
        if one.dtype != wanted:
            raise ValueError(f"{task.kind}: {name} is {one.as_text()}; it must be {wanted}")
        num_dims = 3 if is_table or OF_EXPERTS.get(task.kind) == i else 2
        if len(one.sizes) != num_dims:
            wanted = "two dimensions"
            if num_dims == 3:
                wanted = "three dimensions: a matrix [k, n] for each expert"
            raise ValueError(f"{task.kind}: {name} is {one.as_text()}; it must have {wanted}")


Sizes = list[tuple[Size, ...]]


def _matmul(task: Any, sizes: Sizes) -> tuple[Size, ...]:
    if sizes[0][1] != sizes[1][0]:
        raise ValueError(
            f"matmul: {task.operands[0]} has {text.value(sizes[0][1])} columns but "
            f"{task.operands[1]} has {text.value(sizes[1][0])} rows; they must be equal"
        )
    return sizes[0][0], sizes[1][1]


def _matmul_tn(task: Any, sizes: Sizes) -> tuple[Size, ...]:
    if sizes[0][0] != sizes[1][0]:
        told = ", ".join(f"{n} has {text.value(one[0])}" for n, one in zip(task.operands, sizes))
        raise ValueError(f"matmul_tn: {told} rows, which it sums over; they must be equal")
    return sizes[0][1], sizes[1][1]


def _gated(task: Any, sizes: Sizes) -> tuple[Size, ...]:
    columns = sizes[0][1]
    if not isinstance(columns, int) or columns % 2:
        raise ValueError(
            f"{task.kind}: {task.operands[0]} has {text.value(columns)} columns; it takes pairs of "
            "gate and value, so an even number that the declaration says"
        )
    return sizes[0][0], columns // 2


def _columns(task: Any, sizes: Sizes) -> tuple[Size, ...]:
    columns, (first, end) = sizes[0][1], task.between or (0, 1)
    if not isinstance(columns, int) or end > columns:
        message = f"{task.operands[0]} has {text.value(columns)} columns"
        raise ValueError(f"columns: {message}, of which {first} to {end} are asked for; it takes "
                         "some of a number that the declaration says")  # fmt: skip
    return sizes[0][0], end - first


def _with_row(task: Any, sizes: Sizes) -> tuple[Size, ...]:
    if sizes[1] != (1, sizes[0][1]):
        raise ValueError(
            f"{task.kind}: {task.operands[0]} has {text.value(sizes[0][1])} columns, so "
            f"{task.operands[1]} must be {text.value((1, sizes[0][1]))}; it is "
            f"{text.value(sizes[1])}"
        )
    return sizes[0]


def _alike(task: Any, sizes: Sizes) -> tuple[Size, ...]:
    if any(one != sizes[0] for one in sizes):
        message = ", ".join(f"{n} is {text.value(one)}" for n, one in zip(task.operands, sizes))
        row = ", or those of one row, [1, columns]" if task.kind in ROWS else ""
        raise ValueError(f"{task.kind}: {message}; sizes must be equal{row}")
    return sizes[0]


def _moe_route(task: Any, sizes: Sizes) -> tuple[Size, ...]:
    tokens, experts = sizes[0]
    top_k = task.top_k or 1
    if not isinstance(experts, int) or experts < top_k:
        raise ValueError(
            f"{task.kind}: {task.operands[0]} has {text.value(experts)} columns, one for each "
            f"expert; with top_k={top_k} it needs {top_k}, and a number that the declaration says"
        )
    return tokens, top_k, experts


def _by_slot(task: Any, sizes: Sizes) -> tuple[Size, ...]:
    tokens, top_k, _ = sizes[1]
    assert isinstance(top_k, int)
    if sizes[0][0] != tokens:
        raise ValueError(
            f"{task.kind}: {task.operands[0]} has {text.value(sizes[0][0])} rows, but "
            f"{text.value(tokens)} tokens were routed; it takes a row for each token"
        )
    return times(tokens, top_k), sizes[0][1]


def _by_token(task: Any, sizes: Sizes) -> tuple[Size, ...]:
    _check_slots(task, sizes[0], sizes[1])
    return sizes[1][0], sizes[0][1]


def _grouped_matmul(task: Any, sizes: Sizes) -> tuple[Size, ...]:
    rows, (experts, k, n), table = sizes
    _check_slots(task, rows, table)
    if experts != table[2]:
        raise ValueError(
            f"grouped_matmul: {task.operands[1]} has {text.value(experts)} experts, but tokens "
            f"were routed to {text.value(table[2])}; they must be equal"
        )
    if rows[1] != k:
        raise ValueError(
            f"grouped_matmul: {task.operands[0]} has {text.value(rows[1])} columns but each expert "
            f"of {task.operands[1]} has {text.value(k)} rows; they must be equal"
        )
    return rows[0], n


def _check_slots(task: Any, rows: tuple[Size, ...], table: tuple[Size, ...]) -> None:
    tokens, top_k, _ = table
    assert isinstance(top_k, int)
    if rows[0] != times(tokens, top_k):
        raise ValueError(
            f"{task.kind}: {task.operands[0]} has {text.value(rows[0])} rows, but of "
            f"{text.value(tokens)} tokens each has top_k={top_k} choices: it takes "
            f"{text.value(times(tokens, top_k))} rows, which gather_rows gives"
        )


def per_sequence(cache: Size, sequences: Size) -> int | None:
    """The rows of a cache for each sequence; None where its rows are no such number times them."""
    if isinstance(cache, Times):
        return cache.by if cache.size == sequences else None
    if isinstance(cache, int) and isinstance(sequences, int) and sequences:
        return cache // sequences if cache % sequences == 0 else None
    return 1 if cache == sequences else None


def _rope(task: Any, sizes: Sizes) -> tuple[Size, ...]:
    _check_sequences(task, sizes[0], sizes[1])
    return sizes[0]


def _rope_by_table(task: Any, sizes: Sizes) -> tuple[Size, ...]:
    x, positions, table = sizes
    _whole_heads(task, 0, x, task.head or 2)
    if table[1] != task.head:
        message = f"{task.operands[2]} has {text.value(table[1])} columns; of heads of {task.head}"
        raise ValueError(f"{task.kind}: {message} it has as many: cosines, then sines")
    if positions != (1, x[0]):
        message = f"{task.operands[1]} is {text.value(positions)}; of {text.value(x[0])} rows"
        raise ValueError(f"{task.kind}: {message} it must be {text.value((1, x[0]))}")
    return x


def _embedding(task: Any, sizes: Sizes) -> tuple[Size, ...]:
    table, ids = sizes
    if ids[0] != 1 or not isinstance(table[0], int):
        given = ", ".join(f"{n} is {text.value(one)}" for n, one in zip(task.operands, sizes))
        raise ValueError(f"{task.kind}: {given}; it takes a table [vocabulary, columns], of a "
                         "number that the declaration says, and ids [1, rows]")  # fmt: skip
    return ids[1], table[1]


def _head_norm(task: Any, sizes: Sizes) -> tuple[Size, ...]:
    _whole_heads(task, 0, sizes[0], task.head or 2)
    if sizes[1] != (1, task.head):
        message = f"{task.operands[1]} is {text.value(sizes[1])}; of heads of {task.head} columns"
        raise ValueError(f"{task.kind}: {message} it must be {text.value((1, task.head))}")
    return sizes[0]


def _kv_append(task: Any, sizes: Sizes) -> tuple[Size, ...]:
    cache, x, lengths = sizes
    _check_sequences(task, x, lengths)
    _check_cache(task, 0, cache, x)
    if cache[1] != x[1]:
        message = f"has {text.value(x[1])} columns, {task.operands[0]} {text.value(cache[1])}"
        raise ValueError(f"kv_append: {task.operands[1]} {message}; they must be equal")
    return cache


def _decode_attention(task: Any, sizes: Sizes) -> tuple[Size, ...]:
    q, k, v, lengths = sizes
    head = task.head or 2
    _check_sequences(task, q, lengths)
    for i, cache in ((1, k), (2, v)):
        _check_cache(task, i, cache, q)
    columns = [_whole_heads(task, i, one, head) for i, one in enumerate((q, k))]
    if k != v or columns[0] % columns[1]:
        message = ", ".join(f"{n} is {text.value(one)}" for n, one in zip(task.operands, sizes))
        raise ValueError(f"{task.kind}: {message}; caches are alike, and q has their heads or "
                         "a multiple of them")  # fmt: skip
    return q


def _attention_parts(task: Any, sizes: Sizes) -> tuple[Size, ...]:
    rows, columns = _decode_attention(task, sizes)
    return times(rows, task.splits), times(columns, 2)


def _merge_parts(task: Any, sizes: Sizes) -> tuple[Size, ...]:
    ((rows, _),) = sizes
    columns = _whole_heads(task, 0, sizes[0], 2 * (task.head or 2))
    if isinstance(rows, Times) and rows.by % task.splits == 0:
        by = rows.by // task.splits
        return rows.size if by == 1 else Times(rows.size, by), columns // 2
    if isinstance(rows, int) and rows % task.splits == 0:
        return rows // task.splits, columns // 2
    message = f"{task.operands[0]} has {text.value(rows)} rows, no multiple of splits={task.splits}"
    raise ValueError(f"merge_parts: {message}")


def _attention(task: Any, sizes: Sizes) -> tuple[Size, ...]:
    q, k, v = sizes
    columns = [_whole_heads(task, i, one, task.head or 2) for i, one in enumerate((q, k))]
    if k != v or q[0] != k[0] or columns[0] % columns[1]:
        message = ", ".join(f"{n} is {text.value(one)}" for n, one in zip(task.operands, sizes))
        raise ValueError(f"{task.kind}: {message}; rows are alike in all, columns in keys and "
                         "values, and q has their heads or a multiple of them")  # fmt: skip
    return q


def _whole_heads(task: Any, i: int, sizes: tuple[Size, ...], head: int) -> int:
    columns = sizes[1]
    if not isinstance(columns, int) or columns % head or not columns:
        message = f"{task.operands[i]} has {text.value(columns)} columns; heads have head={head}"
        raise ValueError(f"{task.kind}: {message}: it takes whole heads, declared")
    return columns


def _check_sequences(task: Any, x: tuple[Size, ...], lengths: tuple[Size, ...]) -> None:
    if lengths != (1, x[0]):
        message = f"{task.operands[-1]} is {text.value(lengths)}; of {text.value(x[0])} sequences"
        raise ValueError(f"{task.kind}: {message} it must be {text.value((1, x[0]))}")


def _check_cache(task: Any, i: int, cache: tuple[Size, ...], x: tuple[Size, ...]) -> None:
    if per_sequence(cache[0], x[0]) is None:
        message = f"{task.operands[i]} has {text.value(cache[0])} rows for {text.value(x[0])}"
        raise ValueError(
            f"{task.kind}: {message} sequences; it takes as many for each, {text.value(x[0])} "
            "times max_kv: declare Times(name, max_kv) where the former has a name"
        )


_RULES: Mapping[str, Callable[[Any, Sizes], tuple[Size, ...]]] = {
    "matmul": _matmul,
    **{
        f"matmul_{kind}": lambda task, sizes: _gated(task, [_matmul(task, sizes)]) for kind in GATED
    },
    "matmul_tn": _matmul_tn,
    **dict.fromkeys((*GATED, *(f"{kind}_halves" for kind in GATED)), _gated),
    "columns": _columns,
    "mul_row": _with_row,
    "add_row": _with_row,
    "rms_norm": _with_row,
    "moe_route": _moe_route,
    "ep_route": _moe_route,
    "gather_rows": _by_slot,
    "grouped_matmul": _grouped_matmul,
    "scatter_rows": _by_token,
    "ep_dispatch": _by_slot,
    "ep_combine": _by_token,
    "embedding": _embedding,
    "head_norm": _head_norm,
    "rope": _rope,
    "rope_by_table": _rope_by_table,
    "kv_append": _kv_append,
    "decode_attention": _decode_attention,
    "attention_parts": _attention_parts,
    "merge_parts": _merge_parts,
    "attention": _attention,
    "ag_attention": _attention,
}
