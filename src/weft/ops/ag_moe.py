"""All-gather of tokens, then the product with each one's experts, as one operator.

    out[slot, :]  =  x of all ranks[token_of[slot], :] @ b[expert of slot]

m tokens are split as torch.chunk splits them. Every rank has n columns of every expert and ends
with its columns of all m * top_k slots, in the order of moe_route: sorted by expert. Which slots an
expert has is known on the device alone.

Plan, `ce_push`: copy-engine push (many tokens, on GPUs of one node)
    stage     a kernel waits until every rank's slot is free, copies own tokens to the own slot and
              sets the own flag
    copies    copy engines move own tokens to rank - 1's slot, - 2's, ..; behind each the flag
    multiply  as below, without communication CTAs

Plan, `sm_push`: one kernel on each rank, the GEMM template with hooks (weft.tiles.hooks.table)
    begin     `channels` communication CTAs store own tokens in every rank's slot, the own one
              first, then rank + 1's, + 2's, ..; then they multiply too, what is left of each wave
    order     tiles by the table, in the turns of moe_route: those of own tokens first, then those
              whose last tokens come next
    ready     waits for the ranks whose tokens are in the tile, and for no other
    emit      slots -> out

Signals (SET to the call's epoch e, read on the device; waited for in the call that sets it)
    rows_ready[src * channels + l]   sm_push: what channel l of rank src stores of its tokens is in
                                  this rank's slot. By src
    rows_ready[src]               ce_push: src's tokens are. By src's engine; the own flag by stage
    summed[2 * program + half]    local: partial sums of another program's tile are there (sm90)
    slot_free, epoch, ticket      the slot's; the last program moves them
Ranks without tokens are the last ones: no tile waits for them, and they push nothing. Some tile
waits for each of the other flags, so none is still on its way when the slot is released.

Limits  x is contiguous, b is [experts, k, n] or a transposed [experts, n, k]; the template for
        Hopper takes tables of tile_m=128 and k in multiples of 64
Source  docs/decisions/009-hooks.md; Triton-distributed's AG-MoE for the idea
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.base.card import Op, Trial, trials
from weft.base.errors import ConfigError
from weft.base.target import Target
from weft.ir import core
from weft.language import slots
from weft.language.mapping import StaticMapping
from weft.ops import _baselines, _moe
from weft.ops.moe_route import Routing
from weft.plan import described, operations, transfers
from weft.plan.launches import Start
from weft.runtime.world import World
from weft.tiles.hooks.feed import feed

# From so many bytes of own tokens on, engines bring them: a few microseconds' worth of links.
PUT_BYTES = 1 << 20
STAGE_WARPS = 8


def reference(problem: Problem, inputs: Sequence[Mapping[str, Any]]) -> list[torch.Tensor]:
    """All ranks at once, in fp32."""
    tokens = torch.cat([one["x"] for one in inputs]).float()
    return [_moe.product(problem, tokens[one["token_of"].long()], one) for one in inputs]


# ---------------------------------------------------------------------------------------------
# Problem and configuration


@dataclass(frozen=True)
class Problem(_moe.Problem):
    """m tokens of k elements over all ranks; n columns of every expert on each rank."""

    op = "ag_moe"
    rows_are = "own tokens, as torch.chunk splits all"
    transports = ("sm_push", "ce_push")
    templates = ("plain", "sm90")

    def rows_of_x(self, rank: int) -> int:
        return self.num_tokens(rank)

    def rows_of_out(self, rank: int) -> int:
        return self.num_slots


@dataclass(frozen=True)
class Config(_moe.Config):
    """Units   channels: communication CTAs of sm_push, which store own tokens, then multiply"""

    channels: int = 8

    def check(self, problem: Problem, target: Target) -> None:
        """Raises  ConfigError: a field that does not fit the problem or the target"""
        super().check(problem, target)
        if not 1 <= self.channels <= target.num_sms:
            raise ConfigError(
                f"ag_moe: channels={self.channels}; {target} runs 1 to {target.num_sms} programs "
                "together"
            )
        if self.transport == "ce_push" and len(problem.nodes) > 1:
            raise ConfigError(
                f"ag_moe: transport='ce_push' on {len(problem.nodes)} nodes; copy engines reach "
                "the ranks of one node only: take transport='sm_push'"
            )


def candidates(problem: Problem, target: Target) -> Iterator[Config]:
    """Configurations worth measuring, the one to take unmeasured first."""
    return islice(_candidates(problem, target), 8)


def _candidates(problem: Problem, target: Target) -> Iterator[Config]:
    for config in _moe.candidates(Config, problem, target):
        pushed = replace(config, channels=2) if target.backend == "emu" else config
        ways = [pushed]
        if len(problem.nodes) <= 1 and problem.num_ranks > 1:
            ways.append(replace(pushed, transport="ce_push"))
        is_much = problem.rows * problem.k * problem.itemsize >= PUT_BYTES
        yield from ways[::-1] if is_much and config.template == "sm90" else ways


def choose(problem: Problem, target: Target) -> Config:
    """The configuration to take when nothing was measured: a pure function of both."""
    return next(candidates(problem, target))


# ---------------------------------------------------------------------------------------------
# The programs


# Hooks of the GEMM template, of which the kernels are composed
# (docs/composed_kernels.md).
TEXT = """\
program(ag_moe_multiply)
x = param(pointer, by='own tokens')
b = param(operand)
out = param(pointer)
gathered = param(pointer)
rows_ready = param(signals, by=kernel, to=kernel, announces=(gathered,))
routing = param(tables, by='moe_route')
slot = param(slot, by=kernel, to=kernel)
world = param(world)
experts = mapping(tables, (routing,), cuts=experts)
template(gemm, (128, 128, 64), formula='out = gather_rows(all_gather(x)) @ b by expert')
credit(begin, slot)
hook(begin, feed, (x, gathered, experts))
notify(begin, rows_ready, each, experts)
hook(order, in_turn, (routing, experts))
wait(ready, rows_ready, sources, experts)
hook(ready, rows_by_token, (gathered, routing))
hook(emit, store_slots, (out,))
finish(end, slot)
"""


def _by_engine(text: str) -> str:
    """The same product where `stage` waits for the slot and engines push the tokens."""
    before = ("x = param", "credit(begin", "hook(begin", "notify(begin")
    kept = "\n".join(line for line in text.splitlines() if not line.startswith(before))
    for found, then in (("(signals, by=kernel", "(signals, by=engine"),
                        ("(slot, by=kernel", "(slot, by=stage"),
                        ("ag_moe_multiply", "ag_moe_put_multiply")):  # fmt: skip
        kept = kept.replace(found, then)
    return kept + "\n"


KERNEL = core.require(core.parse(TEXT))
PUT_KERNEL = core.require(core.parse(_by_engine(TEXT)))


@triton.jit
def stage(x, gathered, rows_ready, slot, k, experts, world):
    """Copy own tokens to the own slot, where tiles have them with others', and set the own flag,
    which engines copy behind them. Product and copies follow this kernel in stream order.

    experts: Experts, whose channels are this kernel's programs
    """
    rank = wl.rank(world).to(tl.int32)
    e = slots.slot_epoch(slot)
    slots.slot_wait_free(world, slot, e)
    feed(x, gathered, rank, tl.program_id(0), rank, k, experts, world)
    if tl.program_id(0) == 0:
        # weft: equivalent-mutant narrow of notify: the product and the engines, which read it, come
        # behind this kernel in stream order
        wl.notify(world, rows_ready + rank, e, to=rank, op=wl.SignalOp.SET,
                  order=wl.Order.RELAXED, scope=wl.Scope.DEVICE)  # fmt: skip


# ---------------------------------------------------------------------------------------------
# The host


def ag_moe(
    x: torch.Tensor,
    b: torch.Tensor,
    routing: Routing,
    *,
    world: World,
    config: Config | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Every token of all ranks times its experts' b, in the order of routing's slots. Collective.

        out[slot] = all_gather(x)[token_of[slot]] @ b[expert of slot]

    Shapes  x: [own tokens, k], contiguous; b: [experts, k, n], contiguous or the transpose of a
            contiguous [experts, n, k]; out: [m * top_k, n]
    Dtypes  all alike, float16, bfloat16 or float32; sums in fp32
    Sync    stream-ordered on the current stream; the host waits for nothing; can be recorded
    Raises  ShapeError, DtypeError, ConfigError: with the values; CallOrderError: ranks that differ
    """
    if operations.is_asked(x, b):
        return _moe.as_operation("ag_moe", world, x, b, routing, config, out)
    problem = problem_of(world, x, b, routing, out)
    config = config or choose(problem, world.target)
    return _moe.run(Call, world, problem, config, x, b, routing, out)


