"""`weft.program`: a Python function over tensors with placements, as Task IR.

    @weft.program(
        mesh="tp",
        x=Tensor("bfloat16", ("m", 64), Shard(0)),
        w=Tensor("bfloat16", (64, 96), Shard(1)),
    )
    def project(x, w):
        return all_gather(x) @ w

The function is traced once, when it is declared: it is called with values that write down what is
done with them, so Python's own control flow may shape the program and may not look at values. A
size that is a name is known at the call only; nothing is compiled again for another.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

from weft.base.errors import UsageError
from weft.base.place import Frame, Place
from weft.compiler import dtensors
from weft.compiler.compiled import MOVED, Compiled, Persistent
from weft.compiler.facts import Settings
from weft.ir import text
from weft.ir.shapes import ACTIVATIONS, GATED
from weft.ir.task import Program, Task
from weft.ir.tensor import TABLE, Halves, Pieces, Replicate, Shard, Times, Type

HAS = "a value of a program has @, *, + and the functions of weft.compiler alone"
# What the result of an operation is called; a second one gets a number.
RESULTS = {
    "matmul": "product", "matmul_tn": "product", "mul": "scaled", "add": "total",
    **dict.fromkeys(ACTIVATIONS, "activated"), **dict.fromkeys(GATED, "gated"),
    **{f"{kind}_halves": "gated" for kind in GATED},
    "rms_norm": "normed", "head_norm": "normed", "embedding": "embedded", "columns": "part",
    "rope_by_table": "turned",
    "moe_route": "routing", "ep_route": "routing", "gather_rows": "rows", "scatter_rows": "sums",
    "grouped_matmul": "products", "ep_dispatch": "dispatched", "ep_combine": "combined",
    "rope": "turned", "kv_append": "cached", "decode_attention": "attended",
    "attention": "attended", "all_to_all": "exchanged",
    "all_gather": "gathered", "reduce_scatter": "scattered", "all_reduce": "reduced",
}  # fmt: skip


class Trace:
    """What has been done so far."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []

    def add(self, kind: str, *operands: Value, name: str = "", **fields: Any) -> Value:
        """A task with a name of its own, at the user's line."""
        names = {task.name for task in self.tasks}
        name, number = name or RESULTS[kind], 1
        unique = name
        while unique in names:
            number += 1
            unique = f"{name}_{number}"
        operand_names = tuple(operand.name for operand in operands)
        place = fields.pop("place", None) or _user_place()
        self.tasks.append(Task(unique, kind, operand_names, place=place, **fields))
        return Value(self, unique)


class Value:
    """A tensor of the program while it is traced: @, *, + and the functions below take it."""

    def __init__(self, trace: Trace, name: str) -> None:
        self._trace = trace
        self.name: str = name

    def __matmul__(self, other: Any) -> Value:
        return _record("matmul", self, other)

    def __mul__(self, other: Any) -> Value:
        return _record("mul", self, other)

    def __add__(self, other: Any) -> Value:
        return _record("add", self, other)

    def __rmatmul__(self, other: Any) -> Value:
        return _record("matmul", other, self)

    def __getitem__(self, index: Any) -> Value:
        """x[:, first:end]: some of the columns, all rows."""
        rows, columns = index if isinstance(index, tuple) and len(index) == 2 else (index, slice(0))
        is_right = rows == slice(None) and isinstance(columns, slice) and columns.step is None
        if is_right and isinstance(columns.stop, int):
            first = 0 if columns.start is None else columns.start
            if isinstance(first, int) and 0 <= first < columns.stop:
                return _record("columns", self, between=(first, columns.stop))
        raise UsageError(
            f"{self.name}[..]: of a value of a program all rows of some columns can be taken, by "
            f"numbers from 0 on: {self.name}[:, first:end]; while it is traced it has no elements, "
            "and its width is not known yet",
            place=_user_place(),
        )

    __rmul__ = __mul__
    __radd__ = __add__

    def __bool__(self) -> bool:
        raise UsageError(
            f"{self.name} is asked whether it is true while the program is traced, when it has no "
            "values yet: decide by what Python knows, or outside of the program",
            place=_user_place(),
        )

    def __iter__(self) -> Any:
        raise UsageError(f"{self.name} has no parts while it is traced", place=_user_place())

    @classmethod
    def __torch_function__(cls, function: Any, *_: Any, **__: Any) -> Any:
        """torch asks this where one of its functions is given a value."""
        name = getattr(function, "__name__", function)
        raise UsageError(
            f"torch's {name} is given a value of a program, which has no elements while it is"
            " traced: use @, *, + and the functions of weft.compiler; tensors from outside are"
            " passed as parameters",
            place=_user_place(),
        )

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # Python itself asks for these
            raise AttributeError(attribute)
        raise UsageError(
            f"{self.name}.{attribute}: {HAS}",
            place=_user_place(),
        )


