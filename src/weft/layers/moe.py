"""A mixture of experts that is spread over the ranks: each expert's inner columns, or experts.

    y[t] = sum over the top_k experts e of t of  weight[t, e] * mlp_e(x[t])
           + what an expert that all tokens share makes of x[t], times the sigmoid of its gate

Own tokens are routed (moe_route), gathered beneath the product up (ag_moe), and summed on their
own ranks behind the product down (moe_rs). Of whole experts each rank multiplies the rows that are
its own experts' alone, by tables of these; or tokens are sent to the ranks of their experts alone,
and what these make of them comes back (ep_dispatch, ep_combine).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from weft.base.errors import UnsupportedError, UsageError
from weft.base.expert_tiles import tile_rows
from weft.base.parts import part_of
from weft.compiler import experts
from weft.compiler.experts import Routing, Scoring
from weft.layers.activations import Activations, all_rows, own_rows, shared
from weft.layers.gating import Gating
from weft.layers.mlp import ACTIVATIONS, NAMES, ParallelMLP
from weft.layers.shards import check_divides, like, one_of, shard_of, whole
from weft.ops import ag_moe, all_gather, ep_combine, ep_dispatch, moe_route, moe_rs
from weft.runtime.world import World

# How experts are spread, and tokens come to them.
COLUMNS, GATHER, DISPATCH, BY_CHOICE = "columns", "gather", "dispatch", "dispatch by choice"
STRATEGIES = (COLUMNS, GATHER, DISPATCH, BY_CHOICE)
# What ordinary modules call the bias by which DeepSeek's router balances its experts, and the
# expert that all tokens share.
BIAS = "e_score_correction_bias"
SHARED, SHARED_GATE = ("shared_expert", "shared_experts"), "shared_expert_gate"


class ParallelMoE(nn.Module):
    """Gated experts behind a router. Collective.

    renormalise: the weights of the experts that a token takes sum up to 1 (times scoring.scale).
    scoring: all that weft.ops.moe_route knows of a router, instead. A router that rates by sigmoids
    computes in fp32, and has a bias for its choice alone. `shared`: inner columns of an expert that
    all tokens share. strategy: "columns", of every expert a part of its inner columns, and all
    tokens to all ranks; of whole experts "gather", all tokens to all ranks too; "dispatch", a token
    to the ranks of its experts alone, and a row back from each of these; "dispatch by choice", a
    row back for each choice, by which sums are in the order of choices on any number of ranks

    Shapes  x, the result: [.., hidden], as activations lie
    Raises  ShapeError: ranks that do not divide `inner`, or of whole experts `experts`
            UsageError: another strategy
    """

    def __init__(
        self, hidden: int, inner: int, experts: int, top_k: int, world: World, *,
        renormalise: bool = True, scoring: Scoring | None = None, shared: int = 0,
        strategy: str = COLUMNS, act: Callable[[Tensor], Tensor] = functional.silu,
        activations: Activations | None = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.world, self.activations = world, activations or Activations(world)
        self.hidden, self.inner, self.top_k = hidden, inner, top_k
        self.scoring = scoring or Scoring(renormalise=renormalise)
        self.act, options = act, {"device": world.device, **options}
        self.strategy, name = strategy, type(self).__name__
        if strategy not in STRATEGIES:
            known = ", ".join(map(repr, STRATEGIES))
            raise UsageError(f"{name}: strategy={strategy!r}; it must be one of {known}")
        stacked, own = experts, inner
        if strategy == COLUMNS:
            own = check_divides(name, "inner", inner, world)
        else:
            stacked = check_divides(name, "experts", experts, world)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(shape, **options) * shape[-1] ** -0.5

        self.gate = nn.ParameterDict({"weight": drawn(experts, hidden)})
        if self.scoring.score == "sigmoid":
            self.gate.register_buffer(BIAS, torch.zeros(experts, device=options["device"]))
        up, down = drawn(stacked, 2 * own, hidden), drawn(stacked, hidden, own)
        self.experts = nn.ParameterDict({"gate_up_proj": up, "down_proj": down})
        self._act = Gating(act, down.shape[-1], down.dtype, world)
        self._shared_name, self._has_gate = "", False
        if shared:
            self._share(ParallelMLP(
                hidden, shared, world, act=act, activations=self.activations, **options
            ))  # fmt: skip

    @classmethod
    def from_module(
        cls, module: nn.Module, world: World, activations: Activations | None = None, *,
        strategy: str = COLUMNS,
    ) -> ParallelMoE:  # fmt: skip
        """Of a module with `gate`, a router, and `experts`: a list of gated MLPs, or stacked, as
        gate_up_proj [experts, 2 * inner, hidden] and down_proj [experts, hidden, inner]."""
        name = cls.__name__
        gate, experts = one_of(name, module, "gate", "router"), one_of(name, module, "experts")
        if others := [one for one, _ in gate.named_parameters() if one != "weight"]:
            raise UnsupportedError(
                f"{name}: {type(module).__name__} has {', '.join(others)}, which this layer does "
                "not compute; leave this module out of the plan"
            )
        gate_up, down = _stacked(name, experts)
        count, hidden, inner = down.shape
        made = cls(
            hidden, inner, count, _said(module, "top_k", "num_experts_per_tok"), world,
            scoring=_scoring_of(module, gate), activations=activations, strategy=strategy,
            act=one_of(name, experts if hasattr(experts, "act_fn") else experts[0], *ACTIVATIONS),
            device="meta", dtype=down.dtype,
        )  # fmt: skip
        dims = (1, 2) if strategy == COLUMNS else (0, 0)
        parts = [shard_of(one, dims[0], world) for one in whole(gate_up.detach()).chunk(2, 1)]
        made.gate["weight"] = like(shard_of(gate.weight, None, world), gate.weight)
        if made.scoring.score == "sigmoid":
            made.gate.register_buffer(BIAS, getattr(gate, BIAS).detach().float().clone())
        made.experts["gate_up_proj"] = like(torch.cat(parts, 1), gate_up)
        made.experts["down_proj"] = like(shard_of(down, dims[1], world), down)
        made._share_as(module, world)
        return made

    def _share(self, expert: nn.Module, name: str = SHARED[0], gate: Any = None) -> None:
        """All tokens share an expert, by the name that state dicts have for it."""
        self.add_module(name, expert)
        self._shared_name, self._has_gate = name, gate is not None
        if gate is not None:
            self.add_module(SHARED_GATE, nn.ParameterDict({"weight": gate}))

    def _share_as(self, module: nn.Module, world: World) -> None:
        """As an ordinary module does."""
        for name in SHARED:
            if hasattr(module, name):
                expert = ParallelMLP.from_module(getattr(module, name), world, self.activations)
                gate = getattr(module, SHARED_GATE, None)
                if gate is not None:
                    gate = like(shard_of(gate.weight, None, world), gate.weight)
                self._share(expert, name, gate)

    def extra_repr(self) -> str:
        part = f"own part of {self.inner}" if self.strategy == COLUMNS else "own of the experts"
        return f"{self.hidden}, {part}, top_k={self.top_k}, {self.strategy}"

    def forward(self, x: Tensor) -> Tensor:
        lie, world = self.activations, self.world
        if lie.is_split:
            rows, m = lie.own(x, type(self).__name__), lie.m
        else:
            rows = x.reshape(-1, x.shape[-1])
            rows, m = own_rows(rows, world), rows.shape[0]
        y = self._routed(rows.contiguous(), m)
        y = lie.as_own(y) if lie.is_split else all_rows(y, world, m).view(x.shape)
        return y + self._of_shared(x) if self._shared_name else y

    def _routed(self, rows: Tensor, m: int) -> Tensor:
        """What their experts make of own rows, of m of all ranks."""
        world, stacked, scoring = self.world, self.experts, self.scoring
        is_wide, by_choice = scoring.score == "sigmoid", self.strategy == BY_CHOICE
        # Each rank has a share of the router's gradient: that of its own rows.
        weight = self.gate["weight"] if by_choice else shared(self.gate["weight"], world)
        wide = (rows.float(), weight.float()) if is_wide else (rows, weight)
        logits = _AsOfAll.apply(*wide, world, m) if by_choice else functional.linear(*wide)
        tile_m = tile_rows(m * self.top_k, logits.shape[1])
        routing = moe_route(
            logits, self.top_k, world=world, m=m, tile_m=tile_m,
            bias=getattr(self.gate, BIAS) if is_wide else None,
            split_experts=self.strategy != COLUMNS, **scoring._asdict(),
        )  # fmt: skip
        if self.strategy in (DISPATCH, BY_CHOICE):
            return self._dispatched(rows, routing)
        up = ag_moe(rows, stacked["gate_up_proj"].transpose(1, 2), routing, world=world)
        down = stacked["down_proj"].transpose(1, 2)
        return moe_rs(self._act(up), down, routing, world=world)

    def _dispatched(self, rows: Tensor, own: Routing) -> Tensor:
        """Rows go to the ranks of their experts, and back. own: of own experts"""
        world, stacked, by_choice = self.world, self.experts, self.strategy == BY_CHOICE
        sent, handle = ep_dispatch(
            rows, handle=own, world=world, clear=True, by_choice=by_choice
        )  # fmt: skip
        up, down = (stacked[name].transpose(1, 2) for name in ("gate_up_proj", "down_proj"))
        ends = experts.ends_of(own, len(down))
        y = self._act(experts.grouped_matmul(sent, up, own, ends=ends))
        y = experts.grouped_matmul(y, down, own, ends=ends)
        return ep_combine(y.contiguous(), handle, world=world, by_choice=by_choice)

    def _of_shared(self, x: Tensor) -> Tensor:
        y = getattr(self, self._shared_name)(x)
        if self._has_gate:
            weight = shared(getattr(self, SHARED_GATE)["weight"], self.world)
            y = functional.linear(x, weight).sigmoid() * y
        return y


class _AsOfAll(torch.autograd.Function):
    """own rows @ weight^T, as rows of the product of all ranks' m rows: a library's bits may depend
    on how many rows there are. The gradient of the weight is of all rows at once, on every rank."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, world: World, m: int) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.world, ctx.m, ctx.own = world, m, slice(*part_of(m, world.rank, world.num_ranks))
        whole = rows.new_zeros(m, rows.shape[1])
        whole[ctx.own] = rows
        return functional.linear(whole, weight)[ctx.own]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:  # type: ignore[override]
        own, weight = ctx.saved_tensors
        back, rows = (
            all_gather(one.contiguous(), world=ctx.world, m=ctx.m).to(weight.dtype)
            for one in (gradient, own)
        )
        return (back @ weight)[ctx.own].to(own.dtype), back.t() @ rows, None, None