class Call(_moe.Call):
    """The product and, by `ce_push`, what stages and copies own tokens beside it."""

    def __init__(self, world: Any, problem: Problem, config: Config) -> None:
        self.by_engine = config.transport == "ce_push"
        flags = 1 if self.by_engine else config.channels
        super().__init__(
            world, problem, config, PUT_KERNEL if self.by_engine else KERNEL,
            {"gathered": ((problem.m, problem.k), problem.torch_dtype)},
            {"rows_ready": (problem.num_ranks * flags, torch.int64)}, flags,
        )  # fmt: skip
        self.split = StaticMapping.of(
            problem.m, problem.num_ranks, chunks=1, push_rows=1, tile_rows=1
        )
        self._loaded: set[tuple[bool, ...]] = set()

    def launch(self, slot: Any, x: Any, b: Any, out: Any, routing: Routing) -> None:
        multiply = self.multiplying(slot, x, b, out, routing)
        if not self.by_engine:
            multiply.run()
            return
        world, programs = self.world, self.world.target.num_sms
        experts = self.product.experts._replace(channels=programs)
        given = (x, slot.gathered, slot.rows_ready, slot.arg, self.problem.k, experts, world.arg)
        staged = Start(stage, (programs, 1, 1), given, {"num_warps": STAGE_WARPS})
        # Triton specialises kernels by each address. The product waits for copies, and no binary is
        # loaded while a kernel runs.
        kind = tuple(one.data_ptr() % 16 == 0 for one in (x, b, out, *routing.tables))
        if kind not in self._loaded:
            for one in (staged, multiply):
                world.load(one.function, *one.arguments, **one.options)
            self._loaded.add(kind)
        # That slots are free is waited for before the product: twelve warps of the template for
        # Hopper have all registers of an SM, and nothing runs beside it.
        staged.run()
        if not len(x):
            multiply.run()
            return
        main, copier = world.current_stream(), world.stream("copy")
        copier.wait(main)
        multiply.run()
        with copier:
            transfers.push(world, x, slot.gathered, slot.rows_ready, self.split)
        main.wait(copier)  # the engines still read x


