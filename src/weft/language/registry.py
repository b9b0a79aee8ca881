"""Primitives: each declared once, implemented per target, joined by name and parameters.

A declaration is a function with a docstring and no body; `declare` turns it into a builtin that
checks its arguments while a kernel is traced and calls the target's `@triton.jit` implementation.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from weft.base.errors import UnsupportedError, UsageError
from weft.base.vocabulary import Order
from weft.language import triton_api as api
from weft.language.arguments import Call, check_arguments, is_world
from weft.language.wait_report import pack_name
from weft.language.world_arg import is_far_version, language_version

F = TypeVar("F", bound=Callable[..., Any])

BACKENDS = ("cuda", "hip", "emu")
# Which serve worlds with far peers; on the emulator no version of a world says that it has some.
FAR_BACKENDS = ("cuda", "emu")


@dataclass
class Primitive:
    """One primitive: its declaration, and what exists of it."""

    name: str
    file: str
    signature: inspect.Signature
    doc: str
    orders: tuple[Order, ...]
    kinds: Mapping[str, str]
    public: bool
    needs_site: bool
    evaluate: Callable[[dict[str, Any], Any], Any] | None
    implementations: dict[str, Any] = field(default_factory=dict)
    gaps: dict[str, str] = field(default_factory=dict)

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names an implementation takes, in order."""
        return (*self.signature.parameters, *(("site",) if self.needs_site else ()))

    @property
    def spelling(self) -> str:
        """The declaration's first line, enums by their short names."""
        parts, keyword_only = [], False
        for name, parameter in self.signature.parameters.items():
            if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
                parts.append("*")
                keyword_only = True
            default = parameter.default
            if default is parameter.empty:
                parts.append(name)
            else:
                parts.append(f"{name}={getattr(default, 'name', default)}")
        return f"{self.name}({', '.join(parts)})"

    def implementation(self, backend: str) -> Any:
        """The target's `@triton.jit` function.

        Raises  UnsupportedError: a gap of the coverage table
        """
        if backend in self.implementations:
            return self.implementations[backend]
        reason = self.gaps.get(backend, f"nobody has written it in language/{backend}")
        raise UnsupportedError(f"wl.{self.name} does not exist on {backend}: {reason}")


PRIMITIVES: dict[str, Primitive] = {}


def declare(
    *,
    orders: tuple[Order, ...] = tuple(Order),
    kinds: Mapping[str, str] | None = None,
    public: bool = True,
    needs_site: bool = False,
    evaluate: Callable[[dict[str, Any], Any], Any] | None = None,
) -> Callable[[F], F]:
    """Make the builtin that a documented, empty function describes.

    `orders` are those it takes; `kinds` names the check of a parameter where it is not that of
    its name (arguments.CHECKS); `needs_site`: implementations receive, as a last argument, the
    name and line of the device function that calls, for the report of a wait that gives up;
    `evaluate(arguments, semantic)` gives a result that is known while tracing, on every target.
    """

    def decorate(stub: F) -> F:
        primitive = Primitive(
            name=stub.__name__,
            file=stub.__module__.rsplit(".", 1)[-1] + ".py",
            signature=inspect.signature(stub),
            doc=inspect.getdoc(stub) or "",
            orders=orders,
            kinds=kinds or {},
            public=public,
            needs_site=needs_site,
            evaluate=evaluate,
        )
        if stub.__name__ in PRIMITIVES:
            raise UsageError(f"wl.{stub.__name__} is declared twice")
        PRIMITIVES[stub.__name__] = primitive
        return _builtin_for(primitive, stub)

    return decorate


def implement(declared: Callable, *targets: str) -> Callable[[Any], Any]:
    """Join a `@triton.jit` function to its declaration, for each of `targets`.

    Raises  UsageError: unknown target, a second implementation, other names or another order
            of parameters than declared
    """
    primitive: Primitive = declared.primitive

    def decorate(function: Any) -> Any:
        name, names = function.__name__, tuple(function.arg_names)
        if name != primitive.name or names != primitive.parameters:
            raise UsageError(
                f"{name}({', '.join(names)}) in {function.__module__} does not implement "
                f"{primitive.name}({', '.join(primitive.parameters)}): same name, same parameters"
            )
        for target in targets:
            if target not in BACKENDS:
                raise UsageError(f"{name}: no target {target!r}; weft has {', '.join(BACKENDS)}")
            if target in primitive.implementations:
                raise UsageError(f"wl.{name} is implemented twice for {target}")
            primitive.implementations[target] = function
        return function

    return decorate