def _said(module: nn.Module, *names: str, default: Any = None) -> Any:
    """What a module of experts says, or its router, or its configuration; by one of these names."""
    router = next(getattr(module, one) for one in ("gate", "router") if hasattr(module, one))
    for one in (router, module, getattr(module, "config", None)):
        for name in names:
            if hasattr(one, name):
                return getattr(one, name)
    return default


def _scoring_of(module: nn.Module, gate: nn.Module) -> Scoring:
    if not hasattr(gate, BIAS):
        return Scoring(renormalise=_said(module, "norm_topk_prob", default=True))
    return Scoring(
        "sigmoid", _said(module, "norm_topk_prob", default=True),
        _said(module, "num_group", "n_group", default=1), _said(module, "topk_group", default=1),
        scale=_said(module, "routed_scaling_factor", default=1.0),
    )  # fmt: skip


def _stacked(layer: str, experts: Any) -> tuple[Tensor, Tensor]:
    """(gate over up, down) of all experts."""
    if hasattr(experts, "gate_up_proj"):
        return experts.gate_up_proj, experts.down_proj
    gated = [names for names in NAMES if len(names) == 3 and hasattr(experts[0], names[0])]
    if not gated:
        one_of(layer, experts[0], *(names[0] for names in NAMES if len(names) == 3))
    gate, up, down = (
        torch.stack([whole(getattr(one, name).weight) for one in experts]) for name in gated[0]
    )
    return torch.cat((gate, up), 1), down
