"""What is measured: variants of one operator on one case, and where they come from.

weft's own are asked for by words: `weft` is what is chosen unmeasured, `weft/each` one for each
transport, `weft/transport=sm_pull/chunks=4` the first candidate with these fields, the rest
replaced.
Baselines are on the operator's card, each a function of a Case that returns a Variant; a peer's
come from a folder (`peers`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from weft.base.errors import UsageError

if TYPE_CHECKING:
    from weft.tune.case import Case

MODES = ("graph", "queued", "eager")
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
    where that differs.
    """

    name: str
    calls: Sequence[Callable[[], Any]]
    before: Callable[[int], None] | None = None
    modes: tuple[str, ...] = MODES
    answers: bool = True
    about: str = ""
    about_recorded: str = ""

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
            str(card.choose(problem, target, one) if card.choose else configs[0])
            for one in (False, True)
        )
        yield replace(_weft(case, "weft", None, eager), about_recorded=recorded)
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
