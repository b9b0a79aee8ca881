"""Operators as torch's own operations: traced whole by torch.compile, checked by opcheck."""

from __future__ import annotations

import builtins
from pathlib import Path
from types import ModuleType

import pytest
import torch
from differentiating import leaf, same, shard, whole
from torch._dynamo import symbolic_convert
from torch._dynamo.exc import Unsupported
from torch._dynamo.testing import EagerAndRecordGraphs
from torch.fx.experimental.proxy_tensor import make_fx

import weft
from weft import ops
from weft.ops import card
from weft.ops.ag_gemm import Config
from weft.plan import operations
from weft.tools.main import main as command


@pytest.fixture(autouse=True)
def compile_anew():
    """What other tests have had compiled is none of this one's."""
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def import_as_torch_2_11(monkeypatch):
    """It traces no import out of a module whose type is its own, and weft.ops is of such a type."""

    def imported(name, *args, **kwargs):
        found = builtins.__import__(name, *args, **kwargs)
        assert type(found) is ModuleType, name
        return found

    monkeypatch.setattr(symbolic_convert, "__import__", imported, raising=False)


def on_ranks(ranks, num_ranks, main):
    def run():
        with weft.init() as world:
            return main(world)

    return ranks(run, num_ranks)


def mlp(x, up, down, world, m):
    hidden = torch.nn.functional.silu(ops.ag_gemm(x, up, world=world, m=m))
    return ops.gemm_rs(hidden, down, world=world)


@pytest.mark.slow
def test_compiled_layers_are_as_eager_ones(ranks):
    """In one graph, forward and backward; run with values on two ranks whose shards differ."""
    m = 9
    x, weights = whole(m, 16, seed=1), [whole(16, 32, seed=2), whole(32, 16, seed=3)]

    def main(world):
        rank = world.rank
        # A function of each rank's own: emulated ranks share what torch has compiled of one.
        compiled = torch.compile(
            lambda *x: mlp(*x, world, m) if rank + 1 else None, backend="aot_eager", fullgraph=True
        )
        found = []
        for call in (lambda *x: mlp(*x, world, m), compiled):
            leaves = [leaf(shard(x, rank, 2)), *map(leaf, weights)]
            out = call(*leaves)
            out.sum().backward()
            found.append([out.detach(), *(one.grad for one in leaves)])
        same(*found)

    on_ranks(ranks, 2, main)


@pytest.mark.slow
def test_what_runs_on_gpus_runs_on_the_emulator():
    """A script's ranks compile for themselves, as processes do, where their shards differ."""
    script = Path(__file__).parent / "scripts" / "gradients.py"
    assert command(["emulate", str(script), "--ranks", "2", "--", "small"]) == 0


@pytest.mark.slow
def test_a_graph_holds_operations_whole(ranks):
    """Every operator's, with out= and without a gradient too."""
    x, weight = whole(4, 16, seed=1), whole(16, 16, seed=2)

    def every(x, weight, world, out):
        a = ops.all_gather(x, world=world)
        b = ops.reduce_scatter(a, world=world)
        c = ops.all_reduce(b, world=world, out=out)
        d = ops.all_to_all(c, world=world)
        e = ops.gemm_ar(d, weight, world=world)
        f, g = ops.all_reduce_rms_norm(e, c, weight[0].contiguous(), world=world)
        h = ops.ag_gemm(f + g, weight, world=world)
        return ops.gemm_rs(h, weight, world=world)

    def main(world):
        kept, out = EagerAndRecordGraphs(), torch.empty(4, 16)
        with torch.no_grad():
            got = torch.compile(every, backend=kept, fullgraph=True)(x, weight, world, out)
            want = every(x, weight, world, torch.empty(4, 16))
        assert torch.equal(got, want)
        (graph,) = kept.graphs
        return [str(node.target) for node in graph.graph.nodes if "weft" in str(node.target)]

    called = [f"weft.{name}.default" for name in (
        "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "gemm_ar",
        "all_reduce_rms_norm", "ag_gemm", "gemm_rs",
    )]  # fmt: skip
    assert on_ranks(ranks, 1, main) == [called]


