"""The session's rewrites: one that finds out which mutants there are, one that makes a mutant."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from weft.base.report import Finding
from weft.emulator.codegen import EmulatedKernel, write_kernel
from weft.emulator.device import Stream, Work
from weft.emulator.rewriting import Rewrite, parsed
from weft.ir.ttir import Op
from weft.ir.ttir_parser import parse_statements
from weft.verify.mutants import host, kernels
from weft.verify.mutants.edits import Changes, edited
from weft.verify.mutants.records import HOST, Mutant, Site

# That a wait is gone shows at once; what is asked is whether it was needed.
SAYS_NOTHING = {"unused signal"}


class Census(Rewrite):
    """Changes nothing, and remembers what could be changed.

    `mutants` in the order of their kernels' launches; `sites` whose operation was reached.
    """

    # A call at addresses that were seen before is replayed, which is a site of its own: it must not
    # be reached here and then never again by chance of the allocator.
    keeps_memory = True

    def __init__(self) -> None:
        self.mutants: dict[Mutant, None] = {}
        self.sites: set[Site] = set()
        self._marks: list[Site] = []
        self._kernels: dict[str, EmulatedKernel] = {}

    def kernel(self, text: str) -> EmulatedKernel:
        known = self._kernels.get(text)
        if known is None:
            module = parsed(text)
            self.mutants.update(dict.fromkeys(_mutations(text)))
            changes = {op: [self._mark(op, site), op] for op, site in kernels.sites(module).items()}
            known = self._kernels[text] = write_kernel(edited(module, changes))
        return known

    def _mark(self, op: Op, site: Site) -> Op:
        """An operation that tells that the one behind it is about to run."""
        self._marks.append(site)
        symbol = f"weft.reached:{len(self._marks) - 1}"
        (mark,) = parse_statements(
            f'%reached = tt.extern_elementwise {{pure = false, symbol = "{symbol}"}} : () -> i32',
            {}, op.place,
        )  # fmt: skip
        return mark

    def reached(self, mark: int) -> None:
        self.sites.add(self._marks[mark])

    def position(self, work: Work, stream: Stream) -> int | None:
        for mutant in host.mutations(work, stream):
            self.mutants[mutant] = None
            self.sites.add(mutant.site)
        return super().position(work, stream)


class ToFirstFinding(Rewrite):
    """Changes nothing, and ends a session as soon as it has shown something."""

    keeps_memory = True

    def is_enough(self, finding: Finding) -> bool:
        return finding.kind not in SAYS_NOTHING


class OneMutant(ToFirstFinding):
    """The program with one mutant in it."""

    def __init__(self, mutant: Mutant) -> None:
        self.mutant = mutant

    def kernel(self, text: str) -> EmulatedKernel:
        if self.mutant.site.kernel == HOST:
            return super().kernel(text)
        return _mutated(text, self.mutant) or super().kernel(text)

    def position(self, work: Work, stream: Stream) -> int | None:
        if self.mutant.site.kernel != HOST:
            return super().position(work, stream)
        return host.position(work, stream, self.mutant)


@lru_cache(maxsize=64)
def _mutated(text: str, mutant: Mutant) -> EmulatedKernel | None:
    """Kept for as long as one mutant runs under several schedules."""
    module = parsed(text)
    if module.kernel.name != mutant.site.kernel:
        return None
    changes = _mutations(text).get(mutant)
    return None if changes is None else write_kernel(edited(module, changes))


@lru_cache(maxsize=64)
def _mutations(text: str) -> Mapping[Mutant, Changes]:
    """All of one text: every mutant of it asks for one of them."""
    return kernels.mutations(parsed(text))
