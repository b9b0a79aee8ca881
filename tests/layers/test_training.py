"""Small models trained on two ranks: AdamW's loss curve is one process's, but for rounding.

What rounding does to a curve is read, not guessed: from the same steps in float64, one process in
float32 departs by so much; ranks, who add up products in another order, may by a few times that.
Where no sum has another order, bits are compared: all ranks', and those of torch.compile; and on
whole numbers, for which every order gives the same, those of one process too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from ordinary import HIDDEN, Llama, MoE
from parallel import seeded
from torch import nn
from torch.nn.functional import cross_entropy

import weft
from weft.layers import Activations, ParallelMLP, ParallelMoE

RANKS, VOCABULARY, TOKENS = 2, 10, (2, 7)
INF = float("inf")
SHORT, WHOLE = 5, 50
TIMES = 4  # of one process's rounding, and of float32's in a loss


def of_transformers(kind: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{kind}Config")(
        hidden_size=HIDDEN, intermediate_size=12, num_hidden_layers=2, head_dim=4,
        num_attention_heads=4, num_key_value_heads=2, vocab_size=VOCABULARY, pad_token_id=0,
        use_cache=False, **({"num_local_experts": 4} if kind == "Mixtral" else {}),
    )  # fmt: skip
    config._experts_implementation = "eager"  # others take no float64
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def logits_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    y = model(ids)
    return getattr(y, "logits", y)


def curve(
    model: nn.Module, steps: int, call: Callable[..., torch.Tensor],
    after: Callable[[nn.Module], None] = lambda _: None,
) -> torch.Tensor:  # fmt: skip
    """The loss of each step; `after(model)` comes when its gradients are there."""
    found, optimizer = [], torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        seeds = torch.Generator().manual_seed(step % 4)
        ids = torch.randint(0, VOCABULARY, TOKENS, generator=seeds)
        y = call(ids)
        loss = cross_entropy(y[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        after(model)
        optimizer.step()
        found.append(loss.detach())
    return torch.stack(found).double()


def train(make: Callable[[], nn.Module], steps: int, split_from: float, compiled: int) -> None:
    """`compiled`: steps that are also taken by torch.compile."""
    ordinary = seeded(make)
    whole = {name: one.shape for name, one in ordinary.named_parameters()}

    def alone(dtype: torch.dtype) -> torch.Tensor:
        model = copy.deepcopy(ordinary).to(dtype)
        return curve(model, steps, partial(logits_of, model))

    exact, single = alone(torch.float64), alone(torch.float32)
    rounding = float((single - exact).abs().max() + torch.finfo(torch.float32).eps * exact.max())

    def main() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        with weft.init() as world:
            gradients: list[torch.Tensor] = []

            def keep(model: nn.Module) -> None:
                for name, one in model.named_parameters():
                    if whole.get(name) == one.shape and one.grad is not None:
                        gradients.append(one.grad.clone())

            curves = []
            for count in (steps, compiled)[: 1 + bool(compiled)]:
                model = weft.parallelize(copy.deepcopy(ordinary), world, split_from=split_from)
                call = partial(logits_of, model)
                # A function of its own: ranks share what torch compiled of one.
                here = torch.compile(lambda ids, call=call: call(ids)) if curves else call
                curves.append(curve(model, count, here, keep))
            return curves, gradients

    with weft.emulated(ranks=RANKS) as ranks:
        (curves, gradients), *others = ranks.run(main)
    for one in curves:
        away = one - exact[: len(one)]
        assert away.abs().max() <= TIMES * rounding, (away, rounding)
        assert torch.equal(one, curves[0][: len(one)])
    for theirs, of_them in others:
        assert all(map(torch.equal, theirs, curves)), "ranks have different losses"
        assert gradients and len(gradients) == len(of_them)
        assert all(map(torch.equal, gradients, of_them)), "replicated parameters drift apart"
    if steps == WHOLE:
        assert curves[0][-1] < 0.8 * curves[0][0], "nothing was learned"


@pytest.mark.slow
@pytest.mark.parametrize("split_from", [0, pytest.param(INF, marks=pytest.mark.slow)])
@pytest.mark.parametrize("experts", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_few_steps(experts, split_from):
    train(partial(Llama, experts), SHORT, split_from, compiled=0)


@pytest.mark.slow
@pytest.mark.parametrize("split_from", [0, INF])
@pytest.mark.parametrize(("kind", "compiled"), [("Llama", WHOLE), ("Mixtral", SHORT)])
def test_a_loss_curve_is_one_processs(kind, compiled, split_from):
    """transformers' classes, as they are and by torch.compile."""
    train(partial(of_transformers, kind), WHOLE, split_from, compiled)


