"""Whole blocks of models as programs, beside plain torch modules: Llama's and Qwen3's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import weft
import weft.megakernel
from weft.base.errors import ShapeError, UnsupportedError
from weft.compiler import (
    Halves,
    Pieces,
    Replicate,
    Shard,
    Tensor,
    Times,
    all_gather,
    all_reduce,
    attention,
    decode_attention,
    embedding,
    kv_append,
    program,
    reduce_scatter,
    rms_norm,
    rope_by_table,
    silu,
    silu_mul,
    split,
)
from weft.plan.program_cards import rank_part

HIDDEN, INNER, HEAD, HEADS, KV_HEADS, VOCABULARY, POSITIONS = 24, 20, 8, 4, 2, 11, 16
Q, KV = HEADS * HEAD, KV_HEADS * HEAD
QKV = (Q, KV, KV)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cache"))


# ---------------------------------------------------------------------------------------------
# As torch has them


def angles() -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of all positions, as transformers hands them round: [positions, head]."""
    speed = 10000.0 ** (-torch.arange(0, HEAD, 2) / HEAD)
    angle = torch.arange(POSITIONS)[:, None] * speed
    return torch.cat((angle, angle), 1).cos(), torch.cat((angle, angle), 1).sin()


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]


class Block(nn.Module):
    """Biases as Qwen2 and some Llamas have, or norms of queries and keys as Qwen3 has."""

    def __init__(self, bias: bool, head_norms: bool) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(HIDDEN, eps=1e-6), nn.RMSNorm(HIDDEN, eps=1e-6)
        self.q_proj, self.o_proj = nn.Linear(HIDDEN, Q, bias), nn.Linear(Q, HIDDEN, False)
        self.k_proj, self.v_proj = (nn.Linear(HIDDEN, KV, bias) for _ in range(2))
        self.gate, self.up = (nn.Linear(HIDDEN, INNER, False) for _ in range(2))
        self.down = nn.Linear(INNER, HIDDEN, False)
        self.q_norm, self.k_norm = (
            nn.RMSNorm(HEAD, eps=1e-6) if head_norms else nn.Identity() for _ in range(2)
        )
        for one in self.parameters():
            nn.init.normal_(one, std=0.3)

    def queries_keys_values(self, x: torch.Tensor, positions: torch.Tensor):
        h, (cos, sin) = self.norm_1(x), (one[positions] for one in angles())
        q, k, v = (
            one(h).unflatten(1, (-1, HEAD)) for one in (self.q_proj, self.k_proj, self.v_proj)
        )
        return rotated(self.q_norm(q), cos, sin), rotated(self.k_norm(k), cos, sin), v

    def behind(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        x = x + self.o_proj(attended.flatten(1))
        h = self.norm_2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.queries_keys_values(x, torch.arange(len(x)))
        q, k, v = (one.transpose(0, 1) for one in (q, k, v))
        k, v = (one.repeat_interleave(HEADS // KV_HEADS, 0) for one in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.behind(x, attended.transpose(0, 1))

    def weights(self) -> dict[str, torch.Tensor]:
        """As the programs below call them, whole."""
        found = {
            "gain_1": self.norm_1.weight[None], "gain_2": self.norm_2.weight[None],
            "qkv": torch.cat([one.weight for one in (self.q_proj, self.k_proj, self.v_proj)]).t(),
            "o": self.o_proj.weight.t(),
            "gate_up": torch.cat([self.gate.weight, self.up.weight]).t(),
            "down": self.down.weight.t(),
        }  # fmt: skip
        if isinstance(self.q_norm, nn.RMSNorm):
            found |= {"q_gain": self.q_norm.weight[None], "k_gain": self.k_norm.weight[None]}
        if self.q_proj.bias is not None:
            biases = [one.bias for one in (self.q_proj, self.k_proj, self.v_proj)]
            found["bias"] = torch.cat(biases)[None]
        return found


# ---------------------------------------------------------------------------------------------
# As programs


def of(*sizes, dtype: str = "fp32") -> Tensor:
    return Tensor(dtype, sizes[:-1], sizes[-1])


WEIGHTS = {
    "gain_1": of(1, HIDDEN, Replicate()), "gain_2": of(1, HIDDEN, Replicate()),
    "qkv": of(HIDDEN, sum(QKV), Pieces(1, QKV)), "o": of(Q, HIDDEN, Shard(0)),
    "gate_up": of(HIDDEN, 2 * INNER, Halves(1)), "down": of(INNER, HIDDEN, Shard(0)),
}  # fmt: skip
GAINS = {"q_gain": of(1, HEAD, Replicate()), "k_gain": of(1, HEAD, Replicate())}
ROPE = {
    "positions": of(1, "m", Replicate(), dtype="int32"),
    "table": of(POSITIONS, HEAD, Replicate()),
}


@program(
    mesh="tp", x=of("m", HIDDEN, Shard(0)), **ROPE, **WEIGHTS,
    bias=of(1, sum(QKV), Pieces(1, QKV)),
)  # fmt: skip
def llama(x, positions, table, gain_1, gain_2, qkv, o, gate_up, down, bias):
    q, k, v = split(all_gather(rms_norm(x, gain_1)) @ qkv + bias, QKV)
    q, k = (rope_by_table(one, positions, table, head=HEAD) for one in (q, k))
    x = reduce_scatter(attention(q, k, v, head=HEAD) @ o) + x
    h = all_gather(rms_norm(x, gain_2)) @ gate_up
    return reduce_scatter(silu_mul(h, side_by_side=True) @ down) + x


@program(
    mesh="tp", ids=of(1, "m", Replicate(), dtype="int32"), **ROPE, **WEIGHTS, **GAINS,
    vocabulary=of(VOCABULARY, HIDDEN, Shard(0)), head=of(HIDDEN, VOCABULARY, Shard(1)),
)  # fmt: skip
def qwen3(
    ids, positions, table, gain_1, gain_2, qkv, o, gate_up, down, q_gain, k_gain, vocabulary, head
):
    """With embedding and logits, of one matrix."""
    x = reduce_scatter(embedding(ids, vocabulary))
    q, k, v = split(all_gather(rms_norm(x, gain_1)) @ qkv, QKV)
    q, k = rms_norm(q, q_gain, head=HEAD), rms_norm(k, k_gain, head=HEAD)
    q, k = (rope_by_table(one, positions, table, head=HEAD) for one in (q, k))
    x = reduce_scatter(attention(q, k, v, head=HEAD) @ o) + x
    h = all_gather(rms_norm(x, gain_2)) @ gate_up
    x = reduce_scatter(silu_mul(h, side_by_side=True) @ down) + x
    return all_gather(all_gather(x) @ head, dim=1)


CACHE = of(Times("m", 5), KV, Shard(1))


@program(
    mesh="tp", x=of("m", HIDDEN, Replicate()), lengths=of(1, "m", Replicate(), dtype="int32"),
    keys=CACHE, values=CACHE, **ROPE, **WEIGHTS, **GAINS,
)  # fmt: skip
def qwen3_step(
    x,
    lengths,
    keys,
    values,
    positions,
    table,
    gain_1,
    gain_2,
    qkv,
    o,
    gate_up,
    down,
    q_gain,
    k_gain,
):
    """One token of each sequence."""
    q, k, v = split(rms_norm(x, gain_1) @ qkv, QKV)
    q, k = rms_norm(q, q_gain, head=HEAD), rms_norm(k, k_gain, head=HEAD)
    q, k = (rope_by_table(one, positions, table, head=HEAD) for one in (q, k))
    keys, values = kv_append(keys, k, lengths), kv_append(values, v, lengths)
    x = all_reduce(decode_attention(q, keys, values, lengths, head=HEAD) @ o) + x
    h = rms_norm(x, gain_2) @ gate_up
    return all_reduce(silu_mul(h, side_by_side=True) @ down) + x, keys, values


# ---------------------------------------------------------------------------------------------


def rotations(positions: torch.Tensor) -> dict[str, torch.Tensor]:
    cos, sin = (one[:, : HEAD // 2] for one in angles())
    return {"positions": positions.int()[None], "table": torch.cat((cos, sin), 1)}


def parts_of(made, whole: dict[str, torch.Tensor], world) -> dict[str, torch.Tensor]:
    kinds = {one.name: one.type for one in made.stages.program.tasks if one.kind == "input"}
    assert kinds.keys() == whole.keys()
    return {
        name: rank_part(
            kind.placement, whole[name].detach(), world.rank, world.num_ranks
        ).contiguous()
        for name, kind in kinds.items()
    }


def near(got: torch.Tensor, want: torch.Tensor) -> bool:
    return bool((got - want).norm() <= 1e-4 * want.norm() + 1e-6)


@pytest.mark.few(1)
@pytest.mark.parametrize("lowering", ["unfused", "overlapped"])
@pytest.mark.parametrize("m", [7, 12])
def test_a_llama_block_forward_and_backward(ranks, lowering: str, m: int):
    torch.manual_seed(0)
    module, x = Block(bias=True, head_norms=False), torch.randn(m, HIDDEN)
    whole = {"x": x, **rotations(torch.arange(m)), **module.weights()}
    wanted, upstream = module(x), torch.randn(m, HIDDEN)
    (wanted * upstream).sum().backward()
    gradients = {name: one.grad for name, one in module.named_parameters()}

    def main():
        with weft.init() as world:
            mine = parts_of(llama, whole, world)
            for name in ("x", *module.weights()):
                mine[name].requires_grad_()
            got = llama.options(lowering=lowering)(**mine, world=world, m=m)
            assert near(got, rank_part(Shard(0), wanted, world.rank, 2))
            (got * rank_part(Shard(0), upstream, world.rank, 2)).sum().backward()
            qkv = torch.cat([gradients[f"{one}_proj.weight"] for one in "qkv"]).t()
            assert near(mine["qkv"].grad, rank_part(Pieces(1, QKV), qkv, world.rank, 2))
            bias = torch.cat([gradients[f"{one}_proj.bias"] for one in "qkv"])[None]
            assert near(mine["bias"].grad, rank_part(Pieces(1, QKV), bias, world.rank, 2))
            assert near(mine["gain_1"].grad[0], gradients["norm_1.weight"])
            down = gradients["down.weight"].t()
            assert near(mine["down"].grad, rank_part(Shard(0), down, world.rank, 2))

    ranks(main, 2)


@pytest.mark.slow
@pytest.mark.parametrize("lowering", ["unfused", "overlapped"])
def test_a_qwen3_model_of_one_block(ranks, lowering: str):
    """From ids to logits."""
    torch.manual_seed(1)
    m, module = 9, Block(bias=False, head_norms=True)
    ids, vocabulary = torch.randint(VOCABULARY, (1, m)), torch.randn(VOCABULARY, HIDDEN)
    wanted = module(vocabulary[ids[0]]).detach() @ vocabulary.t()
    whole = {
        "ids": ids.int(), **rotations(torch.arange(m)), **module.weights(),
        "vocabulary": vocabulary, "head": vocabulary.t(),
    }  # fmt: skip

    def main():
        with weft.init() as world:
            mine = parts_of(qwen3, whole, world)
            mine["head"] = mine["vocabulary"].t()  # tied, read where it lies
            got = qwen3.options(lowering=lowering)(**mine, world=world, m=m)
            assert near(got, wanted)

    ranks(main, 2)


@pytest.mark.few(1)
@pytest.mark.parametrize("lowering", ["unfused", "overlapped", "persistent"])
def test_a_qwen3_step_over_caches(ranks, lowering: str):
    """Three sequences of other lengths; the persistent kernel is one launch."""
    torch.manual_seed(2)
    b, module, lengths = 3, Block(bias=False, head_norms=True), torch.tensor([4, 1, 5])
    x, keys, values = torch.randn(b, HIDDEN), *(torch.randn(b, 5, KV) for _ in range(2))
    whole = {
        "x": x, "lengths": lengths.int()[None], "keys": keys.flatten(0, 1),
        "values": values.flatten(0, 1), **rotations(lengths - 1), **module.weights(),
    }  # fmt: skip
    with torch.no_grad():
        q, k, v = module.queries_keys_values(x, lengths - 1)
        attended = []
        for i, length in enumerate(lengths.tolist()):
            of_keys, of_values = (
                torch.cat([cache[i, : length - 1], new[i].flatten()[None]])
                .unflatten(1, (KV_HEADS, HEAD)).transpose(0, 1)
                .repeat_interleave(HEADS // KV_HEADS, 0)
                for cache, new in ((keys, k), (values, v))
            )  # fmt: skip
            one = F.scaled_dot_product_attention(q[i][:, None], of_keys, of_values)
            attended.append(one[:, 0])
        wanted = module.behind(x, torch.stack(attended))

    def main():
        with weft.init() as world:
            mine = parts_of(qwen3_step, whole, world)
            got, _, _ = qwen3_step.options(lowering=lowering)(**mine, world=world, m=b)
            assert near(got, wanted)

    ranks(main, 2)


def test_what_the_persistent_kernel_has_no_task_for_is_refused_at_the_line(ranks):
    def main():
        with weft.init() as world:
            module = Block(bias=True, head_norms=False)
            whole = {"x": torch.randn(4, HIDDEN), **rotations(torch.arange(4)), **module.weights()}
            mine = parts_of(llama, whole, world)
            with pytest.raises(UnsupportedError, match="no task for attention") as caught:
                llama.options(lowering="persistent")(**mine, world=world, m=4)
            assert "attention(q, k, v, head=HEAD)" in str(caught.value)

    ranks(main, 2)


@program(
    mesh="tp", x=of("m", HIDDEN, Replicate()), residual=of("m", HIDDEN, Shard(0)),
    up=of(HIDDEN, INNER, Shard(1)), down=of(INNER, HIDDEN, Shard(0)),
)  # fmt: skip
def mlp(x, residual, up, down):
    h = silu(x @ up) @ down
    return all_reduce(h) + x, reduce_scatter(h) + residual


@pytest.mark.few(1)
@pytest.mark.parametrize("lowering", ["unfused", "overlapped", "persistent"])
def test_activations_of_more_dimensions_are_rows(ranks, lowering: str):
    torch.manual_seed(3)
    x, up, down = torch.randn(2, 3, HIDDEN), torch.randn(HIDDEN, INNER), torch.randn(INNER, HIDDEN)
    wanted = F.silu(x @ up) @ down

    def main():
        with weft.init() as world:
            mine = [rank_part(Shard(i), one, world.rank, 2) for i, one in ((1, up), (0, down))]
            rows = rank_part(Shard(0), x.flatten(0, 1), world.rank, 2)
            given = (x.clone().requires_grad_(lowering == "unfused"), rows, *mine)
            whole, part = mlp.options(lowering=lowering)(*given, world=world)
            assert whole.shape == x.shape and near(whole, wanted + x)
            # Split rows were passed in one dimension.
            assert near(part, rank_part(Shard(0), (wanted + x).flatten(0, 1), world.rank, 2))
            if lowering == "unfused":
                whole.sum().backward()
                assert given[0].grad.shape == x.shape

    ranks(main, 2)


def test_dimensions_that_differ_and_attention_of_several_sequences(ranks):
    @program(mesh="tp", x=of("m", HIDDEN, Replicate()), y=of("m", HIDDEN, Replicate()))
    def total(x, y):
        return x + y

    @program(mesh="tp", x=of("m", HIDDEN, Replicate()))
    def attended(x):
        return attention(x, x, x, head=HEAD)

    def main():
        with weft.init() as world:
            x = torch.randn(2, 3, HIDDEN)
            assert attended(x[:1], world=world).shape == (1, 3, HIDDEN)
            with pytest.raises(UnsupportedError, match="tokens of one sequence") as caught:
                attended(x, world=world)
            assert "attention(x, x, x, head=HEAD)" in str(caught.value)
            with pytest.raises(ShapeError, match=r"y has shape \(3, 2, 24\), another has \(2, 3\)"):
                total(x, x.transpose(0, 1), world=world)

    ranks(main, 1)
