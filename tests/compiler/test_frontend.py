"""`weft.program`: what is traced, and what is refused, at the user's line."""

from __future__ import annotations

import linecache
import re
from dataclasses import replace

import pytest
import torch
import torch.distributed.tensor as distributed

import weft
from weft.base.errors import DtypeError, PlacementError, ShapeError, UsageError
from weft.compiler import (
    Partial,
    Pieces,
    Replicate,
    Shard,
    Tensor,
    all_gather,
    all_reduce,
    embedding,
    gelu,
    program,
    reduce_scatter,
    rms_norm,
    rope_by_table,
    silu,
    silu_mul,
    split,
)

X = Tensor("float32", ("m", 8), Shard(0))
W = Tensor("float32", (8, 12), Shard(1))


def line_of(error: pytest.ExceptionInfo) -> str:
    """The source line that the error names first: the user's."""
    frame = error.value.place.outermost
    assert frame is not None and frame.file == __file__
    return linecache.getline(frame.file, frame.line).strip()


def test_the_root_has_it():
    assert weft.program is program


def test_a_function_becomes_tasks():
    @program(mesh="tp", x=X, w=W)
    def project(x, w):
        return all_gather(x) @ w

    kinds = [task.kind for task in project.stages.program.tasks]
    assert kinds == ["input", "input", "all_gather", "matmul"]
    assert project.stages.program.mesh == "tp" and project.__name__ == "project"
    product = project.stages.program.task("product")
    assert product.type == Tensor("float32", ("m", 12), Shard(1))
    assert linecache.getline(__file__, product.place.frames[0].line).strip().startswith("return")


def test_places_are_call_chains():
    def gathered(x):
        return all_gather(x)

    @program(mesh="tp", x=X, w=W)
    def project(x, w):
        return gathered(x) @ w

    place = project.stages.program.task("gathered").place
    assert [frame.function for frame in place.frames] == ["project", "gathered"]


def test_what_nobody_reads_is_left_out():
    @program(mesh="tp", x=X, w=W)
    def project(x, w):
        everything = all_gather(x)
        silu(everything)
        return everything, everything @ w

    names = [task.name for task in project.stages.program.tasks]
    assert names == ["x", "w", "gathered", "product"]
    assert project.stages.program.results == ("gathered", "product")


def test_placement_defaults_to_replicate():
    @program(mesh="tp", x=X, w=Tensor("float32", (8, 12)))
    def project(x, w):
        return x @ w

    assert project.stages.program.task("product").type.placement == Shard(0)


# (operations, kind of error, part of its text, part of the user's line)
REFUSED = [
    (lambda x, w: x @ w, PlacementError,
     "matmul cannot take x @ Shard(0) and w @ Shard(1); w must be Replicate(): "
     "all_gather(w, dim=1) or declare it so;  or x must be Replicate(): all_gather(x, dim=0) or "
     "declare it so\n"),
    (lambda x, w: reduce_scatter(all_gather(x) @ w), PlacementError,
     "reduce_scatter cannot take product @ Shard(1); it takes Partial()"),
    (lambda x, w: silu(x @ (all_gather(x) @ w)), ShapeError, "matmul: x has 8 columns but product"),
    (lambda x, w: rms_norm(x, w), ShapeError, "w must be (1, 8); it is (8, 12)"),
    (lambda x, w: all_gather(x) + w, ShapeError, "add: gathered is (m, 8), w is (8, 12)"),
    (lambda x, w: silu_mul(w @ w), ShapeError, "w has 12 columns but w has 8 rows"),
    (lambda x, w: gelu(x, approximate="erf"), UsageError,
     "gelu has approximate='erf'; it is one of none, tanh"),
    (lambda x, w: x * 2, UsageError, "mul is given 2; it takes values of the program"),
    (lambda x, w: 2 @ x, UsageError, "matmul is given 2"),
    (lambda x, w: x - w, UsageError, "- of x: a value of a program has @, *, + and the functions"),
    (lambda x, w: -x, UsageError, "- of x: a value of a program has @"),
    (lambda x, w: x / 2, UsageError, "/ of x: a value of a program has @"),
    (lambda x, w: x * len(x), UsageError, "len of x: a value of a program has @"),
    (lambda x, w: x if x else w, UsageError, "x is asked whether it is true"),
    (lambda x, w: list(x), UsageError, "x has no parts"),
    (lambda x, w: x.t() @ w, UsageError, "x.t: a value of a program has @, *, +"),
    (lambda x, w: torch.relu(x), UsageError, "torch's relu is given a value of a program"),
]  # fmt: skip


