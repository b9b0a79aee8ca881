"""A wrong `out` of any operator: the error names the operator, `out`, and what it must be."""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch

import weft
from weft.base.errors import DtypeError, ShapeError
from weft.ops import cards

# Its card sends before it receives, so a message would be left over: tests/ops/test_send.py.
BY_ITSELF = ("recv",)
TAKE_OUT = [
    name
    for name in cards()
    if "out" in inspect.signature(getattr(weft.ops, name)).parameters and name not in BY_ITSELF
]  # fmt: skip

WRONG = {
    "shape": lambda right: right.new_empty(right.shape[0] + 3, *right.shape[1:]),
    "rank": lambda right: right.new_empty(right.numel()),
    "dtype": lambda right: right.to(torch.int16),
    "device": lambda right: right.to("meta"),
    "layout": lambda right: right.new_empty(*right.shape, 2)[..., 0],
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", TAKE_OUT)
def test_the_error_of_a_wrong_out_names_it(name: str, monkeypatch):
    card = cards()[name]
    module = importlib.import_module(card.run.__module__)
    operator, outs = getattr(module, name), {}

    def with_out(*args, world, **options):
        if world.rank in outs:
            options["out"] = outs[world.rank]
        return operator(*args, world=world, **options)

    monkeypatch.setattr(module, name, with_out)
    # Such a card hands all inputs on by name, to the operator itself.
    hands_on = card.run.__qualname__.startswith("calling.")

    def main():
        world = weft.init()
        nodes = ((2,),) if card.takes_nodes else ()
        problem = card.make_problem(2, card.default_shape, "bfloat16", *nodes)
        inputs = card.make_inputs(problem, world.rank, 0)
        result = card.run(world, problem, inputs, None)
        right = result[0] if isinstance(result, tuple) else result
        told = {}
        for what, wrong in WRONG.items():
            outs[world.rank] = wrong(right)
            world.calls.clear()
            given = {**inputs, "out": outs[world.rank]} if hands_on else inputs
            with pytest.raises((ShapeError, DtypeError)) as error:
                card.run(world, problem, given, None)
            told[what] = error.value
        world.close()
        return told

    with weft.emulated(2) as ranks:
        for told in ranks.run(main):
            for what, error in told.items():
                assert str(error).startswith(f"{name}: out "), f"{what}: {error}"
            assert isinstance(told["dtype"], DtypeError)


@pytest.mark.parametrize("name", ["ag_gemm", "all_gather"])
def test_an_out_that_says_how_many_rows_there_are_is_named_where_they_are_too_few(name: str):
    card = cards()[name]

    def main():
        world = weft.init()
        inputs = card.make_inputs(
            card.make_problem(2, card.default_shape, "bfloat16", (2,)), world.rank, 0
        )
        tensors = [one for one in inputs.values() if isinstance(one, torch.Tensor)]
        out = torch.empty(3, 256, dtype=torch.bfloat16, device=world.device)
        with pytest.raises(ShapeError) as error:
            getattr(weft.ops, name)(*tensors, world=world, out=out)
        world.close()
        return str(error.value)

    with weft.emulated(2) as ranks:
        told = ranks.run(main)[0]
    assert told.startswith(
        f"{name}: out has shape (3, 256), the rows of all ranks, but rank 0 of 2"
    )
    assert "passes" in told and "with 128 rows; of m=3 it holds 2" in told
