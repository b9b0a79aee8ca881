"""Core IR -> kernels that are launched: of its template, with its hooks as arguments, by its name.

variants = load(kernel)
variants.plain[grid](*variants.arranged((a, b, c, partials, ..)), slot, shape, parts, .., world)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from textwrap import wrap
from typing import Any, NamedTuple

from weft.compiler.lower.compose import compose, has_sm90, operands_apart, params_of
from weft.ir import core
from weft.language import triton_api
from weft.tiles import composed, own_rows, row_packets, rows
from weft.tiles.composition import Hooks
from weft.tiles.hooks.scatter import MOST_PEERS

# Template -> its kernel.
KERNELS = {"gemm": composed.product, "rows": rows.rows, "every_row": row_packets.every_row,
           core.OWN_ROWS: own_rows.own_rows}  # fmt: skip
# Operands that a kernel takes one by one, and arrays of which there are descriptors by peer.
OPERANDS, DESCRIBED = 4, 2
_NONE = (None,) * (DESCRIBED * MOST_PEERS)


class Variants(NamedTuple):
    """A kernel, and the same in Gluon for Hopper: JITFunctions. Rows have no other form there.

    `operands` and `arrays` are places among the arguments of the kernel's parameters.
    """

    plain: Any
    sm90: Any
    hooks: Hooks
    operands: tuple[int, ...] | None
    arrays: tuple[int, ...]

    def arranged(self, given: Sequence[Any], peers: Sequence[Any] | None = None) -> tuple[Any, ...]:
        """The first arguments of a launch. `given` are those of the kernel's parameters, in order,
        but for slot and world; `peers`, an sm90 variant's descriptors, array by array."""
        arrays = tuple(map(given.__getitem__, self.arrays))
        if self.operands is None:
            return (self.hooks, arrays)
        operands = (*map(given.__getitem__, self.operands), *_NONE[len(self.operands) : OPERANDS])
        if peers is None:
            return (self.hooks, *operands, arrays)
        return (self.hooks, *operands, *peers, *_NONE[len(peers) :], arrays)


def load(kernel: core.Kernel) -> Variants:
    """The kernel's functions, made once for each record."""
    for seen in _watching:
        seen.setdefault(kernel)
    kernel = _instead.get(kernel, kernel)
    if kernel not in _loaded:
        plain, sm90 = KERNELS[kernel.of(core.Template)[0].function], None
        if has_sm90(kernel):
            sm90 = triton_api.renamed(composed.product_sm90, f"{kernel.name}_sm90")
        apart = operands_apart(kernel)
        names = [one.name for one in params_of(kernel)]
        operands = tuple(map(names.index, apart)) if apart else None
        arrays = tuple(i for i, name in enumerate(names) if name not in apart)
        hooks, plain = compose(kernel), triton_api.renamed(plain, kernel.name)
        _loaded.setdefault(kernel, Variants(plain, sm90, hooks, operands, arrays))
    return _loaded[kernel]


def shown(kernel: core.Kernel) -> str:
    """The launch of a kernel as text: what is called, with which hooks."""
    apart = operands_apart(kernel)
    arrays = ", ".join(one.name for one in params_of(kernel) if one.name not in apart)
    (mapping,) = kernel.of(core.Mapping)
    cut = ["shape"] if apart else []
    words = ["hooks", *apart, f"({arrays})", "slot", *cut, mapping.name, "tile", "world"]
    template = KERNELS[kernel.of(core.Template)[0].function]
    home = template.__module__.rpartition(".")[2]
    called = wrap(f"{home}.{template.__name__}({', '.join(words)})", 92, subsequent_indent="    ")
    if has_sm90(kernel):
        called.append(f"on Hopper {home}.{composed.product_sm90.__name__}, the same")
    formula = kernel.of(core.Template)[0].formula
    head = f"{kernel.name}: {formula}" if formula else kernel.name
    return "\n".join([*wrap(head, 96), "", *called, "", *_signals(kernel), str(compose(kernel))])


def _signals(kernel: core.Kernel) -> Iterator[str]:
    """Who notifies each signal, who waits for it, and which arrays it announces."""
    names = {core.KERNEL: kernel.name, core.ENGINE: "copy engines"}
    for one in kernel.of(core.Param):
        if one.sort in ("signals", "packets"):
            of = f", of {', '.join(one.announces)}" if one.announces else ""
            to = kernel.name if one.sort == "packets" else names.get(one.to, one.to)
            if not one.by and not one.to:
                yield f"{one.name}: counts, in {kernel.name} alone"
                continue
            yield f"{one.name}: from {names.get(one.by, one.by)} to {to}{of}"
        if one.sort == "slot" and (one.by or one.to):
            message = [
                f"{words} {names.get(who, who)}"
                for who, words in ((one.by, "waits for its credits:"), (one.to, "ends the call:"))
                if who
            ]
            yield f"{one.name}: {'; '.join(message)}"  # fmt: skip
    yield ""


_loaded: dict[core.Kernel, Variants] = {}
_watching: list[dict[core.Kernel, None]] = []
_instead: dict[core.Kernel, core.Kernel] = {}


@contextmanager
def watched() -> Iterator[dict[core.Kernel, None]]:
    """Which kernels are loaded meanwhile, in order."""
    seen: dict[core.Kernel, None] = {}
    _watching.append(seen)
    try:
        yield seen
    finally:
        _watching.remove(seen)


@contextmanager
def replaced(kernel: core.Kernel, by: core.Kernel) -> Iterator[None]:
    """Meanwhile another is loaded where this kernel is asked for: a mutant of it, say."""
    _instead[kernel] = by
    try:
        yield
    finally:
        del _instead[kernel]