def gap(declared: Callable, target: str, reason: str) -> None:
    """Say why `target` lacks a primitive; the UnsupportedError of tracing it there repeats it."""
    declared.primitive.gaps[target] = reason


def coverage() -> dict[str, dict[str, str]]:
    """For each public primitive and target: "" where it exists, else the reason why not."""
    table = {}
    for name, primitive in PRIMITIVES.items():
        if primitive.public:
            table[name] = {
                backend: ""
                if backend in primitive.implementations or primitive.evaluate
                else primitive.gaps.get(backend, "not written yet")
                for backend in BACKENDS
            }
    return table


def _builtin_for(primitive: Primitive, stub: F) -> F:
    @functools.wraps(stub)
    def traced(*args: Any, _semantic: Any = None, _generator: Any = None, **kwargs: Any) -> Any:
        values = _bind(primitive, args, kwargs)
        if "world" in values and values["world"] is None:
            values["world"] = world_in_scope(_generator)
        call = Call(primitive.name, primitive.orders, primitive.kinds, _semantic)
        checked = check_arguments(call, values)
        if primitive.evaluate is not None:
            return primitive.evaluate(checked, _semantic)
        if primitive.needs_site:
            checked["site"] = _site(_semantic, _generator, checked.get("world"))
        backend = api.backend_name(_semantic)
        if backend not in FAR_BACKENDS and _is_far(values.get("world")):
            raise UnsupportedError(
                f"wl.{primitive.name} reaches no far peers on {backend}: that is written for "
                f"{', '.join(FAR_BACKENDS)}; use a world of one node"
            )
        implementation = primitive.implementation(backend)
        return api.call_jit(_generator, implementation, list(checked.values()))

    # Triton asks for the signature to see whether to hand over its own state.
    traced.__signature__ = primitive.signature.replace(
        parameters=[
            *primitive.signature.parameters.values(),
            inspect.Parameter("_semantic", inspect.Parameter.KEYWORD_ONLY, default=None),
            inspect.Parameter("_generator", inspect.Parameter.KEYWORD_ONLY, default=None),
        ]
    )
    builtin = api.stamped_builtin(traced, language_version)
    builtin.primitive = primitive
    return builtin


def _is_far(world: Any) -> bool:
    return world is not None and is_far_version(api.unwrap(world.version))


def _bind(primitive: Primitive, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    first = next(iter(primitive.signature.parameters), "world")
    if first != "world" and args and is_world(args[0]):
        keyword = (
            "; it takes one by name, world=" if "world" in primitive.signature.parameters else ""
        )
        raise UsageError(
            f"wl.{primitive.name} takes no world: its first argument is {first}{keyword}; it is "
            f"{primitive.spelling}"
        )
    try:
        bound = primitive.signature.bind(*args, **kwargs)
    except TypeError as error:
        raise UsageError(f"wl.{primitive.name}: {error}; it is {primitive.spelling}") from None
    bound.apply_defaults()
    return {
        name: None if api.unwrap(value) is None else value
        for name, value in bound.arguments.items()
    }


def world_in_scope(generator: Any) -> Any:
    """The first world among the variables of the device function being traced, or None."""
    return next(filter(is_world, api.enclosing_scope(generator).values()), None)


def _site(semantic: Any, generator: Any, world: Any) -> Any:
    """The calling function as five scalars: four words of name, then the line. None for unbounded
    waits.

    Scalars, not constants: one instance of the implementation serves all callers.
    """
    if world is None or api.backend_name(semantic) == "emu":
        return None
    words = (*pack_name(api.enclosing_name(generator)), api.enclosing_line(generator))
    return api.make_tuple([api.cast(semantic, word, api.INT64) for word in words])
