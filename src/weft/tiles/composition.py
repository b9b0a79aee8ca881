"""A kernel is a template with its hooks as arguments: the record of them, which is a constant.

    product[grid](hooks, a, b, c, None, (partials, partials_ready), slot, shape, parts, ..)

Each moment of a template has a chain of calls (`Chain`), which the template calls as a function.
A call is of a `@triton.jit` function that knows of no kernel:

    def push(partials, parts, at, cells, fragment, rank, world): ...

The names of its parameters say what it is given. Those of the moment (`MOMENTS`: at, cells,
fragment, ..) and of the launch (`Launch`, and `num_ranks` of its world) are given by these; the
others are its own arguments, in order, which `Call.args` names as the kernel does: "partials",
"parts", "shape.n", or a constant. What a function returns is called as `Call.gives` says, mostly
`value`, for the calls behind it; a chain returns the last `value`.

Triton's cache of binaries knows hooks by the keys of their functions. The line of the user's
program that asked for a call is the place of what is traced in it, so every finding and every line
of assembly shows it.

Source  docs/decisions/026-hooks-as-arguments.md
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from weft.base.vocabulary import Order, Scope
from weft.language import triton_api as api

# By moment, what a template gives to its calls; behind that it gives the Launch.
MOMENTS = {
    "begin": (),
    "arrange": ("num_m", "tile_m"),  # -> the arguments of `order`
    "count": ("tile_m",),  # -> how many rows of tiles there are
    "first": (),  # -> this program's place among all of them
    "order": ("i", "num_m", "num_n"),
    "segments": ("at",),  # -> how many parts there are of what a tile sums over
    "ready": ("at", "segment", "tile"),
    "scales": ("at", "tile"),
    "combine": ("at", "cells", "value"),
    "emit": ("at", "cells", "fragment"),
    "announce": ("at", "part"),
    "collect": ("at", "tile_m", "tile_n"),
    "result": ("at", "value", "tile"),
    "done": (),
    "end": (),
}
# Where a tile is whole rows.
MOMENTS_OF_ROWS = MOMENTS | {
    "combine": ("at", "cells", "value", "tile"),
    "emit": ("at", "cells", "fragment", "tile"),
    "collect": ("at", "tile"),
}

# Where rows are this rank's alone.
MOMENTS_OF_OWN_ROWS = {
    "begin": (), "end": (), "ready": ("cells", "tile"), "result": ("cells", "value", "tile"),
}  # fmt: skip


# What a function hands to the calls that it makes itself, before all that it was given.
HANDED = {"fed": ("to",), "pushed": ("to", "chunk")}


# As they come in a kernel.
_TURNS = [*MOMENTS_OF_ROWS]


class Launch(NamedTuple):
    """What is known of a launch wherever a hook is called. `operands` may be descriptors, which
    Triton's launcher makes of a kernel's own arguments alone; `arrays` are all others."""

    rank: Any
    e: Any
    program: Any
    num_programs: Any
    turns: Any
    operands: Any
    arrays: Any
    described: Any
    shape: Any
    mapping: Any
    slot: Any
    world: Any
    block: Any  # elements that a communication CTA moves at a time, a constant


# All names of parameters that are no argument of a call itself.
GIVEN = {
    *Launch._fields, "launch", "args", "given", "num_ranks", "value", "own", "other", "last",
    "pusher",
    *HANDED, *(name for names in HANDED.values() for name in names),
    *(name for of in (MOMENTS, MOMENTS_OF_ROWS) for names in of.values() for name in names),
}  # fmt: skip


class Call(NamedTuple):
    """One function, its own arguments, what it gives; the file and line of whose wish it was.

    Calls in `then` are the function's to make, where it takes a chain of this name.
    """

    function: Any
    args: tuple[Any, ...] = ()
    gives: str = "value"
    place: tuple[str, int] = ("", 0)
    then: Mapping[str, tuple[Call, ...]] = {}

    def parts(self) -> Iterator[str]:
        """All that it is, as text; of functions their keys."""
        yield from (self.function.cache_key, self.gives, repr(self.place))
        for one in self.args:
            yield getattr(one, "cache_key", repr(one))
        for name, calls in self.then.items():
            yield name
            yield from (part for one in calls for part in one.parts())


def own_parameters(function: Any) -> list[str]:
    """Which of a function's parameters a statement gives, and no moment, launch or chain."""
    return [name for name in function.arg_names if name not in GIVEN]


