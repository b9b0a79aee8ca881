"""Inputs of programs that do not lie in rows one behind the other: read in place, copied, refused;
each lowering gives what it gives for the same numbers in rows."""

from __future__ import annotations

import pytest
import torch
from random_programs import global_inputs, of_rank

import weft
import weft.megakernel
from weft.base.dtypes import tolerance
from weft.base.errors import ShapeError
from weft.compiler import (
    Partial,
    Replicate,
    Settings,
    Shard,
    Tensor,
    all_gather,
    all_reduce,
    gather_rows,
    grouped_matmul,
    layouts,
    libraries,
    moe_route,
    program,
    reduce_scatter,
    rms_norm,
    scatter_rows,
    silu_mul,
)

M, K, F, EXPERTS = 12, 16, 24, 3


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cache"))


def of(*sizes, dtype: str = "float32") -> Tensor:
    return Tensor(dtype, sizes[:-1], sizes[-1])


@program(mesh="tp", x=of("m", K, Shard(0)), w1=of(K, 2 * F, Shard(1)), w2=of(F, K, Shard(0)))
def mlp(x, w1, w2):
    return reduce_scatter(silu_mul(all_gather(x) @ w1) @ w2)


@program(mesh="tp", a=of("m", F, Shard(1)), b=of(F, K, Shard(0)), scale=of("m", K, Replicate()))
def scaled(a, b, scale):
    """A left operand that is an input, and what is read in an epilogue."""
    return all_reduce(a @ b) * scale


@program(mesh="tp", x=of("m", K, Shard(0)), w=of(K, F, Shard(1)), y=of("m", F, Shard(1)))
def epilogue(x, w, y):
    return (all_gather(x) @ w) * y


@program(
    mesh="tp", x=of("m", K, Partial()), residual=of("m", K, Replicate()),
    weight=of(1, K, Replicate()),
)  # fmt: skip
def normed(x, residual, weight):
    return rms_norm(all_reduce(x) + residual, weight)


@program(
    mesh="tp", x=of("m", K, Shard(0)), logits=of("m", EXPERTS, Shard(0)),
    up=of(EXPERTS, K, 2 * F, Shard(2)), down=of(EXPERTS, F, K, Shard(1)),
)  # fmt: skip
def mixture(x, logits, up, down):
    routing = moe_route(logits, top_k=2)
    h = silu_mul(grouped_matmul(gather_rows(all_gather(x), routing), up, routing))
    return reduce_scatter(scatter_rows(grouped_matmul(h, down, routing), routing))


def padded(t: torch.Tensor) -> torch.Tensor:
    """Rows with something between them."""
    wide = torch.full((*t.shape[:-1], t.shape[-1] + 8), float("nan"))
    wide[..., : t.shape[-1]] = t
    return wide[..., : t.shape[-1]]


def sliced(t: torch.Tensor) -> torch.Tensor:
    """Columns of a wider tensor, from some column on, of a length that divides by nothing."""
    wide = torch.full((*t.shape[:-1], t.shape[-1] + 7), float("nan"))
    wide[..., 3 : 3 + t.shape[-1]] = t
    return wide[..., 3 : 3 + t.shape[-1]]


def offset(t: torch.Tensor) -> torch.Tensor:
    """Rows one behind the other that begin at no multiple of 16 bytes."""
    flat = torch.full((t.numel() + 1,), float("nan"))
    flat[1:] = t.flatten()
    return flat[1:].view(t.shape)


def transposed(t: torch.Tensor) -> torch.Tensor:
    return t.mT.contiguous().mT


def transposed_and_padded(t: torch.Tensor) -> torch.Tensor:
    return padded(t.mT.contiguous()).mT


def every_other(t: torch.Tensor) -> torch.Tensor:
    """Neither rows nor columns have their elements side by side."""
    wide = torch.full((2 * t.shape[-2], 2 * t.shape[-1]), float("nan"))
    wide[::2, ::2] = t
    return wide[::2, ::2]


OF_ROWS = (padded, sliced, offset, transposed, transposed_and_padded, every_other)
OF_WEIGHTS = (padded, sliced, offset, transposed, transposed_and_padded)


