"""torch.compile on emulated ranks.

inductor's machine code reads and writes memory by itself: it waits for no queued work, and the
checker sees nothing of it. So a rank that compiles with inductor gets the graph that inductor
would have been given, forward and backward, behind the passes of the user's own, and runs it
operation by operation, as "aot_eager" does. What inductor made elsewhere is refused when a rank
calls it. Launches of kernels end a graph.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import ModuleType
from typing import Any

from weft.base.errors import UnsupportedError
from weft.base.user_place import user_place
from weft.emulator.context import current
from weft.language import triton_api


def intercept_compilers() -> Callable[[], None]:
    """Let ranks compile without machine code, and refuse what has it; returns the undo."""
    undo = ExitStack()
    for name in _MODULES:
        if name in sys.modules:
            _intercept(sys.modules[name], undo)
    finder = _Finder(undo)
    sys.meta_path.insert(0, finder)
    undo.callback(sys.meta_path.remove, finder)
    return undo.close


def _intercept(module: ModuleType, undo: ExitStack) -> None:
    """What a rank calls in `module` becomes what this file says."""
    if module.__name__ == "torch._dynamo":
        undo.callback(triton_api.end_graphs_at_launches())
    for path, on_a_rank in _MODULES[module.__name__].items():
        *owners, name = path.split(".")
        owner = functools.reduce(getattr, owners, module)
        own = getattr(owner, name)
        setattr(owner, name, _unless_emulated(own, on_a_rank))
        undo.callback(setattr, owner, name, own)


def _unless_emulated(own: Callable[..., Any], on_a_rank: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (own if current() is None else on_a_rank)(*args, **kwargs)

    return call


def _compile_by_operations(
    model: Any, example_inputs: Any, *rest: Any, config_patches: Any = None, **options: Any
) -> Any:
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    joint, each = (_passes(kind, config_patches or {}) for kind in ("joint", "post_grad"))

    def compile_one(module: Any, inputs: Any) -> Any:
        return boxed_nop(_through(module, each), inputs)

    # As inductor: a graph without gradients goes through both.
    return aot_autograd(
        fw_compiler=compile_one,
        inference_compiler=lambda module, inputs: compile_one(_through(module, joint), inputs),
        partition_fn=lambda module, *given, **named: min_cut_rematerialization_partition(
            _through(module, joint), *given, **named
        ),
        keep_inference_input_mutations=True,
    )(model, example_inputs)


def _passes(kind: str, patches: Mapping[str, Any]) -> list[Callable[[Any], None]]:
    """The user's passes over graphs of a kind, in inductor's order."""
    from torch._inductor import config

    found: list[Callable[[Any], None]] = []
    for name in (f"{kind}_custom_pre_pass", f"{kind}_custom_post_pass"):
        given = patches.get(name, getattr(config, name))
        found += given if isinstance(given, list | tuple) else [given] * (given is not None)
    return found


def _through(module: Any, passes: Sequence[Callable[[Any], None]]) -> Any:
    for one in passes:
        one(module.graph)
    if passes:
        module.recompile()
    return module


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise UnsupportedError(
        "inductor's machine code does not run on an emulated rank: it would read memory before "
        "the work queued for it has run, and nothing would be checked; let the rank itself call "
        "torch.compile (torch._dynamo.reset() forgets what was compiled before the ranks began), "
        'or compile with backend="aot_eager"',
        place=user_place(),
    )


# What is replaced, by module: they are loaded only when somebody compiles, which takes seconds.
_MODULES: dict[str, dict[str, Callable[..., Any]]] = {
    "torch._dynamo": {},
    "torch._inductor.compile_fx": {
        "compile_fx": _compile_by_operations, "compile_fx_aot": _refuse,
    },
    "torch._inductor.output_code": {
        "CompiledFxGraph.__call__": _refuse, "CompiledAOTI.__call__": _refuse,
    },
    "torch.export.pt2_archive._package": {"AOTICompiledModel.__call__": _refuse},
}  # fmt: skip


class _Finder(importlib.abc.MetaPathFinder):
    """Intercepts in modules that are loaded later."""

    def __init__(self, undo: ExitStack) -> None:
        self.undo = undo

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _MODULES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            own = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                own(module)
                _intercept(module, self.undo)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
