"""What models are made of: each word as every lowering does it, its gradients, awkward shapes."""

from __future__ import annotations

import pytest
import torch
from random_programs import of_rank
from test_gradients import check
from test_unfused import run

import weft
import weft.megakernel
from weft.base.errors import ShapeError
from weft.base.target import TARGETS
from weft.compiler import (
    Compiled,
    Facts,
    Halves,
    Partial,
    Pieces,
    Replicate,
    Shard,
    Tensor,
    all_gather,
    all_reduce,
    embedding,
    gelu,
    gelu_mul,
    program,
    reduce_scatter,
    rms_norm,
    rope,
    rope_by_table,
    silu,
    silu_mul,
    split,
)
from weft.compiler.binding import check_pairs
from weft.compiler.lower import kernels, source
from weft.compiler.lower.signature import Specialised, record
from weft.ir import core
from weft.language import triton_api
from weft.plan.program_cards import whole_of
from weft.tools.check import Work, check_on_gpus
from weft.tools.main import main as weft_verb
from weft.tools.programs import find_op
from weft.verify import compiled

K, N = 12, 12
LOWERINGS = ("unfused", "overlapped", "persistent")


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cache"))


def of(*sizes, dtype: str = "fp32") -> Tensor:
    return Tensor(dtype, sizes[:-1], sizes[-1])


@program(
    mesh="tp", x=of("m", K, Shard(0)), w1=of(K, N, Shard(1)), b1=of(1, N, Shard(1)),
    w2=of(N, K, Shard(0)), b2=of(1, K, Replicate()),
)  # fmt: skip
def bias(x, w1, b1, w2, b2):
    return reduce_scatter(silu(all_gather(x) @ w1 + b1) @ w2) + b2


@program(
    mesh="tp", x=of("m", K, Shard(0)), w1=of(K, 2 * N, Halves(1)), b1=of(1, 2 * N, Halves(1)),
    w2=of(N, K, Shard(0)),
)  # fmt: skip
def bias_of_halves(x, w1, b1, w2):
    return reduce_scatter(silu_mul(all_gather(x) @ w1 + b1, side_by_side=True) @ w2)


@program(
    mesh="tp", x=of("m", K, Shard(1)), w=of(K, N, Shard(0)), b=of(1, N, Replicate()),
    gain=of(1, N, Replicate()),
)  # fmt: skip
def bias_of_a_sum(x, w, b, gain):
    """In the kernel that has whole rows, where they are summed, or behind a product's."""
    total = all_reduce(x @ w) + b
    return rms_norm(total * gain, gain), total


@program(mesh="tp", x=of("m", K, Partial()), b=of(1, K, Replicate()), gain=of(1, K, Replicate()))
def bias_of_rows(x, b, gain):
    return rms_norm(all_reduce(x) + b, gain)


@program(
    mesh="tp", x=of("m", K, Shard(0)), pairs=of(K, 2 * N, Shard(1)), halves=of(K, 2 * N, Halves(1)),
    down=of(N, K, Shard(0)),
)  # fmt: skip
def gelus(x, pairs, halves, down):
    """Of neighbouring columns and of halves; in registers, or a step of its own."""
    rows = all_gather(x)
    first = gelu_mul(rows @ pairs, approximate="tanh") @ down
    second = gelu_mul(rows @ halves, side_by_side=True) @ down
    return gelu(reduce_scatter(first)), reduce_scatter(second), gelu(rows @ pairs)


@program(mesh="tp", x=of("m", K, Partial()), gain=of(1, K, Replicate()))
def gelus_of_a_sum(x, gain):
    total = gelu(all_reduce(x), approximate="tanh")
    return rms_norm(gelu(total), gain), total


QKV = (24, 12, 12)


@program(
    mesh="tp", x=of("m", K, Shard(0)), w=of(K, sum(QKV), Pieces(1, QKV)),
    b=of(1, sum(QKV), Pieces(1, QKV)), down=of(QKV[0], K, Shard(0)),
)  # fmt: skip
def pieces(x, w, b, down):
    """Of one product: one is read by another product, two by steps of their own and the user."""
    q, k, v = split(all_gather(x) @ w + b, QKV)
    return reduce_scatter(q @ down), k * v, v


@program(mesh="tp", x=of("m", K, Shard(0)), w=of(7, N, Shard(1)), s=of("m", N, Partial()))
def some_columns(x, w, s):
    """Rows that travel are a part of others; so is a summand."""
    return all_gather(x[:, 2:9]) @ w, reduce_scatter(s[:, :5]), silu(x)[:, 11:12]


HEAD = 6


@program(
    mesh="tp", x=of("m", K, Replicate()), w=of(K, 6 * HEAD, Shard(1)),
    gain=of(1, HEAD, Replicate()), positions=of(1, "m", Replicate(), dtype="int32"),
    table=of(9, HEAD, Replicate()),
)  # fmt: skip
def heads(x, w, gain, positions, table):
    """Queries of each rank's own heads, as Qwen3 has them."""
    q = rms_norm(x @ w, gain, head=HEAD, eps=1e-3)
    return rope_by_table(q, positions, table, head=HEAD), q