def _refused(sign: str) -> Callable[..., Any]:
    def refuse(one: Value, *_: Any) -> Any:
        raise UsageError(f"{sign} of {one.name}: {HAS}", place=_user_place())

    return refuse


for _name, _sign in {
    "sub": "-", "rsub": "-", "neg": "-", "truediv": "/", "rtruediv": "/", "pow": "**", "len": "len",
    "lt": "<", "gt": ">", "le": "<=", "ge": ">=", "float": "float", "int": "int",
}.items():  # fmt: skip
    setattr(Value, f"__{_name}__", _refused(_sign))


def split(x: Value, sizes: Sequence[int]) -> tuple[Value, ...]:
    """The columns of x, so many after so many: views, x[:, first:end] each.

        q, k, v = split(h @ wqkv, (q_columns, kv_columns, kv_columns))

    Of columns that are split over ranks each rank has its part of each: declare wqkv
    @ Pieces(1, (q_columns, kv_columns, kv_columns)), and q, k and v are @ Shard(1).
    """
    bounds = pairwise((0, *accumulate(sizes)))
    return tuple(x[:, first:end] for first, end in bounds)


def silu(x: Value) -> Value:
    """x * sigmoid(x), element by element."""
    return _record("silu", x)


def silu_mul(h: Value, *, side_by_side: bool = False) -> Value:
    """Gate and value from neighbouring columns: half as many columns come out.

        out = silu(h[:, 0::2]) * h[:, 1::2]
        out = silu(h[:, :n]) * h[:, n:]            (side_by_side, n columns come out)

    In pairs both lie in one tile and on one rank however columns are split, and a product's kernel
    does it in registers. `side_by_side` is for weights as checkpoints have them, gate then up:
    declare such a weight @ Halves(1), of which each rank has its part of gate, then its part of up.
    No weight is permuted; it is a step of its own behind the product, which reads h once more.
    """
    return _gate("silu", h, side_by_side)


def gelu(x: Value, *, approximate: str = "none") -> Value:
    """torch's: x * P(X <= x) of a normal X, or, "tanh", its approximation by a tanh."""
    return _record(_of_gelu(approximate), x)


def gelu_mul(h: Value, *, approximate: str = "none", side_by_side: bool = False) -> Value:
    """As silu_mul, with gelu of the gate."""
    return _gate(_of_gelu(approximate), h, side_by_side)


def _of_gelu(approximate: str) -> str:
    kinds = {"none": "gelu", "tanh": "gelu_tanh"}
    if approximate not in kinds:
        message = f"gelu has approximate={approximate!r}; it is one of {', '.join(kinds)}"
        raise UsageError(message, place=_user_place())
    return kinds[approximate]


def _gate(activation: str, h: Value, side_by_side: bool) -> Value:
    return _record(f"{activation}_mul{'_halves' if side_by_side else ''}", h)