def parts(made, rank: int, num_ranks: int, seed: int = 0) -> tuple[dict, dict]:
    """All ranks' tensors, and this rank's."""
    traced = made.stages.program
    whole = global_inputs(traced, {"m": M}, seed)
    mine = {
        name: of_rank(traced.task(name).type, one, {"m": M}, rank, num_ranks).contiguous()
        for name, one in whole.items()
    }
    return whole, mine


def is_close(made, got: torch.Tensor, whole: dict, rank: int, num_ranks: int) -> bool:
    (want,) = libraries.reference(made.stages.program, whole)
    kind = made.stages.program.task(made.stages.program.results[0]).type
    want = of_rank(kind, want, {"m": M}, rank, num_ranks)
    return bool((got - want).norm() <= tolerance("float32", 256) * want.norm())


LOWERINGS = ("unfused", "overlapped", "persistent")


def calls_alike(made, cases: dict[str, tuple], lowerings=LOWERINGS) -> None:
    """On one rank: of each lowering and each input's layouts the result is that of rows."""
    world = weft.init()
    whole, mine = parts(made, world.rank, world.num_ranks)
    for lowering in lowerings:

        def call(given, lowering=lowering):
            return made.options(lowering=lowering)(*given.values(), world=world, m=M)

        expected = call(mine)
        assert is_close(made, expected, whole, world.rank, world.num_ranks), lowering
        for name, ways in cases.items():
            for way in ways:
                given = {**mine, name: way(mine[name])}
                assert torch.equal(given[name], mine[name])
                got = call(given)
                assert torch.equal(got, expected), (lowering, name, way.__name__)
    world.close()


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["sm_push", "ce_push"])
def test_gathered_rows_and_weights(ranks, engine):
    made = mlp.options(settings=Settings(engines={"gathered": engine}))
    cases = {"x": OF_ROWS, "w1": OF_WEIGHTS, "w2": OF_WEIGHTS}
    ranks(lambda: calls_alike(made, cases, ("unfused", "overlapped")), 2)


@pytest.mark.slow
def test_the_persistent_kernel(ranks):
    cases = {"x": OF_ROWS, "w1": (offset, transposed), "w2": (offset, transposed)}
    ranks(lambda: calls_alike(mlp, cases, ("persistent",)), 2)
    cases = {"a": OF_ROWS, "b": (transposed,), "scale": OF_ROWS}
    ranks(lambda: calls_alike(scaled, cases, ("persistent",)), 2)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["sm_push", "ce_push"])
def test_a_left_operand_that_is_an_input(ranks, engine):
    @program(mesh="tp", a=of("m", F, Shard(1)), b=of(F, K, Shard(0)))
    def gemm_rs(a, b):
        return reduce_scatter(a @ b)

    made = gemm_rs.options(settings=Settings(engines={"scattered": engine}))
    cases = {"a": OF_ROWS, "b": OF_WEIGHTS}
    ranks(lambda: calls_alike(made, cases, ("unfused", "overlapped")), 2)


@pytest.mark.slow
def test_what_epilogues_and_rows_read(ranks):
    def main():
        calls_alike(scaled, {"a": OF_ROWS, "b": OF_WEIGHTS, "scale": OF_ROWS},
                    ("unfused", "overlapped"))  # fmt: skip

    ranks(main, 2)
    cases = {"x": OF_ROWS, "w": OF_WEIGHTS, "y": OF_ROWS}
    ranks(lambda: calls_alike(epilogue, cases, ("unfused", "overlapped")), 2)


@pytest.mark.few(1)
@pytest.mark.parametrize("engine", ["sm_push", "one_shot_ll", "two_shot_ll"])
def test_rows_that_are_summed(ranks, engine):
    made = normed.options(settings=Settings(engines={"reduced": engine}))
    cases = {"x": OF_ROWS, "residual": OF_ROWS, "weight": (padded, offset, transposed)}
    ranks(lambda: calls_alike(made, cases, ("unfused", "overlapped")), 2)


@pytest.mark.slow
def test_products_by_tables(ranks):
    cases = {"x": (padded, transposed), "logits": (padded, transposed),
             "up": (offset, transposed), "down": (offset, transposed)}  # fmt: skip
    ranks(lambda: calls_alike(mixture, cases, ("overlapped",)), 2)