def test_attention_is_held_whole(ranks):
    q, k = torch.randn(6, 4, 16), torch.randn(6, 2, 16)

    def main(world):
        def call(q, k):
            return ops.ag_attention(q, k, k, world=world)

        with torch.no_grad():
            return torch.compile(call, backend="aot_eager", fullgraph=True)(q, k), call(q, k)

    same(*([one] for one in on_ranks(ranks, 1, main)[0]))


def test_sizes_may_stay_open(ranks):
    """One graph for all m: nothing in it depends on how many rows there are."""

    def main(world):
        counted = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        call = torch.compile(
            lambda x, w: ops.ag_gemm(x, w, world=world), backend=counted, fullgraph=True,
            dynamic=True,
        )  # fmt: skip
        for rows in (4, 6, 10):
            x, weight = whole(rows, 16, seed=rows), whole(16, 16, seed=2)
            assert torch.equal(call(x, weight), ops.ag_gemm(x, weight, world=world))
        return counted.frame_count

    assert on_ranks(ranks, 1, main) == [1]


def test_fake_tensors_are_enough(ranks):
    """What a result is like is known without values, on the rank that asks."""

    def main(world):
        def call(x, weight):
            return ops.gemm_rs(x, weight, world=world)

        graph = make_fx(call, tracing_mode="fake")(torch.ones(7, 8), torch.ones(8, 4))
        (out,) = [node for node in graph.graph.nodes if "gemm_rs" in str(node.target)]
        return tuple(out.meta["val"].shape)

    assert on_ranks(ranks, 3, main) == [(3, 4), (3, 4), (1, 4)]


def test_a_configuration_is_eager_alone(ranks):
    x = whole(16, 16, seed=1)

    def main(world):
        given = Config(transport="sm_push", tile_m=16, tile_n=16, tile_k=16, pushers=2)
        weight = leaf(x)
        out = ops.ag_gemm(x, weight, world=world, config=given)
        out.sum().backward()
        assert torch.equal(out, x @ x) and torch.equal(weight.grad, x.t() @ torch.ones(16, 16))
        with pytest.raises(Unsupported, match="config= cannot be traced"):
            torch.compile(ops.ag_gemm, backend="eager", fullgraph=True)(
                x, weight, world=world, config=given
            )

    on_ranks(ranks, 1, main)


def test_every_gradient_is_an_operators():
    """What carries gradients back is there; an operation without it refuses to be gone through."""
    for name in ops.names():  # each is an operation from its first use on
        getattr(ops, name)
    backward = {name: card(name).backward for name in {*operations.names()} & {*ops.names()}}
    assert {name for name, back in backward.items() if back is None} == {"flash_decode"}
    for back in backward.values():
        assert {*(back or ())} <= {*ops.names()}


@pytest.mark.parametrize(
    ("name", "schema"),
    [
        ("ag_gemm", "(Tensor a, Tensor b, str world, SymInt? m, ScalarType? out_dtype, "
         "Tensor? scale_a, Tensor? scale_b, str config) -> Tensor"),
        ("all_to_all", "(Tensor x, Tensor? splits, str world, SymInt? capacity, str config) -> "
         "(Tensor, Tensor)"),
        ("moe_rs", "(Tensor x, Tensor b, Tensor weight_of, Tensor[] tables, int tile_m, "
         "bool split_experts, str world, str config) -> Tensor"),
    ],
)  # fmt: skip
def test_a_schema_is_the_operators_signature(name, schema):
    getattr(ops, name)
    assert str(operations.operation(name)._schema) == f"weft::{name}{schema}"


CHECKED = {
    "all_to_all": lambda world: (leaf(whole(4, 8, seed=1)), None, world, None, ""),
    "all_gather": lambda world: (leaf(whole(3, 8, seed=1)), world, None, ""),
    "reduce_scatter": lambda world: (leaf(whole(6, 8, seed=1)), world, ""),
    "gemm_rs": lambda world: (
        leaf(whole(6, 8, seed=1)),
        leaf(whole(8, 4, seed=2)),
        world,
        None,
        None,
        None,
        "",
    ),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", CHECKED)
def test_opcheck(ranks, name):
    """torch's own list of what an operation must be: schema, fake, gradient, tracing."""

    def main(world):
        torch.library.opcheck(operations.operation(name), CHECKED[name](world.name))

    on_ranks(ranks, 1, main)