def rms_norm(x: Value, weight: Value, *, eps: float = 1e-6, head: int | None = None) -> Value:
    """Each row by its root mean square, times a weight per column: weight is [1, columns].

        out = x / sqrt(mean(x**2 over columns) + eps) * weight

    `head`: of each head of so many columns by itself; weight is [1, head], the same for all heads.
    """
    if head is not None:
        return _record("head_norm", x, weight, eps=float(eps), head=head)
    return _record("rms_norm", x, weight, eps=float(eps))


def moe_route(logits: Value, *, top_k: int, split_experts: bool = False) -> Value:
    """The top_k experts of every token and where its rows are when all are sorted by expert.

    logits: [m, experts] @ Shard(0) or Replicate(). The result is a table, which the functions below
    take: how many rows an expert has is known on the device alone. Weights are the softmax over
    those taken. With split_experts it is @ ByExpert(): each rank's is of its own experts, whose
    rows gather_rows then gives, and scatter_rows gives a summand; ep_dispatch sends rows by it,
    and no choices.
    """
    return _record("ep_route" if split_experts else "moe_route", logits, top_k=top_k)


def gather_rows(x: Value, routing: Value) -> Value:
    """A row for each choice of each token, m * top_k in all, sorted by expert: its slots."""
    return _record("gather_rows", x, routing)


def matmul(x: Value, w: Value, *, dtype: str = "", scaling: str = "") -> Value:
    """x @ w for kernels alone, libraries know none of it: rounded to another dtype; of fp8, whose
    scales are passed beside the operands, one for each row and column or one for each block."""
    return _record("matmul", x, w, dtype=dtype, scaling=scaling)


def matmul_tn(x: Value, y: Value, *, dtype: str = "") -> Value:
    """x^T @ y, the sum over the rows of both: the gradient of a weight. Rows of one of them may be
    gathered meanwhile. `dtype`, for kernels alone, is what it is rounded to."""
    return _record("matmul_tn", x, y, dtype=dtype)


def grouped_matmul(rows: Value, experts: Value, routing: Value) -> Value:
    """Each slot's row times the matrix of its expert: [slots, k], [experts, k, n] -> [slots, n].

    Experts may be split along n, along k (then the result is to be summed), or, of rows by expert,
    along experts.
    """
    return _record("grouped_matmul", rows, experts, routing)


def scatter_rows(y: Value, routing: Value) -> Value:
    """Back from slots to tokens: the sum over a token's choices, each times its weight, in fp32."""
    return _record("scatter_rows", y, routing)


def ep_dispatch(x: Value, routing: Value) -> Value:
    """Shard(0) -> ByExpert(): gather_rows of all ranks' tokens, to the ranks that have their
    experts."""
    return _record("ep_dispatch", x, routing)


def ep_combine(y: Value, routing: Value) -> Value:
    """ByExpert() -> Shard(0): scatter_rows, to the ranks whose tokens they are."""
    return _record("ep_combine", y, routing)


def rope(x: Value, lengths: Value, *, head: int, base: float = 10000.0) -> Value:
    """Heads of `head` columns turned by position: row i stands at lengths[0, i] - 1.

    lengths: int32 [1, rows]. The halves of a head turn against each other, column j by the angle
    position * base ** (-2 j / head).
    """
    return _record("rope", x, lengths, head=head, base=float(base))


def rope_by_table(x: Value, positions: Value, table: Value, *, head: int) -> Value:
    """Heads of `head` columns turned by position, as models have it: with angles from a table.

        c, s = table[positions[0, i]].chunk(2);  a, b = x[i, h].chunk(2)
        out[i, h] = (a * c - b * s, b * c + a * s)

    positions: int32 [1, rows], from 0 on; table: float32 [positions, head], cosines of head / 2
    angles, then their sines: however the model scales its angles. Tokens may be split, then
    positions are @ Shard(1).
    """
    return _record("rope_by_table", x, positions, table, head=head)