@pytest.mark.parametrize(("function", "error", "told"), REFUSED, ids=range(len(REFUSED)))
def test_refusals_name_the_line(function, error: type, told: str):
    with pytest.raises(error) as caught:
        program(mesh="tp", x=X, w=W)(function)
    assert told in str(caught.value)
    assert "lambda x, w" in line_of(caught)


def test_summands_are_not_for_silu():
    h = Tensor("float32", ("m", 8), Shard(1))
    w = Tensor("float32", (8, 6), Shard(0))
    with pytest.raises(PlacementError) as caught:

        @program(mesh="tp", h=h, w=w)
        def wrong(h, w):
            return silu(h @ w)

    told = str(caught.value)
    assert "product @ Partial()" in told and "all_reduce(product)" in told
    assert "reduce_scatter(product, dim=0)" in told and "reduce_scatter(product, dim=1)" in told
    assert line_of(caught) == "return silu(h @ w)"


def test_one_row_for_all_rows():
    """On either side; it lies as the columns that it is for."""
    bias = Tensor("float32", (1, 12), Shard(1))

    @program(mesh="tp", x=X, w=W, bias=bias)
    def biased(x, w, bias):
        h = all_gather(x) @ w
        return h + bias, bias * h, bias + bias

    tasks = biased.stages.program.tasks[-3:]
    assert [(one.kind, one.operands) for one in tasks] == [
        ("add_row", ("product", "bias")),
        ("mul_row", ("product", "bias")),
        ("add", ("bias", "bias")),
    ]
    assert tasks[0].type == Tensor("float32", ("m", 12), Shard(1))
    h, w = Tensor("float32", ("m", 8), Shard(1)), Tensor("float32", (8, 6), Shard(0))
    told = r"add_row cannot take product @ Partial\(\) and b .* all_reduce\(product\);"
    with pytest.raises(PlacementError, match=told):
        program(mesh="tp", h=h, w=w, b=Tensor("float32", (1, 6)))(lambda h, w, b: h @ w + b)
    with pytest.raises(ShapeError, match=r"x has 8 columns, so bias must be \(1, 8\); it is"):
        program(mesh="tp", x=X, bias=bias)(lambda x, bias: x + bias)


SOME_COLUMNS = [
    (lambda x, w: x[0], UsageError, "x[..]: of a value of a program all rows of some columns"),
    (lambda x, w: x[:, 2:], UsageError, "x[:, first:end]; while it is traced"),
    (lambda x, w: x[:, -3:4], UsageError, "by numbers from 0 on"),
    (lambda x, w: x[:, 0:8:2], UsageError, "x[:, first:end]"),
    (lambda x, w: x[:, 4:9], ShapeError, "x has 8 columns, of which 4 to 9 are asked for"),
    (lambda x, w: w[:, :6], PlacementError,
     "declare the weight that w is made of @ Pieces(1, (..)), and take one of its pieces"),
    (lambda x, w: split(all_gather(x) @ w, (8, 4))[1], PlacementError,
     "all_gather(product, dim=1)"),
]  # fmt: skip


@pytest.mark.parametrize(("function", "error", "told"), SOME_COLUMNS, ids=range(len(SOME_COLUMNS)))
def test_columns_that_cannot_be_taken(function, error: type, told: str):
    with pytest.raises(error, match=re.escape(told)) as caught:
        program(mesh="tp", x=X, w=W)(function)
    assert "lambda x, w" in line_of(caught)


OF_HEADS = [
    (lambda x, p, t: rms_norm(x, t, head=6), ShapeError, "x has 8 columns; heads have head=6"),
    (lambda x, p, t: rms_norm(x, t, head=4), ShapeError,
     "head_norm: t is (9, 4); of heads of 4 columns it must be (1, 4)"),
    (lambda x, p, t: rope_by_table(x, t, t, head=4), ShapeError,
     "t is float32[9, 4] @ Replicate(); it must be int32"),
    (lambda x, p, t: rope_by_table(x, p, t, head=8), ShapeError,
     "t has 4 columns; of heads of 8 it has as many: cosines, then sines"),
    (lambda x, p, t: rope_by_table(x, p, t, head=4), PlacementError,
     "p must be Shard(1): declare it so"),
    (lambda x, p, t: embedding(x, t), ShapeError, "embedding: x is float32[m, 8]"),
    (lambda x, p, t: embedding(p, x), ShapeError, "it takes a table [vocabulary, columns]"),
]  # fmt: skip