problem_of = partial(_moe.problem_of, Problem)
fake = _moe.fake


# ---------------------------------------------------------------------------------------------
# The card


def run(
    world: World, problem: Problem, inputs: Mapping[str, torch.Tensor], config: Config | None = None
) -> torch.Tensor:
    routing = _moe.routing_of(problem, inputs)
    return ag_moe(inputs["x"], inputs["b"], routing, world=world, config=config)


op = Op(
    name="ag_moe",
    summary="out[slot, n] = all_gather(x)[token of slot, k] @ b[expert of slot]",
    problem=Problem,
    config=Config,
    make_problem=partial(_moe.make_problem, Problem),
    make_inputs=_moe.make_inputs,
    reference=reference,
    run=run,
    candidates=candidates,
    kernels=described.kernels_of(run, _moe.shaped_inputs, candidates),
    smallest_config={"channels": 1},
    trials=(
        *trials({"m": 20, "n": 24, "k": 16, "experts": 4, "top_k": 2}),
        # More than a block for each channel.
        Trial((2,), {"m": 64, "n": 16, "k": 600, "experts": 2, "top_k": 1}, "sm_push"),
        # Inputs change as soon as a call is over.
        Trial((2,), {"m": 20, "n": 24, "k": 16, "experts": 4, "top_k": 2}, "ce_push", on_heap=True),
    ),
    baselines=_baselines.AG_MOE,
    fake=fake,
    backward=("moe_rs", "all_gather"),
    **_moe.CARD,
)