def embedding(ids: Value, table: Value) -> Value:
    """Row ids[0, i] of a table [vocabulary, columns] for each row i; ids: int32 [1, rows].

    The table may be split by vocabulary, @ Shard(0): then each rank has a summand, which
    reduce_scatter or all_reduce sums, and an id beyond the vocabulary gives zeros. Ids may be split
    where all ranks have the table, @ Shard(1), for rows that are.
    """
    return _record("embedding", table, ids)


def kv_append(cache: Value, x: Value, lengths: Value) -> Value:
    """The cache with each sequence's new row, IN PLACE: read the result, not `cache`, afterwards.

    A cache has max_kv rows for each row of x; row lengths[0, i] - 1 of the i-th becomes x[i].
    """
    return _record("kv_append", cache, x, lengths)


def decode_attention(
    q: Value, k_cache: Value, v_cache: Value, lengths: Value, *, head: int
) -> Value:
    """Attention of one query a sequence, a row of q, over the first lengths[0, i] rows of its part
    of the caches. Heads of `head` columns; query heads share those of the caches in groups."""
    return _record("decode_attention", q, k_cache, v_cache, lengths, head=head)


def attention(q: Value, k: Value, v: Value, *, head: int, causal: bool = True) -> Value:
    """Attention of tokens, one a row, over all rows of k and v; causal: none sees a later one.

    Heads of `head` columns, scaled by 1 / sqrt(head); heads of q share those of k in groups.
    Tokens may be split: attention(q, all_gather(k), all_gather(v)) with all of them @ Shard(0).
    """
    return _record("attention", q, k, v, head=head, causal=bool(causal))


def all_gather(x: Value, *, dim: int = 0) -> Value:
    """Shard(dim) -> Replicate()"""
    return _record("all_gather", x, dim=dim)


def reduce_scatter(x: Value, *, dim: int = 0) -> Value:
    """Partial() -> Shard(dim): the sum over ranks, of which each keeps its part."""
    return _record("reduce_scatter", x, dim=dim)


def all_to_all(x: Value, *, dim: int = 1) -> Value:
    """Shard(1 - dim) -> Shard(dim): of each rank's part every rank gets its own. By dim=1 ranks
    that have some tokens with all heads get all tokens with some heads; dim=0 is the way back."""
    return _record("all_to_all", x, dim=dim)


def all_reduce(x: Value) -> Value:
    """Partial() -> Replicate(): the sum over ranks."""
    return _record("all_reduce", x)


def _record(kind: str, *operands: Any, **fields: Any) -> Value:
    """Raises  UsageError: what is no value of this program"""
    values = [one for one in operands if isinstance(one, Value)]
    for one in operands:
        if not isinstance(one, Value):
            raise UsageError(
                f"{kind} is given {one!r}; it takes values of the program: pass tensors as its "
                "parameters",
                place=_user_place(),
            )
        if one._trace is not values[0]._trace:
            raise UsageError(f"{kind}: {one.name} is of another program", place=_user_place())
    return values[0]._trace.add(kind, *values, **fields)


def program(
    *,
    mesh: str,
    settings: Settings | None = None,
    lowering: str | Persistent | None = None,
    **parameters: Type,
) -> Callable[[Callable[..., Any]], Compiled]:
    """Trace the decorated function and compile it for `mesh`, any number of ranks.

    `parameters` says of each parameter of the function its dtype, sizes and placement; `settings`
    what the compiler shall not choose, `lowering` how it is run: see Compiled.options, which
    changes both. A mesh has one axis, given by its name; the world of a call
    has its ranks.

    Raises  UsageError, ShapeError, PlacementError: a program that cannot be; at the user's line
    """

    def compile_it(function: Callable[..., Any]) -> Compiled:
        traced = trace(function, mesh, parameters)
        if given := [name for name, one in parameters.items() if one.dtype == TABLE]:
            raise UsageError(
                f"{traced.name}: {', '.join(given)} is declared as a table; tables are what "
                "moe_route makes within the program", place=traced.place,
            )  # fmt: skip
        compiled = Compiled(traced, settings, lowering)
        functools.update_wrapper(compiled, function)
        return compiled

    return compile_it