@program(
    mesh="tp", x=of("m", 2 * HEAD, Shard(0)), gain=of(1, HEAD, Replicate()),
    positions=of(1, "m", Shard(1), dtype="int32"), table=of(9, HEAD, Replicate()),
)  # fmt: skip
def heads_of_tokens(x, gain, positions, table):
    """Of each rank's own tokens."""
    x = rms_norm(x, gain, head=HEAD)
    return rope_by_table(x, positions, table, head=HEAD), rope(x, positions, head=HEAD)


VOCABULARY = 7


@program(
    mesh="tp", ids=of(1, "m", Replicate(), dtype="int32"), table=of(VOCABULARY, K, Shard(0)),
    head=of(K, VOCABULARY, Shard(1)), whole=of(VOCABULARY, K, Replicate()),
    gain=of(1, K, Replicate()),
)  # fmt: skip
def vocabulary(ids, table, head, whole, gain):
    """Split by vocabulary, at both ends: in rows that are split, and in rows that are summed."""
    x = reduce_scatter(embedding(ids, table))
    logits = all_gather(x) @ head
    y = rms_norm(all_reduce(embedding(ids, table)) + embedding(ids, whole), gain)
    return logits, all_gather(y @ head, dim=1)


@program(
    mesh="tp", ids=of(1, "m", Shard(1), dtype="int32"), table=of(VOCABULARY, K, Replicate()),
    w=of(K, N, Shard(1)),
)  # fmt: skip
def vocabulary_of_tokens(ids, table, w):
    return all_gather(embedding(ids, table)) @ w


WORDS: list[Compiled] = [
    bias,
    bias_of_halves,
    bias_of_a_sum,
    bias_of_rows,
    gelus,
    gelus_of_a_sum,
    pieces,
    some_columns,
    heads,
    heads_of_tokens,
    vocabulary,
    vocabulary_of_tokens,
]
SIZES = [{"m": 7}, {"m": 1}]


@pytest.mark.few(2)
@pytest.mark.parametrize("word", WORDS, ids=lambda one: one.__name__)
@pytest.mark.parametrize("lowering", LOWERINGS)
def test_it_is_its_meaning(ranks, word: Compiled, lowering: str):
    """Rows that ranks have none of, too."""

    def main():
        with weft.init() as world:
            for sizes in SIZES:
                run(world, word, sizes, seed=sizes["m"], lowering=lowering)

    ranks(main, 3 if lowering != "persistent" else 2)


@pytest.mark.parametrize("word", WORDS, ids=lambda one: one.__name__)
def test_gradients(ranks, word: Compiled):
    def main():
        with weft.init() as world:
            check(world, word, {"m": 7}, 3)

    ranks(main, 2)


@program(
    mesh="tp", x=of("m", 4096, Shard(0), dtype="bf16"), w=of(4096, 8192, Shard(1), dtype="bf16"),
    b=of(1, 8192, Shard(1), dtype="bf16"),
)  # fmt: skip
def wide(x, w, b):
    return gelu_mul(all_gather(x) @ w + b, approximate="none")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "variant", "given"),
    [
        ("cuda:90", "sm90", Specialised("bfloat16", (128, 128, 64), 4, num_stages=4)),
        pytest.param("cuda:90", "plain",
                     Specialised("bfloat16", (128, 128, 64), 4, tma=True, num_warps=8),
                     marks=pytest.mark.slow),
        pytest.param("hip:gfx942", "plain",
                     Specialised("bfloat16", (128, 128, 64), 4, num_stages=2),
                     marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_epilogues_compile(target: str, variant: str, given: Specialised):
    """A row, an error function, and a gate behind both, in one kernel."""
    plan = wide.overlapped(Facts({"m": 8192}, 4, TARGETS[target])).plan
    (kernel,) = kernels.lower(plan).values()
    asked = [one.function for one in kernel.at("value") if isinstance(one, core.Hook)]
    assert asked == ["add_row", "gelu_mul"]
    made = record(kernel, variant, given)
    binary = triton_api.compile_kernel(getattr(source.load(kernel), variant), made, TARGETS[target])
    assert "ld.local" not in binary.asm.get("ptx", "")
    assert compiled(binary, TARGETS[target]).ok


def test_a_rank_has_its_part_of_each_piece():
    whole = torch.arange(12.0)[None]
    kind = of(1, 12, Pieces(1, (6, 4, 2)))
    parts = [of_rank(kind, whole, {}, rank, 2) for rank in range(2)]
    assert parts[1][0].tolist() == [3, 4, 5, 8, 9, 11]
    assert torch.equal(whole_of(kind.placement, parts), whole)


def test_pieces_that_ranks_cannot_share():
    told = "w lies in pieces of 24, 12, 12, of which 8 ranks cannot have equal parts"
    with pytest.raises(ShapeError, match=told):
        check_pairs(pieces.stages.program, {"m": 5}, 8)
    check_pairs(pieces.stages.program, {"m": 5}, 4)


@pytest.mark.parametrize("word", ["pieces", "bias_of_halves"])
def test_weft_run_gives_ranks_their_parts_of_pieces(word: str):
    assert weft_verb(["run", f"{__file__}:{word}", "--ranks", "2", "--shape", "m=9"]) == 0


@pytest.mark.gpu(2)
@pytest.mark.parametrize("word", ["bias", "bias_of_halves", "bias_of_rows", "gelus", "pieces"])
def test_words_on_gpus(word: str):
    steps = check_on_gpus(Work(find_op(f"{__file__}:{word}"), 2, {"m": 999}, "float32", (2,)))
    assert all(step.ok for step in steps), steps