def test_rows_that_are_all_one_row(ranks):
    """Expanded: strides of 0."""

    def main():
        world = weft.init()
        row = torch.randn(1, K)
        _, mine = parts(mlp, world.rank, 2)
        rows = M // 2
        for lowering in LOWERINGS:

            def call(x, lowering=lowering):
                made = mlp.options(lowering=lowering)
                return made(x, mine["w1"], mine["w2"], world=world)

            same = call(row.expand(rows, K))
            assert torch.equal(same, call(row.expand(rows, K).contiguous()))
            assert same.isfinite().all()
        world.close()

    ranks(main, 2)


@pytest.mark.slow
def test_other_strides_at_one_address(ranks):
    """Often enough for calls to be replayed: what was recorded for one layout serves no other."""

    def main():
        world = weft.init()
        memory = torch.randn(2 * K * 2 * F)
        _, mine = parts(mlp, world.rank, 2)
        shape = mine["w1"].shape
        weights = [
            memory.as_strided(shape, (shape[1], 1)), memory.as_strided(shape, (2 * shape[1], 1)),
            memory.as_strided(shape, (1, shape[0])), memory.as_strided(shape, (1, shape[0] + 4)),
        ]  # fmt: skip
        x_memory = torch.randn(4 * M * K)
        rows = mine["x"].shape
        xs = [x_memory.as_strided(rows, (K, 1)), x_memory.as_strided(rows, (2 * K, 1)),
              x_memory.as_strided(rows, (1, rows[0]))]  # fmt: skip
        assert len({one.data_ptr() for one in (*weights, memory)}) == 1

        def call(x, w1, lowering):
            return mlp.options(lowering=lowering)(x, w1, mine["w2"], world=world)

        for _ in range(5):
            for x, w1 in ((xs[0], w) for w in weights):
                got, want = call(x, w1, "overlapped"), call(x, w1, "unfused")
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
            for x in xs:
                got, want = call(x, weights[0], "overlapped"), call(x, weights[0], "unfused")
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        world.close()

    ranks(main, 2)


def test_a_weight_that_would_be_copied_at_each_call_is_refused(ranks):
    def main():
        world = weft.init()
        _, mine = parts(mlp, world.rank, 2)

        def call(w1, lowering):
            return mlp.options(lowering=lowering)(mine["x"], w1, mine["w2"], world=world)

        whole = call(mine["w1"], "unfused")
        for way, lowerings in ((every_other, ("overlapped", "persistent")),
                               (padded, ("persistent",))):  # fmt: skip
            given = way(mine["w1"])
            assert torch.equal(call(given, "unfused"), whole)
            for lowering in lowerings:
                told = r"mlp: w1 of shape \(16, 24\) has strides .* pass w1.contiguous"
                with pytest.raises(ShapeError, match=told) as caught:
                    call(given, lowering)
                assert caught.value.place.outermost.file == __file__
        with pytest.raises(ShapeError, match="w1 of shape .* would be copied"):
            call(torch.randn(1, 1).expand(mine["w1"].shape), "overlapped")
        world.close()

    ranks(main, 2)


@pytest.mark.parametrize(
    ("strides", "found"),
    [
        ((5, 1), (False, 5)), ((8, 1), (False, 8)), ((1, 4), (True, 4)), ((1, 9), (True, 9)),
        ((10, 2), None), ((0, 1), None), ((1, 1), None), ((2, 1), None),
    ],
)  # fmt: skip
def test_how_a_matrix_lies(strides, found):
    matrix = torch.empty(100).as_strided((4, 5), strides)
    assert layouts.rows_of(matrix) == found


def test_of_one_row_or_column_a_stride_says_nothing():
    for shape, strides, found in (
        ((1, 5), (99, 1), (False, 5)), ((1, 5), (1, 7), (True, 7)), ((4, 1), (1, 99), (False, 1)),
        ((4, 1), (3, 1), (False, 3)), ((1, 1), (7, 9), (False, 1)),
    ):  # fmt: skip
        assert layouts.rows_of(torch.empty(500).as_strided(shape, strides)) == found
