"""A layer on emulated ranks against the ordinary module it was made of: results, gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import weft
from weft.base.parts import part_of
from weft.layers import Activations
from weft.layers.shards import seat_of

RATE = 0.05


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """The same module on every rank."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = make()
        for one in made.parameters():
            one.data = torch.randn(one.shape) / max(1, one.shape[-1]) ** 0.5
    return made


def drawn(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def step(module: nn.Module, y: torch.Tensor) -> None:
    """One step of descent."""
    (y * drawn(*y.shape, seed=2)).sum().backward()
    descend(module)


def descend(module: nn.Module) -> None:
    with torch.no_grad():
        for one in module.parameters():
            one -= RATE * one.grad


def close(got: torch.Tensor, want: torch.Tensor, what: str = "") -> None:
    assert got.shape == want.shape, (what, got.shape, want.shape)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4, msg=lambda m: f"{what}: {m}")


def same_state(layer: nn.Module, ordinary: nn.Module, world: Any) -> None:
    """The same names, and of each this rank's part of the ordinary module's."""
    found, wanted = layer.state_dict(), ordinary.state_dict()
    assert set(found) == set(wanted)
    for name, whole in wanted.items():
        if name.endswith("gate_up_proj") and len(whole) == len(
            found[name]
        ):  # both halves are spread
            halves = [one.chunk(world.num_ranks, 1)[world.rank] for one in whole.chunk(2, 1)]
            whole = torch.cat(halves, 1)
        for dim, size in enumerate(whole.shape):
            if size != found[name].shape[dim]:
                at = (world.rank, world.num_ranks)
                if "k_proj" in name or "v_proj" in name:  # a head may be several ranks'
                    at = seat_of(size // found[name].shape[dim], world)
                first, end = part_of(size, *at)
                whole = whole.narrow(dim, first, end - first)
        close(found[name], whole, name)


def check(
    ranks: Any, num_ranks: int, make: Callable[[], nn.Module], parallel: Callable[..., nn.Module],
    shape: tuple[int, ...], split: bool, call: Callable[..., Any] = lambda layer, x: layer(x),
) -> None:  # fmt: skip
    """Forward, backward, one step of descent, a state dict saved and loaded."""

    def main() -> None:
        with weft.init() as world:
            ordinary = seeded(make)
            lie = Activations(world, 0 if split else float("inf"))
            layer = parallel(copy.deepcopy(ordinary), world, lie)
            same_state(layer, ordinary, world)
            x, alone = drawn(*shape).requires_grad_(), drawn(*shape).requires_grad_()
            y, want = lie.leave(call(layer, lie.enter(x))), call(ordinary, alone)
            close(y, want, "forward")
            with torch.no_grad():
                close(lie.leave(call(layer, lie.enter(x))), want, "inference")
            step(ordinary, want)
            step(layer, y)
            close(x.grad, alone.grad, "x")
            same_state(layer, ordinary, world)
            layer.load_state_dict(layer.state_dict())
            same_state(layer, ordinary, world)

    ranks(main, num_ranks)