@pytest.mark.parametrize(("function", "error", "told"), OF_HEADS, ids=range(len(OF_HEADS)))
def test_heads_positions_and_tables_that_do_not_fit(function, error: type, told: str):
    given = {"p": Tensor("int32", (1, "m")), "t": Tensor("float32", (9, 4))}
    with pytest.raises(error, match=re.escape(told)) as caught:
        program(mesh="tp", x=X, **given)(function)
    assert "lambda x, p, t" in line_of(caught)


def test_pieces_are_taken_whole():
    in_pieces = Tensor("float32", (8, 12), Pieces(1, (8, 4)))
    made = program(mesh="tp", x=X, w=in_pieces)(lambda x, w: split(all_gather(x) @ w, (8, 4)))
    kinds = [one.type for one in made.stages.program.tasks[-2:]]
    assert kinds == [Tensor("float32", ("m", size), Shard(1)) for size in (8, 4)]
    with pytest.raises(PlacementError, match=re.escape("or take one of its pieces, [:, 0:8]")):
        program(mesh="tp", x=X, w=in_pieces)(lambda x, w: (all_gather(x) @ w)[:, :6])
    with pytest.raises(PlacementError, match=re.escape("split(product, (8, 4)), piece by piece")):
        program(mesh="tp", x=X, w=in_pieces)(lambda x, w: silu_mul(all_gather(x) @ w))
    with pytest.raises(ShapeError, match="pieces of 12 do not fill it"):
        program(mesh="tp", w=Tensor("float32", (8, 13), Pieces(1, (8, 4))))(lambda w: w)


def test_each_remedy_is_one():
    """What the error above proposes compiles."""
    h, w = Tensor("float32", ("m", 8), Shard(1)), Tensor("float32", (8, 6), Shard(0))
    for remedy in (all_reduce, reduce_scatter, lambda x: reduce_scatter(x, dim=1)):
        program(mesh="tp", h=h, w=w)(_with(remedy))
    program(mesh="tp", x=X, w=W)(lambda x, w: x @ all_gather(w, dim=1))
    program(mesh="tp", x=X, w=W)(lambda x, w: all_gather(x) @ w)


def test_pairs_need_a_width_that_is_known():
    for columns in (7, "n"):
        with pytest.raises(ShapeError, match="takes pairs of gate and value"):
            program(mesh="tp", h=Tensor("float32", ("m", columns), Partial()))(
                lambda h: silu_mul(all_reduce(h))
            )


def test_parameters_and_declarations_agree():
    with pytest.raises(UsageError, match="has the parameters x, but declared are x, w"):
        program(mesh="tp", x=X, w=W)(lambda x: all_gather(x))
    with pytest.raises(UsageError, match="x is declared as a table; tables are what"):
        program(mesh="tp", x=Tensor("table", ("m", 2, 8), Replicate()))(lambda x: x)
    with pytest.raises(UsageError, match="x is declared as 3, not a Tensor"):
        program(mesh="tp", x=3)(lambda x: x)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="it returns a value of itself, or a tuple of these"):
        program(mesh="tp", x=X)(lambda x: None)
    with pytest.raises(UsageError, match="returns a list; it returns a value of itself, or a tupl"):
        program(mesh="tp", x=X)(lambda x: [x, x])


@pytest.mark.parametrize(
    ("sizes", "placement", "told"),
    [
        (("m", 8), Shard(5), r"x is declared @ Shard\(5\), but has 2 dimensions"),
        (("m", 8), Shard(-3), r"x is declared @ Shard\(-3\), but has 2 dimensions"),
        (("m", 8), "Shard(0)", r"x is declared @ 'Shard\(0\)'; import Shard, Replicate"),
        (("m", 8.5), Shard(0), "x is declared with a size 8.5; sizes are whole numbers from 0 on"),
        (("m", -8), Shard(0), "x is declared with a size -8; sizes are whole numbers from 0 on"),
    ],
)
def test_a_declaration_that_is_none_of_a_tensor(sizes, placement, told):
    with pytest.raises(UsageError, match=told):
        program(mesh="tp", x=Tensor("float32", sizes, placement))(lambda x: x)