# What needs no word where it is shown.
_USUAL = (Order.ACQUIRE, Order.RELEASE, Scope.SYSTEM, False)


def shown(calls: Sequence[Call], margin: str = "") -> Iterator[str]:
    """Calls as text, with the lines of whose wish they were."""
    for call in calls:
        home = call.function.fn.__module__.rpartition(".")[2]
        words = [
            one if type(one) is str else f"{name}={getattr(one, '__name__', one)}"
            for name, one in zip(own_parameters(call.function), call.args, strict=True)
            if one not in _USUAL
        ]
        gives = "" if call.gives == "value" else f"{call.gives} = "
        file, line = call.place
        place = f"  # {Path(file).name}:{line}" if file else ""
        yield f"{margin}{gives}{home}.{call.function.__name__}({', '.join(words)}){place}"
        for name, inner in call.then.items():
            yield f"{margin}  {name}:"
            yield from shown(inner, f"{margin}    ")


# Triton leaves builtins out of its keys.
_OWN_SOURCE = Path(__file__).read_text()


class Chain(api.Traced):
    """Calls, one after the other, called from a template as one function.

    `names` are those of what it is given, before the launch's; `where` says what the kernel's names
    are in its Launch: a field, and an index or nothing. Tuples lose their constants on their way
    through branches: so `launch`, and `given` where calls are made by another one, are forms.
    """

    def __init__(
        self, moment: str, names: Sequence[str], calls: Sequence[Call],
        where: Mapping[str, tuple[str, int | None]], launch: Any = None, given: Any = None,
    ) -> None:  # fmt: skip
        self.moment, self.names, self.calls, self.where = moment, names, calls, where
        self.launch, self.given = launch, given
        parts = (part for call in calls for part in call.parts())
        key = (_OWN_SOURCE, moment, *names, repr((sorted(where.items()), launch, given)), *parts)
        self.cache_key = hashlib.sha256("\n".join(key).encode()).hexdigest()

    def __repr__(self) -> str:
        return f"{self.moment}_{self.cache_key[:16]}"

    def within(self, launch: Any) -> Chain:
        """The same for a Launch of this form."""
        return Chain(self.moment, self.names, self.calls, self.where, launch, self.given)

    def __call__(self, *given: Any, _semantic: Any = None, _generator: Any = None) -> Any:
        *values, leaves = given
        if self.given is not None:
            *values, inner = values
            values += api.put_together(self.given, iter(inner.values)).values
        known = dict(zip(self.names, values, strict=True))
        launch = leaves
        if self.moment != "order":  # which has arguments of its own
            launch = api.put_together(self.launch, iter(leaves.values))
        for call in self.calls:
            with api.at_line(_generator, *call.place):
                bound = [*self._bound(call, known, launch, leaves)]
                made = api.call_jit(_generator, call.function, bound)
            if made is not None:
                known[call.gives] = made
        return known.get("value")

    def _bound(
        self, call: Call, known: Mapping[str, Any], launch: Any, leaves: Any
    ) -> Iterator[Any]:
        """A function's arguments: by its parameters' names, or its own, in order."""
        own = iter(call.args)
        values, form = api.taken_apart(api.make_tuple([*known.values()]))
        for name in call.function.arg_names:
            if name in call.then:
                names = (*HANDED.get(name, ()), *known)
                title = f"{self.moment}_{name}"
                yield Chain(title, names, call.then[name], self.where, self.launch, form)
            elif name == "given":
                yield api.make_tuple(values)
            elif name in ("launch", "args"):
                yield leaves
            elif name == "num_ranks":
                yield launch.world.num_ranks
            elif name in known:
                yield known[name]
            elif name in Launch._fields:
                yield getattr(launch, name)
            else:
                one = next(own)
                yield self._value(one, known, launch) if type(one) is str else one

    def _value(self, path: str, known: Mapping[str, Any], launch: Any) -> Any:
        """A name of the kernel, or of what was made before; of a tuple or a tensor what is in it,
        behind a dot."""
        name, *fields = path.split(".")
        value = (
            known[name] if name in known else _named(*self.where.get(name, (name, None)), launch)
        )
        for one in fields:
            value = getattr(value, one)
        return value


