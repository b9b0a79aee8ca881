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
import time
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from weft.base.card import Op

if TYPE_CHECKING:
    # For type checkers and editors; a test compares it with `names()`.
    from weft.ops.ag_attention import ag_attention as ag_attention
    from weft.ops.ag_gemm import ag_gemm as ag_gemm
    from weft.ops.ag_moe import ag_moe as ag_moe
    from weft.ops.ag_rms_gemm import ag_rms_gemm as ag_rms_gemm
    from weft.ops.ag_wgrad import ag_wgrad as ag_wgrad
    from weft.ops.all_gather import all_gather as all_gather
    from weft.ops.all_reduce import all_reduce as all_reduce
    from weft.ops.all_reduce_rms_norm import all_reduce_rms_norm as all_reduce_rms_norm
    from weft.ops.all_to_all import all_to_all as all_to_all
    from weft.ops.ep_combine import ep_combine as ep_combine
    from weft.ops.ep_dispatch import ep_dispatch as ep_dispatch
    from weft.ops.flash_decode import flash_decode as flash_decode
    from weft.ops.gemm_ar import gemm_ar as gemm_ar
    from weft.ops.gemm_rs import gemm_rs as gemm_rs
    from weft.ops.moe_ar import moe_ar as moe_ar
    from weft.ops.moe_route import moe_route as moe_route
    from weft.ops.moe_rs import moe_rs as moe_rs
    from weft.ops.recv import recv as recv
    from weft.ops.reduce_scatter import reduce_scatter as reduce_scatter
    from weft.ops.send import send as send


@functools.lru_cache(maxsize=1)
def names() -> tuple[str, ...]:
    """The operators there are, by name; imports none of them."""
    found = (module.name for module in pkgutil.iter_modules(__path__))
    return tuple(sorted(name for name in found if not name.startswith("_")))


@functools.cache
def card(name: str) -> Op:
    """The card of the operator called `name`; kept, since each call of new sizes asks for it."""
    return importlib.import_module(f"{__name__}.{name}").op


def cards() -> dict[str, Op]:
    """Every operator's card by name."""
    return {name: card(name) for name in names()}


class _Operators(ModuleType):
    """Importing a submodule binds the module to its name here: bind the operator instead."""

    def __setattr__(self, name: str, value: Any) -> None:
        is_part = isinstance(value, ModuleType) and value.__name__ == f"{__name__}.{name}"
        if is_part and not name.startswith("_"):
            # What calls become that torch differentiates or traces.
            from weft.plan import operations, operator_gradients  # noqa: F401

            value = getattr(value, name)
            operations.define(name, value)
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in names():
            raise AttributeError(f"weft.ops has no {name!r}; there are {', '.join(names())}")
        importlib.import_module(f"{__name__}.{name}")
        while name not in self.__dict__:  # another thread has just imported it, and will say so
            time.sleep(1e-4)
        return self.__dict__[name]

    def __dir__(self) -> list[str]:
        return sorted({*self.__dict__, *names()})


sys.modules[__name__].__class__ = _Operators