def test_placements_as_torch_has_them():
    """Its classes, and dimensions from the last one on."""
    theirs = [distributed.Shard(0), distributed.Replicate(), distributed.Partial(), Shard(-2)]
    ours = [Shard(0), Replicate(), Partial(), Shard(0)]
    for given, placement in zip(theirs, ours, strict=True):
        made = program(mesh="tp", x=Tensor("float32", ("m", 8), given))(lambda x: x)
        assert made.stages.program.task("x").type.placement == placement


def test_a_value_of_another_program_is_refused():
    kept = []
    program(mesh="tp", x=X)(lambda x: kept.append(x) or x)
    with pytest.raises(UsageError, match="x is of another program"):
        program(mesh="tp", y=Tensor("float32", ("m", 8), Replicate()))(lambda y: y + kept[0])


def _with(remedy):
    return lambda h, w: silu(remedy(h @ w))


@pytest.mark.parametrize("dtype", [torch.bfloat16, "bf16", "torch.bfloat16", "bfloat16"])
def test_dtypes_as_torch_or_the_command_line_has_them(dtype):
    kind = Tensor(dtype, ("m", 8), Shard(0))
    assert kind == Tensor("bfloat16", ("m", 8), Shard(0)) and kind.dtype == "bfloat16"
    assert kind.as_text() == "bfloat16[m, 8] @ Shard(0)"
    assert hash(kind) == hash(Tensor("bfloat16", ["m", 8], Shard(0)))
    assert replace(kind, placement=None) == Tensor(dtype, ("m", 8))


def test_a_dtype_that_weft_does_not_know():
    for dtype in ("bfloat17", torch.complex64):
        with pytest.raises(DtypeError, match=f"unknown dtype '{dtype}'; weft knows fp16, bf16"):
            Tensor(dtype, ("m", 8))


@pytest.mark.parametrize("mesh", [("dp", "tp"), ["tp"], "", "dp, tp", None])
def test_a_mesh_of_other_than_one_axis_is_refused(mesh):
    def project(x, w):
        return all_gather(x) @ w

    told = re.escape(f"project has mesh={mesh!r}; a program is over one axis")
    with pytest.raises(UsageError, match=told) as caught:
        program(mesh=mesh, x=X, w=W)(project)
    assert line_of(caught).startswith("def project")


def test_parameters_that_a_call_has_for_itself():
    with pytest.raises(UsageError, match="has a parameter world, which a call has for itself"):

        @program(mesh="tp", x=X, world=W)
        def project(x, world):
            return all_gather(x) @ world


def test_a_call_by_keywords(ranks):
    @program(mesh="tp", x=X, w=W)
    def project(x, w):
        return all_gather(x) @ w

    def main():
        world = weft.init()
        given = {"world": world}
        x, w = torch.randn(3, 8), torch.randn(8, 6)
        for lowering in ("unfused", "overlapped"):
            made = project.options(lowering=lowering)
            wanted = made(x, w, **given)
            assert torch.equal(made(w=w, x=x, **given), wanted)
            assert torch.equal(made(x, w=w, m=6, **given), wanted)
        for call, told in (
            (lambda: project(x, x=x, w=w, **given), "takes x, w; given is x both by place and by"),
            (lambda: project(x=x, **given), "project takes x, w; w is missing"),
            (lambda: project(x, **given), "project takes x, w; given are x\n"),
            (lambda: project(x, w, v=w, **given), "has no parameter or size v; its parameters are"),
            (
                lambda: project(x, w, lowering="unfused", **given),
                r"lowering= is an option of the program: project.options\(lowering='unfused'\)",
            ),
            (lambda: project(x, w, collectives=weft.ops, **given), "operators are found by"),
            (lambda: project(x, w, n=3, **given), "parameter or size n; .* are x, w, its sizes m"),
        ):
            with pytest.raises(UsageError, match=told):
                call()
        with pytest.raises(UsageError, match="project: w is of type NoneType; pass a torch tensor"):
            project(x, None, **given)
        for m in (-1, "6"):
            with pytest.raises(ShapeError, match="project: m=.*; a size is a whole number from 0"):
                project(x, w, m=m, **given)
        world.close()

    ranks(main, 2)


def test_a_parameter_that_is_called_like_a_size(ranks):
    @program(mesh="tp", m=Tensor("float32", ("m", 4), Replicate()))
    def same(m):
        return m + m

    def main():
        world = weft.init()
        m = torch.ones(3, 4)
        given = {"world": world}
        assert torch.equal(same(m=m, **given), 2 * m)
        assert torch.equal(same(m, m=3, **given), 2 * m)
        world.close()

    ranks(main, 1)