def _named(field: str, index: int | None, launch: Any) -> Any:
    """What a name of the kernel stands for."""
    value = getattr(launch, field)
    return value if index is None or not api.is_tuple(value) else value[index]


class Operand(api.Traced):
    """An operand that the template itself is given: a function of the Launch."""

    def __init__(self, field: str, index: int | None, launch: Any = None) -> None:
        self.field, self.index, self.launch = field, index, launch

    def __repr__(self) -> str:
        return f"{self.field}_{self.index}"

    def within(self, launch: Any) -> Operand:
        return Operand(self.field, self.index, launch)

    def __call__(self, leaves: Any, _semantic: Any = None) -> Any:
        launch = api.put_together(self.launch, iter(leaves.values))
        return _named(self.field, self.index, launch)


class Hooks:
    """A kernel's hooks: a chain for each moment, or None; where the GEMM templates find their
    operands `a`, `b` and `c`; `late` and `by_index` are the sm90 template's, `per_block` says that
    scales are of blocks. `called` is what the
    kernel's arguments are called in reports.

    A constant of compilation, which is made once for each kernel: two are never equal.
    """

    def __init__(
        self, name: str, chains: Mapping[str, Chain], operands: Sequence[Operand] = (), *,
        late: bool = False, by_index: bool = False, per_block: bool = False,
        called: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.__name__ = self.name = name
        self.chains, self.operands = chains, operands
        self.late, self.by_index, self.per_block = late, by_index, per_block
        self.called = called or {}
        for moment in MOMENTS_OF_ROWS:
            setattr(self, moment, chains.get(moment))
        self.a, self.b, self.c = operands or (None,) * 3
        key = [repr(one) for one in (name, *operands, late, by_index, per_block)]
        keys = [f"{moment} {one.cache_key}" for moment, one in chains.items()]
        self.cache_key = hashlib.sha256("\n".join((*key, *keys)).encode()).hexdigest()

    def __repr__(self) -> str:
        return f"hooks_{self.cache_key}"

    def __str__(self) -> str:
        lines = []
        for moment, chain in sorted(self.chains.items(), key=lambda one: _TURNS.index(one[0])):
            calls = list(shown(chain.calls))
            lines += [
                f"{title:<10}{line}" for title, line in zip([moment, *[""] * len(calls)], calls)
            ]
        return "\n".join(line.rstrip() for line in lines)

    def __deepcopy__(self, memo: Any) -> Hooks:
        return self  # as records of launches are copied

    def within(self, launch: Any, _semantic: Any = None) -> Hooks:
        """The same for a launch of this form, which every chain is then given as `leaves`."""
        _, form = api.taken_apart(launch)
        chains = {moment: one.within(form) for moment, one in self.chains.items()}
        operands = [one.within(form) for one in self.operands]
        return Hooks(self.name, chains, operands, late=self.late, by_index=self.by_index,
                     per_block=self.per_block)  # fmt: skip

    within.__triton_builtin__ = True


@api.builtin
def leaves(launch: Any, _semantic: Any = None) -> Any:
    """A Launch as templates hand it to hooks: all of its traced values, and no constant."""
    return api.make_tuple(api.taken_apart(launch)[0])
