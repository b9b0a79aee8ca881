"""What is measured: variants of one operator on one case, and where they come from.

weft's own are asked for by words: `weft` is what is chosen, `weft/each` one for each transport,
`weft/candidates` all that may be best, `weft/transport=sm_pull/chunks=4` the first candidate with
these fields, the rest replaced.
Baselines are on the operator's card, each a function of a Case that returns a Variant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from weft.base.errors import UsageError
from weft.base.providers import provider
from weft.compiler.schedules import LIBRARY

if TYPE_CHECKING:
    from weft.base.card import Op
    from weft.base.target import Target
    from weft.tune.case import Case

MODES = ("graph", "queued", "eager")
CANDIDATES = "weft/candidates"
# What is predicted to take so much longer than the best is not measured: predictions are 5 % off on
# average, and choices that were wrong were predicted within a fifth of the best.
MARGIN = 1.3
# The baselines that are parts of the unfused way, from which the figures are made.
PARTS = {
    "cublas": "gemm", "nccl": "comm", "cublas_nccl": "serial",
    "attention_alone": "gemm", "nccl_gather": "comm", "nccl_attention": "serial",
}  # fmt: skip
# Those that do only a part of the work where there is a product: they are not compared with all.
PIECES = ("cublas", "nccl", "weft_alone", "attention_alone", "nccl_gather")


@dataclass(frozen=True)
class Variant:
    """Calls of one way of doing the work on one rank, one for each set of inputs.

    A call returns this rank's answer, which is checked where `answers`. `before(i)` runs untimed
    before each timed call on set i and restores what the call overwrites. `modes` are those that
    it can be measured in; `about` says how it was configured, `about_recorded` how in a graph,
    where that differs. Of candidates `config` is it, and `prepare` has all ranks ready: it raises
    where a rank cannot run it, before any rank waits for another.
    """

    name: str
    calls: Sequence[Callable[[], Any]]
    before: Callable[[int], None] | None = None
    modes: tuple[str, ...] = MODES
    answers: bool = True
    about: str = ""
    about_recorded: str = ""
    config: Any = None
    prepare: Callable[[], None] | None = None

    def about_in(self, mode: str) -> str:
        return self.about_recorded if mode == "graph" and self.about_recorded else self.about

    @property
    def part(self) -> str:
        """Which part of the unfused way this is, if any."""
        return PARTS.get(self.name, "")


def of_weft(case: Case, words: str) -> Iterator[Variant]:
    """weft's own variants that `words` asks for; `weft` first tells nothing of a configuration."""
    card, problem, target = case.card, case.problem, case.world.target
    configs = list(card.candidates(problem, target))
    if words == "weft":
        eager, recorded = (
            str(provider("choices").chosen(case.world, card, problem, one)) for one in (False, True)
        )
        yield replace(_weft(case, "weft", None, eager), about_recorded=recorded)
    elif words == CANDIDATES:
        for i, config in enumerate(worth_measuring(card, problem, target)):
            one = _weft(case, f"weft {config.transport} {i}", config, str(config))
            compile_call = partial(
                provider("preparing").compile_call, case.world, card, problem, config
            )
            yield replace(one, config=config, prepare=compile_call)
    elif words == "weft/each":
        first: dict[str, Any] = {}
        for config in configs:
            first.setdefault(config.transport, config)
        for transport, config in first.items():
            yield _weft(case, f"weft {transport}", config, str(config))
    else:
        changes = _parse_changes(words, card.config)
        config = replace(_nearest(configs, changes), **changes)
        config.check(problem, target)
        name = "weft " + " ".join(f"{name}={value}" for name, value in changes.items())
        yield _weft(case, name, config, str(config))


def worth_measuring(card: Op, problem: Any, target: Target) -> list[Any]:
    """The candidates but for those that are predicted to be far behind; of what nothing is
    predicted all."""
    found = list(dict.fromkeys([*card.candidates(problem, target), *card.unfused]))
    us = [card.predict(problem, target, one) if card.predict else None for one in found]
    least = min((one for one in us if one is not None), default=0.0)
    return [
        one for one, predicted in zip(found, us, strict=True)
        if predicted is None or predicted <= MARGIN * least or one.transport == LIBRARY
    ]  # fmt: skip


def _weft(case: Case, name: str, config: Any, about: str) -> Variant:
    def call(inputs: Any) -> Callable[[], Any]:
        return lambda: case.card.run(case.world, case.problem, inputs, config)

    return Variant(name, [call(inputs) for inputs in case.sets], about=about)


def _parse_changes(words: str, config: type) -> dict[str, Any]:
    """`weft/transport=sm_pull/chunks=4` as values of the configuration's fields."""
    kinds = {field.name: type(field.default) for field in fields(config)}
    changes = {}
    for word in words.split("/")[1:]:
        name, equals, value = word.partition("=")
        if not equals or name not in kinds:
            raise UsageError(
                f"--variants {words!r}: {word!r} is not FIELD=VALUE; fields are {', '.join(kinds)}"
            )
        kind = kinds[name]
        try:
            changes[name] = value.lower() in ("1", "true") if kind is bool else kind(value)
        except ValueError:
            raise UsageError(f"--variants {words!r}: {name} is a {kind.__name__}") from None
    return changes


def _nearest(configs: Sequence[Any], changes: dict[str, Any]) -> Any:
    """The first of the candidates that agree with most of the changes."""
    return max(
        configs,
        key=lambda config: sum(getattr(config, name) == value for name, value in changes.items()),
    )