def trace(
    function: Callable[..., Any], mesh: str, parameters: dict[str, Type], **constants: Any
) -> Program:
    """The Task IR of `function`, at stage traced; `constants` are its parameters that are no
    tensors. Raises  UsageError"""
    code = inspect.unwrap(function).__code__
    name = function.__name__ if function.__name__.isidentifier() else "program"
    here = Place((Frame(code.co_filename, code.co_firstlineno, function.__name__),))
    if not isinstance(mesh, str) or not mesh.isidentifier():
        raise UsageError(
            f"{name} has mesh={mesh!r}; a program is over one axis, given by a name: mesh='tp'. Of "
            "a mesh of more axes name the one over which its tensors are split, and call it with "
            "the world of that axis: weft.init(group=device_mesh['tp'])",
            place=here,
        )
    wanted = [one for one in inspect.signature(function).parameters if one not in constants]
    if taken := {"world", *MOVED} & {*wanted}:
        message = f"{name} has a parameter {', '.join(sorted(taken))}, which a call has for itself"
        raise UsageError(f"{message}; call it otherwise", place=here)
    if set(wanted) != set(parameters):
        raise UsageError(
            f"{name} has the parameters {', '.join(wanted) or 'none'}, but declared are "
            f"{', '.join(parameters) or 'none'}: each needs a Tensor(dtype, sizes, placement)",
            place=here,
        )
    traced = Trace()
    inputs = {}
    for one in wanted:
        kind = parameters[one]
        if not isinstance(kind, Type):
            raise UsageError(f"{name}: {one} is declared as {kind!r}, not a Tensor", place=here)
        try:
            kind = _declared(kind)
        except ValueError as error:
            raise UsageError(f"{name}: {one} is declared {error}", place=here) from None
        inputs[one] = traced.add("input", name=one, type=kind, place=here)
    returned = function(**inputs, **constants)
    results = returned if isinstance(returned, tuple) else (returned,)
    if not results or not all(isinstance(one, Value) for one in results):
        message = f"{name} returns a {type(returned).__name__}"
        raise UsageError(
            f"{message}; it returns a value of itself, or a tuple of these", place=here
        )
    names = tuple(one.name for one in results)
    return Program(name, mesh, tuple(_needed(traced.tasks, names)), names, place=here)


def _declared(kind: Type) -> Type:
    """As declared, with torch's placements as weft's, and dimensions counted from the first.

    Raises  ValueError: sizes that are none, or a placement that is none of such a tensor
    """
    for size in kind.sizes:
        is_number = isinstance(size, int) and not isinstance(size, bool) and size >= 0
        if not (is_number or isinstance(size, Times) or (isinstance(size, str) and size)):
            raise ValueError(f"with a size {size!r}; sizes are whole numbers from 0 on, or names")
    given = Replicate() if kind.placement is None else kind.placement
    where, count = dtensors.placement_of(given), len(kind.sizes)
    if where is None:
        raise ValueError(f"@ {given!r}; import Shard, Replicate, .. from weft.compiler")
    if isinstance(where, Shard | Halves | Pieces):
        if not -count <= where.dim < count:
            raise ValueError(f"@ {text.value(where)}, but has {count} dimensions")
        where = replace(where, dim=where.dim % count)
    return Type(kind.dtype, kind.sizes, where)


def _needed(tasks: list[Task], results: Iterable[str]) -> list[Task]:
    """Inputs, and the tasks that a result depends on: what nobody reads is not run."""
    wanted = set(results)
    for task in reversed(tasks):
        if task.name in wanted:
            wanted.update(task.operands)
    return [task for task in tasks if task.name in wanted or task.kind == "input"]


def _user_place() -> Place:
    """The call chain within the function that is traced, its own line first."""
    frames: list[Frame] = []
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not trace.__code__:
        code = frame.f_code
        if code.co_filename != __file__:
            frames.append(Frame(code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back
    return Place(tuple(reversed(frames)))