@pytest.mark.few(1)
@pytest.mark.parametrize("split_from", [0, INF])
def test_whole_numbers_have_one_processs_bits(ranks, split_from):
    """Gradients, and what AdamW makes of them."""

    def whole(*shape: int, seed: int) -> torch.Tensor:
        seeds = torch.Generator().manual_seed(seed)
        return torch.randint(-3, 4, shape, generator=seeds).float()

    def make() -> nn.Module:
        module = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8))
        for seed, one in enumerate(module.parameters()):
            one.data = whole(*one.shape, seed=seed)
        return module

    def main() -> None:
        with weft.init() as world:
            ordinary, lie = make(), Activations(world, split_from)
            layer = ParallelMLP.from_module(make(), world, lie)
            x = whole(5, 8, seed=7)
            for module, y in ((ordinary, ordinary(x)), (layer, lie.leave(layer(lie.enter(x))))):
                (y * whole(5, 8, seed=8)).sum().backward()
                torch.optim.AdamW(module.parameters(), lr=0.5).step()
            wanted = ordinary.state_dict()
            for name, found in layer.state_dict().items():
                dim = next((i for i, n in enumerate(found.shape) if n != wanted[name].shape[i]), 0)
                first = world.rank * found.shape[dim] * (found.shape != wanted[name].shape)
                assert torch.equal(found, wanted[name].narrow(dim, first, found.shape[dim])), name

    ranks(main, RANKS)


class Mixtures(nn.Module):
    """Two mixtures of experts; all else is alike on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
        self.norms = nn.ModuleList(nn.RMSNorm(HIDDEN, eps=1e-6) for _ in range(2))
        self.mixtures = nn.ModuleList(MoE() for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for norm, mixture in zip(self.norms, self.mixtures, strict=True):
            x = x + mixture(norm(x))
        return self.head(x).float()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "dtype"),
    [(SHORT, torch.bfloat16), pytest.param(SHORT, torch.float32, marks=pytest.mark.slow),
     pytest.param(4 * WHOLE, torch.bfloat16, marks=pytest.mark.slow)],
)  # fmt: skip
def test_sums_by_choice_have_one_loss_curve_on_any_ranks(steps, dtype):
    """Bit by bit, and gradients of the router, of norms and of experts. In float32 as far as a
    CPU's products go, whose bits may depend on how many rows they are of."""

    def are_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
        if dtype == torch.bfloat16:
            return torch.equal(one, other)
        return torch.allclose(one, other, rtol=1e-5, atol=1e-6)

    def main() -> tuple[torch.Tensor, list[torch.Tensor]]:
        with weft.init() as world:
            model, shards = seeded(Mixtures).to(dtype), []
            for i, one in enumerate(model.mixtures):
                model.mixtures[i] = ParallelMoE.from_module(
                    one, world, strategy="dispatch by choice"
                )

            def keep(model: nn.Module) -> None:
                shards[:] = [one.grad.clone() for one in model.parameters()]

            return curve(model, steps, model, keep), shards

    wanted = None
    for num_ranks in (1, 2, 4):
        with weft.emulated(ranks=num_ranks) as ranks:
            curves, gradients = zip(*ranks.run(main), strict=True)
        # Of experts each rank has a part.
        whole = [
            of[0] if wanted and of[0].shape == wanted[1][i].shape else torch.cat(of)
            for i, of in enumerate(zip(*gradients, strict=True))
        ]
        wanted = wanted or (curves[0], whole)
        assert all(are_alike(one, wanted[0]) for one in curves), num_ranks
        assert all(map(are_alike, whole, wanted[1])), num_ranks
    assert wanted[0][-1] < wanted[0][0]
