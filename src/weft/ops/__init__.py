"""Operators: plain functions on torch tensors, one file each, found by their cards.

    weft.ops.ag_gemm(a, b, world=world)
    weft.ops.cards()["ag_gemm"]

Every module of this folder is an operator: it defines a function of its own name and its card,
`op`. Nothing else lists them, and each is imported when it is first asked for. The name in this
package is the function; the rest is had by `from weft.ops.ag_gemm import Config`.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from weft.base.card import Op


@functools.lru_cache(maxsize=1)
def names() -> tuple[str, ...]:
    """The operators there are, by name; imports none of them."""
    found = (module.name for module in pkgutil.iter_modules(__path__))
    return tuple(sorted(name for name in found if not name.startswith("_")))


def card(name: str) -> Op:
    """The card of the operator called `name`."""
    return importlib.import_module(f"{__name__}.{name}").op


def cards() -> dict[str, Op]:
    """Every operator's card by name."""
    return {name: card(name) for name in names()}


def run_plan(stages: Any, tensors: Any, sizes: Any, *, world: Any, orders: Any = None) -> Any:
    """One rank's results of a compiled program's plan that overlaps; see _plan.py. Collective."""
    from weft.ops import _plan

    return _plan.run_plan(stages, tensors, sizes, world=world, orders=orders)


class _Operators(ModuleType):
    """Importing a submodule binds the module to its name here: bind the operator instead."""

    def __setattr__(self, name: str, value: Any) -> None:
        is_part = isinstance(value, ModuleType) and value.__name__ == f"{__name__}.{name}"
        if is_part and not name.startswith("_"):
            value = getattr(value, name)
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in names():
            raise AttributeError(f"weft.ops has no {name!r}; there are {', '.join(names())}")
        importlib.import_module(f"{__name__}.{name}")
        return self.__dict__[name]

    def __dir__(self) -> list[str]:
        return sorted({*self.__dict__, *names()})


sys.modules[__name__].__class__ = _Operators
